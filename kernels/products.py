"""The matmul of one output tile, accumulated in fp32: the loop that every fused kernel shares.

Legend: A is ``rows x K``, rows ``stride_am`` apart, K contiguous. B is ``K x N`` with any strides.
``tile_m, tile_n`` count tiles of ``BLOCK_M x BLOCK_N``; rows and columns beyond the edge read as zero.

Two paths, chosen by the constant ``TILES.DESCRIPTORS``:

``""``    pointers. Takes anything.
``"kn"``  descriptors (TMA), B contiguous along N. 16-byte aligned bases and row strides, K > 0.
``"nk"``  descriptors (TMA), B contiguous along K: a transposed ``nn.Linear`` weight, read in place.

Block-scaled operands (``TILES.VALUES``) are bytes: rows of A and columns of B are packed, see
``block_scales.py``, and K is the length of a packed row. Their scales are loaded by pointers.

``rows_operand`` and ``columns_operand`` turn A and B into the operands of ``multiply_tile``: pointers, or
descriptors. Making a descriptor costs a write and a fence, so callers make descriptors of whole matrices
once per program. Chunks and segments of A are taken from these (``part_of_rows``).

Each tile's k loop is nested in the caller's tile loop. A caller may let the compiler flatten the two into
one (``flatten``), so that the next tile is loaded while this one is stored. Or it may give loads, products
and stores separate warps (``warp_specialize``). Both are allowed only if no wait is inside the tile loop:
the compiler would move loads before it.
"""

import triton
import triton.language as tl

from interlace.kernels.block_scales import multiply_packed


@triton.jit
def tile_offsets(tile, BLOCK: tl.constexpr):
    """Indices of a tile's rows or columns; int64, because their product with a stride may pass 2**31."""
    return tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _accumulate(a, b, acc, TILES: tl.constexpr):
    """Return ``acc + a @ b``. For fp8, each step's sum is added in fp32 unless ``FAST_ACCUM``.

    The tensor cores of 9.0 keep fewer bits than fp32 has while they add up products of fp8 numbers.
    """
    if TILES.FAST_ACCUM or not a.dtype.is_fp8():
        acc = tl.dot(a, b, acc, input_precision=TILES.INPUT_PRECISION)
    else:
        # A whole step may be imprecise; the running sum is kept in fp32, outside the tensor cores.
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=a.shape[1])
    return acc


@triton.jit
def add_product(
    acc, a_ptr, stride_am, rows, weight, b_ptr, N, K, tile_m, tile_n, TILES: tl.constexpr
):
    """Return ``acc + A[tile_m] @ B[:, tile_n]`` in fp32, by pointers."""
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    offs_m = tile_offsets(tile_m, BLOCK_M)
    offs_n = tile_offsets(tile_n, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    # Rows beyond the edge belong to a chunk that may not have arrived, or are past the tensor's end.
    mask_m = (offs_m < rows)[:, None]
    mask_n = (offs_n < N)[None, :]
    # A is contiguous along K, so 32 bits do for its `offs_k`; B's are multiplied by a stride.
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :]
    b_ptrs = (
        b_ptr + offs_k.to(tl.int64)[:, None] * weight.stride_k + offs_n[None, :] * weight.stride_n
    )
    # A step may be larger than 32 bits: a K of many rows, each as long as a vocabulary.
    step_b = tl.full((), BLOCK_K, tl.int64) * weight.stride_k
    for k in range(0, K, BLOCK_K):
        # Both operands are zero beyond K: a garbage infinity times zero would be nan.
        mask_k = offs_k < K - k
        a = tl.load(a_ptrs, mask=mask_m & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_n & mask_k[:, None], other=0.0)
        acc = _accumulate(a, b, acc, TILES)
        a_ptrs += BLOCK_K
        b_ptrs += step_b
    return acc


