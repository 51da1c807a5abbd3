"""``interlace new kernel``: what it writes passes its tests and ``verify``, and it writes over nothing."""

import functools
import itertools
import os
import pathlib
import subprocess
import sys
from unittest import mock

import pytest

from interlace.cli.main import run
from interlace.verify import races
from interlace_verify.suite import jobs as suite
from tiers import thorough

PYTHON = pathlib.Path(__file__).parents[3] / "python"


NUMBERS = itertools.count()


@pytest.fixture
def kernel(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a kernel with a name that no other test has imported."""
    name = f"ring_sum_{next(NUMBERS)}"
    assert run(["new", "kernel", name, "--folder", str(tmp_path)]) == 0
    return tmp_path / f"{name}.py"


@thorough
def test_its_tests_pass(kernel: pathlib.Path) -> None:
    plugins = ["-p", "no:interlace", "-p", "interlace_pytest.plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins],
        cwd=kernel.parent,
        env={**os.environ, "PYTHONPATH": str(PYTHON)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@thorough
def test_verify_finds_nothing_in_it(
    kernel: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    little = ("--ranks", "2,3", "--seeds", "1", "--schedules", "3", "--arch", "90")
    with mock.patch.object(suite, "lint_many", functools.partial(suite.lint_many, workers=1)):
        assert run(["verify", f"{kernel}::two_rounds", *little]) == 0
    assert "No findings." in capsys.readouterr().out


def test_a_fault_in_it_is_found(kernel: pathlib.Path) -> None:
    text, wait = kernel.read_text(), "        wait_flag(flag_pointer(pads, rank, world_size, CREDIT"
    (line,) = (each for each in text.splitlines(keepends=True) if each.startswith(wait))
    broken = kernel.with_name("broken.py")
    broken.write_text(text.replace(line, ""))
    report = races(suite.load_function(f"{broken}::two_rounds"), 2, seeds=3)
    assert "read-write" in {kind for each in report.findings for kind in each.kinds}, str(report)


def test_it_writes_over_nothing(kernel: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel.write_text("mine")
    again = ["new", "kernel", kernel.stem, "--folder", str(kernel.parent)]
    assert run(again) == 2
    kernel.unlink()  # its test alone is a reason, and then the kernel is not written either
    assert run(again) == 2
    assert capsys.readouterr().err.count("exists already, and new does not overwrite it") == 2
    assert not kernel.exists()


def test_a_folder_that_is_not_there(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["new", "kernel", "mine", "--folder", str(tmp_path / "a/b")]) == 0
    assert len(list((tmp_path / "a/b").iterdir())) == 2
    assert run(["new", "kernel", "mine", "--folder", str(tmp_path / "a/b/mine.py/c")]) == 2
    assert "mine.py/c: cannot be made" in "".join(capsys.readouterr().err.split("\n"))


@pytest.mark.thorough
def test_a_strict_type_checker_finds_nothing_in_it(kernel: pathlib.Path) -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "."]
    done = subprocess.run(command, cwd=kernel.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
