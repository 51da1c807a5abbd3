"""A one-shot all-reduce in the style of symmetric-memory recipes: Triton, flags by inline PTX, no library.

Every rank puts its tensor into its symmetric buffer, all ranks meet, everyone adds up everybody's buffer,
and all meet again before a buffer is written anew. The Python code is written for torch's symmetric memory;
here it finds interlace's stand-in, so that the kernel runs and is checked on a CPU::

    python -m interlace verify docs/examples/one_shot_all_reduce.py::three_rounds
"""

# ruff: noqa: I001
import interlace  # before triton: without a GPU it chooses the interpreter
from interlace import symmetric_memory  # on GPUs: torch.distributed._symmetric_memory

import torch
import triton
import triton.language as tl


@triton.jit
def thread_id():
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def put(flags):
    """Thread i sets flag i, once it has been taken: 0 becomes 1. Releases."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred %taken;
            .reg .u32 %seen;
        again:
            atom.global.release.sys.cas.b32 %seen, [$1], 0, 1;
            setp.eq.u32 %taken, %seen, 0;
            @!%taken bra again;
            mov.u32 $0, %seen;
        }
        """,
        "=r,l",
        [flags],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def take(flags):
    """Thread i waits for flag i: 1 becomes 0. Acquires."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred %set;
            .reg .u32 %seen;
        again:
            atom.global.acquire.sys.cas.b32 %seen, [$1], 1, 0;
            setp.eq.u32 %set, %seen, 1;
            @!%set bra again;
            mov.u32 $0, %seen;
        }
        """,
        "=r,l",
        [flags],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def meet(pads_ptr, rank, WORLD_SIZE: tl.constexpr):
    """Programs of the same number on all ranks: what each did before, all see after."""
    tl.debug_barrier()
    pads = pads_ptr.to(tl.pointer_type(tl.int64))
    peers = tl.arange(0, WORLD_SIZE)
    peer_pads = tl.load(pads + peers).to(tl.pointer_type(tl.int32))
    rank_pads = tl.load(pads + rank).to(tl.pointer_type(tl.int32))
    first = tl.program_id(0) * WORLD_SIZE
    if thread_id() < WORLD_SIZE:
        put(peer_pads + first + rank)
        take(rank_pads + first + peers)
    tl.debug_barrier()


@triton.jit
def one_shot_all_reduce(buffers_ptr, pads_ptr, input_ptr, output_ptr, rank,
                        WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """``output = sum over ranks of input``, a block of elements per program."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    buffers = buffers_ptr.to(tl.pointer_type(tl.int64))
    rank_buffer = tl.load(buffers + rank).to(tl.pointer_type(tl.float32))
    tl.store(rank_buffer + offsets, tl.load(input_ptr + offsets))
    meet(pads_ptr, rank, WORLD_SIZE)
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in range(WORLD_SIZE):
        peer_buffer = tl.load(buffers + peer).to(tl.pointer_type(tl.float32))
        total += tl.load(peer_buffer + offsets)
    tl.store(output_ptr + offsets, total)
    meet(pads_ptr, rank, WORLD_SIZE)


def three_rounds():
    """Run three all-reduces through one buffer, on every rank."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    programs, block = 4, 64
    buffer = symmetric_memory.empty(programs * block, dtype=torch.float32)
    handle = symmetric_memory.rendezvous(buffer)
    output = torch.empty(programs * block)
    for step in range(3):
        summand = torch.arange(programs * block) + 1000.0 * rank + step
        one_shot_all_reduce[(programs,)](
            handle.buffer_ptrs_dev,
            handle.signal_pad_ptrs_dev,
            summand,
            output,
            rank,
            WORLD_SIZE=world_size,
            BLOCK=block,
        )
        ranks = world_size * (world_size - 1) / 2
        right = world_size * (torch.arange(programs * block) + step) + 1000.0 * ranks
        if not torch.equal(output, right):
            raise AssertionError(f"wrong sum on rank {rank} in step {step}")
    return output


if __name__ == "__main__":
    print(interlace.run(three_rounds, 2)[0][:4].tolist())
