"""Seeds, poisoned memory, garbage collection and arguments: shared parts of checks that run schedules."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from interlace.runtime.places.sim.scheduler.source_lines import with_lines

MOST_SEEDS = 1_000_000  # these take days
NEW_OBJECTS = 50_000  # more than a small schedule creates


def seed_list(seeds: int | Iterable[int]) -> list[int]:
    """Return ``range(seeds)`` or the given seeds. Raise TypeError or ValueError for anything else."""
    if isinstance(seeds, bool) or not isinstance(seeds, (int, Iterable)):
        raise TypeError(f"seeds must be a number of schedules or seeds, got {seeds!r}")
    named = range(seeds) if isinstance(seeds, int) else seeds
    chosen = list(itertools.islice(named, MOST_SEEDS + 1))
    if len(chosen) > MOST_SEEDS:
        raise ValueError(f"seeds: at most {MOST_SEEDS:,} schedules are allowed, got more seeds")
    for seed in chosen:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seeds must be ints, got {seed!r}")
    if not chosen:
        raise ValueError(f"seeds must name at least one schedule, got {seeds!r}")
    return chosen


def refused(error: BaseException | None) -> str | None:
    """Return what the simulator cannot run, if this ended a schedule, which then counts as not checked."""
    return with_lines(error) if isinstance(error, NotImplementedError) else None


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised tensors with nan, or the largest number.

    The old contents may be the right result of the previous schedule, which would hide a wrong one. This is
    torch's own ``torch.utils.deterministic.fill_uninitialized_memory``, which is on by default. The switch
    is set as ``torch.use_deterministic_algorithms`` sets it. That function itself would import torch's
    compiler as well: two seconds in every process that runs schedules.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        try:
            torch._C._set_deterministic_algorithms(True, warn_only=True)
            yield
        finally:
            torch._C._set_deterministic_algorithms(before, warn_only=warns)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Run the garbage collector less often than twice in each schedule.

    Its share of a schedule of 12 ms was 0.6 to 1.1 ms.
    """
    before = gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
