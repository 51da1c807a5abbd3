"""The scalar types of PTX, and float formats of 4 to 8 bits and tf32: the meaning of a register's bits.

A register is an array with one element for each thread: unsigned bits without a sign or a format.
``decode`` returns the numbers that an instruction of this type sees in them, ``encode`` the bits of
numbers, rounded once. 16-bit numbers are fp32 in between, which represents each of them exactly. A register
holds tf32 as the equal fp32 number.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import triton.language as tl

from interlace.runtime.numerics.exact import (
    HALF,
    NARROW,
    STORED_AS_BITS,
    Format,
    encode,
    narrow,
    values_of,
)

Array = Any  # a numpy array, or a numpy scalar, which stands for every thread
_NAN = {"f16": 0x7FFF, "f32": 0x7FFFFFFF}  # the result of arithmetic instructions


@dataclass(frozen=True)
class ScalarType:
    """A type. ``letter``: "u", "s", "b" (bits, handled as unsigned), "f" or "p". ``memory``: Triton's type;
    ``stored``: numpy's type in the interpreter; ``raw``: the unsigned type of the same width."""

    name: str
    letter: str
    bits: int
    memory: Any
    stored: Any
    raw: Any

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1

    @property
    def is_float(self) -> bool:
        return self.letter == "f"

    @property
    def number(self) -> Any:
        """The dtype of the numbers that ``decode`` returns."""
        return np.dtype(np.float32) if self.is_float and self.bits < 32 else self.stored

    def decode(self, bits: Array) -> Array:
        if self.letter in "ubp":
            return bits
        if self.name == "bf16":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        numbers = bits.view(self.stored)
        return numbers.astype(np.float32) if self.name == "f16" else numbers

    def encode(self, values: Array) -> Array:
        if self.name == "bf16":
            return narrow(values, self.memory)
        if values.dtype != self.stored:
            values = values.astype(self.stored)
        bits = values.view(self.raw)
        if self.name in _NAN:
            wrong = values != values
            if wrong.any():
                bits = np.where(wrong, self.raw.type(_NAN[self.name]), bits)
        return bits

    @functools.cached_property
    def encoder(self) -> Callable[[Array], Array]:
        """``encode``, reduced to the checks that this type needs."""
        stored, raw, encode = self.stored, self.raw, self.encode
        if self.letter in "ub":
            return lambda values: values if values.dtype is raw else encode(values)
        if self.letter == "s":
            return lambda values: values.view(raw) if values.dtype is stored else encode(values)
        return encode

    def bits_of(self, value: float) -> int:
        if not self.is_float:
            return int(value) & self.mask
        with np.errstate(all="ignore"):
            return int(self.encode(np.array(value, np.float64))[()])


def _type(name: str, letter: str, memory: Any, stored: str) -> ScalarType:
    kind = np.dtype(stored)
    raw = np.dtype("?" if letter == "p" else f"u{kind.itemsize}")
    return ScalarType(name, letter, memory.primitive_bitwidth, memory, kind, raw)


TYPES = {
    "pred": _type("pred", "p", tl.int1, "?"),
    "f16": _type("f16", "f", tl.float16, "f2"),
    "bf16": _type("bf16", "f", tl.bfloat16, "u2"),
    "f32": _type("f32", "f", tl.float32, "f4"),
    "f64": _type("f64", "f", tl.float64, "f8"),
}
for _bits in (8, 16, 32, 64):
    for _letter, _word in (("u", "uint"), ("b", "uint"), ("s", "int")):
        _name, _memory = f"{_letter}{_bits}", getattr(tl, f"{_word}{_bits}")
        TYPES[_name] = _type(_name, _letter, _memory, f"{_word[0]}{_bits // 8}")
PREDICATE = TYPES["pred"]


Rounding = Callable[[Array], Array]
"""Rounds numbers in units of the last place."""


ROUNDINGS: dict[str, Rounding] = {
    "rn": np.rint,
    "rna": lambda units: np.copysign(np.floor(np.abs(units) + 0.5), units),
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
}


@dataclass(frozen=True)
class NarrowFloat:
    """A format of ``bits`` per number, several in a register; ``form`` is None for the scale."""

    name: str
    bits: int
    form: Format | None = None

    @property
    def raw(self) -> Any:
        return np.dtype(f"u{max(1, self.bits // 8)}")

    def decode(self, bits: Array) -> Array:
        """Return fp32 numbers, which represent each of them exactly."""
        if self.name == "tf32":  # tensor cores ignore the last bits
            return (bits & np.uint32(0xFFFFE000)).view(np.float32)
        if self.bits == 16:
            return TYPES[self.name].decode(bits.astype(np.uint16))
        return _VALUES[self.name][bits]

    def encode(self, values: Array, rounding: Rounding, *, saturates: bool = False) -> Array:
        """Return bits. ``saturates``: too large a number becomes the largest one, not infinity."""
        if self.form is None:
            return _scale(values, rounding, 254 if saturates else 255)
        form = replace(self.form, overflow=self.form.largest) if saturates else self.form
        found = encode(values, form, rounding)
        return found << np.uint32(13) if self.name == "tf32" else found


def _scale(values: Array, rounding: Rounding, infinity: int) -> Array:
    """Return the exponents of magnitudes, rounded up or down; 254 is the largest, 255 is nan."""
    mantissa, exponent = np.frexp(np.abs(values.astype(np.float64)))
    above = (rounding is np.ceil) & (mantissa > 0.5)
    code = np.maximum(exponent + 126 + above, 0)
    code = np.where((code > 254) | np.isinf(values), infinity, code)
    return np.where(np.isnan(values), 255, np.where(values == 0, 0, code)).astype(np.uint8)


_VALUES = {
    name: values_of(form, 0x7C if name == "e5m2" else None)
    for name, form in NARROW.items()
    if form.bits <= 8
}
_VALUES["ue8m0"] = np.append(np.exp2(np.arange(255.0) - 127), np.nan).astype(np.float32)

_PLACES = {"e2m1": 4, "tf32": 32}  # bits of a number in a register; 8 for others
FORMATS = {n: NarrowFloat(n, _PLACES.get(n, 8), form) for n, form in NARROW.items()}
FORMATS |= {
    "ue8m0": NarrowFloat("ue8m0", 8),
    "f16": NarrowFloat("f16", 16, HALF),
    "bf16": NarrowFloat("bf16", 16, STORED_AS_BITS["bf16"]),
}
