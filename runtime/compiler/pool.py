"""Compile kernels in worker processes, from a process that may interpret them.

In a process that interprets kernels, ``@triton.jit`` has already made interpreted functions of them, so
others compile: one per core, each without ``TRITON_INTERPRET``. A compiler that crashes takes its worker
along; the kernel is reported and the next worker goes on. Workers end with the call, also when it
is interrupted; should this process be killed, they end when they find their input closed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import IO

from interlace.runtime.compiler.request import Measurement, Request, decode_measurement, encode
from interlace.runtime.compiler.worker import COMPILING, ReenteredError

_PROGRAM = pathlib.Path(__file__).with_name("start.py")


def compile_all(
    requests: Sequence[Request],
    *,
    workers: int | None = None,
    on_result: Callable[[int, Measurement], None] = lambda index, measurement: None,
) -> list[Measurement]:
    """Compile and measure ``requests``; results in the same order.

    ``workers`` is one per core by default. ``on_result`` is called with the number of each request as it
    is done, by one thread at a time.
    """
    if os.environ.get(COMPILING):
        raise ReenteredError(
            "a file that is loaded for its kernel compiles kernels before it defines that one"
        )
    pool = _Pool(requests, on_result)
    count = min(len(requests), workers or os.cpu_count() or 1)
    threads = [threading.Thread(target=pool.work, name=f"compile {i}") for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        pool.stop()
        for thread in threads:
            thread.join()
        raise
    if pool.failure is not None:
        raise pool.failure
    return [pool.results[index] for index in range(len(requests))]


class _Pool:
    """The requests of one call, and what is known of them."""

    def __init__(
        self, requests: Sequence[Request], on_result: Callable[[int, Measurement], None]
    ) -> None:
        self.results: dict[int, Measurement] = {}
        self.failure: BaseException | None = None
        self._requests, self._on_result = requests, on_result
        self._todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(requests)):
            self._todo.put(index)
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._stopped = False

    def work(self) -> None:
        """Take requests until there are none, or until the call is stopped."""
        worker: _Worker | None = None
        try:
            while not self._stopped:
                index = self._todo.get_nowait()
                worker = worker or self._new_worker()
                measurement = worker.compile(self._requests[index])
                if measurement is None:
                    measurement = Measurement(error=worker.last_words())
                    self._end(worker)
                    worker = None
                with self._lock:
                    self.results[index] = measurement
                    if not self._stopped:
                        self._on_result(index, measurement)
        except queue.Empty:
            pass
        except BaseException as error:
            self.failure = error
            self.stop()
        finally:
            if worker:
                self._end(worker)

    def stop(self) -> None:
        """End all workers, whatever they do."""
        self._stopped = True
        with self._lock:
            for worker in self._workers:
                worker.kill()

    def _new_worker(self) -> _Worker:
        with self._lock:
            worker = _Worker()
            self._workers.add(worker)
            if self._stopped:
                worker.kill()
            return worker

    def _end(self, worker: _Worker) -> None:
        worker.close()
        with self._lock:
            self._workers.discard(worker)


class _Worker:
    """One compiling process."""

    def __init__(self) -> None:
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
            text=True,
            env={**os.environ, **settings},
        )

    def compile(self, request: Request) -> Measurement | None:
        """The result, or None if the process has ended instead."""
        assert self._process.stdin and self._process.stdout
        said_before = os.fstat(self._errors.fileno()).st_size
        try:
            self._process.stdin.write(encode(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._process.stdout.readline()
        if not line:
            return None
        measurement = decode_measurement(line)
        if measurement.error is None:
            return measurement
        said = [measurement.error, *_diagnostics(self._said(said_before))]
        return replace(measurement, error="; ".join(said))

    def last_words(self) -> str:
        """How the process ended, with the end of what it wrote."""
        self._finish()
        said = self._said(0).strip().splitlines()
        return f"the compiler ended with code {self._process.returncode}: {' '.join(said[-3:])}"

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """Wait until the process has ended, which it does when it has done its work."""
        self._finish()
        self._errors.close()

    def _finish(self) -> None:
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _said(self, start: int) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size - start, start).decode(errors="replace")


def _diagnostics(said: str) -> list[str]:
    """The compiler's own complaints, of all that it prints: a pass that fails prints the module."""
    lines = [line.strip() for line in said.splitlines() if " error: " in line]
    return [line for line in lines if "Failures have been detected" not in line][:3]
