"""Inline PTX that reaches all ranks at once: ``multimem.ld_reduce``, ``multimem.st`` and ``multimem.red``.

An address of theirs is one that ``multicast.py`` has given out; anything else is an error, as it is on a
GPU. What the switch does at once is done here rank by rank, in rank order, each with an access of its
own: of a vector or a packed pair, which carry data, plain ones; of a single number, which may be a signal,
atomic ones with the ordering that the instruction has. Sums of numbers below 32 bits are in fp32, and
are rounded once.
"""

from collections.abc import Callable

from interlace.runtime.ptx import memory, multicast
from interlace.runtime.ptx.instruction import Action, Instruction, builders
from interlace.runtime.ptx.special import Thread
from interlace.runtime.ptx.types import TYPES, ScalarType

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

    def addresses(thread: Thread) -> list[int]:
        """The address of the access in every rank's memory, by rank."""
        address = where(thread)
        try:
            return multicast.addresses(address, nbytes)
        except LookupError:
            raise ValueError(
                f"inline PTX: {address:#x} is no multicast address of {nbytes} bytes; line "
                f"{instruction.line}: {instruction.text}"
            ) from None

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
