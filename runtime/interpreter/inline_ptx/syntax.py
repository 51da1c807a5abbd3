"""Inline PTX as data: instructions, their operands, and how they say what is wrong with them.

A register is a *slot*, an index into a list of integers: first the operands ``$0``, ``$1`` of the asm
text, then what ``.reg`` declares. What an instruction means is not known here: whoever builds it (the
tables of ``arithmetic.py``, ``moves.py`` and ``memory.py``) takes its
qualifiers one by one, in any order, and what is left is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.interpreter.inline_ptx.types import TYPES, ScalarType


class InlineAssemblyError(InterlaceError, NotImplementedError):
    """Inline PTX that the interpreter cannot run, or that no assembler would take."""


@dataclass(frozen=True)
class Register:
    """``bits`` is 1 for a predicate."""

    name: str
    slot: int
    bits: int


@dataclass(frozen=True)
class Literal:
    """A number. ``raw``: (width, bits) of a hexadecimal float, which stay what they are."""

    value: int | float
    raw: tuple[int, int] | None = None


@dataclass(frozen=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Address:
    base: Operand
    offset: int


@dataclass(frozen=True)
class Vector:
    parts: tuple[Operand, ...]


@dataclass(frozen=True)
class Negated:
    predicate: Register


@dataclass(frozen=True)
class Pair:
    """Two predicates that one ``setp`` sets, ``p|q``."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Sink:
    """``_``: the result is not wanted."""


Operand = Register | Literal | Special | Address | Vector | Negated | Pair | Sink


@dataclass
class Instruction:
    """One instruction. ``qualifiers`` are those that nobody has taken yet.

    ``problem``: what is wrong with its operands, which matters only if the instruction is known.
    """

    opcode: str
    mnemonic: str
    qualifiers: list[str]
    operands: list[Operand]
    line: int
    text: str
    guard: Register | None = None
    negated: bool = False
    target: int = -1
    problem: InlineAssemblyError | None = None

    def error(self, problem: str) -> InlineAssemblyError:
        return error(problem, self.line, self.text)

    def unknown(self, problem: str, known: Iterable[str]) -> InlineAssemblyError:
        """``problem`` is something that a GPU can do and the interpreter cannot."""
        listed = ", ".join(sorted(known))
        return error(
            f"{problem} is not known to the interpreter (known are {listed}); compiled for a GPU, "
            "a kernel may use all of PTX",
            self.line,
            self.text,
        )

    def flag(self, name: str) -> bool:
        """Take a qualifier if it is there."""
        return self.choose(name) is not None

    def choose(self, *names: str) -> str | None:
        """Take one of several qualifiers."""
        for name in names:
            if name in self.qualifiers:
                self.qualifiers.remove(name)
                return name
        return None

    def take_type(self, allowed: Iterable[str]) -> ScalarType:
        """Take the first type among the qualifiers; it must be one of ``allowed``."""
        allowed = list(allowed)
        for name in self.qualifiers:
            if name in TYPES:
                if name not in allowed:
                    raise self.error(f"'{self.mnemonic}' is interpreted for {_list(allowed)} only")
                self.qualifiers.remove(name)
                return TYPES[name]
        raise self.error(f"'{self.mnemonic}' needs a type, one of {_list(allowed)}")

    def finish(self, *counts: int) -> None:
        """All qualifiers must have been taken, and the number of operands be one of ``counts``."""
        if self.qualifiers:
            raise self.error(
                f"qualifier '.{self.qualifiers[0]}' of '{self.opcode}' is not known to the "
                "interpreter; compiled for a GPU, a kernel may use all of PTX"
            )
        if self.problem is not None:
            raise self.problem
        if len(self.operands) not in counts:
            wanted = " or ".join(map(str, counts))
            raise self.error(f"'{self.mnemonic}' takes {wanted} operands, not {len(self.operands)}")


def error(problem: str, line: int, text: str) -> InlineAssemblyError:
    return InlineAssemblyError(f"inline PTX: {problem}; line {line}: {text}")


def _list(names: Iterable[str]) -> str:
    return ", ".join(f".{name}" for name in names)
