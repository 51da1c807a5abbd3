"""Norms of whole rows: what is done to a sum over ranks before anybody sees it.

Legend: ``rows x N``, dense; a slice is ``ROWS`` rows, looked at ``COLUMNS`` columns at a time. For a row s
of the sum, with its bias and activation, all in fp32::

    x = s + residual         rounded to the output's dtype, stored: the new residual
    y = (x - mean) * r * weight + bias    r = 1 / sqrt(variance + EPS); "rms" has no mean and no bias
    scale = max |y| / 448, q = y / scale  with QUANTIZE: float8_e4m3fn, one scale per row; else q = y,
                           which may be fp8, too, by a scale that the weight has: the cast saturates

The statistics are those of x as it is stored, so whoever has the new residual can compute y again: a
backward, or the next layer. A first pass over the columns adds up and stores x, a second one reads it
again, out of the cache; with QUANTIZE there is one more between them, for the largest of y. A row is one
program's, and its columns are taken in order, so bits do not depend on who computes it.

The variance of "layer" is put together block by block: the squares of each are taken from its own mean, and
corrected for the distance of the means (Chan, Golub and LeVeque, 1979). Squares of x alone would cancel.
"""

import triton
import triton.language as tl

_LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
_SMALLEST_SCALE = tl.constexpr(1e-12)  # a row of zeros has one that can be divided by


@triton.jit
def no_statistics(TAIL: tl.constexpr):
    """(mean, sum of squares) of rows of which no column has been seen."""
    ROWS: tl.constexpr = TAIL.ROWS
    return tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)


@triton.jit
def with_block(mean, squares, x, mask, first, N, TAIL: tl.constexpr):
    """The statistics with the columns of ``x`` from ``first`` on; ``x`` is 0 where ``mask`` is false."""
    if TAIL.KIND == "rms":
        squares += tl.sum(x * x, axis=1)
    else:
        before = tl.cast(first, tl.float32)
        count = tl.cast(min(N - first, TAIL.COLUMNS), tl.float32)
        own = tl.sum(x, axis=1) / count
        centred = tl.where(mask, x - own[:, None], 0.0)
        apart = own - mean
        part = count / (before + count)
        squares += tl.sum(centred * centred, axis=1) + apart * apart * (before * part)
        mean += apart * part
    return mean, squares


@triton.jit
def reciprocal_deviation(squares, N, TAIL: tl.constexpr):
    """1 / sqrt(variance + EPS); of "rms" the mean of the squares is the variance."""
    return tl.rsqrt(squares / tl.cast(N, tl.float32) + TAIL.EPS)


@triton.jit
def load_residual(norm, offsets, mask, TAIL: tl.constexpr):
    """The residual, if there is one: loaded before the sum, so that both are on their way at once."""
    residual = mask  # which nobody looks at
    if TAIL.RESIDUAL:
        residual = tl.load(norm.residual_ptr + offsets, mask=mask, other=0.0)
    return residual


@triton.jit
def store_sum(total, residual, output_ptr, offsets, mask, TAIL: tl.constexpr):
    """Add the residual, round, store; the rounded numbers in fp32, 0 where ``mask`` is false."""
    if TAIL.RESIDUAL:
        total += residual.to(tl.float32)
    rounded = total.to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + offsets, rounded, mask=mask)
    return tl.where(mask, rounded.to(tl.float32), 0.0)


@triton.jit
def _load_vectors(norm, offs_n, mask, N, TAIL: tl.constexpr):
    weight, bias = mask, mask  # which nobody looks at
    if TAIL.NORM_WEIGHT:
        weight = tl.load(norm.norm_weight_ptr + offs_n, mask=offs_n < N, other=0.0)
    if TAIL.NORM_BIAS:
        bias = tl.load(norm.norm_bias_ptr + offs_n, mask=offs_n < N, other=0.0)
    return weight, bias


@triton.jit
def load_blocks(x_ptr, norm, offs_m, first, rows, N, TAIL: tl.constexpr):
    """Two blocks of columns from ``first`` on, of whole rows at ``x_ptr``: what ``normed`` takes of each.

    All are loaded before one is used, or stored: a load does not go ahead of a store, which may be of the
    same memory. A block is (columns, mask, x, weight, bias); these mean nothing where there are none.
    """
    offs_n = first + tl.arange(0, TAIL.COLUMNS)
    after_n = offs_n + TAIL.COLUMNS
    mask_m = (offs_m < rows)[:, None]
    mask, after_mask = mask_m & (offs_n < N)[None, :], mask_m & (after_n < N)[None, :]
    pointers = x_ptr + offs_m[:, None] * N + offs_n[None, :]
    x = tl.load(pointers, mask=mask, other=0.0)
    after_x = tl.load(pointers + TAIL.COLUMNS, mask=after_mask, other=0.0)
    weight, bias = _load_vectors(norm, offs_n, mask, N, TAIL)
    after_weight, after_bias = _load_vectors(norm, after_n, mask, N, TAIL)
    block = offs_n, mask, x, weight, bias
    return block, (after_n, after_mask, after_x, after_weight, after_bias)


@triton.jit
def normed(block, mean, deviation, TAIL: tl.constexpr):
    """y of one of ``load_blocks``, in fp32."""
    _, _, x, weight, bias = block
    y = (x.to(tl.float32) - mean[:, None]) * deviation[:, None]
    if TAIL.NORM_WEIGHT:
        y *= weight.to(tl.float32)[None, :]
    if TAIL.NORM_BIAS:
        y += bias.to(tl.float32)[None, :]
    return y


@triton.jit
def _sizes(block, mean, deviation, TAIL: tl.constexpr):
    return tl.where(block[1], tl.abs(normed(block, mean, deviation, TAIL)), 0.0)


@triton.jit
def scale_of_rows(output_ptr, mean, deviation, norm, offs_m, rows, N, TAIL: tl.constexpr):
    """The scale of each row: what its largest number is divided by to be the largest of float8_e4m3fn."""
    ROWS: tl.constexpr = TAIL.ROWS
    largest = tl.zeros((ROWS,), tl.float32)
    for first in range(0, N, 2 * TAIL.COLUMNS):
        block, after = load_blocks(output_ptr, norm, offs_m, first, rows, N, TAIL)
        sizes = _sizes(block, mean, deviation, TAIL)
        sizes = tl.maximum(sizes, _sizes(after, mean, deviation, TAIL))
        largest = tl.maximum(largest, tl.max(sizes, axis=1))
    return tl.maximum(largest / _LARGEST, _SMALLEST_SCALE)
