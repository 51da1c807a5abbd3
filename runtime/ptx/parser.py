"""PTX as text: what it says, with names, scopes and labels resolved.

Blocks in braces have names of their own, as in PTX, and a label or register of an outer block can be
used inside. A vector, and a register of 128 bits, is several registers; as an operand, those in braces.
Branches get the index of the instruction that they go to.
"""

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from interlace.runtime.ptx.instruction import Instruction, Register, error, split
from interlace.runtime.ptx.types import TYPES, ScalarType

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_GUARD = re.compile(r"@\s*(!?)\s*([^\s!]+)\s+(.*)", re.DOTALL)
_REGISTERS = re.compile(r"\.reg(?: ?\.v([24]))? ?\.(\w+) (.+)")
_COMPONENTS, _HALVES = (".x", ".y", ".z", ".w"), (".low", ".high")  # of a vector, of 128 bits
_DECLARED = re.compile(r"([A-Za-z_$%][\w$]*)(?:<(\d+)>)?")


class Parser:
    """A parser of one text whose operands ``$0``, ``$1``, ... are given registers.

    ``kinds`` are the dtypes of all slots, as far as the text is read. A whole kernel has ``symbols``,
    addresses in shared memory by name, and ``parameters``; inline PTX has neither.
    """

    def __init__(
        self,
        operands: Sequence[Register],
        symbols: Mapping[str, int] | None = None,
        parameters: Mapping[str, ScalarType] | None = None,
    ) -> None:
        slots = {register.slot: register.dtype for register in operands}
        unused = np.dtype(np.uint8)  # the number of a tied operand
        self.kinds = [slots.get(slot, unused) for slot in range(max(slots, default=-1) + 1)]
        self._registers = ChainMap({register.name: register for register in operands})
        self._symbols, self._parameters = symbols, parameters
        self._labels: ChainMap[str, int] = ChainMap()
        self._vectors: ChainMap[str, str] = ChainMap()
        self._line, self._text = 1, ""

    def instructions(self, asm: str) -> Iterator[Instruction]:
        """One by one, when what is declared before is known. Branches have no target before the end."""
        asm = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n") or " ", asm)
        asm = re.sub(r"\$\{(\d+)\}", r"$\1", asm.replace("${:uid}", "0"))
        branches, count, label = [], 0, ""
        tables: dict[str, list[str]] = {}
        for self._line, self._text in _statements(asm):
            text = self._text
            if text == "{":
                self._registers = self._registers.new_child()
                self._labels, self._vectors = self._labels.new_child(), self._vectors.new_child()
            elif text == "}":
                if len(self._labels.maps) == 1:
                    raise self._error("'}' without '{'")
                self._registers, self._labels = self._registers.parents, self._labels.parents
                self._vectors = self._vectors.parents
            elif text.endswith(":"):
                label = text[:-1].rstrip()
                if label in self._labels.maps[0]:
                    raise self._error(f"'{label}' is defined twice")
                self._labels[label] = count
            elif text.startswith(".branchtargets"):
                tables[label] = split(text.partition(" ")[2])
            elif text.startswith("."):
                self._declare(text)
            else:
                found = self._instruction(text)
                if found.mnemonic in ("bra", "brx"):
                    branches.append((found, self._labels))
                yield found
                count += 1
        if len(self._labels.maps) > 1:
            raise self._error("a '{' is never closed")
        for branch, labels in branches:
            label = branch.operands[-1]
            wanted = tables.get(label, [label])
            if missing := [each for each in wanted if each not in labels]:
                raise branch.error(f"label '{missing[0]}' is not defined")
            branch.targets = tuple(labels[each] for each in wanted)
            branch.target = branch.targets[0]

    def _error(self, problem: str) -> Exception:
        return error(problem, self._line, self._text)

    def _declare(self, text: str) -> None:
        words = text.split(None, 1)
        if words[0] == ".pragma":
            return
        if words[0] != ".reg":
            raise self._error(f"directive '{words[0]}' is not known to the interpreter")
        match = _REGISTERS.fullmatch(text)
        kind = TYPES.get("b64" if match[2] == "b128" else match[2]) if match else None
        if match is None or kind is None:
            raise self._error("'.reg' needs one type of 1 to 128 bits and names")
        parts = _HALVES if match[2] == "b128" else _COMPONENTS[: int(match[1] or 0)]
        for declared in match[3].split(","):
            found = _DECLARED.fullmatch(declared.strip())
            if found is None:
                raise self._error(f"'{declared.strip()}' is no name of a register")
            count = [""] if found[2] is None else map(str, range(int(found[2])))
            for name in (found[1] + number for number in count):
                if name in self._registers.maps[0] or name in self._vectors.maps[0]:
                    raise self._error(f"register '{name}' is declared twice")
                if parts:
                    self._vectors[name] = "{" + ", ".join(name + part for part in parts) + "}"
                for each in [name + part for part in parts] or [name]:
                    register = Register(each, len(self.kinds), kind.bits)
                    self._registers[each] = register
                    self.kinds.append(register.dtype)

    def _instruction(self, text: str) -> Instruction:
        guard = _GUARD.fullmatch(text)
        opcode, _, operands = (guard[3] if guard else text).partition(" ")
        given = [self._vectors.get(each, each) for each in split(operands)]
        found = Instruction(opcode, given, self._line, text, self._registers)
        found.symbols, found.parameters = self._symbols, self._parameters
        if guard:
            found.guard, found.wanted = found.predicate(guard[2]).slot, 0 if guard[1] else 1
        return found


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
