"""Steps of a collective, run by machine code: copies, sums, stores and waits on words of shared memory.

An op of a few microseconds is mostly Python's own time, and with more ranks than cores most of that is
time to get Python's code and data back into the caches after another rank has had the core. So what an op
does between its first and its last word is written down once, as :class:`Steps`, and done by one call.

Steps stop where only Python can help: a peer does not come (WAIT), or has sent another message (COMPARE).
:meth:`Steps.run` then returns the number of that step; whoever runs them sees to it, and goes on there.

Numbers that differ from run to run are in registers. Not for several threads at once.
"""

import array
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.runtime.places.shm.machine_code import ir, loader
from interlace.runtime.places.shm.machine_code.ir import COMPARE, RING, WAIT
from interlace.runtime.processes.control import ANYONE

Operand = int | tuple[int, int]
"""A number, or a number and the register to add to it."""

SUMS = {getattr(torch, element.name): element for element in ir.ELEMENTS}
for _name in ("uint8", "uint16", "uint32", "uint64"):
    SUMS[getattr(torch, _name)] = SUMS[getattr(torch, _name[1:])]
"""The dtypes that can be summed, with what ``reductions.fold`` gives for "sum", bit for bit."""

PAUSES = 400  # polls before the core is given away, where every rank has a core of its own
YIELDS = 200  # times that it is given away before Python looks why
PATIENCE = 10_000_000  # ns of that
_never = ctypes.c_int64()
NO_CROWD = 1 << 62, 0, ctypes.addressof(_never)


@functools.cache
def _run() -> Callable[[int, int], int] | None:
    if not loader.supported():
        return None
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    run: Callable[[int, int], int] = kind(loader.compiled(ir.run(loader.PROCESSOR), "run"))
    return run


@functools.cache
def _summing(element: ir.Element) -> int:
    return loader.compiled(ir.summing(element, loader.PROCESSOR), "sum")


def available() -> bool:
    return _run() is not None


class Steps:
    """A list of steps. Add them in order, then :meth:`run` them, as often as you like.

    ``words`` is the memory that they are in, of which ``registers[r]`` is register r; register 0 is 0.
    ``memory`` are the registers as bytes.
    Addresses must stay mapped, and lists and their order stay as they were when added.
    """

    __slots__ = ("_code", "_rows", "_words", "kinds", "memory", "notes", "registers", "run")

    run: Callable[[int], int]

    def __init__(self) -> None:
        self._rows: list[tuple[int, Sequence[int], int, tuple[Operand, ...]]] = []
        self.kinds: list[int] = []
        self.notes: dict[int, Any] = {}
        self._words: ctypes.Array[ctypes.c_int64] | None = None
        code = _run()
        if code is None:
            raise RuntimeError("no machine code can be made for this processor")
        self._code = code

    def _add(self, kind: int, listed: Sequence[int], count: int, *operands: Operand) -> None:
        assert self._words is None, "steps are complete"
        self._rows.append((kind, listed, count, operands))
        self.kinds.append(kind)

    def copy(self, target: Operand, source: Operand, nbytes: Operand) -> None:
        """``nbytes`` from ``source`` to ``target``, which may overlap."""
        self._add(ir.COPY, (), 0, target, source, nbytes)

    def stream(self, target: Operand, source: Operand, nbytes: Operand, *, past: bool) -> None:
        """A copy of many bytes, ``past`` the caches or through them; they must not overlap."""
        self._add(ir.PAST if past else ir.STREAM, (), 0, target, source, nbytes)

    def release(self, address: int, value: Operand) -> None:
        """Store a word; what was written before comes before it."""
        self._add(ir.RELEASE, (), 0, address, value)

    def store(self, target: Operand, first: int, nbytes: int) -> None:
        """``nbytes`` of the registers from ``first`` on to ``target``."""
        self._add(ir.STORE, (), 0, target, first, nbytes)

    def stamp(self, address: Operand) -> None:
        """Store the time of the clock's last tick, in ns of the monotonic clock."""
        self._add(ir.STAMP, (), 0, address)

    def ring(self, asleep: Sequence[int], own: int = ANYONE) -> None:
        """Wake those who have put ``own``, or ANYONE, into these words (``processes/control.py``)."""
        self._add(RING, asleep, len(asleep), own)

    def wait(
        self, addresses: Sequence[int], value: Operand, note: Any = None, who: Sequence[int] = ()
    ) -> None:
        """Until each of these words is at least ``value``; stop if that takes long, with ``note``.

        ``who`` releases each, as it calls itself in :meth:`ring`.
        """
        self.notes[len(self.kinds)] = note
        listed = [*addresses, *(who or [ANYONE] * len(addresses))]
        self._add(WAIT, listed, len(addresses), 0, value)

    def compare(
        self, own: Operand, others: Sequence[int], further: Operand, nbytes: Operand
    ) -> None:
        """Stop if one of ``others``, each ``further`` on, has other bytes than ``own``."""
        self._add(COMPARE, others, len(others), own, further, nbytes)

    def sum(
        self, dtype: torch.dtype, target: Operand, sources: Sequence[Operand], count: Operand
    ) -> None:
        """``target`` = the sum of all sources, ``count`` elements; it may be one of them."""
        pairs = [word for source in sources for word in _pair(source)]
        self._add(ir.SUM, pairs, len(sources), target, _summing(SUMS[dtype]), count)

    def complete(
        self, *, spin: bool, crowd: tuple[int, int, int] = NO_CROWD, asleep: int = 0
    ) -> "Steps":
        """No more steps. ``spin``: whether every rank has a core of its own. Returns itself.

        ``crowd``: if to give the core away takes more ns than the first, the word at the address that is
        the last is set to the time, so many times as long ahead, until which waits sleep instead.
        ``asleep``: the address of the own word for those who sleep; 0 if nobody would wake this rank.
        """
        self._add(ir.END, (), 0)
        lists = ir.FIRST + ir.STEP * len(self._rows)
        words = [PAUSES if spin else 1, YIELDS, PATIENCE, *crowd, asleep]
        words += [0] * (lists - len(words))
        memory = (ctypes.c_int64 * (lists + sum(len(row[1]) for row in self._rows)))()
        address = ctypes.addressof(memory)
        for number, (kind, listed, count, operands) in enumerate(self._rows):
            at = ir.FIRST + ir.STEP * number
            words[at : at + 3] = kind, address + 8 * len(words), count
            for operand, place in zip(operands, (3, 5, 7), strict=False):
                words[at + place : at + place + 2] = _pair(operand)
            words += listed
        view = memoryview(memory).cast("B").cast("q")
        view[:] = memoryview(array.array("q", words))
        self._words, self.run = memory, functools.partial(self._code, address)
        self.registers = view[ir.REGISTERS : ir.FIRST]
        self.memory = self.registers.cast("B")
        self._rows = []
        return self

    @property
    def nbytes(self) -> int:
        """The memory of a list that is complete."""
        assert self._words is not None
        return ctypes.sizeof(self._words)


class Copier:
    """A single copy: ``copier(target, source, nbytes)``, past the caches or through them."""

    def __init__(self, *, past: bool) -> None:
        self._steps = steps = Steps()
        steps.stream((0, 1), (0, 2), (0, 3), past=past)
        steps.complete(spin=False)

    def __call__(self, target: int, source: int, nbytes: int) -> None:
        registers = self._steps.registers
        registers[1], registers[2], registers[3] = target, source, nbytes
        self._steps.run(0)


def _pair(operand: Operand) -> tuple[int, int]:
    return operand if isinstance(operand, tuple) else (operand, 0)
