"""The processes that run schedules: what they raise, how they end, and what is lost with one."""

import gc
import multiprocessing.connection
import os
import signal
from typing import Any

import pytest

from interlace.runtime.core.errors import InterlaceError
from interlace.verify import schedules
from interlace_verify.schedule_check import parallel


def test_an_exception_in_a_worker_is_raised_here() -> None:
    def fails(seed: int) -> int:
        raise KeyError(seed)

    with pytest.raises(KeyError):
        list(parallel.map_seeds(fails, range(8), workers=2))


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_workers_end_when_one_is_interrupted(workers: int) -> None:
    """Though the caller's own handler of SIGTERM, as the command line has one, would survive that."""

    def interrupted(seed: int) -> None:
        if seed:
            signal.pause()
        raise KeyboardInterrupt

    children = set(multiprocessing.active_children())  # of other tests
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(parallel.map_seeds(interrupted, range(8), workers=workers))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert set(multiprocessing.active_children()) <= children


def test_a_worker_that_ends_is_named_with_what_it_ran() -> None:
    numbers = iter(parallel.map_seeds(os._exit, [7, 8], workers=2, name="job {}".format))
    with pytest.raises(InterlaceError, match=r"job [78]: its process ended with exit code [78]$"):
        list(numbers)


def test_a_worker_does_not_free_what_it_inherited() -> None:
    """The end of a store, for one, joins a thread; the worker has none of its parent's."""
    parent = os.getpid()

    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            if os.getpid() != parent:
                os._exit(9)

    def collects(seed: int) -> int:
        gc.collect()
        return seed

    Garbage()
    assert dict(parallel.map_seeds(collects, range(8), workers=2)) == {i: i for i in range(8)}
    assert gc.isenabled()


def test_what_is_lost_with_a_worker_is_one_seed() -> None:
    def run(seed: int) -> int:
        return os._exit(9) if seed == 5 else seed

    progress: list[int] = []
    ways = {"lost": lambda seed, how: how, "on_progress": progress.append}
    found = dict(parallel.map_seeds(run, range(40), workers=2, **ways))
    assert found.pop(5) == "its process ended with exit code 9"
    assert found == {seed: seed for seed in range(40) if seed != 5} and progress[-1] == 40


def test_schedules_whose_process_ends_are_not_checked() -> None:
    here = os.getpid()
    report = schedules(lambda: os.getpid() == here or os._exit(9), 1, n=4, workers=2)
    assert report.refused == (1, 2, 3) and not report.failing and not report.clean
    assert "its process ended with exit code 9" in str(report)


def test_a_worker_that_nobody_uses_ends() -> None:
    """As one does if Ctrl-C comes before it is known to whoever would kill it."""
    worker = parallel._ForkedWorker(abs)
    worker.connection.close()
    multiprocessing.connection.wait([worker._process.sentinel])
    worker.close()


def _busy_parents(writing: Any) -> None:
    def busy(seed: int) -> None:
        writing.send(os.getpid())
        signal.pause()

    list(parallel.map_seeds(busy, range(3), workers=3))


def test_workers_end_with_their_parent() -> None:
    """Which is killed, while they run what takes forever. It is no fork of a process with threads."""
    reading, writing = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("forkserver")
    parent = context.Process(target=_busy_parents, args=(writing,))
    parent.start()
    writing.close()
    workers = [os.pidfd_open(reading.recv()) for _ in range(3)]
    parent.kill()
    parent.join()
    for worker in workers:
        multiprocessing.connection.wait([worker])
        os.close(worker)
    reading.close()
