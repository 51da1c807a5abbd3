"""PTX within registers: arithmetic, shifts, counts and comparisons. Results are exact, rounded once.

Rounding other than to nearest even is only implemented for fp32.
"""

import functools
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from interlace.runtime.numerics.exact import SINGLE, encode, fused_multiply_add, larger, smaller
from interlace_verify.ptx.instruction import CARRY, Action, Instruction, builders
from interlace_verify.ptx.special import Threads
from interlace_verify.ptx.types import PREDICATE, TYPES, Array, ScalarType

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
SIGNED = ("s16", "s32", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
BITS = ("b16", "b32", "b64")
PAIRS = {"f16x2": "f16", "bf16x2": "bf16"}
PACKED = {**PAIRS, "f32x2": "f32", "u16x2": "u16", "s16x2": "s16"}
REDUCTIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
SMALLEST_NORMAL = np.float32(2.0**-126)

ARITHMETIC, builds = builders()


# -- numbers in, numbers out -----------------------------------------------------------------------


def _or_ones(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Return all ones for a divisor of 0: PTX leaves it undefined, hardware returns ones. No trap."""

    def compute(x: Array, y: Array) -> Array:
        wrong = y == 0
        if not wrong.any():
            return function(x, y)
        return np.where(wrong, ~y.dtype.type(0), function(x, np.where(wrong, y.dtype.type(1), y)))

    return compute


@_or_ones
def quotient(x: Array, y: Array) -> Array:
    """Divide and truncate, as C does."""
    return (x - np.fmod(x, y)) // y


def _spreading_larger(x: Array, y: Array) -> Array:
    return np.where(np.isnan(x) | np.isnan(y), np.maximum(x, y), larger(x, y))


_SPREADING: dict[str, Callable[[Array, Array], Array]] = {
    "max": _spreading_larger,
    "min": lambda x, y: -_spreading_larger(-x, -y),
}


_OF_INTEGERS: dict[str, tuple[Callable[..., Array], tuple[str, ...]]] = {
    "add": (operator.add, INTEGERS),
    "sub": (operator.sub, INTEGERS),
    "div": (quotient, INTEGERS),
    "rem": (_or_ones(np.fmod), INTEGERS),
    "min": (smaller, INTEGERS),
    "max": (larger, INTEGERS),
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
    "copysign": lambda sign, value: np.copysign(value, sign),
    "fma": fused_multiply_add,
    "mad": fused_multiply_add,
}
_OPERANDS = {"not": 1, "neg": 1, "abs": 1, "fma": 3, "mad": 3}


@builds(*_OF_INTEGERS, "mul", "mad", "fma", "copysign")
def build_arithmetic(instruction: Instruction) -> Action:
    name = instruction.mnemonic
    if "cc" in instruction.qualifiers:
        return build_carrying(instruction)
    packed = instruction.choose(*PACKED)
    function, allowed = _OF_INTEGERS.get(
        name, (None, () if name in ("fma", "copysign") else INTEGERS)
    )
    if name in _OF_FLOATS:
        allowed = (*allowed, *FLOATS)
    kind = TYPES[PACKED[packed]] if packed else instruction.take_type(allowed)
    if packed and kind.name not in (*FLOATS, *_OF_SHORTS.get(name, ())):
        raise instruction.error(f"'{name}' is not interpreted for .{packed}")
    count = 1 + _OPERANDS.get(name, 2)
    if name in ("min", "max") and len(instruction.operands) == 4:
        count = 4
    if kind.is_float:
        function = _of_floats(instruction, kind)
    elif function is None:
        return _multiply(instruction, kind)
    elif name in ("add", "sub") and kind.name == "s32" and instruction.flag("sat"):
        function = _saturating(function)
    elif name in ("min", "max") and instruction.flag("relu"):
        function = _then(function, lambda x: np.maximum(x, x.dtype.type(0)))
    if packed:
        register = TYPES[f"b{2 * kind.bits}"]
        return instruction.computes(lanewise(function, kind), *[register] * count, raw=True)
    modular = function in (operator.add, operator.sub) and not kind.is_float  # signed or not
    return instruction.computes(function, *[kind] * count, raw=modular)


_OF_SHORTS = dict.fromkeys(("add", "min", "max"), ("u16", "s16"))
_DIRECTED = ("rz", "rm", "rp")


def _of_floats(instruction: Instruction, kind: ScalarType) -> Callable[..., Array]:
    name = instruction.mnemonic
    function = _OF_FLOATS[name]
    if name in ("min", "max"):
        if instruction.flag("NaN"):
            function = _SPREADING[name]
        if instruction.flag("xorsign"):
            if not instruction.flag("abs"):
                raise instruction.error("'.xorsign' comes with '.abs'")
            function = _of_magnitudes(function)
        function = functools.partial(_reduce, function)
    elif name == "div":
        instruction.choose("approx", "full")  # the exact answer is one that they allow
    elif name in ("fma", "mad") and kind.bits == 64:
        function = _fused_of_doubles
    rounding = instruction.choose(*_DIRECTED)
    if rounding is not None:
        if name not in _AS_FUSED or kind.name != "f32":
            raise instruction.error(f"'{name}.{kind.name}' is interpreted for .rn only")
        function = _round(_AS_FUSED[name], rounding)
    instruction.flag("rn")
    instruction.flag("noftz")
    if instruction.flag("ftz"):
        function = _flushing(function)
    if instruction.flag("sat"):
        function = _then(function, _between_0_and_1)
    if instruction.flag("relu"):
        function = _then(function, rectified)
    return function


def _reduce(function: Callable[..., Array], *given: Array) -> Array:
    return functools.reduce(function, given)


def _then(function: Callable[..., Array], after: Callable[[Array], Array]) -> Callable[..., Array]:
    return lambda *given: after(function(*given))


def rectified(values: Array) -> Array:
    return np.where((values > 0) | np.isnan(values), values, values.dtype.type(0))


def _between_0_and_1(values: Array) -> Array:
    """Clamp to 0 to 1. A nan becomes 0."""
    return larger(smaller(values, values.dtype.type(1)), values.dtype.type(0))


def _of_magnitudes(function: Callable[..., Array]) -> Callable[..., Array]:
    def compute(x: Array, y: Array) -> Array:
        sign = np.where(np.signbit(x) ^ np.signbit(y), x.dtype.type(-1), x.dtype.type(1))
        return np.copysign(function(np.abs(x), np.abs(y)), sign)

    return compute


def _saturating(function: Callable[..., Array]) -> Callable[..., Array]:
    def compute(x: Array, y: Array) -> Array:
        exact = function(x.astype(np.int64), y.astype(np.int64))
        return np.clip(exact, -(2**31), 2**31 - 1).astype(np.int32)

    return compute


_AS_FUSED: dict[str, Callable[..., Array]] = {
    "add": lambda x, y: fused_multiply_add(x, np.float32(1), y),
    "sub": lambda x, y: fused_multiply_add(x, np.float32(1), -y),
    "mul": lambda x, y: fused_multiply_add(x, y, np.float32(-0.0)),
    "fma": fused_multiply_add,
    "mad": fused_multiply_add,
}


def _round(exact: Callable[..., Array], rounding: str) -> Callable[..., Array]:
    """Round to fp32 in one direction. The exact function rounds to odd, so no information is lost."""
    by = {"rz": np.trunc, "rm": np.floor, "rp": np.ceil}[rounding]
    return lambda *given: encode(exact(*given), SINGLE, by).view(np.float32)


def _fused_of_doubles(x: Array, y: Array, z: Array) -> Array:
    """Return x * y + z in fp64, rounded once: by integers where all numbers are finite."""
    found = np.asarray(x * y + z)
    operands = np.broadcast_arrays(x, y, z)
    usual = np.isfinite(found)
    exact = zip(*(map(Fraction, each[usual].tolist()) for each in operands), strict=True)
    sums = [a * b + c for a, b, c in exact]
    found[usual] = [float(s) if s else near for s, near in zip(sums, found[usual], strict=True)]
    return found


def lanewise(function: Callable[..., Array], kind: ScalarType) -> Callable[..., Array]:
    register = np.dtype(f"u{kind.bits // 4}").type

    def compute(*given: Array) -> Array:
        numbers = [kind.decode(halves(bits, kind)) for bits in given]
        low, high = kind.encode(function(*numbers)).astype(register)
        return low | high << register(kind.bits)

    return compute


def halves(bits: Array, kind: ScalarType) -> Array:
    """Return the lower and the upper half of registers in the first dimension."""
    mask, shift = bits.dtype.type(kind.mask), bits.dtype.type(kind.bits)
    return np.stack([bits & mask, bits >> shift]).astype(kind.raw)


def flushed(values: Array) -> Array:
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
    multiply = _product(part, kind, result)
    multiply_add = (lambda x, y, z: multiply(x, y) + z) if addend else multiply
    return instruction.computes(multiply_add, result, kind, kind, *addend, raw=part == "lo")


def _product(part: str, kind: ScalarType, result: ScalarType) -> Callable[[Array, Array], Array]:
    """Return the multiplication of ``part``: on numbers of ``kind``, or on their bits for "lo"."""
    if part == "lo":
        return operator.mul
    if part == "wide":
        return lambda x, y: x.astype(result.stored) * y.astype(result.stored)

    def multiply(x: Array, y: Array) -> Array:
        high = x.astype(object) * y.astype(object) >> kind.bits
        return np.asarray(high).astype(kind.stored)

    return multiply


@builds("addc", "subc", "madc")
def build_carrying(instruction: Instruction) -> Action:
    """Build arithmetic with the thread's carry or borrow, which ``.cc`` sets for the next instruction."""
    name, gives = instruction.mnemonic, instruction.flag("cc")
    takes, part = name.endswith("c"), instruction.choose("lo", "hi")
    kind = instruction.take_type(("u32", "s32", "u64", "s64"))
    multiplies, subtracts = name.startswith("mad"), name.startswith("sub")
    if multiplies != (part is not None):
        raise instruction.error(f"'{name}': only 'madc' takes .lo or .hi, and it needs one")
    instruction.finish(4 if multiplies else 3)
    target, *sources = instruction.operands
    multiply = _product(part or "lo", kind, kind)
    of_product = instruction.numbers if part == "hi" else instruction.reader
    factors = [of_product(source, kind) for source in sources[:2] if multiplies]
    terms = [instruction.reader(source, kind) for source in sources[len(factors) :]]
    write, zero = instruction.writer(target, kind), kind.raw.type(0)
    carried, carry = instruction.reader(CARRY, PREDICATE), instruction.writer(CARRY, PREDICATE)

    def compute(threads: Threads) -> None:
        product_terms = (
            [multiply(*(read(threads) for read in factors)).view(kind.raw)] if factors else []
        )
        x, y = (*product_terms, *(read(threads) for read in terms))
        more = carried(threads).astype(kind.raw) if takes else zero
        if subtracts:
            found = x - y - more
            over = (x < y) | (x - y < more)
        else:
            found = x + y + more
            over = (x + y < x) | (found < more)
        write(threads, found)
        if gives:
            carry(threads, over)

    return compute


_APPROXIMATED: dict[str, tuple[Callable[[Array], Array], tuple[str, ...]]] = {
    "ex2": (np.exp2, ("f16", "bf16", "f32")),
    "lg2": (np.log2, ("f32",)),
    "sin": (np.sin, ("f32",)),
    "cos": (np.cos, ("f32",)),
    "rcp": (np.reciprocal, ("f32", "f64")),
    "sqrt": (np.sqrt, ("f32", "f64")),
    "rsqrt": (lambda x: 1 / np.sqrt(x), ("f32", "f64")),
    "tanh": (np.tanh, ("f16", "bf16", "f32")),
}


@builds(*_APPROXIMATED)
def build_function(instruction: Instruction) -> Action:
    """Build a function with an exact result, rounded once: ``.rn`` needs this, ``.approx`` allows it."""
    function, allowed = _APPROXIMATED[instruction.mnemonic]
    instruction.choose("approx", "rn")
    flush, packed = instruction.flag("ftz"), instruction.choose(*PACKED)
    if packed and PACKED[packed] not in allowed[:-1]:
        raise instruction.error(f"'{instruction.mnemonic}' is not interpreted for .{packed}")
    kind = TYPES[PACKED[packed]] if packed else instruction.take_type(allowed)

    def compute(x: Array) -> Array:
        exact = function((flushed(x) if flush else x).astype(np.float64)).astype(x.dtype)
        return flushed(exact) if flush else exact

    if packed:
        return instruction.computes(lanewise(compute, kind), *[TYPES["b32"]] * 2, raw=True)
    return instruction.computes(compute, kind, kind)


# -- predicates ------------------------------------------------------------------------------------

_ORDERED: dict[str, Callable[[Any, Any], Array]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_OF_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_UNORDERED = {f"{name}u": name for name in _ORDERED}
COMBINED: dict[str, Callable[[Array, Array], Array]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


@builds("setp")
def build_comparison(instruction: Instruction) -> Action:
    name = instruction.choose(*_ORDERED, *_OF_UNSIGNED, *_UNORDERED, "num", "nan")
    combined, packed = instruction.choose(*COMBINED), instruction.choose(*PAIRS)
    kind = TYPES[PAIRS[packed]] if packed else instruction.take_type((*BITS, *INTEGERS, *FLOATS))
    flush = kind.is_float and instruction.flag("ftz")
    instruction.finish(4 if combined else 3)
    if name is None:
        raise instruction.error("'setp' needs a comparison such as .eq or .lt")
    compare = _comparison(name, kind)
    if compare is None:
        raise instruction.error(f"'.{name}' does not compare .{kind.name}")
    target, *compared = instruction.operands
    # with two predicates, p|q, the second gets the opposite
    writes = [instruction.writer(each.strip(), PREDICATE) for each in target.split("|")]
    number = TYPES["b32"] if packed else kind
    first, second = (instruction.numbers(each, number) for each in compared[:2])
    thirds = [instruction.reader(each, PREDICATE) for each in compared[2:]]
    combine = COMBINED[combined or "and"]

    if len(writes) == 1 and not (packed or flush or thirds):
        (only,) = writes
        return lambda threads: only(threads, compare(first(threads), second(threads)))

    def set_predicate(threads: Threads) -> None:
        x, y = first(threads), second(threads)
        if packed:  # p is for the lower numbers, q for the upper ones
            x, y = (kind.decode(halves(each, kind)) for each in (x, y))
        found = compare(flushed(x), flushed(y)) if flush else compare(x, y)
        results = [found] if len(writes) == 1 else [found, ~found]
        results = list(found) if packed else results
        for third in thirds:
            results = [combine(result, third(threads)) for result in results]
        for write, each in zip(writes, results, strict=False):
            write(threads, each)

    return set_predicate


@builds("set")
def build_set(instruction: Instruction) -> Action:
    """Build a comparison whose result is all ones, or 1.0, where it holds."""
    name = instruction.choose(*_ORDERED, *_OF_UNSIGNED, *_UNORDERED, "num", "nan")
    flush, packed = instruction.flag("ftz"), instruction.choose(*PAIRS)
    if packed and instruction.flag(packed):  # types of the result and of the compared numbers
        target = kind = TYPES[PAIRS[packed]]
    else:
        target = instruction.take_type(("u32", "s32", "f16", "bf16", "f32"))
        kind = instruction.take_type((*BITS, *INTEGERS, *FLOATS))
    compare = None if name is None else _comparison(name, kind)
    if compare is None:
        raise instruction.error(f"'{instruction.opcode}' is not a comparison")
    yes = target.raw.type(target.bits_of(1 if target.is_float else -1))

    def choose(x: Array, y: Array) -> Array:
        operands = (flushed(x), flushed(y)) if flush and kind.is_float else (x, y)
        return target.decode(np.where(compare(*operands), yes, target.raw.type(0)))

    if packed:
        return instruction.computes(lanewise(choose, kind), *[TYPES["b32"]] * 3, raw=True)
    return instruction.computes(choose, target, kind, kind)


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


# -- forms: some words, a type, and operands -------------------------------------------------------

_TESTS: dict[str, Callable[[Array], Array]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).smallest_normal),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).smallest_normal),
}


