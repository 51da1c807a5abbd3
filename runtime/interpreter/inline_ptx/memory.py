"""Inline PTX that loads and stores.

Plain accesses (weak and volatile) are told to the hooks as loads and stores, which a store buffer may
delay and a race detector checks; those with an ordering as atomics.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from triton._C.libtriton import interpreter
from triton.runtime.interpreter import TensorHandle

from interlace.runtime.interpreter.inline_ptx.atomics import (
    ALL,
    address_of,
    bits_of,
    handle,
    ordered_load,
    ordered_store,
    pointer,
    take_global,
    take_ordering,
    take_parts,
)
from interlace.runtime.interpreter.inline_ptx.syntax import Instruction
from interlace.runtime.interpreter.inline_ptx.types import TYPES, ScalarType
from interlace.runtime.interpreter.inline_ptx.values import (
    Action,
    Builder,
    Thread,
    adds_to,
    reader,
    writer,
)

MEMORY: dict[str, Builder] = {}
builds = adds_to(MEMORY)

_ACCESS_TYPES = [name for name in TYPES if name not in ("pred", "f16", "bf16")]
_CACHE_HINT = re.compile(r"ca|cg|cs|cv|lu|wb|wt|nc|L1::\w+|L2::(evict_\w+|\d+B)")


@builds("ld", "st")
def build_access(instruction: Instruction) -> Action:
    loads = instruction.mnemonic == "ld"
    strongest = "acquire" if loads else "release"
    sem, scope = take_ordering(instruction, "weak", "volatile", "relaxed", strongest)
    atomic = sem in ("relaxed", strongest)
    if atomic:
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
    places = [(index * kind.bits // 8, part) for index, part in enumerate(parts)]
    if loads:
        get = ordered_load(kind, str(sem), scope) if atomic else plain_load(kind, sem)
        writes = [(by, writer(instruction, part, kind, wider=True)) for by, part in places]

        def load(thread: Thread) -> None:
            address = at(thread)
            for by, write in writes:
                write(thread, get(thread, address + by))

        return load
    put = ordered_store(kind, str(sem), scope) if atomic else plain_store(kind)
    reads = [(by, reader(instruction, part, kind, wider=True)) for by, part in places]

    def store(thread: Thread) -> None:
        address = at(thread)
        for by, read in reads:
            put(thread, address + by, read(thread))

    return store


def plain_load(kind: ScalarType, sem: str | None) -> Callable[[Thread, int], int]:
    zero, volatile = handle(0, kind), sem == "volatile"

    def load(thread: Thread, address: int) -> int:
        thread.idle_steps, thread.polls_plainly = 0, not volatile
        pointers = pointer(address, kind)

        def perform() -> Any:
            found = interpreter.load(pointers.data, ALL.data, zero.data, zero.data.dtype)
            return TensorHandle(found, kind.memory)

        return bits_of(thread.session.hooks.load(pointers, ALL, perform, volatile=volatile))

    return load


def plain_store(kind: ScalarType) -> Callable[[Thread, int, int], None]:
    def store(thread: Thread, address: int, bits: int) -> None:
        thread.idle_steps = 0
        pointers, value = pointer(address, kind), handle(bits, kind)

        def perform() -> None:
            interpreter.store(pointers.data, value.data, ALL.data)

        thread.session.hooks.store(pointers, value, ALL, perform)

    return store
