"""Inline PTX within registers: what computes, moves, converts, compares and branches.

One builder per mnemonic turns an instruction into an action. Results are those of the instruction,
rounded once; rounding other than to nearest even is refused.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from interlace.runtime.numerics.float_formats import fused_multiply_add
from interlace.runtime.ptx.instruction import Action, Instruction, builders
from interlace.runtime.ptx.special import Thread
from interlace.runtime.ptx.types import PREDICATE, TYPES, ScalarType

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
SIGNED = ("s16", "s32", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
BITS = ("b16", "b32", "b64")
SMALLEST_NORMAL = 2.0**-126

ARITHMETIC, builds = builders()


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


@builds(*_OF_INTEGERS, "mul", "mad", "fma")
def build_arithmetic(instruction: Instruction) -> Action:
    name = instruction.mnemonic
    function, allowed = _OF_INTEGERS.get(name, (None, () if name == "fma" else INTEGERS))
    if name in _OF_FLOATS:
        # a product of fp64 numbers is not exact in fp64
        allowed = (*allowed, *(FLOATS[:3] if name in ("fma", "mad") else FLOATS))
    kind = instruction.take_type(allowed)
    compute: Callable[..., Any]
    if kind.is_float:
        instruction.flag("rn")
        if name == "div":
            instruction.choose("approx", "full")  # the right answer is one of those they may give
        compute = _OF_FLOATS[name]
        if instruction.flag("ftz"):
            compute = _flushing(compute)
    elif function is None:
        return _multiply(instruction, kind)
    else:
        compute = _division(instruction, function) if name in ("div", "rem") else function
    return instruction.computes(compute, *[kind] * (1 + _OPERANDS.get(name, 2)))


def flushed(value: float) -> float:
    """Subnormal numbers are zero."""
    return math.copysign(0.0, value) if abs(value) < SMALLEST_NORMAL else value


def _flushing(function: Callable[..., float]) -> Callable[..., float]:
    return lambda *given: flushed(function(*map(flushed, given)))


def _division(instruction: Instruction, function: Callable[..., int]) -> Callable[..., int]:
    def checked(x: int, y: int) -> int:
        if y == 0:
            raise ZeroDivisionError(
                f"inline PTX: division by zero; line {instruction.line}: {instruction.text}"
            )
        return function(x, y)

    return checked


def _multiply(instruction: Instruction, kind: ScalarType) -> Action:
    part = instruction.choose("lo", "hi", "wide")
    if part is None:
        raise instruction.error(f"'{instruction.opcode}' needs one of .lo, .hi, .wide")
    if part == "wide" and kind.bits == 64:
        raise instruction.error("'.wide' takes 16 or 32 bits")
    result = TYPES[f"{kind.letter}{2 * kind.bits}"] if part == "wide" else kind
    shift = kind.bits if part == "hi" else 0
    addend = [result] if instruction.mnemonic == "mad" else []
    return instruction.computes(lambda x, y, z=0: (x * y >> shift) + z, result, kind, kind, *addend)


@builds("shl", "shr")
def build_shift(instruction: Instruction) -> Action:
    left = instruction.mnemonic == "shl"
    kind = instruction.take_type(BITS if left else (*BITS, *INTEGERS))
    shift = operator.lshift if left else operator.rshift
    return instruction.computes(
        lambda value, by: shift(value, min(by, kind.bits)), kind, kind, TYPES["u32"]
    )


@builds("popc", "clz")
def build_count(instruction: Instruction) -> Action:
    kind = instruction.take_type(("b32", "b64"))
    if instruction.mnemonic == "popc":
        return instruction.computes(int.bit_count, TYPES["u32"], kind)
    return instruction.computes(lambda value: kind.bits - value.bit_length(), TYPES["u32"], kind)


# -- moves and conversions -------------------------------------------------------------------------


@builds("mov")
def build_move(instruction: Instruction) -> Action:
    kind = instruction.take_type((*BITS, "b8", *INTEGERS, "u8", "s8", *FLOATS, "pred"))
    instruction.finish(2)
    target, source = (_parts(instruction, operand, kind) for operand in instruction.operands)
    writes = [(shift, part.mask, instruction.writer(name, part)) for shift, name, part in target]
    reads = [(shift, instruction.reader(name, part)) for shift, name, part in source]

    def move(thread: Thread) -> None:
        bits = sum(read(thread) << shift for shift, read in reads)
        for shift, mask, write in writes:
            write(thread, bits >> shift & mask)

    return move


def _parts(
    instruction: Instruction, operand: str, kind: ScalarType
) -> list[tuple[int, str, ScalarType]]:
    """The registers of a packed operand, or of a plain one: the first bit, the name, the type."""
    names = instruction.parts(operand)
    if names == [operand]:
        return [(0, operand, kind)]
    if kind.letter != "b" or len(names) not in (2, 4) or kind.bits // len(names) < 8:
        raise instruction.error(f"{len(names)} parts do not make a .{kind.name}")
    part = TYPES[f"b{kind.bits // len(names)}"]
    return [(index * part.bits, name, part) for index, name in enumerate(names)]


@builds("cvta")
def build_address_conversion(instruction: Instruction) -> Action:
    """Global addresses are generic addresses."""
    instruction.flag("to")
    instruction.flag("global")
    kind = instruction.take_type(("u64",))
    return instruction.computes(int, kind, kind)


@builds("selp")
def build_selection(instruction: Instruction) -> Action:
    kind = instruction.take_type((*BITS, *INTEGERS, *FLOATS))
    return instruction.computes(
        lambda x, y, chosen: x if chosen else y, kind, kind, kind, PREDICATE, raw=True
    )


_TO_INTEGRAL: dict[str, Callable[[float], Any]] = {
    "rni": round,
    "rzi": math.trunc,
    "rmi": math.floor,
    "rpi": math.ceil,
}


@builds("cvt")
def build_conversion(instruction: Instruction) -> Action:
    known = (*INTEGERS, "u8", "s8", *FLOATS)
    target, source = instruction.take_type(known), instruction.take_type(known)
    integral = instruction.choose(*_TO_INTEGRAL)
    nearest, saturate = instruction.flag("rn"), instruction.flag("sat")
    flush = instruction.flag("ftz")
    instruction.finish(2)
    narrows = target.is_float and (not source.is_float or source.bits > target.bits)
    needs_integral = source.is_float and not target.is_float
    if (
        nearest != narrows
        or (needs_integral and not integral)
        or (integral and not source.is_float)
    ):
        wanted = "one of .rni, .rzi, .rmi, .rpi" if needs_integral else "none"
        wanted = "'.rn'" if narrows else wanted
        raise instruction.error(f"from .{source.name} to .{target.name} takes {wanted} as rounding")
    low, high = (-(1 << target.bits - 1), 1 << target.bits - 1)
    low, high = (low, high - 1) if target.letter == "s" else (0, target.mask)
    clamps = saturate or source.is_float

    def convert(value: Any) -> Any:
        if flush and source.is_float:
            value = flushed(value)
        if integral and math.isfinite(value):
            value = math.copysign(_TO_INTEGRAL[integral](value), value)
        if target.is_float:
            if not source.is_float:
                value = _to_double(value) if target.bits < 64 else float(value)
            if saturate:
                value = larger(0.0, smaller(value, 1.0))
            return flushed(value) if flush else value
        if value != value:
            return 1 << 63 if target.bits == 64 else 0
        return max(low, min(high, value)) if clamps else value

    return instruction.computes(convert, target, source, wider=True)


def _to_double(value: int) -> float:
    """Rounded to odd, so that rounding it again gives the singly rounded result."""
    magnitude = abs(value)
    cut = max(0, magnitude.bit_length() - 53)
    sticky = 1 if magnitude & ((1 << cut) - 1) else 0
    return math.copysign(float((magnitude >> cut | sticky) << cut), value)


# -- predicates and branches -----------------------------------------------------------------------

_ORDERED: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_OF_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_UNORDERED = {f"{name}u": name for name in _ORDERED}
_COMBINED: dict[str, Callable[[bool, bool], bool]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


@builds("setp")
def build_comparison(instruction: Instruction) -> Action:
    name = instruction.choose(*_ORDERED, *_OF_UNSIGNED, *_UNORDERED, "num", "nan")
    combined = instruction.choose(*_COMBINED)
    kind = instruction.take_type((*BITS, *INTEGERS, *FLOATS))
    flush = kind.is_float and instruction.flag("ftz")
    instruction.finish(4 if combined else 3)
    if name is None:
        raise instruction.error("'setp' needs a comparison such as .eq or .lt")
    compare = _comparison(name, kind)
    if compare is None:
        raise instruction.error(f"'.{name}' does not compare .{kind.name}")
    target, *compared = instruction.operands
    # of two predicates, p|q, the second gets the opposite
    writes = [instruction.writer(each.strip(), PREDICATE) for each in target.split("|")]
    first, second = (instruction.numbers(each, kind) for each in compared[:2])
    thirds = [instruction.reader(each, PREDICATE) for each in compared[2:]]
    combine = _COMBINED[combined or "and"]

    def set_predicate(thread: Thread) -> None:
        x, y = first(thread), second(thread)
        found = compare(flushed(x), flushed(y)) if flush else compare(x, y)
        with_it = all(third(thread) for third in thirds)
        for write, each in zip(writes, (found, not found), strict=False):
            write(thread, int(combine(each, with_it)))

    return set_predicate


def _comparison(name: str, kind: ScalarType) -> Callable[[Any, Any], bool] | None:
    if kind.is_float:
        if name in ("num", "nan"):
            return lambda x, y: (x == x and y == y) == (name == "num")
        if name in _UNORDERED:
            ordered = _ORDERED[_UNORDERED[name]]
            return lambda x, y: x != x or y != y or ordered(x, y)
        if name == "ne":  # ordered, unlike Python's
            return lambda x, y: x == x and y == y and x != y
        return _ORDERED.get(name)
    if kind.letter == "b":
        return _ORDERED[name] if name in ("eq", "ne") else None
    if kind.letter == "u":
        name = _OF_UNSIGNED.get(name, name)
    return _ORDERED.get(name)


@builds("bra")
def build_branch(instruction: Instruction) -> Action:
    instruction.flag("uni")
    instruction.finish(1)
    return lambda thread: instruction.target