_PERMUTATIONS: dict[str, Callable[[int, int], int]] = {
    "f4e": lambda index, low: low + index,
    "b4e": lambda index, low: (low - index) % 8,
    "rc8": lambda index, low: low,
    "ecl": lambda index, low: max(index, low),
    "ecr": lambda index, low: min(index, low),
    "rc16": lambda index, low: 2 * (low % 2) + index % 2,
}
"""By mode of prmt: the byte of eight for a position and the lowest two bits of the selector."""


def _shift(shift: Any, kind: ScalarType, value: Array, by: Array) -> Array:
    return shift(value, np.minimum(by, np.uint32(kind.bits)).astype(kind.stored))


def _funnel_shifted(
    kind: ScalarType, side: str, bound: str, low: Array, high: Array, by: Array
) -> Array:
    by = np.minimum(by, np.uint32(32)) if bound == "clamp" else by & np.uint32(31)
    by, whole = by.astype(np.uint64), high.astype(np.uint64) << np.uint64(32) | low
    return (whole << by >> np.uint64(32) if side == "l" else whole >> by).astype(np.uint32)


def _field(kind: ScalarType, value: Array, start: Array, length: Array) -> Array:
    """Extract ``length`` bits from ``start`` on; a signed type extends the last one."""
    bits = np.uint32(kind.bits)
    start, length = start & np.uint32(0xFF), length & np.uint32(0xFF)
    end = np.minimum(start + length, bits)
    # shift to the top, then down: this removes the bits above and below the field
    moved = np.left_shift(value, (bits - end).astype(kind.stored))
    width = np.where(start < end, end - start, np.uint32(0))
    found = np.right_shift(moved, (bits - width).astype(kind.stored))
    past = (length > 0) & (start >= bits)  # a signed field consists of the sign alone
    beyond = np.right_shift(value, bits.astype(kind.stored))
    return np.where(past, beyond, np.where(length > 0, found, kind.stored.type(0)))


