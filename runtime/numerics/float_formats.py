"""The float formats that Triton's interpreter stores as bits, and exact conversions of them.

A tile of bf16 or fp8 is an array of unsigned integers there. :func:`widen` turns the bits into
fp32, which holds each of these formats exactly; :func:`narrow` and :func:`encode` round numbers to
bits, once. All of it is numpy: torch is what the tests compare with.

Out of range follows the GPU's `cvt` instructions: bf16 overflows to infinity, fp8 saturates.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # numpy arrays whose element type is known at run time only


@dataclass(frozen=True)
class Format:
    """A binary float format; codes have no sign bit. ``overflow``: what too large values become."""

    bits: int
    mantissa: int
    smallest_exponent: int
    largest: int
    overflow: int
    nan: int

    @property
    def storage(self) -> Any:
        return np.uint16 if self.bits == 16 else np.uint8


# By the name of the triton dtype. nan is the pattern that the cvt instructions produce.
STORED_AS_BITS = {
    "bf16": Format(16, 7, -126, largest=0x7F7F, overflow=0x7F80, nan=0x7FFF),
    "fp8e4nv": Format(8, 3, -6, largest=0x7E, overflow=0x7E, nan=0x7F),
    "fp8e5": Format(8, 2, -14, largest=0x7B, overflow=0x7B, nan=0x7F),
}
HALF = Format(16, 10, -14, largest=0x7BFF, overflow=0x7C00, nan=0x7FFF)


def encode(values: Array, form: Format, *, toward_zero: bool = False) -> Array:
    """The bit patterns of ``values`` in ``form``, rounded once, to nearest even or toward zero."""
    x = np.asarray(values, dtype=np.float64)
    magnitude = np.where(np.isfinite(x), np.abs(x), 0.0)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, form.smallest_exponent)
    # In units of the last place; the division is by a power of two, hence exact.
    units = np.ldexp(magnitude, form.mantissa - exponent)
    units = (np.floor(units) if toward_zero else np.rint(units)).astype(np.int64)
    # A carry out of the mantissa lands in the exponent field, which is the right answer.
    code = ((exponent - form.smallest_exponent).astype(np.int64) << form.mantissa) + units
    code = np.where(magnitude == 0.0, 0, code)
    code = np.where(code > form.largest, form.largest if toward_zero else form.overflow, code)
    code = np.where(np.isinf(x), form.overflow, code)
    code |= np.signbit(x).astype(np.int64) << (form.bits - 1)
    return np.where(np.isnan(x), form.nan, code).astype(form.storage)


def _fp8_values(shift: int, scale: float, nans: tuple[int, ...]) -> Array:
    """fp32 value of each of the 256 patterns: as bits of an fp16 with another bias of the exponent."""
    code = np.arange(256, dtype=np.uint16)
    halves = ((code & 0x80) << 8 | (code & 0x7F) << shift).view(np.float16)
    with np.errstate(invalid="ignore"):  # signalling nans are quieted
        values = halves.astype(np.float32) * np.float32(scale)
    values[list(nans)] = np.nan
    return values


FP8_VALUES = {"fp8e4nv": _fp8_values(7, 256.0, (0x7F, 0xFF)), "fp8e5": _fp8_values(8, 1.0, ())}


def widen(data: Array, dtype: Any) -> Array:
    """Stored bits as fp32; data of every other type unchanged. Exact."""
    if dtype.name == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype.name in FP8_VALUES:
        return FP8_VALUES[dtype.name][data.view(np.uint8)]
    return data


def narrow(values: Array, dtype: Any) -> Array:
    """Numbers (fp64, fp32, fp16, any integer, bool) as stored bits of ``dtype``, rounded once."""
    values = np.asarray(values)
    if values.dtype.itemsize <= 2:
        values = values.astype(np.float32)  # exact, and faster below
    if dtype.name == "bf16" and values.dtype == np.float32:
        # The hot path: add half a unit, less one for an even result, and drop the low half.
        bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
        rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(STORED_AS_BITS["bf16"].nan), rounded)
    if values.dtype in (np.int64, np.uint64):
        # fp64 holds 53 bits: keep "something was cut off" as a bit far below bf16's last place.
        low = values & values.dtype.type(0x7FF)
        sticky = (values - low) | np.where(low != 0, values.dtype.type(0x400), low)
        big = (values >= 1 << 53) | (values < -(1 << 53))
        values = np.where(big, sticky, values)
    return encode(values, STORED_AS_BITS[dtype.name])


def fused_multiply_add(x: Array, y: Array, z: Array) -> Array:
    """x * y + z in fp64 rounded to odd, so that rounding it again is right; factors of at most 24 bits."""
    product, addend = x.astype(np.float64) * y, z.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # exact (Knuth's two-sum)
    cut_off = np.isfinite(error) & (error != 0.0)
    even = (total.view(np.int64) & 1) == 0
    return np.where(cut_off & even, np.nextafter(total, np.copysign(np.inf, error)), total)
