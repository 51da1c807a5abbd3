"""Kernels that are not interlace's, for the checks of interlace.verify; mutated by the tests too."""

import torch
import triton
import triton.language as tl

import interlace
from interlace.groups.groups import default_group

PROGRAMS, BLOCK = 4, 16


@triton.jit
def exchange_kernel(peers_ptr, input_ptr, output_ptr, rank, epoch, BLOCK: tl.constexpr):
    """Two ranks: send a block to the other one, wait for its block, add both."""
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    theirs = tl.load(peers_ptr + 1 - rank)
    mine = tl.load(peers_ptr + rank)
    x = tl.load(input_ptr + offsets)
    tl.store((theirs + 256).to(tl.pointer_type(tl.float32)) + offsets, x)
    tl.debug_barrier()
    flag = theirs.to(tl.pointer_type(tl.int32)) + pid
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
    own_flag = mine.to(tl.pointer_type(tl.int32)) + pid
    while tl.atomic_add(own_flag, 0, sem="acquire", scope="sys") < epoch:
        pass
    y = tl.load((mine + 256).to(tl.pointer_type(tl.float32)) + offsets)
    tl.store(output_ptr + offsets, x + y)


@triton.jit
def last_program_kernel(parts_ptr, counter_ptr, output_ptr, PROGRAMS: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
    """Every program leaves a part; the one that comes last adds all of them."""
    offsets = tl.arange(0, BLOCK)
    pid = tl.program_id(0)
    tl.store(parts_ptr + pid * BLOCK + offsets, (offsets + pid).to(tl.float32))
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    if before == PROGRAMS - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for part in range(PROGRAMS):
            total += tl.load(parts_ptr + part * BLOCK + offsets)
        tl.store(output_ptr + offsets, total)


def exchange(calls: int = 1) -> torch.Tensor:
    """Exchange between two ranks; more than one call uses the buffer again, which is a fault."""
    rank, place = interlace.get_rank(), default_group().place
    buffer = place.allocate(1024)
    output = torch.empty(PROGRAMS * BLOCK)
    for call in range(calls):
        x = torch.arange(PROGRAMS * BLOCK) + 1000.0 * rank + 10000.0 * call
        exchange_kernel[(PROGRAMS,)](buffer.peers, x, output, rank, call + 1, BLOCK=BLOCK)
        right = 2 * (torch.arange(PROGRAMS * BLOCK) + 10000.0 * call) + 1000.0
        if not torch.equal(output, right):
            raise AssertionError(f"wrong sum on rank {rank} in call {call}")
    return output


def last_program() -> None:
    parts, output = torch.empty(PROGRAMS * BLOCK), torch.empty(BLOCK)
    counter = torch.zeros(1, dtype=torch.int32)
    last_program_kernel[(PROGRAMS,)](parts, counter, output, PROGRAMS, BLOCK)
    if not torch.equal(output, PROGRAMS * torch.arange(BLOCK) + sum(range(PROGRAMS)) * 1.0):
        raise AssertionError(f"wrong sum on rank {interlace.get_rank()}")
