"""Message passing in the style of Iris: a heap, stores at a peer, an exchange that releases.

Rank r sends a block to rank r + 1, twice through the same memory. The receiver hands the memory back by a
flag of its own.
"""

import iris
import torch
import triton
import triton.language as tl

import interlace

BLOCK, PROGRAMS, ROUNDS = 32, 2, 2


@triton.jit
def pass_on(
    source, inbox, output, ready, taken, heap_bases, rank, world_size, step, BLOCK: tl.constexpr
):
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    to_rank = (rank + 1) % world_size
    from_rank = (rank + world_size - 1) % world_size
    # the inbox of the next rank is free once it has taken what came in the step before
    while tl.atomic_add(taken + pid, 0, sem="acquire", scope="sys") < step:
        pass
    iris.store(inbox + offsets, tl.load(source + offsets), rank, to_rank, heap_bases)
    tl.debug_barrier()
    iris.atomic_xchg(ready + pid, step + 1, rank, to_rank, heap_bases, sem="release", scope="sys")
    while tl.atomic_add(ready + pid, 0, sem="acquire", scope="sys") <= step:
        pass
    tl.store(output + offsets, iris.load(inbox + offsets, rank, rank, heap_bases))
    tl.debug_barrier()
    iris.atomic_xchg(taken + pid, step + 1, rank, from_rank, heap_bases, sem="release", scope="sys")


def two_rounds():
    ctx = iris.iris(1 << 16)
    rank, world_size = ctx.get_rank(), ctx.get_num_ranks()
    inbox = ctx.zeros(BLOCK * PROGRAMS)
    ready = ctx.zeros(PROGRAMS, dtype=torch.int32)
    taken = ctx.zeros(PROGRAMS, dtype=torch.int32)
    ctx.barrier()
    output = torch.empty(BLOCK * PROGRAMS)
    for step in range(ROUNDS):
        mine = torch.arange(BLOCK * PROGRAMS) + 1000.0 * rank + step
        bases = ctx.get_heap_bases()
        pass_on[(PROGRAMS,)](
            mine, inbox, output, ready, taken, bases, rank, world_size, step, BLOCK
        )
        theirs = mine - 1000.0 * rank + 1000.0 * ((rank - 1) % world_size)
        if not torch.equal(output, theirs):
            raise AssertionError(f"rank {rank} has wrong data in step {step}")


if __name__ == "__main__":
    interlace.run(two_rounds, 2)
