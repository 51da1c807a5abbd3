"""PTX within registers: what computes, shifts, counts and compares.

One builder per mnemonic turns an instruction into an action. Results are those of the instruction,
rounded once; rounding other than to nearest even is refused.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from interlace.runtime.numerics.float_formats import fused_multiply_add
from interlace.runtime.ptx.instruction import Action, Instruction, builders
from interlace.runtime.ptx.special import Threads
from interlace.runtime.ptx.types import PREDICATE, TYPES, Array, ScalarType

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
SIGNED = ("s16", "s32", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
BITS = ("b16", "b32", "b64")
PAIRS = {"f16x2": "f16", "bf16x2": "bf16"}
SMALLEST_NORMAL = np.float32(2.0**-126)

ARITHMETIC, builds = builders()


# -- numbers in, numbers out -----------------------------------------------------------------------


def quotient(x: Array, y: Array) -> Array:
    """Truncated, as in C."""
    return (x - np.fmod(x, y)) // y


def larger(x: Array, y: Array) -> Array:
    """The number if only one is; +0 is larger than -0."""
    return np.where((x == y) & np.signbit(x), y, np.fmax(x, y))


def smaller(x: Array, y: Array) -> Array:
    return -larger(-x, -y)


_OF_INTEGERS: dict[str, tuple[Callable[..., Array], tuple[str, ...]]] = {
    "add": (operator.add, INTEGERS),
    "sub": (operator.sub, INTEGERS),
    "div": (quotient, INTEGERS),
    "rem": (np.fmod, INTEGERS),
    "min": (np.minimum, INTEGERS),
    "max": (np.maximum, INTEGERS),
    "and": (operator.and_, (*BITS, "pred")),
    "or": (operator.or_, (*BITS, "pred")),
    "xor": (operator.xor, (*BITS, "pred")),
    "not": (operator.invert, (*BITS, "pred")),
    "neg": (operator.neg, SIGNED),
    "abs": (np.abs, SIGNED),
}
_OF_FLOATS: dict[str, Callable[..., Array]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "min": smaller,
    "max": larger,
    "neg": operator.neg,
    "abs": np.abs,
    "fma": fused_multiply_add,
    "mad": fused_multiply_add,
}
_OPERANDS = {"not": 1, "neg": 1, "abs": 1, "fma": 3, "mad": 3}


@builds(*_OF_INTEGERS, "mul", "mad", "fma")
def build_arithmetic(instruction: Instruction) -> Action:
    name = instruction.mnemonic
    pair = instruction.choose(*PAIRS) if name in _OF_FLOATS else None
    function, allowed = _OF_INTEGERS.get(name, (None, () if name == "fma" else INTEGERS))
    if name in _OF_FLOATS:
        # a product of fp64 numbers is not exact in fp64
        allowed = (*allowed, *(FLOATS[:3] if name in ("fma", "mad") else FLOATS))
    kind = TYPES[PAIRS[pair]] if pair else instruction.take_type(allowed)
    count = 1 + _OPERANDS.get(name, 2)
    if kind.is_float:
        instruction.flag("rn")
        if name == "div":
            instruction.choose("approx", "full")  # the right answer is one of those they may give
        compute = _OF_FLOATS[name]
        if instruction.flag("ftz"):
            compute = _flushing(compute)
        if pair:
            return instruction.computes(_lanewise(compute, kind), *[TYPES["b32"]] * count, raw=True)
        return instruction.computes(compute, *[kind] * count)
    if function is None:
        return _multiply(instruction, kind)
    if name not in ("div", "rem"):
        return instruction.computes(function, *[kind] * count)

    def check(x: Array, y: Array) -> None:
        if not y.all():
            raise ZeroDivisionError(
                f"PTX: division by zero; line {instruction.line}: {instruction.text}"
            )

    return instruction.computes(function, *[kind] * count, check=check)


def _lanewise(function: Callable[..., Array], kind: ScalarType) -> Callable[..., Array]:
    """Of pairs of 16-bit numbers in registers of 32 bits."""

    def compute(*given: Array) -> Array:
        halves = [np.stack([x & np.uint32(0xFFFF), x >> np.uint32(16)]) for x in given]
        numbers = [kind.decode(half.astype(np.uint16)) for half in halves]
        low, high = kind.encode(function(*numbers)).astype(np.uint32)
        return low | high << np.uint32(16)

    return compute


def flushed(values: Array) -> Array:
    """Subnormal numbers are zero."""
    zero = np.copysign(values.dtype.type(0), values)
    return np.where(np.abs(values) < SMALLEST_NORMAL, zero, values)


def _flushing(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *given: flushed(function(*map(flushed, given)).astype(given[0].dtype))


def _multiply(instruction: Instruction, kind: ScalarType) -> Action:
    part = instruction.choose("lo", "hi", "wide")
    if part is None:
        raise instruction.error(f"'{instruction.opcode}' needs one of .lo, .hi, .wide")
    if part == "wide" and kind.bits == 64:
        raise instruction.error("'.wide' takes 16 or 32 bits")
    result = TYPES[f"{kind.letter}{2 * kind.bits}"] if part == "wide" else kind
    addend = [result] if instruction.mnemonic == "mad" else []
    if part == "lo":
        multiply: Callable[..., Array] = operator.mul
    elif part == "wide":
        wide = result.stored

        def multiply(x: Array, y: Array) -> Array:
            return x.astype(wide) * y.astype(wide)
    else:

        def multiply(x: Array, y: Array) -> Array:
            high = x.astype(object) * y.astype(object) >> kind.bits
            return np.asarray(high).astype(kind.stored)

    return instruction.computes(
        (lambda x, y, z: multiply(x, y) + z) if addend else multiply, result, kind, kind, *addend
    )


_APPROXIMATED: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "tanh": np.tanh,
}


@builds(*_APPROXIMATED)
def build_function(instruction: Instruction) -> Action:
    """What ``.approx`` may give, and ``.rn`` has to: the right answer, rounded once."""
    instruction.choose("approx", "rn")
    flush, kind = instruction.flag("ftz"), instruction.take_type(("f32",))
    function = _APPROXIMATED[instruction.mnemonic]

    def compute(x: Array) -> Array:
        exact = function((flushed(x) if flush else x).astype(np.float64)).astype(np.float32)
        return flushed(exact) if flush else exact

    return instruction.computes(compute, kind, kind)


@builds("shl", "shr")
def build_shift(instruction: Instruction) -> Action:
    left = instruction.mnemonic == "shl"
    kind = instruction.take_type(BITS if left else (*BITS, *INTEGERS))
    shift, most = np.left_shift if left else np.right_shift, np.uint32(kind.bits)
    return instruction.computes(
        lambda value, by: shift(value, np.minimum(by, most).astype(kind.stored)),
        kind,
        kind,
        TYPES["u32"],
    )


@builds("shf")
def build_funnel_shift(instruction: Instruction) -> Action:
    left = instruction.choose("l", "r") == "l"
    clamps = instruction.choose("clamp", "wrap") == "clamp"
    kind = instruction.take_type(("b32",))

    def shift(low: Array, high: Array, by: Array) -> Array:
        by = (np.minimum(by, np.uint32(32)) if clamps else by & np.uint32(31)).astype(np.uint64)
        whole = high.astype(np.uint64) << np.uint64(32) | low
        return (whole << by >> np.uint64(32) if left else whole >> by).astype(np.uint32)

    return instruction.computes(shift, kind, kind, kind, kind)


@builds("bfe")
def build_field(instruction: Instruction) -> Action:
    """Bits from a position on, as many as given; signed ones extend the last."""
    kind = instruction.take_type(("u32", "s32", "u64", "s64"))
    bits = np.uint32(kind.bits)

    def extract(value: Array, start: Array, length: Array) -> Array:
        start, length = start & np.uint32(0xFF), length & np.uint32(0xFF)
        end = np.minimum(start + length, bits)
        # up against the top, then down: what was above is gone, what was below too
        moved = np.left_shift(value, (bits - end).astype(kind.stored))
        width = np.where(start < end, end - start, np.uint32(0))
        found = np.right_shift(moved, (bits - width).astype(kind.stored))
        past = (length > 0) & (start >= bits)  # all of a signed field is its sign
        beyond = np.right_shift(value, bits.astype(kind.stored))
        return np.where(past, beyond, np.where(length > 0, found, kind.stored.type(0)))

    return instruction.computes(extract, kind, kind, TYPES["u32"], TYPES["u32"])


@builds("prmt")
def build_permutation(instruction: Instruction) -> Action:
    """Bytes of two registers, chosen by four numbers of four bits; the highest takes a byte's sign."""
    kind = instruction.take_type(("b32",))

    def permute(low: Array, high: Array, selector: Array) -> Array:
        whole = high.astype(np.uint64) << np.uint64(32) | low
        result = np.zeros(np.broadcast(low, high, selector).shape, np.uint64)
        for index in range(4):
            nibble = selector.astype(np.uint64) >> np.uint64(4 * index) & np.uint64(15)
            byte = whole >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
            sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
            result |= np.where(nibble > 7, sign, byte) << np.uint64(8 * index)
        return result.astype(np.uint32)

    return instruction.computes(permute, kind, kind, kind, kind)


