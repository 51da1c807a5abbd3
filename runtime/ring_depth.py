"""How many slots of its ring a rank uses: few, or many, whichever was faster when both were tried.

Few slots stay in a cache that the ranks share, and memory is crossed once on the way in and once on the
way out. But where ranks have caches of their own (other core complexes or sockets), writing lines that a
peer has just read costs a message between the caches for each: a slot that has left the peer's cache
before it is written again is then several times faster. Which of the two it is depends on where the
ranks run, which only measuring tells (2 ranks, broadcast of 64 MiB: 5.1 and 7.2 ms with 4 and 32 slots
under one shared cache, 30 and 7.1 ms without; November 2026).

Every rank chooses for its own ring and says so in its message, so ranks need not agree.
"""

from __future__ import annotations

from collections import deque
from statistics import median

FEW, MANY = 4, 32
TRIES = 3  # of each, at first
AGAIN = 64  # ops after which the other one is tried again: ranks may have moved


class Depth:
    """The choice for one op and size."""

    def __init__(self) -> None:
        self._ops = 0
        self._times = {FEW: deque[float](maxlen=TRIES), MANY: deque[float](maxlen=TRIES)}

    def choice(self) -> int:
        """The number of slots for the next op; ranks that have measured as many ops try alike."""
        if self._ops < 2 * TRIES:
            return (FEW, MANY)[self._ops % 2]
        few, many = (median(self._times[each]) for each in (FEW, MANY))
        best, other = (FEW, MANY) if few <= many else (MANY, FEW)
        return other if self._ops % AGAIN == 0 else best

    def took(self, slots: int, seconds: float) -> None:
        """An op with this many slots, from the meeting of the ranks to its end."""
        self._ops += 1
        self._times[slots].append(seconds)
