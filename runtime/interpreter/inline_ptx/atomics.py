"""Inline PTX that is atomic: ``atom`` and ``red``, and loads and stores with an ordering.

Each is told to the hooks as one access and performed with ``std::atomic`` by the C++ half of Triton's
interpreter, so it is atomic across processes too. What that half lacks is a loop of compare-and-swap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter
from triton.runtime.interpreter import TensorHandle

from interlace.runtime.core.accesses import Atomic
from interlace.runtime.interpreter.inline_ptx.syntax import (
    Address,
    Instruction,
    Operand,
    Vector,
)
from interlace.runtime.interpreter.inline_ptx.types import TYPES, ScalarType
from interlace.runtime.interpreter.inline_ptx.values import (
    Action,
    Builder,
    Read,
    Thread,
    adds_to,
    reader,
    writer,
)

ATOMICS: dict[str, Builder] = {}
builds = adds_to(ATOMICS)

SCOPES = {"cta": "cta", "cluster": "cta", "gpu": "gpu", "sys": "sys"}  # a program is a cluster
ALL = TensorHandle(np.ones(1, np.bool_), tl.int1)
_ORDERS = {
    "relaxed": interpreter.MEM_SEMANTIC.RELAXED,
    "acquire": interpreter.MEM_SEMANTIC.ACQUIRE,
    "release": interpreter.MEM_SEMANTIC.RELEASE,
    "acq_rel": interpreter.MEM_SEMANTIC.ACQUIRE_RELEASE,
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


def handle(bits: int, kind: ScalarType) -> Any:
    """One element as the interpreter has it."""
    return _as(kind, np.array([bits], kind.raw))


def _as(kind: ScalarType, found: Any) -> Any:
    return TensorHandle(found.view(kind.stored), kind.memory)


def bits_of(found: Any) -> int:
    return int.from_bytes(found.data.tobytes(), "little")


_pointer_types = {kind.name: tl.pointer_type(kind.memory) for kind in TYPES.values()}


def pointer(address: int, kind: ScalarType) -> Any:
    return TensorHandle(np.array([address], np.uint64), _pointer_types[kind.name])


def address_of(
    instruction: Instruction, operand: Operand, kind: ScalarType, count: int = 1
) -> Read:
    """Where ``count`` elements start; checked, as the interpreter would not survive a wrong one."""
    if not isinstance(operand, Address):
        raise instruction.error("an address is written in brackets, as [register+4]")
    base, offset = reader(instruction, operand.base, TYPES["u64"]), operand.offset
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
    if (scope is not None) != (sem in _ORDERS):
        raise instruction.error(
            "a scope belongs to .relaxed, .acquire and .release, and they need one"
        )
    return sem, SCOPES[scope or "cta"]


def take_parts(
    instruction: Instruction, operand: Operand, vector: str | None
) -> tuple[Operand, ...]:
    """The registers of ``operand``, as many as ``vector``, "v2" or "v4", says."""
    parts = operand.parts if isinstance(operand, Vector) else (operand,)
    if len(parts) != int((vector or "v1")[1:]) or isinstance(operand, Vector) != bool(vector):
        raise instruction.error("'.v2', '.v4' and '.v8' go with as many registers in braces")
    return parts


def _tell(
    thread: Thread,
    pointers: Any,
    kind: str,
    sem: str,
    scope: str,
    reads_only: bool,
    perform: Callable[[], Any],
    compare: Any = None,
) -> int:
    """Let the hooks do an atomic; returns the bits that were there before."""
    thread.idle_steps, thread.polls_plainly = 0, False
    atomic = Atomic(
        pointers, ALL, kind, sem, scope, reads_only, compare, each_thread=not thread.alone
    )
    return bits_of(thread.session.hooks.atomic(atomic, perform))


def ordered_load(kind: ScalarType, sem: str, scope: str) -> Callable[[Thread, int], int]:
    zero = np.zeros(1, kind.raw)

    def load(thread: Thread, address: int) -> int:
        pointers = pointer(address, kind)

        def perform() -> Any:  # 0 becomes 0, and anything else stays
            return _as(kind, interpreter.atomic_cas(pointers.data, zero, zero, _ORDERS[sem]))

        return _tell(thread, pointers, "load", sem, scope, True, perform)

    return load


def ordered_store(kind: ScalarType, sem: str, scope: str) -> Callable[[Thread, int, int], int]:
    change = _change("xchg", TYPES[f"u{kind.bits}"])

    def store(thread: Thread, address: int, bits: int) -> int:
        pointers = pointer(address, kind)

        def perform() -> Any:
            return _as(kind, change(pointers.data, bits, _ORDERS[sem]))

        return _tell(thread, pointers, "store", sem, scope, False, perform)

    return store


@builds("atom", "red")
def build_atomic(instruction: Instruction) -> Action:
    returns = instruction.mnemonic == "atom"
    sems = ("relaxed", "acquire", "release", "acq_rel") if returns else ("relaxed", "release")
    sem = instruction.choose(*sems) or "relaxed"
    scope = SCOPES[instruction.choose(*SCOPES) or "gpu"]
    take_global(instruction)
    known = list(_OPERATIONS) if returns else list(_OPERATIONS)[:-2]
    name = instruction.choose(*known)
    if name is None:
        raise instruction.unknown(f"the operation of '{instruction.opcode}'", known)
    kind = instruction.take_type(_OPERATIONS[name])
    instruction.finish(2 + returns + (name == "cas"))
    write = writer(instruction, instruction.operands[0], kind) if returns else None
    target, *given = instruction.operands[returns:]
    at = address_of(instruction, target, kind)
    reads = [reader(instruction, operand, kind) for operand in given]
    apply = _compare_and_swap(kind) if name == "cas" else read_modify_write(name, kind)

    def run(thread: Thread) -> None:
        before = apply(thread, sem, scope, at(thread), *[read(thread) for read in reads])
        if write is not None:
            write(thread, before)

    return run


def _compare_and_swap(kind: ScalarType) -> Callable[[Thread, str, str, int, int, int], int]:
    def apply(thread: Thread, sem: str, scope: str, address: int, expected: int, value: int) -> int:
        pointers = pointer(address, kind)
        compare, swap = handle(expected, kind), handle(value, kind)

        def perform() -> Any:
            found = interpreter.atomic_cas(pointers.data, compare.data, swap.data, _ORDERS[sem])
            return TensorHandle(found, kind.memory)

        return _tell(
            thread, pointers, "cas", sem, scope, expected == value, perform, compare=compare
        )

    return apply


def read_modify_write(name: str, kind: ScalarType) -> Callable[[Thread, str, str, int, int], int]:
    told = "xchg" if name == "exch" else name
    change = _change(told, kind)
    harmless = {"add": 0, "or": 0, "xor": 0, "and": kind.mask}.get(name)
    if kind.is_float:
        harmless = None  # -0 + 0 is +0

    def apply(thread: Thread, sem: str, scope: str, address: int, value: int) -> int:
        pointers = pointer(address, kind)

        def perform() -> Any:
            return _as(kind, change(pointers.data, value, _ORDERS[sem]))

        return _tell(thread, pointers, told, sem, scope, value == harmless, perform)

    return apply


_NATIVE = {
    (letter, name): getattr(interpreter.RMW_OP, prefix + name.upper())
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


def _change(name: str, kind: ScalarType) -> Callable[[Any, int, Any], Any]:
    """(addresses, bits, order) -> what was there, atomically."""
    native = _NATIVE.get((kind.letter, name)) if kind.bits >= 32 else None
    if native is not None:

        def rmw(addresses: Any, bits: int, order: Any) -> Any:
            value = handle(bits, kind).data
            return interpreter.atomic_rmw(native, addresses, value, ALL.data, order)

        return rmw
    updates: dict[str, Callable[[int, int], int]] = {
        "xchg": lambda old, value: value,
        "inc": lambda old, value: 0 if old >= value else old + 1,
        "dec": lambda old, value: value if old == 0 or old > value else old - 1,
    }
    new = updates[name]

    def loop(addresses: Any, bits: int, order: Any) -> Any:
        seen = handle(0, kind).data
        while True:
            value = handle(new(int(seen[0]), bits), kind).data
            found = interpreter.atomic_cas(addresses, seen, value, order)
            if found[0] == seen[0]:
                return found
            seen = found

    return loop
