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

Ranks of one host that wait for each other are detected within some ms, from words in shared memory. A wait
that lasts publishes its *claim*: one word in this rank's control segment of every group of its process that
also contains the awaited process::

    number of the wait << 16 | OTHERS | BOUNDED | 1 + the awaited rank

A claim stays after its wait has ended, so a circle of claims proves nothing yet. A rank that finds itself
in the same circle at two looks, with a failed poll between them, publishes in SEEN a hash of all claims of
the circle. Once all its ranks have published the same hash, these waits can end only with an error. Proof:
rank a waits for something that rank b had not done before b's wait began, because a polled after it saw b's
claim. And b does not do it before b's wait ends, which had not ended when b saw a's claim. So a's wait ends
after b's, b's after c's, and so on around to a's.

This holds for ranks in which one thread calls ops and that thread waits; the other threads are interlace's
own and are idle. OTHERS means that there are more threads: then a circle is only a warning. BOUNDED means
that the process may continue, because its caller has bounded the wait or interlace's threads are at work:
then the ranks that wait for it are not told of a deadlock. A ``monitored_barrier`` ends its wait EARLY and
alone, because its purpose is to report which ranks do not come.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interlace.runtime.core.errors import (
    BlockedWait,
    CollectiveTimeoutError,
    DeadlockError,
    InterlaceError,
)
from interlace.runtime.processes.control import LONGEST_SLEEP, Bell, Control
from interlace.runtime.processes.worker import Helper

if TYPE_CHECKING:
    from interlace.runtime.processes.dump import Blame

OTHERS, BOUNDED, _RANK, _NUMBER = 1 << 9, 1 << 8, 0xFF, 16
LOOK_SECONDS = 5e-3
ELSEWHERE_SECONDS, SAY_SECONDS, WARNING_SECONDS = 0.2, 0.1, 1.0

Circle = tuple[tuple[int, int], ...]
"""Ranks and their claims, by rank."""

_log = logging.getLogger("interlace")
_numbers = itertools.count(1)


class Kind(enum.Enum):
    """How a wait may end: with its op; at its caller's timeout; before that; as one of many waits."""

    OF_OP, OF_CALLER, EARLY, OF_MANY = range(4)


def alone() -> bool:
    """Return whether no other thread can call an op; ``threading`` does not know all threads."""
    everyone = {thread.ident: thread for thread in threading.enumerate()}
    others = (everyone.keys() | sys._current_frames().keys()) - {threading.get_ident()}
    return all(isinstance(everyone.get(other), Helper) for other in others)


def helpers_at_work() -> bool:
    return any(isinstance(thread, Helper) and thread.at_work() for thread in threading.enumerate())


def circle(control: Control, rank: int) -> Circle:
    """Return the circle of claims that contains ``rank``, or an empty one."""
    found: dict[int, int] = {}
    last = rank
    while last not in found:
        found[last] = claim = control.claim(last)
        last = (claim & _RANK) - 1
        if last < 0:
            return ()
    return tuple(sorted(found.items())) if last == rank else ()


