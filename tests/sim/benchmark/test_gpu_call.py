"""The script for the first fifteen minutes on a GPU, on simulated ranks, and the facts that it asks for."""

import ctypes
import os
import pathlib
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases.launches import on_cpu
from sim.benchmark.model_support import ROOT, module
from stand_ins import cupy_stand_in
from stand_ins.replaced import replaced
from tiers import thorough

SCRIPT = ROOT / "benchmarks" / "gpu_call.sh"
COMMANDS = {  # as docs/how-to/gpu/first-run.md has them
    "1": "bash benchmarks/gpu_call.sh 1",
    "2": "bash benchmarks/gpu_call.sh 2",
    "3": "bash benchmarks/gpu_call.sh 3",
}


CAUSES = {
    "eager": "CUDA_MODULE_LOADING=EAGER",
    "one-queue": "CUDA_DEVICE_MAX_CONNECTIONS=1",
    "blocking": "CUDA_LAUNCH_BLOCKING=1",
}


def run(
    call: str, out: pathlib.Path, how: tuple[str, ...] = ("--dry-run",), **changed: str
) -> subprocess.CompletedProcess[str]:
    here = {"WORK": str(out), "TRITON_CACHE_DIR": str(out / "kernels"), "CACHE": str(out / "none")}
    environment = {**os.environ, "PY": sys.executable, **here, **changed}
    command = [*COMMANDS[call].split(), *how]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def begun(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall("^== (.*): status", done.stdout.partition("-- call")[0], re.MULTILINE)


def program(folder: pathlib.Path, text: str) -> str:
    file = folder / f"program-{len([*folder.glob('program-*')])}"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


@thorough
def test_every_step_of_the_calls_runs(tmp_path: pathlib.Path) -> None:
    for call in "12":
        done = run(call, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = (tmp_path / call / "summary.txt").read_text()
        names = re.findall("^== (.*): status 0", summary, re.MULTILINE)
        assert len({*names}) == len(names) > 5  # each has its own log
        with tarfile.open(tmp_path / f"{call}.tgz") as packed:
            logs = {f"{call}/{name}.log" for name in names}
            assert logs | {f"{call}/summary.txt"} <= {*packed.getnames()}
    third = run("3", tmp_path / "third")
    assert third.returncode == 0, third.stdout + third.stderr
    assert "== check-odd: status 0" in third.stdout and "== small: status 0" in third.stdout


def test_limits_leave_time_for_the_starts_of_the_machine() -> None:
    """There are two calls of at most 330 s and a shorter one; a step that is stopped takes 5 s more."""
    limits = [int(each) for each in re.findall(r"\bseconds=(\d+)", SCRIPT.read_text())]
    assert len(limits) == 2 and limits[0] + 8 <= 330 and limits[1] + 8 <= 180


def test_a_step_that_fails_is_told_and_the_next_begins(tmp_path: pathlib.Path) -> None:
    done = run("2", tmp_path, PY="false")
    assert done.returncode == 1, done.stdout
    assert "== check-4: status 1" in done.stdout and "== host-cost: status 1" in done.stdout
    assert (tmp_path / "check-4.failed").exists()
    assert run("2", tmp_path, PY="true").returncode == 0
    assert not list(tmp_path.glob("*.failed"))


def test_what_explains_a_failure_comes_before_speed(tmp_path: pathlib.Path) -> None:
    one_rank = program(tmp_path, 'case "$*" in *"--ranks 1 "*) exit 1;; esac')
    for python, order in (
        ("false", "probe matmul"),
        (one_rank, "probe matmul"),
        ("true", "variants probe"),
    ):
        done = run("1", tmp_path / f"after {pathlib.Path(python).name}", PY=python)
        names = begun(done)
        assert names[:3] == ["facts", "check-1", "check-2"] and names.count("probe") == 1
        assert order in " ".join(names)


@pytest.mark.parametrize(
    "failing", ["--ranks 2 ", "--ranks 4 ", "gpu_facts", "processes", "--part ops"]
)
def test_what_failed_runs_again_one_cause_after_the_other(
    tmp_path: pathlib.Path, failing: str
) -> None:
    python = program(tmp_path, f'case "$*" in *"{failing}"*) exit 1;; esac')
    failed = []
    for call in "12":
        out = tmp_path / f"out {call}"
        done = run(call, tmp_path, PY=python, OUT=str(out))
        assert [file.name for file in out.iterdir()] == [f"{call}.tgz"]
        failed += re.findall(
            "^== (.*): status 1", done.stdout.partition("-- call")[0], re.MULTILINE
        )
    (step,) = failed
    log = tmp_path / "causes.txt"
    says = f'case "$*" in *"{failing}"*) env | grep ^CUDA_ >>"{log}";; *) exit 1;; esac'
    pathlib.Path(python).write_text(f"#!/bin/sh\n{says}\n")
    done = run("3", tmp_path, PY="false")  # it is what stood for Python that runs again
    assert done.returncode == 0 and begun(done) == [f"{step}-{cause}" for cause in CAUSES], (
        done.stdout
    )
    assert all(setting in log.read_text() for setting in CAUSES.values())


def test_whatever_fails_the_third_call_is_bounded_and_runs_all_of_it_once(
    tmp_path: pathlib.Path,
) -> None:
    run("1", tmp_path, PY="false")
    done = run("3", tmp_path, PY="false")
    steps = ["facts", "check-1", "check-2", "probe", "matmul", "variants"]
    assert {*begun(done)[: len(steps)]} == {f"{step}-eager" for step in steps}
    shares = [int(each) for each in re.findall(r"of (\d+) s", done.stdout.partition("-- call")[0])]
    assert len(shares) == 3 * len(steps)
    assert {*shares[: len(steps)]} == {4 * 20}  # a dry run's are four times as long


def test_cases_that_had_no_time_have_not_failed(tmp_path: pathlib.Path) -> None:
    run("1", tmp_path, PY=program(tmp_path, 'case "$*" in *check*) exit 3;; esac'))
    assert "== check-odd: status 0" in run("3", tmp_path, PY="true").stdout


@pytest.mark.parametrize(
    ("how", "changed", "said"),
    [
        (("--dry-run",), {"OUT": "/dev/null/y"}, "/dev/null"),
        (("--dry-run",), {"WORK": "/dev/null/y"}, "/dev/null"),
        (("--dry-run",), {"LIMIT": "abc"}, "LIMIT=abc: "),
        (("--dryrun",), {}, COMMANDS["1"][:-1]),
        (("--dry-run", "now"), {}, COMMANDS["1"][:-1]),
        (("", "now"), {}, COMMANDS["1"][:-1]),
        ((), {}, "no GPU"),
    ],
)
def test_a_call_that_cannot_run_stops_at_once(
    tmp_path: pathlib.Path, how: tuple[str, ...], changed: dict[str, str], said: str
) -> None:
    if not how and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run("1", tmp_path, how, **({"PY": "true"} if how else {}), **changed)
    assert done.returncode == 2 and not done.stdout and said in done.stderr
    assert len(done.stderr.splitlines()) == 1 or COMMANDS["1"][:-1] in done.stderr


def test_results_that_could_not_be_packed_are_a_failure(tmp_path: pathlib.Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tar").symlink_to("/bin/false")
    done = run("1", tmp_path, PY="true", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 1 and "NOT packed" in done.stdout


def test_what_has_no_time_is_left_out(tmp_path: pathlib.Path) -> None:
    done = run("2", tmp_path, PY="true", LIMIT="5")
    assert "processes: left out, no time" in done.stdout and done.returncode == 1


def test_a_kernel_that_the_cache_has_not_is_seen(tmp_path: pathlib.Path) -> None:
    whole = tmp_path / "packed" / "key"
    whole.mkdir(parents=True)
    (whole / "all_gather_kernel.cubin").touch()
    packed = tmp_path / "cache.tgz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(whole, "key")
    build = "mkdir -p $TRITON_CACHE_DIR/$1; touch $TRITON_CACHE_DIR/$1/wait_kernel.cubin"
    for text, seen in ((build, True), ("exit 0", False)):
        folder = tmp_path / str(seen)
        folder.mkdir()
        done = run("2", folder, PY=program(folder, text), CACHE=str(packed))
        assert (folder / "kernels" / "key" / "all_gather_kernel.cubin").exists()
        assert ("not in the cache, compiled here: wait_kernel x 1" in done.stdout) == seen
        assert "every kernel is compiled here" not in done.stdout
    assert "every kernel is compiled here" in run("2", tmp_path, PY="true").stdout


SMS = 4


class PlayedEvent:
    """An event that is reached at once, or never."""

    passes = True

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.passes


@pytest.fixture
def facts() -> Iterator[Any]:
    properties = SimpleNamespace(multi_processor_count=SMS)
    found = module("gpu_facts")
    with replaced(
        (torch.cuda, "Stream", lambda **options: SimpleNamespace(cuda_stream=7)),
        (torch.cuda, "stream", cupy_stand_in._Stream),
        (torch.cuda, "Event", PlayedEvent),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "get_device_properties", lambda device: properties),
        (torch, "zeros", on_cpu(torch.zeros)),
        (found, "PATIENCE", 0.01),
        (found, "COPIED", 64),
    ):
        yield found.Facts(cupy_stand_in)


def kernel(late_ns: list[int], sm: int) -> Any:
    """A kernel whose programs begin this late, all on this SM."""

    def run(grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
        sms, begun, _ = (int(each) for each in arguments)
        for program in range(grid[0]):
            ctypes.c_int32.from_address(sms + 4 * program).value = sm
            late = late_ns[program % len(late_ns)]
            ctypes.c_int64.from_address(begun + 8 * program).value = 1000 + late

    return run


@pytest.mark.parametrize(
    ("spin", "fat", "ranks", "found"),
    [
        ([0], [0], 2, {"their SMs": 1, "CTAs that begin late": 0}),
        ([0], [0, 5_000_001], 2, {"their SMs": 1, "CTAs that begin late": SMS // 2}),
        ([0], [280_000_000], 8, "the kernel waited 280 ms"),
        ([0], [900_000_000], 8, "the kernel waited 900 ms"),
    ],
)
def test_a_kernel_beside_spinning_kernels(
    facts: Any, spin: list[int], fat: list[int], ranks: int, found: Any
) -> None:
    facts.spin, facts.fat = kernel(spin, 3), kernel(fat, 0)
    seen = facts.spinning(ranks)
    assert seen.startswith(found) if isinstance(found, str) else seen == found


def test_spinning_kernels_that_begin_later_are_not_counted_as_beside(facts: Any) -> None:
    starts = iter([0, module("gpu_facts").LIMIT_NS])
    facts.spin = lambda *launch, **more: kernel([next(starts)], 0)(*launch, **more)
    facts.fat = kernel([20_000_000], 0)
    assert "1 were spinning when it began" in facts.spinning(2)


def test_ctas_have_the_shared_memory_of_the_largest_tile_that_ships() -> None:
    figures = (ROOT / "docs/reference/warp-roles.md").read_text()
    row = next(each for each in figures.splitlines() if each.startswith("| shared memory, bytes"))
    _, triton, _, roles = row.split("|")[2:6]  # the ones of 3 stages ship
    assert f"{module('gpu_facts').SHARED:,}" == max(triton, roles).strip()


def test_what_runs_together_is_counted(facts: Any) -> None:
    limit, streams = module("gpu_facts").LIMIT_NS, module("gpu_facts").STREAMS
    for late_ns, together in (([0], streams), ([limit], streams)):
        facts.spin = kernel(late_ns, 0)
        assert facts.at_once()["together"] == together
    starts = iter([0] * 8 + [limit] * (streams - 8))
    facts.spin = lambda *launch, **more: kernel([next(starts)], 0)(*launch, **more)
    assert facts.at_once()["together"] == 8


def test_what_waits_for_the_kernel_is_told(facts: Any) -> None:
    facts.fat = kernel([0], 0)
    assert "goes on" in facts.copy(1)
    with replaced((PlayedEvent, "passes", False)):
        assert facts.copy(0) == "waits for the kernel: it needs SMs"


def test_a_dry_run_names_the_questions(capsys: pytest.CaptureFixture[str]) -> None:
    assert module("gpu_facts").main(["--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 9
