"""int64 words of shared memory: loaded with acquire, stored with release, in a tenth of a microsecond.

Where the processor itself keeps loads in order with loads and stores with stores (x86-64), an aligned load
of Python's ``memoryview`` is an acquire and its store a release: each is one move of eight bytes inside a
C function that no compiler can look into from its caller. Everywhere else :func:`acquired` and
:func:`release` go through the atomics of :mod:`interlace.runtime.places.one_host.atomics`, which take 20
times as long. A poll may then read the plain word; what it has seen counts after :func:`acquired`.
"""

from __future__ import annotations

import platform

from interlace.runtime.places.one_host.atomics import load_acquire, store_release

ORDERED = platform.machine() in ("x86_64", "AMD64")


class Words:
    """``data``, bytes at ``address`` that stay mapped, as words: ``view[i]`` is byte ``8 * i``."""

    __slots__ = ("address", "view")

    def __init__(self, address: int, data: memoryview) -> None:
        self.address = address
        self.view = data[: data.nbytes // 8 * 8].cast("B").cast("q")

    def release(self, index: int, value: int) -> None:
        """Store ``value``; earlier writes of this thread come before it."""
        if ORDERED:
            self.view[index] = value
        else:
            store_release(self.address + 8 * index, value)

    def acquired(self, index: int) -> int:
        """Load a word; what was written before its release is seen afterwards."""
        return self.view[index] if ORDERED else load_acquire(self.address + 8 * index)