def _insert_bits(kind: ScalarType, low: Array, into: Array, start: Array, length: Array) -> Array:
    start, length = start & np.uint32(0xFF), length & np.uint32(0xFF)
    one, most = kind.stored.type(1), np.uint32(kind.bits)
    field = np.left_shift(one, np.minimum(length, most).astype(kind.stored)) - one
    by = np.minimum(start, most).astype(kind.stored)
    mask = np.left_shift(field, by)
    return np.left_shift(low, by) & mask | into & ~mask


def _mask(kind: ScalarType, bound: str, start: Array, length: Array) -> Array:
    first, count = (each.astype(np.uint64) for each in (start, length))
    if bound != "clamp":
        first, count = first & np.uint64(31), count & np.uint64(31)
    first = np.minimum(first, np.uint64(32))
    end = np.minimum(first + count, np.uint64(32))
    return ((np.uint64(1) << end) - (np.uint64(1) << first)).astype(np.uint32)


def _permute(kind: ScalarType, mode: str | None, low: Array, high: Array, selector: Array) -> Array:
    """Choose bytes of two registers by four 4-bit selectors; the highest bit copies a byte's sign."""
    whole = high.astype(np.uint64) << np.uint64(32) | low
    result = np.zeros(np.broadcast(low, high, selector).shape, np.uint64)
    for index in range(4):
        nibble = selector.astype(np.uint64) >> np.uint64(4 * index) & np.uint64(15)
        if mode is not None:
            table = [_PERMUTATIONS[mode](index, low_bits) for low_bits in range(4)]
            nibble = np.array(table, np.uint64)[(selector & np.uint32(3)).astype(np.intp)]
        byte = whole >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
        result |= np.where(nibble > 7, sign, byte) << np.uint64(8 * index)
    return result.astype(np.uint32)


