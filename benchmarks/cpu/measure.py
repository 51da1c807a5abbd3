"""The protocol of the benchmarks: one for all ops, on all ranks of a group of processes.

The protocol is ``interlace.benchmark.protocol``'s, with blocks of one call unless a module says
otherwise: candidates of a case are timed in turn within every repetition, and a block takes as long as its
slowest rank, from a common barrier to the end of the op on that rank. Results are medians over repetitions;
ratios are of medians of the same run.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.benchmark.protocol import alternate

Shape = dict[str, int | str]
Candidates = dict[str, Callable[[], object]]


@dataclass
class Case:
    """One shape of one op: what to time, by name, and the name that ratios are taken against."""

    op: str
    shape: Shape
    baseline: str
    candidates: Candidates = field(default_factory=dict)


@dataclass
class Measurement:
    op: str
    world_size: int
    shape: Shape
    baseline: str
    microseconds: dict[str, float]
    repetitions: int

    def ratio(self, candidate: str) -> float:
        """How many times as fast as the baseline."""
        return self.microseconds[self.baseline] / self.microseconds[candidate]


@contextlib.contextmanager
def gloo(path: str) -> Iterator[Any]:
    """torch's gloo group over the same ranks as interlace's, which meet at the file ``path``."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=interlace.get_rank(),
        world_size=interlace.get_world_size(),
        timeout=timedelta(seconds=120),
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def beside_gloo(path: str) -> Iterator[Callable[[Callable[[Any], object]], Candidates]]:
    """Yield a function that makes two candidates of an op: on torch's gloo group and on interlace's."""
    torch.set_num_threads(1)
    with gloo(path) as group:
        groups = {"gloo": group, "interlace": dist.new_group(backend="interlace")}
        yield lambda op: {name: partial(op, each) for name, each in groups.items()}


def on_ranks(
    on_rank: Callable[..., list[Measurement]], world_size: int, *values: Any
) -> list[Measurement]:
    """Return ``on_rank(path, *values)`` of processes on this host; ``path`` is a file to meet at."""
    with tempfile.TemporaryDirectory() as folder:
        given = f"{folder}/store", *values
        found: list[Measurement] = interlace.run(
            on_rank, world_size, *given, place="shm", timeout=1200.0
        )[0]
    return found


def measure(
    case: Case, repetitions: int, *, calls: int | None = 1, warm_up: int = 2
) -> Measurement:
    """Time every candidate of ``case``; the same result on every rank.

    ``calls`` are the calls of a block, None as many as fill 20 ms; ``warm_up`` blocks do not count.
    """
    timings = alternate(case.candidates, repetitions, calls=calls, warm_up=warm_up)
    return Measurement(
        case.op,
        interlace.get_world_size(),
        case.shape,
        case.baseline,
        {name: median(timing.microseconds) for name, timing in timings.items()},
        repetitions,
    )
