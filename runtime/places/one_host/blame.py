"""Blame of a wait that lasts: who is late, where it is instead, and telling everybody when a wait fails.

A rank that waits says in its control segments for whom, again and again. So others can follow a chain of
ranks to the one that nobody waits behind, whichever of them is the first to give up. To the groups in
which it does not wait it says where it does: ranks that call the ops of two groups in different orders
are found after a second, and told in a warning, long before the timeout.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError, PeerDiedError
from interlace.runtime.record.dump import dump

FRESH_SECONDS = 0.5  # a rank that waits says so every millisecond, if it gets a core
ELSEWHERE_SECONDS, WARNING_SECONDS = 0.2, 1.0

_log = logging.getLogger("interlace")
_everywhere: weakref.WeakSet[Any] = weakref.WeakSet()
"""The groups of this process; a judge may outlive its group, in an error's traceback."""


def follow(rank: int, awaited: Callable[[int], int | None], own: int) -> int:
    """The end of the chain of who waits for whom from ``rank`` on; ``rank`` if that leads to ``own``."""
    seen, last = {own}, rank
    while last not in seen:
        seen.add(last)
        if (further := awaited(last)) is None:
            return last
        last = further
    return rank


def aborted_by(rank: int, reason: str) -> str:
    """A text: who aborted, and why; a reason that goes from rank to rank keeps the first one's name."""
    said = " aborted the group: "
    return reason if said in reason else f"rank {rank}{said}{reason}"


class Blame:
    """The judge of the waits of ``group``, a HostGroup."""

    def __init__(self, group: Any) -> None:
        self._group = weakref.proxy(group)
        self._wait: tuple[str, int] | None = None
        self._since = self._next = 0.0
        self._warned = False
        _everywhere.add(group)

    def look(self, doing: str, waited_for: Sequence[int]) -> InterlaceError | None:
        """``HostGroup.interruption`` for a wait under way, of which the peers can read."""
        group, now = self._group, time.monotonic()
        if group.control is not None and waited_for:
            group.control.waits(waited_for[0], now)
            wait = doing, group.sequence
            if wait != self._wait:
                self._wait, self._warned = wait, False
                self._since, self._next = now, now + ELSEWHERE_SECONDS
            elif now > self._next:
                self._next = now + FRESH_SECONDS / 5
                self._lasts(doing, waited_for, now)
        found: InterlaceError | None = group.interruption(doing, waited_for)
        return found

    def _lasts(self, doing: str, waited_for: Sequence[int], now: float) -> None:
        """Say in the other groups of this process where it waits, and here if a peer waits elsewhere."""
        group = self._group
        late = [group.names[rank] for rank in waited_for]
        text = f"{doing} of group {group.prefix!r}, for ranks {late} of it"
        for other in list(_everywhere):
            if other.control is not None and other.prefix != group.prefix:
                other.control.say_elsewhere(text, now)
        lasted = now - self._since > WARNING_SECONDS and not self._warned
        if lasted and (where := self.whereabouts(late)):
            self._warned = True
            _log.warning("rank %s waits in %s%s", group.names[group.rank], text, where)

    def whereabouts(self, ranks: Sequence[int]) -> str:
        """A text on where these ranks, by name, wait instead, of those that do; empty if none does."""
        control, since = self._group.control, time.monotonic() - FRESH_SECONDS
        if control is None:
            return ""
        local = enumerate(self._group.names)
        known = [(name, control.elsewhere(rank, since)) for rank, name in local if name in ranks]
        return "".join(f"; rank {name} waits in {text}" for name, text in known if text)

    def awaited(self, rank: int) -> int | None:
        """For whom ``rank`` waits in this group; None for nobody."""
        control = self._group.control
        return None if control is None else control.awaited(rank, time.monotonic() - FRESH_SECONDS)

    def culprits(self, waited_for: Sequence[int]) -> list[int]:
        """Whom these ranks wait for in the end: the names of who is to blame if none of them comes."""
        group = self._group
        late = {follow(rank, self.awaited, group.rank) for rank in waited_for}
        return sorted({group.beyond(group.names[rank]) for rank in late})

    def ended(self, error: InterlaceError) -> None:
        """A wait has ended with ``error``: what came too late, or died, ends those of all ranks."""
        group = self._group
        if isinstance(error, CollectiveTimeoutError):
            late = error.waited_for
        elif isinstance(error, PeerDiedError):
            late = (error.rank,)
        else:
            dump(group, str(error), level=logging.INFO)  # others have said it
            return
        blamed = [rank for rank, name in enumerate(group.names) if name in late]
        group.abort(f"{error} (message {group.sequence} of its group)", blamed)
