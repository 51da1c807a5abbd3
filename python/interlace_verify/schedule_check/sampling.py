"""Seeds, poisoned memory, collections, arguments: what the checks that run schedules have in common."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from interlace.runtime.places.sim.scheduler.source_lines import with_lines

MOST_SEEDS = 1_000_000  # some days
NEW_OBJECTS = 50_000  # more than a small schedule makes


def seed_list(seeds: int | Iterable[int]) -> list[int]:
    """``range(seeds)`` or the seeds themselves. Raises TypeError or ValueError for anything else."""
    if isinstance(seeds, bool) or not isinstance(seeds, (int, Iterable)):
        raise TypeError(f"seeds must be a number of schedules or seeds, got {seeds!r}")
    named = range(seeds) if isinstance(seeds, int) else seeds
    chosen = list(itertools.islice(named, MOST_SEEDS + 1))
    if len(chosen) > MOST_SEEDS:
        raise ValueError(f"at most {MOST_SEEDS:,} schedules can be asked for, got more seeds")
    for seed in chosen:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seeds must be ints, got {seed!r}")
    if not chosen:
        raise ValueError(f"seeds must name at least one schedule, got {seeds!r}")
    return chosen


def refused(error: BaseException | None) -> str | None:
    """What the simulator cannot run, if that ended a schedule, which is then not checked."""
    return with_lines(error) if isinstance(error, NotImplementedError) else None


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Tensors that are not initialized hold nan, or the largest number, instead of what was there.

    That may be the right result of the schedule before, which would hide a wrong one. It is torch's own
    ``torch.utils.deterministic.fill_uninitialized_memory``, which is on unless somebody turns it off. The
    switch is set as ``torch.use_deterministic_algorithms`` does, which would import torch's compiler to
    tell it too: two seconds in every process that runs schedules.
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
    """Python looks for garbage now and then, and not twice in each schedule.

    Of a schedule of 12 ms that took 0.6 to 1.1.
    """
    before = gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