def ones(value: Array) -> Array:
    value = np.asarray(value)
    octets = value.reshape(-1, 1).view(np.uint8)
    return np.unpackbits(octets, axis=1).sum(axis=1, dtype=np.uint32).reshape(value.shape)


def leading_zeros(value: Array) -> Array:
    for by in (1, 2, 4, 8, 16, 32):  # set all bits below the highest one
        value = value | np.right_shift(value, value.dtype.type(by))
    return np.uint32(8 * value.dtype.itemsize) - ones(value)


def reversed_bits(value: Array) -> Array:
    value = np.asarray(value)
    each = np.unpackbits(np.ascontiguousarray(value).reshape(-1, 1).view(np.uint8), axis=1)
    return np.packbits(each[:, ::-1], axis=1).view(value.dtype).reshape(value.shape)


def _highest(kind: ScalarType, as_shift: str | None, value: Array) -> Array:
    """Return the position of the highest non-sign bit; with .shiftamt its distance from the top."""
    value = np.where(value < 0, ~value, value).view(kind.raw)
    left = leading_zeros(value)
    found = left if as_shift else np.uint32(kind.bits - 1) - left
    return np.where(value == 0, np.uint32(0xFFFFFFFF), found)


def _short_product(kind: ScalarType, part: str | None, x: Array, y: Array, *total: Array) -> Array:
    """Multiply 24-bit numbers; return the lower or the upper 32 of 48 bits."""
    x, y = (each.astype(np.int64) << 40 >> 40 for each in (x, y))
    if kind.letter == "u":
        x, y = x & 0xFFFFFF, y & 0xFFFFFF
    product = (x * y >> (16 if part == "hi" else 0)).astype(kind.stored)
    return product + total[0] if total else product


