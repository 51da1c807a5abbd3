"""The simulator's arithmetic in numpy, with the same bits on every processor: formats, products, sums.

In Triton's interpreter a tile of bf16 or fp8 is an array of unsigned integers. :func:`widen` turns the bits
into fp32, which represents each of these formats exactly. :func:`narrow` and :func:`encode` round numbers
to bits, once. The tests compare with torch. Out of range they follow the GPU's `cvt` instructions: bf16
overflows to infinity, fp8 saturates.

The order in which a BLAS adds depends on the processor, the number of threads, and the shape of the
product: a row may get other bits when it is multiplied alone. The simulator uses this definition instead::

    matrix_product   fp32 and narrower: products are exact in fp64, are added in fp64 in the order of k, and
                     the sum is rounded once, to fp32. fp64: each product and each sum is rounded to fp64.
    reduce           halves are combined until one element is left: ((x0 + x4) + (x2 + x6)) + ...
    larger, smaller  the number, if the other is nan; +0 is larger than -0

A zero sum is +0, and a nan of a product has the bits of ``np.nan``. So an element of a product depends only
on its row and its column.

A loop over k in numpy is slow, so a BLAS computes the product in fp64 first. Two orders of the same K
additions differ by at most ``(2 K + 4) 2**-53 |row| |column|``. If all numbers within that distance of the
BLAS' result round to one fp32 number, that number is also the rounded sum in the order of k. The other
elements are added in the order of k: about one in 100,000 random ones, and those that cancel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_UNIT = 2.0**-53
Array = Any  # numpy arrays whose element type is known only at run time


@dataclass(frozen=True)
class Format:
    """A binary float format. Codes have no sign bit. ``overflow``: the code for too large values."""

    bits: int
    mantissa: int
    smallest_exponent: int
    largest: int
    overflow: int
    nan: int

    @property
    def storage(self) -> Any:
        return np.uint8 if self.bits <= 8 else np.uint16 if self.bits <= 16 else np.uint32


# By the name of the triton dtype. nan is the pattern that the cvt instructions produce.
STORED_AS_BITS = {
    "bf16": Format(16, 7, -126, largest=0x7F7F, overflow=0x7F80, nan=0x7FFF),
    "fp8e4nv": Format(8, 3, -6, largest=0x7E, overflow=0x7E, nan=0x7F),
    "fp8e5": Format(8, 2, -14, largest=0x7B, overflow=0x7B, nan=0x7F),
}
HALF = Format(16, 10, -14, largest=0x7BFF, overflow=0x7C00, nan=0x7FFF)
SINGLE = Format(32, 23, -126, largest=0x7F7FFFFF, overflow=0x7F800000, nan=0x7FFFFFFF)


# By the name in PTX. Formats of four and six bits have neither infinity nor nan. tf32 is fp32 without its
# last 13 bits.
NARROW = {
    "e4m3": STORED_AS_BITS["fp8e4nv"],
    "e5m2": STORED_AS_BITS["fp8e5"],
    "e2m1": Format(4, 1, 0, largest=0x7, overflow=0x7, nan=0x7),
    "e2m3": Format(6, 3, 0, largest=0x1F, overflow=0x1F, nan=0x1F),
    "e3m2": Format(6, 2, -2, largest=0x1F, overflow=0x1F, nan=0x1F),
    "tf32": Format(19, 10, -126, largest=0x3FBFF, overflow=0x3FC00, nan=0x3FFFF),
}


def encode(values: Array, form: Format, rounding: Callable[[Array], Array] = np.rint) -> Array:
    """Return the bit patterns of ``values`` in ``form``, rounded once.

    ``rounding`` gets signed numbers in units of the last place. Toward zero, nothing overflows.
    """
    x = np.asarray(values, dtype=np.float64)
    magnitude = np.where(np.isfinite(x), np.abs(x), 0.0)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, form.smallest_exponent)
    # In units of the last place. The division is by a power of two, so it is exact.
    units = np.copysign(np.ldexp(magnitude, form.mantissa - exponent), x)
    units = np.abs(rounding(units)).astype(np.int64)
    # A carry out of the mantissa goes into the exponent field, which is the right result.
    code = ((exponent - form.smallest_exponent).astype(np.int64) << form.mantissa) + units
    code = np.where(magnitude == 0.0, 0, code)
    too_large = form.largest if rounding is np.trunc else form.overflow
    code = np.where(code > form.largest, too_large, code)
    code = np.where(np.isinf(x), form.overflow, code)
    code |= np.signbit(x).astype(np.int64) << (form.bits - 1)
    return np.where(np.isnan(x), form.nan, code).astype(form.storage)


def values_of(form: Format, infinity: int | None = None) -> Array:
    """Return the fp32 value of each pattern of up to 8 bits; beyond the largest nan, or ``infinity``."""
    code = np.arange(1 << form.bits)
    magnitude = code & (len(code) // 2 - 1)
    exponent = np.maximum(magnitude >> form.mantissa, 1) - 1
    units = magnitude - (exponent << form.mantissa)  # with the implicit bit
    values = np.ldexp(units, exponent + form.smallest_exponent - form.mantissa)
    values = np.where(magnitude > form.largest, np.nan, values)
    if infinity is not None:
        values = np.where(magnitude == infinity, np.inf, values)
    return np.where(code == magnitude, values, -values).astype(np.float32)


FP8_VALUES = {
    "fp8e4nv": values_of(STORED_AS_BITS["fp8e4nv"]),
    "fp8e5": values_of(STORED_AS_BITS["fp8e5"], 0x7C),
}


def widen(data: Array, dtype: Any) -> Array:
    """Return stored bits as fp32, exactly. Data of every other type is unchanged."""
    if dtype.name == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype.name in FP8_VALUES:
        return FP8_VALUES[dtype.name][data.view(np.uint8)]
    return data


def narrow(values: Array, dtype: Any) -> Array:
    """Return numbers (fp64, fp32, fp16, any integer, bool) as stored bits of ``dtype``, rounded once."""
    values = np.asarray(values)
    if values.dtype.itemsize <= 2:
        values = values.astype(np.float32)  # exact, and the next steps are faster
    if dtype.name == "bf16" and values.dtype == np.float32:
        # The hot path: add half a unit, less one for an even result, and drop the low half.
        bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
        rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(STORED_AS_BITS["bf16"].nan), rounded)
    if values.dtype in (np.int64, np.uint64):
        # fp64 holds 53 bits: mark an inexact value by a bit far below bf16's last place.
        low = values & values.dtype.type(0x7FF)
        sticky = (values - low) | np.where(low != 0, values.dtype.type(0x400), low)
        big = (values >= 1 << 53) | (values < -(1 << 53))
        values = np.where(big, sticky, values)
    return encode(values, STORED_AS_BITS[dtype.name])


def fused_multiply_add(x: Array, y: Array, z: Array) -> Array:
    """Return x * y + z in fp64, rounded to odd, so that it can be rounded again; 24-bit factors."""
    product, addend = x.astype(np.float64) * y, z.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # exact (Knuth's two-sum)
    cut_off = np.isfinite(error) & (error != 0.0)
    even = (total.view(np.int64) & 1) == 0
    return np.where(cut_off & even, np.nextafter(total, np.copysign(np.inf, error)), total)


def matrix_product(left: Array, right: Array) -> Array:
    """Return ``left @ right`` of floats, ``(..., M, K)`` and ``(..., K, N)``: fp64 if both are, else fp32.

    The caller makes numpy ignore infinities and nans, here and in :func:`reduce`: they are valid results.
    """
    if left.dtype == right.dtype == np.float64:
        batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        result = np.zeros((*batch, left.shape[-2], right.shape[-1]))
        for k in range(left.shape[-1]):
            result += left[..., :, k, None] * right[..., None, k, :]
        result[np.isnan(result)] = np.nan
        return result
    a, b = left.astype(np.float64), right.astype(np.float64)
    near = a @ b
    ones = np.ones(a.shape[-1])  # products are faster than np.einsum, and np.vecdot needs numpy 2
    of_rows = np.sqrt((a * a) @ ones)
    of_columns = np.sqrt(ones @ (b * b)) * ((2 * len(ones) + 4) * _UNIT)
    margin = of_rows[..., :, None] * of_columns[..., None, :]
    result = (near - margin).astype(np.float32)
    margin += near
    sure = result == margin.astype(np.float32)
    if not sure.all():
        special = ~np.isfinite(near)  # in every order: sums of fp32 products do not overflow
        result[special] = np.where(np.isnan(near), np.nan, near)[special]
        unsure = np.nonzero(~(sure | special))
        batch = near.shape[:-2]
        row, column = (*unsure[:-2], unsure[-2]), (*unsure[:-2], unsure[-1])
        rows = np.broadcast_to(a, (*batch, *a.shape[-2:]))[row]
        columns = np.broadcast_to(b, (*batch, *b.shape[-2:])).swapaxes(-1, -2)[column]
        result[unsure] = np.add.accumulate(rows * columns, axis=-1)[:, -1]
    result += np.float32(0)  # turns -0 into +0
    return result


def reduce(combine: Callable[[Array, Array], Array], values: Array, axis: int) -> Array:
    """Combine ``values`` along ``axis``: halves with each other, until one element is left."""
    left = np.moveaxis(values, axis, 0)
    while (count := len(left)) > 1:
        half = count // 2
        pairs = combine(left[:half], left[half : 2 * half])
        left = np.concatenate([pairs, left[2 * half :]]) if count % 2 else pairs
    return left[0]


def larger(x: Array, y: Array) -> Array:
    """Return the larger, or the number if the other is nan. +0 is larger than -0."""
    if x.dtype.kind in "iu":
        return np.maximum(x, y)
    equal = np.where(np.signbit(x), y, x)  # numpy may return either of two zeros
    return np.where(x == y, equal, np.fmax(x, y))


def smaller(x: Array, y: Array) -> Array:
    """Return the smaller, or the number if the other is nan. -0 is smaller than +0."""
    return np.minimum(x, y) if x.dtype.kind in "iu" else -larger(-x, -y)
