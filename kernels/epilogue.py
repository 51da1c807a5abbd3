"""What is done to a finished tile of a matmul, in registers: scale, bias, activation, store.

In this order, all in fp32, and rounded once, when it is stored. What is off costs nothing: it is a
constexpr, and no instruction is left of it.

``SCALES``      "" none; "tensor" one number for A and one for B; "row" one per row of A and column of B
``BIAS``        "" none; "n" one value per column; "m" one per row
``ACTIVATION``  "" none; "relu", "gelu" (with erf), "gelu_tanh", "silu": torch's functions of these names
``SUBTILE``     1, 2 or 4: in how many parts, side by side, a tile is stored. Parts need fewer registers
                for addresses, and less shared memory, which is room for the loads of the next tile.

A tile goes out with ``tl.store`` (``OUT_DESCRIPTOR`` False), or through a descriptor (TMA), which runs on
while the next tile is being computed, and is for outputs that nobody publishes (law 2).
"""

import triton
import triton.language as tl

from interlace.kernels.matmul import tile_offsets

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


@triton.jit
def scale_tile(acc, row_scale_ptr, column_scale_ptr, tile_m, tile_n, rows, N,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALES: tl.constexpr):  # fmt: skip
    """Multiply by the scales of A and B, which are fp32, as ``torch._scaled_mm`` does."""
    if SCALES == "tensor":
        acc *= tl.load(row_scale_ptr) * tl.load(column_scale_ptr)
    if SCALES == "row":
        offs_m = tile_offsets(tile_m, BLOCK_M)
        offs_n = tile_offsets(tile_n, BLOCK_N)
        acc *= tl.load(row_scale_ptr + offs_m, mask=offs_m < rows, other=0.0)[:, None]
        acc *= tl.load(column_scale_ptr + offs_n, mask=offs_n < N, other=0.0)[None, :]
    return acc


@triton.jit
def add_bias(acc, bias_ptr, tile_m, tile_n, rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BIAS: tl.constexpr):  # fmt: skip
    """Add a bias in fp32."""
    if BIAS == "n":
        offs_n = tile_offsets(tile_n, BLOCK_N)
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    if BIAS == "m":
        offs_m = tile_offsets(tile_m, BLOCK_M)
        acc += tl.load(bias_ptr + offs_m, mask=offs_m < rows, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of fp32 numbers.

    ``gelu_tanh`` is ``x / 2 * (1 + tanh(y))``, and ``(1 + tanh(y)) / 2`` is the sigmoid of ``2 y``, so one
    exponential does; where it overflows the sigmoid is 0, which is right.
    """
    if ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # not maximum, which would hide a nan
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def store_tile(c_ptr, stride_cm, acc, tile_m, tile_n, rows, N, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr):  # fmt: skip
    """Round a tile to C's dtype and store it. Always ``tl.store``: a tile may be published next."""
    offs_m = tile_offsets(tile_m, BLOCK_M)
    offs_n = tile_offsets(tile_n, BLOCK_N)
    mask = (offs_m < rows)[:, None] & (offs_n < N)[None, :]
    pointers = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :]
    tl.store(pointers, acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def output_operand(c_ptr, stride_cm, rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   SUBTILE: tl.constexpr, OUT_DESCRIPTOR: tl.constexpr):  # fmt: skip
    """C as ``emit_tile`` takes it: a pointer, or a descriptor of ``rows x N`` from ``c_ptr`` on."""
    if OUT_DESCRIPTOR:
        operand = tl.make_tensor_descriptor(
            c_ptr, [rows, N], [stride_cm, 1], [BLOCK_M, BLOCK_N // SUBTILE]
        )
    else:
        operand = c_ptr
    return operand


@triton.jit
def _halves(acc):
    """The left and the right half of a tile's columns. Moves nothing: a thread has some of both."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def _emit_part(
    c,
    stride_cm,
    acc,
    bias_ptr,
    row_scale_ptr,
    column_scale_ptr,
    tile_m,
    tile_n,
    rows,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
    OUT_DESCRIPTOR: tl.constexpr,
):
    acc = scale_tile(
        acc, row_scale_ptr, column_scale_ptr, tile_m, tile_n, rows, N, BLOCK_M, BLOCK_N, SCALES
    )
    acc = add_bias(acc, bias_ptr, tile_m, tile_n, rows, N, BLOCK_M, BLOCK_N, BIAS)
    acc = activate(acc, ACTIVATION)
    if OUT_DESCRIPTOR:
        row = (tile_m * BLOCK_M).to(tl.int32)
        column = (tile_n * BLOCK_N).to(tl.int32)
        c.store([row, column], acc.to(c.dtype))
    else:
        store_tile(c, stride_cm, acc, tile_m, tile_n, rows, N, BLOCK_M, BLOCK_N)


@triton.jit
def emit_tile(
    c,
    stride_cm,
    acc,
    bias_ptr,
    row_scale_ptr,
    column_scale_ptr,
    tile_m,
    tile_n,
    rows,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
    SUBTILE: tl.constexpr,
    OUT_DESCRIPTOR: tl.constexpr,
):
    """Scale, add the bias, activate and store the tile ``acc`` of ``rows x N``, part by part.

    Part i of tile n is tile ``n * SUBTILE + i`` of a matrix whose tiles are ``BLOCK_N / SUBTILE`` wide.
    """
    PART: tl.constexpr = BLOCK_N // SUBTILE
    if SUBTILE == 1:
        parts = (acc,)
    elif SUBTILE == 2:
        parts = _halves(acc)
    else:
        left, right = _halves(acc)
        parts = _halves(left) + _halves(right)
    for part in tl.static_range(SUBTILE):
        _emit_part(
            c,
            stride_cm,
            parts[part],
            bias_ptr,
            row_scale_ptr,
            column_scale_ptr,
            tile_m,
            tile_n * SUBTILE + part,
            rows,
            N,
            BLOCK_M,
            PART,
            BIAS,
            ACTIVATION,
            SCALES,
            OUT_DESCRIPTOR,
        )
