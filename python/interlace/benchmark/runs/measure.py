"""Measurement of one size on one rank: make the subject, check every candidate, take times, check again."""

import itertools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from interlace.benchmark.runs.results import BenchRow, MeasuredSize
from interlace.benchmark.subjects.baselines import joined
from interlace.benchmark.subjects.requests import BenchRequest, source
from interlace.benchmark.timing import kernel, protocol
from interlace.benchmark.timing.caches import cache_bytes, sets_needed
from interlace.benchmark.timing.figures import Spread
from interlace.benchmark.timing.subject import BenchCandidate, Facts, Subject
from interlace.groups import groups
from interlace.runtime.core.place import Place

Tick = Callable[[int, int], None]


def rank_0(tick: Tick) -> Tick:
    """``tick`` on rank 0; on the others, which show no progress, nothing."""
    return tick if groups.default_group().rank == 0 else lambda done, total: None


def measure(request: BenchRequest, tick: Tick) -> MeasuredSize:
    """Measure one size. Collective; the same on every rank. ``tick(done, total)`` is for progress."""
    place = groups.default_group().place
    found = source(request, place)
    with joined(found.backend, request.store, place.rank, place.world_size):
        subject = found.make()
        rows = _measure(subject, request, place, rank_0(tick))
    sizes = MeasuredSize(
        **{each.name: getattr(subject, each.name) for each in fields(Facts)},
        place=place.name,
        device=place.device.type,
        world_size=place.world_size,
        dtype=request.dtype,
        cache_bytes=cache_bytes(place.device),
        left_out=found.left_out,
        rows=rows,
    )
    sizes.compare()
    return sizes


def _measure(subject: Subject, request: BenchRequest, place: Place, tick: Tick) -> list[BenchRow]:
    candidates = subject.candidates
    total = len(candidates) * (request.repetitions + 2)
    done = itertools.count()

    def step() -> None:
        tick(next(done), total)

    step()
    errors: dict[str, tuple[float | None, str]] = {}

    def check_all(number: int) -> None:
        for each in candidates:
            error, said = errors.get(each.name, (None, ""))
            now, now_said = _checked(each, number, virtual=request.virtual)
            if now is not None:
                errors[each.name] = (max(now, error or 0.0), said or now_said)
            step()

    check_all(0)
    rotations: dict[Any, protocol.Rotation] = {}
    rotated_bytes, functions = {}, {}
    for each in candidates:
        make = each.timed_inputs or each.inputs
        if make not in rotations:
            first = make(0)
            count, set_bytes = sets_of(first, place)
            count = min(count, each.most_sets)
            further = protocol.copies_of(first, count) if each.copied else None
            sets = further or [first, *map(make, range(1, count))]
            rotations[make], rotated_bytes[make] = protocol.Rotation(sets), count * set_bytes
        functions[each.name] = rotations[make].calling(each.run)
    timings = protocol.alternate(functions, request.repetitions, virtual=request.virtual, tick=step)
    functions.clear()  # which have the inputs
    rotations.clear()
    check_all(1)
    return [
        BenchRow(
            each.name,
            each.role,
            timings[each.name].calls,
            Spread.of(timings[each.name].microseconds),
            timings[each.name].microseconds,
            *errors.get(each.name, (None, "")),
            rotated_bytes[each.timed_inputs or each.inputs],
        )
        for each in candidates
    ]


def sets_of(first: tuple[Any, ...], place: Place) -> tuple[int, int]:
    """The number of sets of inputs like ``first`` that get past the cache, and one's bytes. Collective."""
    # the largest, for it has to be the same number on every rank: making inputs may be collective
    set_bytes = int(protocol.slowest(protocol.total_bytes(first)))
    count = 1 if place.simulated else sets_needed(set_bytes, cache_bytes(place.device))
    return count, set_bytes


def _checked(each: BenchCandidate, number: int, *, virtual: bool) -> tuple[float | None, str]:
    """Run once, and compare on all ranks: (largest error, what a check said). Collective."""
    result = each.run(*each.inputs(number))
    protocol.finish(virtual=virtual)
    if each.check is None:
        return None, ""
    mine = kernel.verdict(each.check, result, number)
    verdicts = protocol.everyones(mine)
    worst = max(range(len(verdicts)), key=lambda rank: verdicts[rank][0])
    error, said = verdicts[worst]
    return error, f"rank {worst}: {said}" if said else ""
