"""Inline PTX that reaches all ranks at once: ``multimem.ld_reduce``, ``multimem.st`` and ``multimem.red``.

An address of theirs is one that ``multicast.py`` has given out; anything else is an error, as it is on a
GPU. What the switch does at once is done here rank by rank, in rank order, each with an access of its
own: of a vector or a packed pair, which carry data, plain ones; of a single number, which may be a signal,
atomic ones with the ordering that the instruction has. Sums of numbers below 32 bits are in fp32, and
are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

from interlace.runtime.interpreter.inline_ptx import multicast
from interlace.runtime.interpreter.inline_ptx.atomics import (
    address_of,
    ordered_load,
    ordered_store,
    read_modify_write,
    take_global,
    take_ordering,
    take_parts,
)
from interlace.runtime.interpreter.inline_ptx.memory import plain_load, plain_store
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

MULTIMEM: dict[str, Builder] = {}
builds = adds_to(MULTIMEM)

_FORMS = ("ld_reduce", "st", "red")
_SUMS = ("u32", "s32", "u64", "f32", "f64")
_PAIRS = {"f16x2": "f16", "bf16x2": "bf16"}
_WIDEST = 128


class _Access:
    """What the three instructions share: ordering, types, operands and where they point."""

    def __init__(self, instruction: Instruction, form: str, orderings: tuple[str, ...]) -> None:
        sem, self.scope = take_ordering(instruction, *orderings)
        self.sem = sem or "weak"
        take_global(instruction)
        if form != "st" and not instruction.flag("add"):
            raise instruction.unknown(f"the operation of '{instruction.opcode}'", ["add"])
        instruction.flag("acc::f32")
        vector = instruction.choose("v2", "v4", "v8")
        pair = instruction.choose(*_PAIRS)
        known = _SUMS if form != "st" else (*_SUMS, "s64", "b32", "b64")
        self.register = TYPES["b32"] if pair else instruction.take_type(known)
        self.number = TYPES[_PAIRS[pair]] if pair else self.register
        instruction.finish(2)
        data, at = instruction.operands if form == "ld_reduce" else instruction.operands[::-1]
        self.parts = take_parts(instruction, data, vector)
        count = len(self.parts)
        if count * self.register.bits > _WIDEST or (vector and self.register.bits == 64):
            raise instruction.error(f"more than {_WIDEST} bits at once")
        self.is_data = pair is not None or count > 1 or self.sem == "weak"
        self._instruction = instruction
        self._at = address_of(instruction, at, self.register, count)
        self._nbytes = count * self.register.bits // 8

    def addresses(self, thread: Thread) -> list[int]:
        """The address of the access in every rank's memory, by rank."""
        address = self._at(thread)
        try:
            return multicast.addresses(address, self._nbytes)
        except LookupError:
            raise ValueError(
                f"inline PTX: {address:#x} is no multicast address of {self._nbytes} bytes; line "
                f"{self._instruction.line}: {self._instruction.text}"
            ) from None

    def offsets(self) -> list[int]:
        return [index * self.register.bits // 8 for index in range(len(self.parts))]


@builds("multimem")
def build_multimem(instruction: Instruction) -> Action:
    form = instruction.choose(*_FORMS)
    if form is None:
        known = [f"multimem.{name}" for name in _FORMS]
        raise instruction.unknown(f"instruction '{instruction.opcode}'", known)
    return {"ld_reduce": _load, "st": _store, "red": _reduction}[form](instruction)


def _load(instruction: Instruction) -> Action:
    access = _Access(instruction, "ld_reduce", ("weak", "relaxed", "acquire"))
    kind = access.register
    get = plain_load(kind, None)
    if not access.is_data:
        get = ordered_load(kind, access.sem, access.scope)
    writes = [writer(instruction, part, kind, wider=True) for part in access.parts]
    total = _summed(access.number, kind)

    def load(thread: Thread) -> None:
        addresses = access.addresses(thread)
        for offset, write in zip(access.offsets(), writes, strict=True):
            write(thread, total([get(thread, address + offset) for address in addresses]))

    return load


def _summed(number: ScalarType, kind: ScalarType) -> Callable[[list[int]], int]:
    """The bits of the sum of registers of ``kind``, each of one or two of ``number``."""
    wide = TYPES["f32"] if number.is_float and number.bits < 32 else number

    def lane(registers: list[int], shift: int) -> int:
        total = wide.decode(0)
        for bits in registers:
            total = wide.decode(wide.encode(total + number.decode(bits >> shift)))
        return number.encode(total)

    def summed(registers: list[int]) -> int:
        lanes = range(0, kind.bits, number.bits)
        return sum(lane(registers, shift) << shift for shift in lanes)

    return summed


def _store(instruction: Instruction) -> Action:
    access = _Access(instruction, "st", ("weak", "relaxed", "release"))
    kind = access.register
    put: Callable[[Thread, int, int], object] = plain_store(kind)
    if not access.is_data:
        put = ordered_store(kind, access.sem, access.scope)
    reads = [reader(instruction, part, kind, wider=True) for part in access.parts]

    def store(thread: Thread) -> None:
        for address in access.addresses(thread):
            for offset, read in zip(access.offsets(), reads, strict=True):
                put(thread, address + offset, read(thread))

    return store


def _reduction(instruction: Instruction) -> Action:
    access = _Access(instruction, "red", ("relaxed", "release"))
    kind = access.register
    if len(access.parts) > 1 or access.number is not kind:
        raise instruction.unknown("'multimem.red' of more than one number", _SUMS)
    add = read_modify_write("add", kind)
    read = reader(instruction, access.parts[0], kind, wider=True)

    def reduction(thread: Thread) -> None:
        for address in access.addresses(thread):
            add(thread, access.sem, access.scope, address, read(thread))

    return reduction
