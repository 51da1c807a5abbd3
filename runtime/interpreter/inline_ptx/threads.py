"""Inline PTX in the interpreter: the instructions that symmetric-memory kernels synchronise with.

``tl.inline_asm_elementwise`` is one text for every thread of a program. Here it is run

==============================  ==================================================================
on a tensor of n elements       n times; element i by thread i (``%tid.x``, modulo 128)
on scalars                      once, by thread 0, which stands for all: side effects happen once
on scalars, if the text tells   by all 128 threads, as on a GPU: thread i may signal rank i; the
threads apart, touches memory   results are those of thread 0
==============================  ==================================================================

Several threads take turns: each runs until it branches back, meets a barrier or ends. So they may wait
for each other and for whatever their program's other threads have caused, in any order, and a barrier
is one barrier of the program.

A text is built once: ``parser.py`` makes instructions of it, the files by kind of instruction make
actions of those. An instruction, qualifier or type that is not known is an
:class:`InlineAssemblyError` that names it, before anything of the text has run.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from interlace.runtime.interpreter.inline_ptx.operands import AsmOperands
from interlace.runtime.ptx.arithmetic import ARITHMETIC
from interlace.runtime.ptx.bits import BIT_OPERATIONS
from interlace.runtime.ptx.instruction import InlineAssemblyError, Instruction
from interlace.runtime.ptx.memory import MEMORY
from interlace.runtime.ptx.moves import MOVES
from interlace.runtime.ptx.multimem import MULTIMEM
from interlace.runtime.ptx.parser import Parser
from interlace.runtime.ptx.special import (
    OF_THREADS,
    THREADS,
    WARP,
    PtxSession,
    Threads,
)
from interlace.runtime.ptx.waits import BLOCK_BARRIER, WAITS

TOUCHING = {**MEMORY, **MULTIMEM, **WAITS}
BUILDERS = {**ARITHMETIC, **BIT_OPERATIONS, **MOVES, **TOUCHING}
IDLE_STEPS = 1_000_000
"""So many instructions in loops that touch no memory are taken for an endless loop."""
_AGAIN = -3  # a thread has branched back


@dataclass(frozen=True)
class _Statement:
    """A built asm text."""

    steps: tuple[Instruction, ...]
    operands: AsmOperands
    kinds: list[Any]
    tells_threads_apart: bool


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
    apart = any(name in asm for name in OF_THREADS)
    effects = any(step.mnemonic in TOUCHING for step in steps)
    return _Statement(tuple(steps), operands, parser.kinds, apart and effects)


class InlineAssembly(PtxSession):
    """``tl.inline_asm_elementwise`` of one session."""

    def create(
        self, asm: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int
    ) -> Any:
        """Runs the text; the results as Triton asks for them."""
        statement = _build(asm, constraints)
        shape = values[0].data.shape if values else (1,)
        groups = statement.operands.arguments(values, shape, pack, statement.kinds)
        alone = len(groups) == 1 and not statement.tells_threads_apart
        registers = groups
        if len(groups) == 1 and not alone:
            registers = [groups[0], *(list(groups[0]) for _ in range(THREADS - 1))]
        threads = [
            Threads(self, each, np.array([i % THREADS], np.uint32), alone=alone)
            for i, each in enumerate(registers)
        ]
        with np.errstate(all="ignore"):
            self._take_turns(statement, threads)
        found = statement.operands.results(types, shape, pack, groups)
        return SimpleNamespace(get_result=found.__getitem__)

    def _take_turns(self, statement: _Statement, threads: list[Threads]) -> None:
        running = {thread: _execute(statement, thread) for thread in threads}
        arrived: dict[Threads, int] = {}
        while running:
            for thread in [t for t in running if t not in arrived]:
                event = next(running[thread], None)
                if event is None:
                    del running[thread]
                elif event != _AGAIN:
                    arrived[thread] = event
                elif thread.polls_plainly:  # an atomic has given way itself
                    thread.polls_plainly = False
                    self.hooks.pause()
            if arrived and not self._meet(list(running), arrived) and len(arrived) == len(running):
                raise InlineAssemblyError(
                    "inline PTX: threads of a program wait for each other, at bar.sync and bar.warp.sync"
                )

    def _meet(self, running: list[Threads], arrived: dict[Threads, int]) -> bool:
        """Let those go on whose whole block or warp is there; whether any may."""
        met = False
        for thread in [t for t in running if t in arrived]:
            barrier, warp = arrived.get(thread), thread.numbers[0] // WARP
            whole = barrier == BLOCK_BARRIER
            members = [t for t in running if whole or t.numbers[0] // WARP == warp]
            if barrier is not None and all(arrived.get(t) == barrier for t in members):
                met = True
                if whole:
                    self.hooks.barrier()
                for member in members:
                    del arrived[member]
        return met


def _execute(statement: _Statement, thread: Threads) -> Iterator[int]:
    """Run a thread; yields when it branches back and at barriers."""
    steps, registers = statement.steps, thread.registers
    index, count = 0, len(statement.steps)
    while index < count:
        step, target = steps[index], None
        if step.guard < 0 or registers[step.guard][0] == step.wanted:
            target = step.action(thread)
        if target is None or target < 0:
            index += 1
            if target is not None:
                yield target
            continue
        if target <= index:
            thread.idle_steps += index - target + 1
            if thread.idle_steps > IDLE_STEPS:
                raise InlineAssemblyError(
                    f"inline PTX: a loop without memory accesses has run {IDLE_STEPS} "
                    f"instructions; it goes back at: {step.text}"
                )
            yield _AGAIN
        index = target
