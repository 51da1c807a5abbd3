"""Ranks spread evenly over the cores: where more of them share one core than another, one moves.

A rank that waits keeps its core busy, politely. So an operating system that counts who is busy may leave
three ranks on one core and one on the other for a long time, and each op takes as long as three ranks on
one core take (4 ranks on 2 cores, all_reduce of 16 MiB: 12.1 ms, and 8.2 with two on each; November 2026).
But the ranks know what it cannot know: that they work in step.

Each rank says now and then on which core it runs. Looking at all of them, the last of those on the fullest
core moves to the emptiest, if that makes it more even. Moving is a nudge, not a binding: the thread is
bound to the other core and at once allowed all of its cores again, so the operating system keeps the last
word. It moves nobody to a core outside the thread's own affinity.

What is said may be old when it is looked at. Then one nudge too few or too many is made, and nothing else.
"""

import ctypes
import os
import time
from collections.abc import Sequence

SECONDS_BETWEEN = 5e-3  # nudges of one rank; between them the operating system may have its way

# A PyDLL keeps the GIL, which a call of a tenth of a microsecond should not give away.
_core = getattr(ctypes.PyDLL(None), "sched_getcpu", None)


def move(cores: Sequence[int], rank: int, allowed: Sequence[int]) -> int | None:
    """The core to which ``rank`` should move, if any. ``cores``: every rank's; unknown ones are negative.

    Ranks that look at the same ``cores`` and are allowed the same move one rank in all: with cores
    ``[0, 0, 0, 1]`` and ``allowed`` 0 and 1 rank 2 moves to 1.
    """
    own = cores[rank]
    crowd = cores.count(own)
    if crowd < 2 or own not in allowed or rank != max(r for r, c in enumerate(cores) if c == own):
        return None
    counts = {core: cores.count(core) for core in sorted(allowed)}
    fullest = max(counts, key=counts.__getitem__)
    emptiest = min(counts, key=counts.__getitem__)
    return emptiest if own == fullest and crowd - counts[emptiest] >= 2 else None


class CoreSpread:
    """The cores of all ranks of a group. ``words[r]`` is of one int64 that rank r alone writes."""

    def __init__(self, words: Sequence[memoryview], rank: int) -> None:
        self._words, self._own, self._rank = words, words[rank], rank
        self._next = 0.0
        self._works = _core is not None and hasattr(os, "sched_setaffinity") and len(words) > 1

    def say(self) -> None:
        """Tell the other ranks on which core this thread runs."""
        if self._works:
            self._own[0] = 1 + _core()  # type: ignore[misc]  # memory begins with 0: not said yet

    def look(self) -> None:
        """Move this thread to another core if that makes the ranks more even."""
        if not self._works:
            return
        cores = [word[0] - 1 for word in self._words]
        if cores.count(cores[self._rank]) < 2:
            return
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SECONDS_BETWEEN
        try:
            allowed = os.sched_getaffinity(0)
            target = move(cores, self._rank, tuple(allowed))
            if target is not None:
                os.sched_setaffinity(0, (target,))
                try:
                    self._own[0] = 1 + target
                finally:
                    os.sched_setaffinity(0, allowed)
        except OSError:  # not permitted, or the cores changed meanwhile
            self._works = False
