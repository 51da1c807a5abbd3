"""The all-reduce of one_shot_all_reduce.py, made ready for ``python -m interlace bench``::

python -m interlace bench docs/examples/bench_kernel.py::one_shot --sizes 4K,64K --place shm
"""

# ruff: noqa: I001
import interlace  # before triton: without a GPU it chooses the interpreter
from interlace import symmetric_memory
from interlace.benchmark import Kernel

import torch
import torch.distributed as dist

from one_shot_all_reduce import one_shot_all_reduce

BLOCK = 1024


def one_shot(nbytes):
    """Called on every rank, once per size: sets up, and says what to run."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    programs = max(1, nbytes // (4 * BLOCK))
    count = programs * BLOCK
    handle = symmetric_memory.rendezvous(symmetric_memory.empty(count, dtype=torch.float32))

    def inputs(number):
        x = torch.arange(count, dtype=torch.float32) % 1000 + rank + number
        return x, torch.full((count,), float("nan"))

    def run(x, output):
        one_shot_all_reduce[(programs,)](
            handle.buffer_ptrs_dev,
            handle.signal_pad_ptrs_dev,
            x,
            output,
            rank,
            WORLD_SIZE=world_size,
            BLOCK=BLOCK,
        )
        return output

    def gloo(x, output):
        dist.all_reduce(output.copy_(x))
        return output

    def check(result, number):
        ranks = world_size * (world_size - 1) / 2
        right = world_size * (torch.arange(count) % 1000 + number) + ranks
        return torch.equal(result, right)

    return Kernel(
        run=run,
        inputs=inputs,
        check=check,
        nbytes=4 * count,
        bus_factor=2 * (world_size - 1) / world_size,
        baselines={"gloo": gloo},
    )
