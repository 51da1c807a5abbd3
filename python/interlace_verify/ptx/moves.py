"""PTX within registers: moves and conversions.

Conversions round once. Where PTX leaves a result to the hardware (NaN as an integer), it is the hardware's:
0, or the highest bit of 64.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from interlace.runtime.numerics.exact import SINGLE, encode, larger, smaller
from interlace_verify.ptx.arithmetic import BITS, FLOATS, INTEGERS, flushed, rectified
from interlace_verify.ptx.instruction import Action, Instruction, builders
from interlace_verify.ptx.special import Threads
from interlace_verify.ptx.types import (
    FORMATS,
    ROUNDINGS,
    TYPES,
    Array,
    NarrowFloat,
    Rounding,
    ScalarType,
)

MOVES, builds = builders()


@builds("mov")
def build_move(instruction: Instruction) -> Action:
    if vector := instruction.choose("v2", "v4"):
        return _move_all(instruction, int(vector[1:]))
    if instruction.flag("b128"):
        instruction.qualifiers.append("b64")
        return _move_all(instruction, 2)
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


def _move_all(instruction: Instruction, count: int) -> Action:
    """Move part by part, or one number to all parts."""
    kind = instruction.take_type((*BITS, *INTEGERS, *FLOATS))
    instruction.finish(2)
    target, source = (instruction.parts(operand) for operand in instruction.operands)
    if len(target) != count or len(source) not in (1, count):
        raise instruction.error(f"'{instruction.opcode}' moves {count} registers")
    writes = [instruction.writer(each, kind) for each in target]
    reads = [instruction.reader(each, kind) for each in source * (count // len(source))]

    def move(threads: Threads) -> None:
        found = [read(threads) for read in reads]
        for write, bits in zip(writes, found, strict=True):
            write(threads, bits)

    return move


def _parts(
    instruction: Instruction, operand: str, kind: ScalarType
) -> list[tuple[int, str, ScalarType]]:
    """Return (first bit, name, type) of each register of a packed operand, or of a plain one."""
    names = instruction.parts(operand)
    if names == [operand]:
        return [(0, operand, kind)]
    if kind.letter != "b" or len(names) not in (2, 4) or kind.bits // len(names) < 8:
        raise instruction.error(f"{len(names)} parts do not make a .{kind.name}")
    part = TYPES[f"b{kind.bits // len(names)}"]
    return [(index * part.bits, name, part) for index, name in enumerate(names)]


@builds("cvta")
def build_address_conversion(instruction: Instruction) -> Action:
    """Convert an address. Addresses of every state space are generic addresses."""
    instruction.flag("to")
    instruction.choose("global", "shared", "shared::cta", "const", "local")
    kind = instruction.take_type(("u64", "u32"))
    return instruction.computes(lambda address: address, kind, kind)


@builds("isspacep")
def build_question(instruction: Instruction) -> Action:
    """Answer whether an address is global. Without shared memory all addresses are."""
    holds = instruction.flag("global")
    instruction.choose("shared", "shared::cta", "shared::cluster", "const", "local", "param")
    instruction.finish(2)
    write = instruction.writer(instruction.operands[0], TYPES["pred"])
    return lambda threads: write(threads, np.bool_(holds))


_TO_INTEGRAL: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


@builds("cvt")
def build_conversion(instruction: Instruction) -> Action:
    known = (*INTEGERS, "u8", "s8", *FLOATS)
    rounding = instruction.choose(*ROUNDINGS, "rs")
    rectify, saturate = instruction.flag("relu"), instruction.choose("sat", "satfinite")
    packed = [qualifier for qualifier in instruction.qualifiers if _PACKED.fullmatch(qualifier)]
    if packed:
        return _build_packed(instruction, packed, rounding, rectify, saturate == "satfinite")
    tensor = instruction.flag("tf32")
    target = TYPES["b32"] if tensor else instruction.take_type(known)
    source = instruction.take_type(("f32",) if tensor else known)
    integral, flush = instruction.choose(*_TO_INTEGRAL), instruction.flag("ftz")
    instruction.finish(2)
    to_float = tensor or target.is_float
    narrows = tensor or (to_float and (not source.is_float or source.bits > target.bits))
    needs_integral = source.is_float and not to_float
    if (
        (rounding in ROUNDINGS) != narrows
        or (needs_integral and not integral)
        or (integral and not source.is_float)
    ):
        wanted = "one of .rni, .rzi, .rmi, .rpi" if needs_integral else "no qualifier"
        wanted = f"one of .{', .'.join(ROUNDINGS)}" if narrows else wanted
        raise instruction.error(f"from .{source.name} to .{target.name} takes {wanted} as rounding")
    if narrows and (tensor or rounding != "rn" or saturate == "satfinite"):
        form = "tf32" if tensor else target.name
        if form not in (*FORMATS, "f32"):
            raise instruction.error(f"to .{form} only '.rn' is known")
        encode = _narrowing(form, str(rounding), saturate == "satfinite")
    else:
        encode = target.encode

    def convert(values: Array) -> Array:
        if flush and source.is_float:
            values = flushed(values)
        if integral:
            values = _TO_INTEGRAL[integral](values)
        if not to_float:
            if source.is_float:
                return target.encode(_to_integer(values, target))
            clamp = _clamp(values, target) if saturate else values.astype(target.stored)
            return target.encode(clamp)
        if not source.is_float:
            values = _to_double(values) if target.bits < 64 else values.astype(np.float64)
        if saturate == "sat":
            zero, one = values.dtype.type(0), values.dtype.type(1)
            values = larger(zero, smaller(values, one))
        if rectify:
            values = rectified(values)
        return encode(flushed(values) if flush else values)

    def raw(bits: Array) -> Array:
        return convert(source.decode(bits))

    return instruction.computes(raw, target, source, raw=True, wider=True)


def _narrowing(name: str, rounding: str, saturates: bool) -> Callable[[Array], Array]:
    if name == "f32":
        form = replace(SINGLE, overflow=SINGLE.largest) if saturates else SINGLE
        return lambda values: encode(values, form, ROUNDINGS[rounding])
    return lambda values: FORMATS[name].encode(values, ROUNDINGS[rounding], saturates=saturates)


# -- several numbers in a register -----------------------------------------------------------------

_PACKED = re.compile(rf"({'|'.join(FORMATS)})x([24])")
_RANDOM_BITS = {"f16": 13}  # for each number; 16 for other formats


def _build_packed(
    instruction: Instruction,
    packed: list[str],
    rounding: str | None,
    rectify: bool,
    saturates: bool,
) -> Action:
    """Convert from fp32 numbers, the first in the highest bits, or from a packed register."""
    for name in packed:
        instruction.flag(name)
    target, *sources = (_take_packed(name) for name in packed)
    (form, count, register) = target
    if instruction.flag("f32"):
        operands = [part for each in instruction.operands for part in instruction.parts(each)]
        instruction.operands, kinds = operands, [TYPES["f32"]] * count
    else:
        kinds = [sources[0][2]] if sources and sources[0][1] == count else []
    random = [TYPES["b32"]] if rounding == "rs" else []
    if not kinds or rounding is None:
        raise instruction.unknown(f"'{instruction.opcode}'", [f"{p} from f32" for p in FORMATS])
    saturates = saturates or form.name in ("e4m3", "e5m2")

    def convert(*given: Array) -> Array:
        if sources:
            numbers = _unpack(given[0], *sources[0][:2])
        else:
            numbers = [bits.view(np.float32) for bits in given[:count]][::-1]
        bits = register.raw.type(0)
        for index, values in enumerate(numbers):
            by = _by_chance(given[-1], index, form.name) if random else ROUNDINGS[rounding]
            values = rectified(values) if rectify else values
            code = form.encode(values, by, saturates=saturates).astype(register.raw)
            bits = bits | code << register.raw.type(index * form.bits)
        return bits

    return instruction.computes(convert, register, *kinds, *random, raw=True)


def _take_packed(name: str) -> tuple[NarrowFloat, int, ScalarType]:
    match = _PACKED.fullmatch(name)
    assert match is not None
    form, count = FORMATS[match[1]], int(match[2])
    return form, count, TYPES[f"b{form.bits * count}"]


def _unpack(bits: Array, form: NarrowFloat, count: int) -> list[Array]:
    """Return the numbers in a register, lowest first."""
    kind, mask = bits.dtype.type, bits.dtype.type((1 << form.bits) - 1)
    return [form.decode(bits >> kind(i * form.bits) & mask) for i in range(count)]


def _by_chance(bits: Array, index: int, name: str) -> Rounding:
    """Return stochastic rounding: up if the cut-off bits plus random bits carry. Each half of the 32 random
    bits serves one number of two, or two numbers of four; the second number uses it in reverse."""
    width = _RANDOM_BITS.get(name, 16)
    per_half = 1 if name in ("f16", "bf16") else 2
    half = bits >> np.uint32(16 * (index // per_half)) & np.uint32(0xFFFF)
    if index % per_half:
        half = sum((half >> np.uint32(i) & np.uint32(1)) << np.uint32(15 - i) for i in range(16))
    part = (half & np.uint32((1 << width) - 1)) / float(1 << width)
    return lambda units: np.copysign(np.floor(np.abs(units) + part), units)


def _to_integer(values: Array, target: ScalarType) -> Array:
    limits = np.iinfo(target.stored)
    low, high = float(limits.min), float(limits.max)
    wide = values.astype(np.float64)
    inside = np.where((wide > low) & (wide < high), wide, 0.0).astype(target.stored)
    found = np.where(wide >= high, target.stored.type(limits.max), inside)
    found = np.where(wide <= low, target.stored.type(limits.min), found)
    wrong = np.array(1 << 63 if target.bits == 64 else 0, np.uint64).astype(target.stored)
    return np.where(np.isnan(wide), wrong, found)


def _clamp(values: Array, target: ScalarType) -> Array:
    limits, source_limits = np.iinfo(target.stored), np.iinfo(values.dtype)
    low, high = max(limits.min, source_limits.min), min(limits.max, source_limits.max)
    kind = values.dtype.type
    return np.minimum(np.maximum(values, kind(low)), kind(high)).astype(target.stored)


def _to_double(values: Array) -> Array:
    """Convert with rounding to odd, so that a second rounding gives the singly rounded result."""
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
