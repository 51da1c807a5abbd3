"""The operands of an asm text: tensors into registers ``$0``, ``$1``, ... and back.

One execution of the text takes ``pack`` elements of every argument. Elements of less than 32 bits share
registers, the first in the lowest bits; a constraint's letter is the width of its register.
"""

import math
from typing import Any

import numpy as np

from interlace.runtime.compat.triton_interpreter import TensorHandle, triton_interpreter
from interlace.runtime.ptx.instruction import InlineAssemblyError, Register

_WIDTHS = {"r": 32, "f": 32, "l": 64, "d": 64, "h": 16, "b": 1}


class AsmOperands:
    """The registers of results and of inputs, by constraints such as ``"=r,l,0,~{memory}"``."""

    def __init__(self, constraints: str) -> None:
        self._constraints = constraints
        self.outputs: list[Register] = []
        self.inputs: list[Register] = []
        for given in filter(None, (part.strip() for part in constraints.split(","))):
            if given.startswith("~"):
                continue
            index = len(self.outputs) + len(self.inputs)
            letter = given.lstrip("=&")
            if given.startswith("=") and not self.inputs and letter in _WIDTHS:
                self.outputs.append(Register(f"${index}", index, _WIDTHS[letter]))
            elif given.isdecimal() and int(given) < len(self.outputs):
                tied = self.outputs[int(given)]
                self.inputs.append(Register(f"${index}", tied.slot, tied.bits))
            elif given in _WIDTHS:
                self.inputs.append(Register(f"${index}", index, _WIDTHS[given]))
            else:
                raise InlineAssemblyError(
                    f"inline PTX: constraint '{given}' of \"{constraints}\" is not known to the "
                    f"interpreter; known are {', '.join(_WIDTHS)}, with = for results, which come "
                    "first, the number of a result, and ~{...}"
                )

    def arguments(
        self, values: Any, shape: tuple[int, ...], pack: int, kinds: list[Any]
    ) -> list[list[Any]]:
        """All registers of every execution, with the arguments in theirs and 0 in the others."""
        count, left = divmod(math.prod(shape), pack)
        if left:
            raise InlineAssemblyError(f"inline PTX: shape {shape} is not a multiple of pack={pack}")
        columns = [column for value in values for column in _columns(value.data, shape, pack)]
        self._check("inputs", self.inputs, len(columns))
        groups = [[np.zeros(1, kind) for kind in kinds] for _ in range(count)]
        for register, column in zip(self.inputs, columns, strict=True):
            for registers, bits in zip(groups, column, strict=True):
                registers[register.slot][0] = bits & ((1 << register.bits) - 1)
        return groups

    def results(
        self, types: Any, shape: tuple[int, ...], pack: int, groups: list[list[Any]]
    ) -> list[Any]:
        """The handles of what the asm has left in its output registers."""
        stored = [triton_interpreter._get_np_dtype(result.scalar) for result in types]
        lanes = [_lanes(8 * kind.itemsize, pack) for kind in stored]
        self._check("results", self.outputs, sum(map(len, lanes)))
        left, handles = iter(self.outputs), []
        for result, kind, parts in zip(types, stored, lanes, strict=True):
            bits, places = 8 * kind.itemsize, []  # of an element: its slot, and its first bit there
            for part, register in zip(parts, left, strict=False):
                places += [(register.slot, (i - part[0]) * bits) for i in part]
            mask = (1 << bits) - 1
            values = [
                int(group[slot][0]) >> shift & mask for group in groups for slot, shift in places
            ]
            data = np.array(values, f"u{kind.itemsize}").view(kind).reshape(shape)
            handles.append(TensorHandle(data, result.scalar))
        return handles

    def _check(self, what: str, found: list[Register], wanted: int) -> None:
        if len(found) != wanted:
            raise InlineAssemblyError(
                f'inline PTX: "{self._constraints}" has {len(found)} {what}, but the arguments '
                f"make {wanted}"
            )


def _lanes(bits: int, pack: int) -> list[range]:
    """The elements in each register: those of less than 32 bits share one."""
    shared = max(1, 32 // bits)
    return [range(first, min(first + shared, pack)) for first in range(0, pack, shared)]


def _columns(data: Any, shape: tuple[int, ...], pack: int) -> list[list[int]]:
    """The registers that one argument fills, each with its values for all groups of elements."""
    flat = np.ascontiguousarray(np.broadcast_to(data, shape)).reshape(-1)
    bits = 8 * flat.dtype.itemsize
    values = flat.view(f"u{flat.dtype.itemsize}").tolist()
    starts = range(0, len(values), pack)
    return [
        [sum(values[at + i] << (i - lanes[0]) * bits for i in lanes) for at in starts]
        for lanes in _lanes(bits, pack)
    ]