@triton.jit
def rows_operand(a_ptr, stride_am, K, TILES: tl.constexpr, rows=(1 << 31) - 1):
    """Return A as an operand of ``multiply_tile``. Without ``rows`` it is for whole tiles only."""
    # Constants, so that one path is compiled. Triton cannot join a pointer and a descriptor after a
    # branch that is taken at run time.
    if TILES.DESCRIPTORS == "":
        operand = a_ptr
    else:
        operand = tl.make_tensor_descriptor(
            a_ptr, [rows, K], [stride_am, 1], [TILES.BLOCK_M, TILES.BLOCK_K]
        )
    return operand


@triton.jit
def part_of_rows(whole, part_ptr, stride_am, first_row, rows, K, TILES: tl.constexpr):
    """Return (operand, first row in it) for ``rows`` of A from ``first_row`` on, at ``part_ptr``.

    ``whole``: a descriptor of all rows, for parts of whole tiles. A part that ends within a tile gets its
    own descriptor, so that nothing beyond its last row is loaded: those rows may not have arrived.
    """
    row = tl.zeros((), tl.int32)
    operand = whole
    if TILES.DESCRIPTORS == "":
        operand = part_ptr
    else:
        # A branch may join descriptors, of the same block and dtype.
        if rows % TILES.BLOCK_M == 0:
            row = first_row.to(tl.int32)
        else:
            operand = rows_operand(part_ptr, stride_am, K, TILES, rows)
    return operand, row


@triton.jit
def columns_operand(b_ptr, weight, N, K, TILES: tl.constexpr):
    """Return B as an operand of ``multiply_tile``: from ``b_ptr`` on, with the strides of ``weight``."""
    if TILES.DESCRIPTORS == "":
        operand = b_ptr
    elif TILES.DESCRIPTORS == "kn":
        operand = tl.make_tensor_descriptor(
            b_ptr, [K, N], [weight.stride_k, 1], [TILES.BLOCK_K, TILES.BLOCK_N]
        )
    else:
        operand = tl.make_tensor_descriptor(
            b_ptr, [N, K], [weight.stride_n, 1], [TILES.BLOCK_N, TILES.BLOCK_K]
        )
    return operand


@triton.jit
def _multiply_descriptors(a, first_row, b, K, tile_m, tile_n, TILES: tl.constexpr):
    # Coordinates of TMA are 32 bits wide, whatever counts the tiles. No masks: beyond the shape that the
    # descriptor was made with, TMA reads zeros.
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    row = (first_row + tile_m * BLOCK_M).to(tl.int32)
    column = (tile_n * BLOCK_N).to(tl.int32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # A separate loop below the caller's wait. If it were flattened by hand into the tile loop, with the
    # wait inside it, its loads would be pipelined to before the wait.
    for k in range(0, K, TILES.BLOCK_K):
        a_tile = a.load([row, k])
        if TILES.DESCRIPTORS == "kn":
            b_tile = b.load([k, column])
        else:
            # The weight in nn.Linear's layout: transposed tile by tile, without a copy.
            b_tile = b.load([column, k]).T
        acc = _accumulate(a_tile, b_tile, acc, TILES)
    return acc


@triton.jit
def multiply_tile(a, stride_am, rows, weight, b, N, K, tile_m, tile_n, TILES: tl.constexpr,
                  first_row=0, a_ptr=None, b_ptr=None):  # fmt: skip
    """Return ``A[tile_m] @ B[:, tile_n]`` in fp32; A's rows begin at ``first_row`` of a descriptor.

    ``a_ptr`` and ``b_ptr``: where packed operands begin, whose scales have no descriptors.
    """
    if TILES.VALUES != "":
        acc = multiply_packed(
            a, a_ptr, stride_am, rows, weight, b, b_ptr, N, K, tile_m, tile_n, first_row, TILES
        )
    elif TILES.DESCRIPTORS == "":
        zeros = tl.full((TILES.BLOCK_M, TILES.BLOCK_N), 0.0, tl.float32)
        acc = add_product(zeros, a, stride_am, rows, weight, b, N, K, tile_m, tile_n, TILES)
    else:
        acc = _multiply_descriptors(a, first_row, b, K, tile_m, tile_n, TILES)
    return acc
