"""Source lines of the instructions of a PTX text, with the calls that each was inlined through.

Line information is in ``.loc`` directives. The chain of inlined calls is a comment behind them, up to
Triton 3.7; later they name the call, which has a ``.loc`` of its own before, and count the lines of a text
of inline assembly as if they were the kernel's::

    .loc  2 73 29   // signal.py:73:29 @[ transfer.py:108:71 @[ kernels/matmul/all_gather_matmul.py:105:12 ]
    ]
    .loc  2 73 29, function_name $L__info_string0, inlined_at 3 108 71    // signal.py:73:29

The later form is ambiguous. Where A calls B at two lines, and B calls C, C's instructions say which line of
B they are from, and not which B; that line has a ``.loc`` once for each, not at each block of C. Blocks
are not in the order of the source, so the last ``.loc`` may be of the other B. What ran before tells them
apart: of the chains that are possible an instruction has that which shares most calls with the one before.
"""

import os
import re

from interlace.runtime.compiler.lint.control_flow import Flow
from interlace.runtime.compiler.lint.lines import Frame, FrameChain

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)[^/]*(?://(.*))?")
_CALL = re.compile(r"inlined_at\s+(\d+)\s+(\d+)\s+(\d+)")

_Chains = dict[FrameChain, None]
"""Chains that a line may have, the one that was named last at the end."""


class Places:
    """The chains of instructions, told of directives and instructions as they follow in the text."""

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
        """A ``.loc``."""
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
            self._now = {(frame, *self._commented(comment or "")): None}
        self._fresh[frame] = self._now
        known = self._known.setdefault(frame, {})
        for chain in self._now:
            known.pop(chain, None)
            known[chain] = None

    def add_instruction(self) -> None:
        self._of_instructions.append(tuple(self._now) or ((),))
        self._fresh = {}

    def along(self, flow: Flow) -> list[FrameChain]:
        """The chain of each instruction, given what may run after what."""
        chains: list[FrameChain] = [()] * len(self._of_instructions)
        before: list[set[FrameChain]] = [set() for _ in chains]
        for index in flow.order:  # so what comes by a jump back is not known yet
            others = before[index]
            chains[index] = chain = max(
                reversed(self._of_instructions[index]),  # of those that share as much the last
                key=lambda one: max((_shared(one, other) for other in others), default=0),
            )
            # The compiler gives some instructions no line; then what was before them counts.
            told = {chain} if chain and chain[0].line else others
            for after in flow.following(index):
                before[after] |= told
        return chains

    def _frame(self, number: str, line: str, column: str) -> Frame:
        return Frame(self._paths.get(int(number), ""), int(line), int(column))

    def _commented(self, comment: str) -> FrameChain:
        frames = []
        for called_at in comment.replace("]", "").split("@[")[1:]:
            name, _, rest = called_at.strip().partition(":")
            numbers = [int(word) for word in rest.split(":") if word.strip().isdigit()]
            frames.append(Frame(self._by_name.get(name, name), *numbers[:2]))
        return tuple(frames)


def _shared(one: FrameChain, other: FrameChain) -> int:
    """How many calls two chains have in common, from the kernel on."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
