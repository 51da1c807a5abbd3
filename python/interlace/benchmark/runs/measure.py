"""What one rank does for one size: make the subject, check every candidate, take times, check again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from interlace.benchmark.subjects.baselines import Joined
from interlace.benchmark.subjects.requests import Request, source
from interlace.benchmark.timing import kernel, protocol
from interlace.benchmark.timing.caches import cache_bytes, sets_needed
from interlace.benchmark.timing.subject import Candidate, Subject
from interlace.groups import groups
from interlace.runtime.core.place import Place

Tick = Callable[[int, int], None]


@dataclass
class Measured:
    """One candidate at one size. ``error``: largest of all ranks, as a multiple of what is allowed.

    ``error`` None: not checked. ``said``: what a check raised. ``sets``: of inputs, used in turn.
    """

    name: str
    role: str
    calls: int
    microseconds: list[float]
    error: float | None
    said: str
    sets: int
    set_bytes: int


@dataclass
class Sizes:
    """All of one size; ``cache_bytes``: of the cache that inputs are rotated past."""

    op: str
    shape: dict[str, int]
    place: str
    device: str
    world_size: int
    dtype: str
    nbytes: int
    bus_factor: float | None
    flops: float
    matmul: str | None
    communication: str | None
    cache_bytes: int
    left_out: list[str]
    candidates: list[Measured]


def measure(request: Request, tick: Tick) -> Sizes:
    """Measure one size. Collective; the same on every rank. ``tick(done, total)`` is for progress."""
    place = groups.default_group().place
    found = source(request, place)
    with Joined(found.backend, request.store, place.rank, place.world_size):
        subject = found.make()
        measured = _measure(subject, request, place, tick)
    return Sizes(
        subject.op,
        subject.shape,
        place.name,
        place.device.type,
        place.world_size,
        request.dtype,
        subject.nbytes,
        subject.bus_factor,
        subject.flops,
        subject.matmul,
        subject.communication,
        cache_bytes(place.device),
        found.left_out,
        measured,
    )


def _measure(subject: Subject, request: Request, place: Place, tick: Tick) -> list[Measured]:
    candidates = subject.candidates
    total = len(candidates) * (request.repetitions + 2)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        tick(done, total)

    tick(0, total)
    errors: dict[str, tuple[float | None, str]] = {}

    def check_all(number: int) -> None:
        for each in candidates:
            error, said = errors.get(each.name, (None, ""))
            now, now_said = _checked(each, number, virtual=request.virtual)
            if now is not None:
                errors[each.name] = (max(now, error or 0.0), said or now_said)
            step()

    check_all(0)
    rotations: dict[Any, tuple[protocol.Rotation, int]] = {}
    for each in candidates:
        make = each.timed_inputs or each.inputs
        if make not in rotations:
            rotations[make] = _rotation(each, make, place)
    functions = {
        each.name: rotations[each.timed_inputs or each.inputs][0].calling(each.run)
        for each in candidates
    }
    timings = protocol.alternate(functions, request.repetitions, virtual=request.virtual, tick=step)
    used = {make: (len(sets), set_bytes) for make, (sets, set_bytes) in rotations.items()}
    functions.clear()
    rotations.clear()
    check_all(1)
    return [
        Measured(
            each.name,
            each.role,
            timings[each.name].calls,
            timings[each.name].microseconds,
            *errors.get(each.name, (None, "")),
            *used[each.timed_inputs or each.inputs],
        )
        for each in candidates
    ]


def _rotation(
    each: Candidate, make: Callable[[int], tuple[Any, ...]], place: Place
) -> tuple[protocol.Rotation, int]:
    """Enough sets of inputs to get past the cache, and the bytes of one. Collective.

    One in the simulator, whose times do not depend on a cache.
    """
    first = make(0)
    # the largest, for it has to be the same number on every rank: making inputs may be collective
    set_bytes = int(protocol.slowest(protocol.total_bytes(first)))
    count = min(sets_needed(set_bytes, cache_bytes(place.device)), each.most_sets)
    count = 1 if place.name == "sim" else count
    if each.copied:
        return protocol.Rotation(protocol.copies_of(first, count)), set_bytes
    return protocol.Rotation([first, *map(make, range(1, count))]), set_bytes


def _checked(each: Candidate, number: int, *, virtual: bool) -> tuple[float | None, str]:
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
