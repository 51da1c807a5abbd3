"""Waits of one process for others: they yield the core, are bounded, and never wait for an ended process.

A wait is a loop of the caller's own polls, with one :meth:`Patience.step` after each failed poll::

    polls 1-20        nothing: the answer usually arrives within microseconds
    up to 1 ms        yield the core after each poll: with more ranks than cores, the awaited rank may need
                      it (a barrier on 2 cores is 4 times faster with it). Not while other processes of the
                      host want the cores, because they keep a yielded core for milliseconds
    later             sleep until a peer rings the bell (``control.py``), at most 1 ms; if no peer would
                      ring it, sleep for 1/20 of the time waited so far
    every 1 ms        look for reasons why the wait could never end

A reason must be found twice with a poll in between: a peer may publish the awaited value and then exit,
which is not a failure.
"""

import ctypes
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence

from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError
from interlace.runtime.processes.control import LONGEST_SLEEP, Bell
from interlace.runtime.processes.deadlock import LastingWait

CHECK_SECONDS = 1e-3
YIELD_SECONDS = 1e-3
SPINS = 20
LONG_YIELD = 500_000  # ns: another process took a whole time slice
CROWDED = 10  # for this many such slices this process yields no core; a sleeping one is woken before others

# os.sched_yield keeps the GIL before Python 3.12 and would starve the process's other threads.
_yield_core = ctypes.CDLL(None).sched_yield

crowded_until = ctypes.c_int64()
"""In ns of the monotonic clock, for this process. Machine code reads and sets it, too."""
CROWD = LONG_YIELD, CROWDED, ctypes.addressof(crowded_until)

Interruption = Callable[[str, Sequence[int]], InterlaceError | None]


def give_core_away() -> None:
    """Yield the core, and note it if another process kept the core for long."""
    before = time.monotonic_ns()
    _yield_core()
    after = time.monotonic_ns()
    if after - before > LONG_YIELD:
        crowded_until.value = after + CROWDED * (after - before)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def ended_processes(pidfds: Mapping[int, int], seconds: float = 0.0) -> list[int]:
    """Return the ranks whose process has ended; wait at most ``seconds`` for the first one.

    Threads cannot share a poll object, so each call makes its own.
    """
    poll = select.poll()
    ranks = {descriptor: rank for rank, descriptor in pidfds.items()}
    for descriptor in ranks:
        poll.register(descriptor, select.POLLIN)
    return [
        ranks[descriptor] for descriptor, what in poll.poll(1e3 * seconds) if what & select.POLLIN
    ]


def has_ended(pid: int) -> bool:
    """Return whether the process that had this number a moment ago has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    try:
        return bool(ended_processes({0: descriptor}))
    finally:
        os.close(descriptor)


class Patience:
    """The state of one wait. ``interruption`` finds out why it can never end; ``timeout`` bounds it.

    ``judge`` finds out who is to blame, and is called with the error that ends the wait. ``since`` is the
    start of the awaited event, by the monotonic clock, if the timeout counts from there.
    """

    def __init__(
        self,
        rank: int,
        timeout: float,
        interruption: Interruption,
        *,
        spins: int = SPINS,
        bell: Bell | None = None,
        judge: LastingWait | None = None,
        since: float = 0.0,
    ) -> None:
        self._bell, self._judge = bell, judge
        self._rank = rank
        self._timeout = timeout
        self._interruption = interruption
        self._steps = -spins
        self._started, self._next_check = since, 0.0
        self._suspect = False

    def _told(self, error: InterlaceError) -> InterlaceError:
        if self._judge is not None:
            self._judge.ended(error)
        return error

    def step(
        self, doing: str, waited_for: Sequence[int], ready: Callable[[], bool] | None = None
    ) -> None:
        """Spend time after a failed poll; raise if hopeless. ``ready`` is the poll, if peers ring for
        it."""
        self._steps += 1
        if self._steps < 0:
            return
        now = time.monotonic()
        if not self._started:
            self._started = now
        if self.due(now) and self.check(doing, waited_for, now):
            return
        waited = now - self._started
        if waited < YIELD_SECONDS and now * 1e9 > crowded_until.value:
            give_core_away()
        elif ready is not None and self._bell is not None:
            self._bell.sleep(LONGEST_SLEEP, ready)
        else:
            time.sleep(min(LONGEST_SLEEP, waited / 20))

    def due(self, now: float) -> bool:
        """Return whether :meth:`check` is due."""
        if not self._next_check:
            self._next_check = now + CHECK_SECONDS
        return now >= self._next_check

    def check(self, doing: str, waited_for: Sequence[int], now: float) -> bool:
        """Raise if hopeless. Return True if the caller must poll first."""
        self._next_check = now + CHECK_SECONDS
        problem = self._interruption(doing, waited_for)
        if problem is not None:
            if self._suspect:
                raise self._told(problem)
            self._suspect, self._next_check = True, now
            return True
        self._suspect = False
        if now - self._started > self._timeout:
            blame = self._judge and self._judge.blame
            late = tuple(blame.culprits(waited_for) if blame else waited_for)
            text = (
                f"rank {self._rank}: {doing} has waited {self._timeout:g} s for ranks {list(late)}"
            )
            text += blame.whereabouts(late) if blame else ""
            raise self._told(CollectiveTimeoutError(text, late))
        return False
