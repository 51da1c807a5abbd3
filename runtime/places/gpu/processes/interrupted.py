"""A bound for C code that waits in a system call and holds the interpreter's lock.

No thread of Python can run meanwhile, so nobody could look after it. But a signal interrupts the call,
which then fails with EINTR, as long as the signal's handler does not ask for a restart; Python's do not.
The timer goes on every second, for the signal may come just before the call.

Signal handlers belong to the main thread; elsewhere, and where a library has a handler of its own for
SIGALRM, there is no bound. A timer of the user's is put off for as long as this one is set.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

AGAIN_SECONDS = 1.0


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[threading.Event]:
    """After ``seconds`` in the block the main thread's system calls fail with EINTR; the event is set."""
    passed = threading.Event()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGALRM) is None
    ):
        yield passed
        return
    before = signal.signal(signal.SIGALRM, lambda number, frame: passed.set())
    start = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        yield passed
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if left:
            left = max(0.001, left - (time.monotonic() - start))
            signal.setitimer(signal.ITIMER_REAL, left, interval)
