"""The instructions of a piece of PTX, with names, scopes and labels resolved.

Blocks in braces have names of their own, as in PTX, and a label or register of an outer block can be
used inside. A vector, and a register of 128 bits, is several registers; as an operand, those in braces.
Branches get the index of the instruction that they go to.

A function's instructions stand where it is called, with registers of their own, and go on behind
themselves instead of returning. Its parameters are the caller's, so nothing is copied; its memory lies
above the caller's, where that of the next function lies, too.
"""

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from interlace.runtime.ptx.calls import called
from interlace.runtime.ptx.instruction import CARRY, Instruction, Register, Symbol, error, split
from interlace.runtime.ptx.text.module_text import PtxFunction
from interlace.runtime.ptx.text.variables import Variable, declared
from interlace.runtime.ptx.types import PREDICATE, TYPES, ScalarType

MOST_INSTRUCTIONS = 500_000  # of a kernel with all that it calls
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_GUARD = re.compile(r"@\s*(!?)\s*([^\s!]+)\s+(.*)", re.DOTALL)
_RETURN = re.compile(r"(@.* )?ret(\.uni)?")
_REGISTERS = re.compile(r"\.reg(?: ?\.v([24]))? ?\.(\w+) (.+)")
_DIRECTIVE = re.compile(r"\.\w+")
_COMPONENTS, _HALVES = (".x", ".y", ".z", ".w"), (".low", ".high")  # of a vector, of 128 bits
_DECLARED = re.compile(r"([A-Za-z_$%][\w$]*)(?:<(\d+)>)?")
_END, _BEHIND = "<end>", "<behind>"  # labels: of a text, and of a call that some threads skip


class _Names(NamedTuple):
    """What is known where the parser is."""

    registers: ChainMap[str, Register]
    symbols: ChainMap[str, Symbol]
    labels: ChainMap[str, int]
    vectors: ChainMap[str, str]

    def inside(self) -> "_Names":
        registers, symbols, labels, vectors = self
        children = registers.new_child(), symbols.new_child(), labels.new_child()
        return _Names(*children, vectors.new_child())

    def outside(self) -> "_Names":
        registers, symbols, labels, vectors = self
        return _Names(registers.parents, symbols.parents, labels.parents, vectors.parents)


