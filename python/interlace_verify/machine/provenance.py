"""The parameters of a kernel that the addresses in its registers come from.

All instructions that compute with a register are followed, in any order. An access by an address that comes
from one tensor belongs to that tensor, even if another tensor lies directly after it in memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from interlace_verify.ptx.instruction import Instruction

ELSEWHERE = ""  # a name for other sources: memory or a variable
WIDE = 8  # bytes of an address
INDEX = 1 << 31  # a smaller number moves an address within a tensor


def sources(
    steps: Sequence[Instruction], kinds: Sequence[Any], computing: frozenset[str]
) -> dict[int, frozenset[str]]:
    """Return, by slot, the 64-bit parameters that its values come from, if there are no other sources.

    ``kinds``: the dtypes of the slots; ``computing``: instructions that compute from registers alone.
    """
    sizes = [kind.itemsize for kind in kinds]  # 1 for a predicate
    found: list[set[str]] = [set() for _ in kinds]
    moves = []
    for step in steps:
        given = _given(step, sizes, computing)
        reads = [slot for slot in step.reads if sizes[slot] > 1] if given is None else []
        for target in step.writes:
            if given is not None and sizes[target] == WIDE:
                found[target].add(given)
            elif given is None and sizes[target] > 1:
                moves.append((found[target], [found[slot] for slot in reads]))
    changed = True
    while changed:
        changed = False
        for names, parts in moves:
            before = len(names)
            names.update(*parts)
            changed |= len(names) > before
    return {
        slot: frozenset(names)
        for slot, names in enumerate(found)
        if sizes[slot] == WIDE and names and ELSEWHERE not in names
    }


def _given(step: Instruction, sizes: Sequence[int], computing: frozenset[str]) -> str | None:
    """Return the source that ``step`` adds to a wide register; None to join its inputs' sources."""
    if step.mnemonic == "ld" and ".param" in step.opcode:
        name = step.operands[-1].strip("[] ")
        kind = (step.parameters or {}).get(name)
        return name if kind is not None and kind.bits == 8 * WIDE else ELSEWHERE
    halves = step.mnemonic == "mov" and any(sizes[slot] < WIDE for slot in step.reads)
    named = {operand.partition("+")[0].strip() for operand in step.operands}
    variable = named & {*(step.symbols or ()), *(step.parameters or ())}
    return ELSEWHERE if step.mnemonic not in computing or halves or variable else None


def origins(
    by_slot: Mapping[int, frozenset[str]], of: Mapping[str, object], numbers: Mapping[str, int]
) -> dict[int, object]:
    """Return the origin of each slot: the only tensor among its parameters, if indices move it."""
    found = {}
    for slot, names in by_slot.items():
        tensors = [name for name in names if name in of]
        if len(tensors) == 1 and all(
            numbers.get(name, INDEX) < INDEX for name in names if name not in of
        ):
            found[slot] = of[tensors[0]]
    return found
