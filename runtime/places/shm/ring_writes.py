"""Writing into shared memory, through the caches or past them, whichever was faster when tried.

Where ranks share a cache, what one writes is read there by the others, and memory is crossed once on the
way in and once on the way out. But where they have caches of their own (other core complexes or sockets),
a line that one has written and another reads goes from cache to cache, one message for each, and so it
does when it is written again: then memory, which lines written past the caches go to, is several times as
fast. Which of the two it is depends on where the ranks run, which only measuring tells (2 ranks, broadcast
of 64 MiB, through and past: 3.7 and 5.2 ms under one shared cache, 30 and 3.7 ms without; November 2026).

All ranks write alike, for what one gains depends on the others: the last rank measures and decides, the
others look its decision up. A look that comes too early or late is one op in another way, no error.

Into rings it measures whole ops, from the meeting of the ranks on. Of data beside a message it measures its
own writing and reading alone: the op begins with a wait for whoever comes last. (2 ranks, 256 KiB, past
relative to through: all_gather 0.85, then, when the cores had moved, broadcast 2.3; November 2026.)
"""

import math
import zlib
from collections import deque
from statistics import median

FIRST = False, True, True, False, False, True  # past the caches or not, in the first ops
KEPT = 3  # times of each way
MESSAGES = 64  # bytes of the table for data beside messages; the others are for rings
ORDER = (True, True, True, False, False, False) * 3  # past the caches or not, in a trial
COUNTED = 2  # of three ops in one way the last: by then all ranks have seen the table
CLEARLY = 0.9  # of the time past the caches: of few bytes the clock tells less
REST = 500  # ops between two trials
# Added to the bits of a size: each rank gets its own; all write and read as much.
APART, EVERYONE = 32, 64
LEAST = 4 << 10  # bytes for which it can be measured in which way they are written

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


class MessageWrites:
    """A group's decisions on data beside messages, by kind, in ``table``, which all ranks see.

    A kind is the number of bits of a part's size and perhaps APART; it has 0 in the table if such data is
    written past the caches. Only the rank that ``decides`` tries.
    """

    def __init__(self, table: bytearray | memoryview, *, decides: bool) -> None:
        self.table, self.decides = table, decides
        self._rest = [0 if 1 << kind % APART > LEAST else -1 for kind in range(MESSAGES)]
        self._times: dict[int, list[float]] = {}

    def tries(self, kind: int) -> bool:
        """Whether the next op of this kind, which is the next of all, is to be timed."""
        if (rest := self._rest[kind]) > 0:
            self._rest[kind] = rest - 1
        return rest == 0

    def took(self, kind: int, seconds: float) -> None:
        """What this rank's writing and reading took in an op that was to be timed."""
        times = self._times.setdefault(kind, [])
        times.append(seconds)
        if len(times) < len(ORDER):
            self.table[kind] = not ORDER[len(times)]
            return
        past, through = (
            min(times[n] for n in range(COUNTED, len(ORDER), COUNTED + 1) if ORDER[n] is way)
            for way in (True, False)
        )
        self.table[kind] = through < CLEARLY * past
        self._rest[kind] = REST
        times.clear()


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
