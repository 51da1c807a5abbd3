"""PTX that warps execute as one on matrices: ``ldmatrix``, ``stmatrix``, ``mma``, ``wgmma``.

The PTX ISA, "Matrix Fragments", says which thread holds which part of a matrix. All matrices follow one
rule for 8 rows: lane 4 g + t holds some neighbours in row g, starting at t times their number. It holds the
same again in the next columns. The second factor of a product is held in the same way with its columns as
rows.

Asynchronous products of four warps, ``wgmma``: D = A B + D of 64 x k, k x n and 64 x n. Warp w of the four
holds rows 16 w to 16 w + 15 of A and D in registers, as above. A may, and B must, be in shared memory,
which a *descriptor* describes:

    bits  0-13   where the matrix starts, / 16
         16-29   leading byte offset, / 16
         32-45   stride byte offset, / 16
         49-51   the row of the swizzle pattern that it starts in
         62-63   swizzle: none, 128, 64, 32 bytes

A matrix consists of blocks of 8 lines (rows, or columns if it is transposed), as wide as the swizzle
pattern. The leading offset separates blocks along a line, the stride blocks below each other; for
transposed matrices without a swizzle it is the other way round.

Each warp's part is computed when the warp waits for the group. Only then are shared memory, the factor in
registers and the sums read, so they must stay unchanged until then. A thread that reads the sums earlier
sees the old values. The exceptions are ``mov``, which is repeated after the wait, and sums of floats, which
wait first.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from interlace.runtime.core.accesses import AsyncAccess
from interlace.runtime.numerics.exact import matrix_product
from interlace_verify.machine.bulk_copies import swizzled
from interlace_verify.machine.shared import (
    PtxProgram,
    build_commit,
    build_wait,
    groups_of,
    put_shared,
    shared_bits,
    take_shared,
)
from interlace_verify.ptx.arithmetic import ARITHMETIC
from interlace_verify.ptx.instruction import Action, Instruction, builders
from interlace_verify.ptx.memory import address_of, pointers_of
from interlace_verify.ptx.moves import MOVES
from interlace_verify.ptx.special import WARP, Reader, Threads
from interlace_verify.ptx.types import FORMATS, PREDICATE, TYPES, Array

MATRICES, builds = builders()
_WORD = TYPES["b32"]
NUMBERS: dict[str, Any] = {**FORMATS, **TYPES}
"""The element types of matrices, by their names in PTX."""
PACKED_SUMS = ("f16",)  # sums that share a register, as factors do


# -- fragments -------------------------------------------------------------------------------------


def bits_of_warps(threads: Threads, reads: Sequence[Reader]) -> Array:
    """Return (warps, 32, registers) of the running threads."""
    found = np.stack([threads.active(read(threads)) for read in reads], axis=-1)
    return found.reshape(-1, WARP, len(reads))


def numbers_of(registers: Array, name: str) -> Array:
    """Return (warps, 32, numbers) in ``registers``: fp32, or fp64 for integers and fp64, for exactness."""
    numbers = NUMBERS[name].decode(registers.view(NUMBERS[name].raw))
    return numbers if numbers.dtype == np.float32 else numbers.astype(np.float64)


def rows_of(numbers: Array, eights: int, neighbours: int) -> Array:
    """Return (warps, 8 eights, columns) from (warps, 32, numbers), with ``neighbours`` in each row."""
    parts = numbers.reshape(-1, 8, 4, numbers.shape[-1] // eights // neighbours, eights, neighbours)
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(len(numbers), 8 * eights, -1)


def fragments_of(matrix: Array, neighbours: int = 2) -> Array:
    """Return the inverse of :func:`rows_of`."""
    warps, rows, columns = matrix.shape
    parts = matrix.reshape(warps, rows // 8, 8, columns // (4 * neighbours), 4, neighbours)
    return np.ascontiguousarray(parts.transpose(0, 2, 4, 3, 1, 5)).reshape(warps, WARP, -1)


def sums_of(registers: Array, name: str, eights: int) -> Array:
    """Return the numbers in accumulators as (warps, rows, columns)."""
    return rows_of(numbers_of(registers, name), eights, 2)


def registers_of(sums: Array, name: str, clamps: bool = False) -> Array:
    """Return ``sums`` as (warps, 32, registers), rounded; integers modulo 2**32 unless they are clamped."""
    kind = TYPES[name]
    if name == "s32":
        sums = np.clip(sums, -(2**31), 2**31 - 1) if clamps else sums
        return fragments_of(sums.astype(np.int64).astype(np.int32)).view(np.uint32)
    bits = fragments_of(kind.encode(sums.astype(kind.number)))
    return bits.view(np.uint32) if name in PACKED_SUMS else bits


def take_numbers(instruction: Instruction) -> list[str]:
    names = [name for name in instruction.qualifiers if name in NUMBERS]
    instruction.qualifiers = [
        qualifier for qualifier in instruction.qualifiers if qualifier not in names
    ]
    return names


# -- matrices in shared memory ---------------------------------------------------------------------


@builds("ldmatrix", "stmatrix")
def build_matrix_access(instruction: Instruction) -> Action:
    """Access 8 rows of 16 bytes per matrix, whose addresses are in 8 lanes; (g, t) has two numbers."""
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
        raise instruction.error(f"'.{number}' takes as many registers")
    at = address_of(instruction, inner, _WORD, 4, shared=True)
    words = np.arange(4, dtype=np.uint64) * np.uint64(4)

    def rows(threads: Threads) -> tuple[Array, Array]:
        """Return the addresses of the rows of all matrices, and the lanes that hold these addresses."""
        each = (at(threads), threads.active(threads.numbers))
        first, lanes = (of.reshape(-1, WARP)[:, : 8 * count].ravel() for of in each)
        return first[:, None] + words, lanes

    def transpose(registers: Array) -> Array:
        """Transpose (warps, matrices, 8, 4) registers of two numbers each, if the instruction does."""
        halves = registers.view(np.uint16)
        return (
            np.ascontiguousarray(halves.swapaxes(2, 3)).view(np.uint32) if transposed else registers
        )

    if loads:
        writes = [instruction.active_writer(part, _WORD) for part in parts]

        def load(threads: Threads) -> None:
            addresses, lanes = rows(threads)
            found = transpose(
                shared_bits(threads, addresses, _WORD, lanes).reshape(-1, count, 8, 4)
            )
            for index, write in enumerate(writes):
                write(threads, found[:, index].reshape(-1))

        return load
    reads = [instruction.reader(part, _WORD) for part in parts]

    def store(threads: Threads) -> None:
        registers = bits_of_warps(threads, reads).swapaxes(1, 2).reshape(-1, count, 8, 4)
        addresses, lanes = rows(threads)
        bits = transpose(np.ascontiguousarray(registers)).reshape(-1, 4)
        put_shared(threads, addresses, bits, _WORD, lanes)

    return store


# -- products --------------------------------------------------------------------------------------

_SUMS = {"f16": "f16 f32", "bf16": "f32", "tf32": "f32", "e4m3": "f32 f16", "e5m2": "f32 f16"}
_SUMS |= {"s8": "s32", "u8": "s32", "f64": "f64"}
SUMS = {name: sums.split() for name, sums in _SUMS.items()}
"""The types of sums, by type of a factor."""
TOGETHER = [("e4m3", "e5m2"), ("s8", "u8")]
"""Types of factors that may be mixed."""


def multiplies(total: str, left: str, right: str) -> bool:
    """Return whether there are products of these factors with sums of type ``total``."""
    mixed = any(left in names and right in names for names in TOGETHER)
    return total in SUMS.get(left, ()) and (left == right or mixed)


_DEPTHS = {8: (16, 32), 16: (8, 16), 32: (4, 8), 64: (4, 8, 16)}  # k, by bits of a factor


@builds("mma")
def build_matrix_product(instruction: Instruction) -> Action:
    """Build D = A B + C of 16 x k, k x 8 and 16 x 8; for fp64 and bytes also with 8 rows."""
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
        raise instruction.error(f"'{instruction.opcode}' has a wrong number of registers")
    writes = [instruction.active_writer(each, register) for each in d]
    reads = [[instruction.reader(each, register) for each in part] for part in (a, b, c)]

    def product(threads: Threads) -> None:
        first, second, before = (bits_of_warps(threads, read) for read in reads)
        rows = rows_of(numbers_of(first, left), eights, packed)
        columns = rows_of(numbers_of(second, right), 1, packed)
        sums = matrix_product(rows, columns.swapaxes(1, 2)) + sums_of(before, total, eights)
        found = registers_of(sums, total, clamps)
        for index, write in enumerate(writes):
            write(threads, np.ascontiguousarray(found[:, :, index]).ravel())

    return product


_SWIZZLES = (16, 128, 64, 32)
_OF_FLOATS = re.compile(r"\.b?f(16|32)")
_SHAPE = re.compile(r"m64n(\d+)k(\d+)")
_FORMS = ("fence", "mma_async", "commit_group", "wait_group")


@builds("wgmma")
def build_wgmma(instruction: Instruction) -> Action:
    form = instruction.choose(*_FORMS)
    for name in ("sync", "aligned"):
        instruction.flag(name)
    if form == "fence":
        instruction.finish(0)
        return lambda threads: None  # a warp accesses its own registers in program order
    if form == "commit_group":
        return build_commit(instruction, "wgmma")
    if form == "wait_group":
        return build_wait(instruction, "wgmma")
    if form is None:
        known = [f"wgmma.{name}" for name in _FORMS]
        raise instruction.unknown(f"instruction '{instruction.opcode}'", known)
    return _build_product(instruction)


def _build_product(instruction: Instruction) -> Action:
    clamps = instruction.flag("satfinite")
    names = take_numbers(instruction)
    total, left, right = names if len(names) == 3 else [""] * 3
    shapes = {name: match for name in instruction.qualifiers if (match := _SHAPE.fullmatch(name))}
    shape = instruction.choose(*shapes)
    columns, depth = map(int, shapes[shape].groups()) if shape else (0, 0)
    if (
        not multiplies(total, left, right)
        or depth * NUMBERS[left].bits != 256
        or columns % 8
        or not 8 <= columns <= 256
    ):
        known = [f"wgmma.mma_async.m64nNkK.{s}.{f}" for f in SUMS for s in SUMS[f] if s != "f64"]
        raise instruction.unknown(f"'{instruction.opcode}'", known)
    instruction.finish(4, 6, 7, 8)
    d, a, b, scale, *immediate = instruction.operands
    from_registers = a.startswith("{")
    literals = [instruction.literal(each, TYPES["s32"]) for each in immediate]
    signs = [-1 if literal == TYPES["s32"].bits_of(-1) else 1 for literal in literals[:2]] or [1, 1]
    turned = [False] * from_registers + [literal == 1 for literal in literals[2:]] + [False, False]
    if None in literals or len(literals) not in (0, 2, 4 - from_registers):
        raise instruction.error("scales and transpositions must be whole numbers")
    if any(turned) and NUMBERS[left].bits != 16:
        raise instruction.error("only factors of 16 bits can be transposed")
    word, results = TYPES["b32"], instruction.parts(d)
    of_sums = columns // (4 if total in PACKED_SUMS else 2)
    if len(results) != of_sums or len(instruction.parts(a)) != (4 if from_registers else 1):
        raise instruction.error(f"'{instruction.opcode}' has a wrong number of registers")
    slots = [instruction.register(result).slot for result in results]
    writes = [instruction.active_writer(result, word) for result in results]
    sums = [instruction.reader(result, word) for result in results]
    adds = _truth(instruction, scale)
    second = instruction.reader(b, TYPES["b64"])
    if from_registers:
        factors = [instruction.reader(part, word) for part in instruction.parts(a)]
    else:
        first = instruction.reader(a, TYPES["b64"])
    packed = 32 // NUMBERS[left].bits

    def start(threads: Threads) -> None:
        count = len(threads.numbers)
        of_b, added = (np.broadcast_to(read(threads), count).copy() for read in (second, adds))
        of_a = None if from_registers else np.broadcast_to(first(threads), count).copy()
        matrices = [(of_b, columns, right, turned[1])]
        if of_a is not None:
            matrices.append((of_a, 64, left, turned[0]))
        access = _begun(threads, matrices)

        def perform(threads: Threads) -> None:
            lanes = threads.active(threads.numbers).reshape(-1, WARP)[:, 0]
            if of_a is None:
                rows = rows_of(numbers_of(bits_of_warps(threads, factors), left), 2, packed)
            else:
                rows = _matrix(threads, of_a[lanes], 64, left, turned[0])
                rows = rows.reshape(-1, 4, 16, rows.shape[-1])[
                    np.arange(len(lanes)), lanes // WARP % 4
                ]
            transposed_columns = _matrix(threads, of_b[lanes], columns, right, turned[1])
            before = sums_of(bits_of_warps(threads, sums), total, 2)
            found = signs[0] * signs[1] * matrix_product(rows, transposed_columns.swapaxes(1, 2))
            found = found + np.where(added[lanes][:, None, None], before, 0)
            registers = registers_of(found, total, clamps)
            for index, write in enumerate(writes):
                write(threads, np.ascontiguousarray(registers[:, :, index]).ravel())
            _end(threads, access)

        work = groups_of(threads, "wgmma").start(threads, perform)
        threads.session.unsettled.update(dict.fromkeys(slots, work))

    return start


def build_sum(instruction: Instruction) -> Action:
    """Build arithmetic that first waits for a pending sum, as assemblers do."""
    action, known = ARITHMETIC[instruction.mnemonic](instruction), instruction.registers
    sources = [known[operand].slot for operand in instruction.operands[1:] if operand in known]
    if not _OF_FLOATS.search(instruction.opcode):
        return action

    def sum_up(threads: Threads) -> None:
        unsettled = threads.session.unsettled
        for slot in sources if unsettled else ():
            work = unsettled.get(slot)
            if work is not None and (work.pending & threads.everyone()).any():
                groups_of(threads, "wgmma").reach(threads, work)
        action(threads)

    return sum_up


def build_move(instruction: Instruction) -> Action:
    """Build a copy that is repeated if its source is a pending sum: compilers copy before the wait."""
    action, known = MOVES["mov"](instruction), instruction.registers
    targets, sources = (
        [known[part].slot for part in instruction.parts(operand) if part in known]
        for operand in instruction.operands
    )

    def move(threads: Threads) -> None:
        action(threads)
        unsettled = threads.session.unsettled
        if not unsettled:
            return
        for work in {unsettled[slot] for slot in sources if slot in unsettled}:
            if (work.pending & threads.everyone()).any():
                work.copies.append(action)
                unsettled.update(dict.fromkeys(targets, work))

    return move if sources else action


def _truth(instruction: Instruction, operand: str) -> Reader:
    literal = instruction.literal(operand, TYPES["u32"])
    if literal is not None:
        return lambda threads: np.bool_(literal)
    return instruction.reader(operand, PREDICATE)


# -- matrices in shared memory ---------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _offsets(descriptor: int, rows: int, size: int, turned: bool) -> Array:
    """Return bytes from the start to each of (rows, 32 / size) numbers, before the swizzle."""
    leading, stride = ((descriptor >> shift & 0x3FFF) * 16 for shift in (16, 32))
    width = _SWIZZLES[descriptor >> 62]
    row, byte = np.arange(rows)[:, None], np.arange(0, 32, size)[None, :]
    if not turned:
        piece = leading if width == 16 else 16
        return row % 8 * width + row // 8 * stride + byte % 16 + byte // 16 * piece
    across, down = (stride, leading) if width == 16 else (leading, stride)
    along, depth = row * size, byte // size
    return along % width + along // width * across + depth % 8 * width + depth // 8 * down


def _places(descriptor: int, rows: int, name: str, turned: bool) -> Array:
    offsets = _offsets(descriptor & ~0x3FFF, rows, NUMBERS[name].bits // 8, turned)
    places = offsets + ((descriptor & 0x3FFF) << 4)
    return swizzled(places, _SWIZZLES[descriptor >> 62], descriptor >> 49 & 7)


def _matrix(threads: Threads, descriptors: Array, rows: int, name: str, turned: bool) -> Array:
    """Return the matrices at the warps' ``descriptors`` as (warps, rows, k)."""
    program: PtxProgram = threads.session
    kind = TYPES[f"b{NUMBERS[name].bits}"]
    size = kind.bits // 8
    found = np.empty((len(descriptors), rows, 32 // size), kind.raw)
    for descriptor in np.unique(descriptors).tolist():
        places = _places(descriptor, rows, name, turned)
        program.offsets(places + program.base, size)
        found[descriptors == descriptor] = program.view(kind)[places // size]
    return numbers_of(found, name)


# -- reports to observers: the async proxy reads -----------------------------------------------------


def _begun(threads: Threads, matrices: list[tuple[Array, int, str, bool]]) -> AsyncAccess | None:
    """Report that the running threads begin to read matrices: (descriptors, rows, numbers, turned)."""
    program: PtxProgram = threads.session
    if not program.hooks.observed:
        return None
    numbers = threads.active(threads.numbers)
    first = int(numbers[0])
    access: AsyncAccess = program.next_in(("wgmma", first), first)
    for descriptors, rows, name, turned in matrices:
        seen = np.unique(descriptors[numbers]).tolist()
        places = np.concatenate([_places(each, rows, name, turned).ravel() for each in seen])
        addresses = (np.unique(places // 8) * 8 + program.base).astype(np.uint64)
        pointers = pointers_of(threads, addresses, TYPES["b64"], np.full(len(addresses), first))
        program.hooks.tell("on_async", access, pointers, does="loads", stores=False)
    return access


def _end(threads: Threads, access: AsyncAccess | None) -> None:
    if access is not None:
        numbers = threads.active(threads.numbers)
        threads.session.hooks.tell(
            "on_async_end", access.queue, access.time, numbers, reads_only=True
        )
