"""Inline PTX that computes: integers, bits and floats.

One builder per mnemonic turns an instruction into an action; see ``values.py``. Results are
those of the instruction, rounded once; rounding other than to nearest even is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from interlace.runtime.interpreter.inline_ptx.syntax import Instruction
from interlace.runtime.interpreter.inline_ptx.types import TYPES, ScalarType
from interlace.runtime.interpreter.inline_ptx.values import (
    Action,
    Builder,
    Read,
    Thread,
    adds_to,
    number_reader,
    reader,
    writer,
)
from interlace.runtime.numerics.float_formats import fused_multiply_add

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
SIGNED = ("s16", "s32", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
BITS = ("b16", "b32", "b64")
SMALLEST_NORMAL = 2.0**-126

ARITHMETIC: dict[str, Builder] = {}
builds = adds_to(ARITHMETIC)


# -- numbers in, number out ------------------------------------------------------------------------


def quotient(x: int, y: int) -> int:
    """Truncated, as in C."""
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def float_quotient(x: float, y: float) -> float:
    if y == 0.0:
        return math.nan if x == 0.0 or x != x else math.copysign(math.inf, x) * math.copysign(1, y)
    return x / y


def larger(x: float, y: float) -> float:
    """The number if only one is; +0 is larger than -0."""
    if x != x or y != y:
        return y if x != x else x
    return max(x, y) if x != y else (y if math.copysign(1, x) < 0 else x)


def smaller(x: float, y: float) -> float:
    return -larger(-x, -y)


def _fused(x: float, y: float, z: float) -> float:
    with np.errstate(all="ignore"):
        return float(fused_multiply_add(np.array(x), np.array(y), np.array(z)))


_OF_INTEGERS: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "add": (operator.add, INTEGERS),
    "sub": (operator.sub, INTEGERS),
    "div": (quotient, INTEGERS),
    "rem": (lambda x, y: x - y * quotient(x, y), INTEGERS),
    "min": (min, INTEGERS),
    "max": (max, INTEGERS),
    "and": (operator.and_, (*BITS, "pred")),
    "or": (operator.or_, (*BITS, "pred")),
    "xor": (operator.xor, (*BITS, "pred")),
    "not": (operator.invert, (*BITS, "pred")),
    "neg": (operator.neg, SIGNED),
    "abs": (abs, SIGNED),
}
_OF_FLOATS: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": float_quotient,
    "min": smaller,
    "max": larger,
    "neg": operator.neg,
    "abs": abs,
    "fma": _fused,
    "mad": _fused,
}
_OPERANDS = {"not": 1, "neg": 1, "abs": 1, "fma": 3, "mad": 3}


@builds("add", "sub", "div", "rem", "min", "max", "and", "or", "xor", "not", "neg", "abs")
@builds("mul", "mad", "fma")
def build_arithmetic(instruction: Instruction) -> Action:
    name = instruction.mnemonic
    function, allowed = _OF_INTEGERS.get(name, (None, () if name == "fma" else INTEGERS))
    if name in _OF_FLOATS:
        # a product of fp64 numbers is not exact in fp64
        allowed = (*allowed, *(FLOATS[:3] if name in ("fma", "mad") else FLOATS))
    kind = instruction.take_type(allowed)
    if not kind.is_float:
        if function is None:
            return _multiply(instruction, kind)
        return _apply(instruction, kind, function)
    instruction.flag("rn")
    if name == "div":
        instruction.choose("approx", "full")  # the right answer is one of those they may give
    plain = _OF_FLOATS[name]
    if instruction.flag("ftz"):
        return _apply(instruction, kind, lambda *given: flushed(plain(*map(flushed, given))))
    return _apply(instruction, kind, plain)


def flushed(value: float) -> float:
    """Subnormal numbers are zero."""
    return math.copysign(0.0, value) if abs(value) < SMALLEST_NORMAL else value


def _apply(instruction: Instruction, kind: ScalarType, function: Callable[..., Any]) -> Action:
    count = _OPERANDS.get(instruction.mnemonic, 2)
    instruction.finish(count + 1)
    write = writer(instruction, instruction.operands[0], kind)
    reads = [number_reader(instruction, operand, kind) for operand in instruction.operands[1:]]
    encode = kind.encode
    if count == 2:
        first, second = reads

        def two(thread: Thread) -> None:
            write(thread, encode(function(first(thread), second(thread))))

        return _division_checked(instruction, two)

    def any_number(thread: Thread) -> None:
        write(thread, encode(function(*[read(thread) for read in reads])))

    return any_number


def _division_checked(instruction: Instruction, action: Action) -> Action:
    if instruction.mnemonic not in ("div", "rem"):
        return action

    def checked(thread: Thread) -> None:
        try:
            action(thread)
        except ZeroDivisionError:
            raise ZeroDivisionError(
                f"inline PTX: division by zero; line {instruction.line}: {instruction.text}"
            ) from None

    return checked


def _multiply(instruction: Instruction, kind: ScalarType) -> Action:
    part = instruction.choose("lo", "hi", "wide")
    if part is None:
        raise instruction.error(f"'{instruction.opcode}' needs one of .lo, .hi, .wide")
    adds = instruction.mnemonic == "mad"
    instruction.finish(4 if adds else 3)
    if part == "wide" and kind.bits == 64:
        raise instruction.error("'.wide' takes 16 or 32 bits")
    result = TYPES[f"{kind.letter}{2 * kind.bits}"] if part == "wide" else kind
    write = writer(instruction, instruction.operands[0], result)
    first, second = (number_reader(instruction, x, kind) for x in instruction.operands[1:3])
    shift = kind.bits if part == "hi" else 0
    addend: Read = lambda thread: 0  # noqa: E731
    if adds:
        addend = number_reader(instruction, instruction.operands[3], result)

    def multiply(thread: Thread) -> None:
        product = first(thread) * second(thread) >> shift
        write(thread, result.encode(product + addend(thread)))

    return multiply


@builds("shl", "shr")
def build_shift(instruction: Instruction) -> Action:
    left = instruction.mnemonic == "shl"
    kind = instruction.take_type(BITS if left else (*BITS, *INTEGERS))
    instruction.finish(3)
    write = writer(instruction, instruction.operands[0], kind)
    value = number_reader(instruction, instruction.operands[1], kind)
    amount = reader(instruction, instruction.operands[2], TYPES["u32"])

    def shift(thread: Thread) -> None:
        by = min(amount(thread), kind.bits)
        write(thread, kind.encode(value(thread) << by if left else value(thread) >> by))

    return shift


@builds("popc", "clz")
def build_count(instruction: Instruction) -> Action:
    kind = instruction.take_type(("b32", "b64"))
    instruction.finish(2)
    write = writer(instruction, instruction.operands[0], TYPES["u32"])
    value = reader(instruction, instruction.operands[1], kind)
    if instruction.mnemonic == "popc":
        return lambda thread: write(thread, bin(value(thread)).count("1"))
    return lambda thread: write(thread, kind.bits - value(thread).bit_length())
