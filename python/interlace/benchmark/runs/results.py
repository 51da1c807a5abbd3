"""Rows of a table or of JSON from what was measured: every derived figure, in one place."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from interlace.benchmark.timing import figures
from interlace.benchmark.timing.figures import Spread
from interlace.benchmark.timing.sizes import format_size
from interlace.benchmark.timing.subject import ALGORITHM, BASELINE, PART, Facts


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
