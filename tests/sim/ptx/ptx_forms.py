"""The tables of ``forms.txt``, read: texts of PTX, and what each must give."""

import pathlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_FILE = pathlib.Path(__file__).with_name("forms.txt")


class Form(NamedTuple):
    """One row. ``memory`` and ``after``: 32-bit words from the first on, before and afterwards.

    ``others``: the memory of a second rank, where an address is one of both ranks'.
    """

    text: str
    given: Sequence[int]
    expected: int
    memory: Sequence[int]
    after: Sequence[int]
    arch: int = 80
    others: Sequence[int] = ()


class LaneForm(NamedTuple):
    """Register %r1 is the lane, %r2 what it has been given; ``expected`` are the lanes' %r3, in bits."""

    text: str
    expected: Sequence[int]


def table(name: str) -> list[list[str]]:
    """The cells of each row of a table."""
    _, _, text = _FILE.read_text().partition(f"## {name}\n")
    return [row.split(" | ") for row in text.partition("\n\n")[0].splitlines()]


def bits(*values: float, dtype: torch.dtype = torch.float32) -> int:
    """Of several numbers, the first in the lowest bits."""
    octets = torch.tensor(values, dtype=torch.float32).to(dtype).view(torch.uint8)
    return int.from_bytes(bytes(octets.tolist()), "little")


LANES = range(32)
GIVEN = [lane * 2654435761 % 2**32 for lane in LANES]
EVEN, ODD = 0x55555555, 0xAAAAAAAA
_OF_ODD = "and.b32 %r4, %r1, 1; setp.ne.s32 %p1, %r4, 0;"
_OF_HALF = f"{_OF_ODD} selp.b32 %r5, {ODD}, {EVEN}, %p1;"
_NAMES: dict[str, Any] = {
    "F": bits,
    "H": lambda *values: bits(*values, dtype=torch.float16),
    "B": lambda *values: bits(*values, dtype=torch.bfloat16),
    "E4M3": lambda *values: bits(*values, dtype=torch.float8_e4m3fn),
    "E5M2": lambda *values: bits(*values, dtype=torch.float8_e5m2),
    "D": lambda value: int.from_bytes(struct.pack("<d", value), "little"),
    "W": lambda value: value % 2**32,
    "NAN": float("nan"),
    "INF": float("inf"),
    "THIRD": 1 / 3,
    "MINUS": 2**32 - 1,
    "LANES": LANES,
    "GIVEN": GIVEN,
    "EVEN": EVEN,
    "ODD": ODD,
}


def _value(cell: str) -> Any:
    return eval(cell, _NAMES)


def _several(cell: str) -> list[int]:
    value = _value(cell) if cell else []
    return list(value) if isinstance(value, list | tuple | range) else [value]


def _form(cells: Sequence[str]) -> Form:
    text, given, expected, memory, after, arch, *_ = [*cells, *[""] * 6]
    numbers = _several(given), _value(expected), _several(memory), _several(after)
    return Form(text, *numbers, int(arch or 80))


def _form_of_ranks(cells: Sequence[str]) -> Form:
    text, given, expected, first, second, after, *_ = [*cells, ""]
    form = _form([text, given, expected, first, after, "90"])
    return form._replace(others=_several(second))


KINDS = ("arithmetic", "whole", "conversions", "comparisons", "accesses", "ordering", "atomics")
EVERYWHERE = {kind: [_form(cells) for cells in table(kind)] for kind in KINDS}
"""Those that run in the interpreter and in a kernel."""
OF_LANES = [
    LaneForm(text.replace("$odd", _OF_ODD).replace("$half", _OF_HALF), _value(expected))
    for text, expected, *_ in table("lanes")
]
"""Those of lanes that run together, and of shared memory."""
OF_ALL_RANKS = [_form_of_ranks(cells) for cells in table("ranks")]
"""Those at multicast addresses; the second rank does nothing."""
FORMS = [*(form for forms in EVERYWHERE.values() for form in forms), *OF_ALL_RANKS]
