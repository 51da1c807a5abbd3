"""The matmul of one output tile, accumulated in fp32: the loop that every fused kernel shares.

Legend: A is ``rows x K``, rows ``stride_am`` apart, K contiguous. B is ``K x N`` with any strides.
``tile_m, tile_n`` count tiles of ``BLOCK_M x BLOCK_N``; rows and columns beyond the edge read as zero.

Two paths, chosen by the constexpr ``DESCRIPTORS``:

``""``    pointers. Takes anything.
``"kn"``  descriptors (TMA), B contiguous along N. 16-byte aligned bases and row strides, K > 0.
``"nk"``  descriptors (TMA), B contiguous along K: a transposed ``nn.Linear`` weight, read in place.

``rows_operand`` and ``columns_operand`` turn A and B into what ``multiply_tile`` takes: pointers, or
descriptors. Making a descriptor costs a write and a fence, so callers make B's once per program and A's
once per chunk or segment, outside their tile loops.

Each tile's k loop is nested in the caller's tile loop. A caller may let the compiler flatten the two into
one (``flatten``), so that the loads of the next tile are under way while this one is stored; or give loads,
products and stores warps of their own (``warp_specialize``). Both only where no wait is inside the tile
loop: the compiler would move loads in front of it.
"""

import triton
import triton.language as tl


@triton.jit
def tile_offsets(tile, BLOCK: tl.constexpr):
    """Indices of a tile's rows or columns, int64 so that a product with a stride cannot wrap."""
    return tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _accumulate(a, b, acc, INPUT_PRECISION: tl.constexpr, FAST_ACCUM: tl.constexpr):
    """``acc + a @ b``. Of fp8 operands, each step's sum is added in fp32 unless ``FAST_ACCUM``.

    The tensor cores of 9.0 keep fewer bits than fp32 has while they add up products of fp8 numbers.
    """
    if FAST_ACCUM or not a.dtype.is_fp8():
        acc = tl.dot(a, b, acc, input_precision=INPUT_PRECISION)
    else:
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=a.shape[1])
    return acc


@triton.jit
def _multiply_pointers(
    a_ptr,
    stride_am,
    rows,
    b_ptr,
    stride_bk,
    stride_bn,
    N,
    K,
    tile_m,
    tile_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    FAST_ACCUM: tl.constexpr,
):
    offs_m = tile_offsets(tile_m, BLOCK_M)
    offs_n = tile_offsets(tile_n, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = (offs_m < rows)[:, None]
    mask_n = (offs_n < N)[None, :]
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :]
    b_ptrs = b_ptr + offs_k.to(tl.int64)[:, None] * stride_bk + offs_n[None, :] * stride_bn
    step_b = tl.full((), BLOCK_K, tl.int64) * stride_bk
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        mask_k = offs_k < K - k
        a = tl.load(a_ptrs, mask=mask_m & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_n & mask_k[:, None], other=0.0)
        acc = _accumulate(a, b, acc, INPUT_PRECISION, FAST_ACCUM)
        a_ptrs += BLOCK_K
        b_ptrs += step_b
    return acc


@triton.jit
def rows_operand(a_ptr, stride_am, rows, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
                 DESCRIPTORS: tl.constexpr):  # fmt: skip
    """A as ``multiply_tile`` takes it."""
    if DESCRIPTORS == "":
        operand = a_ptr
    else:
        operand = tl.make_tensor_descriptor(a_ptr, [rows, K], [stride_am, 1], [BLOCK_M, BLOCK_K])
    return operand


@triton.jit
def columns_operand(b_ptr, stride_bk, stride_bn, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                    DESCRIPTORS: tl.constexpr):  # fmt: skip
    """B as ``multiply_tile`` takes it."""
    if DESCRIPTORS == "":
        operand = b_ptr
    elif DESCRIPTORS == "kn":
        operand = tl.make_tensor_descriptor(b_ptr, [K, N], [stride_bk, 1], [BLOCK_K, BLOCK_N])
    else:
        operand = tl.make_tensor_descriptor(b_ptr, [N, K], [stride_bn, 1], [BLOCK_N, BLOCK_K])
    return operand


@triton.jit
def _multiply_descriptors(a, b, K, tile_m, tile_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                          BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
                          INPUT_PRECISION: tl.constexpr, FAST_ACCUM: tl.constexpr):  # fmt: skip
    row = (tile_m * BLOCK_M).to(tl.int32)
    column = (tile_n * BLOCK_N).to(tl.int32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a_tile = a.load([row, k])
        if DESCRIPTORS == "kn":
            b_tile = b.load([k, column])
        else:
            b_tile = b.load([column, k]).T
        acc = _accumulate(a_tile, b_tile, acc, INPUT_PRECISION, FAST_ACCUM)
    return acc


@triton.jit
def multiply_tile(
    a,
    stride_am,
    rows,
    b,
    stride_bk,
    stride_bn,
    N,
    K,
    tile_m,
    tile_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    FAST_ACCUM: tl.constexpr,
):
    """``A[tile_m] @ B[:, tile_n]`` in fp32, ``[BLOCK_M, BLOCK_N]``, of operands made as above."""
    if DESCRIPTORS == "":
        acc = _multiply_pointers(
            a,
            stride_am,
            rows,
            b,
            stride_bk,
            stride_bn,
            N,
            K,
            tile_m,
            tile_n,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            INPUT_PRECISION,
            FAST_ACCUM,
        )
    else:
        acc = _multiply_descriptors(
            a,
            b,
            K,
            tile_m,
            tile_n,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            DESCRIPTORS,
            INPUT_PRECISION,
            FAST_ACCUM,
        )
    return acc
