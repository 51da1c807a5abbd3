"""The memory check: compares every access of an interpreted program with its pointer's allocation.

The check runs before an access, and leaves its invalid elements out. So a store out of bounds reaches no
memory, and a load reads its ``other``, or 0. The run's owner is notified, or the program gets a
:class:`MemoryAccessError`. The usual case, a whole block in one allocation, takes a minimum, a maximum and
a few comparisons; masks are read only if that is not enough.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from interlace.runtime.core.accesses import NULL, Handle, Mask, origin_of, threads_of
from interlace.runtime.core.errors import MemoryAccessError
from interlace.runtime.places.sim.interpreter.session import as_mask, chosen
from interlace.runtime.places.sim.scheduler.allocations import Allocations, MemoryRange, Origin
from interlace.runtime.places.sim.scheduler.source_lines import program_lines
from interlace.runtime.places.sim.scheduler.strategies import Task

MOST = 1000  # bad accesses before a run ends; otherwise a poll out of bounds never ends
WORD = 4  # bytes: the least that compiled code can swap
APART = 4096  # bytes
FEW = 8  # elements, whose minimum Python finds sooner than numpy


@dataclass(frozen=True)
class BadAccess:
    """The fault of an access, from the first of its ``count`` bad elements on.

    ``kind``: one of ``interlace.verify.KINDS``. ``memory`` and ``nbytes``: the allocation, if there is one;
    ``offset``: the bad byte in it. ``index``: how the program computed the address.
    """

    kind: str
    does: str
    memory: str
    nbytes: int
    offset: int
    count: int
    index: str

    def __str__(self) -> str:
        elements = "1 element" if self.count == 1 else f"{self.count} elements"
        return (
            f"{self.kind}: {self.does} {elements} at byte {self.offset} of {self.memory} "
            f"({self.nbytes} bytes), index {self.index}"
        )


class MemoryCheck:
    def __init__(
        self, memory: Allocations, on_bad: Callable[[Task, BadAccess], None] | None
    ) -> None:
        self._memory, self._on_bad = memory, on_bad
        self._count = 0

    def allowed(
        self, task: Task, pointers: Handle, mask: Mask, does: str, *, writes: bool, atomic: bool
    ) -> Any:
        """Return the mask of the valid elements: ``mask`` itself, unless an element is invalid."""
        data, origin = pointers.data, origin_of(pointers)
        size = max(1, pointers.dtype.element_ty.primitive_bitwidth // 8)
        flat = data.ravel()
        if flat.size <= FEW:
            some = flat.tolist()
            low, high = min(some), max(some)
            apart = origin is None and high - low >= APART  # such as flags of several ranks
            if apart and self._memory.has_all(some, size):
                return mask
        else:
            low, high = int(np.minimum.reduce(flat)), int(np.maximum.reduce(flat))
        allocation = self._memory.at(low) if origin is None else origin.allocation
        if allocation is not None and allocation.has(low, high + size) and not low % size:
            lives = (origin and origin.argument) or not allocation.is_gone()
            if lives and not (writes and _read_only(origin, allocation)):
                return mask
        wanted = chosen(pointers, mask)  # now each element is checked
        if not wanted.any():
            return mask
        # Sums of 16 bits swap the whole word that contains them, and memory has it whole.
        needed = 1 if atomic and size == WORD else size
        there = self._is_inside(data, wanted, origin, needed, task.rank)
        wrong = (  # in the order in which they are reported
            ("out of bounds", ~there),
            ("read-only", self._kept(data, origin) if writes else np.zeros(data.shape, bool)),
            ("misaligned", data % np.uint64(size) != 0),
        )
        bad = np.zeros(data.shape, bool)
        for kind, where in wrong:
            found = where & wanted & ~bad
            if found.any():
                self._tell(task, self._describe(kind, does, pointers, found, size))
                bad |= found
        return as_mask(wanted & ~bad) if bad.any() else mask

    def _is_inside(
        self, data: Any, wanted: object, origin: Origin | None, size: int, rank: int
    ) -> Any:
        """Return for each element whether it is in memory that the pointer may reach."""
        if origin is not None:
            allocation = origin.allocation
            if not origin.argument and allocation.is_gone():
                self._memory.of_number(allocation.base, rank)  # other tensors may keep it
                if allocation.is_gone():
                    return np.zeros(data.shape, bool)
            ends = data + np.uint64(size)
            return (data >= allocation.base) & (ends <= allocation.end) & (ends > data)
        known = self._memory.known(data, size)
        if not self._memory.complete:
            return np.ones(data.shape, bool)
        while (missing := data[wanted & ~known]).size:
            before = self._memory.at(int(missing[0]))
            gone = before is not None and before.is_gone()
            found = self._memory.of_number(int(missing[0]), rank)
            if found is None or (found is before and not (gone and not found.is_gone())):
                break
            known = self._memory.known(data, size)
        return known

    def _kept(self, data: Any, origin: Origin | None) -> Any:
        if origin is not None:
            return np.full(data.shape, bool(_read_only(origin, origin.allocation)))
        found = [self._memory.at(address) for address in data.ravel().tolist()]
        return np.array([bool(each and each.read_only) for each in found]).reshape(data.shape)

    def _describe(self, kind: str, does: str, pointers: Handle, found: Any, size: int) -> BadAccess:
        position = int(np.flatnonzero(found)[0])
        # Several threads may access the same element: elements of memory are counted.
        address, count = int(pointers.data.ravel()[position]), len(np.unique(pointers.data[found]))
        origin = origin_of(pointers)
        allocation: MemoryRange | None
        if origin is None:
            allocation = self._memory.at(address) or self._memory.near(address)
        else:
            allocation = origin.allocation
        lane = np.unravel_index(position, pointers.data.shape)
        shape = "x".join(map(str, pointers.data.shape))
        threads = threads_of(pointers)  # only participating threads, perhaps not the whole block
        if threads is not None:
            where = f", by thread {int(threads[position])}"
        elif pointers.data.size == 1:
            where = ""
        else:
            where = f", element {tuple(map(int, lane))} of a block of {shape}"
        if allocation is None:
            named = f"0, address {address:#x}" + (", null" if address < NULL else "")
            return BadAccess(kind, does, "no allocation", 0, 0, count, named)
        if kind == "out of bounds" and not (origin and origin.argument) and allocation.is_gone():
            kind = "use after free"
        start, name = allocation.base, ""
        if origin is not None:
            start, name = origin.start, f" of {origin.argument}" if origin.argument else ""
        if kind == "read-only":
            where += f": {_read_only(origin, allocation)}"
        first = address
        if kind == "out of bounds" and allocation.base <= address < allocation.end:
            first = allocation.end  # the element begins inside
        index, rest = divmod(address - start, size)
        text = f"{index}" + (f" and {rest} bytes" if rest else "") + name + where
        offset = first - allocation.base
        return BadAccess(kind, does, allocation.name, allocation.nbytes, offset, count, text)

    def misplaced(
        self, task: Task, address: int, align: int, count: int, does: str, memory: str
    ) -> None:
        """Raise an error for an address that is ``memory``: the access cannot be left out."""
        near = self._memory.at(address) or self._memory.near(address)
        kind = "out of bounds" if address < NULL else "misaligned"
        if near is None:
            bad = BadAccess(
                kind, does, "no allocation", 0, 0, count, f"0, address {address:#x}: {memory}"
            )
        else:
            offset = address - near.base
            index = f"{offset // align} and {offset % align} bytes: {memory}"
            bad = BadAccess(kind, does, near.name, near.nbytes, offset, count, index)
        self._tell(task, bad, goes_on=False)

    def note(self, task: Task, bad: BadAccess) -> None:
        """Report a finding that is not an error by itself."""
        if self._on_bad is not None:
            self._on_bad(task, bad)

    def _tell(self, task: Task, bad: BadAccess, *, goes_on: bool = True) -> None:
        self._count += 1
        if self._on_bad is not None:
            self._on_bad(task, bad)
        if self._on_bad is None or self._count > MOST or not goes_on:
            lines = program_lines()
            place = ", called from ".join(lines)
            error = MemoryAccessError(f"rank {task.rank}, {task.who}, {place}: {bad}", bad.kind)
            error.frames = tuple(frame for line in lines for frame in line.frames)
            raise error


def _read_only(origin: Origin | None, allocation: MemoryRange) -> str:
    """Return why this pointer may not store, or ""."""
    return (origin.read_only if origin else "") or allocation.read_only
