"""PTX as a list of instructions with source lines and control flow.

Parses the output of Triton and inline assembly that people write: several statements in a line, scopes with
labels, predicates on any instruction.

``.loc`` directives have the source line of an instruction. Up to Triton 3.7, the chain of inlined calls is
in a comment after the directive. Later releases name the call, which has an earlier ``.loc``.
They also count the lines of an inline assembly text as if they were lines of the kernel::

    .loc  2 73 29   // signal.py:73:29 @[ transfer.py:108:71 @[ kernels/matmul/all_gather_matmul.py:105:12 ]
    ]
    .loc  2 73 29, function_name $L__info_string0, inlined_at 3 108 71    // signal.py:73:29

The later form is ambiguous. If A calls B at two lines and B calls C, C's instructions name their line of B,
but not the call of B. That line has one ``.loc`` per call, but not one at each block of C, and blocks are
not in source order, so the last ``.loc`` may belong to the other call. The preceding instructions decide:
of the possible chains, an instruction has the one that shares the most calls with the one before it.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from interlace.runtime.compiler.lint.control_flow import Flow
from interlace.runtime.compiler.lint.faults import Frame, FrameChain

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)[^/]*(?://(.*))?")
_CALL = re.compile(r"inlined_at\s+(\d+)\s+(\d+)\s+(\d+)")

_Chains = dict[FrameChain, None]
"""The possible chains of a line; the last one is the chain that was named last."""


class Places:
    """The chains of instructions, built from directives and instructions in the order of the text."""

    def __init__(self, ptx: str) -> None:
        self._paths = {int(number): path for number, path in _FILE.findall(ptx)}
        self._by_name: dict[str, str] = {}
        for path in self._paths.values():
            self._by_name.setdefault(os.path.basename(path), path)
        self._known: dict[Frame, _Chains] = {}
        self._fresh: dict[Frame, _Chains] = {}  # since the last instruction
        self._now: _Chains = {(): None}
        self._of_instructions: list[tuple[FrameChain, ...]] = []

    def read(self, directive: str) -> None:
        found = _LOC.match(directive)
        if not found:
            self._now = {(): None}
            return
        *place, comment = found.groups()
        frame = self._frame(*place)
        if call := _CALL.search(directive):
            caller = self._frame(*call.groups())
            callers = self._fresh.get(caller) or self._known.get(caller) or {(caller,): None}
            self._now = {(frame, *chain): None for chain in callers if frame not in chain}
        else:
            self._now = {(frame, *self._frames_of(comment or "")): None}
        self._fresh[frame] = self._now
        known = self._known.setdefault(frame, {})
        for chain in self._now:
            known.pop(chain, None)
            known[chain] = None

    def add_instruction(self) -> None:
        self._of_instructions.append(tuple(self._now) or ((),))
        self._fresh = {}

    def along(self, flow: Flow) -> list[FrameChain]:
        """Return the chain of each instruction, given the control flow."""
        chains: list[FrameChain] = [()] * len(self._of_instructions)
        before: list[set[FrameChain]] = [set() for _ in chains]
        for index in flow.order:  # the chain after a backward jump is not known yet
            earlier = before[index]
            chains[index] = chain = max(
                reversed(self._of_instructions[index]),  # the last of equally good ones
                key=lambda one: max((_calls_in_common(one, other) for other in earlier), default=0),
            )
            # The compiler gives some instructions no line. They get the chain of the ones before them.
            nearest = {chain} if chain and chain[0].line else earlier
            for after in flow.following(index):
                before[after] |= nearest
        return chains

    def _frame(self, number: str, line: str, column: str) -> Frame:
        return Frame(self._paths.get(int(number), ""), int(line), int(column))

    def _frames_of(self, comment: str) -> FrameChain:
        frames = []
        for called_at in comment.replace("]", "").split("@[")[1:]:
            name, _, rest = called_at.strip().partition(":")
            numbers = [int(word) for word in rest.split(":") if word.strip().isdigit()]
            frames.append(Frame(self._by_name.get(name, name), *numbers[:2]))
        return tuple(frames)


def _calls_in_common(one: FrameChain, other: FrameChain) -> int:
    """Return how many calls two chains have in common, counted from the kernel."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


_INLINE = "// begin inline asm", "// end inline asm"
_LABEL = re.compile(r"([$%\w]+):(?!:)\s*")
_PREDICATE = re.compile(r"@(!?[%$\w]+)\s+")
_TARGETS = re.compile(r"\.branchtargets\b(.*)")
_NAME = re.compile(r"[%$]?\w+")
_REGISTER = re.compile(r"%?[A-Za-z_$][\w$]*")  # inline assembly may omit the "%"


@dataclass(frozen=True)
class PtxInstruction:
    """One instruction. ``operation`` is "atom.global.sys.release.exch.b64", ``operands`` is the rest."""

    operation: str
    operands: str
    predicate: str
    chain: FrameChain
    line: int

    @functools.cached_property
    def parts(self) -> frozenset[str]:
        """Return the words of the operation: a scope, a state space, an ordering."""
        return frozenset(self.operation.split("."))

    @functools.cached_property
    def kind(self) -> str:
        return self.operation.partition(".")[0]

    @functools.cached_property
    def is_global(self) -> bool:
        """Return whether it accesses memory that other programs can see, not shared or local memory."""
        spaces = {part.split("::")[0] for part in self.parts}
        return spaces.isdisjoint(("shared", "local", "param", "const"))

    @functools.cached_property
    def registers(self) -> tuple[str, ...]:
        """Return all registers of the operands, first the result of a load or arithmetic operation."""
        return tuple(_REGISTER.findall(self.operands))

    @functools.cached_property
    def results(self) -> tuple[str, ...]:
        """Return the registers that it writes: the first operand of a load, atomic or arithmetic."""
        first = self.operands.lstrip()
        if first.startswith("["):
            return ()
        end = first.find("}") if first.startswith("{") else first.find(",")
        return tuple(_REGISTER.findall(first[:end] if end >= 0 else first))

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """Return the registers that it reads, as far as the results are known."""
        read = self.registers[len(self.results) :]
        return (*read, self.predicate.lstrip("!")) if self.predicate else read

    def __str__(self) -> str:
        return f"{self.operation} {self.operands}".strip()