class LastingWait:
    """One wait: the words that others read about it, and whether it is part of a circle of waits."""

    def __init__(self, blame: Blame, kind: Kind) -> None:
        self.blame, self._kind = blame, kind
        self._awaited: tuple[int, ...] = ()
        self._since = self._next = self._say = 0.0
        self._number = 0
        self._circles: dict[Any, Circle] = {}
        self._warned = False
        self._found: InterlaceError | None = None
        self._waited_in: list[Any] = []  # the groups that contain this wait's circle

    def look(self, doing: str, waited_for: Sequence[int]) -> InterlaceError | None:
        """After a failed poll, publish this wait and return ``HostGroup.interruption`` for it."""
        group, now = self.blame.group, time.monotonic()
        if group.control is not None and waited_for:
            group.control.waits(waited_for[0], now)
            if (awaited := tuple(waited_for)) != self._awaited:
                self._awaited, self._number, self._circles = awaited, 0, {}
                self._since, self._next = now, now + LOOK_SECONDS
                self._say = now + ELSEWHERE_SECONDS
            elif now > self._next:
                self._next = now + LOOK_SECONDS
                self._lasts(doing, now)
        problem = group.interruption(doing, waited_for)
        if problem is not None and self._number and self._found is None:
            self._lasts(doing, now)  # a rank that has detected the deadlock may have left since
        return self._found or problem

    def ended(self, error: InterlaceError) -> None:
        if error is not self._found or isinstance(error, DeadlockError):
            self.blame.ended(error)
        if isinstance(error, DeadlockError):
            for group in self._waited_in:  # its ranks must read the reason before these leave
                group.abort(str(error))

    def _lasts(self, doing: str, now: float) -> None:
        """Publish this wait in the groups of this process; log it if the awaited peer waits elsewhere."""
        group = self.blame.group
        late = [group.names[rank] for rank in self._awaited]
        text = f"ranks {late} in {doing} of group {group.prefix!r}"
        if not self._number:
            self._number = next(_numbers)
            self._claim(text)
        for each, before in self._circles.items():
            if each.control is not None:
                self._look_around(each, each.control, before)
        if now > self._say:
            self._say = now + SAY_SECONDS
            for other in self.blame.everywhere():
                if other.prefix != group.prefix:
                    other.control.say_elsewhere(text, now)
            lasted = now - self._since > WARNING_SECONDS
            if lasted and not self._warned and (where := self.blame.whereabouts(late)):
                self._warned = True
                _log.warning("rank %s waits for %s%s", group.names[group.rank], text, where)

    def _claim(self, text: str) -> None:
        """Publish the claim, if this rank waits for one process in an op of one step."""
        pid = self.blame.group.pids.get(self._awaited[0])
        several = len(self._awaited) > 1 or self._kind is Kind.OF_MANY
        if several or not pid or pid == os.getpid():
            return
        if isinstance(threading.current_thread(), Helper):
            return
        word = self._number << _NUMBER | (0 if alone() else OTHERS)
        word |= BOUNDED if self._kind is not Kind.OF_OP or helpers_at_work() else 0
        for other in self.blame.everywhere():
            for rank, known in other.pids.items():
                if known == pid:
                    other.control.make_claim(word | 1 + rank, text)
                    self._circles[other] = ()

    def _look_around(self, group: Any, control: Control, before: Circle) -> None:
        """Find out whether this wait is in a circle in ``group`` that all ranks of the circle have seen."""
        now = circle(control, group.rank)
        if any(rank == group.rank and claim >> _NUMBER != self._number for rank, claim in now):
            return  # another thread's wait
        if now and now == before:
            control.see(hash(now))
        self._circles[group] = now or before
        if before and all(control.seen(rank) == hash(before) for rank, _ in before):
            self._is_in(group, control, before)

    def _is_in(self, group: Any, control: Control, found: Circle) -> None:
        """Report a circle, none of whose waits can end by itself."""
        flags = 0
        for rank, claim in found:
            own = rank == group.rank and self._kind is Kind.EARLY
            flags |= claim & ~BOUNDED if own else claim
        where = f"of group {group.prefix!r}"
        names, text_of = group.names, control.claim_text
        waits = [BlockedWait(names[rank], where, text_of(rank)) for rank, _ in found]
        text = "; ".join(map(str, waits))
        if flags & BOUNDED:
            return
        if flags & OTHERS:
            if not self._warned:
                _log.warning("%s: a deadlock, unless other threads of theirs go on", text)
            self._warned = True
        elif self._kind is Kind.EARLY:
            own = self.blame.group
            self._found = CollectiveTimeoutError(text, tuple(own.names[r] for r in self._awaited))
        else:
            self._found = DeadlockError(waits)
            self._waited_in = [
                each
                for each in self.blame.everywhere()
                if any(wait.waiting_for.endswith(f" of group {each.prefix!r}") for wait in waits)
            ]


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
    ended = (found for found, events in poll.poll(1e3 * seconds) if events & select.POLLIN)
    return [ranks[descriptor] for descriptor in ended]


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

    def _error_of(self, error: InterlaceError) -> InterlaceError:
        if self._judge is not None:
            self._judge.ended(error)
        return error

    def step(
        self, doing: str, waited_for: Sequence[int], ready: Callable[[], bool] | None = None
    ) -> None:
        """Spend time after a failed poll; raise if hopeless. ``ready``: the poll, if peers ring for it."""
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
        if not self._next_check:
            self._next_check = now + CHECK_SECONDS
        return now >= self._next_check

    def check(self, doing: str, waited_for: Sequence[int], now: float) -> bool:
        """Raise if hopeless. Return True if the caller must poll first."""
        self._next_check = now + CHECK_SECONDS
        problem = self._interruption(doing, waited_for)
        if problem is not None:
            if self._suspect:
                raise self._error_of(problem)
            self._suspect, self._next_check = True, now
            return True
        self._suspect = False
        if now - self._started > self._timeout:
            blame = self._judge and self._judge.blame
            late = tuple(blame.culprits(waited_for) if blame else waited_for)
            where = blame.whereabouts(late) if blame else ""
            text = f"{doing} has waited {self._timeout:g} s for ranks {list(late)}{where}"
            raise self._error_of(CollectiveTimeoutError(f"rank {self._rank}: {text}", late))
        return False
