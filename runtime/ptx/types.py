"""The scalar types of PTX: what the bits of a register mean to an instruction.

A register is an array: one element for each thread, bits without a sign or a format, unsigned. ``decode``
gives the numbers that an instruction of this type sees in them, ``encode`` the bits of numbers, rounded
once. Numbers of 16 bits are fp32 in between, which holds each of them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl

from interlace.runtime.numerics.float_formats import narrow

Array = Any  # of numpy, or one of its scalars, which stands for every thread
_NAN = {"f16": 0x7FFF, "f32": 0x7FFFFFFF}  # what the arithmetic instructions give


@dataclass(frozen=True)
class ScalarType:
    """``letter``: "u", "s", "b" (bits, seen as unsigned), "f" or "p". ``memory``: the type as triton
    has it; ``stored``: as numpy has it in the interpreter; ``raw``: unsigned of the same width."""

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
        """The dtype of what ``decode`` gives."""
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
        """``encode``, in a form that looks at no more than this type needs."""
        stored, raw, encode = self.stored, self.raw, self.encode
        if self.letter in "ub":
            return lambda values: values if values.dtype is raw else encode(values)
        if self.letter == "s":
            return lambda values: values.view(raw) if values.dtype is stored else encode(values)
        return encode

    def bits_of(self, value: float) -> int:
        """The bits of one number of Python's."""
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
