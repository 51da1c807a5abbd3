"""All-reduces in the style of Kraken: one shot behind a matmul, two shots; flags by inline PTX.

In one shot every program stores its tile into the own buffer, meets the programs of its number on all
ranks, and adds up everybody's tile, from a tuple of buffers. In two, it adds up a part and stores the sums
into all buffers. A flag goes from 0 to 1 when it is raised, and back when it is taken, so pads need no
reset and a captured launch can be repeated.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

BLOCK, TILES, ROUNDS = 16, 2, 2


@triton.jit
def thread_number():
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def swap(flags, BEFORE: tl.constexpr, AFTER: tl.constexpr, SEM: tl.constexpr):
    """Every lane turns its flag from BEFORE to AFTER, when it is BEFORE."""
    tl.inline_asm_elementwise(
        f"""
        {{
            .reg .pred %done;
            .reg .u32 %old;
        turn:
            atom.global.sys.{SEM}.cas.b32 %old, [$1], {BEFORE}, {AFTER};
            setp.eq.u32 %done, %old, {BEFORE};
            @!%done bra turn;
            mov.u32 $0, %old;
        }}
        """,
        "=r,l",
        [flags],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def meet(pads_ptr, rank: tl.constexpr, WORLD_SIZE: tl.constexpr, AFTER_STORES: tl.constexpr,
         BEFORE_LOADS: tl.constexpr):  # fmt: skip
    ranks = tl.arange(0, WORLD_SIZE)
    pads = tl.load(pads_ptr.to(tl.pointer_type(tl.uint64)) + ranks).to(tl.pointer_type(tl.uint32))
    own = tl.load(pads_ptr.to(tl.pointer_type(tl.uint64)) + rank).to(tl.pointer_type(tl.uint32))
    first = tl.program_id(0) * WORLD_SIZE
    if AFTER_STORES:
        tl.debug_barrier()
    if thread_number() < WORLD_SIZE:
        swap(pads + first + rank, 0, 1, "release" if AFTER_STORES else "relaxed")
        swap(own + first + ranks, 1, 0, "acquire" if BEFORE_LOADS else "relaxed")
    if BEFORE_LOADS:
        tl.debug_barrier()


@triton.jit
def matmul_all_reduce(a_ptr, b_ptr, buffers, pads_ptr, output_ptr, rank: tl.constexpr,
                      WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Tiles of BLOCK x BLOCK, one below the other; ``b`` is BLOCK x BLOCK."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    b = tl.load(b_ptr + tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])
    tl.store(buffers[rank] + tile, tl.dot(tl.load(a_ptr + tile), b))
    meet(pads_ptr, rank, WORLD_SIZE, AFTER_STORES=True, BEFORE_LOADS=True)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for peer in tl.static_range(WORLD_SIZE):
        total += tl.load(buffers[peer] + tile)
    tl.store(output_ptr + tile, total)
    meet(pads_ptr, rank, WORLD_SIZE, AFTER_STORES=True, BEFORE_LOADS=False)


@triton.jit
def two_shot_all_reduce(input_ptr, buffers, pads_ptr, output_ptr, rank: tl.constexpr,
                        WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The first meeting orders nothing, on purpose: nobody begins long before the others."""
    meet(pads_ptr, rank, WORLD_SIZE, AFTER_STORES=False, BEFORE_LOADS=False)
    first = tl.program_id(0) * WORLD_SIZE * BLOCK
    whole = first + tl.arange(0, WORLD_SIZE * BLOCK)
    part = first + rank * BLOCK + tl.arange(0, BLOCK)
    tl.store(buffers[rank] + whole, tl.load(input_ptr + whole))
    meet(pads_ptr, rank, WORLD_SIZE, AFTER_STORES=True, BEFORE_LOADS=True)
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(WORLD_SIZE):
        total += tl.load(buffers[peer] + part)
    for peer in tl.static_range(WORLD_SIZE):
        tl.store(buffers[peer] + part, total)
    meet(pads_ptr, rank, WORLD_SIZE, AFTER_STORES=True, BEFORE_LOADS=True)
    tl.store(output_ptr + whole, tl.load(buffers[rank] + whole))
    meet(pads_ptr, rank, WORLD_SIZE, AFTER_STORES=True, BEFORE_LOADS=False)


def two_rounds():
    shape = (TILES * BLOCK, BLOCK)
    tensor = symm_mem.empty(shape, dtype=torch.float32)
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    rank, world_size = handle.rank, handle.world_size
    buffers = tuple(handle.get_buffer(r, shape, tensor.dtype) for r in range(world_size))
    output = torch.empty(shape)
    for step in range(ROUNDS):
        mine = torch.full(shape, 1.0 + rank + step)
        matmul_all_reduce[(TILES,)](
            mine, torch.eye(BLOCK), buffers, handle.signal_pad_ptrs_dev, output, rank, world_size,
            BLOCK,
        )  # fmt: skip
        if not torch.all(output == sum(1.0 + r + step for r in range(world_size))):
            raise AssertionError(f"rank {dist.get_rank()} has a wrong sum in step {step}")


def two_shots():
    world_size = dist.get_world_size()
    shape = (TILES * world_size * BLOCK,)
    tensor = symm_mem.empty(shape, dtype=torch.float32)
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    buffers = tuple(handle.get_buffer(r, shape, tensor.dtype) for r in range(world_size))
    output = torch.empty(shape)
    for step in range(ROUNDS):
        mine = torch.arange(shape[0]) + 1000.0 * handle.rank + step
        two_shot_all_reduce[(TILES,)](
            mine, buffers, handle.signal_pad_ptrs_dev, output, handle.rank, world_size, BLOCK
        )  # fmt: skip
        sums = world_size * (torch.arange(shape[0]) + step) + 500.0 * world_size * (world_size - 1)
        if not torch.equal(output, sums):
            raise AssertionError(f"rank {handle.rank} has a wrong sum in step {step}")
