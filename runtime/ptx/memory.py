"""Inline PTX that loads and stores: ``ld`` and ``st``, ``atom`` and ``red``.

Plain accesses (weak and volatile) are told to the hooks as loads and stores, which a store buffer may
delay and a race detector checks. Those with an ordering are told as one atomic each, and performed with
``std::atomic`` by the C++ half of Triton's interpreter, so they are atomic across processes too. What that
half lacks is a loop of compare-and-swap.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from interlace.runtime.compat.triton_interpreter import TensorHandle, atomics
from interlace.runtime.core.accesses import Atomic
from interlace.runtime.ptx.instruction import Action, Instruction, builders
from interlace.runtime.ptx.special import Reader, Thread
from interlace.runtime.ptx.types import TYPES, ScalarType

MEMORY, builds = builders()

Load = Callable[[Thread, int], int]
Store = Callable[[Thread, int, int], object]
"""Of bits, at an address."""
Change = Callable[[Any, Any], Any]
"""(addresses, order) -> what was there: changes memory at once."""
Addresses = Callable[[Thread], list[int]]
"""Where an access starts; of one that reaches all ranks, in every rank's memory."""

SCOPES = {"cta": "cta", "cluster": "cta", "gpu": "gpu", "sys": "sys"}  # a program is a cluster
ALL = TensorHandle(np.ones(1, np.bool_), tl.int1)
ORDERS = {
    "relaxed": atomics.MEM_SEMANTIC.RELAXED,
    "acquire": atomics.MEM_SEMANTIC.ACQUIRE,
    "release": atomics.MEM_SEMANTIC.RELEASE,
    "acq_rel": atomics.MEM_SEMANTIC.ACQUIRE_RELEASE,
}
_WHOLE = ("u32", "s32", "u64", "s64")
_OPERATIONS = {
    "add": ("u32", "s32", "u64", "f32", "f64"),
    "min": _WHOLE,
    "max": _WHOLE,
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "exch": ("b32", "b64"),
    "cas": ("b16", "b32", "b64"),
}
_ACCESS_TYPES = [name for name in TYPES if name not in ("pred", "f16", "bf16")]
_CACHE_HINT = re.compile(r"ca|cg|cs|cv|lu|wb|wt|nc|L1::\w+|L2::(evict_\w+|\d+B)")
_ADDRESS = re.compile(r"\[ ?([^\s+\]]+) ?(?:\+ ?(-?\w+) ?)?\]")
_pointer_types = {kind.name: tl.pointer_type(kind.memory) for kind in TYPES.values()}


# -- what accesses have in common ------------------------------------------------------------------


