"""PTX that warps execute as one: ``shfl``, ``redux``, ``ldmatrix`` and ``mma``.

All threads of a warp have to be there; ``machine.py`` sees to that, for the names in :data:`WARPS`.
Registers are seen as (warps, 32). Which thread holds what of a matrix is said in the PTX ISA, "Matrix
Fragments"; g and t stand for its groupID and threadID_in_group: lane = 4 g + t.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from interlace.runtime.ptx.instruction import Action, Instruction, builders
from interlace.runtime.ptx.machine.shared import shared_bits, take_shared
from interlace.runtime.ptx.memory import address_of
from interlace.runtime.ptx.special import WARP, Threads
from interlace.runtime.ptx.types import PREDICATE, TYPES, Array

WARPS, builds = builders()

_MODES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "idx": lambda lane, by, segment: (lane & segment) | (by & ~segment),
    "up": lambda lane, by, segment: lane - by,
    "down": lambda lane, by, segment: lane + by,
    "bfly": lambda lane, by, segment: lane ^ by,
}


@builds("shfl")
def build_shuffle(instruction: Instruction) -> Action:
    instruction.flag("sync")
    mode = instruction.choose(*_MODES)
    kind = instruction.take_type(("b32",))
    instruction.finish(5)
    if mode is None:
        raise instruction.unknown(f"the mode of '{instruction.opcode}'", _MODES)
    move = _MODES[mode]
    target, *given, _ = instruction.operands
    names = [each.strip() for each in target.split("|")]
    write = instruction.active_writer(names[0], kind)
    tell = instruction.writer(names[1], PREDICATE) if len(names) > 1 else None
    reads = [instruction.reader(each, TYPES["b32"]) for each in given]

    def shuffle(threads: Threads) -> None:
        value, by, limits = (
            threads.active(read(threads)).reshape(-1, WARP).astype(np.int64) for read in reads
        )
        lane = np.arange(WARP)
        segment, clamp = limits >> 8 & 31, limits & 31
        last = (lane & segment) | (clamp & ~segment & 31)
        source = move(lane, by & 31, segment)
        there = source >= last if mode == "up" else source <= last
        source = np.where(there, source, lane)
        moved = np.take_along_axis(value, source, axis=1)
        write(threads, moved.astype(np.uint32).ravel())
        if tell is not None:
            whole = np.zeros(len(threads.numbers), np.bool_)
            whole[slice(None) if threads.mask is None else threads.mask] = there.ravel()
            tell(threads, whole)

    return shuffle


_REDUCTIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@builds("redux")
def build_reduction(instruction: Instruction) -> Action:
    instruction.flag("sync")
    name = instruction.choose(*_REDUCTIONS)
    kind = instruction.take_type(("u32", "s32", "b32"))
    instruction.finish(3)
    if name is None:
        raise instruction.unknown(f"the operation of '{instruction.opcode}'", _REDUCTIONS)
    write = instruction.active_writer(instruction.operands[0], kind)
    read = instruction.numbers(instruction.operands[1], kind)
    reduce = _REDUCTIONS[name].reduce

    def reduction(threads: Threads) -> None:
        values = threads.active(read(threads)).reshape(-1, WARP)
        totals = reduce(values, axis=1, dtype=values.dtype)
        write(threads, kind.encode(np.repeat(totals, WARP)))

    return reduction


@builds("ldmatrix")
def build_matrix_load(instruction: Instruction) -> Action:
    """8 rows of 16 bytes for each matrix, whose addresses are in 8 lanes; (g, t) gets two numbers."""
    for name in ("sync", "aligned"):
        instruction.flag(name)
    shape, number = instruction.choose("m8n8"), instruction.choose("x1", "x2", "x4")
    transposed = instruction.flag("trans")
    take_shared(instruction)
    instruction.take_type(("b16",))
    instruction.finish(2)
    if shape is None or number is None:
        raise instruction.unknown(f"'{instruction.opcode}'", ["ldmatrix.m8n8.x1", ".x2", ".x4"])
    count, kind = int(number[1:]), TYPES["b32"]
    parts = instruction.parts(instruction.operands[0])
    if len(parts) != count:
        raise instruction.error(f"'.{number}' goes with as many registers")
    writes = [instruction.active_writer(part, kind) for part in parts]
    at = address_of(instruction, instruction.operands[1], kind, 4, shared=True)
    words = np.arange(4, dtype=np.uint64) * np.uint64(4)

    def load(threads: Threads) -> None:
        rows, lanes = (
            each.reshape(-1, WARP)[:, : 8 * count].ravel()
            for each in (at(threads), threads.active(threads.numbers))
        )
        found = shared_bits(threads, rows[:, None] + words, kind, lanes)
        halves = found.reshape(-1, count, 8, 4).view(np.uint16)  # warps, matrices, rows, columns
        if transposed:
            halves = halves.swapaxes(2, 3)
        registers = np.ascontiguousarray(halves).view(np.uint32)  # (warps, matrices, g, t)
        for index, write in enumerate(writes):
            write(threads, registers[:, index].reshape(-1))

    return load


_FRAGMENTS = {  # by type of the factors: k of one instruction, numbers in a register
    "f16": ((8, 16), 2),
    "bf16": ((8, 16), 2),
    "tf32": ((4, 8), 1),
}


@builds("mma")
def build_matrix_product(instruction: Instruction) -> Action:
    """D = A B + C of 16 x k, k x 8 and 16 x 8, in fp32."""
    for name in ("sync", "aligned", "row", "col"):
        instruction.flag(name)
    shapes = {f"m16n8k{k}": k for k in (4, 8, 16)}
    shape = instruction.choose(*shapes)
    kinds = [each for each in instruction.qualifiers if each in (*_FRAGMENTS, "f32")]
    instruction.qualifiers = [each for each in instruction.qualifiers if each not in kinds]
    instruction.finish(4)
    factor = kinds[1] if len(kinds) == 4 else ""
    sizes, packed = _FRAGMENTS.get(factor, ((), 1))
    if kinds != ["f32", factor, factor, "f32"] or shapes.get(shape or "") not in sizes:
        known = [f"mma.m16n8k{k}.f32.{f}.{f}.f32" for f, (ks, _) in _FRAGMENTS.items() for k in ks]
        raise instruction.unknown(f"'{instruction.opcode}'", known)
    halves = shapes[shape or ""] // (4 * packed)  # of k
    d, a, b, c = (instruction.parts(operand) for operand in instruction.operands)
    if [len(d), len(a), len(b), len(c)] != [4, 2 * halves, halves, 4]:
        raise instruction.error(f"'{instruction.opcode}' has other numbers of registers")
    writes = [instruction.active_writer(each, TYPES["f32"]) for each in d]
    reads_a, reads_b, reads_c = (
        [instruction.reader(each, TYPES["b32"]) for each in part] for part in (a, b, c)
    )

    def gathered(threads: Threads, reads: Any) -> Array:
        """(warps, g, t, registers)"""
        found = np.stack([threads.active(read(threads)) for read in reads], axis=-1)
        return found.reshape(-1, 8, 4, len(reads))

    def numbers(registers: Array) -> Array:
        """(..., registers, numbers in each) as fp32."""
        if packed == 1:  # the tensor cores look at the upper 19 bits
            return (registers & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
        halves16 = registers.view(np.uint16).reshape(*registers.shape, 2)
        return TYPES[factor].decode(halves16)

    def product(threads: Threads) -> None:
        left = numbers(gathered(threads, reads_a)).reshape(-1, 8, 4, halves, 2, packed)
        left = left.transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, halves * 4 * packed)
        right = numbers(gathered(threads, reads_b))
        right = right.transpose(0, 3, 2, 4, 1).reshape(-1, halves * 4 * packed, 8)
        total = gathered(threads, reads_c).view(np.float32).reshape(-1, 8, 4, 2, 2)
        total = total.transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8)
        result = (left @ right + total).reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4)
        registers = np.ascontiguousarray(result).view(np.uint32).reshape(-1, 4)
        for index, write in enumerate(writes):
            write(threads, np.ascontiguousarray(registers[:, index]))

    return product
