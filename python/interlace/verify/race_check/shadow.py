"""Shadow memory: for every byte that a run touches, who accessed it last, and when.

Memory is known as *segments*: symmetric allocations, the storages of tensors, and pages for anything
else. A segment has shadow cells of 1, 2, 4 or 8 bytes, as small as the smallest access needs. A cell
holds the last store, and per clock component the last load and the last atomic. Times are clock values
of the component; ``happens_before.py`` says what they mean.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

PAGE = 1 << 16
LARGEST_CELL = 8

Index = Any  # a slice, or an int array, of cells
# Of a cell: who did something last, when (never: 0), and where in its source.
MARK = np.dtype([("time", "i8"), ("component", "i4"), ("site", "i4"), ("extra", "i8")])


class Conflict(NamedTuple):
    """An earlier access that is not ordered before the present one; what its marks have besides."""

    component: int
    site: int
    cell: int
    cells: int
    extra: int = 0


class ShadowSegment:
    """Shadow cells of ``[base, base + nbytes)``. ``messages``: what was released, by address, size."""

    def __init__(self, base: int, nbytes: int, label: str, symmetric: bool = False) -> None:
        self.base, self.end, self.label, self.symmetric = base, base + nbytes, label, symmetric
        self.messages: dict[tuple[int, int], Any] = {}
        self.cell = LARGEST_CELL
        cells = -(-nbytes // self.cell)
        self.written = np.zeros(cells, MARK)
        self.loads: dict[int, Any] = {}  # marks by component
        self.atomics: dict[int, Any] = {}

    def _refine(self, size: int) -> None:
        factor = self.cell // size
        self.cell = size
        self.written = np.repeat(self.written, factor)
        for marks in (self.loads, self.atomics):
            marks.update({each: np.repeat(mark, factor) for each, mark in marks.items()})

    def range(self, low: int, high: int) -> slice:
        """The cells of the bytes ``[low, high)``, which are inside."""
        first, last = low - self.base, high - self.base
        while first % self.cell or (last % self.cell and high != self.end):
            self._refine(self.cell // 2)
        return slice(first // self.cell, -(-last // self.cell))

    def cells(self, addresses: Any, size: int) -> Index:
        """The cells of elements of ``size`` bytes."""
        if len(addresses) == 1:
            low = int(addresses[0])
            return self.range(low, low + size)
        offsets = addresses.astype(np.int64) - self.base
        low, high = int(offsets.min()), int(offsets.max()) + size
        if high - low == len(offsets) * size and bool((np.diff(offsets) == size).all()):
            return self.range(self.base + low, self.base + high)
        smallest = min(size, self.cell)
        while smallest > 1 and bool((offsets % smallest).any()):
            smallest //= 2
        if smallest < self.cell:
            self._refine(smallest)
        cells = offsets // self.cell
        if size > self.cell:
            cells = (cells[:, None] + np.arange(size // self.cell)).ravel()
        return cells

    # -- questions: who conflicts, given what ``known`` says of every component's time ---------------

    def unordered_store(self, index: Index, known: Any, me: int) -> list[Conflict]:
        """Stores of others that the present access does not come after."""
        written = self.written[index]
        writer, sites = written["component"], written["site"]
        bad = (written["time"] > known[writer]) & (writer >> 1 != me)
        if not bad.any():
            return []
        found = []
        for site in np.unique(sites[bad]):
            where = np.flatnonzero(bad & (sites == site))
            cell = self._number(index, where[0])
            found.append(Conflict(int(writer[where[0]]), int(site), cell, len(where)))
        return found

    def unordered(
        self, marks: dict[int, Any], index: Index, known: Any, me: int
    ) -> Iterator[Conflict]:
        """Loads or atomics of others that the present access does not come after."""
        for component, mark in marks.items():
            if component >> 1 == me:
                continue
            where = np.flatnonzero(mark["time"][index] > known[component])
            if len(where):
                _, _, site, extra = mark[index][where[0]].tolist()
                yield Conflict(component, site, self._number(index, where[0]), len(where), extra)

    def _number(self, index: Index, position: Any) -> int:
        if isinstance(index, slice):
            return int(index.start + position)
        return int(index[position])

    def note_store(self, index: Index, component: int, time: int, site: int) -> None:
        self.written[index] = time, component, site, 0
        if self.messages:  # a plain store over a signal replaces what was released there
            cells = np.arange(index.start, index.stop) if isinstance(index, slice) else index
            touched = set((cells * self.cell + self.base).tolist())
            for key in [key for key in self.messages if key[0] in touched]:
                del self.messages[key]

    def note(
        self,
        marks: dict[int, Any],
        index: Index,
        component: int,
        time: int,
        site: int,
        extra: int = 0,
    ) -> None:
        if component not in marks:
            marks[component] = np.zeros(len(self.written), MARK)
        marks[component][index] = time, component, site, extra


class ShadowMemory:
    """All segments, by address."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._segments: dict[int, ShadowSegment] = {}

    def add(self, base: int, nbytes: int, label: str, *, symmetric: bool = False) -> None:
        """New memory: whatever was known of these addresses is of something that is gone."""
        if nbytes <= 0:
            return
        self.remove(base, base + nbytes)
        insort(self._bases, base)
        self._segments[base] = ShadowSegment(base, nbytes, label, symmetric)

    def is_symmetric(self, address: int) -> bool:
        """Whether this is symmetric memory, which lives as long as the run."""
        segment = self.at(address)
        return segment is not None and segment.symmetric

    def remove(self, low: int, high: int) -> None:
        """Forget segments that overlap ``[low, high)``."""
        first = max(0, bisect_right(self._bases, low) - 1)
        for base in self._bases[first : bisect_left(self._bases, high)]:
            if self._segments[base].end > low:
                self._bases.remove(base)
                del self._segments[base]

    def at(self, address: int) -> ShadowSegment | None:
        """The segment that has this address."""
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

    def find(self, addresses: Any, size: int) -> Iterator[tuple[ShadowSegment, Index]]:
        """Segments and cells of elements of ``size`` bytes at ``addresses`` (uint64)."""
        while len(addresses):
            segment = self._at_or_page(int(addresses[0]))
            if len(addresses) == 1 or (
                int(addresses.min()) >= segment.base and int(addresses.max()) < segment.end
            ):
                yield segment, segment.cells(addresses, size)
                return
            inside = (addresses >= np.uint64(segment.base)) & (addresses < np.uint64(segment.end))
            yield segment, segment.cells(addresses[inside], size)
            addresses = addresses[~inside]