class PtxModule:
    def __init__(self, ptx: str) -> None:
        places = Places(ptx)
        self.instructions: list[PtxInstruction] = []
        self._labels: dict[str, list[int]] = {}
        self._tables: dict[str, list[str]] = {}
        self._starts: set[int] = set()
        self._read(ptx, places)
        after = [self._successors(i) for i in range(len(self.instructions))]
        dispatches = list(self._dispatches())
        heads = {head for head, _ in dispatches}
        # A warp that returns to the dispatch has finished: it never runs the part of another warp.
        self.flow = Flow([[i for i in each if i not in heads] for each in after])
        for part in [first for _, jump in dispatches for first in after[jump]]:
            self._count_warps({part, *self.flow.reach([part], lambda i: False)})
        chains = places.along(self.flow)
        self.instructions = [
            replace(one, chain=chain) for one, chain in zip(self.instructions, chains, strict=True)
        ]

    def _dispatches(self) -> Iterator[tuple[int, int]]:
        """Yield where the warps that ``warp_specialize`` adds meet and where each jumps to its own part."""
        meetings = self.where(lambda one: one.operation == "barrier.sync")
        for jump in self.where(lambda one: one.kind == "brx"):
            yield from [(i, jump) for i in meetings if 0 < jump - i < 9][-1:]

    def _count_warps(self, part: set[int]) -> None:
        """Replace ``bar.warp.sync`` by ``bar.sync`` in a part without any: one warp is all its threads."""
        if not any(self.instructions[i].operation == "bar.sync" for i in part):
            for i in part:
                if self.instructions[i].operation == "bar.warp.sync":
                    self.instructions[i] = replace(self.instructions[i], operation="bar.sync")

    def where(self, condition: Callable[[PtxInstruction], bool]) -> list[int]:
        return [i for i, instruction in enumerate(self.instructions) if condition(instruction)]

    @functools.cached_property
    def read_registers(self) -> frozenset[str]:
        return frozenset(name for one in self.instructions for name in one.inputs)

    def _read(self, ptx: str, places: Places) -> None:
        label, pending, inline = "", "", False
        for number, raw in enumerate(ptx.splitlines(), 1):
            text = raw.strip()
            if text in _INLINE:
                inline = text == _INLINE[0]
            if text.startswith(".loc"):
                if not inline:
                    places.read(text)
                continue
            text = text.split("//")[0].strip()
            if re.match(r"(\.\w+\s+)*\.(entry|func)\b", text):
                self._starts.add(len(self.instructions))
            for statement in _statements(f"{pending} {text}" if pending else text):
                pending = ""
                while found := _LABEL.match(statement):
                    label = found.group(1)
                    self._labels.setdefault(label, []).append(len(self.instructions))
                    statement = statement[found.end() :]
                if not statement.endswith(";"):
                    # Triton writes one label per line.
                    pending = statement if re.match(r"[a-z@]|\.branch", statement) else ""
                elif targets := _TARGETS.match(statement):
                    self._tables[label] = _NAME.findall(targets.group(1))
                elif re.match(r"[a-z@]", statement):
                    self.instructions.append(_instruction(statement[:-1].strip(), number))
                    places.add_instruction()

    def _successors(self, index: int) -> list[int]:
        one = self.instructions[index]
        following = [index + 1] if index + 1 < len(self.instructions) else []
        if index + 1 in self._starts:
            following = []
        if one.kind in ("ret", "exit", "trap"):
            return following if one.predicate else []
        names = _NAME.findall(one.operands)[-1:] if one.kind in ("bra", "brx") else []
        if one.kind == "brx":
            names = [name for table in names for name in self._tables.get(table, [])]
        targets = {at for name in names for at in self._near(name, index)}
        if targets and not one.predicate:
            following = []
        return sorted({*targets, *following})

    def _near(self, label: str, index: int) -> Iterator[int]:
        """Yield the instruction at ``label``. If several scopes use the name, the nearest one."""
        places = [at for at in self._labels.get(label, []) if at < len(self.instructions)]
        if places:
            yield min(places, key=lambda at: abs(at - index))


def _statements(text: str) -> Iterator[str]:
    """Yield the statements of a line without the braces of scopes. An unfinished one comes last."""
    *whole, rest = text.split(";")
    for statement in whole:
        yield _open(statement) + ";"
    if rest := _open(rest):
        yield rest


def _open(statement: str) -> str:
    """Return the statement without leading braces that open or close scopes."""
    return statement.strip().lstrip("{} \t").strip()


def _instruction(statement: str, line: int) -> PtxInstruction:
    predicate = ""
    if found := _PREDICATE.match(statement):
        predicate, statement = found.group(1), statement[found.end() :]
    operation, *operands = statement.split(None, 1)
    return PtxInstruction(operation, "".join(operands), predicate, (), line)
