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

Each tile's k loop is nested in the caller's tile loop and not flattened into it: a wait in front of it
then stays in front of its loads.
"""

import triton
import triton.language as tl


@triton.jit
def tile_offsets(tile, BLOCK: tl.constexpr):
    """Indices of a tile's rows or columns, int64 so that a product with a stride cannot wrap."""
    return tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


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
        acc = tl.dot(a, b, acc, input_precision=INPUT_PRECISION)
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
                          INPUT_PRECISION: tl.constexpr):  # fmt: skip
    row = (tile_m * BLOCK_M).to(tl.int32)
    column = (tile_n * BLOCK_N).to(tl.int32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a_tile = a.load([row, k])
        if DESCRIPTORS == "kn":
            b_tile = b.load([k, column])
        else:
            b_tile = b.load([column, k]).T
        acc = tl.dot(a_tile, b_tile, acc, input_precision=INPUT_PRECISION)
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
        )
    return acc


@triton.jit
def add_bias(acc, bias_ptr, tile_m, tile_n, rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BIAS: tl.constexpr):  # fmt: skip
    """Add a bias in fp32. ``BIAS``: "" none, "n" one value per column, "m" one per row."""
    if BIAS == "n":
        offs_n = tile_offsets(tile_n, BLOCK_N)
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    if BIAS == "m":
        offs_m = tile_offsets(tile_m, BLOCK_M)
        acc += tl.load(bias_ptr + offs_m, mask=offs_m < rows, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def store_tile(c_ptr, stride_cm, acc, tile_m, tile_n, rows, N, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr):  # fmt: skip
    """Round a tile to C's dtype and store it. Always ``tl.store``: a tile may be published next."""
    offs_m = tile_offsets(tile_m, BLOCK_M)
    offs_n = tile_offsets(tile_n, BLOCK_N)
    mask = (offs_m < rows)[:, None] & (offs_n < N)[None, :]
    pointers = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :]
    tl.store(pointers, acc.to(c_ptr.dtype.element_ty), mask=mask)
