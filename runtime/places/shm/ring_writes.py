"""Writing into rings of shared memory, through the caches or past them, whichever was faster when tried.

Where ranks share a cache, what one writes is read there by the others, and memory is crossed once on the
way in and once on the way out. But where they have caches of their own (other core complexes or sockets),
a line that one has written and another reads goes from cache to cache, one message for each, and so it
does when it is written again: then memory, which lines written past the caches go to, is several times as
fast. Which of the two it is depends on where the ranks run, which only measuring tells (2 ranks, broadcast
of 64 MiB, through and past: 3.7 and 5.2 ms under one shared cache, 30 and 3.7 ms without; November 2026).

All ranks write alike, for what one gains depends on the others: the last rank measures and decides, the
others look its decision up. A look that comes too early or late is one op in another way, no error.
"""

import math
import zlib
from collections import deque
from statistics import median

FIRST = False, True, True, False, False, True  # past the caches or not, in the first ops
KEPT = 3  # times of each way
AGAIN = 64  # ops after which the other way is tried again: ranks may have moved
SOON = 8  # and after so many, if times have changed
CHANGED = 1.25  # times as long, or as short

Key = tuple[str, int]  # the op, and the bits of its number of rounds


class RingWrites:
    """A group's decisions, by kind and size of op, in ``table``, which all ranks see."""

    def __init__(self, table: bytearray | memoryview, *, decides: bool) -> None:
        self._table, self._decides = table, decides
        self._places: dict[Key, int] = {}
        self._choices: dict[Key, WriteChoice] = {}

    def past(self, op: str, count: int) -> bool:
        """Whether an ``op`` of ``count`` rounds writes past the caches."""
        return self._table[self._place((op, count.bit_length()))] != 0

    def took(self, op: str, count: int, past: bool, seconds: float) -> None:
        """Note how long such an op took in this way, from the meeting of the ranks to its end."""
        if self._decides:
            key = op, count.bit_length()
            choice = self._choices.get(key)
            if choice is None:
                choice = self._choices[key] = WriteChoice()
            choice.took(past, seconds / count)
            self._table[self._place(key)] = choice.past()

    def _place(self, key: Key) -> int:
        """A kind's place in the table, the same on all ranks. Two kinds may share one, and its way."""
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = zlib.crc32(repr(key).encode()) % len(self._table)
        return place


class WriteChoice:
    """The choice for ops of one kind and size."""

    def __init__(self) -> None:
        self._ops = 0
        self._times = deque[float](maxlen=KEPT), deque[float](maxlen=KEPT)
        self._then = 0.0  # what the better way took when the other was tried last

    def past(self) -> bool:
        """Whether the next op writes past the caches."""
        if self._ops < len(FIRST):
            return FIRST[self._ops]
        best = self._best()
        return best != self._tries(best)

    def took(self, past: bool, seconds: float) -> None:
        """An op done in this way."""
        tried = self._ops >= len(FIRST) and past != self._best()
        if tried:
            self._times[past].clear()  # that was long ago
        self._times[past].append(seconds)
        self._ops += 1
        if tried or self._ops == len(FIRST):
            self._then = self._typical(self._best())

    def _best(self) -> bool:
        return self._typical(True) < self._typical(False)

    def _typical(self, past: bool) -> float:
        return median(self._times[past]) if self._times[past] else math.inf

    def _tries(self, best: bool) -> bool:
        """Whether the other way is tried now."""
        if self._ops % SOON:
            return False
        now, then = self._typical(best), self._then
        return self._ops % AGAIN == 0 or now > CHANGED * then or then > CHANGED * now