class ScalarForm(NamedTuple):
    """An instruction with one of each of ``words``, a type of ``allowed``, and operands of ``kinds``.

    ``kinds`` begin with the result's kind; "" stands for the instruction's type. ``function`` takes this
    type, the words, and the operands' numbers, or their bits if ``raw``. A word beside None is optional.
    """

    function: Callable[..., Array]
    allowed: tuple[str, ...]
    kinds: tuple[str, ...]
    words: tuple[tuple[str | None, ...], ...] = ()
    raw: bool = False


_EITHER = ("u32", "s32", "u64", "s64")
_BOUNDS = ("clamp", "wrap", None)
_PARTS = ("lo", "hi", None)
FORMS = {
    "selp": ScalarForm(
        lambda kind, x, y, chosen: np.where(chosen, x, y),
        (*BITS, *INTEGERS, *FLOATS),
        ("", "", "", "pred"),
        raw=True,
    ),
    "testp": ScalarForm(
        lambda kind, name, x: _TESTS[name](x), ("f32", "f64"), ("pred", ""), ((*_TESTS,),)
    ),
    "shl": ScalarForm(functools.partial(_shift, np.left_shift), BITS, ("", "", "u32")),
    "shr": ScalarForm(
        functools.partial(_shift, np.right_shift), (*BITS, *INTEGERS), ("", "", "u32")
    ),
    "shf": ScalarForm(_funnel_shifted, ("b32",), ("",) * 4, (("l", "r", None), _BOUNDS)),
    "bfe": ScalarForm(_field, _EITHER, ("", "", "u32", "u32")),
    "bfi": ScalarForm(_insert_bits, ("b32", "b64"), ("", "", "", "u32", "u32")),
    "bmsk": ScalarForm(_mask, ("b32",), ("",) * 3, (_BOUNDS,)),
    "prmt": ScalarForm(_permute, ("b32",), ("",) * 4, ((*_PERMUTATIONS, None),)),
    "popc": ScalarForm(lambda kind, x: ones(x), ("b32", "b64"), ("u32", "")),
    "clz": ScalarForm(lambda kind, x: leading_zeros(x), ("b32", "b64"), ("u32", "")),
    "brev": ScalarForm(lambda kind, x: reversed_bits(x), ("b32", "b64"), ("", "")),
    "cnot": ScalarForm(lambda kind, x: (x == 0).astype(x.dtype), BITS, ("", "")),
    "sad": ScalarForm(
        lambda kind, x, y, total: total + np.where(x < y, y - x, x - y), INTEGERS, ("",) * 4
    ),
    "bfind": ScalarForm(_highest, _EITHER, ("u32", ""), (("shiftamt", None),)),
    "mul24": ScalarForm(_short_product, ("u32", "s32"), ("",) * 3, (_PARTS,)),
    "mad24": ScalarForm(_short_product, ("u32", "s32"), ("",) * 4, (_PARTS,)),
}


