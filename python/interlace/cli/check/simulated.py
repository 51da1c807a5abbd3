"""Cases for ``sim`` only: kernels between nodes of two ranks, and those of torch's handles."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import interlace
from interlace.cli.check.case import CheckCase
from interlace.verify.suite.targets import CALLS, TARGETS


@dataclass
class TargetCase(CheckCase):
    """A target of ``interlace verify``, whose numbers are whole: results are exact, or it raises."""

    def on_rank(self, seed: int) -> float:
        TARGETS[self.op].variants[self.variant]()
        return 0.0


@dataclass
class HandleCase(CheckCase):
    """A tensor in symmetric memory: what is written before a barrier and a signal is there behind it."""

    def on_rank(self, seed: int) -> float:
        memory, size = interlace.symmetric_memory, interlace.get_world_size()
        progress, tensor = torch.zeros(2, dtype=torch.uint32), memory.empty(4)
        handle = memory.rendezvous(tensor)
        after, before = (handle.rank + 1) % size, (handle.rank - 1) % size
        tensor.fill_(handle.rank)
        handle.barrier()
        seen = handle.get_buffer(after, (4,), tensor.dtype)
        right = bool((seen == after).all())
        handle.put_signal(after)
        handle.wait_signal(before)
        handle.stream_write_value32(progress, 1, 3)
        return 0.0 if right and progress.tolist() == [0, 3] else float("inf")


def simulated(world_size: int) -> Iterator[CheckCase]:
    kernels = "put_signal_kernel", "wait_signal_kernel", "handle_barrier_kernel"
    about = "fp32", (*kernels, "write_value_kernel")
    yield HandleCase("symmetric_memory", "handle", world_size, (4,), *about)
    for name, target in TARGETS.items():
        if name == "signal" or name.startswith("nodes."):
            for variant in target.variants:
                yield TargetCase(name, variant, world_size, (CALLS,), "fp32", target.kernels)
