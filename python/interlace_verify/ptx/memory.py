"""PTX that loads and stores: ``ld`` and ``st``, ``atom`` and ``red``.

Plain accesses are reported to the hooks as loads and stores, which a store buffer may delay and a race
detector checks. Each access with an ordering is reported as one atomic. The C++ half of Triton's
interpreter performs it with ``std::atomic``, so it is also atomic across processes. Operations that this
half lacks are loops of compare-and-swap.

Addresses and values belong to the running threads: (threads,), or (threads, parts) for a vector.

``multimem.ld_reduce``, ``multimem.st`` and ``multimem.red`` reach all ranks at once. They take multicast
addresses from ``place.py``; others are an error, as on a GPU. The switch works on all ranks at
once. Here the ranks follow one another, in rank order, each with its own access. An access of a vector or a
packed pair, which carries data, is plain. An access of a single number, which may be a signal, is atomic
with the ordering of the instruction. Sums of numbers below 32 bits are in fp32, and are rounded once.
"""

import functools
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl

from interlace.runtime.compat.triton_interpreter import atomics, everywhere, unchecked_handle
from interlace.runtime.core.accesses import NULL, Atomic, Handle, Numbers, with_origin
from interlace.runtime.numerics.exact import larger, smaller
from interlace.runtime.places.sim import place
from interlace_verify.ptx.arithmetic import COMBINED, PAIRS as _PAIRS, lanewise
from interlace_verify.ptx.instruction import Action, Instruction, Write, builders
from interlace_verify.ptx.special import Reader, Threads
from interlace_verify.ptx.types import FORMATS, TYPES, Array, NarrowFloat, ScalarType

SPACES = ("shared", "shared::cta")
_VERBS = {"ld": "loads", "st": "stores"}
_ADDRESS = re.compile(r"\[ ?([^\s+\]]+) ?(?:\+ ?(-?\w+) ?)?\]")


def address_of(
    instruction: Instruction,
    text: str,
    kind: ScalarType,
    count: int = 1,
    *,
    shared: bool = False,
    window: Reader | None = None,
) -> Reader:
    """Return a reader of the address of ``count`` elements. It refuses addresses that would crash Python.

    Addresses in shared memory or in a ``window``, of 32 bits in PTX, become addresses of this process.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise instruction.error("an address must be in brackets, such as [register+4]")
    if shared and not instruction.generic:
        window = _shared_base
    narrow = window is not None
    base = instruction.reader(match[1], TYPES["u32" if narrow else "u64"], wider=narrow)
    offset = instruction.literal(match[2] or "0", TYPES["u64"])
    if offset is None:
        raise instruction.error(f"the offset in '{text}' must be a whole number")
    align, null = np.uint64(kind.bits // 8 * count), np.uint64(NULL)
    mnemonic = instruction.mnemonic
    by, within = np.uint64(offset), align - np.uint64(1)  # align is a power of 2

    def at(threads: Threads) -> Array:
        addresses = threads.active(base(threads))
        if offset:
            addresses = addresses + by
        if window is not None:
            addresses = (addresses & np.uint64(0xFFFFFFFF)) + window(threads)
        if not addresses.size:
            return addresses
        if np.bitwise_or.reduce(addresses) & within or np.minimum.reduce(addresses) < null:
            wrong = (addresses % align != 0) | (addresses < null)
            address = int(addresses[wrong][0])
            problem = "null" if address < NULL else f"not a multiple of {align}"
            problem = f"{problem}; line {instruction.line}: {instruction.text}"
            if window is None:
                does, count = _VERBS.get(mnemonic, mnemonic), int(wrong.sum())
                threads.session.hooks.misplaced(address, int(align), count, does, problem)
            raise ValueError(f"PTX: address {address:#x} is {problem}")
        return addresses

    return at


def _shared_base(threads: Threads) -> Array:
    return np.uint64(threads.session.base)


MEMORY, builds = builders()

Load = Callable[[Threads, Array], Array]
Store = Callable[[Threads, Array, Array], object]
"""Stores bits at addresses."""
Change = Callable[[Any, Any], Any]
"""(addresses, order) -> the old value: changes memory at once."""
Addresses = Callable[[Threads], list[Array]]
"""Returns the start of an access; for an access that reaches all ranks, in every rank's memory."""


