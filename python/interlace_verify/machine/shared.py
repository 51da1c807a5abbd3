"""PTX on the state spaces of a whole kernel: parameters and shared memory, with copies into the latter.

Shared memory of a program is memory of this process. Observers see its addresses like other addresses, so
they find a missing barrier. They see the store of an asynchronous copy twice, at its start and at its end:
between the two no other thread may use that memory.

Threads commit asynchronous work in groups. Work is done as late as possible, when its thread waits for its
group. A thread that reads earlier, or does not wait, sees the old values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from interlace.runtime.core.accesses import AsyncAccess, Atomic, Numbers
from interlace.runtime.places.sim.scheduler.program_hooks import ProgramHooks
from interlace_verify.machine.local import (
    ThreadMemory,
    build_local,
    build_of_kernel,
    build_parameter,
    is_of_kernel,
)
from interlace_verify.ptx.instruction import Action, Instruction, builders
from interlace_verify.ptx.memory import (
    MEMORY,
    SPACES,
    AccessWay,
    address_of,
    load_of,
    loading,
    pointers_of,
    store_of,
    storing,
    take_access,
    take_cache_hints,
    take_plain_ordering,
)
from interlace_verify.ptx.special import WARP, PtxSession, Threads
from interlace_verify.ptx.types import PREDICATE, TYPES, Array, ScalarType


class AsyncWork:
    """Work that one instruction has started, and that is not done yet for the threads in ``pending``.

    ``perform`` does it for the threads in the mask of its ``Threads``. Then ``copies`` repeats register
    moves that were made too early. ``group``: for each thread the number of its commit group, -1 before the
    commit. ``targets``: for a copy, the destination of each thread's ``size`` bytes, between ``low`` and
    ``high``; None without observers. ``text``: the instruction that started it.
    """

    targets: Array | None = None
    size, low, high, text = 0, np.uint64(0), np.uint64(0), ""

    def __init__(self, pending: Array, perform: Callable[[Threads], None]) -> None:
        self.pending, self.perform = pending.copy(), perform
        self.group = np.full(len(pending), -1)
        self.copies: list[Action] = []


class AsyncGroups:
    """All work of one kind that ``count`` threads of a program have not waited for, oldest first."""

    def __init__(self, count: int) -> None:
        self._committed = np.zeros(count, np.int64)
        self._work: list[AsyncWork] = []

    def start(self, threads: Threads, perform: Callable[[Threads], None]) -> AsyncWork:
        self._work.append(AsyncWork(threads.everyone(), perform))
        return self._work[-1]

    def commit(self, threads: Threads) -> None:
        lanes = threads.everyone()
        for work in self._work:
            work.group = np.where(lanes & (work.group < 0), self._committed, work.group)
        self._committed[lanes] += 1

    def wait(self, threads: Threads, left: int) -> None:
        """Do all but the last ``left`` groups of these threads."""
        lanes, last = threads.everyone(), self._committed - left
        self._perform(threads, [(w, lanes & (w.group >= 0) & (w.group < last)) for w in self._work])

    def reach(self, threads: Threads, last: AsyncWork) -> None:
        """Do ``last``, and all work started before it, for the warps of these threads."""
        lanes = np.repeat(threads.everyone().reshape(-1, WARP).any(axis=1), WARP)
        self._perform(threads, [(w, lanes) for w in self._work[: self._work.index(last) + 1]])

    def started(self) -> list[AsyncWork]:
        return list(self._work)

    def finish(self, threads: Threads, works: list[AsyncWork], lanes: Array) -> None:
        """Do the part of ``works`` that ``lanes`` threads have started and that is not done."""
        self._perform(threads, [(work, lanes) for work in works])

    def _perform(self, threads: Threads, chosen: list[tuple[AsyncWork, Array]]) -> None:
        before = threads.mask
        for work, lanes in chosen:
            due = lanes & work.pending
            if due.any():
                threads.mask, work.pending = due, work.pending & ~due
                for action in (work.perform, *work.copies):
                    action(threads)
        threads.mask = before
        self._work = [work for work in self._work if work.pending.any()]


def build_commit(instruction: Instruction, kind: str) -> Action:
    instruction.finish(0)
    return lambda threads: groups_of(threads, kind).commit(threads)


def build_wait(instruction: Instruction, kind: str) -> Action:
    instruction.finish(1)
    left = instruction.literal(instruction.operands[0], TYPES["u32"]) or 0
    return lambda threads: groups_of(threads, kind).wait(threads, left)


def groups_of(threads: Threads, kind: str) -> AsyncGroups:
    groups: dict[str, AsyncGroups] = threads.session.groups
    return groups.setdefault(kind, AsyncGroups(len(threads.numbers)))


SHARED, builds = builders()


@dataclass(eq=False)
class PtxProgram(PtxSession):
    """The state of the threads of one program. ``unsettled``: by register, the work that will write it."""

    hooks: ProgramHooks
    parameters: dict[str, Array] = field(default_factory=dict)
    variables: Mapping[str, object] = field(default_factory=dict)
    shared: Numbers = field(default_factory=lambda: np.zeros(0, np.uint8))
    local: ThreadMemory = field(default_factory=lambda: ThreadMemory(0, 0))
    groups: dict[str, AsyncGroups] = field(default_factory=dict)
    unsettled: dict[int, AsyncWork] = field(default_factory=dict)

    arrays: dict[int, bytes] = field(default_factory=dict)
    # asynchronous copies: mbarriers by address, stores that are not visible yet, groups by thread
    mbarriers: dict[int, object] = field(default_factory=dict)
    bulk_stores: list[Any] = field(default_factory=list)
    bulk_groups: dict[int, int] = field(default_factory=dict)
    draw: Random = field(default_factory=Random)
    until: Callable[[], bool] | None = None
    changes: int = 0  # counts changes of shared memory and of mbarriers
    branch: Any = None
    _queues: dict[object, int] = field(default_factory=dict)

    @property
    def base(self) -> int:
        return int(self.shared.ctypes.data)

    def view(self, kind: ScalarType) -> Array:
        return self.shared.view(kind.raw)

    def offsets(self, addresses: Array, size: int) -> Array:
        """Return the offsets of accesses of ``size`` bytes, which must be inside."""
        offsets = addresses.astype(np.int64) - self.base
        if offsets.size and (offsets.min() < 0 or offsets.max() + size > len(self.shared)):
            wrong = offsets[(offsets < 0) | (offsets + size > len(self.shared))].flat[0]
            raise ValueError(
                f"PTX: byte {wrong} of shared memory, which has {len(self.shared)} bytes"
            )
        return offsets

    def atomic_in_shared(self, atomic: Atomic, perform: Any) -> Any:
        kind = atomic.pointers.get_element_ty()
        self.offsets(atomic.pointers.data, kind.primitive_bitwidth // 8)
        result = perform()
        offsets = atomic.pointers.data - np.uint64(self.base)
        bits = result.data.view(f"u{result.data.itemsize}")
        memory_words = self.shared.view(bits.dtype)[offsets // np.uint64(result.data.itemsize)]
        self.changes += not np.array_equal(memory_words, bits)
        if self.hooks.observed or atomic.releases:
            self.hooks.shared_atomic(atomic, result)
        return result

    def next_in(self, queue: object, thread: int) -> AsyncAccess:
        self._queues[queue] = self._queues.get(queue, 0) + 1
        return AsyncAccess(queue, self._queues[queue], thread)


def take_shared(instruction: Instruction) -> None:
    if instruction.symbols is None or instruction.choose(*SPACES) is None:
        raise instruction.unknown(f"the state space of '{instruction.opcode}'", SPACES)


def _touch(
    threads: Threads,
    addresses: Array,
    kind: ScalarType,
    *,
    stores: bool,
    lanes: Array | None = None,
    bits: Array | None = None,
    constant: bool = False,
) -> Array:
    """Report an access to observers; return its offsets. ``constant``: all threads store the same value."""
    program: PtxProgram = threads.session
    offsets: Array = program.offsets(addresses, kind.bits // 8)
    if program.hooks.observed:
        pointers = pointers_of(threads, addresses, kind, lanes)
        pointers.shared = True
        if bits is not None:
            memory_words = program.view(kind)[offsets // (kind.bits // 8)]
            pointers.unchanged, pointers.stored = bool((memory_words == bits).all()), bits
        pointers.constant = constant
        program.hooks.shared(pointers, stores=stores)
    return offsets


def shared_bits(
    threads: Threads, addresses: Array, kind: ScalarType, lanes: Array | None = None
) -> Array:
    """Load bits. ``lanes``: the threads of ``addresses``' first dimension, if not the running threads."""
    offsets = _touch(threads, addresses, kind, stores=False, lanes=lanes)
    if "cp.async" in threads.session.groups:
        _tell_of_unfinished(threads, addresses, kind.bits // 8, lanes)
    return threads.session.view(kind)[offsets // (kind.bits // 8)]


def put_shared(
    threads: Threads,
    addresses: Array,
    bits: Array,
    kind: ScalarType,
    lanes: Array | None = None,
    *,
    constant: bool = False,
) -> None:
    options: dict[str, Any] = {"lanes": lanes, "bits": bits, "constant": constant}
    offsets = _touch(threads, addresses, kind, stores=True, **options)
    places, memory_words = offsets // (kind.bits // 8), threads.session.view(kind)
    threads.session.changes += not (memory_words[places] == bits).all()
    memory_words[places] = bits


@builds("ld", "st", "atom", "red")
def build_access(instruction: Instruction) -> Action:
    """Build an access of global or shared memory; a generic address may be in either."""
    plain = instruction.mnemonic in ("ld", "st")
    if plain and instruction.choose("param", "param::entry", "param::func"):
        return build_parameter(instruction)
    if plain and instruction.choose("local"):
        return build_local(instruction)
    if instruction.mnemonic == "ld" and instruction.flag("const"):
        instruction.qualifiers.append("global")  # a read-only variable
    if any(name in instruction.qualifiers for name in (*SPACES, "global")):
        return _build(instruction)
    at = next(operand for operand in instruction.operands if operand.startswith("["))
    where = address_of(instruction, at, TYPES["b8"])

    def of(space: str) -> Instruction:
        operands, opcode = list(instruction.operands), instruction.opcode + space
        return replace(instruction, opcode=opcode, generic=bool(space), operands=operands)

    elsewhere, inside = _build(of("")), _build(of(".shared"))
    local_access = build_local(of(""), generic=True) if plain else None
    kernel_access = build_of_kernel(of("")) if instruction.mnemonic == "ld" else None

    def access(threads: Threads) -> None:
        program, before, everyone = threads.session, threads.mask, threads.everyone()
        addresses = where(threads)
        left, parts = np.ones(len(addresses), np.bool_), []
        offsets = addresses - np.uint64(program.base)
        spaces = [(offsets < np.uint64(len(program.shared)), inside)]
        if local_access is not None and program.local.nbytes:
            spaces.append((program.local.has(addresses), local_access))
        if kernel_access is not None and program.arrays:
            spaces.append((is_of_kernel(threads, addresses), kernel_access))
        for lanes, action in (*spaces, (left, elsewhere)):
            if lanes.any():
                parts.append((lanes.copy(), action))
                left &= ~lanes
        if len(parts) == 1:
            parts[0][1](threads)
            return
        for lanes, action in parts:
            threads.mask = everyone.copy()
            threads.mask[everyone] = lanes
            action(threads)
        threads.mask = before

    return access


def _build(instruction: Instruction) -> Action:
    if instruction.mnemonic not in ("ld", "st") or instruction.choose(*SPACES) is None:
        return MEMORY[instruction.mnemonic](instruction)
    way = AccessWay(*take_plain_ordering(instruction), shared=True)
    parts, kind, addresses = take_access(instruction, shared=True)
    constant = all(instruction.literal(part, kind) is not None for part in parts)

    def get(threads: Threads, addresses: Array) -> Array:
        return shared_bits(threads, addresses, kind)

    def put(threads: Threads, addresses: Array, bits: Array) -> None:
        put_shared(threads, addresses, bits, kind, constant=constant)

    if instruction.mnemonic == "ld":
        load = load_of(kind, way) if way.orders else get
        return loading(instruction, parts, kind, addresses, load)
    store = store_of(kind, way) if way.orders else put
    return storing(instruction, parts, kind, addresses, store)


@builds("cvta")
def build_address_conversion(instruction: Instruction) -> Action:
    """Convert an address. Generic addresses of shared and local memory are this process's."""
    back = instruction.flag("to")
    shared, local = instruction.choose(*SPACES) is not None, instruction.flag("local")
    instruction.choose("global", "const", "param", "param::entry", "param::func")
    kind = instruction.take_type(("u64",))
    instruction.finish(2)
    write = instruction.writer(instruction.operands[0], kind)
    read = instruction.reader(instruction.operands[1], kind)

    def convert(threads: Threads) -> None:
        base = np.uint64(threads.session.base if shared else 0)
        if local:
            base = threads.session.local.starts
        write(threads, read(threads) - base if back else read(threads) + base)

    return convert


@builds("isspacep")
def build_question(instruction: Instruction) -> Action:
    shared, local = instruction.choose(*SPACES) is not None, instruction.flag("local")
    instruction.flag("global")
    instruction.finish(2)
    write = instruction.writer(instruction.operands[0], PREDICATE)
    read = instruction.reader(instruction.operands[1], TYPES["u64"])

    def ask(threads: Threads) -> None:
        program, addresses = threads.session, np.asarray(read(threads))
        inside = addresses - np.uint64(program.base) < np.uint64(len(program.shared))
        is_local = program.local.has(addresses)
        write(threads, inside if shared else is_local if local else ~(inside | is_local))

    return ask


# -- asynchronous copies ---------------------------------------------------------------------------

_WORD = TYPES["b32"]


_load = load_of(_WORD)


@builds("cp")
def build_copy(instruction: Instruction) -> Action:
    if not instruction.flag("async") or instruction.choose("bulk"):
        raise instruction.unknown(f"instruction '{instruction.opcode}'", ["cp.async"])
    if instruction.flag("commit_group"):
        return build_commit(instruction, "cp.async")
    if instruction.flag("wait_group"):
        return build_wait(instruction, "cp.async")
    if instruction.flag("wait_all"):
        instruction.finish(0)

        def wait_all(threads: Threads) -> None:
            groups = groups_of(threads, "cp.async")
            groups.commit(threads)
            groups.wait(threads, 0)

        return wait_all
    return _start(instruction)


def _start(instruction: Instruction) -> Action:
    instruction.choose("ca", "cg")
    take_cache_hints(instruction)
    take_shared(instruction)
    instruction.flag("global")
    instruction.finish(3, 4)
    destination, source, size_text, *rest = instruction.operands
    size = instruction.literal(size_text, _WORD)
    if size not in (4, 8, 16):
        raise instruction.error("'cp.async' copies 4, 8 or 16 bytes")
    to = address_of(instruction, destination, _WORD, size // 4, shared=True)
    where = address_of(instruction, source, _WORD, size // 4)
    length = instruction.reader((rest or [str(size)])[0], _WORD)
    words = np.arange(0, size, 4, dtype=np.uint64)

    def start(threads: Threads) -> None:
        count, mask, everyone = len(threads.numbers), threads.mask, threads.everyone()
        lengths = np.broadcast_to(length(threads), count)
        reads = everyone & (lengths == size)
        if (lengths[everyone & ~reads] != 0).any():
            raise instruction.error("a 'cp.async' of a part of its bytes is not known")
        targets, sources = np.zeros(count, np.uint64), np.zeros(count, np.uint64)
        targets[everyone] = to(threads)
        _touch(threads, targets[everyone][:, None] + words, _WORD, stores=True)
        threads.mask = reads  # an address that no byte is read from may be invalid
        sources[reads] = where(threads)
        threads.mask = mask

        def perform(threads: Threads) -> None:
            active = threads.everyone()
            for threads.mask in (active & reads, active & ~reads):
                if threads.mask.any():
                    into = targets[threads.mask][:, None] + words
                    bits = np.zeros(into.shape, np.uint32)
                    if reads[threads.mask].all():
                        bits = _load(threads, sources[threads.mask][:, None] + words)
                    put_shared(threads, into, bits, _WORD)

        work = groups_of(threads, "cp.async").start(threads, perform)
        if threads.session.hooks.observed:
            work.targets, work.size, work.text = targets, size, instruction.text
            work.low, work.high = targets[everyone].min(), targets[everyone].max()

    return start


def _tell_of_unfinished(threads: Threads, addresses: Array, size: int, lanes: Array | None) -> None:
    """Report loads from the destination of a copy that the loading thread has not waited for."""
    program: PtxProgram = threads.session
    first, last = addresses.min(), addresses.max()
    for work in program.groups["cp.async"].started():
        if work.targets is None or last < work.low or work.high + np.uint64(work.size) <= first:
            continue
        numbers = threads.active(threads.numbers) if lanes is None else lanes
        by = numbers.reshape(-1, *[1] * (addresses.ndim - 1))
        start = work.targets[by]
        late = (addresses < start + np.uint64(work.size)) & (addresses + np.uint64(size) > start)
        late &= work.pending[by]
        if late.any():
            thread = int(np.broadcast_to(by, late.shape)[late][0])
            program.hooks.left_open(
                "unfinished copy",
                "loads",
                f"thread {thread} has not waited for its '{work.text}'",
                at=int(addresses[late][0]) - program.base,
                count=int(np.count_nonzero(late)),
            )
