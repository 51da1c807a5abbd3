"""The compiling process: it loads each file of kernels once, and compiles each kernel in a fork of itself.

A user's file often imports torch, which takes seconds, and Triton hashes its own sources before the first
compilation. The forks inherit both. If a fork crashes, as compilers do, that is the kernel's result. If a
file ends this process, that is the result of its kernel, and the caller starts another process.
"""

import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from typing import IO

from interlace.runtime.compat.triton_launcher import knobs, ready_to_compile
from interlace.runtime.compiler import worker
from interlace.runtime.compiler.request import Compilation, Measurement


@dataclass
class Fork:
    """A process that compiles request ``index``: its answer, and its output and that of its tools."""

    index: int
    pid: int
    answer: IO[bytes]
    said: IO[bytes]

    def end(self) -> Measurement:
        """Return its measurement, once it has one, or the error if it ended without."""
        data = self.answer.read()
        self.answer.close()
        _, status = os.waitpid(self.pid, 0)
        self.said.seek(0)
        said = self.said.read().decode(errors="replace")
        self.said.close()
        if not data:
            code = os.waitstatus_to_exitcode(status)
            return Measurement(error=ended_with(code, said))
        measurement: Measurement = pickle.loads(data)
        if measurement.error is None:
            return measurement
        return replace(measurement, error="; ".join([measurement.error, *_diagnostics(said)]))


def ended_with(code: int, said: str) -> str:
    """Return the error of a process that ended without an answer."""
    return f"the compiler ended with code {code}: {' '.join(said.strip().splitlines()[-3:])}"


def _diagnostics(said: str) -> list[str]:
    """Return the compiler's error lines out of all its output: a failing pass prints the whole module."""
    lines = [line.strip() for line in said.splitlines() if " error: " in line]
    return [line for line in lines if "Failures have been detected" not in line][:3]


def _fork(index: int, request: Compilation, begin: float) -> Fork:
    reading, writing = os.pipe()
    said = tempfile.TemporaryFile()  # noqa: SIM115  # outlives this function
    pid = os.fork()
    if pid:
        os.close(writing)
        return Fork(index, pid, os.fdopen(reading, "rb"), said)
    try:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        with os.fdopen(writing, "wb") as answer:
            pickle.dump(replace(worker.measured(request), seconds=time.monotonic() - begin), answer)
    finally:
        os._exit(0)


def serve(asked: BufferedReader, answers: IO[bytes], count: int) -> None:
    """Answer a list of requests with (index, measurement), ``count`` at a time, in the order of completion.

    (index, None) is sent before a file is loaded. Stops once ``asked`` is closed.
    """

    def answer(*what: object) -> None:
        pickle.dump(what, answers)
        answers.flush()

    requests: Sequence[Compilation] = pickle.load(asked)
    todo = list(enumerate(requests))[::-1]
    forks: dict[object, Fork] = {}
    with selectors.DefaultSelector() as events:
        events.register(asked, selectors.EVENT_READ)
        while todo or forks:
            while todo and len(forks) < count:
                index, request = todo.pop()
                answer(index, None)
                begin = time.monotonic()
                if (refused := worker.refused_file(request)) is not None:
                    answer(index, refused)
                    continue
                ready_to_compile()
                fork = _fork(index, request, begin)
                forks[fork.answer] = fork
                events.register(fork.answer, selectors.EVENT_READ)
            for key, _ in events.select() if forks else ():
                if key.fileobj is asked:
                    for fork in forks.values():
                        os.kill(fork.pid, signal.SIGKILL)
                    return
                events.unregister(key.fileobj)
                fork = forks.pop(key.fileobj)
                answer(fork.index, fork.end())


def main() -> None:
    """Serve stdin and stdout. The output of files and compilers must not appear between the answers."""
    # A file of kernels may set TRITON_INTERPRET itself; the value set here takes precedence.
    knobs.runtime.interpret = False
    answers_fd = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answers_fd, "wb") as answers, os.fdopen(0, "rb", closefd=False) as asked:
        while asked.peek(1):
            serve(asked, answers, int(sys.argv[1]))
