"""torch's own tests of process groups in this process: ``DistributedTest`` of ``torch.testing._internal``.

    python torch_suite.py gloo|interlace WORLD_SIZE RESULTS [PATTERN ...]

Writes one line of JSON per test to RESULTS: name, verdict ("pass", "skip", "fail"), seconds, message. The
suite reads backend and world size when it is imported, so each combination is a process of its own; each
test forks its ranks from it, with everything loaded.
"""

import json
import os
import re
import sys
import tempfile
import time
import unittest
from typing import Any, TextIO

MESSAGE_LENGTH = 4000


class Recorder(unittest.TestResult):
    """Writes a line for every test as it ends."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file
        self._start = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._start = time.monotonic()

    def _write(self, test: unittest.TestCase, verdict: str, message: str = "") -> None:
        record = {
            "test": test.id().rsplit(".", 1)[-1],
            "verdict": verdict,
            "seconds": round(time.monotonic() - self._start, 2),
            "message": message[-MESSAGE_LENGTH:],
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._write(test, "pass")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._start = self._start or time.monotonic()
        self._write(test, "skip", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._write(test, "fail", self._exc_info_to_string(err, test))

    addError = addFailure

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._write(test, "pass")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._write(test, "fail", "passed, and was expected to fail")

    def addSubTest(self, *_: Any) -> None:
        """The test as a whole is reported."""


def load(backend: str, world_size: int) -> type[unittest.TestCase]:
    """torch's tests as a class whose ranks are forked."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world_size))
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())

    import torch

    torch.set_num_threads(1)
    torch.distributed.is_available() or sys.exit("this torch has no torch.distributed")
    if backend == "interlace":
        import impersonation

        impersonation.install()
    import torch.testing._internal.distributed.distributed_test as suite

    if backend == "interlace":
        impersonation.without_profiling(suite)

    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Suite


def main(backend: str, world_size: int, results: str, patterns: list[str]) -> None:
    suite = load(backend, world_size)
    names = unittest.defaultTestLoader.getTestCaseNames(suite)
    if patterns:
        names = [name for name in names if any(re.search(each, name) for each in patterns)]
    with open(results, "w") as file:
        unittest.TestSuite(suite(name) for name in names).run(Recorder(file))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