class AccessWay(NamedTuple):
    """The way of an access: its order, if any, and its scope.

    ``shared``: it is in shared memory. ``multicast``: the address is another one of the same memory.
    ``incoherent``: if memory is written while the kernel runs, the loaded value may be old. ``base``: the
    slot of the register that addresses are computed from, -1 if it is not known.
    """

    sem: str | None = None
    scope: str = "cta"
    shared: bool = False
    multicast: bool = False
    incoherent: bool = False
    base: int = -1

    @property
    def orders(self) -> bool:
        return self.sem in ORDERS

    def pointers(self, threads: Threads, addresses: Array, kind: ScalarType) -> Any:
        handle = pointers_of(threads, addresses, kind, base=self.base)
        if self.multicast:
            handle.multicast = True
        return handle


PLAIN = AccessWay()
SCOPES = {"cta": "cta", "cluster": "cta", "gpu": "gpu", "sys": "sys"}  # a cluster is one program
ORDERS = {
    "relaxed": atomics.MEM_SEMANTIC.RELAXED,
    "acquire": atomics.MEM_SEMANTIC.ACQUIRE,
    "release": atomics.MEM_SEMANTIC.RELEASE,
    "acq_rel": atomics.MEM_SEMANTIC.ACQUIRE_RELEASE,
}
WHOLE = ("u32", "s32", "u64", "s64")
_SHORTS = ("f16", "bf16")
_OPERATIONS = {
    "add": ("u32", "s32", "u64", "s64", "f32", "f64", *_SHORTS),
    "min": WHOLE,
    "max": WHOLE,
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "exch": ("b32", "b64"),
    "cas": ("b16", "b32", "b64"),
}
_VECTORS = ("v2", "v4", "v8")
_OF_FLOATS = {"add": operator.add, "min": smaller, "max": larger}
_ACCESS_TYPES = [name for name in TYPES if name not in ("pred", "f16", "bf16")]
_CACHE_HINT = re.compile(r"ca|cg|cs|cv|lu|wb|wt|L1::\w+|L2::(evict_\w+|cache_hint|\d+B)")
_pointer_types = {kind.name: tl.pointer_type(kind.memory) for kind in TYPES.values()}


# -- shared parts of accesses ----------------------------------------------------------------------


def take_global(instruction: Instruction) -> None:
    instruction.flag("global")
    space = instruction.choose(
        "shared", "shared::cta", "shared::cluster", "local", "const", "param"
    )
    if space is not None:
        raise instruction.unknown(f"state space '.{space}'", ["global", "generic addresses"])


def take_cache_hints(instruction: Instruction) -> None:
    for name in filter(_CACHE_HINT.fullmatch, list(instruction.qualifiers)):
        instruction.flag(name)
        if name == "L2::cache_hint" and instruction.operands:  # a cache policy
            instruction.reader(instruction.operands.pop(), TYPES["b64"])


def take_space(instruction: Instruction) -> bool:
    """Return whether the access names shared memory, which only a whole kernel has."""
    if instruction.symbols is not None and instruction.choose(*SPACES):
        return True
    take_global(instruction)
    return False


def take_ordering(instruction: Instruction, *sems: str) -> tuple[str | None, str]:
    """Return the ordering, or None, and the scope, which only accesses with an ordering have."""
    sem = instruction.choose(*sems)
    scope = instruction.choose(*SCOPES)
    if (scope is not None) != (sem in ORDERS):
        raise instruction.error("only .relaxed, .acquire and .release take a scope, and need it")
    if sem == "volatile":
        return "relaxed", "sys"  # as PTX defines it
    return sem, SCOPES[scope or "cta"]


def take_parts(instruction: Instruction, operand: str, vector: str | None) -> list[str]:
    """Return the registers of ``operand``, as many as ``vector`` ("v2" or "v4") says."""
    parts = instruction.parts(operand)
    if len(parts) != int((vector or "v1")[1:]) or (vector and not operand.startswith("{")):
        raise instruction.error("'.v2', '.v4' and '.v8' take as many registers in braces")
    return parts


def all_of(addresses: Array) -> Any:
    return everywhere(addresses.shape)


def base_of(instruction: Instruction, text: str) -> int:
    """Return the slot of the register in an address, or -1."""
    match = _ADDRESS.fullmatch(text)
    found = instruction.registers.get(match[1]) if match else None
    return found.slot if found else -1


