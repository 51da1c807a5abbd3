"""The scalar types of PTX: what the bits of a register mean to an instruction.

Registers hold bits without a sign or a format, as Python integers. ``decode`` gives the number that an
instruction of this type sees in them, ``encode`` the bits of a number, rounded once.
"""

import ctypes
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl

from interlace.runtime.numerics.float_formats import HALF, STORED_AS_BITS, encode

_NAN = 0x7FFFFFFF  # what the arithmetic instructions of fp32 give
_STRUCTS = {"f16": ("<e", 0), "bf16": ("<f", 16), "f32": ("<f", 0), "f64": ("<d", 0)}


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

    def decode(self, bits: int) -> Any:
        bits &= self.mask
        if self.letter == "f":
            form, shift = _STRUCTS[self.name]
            return struct.unpack(form, (bits << shift).to_bytes(struct.calcsize(form), "little"))[0]
        if self.letter == "s" and bits >> (self.bits - 1):
            return bits - (1 << self.bits)
        return bits

    def encode(self, value: Any) -> int:
        if self.letter != "f":
            return int(value) & self.mask
        if self.name == "f32":
            single = bytes(ctypes.c_float(value))  # rounds where struct refuses
            return _NAN if value != value else int.from_bytes(single, "little")
        if self.name == "f64":
            return int.from_bytes(struct.pack("<d", value), "little")
        form = HALF if self.name == "f16" else STORED_AS_BITS[self.name]
        return int(encode(np.array(float(value)), form))


def _type(name: str, letter: str, memory: Any, stored: str) -> ScalarType:
    kind = np.dtype(stored)
    raw = np.dtype(f"u{kind.itemsize}")
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
