"""One instruction of inline PTX: its qualifiers, and its operands as functions.

A register is a *slot*, an index into a list of arrays: first the operands ``$0``, ``$1`` of an asm text,
then what ``.reg`` declares. An instruction is built once into an *action*, a function of the threads that
run it; so its operands become functions, too. What it means is not known here: who builds it
(``arithmetic.py``, ``memory.py``, ...) takes its qualifiers one by one, in any order, and what is left is
an error.
"""

import re
import struct
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from interlace.runtime.core.errors import InlineAssemblyError
from interlace_verify.ptx.special import SPECIAL, Reader, Threads, constant
from interlace_verify.ptx.types import PREDICATE, TYPES, Array, ScalarType

Action = Callable[[Threads], "int | None"]
"""Runs one instruction; the index of the next one, or None for the following one."""
Builder = Callable[["Instruction"], Action]
"""Makes the action of an instruction, or raises what is wrong with it."""
Write = Callable[[Threads, Array], None]

CARRY = "<carry>"  # a register of every thread: the carry that instructions with .cc leave
_INTEGER = re.compile(r"(-?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0([0-7]+)|([1-9]\d*|0))U?")
_DECIMAL = re.compile(r"-?\d+(?:\.\d*(?:[eE][+-]?\d+)?|[eE][+-]?\d+)")
_HEXADECIMAL = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_SPECIAL = re.compile(r"%[a-z]\w*(?:\.[xyz])?|WARP_SZ")


class Symbol(NamedTuple):
    """A name of memory in a whole kernel: ``offset`` in its state space.

    0 in "global" and "const", where a variable is at an address of its own. "param": of a function.
    """

    space: str
    offset: int
    nbytes: int


def error(problem: str, line: int, text: str) -> InlineAssemblyError:
    return InlineAssemblyError(f"inline PTX: {problem}; line {line}: {text}")


@dataclass(frozen=True)
class Register:
    """``bits`` is 1 for a predicate."""

    name: str
    slot: int
    bits: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("?" if self.bits == 1 else f"u{self.bits // 8}")

    def extended(self, bits: Array, kind: ScalarType) -> Array:
        """``bits`` of a narrower ``kind`` as they stand in this register."""
        if kind.letter == "s":
            return bits.view(kind.stored).astype(f"i{self.bits // 8}").view(self.dtype)
        return bits.astype(self.dtype)


