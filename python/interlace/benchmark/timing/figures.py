"""Figures computed from a time: bandwidths, arithmetic, overlap, spread.

Bandwidths are those of nccl-tests (its doc/PERFORMANCE.md and the ``GetBw`` of each of its tests)::

    algbw = S / t        S: bytes of the op's largest buffer on a rank, t: time of one call
    busbw = algbw * f    what each rank's link carries at least, whatever the algorithm

    op, of W ranks                                           S                           f
    all_reduce, matmul_all_reduce                            the tensor                  2 (W - 1) / W
    all_gather, all_gather_matmul                            the gathered tensor         (W - 1) / W
    reduce_scatter, matmul_reduce_scatter                    what is scattered           (W - 1) / W
    all_to_all                                               what a rank sends           (W - 1) / W
    gather, scatter                                          the root's whole            (W - 1) / W
    broadcast, reduce                                        the tensor                  1
    send_recv                                                what a rank sends           1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

_WHOLE = ("broadcast", "reduce", "send_recv")


def bus_factor(op: str, world_size: int) -> float:
    """``f`` of the table."""
    if op == "barrier":
        raise ValueError(f"{op} moves no data that a bandwidth could be taken of")
    if op in _WHOLE:
        return 1.0
    return (2 if op.endswith("all_reduce") else 1) * (world_size - 1) / world_size


def overlap(matmul: float, communication: float, fused: float) -> float | None:
    """``(T_mm + T_comm - T_fused) / min(T_mm, T_comm)``: 1 if the shorter part is hidden entirely.

    0 if they run one after another, less if fusing costs more than it hides. None if a part takes no time.

    >>> overlap(100.0, 40.0, 100.0), overlap(100.0, 40.0, 140.0), overlap(100.0, 40.0, 120.0)
    (1.0, 0.0, 0.5)
    """
    shorter = min(matmul, communication)
    return (matmul + communication - fused) / shorter if shorter > 0 else None


@dataclass(frozen=True)
class Spread:
    """A median of blocks, and how far apart they lie; microseconds per call."""

    median: float
    low: float
    high: float
    least: float
    most: float

    @property
    def relative(self) -> float:
        """Half of the distance between the quartiles, as a share of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Median, quartiles, extremes."""
        if len(values) < 2:
            low = high = values[0]
        else:
            low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high, min(values), max(values))
