"""Inline PTX in the interpreter, for texts that do not make a program's threads differ.

``tl.inline_asm_elementwise`` is one text for every thread of a program. Here it runs n times, one after the
other, on a tensor of n elements. On scalars it runs once, by one thread that stands for all; all know what
it acquires. A text by which threads act differently or together is refused: its kernel must be compiled
(``programs/choice.py``).

An unknown instruction, qualifier or type raises an :class:`InlineAssemblyError` that names it, before any
of the text has run. One execution takes ``pack`` elements of every argument. Elements of less than 32 bits
share registers, the first in the lowest bits; a constraint's letter is the width of its register.
"""

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from interlace.runtime.compat.triton_interpreter import TensorHandle, triton_interpreter
from interlace.runtime.core.errors import InlineAssemblyError
from interlace.runtime.places.sim.choice import by_threads
from interlace_verify.ptx.arithmetic import ARITHMETIC
from interlace_verify.ptx.calls import CALLS
from interlace_verify.ptx.instruction import Instruction, Register
from interlace_verify.ptx.memory import MEMORY
from interlace_verify.ptx.moves import MOVES
from interlace_verify.ptx.parser import Parser
from interlace_verify.ptx.special import PtxSession, Threads
from interlace_verify.ptx.waits import BLOCK_BARRIER, WAITS

_WIDTHS = {"r": 32, "f": 32, "l": 64, "d": 64, "h": 16, "b": 1}


class AsmOperands:
    """The registers of results and of inputs, by constraints such as ``"=r,l,0,~{memory}"``."""

    def __init__(self, constraints: str) -> None:
        self._constraints = constraints
        self.outputs: list[Register] = []
        self.inputs: list[Register] = []
        for constraint in filter(None, (part.strip() for part in constraints.split(","))):
            if constraint.startswith("~"):
                continue
            index = len(self.outputs) + len(self.inputs)
            letter = constraint.lstrip("=&")
            if constraint.startswith("=") and not self.inputs and letter in _WIDTHS:
                self.outputs.append(Register(f"${index}", index, _WIDTHS[letter]))
            elif constraint.isdecimal() and int(constraint) < len(self.outputs):
                tied = self.outputs[int(constraint)]
                self.inputs.append(Register(f"${index}", tied.slot, tied.bits))
            elif constraint in _WIDTHS:
                self.inputs.append(Register(f"${index}", index, _WIDTHS[constraint]))
            else:
                raise InlineAssemblyError(
                    f"inline PTX: constraint '{constraint}' of \"{constraints}\" is not known to the "
                    f"interpreter; known are {', '.join(_WIDTHS)}, with = for results, which come "
                    "first, the number of a result, and ~{...}"
                )

    def arguments(
        self, values: Any, shape: tuple[int, ...], pack: int, kinds: list[object]
    ) -> list[list[Any]]:
        """Return all registers of every execution: the arguments in theirs, 0 in the others."""
        count, left = divmod(math.prod(shape), pack)
        if left:
            raise InlineAssemblyError(f"inline PTX: shape {shape} is not a multiple of pack={pack}")
        columns = [column for value in values for column in _columns(value.data, shape, pack)]
        self._check("inputs", self.inputs, len(columns))
        groups = [[np.zeros(1, kind) for kind in kinds] for _ in range(count)]
        for register, column in zip(self.inputs, columns, strict=True):
            for registers, bits in zip(groups, column, strict=True):
                registers[register.slot][0] = bits & ((1 << register.bits) - 1)
        return groups

    def results(
        self, types: Any, shape: tuple[int, ...], pack: int, groups: list[list[Any]]
    ) -> list[Any]:
        """Return handles of the values that the text has left in its output registers."""
        stored = [triton_interpreter._get_np_dtype(result.scalar) for result in types]
        lanes = [_lanes(8 * kind.itemsize, pack) for kind in stored]
        self._check("results", self.outputs, sum(map(len, lanes)))
        left, handles = iter(self.outputs), []
        for result, kind, parts in zip(types, stored, lanes, strict=True):
            bits, places = 8 * kind.itemsize, []  # the slot and first bit of each element
            for part, register in zip(parts, left, strict=False):
                places += [(register.slot, (i - part[0]) * bits) for i in part]
            mask = (1 << bits) - 1
            values = [
                int(group[slot][0]) >> shift & mask for group in groups for slot, shift in places
            ]
            data = np.array(values, f"u{kind.itemsize}").view(kind).reshape(shape)
            handles.append(TensorHandle(data, result.scalar))
        return handles

    def _check(self, noun: str, found: list[Register], wanted: int) -> None:
        if len(found) != wanted:
            raise InlineAssemblyError(
                f'inline PTX: "{self._constraints}" has {len(found)} {noun}, but the arguments '
                f"need {wanted}"
            )


def _lanes(bits: int, pack: int) -> list[range]:
    """Return the elements in each register: elements of less than 32 bits share one."""
    shared = max(1, 32 // bits)
    return [range(first, min(first + shared, pack)) for first in range(0, pack, shared)]


def _columns(data: Any, shape: tuple[int, ...], pack: int) -> list[list[int]]:
    """Return the registers that one argument fills, each with its values for all groups of elements."""
    flat = np.ascontiguousarray(np.broadcast_to(data, shape)).reshape(-1)
    bits = 8 * flat.dtype.itemsize
    values = flat.view(f"u{flat.dtype.itemsize}").tolist()
    starts = range(0, len(values), pack)
    return [
        [sum(values[at + i] << (i - lanes[0]) * bits for i in lanes) for at in starts]
        for lanes in _lanes(bits, pack)
    ]


BUILDERS = ARITHMETIC | CALLS | MEMORY | MOVES | WAITS
IDLE_STEPS = 1_000_000
"""A loop without memory accesses that runs this many instructions counts as endless."""


@dataclass(frozen=True)
class _Statement:
    steps: tuple[Instruction, ...]
    operands: AsmOperands
    kinds: list[Any]


@functools.lru_cache(maxsize=1024)
def _build(asm: str, constraints: str) -> _Statement:
    operands = AsmOperands(constraints)
    parser, steps = Parser([*operands.outputs, *operands.inputs]), []
    for instruction in parser.instructions(asm):
        instruction.action = instruction.builder(BUILDERS)(instruction)
        steps.append(instruction)
    if reason := by_threads(asm):
        raise InlineAssemblyError(
            f"inline PTX: threads differ by '{reason}', so the kernel must be compiled; but this text "
            "was not in its code before the launch"
        )
    return _Statement(tuple(steps), operands, parser.kinds)


class InlineAssembly(PtxSession):
    """``tl.inline_asm_elementwise`` of one session."""

    def create(
        self, asm: str, constraints: str, values: Any, types: object, is_pure: bool, pack: int
    ) -> Any:
        """Run the text and return its results in Triton's form."""
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
    steps, registers, hooks = statement.steps, thread.registers, thread.session.hooks
    index, count = 0, len(steps)
    while index < count:
        step, target = steps[index], None
        if step.guard < 0 or registers[step.guard][0] == step.wanted:
            target = step.action(thread)
        if target == BLOCK_BARRIER:
            if not thread.alone:
                raise step.error("a barrier in a text on a tensor needs a compiled kernel")
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
            if thread.polls_plainly:  # an atomic has paused itself
                thread.polls_plainly = False
                hooks.pause()
        index = target
