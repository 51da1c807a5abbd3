"""The protocol of the benchmarks: one for all ops, on all ranks of a group of processes.

The protocol is ``interlace.benchmark.protocol``'s, with blocks of one call unless a module says
otherwise: candidates of a case are timed in turn within every repetition, and a block takes as long as its
slowest rank, from a common barrier to the end of the op on that rank. Results are medians over repetitions;
ratios are of medians of the same run.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median

import torch.distributed as dist

import interlace
from interlace.benchmark.protocol import alternate


@dataclass
class Case:
    """One shape of one op: what to time, by name, and the name that ratios are taken against."""

    op: str
    shape: dict[str, int | str]
    baseline: str
    candidates: dict[str, Callable[[], object]] = field(default_factory=dict)


@dataclass
class Measurement:
    """Medians in microseconds by candidate."""

    op: str
    world_size: int
    shape: dict[str, int | str]
    baseline: str
    microseconds: dict[str, float]
    repetitions: int

    def ratio(self, candidate: str) -> float:
        """How many times as fast as the baseline."""
        return self.microseconds[self.baseline] / self.microseconds[candidate]


def gloo(port: int) -> None:
    """Join torch's gloo group next to interlace's, over a store on ``port`` of this host."""
    if not dist.is_initialized():
        rank, world_size = interlace.get_rank(), interlace.get_world_size()
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )


@contextlib.contextmanager
def beside_gloo(path: str) -> Iterator[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
    """torch's gloo group and interlace's over the same ranks, which meet at the file ``path``."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=interlace.get_rank(),
        world_size=interlace.get_world_size(),
        timeout=timedelta(seconds=120),
    )
    try:
        gloo = dist.group.WORLD
        assert gloo is not None
        yield gloo, dist.new_group(backend="interlace")
    finally:
        dist.barrier()
        dist.destroy_process_group()


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
