"""Inline PTX in the interpreter, as far as a program's threads do not differ by it.

``tl.inline_asm_elementwise`` is one text for every thread of a program. Here it is run

=========================  =======================================================================
on a tensor of n elements  n times, one after the other
on scalars                 once, by one thread that stands for all; what it acquires is known to all
=========================  =======================================================================

What threads do differently, together or as many as they are is not for the interpreter: such a kernel is
compiled (``programs/choice.py``), and a text that comes here all the same is refused.

A text is built once: ``parser.py`` makes instructions of it, the files by kind of instruction make
actions of those. An instruction, qualifier or type that is not known is an
:class:`InlineAssemblyError` that names it, before anything of the text has run.
"""

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from interlace.runtime.places.sim.interpreter.inline_ptx.operands import AsmOperands
from interlace.runtime.ptx.arithmetic import ARITHMETIC
from interlace.runtime.ptx.bits import BIT_OPERATIONS
from interlace.runtime.ptx.calls import CALLS
from interlace.runtime.ptx.instruction import InlineAssemblyError, Instruction
from interlace.runtime.ptx.memory import MEMORY
from interlace.runtime.ptx.moves import MOVES
from interlace.runtime.ptx.multimem import MULTIMEM
from interlace.runtime.ptx.special import PtxSession, Threads, by_threads
from interlace.runtime.ptx.text.parser import Parser
from interlace.runtime.ptx.waits import BLOCK_BARRIER, WAITS

BUILDERS = {
    **ARITHMETIC,
    **BIT_OPERATIONS,
    **CALLS,
    **MEMORY,
    **MOVES,
    **MULTIMEM,
    **WAITS,
}
IDLE_STEPS = 1_000_000
"""So many instructions in loops that touch no memory are taken for an endless loop."""


@dataclass(frozen=True)
class _Statement:
    """A built asm text."""

    steps: tuple[Instruction, ...]
    operands: AsmOperands
    kinds: list[Any]


@functools.lru_cache(maxsize=1024)
def _build(asm: str, constraints: str) -> _Statement:
    operands = AsmOperands(constraints)
    parser, steps = Parser([*operands.outputs, *operands.inputs]), []
    for instruction in parser.instructions(asm):
        builder = BUILDERS.get(instruction.mnemonic)
        if builder is None:
            raise instruction.unknown(f"instruction '{instruction.opcode}'", BUILDERS)
        instruction.action = builder(instruction)
        steps.append(instruction)
    if reason := by_threads(asm):
        raise InlineAssemblyError(
            f"inline PTX: threads differ by '{reason}', which is run where a kernel is compiled; where "
            "it is interpreted, this text was not in its code before the launch"
        )
    return _Statement(tuple(steps), operands, parser.kinds)


class InlineAssembly(PtxSession):
    """``tl.inline_asm_elementwise`` of one session."""

    def create(
        self, asm: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int
    ) -> Any:
        """Runs the text; the results as Triton asks for them."""
        statement = _build(asm, constraints)
        shape = values[0].data.shape if values else (1,)
        groups = statement.operands.arguments(values, shape, pack, statement.kinds)
        with np.errstate(all="ignore"):
            for number, registers in enumerate(groups):
                numbers = np.array([number], np.uint32)
                _run(statement, Threads(self, registers, numbers, alone=len(groups) == 1))
        found = statement.operands.results(types, shape, pack, groups)
        return SimpleNamespace(get_result=found.__getitem__)


def _run(statement: _Statement, thread: Threads) -> None:
    """Run a text for one element, or for all threads."""
    steps, registers, hooks = statement.steps, thread.registers, thread.session.hooks
    index, count = 0, len(steps)
    while index < count:
        step, target = steps[index], None
        if step.guard < 0 or registers[step.guard][0] == step.wanted:
            target = step.action(thread)
        if target == BLOCK_BARRIER:
            if not thread.alone:
                raise step.error(
                    "a barrier in a text on a tensor is run where a kernel is compiled"
                )
            hooks.barrier()
            target = None
        if target is None:
            index += 1
            continue
        if target <= index:
            thread.idle_steps += index - target + 1
            if thread.idle_steps > IDLE_STEPS:
                raise InlineAssemblyError(
                    f"inline PTX: a loop without memory accesses has run {IDLE_STEPS} "
                    f"instructions; it goes back at: {step.text}"
                )
            if thread.polls_plainly:  # an atomic has given way itself
                thread.polls_plainly = False
                hooks.pause()
        index = target
