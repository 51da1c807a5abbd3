"""Processor seconds of the tests, by file: ``python tests/repository/cost.py [options of pytest]``.

    own         the process that runs the tests: imports, simulated ranks, interpreted kernels
    processes   processes that the tests start: ranks, commands, compilers
    waiting     seconds in which none of these ran
    tests       number of tests

Below the table are the sum, and the seconds of the whole run with all of its processes. Run it after
``make .venv/test`` on a quiet machine. Empty ``~/.triton`` first to measure with cold caches.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from typing import Any

import pytest

FOLDER = "TESTS_COST_FOLDER"
SET_CHILD_SUBREAPER = 36  # an option of prctl
TICKS = os.sysconf("SC_CLK_TCK")


def processes_below(root: int) -> float:
    """Return the processor seconds of a process and of all below it, with their ended children."""
    parents, seconds = dict[int, int](), dict[int, float]()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            parents[int(pid)] = int(fields[1])
            seconds[int(pid)] = sum(map(int, fields[11:15])) / TICKS

    def below(pid: int) -> bool:
        return pid == root or (pid in parents and below(parents[pid]))

    return sum(used for pid, used in seconds.items() if below(pid))


class Meter:
    """A meter of a process that runs tests; it writes a line for each file."""

    def __init__(self, folder: str) -> None:
        self._file = open(pathlib.Path(folder, f"{os.getpid()}.json"), "w")  # noqa: SIM115
        self._before = (time.monotonic(), 0.0, 0.0)
        self._tests = 0

    def write(self, name: str) -> None:
        own = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        now = time.monotonic(), own, processes_below(os.getpid()) - own
        wall, own, others = (b - a for a, b in zip(self._before, now, strict=True))
        row = {"file": name, "own": own, "processes": max(0.0, others), "tests": self._tests}
        print(
            json.dumps({**row, "waiting": max(0.0, wall - own - others)}),
            file=self._file,
            flush=True,
        )
        self._before, self._tests = now, 0

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        self.write("(collecting)")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Generator[None, Any, Any]:
        result = yield
        self._tests += 1
        if nextitem is None or nextitem.path != item.path:
            self.write(item.nodeid.partition("::")[0])
        return result


def pytest_configure(config: pytest.Config) -> None:
    if not getattr(config.option, "numprocesses", None):  # it runs tests itself
        config.pluginmanager.register(Meter(os.environ[FOLDER]))


def main(options: list[str]) -> int:
    tests = pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-p", "repository.cost", *options]
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths.rstrip(os.pathsep), FOLDER: folder}
        began = time.monotonic()
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)  # orphans become children
        status = subprocess.run(command, cwd=tests.parent, env=environment).returncode
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        wall = time.monotonic() - began
        lines = [each.read_text().splitlines() for each in pathlib.Path(folder).iterdir()]
    rows = [json.loads(line) for each in lines for line in each]
    rows.sort(key=lambda row: -(row["own"] + row["processes"]))
    names = "own", "processes", "waiting", "tests"
    print(*(f"{name:>10}" for name in names), " file")
    for row in [
        *rows,
        {**{name: sum(row[name] for row in rows) for name in names}, "file": "(all)"},
    ]:
        print(*(f"{row[name]:10.1f}" for name in names), "", row["file"])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"the whole run: {used.ru_utime + used.ru_stime:.0f} processor seconds in {wall:.0f} s")
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
