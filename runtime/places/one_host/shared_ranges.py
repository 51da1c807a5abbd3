"""Memory of the caller's that all ranks of a host group have mapped: found by address.

``interlace.symmetric_memory`` shares it. A collective on a tensor that lies in it needs no staging: the
others read it where it is.
"""

import weakref
from collections.abc import Sequence

from interlace.runtime.core.memory import Array


class SharedRanges:
    """Arrays shared in a group, numbered alike on all ranks, as long as this rank uses its part."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._count = 0
        # address and bytes of the own array, which must not live here, and all others
        self._ranges: dict[int, tuple[int, int, list[Array]]] = {}

    def add(self, arrays: Sequence[Array]) -> None:
        """One array per rank, of equal sizes. Called in the same order on all ranks."""
        self._count = number = self._count + 1
        own = arrays[self._rank]
        if own.nbytes:
            others = [a for r, a in enumerate(arrays) if r != self._rank]
            self._ranges[number] = own.ctypes.data, own.nbytes, others
            weakref.finalize(own, self._ranges.pop, number, None)

    def find(self, address: int, nbytes: int) -> tuple[int, int]:
        """The number of the range that holds these bytes and where in it; number 0 if none does."""
        for number, (start, size, _) in list(self._ranges.items()):
            if start <= address and address + nbytes <= start + size:
                return number, address - start
        return 0, 0

    def array(self, number: int, rank: int) -> Array:
        """Another rank's array of range ``number``."""
        return self._ranges[number][2][rank - (rank > self._rank)]

    def __bool__(self) -> bool:
        return bool(self._ranges)
