"""The end of a tile of a matmul, in registers: scale, bias, activation, store.

In this order, all in fp32, and rounded once, when it is stored. Options are constexprs: one that is off
leaves no instruction.

``SCALES``      "" none; "tensor" one number for A and one for B; "row" one per row of A and column of B
``BIAS``        "" none; "n" one value per column; "m" one per row
``ACTIVATION``  "" none; "relu", "gelu" (with erf), "gelu_tanh", "silu": torch's functions of these names
``SUBTILE``     1, 2 or 4: in how many parts, side by side, a tile is stored. Parts need fewer registers
                for addresses, and less shared memory, which is room for the loads of the next tile.

A tile is stored with ``tl.store`` (``OUT_DESCRIPTOR`` False), or through a descriptor (TMA). TMA stores
while the next tile is computed, and is for outputs that are not published (law 2).
"""

from typing import Literal, get_args

import triton
import triton.language as tl

from interlace.kernels.products import tile_offsets

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS = get_args(Activation)


@triton.jit
def scale_tile(acc, epilogue, tile_m, tile_n, rows, N, BLOCK_N: tl.constexpr, TILES: tl.constexpr):
    """Multiply by the scales of A and B, which are fp32, like ``torch._scaled_mm``."""
    if TILES.SCALES == "tensor":
        acc *= tl.load(epilogue.row_scale_ptr) * tl.load(epilogue.column_scale_ptr)
    if TILES.SCALES == "row":
        offs_m = tile_offsets(tile_m, TILES.BLOCK_M)
        offs_n = tile_offsets(tile_n, BLOCK_N)
        acc *= tl.load(epilogue.row_scale_ptr + offs_m, mask=offs_m < rows, other=0.0)[:, None]
        acc *= tl.load(epilogue.column_scale_ptr + offs_n, mask=offs_n < N, other=0.0)[None, :]
    return acc


@triton.jit
def add_bias(acc, bias_ptr, tile_m, tile_n, rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             TILES: tl.constexpr):  # fmt: skip
    """Add a bias in fp32."""
    if TILES.BIAS == "n":
        offs_n = tile_offsets(tile_n, BLOCK_N)
        # To fp32 before the sum: a sum in the bias's 16 bits would be one rounding more.
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    if TILES.BIAS == "m":
        offs_m = tile_offsets(tile_m, BLOCK_M)
        acc += tl.load(bias_ptr + offs_m, mask=offs_m < rows, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def activate(x, TILES: tl.constexpr):
    """Return the activation of fp32 numbers.

    ``gelu_tanh`` is ``x / 2 * (1 + tanh(y))``, and ``(1 + tanh(y)) / 2`` is the sigmoid of ``2 y``. So one
    exponential is enough; if it overflows the sigmoid is 0, which is right.
    """
    if TILES.ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # not maximum, which would hide a nan
    if TILES.ACTIVATION == "gelu":
        # 0.7071... is 1 / sqrt(2); below, 1.5957... is 2 * sqrt(2 / pi).
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    if TILES.ACTIVATION == "gelu_tanh":
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    if TILES.ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def store_tile(c_ptr, acc, tile_m, tile_n, rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Round a tile to C's dtype and store it. Always ``tl.store``: a tile may be published next."""
    offs_m = tile_offsets(tile_m, BLOCK_M)
    offs_n = tile_offsets(tile_n, BLOCK_N)
    # Rows beyond `rows` belong to the next part of C, which other programs compute: without a mask, the
    # last store would win. Columns beyond N are in the next row, as C is dense.
    mask = (offs_m < rows)[:, None] & (offs_n < N)[None, :]
    pointers = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(pointers, acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def output_operand(c_ptr, N, TILES: tl.constexpr, rows=(1 << 31) - 1):
    """Return C as ``emit_tile`` takes it: a pointer, or a descriptor of ``rows x N``, dense at
    ``c_ptr``."""
    if TILES.OUT_DESCRIPTOR:
        operand = tl.make_tensor_descriptor(
            c_ptr, [rows, N], [N, 1], [TILES.BLOCK_M, TILES.BLOCK_N // TILES.SUBTILE]
        )
    else:
        operand = c_ptr
    return operand


@triton.jit
def part_of_output(whole, part_ptr, first_row, rows, N, TILES: tl.constexpr):
    """Return ``rows`` of C from ``first_row`` on, like ``part_of_rows`` does for A."""
    row = tl.zeros((), tl.int32)
    operand = part_ptr
    if TILES.OUT_DESCRIPTOR:
        operand = whole
        if rows % TILES.BLOCK_M == 0:
            row = first_row.to(tl.int32)
        else:
            operand = output_operand(part_ptr, N, TILES, rows)
    return operand, row


@triton.jit
def _halves(acc):
    """Return the left and the right half of a tile's columns. Moves nothing: a thread has some of both."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def _emit_part(c, acc, epilogue, tile_m, tile_n, rows, N, TILES: tl.constexpr,
               PARTIAL: tl.constexpr, first_row):  # fmt: skip
    PART: tl.constexpr = TILES.BLOCK_N // TILES.SUBTILE
    acc = scale_tile(acc, epilogue, tile_m, tile_n, rows, N, PART, TILES)
    # Scales are this rank's, and go into its contribution. The bias is added once, to the sum, and the
    # activation applies to the whole sum only.
    if not PARTIAL:
        acc = add_bias(acc, epilogue.bias_ptr, tile_m, tile_n, rows, N, TILES.BLOCK_M, PART, TILES)
        acc = activate(acc, TILES)
    if TILES.OUT_DESCRIPTOR:
        # No mask: a descriptor stores nothing beyond its shape. Coordinates of TMA are 32 bits wide.
        row = (first_row + tile_m * TILES.BLOCK_M).to(tl.int32)
        column = (tile_n * PART).to(tl.int32)
        c.store([row, column], acc.to(c.dtype))
    else:
        store_tile(c, acc, tile_m, tile_n, rows, N, TILES.BLOCK_M, PART)


@triton.jit
def emit_tile(c, acc, epilogue, tile_m, tile_n, rows, N, TILES: tl.constexpr,
              PARTIAL: tl.constexpr = False, first_row=0):  # fmt: skip
    """Scale, add the bias, activate and store the tile ``acc`` of ``rows x N``, part by part.

    ``first_row``: where the rows begin in a descriptor.
    ``PARTIAL``: a contribution to a sum: bias and activation apply to the sum instead.
    Part i of tile n is tile ``n * SUBTILE + i`` of a matrix whose tiles are ``BLOCK_N / SUBTILE`` wide.
    """
    PARTS: tl.constexpr = TILES.SUBTILE
    if PARTS == 1:
        parts = (acc,)
    elif PARTS == 2:
        parts = _halves(acc)
    else:
        left, right = _halves(acc)
        parts = _halves(left) + _halves(right)
    # Unrolled: a tuple is indexed by constants only.
    for part in tl.static_range(PARTS):
        place = tile_n * PARTS + part
        _emit_part(c, parts[part], epilogue, tile_m, place, rows, N, TILES, PARTIAL, first_row)
