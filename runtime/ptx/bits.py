"""PTX within registers: the bits of whole numbers, shifted, picked, counted and multiplied by bytes."""

from collections.abc import Callable

import numpy as np

from interlace.runtime.ptx.arithmetic import BITS, INTEGERS
from interlace.runtime.ptx.instruction import Action, Instruction, builders
from interlace.runtime.ptx.types import TYPES, Array

BIT_OPERATIONS, builds = builders()
_U32 = TYPES["u32"]
_PERMUTATIONS: dict[str, Callable[[int, int], int]] = {
    "f4e": lambda index, low: low + index,
    "b4e": lambda index, low: (low - index) % 8,
    "rc8": lambda index, low: low,
    "ecl": lambda index, low: max(index, low),
    "ecr": lambda index, low: min(index, low),
    "rc16": lambda index, low: 2 * (low % 2) + index % 2,
}
"""By mode of prmt, the byte of eight for a place and the lowest two bits of the selector."""


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


@builds("bmsk")
def build_mask(instruction: Instruction) -> Action:
    """Ones from a position on, as many as given."""
    clamps = instruction.choose("clamp", "wrap") == "clamp"
    kind = instruction.take_type(("b32",))

    def mask(start: Array, length: Array) -> Array:
        first, count = (each.astype(np.uint64) for each in (start, length))
        if not clamps:
            first, count = first & np.uint64(31), count & np.uint64(31)
        first = np.minimum(first, np.uint64(32))
        end = np.minimum(first + count, np.uint64(32))
        ones = (np.uint64(1) << end) - (np.uint64(1) << first)
        return ones.astype(np.uint32)

    return instruction.computes(mask, kind, kind, kind)


@builds("prmt")
def build_permutation(instruction: Instruction) -> Action:
    """Bytes of two registers, chosen by four numbers of four bits; the highest takes a byte's sign."""
    mode = instruction.choose(*_PERMUTATIONS)
    kind = instruction.take_type(("b32",))

    def permute(low: Array, high: Array, selector: Array) -> Array:
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


def leading_zeros(value: Array) -> Array:
    for by in (1, 2, 4, 8, 16, 32):  # all bits below the first
        value = value | np.right_shift(value, value.dtype.type(by))
    return np.uint32(8 * value.dtype.itemsize) - ones(value)


@builds("popc", "clz")
def build_count(instruction: Instruction) -> Action:
    kind = instruction.take_type(("b32", "b64"))
    count = ones if instruction.mnemonic == "popc" else leading_zeros
    return instruction.computes(count, TYPES["u32"], kind)


def reversed_bits(value: Array) -> Array:
    value = np.asarray(value)
    each = np.unpackbits(np.ascontiguousarray(value).reshape(-1, 1).view(np.uint8), axis=1)
    return np.packbits(each[:, ::-1], axis=1).view(value.dtype).reshape(value.shape)


def _sum_of_differences(x: Array, y: Array, total: Array) -> Array:
    return total + np.where(x < y, y - x, x - y)


_ROWS: dict[str, tuple[Callable[..., Array], int, tuple[str, ...]]] = {
    "brev": (reversed_bits, 1, ("b32", "b64")),
    "cnot": (lambda x: (x == 0).astype(x.dtype), 1, BITS),
    "sad": (_sum_of_differences, 3, INTEGERS),
}


@builds(*_ROWS)
def build_row(instruction: Instruction) -> Action:
    function, count, allowed = _ROWS[instruction.mnemonic]
    kind = instruction.take_type(allowed)
    return instruction.computes(function, *[kind] * (1 + count))


@builds("bfi")
def build_insertion(instruction: Instruction) -> Action:
    """The lowest bits of one into another, from a position on, as many as given."""
    kind = instruction.take_type(("b32", "b64"))

    def insert(low: Array, into: Array, start: Array, length: Array) -> Array:
        start, length = start & np.uint32(0xFF), length & np.uint32(0xFF)
        one, most = kind.stored.type(1), np.uint32(kind.bits)
        field = np.left_shift(one, np.minimum(length, most).astype(kind.stored)) - one
        by = np.minimum(start, most).astype(kind.stored)
        mask = np.left_shift(field, by)
        return np.left_shift(low, by) & mask | into & ~mask

    return instruction.computes(insert, kind, kind, kind, _U32, _U32)


@builds("bfind")
def build_search(instruction: Instruction) -> Action:
    """Where the highest bit is that is not the sign's; .shiftamt: how far from the top."""
    as_shift = instruction.flag("shiftamt")
    kind = instruction.take_type(("u32", "s32", "u64", "s64"))

    def find(value: Array) -> Array:
        value = np.where(value < 0, ~value, value).view(kind.raw)
        left = leading_zeros(value)
        found = left if as_shift else np.uint32(kind.bits - 1) - left
        return np.where(value == 0, np.uint32(0xFFFFFFFF), found)

    return instruction.computes(find, _U32, kind)


@builds("mul24", "mad24")
def build_short_product(instruction: Instruction) -> Action:
    """Of 24 bits, the lower or the upper 32 of 48."""
    high = instruction.choose("lo", "hi") == "hi"
    kind = instruction.take_type(("u32", "s32"))

    def multiply(x: Array, y: Array, *total: Array) -> Array:
        x, y = (
            each.astype(np.int64) << 40 >> 40
            if kind.letter == "s"
            else each.astype(np.int64) & 0xFFFFFF
            for each in (x, y)
        )
        product = (x * y >> (16 if high else 0)).astype(kind.stored)
        return product + total[0] if total else product

    return instruction.computes(multiply, *[kind] * (4 if "mad" in instruction.mnemonic else 3))


@builds("dp4a", "dp2a")
def build_dot_product(instruction: Instruction) -> Action:
    """Of four bytes each, or of two numbers of 16 bits and the lower or upper two bytes."""
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
