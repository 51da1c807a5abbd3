"""The operands of an asm text: tensors into registers ``$0``, ``$1``, ... and back.

One execution of the text takes ``pack`` elements of every argument. Elements of less than 32 bits share
registers, the first in the lowest bits; a constraint's letter is the width of its register.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from triton.runtime import interpreter as triton_interpreter

from interlace.runtime.interpreter.inline_ptx.syntax import InlineAssemblyError, Register

_WIDTHS = {"r": 32, "f": 32, "l": 64, "d": 64, "h": 16, "b": 1}


def registers_of(constraints: str) -> tuple[tuple[Register, ...], tuple[Register, ...]]:
    """Operands by their constraints, such as ``"=r,l,0,~{memory}"``."""
    outputs: list[Register] = []
    inputs: list[Register] = []
    for given in filter(None, (part.strip() for part in constraints.split(","))):
        if given.startswith("~"):
            continue
        index = len(outputs) + len(inputs)
        letter = given.lstrip("=&")
        if given.startswith("=") and not inputs and letter in _WIDTHS:
            outputs.append(Register(f"${index}", index, _WIDTHS[letter]))
        elif given.isdecimal() and int(given) < len(outputs):
            tied = outputs[int(given)]
            inputs.append(Register(f"${index}", tied.slot, tied.bits))
        elif given in _WIDTHS:
            inputs.append(Register(f"${index}", index, _WIDTHS[given]))
        else:
            raise InlineAssemblyError(
                f"inline PTX: constraint '{given}' of \"{constraints}\" is not known to the "
                f"interpreter; known are {', '.join(_WIDTHS)}, with = for results, which come first, "
                "the number of a result, and ~{...}"
            )
    return tuple(outputs), tuple(inputs)


def _layout(bits: int, pack: int) -> tuple[int, int]:
    """(registers, elements in each): elements of less than 32 bits share registers."""
    shared = max(1, 32 // bits)
    return -(-pack // shared), shared


def _columns(data: Any, shape: tuple[int, ...], pack: int) -> list[list[int]]:
    """The registers that one argument fills, each with its values for all groups of elements."""
    flat = np.ascontiguousarray(np.broadcast_to(data, shape)).reshape(-1)
    bits = 8 * flat.dtype.itemsize
    values = flat.view(f"u{flat.dtype.itemsize}").tolist()
    if pack == 1:
        return [values]
    registers, shared = _layout(bits, pack)
    columns = []
    for first in range(0, registers * shared, shared):
        lanes = range(first, min(first + shared, pack))
        starts = range(0, len(values), pack)
        columns.append([sum(values[s + i] << (i - first) * bits for i in lanes) for s in starts])
    return columns


def arguments(
    values: Any,
    shape: tuple[int, ...],
    pack: int,
    inputs: Sequence[Register],
    slots: int,
    constraints: str,
) -> list[list[int]]:
    """All registers of every execution, with the arguments in theirs and 0 in the others."""
    count, left = divmod(math.prod(shape), pack)
    if left:
        raise InlineAssemblyError(f"inline PTX: shape {shape} is not a multiple of pack={pack}")
    columns = [column for value in values for column in _columns(value.data, shape, pack)]
    _check_count("inputs", inputs, len(columns), constraints)
    groups = []
    for group in range(count):
        registers = [0] * slots
        for register, column in zip(inputs, columns, strict=True):
            registers[register.slot] = column[group] & ((1 << register.bits) - 1)
        groups.append(registers)
    return groups


def results(
    types: Any,
    shape: tuple[int, ...],
    pack: int,
    outputs: Sequence[Register],
    groups: list[list[int]],
    constraints: str,
) -> list[Any]:
    """The handles of what the asm has left in its output registers."""
    handles, first = [], 0
    for result in types:
        dtype = result.scalar
        stored = triton_interpreter._get_np_dtype(dtype)
        bits = 8 * stored.itemsize
        registers, shared = _layout(bits, pack)
        slots = [register.slot for register in outputs[first : first + registers]]
        first += registers
        if len(slots) < registers:
            break
        mask = (1 << bits) - 1
        values = [
            group[slots[i // shared]] >> i % shared * bits & mask
            for group in groups
            for i in range(pack)
        ]
        if dtype.primitive_bitwidth == 1:
            values = [value & 1 for value in values]
        data = np.array(values, f"u{stored.itemsize}").view(stored).reshape(shape)
        handles.append(triton_interpreter.TensorHandle(data, dtype))
    if len(handles) < len(types) or first != len(outputs):
        wanted = sum(
            _layout(8 * triton_interpreter._get_np_dtype(t.scalar).itemsize, pack)[0] for t in types
        )
        _check_count("results", outputs, wanted, constraints)
    return handles


def _check_count(what: str, found: Sequence[Register], wanted: int, constraints: str) -> None:
    if len(found) != wanted:
        raise InlineAssemblyError(
            f'inline PTX: "{constraints}" has {len(found)} {what}, but the arguments make {wanted}'
        )
