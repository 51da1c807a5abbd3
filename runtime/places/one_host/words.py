"""int64 words of shared memory: loaded with acquire, stored with release, in a tenth of a microsecond.

Where the processor itself keeps loads in order with loads and stores with stores (x86-64), an aligned load
of Python's ``memoryview`` is an acquire and its store a release: each is one move of eight bytes inside a
C function that no compiler can look into from its caller. Everywhere else ``acquired`` and
``release`` go through the atomics of :mod:`interlace.runtime.places.one_host.atomics`, which take 20
times as long. A poll may then read the plain word; what it has seen counts after ``acquired``.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

from interlace.runtime.places.one_host.atomics import load_acquire, store_release

ORDERED = platform.machine() in ("x86_64", "AMD64")


class Words:
    """``data``, bytes at ``address`` that stay mapped, as words: ``view[i]`` is byte ``8 * i``.

    ``release(index, value)`` stores a word; earlier writes of this thread come before it.
    ``acquired(index)`` loads one; what was written before its release is seen afterwards.
    """

    __slots__ = ("acquired", "address", "release", "view")

    release: Callable[[int, int], None]
    acquired: Callable[[int], int]

    def __init__(self, address: int, data: memoryview) -> None:
        self.address = address
        self.view = data[: data.nbytes // 8 * 8].cast("B").cast("q")
        if ORDERED:
            self.release, self.acquired = self.view.__setitem__, self.view.__getitem__
        else:
            self.release = lambda index, value: store_release(address + 8 * index, value)
            self.acquired = lambda index: load_acquire(address + 8 * index)
