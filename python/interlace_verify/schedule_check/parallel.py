"""Seeds, or numbers of jobs, in parallel: forked worker processes that run one function on each.

Forked, so that the function may be anything, a closure too. A child runs torch in one thread: OpenMP's
threads do not survive a fork. The children inherit what they need and send back small results only.

Each worker has a pipe of its own and shares no lock, so it can be killed whatever it does: a pool with
queues, as concurrent.futures has it, waits forever if a worker is killed that holds one's lock. Signals
are the parent's: it kills the workers when it is interrupted. Should it be killed itself, they end, too.

A worker never frees what it inherited: garbage of the parent's may own threads (a store, a process group),
and to join one that did not survive the fork ends the process.
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
from interlace.runtime.places import worker_process
from interlace.runtime.places.worker_process import TaskReport

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
    """(seed, ``function(seed)``) in any order, by so many processes (default: one per core; 1 runs here).

    A worker takes up to ``chunk`` seeds at once. An exception of ``function`` is raised here. If a worker
    ends, the result of the seed with which it does is that of ``lost``, given how it ended; without
    ``lost`` it is an InterlaceError with the ``name`` of what it was about to run. By default, one core
    forks a worker if there is ``lost``: nothing that ends a worker ends this process.
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
        # all are killed, also if Ctrl-C comes meanwhile
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
                    else:  # which of them it was shows when each is run by itself
                        chunks.extendleft([seed] for seed in reversed(alone))
                    worker = leaving.enter_context(contextlib.closing(_ForkedWorker(function)))
                if worker.take(chunks):
                    busy[worker.connection] = worker
                yield from results
                done += len(results)
                on_progress(done)


class _WorkerEnded(InterlaceError):
    def __init__(self, names: str, how: str) -> None:
        self.how = how
        super().__init__(f"{names}: {how}")


class _ForkedWorker:
    """A forked process that calls ``function``, and this process's end of the pipe to it."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.seeds: Sequence[int] = ()
        self.connection, theirs = context.Pipe()
        # the child lets them through when they do not go to the parent's handlers any more
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        collects = gc.isenabled()
        gc.disable()  # in the child, until what it inherited is frozen
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
        """Begin with the next of ``chunks``; whether there is one."""
        if not chunks:
            return False
        self.seeds = chunks.popleft()
        with contextlib.suppress(OSError):  # it has ended, which is found when it should answer
            self.connection.send(self.seeds)
        return True

    def results(self, name: Callable[[int], str]) -> list[tuple[int, Any]]:
        """Of the seeds that it took, when it has answered. Raises what the function raised."""
        try:
            report: TaskReport = self.connection.recv()
        except (EOFError, OSError):
            names = " to ".join(dict.fromkeys(map(name, (self.seeds[0], self.seeds[-1]))))
            raise _WorkerEnded(names, worker_process.ended(self._process)) from None
        if report.failed:
            raise report.exception() from InterlaceError(report.details)
        results: list[tuple[int, object]] = report.result()
        return results

    def close(self) -> None:
        """Kill it, whatever it does."""
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
    """The life of a worker: a report for every chunk that it is sent."""
    gc.freeze()
    gc.enable()
    parents.close()  # or the pipe would never seem closed
    worker_process.end_with_parent(parent_thread_stays)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent sees to it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the parent does
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            seeds: Sequence[int] = connection.recv()
            try:
                report = worker_process.success([(seed, function(seed)) for seed in seeds])
            except BaseException as error:
                report = worker_process.failure(error)
            connection.send(report)
