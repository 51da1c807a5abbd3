"""One instruction of inline PTX: its qualifiers, and its operands as functions.

A register is a *slot*, an index into a list of integers: first the operands ``$0``, ``$1`` of the asm
text, then what ``.reg`` declares. An instruction is built once into an *action*, a function of the thread;
so its operands become functions, too. What it means is not known here: who builds it (``arithmetic.py``,
``memory.py``, ...) takes its qualifiers one by one, in any order, and what is left is an error.
"""

import re
import struct
from collections import ChainMap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.ptx.special import SPECIAL, Reader, Thread, constant
from interlace.runtime.ptx.types import PREDICATE, TYPES, ScalarType

Action = Callable[[Thread], "int | None"]
"""Runs one instruction; the index of the next one, or None for the following one."""
Builder = Callable[["Instruction"], Action]
"""Makes the action of an instruction, or raises what is wrong with it."""
Write = Callable[[Thread, int], None]

_INTEGER = re.compile(r"(-?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0([0-7]+)|([1-9]\d*|0))U?")
_DECIMAL = re.compile(r"-?\d+(?:\.\d*(?:[eE][+-]?\d+)?|[eE][+-]?\d+)")
_HEXADECIMAL = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_SPECIAL = re.compile(r"%[a-z]\w*(?:\.[xyz])?|WARP_SZ")


class InlineAssemblyError(InterlaceError, NotImplementedError):
    """Inline PTX that the interpreter cannot run, or that no assembler would take."""


def error(problem: str, line: int, text: str) -> InlineAssemblyError:
    return InlineAssemblyError(f"inline PTX: {problem}; line {line}: {text}")


@dataclass(frozen=True)
class Register:
    """``bits`` is 1 for a predicate."""

    name: str
    slot: int
    bits: int


