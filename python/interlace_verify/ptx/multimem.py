"""PTX that reaches all ranks at once: ``multimem.ld_reduce``, ``multimem.st`` and ``multimem.red``.

Their addresses must be multicast addresses from ``place.py``; others are an error, as on a GPU. The switch
works on all ranks at once. Here the ranks follow one another, in rank order, each with its own access. An
access of a vector or a packed pair, which carries data, is plain. An access of a single number, which may
be a signal, is atomic with the ordering of the instruction. Sums of numbers below 32 bits are in fp32, and
are rounded once.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from interlace.runtime.numerics.exact import larger, smaller
from interlace.runtime.places.sim import place
from interlace_verify.ptx import memory
from interlace_verify.ptx.arithmetic import COMBINED, PAIRS
from interlace_verify.ptx.instruction import Action, Instruction, builders
from interlace_verify.ptx.memory import address_of
from interlace_verify.ptx.special import Threads
from interlace_verify.ptx.types import FORMATS, TYPES, Array, NarrowFloat, ScalarType

MULTIMEM, builds = builders()

_ORDERINGS = {
    "ld_reduce": ("weak", "relaxed", "acquire"),
    "st": ("weak", "relaxed", "release"),
    "red": ("relaxed", "release"),
}
_SUMS = ("u32", "s32", "u64", "f32", "f64")
_FOURS = {"e4m3x4": FORMATS["e4m3"], "e5m2x4": FORMATS["e5m2"]}
_OPERATIONS: dict[str, tuple[Callable[..., Array], tuple[str, ...]]] = {
    "add": (operator.add, _SUMS),
    **{name: (each, memory.WHOLE) for name, each in (("min", smaller), ("max", larger))},
    **{name: (COMBINED[name], ("b32", "b64")) for name in COMBINED},
}
_WIDEST = 128


@builds("multimem")
def build_multimem(instruction: Instruction) -> Action:
    form = instruction.choose(*_ORDERINGS)
    if form is None:
        known = [f"multimem.{name}" for name in _ORDERINGS]
        raise instruction.unknown(f"instruction '{instruction.opcode}'", known)
    sem, scope = memory.take_ordering(instruction, *_ORDERINGS[form])
    memory.take_global(instruction)
    name = instruction.choose(*_OPERATIONS) if form != "st" else "add"
    if name is None:
        raise instruction.unknown(f"the operation of '{instruction.opcode}'", _OPERATIONS)
    reduce, kinds = _OPERATIONS[name]
    instruction.choose("acc::f32", "acc::f16")
    vector = instruction.choose("v2", "v4", "v8")
    packed = instruction.choose(*PAIRS, *(_FOURS if form != "red" else ()))
    kinds = kinds if form != "st" else (*_SUMS, "s64", "b32", "b64")
    kind = TYPES["b32"] if packed else instruction.take_type(kinds)
    instruction.finish(2)
    data, at = instruction.operands if form == "ld_reduce" else instruction.operands[::-1]
    parts = memory.take_parts(instruction, data, vector)
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

    number = TYPES[PAIRS[packed]] if packed in PAIRS else None
    ordering = None if packed or len(parts) > 1 else sem
    way = memory.AccessWay(ordering, scope, multicast=True)
    if form == "ld_reduce":
        total = _reduced(reduce, _FOURS.get(str(packed), number or kind), kind)
        return memory.loading(instruction, parts, kind, addresses, memory.load_of(kind, way), total)
    if form == "st":
        return memory.storing(instruction, parts, kind, addresses, memory.store_of(kind, way))
    way = way._replace(sem=sem or "relaxed")
    change = memory.read_modify_write(name, kind, way, number=number)
    return memory.storing(instruction, parts, kind, addresses, change)


def _reduced(reduce: Any, number: Any, kind: ScalarType) -> Callable[[list[Array]], Array]:
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
