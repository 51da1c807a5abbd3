"""Products that a compiler for sm_90 makes ``wgmma`` of: of factors in shared memory and in registers."""

import triton
import triton.language as tl


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    B_BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """A block of c = a b; of b, rows or columns lie next to each other."""
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    depth = tl.arange(0, BK)
    total = tl.zeros((BM, BN), c_ptr.dtype.element_ty)
    for k in range(0, K, BK):
        a = tl.load(a_ptr + rows[:, None] * K + (k + depth)[None, :])
        if B_BY_COLUMN:
            b = tl.load(b_ptr + columns[:, None] * K + (k + depth)[None, :]).T
        else:
            b = tl.load(b_ptr + (k + depth)[:, None] * N + columns[None, :])
        total = tl.dot(a, b, total, out_dtype=c_ptr.dtype.element_ty)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total)


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, o_ptr, N, B: tl.constexpr, D: tl.constexpr):
    """A block of softmax_2(q k^T) v, whose second product has a factor in registers."""
    rows, columns, depth = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, B), tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + depth[None, :])
    total = tl.zeros((B, D), tl.float32)
    largest, weight = tl.full((B,), -1e9, tl.float32), tl.zeros((B,), tl.float32)
    for n in range(0, N, B):
        k = tl.load(k_ptr + (n + columns)[None, :] * D + depth[:, None])
        scores = tl.dot(q, k)
        larger = tl.maximum(largest, tl.max(scores, 1))
        p, shrink = tl.exp2(scores - larger[:, None]), tl.exp2(largest - larger)
        weight, largest = weight * shrink + tl.sum(p, 1), larger
        v = tl.load(v_ptr + (n + columns)[:, None] * D + depth[None, :])
        total = tl.dot(p.to(v.dtype), v, total * shrink[:, None])
    tl.store(o_ptr + rows[:, None] * D + depth[None, :], total / weight[:, None])


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
