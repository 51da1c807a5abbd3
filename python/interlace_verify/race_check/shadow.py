"""Shadow memory: the last accesses of every byte that a run touches, with their times.

A segment has shadow cells of 1, 2, 4 or 8 bytes, as small as its smallest access needs. A cell holds the
last store, and for each clock component the last load and the last atomic. A time is the clock value of the
component; ``happens_before.py`` explains it.
"""

import ctypes
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from interlace.runtime.core.accesses import Numbers
from interlace_verify.race_check.agents import Agent

PAGE = 1 << 16
LARGEST_CELL = 8
WRITES = 4  # in the extra of an atomic's mark, besides its scope

# In the extra of a mark: several threads of a program did it, and the component is the one of one thread.
# The bits from THREADS on hold the first thread and the last.
SEVERAL = 8
THREADS, THREAD_BITS = 16, 16
Index = Any  # a slice, or an int array, of cells
# The mark of an access in a cell: component, time (0: no access yet), and site in the source.
MARK = np.dtype([("time", "i8"), ("component", "i4"), ("site", "i4"), ("extra", "i8")])


class Conflict(NamedTuple):
    """An earlier access that is not ordered before the present one, with its cells and its time."""

    component: int
    site: int
    time: int
    cells: Index
    extra: int = 0


class KnownTimes:
    """The times that the present access comes after: ``clock`` has a time for each component.

    An agent knows all its own components. If threads are known, ``own`` has the component of each element.
    ``more``: clocks of threads that know more, with the threads' numbers. ``owners``: agents by component.
    ``multicast``: the access is by a multicast address, and the clocks hold what is ordered before those.
    """

    def __init__(
        self,
        clock: Numbers,
        agent: Agent,
        owners: list[Agent],
        own: Any = None,
        more: Sequence[tuple[list[int], Numbers]] = (),
        *,
        multicast: bool = False,
    ) -> None:
        self.clock, self.agent, self.own, self.more = clock, agent, own, more
        self.owners, self.multicast = owners, multicast
        self.constant = -1  # a site where all threads store the same value

    def _behind(self, clock: Numbers, marks: Numbers) -> Any:
        component, time, extra = marks["component"], marks["time"], marks["extra"]
        late = time > clock[component]
        several = (extra & SEVERAL) != 0
        if several.any():
            of_threads = extra >> THREADS
            for one, threads in set(zip(component[several], of_threads[several], strict=True)):
                first = self.owners[one].first
                low, high = threads & (1 << THREAD_BITS) - 1, threads >> THREAD_BITS
                known = clock[first + low : first + high + 1].min()
                lanes = several & (component == one) & (of_threads == threads)
                late |= lanes & (time > known)
        return late

    def lacks(self, marks: Numbers) -> Any:
        """Return which of the marks the access does not come after."""
        late = self._behind(self.clock, marks)
        if not late.any():
            return late
        component = marks["component"]
        if self.own is None:
            return late if self.multicast else late & ~self.agent.owns(component)
        same = self.own + 2 * self.agent.components if self.multicast else self.own
        late &= (component != same) | (marks["extra"] & SEVERAL != 0)
        for components, clock in self.more:
            theirs = np.zeros(self.agent.components, np.bool_)
            theirs[components] = True
            asked = late & theirs[self.own - self.agent.first]
            if asked.any():
                late[asked] = self._behind(clock, marks[asked])
        return late


