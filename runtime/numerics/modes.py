"""The floating-point mode of a thread: how it rounds, and whether denormal numbers count as zero.

Ranks that each sum the same data for themselves get the same bits in the same mode only, and a user may set
another on one of them (``torch.set_flush_denormal``, C's ``fesetround``). So what interlace computes for a
rank it computes in the usual mode: to the nearest, with denormal numbers.

Asking C for the mode costs 1 us, as much as to add two small tensors. Four sums of Python's tell in 0.1 us
whether it is the usual one (Zen 4, Python 3.11, November 2026).
"""

import ctypes
import sys
from typing import Any

_LONGEST = 256  # bytes of an fenv_t: 32 on x86-64, 8 on AArch64
_USUAL = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl
_DENORMAL, _LITTLE, _one = 2.0**-1070, 2.0**-60, 1.0

_c: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def is_usual() -> bool:
    """Whether the mode of this thread is the usual one."""
    return (
        _DENORMAL * 0.5 > 0.0
        and _one + _LITTLE == 1.0
        and _one - _LITTLE == 1.0
        and -_one - _LITTLE == -1.0
    )


class UsualMode:
    """A context in which this thread computes in the usual mode; afterwards it has the one from before."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before: ctypes.Array[ctypes.c_char] | None = None
        if not is_usual() and _c is not None:
            self._before = ctypes.create_string_buffer(_LONGEST)
            _c.fegetenv(self._before)
            _c.fesetenv(_USUAL)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _c.fesetenv(self._before)
