"""Processor seconds of the tests, by file: ``python tests/repository/cost.py [options of pytest]``.

    own         the process that runs the tests: imports, simulated ranks, interpreted kernels
    compilers   processes that compile kernels, with their tools
    processes   all other processes that the tests start: ranks, commands, scripts
    waiting     seconds in which none of these ran
    tests       how many

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
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest

FOLDER = "TESTS_COST_FOLDER"
SET_CHILD_SUBREAPER = 36  # an option of prctl
COMPILER = b"compiler/start.py"
TICKS = os.sysconf("SC_CLK_TCK")


def _statistics() -> dict[int, tuple[int, float]]:
    """Return the parent and the processor seconds of every process, including its ended children."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[int(pid)] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS
    return found


def _tree(root: int) -> dict[int, float]:
    known = _statistics()
    below = defaultdict(list)
    for pid, (parent, _) in known.items():
        below[parent].append(pid)
    found, left = {}, [root]
    while left:
        pid = left.pop()
        if pid in known:
            found[pid] = known[pid][1]
            left += below[pid]
    return found


class Meter:
    """A meter of a process that runs tests; it writes a line for each file."""

    def __init__(self, folder: str) -> None:
        self._file = open(pathlib.Path(folder, f"{os.getpid()}.json"), "w")  # noqa: SIM115
        self._compilers: dict[int, float] = {}
        self._before = (time.monotonic(), 0.0, 0.0, 0.0)
        self._tests = 0

    def _now(self) -> tuple[float, float, float, float]:
        own = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        tree = _tree(os.getpid())
        for pid in tree:
            self.sample(pid)
        return time.monotonic(), own, sum(self._compilers.values()), sum(tree.values()) - own

    def sample(self, pid: int) -> None:
        """Note the processor seconds of a compiling process."""
        try:
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return
        if COMPILER in command:
            self._compilers[pid] = sum(_tree(pid).values())

    def write(self, name: str) -> None:
        now = self._now()
        wall, own, compilers, others = (b - a for a, b in zip(self._before, now, strict=True))
        row = {"file": name, "own": own, "compilers": compilers, "processes": others - compilers}
        row |= {"waiting": max(0.0, wall - own - others), "tests": self._tests}
        print(json.dumps(row), file=self._file, flush=True)
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
        from interlace.runtime.compiler import pool

        meter = Meter(os.environ[FOLDER])
        config.pluginmanager.register(meter)
        close = pool._Server.close

        def closed(server: Any) -> None:
            meter.sample(server.process.pid)
            close(server)

        pool._Server.close = closed  # type: ignore[method-assign]


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
    print(f"{'own':>8} {'compilers':>9} {'processes':>9} {'waiting':>8} {'tests':>6}  file")
    names = ("own", "compilers", "processes", "waiting", "tests")
    sums = {name: sum(row[name] for row in rows) for name in names}
    rows.sort(key=lambda row: -(row["own"] + row["compilers"] + row["processes"]))
    for row in [*rows, {"file": "(all)", **sums}]:
        figures = [
            f"{row[name]:{width}.1f}" for name, width in zip(names[:4], (8, 9, 9, 8), strict=True)
        ]
        print(*figures, f"{row['tests']:6d} ", row["file"])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"the whole run: {used.ru_utime + used.ru_stime:.0f} processor seconds in {wall:.0f} s")
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
