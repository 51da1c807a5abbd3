"""A ring in the style of torch's NVSHMEM functions: blocks travel with their signals to the next rank."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.distributed._symmetric_memory._nvshmem_triton as nvshmem
import triton
import triton.language as tl
from torch.distributed._symmetric_memory._nvshmem_triton import requires_nvshmem

ELEMENTS = 48


@requires_nvshmem
@triton.jit
def ring_kernel(
    source, gathered, signal, output, steps, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr
):
    """All-gather: in every step the block that came last goes on, to the slot of the rank it is of."""
    me = nvshmem.my_pe()
    world_size = nvshmem.n_pes()
    to_rank = (me + 1) % world_size
    offsets = tl.arange(0, BLOCK)
    mask = offsets < ELEMENTS
    tl.store(gathered + me * ELEMENTS + offsets, tl.load(source + offsets, mask=mask), mask=mask)
    for step in range(steps):
        owner = (me + world_size - step) % world_size
        block = gathered + owner * ELEMENTS
        nvshmem.put(block, block, ELEMENTS, to_rank)
        nvshmem.fence()
        nvshmem.signal_op(signal + step, 1, 9, to_rank)
        nvshmem.signal_wait_until(signal + step, 0, 1)
    for owner in range(world_size):
        here = owner * ELEMENTS + offsets
        tl.store(output + here, tl.load(gathered + here, mask=mask), mask=mask)


def gather():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gathered = symm_mem.empty(world_size * ELEMENTS)
    symm_mem.rendezvous(gathered, dist.group.WORLD)
    signal = symm_mem.empty(world_size, dtype=torch.int64)
    symm_mem.rendezvous(signal, dist.group.WORLD)
    signal.zero_()
    dist.barrier()
    mine = torch.arange(ELEMENTS) + 1000.0 * rank
    output = torch.empty(world_size, ELEMENTS)
    ring_kernel[(1,)](mine, gathered, signal, output, world_size - 1, ELEMENTS, 64)
    every = torch.arange(ELEMENTS) + 1000.0 * torch.arange(world_size)[:, None]
    if not torch.equal(output, every):
        raise AssertionError(f"rank {rank} has wrong data")


@requires_nvshmem
@triton.jit
def tell_kernel(inbox, source, flag, told, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Rank 0 sends a block, and then a flag as one sends data."""
    if nvshmem.my_pe() == 0:
        nvshmem.put(inbox, source, ELEMENTS, 1)
        nvshmem.quiet()
        nvshmem.put(flag, told, 1, 1)
    else:
        nvshmem.wait_until(flag, 0, 1)
        offsets = tl.arange(0, BLOCK)
        block = tl.load(inbox + offsets, mask=offsets < ELEMENTS)
        tl.store(source + offsets, block, mask=offsets < ELEMENTS)


def tell():
    inbox, source = symm_mem.empty(ELEMENTS), symm_mem.empty(ELEMENTS)
    flag, told = (symm_mem.empty(1, dtype=torch.int32) for _ in range(2))
    for tensor, value in ((inbox, 0), (source, dist.get_rank()), (flag, 0), (told, 1)):
        symm_mem.rendezvous(tensor, dist.group.WORLD)
        tensor.fill_(value)
    dist.barrier()
    tell_kernel[(1,)](inbox, source, flag, told, ELEMENTS, 64)
    if source.any():
        raise AssertionError(f"rank {dist.get_rank()} has wrong data")