class ShadowSegment:
    """Shadow cells of ``[base, base + nbytes)``.

    By address and size: ``messages``, the released clocks; ``writes``, the atomics that made the present
    value, each with its time and scope.
    """

    def __init__(self, base: int, nbytes: int, label: str, symmetric: bool = False) -> None:
        self.base, self.end, self.label, self.symmetric = base, base + nbytes, label, symmetric
        self.poison = b""  # repeated in bytes that were not written, if their value is undefined
        self.messages: dict[tuple[int, int], Any] = {}
        self.writes: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        self.cell = LARGEST_CELL
        cells = -(-nbytes // self.cell)
        self.written = np.zeros(cells, MARK)
        self.loads: dict[int, Numbers] = {}  # marks by component
        self.atomics: dict[int, Numbers] = {}

    def _refine(self, size: int) -> None:
        factor = self.cell // size
        self.cell = size
        self.written = np.repeat(self.written, factor)
        for marks in (self.loads, self.atomics):
            marks.update({each: np.repeat(mark, factor) for each, mark in marks.items()})

    def range(self, low: int, high: int) -> slice:
        """Return the cells of the bytes ``[low, high)``, which are inside the segment."""
        first, last = low - self.base, high - self.base
        while first % self.cell or (last % self.cell and high != self.end):
            self._refine(self.cell // 2)
        return slice(first // self.cell, -(-last // self.cell))

    def cells(self, addresses: Numbers, size: int) -> Index:
        if len(addresses) == 1:
            low = int(addresses[0])
            return self.range(low, low + size)
        offsets = addresses.astype(np.int64) - self.base
        low, high = int(offsets.min()), int(offsets.max()) + size
        if high - low == len(offsets) * size and bool((np.diff(offsets) == size).all()):
            return self.range(self.base + low, self.base + high)
        cells = self._first_cells(offsets, size)
        if size > self.cell:
            cells = (cells[:, None] + np.arange(size // self.cell)).ravel()
        return cells

    def _first_cells(self, offsets: Numbers, size: int) -> Numbers:
        """Return the first cells of elements of ``size`` bytes; split cells if that is needed."""
        smallest = min(size, self.cell)
        while smallest > 1 and bool((offsets % smallest).any()):
            smallest //= 2
        if smallest < self.cell:
            self._refine(smallest)
        return offsets // self.cell

    # -- conflicts with the present access, which knows the times in ``known`` ---------------------

    def unordered_store(self, index: Index, known: KnownTimes) -> list[Conflict]:
        """Return stores of others that the present access does not come after."""
        written = self.written[index]
        writer, sites = written["component"], written["site"]
        bad = known.lacks(written)
        if not bad.any():
            return []
        found = []
        for site in sorted({*sites[bad].tolist()} - {known.constant}):
            where = np.flatnonzero(bad & (sites == site))
            time, component = int(written["time"][where[0]]), int(writer[where[0]])
            found.append(Conflict(component, int(site), time, self._numbers(index, where)))
        return found

    def unordered(
        self, marks: dict[int, Any], index: Index, known: KnownTimes, *, apart: bool = False
    ) -> Iterator[Conflict]:
        """Yield loads or atomics of others that the present access does not come after.

        ``apart``: yield each of them, not only one of each agent for all cells.
        """
        for mark in marks.values():
            found = mark[index]
            where = np.flatnonzero(known.lacks(found))
            many = np.unique(found[where]) if apart else found[where[:1]]
            for one in many:
                time, component, site, extra = one.tolist()
                cells = where[found[where] == one] if len(many) > 1 else where
                yield Conflict(component, site, time, self._numbers(index, cells), extra)

    def unwritten(self, index: Index, seen: Any = None) -> Any:
        """Return the cells that were never written and that hold poison.

        If an atomic has ``seen`` the value of its one element, that value must be the poison.
        """
        never = self.written["time"][index] == 0
        if not never.any():  # the usual case
            return np.zeros(0, np.int64)
        for marks in self.atomics.values():
            never &= (marks["extra"][index] & WRITES) == 0
        cells = self._numbers(index, np.flatnonzero(never))
        nbytes, poison = self.end - self.base, np.frombuffer(self.poison, np.uint8)
        view = memoryview((ctypes.c_ubyte * nbytes).from_address(self.base))
        memory = np.frombuffer(view, np.uint8)
        offsets = cells[:, None] * self.cell + np.arange(self.cell)
        if seen is None:
            memory_bytes = memory[np.minimum(offsets, nbytes - 1)]
        else:
            memory_bytes = np.frombuffer(seen.tobytes(), np.uint8)[offsets % seen.itemsize]
        same = memory_bytes == poison[offsets % len(poison)]
        same |= offsets >= nbytes  # the last cell may be longer than the memory
        return cells[same.all(axis=1)]

    def _numbers(self, index: Index, positions: Numbers) -> Any:
        return index.start + positions if isinstance(index, slice) else index[positions]

    def bytes_of(self, cells: Numbers) -> Numbers:
        offsets = (cells[:, None] * self.cell + np.arange(self.cell)).ravel()
        return offsets[offsets < self.end - self.base]

    def elements(self, offset: int, cells: int, size: int) -> int:
        return max(1, min(cells * self.cell, self.end - self.base - offset) // size)

    def note_store(self, index: Index, component: object, time: object, site: int) -> None:
        for name, value in zip(MARK.names or (), (time, component, site, 0), strict=True):
            self.written[name][index] = value
        if self.messages:  # a plain store over a signal replaces its released clock
            cells = np.arange(index.start, index.stop) if isinstance(index, slice) else index
            touched = set((cells * self.cell + self.base).tolist())
            for key in [key for key in self.messages if key[0] in touched]:
                del self.messages[key]

    def note(
        self,
        marks: dict[int, Any],
        cells: Index,
        components: Any,
        times: Any,
        site: int,
        extra: int = 0,
        known: KnownTimes | None = None,
    ) -> None:
        """Note loads or atomics of one component, or of several threads, which have one mark in a cell."""
        several = known is not None and known.own is not None
        key = known.agent.first if known is not None and several else components
        if key not in marks:
            marks[key] = np.zeros(len(self.written), MARK)
        if known is not None and several:
            extra = extra | self._shared(marks[key][cells], cells, components, known)
        for name, value in zip(MARK.names or (), (times, components, site, extra), strict=True):
            marks[key][name][cells] = value

    # -- the same for accesses whose threads are known ---------------------------------------------

    def cells_of(self, addresses: Numbers, size: int) -> tuple[Index, int]:
        """Return the cells of every element, one after another, and the number of cells of each."""
        first = self._first_cells(addresses.astype(np.int64) - self.base, size)
        each = size // self.cell
        return (first[:, None] + np.arange(each)).ravel(), each

    def _shared(self, before: Numbers, cells: Index, components: Any, known: KnownTimes) -> Any:
        """Return the bits that name the first and last thread of an access, if threads share its mark."""
        first = known.agent.first
        low = high = components - first
        different, place = np.unique(cells, return_inverse=True)
        if len(different) < len(cells):  # other threads do the same access
            lowest = np.full(len(different), len(known.owners))
            highest = np.zeros(len(different), np.int64)
            np.minimum.at(lowest, place, low)
            np.maximum.at(highest, place, high)
            low, high = lowest[place], highest[place]
        counts = (before["time"] > known.clock[before["component"]]) & (before["time"] > 0)
        several = (before["extra"] & SEVERAL) != 0
        alone, threads = before["component"] - first, before["extra"] >> THREADS
        earlier = np.where(several, threads & (1 << THREAD_BITS) - 1, alone)
        later = np.where(several, threads >> THREAD_BITS, alone)
        low = np.where(counts, np.minimum(low, earlier), low)
        high = np.where(counts, np.maximum(high, later), high)
        thread_range = SEVERAL | low << THREADS | high << THREADS + THREAD_BITS
        return np.where(low == high, 0, thread_range)


class ShadowMemory:
    """All segments: symmetric allocations, storages of tensors, and pages for all other memory."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._segments: dict[int, ShadowSegment] = {}

    def add(self, base: int, nbytes: int, label: str, *, symmetric: bool = False) -> None:
        """Add new memory; forget older memory at these addresses."""
        if nbytes <= 0:
            return
        self.remove(base, base + nbytes)
        insort(self._bases, base)
        self._segments[base] = ShadowSegment(base, nbytes, label, symmetric)

    def is_symmetric(self, address: int) -> bool:
        """Return whether this is symmetric memory, which lives as long as the run."""
        segment = self.at(address)
        return segment is not None and segment.symmetric

    def remove(self, low: int, high: int) -> None:
        first = max(0, bisect_right(self._bases, low) - 1)
        for base in self._bases[first : bisect_left(self._bases, high)]:
            if self._segments[base].end > low:
                self._bases.remove(base)
                del self._segments[base]

    def at(self, address: int) -> ShadowSegment | None:
        position = bisect_right(self._bases, address) - 1
        segment = self._segments[self._bases[position]] if position >= 0 else None
        return None if segment is None or address >= segment.end else segment

    def _at_or_page(self, address: int) -> ShadowSegment:
        segment = self.at(address)
        if segment is not None:
            return segment
        base, end = address // PAGE * PAGE, address // PAGE * PAGE + PAGE
        for other in self._segments.values():  # a page only fills the gap between its neighbours
            if other.end <= address:
                base = max(base, other.end)
            elif other.base > address:
                end = min(end, other.base)
        base = -(-base // LARGEST_CELL) * LARGEST_CELL if base < address - LARGEST_CELL else base
        self.add(base, end - base, "memory that no tensor of this run owns")
        return self._segments[base]

    def parts(self, addresses: Numbers) -> Iterator[tuple[ShadowSegment, Any]]:
        """Yield segments, and which of ``addresses`` (uint64) are in each."""
        left = np.arange(len(addresses))
        while len(left):
            segment = self._at_or_page(int(addresses[left[0]]))
            inside = (addresses[left] >= np.uint64(segment.base)) & (
                addresses[left] < np.uint64(segment.end)
            )
            yield segment, left[inside]
            left = left[~inside]

    def find(self, addresses: Numbers, size: int) -> Iterator[tuple[ShadowSegment, Index]]:
        """Yield segments and the cells of elements of ``size`` bytes at ``addresses`` (uint64)."""
        if len(addresses) == 1:  # such as the address of an atomic
            segment = self._at_or_page(int(addresses[0]))
            yield segment, segment.cells(addresses, size)
            return
        for segment, lanes in self.parts(addresses):
            yield segment, segment.cells(addresses[lanes], size)


def byte_ranges(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the contiguous pieces of a tensor's memory as (address, bytes)."""
    if not tensor.numel():
        return []
    size = tensor.element_size()
    if tensor.is_contiguous():
        return [(tensor.data_ptr(), tensor.numel() * size)]
    stride_and_extent = zip(tensor.stride(), tensor.shape, strict=True)
    dims = sorted(
        (stride, extent) for stride, extent in stride_and_extent if extent > 1 and stride
    )[::-1]
    run = size
    while dims and dims[-1][0] * size == run:
        run *= dims.pop()[1]
    offsets = np.zeros(1, np.int64)
    for stride, extent in dims:
        offsets = (offsets[:, None] + np.arange(extent) * stride * size).ravel()
    base = tensor.data_ptr()
    return [(base + offset, run) for offset in offsets.tolist()]
