"""Limits of the tests on a GPU: one that hangs or dies fails alone (tests/gpu/conftest.py)."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

from tiers import thorough

GPU = pathlib.Path(__file__).parent / "gpu" / "conftest.py"

TESTS = """
import ctypes, os
import pytest

def test_before(): pass
def test_hangs():
    libc = ctypes.PyDLL(None)  # keeps the interpreter, as no signal is taken in a driver that hangs
    while True:
        libc.pause()
def test_dies(): os.abort()
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="no need")
def test_skipped(): pass
def test_after(): pass
"""


def prepared(folder: pathlib.Path, tests: str, limit: float) -> list[str]:
    shutil.copy(GPU, folder / "conftest.py")
    with (folder / "conftest.py").open("a") as file:
        file.write(f"\nLIMIT = {limit}\ntorch.cuda.is_available = lambda: True\n")
    (folder / "test_them.py").write_text(tests)
    return [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", str(folder)]


@thorough
def test_one_that_hangs_or_dies_fails_alone(tmp_path: pathlib.Path) -> None:
    command = prepared(tmp_path, TESTS, 5.0)  # the others take hundredths of that
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "3 failed, 2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "test_hangs took more than 5 s" in done.stdout
    assert "test_dies ended with status 6" in done.stdout
    assert "assert 1 == 2" in done.stdout


def test_one_that_hangs_ends_with_the_run(tmp_path: pathlib.Path) -> None:
    """Otherwise the process would occupy the GPU during the next step of gpu_call.sh."""
    report, told = os.pipe()
    hangs = (
        f"import os, signal\ndef test_hangs():\n    os.write({told}, b'.')\n    signal.pause()\n"
    )
    command = prepared(tmp_path, hangs, 600.0)
    with subprocess.Popen(
        command, cwd=tmp_path, pass_fds=[told], stdout=subprocess.DEVNULL
    ) as running:
        os.close(told)
        assert os.read(report, 1) == b"."
        running.send_signal(signal.SIGKILL)
        assert os.read(report, 1) == b""  # nobody has the other end any more
    os.close(report)
