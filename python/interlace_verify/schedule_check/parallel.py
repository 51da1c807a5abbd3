"""Run one function for many seeds, or numbers of jobs, in parallel forked worker processes.

Workers are forked, so the function may be any callable, also a closure. A worker runs torch in one thread,
because OpenMP's threads do not survive a fork.

Each worker has its own pipe and shares no lock, so it can be killed at any point. A pool with queues, such
as concurrent.futures, waits forever if a worker is killed while it holds the lock. Only the parent handles
signals. If the parent itself is killed, the workers also end.

A worker never frees inherited objects. Garbage of the parent may own threads (a store, a process group).
Joining a thread that did not survive the fork would end the process.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from typing import Any

import torch

from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places import pool
from interlace.runtime.places.pool import TaskReport

CHUNKS_PER_WORKER = 8
LARGEST_CHUNK = 32


def map_seeds(
    function: Callable[[int], object],
    seeds: Sequence[int],
    *,
    workers: int | None = None,
    chunk: int = LARGEST_CHUNK,
    name: Callable[[int], str] = "seed {}".format,
    on_progress: Callable[[int], None] = lambda done: None,
    lost: Callable[[int, str], object] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield (seed, ``function(seed)``) in any order, from ``workers`` processes.

    The default is one process per core; 1 runs in this process. A worker takes up to ``chunk`` seeds at
    once. An exception of ``function`` is raised here. If a worker dies, the result of its seed is
    ``lost(seed, how it ended)``. Without ``lost`` an InterlaceError names the job by ``name``. With
    ``lost``, even one core forks a worker by default, so that a crash does not end this process.
    """
    count = len(os.sched_getaffinity(0)) if workers is None else workers
    count = min(count, len(seeds))
    if not count or (count == 1 and (workers == 1 or lost is None)):
        for done, seed in enumerate(seeds, 1):
            yield seed, function(seed)
            on_progress(done)
        return
    size = max(1, min(chunk, -(-len(seeds) // (count * CHUNKS_PER_WORKER))))
    chunks = deque(seeds[first : first + size] for first in range(0, len(seeds), size))
    with contextlib.ExitStack() as leaving:
        # all workers are killed, also if Ctrl-C comes at this point
        started = [
            leaving.enter_context(contextlib.closing(_ForkedWorker(function))) for _ in range(count)
        ]
        busy = {worker.connection: worker for worker in started if worker.take(chunks)}
        done = 0
        while busy:
            for ready in mp_connection.wait(list(busy)):
                worker = busy.pop(ready)  # type: ignore[call-overload]  # nothing else was waited for
                try:
                    results = worker.results(name)
                except _WorkerEnded as ended:
                    if lost is None:
                        raise
                    results, alone = [], worker.seeds
                    if len(alone) == 1:
                        results = [(alone[0], lost(alone[0], ended.how))]
                    else:  # run each seed by itself to find the one that failed
                        chunks.extendleft([seed] for seed in reversed(alone))
                    worker = leaving.enter_context(contextlib.closing(_ForkedWorker(function)))
                if worker.take(chunks):
                    busy[worker.connection] = worker
                yield from results
                done += len(results)
                on_progress(done)


class _WorkerEnded(InterlaceError):
    def __init__(self, names: str, reason: str) -> None:
        self.how = reason
        super().__init__(f"{names}: {reason}")


class _ForkedWorker:
    """A forked process that calls ``function``, and this process's end of the pipe to it."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.seeds: Sequence[int] = ()
        self.connection, theirs = context.Pipe()
        # the child unblocks the signals after it has replaced the parent's handlers
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        collects = gc.isenabled()
        gc.disable()  # in the child, until its inherited objects are frozen
        try:
            stays = threading.current_thread() is threading.main_thread()
            arguments = function, theirs, self.connection, stays, mask
            self._process = context.Process(target=_serve, args=arguments)
            self._process.start()
        finally:
            if collects:
                gc.enable()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()

    def take(self, chunks: deque[Sequence[int]]) -> bool:
        """Start the next of ``chunks``; return whether there was one."""
        if not chunks:
            return False
        self.seeds = chunks.popleft()
        with contextlib.suppress(OSError):  # it has ended, which ``results`` finds
            self.connection.send(self.seeds)
        return True

    def results(self, name: Callable[[int], str]) -> list[tuple[int, Any]]:
        """Return the results of its seeds when it has answered. Raise the function's exception."""
        try:
            report: TaskReport = self.connection.recv()
        except (EOFError, OSError):
            names = " to ".join(dict.fromkeys(map(name, (self.seeds[0], self.seeds[-1]))))
            raise _WorkerEnded(names, pool.ended(self._process)) from None
        if report.failed:
            raise report.exception() from InterlaceError(report.details)
        results: list[tuple[int, object]] = report.result()
        return results

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(
    function: Callable[[int], object],
    connection: Connection,
    parents: Connection,
    parent_thread_stays: bool,
    mask: set[signal.Signals],
) -> None:
    """Run a worker: send a report for every chunk that arrives."""
    gc.freeze()
    gc.enable()
    parents.close()  # otherwise the pipe never counts as closed
    pool.end_with_parent(parent_thread_stays)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the parent's handler
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            seeds: Sequence[int] = connection.recv()
            try:
                report = pool.success([(seed, function(seed)) for seed in seeds])
            except BaseException as error:
                report = pool.failure(error)
            connection.send(report)
