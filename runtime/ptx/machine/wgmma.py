"""Asynchronous products of four warps: ``wgmma``.

D = A B + D of 64 x k, k x n and 64 x n: warp w of the four has rows 16 w to 16 w + 15 of A and D in
registers, as in ``matrices.py``. A may, and B must, be in shared memory, told by a *descriptor*:

    bits  0-13   where the matrix starts, / 16
         16-29   leading byte offset, / 16
         32-45   stride byte offset, / 16
         49-51   the row of the swizzle pattern that it starts in
         62-63   swizzle: none, 128, 64, 32 bytes

A matrix consists of blocks: 8 lines, rows or, if it is transposed, columns, as wide as the swizzle pattern.
The blocks along a line are the leading offset apart, those below each other the stride; of transposed ones
without a swizzle it is the other way round.

Every warp's part is done when it waits for the group; shared memory, the factor in registers and the sums
are looked at then, so all of them have to be left alone until the wait. Whoever reads the sums before sees
what was there, but for ``mov``, and for sums of floats, before which the wait is made.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from interlace.runtime.core.accesses import AsyncAccess
from interlace.runtime.numerics.sums import matrix_product
from interlace.runtime.ptx.arithmetic import ARITHMETIC
from interlace.runtime.ptx.instruction import Action, Instruction, builders
from interlace.runtime.ptx.machine.groups import build_commit, build_wait, groups_of
from interlace.runtime.ptx.machine.matrices import (
    NUMBERS,
    PACKED_SUMS,
    SUMS,
    bits_of_warps,
    multiplies,
    numbers_of,
    registers_of,
    rows_of,
    sums_of,
    take_numbers,
)
from interlace.runtime.ptx.machine.swizzle import swizzled
from interlace.runtime.ptx.memory import pointers_of
from interlace.runtime.ptx.moves import MOVES
from interlace.runtime.ptx.special import WARP, Threads
from interlace.runtime.ptx.types import PREDICATE, TYPES, Array

WGMMA, builds = builders()
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
        return lambda threads: None  # a warp's own registers are read and written in its order
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
    columns, depth = _shape(instruction)
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
    signs = [-1 if each == TYPES["s32"].bits_of(-1) else 1 for each in literals[:2]] or [1, 1]
    turned = [False] * from_registers + [each == 1 for each in literals[2:]] + [False, False]
    if None in literals or len(literals) not in (0, 2, 4 - from_registers):
        raise instruction.error("scales and transpositions are whole numbers")
    if any(turned) and NUMBERS[left].bits != 16:
        raise instruction.error("only factors of 16 bits can be transposed")
    word, results = TYPES["b32"], instruction.parts(d)
    of_sums = columns // (4 if total in PACKED_SUMS else 2)
    if len(results) != of_sums or len(instruction.parts(a)) != (4 if from_registers else 1):
        raise instruction.error(f"'{instruction.opcode}' has other numbers of registers")
    slots = [instruction.register(each).slot for each in results]
    writes = [instruction.active_writer(each, word) for each in results]
    sums = [instruction.reader(each, word) for each in results]
    adds = _truth(instruction, scale)
    second = instruction.reader(b, TYPES["b64"])
    if from_registers:
        factors = [instruction.reader(each, word) for each in instruction.parts(a)]
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
            others = _matrix(threads, of_b[lanes], columns, right, turned[1])
            before = sums_of(bits_of_warps(threads, sums), total, 2)
            found = signs[0] * signs[1] * matrix_product(rows, others.swapaxes(1, 2))
            found = found + np.where(added[lanes][:, None, None], before, 0)
            registers = registers_of(found, total, clamps)
            for index, write in enumerate(writes):
                write(threads, np.ascontiguousarray(registers[:, :, index]).ravel())
            _ended(threads, access)

        work = groups_of(threads, "wgmma").start(threads, perform)
        threads.session.unsettled.update(dict.fromkeys(slots, work))

    return start


def build_sum(instruction: Instruction) -> Action:
    """Arithmetic on a sum that is not there yet waits for it, as assemblers have it do."""
    action, known = ARITHMETIC[instruction.mnemonic](instruction), instruction.registers
    sources = [known[each].slot for each in instruction.operands[1:] if each in known]
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
    """A copy of a sum that is not there yet is made again when it is.

    Compilers write such copies before the wait, and assemblers know what is pending.
    """
    action, known = MOVES["mov"](instruction), instruction.registers
    targets, sources = (
        [known[part].slot for part in instruction.parts(each) if part in known]
        for each in instruction.operands
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


def _shape(instruction: Instruction) -> tuple[int, int]:
    """n and k; zeros if it says none."""
    for name in list(instruction.qualifiers):
        if match := _SHAPE.fullmatch(name):
            instruction.flag(name)
            return int(match[1]), int(match[2])
    return 0, 0


def _truth(instruction: Instruction, operand: str) -> Callable[[Threads], Any]:
    literal = instruction.literal(operand, TYPES["u32"])
    if literal is not None:
        return lambda threads: np.bool_(literal)
    return instruction.reader(operand, PREDICATE)


# -- matrices in shared memory ---------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _offsets(descriptor: int, rows: int, size: int, turned: bool) -> Array:
    """Bytes from the start to each of (rows, 32 / size) numbers, before they are swizzled.

    ``descriptor`` is one without its start; ``size`` of a number. ``turned``: neighbours are in a column.
    """
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
    """Offsets of (rows, k) numbers in shared memory."""
    offsets = _offsets(descriptor & ~0x3FFF, rows, NUMBERS[name].bits // 8, turned)
    places = offsets + ((descriptor & 0x3FFF) << 4)
    return swizzled(places, _SWIZZLES[descriptor >> 62], descriptor >> 49 & 7)


def _matrix(threads: Threads, descriptors: Array, rows: int, name: str, turned: bool) -> Array:
    """(warps, rows, k): what warps see by their ``descriptors``."""
    program: Any = threads.session
    kind = TYPES[f"b{NUMBERS[name].bits}"]
    size = kind.bits // 8
    found = np.empty((len(descriptors), rows, 32 // size), kind.raw)
    for descriptor in np.unique(descriptors).tolist():
        places = _places(descriptor, rows, name, turned)
        program.offsets(places + program.base, size)
        found[descriptors == descriptor] = program.shared.view(kind.raw)[places // size]
    return numbers_of(found, name)


# -- what observers see: the async proxy reads -------------------------------------------------------


def _begun(threads: Threads, matrices: list[tuple[Array, int, str, bool]]) -> AsyncAccess | None:
    """The threads that run begin to read matrices, each by (descriptors, rows, numbers, turned)."""
    program: Any = threads.session
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


def _ended(threads: Threads, access: AsyncAccess | None) -> None:
    if access is not None:
        numbers = threads.active(threads.numbers)
        threads.session.hooks.tell(
            "on_async_end", access.queue, access.time, numbers, reads_only=True
        )