@builds("lop3")
def build_logic(instruction: Instruction) -> Action:
    """Any logic of three: bit ``4 a + 2 b + c`` of the last operand is the result of bits a, b, c."""
    kind = instruction.take_type(("b32",))
    table = instruction.literal(instruction.operands.pop(), TYPES["u32"])
    if table is None:
        raise instruction.error("the table of 'lop3' must be a whole number")

    def look_up(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
        for entry in range(8):
            if table >> entry & 1:
                each = [x if entry >> 2 - i & 1 else ~x for i, x in enumerate((a, b, c))]
                result |= each[0] & each[1] & each[2]
        return result

    return instruction.computes(look_up, kind, kind, kind, kind)


def ones(value: Array) -> Array:
    """How many bits are 1."""
    value = np.asarray(value)
    octets = value.reshape(-1, 1).view(np.uint8)
    return np.unpackbits(octets, axis=1).sum(axis=1, dtype=np.uint32).reshape(value.shape)


@builds("popc", "clz")
def build_count(instruction: Instruction) -> Action:
    kind = instruction.take_type(("b32", "b64"))

    def leading_zeros(value: Array) -> Array:
        for by in (1, 2, 4, 8, 16, 32):  # all bits below the first
            value = value | np.right_shift(value, kind.stored.type(by))
        return np.uint32(kind.bits) - ones(value)

    count = ones if instruction.mnemonic == "popc" else leading_zeros
    return instruction.computes(count, TYPES["u32"], kind)


# -- predicates ------------------------------------------------------------------------------------

_ORDERED: dict[str, Callable[[Any, Any], Array]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_OF_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_UNORDERED = {f"{name}u": name for name in _ORDERED}
_COMBINED: dict[str, Callable[[Array, Array], Array]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


@builds("selp")
def build_selection(instruction: Instruction) -> Action:
    kind = instruction.take_type((*BITS, *INTEGERS, *FLOATS))
    return instruction.computes(
        lambda x, y, chosen: np.where(chosen, x, y), kind, kind, kind, PREDICATE, raw=True
    )


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

    def set_predicate(threads: Threads) -> None:
        x, y = first(threads), second(threads)
        found = compare(flushed(x), flushed(y)) if flush else compare(x, y)
        results = [found] if len(writes) == 1 else [found, ~found]
        for third in thirds:
            results = [combine(each, third(threads)) for each in results]
        for write, each in zip(writes, results, strict=False):
            write(threads, each)

    return set_predicate


def _comparison(name: str, kind: ScalarType) -> Callable[[Any, Any], Array] | None:
    if kind.is_float:
        if name in ("num", "nan"):
            return lambda x, y: ((x == x) & (y == y)) == (name == "num")
        if name in _UNORDERED:
            ordered = _ORDERED[_UNORDERED[name]]
            return lambda x, y: (x != x) | (y != y) | ordered(x, y)
        if name == "ne":  # ordered, unlike numpy's
            return lambda x, y: (x == x) & (y == y) & (x != y)
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
    return lambda threads: instruction.target
