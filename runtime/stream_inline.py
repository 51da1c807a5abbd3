"""Streams that run every item at once, in the calling thread: a CPU place needs no queue.

An op's algorithm is written for streams that overlap. Here they do not: an item has ended when the
call returns, so events are always complete, and the order of the calls is the order of execution.
What a stream waits for must therefore be published by a peer, or by this rank before the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from interlace.kernels.signal import ABORT_WORD, CREDIT_WORDS, EPOCH_WORD
from interlace.runtime.atomics import Cells, load_acquire, store_release
from interlace.runtime.errors import AbortedError, BlockedWait
from interlace.runtime.memory import WORD, Workspace
from interlace.runtime.stream import Event, Stream

if TYPE_CHECKING:
    from interlace.runtime.launch import KernelLaunch


class Waiter(Protocol):
    """What an :class:`InlineStream` needs of its place."""

    rank: int

    def wait_until(
        self, predicate: Callable[[], bool], doing: str, waited_for: Sequence[int]
    ) -> None:
        """Return once ``predicate()``; raise if a rank of ``waited_for`` is gone, etc."""

    def idle_hook(self) -> Callable[[BlockedWait], None]:
        """For one launch: a function to call whenever all its programs wait."""

    def check(self) -> None:
        """Raise what the group has failed with, if it has."""


class CompletedEvent(Event):
    """A point that has been reached."""

    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class InlineStream(Stream):
    """Runs items at once. ``waiter`` is the place."""

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter

    def launch(self, launch: KernelLaunch) -> None:
        launch.run_interpreted(self._waiter.rank, self._waiter.idle_hook())

    def copy(self, destination: torch.Tensor, source: torch.Tensor, label: str) -> None:
        destination.copy_(source)

    def call(self, function: Callable[[], Any], label: str) -> None:
        function()

    def publish(self, workspace: Workspace, peer: int, slot: int) -> None:
        bases = _bases(workspace)
        epoch = _epoch(bases[workspace.rank])
        store_release(bases[peer] + workspace.slot_byte(slot), epoch)

    def wait(self, workspace: Workspace, source: int, slot: int) -> None:
        base = _bases(workspace)[workspace.rank]
        epoch = _epoch(base)
        cells = Cells((base + workspace.slot_byte(slot), base + ABORT_WORD * WORD))

        def published() -> bool:
            seen, aborted = cells.load_acquire()
            return seen >= epoch or self._gave_up(aborted, workspace)

        doing = f"{workspace.op}, waiting for slot {slot} to reach epoch {epoch}"
        self._waiter.wait_until(published, doing, (source,))

    def wait_credits(self, workspace: Workspace) -> None:
        base = _bases(workspace)[workspace.rank]
        previous = _epoch(base) - 1
        credits = [base + (CREDIT_WORDS + rank) * WORD for rank in range(workspace.world_size)]
        cells = Cells((*credits, base + ABORT_WORD * WORD))

        def credited() -> bool:
            *seen, aborted = cells.load_acquire()
            return min(seen) >= previous or self._gave_up(aborted, workspace)

        if not credited():
            late = [rank for rank, seen in enumerate(cells.load_acquire()[:-1]) if seen < previous]
            doing = f"{workspace.op}, waiting for the end of the op before it on this channel"
            self._waiter.wait_until(credited, doing, late)

    def finish(self, workspace: Workspace) -> None:
        bases = _bases(workspace)
        epoch = _epoch(bases[workspace.rank])
        Cells([base + (CREDIT_WORDS + workspace.rank) * WORD for base in bases]).store_release(
            epoch
        )
        store_release(bases[workspace.rank] + EPOCH_WORD * WORD, epoch)

    def record(self) -> Event:
        return CompletedEvent()

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def _gave_up(self, aborted: int, workspace: Workspace) -> bool:
        """False; an error if a rank aborted, or a kernel of some rank gave up its wait."""
        if aborted:
            self._waiter.check()
            raise AbortedError(f"{workspace.op}: a kernel of this group has given up waiting")
        return False


def _bases(workspace: Workspace) -> list[int]:
    bases: list[int] = workspace.buffer.peers.tolist()
    return bases


def _epoch(own_base: int) -> int:
    """The epoch of the op that runs now on the channel whose header is at ``own_base``."""
    return load_acquire(own_base + EPOCH_WORD * WORD) + 1