@dataclass
class Instruction:
    """``qualifiers`` are those that nobody has taken yet, ``registers`` those that are declared here.

    It runs unless predicate register ``guard`` (-1: none) differs from ``wanted``. ``target``: the index of
    the instruction that a branch goes to; ``targets``: those of a table. ``symbols`` and ``parameters``:
    of a whole kernel, else None. ``members``: a mask of the lanes that run it together, if it names them.
    ``generic``: what it accesses is in shared memory, its address one of 64 bits. ``reads`` and ``writes``:
    the slots of its operands, as far as they have become functions.
    """

    opcode: str
    operands: list[str]
    line: int
    text: str
    registers: ChainMap[str, Register]
    guard: int = -1
    wanted: int = 1
    target: int = -1
    targets: tuple[int, ...] = ()
    symbols: Mapping[str, Symbol] | None = None
    parameters: Mapping[str, ScalarType] | None = None
    members: Reader | None = None
    generic: bool = False
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    action: Action = lambda threads: None

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

    def builder(self, known: Mapping[str, Builder]) -> Builder:
        if self.mnemonic not in known:
            raise self.unknown(f"instruction '{self.opcode}'", known)
        return known[self.mnemonic]

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
        """The bits of a number as ``kind``; None if it is none."""
        try:
            return number_of(text, kind)
        except ValueError as problem:
            raise self.error(str(problem)) from None

    def symbol(self, text: str) -> Symbol | None:
        """What ``name`` or ``name+4`` is the address of."""
        name, _, more = text.partition("+")
        known = self.symbols is not None and (not more or more.isdecimal())
        return (self.symbols or {}).get(name) if known else None

    def reader(self, text: str, kind: ScalarType, *, wider: bool = False) -> Reader:
        """A function that gives the bits of an operand. ``wider``: its register may be wider."""
        literal = self.literal(text, kind)
        if literal is not None:
            return constant(kind.raw.type(literal))
        if (symbol := self.symbol(text)) is not None:
            name, _, more = text.partition("+")
            offset = kind.raw.type(symbol.offset + int(more or 0))
            if symbol.space in ("global", "const"):
                return lambda threads: threads.session.variables[name].astype(kind.raw) + offset
            return constant(offset)
        if (self.parameters or {}).get(text) is TYPES["b8"]:  # the address of an array
            return lambda threads: threads.session.parameters[text].astype(kind.raw)
        if text in SPECIAL and text not in self.registers:
            special = SPECIAL[text]
            return lambda threads: special(threads).astype(kind.raw)
        if text.startswith("!") and kind is PREDICATE:
            negated = self.predicate(text[1:].strip()).slot
            self.reads.add(negated)
            return lambda threads: ~threads.registers[negated]
        register = self._of_width(text, kind, wider)
        slot = register.slot
        self.reads.add(slot)
        if register.bits == kind.bits:
            return lambda threads: threads.registers[slot]
        return lambda threads: threads.registers[slot].astype(kind.raw)

    def numbers(self, text: str, kind: ScalarType, *, wider: bool = False) -> Reader:
        """A function that gives the numbers in an operand."""
        read, decode = self.reader(text, kind, wider=wider), kind.decode
        if kind.letter in "ubp":
            return read
        if self.literal(text, kind) is not None:
            return constant(decode(kind.raw.type(self.literal(text, kind))))
        return lambda threads: decode(read(threads))

    def writer(self, text: str, kind: ScalarType, *, wider: bool = False) -> Write:
        """A function that puts bits into an operand; a signed type extends into a wider register."""
        if text == "_":
            return lambda threads, bits: None
        register = self._of_width(text, kind, wider)
        slot = register.slot
        self.writes.add(slot)
        if register.bits == kind.bits:

            def put(threads: Threads, bits: Array) -> None:
                if threads.mask is None and bits.ndim:  # as most are
                    threads.registers[slot] = bits
                else:
                    threads.set(slot, bits)

            return put
        return lambda threads, bits: threads.set(slot, register.extended(bits, kind))

    def active_writer(self, text: str, kind: ScalarType) -> Write:
        """A function that puts bits of those threads that run into an operand, which may be wider."""
        if text == "_":
            return lambda threads, bits: None
        register = self._of_width(text, kind, True)
        self.writes.add(register.slot)
        if register.bits == kind.bits:
            return lambda threads, bits: threads.set_active(register.slot, bits)
        return lambda threads, bits: threads.set_active(
            register.slot, register.extended(bits, kind)
        )

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
        function: Callable[..., Array],
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
        encode = _unchanged if raw else kind.encoder
        if len(reads) == 2:
            first, second = reads
            return lambda threads: write(threads, encode(function(first(threads), second(threads))))

        def compute(threads: Threads) -> None:
            write(threads, encode(function(*[read(threads) for read in reads])))

        return compute


def _unchanged(bits: Array) -> Array:
    return bits


def number_of(text: str, kind: ScalarType) -> int | None:
    """The bits of ``-12``, ``0x1F``, ``1.5`` or ``0f3F800000`` as ``kind``; None if it is no number.

    ValueError if it is a number with a point, and ``kind`` has none.
    """
    value: int | float
    if match := _INTEGER.fullmatch(text):
        sign, *digits = match.groups()
        value = next(int(d, base) for d, base in zip(digits, (16, 2, 8, 10), strict=True) if d)
        return kind.bits_of(-value if sign else value)
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
        raise ValueError(f"{value} is no number of type .{kind.name}")
    return kind.bits_of(value)


def split(text: str) -> list[str]:
    """Operands, which commas separate outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "[{(") - (character in "]})")
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
