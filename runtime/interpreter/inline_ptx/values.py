"""Threads, special registers and operands of inline PTX, as functions.

An instruction is built once into an *action*, a function of the thread; so its operands become
functions, too: ``reader`` gives one that reads, ``writer`` one that writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from interlace.runtime.interpreter.inline_ptx.syntax import (
    Instruction,
    Literal,
    Negated,
    Operand,
    Register,
    Sink,
    Special,
)
from interlace.runtime.interpreter.inline_ptx.types import PREDICATE, ScalarType

WARP = 32
THREADS = 128
"""What ``%ntid.x`` says: the threads of four warps, which is Triton's default."""
CLOCK_STEP = 1000
"""A read of a clock takes so long, in cycles or nanoseconds: no real clock enters a schedule."""


@dataclass(eq=False)
class PtxSession:
    """What all threads of a session share."""

    builder: Any
    hooks: Any
    clock: int = 0

    def read_clock(self) -> int:
        self.clock += CLOCK_STEP
        return self.clock


class Thread:
    """One thread of a program, which runs one asm statement.

    ``alone``: it stands for all threads. ``polls_plainly``: since it last branched back it has
    loaded, and done nothing that lets other programs go on. ``idle_steps``: instructions in loops since
    it last touched memory or a clock.
    """

    __slots__ = ("alone", "idle_steps", "number", "polls_plainly", "registers", "session")

    def __init__(self, session: PtxSession, registers: list[int], number: int, alone: bool) -> None:
        self.session = session
        self.registers = registers
        self.number = number
        self.alone = alone
        self.polls_plainly = False
        self.idle_steps = 0


Action = Callable[[Thread], "int | None"]
"""Runs one instruction; the index of the next one, or None for the following one."""
Builder = Callable[[Instruction], Action]
"""Makes the action of an instruction, or raises what is wrong with it."""
Read = Callable[[Thread], Any]
Write = Callable[[Thread, Any], None]


def adds_to(table: dict[str, Builder]) -> Callable[..., Callable[[Builder], Builder]]:
    """A decorator: what builds instructions with these mnemonics."""

    def builds(*mnemonics: str) -> Callable[[Builder], Builder]:
        def add(builder: Builder) -> Builder:
            table.update(dict.fromkeys(mnemonics, builder))
            return builder

        return add

    return builds


def _grid(name: str, axis: int) -> Read:
    return lambda thread: int(getattr(thread.session.builder, name)[axis])


def _clock(shift: int) -> Read:
    def read(thread: Thread) -> int:
        thread.idle_steps = 0
        return thread.session.read_clock() >> shift

    return read


def _program_number(thread: Thread) -> int:
    """Stands for the multiprocessor: as if every program had one of its own."""
    builder = thread.session.builder
    (x, y, z), (width, height, _) = builder.grid_idx, builder.grid_dim
    return int((z * height + y) * width + x)


def _constant(value: int) -> Read:
    return lambda thread: value


SPECIAL: dict[str, Read] = {
    "%tid.x": lambda thread: thread.number,
    "%ntid.x": _constant(THREADS),
    "%laneid": lambda thread: thread.number % WARP,
    "%warpid": lambda thread: thread.number // WARP,
    "%nwarpid": _constant(THREADS // WARP),
    "%warpsize": _constant(WARP),
    "WARP_SZ": _constant(WARP),
    "%smid": _program_number,
    "%lanemask_eq": lambda thread: 1 << thread.number % WARP,
    "%lanemask_lt": lambda thread: (1 << thread.number % WARP) - 1,
    "%lanemask_le": lambda thread: (2 << thread.number % WARP) - 1,
    "%lanemask_gt": lambda thread: -(2 << thread.number % WARP),
    "%lanemask_ge": lambda thread: -(1 << thread.number % WARP),
}
for _name in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo"):
    SPECIAL[_name] = _clock(0)
for _name in ("%clock_hi", "%globaltimer_hi"):
    SPECIAL[_name] = _clock(32)
for _axis, _letter in enumerate("xyz"):
    SPECIAL[f"%ctaid.{_letter}"] = _grid("grid_idx", _axis)
    SPECIAL[f"%nctaid.{_letter}"] = _grid("grid_dim", _axis)
    SPECIAL.setdefault(f"%tid.{_letter}", _constant(0))
    SPECIAL.setdefault(f"%ntid.{_letter}", _constant(1))

OF_THREADS = tuple(n for n in SPECIAL if n.startswith(("%tid", "%lane", "%warpid")))
"""Special registers in which the threads of a program differ."""


def reader(
    instruction: Instruction, operand: Operand, kind: ScalarType, *, wider: bool = False
) -> Read:
    """A function that gives the bits of ``operand``. ``wider``: its register may be wider."""
    mask = kind.mask
    if isinstance(operand, Register):
        slot = operand.slot
        _check_width(instruction, operand, kind, wider)
        if operand.bits == kind.bits:
            return lambda thread: thread.registers[slot]
        return lambda thread: thread.registers[slot] & mask
    if isinstance(operand, Literal):
        return _constant(_literal_bits(instruction, operand, kind))
    if isinstance(operand, Special):
        read = SPECIAL.get(operand.name)
        if read is None:
            raise instruction.unknown(f"special register '{operand.name}'", SPECIAL)
        return lambda thread: read(thread) & mask
    if isinstance(operand, Negated) and kind is PREDICATE:
        slot = operand.predicate.slot
        return lambda thread: 1 - thread.registers[slot]
    raise instruction.error(
        f"'{instruction.mnemonic}' takes a register or a number where a {type(operand).__name__} is"
    )


def number_reader(instruction: Instruction, operand: Operand, kind: ScalarType) -> Read:
    """A function that gives the number in ``operand``."""
    read = reader(instruction, operand, kind)
    if kind.letter in "ubp":  # registers hold exactly that
        return read
    if isinstance(operand, Literal):
        return _constant(kind.decode(read(None)))  # type: ignore[arg-type]
    decode = kind.decode
    return lambda thread: decode(read(thread))


def writer(
    instruction: Instruction, operand: Operand, kind: ScalarType, *, wider: bool = False
) -> Write:
    """A function that puts bits into ``operand``; a signed type extends into a wider register."""
    if isinstance(operand, Sink):
        return lambda thread, bits: None
    if not isinstance(operand, Register):
        raise instruction.error(
            f"the result of '{instruction.mnemonic}' goes into a register, not a "
            f"{type(operand).__name__}"
        )
    slot = operand.slot
    _check_width(instruction, operand, kind, wider)
    if kind.letter == "s" and operand.bits > kind.bits:
        mask, decode = (1 << operand.bits) - 1, kind.decode

        def extend(thread: Thread, bits: int) -> None:
            thread.registers[slot] = decode(bits) & mask

        return extend

    def write(thread: Thread, bits: int) -> None:
        thread.registers[slot] = bits

    return write


def _check_width(
    instruction: Instruction, register: Register, kind: ScalarType, wider: bool
) -> None:
    fits = register.bits >= kind.bits and register.bits > 1 if wider else register.bits == kind.bits
    if not fits:
        raise instruction.error(
            f"register '{register.name}' has {register.bits} bits, .{kind.name} needs {kind.bits}"
        )


def _literal_bits(instruction: Instruction, literal: Literal, kind: ScalarType) -> int:
    if literal.raw is not None and literal.raw[0] == kind.bits:
        return literal.raw[1]
    if isinstance(literal.value, float) and not kind.is_float:
        raise instruction.error(f"{literal.value} is no number of type .{kind.name}")
    return kind.encode(literal.value)
