"""A two-shot all-reduce by the switch in the style of Megatron and SGLang: ``multimem`` by inline PTX.

Every rank adds up a part of all ranks' buffers by one load from the multicast address, and sends the sums
to all by one store to it. All ranks meet before, when inputs are there, and after, when sums are. There is
a thread for each float: of several that do the same one would add up what another has sent already.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

PART, ROUNDS = 64, 2


@triton.jit
def add_up(addresses):
    """The sums over ranks of what lies at multicast addresses, a float each."""
    return tl.inline_asm_elementwise(
        "multimem.ld_reduce.relaxed.sys.global.add.f32 $0, [$1];",
        "=f,l",
        [addresses],
        dtype=tl.float32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def send_to_all(addresses, values):
    """Store a float at multicast addresses, so at all ranks."""
    tl.inline_asm_elementwise(
        "multimem.st.relaxed.sys.global.f32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,f",
        [addresses, values],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def meet(counts_ptr, step, rank, WORLD_SIZE: tl.constexpr):
    """``counts_ptr``: a table of every rank's words, of which rank r of all counts the r-th."""
    tl.debug_barrier()
    table = counts_ptr.to(tl.pointer_type(tl.int64))
    for peer in range(WORLD_SIZE):
        theirs = tl.load(table + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + rank, step, sem="release", scope="sys")
    own = tl.load(table + rank).to(tl.pointer_type(tl.int32))
    for peer in range(WORLD_SIZE):
        while tl.atomic_add(own + peer, 0, sem="acquire", scope="sys") < step:
            pass


@triton.jit
def all_reduce(multicast_ptr, counts_ptr, step, rank, WORLD_SIZE: tl.constexpr, PART: tl.constexpr):
    addresses = multicast_ptr + 4 * (rank * PART + tl.arange(0, PART)).to(tl.int64)
    meet(counts_ptr, 2 * step + 1, rank, WORLD_SIZE)
    send_to_all(addresses, add_up(addresses))
    meet(counts_ptr, 2 * step + 2, rank, WORLD_SIZE)


def two_rounds():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = symm_mem.empty(world_size * PART)
    counts = symm_mem.empty(world_size, dtype=torch.int32)
    counts.zero_()
    handle, words = (
        symm_mem.rendezvous(tensor, dist.group.WORLD),
        symm_mem.rendezvous(counts, dist.group.WORLD),
    )
    handle.barrier()
    for step in range(ROUNDS):
        tensor.copy_(torch.arange(world_size * PART) + 1000.0 * rank + step)
        all_reduce[(1,)](
            handle.multicast_ptr, words.buffer_ptrs_dev, step, rank, world_size, PART, num_warps=2
        )  # fmt: skip
        ranks = world_size * (world_size - 1) / 2
        right = world_size * (torch.arange(world_size * PART) + step) + 1000.0 * ranks
        if not torch.equal(tensor, right):
            raise AssertionError(f"rank {rank} has a wrong sum in step {step}")
