"""Kernels for test_ptx_hopper.py: three with a fault, and one with descriptors of the host."""

import triton
import triton.language as tl


@triton.jit
def told_falsely(ptr, BLOCK: tl.constexpr):
    tl.store(tl.multiple_of(ptr + 1, 16) + tl.arange(0, BLOCK), 1.0)


@triton.jit
def unknown(ptr, BLOCK: tl.constexpr):
    asm: tl.constexpr = "mov.b32 $0, $1; brkpt;"
    one = tl.inline_asm_elementwise(asm, "=f,f", [1.0], dtype=tl.float32, is_pure=False, pack=1)
    tl.store(ptr, one)


@triton.jit
def begins_anywhere(ptr, BLOCK: tl.constexpr):
    tile = tl.make_tensor_descriptor(ptr + 1, [BLOCK, BLOCK], [BLOCK, 1], [16, 16])
    tile.store([0, 0], tl.zeros([16, 16], tl.float32))


@triton.jit
def shifted(source, target, N: tl.constexpr):
    """By descriptors of the host: each row and column of the target is the source's plus one."""
    at = tl.program_id(0) * N
    target.store([at, 0], source.load([at, 0]) + 1)
