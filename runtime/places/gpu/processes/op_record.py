"""The ops of a rank on a GPU in the record of its host's ranks, which outlives it: ``recorder.py``.

An op begins there when the host asks the others about it, or, if it knows their answers, with the first
part that it enqueues. It has ended when the device says so, by what it writes in any case: EPOCH in the
header of the workspace in which the op's last part was enqueued, which the watchdog brings over while
anything is under way. So ends are told up to 0.1 s late. Whom a wait was given up for is the device's
word, too, from the status record of that header.

From the first graph capture on a replay may count an EPOCH up that this host has not enqueued. No end of an
op is told any more then, but of those that enqueue nothing.
"""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from interlace.runtime.core.errors import CollectiveTimeoutError
from interlace.runtime.processes import dump as record
from interlace.runtime.processes.recorder import ENTRIES


class OpRecord:
    """The record of one rank's ops, in that of ``processes``, its place without the GPU."""

    def __init__(self, processes: Any) -> None:
        self._group = processes.group
        self._open: deque[tuple[int, int, int]] = deque(maxlen=ENTRIES)
        self._last = self._enqueued = self._launched = 0  # numbers of entries
        self.agreed: bytes | None = None
        """An op that the host has agreed on without asking; it is about to begin."""

    def begins(self, op: bytes | str) -> None:
        """The host is about to ask about ``op``, or to enqueue it; with those before it is through."""
        self.agreed = None
        self.launched()
        self._last = record.began(self._group, op)

    def enqueued(self, address: int, epoch: int | None) -> None:
        """A part of the op ends when the memory at ``address`` has come to ``epoch``, if that is known."""
        self._begin()
        self._enqueued = self._last
        if epoch is not None and self._last:
            self._open.append((self._last, address, epoch))

    def launched(self) -> None:
        """The host has enqueued all of the op; if that is nothing, the op has ended."""
        self._begin()
        if self._last != self._launched:
            if self._last != self._enqueued:
                record.ended(self._group, self._last)
            self._launched = self._last

    def _begin(self) -> None:
        if self.agreed is not None:
            self.begins(self.agreed)

    def reached(self, epochs: Mapping[int, int]) -> None:
        """How far the device has come, by address of the memory. Called by the watchdog alone."""
        while self._open:
            number, address, epoch = self._open[0]
            if number > self._launched or epochs.get(address, 0) < epoch:
                return
            self._open.popleft()
            if not self._open or self._open[0][0] != number:
                record.ended(self._group, number)

    def failed(self, error: Exception) -> None:
        """The group is over: say for whom this rank has waited, and write the records."""
        late = error.waited_for if isinstance(error, CollectiveTimeoutError) else ()
        blamed = [rank for rank, name in enumerate(self._group.names) if name in late]
        if blamed and (control := self._group.control) is not None:
            control.waits(blamed[0], time.monotonic())
        self._group.abort(str(error), blamed)