@builds(*FORMS)
def build_form(instruction: Instruction) -> Action:
    form = FORMS[instruction.mnemonic]
    words = [instruction.choose(*filter(None, each)) for each in form.words]
    for word, known in zip(words, form.words, strict=True):
        if word not in known:
            raise instruction.unknown(f"the mode of '{instruction.opcode}'", filter(None, known))
    main_kind = instruction.take_type(form.allowed)
    kinds = [TYPES[each] if each else main_kind for each in form.kinds]
    function = functools.partial(form.function, main_kind, *words)
    return instruction.computes(function, *kinds, raw=form.raw)


@builds("slct")
def build_choice(instruction: Instruction) -> Action:
    """Choose the first operand where the third is not negative, otherwise the second."""
    instruction.flag("ftz")
    by = TYPES["f32" if instruction.qualifiers[-1] == "f32" else "s32"]
    instruction.qualifiers.pop()
    kind = instruction.take_type((*BITS, *INTEGERS, *FLOATS))

    def choose(x: Array, y: Array, sign: Array) -> Array:
        return np.where(by.decode(sign) >= 0, x, y)

    return instruction.computes(choose, kind, kind, kind, by, raw=True)


@builds("lop3")
def build_logic(instruction: Instruction) -> Action:
    """Compute any logic of bits a, b, c: bit ``4 a + 2 b + c`` of the last operand is the result."""
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


@builds("dp4a", "dp2a")
def build_dot_product(instruction: Instruction) -> Action:
    """Build a dot product of four bytes each, or of two 16-bit numbers and two lower or upper bytes."""
    half = instruction.choose("lo", "hi") if instruction.mnemonic == "dp2a" else None
    kinds = [instruction.take_type(("u32", "s32")) for _ in range(2)]

    def parts(bits: Array, letter: str, size: int) -> Array:
        bits = np.ascontiguousarray(bits).reshape(-1, 1)
        return bits.view(f"{'u' if letter == 'u' else 'i'}{size}").astype(np.int64)

    def multiply(a: Array, b: Array, c: Array) -> Array:
        a, b, c = np.broadcast_arrays(a, b, c)
        left = parts(a, kinds[0].letter, 2 if half else 1)
        right = parts(b, kinds[1].letter, 1)
        if half:
            right = right[:, :2] if half == "lo" else right[:, 2:]
        return ((left * right).sum(axis=1).reshape(c.shape) + c).astype(np.uint32)

    return instruction.computes(multiply, *[TYPES["b32"]] * 4)
