"""int64 words of shared memory for Python: release/acquire atomics on raw addresses, and faster accesses.

Python has no atomics. The C++ half of Triton's interpreter runs ``std::atomic`` operations on arrays of
addresses with a given memory order. By using it, Python and interpreted kernels execute the same
instructions, the code is right on weakly ordered processors, and no compiler is needed. A load is an
``atomic_add`` of 0, as in ``kernels/signal.py``.

Thread safety: :class:`Cells` holds only arrays that are never written (addresses, zeros, mask), and a store
creates its own value array. Any number of threads may use one object at once.

x86-64 keeps loads in order with loads and stores in order with stores. There, an aligned load through a
``memoryview`` is an acquire and an aligned store is a release: each is one move of eight bytes in a C
function that the compiler cannot inline into its caller. So :class:`Words` take a tenth of a microsecond on
x86-64, and use the atomics elsewhere. A poll may read the plain word; rely on its value only after
``acquired``.
"""

import platform
from collections.abc import Callable, Sequence

import numpy as np

from interlace.runtime.compat.triton_interpreter import atomics

_rmw = atomics.atomic_rmw
_EXCHANGE = atomics.RMW_OP.XCHG
_ADD = atomics.RMW_OP.ADD
_RELEASE = atomics.MEM_SEMANTIC.RELEASE
_ACQUIRE = atomics.MEM_SEMANTIC.ACQUIRE
_BOTH = atomics.MEM_SEMANTIC.ACQUIRE_RELEASE
ORDERED = platform.machine() in ("x86_64", "AMD64")


class Cells:
    """int64 words, 8-byte aligned, that stay mapped and are read or written together."""

    __slots__ = ("_addresses", "_mask", "_zeros")

    def __init__(self, addresses: Sequence[int]) -> None:
        self._addresses = np.array(addresses, dtype=np.uint64)
        self._zeros = np.zeros(len(addresses), dtype=np.int64)
        self._mask = np.ones(len(addresses), dtype=np.bool_)

    def load_acquire(self) -> list[int]:
        values: list[int] = _rmw(_ADD, self._addresses, self._zeros, self._mask, _ACQUIRE).tolist()
        return values

    def store_release(self, value: int) -> None:
        values = np.full(len(self._zeros), value, dtype=np.int64)
        _rmw(_EXCHANGE, self._addresses, values, self._mask, _RELEASE)


def store_release(address: int, value: int) -> None:
    Cells((address,)).store_release(value)


def load_acquire(address: int) -> int:
    return Cells((address,)).load_acquire()[0]


def compare_and_swap(address: int, old: int, new: int) -> None:
    """Atomically store ``new`` if the word equals ``old``."""
    values = np.array([old], dtype=np.int64), np.array([new], dtype=np.int64)
    atomics.atomic_cas(np.array([address], dtype=np.uint64), *values, _BOTH)


class Words:
    """The words of ``data``, bytes at ``address`` that stay mapped: ``view[i]`` is byte ``8 * i``.

    ``release(index, value)`` stores a word after all earlier writes of this thread. ``acquired(index)``
    loads a word; the writes before its release are visible afterwards.
    """

    __slots__ = ("acquired", "address", "bytes", "release", "view")

    release: Callable[[int, int], None]
    acquired: Callable[[int], int]

    def __init__(self, address: int, data: memoryview) -> None:
        self.address = address
        self.bytes = data
        self.view = data[: data.nbytes // 8 * 8].cast("B").cast("q")
        if ORDERED:
            self.release, self.acquired = self.view.__setitem__, self.view.__getitem__
        else:
            self.release = lambda index, value: store_release(address + 8 * index, value)
            self.acquired = lambda index: load_acquire(address + 8 * index)
