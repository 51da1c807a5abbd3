"""PTX as text: the declarations of a module, and the instructions of a kernel and of functions it calls.

Blocks in braces have their own names, as in PTX, and may use a label or register of an outer block. A
vector, or a register of 128 bits, is several registers; as an operand it is registers in braces.

A function's instructions are inlined at the call, with their own registers. Instead of a return they
continue after the call. The parameters are the caller's, so nothing is copied. The function's memory lies
above the caller's memory, at the same place as the memory of the next called function. A body is parsed
only when a kernel needs it, so a module may contain much that is not known here.
"""

import math
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from interlace.runtime.core.errors import InlineAssemblyError
from interlace_verify.ptx.calls import call_parts
from interlace_verify.ptx.instruction import (
    CARRY,
    Instruction,
    Register,
    Symbol,
    error,
    number_of,
    split,
)
from interlace_verify.ptx.types import PREDICATE, TYPES, ScalarType

_DECLARED = re.compile(
    r"\.(global|const|shared|local|param|reg) ?(?:\.attribute ?\([^)]*\) ?)?(?:\.align (\d+) ?)?"
    r"(?:\.v([248]) ?)?\.(\w+) ?(?:\.ptr(?: ?\.\w+(?: \d+)?)* )?([^\s.].*)"
)
_NAME = re.compile(r"([\w$%.]+) ?((?:\[ ?\w* ?\] ?)*)(?:= ?(.*))?")
_ADDRESS = re.compile(r"(?:generic ?\( ?([\w$%.]+) ?\)|([A-Za-z_$%][\w$%.]*)) ?(?:([+-]) ?(\d+))?")


