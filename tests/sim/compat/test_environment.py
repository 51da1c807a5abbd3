"""Environment variables: every one that is read is known and in the docs, and a typo is an error."""

import logging
import os
import pathlib
import re
import subprocess
import sys
import warnings

import pytest
import torch

import interlace
from interlace.runtime.compat.environment import SWITCHES, VARIABLES, check_environment, write_log
from stand_ins.replaced import environment
from tiers import few

ROOT = pathlib.Path(__file__).parents[3]
OF_OTHERS = re.compile(r"""environ(?:\.get\(|\[)["']((?!INTERLACE)[A-Z_]+)["']""")
IN_SOURCE = re.compile(r"""["'](INTERLACE_[A-Z_]+)["']""")


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    rows = re.findall(r"^\| `(INTERLACE_\w+)` \| (.*) \|$", page, re.M)
    said = {name: re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text) for name, text in rows}  # no links
    assert said == VARIABLES and len(rows) == len(VARIABLES)
    files = [file for top in ("runtime", "python") for file in (ROOT / top).rglob("*.py")]
    others = {name for file in files for name in OF_OTHERS.findall(file.read_text())}
    assert {"RANK", "TRITON_INTERPRET"} < others
    assert {f"`{name}`" for name in others} <= set(re.findall(r"`[A-Z_]+`", page))


def test_every_variable_that_is_read_is_known() -> None:
    own = ROOT / "runtime/compat/environment.py"
    files = [
        file for top in ("runtime", "python", "kernels") for file in (ROOT / top).rglob("*.py")
    ]
    found = {name for file in files if file != own for name in IN_SOURCE.findall(file.read_text())}
    # which tests, and that file itself, read
    read_elsewhere = {"INTERLACE_WITHOUT_NVSHMEM", "INTERLACE_DEBUG", "INTERLACE_UNKNOWN"}
    assert found == set(VARIABLES) - read_elsewhere


@pytest.mark.parametrize(
    ("slip", "meant"),
    [("INTERLACE_MACHINCODE", "INTERLACE_MACHINE_CODE"), ("INTERLACE_RECORDS", "INTERLACE_RECORD")],
)
def test_a_slip_is_named_with_what_was_meant(slip: str, meant: str) -> None:
    said = rf"^{slip} is not an environment variable .* did you mean {meant}"
    with environment(**{slip: "0"}), pytest.raises(ValueError, match=said):
        check_environment()


@pytest.mark.parametrize("value", ["2", "true", "no"])
def test_a_switch_is_0_or_1(value: str) -> None:
    with environment(**dict.fromkeys(SWITCHES, "1")):
        check_environment()
    said = f"INTERLACE_MACHINE_CODE .* 0 or 1, got '{value}'"
    with environment(INTERLACE_MACHINE_CODE=value), pytest.raises(ValueError, match=said):
        check_environment()


def test_a_service_of_kubernetes_passes() -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_443_TCP_ADDR")
    for job in ("INTERLACE", "INTERLACE_JOB"):
        with environment(**{f"{job}_{name}": "10.0.0.1" for name in names}):
            check_environment()


def test_variables_of_a_job_are_one_warning() -> None:
    """Rank 0 warns; its child processes inherit its environment and do not warn again."""
    job = {"INTERLACE_RESTART": "5", "INTERLACE_CACHE": "x"}  # not quite TUNE_CACHE
    with environment(**job, RANK="1", INTERLACE_UNKNOWN=None), warnings.catch_warnings():
        warnings.simplefilter("error")
        check_environment()
    names = r"INTERLACE_RESTART, INTERLACE_CACHE \(did you mean INTERLACE_TUNE_CACHE\?\)"
    said = rf"ignores {names} in .*; docs/reference/environment.md lists"
    with environment(**job, RANK=None, INTERLACE_UNKNOWN=None), pytest.warns(match=said) as seen:
        check_environment()
        check_environment()
    assert len(seen) == 1


def test_import_raises_it() -> None:
    environment = {**os.environ, "INTERLACE_TUNE_CASH": "off"}
    command = [sys.executable, "-c", "import interlace"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("did you mean INTERLACE_TUNE_CACHE?\n")


def test_a_level_that_is_none() -> None:
    said = "INTERLACE_DEBUG must be one of warning, info, debug, got 'verb"
    with environment(INTERLACE_DEBUG="verbose"), pytest.raises(ValueError, match=said):
        write_log()


LEVELS = [
    ("debug", ["made", "closed after ", "all_reduce 1: tensor (3,) bfloat16: "], []),
    ("Info", ["made", "closed after "], ["all_reduce"]),
    ("warning", [], ["made", "closed", "all_reduce"]),
    ("", [], ["made", "closed", "all_reduce"]),
]


@pytest.mark.parametrize(("level", "seen", "unseen"), few(LEVELS, LEVELS[0]))
def test_what_is_logged_at_which_level(level: str, seen: list[str], unseen: list[str]) -> None:
    code = """
import interlace, torch
def on_rank():
    group = interlace.new_group([1, 0])
    interlace.all_reduce(torch.ones(3, dtype=torch.bfloat16), group=group)
    group.close()
interlace.run(on_rank, 2)
"""
    environment = {**os.environ, "INTERLACE_DEBUG": level, "INTERLACE_JOB_ID": "5"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    for text in seen:
        line = next(line for line in done.stderr.splitlines() if text in line)
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} interlace rank [01] of group", line)
    assert not any(text in done.stderr for text in unseen) and not done.stdout
    assert done.stderr.count("interlace ignores INTERLACE_JOB_ID") == 1


def test_a_group_that_shrinks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "interlace")
    torch.distributed.init_process_group(
        "interlace", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        interlace.shrink()
    finally:
        torch.distributed.destroy_process_group()
    said = [re.sub(r"[0-9.]+ s$", "? s", text) for text in caplog.messages]
    about = "rank 0 of group [0] on shm: "
    events = [
        "made in ? s",
        "shrunk to its ranks [0] in ? s",
        "closed after ? s",
        "made in ? s",
        "closed after ? s",
    ]
    assert said == [about + event for event in events]
