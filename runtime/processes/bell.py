"""Sleeping until a peer process has released something: one futex per rank, in shared memory.

A rank that wants to sleep says so in its ASLEEP word, looks once more at what it waits for, and then
waits on its BELL. Whoever releases anything looks at the ASLEEP words afterwards and rings for those
that are set. A processor may let the releasing rank read ASLEEP before its release is visible, and the
bell is then not rung; sleeping is therefore bounded by a millisecond, and nothing but that is lost.

Where there is no futex (not Linux on x86-64 or AArch64) sleeping is a short plain sleep.
"""

import ctypes
import platform
import sys
import time
from collections.abc import Callable

LONGEST_SLEEP = 1e-3

_NUMBERS = {"x86_64": 202, "AMD64": 202, "aarch64": 98}
_FUTEX = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
FUTEX_WAIT, FUTEX_WAKE = 0, 1
EVERYONE = 1 << 30  # threads to wake
BELL = 64  # bytes from the word ASLEEP to the futex
ANYONE = -1  # in ASLEEP

_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wake(asleep: int) -> None:
    """Ring the bell of whoever sleeps by the word at this address."""
    if _FUTEX is not None:
        futex = asleep + BELL
        ctypes.c_uint32.from_address(futex).value += 1
        _syscall(_FUTEX, ctypes.c_void_p(futex), FUTEX_WAKE, EVERYONE, None, None, 0)


class Bell:
    """The own bell, by the address of the word that says that this rank sleeps."""

    def __init__(self, asleep: int) -> None:
        self._own_asleep = ctypes.c_int64.from_address(asleep)
        self._bell = ctypes.c_uint32.from_address(asleep + BELL)
        self._address = ctypes.c_void_p(asleep + BELL)

    def sleep(self, seconds: float, ready: Callable[[], bool]) -> None:
        """Sleep until the bell rings, ``seconds`` at most; not at all if ``ready()``."""
        seconds = min(seconds, LONGEST_SLEEP)
        if _FUTEX is None:
            time.sleep(seconds)
            return
        rung = self._bell.value
        self._own_asleep.value = ANYONE
        try:
            if not ready():
                timeout = ctypes.byref(_Timespec(0, int(seconds * 1e9)))
                still = ctypes.c_uint32(rung)
                _syscall(_FUTEX, self._address, FUTEX_WAIT, still, timeout, None, 0)
        finally:
            self._own_asleep.value = 0
