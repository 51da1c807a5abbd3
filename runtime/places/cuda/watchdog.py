"""The watchdog of a rank on a GPU: what the host cannot see of its own accord, and what CUDA never ends.

A rank's host enqueues and goes on, so somebody else has to look. One thread per place, which sleeps while
nothing is under way, looks every 50 ms for

=======================  ============================================================================
waits of streams         one that a stream has been in for longer than the group's timeout
a wait that gave up      in a kernel: its record in the header of the workspace
peers                    a process that ended, a group that was aborted (``place.trouble()``)
=======================  ============================================================================

and fails the place: the error is kept for the next call, the group is aborted on all ranks, every wait in
every kernel returns, and the streams that wait are let go. What they compute from there on is void.

Copies that follow a wait on a stream cannot be called back, so a stream is let go only when they harm
nobody (:meth:`Watchdog.let_go`). All come after ABORT is set on every rank that this one reaches::

    for data      at once: what follows fills this rank's own memory, and signals behind are kernels' matter
    for credits   once the peer has told that it is through (CREDIT < 0), or is dead; or after a second

How it knows which wait a stream is in without asking CUDA, whose queries would end another thread's graph
capture: the stream itself writes, into pinned memory of the host, that it comes to wait number n and that
it has passed it. A header is copied to pinned memory at one look and read at the next.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.kernels.signal import (
    ABORT_WORD,
    CLAIMED_WORD,
    CREDIT_WORDS,
    EPOCH_WORD,
    HEADER_WORDS,
)
from interlace.runtime.core.errors import (
    AbortedError,
    CollectiveTimeoutError,
    PeerDiedError,
)
from interlace.runtime.core.memory import WORD, SymmetricBuffer, Workspace
from interlace.runtime.places.cuda import driver

LOOK_SECONDS = 0.05
LINGER_SECONDS = 1.0  # in which a peer that lives gets through what it was about to read
IDLE_LOOK_SECONDS = 1.0  # where graphs are replayed of which the host does not know
CELLS = 64
_UNKNOWN = torch.empty(0)


@dataclass
class Wait:
    """One wait of a stream: for word ``address`` to be ``value``, published by ``source``."""

    number: int
    cell: int
    op: str
    source: int
    slot_byte: int
    address: int
    value: int

    @property
    def for_credit(self) -> bool:
        return self.slot_byte < HEADER_WORDS * WORD


class StreamWaits:
    """Waits of streams for signals of the op in ``workspace``, whose epoch is ``epoch``."""

    def __init__(
        self, ledger: Ledger, words: driver.Driver, workspace: Workspace, epoch: int
    ) -> None:
        self._ledger, self._words = ledger, words
        self._workspace, self._epoch = workspace, epoch

    def published(self, stream: int, source: int, slot_byte: int) -> None:
        """Hold ``stream`` until ``source`` has published the own slot at ``slot_byte``."""
        self._wait(stream, source, slot_byte, self._epoch)

    def credits(self, stream: int) -> None:
        """Hold ``stream`` until every peer has finished the previous op in this workspace."""
        for peer in range(self._workspace.world_size):
            if peer != self._workspace.rank and self._epoch > 1:
                self._wait(stream, peer, (CREDIT_WORDS + peer) * WORD, self._epoch - 1)

    def _wait(self, stream: int, source: int, slot_byte: int, value: int) -> None:
        workspace = self._workspace
        address = workspace.buffer.addresses[workspace.rank] + slot_byte
        wait = self._ledger.enter(stream, workspace.op, source, slot_byte, address, value)
        self._words.write(stream, self._ledger.entered(wait), wait.number)
        self._words.wait(stream, address, value)
        self._words.write(stream, self._ledger.passed(wait), wait.number)


class Ledger:
    """The waits that streams may still be in, in the order of the calls."""

    def __init__(self) -> None:
        self._progress = driver.pinned([0] * (2 * CELLS))
        self._view = self._progress.numpy().data.cast("B").cast("q")
        self._base = self._progress.data_ptr()
        self._cells: dict[int, int] = {}
        self._count = 0
        self.waits: deque[Wait] = deque()
        self._trimming = threading.Lock()
        self._since: dict[int, tuple[int, float]] = {}  # by cell: wait and when it was first seen

    def enter(
        self, stream: int, op: str, source: int, slot_byte: int, address: int, value: int
    ) -> Wait:
        """A wait that is about to be enqueued."""
        self._trim()  # a host that is fast and a watchdog that is slow would keep many
        cell = self._cells.setdefault(stream, len(self._cells) % CELLS)
        self._count += 1
        wait = Wait(self._count, cell, op, source, slot_byte, address, value)
        self.waits.append(wait)
        return wait

    def entered(self, wait: Wait) -> int:
        """Where a stream writes the number of a wait that it has come to."""
        return self._base + 2 * WORD * wait.cell

    def passed(self, wait: Wait) -> int:
        """Where it writes the number of one that it has passed."""
        return self.entered(wait) + WORD

    def _trim(self) -> None:
        """Forget the oldest waits, as far as they were passed."""
        view, waits = self._view, self.waits
        if self._trimming.acquire(blocking=False):
            try:
                while waits and view[2 * waits[0].cell + 1] >= waits[0].number:
                    waits.popleft()
            finally:
                self._trimming.release()

    def open(self) -> list[Wait]:
        """The waits that have not been passed."""
        self._trim()
        view = self._view
        return [wait for wait in list(self.waits) if view[2 * wait.cell + 1] < wait.number]

    def overdue(self, seconds: float, now: float) -> Wait | None:
        """A wait that a stream has been in for longer than ``seconds``."""
        for wait in self.open():
            if self._view[2 * wait.cell] != wait.number:
                continue  # not there yet
            number, since = self._since.get(wait.cell, (0, now))
            if number != wait.number:
                self._since[wait.cell] = (wait.number, now)
            elif now - since > seconds:
                return wait
        return None


class Watchdog:
    """Looks after ``place``, a DevicePlace; its thread starts with the first :meth:`look_after`."""

    def __init__(self, place: Any, timeout: float) -> None:
        self.ledger = Ledger()
        self.timeout = timeout
        self._place = weakref.ref(place)
        self._wanted = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._headers: list[tuple[SymmetricBuffer, torch.Tensor]] = []
        self._stream: torch.cuda.Stream | None = None
        self._letting_go: float | None = None  # since when

    def look_after(self) -> None:
        """Wake the watchdog: something was enqueued."""
        if self._wanted.is_set():
            return
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="interlace watchdog", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopped = True
        self._wanted.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
        place = self._place()
        if place is not None and self._letting_go is not None:
            self.let_go(place, self._letting_go + LINGER_SECONDS)  # nobody comes back to do it

    def _watch(self) -> None:
        place = self._place()
        if place is None:
            return
        if place.device.type == "cuda":
            torch.cuda.set_device(place.device)
        driver.leave_captures_alone()
        del place
        while not self._stopped:
            self._wanted.wait(IDLE_LOOK_SECONDS)
            place = self._place()
            if self._stopped or place is None:
                return
            if place.failure is not None or self._letting_go is not None:
                if not self.let_go(place, time.monotonic()):
                    return
                self._copy_headers(place)
            elif self._wanted.is_set() or place.replays:
                self.look(place, time.monotonic())
            del place
            time.sleep(LOOK_SECONDS)

    def look(self, place: Any, now: float) -> None:
        """One look; fails ``place`` if there is a reason to."""
        problem = self._problem(place, now)
        if problem is not None:
            place.fail(problem)

    def _problem(self, place: Any, now: float) -> Exception | None:
        late = self.ledger.overdue(self.timeout, now)
        if late is not None:
            return CollectiveTimeoutError(
                f"rank {place.rank}: {late.op} has waited {self.timeout:g} s for rank {late.source}: slot "
                f"at byte {late.slot_byte} is below {late.value}",
                (late.source,),
            )
        problem: Exception | None = place.trouble("work on the GPU")
        if problem is not None:
            return problem
        for _, mirror in self._headers:
            header = mirror.tolist()
            problem = signal_report(place.rank, header)
            if problem is None and header[ABORT_WORD]:
                problem = AbortedError(
                    f"rank {place.rank}: a kernel of another rank of the group has given up waiting"
                )
            if problem is not None:
                return problem
        self._wanted.clear()
        if self._busy(place):
            self._wanted.set()
        self._copy_headers(place)
        return None

    def _busy(self, place: Any) -> bool:
        """Whether something that was enqueued may not have ended."""
        return (
            len(self._headers) < len(place.workspaces())
            or bool(self.ledger.open())
            or any(
                int(mirror[EPOCH_WORD]) < place.ops_finished(buffer)
                for buffer, mirror in self._headers
            )
        )

    def _copy_headers(self, place: Any) -> None:
        """Bring the headers of the own workspaces over, for the next look."""
        buffers = place.workspaces()
        known = {id(buffer): mirror for buffer, mirror in self._headers}
        self._headers = [(buffer, known.get(id(buffer), _UNKNOWN)) for buffer in buffers]
        if self._stream is None:
            self._stream = torch.cuda.Stream(place.device, priority=-1)
        with torch.cuda.stream(self._stream):
            for index, (buffer, mirror) in enumerate(self._headers):
                if mirror is _UNKNOWN:
                    mirror = driver.pinned([0] * HEADER_WORDS)
                    self._headers[index] = (buffer, mirror)
                mirror.copy_(place.header(buffer, place.rank), non_blocking=True)

    def let_go(self, place: Any, now: float) -> bool:
        """After the kernels were woken: release the streams that harm nobody; whether some still wait.

        From any thread; to be called again as long as it returns True, which the own thread does.
        """
        words = place._stream_words()
        if self._letting_go is None:
            self._letting_go = now
        over = now - self._letting_go >= LINGER_SECONDS
        gone = place.failure.rank if isinstance(place.failure, PeerDiedError) else None
        alarm = int(place.alarm_stream().cuda_stream)
        left = False
        for wait in self.ledger.open():
            if over or not wait.for_credit or wait.source == gone or self._through(wait):
                if words is not None:
                    words.write(alarm, wait.address, wait.value)
            else:
                left = True
        if left:
            self.look_after()
        return left

    def _through(self, wait: Wait) -> bool:
        """Whether the source of ``wait``, for a credit, has told that it reads nothing any more."""
        for buffer, mirror in self._headers:
            if buffer.addresses[buffer.rank] + wait.slot_byte == wait.address:
                return int(mirror[CREDIT_WORDS + wait.source]) < 0
        return False


def signal_report(rank: int, header: Sequence[int]) -> CollectiveTimeoutError | None:
    """The error that the status record in a channel's header describes, if there is one."""
    claimed, source, slot, expected, seen, program = header[CLAIMED_WORD : CLAIMED_WORD + 6]
    if not claimed or not expected:
        return None
    return CollectiveTimeoutError(
        f"rank {rank}: program {program} gave up waiting for rank {source}: slot at byte {slot} "
        f"was {seen}, expected {expected}",
        (source,),
    )
