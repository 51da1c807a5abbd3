"""Limits of the tests on a GPU: one that hangs or dies fails alone (tests/gpu/conftest.py)."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

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


def test_one_that_hangs_or_dies_fails_alone(tmp_path: pathlib.Path) -> None:
    shutil.copy(GPU, tmp_path / "conftest.py")
    with (tmp_path / "conftest.py").open("a") as file:
        file.write("\nLIMIT = 2.0\ntorch.cuda.is_available = lambda: True\n")
    (tmp_path / "test_them.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "3 failed, 2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "test_hangs took more than 2 s" in done.stdout
    assert "test_dies ended with status 6" in done.stdout
    assert "assert 1 == 2" in done.stdout
