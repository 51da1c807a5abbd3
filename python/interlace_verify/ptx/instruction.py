"""One instruction of inline PTX: its qualifiers, and its operands as functions.

A register is a *slot*, an index into a list of arrays: first the operands ``$0``, ``$1`` of an asm text,
then the registers of ``.reg``. A builder (``arithmetic.py``, ``memory.py``, ...) makes an instruction once
into an *action*, a function of the threads that run it. It takes the qualifiers one by one, in any order; a
qualifier that is left is an error.
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
"""Runs one instruction; returns the index of the next one, or None for the following one."""
Builder = Callable[["Instruction"], Action]
"""Makes the action of an instruction, or raises an error for a wrong one."""
Write = Callable[[Threads, Array], None]

CARRY = "<carry>"  # a register of every thread: the carry that instructions with .cc set
_INTEGER = re.compile(r"(-?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0([0-7]+)|([1-9]\d*|0))U?")
_DECIMAL = re.compile(r"-?\d+(?:\.\d*(?:[eE][+-]?\d+)?|[eE][+-]?\d+)")
_HEXADECIMAL = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_SPECIAL = re.compile(r"%[a-z]\w*(?:\.[xyz])?|WARP_SZ")


class Symbol(NamedTuple):
    """A name of memory in a whole kernel: ``offset`` in its state space, 0 for a global variable."""

    space: str
    offset: int
    nbytes: int


def error(problem: str, line: int, text: str) -> InlineAssemblyError:
    return InlineAssemblyError(f"inline PTX: {problem}; line {line}: {text}")


@dataclass(frozen=True)
class Register:
    """A register; ``bits`` is 1 for a predicate."""

    name: str
    slot: int
    bits: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("?" if self.bits == 1 else f"u{self.bits // 8}")

    def extended(self, bits: Array, kind: ScalarType) -> Array:
        """Return ``bits`` of a narrower ``kind`` as this register holds them."""
        if kind.letter == "s":
            return bits.view(kind.stored).astype(f"i{self.bits // 8}").view(self.dtype)
        return bits.astype(self.dtype)


@dataclass
class Instruction:
    """An instruction. ``qualifiers`` are not taken yet; ``registers`` are declared at its position.

    It runs unless predicate register ``guard`` (-1: none) differs from ``wanted``. ``target``: the index of
    a branch's target instruction; ``targets``: the indices of a table. ``symbols`` and ``parameters``: for
    a whole kernel, otherwise None. ``members``: the mask of the lanes that run it together, if it has one.
    ``generic``: it accesses shared memory by a 64-bit address. ``reads`` and ``writes``: the slots of
    operands that are functions already.
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
        """Return an error for a ``problem`` that a GPU handles and the interpreter does not."""
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

    def require(self, what: str, names: Iterable[str]) -> str:
        """Take one of ``names``; without one, ``what`` of the instruction is not known."""
        found = self.choose(*names)
        if found is None:
            raise self.unknown(f"{what} of '{self.opcode}'", names)
        return found

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
        """Check that all qualifiers are taken, and that the number of operands is one of ``counts``."""
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
            raise self.error(f"there are {count} operands, and '{name}' is not one of them")
        raise self.error(f"'{name}' is not a declared register")

    def predicate(self, name: str) -> Register:
        found = self.registers.get(name)
        if found is None or found.bits != 1:
            raise self.error(f"'{name}' is not a declared predicate")
        return found

    def literal(self, text: str, kind: ScalarType) -> int | None:
        """Return the bits of a number as ``kind``, or None if ``text`` is not a number."""
        try:
            return number_of(text, kind)
        except ValueError as problem:
            raise self.error(str(problem)) from None

    def symbol(self, text: str) -> Symbol | None:
        """Return the symbol whose address ``name`` or ``name+4`` is."""
        name, _, more = text.partition("+")
        known = self.symbols is not None and (not more or more.isdecimal())
        return (self.symbols or {}).get(name) if known else None

    def reader(self, text: str, kind: ScalarType, *, wider: bool = False) -> Reader:
        """Return a function that reads an operand's bits. ``wider``: its register may be wider."""
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
        read, decode = self.reader(text, kind, wider=wider), kind.decode
        if kind.letter in "ubp":
            return read
        if self.literal(text, kind) is not None:
            return constant(decode(kind.raw.type(self.literal(text, kind))))
        return lambda threads: decode(read(threads))

    def writer(self, text: str, kind: ScalarType, *, wider: bool = False) -> Write:
        """Return a function that writes an operand's bits; a signed type extends to a wider register."""
        if text == "_":
            return lambda threads, bits: None
        register = self._of_width(text, kind, wider)
        slot = register.slot
        self.writes.add(slot)
        if register.bits == kind.bits:

            def put(threads: Threads, bits: Array) -> None:
                if threads.mask is None and bits.ndim:  # the usual case
                    threads.registers[slot] = bits
                else:
                    threads.set(slot, bits)

            return put
        return lambda threads, bits: threads.set(slot, register.extended(bits, kind))

    def active_writer(self, text: str, kind: ScalarType) -> Write:
        """Return a function that writes bits of the running threads; the operand may be wider."""
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
        """Return the registers of an operand, several in braces or one."""
        return split(text[1:-1]) if text.startswith("{") else [text]

    def computes(
        self,
        function: Callable[..., Array],
        *kinds: ScalarType,
        raw: bool = False,
        wider: bool = False,
    ) -> Action:
        """Apply ``function`` to the numbers (``raw``: bits) of all operands but the first, the result."""
        self.finish(len(kinds))
        (target, kind), *sources = zip(self.operands, kinds, strict=True)
        write = self.writer(target, kind, wider=wider)
        read = self.reader if raw else self.numbers
        reads = [read(*source, wider=wider) for source in sources]
        encode: Callable[[Array], Array] = (lambda bits: bits) if raw else kind.encoder
        if len(reads) == 2:
            first, second = reads
            return lambda threads: write(threads, encode(function(first(threads), second(threads))))

        def compute(threads: Threads) -> None:
            write(threads, encode(function(*[read(threads) for read in reads])))

        return compute


def number_of(text: str, kind: ScalarType) -> int | None:
    """Return the bits of ``-12``, ``0x1F``, ``1.5`` or ``0f3F800000`` as ``kind``; None for other texts."""
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
        raise ValueError(f"{value} is not a number of type .{kind.name}")
    return kind.bits_of(value)


def split(text: str) -> list[str]:
    """Return operands, which are separated by commas outside brackets."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "[{(") - (character in "]})")
        if character == "," and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()] if text.strip() else []


def builders() -> tuple[dict[str, Builder], Callable[..., Callable[[Builder], Builder]]]:
    """Return a table of builders by mnemonic, and a decorator that adds one."""
    table: dict[str, Builder] = {}

    def builds(*mnemonics: str) -> Callable[[Builder], Builder]:
        def add(builder: Builder) -> Builder:
            table.update(dict.fromkeys(mnemonics, builder))
            return builder

        return add

    return table, builds
