"""Streams that run every item at once, in the calling thread: a CPU place needs no queue.

An op's algorithm is written for streams that overlap. Here they do not: an item has ended when the
call returns, so events are always complete, and the order of the calls is the order of execution.
What a stream waits for must therefore be published by a peer, or by this rank before the wait.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from interlace.kernels.signal import ABORT_WORD, CREDIT_WORDS, EPOCH_WORD
from interlace.runtime.core.errors import AbortedError
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import WORD, Workspace
from interlace.runtime.core.stream import Event, Stream
from interlace.runtime.places.sim.scheduler import trace
from interlace.runtime.places.sim.scheduler.scheduler import run_interpreted
from interlace.runtime.processes.atomics import Cells, load_acquire, store_release
from interlace.runtime.processes.group import HostGroup


class CompletedEvent(Event):
    """A point that has been reached."""

    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class InlineStream(Stream):
    """Runs items at once. ``group`` is that of the host's ranks."""

    def __init__(self, group: HostGroup) -> None:
        self._group = group

    def launch(self, launch: KernelLaunch) -> None:
        idle = self._group.idle_hook()
        run_interpreted(launch, self._group.rank, idle, observer=trace.current())
        # Waits in a kernel return early once the group is aborted: what it computed is void.
        everyone = range(self._group.world_size)
        self._group.check_during(f"{launch.op}, in {launch.name}", everyone)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, label: str) -> None:
        destination.copy_(source)

    def call(self, function: Callable[[], Any], label: str) -> None:
        function()

    def publish(self, workspace: Workspace, peer: int, slot: int) -> None:
        bases = workspace.buffer.addresses
        epoch = _epoch(bases[workspace.rank])
        store_release(bases[peer] + workspace.slot_byte(slot), epoch)

    def wait(self, workspace: Workspace, source: int, slot: int) -> None:
        base = workspace.buffer.addresses[workspace.rank]
        epoch = _epoch(base)
        doing = f"{workspace.op}, waiting for slot {slot} to reach epoch {epoch}"
        self._hold(base, {source: workspace.slot_byte(slot)}, epoch, doing)

    def wait_credits(self, workspace: Workspace) -> None:
        base = workspace.buffer.addresses[workspace.rank]
        credits = {rank: (CREDIT_WORDS + rank) * WORD for rank in range(workspace.world_size)}
        doing = f"{workspace.op}, waiting for the end of the op before it on this channel"
        self._hold(base, credits, _epoch(base) - 1, doing)

    def _hold(self, base: int, words: Mapping[int, int], value: int, doing: str) -> None:
        """Return when these words of own memory, by the rank that writes them, are at least ``value``."""
        cells = Cells([*(base + word for word in words.values()), base + ABORT_WORD * WORD])

        def late() -> list[int]:
            *seen, aborted = cells.load_acquire()
            missing = [rank for rank, has in zip(words, seen, strict=True) if has < value]
            if missing and aborted:
                self._raise_abort(doing, missing)
            return missing

        if first := late():
            self._group.wait_until(lambda: not late(), doing, first)

    def finish(self, workspace: Workspace) -> None:
        bases = workspace.buffer.addresses
        own = bases[workspace.rank]
        if load_acquire(own + ABORT_WORD * WORD):
            self._raise_abort(f"the end of {workspace.op}", range(workspace.world_size))
        epoch = _epoch(own)
        credits = [base + (CREDIT_WORDS + workspace.rank) * WORD for base in bases]
        Cells(credits).store_release(epoch)
        store_release(own + EPOCH_WORD * WORD, epoch)

    def record(self) -> Event:
        return CompletedEvent()

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for: an item has ended when it was called."""

    def _raise_abort(self, doing: str, waited_for: Sequence[int]) -> None:
        """The channel is void: a rank aborted, or a kernel of some rank gave up its wait."""
        self._group.check_during(doing, waited_for)
        raise AbortedError(f"{doing}: a kernel of this group has given up waiting")


def _epoch(own_base: int) -> int:
    """The epoch of the op that runs now on the channel whose header is at ``own_base``."""
    return load_acquire(own_base + EPOCH_WORD * WORD) + 1