def address_of(instruction: Instruction, text: str, kind: ScalarType, count: int = 1) -> Reader:
    """Where ``count`` elements start; checked, as the interpreter would not survive a wrong one."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise instruction.error("an address is written in brackets, as [register+4]")
    base = instruction.reader(match[1], TYPES["u64"])
    offset = instruction.literal(match[2] or "0", TYPES["u64"])
    if offset is None:
        raise instruction.error(f"the offset in '{text}' must be a whole number")
    align = kind.bits // 8 * count

    def at(thread: Thread) -> int:
        address: int = base(thread) + offset & 0xFFFFFFFFFFFFFFFF
        if address % align or address < 4096:
            what = "null" if address < 4096 else f"not a multiple of {align}"
            raise ValueError(
                f"inline PTX: address {address:#x} is {what}; line {instruction.line}: "
                f"{instruction.text}"
            )
        return address

    return at


def take_global(instruction: Instruction) -> None:
    instruction.flag("global")
    space = instruction.choose(
        "shared", "shared::cta", "shared::cluster", "local", "const", "param"
    )
    if space is not None:
        raise instruction.unknown(f"state space '.{space}'", ["global", "generic addresses"])


def take_ordering(instruction: Instruction, *sems: str) -> tuple[str | None, str]:
    """The ordering, None if there is none, and the scope; only those that order have one."""
    sem = instruction.choose(*sems)
    scope = instruction.choose(*SCOPES)
    if (scope is not None) != (sem in ORDERS):
        raise instruction.error("a scope belongs to .relaxed, .acquire, .release, which need one")
    return sem, SCOPES[scope or "cta"]


def take_parts(instruction: Instruction, operand: str, vector: str | None) -> list[str]:
    """The registers of ``operand``, as many as ``vector``, "v2" or "v4", says."""
    parts = instruction.parts(operand)
    if len(parts) != int((vector or "v1")[1:]) or operand.startswith("{") != bool(vector):
        raise instruction.error("'.v2', '.v4' and '.v8' go with as many registers in braces")
    return parts


def _pointer(address: int, kind: ScalarType) -> Any:
    return TensorHandle(np.array([address], np.uint64), _pointer_types[kind.name])


def _handle(bits: int, kind: ScalarType) -> Any:
    return TensorHandle(np.array([bits], kind.raw).view(kind.stored), kind.memory)


def _bits_of(found: Any) -> int:
    return int.from_bytes(found.data.tobytes(), "little")


# -- loads and stores ------------------------------------------------------------------------------


@builds("ld", "st")
def build_access(instruction: Instruction) -> Action:
    loads = instruction.mnemonic == "ld"
    strongest = "acquire" if loads else "release"
    sem, scope = take_ordering(instruction, "weak", "volatile", "relaxed", strongest)
    if sem in ORDERS:
        instruction.flag("mmio")
    take_global(instruction)
    for name in filter(_CACHE_HINT.fullmatch, list(instruction.qualifiers)):
        instruction.flag(name)
    vector = instruction.choose("v2", "v4")
    kind = instruction.take_type(_ACCESS_TYPES)
    instruction.finish(2)
    outer, inner = instruction.operands if loads else instruction.operands[::-1]
    parts = take_parts(instruction, outer, vector)
    at = address_of(instruction, inner, kind, len(parts))

    def addresses(thread: Thread) -> list[int]:
        return [at(thread)]

    if loads:
        return loading(instruction, parts, kind, addresses, load_of(kind, sem, scope), sum)
    return storing(instruction, parts, kind, addresses, store_of(kind, sem, scope))


def loading(
    instruction: Instruction,
    parts: list[str],
    kind: ScalarType,
    addresses: Addresses,
    get: Load,
    total: Callable[[list[int]], int],
) -> Action:
    """Into each of ``parts`` goes the total of what is at the addresses."""
    writes = [instruction.writer(part, kind, wider=True) for part in parts]

    def load(thread: Thread) -> None:
        found = addresses(thread)
        for index, write in enumerate(writes):
            by = index * kind.bits // 8
            write(thread, total([get(thread, address + by) for address in found]))

    return load


def storing(
    instruction: Instruction, parts: list[str], kind: ScalarType, addresses: Addresses, put: Store
) -> Action:
    """Each of ``parts`` goes to every address."""
    reads = [instruction.reader(part, kind, wider=True) for part in parts]

    def store(thread: Thread) -> None:
        for address in addresses(thread):
            for index, read in enumerate(reads):
                put(thread, address + index * kind.bits // 8, read(thread))

    return store


def load_of(kind: ScalarType, sem: str | None, scope: str) -> Load:
    if sem in ORDERS:
        nothing = np.zeros(1, kind.raw)

        def unchanged(addresses: Any, order: Any) -> Any:  # 0 becomes 0, and anything else stays
            return atomics.atomic_cas(addresses, nothing, nothing, order)

        access = _atomic(kind, "load", str(sem), scope)
        return lambda thread, address: access(thread, address, unchanged, reads_only=True)
    zero, volatile = _handle(0, kind), sem == "volatile"

    def load(thread: Thread, address: int) -> int:
        thread.idle_steps, thread.polls_plainly = 0, not volatile
        pointers = _pointer(address, kind)

        def perform() -> Any:
            found = atomics.load(pointers.data, ALL.data, zero.data, zero.data.dtype)
            return TensorHandle(found, kind.memory)

        return _bits_of(thread.session.hooks.load(pointers, ALL, perform, volatile=volatile))

    return load


def store_of(kind: ScalarType, sem: str | None, scope: str) -> Store:
    if sem in ORDERS:
        return read_modify_write("xchg", TYPES[f"u{kind.bits}"], str(sem), scope, told="store")

    def store(thread: Thread, address: int, bits: int) -> None:
        thread.idle_steps = 0
        pointers, value = _pointer(address, kind), _handle(bits, kind)

        def perform() -> None:
            atomics.store(pointers.data, value.data, ALL.data)

        thread.session.hooks.store(pointers, value, ALL, perform)

    return store


# -- atomics ---------------------------------------------------------------------------------------


def _atomic(kind: ScalarType, told: str, sem: str, scope: str) -> Callable[..., int]:
    """Lets the hooks do a change; gives the bits that were there before."""

    def access(
        thread: Thread, address: int, change: Change, reads_only: bool = False, compare: Any = None
    ) -> int:
        thread.idle_steps, thread.polls_plainly = 0, False
        pointers = _pointer(address, kind)

        def perform() -> Any:
            return TensorHandle(change(pointers.data, ORDERS[sem]).view(kind.stored), kind.memory)

        alone = thread.alone
        atomic = Atomic(pointers, ALL, told, sem, scope, reads_only, compare, each_thread=not alone)
        return _bits_of(thread.session.hooks.atomic(atomic, perform))

    return access


@builds("atom", "red")
def build_atomic(instruction: Instruction) -> Action:
    returns = instruction.mnemonic == "atom"
    sems = ORDERS if returns else ("relaxed", "release")
    sem = instruction.choose(*sems) or "relaxed"
    scope = SCOPES[instruction.choose(*SCOPES) or "gpu"]
    take_global(instruction)
    known = list(_OPERATIONS) if returns else list(_OPERATIONS)[:-2]
    name = instruction.choose(*known)
    if name is None:
        raise instruction.unknown(f"the operation of '{instruction.opcode}'", known)
    kind = instruction.take_type(_OPERATIONS[name])
    instruction.finish(2 + returns + (name == "cas"))
    write = instruction.writer(instruction.operands[0], kind) if returns else None
    target, *given = instruction.operands[returns:]
    at = address_of(instruction, target, kind)
    reads = [instruction.reader(operand, kind) for operand in given]
    if name == "cas":
        apply = _compare_and_swap(kind, sem, scope)
    else:
        apply = read_modify_write("xchg" if name == "exch" else name, kind, sem, scope)

    def run(thread: Thread) -> None:
        before = apply(thread, at(thread), *[read(thread) for read in reads])
        if write is not None:
            write(thread, before)

    return run


def _compare_and_swap(kind: ScalarType, sem: str, scope: str) -> Callable[..., int]:
    access = _atomic(kind, "cas", sem, scope)

    def apply(thread: Thread, address: int, expected: int, value: int) -> int:
        compare, swap = _handle(expected, kind), _handle(value, kind)

        def change(addresses: Any, order: Any) -> Any:
            return atomics.atomic_cas(addresses, compare.data, swap.data, order)

        return access(thread, address, change, reads_only=expected == value, compare=compare)

    return apply


def read_modify_write(
    name: str, kind: ScalarType, sem: str, scope: str, *, told: str = ""
) -> Callable[..., int]:
    """``told``: what hooks are told, if not ``name``."""
    access, change = _atomic(kind, told or name, sem, scope), _change(name, kind)
    harmless = {"add": 0, "or": 0, "xor": 0, "and": kind.mask}.get(name)
    if kind.is_float:
        harmless = None  # -0 + 0 is +0

    def apply(thread: Thread, address: int, bits: int) -> int:
        changed = functools.partial(change, bits)
        return access(thread, address, changed, reads_only=bits == harmless)

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


def _change(name: str, kind: ScalarType) -> Callable[[int, Any, Any], Any]:
    """(bits, addresses, order) -> what was there, atomically."""
    native = _NATIVE.get((kind.letter, name)) if kind.bits >= 32 else None
    if native is not None:
        return lambda bits, addresses, order: atomics.atomic_rmw(
            native, addresses, _handle(bits, kind).data, ALL.data, order
        )

    def loop(bits: int, addresses: Any, order: Any) -> Any:
        seen = _handle(0, kind).data
        while True:
            value = _handle(_UPDATES[name](int(seen[0]), bits), kind).data
            found = atomics.atomic_cas(addresses, seen, value, order)
            if found[0] == seen[0]:
                return found
            seen = found

    return loop
