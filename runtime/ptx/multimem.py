"""PTX that reaches all ranks at once: ``multimem.ld_reduce``, ``multimem.st`` and ``multimem.red``.

An address of theirs is one that ``multicast.py`` has given out; anything else is an error, as it is on a
GPU. What the switch does at once is done here rank by rank, in rank order, each with an access of its
own: of a vector or a packed pair, which carry data, plain ones; of a single number, which may be a signal,
atomic ones with the ordering that the instruction has. Sums of numbers below 32 bits are in fp32, and
are rounded once.
"""

import functools
import operator
from collections.abc import Callable

import numpy as np

from interlace.runtime.ptx import memory, multicast
from interlace.runtime.ptx.instruction import Action, Instruction, builders
from interlace.runtime.ptx.special import Threads
from interlace.runtime.ptx.types import TYPES, Array, ScalarType

MULTIMEM, builds = builders()

_ORDERINGS = {
    "ld_reduce": ("weak", "relaxed", "acquire"),
    "st": ("weak", "relaxed", "release"),
    "red": ("relaxed", "release"),
}
_SUMS = ("u32", "s32", "u64", "f32", "f64")
_PAIRS = {"f16x2": "f16", "bf16x2": "bf16"}
_WIDEST = 128


@builds("multimem")
def build_multimem(instruction: Instruction) -> Action:
    form = instruction.choose(*_ORDERINGS)
    if form is None:
        known = [f"multimem.{name}" for name in _ORDERINGS]
        raise instruction.unknown(f"instruction '{instruction.opcode}'", known)
    sem, scope = memory.take_ordering(instruction, *_ORDERINGS[form])
    memory.take_global(instruction)
    if form != "st" and not instruction.flag("add"):
        raise instruction.unknown(f"the operation of '{instruction.opcode}'", ["add"])
    instruction.flag("acc::f32")
    vector = instruction.choose("v2", "v4", "v8")
    pair = instruction.choose(*_PAIRS)
    kinds = _SUMS if form != "st" else (*_SUMS, "s64", "b32", "b64")
    kind = TYPES["b32"] if pair else instruction.take_type(kinds)
    instruction.finish(2)
    data, at = instruction.operands if form == "ld_reduce" else instruction.operands[::-1]
    parts = memory.take_parts(instruction, data, vector)
    nbytes = len(parts) * kind.bits // 8
    if 8 * nbytes > _WIDEST or (vector and kind.bits == 64):
        raise instruction.error(f"more than {_WIDEST} bits at once")
    where = memory.address_of(instruction, at, kind, len(parts))

    def on_ranks(address: int) -> list[int]:
        try:
            return multicast.addresses(address, nbytes)
        except LookupError:
            raise ValueError(
                f"PTX: {address:#x} is no multicast address of {nbytes} bytes; line "
                f"{instruction.line}: {instruction.text}"
            ) from None

    def addresses(threads: Threads) -> list[Array]:
        """The addresses of the access in every rank's memory, by rank."""
        return list(np.array([on_ranks(each) for each in where(threads).tolist()], np.uint64).T)

    ordering = None if pair or len(parts) > 1 else sem
    if form == "ld_reduce":
        total = _summed(TYPES[_PAIRS[pair]] if pair else kind, kind)
        get = memory.load_of(kind, ordering, scope)
        return memory.loading(instruction, parts, kind, addresses, get, total)
    if form == "st":
        return memory.storing(
            instruction, parts, kind, addresses, memory.store_of(kind, ordering, scope)
        )
    if pair or len(parts) > 1:
        raise instruction.unknown("'multimem.red' of more than one number", _SUMS)
    add = memory.read_modify_write("add", kind, sem or "relaxed", scope)
    return memory.storing(instruction, parts, kind, addresses, add)


def _summed(number: ScalarType, kind: ScalarType) -> Callable[[list[Array]], Array]:
    """The bits of the sum of registers of ``kind``, each of one or two of ``number``."""

    def lane(registers: list[Array], shift: int) -> Array:
        parts = [
            number.decode((bits >> kind.raw.type(shift)).astype(number.raw)) for bits in registers
        ]
        return number.encode(functools.reduce(operator.add, parts[1:], parts[0] + 0))

    def summed(registers: list[Array]) -> Array:
        lanes = [
            lane(registers, shift).astype(kind.raw) << kind.raw.type(shift)
            for shift in range(0, kind.bits, number.bits)
        ]
        return functools.reduce(operator.or_, lanes)

    return summed
