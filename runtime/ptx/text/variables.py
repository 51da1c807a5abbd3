"""Variables that PTX declares, in any state space, and what is in them in the beginning."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from interlace.runtime.ptx.instruction import InlineAssemblyError, number_of, split
from interlace.runtime.ptx.types import TYPES, ScalarType

_DECLARED = re.compile(
    r"\.(global|const|shared|local|param|reg) ?(?:\.attribute ?\([^)]*\) ?)?(?:\.align (\d+) ?)?"
    r"(?:\.v([248]) ?)?\.(\w+) ?(?:\.ptr(?: ?\.\w+(?: \d+)?)* )?([^\s.].*)"
)
_NAME = re.compile(r"([\w$%.]+) ?((?:\[ ?\w* ?\] ?)*)(?:= ?(.*))?")
_ADDRESS = re.compile(r"(?:generic ?\( ?([\w$%.]+) ?\)|([A-Za-z_$%][\w$%.]*)) ?(?:([+-]) ?(\d+))?")


@dataclass(frozen=True)
class Variable:
    """``nbytes`` is None where the text leaves the size open; ``initial``: values as it has them.

    ``extern``: another text has it.
    """

    name: str
    space: str
    kind: ScalarType
    align: int
    nbytes: int | None
    initial: tuple[str, ...] = ()
    extern: bool = False

    def filled(self, address: Callable[[str], int | None]) -> bytes:
        """Its memory in the beginning; ``address`` of another variable, None if there is none."""
        parts = [self._filled_with(each, address) for each in self.initial]
        return b"".join(parts).ljust(self.nbytes or 0, b"\0")

    def _filled_with(self, text: str, address: Callable[[str], int | None]) -> bytes:
        bits = number_of(text, self.kind)
        if bits is None and (match := _ADDRESS.fullmatch(text)):
            base = address(match[1] or match[2])
            if base is not None and self.kind.bits == 64:
                bits = base + int((match[3] or "") + (match[4] or "0"))
        if bits is None:
            raise InlineAssemblyError(f"PTX: {self.name} begins as '{text}', which is not known")
        return bits.to_bytes(self.kind.bits // 8, "little")


def declared(text: str) -> list[Variable]:
    """The variables of one declaration, without its ';'. ValueError says what is wrong with it."""
    match = _DECLARED.fullmatch(text := " ".join(text.split()))
    kind = TYPES.get(match[4]) if match else None
    if match is None or kind is None:
        raise ValueError(f"'{text[:80]}' declares nothing that is known")
    size = kind.bits // 8 * int(match[3] or 1)
    found = []
    for each in split(match[5]):
        name = _NAME.fullmatch(each)
        if name is None:
            raise ValueError(f"'{each[:80]}' is no name of a variable")
        initial = tuple(_flat(name[3] or ""))
        extents = re.findall(r"\[ ?(\w*) ?\]", name[2])
        nbytes: int | None = size * math.prod(int(each or "0", 0) for each in extents)
        if extents and not extents[0]:  # as many as it takes
            inner = size * math.prod(int(each, 0) for each in extents[1:])
            nbytes = -(-len(initial) * kind.bits // 8 // inner) * inner if initial else None
        found.append(Variable(name[1], match[1], kind, int(match[2] or size), nbytes, initial))
    return found


def _flat(text: str) -> list[str]:
    """The values of an initialiser, whatever braces are around them."""
    return [part for part in (each.strip() for each in re.split(r"[{},]", text)) if part]
