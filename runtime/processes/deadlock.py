"""Detection of ranks of one host that wait for each other, within some ms, from words in shared memory.

A wait that lasts publishes its *claim*: one word in this rank's control segment of every group of its
process that contains the awaited process, too::

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

import enum
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from interlace.runtime.core.errors import (
    BlockedWait,
    CollectiveTimeoutError,
    DeadlockError,
    InterlaceError,
)
from interlace.runtime.processes.control import Control
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
    """How a wait may end: with its op; at its caller's timeout; early, before that; as one of many
    waits."""

    OF_OP, OF_CALLER, EARLY, OF_MANY = range(4)


def alone() -> bool:
    """Return whether no other thread of this process can call an op. ``threading`` does not know all
    threads.
    """
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
                self._since, self._next, self._say = (
                    now,
                    now + LOOK_SECONDS,
                    now + ELSEWHERE_SECONDS,
                )
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
        if isinstance(
            error, DeadlockError
        ):  # ranks that wait for these must read the reason before these leave
            for group in self._waited_in:
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
        waits = [
            BlockedWait(group.names[rank], where, control.claim_text(rank)) for rank, _ in found
        ]
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
