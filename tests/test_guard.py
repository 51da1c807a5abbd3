"""A slow test fails alone, a dead worker ends the run, and a test that hangs on a GPU fails alone."""

import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from documents import page_child
from tiers import thorough

HERE = pathlib.Path(__file__).parent

SLOW = """
import time, interlace
interlace.run(interlace.get_rank, 2)  # the slow part of a first call is done
def test_before(): pass
def test_slow():
    interlace.run(lambda: time.sleep({seconds}), 2)
def test_after():
    assert interlace.run(interlace.get_rank, 2) == [0, 1]
"""
# The second worker begins with these; what it has done when it dies counts as not done for xdist.
DIES = {
    "test_a.py": "def test_a(): pass",
    "test_b.py": "import time\ndef test_b(): time.sleep(1)\ndef test_b2(): time.sleep(1)",
    "test_c.py": "import os\ndef test_c(): pass\ndef test_c1(): os._exit(1)\ndef test_c2(): pass\n",
}
# A child of the worker that dies has its pipe, and lives on.
HELD = """
import os, pathlib, time
def test_dies():
    if os.fork() == 0:
        until = time.monotonic() + {seconds}
        while not pathlib.Path("end").exists() and time.monotonic() < until:
            time.sleep(0.05)
        pathlib.Path("ended").touch()
        os._exit(0)
    os._exit(1)
"""


def command(folder: pathlib.Path, options: tuple[str, ...], change: str) -> list[str]:
    """Return a program that runs pytest there; ``change`` changes one of the guard's hooks."""
    (folder / "guarded.py").write_text(f"import guard\nfrom guard import *\n{change}\n")
    return ["-m", "pytest", "-q", "-p", "guarded", "-p", "no:cacheprovider", *options]


def forked(folder: pathlib.Path, *options: str, change: str = "") -> str:
    """Run it like :func:`run`, by a fork of a process that has imported torch."""
    said, errors = str(folder / "said"), str(folder / "errors")
    process = multiprocessing.get_context("forkserver").Process(
        target=page_child.run_python,
        args=(str(folder), command(folder, options, change), {}, said, errors),
    )
    process.start()
    process.join()
    both = pathlib.Path(said).read_text() + pathlib.Path(errors).read_text()
    return f"{both}\nexit status {process.exitcode}"


def run(folder: pathlib.Path, *options: str, change: str = "", limit: float | None = None) -> str:
    """Return the output of a run of pytest, and its exit status."""
    with open(folder / "said", "w") as said:  # a child would also hold a pipe open
        done = subprocess.run(
            [sys.executable, *command(folder, options, change)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(HERE), *sys.path])},
            stdout=said,
            stderr=said,
            timeout=limit,
        )
    return f"{(folder / 'said').read_text()}\nexit status {done.returncode}"


@thorough
def test_a_slow_test_fails_alone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW.format(seconds=100_000))
    said = forked(tmp_path, "-o", "limit=1", change="guard.busy = lambda: 2.0")
    assert "test_slow.py::test_slow has taken more than 2 s" in said
    assert "1 failed, 2 passed" in said and "Thread 0x" in said and "exit status 1" in said


@thorough
def test_where_others_are_busy_it_may_take_longer(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW.format(seconds=1.5))
    said = forked(tmp_path, "-o", "limit=0.5", change="guard.busy = lambda: 1000.0")
    assert "3 passed" in said and "exit status 0" in said


@thorough
def test_a_dead_worker_ends_the_run(tmp_path: pathlib.Path) -> None:
    for name, text in DIES.items():
        (tmp_path / name).write_text(text)
    said = run(tmp_path, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    assert "crashed while running 'test_c.py::test_c1'" in said and "exit status 1" in said


@thorough
def test_without_the_guard_it_never_ends(tmp_path: pathlib.Path) -> None:
    for name, text in DIES.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(subprocess.TimeoutExpired):
        options = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
        run(tmp_path, *options, change="del pytest_configure", limit=40)


@thorough
@pytest.mark.parametrize("guarded", [True, False])
def test_whose_pipe_is_held_by_another_is_found_dead(guarded: bool, tmp_path: pathlib.Path) -> None:
    """Without the guard the run would end after that other process."""
    (tmp_path / "test_held.py").write_text(HELD.format(seconds=100_000 if guarded else 8))
    try:
        said = run(tmp_path, "-n", "1", change="" if guarded else "del pytest_testnodeready")
        assert "crashed while running" in said and "exit status 1" in said
        assert (tmp_path / "ended").exists() is not guarded
    finally:
        (tmp_path / "end").touch()


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


@thorough
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