@dataclass
class Instruction:
    """``qualifiers`` are those that nobody has taken yet, ``registers`` those that are declared here.

    It runs unless predicate register ``guard`` (-1: none) differs from ``wanted``. ``target``: the index of
    the instruction that a branch goes to.
    """

    opcode: str
    operands: list[str]
    line: int
    text: str
    registers: ChainMap[str, Register]
    guard: int = -1
    wanted: int = 1
    target: int = -1
    action: Action = lambda thread: None

    def __post_init__(self) -> None:
        self.mnemonic, *self.qualifiers = self.opcode.split(".")

    def error(self, problem: str) -> InlineAssemblyError:
        return error(problem, self.line, self.text)

    def unknown(self, problem: str, known: Iterable[str]) -> InlineAssemblyError:
        """``problem`` is something that a GPU can do and the interpreter cannot."""
        listed = ", ".join(sorted(known))
        return self.error(
            f"{problem} is not known to the interpreter (known are {listed}); compiled for a GPU, "
            "a kernel may use all of PTX"
        )

    # -- qualifiers --------------------------------------------------------------------------------

    def flag(self, name: str) -> bool:
        return self.choose(name) is not None

    def choose(self, *names: str) -> str | None:
        for name in names:
            if name in self.qualifiers:
                self.qualifiers.remove(name)
                return name
        return None

    def take_type(self, allowed: Iterable[str]) -> ScalarType:
        """Take the first type among the qualifiers; it must be one of ``allowed``."""
        listed = ", ".join(f".{name}" for name in allowed)
        for name in self.qualifiers:
            if name in TYPES:
                if name not in allowed:
                    raise self.error(f"'{self.mnemonic}' is interpreted for {listed} only")
                self.qualifiers.remove(name)
                return TYPES[name]
        raise self.error(f"'{self.mnemonic}' needs a type, one of {listed}")

    def finish(self, *counts: int) -> None:
        """All qualifiers must have been taken, and the number of operands be one of ``counts``."""
        if self.qualifiers:
            raise self.error(
                f"qualifier '.{self.qualifiers[0]}' of '{self.opcode}' is not known to the "
                "interpreter; compiled for a GPU, a kernel may use all of PTX"
            )
        if len(self.operands) not in counts:
            wanted = " or ".join(map(str, counts))
            raise self.error(f"'{self.mnemonic}' takes {wanted} operands, not {len(self.operands)}")

    # -- operands ----------------------------------------------------------------------------------

    def register(self, name: str) -> Register:
        found = self.registers.get(name)
        if found is not None:
            return found
        if _SPECIAL.fullmatch(name):
            raise self.unknown(f"special register '{name}'", SPECIAL)
        if re.fullmatch(r"\$\d+", name):
            count = sum(known.startswith("$") for known in self.registers.maps[-1])
            raise self.error(f"there are {count} operands and no '{name}'")
        raise self.error(f"'{name}' is not a declared register")

    def predicate(self, name: str) -> Register:
        found = self.registers.get(name)
        if found is None or found.bits != 1:
            raise self.error(f"'{name}' is not a declared predicate")
        return found

    def literal(self, text: str, kind: ScalarType) -> int | None:
        """The bits of ``-12``, ``0x1F``, ``1.5`` or ``0f3F800000`` as ``kind``; None if it is no number."""
        value: int | float
        if match := _INTEGER.fullmatch(text):
            sign, *digits = match.groups()
            value = next(int(d, base) for d, base in zip(digits, (16, 2, 8, 10), strict=True) if d)
            return kind.encode(-value if sign else value)
        if match := _HEXADECIMAL.fullmatch(text):
            raw = bytes.fromhex(match[1] or match[2])
            if 8 * len(raw) == kind.bits:
                return int.from_bytes(raw, "big")
            value = struct.unpack(">f" if match[1] else ">d", raw)[0]
        elif _DECIMAL.fullmatch(text):
            value = float(text)
        else:
            return None
        if not kind.is_float:
            raise self.error(f"{value} is no number of type .{kind.name}")
        return kind.encode(value)

    def reader(self, text: str, kind: ScalarType, *, wider: bool = False) -> Reader:
        """A function that gives the bits of an operand. ``wider``: its register may be wider."""
        mask, literal = kind.mask, self.literal(text, kind)
        if literal is not None:
            return constant(literal)
        if text in SPECIAL and text not in self.registers:
            special = SPECIAL[text]
            return lambda thread: special(thread) & mask
        if text.startswith("!") and kind is PREDICATE:
            negated = self.predicate(text[1:].strip()).slot
            return lambda thread: 1 - thread.registers[negated]
        register = self._of_width(text, kind, wider)
        slot = register.slot
        if register.bits == kind.bits:
            return lambda thread: thread.registers[slot]
        return lambda thread: thread.registers[slot] & mask

    def numbers(self, text: str, kind: ScalarType, *, wider: bool = False) -> Reader:
        """A function that gives the number in an operand."""
        read, decode = self.reader(text, kind, wider=wider), kind.decode
        return read if kind.letter in "ubp" else lambda thread: decode(read(thread))

    def writer(self, text: str, kind: ScalarType, *, wider: bool = False) -> Write:
        """A function that puts bits into an operand; a signed type extends into a wider register."""
        if text == "_":
            return lambda thread, bits: None
        register = self._of_width(text, kind, wider)
        slot, mask, decode = register.slot, (1 << register.bits) - 1, kind.decode
        extends = kind.letter == "s" and register.bits > kind.bits

        def write(thread: Thread, bits: int) -> None:
            thread.registers[slot] = decode(bits) & mask if extends else bits

        return write

    def _of_width(self, name: str, kind: ScalarType, wider: bool) -> Register:
        found = self.register(name)
        bits = found.bits
        if not (bits >= kind.bits and bits > 1 if wider else bits == kind.bits):
            raise self.error(f"register '{name}' has {bits} bits, .{kind.name} needs {kind.bits}")
        return found

    def parts(self, text: str) -> list[str]:
        """The registers of an operand, several in braces or one."""
        return split(text[1:-1]) if text.startswith("{") else [text]

    def computes(
        self,
        function: Callable[..., Any],
        *kinds: ScalarType,
        raw: bool = False,
        wider: bool = False,
    ) -> Action:
        """``function`` of the numbers (``raw``: bits) in all operands but the first, which it goes to."""
        self.finish(len(kinds))
        (target, kind), *sources = zip(self.operands, kinds, strict=True)
        write = self.writer(target, kind, wider=wider)
        read = self.reader if raw else self.numbers
        reads = [read(*source, wider=wider) for source in sources]
        encode = int if raw else kind.encode
        return lambda thread: write(thread, encode(function(*[read(thread) for read in reads])))


def split(text: str) -> list[str]:
    """Operands, which commas separate outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()] if text.strip() else []


def builders() -> tuple[dict[str, Builder], Callable[..., Callable[[Builder], Builder]]]:
    """Builders by mnemonic, and a decorator that adds one."""
    table: dict[str, Builder] = {}

    def builds(*mnemonics: str) -> Callable[[Builder], Builder]:
        def add(builder: Builder) -> Builder:
            table.update(dict.fromkeys(mnemonics, builder))
            return builder

        return add

    return table, builds
