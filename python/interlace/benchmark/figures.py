"""Sizes as they are written on a command line, and figures computed from a time.

Bandwidths are defined like in nccl-tests (its doc/PERFORMANCE.md and ``GetBw`` in each of its tests)::

    algbw = S / t        S: bytes of the op's largest buffer on a rank, t: time of one call
    busbw = algbw * f    the least that each rank's link carries, whatever the algorithm

``docs/how-to/gpu/bench.md`` and :func:`bus_factor` have S and f of each op.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

_WHOLE = ("broadcast", "reduce", "send_recv")


def bus_factor(op: str, world_size: int) -> float:
    """Return f of an op: 1, or the share (W - 1) / W of W ranks, twice for an all-reduce."""
    if op == "barrier":
        raise ValueError("op must move data, which a bandwidth can be computed from; got 'barrier'")
    if op in _WHOLE:
        return 1.0
    return (2 if op.endswith("all_reduce") else 1) * (world_size - 1) / world_size


def overlap(matmul: float, communication: float, fused: float) -> float | None:
    """Return ``(T_mm + T_comm - T_fused) / min(T_mm, T_comm)``: 1 if the shorter part is hidden entirely.

    0 if they run one after another, less if fusing costs more than it hides. None if a part takes no time.

    >>> overlap(100.0, 40.0, 100.0), overlap(100.0, 40.0, 140.0), overlap(100.0, 40.0, 120.0)
    (1.0, 0.0, 0.5)
    """
    shorter = min(matmul, communication)
    return (matmul + communication - fused) / shorter if shorter > 0 else None


@dataclass(frozen=True)
class Spread:
    """The median of blocks, and their spread; microseconds per call."""

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
        if len(values) < 2:
            low = high = values[0]
        else:
            low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high, min(values), max(values))


UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST = 1000
_NUMBER = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str, where: str = "size") -> int:
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{where}: {text!r} is not a size; write 100, 64K, 1M or 1G")
    size = int(found[1]) * UNITS[found[2].upper()]
    if size < 1:
        raise ValueError(f"{where}: must be positive, got {text!r}")
    return size


def parse_sizes(text: str, where: str = "--sizes") -> list[int]:
    """Return all sizes of a list of sizes or ranges; a range includes its last size if the steps reach it.

    >>> parse_sizes("1K:20K:x4")
    [1024, 4096, 16384]
    >>> parse_sizes("100,1K:3K:+1K")
    [100, 1024, 2048, 3072]
    """
    sizes: list[int] = []
    for entry in text.split(","):
        parts = entry.split(":")
        if len(parts) == 1:
            sizes.append(parse_size(entry, where))
        elif len(parts) == 3:
            sizes += _range(entry, parts, where)
        else:
            raise ValueError(
                f"{where}: {entry!r} must be a size or first:last:step, as 1K:1G:x4 or 1M:4M:+1M"
            )
        if len(sizes) > MOST:
            raise ValueError(f"{where}: {text!r} has more than {MOST} sizes")
    return list(dict.fromkeys(sizes))


def _range(entry: str, parts: list[str], where: str) -> list[int]:
    first, last = parse_size(parts[0], where), parse_size(parts[1], where)
    step = parts[2].strip()
    if first > last:
        raise ValueError(f"{where}: {entry!r} begins with {first}, which is more than {last}")
    if step[:1] not in ("x", "+"):
        raise ValueError(f"{where}: the step of {entry!r} must be like x4 or +1M, got {step!r}")
    by = parse_size(step[1:], where)
    if step[0] == "x" and by < 2:
        raise ValueError(f"{where}: the factor of {entry!r} must be at least 2, got {by}")
    sizes = [first]
    while len(sizes) <= MOST:
        following = sizes[-1] * by if step[0] == "x" else sizes[-1] + by
        if following > last:
            break
        sizes.append(following)
    return sizes


def format_size(nbytes: int) -> str:
    """Return the shortest exact text for a size.

    >>> format_size(65536), format_size(1536), format_size(1000)
    ('64 KiB', '1.5 KiB', '1000 B')
    """
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale and nbytes % (scale // 4) == 0:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"
