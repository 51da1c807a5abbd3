"""Inline PTX that moves, converts, compares and branches, all within registers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from interlace.runtime.interpreter.inline_ptx.arithmetic import (
    BITS,
    FLOATS,
    INTEGERS,
    flushed,
    larger,
    smaller,
)
from interlace.runtime.interpreter.inline_ptx.syntax import Instruction, Pair, Vector
from interlace.runtime.interpreter.inline_ptx.types import PREDICATE, TYPES, ScalarType
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

UNTYPED = (*BITS, "b8", *INTEGERS, "u8", "s8", *FLOATS, "pred")

MOVES: dict[str, Builder] = {}
builds = adds_to(MOVES)


@builds("mov")
def build_move(instruction: Instruction) -> Action:
    kind = instruction.take_type(UNTYPED)
    instruction.finish(2)
    target, source = instruction.operands
    if isinstance(target, Vector) and not isinstance(source, Vector):
        part = _part(instruction, kind, len(target.parts))
        read = reader(instruction, source, kind)
        writes = [writer(instruction, operand, part) for operand in target.parts]

        def unpack(thread: Thread) -> None:
            bits = read(thread)
            for index, write in enumerate(writes):
                write(thread, bits >> index * part.bits & part.mask)

        return unpack
    write = writer(instruction, target, kind)
    if isinstance(source, Vector):
        part = _part(instruction, kind, len(source.parts))
        reads = [reader(instruction, operand, part) for operand in source.parts]

        def pack(thread: Thread) -> None:
            parts = [read(thread) << index * part.bits for index, read in enumerate(reads)]
            write(thread, sum(parts))

        return pack
    read = reader(instruction, source, kind)
    return lambda thread: write(thread, read(thread))


def _part(instruction: Instruction, kind: ScalarType, count: int) -> ScalarType:
    if kind.letter != "b" or count not in (2, 4) or kind.bits // count < 8:
        raise instruction.error(f"{count} parts do not make a .{kind.name}")
    return TYPES[f"b{kind.bits // count}"]


@builds("cvta")
def build_address_conversion(instruction: Instruction) -> Action:
    """Global addresses are generic addresses."""
    instruction.flag("to")
    instruction.flag("global")
    kind = instruction.take_type(("u64",))
    instruction.finish(2)
    write = writer(instruction, instruction.operands[0], kind)
    read = reader(instruction, instruction.operands[1], kind)
    return lambda thread: write(thread, read(thread))


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
        raise instruction.error(
            f"from .{source.name} to .{target.name} takes {wanted} as its rounding"
        )
    write = writer(instruction, instruction.operands[0], target, wider=True)
    read = reader(instruction, instruction.operands[1], source, wider=True)
    low, high = (-(1 << target.bits - 1), 1 << target.bits - 1)
    low, high = (low, high - 1) if target.letter == "s" else (0, target.mask)
    clamps = saturate or source.is_float

    def convert(thread: Thread) -> None:
        value = source.decode(read(thread))
        if flush and source.is_float:
            value = flushed(value)
        if integral and math.isfinite(value):
            value = math.copysign(_TO_INTEGRAL[integral](value), value)
        if target.is_float:
            if not source.is_float:
                value = _to_double(value) if target.bits < 64 else float(value)
            if saturate:
                value = larger(0.0, smaller(value, 1.0))
            write(thread, target.encode(flushed(value) if flush else value))
        elif value != value:
            write(thread, 1 << 63 if target.bits == 64 else 0)
        else:
            write(thread, target.encode(max(low, min(high, value)) if clamps else value))

    return convert


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
    target = instruction.operands[0]
    pair = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    write = writer(instruction, pair[0], PREDICATE)
    other = None if pair[1] is None else writer(instruction, pair[1], PREDICATE)
    first, second = (number_reader(instruction, x, kind) for x in instruction.operands[1:3])
    combine = _COMBINED[combined or "and"]
    third: Read = lambda thread: True  # noqa: E731
    if combined:
        third = reader(instruction, instruction.operands[3], PREDICATE)

    def set_predicate(thread: Thread) -> None:
        x, y = first(thread), second(thread)
        found = compare(flushed(x), flushed(y)) if flush else compare(x, y)
        with_it = bool(third(thread))
        write(thread, int(combine(found, with_it)))
        if other is not None:
            other(thread, int(combine(not found, with_it)))

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


@builds("selp")
def build_selection(instruction: Instruction) -> Action:
    kind = instruction.take_type((*BITS, *INTEGERS, *FLOATS))
    instruction.finish(4)
    write = writer(instruction, instruction.operands[0], kind)
    first, second = (reader(instruction, x, kind) for x in instruction.operands[1:3])
    predicate = reader(instruction, instruction.operands[3], PREDICATE)
    return lambda thread: write(thread, first(thread) if predicate(thread) else second(thread))


@builds("bra")
def build_branch(instruction: Instruction) -> Action:
    instruction.flag("uni")
    instruction.finish(0)
    target = instruction.target
    return lambda thread: target
