"""Worker processes that compile kernels, for a process that may interpret them.

In a process that interprets kernels, ``@triton.jit`` has already made interpreted functions of them, so
others compile: one per core, each without ``TRITON_INTERPRET``. A compiler that crashes takes its worker
along; the kernel is reported and another worker takes its place. Workers end with the call, also when it
is interrupted; should this process be killed, they end when they find their input closed.
"""

import contextlib
import os
import pathlib
import pickle
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import IO

from interlace.runtime.compiler.request import Compilation, Measurement
from interlace.runtime.compiler.worker import COMPILING, ReenteredError

_PROGRAM = pathlib.Path(__file__).with_name("start.py")


def compile_all(
    requests: Sequence[Compilation],
    *,
    workers: int | None = None,
    on_result: Callable[[int, Measurement], None] = lambda index, measurement: None,
) -> list[Measurement]:
    """Compile and measure ``requests``; results in the same order.

    ``workers`` is one per core by default. ``on_result`` is called with the number of each request as it
    is done, in the caller's thread.
    """
    if os.environ.get(COMPILING):
        raise ReenteredError(
            "a file that is loaded for its kernel compiles kernels before it defines that one"
        )
    if not requests:
        return []
    count = min(len(requests), workers or os.cpu_count() or 1)
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    with contextlib.ExitStack() as leaving:
        started = [leaving.enter_context(contextlib.closing(_Worker())) for _ in range(count)]
        threads = leaving.enter_context(ThreadPoolExecutor(count, "compile"))
        for worker in started:
            leaving.callback(worker.kill)
            idle.put(worker)
        # before that: of a call that fails nothing more is begun
        leaving.callback(threads.shutdown, wait=False, cancel_futures=True)

        def compiled(request: Compilation) -> Measurement:
            worker = idle.get()
            try:
                return worker.compile(request)
            finally:
                idle.put(worker)

        futures = {threads.submit(compiled, each): index for index, each in enumerate(requests)}
        for future in as_completed(futures):
            on_result(futures[future], future.result())
    return [future.result() for future in futures]


class _Worker:
    """One compiling process, and after a crash the next one."""

    def __init__(self) -> None:
        self._killed = False
        self._start()

    def _start(self) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # outlives this function
        settings = {
            "TRITON_INTERPRET": "0",
            "TRITON_DISABLE_LINE_INFO": "0",
            "PYTHONPATH": paths,
            COMPILING: "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **settings},
        )
        if self._killed:
            self._process.kill()

    def compile(self, request: Compilation) -> Measurement:
        """The result; an error if the process has ended instead."""
        assert self._process.stdin and self._process.stdout
        said_before = os.fstat(self._errors.fileno()).st_size
        measurement: Measurement | None = None
        with contextlib.suppress(BrokenPipeError, EOFError, pickle.UnpicklingError):
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            measurement = pickle.load(self._process.stdout)
        if measurement is None:
            code = self._finish()
            last_words = " ".join(self._said(0).strip().splitlines()[-3:])
            self._errors.close()
            self._start()
            return Measurement(error=f"the compiler ended with code {code}: {last_words}")
        if measurement.error is None:
            return measurement
        said = [measurement.error, *_diagnostics(self._said(said_before))]
        return replace(measurement, error="; ".join(said))

    def kill(self) -> None:
        """End the process, whatever it does, and every later one. From any thread."""
        self._killed = True
        self._process.kill()

    def close(self) -> None:
        self._finish()
        self._errors.close()

    def _finish(self) -> int:
        """Wait until the process has ended, which it does without input; its exit code."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait()

    def _said(self, start: int) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size - start, start).decode(errors="replace")


def _diagnostics(said: str) -> list[str]:
    """The compiler's own complaints, of all that it prints: a pass that fails prints the module."""
    lines = [line.strip() for line in said.splitlines() if " error: " in line]
    return [line for line in lines if "Failures have been detected" not in line][:3]
