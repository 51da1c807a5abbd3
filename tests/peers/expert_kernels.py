"""Expert-parallel dispatch and combine in the style of torchtitan's: rows are stored where they belong.

Every rank knows from the counts of all where its rows begin at each expert's rank. Kernels store rows
through a table of the peers' addresses; the handle's barrier is between what stores and what loads.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

TOKENS, WIDTH, ROUNDS = 6, 16, 2


@triton.jit
def copy_rows(from_ptr, table_ptr, peers_ptr, rows_ptr, WIDTH: tl.constexpr):
    """Row i goes to row ``rows[i]`` of the buffer of rank ``peers[i]``."""
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    peer, to_row = tl.load(peers_ptr + row), tl.load(rows_ptr + row)
    buffer = tl.load(table_ptr.to(tl.pointer_type(tl.int64)) + peer).to(tl.pointer_type(tl.float32))
    tl.store(buffer + to_row * WIDTH + columns, tl.load(from_ptr + row * WIDTH + columns))


@triton.jit
def expert_kernel(rows_ptr, count, factor, WIDTH: tl.constexpr):
    """The expert of this rank: rows times a factor, in place."""
    columns = tl.arange(0, WIDTH)
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        place = rows_ptr + row * WIDTH + columns
        tl.store(place, tl.load(place) * factor)


def choices(world_size, step):
    """The expert of every token, of all ranks: what a router has decided, and everybody has been told."""
    every = torch.arange(world_size)[:, None] * 5 + torch.arange(TOKENS)[None, :] ** 2 + step
    return every % world_size


def two_rounds():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    room = symm_mem.empty(world_size * TOKENS, WIDTH)
    back = symm_mem.empty(TOKENS, WIDTH)
    there, here = (
        symm_mem.rendezvous(room, dist.group.WORLD),
        symm_mem.rendezvous(back, dist.group.WORLD),
    )
    for step in range(ROUNDS):
        experts = choices(world_size, step)
        tokens = torch.arange(TOKENS * WIDTH).view(TOKENS, WIDTH) + 1000.0 * rank + step
        # at an expert: the rows of lower ranks first, each rank's in the order of its tokens
        flat = experts.flatten()
        before = [(flat[:i] == expert).sum() for i, expert in enumerate(flat.tolist())]
        rows = torch.stack(before).view(world_size, TOKENS)
        copy_rows[(TOKENS,)](tokens, there.buffer_ptrs_dev, experts[rank], rows[rank], WIDTH)
        there.barrier()
        mine = int((flat == rank).sum())
        expert_kernel[(2,)](room, mine, 2.0 + rank, WIDTH)
        owner, token = torch.nonzero(experts == rank, as_tuple=True)
        if mine:
            copy_rows[(mine,)](room, here.buffer_ptrs_dev, owner, token, WIDTH)
        here.barrier()
        if not torch.equal(back, tokens * (2.0 + experts[rank])[:, None]):
            raise AssertionError(f"rank {rank} has wrong rows in step {step}")
