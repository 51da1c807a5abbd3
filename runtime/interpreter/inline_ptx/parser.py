"""Inline PTX as text: what an asm text says, with names, scopes and labels resolved.

Blocks in braces have names of their own, as in PTX, and a label or register of an outer block can be
used inside. Branches get the index of the instruction that they go to.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from interlace.runtime.interpreter.inline_ptx.syntax import (
    Address,
    InlineAssemblyError,
    Instruction,
    Literal,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Vector,
    error,
)
from interlace.runtime.interpreter.inline_ptx.types import TYPES


@dataclass
class Code:
    instructions: list[Instruction]
    slots: int


@dataclass
class _Scope:
    registers: dict[str, Register] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    branches: list[tuple[Instruction, str]] = field(default_factory=list)


_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_GUARD = re.compile(r"@\s*(!?)\s*([^\s!]+)\s+(.*)", re.DOTALL)
_DECLARED = re.compile(r"([A-Za-z_$%][\w$]*)(?:<(\d+)>)?")
_OFFSET = re.compile(r"([^\s+]+)\s*\+\s*(-?\w+)")
_INTEGER = re.compile(r"(-?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0([0-7]+)|([1-9]\d*|0))U?")
_DECIMAL = re.compile(r"-?\d+(?:\.\d*(?:[eE][+-]?\d+)?|[eE][+-]?\d+)")
_HEXADECIMAL = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_SPECIAL = re.compile(r"%[a-z]\w*(?:\.[xyz])?|WARP_SZ")


def parse(asm: str, operands: Sequence[Register]) -> Code:
    """Parse an asm text whose operands ``$0``, ``$1``, ... are the given registers."""
    return _Parser(operands).parse(asm)


class _Parser:
    def __init__(self, operands: Sequence[Register]) -> None:
        self._operands = operands
        self._slots = max((register.slot + 1 for register in operands), default=0)
        self._scopes = [_Scope()]
        self._instructions: list[Instruction] = []
        self._line, self._text = 1, ""

    def parse(self, asm: str) -> Code:
        asm = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n") or " ", asm)
        for self._line, self._text in _statements(asm.replace("${:uid}", "0")):
            text = self._text
            if text == "{":
                self._scopes.append(_Scope())
            elif text == "}":
                self._close()
            elif text.endswith(":"):
                self._define(self._scopes[-1].labels, text[:-1].rstrip(), len(self._instructions))
            elif text.startswith("."):
                self._declare(text)
            else:
                self._instructions.append(self._instruction(text))
        if len(self._scopes) > 1:
            raise self._error("a '{' is never closed")
        for instruction, label in self._resolve(self._scopes[0]):
            raise instruction.error(f"label '{label}' is not defined")
        return Code(self._instructions, self._slots)

    def _error(self, problem: str) -> InlineAssemblyError:
        return error(problem, self._line, self._text)

    def _close(self) -> None:
        if len(self._scopes) == 1:
            raise self._error("'}' without '{'")
        self._scopes[-2].branches += self._resolve(self._scopes.pop())

    @staticmethod
    def _resolve(scope: _Scope) -> list[tuple[Instruction, str]]:
        """Give branches their targets; returns those whose label is further out."""
        left = []
        for instruction, label in scope.branches:
            if label in scope.labels:
                instruction.target = scope.labels[label]
            else:
                left.append((instruction, label))
        return left

    def _define(self, names: dict[str, int], name: str, value: int) -> None:
        if name in names:
            raise self._error(f"'{name}' is defined twice")
        names[name] = value

    def _declare(self, text: str) -> None:
        words = text.split(None, 2)
        if words[0] != ".reg":
            raise self._error(f"directive '{words[0]}' is not known to the interpreter")
        kind = TYPES.get(words[1].lstrip(".")) if len(words) == 3 else None
        if kind is None:
            raise self._error("'.reg' needs one type of 1 to 64 bits and names")
        scope = self._scopes[-1].registers
        for declared in words[2].split(","):
            match = _DECLARED.fullmatch(declared.strip())
            if match is None:
                raise self._error(f"'{declared.strip()}' is no name of a register")
            count = [""] if match[2] is None else map(str, range(int(match[2])))
            for name in (match[1] + number for number in count):
                if name in scope:
                    raise self._error(f"register '{name}' is declared twice")
                scope[name] = Register(name, self._slots, kind.bits)
                self._slots += 1

    def _instruction(self, text: str) -> Instruction:
        guard, negated, rest = None, False, text
        if match := _GUARD.fullmatch(text):
            guard, negated, rest = self._register(match[2]), bool(match[1]), match[3]
            if guard is None or guard.bits != 1:
                raise self._error(f"'{match[2]}' is not a declared predicate")
        opcode, _, arguments = rest.partition(" ")
        mnemonic, *qualifiers = opcode.split(".")
        parts = _split(arguments)
        found = Instruction(opcode, mnemonic, qualifiers, [], self._line, text, guard, negated)
        if mnemonic == "bra":
            if len(parts) != 1:
                raise self._error("'bra' takes one label")
            self._scopes[-1].branches.append((found, parts[0]))
            return found
        try:
            found.operands = [self._operand(part) for part in parts]
        except InlineAssemblyError as problem:
            found.problem = problem
        return found

    def _operand(self, text: str) -> Operand:
        if text == "_":
            return Sink()
        if text[:1] == "[" and text[-1] == "]":
            return self._address(text[1:-1].strip())
        if text[:1] == "{" and text[-1] == "}":
            return Vector(tuple(self._operand(part) for part in _split(text[1:-1])))
        if "|" in text:
            first, _, second = text.partition("|")
            return Pair(self._operand(first.strip()), self._operand(second.strip()))
        if text.startswith("!"):
            predicate = self._register(text[1:].strip())
            if predicate is None or predicate.bits != 1:
                raise self._error(f"'{text[1:]}' is not a declared predicate")
            return Negated(predicate)
        found = self._register(text) or number(text)
        if found is not None:
            return found
        if _SPECIAL.fullmatch(text):
            return Special(text)
        raise self._error(f"'{text}' is not a declared register")

    def _address(self, text: str) -> Address:
        offset = 0
        if match := _OFFSET.fullmatch(text):
            literal = number(match[2])
            if not isinstance(literal, Literal) or not isinstance(literal.value, int):
                raise self._error(f"the offset in '[{text}]' must be a whole number")
            text, offset = match[1], literal.value
        return Address(self._operand(text), offset)

    def _register(self, name: str) -> Register | None:
        if match := re.fullmatch(r"\$\{?(\d+)\}?", name):
            if int(match[1]) >= len(self._operands):
                raise self._error(f"there are {len(self._operands)} operands and no '{name}'")
            return self._operands[int(match[1])]
        for scope in reversed(self._scopes):
            if name in scope.registers:
                return scope.registers[name]
        return None


def number(text: str) -> Literal | None:
    """A literal of PTX: ``-12``, ``0x1F``, ``1.5``, ``0f3F800000``; None if it is none."""
    if match := _INTEGER.fullmatch(text):
        sign, *digits = match.groups()
        value = next(int(d, base) for d, base in zip(digits, (16, 2, 8, 10), strict=True) if d)
        return Literal(-value if sign else value)
    if match := _HEXADECIMAL.fullmatch(text):
        raw = bytes.fromhex(match[1] or match[2])
        value = struct.unpack(">f" if match[1] else ">d", raw)[0]
        return Literal(value, (8 * len(raw), int.from_bytes(raw, "big")))
    return Literal(float(text)) if _DECIMAL.fullmatch(text) else None


def _statements(asm: str) -> Iterator[tuple[int, str]]:
    """(line, text) of braces, labels and instructions; no comments are left in ``asm``."""
    at = 0
    while at < len(asm):
        if asm[at].isspace() or asm[at] == ";":
            at += 1
            continue
        line = asm.count("\n", 0, at) + 1
        if asm[at] in "{}":
            end = at + 1
        elif match := _LABEL.match(asm, at):
            end = match.end()
        else:
            end = asm.find(";", at)
            if end < 0:
                raise error("a ';' is missing", line, " ".join(asm[at:].split()))
        yield line, " ".join(asm[at:end].split())
        at = end


def _split(text: str) -> list[str]:
    """Operands, which commas separate outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()] if text.strip() else []