def pointers_of(
    threads: Threads,
    addresses: Array,
    kind: ScalarType,
    lanes: Array | None = None,
    *,
    base: int = -1,
) -> Any:
    """Return a handle of ``addresses``. The first dimension is the running threads, or ``lanes``."""
    handle = unchecked_handle(addresses, _pointer_types[kind.name])
    if (origin := threads.session.origins.get(base)) is not None:
        handle.dtype = with_origin(handle.dtype, origin)
    if threads.heard and (numbers := threads.who() if lanes is None else lanes) is not None:
        if addresses.ndim > 1:
            numbers = numbers.reshape(-1, *[1] * (addresses.ndim - 1))
        same = numbers.shape == addresses.shape
        handle.threads = numbers if same else np.broadcast_to(numbers, addresses.shape)
    return handle


def handle_of(bits: Array, kind: ScalarType) -> Any:
    return unchecked_handle(bits.view(kind.stored), kind.memory)


def fetch(pointers: Handle, mask: Handle, kind: ScalarType) -> Array:
    """Return the present memory contents in the form of ``kind``; 0 outside the mask."""
    zero = _zeros(pointers.data.shape, kind.stored)
    return atomics.load(pointers.data, mask.data, zero, kind.stored)


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: object) -> Array:
    return np.zeros(shape, dtype)  # never written


def put(pointers: Handle, value: Handle, mask: Handle) -> None:
    atomics.store(pointers.data, value.data, mask.data)


# -- loads and stores ------------------------------------------------------------------------------


@builds("ld", "st")
def build_access(instruction: Instruction) -> Action:
    sem, scope = take_plain_ordering(instruction)
    if sem in ORDERS:
        instruction.flag("mmio")
    take_global(instruction)
    incoherent = instruction.mnemonic == "ld" and instruction.flag("nc")
    take_cache_hints(instruction)
    parts, kind, addresses = take_access(instruction)
    base = base_of(instruction, instruction.operands[instruction.mnemonic == "ld"])
    way = AccessWay(sem, scope, incoherent=incoherent, base=base)
    if instruction.mnemonic == "ld":
        return loading(instruction, parts, kind, addresses, load_of(kind, way))
    return storing(instruction, parts, kind, addresses, store_of(kind, way))


def take_plain_ordering(instruction: Instruction) -> tuple[str | None, str]:
    strongest = "acquire" if instruction.mnemonic == "ld" else "release"
    return take_ordering(instruction, "weak", "volatile", "relaxed", strongest)


def take_access(
    instruction: Instruction, *, shared: bool = False, window: Reader | None = None
) -> tuple[list[str], ScalarType, Addresses]:
    """Return the registers of a load or a store, their type, and the start, see :func:`address_of`."""
    vector, kind = take_accessed(instruction)
    instruction.finish(2)
    order = 1 if instruction.mnemonic == "ld" else -1
    outer, inner = instruction.operands[::order]
    parts = take_parts(instruction, outer, vector)
    at = address_of(instruction, inner, kind, len(parts), shared=shared, window=window)
    return parts, kind, lambda threads: [at(threads)]


def take_accessed(instruction: Instruction) -> tuple[str | None, ScalarType]:
    """Return the vector and the type of a load or a store; 128 bits are two halves."""
    if instruction.flag("b128"):
        return "v2", TYPES["b64"]
    return instruction.choose(*_VECTORS), instruction.take_type(_ACCESS_TYPES)


