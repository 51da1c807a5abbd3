"""Measurement of one size on one rank, and the rows of a table or of JSON that it makes.

The subject is made, every candidate checked, timed, and checked again.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from interlace.benchmark import figures, kernel, protocol
from interlace.benchmark.baselines import joined
from interlace.benchmark.figures import Spread, format_size
from interlace.benchmark.kernel import (
    ALGORITHM,
    BASELINE,
    PART,
    BenchCandidate,
    Facts,
    Subject,
)
from interlace.benchmark.protocol import cache_bytes, sets_needed
from interlace.benchmark.requests import BenchRequest, source
from interlace.groups import groups
from interlace.runtime.core.place import Place


@dataclass
class BenchRow:
    """One candidate at one size. Figures are None where they mean nothing.

    ``microseconds``: per call, of ``calls`` in a block. ``error``: the largest of all ranks, as a multiple
    of what is allowed; None where nothing was checked. ``said``: what a check raised. ``algbw``, ``busbw``:
    10**9 bytes/s. ``tflops``: of one rank. ``speedup``: by baseline, how many times as fast.
    """

    name: str
    role: str
    calls: int
    microseconds: Spread
    blocks: list[float]
    error: float | None
    said: str
    rotated_bytes: int
    algbw: float | None = None
    busbw: float | None = None
    tflops: float | None = None
    overlap: float | None = None
    speedup: dict[str, float] = field(default_factory=dict)

    @property
    def right(self) -> bool | None:
        """None where nothing was checked."""
        return None if self.error is None else self.error <= 1

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        finite = self.error is not None and math.isfinite(self.error)
        error = self.error if finite else None
        return {**asdict(self), "error": error, "right": self.right}


@dataclass(kw_only=True)
class MeasuredSize(Facts):
    """All of one size; ``cache_bytes``: of the cache that inputs are rotated past."""

    place: str
    device: str
    world_size: int
    dtype: str
    cache_bytes: int
    left_out: list[str]
    rows: list[BenchRow]

    def compare(self) -> None:
        medians = {row.name: row.microseconds.median for row in self.rows}
        compared = [row.name for row in self.rows if row.role == BASELINE]
        for row in self.rows:
            time = row.microseconds.median
            if self.nbytes and row.name != self.matmul:
                row.algbw = self.nbytes / time / 1e3
                row.busbw = None if self.bus_factor is None else row.algbw * self.bus_factor
            if self.flops and row.name != self.communication:
                row.tflops = self.flops / time / 1e6
            if self.matmul and self.communication and self.world_size > 1 and row.role == ALGORITHM:
                parts = medians[self.matmul], medians[self.communication]
                row.overlap = figures.overlap(*parts, time)
            if row.role != PART:
                row.speedup = {name: medians[name] / time for name in compared if name != row.name}


@dataclass
class SizeResult:
    """One size: what was measured; or, with ``failed``, how a run of it ended wrong."""

    sizes: MeasuredSize | None
    failed: str = ""

    @property
    def rows(self) -> list[BenchRow]:
        return [] if self.sizes is None else self.sizes.rows

    @property
    def right(self) -> bool:
        return not self.failed and all(row.right is not False for row in self.rows)

    @property
    def heading(self) -> str:
        """The parts of :attr:`label`, as a column's heading: "size", "m x n x k"."""
        names = [] if self.sizes is None else [name for name in self.sizes.shape if name != "bytes"]
        return " x ".join(names) or "size"

    @property
    def label(self) -> str:
        """The shape, for tables: "64 KiB", "1024 x 512 x 512"."""
        if self.sizes is None:
            return "-"
        shape = dict(self.sizes.shape)
        nbytes = shape.pop("bytes", 0)
        parts = [" x ".join(str(value) for value in shape.values())] if shape else []
        return "; ".join(([format_size(nbytes)] if nbytes else []) + parts) or "-"

    def to_dict(self) -> dict[str, Any]:
        facts = {} if self.sizes is None else asdict(self.sizes)
        return {**facts, "failed": self.failed, "rows": [row.to_dict() for row in self.rows]}


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