@dataclass(frozen=True)
class Variable:
    """A variable. ``nbytes``: None if the text leaves it open. ``extern``: another text defines it."""

    name: str
    space: str
    kind: ScalarType
    align: int
    nbytes: int | None
    initial: tuple[str, ...] = ()
    extern: bool = False

    def filled(self, address: Callable[[str], int | None]) -> bytes:
        """Return its initial memory. ``address`` returns the address of another variable, or None."""
        parts = [self._filled_with(each, address) for each in self.initial]
        return b"".join(parts).ljust(self.nbytes or 0, b"\0")

    def _filled_with(self, text: str, address: Callable[[str], int | None]) -> bytes:
        bits = number_of(text, self.kind)
        if bits is None and (match := _ADDRESS.fullmatch(text)):
            base = address(match[1] or match[2])
            if base is not None and self.kind.bits == 64:
                bits = base + int((match[3] or "") + (match[4] or "0"))
        if bits is None:
            raise InlineAssemblyError(
                f"PTX: the initial value of {self.name} must be a number or, in 64 bits, the address of a "
                f"variable of the module; got '{text}'"
            )
        return bits.to_bytes(self.kind.bits // 8, "little")


def declare(text: str) -> list[Variable]:
    """Return the variables of one declaration without its ';'. Raise ValueError for a wrong one."""
    match = _DECLARED.fullmatch(text := " ".join(text.split()))
    kind = TYPES.get(match[4]) if match else None
    if match is None or kind is None:
        raise ValueError(f"'{text[:80]}' is not a known declaration")
    size = kind.bits // 8 * int(match[3] or 1)
    found = []
    for each in split(match[5]):
        name = _NAME.fullmatch(each)
        if name is None:
            raise ValueError(f"'{each[:80]}' is not a name of a variable")
        values = (value.strip() for value in re.split(r"[{},]", name[3] or ""))
        initial = tuple(filter(None, values))
        extents = re.findall(r"\[ ?(\w*) ?\]", name[2])
        nbytes: int | None = size * math.prod(int(extent or "0", 0) for extent in extents)
        if extents and not extents[0]:  # as many elements as there are values
            inner = size * math.prod(int(extent, 0) for extent in extents[1:])
            nbytes = -(-len(initial) * kind.bits // 8 // inner) * inner if initial else None
        found.append(Variable(name[1], match[1], kind, int(match[2] or size), nbytes, initial))
    return found


_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_MODULE_DIRECTIVE = re.compile(  # code may follow it on its line
    r"(?<![\w%$.])\.(?:"
    r"loc[ \t]+\d+[ \t]+\d+[ \t]+\d+(?:[ \t]*,[ \t]*(?:function_name[^,;\n]+|inlined_at[ \t\d]+))*"
    r'|file[ \t]+\d+[ \t]+"[^"\n]*"?(?:[ \t]*,[ \t]*\d+)*'
    r"|version[ \t]+[\d.]+|target[ \t]+\w+(?:[ \t]*,[ \t]*\w+)*|address_size[ \t]+\d+)"
)
_FUNCTION = re.compile(
    r"\.(entry|func)\s*(?:\.attribute\s*\([^)]*\)\s*)?(?:\(([^)]*)\))?\s*([\w$%]+)\s*(?:\(([^)]*)\))?(.*)",
    re.DOTALL,
)
_VARIABLE = re.compile(r"\.(global|const|shared)\b.*", re.DOTALL)
_ALIAS = re.compile(r"\.alias\s+([\w$%]+)\s*,\s*([\w$%]+)")
_WORDS = re.compile(r"[\w$%]+")
_TAKEN = re.compile(r"\bmov\.[bus]64\s+[^,;]+,\s*([\w$%]+)")


@dataclass(frozen=True)
class PtxFunction:
    """A function. ``body`` begins in ``line``; None if it is only declared. ``directives`` precede it."""

    name: str
    results: tuple[Variable, ...]
    parameters: tuple[Variable, ...]
    directives: str
    body: str | None
    line: int

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(_WORDS.findall(self.body or ""))


@dataclass(frozen=True)
class ModuleText:
    kernels: Mapping[str, PtxFunction]
    functions: Mapping[str, PtxFunction]
    variables: Mapping[str, Variable]

    def kernel(self, name: str | None) -> PtxFunction:
        """Return the kernel ``name``, or the only one for None. An error lists the kernels."""
        if name is None and len(self.kernels) == 1:
            return next(iter(self.kernels.values()))
        if name in self.kernels:
            return self.kernels[name or ""]
        wanted = "name the kernel to run" if name is None else ""
        raise InlineAssemblyError(
            f"PTX: {wanted or f'there is no kernel {name!r}'}; there are: "
            f"{', '.join(self.kernels) or 'none'}"
        )

    def reached(self, kernel: PtxFunction) -> list[PtxFunction]:
        """Return ``kernel`` and all functions that it may call, also by addresses in variables."""
        found = [kernel]
        for each in found:
            named = {*each.words, *self._in_values(each.words)}
            called_functions = (
                self.functions[name] for name in sorted(named & self.functions.keys())
            )
            found += [other for other in called_functions if other not in found]
        return found

    def named_by(self, functions: list[PtxFunction]) -> dict[str, Variable]:
        """Return the variables that ``functions`` or the values of these variables name."""
        words = frozenset().union(*(function.words for function in functions))
        names = {*words, *self._in_values(words)}
        return {name: each for name, each in self.variables.items() if name in names}

    def pointed_to(self, functions: list[PtxFunction]) -> set[str]:
        """Return the functions whose address ``functions`` or a variable takes."""
        taken = {name for each in functions for name in _TAKEN.findall(each.body or "")}
        words = frozenset().union(*(function.words for function in functions))
        return (taken | self._in_values(words)) & self.functions.keys()

    def _in_values(self, words: frozenset[str]) -> set[str]:
        """Return the names in the initial values of variables among ``words``, and so on."""
        found = [name for name in self.variables if name in words]
        named: set[str] = set()
        for name in found:
            more = {*_WORDS.findall(" ".join(self.variables[name].initial))} - named
            named |= more
            found += [each for each in more if each in self.variables]
        return named


def read_text(ptx: str) -> ModuleText:
    kernels: dict[str, PtxFunction] = {}
    functions: dict[str, PtxFunction] = {}
    variables: dict[str, Variable] = {}
    for line, head, body in _declarations(_MODULE_DIRECTIVE.sub("", _strip_comments(ptx))):
        if match := _FUNCTION.search(head):
            results, parameters = (_formals(each or "", line) for each in (match[2], match[4]))
            function = PtxFunction(match[3], results, parameters, match[5], body, line)
            if match[1] == "entry":
                kernels[function.name] = function
            elif body is not None or function.name not in functions:
                functions[function.name] = function
        elif match := _ALIAS.match(head):
            functions[match[1]] = functions[match[2]]
        elif match := _VARIABLE.search(head):
            for variable in _declared(match[0]):
                extern = head.startswith(".extern")
                if not extern or variable.name not in variables:
                    variables[variable.name] = replace(variable, extern=extern)
    return ModuleText(kernels, functions, variables)


def _strip_comments(text: str) -> str:
    return _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n") or " ", text)


def _declarations(text: str) -> Iterator[tuple[int, str, str | None]]:
    """Yield (line of the body, the text before it, the body without its braces or None)."""
    at = 0
    while match := re.compile(r"[;{]").search(text, at):
        head, body, end = text[at : match.start()].strip(), None, match.end()
        if match[0] == "{" and "=" in head:
            end = text.find(";", end) + 1 or len(text)
            head = text[at : end - 1].strip()
        elif match[0] == "{":
            close = _closing(text, end)
            body, end = text[end:close], close + 1
        yield text.count("\n", 0, match.end()) + 1, head, body
        at = end


def _closing(text: str, at: int) -> int:
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, at):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.start()
    raise InlineAssemblyError("PTX: a '{' is never closed")


def _formals(text: str, line: int) -> tuple[Variable, ...]:
    try:
        return tuple(variable for each in split(text) for variable in declare(each))
    except ValueError as error:
        raise InlineAssemblyError(f"PTX: {error}; line {line}") from None


def _declared(text: str) -> list[Variable]:
    """Return [] for an unknown type: an instruction that uses the name reports that it is not declared."""
    try:
        return declare(text)
    except ValueError:
        return []


# -- instructions ------------------------------------------------------------------------------

MOST_INSTRUCTIONS = 500_000  # in a kernel with all functions that it calls
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_GUARD = re.compile(r"@\s*(!?)\s*([^\s!]+)\s+(.*)", re.DOTALL)
_RETURN = re.compile(r"(@.* )?ret(\.uni)?")
_REGISTERS = re.compile(r"\.reg(?: ?\.v([24]))? ?\.(\w+) (.+)")
_DIRECTIVE = re.compile(r"\.\w+")
_COMPONENTS, _HALVES = (".x", ".y", ".z", ".w"), (".low", ".high")  # for a vector, for 128 bits
_LISTED = re.compile(r"([A-Za-z_$%][\w$]*)(?:<(\d+)>)?")
_END, _BEHIND = "<end>", "<behind>"  # labels: the end of a text, and after a call that threads skip


class _Names(NamedTuple):
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

    ``kinds`` are the dtypes of all slots in the text read so far. A whole kernel also has ``symbols``
    (names of memory), ``parameters``, and ``functions`` that it may call; functions in ``pointers`` may be
    called by address. ``frame``: the bytes of a thread's memory that the declarations need.
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
        unused = np.dtype(np.uint8)  # the slot of a tied operand
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
        local_registers = ChainMap({**registers, CARRY: self._carry})
        return _Names(local_registers, ChainMap(symbols, self._outside), ChainMap(), ChainMap())

    def instructions(self, asm: str, line: int = 1) -> Iterator[Instruction]:
        """Yield instructions after their declarations. Branches get their targets at the end."""
        asm = re.sub(r"\$\{(\d+)\}", r"$\1", _strip_comments(asm).replace("${:uid}", "0"))
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
                if calls and self._whole and call_parts(found)[1] in self._names.registers:
                    yield from self._chosen(found)
                elif function is None:
                    yield self._counted(found)
                else:
                    yield from self._inline(found, function)
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
            raise self._error(f"the kernel and its calls exceed {MOST_INSTRUCTIONS} instructions")
        return instruction

    def _error(self, problem: str) -> Exception:
        return error(problem, self._line, self._text)

    # -- declarations ------------------------------------------------------------------------------

    def _declare(self, text: str) -> None:
        word = _DIRECTIVE.match(text)[0]  # type: ignore[index]
        if word in (".pragma", ".callprototype", ".calltargets") or (
            word == ".shared" and self._whole
        ):
            return  # shared memory exists before a program begins
        if word in (".local", ".param") and self._whole:
            try:
                for variable in declare(text):
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
        for declared in match[3].split(","):
            found = _LISTED.fullmatch(declared.strip())
            if found is None:
                raise self._error(f"'{declared.strip()}' is not a name of a register")
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
        parts = [self._names.vectors.get(each, each) for each in split(operands)]
        found = Instruction(opcode, parts, self._line, self._text, self._names.registers)
        found.parameters = self._parameters
        found.symbols = self._names.symbols if self._whole else None
        if guard:
            found.guard, found.wanted = found.predicate(guard[2]).slot, 0 if guard[1] else 1
        return found

    def _function(self, call: Instruction) -> PtxFunction | None:
        results, name, arguments = call_parts(call)
        function = self._functions.get(name)
        if function is None or function.body is None:
            return None
        if name in self._callers:
            raise self._error(f"'{name}' calls itself; recursion is not known here")
        wanted = len(function.results), len(function.parameters)
        if (len(results), len(arguments)) != wanted:
            raise self._error(
                f"'{name}' returns {wanted[0]} results and takes {wanted[1]} parameters"
            )
        return function

    def _chosen(self, call: Instruction) -> Iterator[Instruction]:
        """Inline, one after the other, all functions of the call's form that the address may mean."""
        results, pointer, arguments = call_parts(call)
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
            yield from self._inline(call, function)
            jumps.append(self._counted(self._instruction(f"bra {_BEHIND}")))
            yield jumps[-1]
            next_one.target, next_one.targets = self._count, (self._count,)
        yield self._counted(self._instruction("trap"))
        for jump in jumps:
            jump.target, jump.targets = self._count, (self._count,)
        self._names = outer

    def _sizes(self, names: list[str]) -> list[int]:
        symbols, registers = self._names.symbols, self._names.registers
        sizes = [symbols[n].nbytes if n in symbols else registers[n].bits // 8 for n in names]
        return sizes

    def _inline(self, call: Instruction, function: PtxFunction) -> Iterator[Instruction]:
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
        """Return a function's parameters by name, and moves that fill them and that return results."""
        results, _, arguments = call_parts(call)
        names = self._names
        registers: dict[str, Register] = {}
        symbols: dict[str, Symbol] = {}
        moves: tuple[list[str], list[str]] = [], []
        pairs = zip((*function.results, *function.parameters), results + arguments, strict=True)
        for number, (formal, actual) in enumerate(pairs):
            actual_symbol, fresh_name, later = (
                names.symbols.get(actual),
                f"<{number}>",
                number < len(results),
            )
            passed = actual_symbol is not None and actual_symbol.space == "param"
            kind = "pred" if formal.kind.bits == 1 else f"b{formal.kind.bits}"
            if formal.space == "reg":
                registers[formal.name] = names.registers[fresh_name] = self._register(
                    fresh_name, formal.kind
                )
                put, get = (
                    f"mov.{kind} {fresh_name}, {actual}",
                    f"mov.{kind} {actual}, {fresh_name}",
                )
                if passed:
                    put, get = (
                        f"ld.param.{kind} {fresh_name}, [{actual}]",
                        f"st.param.{kind} [{actual}], {fresh_name}",
                    )
            elif actual_symbol is not None and passed:
                if actual_symbol.nbytes < (formal.nbytes or 0):
                    raise self._error(
                        f"'{actual}' is smaller than '{formal.name}' of '{function.name}'"
                    )
                symbols[formal.name] = actual_symbol
                continue
            else:
                symbols[formal.name] = names.symbols[fresh_name] = self._room(formal)
                put, get = (
                    f"st.param.{kind} [{fresh_name}], {actual}",
                    f"ld.param.{kind} {actual}, [{fresh_name}]",
                )
            moves[later].append(get if later else put)
        return registers, symbols, *moves


def _statements(asm: str, line: int) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of braces, labels and instructions. ``asm`` has no comments."""
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