def _spread(addresses: Array, parts: int, kind: ScalarType) -> Array:
    if parts == 1:
        return addresses
    return addresses[:, None] + np.arange(parts, dtype=np.uint64) * np.uint64(kind.bits // 8)


def loading(
    instruction: Instruction,
    parts: list[str],
    kind: ScalarType,
    addresses: Addresses,
    get: Load,
    total: Callable[[list[Array]], Array] = lambda found: found[0],
) -> Action:
    """Build a load: each of ``parts`` gets the total of the values at the addresses."""
    writes = [instruction.active_writer(part, kind) for part in parts]

    if len(parts) == 1:
        (only,) = writes
        return lambda threads: only(
            threads, total([get(threads, address) for address in addresses(threads)])
        )

    def load(threads: Threads) -> None:
        everywhere = [_spread(address, len(parts), kind) for address in addresses(threads)]
        found = total([get(threads, each) for each in everywhere])
        for index, write in enumerate(writes):
            write(threads, found[:, index])

    return load


def storing(
    instruction: Instruction, parts: list[str], kind: ScalarType, addresses: Addresses, put: Store
) -> Action:
    reads = [instruction.reader(part, kind, wider=True) for part in parts]

    def store(threads: Threads) -> None:
        bits = _stack([threads.active(read(threads)) for read in reads])
        for address in addresses(threads):
            put(threads, _spread(address, len(parts), kind), bits)

    return store


def load_of(kind: ScalarType, way: AccessWay = PLAIN) -> Load:
    if way.orders:
        access = _atomic(kind, "load", way)

        def get(threads: Threads, addresses: Array) -> Array:
            nothing = np.zeros(addresses.shape, kind.raw)

            def keep(addresses: Array, order: object) -> Array:  # swapping 0 for 0 changes nothing
                return atomics.atomic_cas(addresses, nothing, nothing, order)

            return access(threads, addresses, keep, reads_only=True)

        return get

    def load(threads: Threads, addresses: Array) -> Array:
        threads.idle_steps, threads.polls_plainly = 0, True
        pointers, mask = way.pointers(threads, addresses, kind), all_of(addresses)
        if way.incoherent:
            pointers.incoherent = True

        def perform(mask: Handle = mask) -> Any:
            return unchecked_handle(fetch(pointers, mask, kind), kind.memory)

        return threads.session.hooks.load(pointers, mask, perform).data.view(kind.raw)

    return load


def store_of(kind: ScalarType, way: AccessWay = PLAIN) -> Store:
    if way.orders:
        return read_modify_write("xchg", TYPES[f"u{kind.bits}"], way, hook_name="store")

    def store(threads: Threads, addresses: Array, bits: Array) -> None:
        threads.idle_steps = 0
        pointers, mask = way.pointers(threads, addresses, kind), all_of(addresses)
        value, pointers.stored = handle_of(bits, kind), bits

        def perform(mask: Handle = mask) -> None:
            if threads.heard:
                memory_words = fetch(pointers, mask, kind)
                pointers.unchanged = bool((memory_words.view(kind.raw) == bits).all())
            put(pointers, value, mask)

        threads.session.hooks.store(pointers, value, mask, perform)

    return store


# -- atomics ---------------------------------------------------------------------------------------


def _atomic(kind: ScalarType, hook_name: str, way: AccessWay) -> Callable[..., Array]:
    """Return an access that the hooks perform; it returns the old bits."""
    sem = str(way.sem)

    def access(
        threads: Threads,
        addresses: Array,
        change: Change,
        reads_only: bool = False,
        compare: Handle | None = None,
        value: Handle | None = None,
    ) -> Array:
        threads.idle_steps, threads.polls_plainly = 0, False
        pointers, all_lanes = way.pointers(threads, addresses, kind), all_of(addresses)

        def perform(mask: Handle = all_lanes) -> Any:
            if mask is not all_lanes and not mask.data.all():
                return handle_of(np.zeros(addresses.shape, kind.raw), kind)
            return handle_of(change(pointers.data, ORDERS[sem]), kind)

        options = hook_name, sem, way.scope, reads_only, compare, not threads.alone, value
        atomic, session = Atomic(pointers, all_lanes, *options), threads.session
        change_memory = session.atomic_in_shared if way.shared else session.hooks.atomic
        return change_memory(atomic, perform).data.view(kind.raw)

    return access


@builds("atom", "red")
def build_atomic(instruction: Instruction) -> Action:
    returns = instruction.mnemonic == "atom"
    sems = ORDERS if returns else ("relaxed", "release")
    sem = instruction.choose(*sems) or "relaxed"
    scope, shared = SCOPES[instruction.choose(*SCOPES) or "gpu"], take_space(instruction)
    take_cache_hints(instruction)
    known = list(_OPERATIONS) if returns else list(_OPERATIONS)[:-2]
    name = instruction.require("the operation", known)
    vector, kind, number = instruction.choose(*_VECTORS), *take_changed(instruction, name)
    instruction.finish(2 + returns + (name == "cas"))
    target, *operands = instruction.operands[returns:]
    vectors = [take_parts(instruction, each, vector) for each in operands]
    at = address_of(instruction, target, kind, len(vectors[0]), shared=shared)
    way = AccessWay(sem, scope, shared, base=base_of(instruction, target))
    if name == "cas":
        apply = _compare_and_swap(kind, way)
    else:
        apply = read_modify_write("xchg" if name == "exch" else name, kind, way, number=number)
    writes: list[Write] = []
    if returns:
        parts = take_parts(instruction, instruction.operands[0], vector)
        writes = [instruction.active_writer(part, kind) for part in parts]
    reads = [[instruction.reader(part, kind) for part in parts] for parts in vectors]

    def run(threads: Threads) -> None:
        addresses = _spread(at(threads), len(vectors[0]), kind)
        bits = [_stack([threads.active(read(threads)) for read in each]) for each in reads]
        before = apply(threads, addresses, *bits)
        for index, write in enumerate(writes):
            write(threads, before if vector is None else before[:, index])

    return run


def take_changed(instruction: Instruction, name: str) -> tuple[ScalarType, ScalarType | None]:
    """Return the type of a register, and the type of the two numbers in it, if it is a pair."""
    instruction.flag("noftz")
    if name in _OF_FLOATS and (pair := instruction.choose(*_PAIRS)):
        return TYPES["b32"], TYPES[_PAIRS[pair]]
    shorts = _SHORTS if name in ("min", "max") else ()
    return instruction.take_type((*_OPERATIONS[name], *shorts)), None


def _stack(values: list[Array]) -> Array:
    return values[0] if len(values) == 1 else np.stack(values, axis=1)


def _compare_and_swap(kind: ScalarType, way: AccessWay) -> Callable[..., Array]:
    access = _atomic(kind, "cas", way)

    def apply(threads: Threads, addresses: Array, expected: Array, value: Array) -> Array:
        compare, swap = handle_of(expected, kind), handle_of(value, kind)

        def change(addresses: Numbers, order: object) -> Any:
            return atomics.atomic_cas(addresses, compare.data, swap.data, order)

        same = expected.flat[0] == value.flat[0] and bool((expected == value).all())
        return access(threads, addresses, change, reads_only=same, compare=compare)

    return apply


def read_modify_write(
    name: str,
    kind: ScalarType,
    way: AccessWay,
    *,
    hook_name: str = "",
    number: ScalarType | None = None,
) -> Callable[..., Array]:
    """Build an operation. Hooks see ``hook_name``, or else ``name``; ``number``: the type of a pair."""
    access = _atomic(kind, hook_name or name, way)
    change = _change(name, kind, number)
    harmless = {"add": 0, "or": 0, "xor": 0, "and": kind.mask}.get(name)
    if kind.is_float:
        harmless = None  # -0 + 0 is +0

    def apply(threads: Threads, addresses: Array, bits: Array) -> Array:
        changed = functools.partial(change, bits)
        reads_only = harmless is not None and bool((bits == harmless).all())
        value = handle_of(bits, kind) if hook_name == "store" else None
        return access(threads, addresses, changed, reads_only=reads_only, value=value)

    return apply


_NATIVE = {
    (letter, name): getattr(atomics.RMW_OP, prefix + name.upper())
    for letters, prefix, names in (
        ("us", "", "add and or xor xchg"),
        ("b", "", "and or xor xchg"),
        ("s", "", "min max"),
        ("u", "U", "min max"),
        ("f", "F", "add"),
    )
    for letter in letters
    for name in names.split()
}
_UPDATES: dict[str, Callable[[int, int], int]] = {
    "xchg": lambda old, value: value,
    "inc": lambda old, value: 0 if old >= value else old + 1,
    "dec": lambda old, value: value if old == 0 or old > value else old - 1,
}


def _change(
    name: str, kind: ScalarType, number: ScalarType | None
) -> Callable[[Array, Any, Any], Any]:
    """Return (bits, addresses, order) -> the old value: an atomic change."""
    native = _NATIVE.get((kind.letter, name)) if kind.bits >= 32 and number is None else None
    if native is not None:
        return lambda bits, addresses, order: atomics.atomic_rmw(
            native, addresses, bits.view(kind.stored), np.ones(bits.shape, np.bool_), order
        )

    update = _update(name, kind, number)

    def one(bits: Array, address: Array, order: object) -> Any:
        seen = np.zeros(1, kind.raw)
        while True:
            found = atomics.atomic_cas(address, seen, update(seen, bits), order)
            if found[0] == seen[0]:
                return found
            seen = found

    def loop(bits: Array, addresses: Array, order: object) -> Any:
        flat = zip(bits.reshape(-1, 1), addresses.reshape(-1, 1), strict=True)
        return np.concatenate([one(*each, order) for each in flat]).reshape(bits.shape)

    return loop


def _update(name: str, kind: ScalarType, number: ScalarType | None) -> Callable[..., Array]:
    """Return (old bits, given bits) -> new bits, for one register."""
    if number is not None:
        return lanewise(_OF_FLOATS[name], number)
    if kind.is_float and name in _OF_FLOATS:
        return lambda old, new: kind.encode(_OF_FLOATS[name](kind.decode(old), kind.decode(new)))
    change = _UPDATES[name]
    return lambda old, new: np.array([change(int(old[0]), int(new[0]))], kind.raw)


# -- all ranks at once ------------------------------------------------------------------------------

_ORDERINGS = {
    "ld_reduce": ("weak", "relaxed", "acquire"),
    "st": ("weak", "relaxed", "release"),
    "red": ("relaxed", "release"),
}
_SUMS = ("u32", "s32", "u64", "f32", "f64")
_FOURS = {"e4m3x4": FORMATS["e4m3"], "e5m2x4": FORMATS["e5m2"]}
_AT_ALL_RANKS: dict[str, tuple[Callable[..., Array], tuple[str, ...]]] = {
    "add": (operator.add, _SUMS),
    **{name: (each, WHOLE) for name, each in (("min", smaller), ("max", larger))},
    **{name: (COMBINED[name], ("b32", "b64")) for name in COMBINED},
}
_WIDEST = 128


@builds("multimem")
def build_multimem(instruction: Instruction) -> Action:
    form = instruction.choose(*_ORDERINGS)
    if form is None:
        known = [f"multimem.{name}" for name in _ORDERINGS]
        raise instruction.unknown(f"instruction '{instruction.opcode}'", known)
    sem, scope = take_ordering(instruction, *_ORDERINGS[form])
    take_global(instruction)
    name = instruction.require("the operation", _AT_ALL_RANKS) if form != "st" else "add"
    reduce, kinds = _AT_ALL_RANKS[name]
    instruction.choose("acc::f32", "acc::f16")
    vector = instruction.choose("v2", "v4", "v8")
    packed = instruction.choose(*_PAIRS, *(_FOURS if form != "red" else ()))
    kinds = kinds if form != "st" else (*_SUMS, "s64", "b32", "b64")
    kind = TYPES["b32"] if packed else instruction.take_type(kinds)
    instruction.finish(2)
    data, at = instruction.operands if form == "ld_reduce" else instruction.operands[::-1]
    parts = take_parts(instruction, data, vector)
    nbytes = len(parts) * kind.bits // 8
    if 8 * nbytes > _WIDEST or (vector and kind.bits == 64):
        raise instruction.error(f"more than {_WIDEST} bits at once")
    where = address_of(instruction, at, kind, len(parts))

    def on_ranks(address: int) -> list[int]:
        try:
            return place.addresses(address, nbytes)
        except LookupError:
            raise ValueError(
                f"PTX: {address:#x} is not a multicast address of {nbytes} bytes; line "
                f"{instruction.line}: {instruction.text}"
            ) from None

    def addresses(threads: Threads) -> list[Array]:
        """Return the addresses of the access in every rank's memory, by rank."""
        by_rank = zip(*map(on_ranks, where(threads).tolist()), strict=True)
        return [np.array(each, np.uint64) for each in by_rank]  # a layout that atomics accept

    number = TYPES[_PAIRS[packed]] if packed in _PAIRS else None
    ordering = None if packed or len(parts) > 1 else sem
    way = AccessWay(ordering, scope, multicast=True)
    if form == "ld_reduce":
        total = _total(reduce, _FOURS.get(str(packed), number or kind), kind)
        return loading(instruction, parts, kind, addresses, load_of(kind, way), total)
    if form == "st":
        return storing(instruction, parts, kind, addresses, store_of(kind, way))
    way = way._replace(sem=sem or "relaxed")
    change = read_modify_write(name, kind, way, number=number)
    return storing(instruction, parts, kind, addresses, change)


def _total(reduce: Any, number: Any, kind: ScalarType) -> Callable[[list[Array]], Array]:
    """Return the bits of the sum of registers of ``kind``, each of one, two or four of ``number``."""

    def encode(values: Array) -> Array:
        if isinstance(number, NarrowFloat):
            return number.encode(values, np.rint, saturates=True)
        return number.encode(values)

    def lane(registers: list[Array], shift: int) -> Array:
        parts = [
            number.decode((bits >> kind.raw.type(shift)).astype(number.raw)) for bits in registers
        ]
        return encode(functools.reduce(reduce, parts[1:], parts[0] + 0))

    def reduced(registers: list[Array]) -> Array:
        lanes = [
            lane(registers, shift).astype(kind.raw) << kind.raw.type(shift)
            for shift in range(0, kind.bits, number.bits)
        ]
        return functools.reduce(operator.or_, lanes)

    return reduced
