"""PTX that warps execute as one on matrices: ``ldmatrix``, ``stmatrix`` and ``mma``.

Which thread holds what of a matrix is said in the PTX ISA, "Matrix Fragments"; g and t stand for its
groupID and threadID_in_group: lane = 4 g + t. All follow one rule: of 8 rows, lane (g, t) holds some
neighbours in row g, those that start at t times their number, and the same again in the next columns. The
second factor of a product is held so with its columns for rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from interlace.runtime.numerics.sums import matrix_product
from interlace.runtime.ptx.addresses import address_of
from interlace.runtime.ptx.formats import FORMATS
from interlace.runtime.ptx.instruction import Action, Instruction, builders
from interlace.runtime.ptx.machine.shared import put_shared, shared_bits, take_shared
from interlace.runtime.ptx.special import WARP, Reader, Threads
from interlace.runtime.ptx.types import TYPES, Array

MATRICES, builds = builders()
_WORD = TYPES["b32"]
NUMBERS: dict[str, Any] = {**FORMATS, **TYPES}
"""What a matrix may consist of, by name in PTX."""
PACKED_SUMS = ("f16",)  # sums that share a register, as factors do


# -- fragments -------------------------------------------------------------------------------------


def bits_of_warps(threads: Threads, reads: Sequence[Reader]) -> Array:
    """(warps, 32, registers) of the threads that run."""
    found = np.stack([threads.active(read(threads)) for read in reads], axis=-1)
    return found.reshape(-1, WARP, len(reads))


def numbers_of(registers: Array, name: str) -> Array:
    """(warps, 32, numbers) in ``registers``, as fp32 or, integers and fp64, as fp64: for exact products."""
    numbers = NUMBERS[name].decode(registers.view(NUMBERS[name].raw))
    return numbers if numbers.dtype == np.float32 else numbers.astype(np.float64)


def rows_of(numbers: Array, eights: int, neighbours: int) -> Array:
    """(warps, 8 eights, columns) from (warps, 32, numbers), of which ``neighbours`` lie in each row."""
    parts = numbers.reshape(-1, 8, 4, numbers.shape[-1] // eights // neighbours, eights, neighbours)
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(len(numbers), 8 * eights, -1)


def fragments_of(matrix: Array, neighbours: int = 2) -> Array:
    """The reverse of :func:`rows_of`."""
    warps, rows, columns = matrix.shape
    parts = matrix.reshape(warps, rows // 8, 8, columns // (4 * neighbours), 4, neighbours)
    return np.ascontiguousarray(parts.transpose(0, 2, 4, 3, 1, 5)).reshape(warps, WARP, -1)


def sums_of(registers: Array, name: str, eights: int) -> Array:
    """(warps, rows, columns): what is in accumulators."""
    return rows_of(numbers_of(registers, name), eights, 2)


def registers_of(sums: Array, name: str, clamps: bool = False) -> Array:
    """(warps, 32, registers): ``sums``, rounded or, whole numbers, modulo 2**32 if not clamped."""
    kind = TYPES[name]
    if name == "s32":
        sums = np.clip(sums, -(2**31), 2**31 - 1) if clamps else sums
        return fragments_of(sums.astype(np.int64).astype(np.int32)).view(np.uint32)
    bits = fragments_of(kind.encode(sums.astype(kind.number)))
    return bits.view(np.uint32) if name in PACKED_SUMS else bits


def take_numbers(instruction: Instruction) -> list[str]:
    """The types of sums and factors, in their order."""
    names = [name for name in instruction.qualifiers if name in NUMBERS]
    instruction.qualifiers = [each for each in instruction.qualifiers if each not in names]
    return names


# -- matrices in shared memory ---------------------------------------------------------------------


@builds("ldmatrix", "stmatrix")
def build_matrix_access(instruction: Instruction) -> Action:
    """8 rows of 16 bytes for each matrix, whose addresses are in 8 lanes; (g, t) has two numbers."""
    loads = instruction.mnemonic == "ldmatrix"
    for name in ("sync", "aligned"):
        instruction.flag(name)
    shape, number = instruction.choose("m8n8"), instruction.choose("x1", "x2", "x4")
    transposed = instruction.flag("trans")
    take_shared(instruction)
    instruction.take_type(("b16",))
    instruction.finish(2)
    if shape is None or number is None:
        known = [f"{instruction.mnemonic}.m8n8.x{count}" for count in (1, 2, 4)]
        raise instruction.unknown(f"'{instruction.opcode}'", known)
    count = int(number[1:])
    outer, inner = instruction.operands if loads else instruction.operands[::-1]
    parts = instruction.parts(outer)
    if len(parts) != count:
        raise instruction.error(f"'.{number}' goes with as many registers")
    at = address_of(instruction, inner, _WORD, 4, shared=True)
    words = np.arange(4, dtype=np.uint64) * np.uint64(4)

    def rows(threads: Threads) -> tuple[Array, Array]:
        """Addresses of the rows of all matrices, and the lanes that name them."""
        each = (at(threads), threads.active(threads.numbers))
        first, lanes = (of.reshape(-1, WARP)[:, : 8 * count].ravel() for of in each)
        return first[:, None] + words, lanes

    def turned(registers: Array) -> Array:
        """Of (warps, matrices, 8, 4) registers, each with two numbers, in rows the columns."""
        halves = registers.view(np.uint16)
        return (
            np.ascontiguousarray(halves.swapaxes(2, 3)).view(np.uint32) if transposed else registers
        )

    if loads:
        writes = [instruction.active_writer(part, _WORD) for part in parts]

        def load(threads: Threads) -> None:
            addresses, lanes = rows(threads)
            found = turned(shared_bits(threads, addresses, _WORD, lanes).reshape(-1, count, 8, 4))
            for index, write in enumerate(writes):
                write(threads, found[:, index].reshape(-1))

        return load
    reads = [instruction.reader(part, _WORD) for part in parts]

    def store(threads: Threads) -> None:
        registers = bits_of_warps(threads, reads).swapaxes(1, 2).reshape(-1, count, 8, 4)
        addresses, lanes = rows(threads)
        bits = turned(np.ascontiguousarray(registers)).reshape(-1, 4)
        put_shared(threads, addresses, bits, _WORD, lanes)

    return store


# -- products --------------------------------------------------------------------------------------

_SUMS = {"f16": "f16 f32", "bf16": "f32", "tf32": "f32", "e4m3": "f32 f16", "e5m2": "f32 f16"}
_SUMS |= {"s8": "s32", "u8": "s32", "f64": "f64"}
SUMS = {name: sums.split() for name, sums in _SUMS.items()}
"""By type of a factor, those of the sum."""
TOGETHER = [("e4m3", "e5m2"), ("s8", "u8")]
"""Types of factors that may be mixed."""


def multiplies(total: str, left: str, right: str) -> bool:
    """Whether there are products of these factors in sums of ``total``."""
    mixed = any(left in names and right in names for names in TOGETHER)
    return total in SUMS.get(left, ()) and (left == right or mixed)


_DEPTHS = {8: (16, 32), 16: (8, 16), 32: (4, 8), 64: (4, 8, 16)}  # k, by bits of a factor


@builds("mma")
def build_matrix_product(instruction: Instruction) -> Action:
    """D = A B + C of 16 x k, k x 8 and 16 x 8; of fp64 and bytes, also with 8 rows."""
    for name in ("sync", "aligned", "row", "col"):
        instruction.flag(name)
    clamps = instruction.flag("satfinite")
    names = take_numbers(instruction)
    wide = names[:1] == ["f64"]
    shapes = {f"m16n8k{k}": (2, k) for k in (4, 8, 16, 32)}
    shapes |= {"m8n8k4": (1, 4)} if wide else {"m8n8k16": (1, 16)} if names[:1] == ["s32"] else {}
    shape = instruction.choose(*shapes)
    instruction.finish(4)
    total, left, right, addend = names if len(names) == 4 else [""] * 4
    eights, depth = shapes.get(shape or "", (0, 0))
    if (
        not multiplies(total, left, right)
        or total != addend
        or depth not in _DEPTHS[NUMBERS[left].bits]
    ):
        known = [f"mma.m16n8k.{s}.{f}" for f, sums in SUMS.items() for s in sums]
        raise instruction.unknown(f"'{instruction.opcode}'", known)
    register = TYPES["b64" if wide else "b32"]
    packed = register.bits // NUMBERS[left].bits
    of_sums = eights if total in PACKED_SUMS else 2 * eights
    halves = depth // (4 * packed)
    d, a, b, c = (instruction.parts(operand) for operand in instruction.operands)
    if [len(d), len(a), len(b), len(c)] != [of_sums, eights * halves, halves, of_sums]:
        raise instruction.error(f"'{instruction.opcode}' has other numbers of registers")
    writes = [instruction.active_writer(each, register) for each in d]
    reads = [[instruction.reader(each, register) for each in part] for part in (a, b, c)]

    def product(threads: Threads) -> None:
        first, second, before = (bits_of_warps(threads, each) for each in reads)
        rows = rows_of(numbers_of(first, left), eights, packed)
        columns = rows_of(numbers_of(second, right), 1, packed)
        sums = matrix_product(rows, columns.swapaxes(1, 2)) + sums_of(before, total, eights)
        found = registers_of(sums, total, clamps)
        for index, write in enumerate(writes):
            write(threads, np.ascontiguousarray(found[:, :, index]).ravel())

    return product
