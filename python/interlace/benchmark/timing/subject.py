"""The subject of a measurement on one rank: an op or a kernel at one size, and its candidates."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ALGORITHM, BASELINE, PART = "algorithm", "baseline", "part"


@dataclass
class BenchCandidate:
    """One way to do it.

    ``run(*inputs(number))`` is a call, whose result ``check(result, number)`` judges as in
    :class:`interlace.benchmark.Kernel`; None is not checked. ``timed_inputs`` are the sets of inputs that
    are used in turn while time is taken, at most ``most_sets``; ``inputs`` if None. ``copied``: further
    sets are copies of the first, which is quicker than making them. ``role``: "algorithm" for what the
    measurement is about, "baseline", "part" for the matmul or the communication alone.
    """

    name: str
    role: str
    run: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...]]
    check: Callable[[Any, int], Any] | None = None
    timed_inputs: Callable[[int], tuple[Any, ...]] | None = None
    most_sets: int = 1 << 30
    copied: bool = True


@dataclass
class Facts:
    """``nbytes``, ``bus_factor``, ``flops`` as in :class:`interlace.benchmark.Kernel`.

    ``shape``: what tells sizes of one op apart, for tables. ``matmul`` and ``communication`` are names of
    candidates, for the overlap.
    """

    op: str
    shape: dict[str, int]
    nbytes: int
    bus_factor: float | None
    flops: float
    matmul: str | None = None
    communication: str | None = None


@dataclass
class Subject(Facts):
    """A subject to measure, and the ways to do it."""

    candidates: list[BenchCandidate] = field(default_factory=list)
