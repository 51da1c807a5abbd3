"""Seeds, or numbers of jobs, in parallel: forked worker processes that run one function on each.

Forked, so that the function may be anything, a closure too. A child runs torch in one thread: OpenMP's
threads do not survive a fork. The children inherit what they need and send back small results only.
"""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

CHUNKS_PER_WORKER = 8
LARGEST_CHUNK = 32

_function: Callable[[int], Any] | None = None


def map_seeds(
    function: Callable[[int], Any],
    seeds: Sequence[int],
    *,
    workers: int | None = None,
    chunk: int = LARGEST_CHUNK,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Iterator[tuple[int, Any]]:
    """(seed, ``function(seed)``) in any order, by so many processes (default: one per core; 1 runs here).

    A worker takes up to ``chunk`` seeds at once. An exception of ``function`` is raised here.
    """
    global _function
    count = len(os.sched_getaffinity(0)) if workers is None else workers
    count = min(count, len(seeds))
    if count <= 1:
        for done, seed in enumerate(seeds, 1):
            yield seed, function(seed)
            on_progress(done)
        return
    size = max(1, min(chunk, -(-len(seeds) // (count * CHUNKS_PER_WORKER))))
    chunks = [seeds[first : first + size] for first in range(0, len(seeds), size)]
    _function = function
    context = multiprocessing.get_context("fork")
    pool = concurrent.futures.ProcessPoolExecutor(count, context, torch.set_num_threads, (1,))
    try:
        done = 0
        for future in concurrent.futures.as_completed([pool.submit(_run, c) for c in chunks]):
            results = future.result()
            yield from results
            done += len(results)
            on_progress(done)
    except BaseException:
        for process in list((pool._processes or {}).values()):  # at once, not after their chunk
            process.terminate()
        raise
    finally:
        _function = None
        pool.shutdown(cancel_futures=True)


def _run(seeds: Sequence[int]) -> list[tuple[int, Any]]:
    assert _function is not None
    return [(seed, _function(seed)) for seed in seeds]
