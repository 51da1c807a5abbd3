"""PTX that copies by TMA: boxes of tensors and lines of bytes, between shared and global memory.

A copy happens at a time that the seed draws, between its start and the wait for it. A thread that reads
earlier, or does not wait, may see the old values. A copy to shared memory ends at its mbarrier. A copy from
shared memory belongs to a group. It has read its source after the wait with ``.read``. It is in global
memory after the wait without it, or when the program ends. Observers see the whole copy at its start;
``fences.py`` explains this.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from interlace.runtime.core.accesses import AsyncAccess, Handle
from interlace.runtime.places.sim.scheduler.program_hooks import ProgramHooks
from interlace_verify.machine.mbarriers import build_arrival_of_copies, mbarrier_at
from interlace_verify.machine.shared import SHARED, PtxProgram
from interlace_verify.machine.tensor_maps import ELEMENTS, Box, box_of, read_map
from interlace_verify.ptx.arithmetic import REDUCTIONS
from interlace_verify.ptx.instruction import Action, Instruction, builders
from interlace_verify.ptx.memory import (
    address_of,
    all_of,
    fetched,
    handle_of,
    pointers_of,
    put,
    take_cache_hints,
)
from interlace_verify.ptx.special import Reader, Threads
from interlace_verify.ptx.types import TYPES, Array, ScalarType

BULK, builds = builders()
_LINE = TYPES["b64"]
_IN_TENSOR = re.compile(r"\[ ?([^\s,]+?)(?: ?\+ ?0)? ?, ?\{(.*)\} ?\]")
_DIMENSIONS = tuple(f"{rank}d" for rank in range(1, 6))
BoxAt = Callable[[Threads, int, int], Box]
"""(threads, number of the running thread, offset in shared memory) -> the box that it copies."""


@dataclass(eq=False)
class BulkStore:
    """A copy from shared memory. ``group``: -1 before its commit. ``bits``: the data, after it was read."""

    access: AsyncAccess
    box: Box
    write: Callable[[Array], None]
    group: int = -1
    bits: Array | None = None
    written: bool = False

    def advance(self, program: PtxProgram, *, written: bool) -> None:
        """Read the data, if it was not read yet, and store it if ``written``."""
        if self.bits is None:
            self.bits = _places(program, self.box).copy()
        if written and not self.written:
            self.written = True
            self.write(self.bits[self.box.inside])


def finish(program: PtxProgram) -> None:
    """Perform all stores of an ending program, after other programs had a chance to run."""
    if not all(store.written for store in program.bulk_stores):
        program.hooks.pause()
    for store in program.bulk_stores:
        store.advance(program, written=True)


@builds("cp")
def build_bulk(instruction: Instruction) -> Action:
    if "mbarrier" in instruction.qualifiers and instruction.symbols is not None:
        return build_arrival_of_copies(instruction)
    if "bulk" not in instruction.qualifiers or instruction.symbols is None:
        return SHARED["cp"](instruction)
    reduces = instruction.flag("reduce")
    instruction.flag("async"), instruction.flag("bulk")
    if instruction.flag("commit_group"):
        instruction.finish(0)
        return _commit
    if instruction.flag("wait_group"):
        return _wait(instruction)
    if instruction.flag("prefetch"):
        return lambda threads: None
    take_cache_hints(instruction)
    tensor = instruction.flag("tensor")
    spaces = [each for each in instruction.qualifiers if re.match("global|shared", each)]
    instruction.qualifiers = [each for each in instruction.qualifiers if each not in spaces]
    if spaces and spaces[0] != "global" and instruction.flag("mbarrier::complete_tx::bytes"):
        return _load(instruction, tensor)
    if spaces != ["global", "shared::cta"] or not instruction.flag("bulk_group"):
        known = ["from global to shared memory with an mbarrier", "back in a bulk_group"]
        raise instruction.unknown(f"instruction '{instruction.opcode}'", known)
    return _store(instruction, tensor, reduces=reduces)


def _box(
    instruction: Instruction, operand: str, rest: list[str], tensor: bool, kind: ScalarType
) -> BoxAt:
    """Return the box of an operand in global memory: a tensor's at coordinates, or a line of bytes."""
    if not tensor:
        at = address_of(instruction, operand, _LINE, 2)
        length = instruction.reader(rest.pop(0), TYPES["u32"])

        def line(threads: Threads, which: int, offset: int) -> Box:
            nbytes = int(threads.active(length(threads))[which])
            if nbytes % 16 or offset % 16:
                raise instruction.error(f"{nbytes} bytes at byte {offset} are not multiples of 16")
            steps = np.arange(0, nbytes, kind.bits // 8)
            inside = np.ones(len(steps), np.bool_)
            addresses = at(threads)[which] + steps.astype(np.uint64)
            return Box(addresses, inside, offset + steps, kind, kind, 0)

        return line
    instruction.flag("tile")
    rank = instruction.choose(*_DIMENSIONS)
    match = _IN_TENSOR.fullmatch(operand)
    if rank is None or match is None:
        raise instruction.error("a tensor operand must be [map, {coordinates}], with its rank")
    where = instruction.reader(match[1], TYPES["u64"])
    reads: list[Reader] = [
        instruction.numbers(each.strip(), TYPES["s32"]) for each in match[2].split(",")
    ]
    if len(reads) != int(rank[0]):
        raise instruction.error(f"'.{rank}' takes {rank[0]} coordinates")

    def box(threads: Threads, which: int, offset: int) -> Box:
        corner = [int(threads.active(read(threads))[which]) for read in reads]
        raw = read_map(threads, int(threads.active(where(threads))[which]))
        return box_of(raw, corner, offset, instruction)

    return box


def _each(threads: Threads) -> list[int]:
    return [int(each) for each in threads.active(threads.numbers)]


def _one_by_one(action: Callable[[Threads, int], None]) -> Action:
    """Return an action that runs ``action`` for each running thread alone."""

    def run(threads: Threads) -> None:
        mask = threads.mask
        for thread in _each(threads):
            threads.mask = threads.numbers == thread
            action(threads, thread)
            threads.mask = mask

    return run


def _load(instruction: Instruction, tensor: bool) -> Action:
    target, source, *rest = instruction.operands
    where = _box(instruction, source, rest, tensor, _LINE)
    if len(rest) != 1:
        raise instruction.error("needs an mbarrier, and multicast is not known")
    instruction.operands = [target, source]
    instruction.finish(2)
    to = address_of(instruction, target, TYPES["b64"], 2, shared=True)
    counts = address_of(instruction, rest[0], TYPES["b64"], shared=True)

    def start(threads: Threads, thread: int) -> None:
        program: PtxProgram = threads.session
        mbarrier = mbarrier_at(threads, int(counts(threads)[0]))
        box = where(threads, 0, int(to(threads)[0]) - program.base)
        access = program.next_in(("mbarrier", mbarrier.address), thread)
        sources = _tell(threads, access, box, "loads", "global")
        _tell(threads, access, box, "stores", "shared")

        def perform() -> None:
            bits = np.full(len(box.offsets), box.fill, box.kind.raw)
            bits[box.inside] = _loaded(program.hooks, sources, box.kind)
            _put(program, box, bits)
            mbarrier.bytes -= bits.nbytes
            program.hooks.tell("on_arrival", mbarrier.address, (), (access.queue, access.time))
            mbarrier.arrived(program)

        if program.draw.random() < 0.5:
            perform()
        else:
            mbarrier.copies.append(perform)

    return _one_by_one(start)


def _store(instruction: Instruction, tensor: bool, *, reduces: bool) -> Action:
    name = instruction.choose(*REDUCTIONS) if reduces else None
    if reduces and name is None:
        raise instruction.unknown(f"the operation of '{instruction.opcode}'", REDUCTIONS)
    kind = _LINE
    if reduces and not tensor:
        instruction.flag("noftz")
        kind = instruction.take_type(sorted({*ELEMENTS} - {"u8", "u16"}))
    target, source, *rest = instruction.operands
    where = _box(instruction, target, rest, tensor, kind)
    if rest:
        raise instruction.error("has the wrong number of operands")
    instruction.operands = [target, source]
    instruction.finish(2)
    taken = address_of(instruction, source, TYPES["b64"], 2, shared=True)

    def start(threads: Threads, thread: int) -> None:
        program: PtxProgram = threads.session
        box = where(threads, 0, int(taken(threads)[0]) - program.base)
        access = program.next_in(("bulk", thread), thread)
        does = "reduces" if reduces else "stores"
        _tell(threads, access, box, "loads", "shared")
        targets = _tell(threads, access, box, does, "global")

        def write(bits: Array) -> None:
            if name is not None:
                before = _loaded(program.hooks, targets, box.kind)
                numbers = [box.number.decode(each) for each in (before, bits)]
                bits = box.number.encode(REDUCTIONS[name](*numbers))
            _stored(program.hooks, targets, bits, box.kind, does)

        store = BulkStore(access, box, write)
        program.bulk_stores.append(store)
        chance = program.draw.random()
        if chance < 2 / 3:
            store.advance(program, written=chance < 1 / 3)

    return _one_by_one(start)


def _tell(threads: Threads, access: AsyncAccess, box: Box, does: str, space: str) -> Any:
    """Report a box's addresses in a space to observers; return their handle."""
    program: PtxProgram = threads.session
    if space == "global":
        addresses = box.addresses[box.inside]
    else:
        addresses = (box.offsets + program.base).astype(np.uint64)
        program.offsets(addresses, box.kind.bits // 8)
    lanes = np.full(len(addresses), access.thread)
    pointers = pointers_of(threads, addresses, box.kind, lanes)
    if program.hooks.observed and len(addresses):
        program.hooks.tell("on_async", access, pointers, does=does, stores=does != "loads")
    return pointers


def _loaded(hooks: ProgramHooks, pointers: Handle, kind: ScalarType) -> Array:
    if not pointers.data.size:
        return np.zeros(0, kind.raw)
    load = lambda mask: fetched(pointers, mask, kind)  # noqa: E731
    found = hooks.asynchronous(pointers, all_of(pointers.data), load, value=None, does="loads")
    return found.view(kind.raw)


def _stored(
    hooks: ProgramHooks, pointers: Handle, bits: Array, kind: ScalarType, does: str
) -> None:
    if pointers.data.size:
        value = handle_of(bits, kind)
        store = lambda mask: put(pointers, value, mask)  # noqa: E731
        hooks.asynchronous(pointers, all_of(pointers.data), store, value=value, does=does)


def _places(program: PtxProgram, box: Box) -> Array:
    return program.shared.view(box.kind.raw)[box.offsets // (box.kind.bits // 8)]


def _put(program: PtxProgram, box: Box, bits: Array) -> None:
    program.shared.view(box.kind.raw)[box.offsets // (box.kind.bits // 8)] = bits


def _commit(threads: Threads) -> None:
    program: PtxProgram = threads.session
    for thread in _each(threads):
        committed = program.bulk_groups.get(thread, 0)
        for store in program.bulk_stores:
            if store.access.thread == thread and store.group < 0:
                store.group = committed
        program.bulk_groups[thread] = committed + 1


def _wait(instruction: Instruction) -> Action:
    reads_only = instruction.flag("read")
    instruction.finish(1)
    left = instruction.literal(instruction.operands[0], TYPES["u32"])
    if left is None:
        raise instruction.error("the number of groups must be a constant")

    def wait(threads: Threads) -> None:
        program: PtxProgram = threads.session
        for thread in _each(threads) if program.bulk_stores else ():
            last = program.bulk_groups.get(thread, 0) - left
            due = [
                store
                for store in program.bulk_stores
                if store.access.thread == thread and 0 <= store.group < last
            ]
            for store in due:
                store.advance(program, written=not reads_only)
            if due:
                queue, time, _ = due[-1].access
                those = np.array([thread])
                program.hooks.tell("on_async_end", queue, time, those, reads_only=reads_only)
            if not reads_only:
                program.bulk_stores = [each for each in program.bulk_stores if each not in due]

    return wait
