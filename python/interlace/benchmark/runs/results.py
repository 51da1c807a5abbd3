"""Rows of a table or of JSON from what was measured: every derived figure, in one place."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from interlace.benchmark.runs.measure import Measured, Sizes
from interlace.benchmark.timing import figures
from interlace.benchmark.timing.figures import Spread
from interlace.benchmark.timing.sizes import format_size
from interlace.benchmark.timing.subject import ALGORITHM, BASELINE, PART


@dataclass
class Row:
    """One candidate at one size. Figures are None where they mean nothing.

    ``microseconds``: per call. ``algbw``, ``busbw``: 10**9 bytes/s. ``tflops``: of one rank. ``speedup``:
    by baseline, how many times as fast. ``right``: None where nothing was checked; ``error``: the largest,
    as a multiple of what is allowed; ``said``: what a check or a run raised.
    """

    name: str
    role: str
    calls: int
    microseconds: Spread
    blocks: list[float]
    algbw: float | None
    busbw: float | None
    tflops: float | None
    overlap: float | None
    speedup: dict[str, float]
    right: bool | None
    error: float | None
    said: str
    rotated_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        facts = asdict(self)
        if self.error is not None and not math.isfinite(self.error):
            facts["error"] = None
        return facts


@dataclass
class Result:
    """One size: what was measured, row by row; or, with ``failed``, how a run of it ended wrong."""

    sizes: Sizes | None
    rows: list[Row]
    failed: str = ""

    @property
    def right(self) -> bool:
        return not self.failed and all(row.right is not False for row in self.rows)

    @property
    def heading(self) -> str:
        """What :attr:`label` consists of: "size", "m x n x k"."""
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
        """For JSON."""
        facts = {} if self.sizes is None else asdict(self.sizes)
        facts.pop("candidates", None)
        return {**facts, "failed": self.failed, "rows": [row.to_dict() for row in self.rows]}


def result(sizes: Sizes) -> Result:
    """All rows of one size."""
    medians = {each.name: Spread.of(each.microseconds).median for each in sizes.candidates}
    compared = [each.name for each in sizes.candidates if each.role == BASELINE]
    return Result(sizes, [_row(each, sizes, medians, compared) for each in sizes.candidates])


def _row(each: Measured, sizes: Sizes, medians: dict[str, float], compared: list[str]) -> Row:
    spread = Spread.of(each.microseconds)
    time = spread.median
    part = each.role == PART
    moves = each.name != sizes.matmul and sizes.nbytes > 0
    multiplies = each.name != sizes.communication and sizes.flops > 0
    algbw = figures.gigabytes_per_second(sizes.nbytes, time) if moves else None
    busbw = None if algbw is None or sizes.bus_factor is None else algbw * sizes.bus_factor
    overlap = None
    if (
        sizes.matmul is not None
        and sizes.communication is not None
        and sizes.world_size > 1
        and each.role == ALGORITHM
    ):
        overlap = figures.overlap(medians[sizes.matmul], medians[sizes.communication], time)
    return Row(
        each.name,
        each.role,
        each.calls,
        spread,
        each.microseconds,
        algbw,
        busbw,
        figures.teraflops(sizes.flops, time) if multiplies else None,
        overlap,
        {name: medians[name] / time for name in compared if name != each.name and not part},
        None if each.error is None else each.error <= 1,
        each.error,
        each.said,
        each.sets * each.set_bytes,
    )
