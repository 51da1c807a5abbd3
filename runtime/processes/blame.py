"""Blame of a wait that lasts: who is late, where it is instead, and telling everybody when a wait fails.

A rank that waits says in its control segments for whom, again and again (``deadlock.py``). So others can
follow a chain of ranks to the one that nobody waits behind, whichever of them is the first to give up. To
the groups in which it does not wait it says where it does.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from interlace.runtime.core.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    InterlaceError,
    PeerDiedError,
)
from interlace.runtime.processes.dump import dump

FRESH_SECONDS = 0.5  # a rank that waits says so every millisecond, if it gets a core

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
        self.group = weakref.proxy(group)
        _everywhere.add(group)

    @staticmethod
    def everywhere() -> list[Any]:
        """The groups of this process that have met."""
        return [group for group in list(_everywhere) if group.control is not None]

    def whereabouts(self, ranks: Sequence[int]) -> str:
        """A text on where these ranks, by name, wait instead, of those that do; empty if none does."""
        control, since = self.group.control, time.monotonic() - FRESH_SECONDS
        if control is None:
            return ""
        local = enumerate(self.group.names)
        known = [(name, control.elsewhere(rank, since)) for rank, name in local if name in ranks]
        return "".join(f"; rank {name} waits for {text}" for name, text in known if text)

    def awaited(self, rank: int) -> int | None:
        """For whom ``rank`` waits in this group; None for nobody."""
        control = self.group.control
        return None if control is None else control.awaited(rank, time.monotonic() - FRESH_SECONDS)

    def culprits(self, waited_for: Sequence[int]) -> list[int]:
        """Whom these ranks wait for in the end: the names of who is to blame if none of them comes."""
        group = self.group
        late = {follow(rank, self.awaited, group.rank) for rank in waited_for}
        return sorted({group.beyond(group.names[rank]) for rank in late})

    def ended(self, error: InterlaceError) -> None:
        """A wait has ended with ``error``: what came too late, or died, ends those of all ranks."""
        group = self.group
        if isinstance(error, CollectiveTimeoutError):
            late = error.waited_for
        elif isinstance(error, PeerDiedError):
            late = (error.rank,)
        elif isinstance(error, DeadlockError):
            late = ()
        else:
            dump(group, str(error), level=logging.INFO)  # others have said it
            return
        blamed = [rank for rank, name in enumerate(group.names) if name in late]
        group.abort(f"{error} (message {group.sequence} of its group)", blamed)
