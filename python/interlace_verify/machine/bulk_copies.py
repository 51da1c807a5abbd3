"""PTX that copies by TMA: boxes of tensors and lines of bytes, between shared and global memory.

A copy happens at a time that the seed draws, between its start and the wait for it. A thread that reads
earlier, or does not wait, may see the old values. A copy to shared memory ends at its mbarrier. A copy from
shared memory belongs to a group. It has read its source after the wait with ``.read``. It is in global
memory after the wait without it, or when the program ends. Observers see the whole copy at its start.

A tensor map takes 128 bytes. NVIDIA does not document their meaning; here they are a :data:`MAP`. On a
device ``tensormap.replace`` makes maps, on the host :func:`tensor_map`. Dimension 0 is the innermost.
Elements of a box outside the tensor read as zeros or NaN, and are not stored.

TMA and ``wgmma`` swizzle tiles in the same way: they permute 16-byte pieces, so that a column of pieces of
eight rows of 128 bytes uses every bank once. The address alone decides: bits 4 to 6 are xor bits 7 to 9.
These are all three bits in the 128-byte mode, the lower two in the 64-byte mode, the lowest in the 32-byte
mode.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from interlace.runtime.core.accesses import AsyncAccess, Handle
from interlace.runtime.places.sim.scheduler.program_hooks import ProgramHooks
from interlace_verify.machine.mbarriers import build_arrival_of_copies, mbarrier_at
from interlace_verify.machine.shared import SHARED, PtxProgram, put_shared, shared_bits, take_shared
from interlace_verify.ptx.arithmetic import REDUCTIONS
from interlace_verify.ptx.instruction import Action, Instruction, builders
from interlace_verify.ptx.memory import (
    address_of,
    all_of,
    fetch,
    handle_of,
    load_of,
    pointers_of,
    put,
    store_of,
    take_cache_hints,
)
from interlace_verify.ptx.special import WARP, Reader, Threads
from interlace_verify.ptx.types import TYPES, Array, ScalarType

BULK, builds = builders()


def swizzled(addresses: Array, nbytes: int, first_row: int = 0) -> Array:
    """Return the swizzled places, in bytes, of ``addresses`` in shared memory.

    ``nbytes``: the mode; 16 changes nothing. ``first_row``: the row of 128 bytes, modulo 8, in which a
    pattern begins; 0 if it is aligned to its own size.
    """
    kind = addresses.dtype.type
    rows = (addresses >> kind(7)) - kind(first_row)
    return addresses ^ (rows << kind(4) & kind(nbytes - 16))


NBYTES = 128
MAP = np.dtype(
    [
        ("global_address", "u8"),
        ("global_stride", "u8", 4),  # in bytes, from dimension 1 on
        ("global_dim", "u4", 5),
        ("box_dim", "u4", 5),
        ("element_stride", "u4", 5),
        ("rank", "u4"),  # minus one
        ("elemtype", "u4"),
        ("interleave_layout", "u4"),
        ("swizzle_mode", "u4"),
        ("fill_mode", "u4"),
    ]
)
ELEMENTS = ["u8", "u16", "u32", "s32", "u64", "s64"]
ELEMENTS += ["f16", "f32", "f32", "f64", "bf16", "f32", "f32"]
"""By ``elemtype``; numbers with .ftz and .tf32 are copied unchanged."""
SWIZZLES = (16, 32, 64, 128)
"""By ``swizzle_mode``, in bytes; 16 means no swizzle."""
_FILL = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}


class Box(NamedTuple):
    """The elements of a box, innermost dimension first. Each has an address in global memory, a flag
    whether it is inside the tensor, and an offset in shared memory. Elements are numbers of type ``number``
    with bits of type ``kind``; elements outside are ``fill``."""

    addresses: Array
    inside: Array
    offsets: Array
    kind: ScalarType
    number: ScalarType
    fill: int

    @property
    def places(self) -> Array:
        return self.offsets // (self.kind.bits // 8)


def tensor_map(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    elemtype: int,
    *,
    swizzle: int = 0,
    fill: int = 0,
) -> bytes:
    """Return a tensor map: ``shape`` and ``box`` in elements, ``strides`` in bytes from dimension 1 on."""
    descriptor = np.zeros((), MAP)
    rank = len(shape)
    descriptor["global_address"], descriptor["rank"] = address, rank - 1
    descriptor["global_dim"][:rank], descriptor["box_dim"][:rank] = shape, box
    descriptor["global_stride"][: rank - 1] = strides
    descriptor["element_stride"][:rank] = 1
    descriptor["elemtype"], descriptor["swizzle_mode"], descriptor["fill_mode"] = (
        elemtype,
        swizzle,
        fill,
    )
    return descriptor.tobytes().ljust(NBYTES, b"\0")


def box_of(raw: bytes, corner: Sequence[int], offset: int, instruction: Instruction) -> Box:
    descriptor = np.frombuffer(raw, MAP, 1)[0]
    rank = int(descriptor["rank"]) + 1
    elemtype, mode = int(descriptor["elemtype"]), int(descriptor["swizzle_mode"])
    known = rank == len(corner) and elemtype < len(ELEMENTS) and mode < len(SWIZZLES)
    if not known or descriptor["interleave_layout"]:
        raise instruction.error(
            f"a tensor map of rank {rank}, element type {elemtype}, swizzle {mode} and interleave "
            f"{descriptor['interleave_layout']} is not known or not valid"
        )
    named, span = TYPES[ELEMENTS[elemtype]], SWIZZLES[mode]
    kind = TYPES[f"b{named.bits}"]
    size = kind.bits // 8
    _check(descriptor, rank, size, span, offset, instruction)
    steps = descriptor["element_stride"][:rank].astype(np.int64)
    counts = -(-descriptor["box_dim"][:rank].astype(np.int64) // steps)
    strides = [size, *descriptor["global_stride"][: rank - 1].astype(np.int64).tolist()]
    row = int(counts[0]) * size
    pitch = max(row, span) if mode else row
    addresses = np.array(int(descriptor["global_address"]), np.uint64)
    inside, offsets = np.array(True), np.array(offset, np.int64)
    for dim in range(rank):
        index = np.arange(counts[dim])
        at = corner[dim] + index * steps[dim]
        inside = inside & ((at >= 0) & (at < int(descriptor["global_dim"][dim]))).reshape(
            -1, *[1] * dim
        )
        addresses = addresses + (at * strides[dim]).astype(np.uint64).reshape(-1, *[1] * dim)
        step = size if dim == 0 else pitch * int(np.prod(counts[1:dim], initial=1))
        offsets = offsets + (index * step).reshape(-1, *[1] * dim)
    flat = swizzled(offsets.ravel(), span)
    fill = _FILL.get(named.name, 0) if descriptor["fill_mode"] else 0
    return Box(addresses.ravel(), inside.ravel(), flat, kind, named, fill)


def _check(
    descriptor: Array, rank: int, size: int, span: int, offset: int, instruction: Instruction
) -> None:
    """Raise an error for a map that TMA refuses or handles wrongly."""
    row = int(descriptor["box_dim"][0]) * size
    base, strides = (
        int(descriptor["global_address"]),
        descriptor["global_stride"][: rank - 1].tolist(),
    )
    wrong = {
        f"its base, address {base:#x}, is not a multiple of 16 bytes": base % 16,
        f"its strides, {strides} bytes, are not multiples of 16": any(s % 16 for s in strides),
        f"a row of a box has {row} bytes, which TMA does not take": row % 16
        or (span > 16 and row > span),
        f"a box begins at byte {offset} of shared memory, not at a multiple of 128": offset % 128,
        f"a box is {descriptor['box_dim'][:rank].tolist()}, which TMA does not take": not all(
            1 <= each <= 256 for each in descriptor["box_dim"][:rank].tolist()
        ),
    }
    found = [text for text, bad in wrong.items() if bad]
    if found:
        raise ValueError(
            f"PTX: TMA cannot use this tensor map: {found[0]}; line {instruction.line}: {instruction.text}"
        )


@builds("tensormap")
def build_tensor_map(instruction: Instruction) -> Action:
    if instruction.flag("replace"):
        return _replace(instruction)
    if instruction.flag("cp_fenceproxy"):
        return _copy(instruction)
    known = ["tensormap.replace", "tensormap.cp_fenceproxy"]
    raise instruction.unknown(f"instruction '{instruction.opcode}'", known)


def _replace(instruction: Instruction) -> Action:
    instruction.flag("tile")
    fields: Any = MAP.fields
    name = instruction.require("the field", fields)
    instruction.flag("b1024")
    kind = instruction.take_type(("b32", "b64"))
    field, first = fields[name]
    if field.base.itemsize * 8 < kind.bits:
        raise instruction.error(f"'.{name}' has {field.base.itemsize * 8} bits")
    kind = TYPES[f"b{field.base.itemsize * 8}"]
    shared = "shared::cta" in instruction.qualifiers
    if shared:
        take_shared(instruction)
    else:
        instruction.flag("global")
    instruction.finish(3 if field.shape else 2)
    where, *ordinal, value = instruction.operands
    at = address_of(instruction, where, TYPES["b64"], shared=shared)
    number = instruction.literal(ordinal[0], TYPES["u32"]) if ordinal else 0
    if number is None or number >= max(1, *field.shape, 0):
        raise instruction.error(f"'.{name}' has no element {ordinal[0]}")
    offset = np.uint64(first + number * field.base.itemsize)
    read = instruction.reader(value, kind)

    def replace(threads: Threads) -> None:
        addresses, bits = at(threads) + offset, threads.active(read(threads))
        if shared:
            put_shared(threads, addresses, bits, kind)
        else:
            store_of(kind)(threads, addresses, bits)

    return replace


def _copy(instruction: Instruction) -> Action:
    """Copy a map from shared to global memory: each thread of a warp copies a word of it."""
    taken = ["global", "shared::cta", "tensormap::generic", "release", "sync", "aligned"]
    for name in taken:
        if not instruction.flag(name):
            raise instruction.error(f"'{instruction.mnemonic}.cp_fenceproxy' needs '.{name}'")
    instruction.choose("cta", "cluster", "gpu", "sys")
    instruction.finish(3)
    word = TYPES["b32"]
    to = address_of(instruction, instruction.operands[0], word)
    where = address_of(instruction, instruction.operands[1], word, shared=True)
    put = store_of(word)

    def copy(threads: Threads) -> None:
        numbers = threads.active(threads.numbers)
        for warp in np.unique(numbers // WARP):  # the lanes of a warp wait for each other
            threads.session.hooks.barrier(numbers[numbers // WARP == warp])
        offset = (numbers % WARP * 4).astype(np.uint64)
        put(threads, to(threads) + offset, shared_bits(threads, where(threads) + offset, word))

    return copy


def read_map(threads: Threads, address: int) -> bytes:
    """Return the map at ``address``, in the parameters or in memory, as the running thread reads it."""
    program: PtxProgram = threads.session
    if address in program.arrays:
        return bytes(program.arrays[address])
    words = np.arange(0, NBYTES, 4, dtype=np.uint64)[None] + np.uint64(address)
    return bytes(load_of(TYPES["b32"])(threads, words).tobytes())


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
            self.bits = program.view(self.box.kind)[self.box.places].copy()
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
    spaces = [
        qualifier for qualifier in instruction.qualifiers if re.match("global|shared", qualifier)
    ]
    instruction.qualifiers = [
        qualifier for qualifier in instruction.qualifiers if qualifier not in spaces
    ]
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

        def line(threads: Threads, index: int, offset: int) -> Box:
            nbytes = int(threads.active(length(threads))[index])
            if nbytes % 16 or offset % 16:
                raise instruction.error(f"{nbytes} bytes at byte {offset} are not multiples of 16")
            steps = np.arange(0, nbytes, kind.bits // 8)
            inside = np.ones(len(steps), np.bool_)
            addresses = at(threads)[index] + steps.astype(np.uint64)
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

    def box(threads: Threads, index: int, offset: int) -> Box:
        corner = [int(threads.active(read(threads))[index]) for read in reads]
        raw = read_map(threads, int(threads.active(where(threads))[index]))
        return box_of(raw, corner, offset, instruction)

    return box


def _one_by_one(action: Callable[[Threads, int], None]) -> Action:
    def run(threads: Threads) -> None:
        mask = threads.mask
        for thread in threads.active(threads.numbers).tolist():
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
            program.view(box.kind)[box.places] = bits
            mbarrier.bytes -= bits.nbytes
            program.hooks.tell("on_arrival", mbarrier.address, (), (access.queue, access.time))
            mbarrier.arrived(program)

        if program.draw.random() < 0.5:
            perform()
        else:
            mbarrier.copies.append(perform)

    return _one_by_one(start)


def _store(instruction: Instruction, tensor: bool, *, reduces: bool) -> Action:
    name = instruction.require("the operation", REDUCTIONS) if reduces else None
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
    load = lambda mask: fetch(pointers, mask, kind)  # noqa: E731
    found = hooks.asynchronous(pointers, all_of(pointers.data), load, value=None, does="loads")
    return found.view(kind.raw)


def _stored(
    hooks: ProgramHooks, pointers: Handle, bits: Array, kind: ScalarType, does: str
) -> None:
    if pointers.data.size:
        value = handle_of(bits, kind)
        store = lambda mask: put(pointers, value, mask)  # noqa: E731
        hooks.asynchronous(pointers, all_of(pointers.data), store, value=value, does=does)


def _commit(threads: Threads) -> None:
    program: PtxProgram = threads.session
    for thread in threads.active(threads.numbers).tolist():
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
        numbers = threads.active(threads.numbers).tolist()
        for thread in numbers if program.bulk_stores else ():
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
