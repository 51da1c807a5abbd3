"""Environment variables: every one that is read is known and in the docs, and a slip is an error."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from interlace.runtime.compat.environment import VARIABLES, check_environment

ROOT = pathlib.Path(__file__).parents[3]
IN_SOURCE = re.compile(r"""["'](INTERLACE_[A-Z_]+)["']""")


def test_the_page_has_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs/environment.md").read_text(), re.M)
    assert dict(rows) == VARIABLES and len(rows) == len(VARIABLES)


def test_every_variable_that_is_read_is_known() -> None:
    own = ROOT / "runtime/compat/environment.py"
    files = [
        file for top in ("runtime", "python", "kernels") for file in (ROOT / top).rglob("*.py")
    ]
    found = {name for file in files if file != own for name in IN_SOURCE.findall(file.read_text())}
    assert found == set(VARIABLES) - {"INTERLACE_WITHOUT_NVSHMEM"}  # which tests read


@pytest.mark.parametrize(
    ("slip", "meant"),
    [("INTERLACE_MACHINCODE", "INTERLACE_MACHINE_CODE"), ("INTERLACE_x", "INTERLACE_")],
)
def test_a_slip_is_named_with_what_was_meant(
    slip: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(slip, "0")
    with pytest.raises(ValueError, match=rf"^{slip} in the environment .* did you mean {meant}"):
        check_environment()


def test_a_service_of_kubernetes_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_443_TCP_ADDR"):
        monkeypatch.setenv(f"INTERLACE_{name}", "10.0.0.1")
        monkeypatch.setenv(f"INTERLACE_JOB_{name}", "10.0.0.1")
    check_environment()


def test_import_raises_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import interlace"],
        env={**os.environ, "INTERLACE_TUNE_CASH": "off"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("did you mean INTERLACE_TUNE_CACHE?\n")
