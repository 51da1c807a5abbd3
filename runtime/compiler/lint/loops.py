"""Loops of a compiled kernel: the instructions of one round of each, counted in its SASS.

They tell what limits a loop before any GPU has run it: one that waits for each load as soon as it is issued
is bound by latency, one that makes tensor maps in every round pays for them every time.
"""

import re
from dataclasses import dataclass

from interlace.runtime.compiler.lint.lines import place
from interlace.runtime.compiler.lint.sass_program import Operation, control_flow, operations

_REGISTER = re.compile(r"\bR(\d+)")
_SIZES = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}  # bytes; else 4
_KEPT = re.compile(r"SB0, (0x[0-9a-f]+)")  # how many groups of copies may stay behind a wait
_ROUNDS = 16  # more than stay behind


@dataclass(frozen=True)
class Loop:
    """One loop of the SASS, or what stands outside of all, which has no name and depth 0.

    ``where`` is the line of the branch back. What follows counts what is in this loop and in none inside
    it: ``tensor_maps`` made; ``barriers`` of a program's threads; ``fences`` of system scope, each a wait
    until all stores so far have arrived; ``loads_in_flight``, the most loads of global memory, by thread or
    by descriptor, that nothing has waited for, in the order in which they stand; ``bytes_in_flight`` and
    ``loaded_bytes``, of one thread without a descriptor, on their way at once and in the whole round. Of
    loads by descriptor those between two waits count, which is one stage of a pipeline. Polls of signals
    are no loads.
    """

    where: str
    depth: int
    instructions: int
    tensor_maps: int = 0
    barriers: int = 0
    fences: int = 0
    wgmma_waits: int = 0
    loads_in_flight: int = 0
    loaded_bytes: int = 0
    bytes_in_flight: int = 0


def loops(sass: str) -> tuple[Loop, ...]:
    """The loops of ``nvdisasm -g``'s text in the order of the code; first, what is outside of all."""
    code, labels = operations(sass)
    flow = control_flow(code, labels)
    found = [_counted("", 0, [one for i, one in enumerate(code) if not flow.loop(i)], 1)]
    for first, body in sorted(flow.loops.items()):
        own = [code[i] for i in sorted(body) if flow.loop(i) is body]
        depth = sum(first in other for other in flow.loops.values())
        if len(body) > 1:  # else a jump to itself behind the end, which nothing reaches
            found.append(_counted(place(code[flow.last(first)].frame), depth, own, _ROUNDS))
    return tuple(found)


def _counted(where: str, depth: int, code: list[Operation], rounds: int) -> Loop:
    def count(name: str, modifier: str = "") -> int:
        return sum(one.name == name and modifier in one.modifiers for one in code)

    # A tensor map is written as any memory is, and then made visible to what reads maps.
    counts = (
        count("UTMACCTL", "IV"),
        count("BAR"),
        count("MEMBAR", "SYS"),
        count("WARPGROUP", "DEPBAR"),
    )
    loaded = sum(_bytes(one) for one in code)
    loads, size = _in_flight(code, rounds)
    return Loop(where, depth, len(code), *counts, loads, loaded, size)


def _bytes(one: Operation) -> int:
    if one.name not in ("LDG", "LDGSTS") or "STRONG" in one.modifiers:
        return 0
    return next((size for word, size in _SIZES.items() if word in one.modifiers), 4)


def _in_flight(code: list[Operation], rounds: int) -> tuple[int, int]:
    """The most loads that are on their way at once, and the most bytes of one thread."""
    registers: list[tuple[set[int], int]] = []  # of loads that nothing has used yet; their bytes
    groups: list[list[int]] = [[]]  # bytes of copies into shared memory by group, the last one open
    most = most_bytes = 0
    waits = any(one.name == "DEPBAR" and _KEPT.match(one.operands) for one in code)
    for _ in range(rounds):
        stage = 0
        groups = groups if waits else [[]]
        for one in code:
            named = [int(number) for number in _REGISTER.findall(one.operands)]
            registers = [load for load in registers if load[0].isdisjoint(named)]
            if one.name == "LDG" and (size := _bytes(one)):
                registers.append((set(range(named[0], named[0] + max(1, size // 4))), size))
            if one.name == "LDGSTS":
                groups[-1].append(_bytes(one))
            stage += one.name == "UTMALDG"
            if one.name == "LDGDEPBAR":
                groups.append([])
            elif one.name == "SYNCS" and "PHASECHK" in one.modifiers:
                stage = 0
            elif one.name == "DEPBAR" and (kept := _KEPT.match(one.operands)):
                groups = groups[-1 - int(kept.group(1), 16) :]
            sizes = [size for _, size in registers] + [size for group in groups for size in group]
            most, most_bytes = max(most, len(sizes) + stage), max(most_bytes, sum(sizes))
    return most, most_bytes
