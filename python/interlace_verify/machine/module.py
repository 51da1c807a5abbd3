"""A kernel of a PTX module, ready to run: its parameters, its memory and its instructions.

Divergent threads run in the order of the blocks. A loop comes before the code that follows it, so threads
that leave the loop early wait there for the others.
"""

import functools
import math
import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from interlace.runtime.compiler.lint.control_flow import Flow
from interlace.runtime.core.errors import InlineAssemblyError
from interlace_verify.machine.bulk_copies import BULK
from interlace_verify.machine.matrices import MATRICES, build_move, build_sum
from interlace_verify.machine.mbarriers import MBARRIERS
from interlace_verify.machine.shared import SHARED
from interlace_verify.machine.warps import WARPS
from interlace_verify.ptx.arithmetic import ARITHMETIC
from interlace_verify.ptx.inline_assembly import BUILDERS as INLINE
from interlace_verify.ptx.instruction import Instruction, Symbol
from interlace_verify.ptx.memory import SCOPES
from interlace_verify.ptx.parser import Parser, PtxFunction, Variable, declare, read_text
from interlace_verify.ptx.special import WARP
from interlace_verify.ptx.targets import first_target, has, target_of
from interlace_verify.ptx.types import Array

TOGETHER = WARPS | MATRICES
# these accept forms that the builders of inline PTX refuse
BUILDERS = INLINE | TOGETHER | SHARED | MBARRIERS | BULK | {"mov": build_move}
BUILDERS |= dict.fromkeys(("add", "sub", "mul", "fma"), build_sum)
_ORDERED = ("relaxed", "acquire", "volatile")
_WITHIN_REGISTERS = {*ARITHMETIC, "mov", "cvt", "cvta"}
_COMPUTING = frozenset(_WITHIN_REGISTERS | {"shfl"})
_CLOCK = re.compile(r"%(clock|globaltimer)")
_SHARED = re.compile(r"\.shared\b(?=\s+\.)[^;]*")
_BLOCK = re.compile(r"\.(req|max)ntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
MOST_THREADS = 1024  # the limit of a program on every GPU
Block = tuple[int, int, int]


SourcePlace = tuple[str, int]
"""(file, line)"""


@dataclass(frozen=True)
class PtxKernel:
    """A kernel. ``order``: the position of each instruction's block; ``joins``: the starts of blocks.

    ``places``: the known source lines of every line of the text, each with the lines that called it.
    ``runs``: by their first one, instructions that only change registers; a group runs them in a row.
    ``spinning``: branches back that end a loop which polls memory that others write. ``polling``: the
    branches of loops whose rounds depend only on their polls, with the number of polls in a round.
    ``static_bytes``: the shared memory that the text declares with a size; a launch may add more after it.
    ``local_bytes``: the memory of each thread. ``target``: the GPU of the text, such as "sm_90a".
    ``threads``: the number of threads in whole warps, of which only the threads of ``block`` exist.
    ``variables``: global and constant variables. ``pointers``: numbers that stand for the addresses of
    functions. ``warp_wide``: instructions that all threads of a warp run at once. ``sources``: the sources
    of addresses in registers.
    """

    name: str
    text: str
    target: str
    block: Block
    threads: int
    parameters: tuple[Variable, ...]
    variables: Mapping[str, Variable]
    pointers: Mapping[str, int]
    static_bytes: int
    local_bytes: int
    steps: tuple[Instruction, ...]
    kinds: tuple[object, ...]
    order: tuple[int, ...]
    joins: frozenset[int]
    runs: Mapping[int, tuple[Instruction, ...]]
    spinning: frozenset[int]
    polling: Mapping[int, int]
    warp_wide: frozenset[int]
    sources: Mapping[int, frozenset[str]]
    places: Mapping[int, tuple[SourcePlace, ...]]

    @functools.cached_property
    def registers(self) -> list[Array]:
        """The initial registers of every program. They are not written: a change makes a new array."""
        zeros = {kind: np.zeros(self.threads, kind) for kind in self.kinds}
        for zero in zeros.values():
            zero.flags.writeable = False
        return [zeros[kind] for kind in self.kinds]


def read(ptx: str, name: str | None = None, block: Block | None = None) -> PtxKernel:
    """Read a kernel of a module; ``name`` None: the only one. ``block``: the launch's threads."""
    module, target = read_text(ptx), target_of(ptx)
    if not target:
        raise InlineAssemblyError("PTX: the text has no .target, such as '.target sm_80'")
    kernel = module.kernel(name)
    block = _block(kernel, block)
    reached = module.reached(kernel)
    variables = module.named_by(reached)
    symbols, static_bytes = _shared_symbols([*variables.values(), *_shared_in(reached)])
    variables = {n: each for n, each in variables.items() if each.space != "shared"}
    symbols |= {n: Symbol(each.space, 0, each.nbytes or 0) for n, each in variables.items()}
    kinds = {parameter.name: parameter.kind for parameter in kernel.parameters}
    pointed_to = sorted(module.pointed_to(reached))
    pointers = {name: 16 * number for number, name in enumerate(pointed_to, 1)}
    parser = Parser([], symbols, kinds, module.functions, pointers)
    places = _places(ptx)
    steps = list(parser.instructions(f"{kernel.body}\nret;", kernel.line))
    _take_guesses(steps)

    def where() -> tuple[str, tuple[SourcePlace, ...]]:
        """Return the instruction that is being built, for error messages."""
        return instruction.text, places.get(instruction.line, ())

    for instruction in steps:
        builder = instruction.builder(BUILDERS)
        wanted = first_target(f"{instruction.opcode} {', '.join(instruction.operands)}")
        if wanted and not has(target, wanted):
            raise instruction.error(
                f"'{instruction.opcode}' does not exist on {target}, but on {wanted}"
            )
        instruction.action = builder(instruction)
    after = [_following(steps, index) for index in range(len(steps))]
    order = _in_order(after)
    joins = {
        target for index, targets in enumerate(after) for target in targets if target != index + 1
    }
    joins |= {index + 1 for index, targets in enumerate(after) if targets != [index + 1]}
    return PtxKernel(
        kernel.name,
        ptx,
        target,
        block,
        -(-math.prod(block) // WARP) * WARP,
        kernel.parameters,
        variables,
        pointers,
        static_bytes,
        parser.frame,
        tuple(steps),
        tuple(parser.kinds),
        tuple(order),
        frozenset(joins),
        _runs(steps, joins),
        frozenset(i for i, step in enumerate(steps) if _spins(steps, i, step.target)),
        {i: polls for i, step in enumerate(steps) if (polls := _polls(steps, i, step.target))},
        frozenset(i for i, step in enumerate(steps) if _is_of_warps(step)),
        sources(steps, parser.kinds, _COMPUTING),
        places,
    )


def _block(kernel: PtxFunction, block: Block | None) -> Block:
    declared = {match[1]: match.groups("1")[1:] for match in _BLOCK.finditer(kernel.directives)}
    exact, most = (
        tuple(map(int, declared[directive])) if directive in declared else None
        for directive in ("req", "max")
    )
    wanted = block or exact or most
    if wanted is None:
        raise ValueError(f"{kernel.name} does not say how many threads it has: pass threads")
    if not 1 <= math.prod(wanted) <= MOST_THREADS:
        raise ValueError(f"{kernel.name} has {wanted} threads; a program has 1 to {MOST_THREADS}")
    if (exact and wanted != exact) or (most and math.prod(wanted) > math.prod(most)):
        raise ValueError(
            f"{kernel.name} is for {'exactly' if exact else 'at most'} {exact or most} threads, but is "
            f"launched with {wanted}"
        )
    x, y, z = wanted
    return x, y, z


def _take_guesses(steps: Sequence[Instruction]) -> None:
    """Make the first loads of compare-and-swap loops relaxed, as compilers mean them.

    Compilers write such loops for atomics that a GPU does not have. Another thread may change the loaded
    value, so it is a guess. Only the loop uses it, and only a successful swap confirms it.
    """
    for at, swap in enumerate(steps):
        if swap.mnemonic != "atom" or "cas" not in swap.qualifiers:
            continue
        address, guess = swap.operands[1:3]
        end = next((i for i in range(at, len(steps)) if 0 <= steps[i].target <= at), at)
        named = re.compile(re.escape(guess) + r"(?!\w)")
        guessed_register = swap.registers.get(guess)
        users = [
            i
            for i, step in enumerate(steps)
            if named.search(" ".join(step.operands))
            and step.registers.get(guess) is guessed_register
        ]
        load = steps[users[0]]
        plain = load.mnemonic == "ld" and not {*_ORDERED} & {*load.qualifiers}
        if (
            plain
            and users[0] < steps[end].target
            and users[-1] <= end
            and load.operands[1] == address
        ):
            scope = next((qualifier for qualifier in swap.qualifiers if qualifier in SCOPES), "gpu")
            load.qualifiers[:0] = ["relaxed", scope]


def _runs(
    steps: Sequence[Instruction], joins: Container[int]
) -> dict[int, tuple[Instruction, ...]]:
    found: dict[int, list[Instruction]] = {}
    first = -1
    for at, step in enumerate(steps):
        if at in joins:
            first = -1
        if step.mnemonic not in _WITHIN_REGISTERS or step.guard >= 0:
            first = -1
            continue
        first = at if first < 0 else first
        found.setdefault(first, []).append(step)
    return {at: tuple(run) for at, run in found.items()}


def _is_of_warps(step: Instruction) -> bool:
    barrier = step.mnemonic in ("bar", "barrier") and ".warp" in step.opcode
    if barrier or "cp_fenceproxy" in step.opcode:
        return True
    return step.mnemonic in TOGETHER and step.mnemonic != "activemask"


def _places(ptx: str) -> dict[int, tuple[SourcePlace, ...]]:
    """Return source lines by line, from ``.file`` and ``.loc``, with the callers of inlined functions."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', ptx, re.MULTILINE))
    by_name = {os.path.basename(path): path for path in files.values()}
    found: dict[int, tuple[SourcePlace, ...]] = {}
    places: tuple[SourcePlace, ...] = ()
    for at_line, line in enumerate(ptx.splitlines(), 1):
        if match := re.search(r"(?<![\w.])\.loc\s+(\d+)\s+([1-9]\d*)", line):
            calls = re.findall(r"@\[ ([^:\]]+):([1-9]\d*)", line)
            callers = [(by_name.get(name, name), int(at)) for name, at in calls]
            of_nvcc = re.findall(r"inlined_at (\d+) ([1-9]\d*)", line)
            callers += [(files.get(number, ""), int(at)) for number, at in of_nvcc]
            places = ((files.get(match[1], ""), int(match[2])), *callers)
        if places:
            found[at_line] = places
    return found


def _shared_in(functions: Iterable[PtxFunction]) -> list[Variable]:
    try:
        return [
            each
            for f in functions
            for text in _SHARED.findall(f.body or "")
            for each in declare(text)
        ]
    except ValueError as error:
        raise InlineAssemblyError(f"PTX: {error}") from None


def _shared_symbols(variables: Iterable[Variable]) -> tuple[dict[str, Symbol], int]:
    """Return symbols of shared memory by name, those without a size last, and the bytes of the others."""
    symbols: dict[str, Symbol] = {}
    end = 0
    of_shared = [variable for variable in variables if variable.space == "shared"]
    for each in sorted(of_shared, key=lambda each: each.nbytes is None):
        if each.name in symbols:
            raise InlineAssemblyError(f"PTX: '{each.name}' is in shared memory twice")
        end = -(-end // each.align) * each.align
        symbols[each.name] = Symbol("shared", end, each.nbytes or 0)
        end += each.nbytes or 0
    return symbols, end


def _following(steps: Sequence[Instruction], index: int) -> list[int]:
    step = steps[index]
    following = [index + 1] if index + 1 < len(steps) else []
    if step.targets:
        return [*dict.fromkeys((*step.targets, *(following if step.guard >= 0 else [])))]
    return [] if step.mnemonic in ("ret", "exit", "trap") and step.guard < 0 else following


def _spins(steps: Sequence[Instruction], index: int, target: int) -> bool:
    if not 0 <= target <= index:
        return False
    return any(map(looks, steps[target:index]))


def _polls(steps: Sequence[Instruction], index: int, target: int) -> int:
    """Return the number of polls in a loop that ends here, if its rounds depend only on them."""
    if not 0 <= target <= index:
        return 0
    polls, written, carried = 0, set[int](), set[int]()
    for step in steps[target : index + 1]:
        if looks(step) and ".shared" not in step.opcode and not step.generic:
            polls += 1
        elif step.mnemonic not in (*_WITHIN_REGISTERS, "nanosleep") and step is not steps[index]:
            return 0
        if (step.guard >= 0 and step is not steps[index]) or _CLOCK.search(step.text):
            return 0
        carried |= ({step.guard} | step.reads) - written
        written |= step.writes
    return 0 if carried & written else polls


def looks(step: Instruction) -> bool:
    """Return whether the instruction polls memory that others write."""
    words = ("acquire", "relaxed", "volatile", "try_wait", "test_wait")
    return step.mnemonic == "atom" or any(f".{word}" in step.opcode for word in words)


def _in_order(after: Sequence[Sequence[int]]) -> list[int]:
    """Number the instructions, so that a loop is contiguous and comes before its successors."""
    flow = Flow(after)
    places = {index: place for place, index in enumerate(flow.order)}
    around: list[list[int]] = [[] for _ in after]  # the loops around each, the outermost first
    for head, body in sorted(flow.loops.items(), key=lambda loop: -len(loop[1])):
        for index in body:
            around[index].append(places[head])
    ranked = sorted(places, key=lambda index: (*around[index], places[index]))
    numbers = {index: number for number, index in enumerate(ranked)}
    return [numbers[index] for index in range(len(after))]


# -- the parameters that addresses in registers come from -------------------------------------------
#
# All instructions that compute with a register are followed, in any order. An access by an address that
# comes from one tensor belongs to that tensor, even if another tensor lies directly after it in memory.

ELSEWHERE = ""  # a name for other sources: memory or a variable
WIDE = 8  # bytes of an address
INDEX = 1 << 31  # a smaller number moves an address within a tensor


def sources(
    steps: Sequence[Instruction], kinds: Sequence[Any], computing: frozenset[str]
) -> dict[int, frozenset[str]]:
    """Return, by slot, the 64-bit parameters that its values come from, if there are no other sources."""
    sizes = [kind.itemsize for kind in kinds]  # 1 for a predicate
    found: list[set[str]] = [set() for _ in kinds]
    moves = []
    for step in steps:
        known_source = _given(step, sizes, computing)
        reads = [slot for slot in step.reads if sizes[slot] > 1] if known_source is None else []
        for target in step.writes:
            if known_source is not None and sizes[target] == WIDE:
                found[target].add(known_source)
            elif known_source is None and sizes[target] > 1:
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
