"""Compile kernels in another process, for a process that may interpret them.

In a process that interprets kernels, ``@triton.jit`` has already turned them into interpreted functions.
Therefore a *server* compiles them, without ``TRITON_INTERPRET``, in forks of itself. These processes end
with the call, even if it is interrupted; if this process is killed, they end when their input is closed.
Kernels that are about to run are compiled one at a time, by a server that stays for the next ones.

The server loads each file of kernels once. A user's file often imports torch, which takes seconds, and
Triton hashes its own sources before the first compilation. The forks inherit both. If a fork crashes, as
compilers do, that is the kernel's result. If a file ends this process, that is the result of its kernel,
and the caller starts another process.
"""

import atexit
import contextlib
import os
import pathlib
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from typing import IO

from interlace.runtime.compat.triton_launcher import knobs, ready_to_compile
from interlace.runtime.compiler import worker
from interlace.runtime.compiler.request import Compilation, Measurement
from interlace.runtime.compiler.worker import COMPILING, ReenteredError

_PROGRAM = pathlib.Path(__file__).with_name("start.py")


def compile_all(
    requests: Sequence[Compilation],
    *,
    workers: int | None = None,
    on_result: Callable[[int, Measurement], None] = lambda index, measurement: None,
) -> list[Measurement]:
    """Compile and measure ``requests``. Return the results in the same order.

    ``workers``: the number of parallel compilations, one per core by default. ``on_result`` is called with
    the index of each finished request, in the caller's thread.
    """
    _refuse_reentry()
    results: dict[int, Measurement] = {}
    count = min(len(requests), workers or os.cpu_count() or 1)
    while len(results) < len(requests):  # a file that ends the server counts as one result
        left = [index for index in range(len(requests)) if index not in results]
        with contextlib.closing(_Server(count)) as server:
            for place, measurement in server.compiled([requests[index] for index in left]):
                results[left[place]] = measurement
                on_result(left[place], measurement)
    return [results[index] for index in range(len(requests))]


def compile_one(request: Compilation) -> Measurement:
    """Compile one request, in the server that stays until a file that it has loaded changes."""
    global _staying
    _refuse_reentry()
    path = os.path.realpath(request.path)
    # a forked process must not read the answers of its parent's server
    places = tuple(dict.fromkeys(sys.path))  # naming a folder twice makes no difference
    fits = os.getpid(), os.getcwd(), places, repr(request.stand_ins)
    read_at = os.stat(path).st_mtime_ns
    if _staying is None or _staying.fits != fits or _staying.files.get(path, read_at) != read_at:
        _end_staying()
        _staying = _Server(1, fits)
    _staying.files[path] = read_at
    try:
        ((_, measurement),) = _staying.compiled([request])
    except BaseException:  # an interrupt: otherwise an unread answer would be left over
        _end_staying()
        raise
    if _staying.process.poll() is not None:
        _end_staying()
    return measurement


@atexit.register
def _end_staying() -> None:
    global _staying
    if _staying is not None and _staying.fits[0] == os.getpid():
        _staying.close()
    _staying = None


def _refuse_reentry() -> None:
    if os.environ.get(COMPILING):
        raise ReenteredError(
            "a file that is loaded for its kernel compiles kernels before it defines that one"
        )


class _Server:
    """A compiling process.

    For one that stays, ``fits`` is the state it was started for, and ``files`` are the times at which its
    loaded files were last changed.
    """

    def __init__(self, count: int, fits: tuple[object, ...] = ()) -> None:
        self.fits = fits
        self.files: dict[str, int] = {}
        settings = {
            "TRITON_INTERPRET": "0",
            "TRITON_DISABLE_LINE_INFO": "0",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            COMPILING: "1",
        }
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # outlives this function
        self.process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, **settings},
            start_new_session=True,  # so that it can be ended together with its forks
        )

    def compiled(self, requests: Sequence[Compilation]) -> Iterator[tuple[int, Measurement]]:
        """Yield the results of ``requests``. A server that ends by itself is the error of its last file."""
        server = self.process
        assert server.stdin and server.stdout
        done, loading = 0, 0
        with contextlib.suppress(BrokenPipeError, EOFError, pickle.UnpicklingError):
            pickle.dump(requests, server.stdin)
            server.stdin.flush()
            while done < len(requests):
                index, measurement = pickle.load(server.stdout)
                if measurement is None:
                    loading = index
                else:
                    done += 1
                    yield index, measurement
        if done < len(requests):
            self._said.seek(0)
            words = self._said.read().decode(errors="replace")
            yield loading, Measurement(error=ended_with(server.wait(), words))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, BrokenPipeError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError), self.process:
            pass
        self._said.close()


_staying: _Server | None = None


@dataclass
class Fork:
    """A process that compiles request ``index``: its answer, and the output of it and its tools."""

    index: int
    pid: int
    answer: IO[bytes]
    said: IO[bytes]

    def end(self) -> Measurement:
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
            pickle.dump(
                replace(worker.measure_or_error(request), seconds=time.monotonic() - begin), answer
            )
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
