"""How a rank writes into its ring: through its caches or past them, whichever was faster when tried.

Where ranks share a cache, what one writes is read there by the others, and memory is crossed once on the
way in and once on the way out. But where they have caches of their own (other core complexes or sockets),
a line that one has written and another reads goes from cache to cache, one message for each, and so it
does when it is written again: then memory, which lines written past the caches go to, is several times as
fast. Which of the two it is depends on where the ranks run, which only measuring tells (2 ranks, broadcast
of 64 MiB, through and past: 3.7 and 5.2 ms under one shared cache, 30 and 3.7 ms without; November 2026).

Every rank chooses for its own ring; the others read it alike.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

TRIES = 3  # of each, at first
SOON, AGAIN = (
    8,
    64,
)  # ops after which the other one is tried again: if times have changed, and anyway
CHANGED = 1.25  # times as long, or as short: the ranks have moved


class Choice:
    """The choice for ops of one kind and size."""

    def __init__(self) -> None:
        self._ops = 0
        self._times = deque[float](maxlen=TRIES), deque[float](maxlen=TRIES)
        self._then = 0.0  # what the better one took when the other was tried last

    def past(self) -> bool:
        """Whether the next op writes past the caches; ranks that have measured alike try alike."""
        if self._ops < 2 * TRIES:
            return self._ops % 2 == 1
        best = self._best()
        return best != self._tries(best)

    def took(self, past: bool, seconds: float) -> None:
        """An op done in this way, from the meeting of the ranks to its end."""
        tried = self._ops >= 2 * TRIES and past != self._best()
        if tried:
            self._times[past].clear()  # that was long ago
        self._times[past].append(seconds)
        self._ops += 1
        if tried or self._ops == 2 * TRIES:
            self._then = median(self._times[self._best()])

    def _best(self) -> bool:
        through, past = (median(times) if times else math.inf for times in self._times)
        return past < through

    def _tries(self, best: bool) -> bool:
        """Whether the other one is tried now, at one of the ops at which all ranks may."""
        if self._ops % SOON:
            return False
        change = median(self._times[best]) / self._then
        return self._ops % AGAIN == 0 or not 1 / CHANGED < change < CHANGED
