"""PTX within registers: what moves and converts.

Conversions round once. What PTX leaves to the hardware, a NaN as an integer, is what it gives there: 0, or
the highest bit of 64.
"""

from collections.abc import Callable

import numpy as np

from interlace.runtime.ptx.arithmetic import (
    BITS,
    FLOATS,
    INTEGERS,
    PAIRS,
    flushed,
    larger,
    smaller,
)
from interlace.runtime.ptx.instruction import Action, Instruction, builders
from interlace.runtime.ptx.special import Threads
from interlace.runtime.ptx.types import TYPES, Array, ScalarType

MOVES, builds = builders()


@builds("mov")
def build_move(instruction: Instruction) -> Action:
    kind = instruction.take_type((*BITS, "b8", *INTEGERS, "u8", "s8", *FLOATS, "pred"))
    instruction.finish(2)
    targets, sources = (_parts(instruction, operand, kind) for operand in instruction.operands)
    if len(targets) == len(sources) == 1:
        (_, source, part), (_, target, _) = sources[0], targets[0]
        read, put = instruction.reader(source, part), instruction.writer(target, part)
        return lambda threads: put(threads, read(threads))
    writes = [(shift, part, instruction.writer(name, part)) for shift, name, part in targets]
    reads = [(shift, instruction.reader(name, part)) for shift, name, part in sources]
    whole = kind.raw

    def move(threads: Threads) -> None:
        bits = whole.type(0)
        for shift, read in reads:
            bits = bits | read(threads).astype(whole) << whole.type(shift)
        for shift, part, write in writes:
            write(threads, (bits >> whole.type(shift)).astype(part.raw))

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
    """Addresses of every state space are generic addresses."""
    instruction.flag("to")
    instruction.choose("global", "shared", "shared::cta", "const", "local")
    kind = instruction.take_type(("u64", "u32"))
    return instruction.computes(lambda address: address, kind, kind)


_TO_INTEGRAL: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


@builds("cvt")
def build_conversion(instruction: Instruction) -> Action:
    known = (*INTEGERS, "u8", "s8", *FLOATS)
    if pair := instruction.choose(*PAIRS):
        return _to_pair(instruction, TYPES[PAIRS[pair]])
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

    def convert(values: Array) -> Array:
        if flush and source.is_float:
            values = flushed(values)
        if integral:
            values = _TO_INTEGRAL[integral](values)
        if target.is_float:
            if not source.is_float:
                values = _to_double(values) if target.bits < 64 else values.astype(np.float64)
            if saturate:
                zero, one = values.dtype.type(0), values.dtype.type(1)
                values = larger(zero, smaller(values, one))
            return flushed(values) if flush else values
        if source.is_float:
            return _to_integer(values, target)
        return _clamped(values, target) if saturate else values.astype(target.stored)

    return instruction.computes(convert, target, source, wider=True)


def _to_pair(instruction: Instruction, kind: ScalarType) -> Action:
    """Two fp32 numbers, the first in the high half."""
    instruction.take_type(("f32",))
    if not instruction.flag("rn"):
        raise instruction.error("of pairs only '.rn' is known")
    rectify = instruction.flag("relu")

    def convert(high: Array, low: Array) -> Array:
        if rectify:
            high, low = (larger(each, np.float32(0)) for each in (high, low))
        halves = [kind.encode(each).astype(np.uint32) for each in (high, low)]
        return halves[0] << np.uint32(16) | halves[1]

    return instruction.computes(convert, TYPES["b32"], TYPES["f32"], TYPES["f32"])


def _to_integer(values: Array, target: ScalarType) -> Array:
    """Whole numbers, clamped."""
    limits = np.iinfo(target.stored)
    low, high = float(limits.min), float(limits.max)
    wide = values.astype(np.float64)
    inside = np.where((wide > low) & (wide < high), wide, 0.0).astype(target.stored)
    found = np.where(wide >= high, target.stored.type(limits.max), inside)
    found = np.where(wide <= low, target.stored.type(limits.min), found)
    wrong = np.array(1 << 63 if target.bits == 64 else 0, np.uint64).astype(target.stored)
    return np.where(np.isnan(wide), wrong, found)


def _clamped(values: Array, target: ScalarType) -> Array:
    limits, own = np.iinfo(target.stored), np.iinfo(values.dtype)
    low, high = max(limits.min, own.min), min(limits.max, own.max)
    kind = values.dtype.type
    return np.minimum(np.maximum(values, kind(low)), kind(high)).astype(target.stored)


def _to_double(values: Array) -> Array:
    """Rounded to odd, so that rounding it again gives the singly rounded result."""
    near = values.astype(np.float64)
    if values.dtype.itemsize < 8:
        return near
    unsigned = values.astype(np.uint64)
    magnitude = np.where(values < 0, np.negative(unsigned), unsigned)
    cut = magnitude & np.uint64(0x7FF)  # fp64 keeps 53 of 64 bits
    sticky = magnitude - cut | np.where(cut != 0, np.uint64(0x800), np.uint64(0))
    large = magnitude >= np.uint64(1 << 53)
    odd = np.where(large, sticky, magnitude).astype(np.float64)
    return np.copysign(odd, near)