class Parser:
    """A parser of one text whose operands ``$0``, ``$1``, ... are given registers.

    ``kinds`` are the dtypes of all slots, as far as the text is read. A whole kernel has ``symbols``, names
    of memory, ``parameters``, and ``functions`` that it may call, those of ``pointers`` by an address, too;
    inline PTX has none. ``frame``: the bytes of memory that a thread needs for what is declared.
    """

    def __init__(
        self,
        operands: Sequence[Register],
        symbols: Mapping[str, Symbol] | None = None,
        parameters: Mapping[str, ScalarType] | None = None,
        functions: Mapping[str, PtxFunction] | None = None,
        pointers: Mapping[str, int] | None = None,
    ) -> None:
        slots = {register.slot: register.dtype for register in operands}
        unused = np.dtype(np.uint8)  # the number of a tied operand
        self.kinds = [slots.get(slot, unused) for slot in range(max(slots, default=-1) + 1)]
        self.frame = self._top = self._count = 0
        self._whole, self._outside = symbols is not None, dict(symbols or {})
        self._parameters, self._functions = parameters, functions or {}
        self._pointers = pointers or {}
        for name, number in self._pointers.items():
            self._outside[name] = Symbol("function", number, 0)
        self._carry = self._register(CARRY, PREDICATE)
        self._names = self._fresh({register.name: register for register in operands}, {})
        self._callers: list[str] = []
        self._line, self._text = 1, ""

    def _fresh(self, registers: dict[str, Register], symbols: dict[str, Symbol]) -> _Names:
        own = ChainMap({**registers, CARRY: self._carry})
        return _Names(own, ChainMap(symbols, self._outside), ChainMap(), ChainMap())

    def instructions(self, asm: str, line: int = 1) -> Iterator[Instruction]:
        """One by one, when what is declared before is known. Branches have no target before the end."""
        asm = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n") or " ", asm)
        asm = re.sub(r"\$\{(\d+)\}", r"$\1", asm.replace("${:uid}", "0"))
        yield from self._body(asm, line)

    def _body(self, asm: str, line: int) -> Iterator[Instruction]:
        branches: list[tuple[Instruction, ChainMap[str, int]]] = []
        tables: dict[str, list[str]] = {}
        label, tops = "", list[int]()
        for self._line, self._text in _statements(asm, line):
            text = self._text
            if text == "{":
                self._names = self._names.inside()
                tops.append(self._top)
            elif text == "}":
                if not tops:
                    raise self._error("'}' without '{'")
                self._names, self._top = self._names.outside(), tops.pop()
            elif text.endswith(":"):
                label = text[:-1].rstrip()
                if label in self._names.labels.maps[0]:
                    raise self._error(f"'{label}' is defined twice")
                self._names.labels[label] = self._count
            elif text.startswith(".branchtargets"):
                tables[label] = split(text.partition(" ")[2])
            elif text.startswith("."):
                self._declare(text)
            else:
                if self._callers and (match := _RETURN.fullmatch(text)):
                    text = f"{match[1] or ''}bra {_END}"
                found = self._instruction(text)
                calls = found.mnemonic == "call"
                function = self._function(found) if calls else None
                if found.mnemonic in ("bra", "brx"):
                    branches.append((found, self._names.labels))
                if calls and self._whole and called(found)[1] in self._names.registers:
                    yield from self._chosen(found)
                elif function is None:
                    yield self._counted(found)
                else:
                    yield from self._inlined(found, function)
        if tops:
            raise self._error("a '{' is never closed")
        self._names.labels[_END] = self._count
        for branch, labels in branches:
            label = branch.operands[-1]
            wanted = tables.get(label, [label])
            if missing := [each for each in wanted if each not in labels]:
                raise branch.error(f"label '{missing[0]}' is not defined")
            branch.targets = tuple(labels[each] for each in wanted)
            branch.target = branch.targets[0]

    def _counted(self, instruction: Instruction) -> Instruction:
        self._count += 1
        if self._count > MOST_INSTRUCTIONS:
            raise self._error(f"with what it calls, this is over {MOST_INSTRUCTIONS} instructions")
        return instruction

    def _error(self, problem: str) -> Exception:
        return error(problem, self._line, self._text)

    # -- declarations ------------------------------------------------------------------------------

    def _declare(self, text: str) -> None:
        word = _DIRECTIVE.match(text)[0]  # type: ignore[index]
        if word in (".pragma", ".callprototype", ".calltargets") or (
            word == ".shared" and self._whole
        ):
            return  # shared memory is there when a program begins
        if word in (".local", ".param") and self._whole:
            try:
                for variable in declared(text):
                    self._names.symbols[variable.name] = self._room(variable)
            except ValueError as problem:
                raise self._error(str(problem)) from None
            return
        if word != ".reg":
            raise self._error(f"directive '{word}' is not known to the interpreter")
        match = _REGISTERS.fullmatch(text)
        kind = TYPES.get("b64" if match[2] == "b128" else match[2]) if match else None
        if match is None or kind is None:
            raise self._error("'.reg' needs one type of 1 to 128 bits and names")
        parts = _HALVES if match[2] == "b128" else _COMPONENTS[: int(match[1] or 0)]
        registers, vectors = self._names.registers, self._names.vectors
        for given in match[3].split(","):
            found = _DECLARED.fullmatch(given.strip())
            if found is None:
                raise self._error(f"'{given.strip()}' is no name of a register")
            count = [""] if found[2] is None else map(str, range(int(found[2])))
            for name in (found[1] + number for number in count):
                if name in registers.maps[0] or name in vectors.maps[0]:
                    raise self._error(f"register '{name}' is declared twice")
                if parts:
                    vectors[name] = "{" + ", ".join(name + part for part in parts) + "}"
                for each in [name + part for part in parts] or [name]:
                    registers[each] = self._register(each, kind)

    def _register(self, name: str, kind: ScalarType) -> Register:
        register = Register(name, len(self.kinds), kind.bits)
        self.kinds.append(register.dtype)
        return register

    def _room(self, variable: Variable) -> Symbol:
        """In the memory of a thread."""
        if variable.nbytes is None:
            raise self._error(f"'{variable.name}' has no size")
        offset = -(-self._top // variable.align) * variable.align
        self._top = offset + variable.nbytes
        self.frame = max(self.frame, self._top)
        return Symbol(variable.space, offset, variable.nbytes)

    # -- instructions ------------------------------------------------------------------------------

    def _instruction(self, text: str) -> Instruction:
        guard = _GUARD.fullmatch(text)
        opcode, _, operands = (guard[3] if guard else text).partition(" ")
        given = [self._names.vectors.get(each, each) for each in split(operands)]
        found = Instruction(opcode, given, self._line, self._text, self._names.registers)
        found.parameters = self._parameters
        found.symbols = self._names.symbols if self._whole else None
        if guard:
            found.guard, found.wanted = found.predicate(guard[2]).slot, 0 if guard[1] else 1
        return found

    def _function(self, call: Instruction) -> PtxFunction | None:
        """What is called, if the text has it."""
        results, name, arguments = called(call)
        function = self._functions.get(name)
        if function is None or function.body is None:
            return None
        if name in self._callers:
            raise self._error(f"'{name}' calls itself; such functions are not known here")
        wanted = len(function.results), len(function.parameters)
        if (len(results), len(arguments)) != wanted:
            raise self._error(
                f"'{name}' gives {wanted[0]} results and takes {wanted[1]} parameters"
            )
        return function

    def _chosen(self, call: Instruction) -> Iterator[Instruction]:
        """One function after the other of those that the address may be, as the call has its shape."""
        results, pointer, arguments = called(call)
        guard, outer = (call.guard, call.wanted), self._names
        call.guard, self._names, jumps = -1, outer.inside(), list[Instruction]()
        other, skipped = "<other>", self._instruction(f"bra {_BEHIND}")
        self._names.registers[other] = self._register(other, PREDICATE)
        if guard[0] >= 0:
            skipped.guard, skipped.wanted = guard[0], 1 - guard[1]
            jumps.append(self._counted(skipped))
            yield skipped
        for name, number in self._pointers.items():
            function = self._functions[name]
            sizes = [[each.nbytes for each in of] for of in (function.results, function.parameters)]
            if name in self._callers or sizes != [*map(self._sizes, (results, arguments))]:
                continue
            yield self._counted(self._instruction(f"setp.ne.u64 {other}, {pointer}, {number}"))
            next_one = self._instruction(f"@{other} bra {_BEHIND}")
            yield self._counted(next_one)
            yield from self._inlined(call, function)
            jumps.append(self._counted(self._instruction(f"bra {_BEHIND}")))
            yield jumps[-1]
            next_one.target, next_one.targets = self._count, (self._count,)
        yield self._counted(self._instruction("trap"))
        for jump in jumps:
            jump.target, jump.targets = self._count, (self._count,)
        self._names = outer

    def _sizes(self, names: list[str]) -> list[int]:
        """In bytes, of parameters or registers."""
        symbols, registers = self._names.symbols, self._names.registers
        sizes = [symbols[n].nbytes if n in symbols else registers[n].bits // 8 for n in names]
        return sizes

    def _inlined(self, call: Instruction, function: PtxFunction) -> Iterator[Instruction]:
        outer, place, top = self._names, (self._line, self._text), self._top
        self._names = outer.inside()
        if call.guard >= 0:
            skip = self._instruction(f"bra {_BEHIND}")
            skip.guard, skip.wanted = call.guard, 1 - call.wanted
            yield self._counted(skip)
        registers, symbols, before, after = self._bound(call, function)
        yield from (self._counted(self._instruction(each)) for each in before)
        caller, self._names = self._names, self._fresh(registers, symbols)
        self._callers.append(function.name)
        yield from self._body(function.body or "", function.line)
        self._callers.pop()
        self._names, (self._line, self._text), self._top = caller, place, top
        yield from (self._counted(self._instruction(each)) for each in after)
        if call.guard >= 0:
            skip.target, skip.targets = self._count, (self._count,)
        self._names = outer

    def _bound(
        self, call: Instruction, function: PtxFunction
    ) -> tuple[dict[str, Register], dict[str, Symbol], list[str], list[str]]:
        """Of a function the registers and symbols that are its parameters, by name.

        And the instructions that fill those that are not the caller's, and that hand on results.
        """
        results, _, arguments = called(call)
        names = self._names
        registers: dict[str, Register] = {}
        symbols: dict[str, Symbol] = {}
        moves: tuple[list[str], list[str]] = [], []
        pairs = zip((*function.results, *function.parameters), results + arguments, strict=True)
        for number, (formal, actual) in enumerate(pairs):
            there, own, later = names.symbols.get(actual), f"<{number}>", number < len(results)
            passed = there is not None and there.space == "param"
            kind = "pred" if formal.kind.bits == 1 else f"b{formal.kind.bits}"
            if formal.space == "reg":
                registers[formal.name] = names.registers[own] = self._register(own, formal.kind)
                put, get = f"mov.{kind} {own}, {actual}", f"mov.{kind} {actual}, {own}"
                if passed:
                    put, get = (
                        f"ld.param.{kind} {own}, [{actual}]",
                        f"st.param.{kind} [{actual}], {own}",
                    )
            elif there is not None and passed:
                if there.nbytes < (formal.nbytes or 0):
                    raise self._error(
                        f"'{actual}' is smaller than '{formal.name}' of '{function.name}'"
                    )
                symbols[formal.name] = there
                continue
            else:
                symbols[formal.name] = names.symbols[own] = self._room(formal)
                put, get = (
                    f"st.param.{kind} [{own}], {actual}",
                    f"ld.param.{kind} {actual}, [{own}]",
                )
            moves[later].append(get if later else put)
        return registers, symbols, *moves


def _statements(asm: str, line: int) -> Iterator[tuple[int, str]]:
    """(line, text) of braces, labels and instructions; no comments are left in ``asm``."""
    at = 0
    while at < len(asm):
        if asm[at].isspace() or asm[at] == ";":
            line += asm[at] == "\n"
            at += 1
            continue
        if asm[at] in "{}":
            end = at + 1
        elif match := _LABEL.match(asm, at):
            end = match.end()
        else:
            end = asm.find(";", at)
            if end < 0:
                raise error("a ';' is missing", line, " ".join(asm[at:].split()))
        yield line, " ".join(asm[at:end].split())
        line += asm.count("\n", at, end)
        at = end
