"""What a run did, and when: tiles, copies, waits and signals of every rank, from its memory operations.

Kernels say nothing about themselves. The interpreter's hooks show every store and atomic of every
program with its addresses, and that is enough::

    store into a peer's memory        bytes that leave this rank
    store into the own output         a tile is done
    atomic that writes a slot         publish: a chunk has arrived at the slot's rank
    atomic that reads a slot          wait, from the first poll to the last

A program's time is cut where one of these ends, so its spans follow each other without gaps. Streams
add their copies, signals and items. Turned on for a block of code::

    with recording() as recorder:
        interlace.run(fn, 4)
    recording = merge([recorder.recording()])

In ``sim`` the block goes around the run; in ``shm`` inside ``fn``, and each rank hands back its own
part for :func:`merge`. Time is in thousandths of ``Recording.unit``: a schedule step, or in ``shm``
a microsecond of the clock that all processes of a host share. Compiled kernels are not seen.
"""

from __future__ import annotations

import contextvars
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from interlace.kernels.signal import CREDIT_WORDS, HEADER_WORDS

if TYPE_CHECKING:
    import torch

    from interlace.runtime.scheduler import Scheduler, Task

TICKS = 1000  # of time per unit
STEPS, MICROSECONDS = "schedule steps", "microseconds"
_HEADER_BYTES, _CREDIT_BYTE = 8 * HEADER_WORDS, 8 * CREDIT_WORDS

# What a kernel's stores are: (into symmetric memory, elsewhere). Any other kernel: a copy, a store.
_STORES = {
    "all_gather_matmul_kernel": ("copy", "tile"),
    "matmul_reduce_scatter_kernel": ("tile", "sum"),
}


class Slot(NamedTuple):
    """A signal slot: whose memory, which buffer of that rank, which byte."""

    rank: int
    buffer: int
    byte: int


class Span(NamedTuple):
    """Something that a program or a stream (``lane``) of ``rank`` did from ``start`` to ``end``.

    ``kind``: "tile", "sum", "copy", "wait", "store", or "item" for an entry of a stream. ``peer``: of
    a tile whose rows it multiplies, of a copy where it goes, of a wait who was waited for. ``nbytes``
    went into other ranks' memory. ``slot``: what was waited for, last before a tile.
    """

    kind: str
    rank: int
    lane: str
    op: str
    start: int
    end: int
    peer: int | None = None
    nbytes: int = 0
    slot: Slot | None = None
    label: str = ""


class Signal(NamedTuple):
    """A publish: ``source`` set ``slot`` at ``time``, from ``lane``."""

    time: int
    source: int
    lane: str
    slot: Slot


@dataclass
class Recording:
    """All spans and signals of a run, in the order of time."""

    unit: str
    spans: list[Span]
    signals: list[Signal]

    def bytes_sent(self, rank: int) -> int:
        """Payload that ``rank`` wrote into other ranks' memory; signals are not counted."""
        return sum(span.nbytes for span in self.spans if span.rank == rank)

    def arrivals(self, rank: int) -> list[Signal]:
        """Chunks that other ranks published to ``rank``."""
        return [s for s in self.signals if s.slot.rank == rank and s.source != rank]

    def tiles(self, rank: int) -> list[Span]:
        """Tiles of a matmul that ``rank`` computed."""
        return [span for span in self.spans if span.rank == rank and span.kind == "tile"]

    def overlap(self, rank: int) -> tuple[int, int] | None:
        """How many tiles were done before the last chunk arrived, of how many; None if none did."""
        arrivals, tiles = self.arrivals(rank), self.tiles(rank)
        if not arrivals or not tiles:
            return None
        return sum(tile.end < arrivals[-1].time for tile in tiles), len(tiles)

    def ended_by(self) -> dict[Span, Signal]:
        """For every wait for a slot: the publish that ended it."""
        by_slot: dict[Slot, list[Signal]] = {}
        for signal in self.signals:
            by_slot.setdefault(signal.slot, []).append(signal)
        found = {}
        for span in self.spans:
            if span.kind == "wait" and span.slot in by_slot:
                found[span] = _latest(by_slot[span.slot], span.end)
        return found


def merge(parts: Sequence[Recording]) -> Recording:
    """One recording of what each process recorded; fills in who was waited for, and whose rows."""
    assert parts, "nothing was recorded"
    signals = sorted(signal for part in parts for signal in part.signals)
    by_slot: dict[Slot, list[Signal]] = {}
    for signal in signals:
        by_slot.setdefault(signal.slot, []).append(signal)

    def resolved(span: Span) -> Span:
        if span.peer is not None or span.kind not in ("tile", "wait"):
            return span
        if span.slot is None:
            return span._replace(peer=span.rank)  # a tile of rows that were there from the start
        published = by_slot.get(span.slot)
        return span._replace(peer=_latest(published, span.end).source) if published else span

    spans = [resolved(span) for part in parts for span in part.spans]
    return Recording(parts[0].unit, sorted(spans, key=lambda s: (s.start, s.end)), signals)


def _latest(signals: Sequence[Signal], end: int) -> Signal:
    """The last one by ``end``. A waiter may note the time before the publisher does, hence max."""
    return signals[max(0, bisect_right([signal.time for signal in signals], end) - 1)]


@dataclass
class _Lane:
    """Where one program stands: ``since`` is where its last span ended."""

    since: int
    polled: Slot | None = None
    last_poll: int = 0
    waited: Slot | None = None
    copied: int = 0
    copied_to: int | None = None


@dataclass
class _Memory:
    """Symmetric memory by address."""

    bases: list[int] = field(default_factory=list)
    ranges: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    buffers: dict[int, int] = field(default_factory=dict)

    def add(self, rank: int, base: int, nbytes: int) -> None:
        number = self.buffers.get(rank, 0)
        self.buffers[rank] = number + 1
        self.ranges[base] = (rank, number, base + nbytes)
        self.bases = sorted(self.ranges)

    def find(self, address: int) -> Slot | None:
        index = bisect_right(self.bases, address) - 1
        if index < 0:
            return None
        base = self.bases[index]
        rank, number, end = self.ranges[base]
        return Slot(rank, number, address - base) if address < end else None


class Recorder:
    """Takes the hooks of schedulers (``on_load`` and so on), places and streams."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._signals: list[Signal] = []
        self._memory = _Memory()
        self._scheduler: Scheduler | None = None
        self._last = 0

    def recording(self) -> Recording:
        """What was recorded so far, for :func:`merge`."""
        unit = MICROSECONDS if self._scheduler is None else STEPS
        return Recording(unit, list(self._spans), list(self._signals))

    def now(self) -> int:
        """The time. Strictly increasing in ``sim``, where much can happen within one step."""
        if self._scheduler is None:
            return time.monotonic_ns()
        self._last = max(self._last + 1, self._scheduler.steps * TICKS)
        return self._last

    # -- hooks of the place ----------------------------------------------------------------------

    def attach(self, scheduler: Scheduler) -> None:
        """Take the time from the steps of ``scheduler``."""
        self._scheduler = scheduler

    def on_allocate(self, rank: int, memory: torch.Tensor) -> None:
        """``memory`` is symmetric memory of ``rank``."""
        self._memory.add(rank, memory.data_ptr(), memory.nbytes)

    # -- hooks of streams ------------------------------------------------------------------------

    def on_item(
        self, rank: int, stream: str, label: str, start: int, copied_to: torch.Tensor | None
    ) -> None:
        """An item of a stream has ended; a copy if ``copied_to`` is its destination."""
        span = Span("item", rank, f"stream {stream}", "", start, self.now(), label=label)
        if copied_to is not None:
            to = self._memory.find(copied_to.data_ptr())
            peer = None if to is None else to.rank
            away = copied_to.nbytes if peer not in (None, rank) else 0
            span = span._replace(kind="copy", peer=peer, nbytes=away)
        self._spans.append(span)

    def on_publish(self, rank: int, stream: str, slot: torch.Tensor) -> None:
        """A stream has published ``slot``."""
        self._publish(rank, f"stream {stream}", self._memory.find(slot.data_ptr()), self.now())

    # -- hooks of programs -----------------------------------------------------------------------

    def on_load(self, task: Task | None, pointers: Any, mask: Any) -> None:
        """A program has begun, if this is the first that is heard of it."""
        if task is not None and task.program is not None:
            self._lane(task)

    def on_store(self, task: Task | None, pointers: Any, mask: Any) -> None:
        """A tile, or a piece of a copy."""
        if task is None or task.program is None:
            return
        addresses = _active(pointers, mask)
        if not addresses.size:
            return
        place = self._memory.find(int(addresses[0]))
        if place is not None and place.byte < _HEADER_BYTES:
            return
        inside, elsewhere = _STORES.get(task.program.kernel, ("copy", "store"))
        lane = self._lane(task)
        away = place is not None and place.rank != task.rank
        nbytes = addresses.size * pointers.get_element_ty().primitive_bitwidth // 8 if away else 0
        if place is None:
            self._span(task, lane, elsewhere, slot=lane.waited)
        elif inside == "copy":
            self._close_wait(task, lane)
            lane.copied += nbytes
            lane.copied_to = place.rank
        else:
            self._span(task, lane, inside, peer=place.rank, nbytes=nbytes)

    def on_atomic(
        self, task: Task | None, pointers: Any, mask: Any, reads_only: bool, result: Any
    ) -> None:
        """A poll, or a publish."""
        if task is None or task.program is None:
            return
        addresses = _active(pointers, mask)
        slot = self._memory.find(int(addresses[0])) if addresses.size else None
        if slot is None:
            return
        lane = self._lane(task)
        if reads_only:
            self._polled(task, lane, slot)
            return
        if lane.copied_to is not None:
            self._span(task, lane, "copy", peer=lane.copied_to, nbytes=lane.copied)
            lane.copied, lane.copied_to = 0, None
        self._close_wait(task, lane)
        lane.since = self.now()
        self._publish(task.rank, task.who, slot, lane.since)

    def on_barrier(self, task: Task | None) -> None:
        """Nothing to see."""

    # -- programs --------------------------------------------------------------------------------

    def _lane(self, task: Task) -> _Lane:
        lane: _Lane | None = task.extra.get("trace")
        if lane is None:
            lane = task.extra["trace"] = _Lane(self.now())
        return lane

    def _polled(self, task: Task, lane: _Lane, slot: Slot) -> None:
        """Polls of one slot in a row are one wait. Looking for an abort is not one."""
        if slot.byte < _CREDIT_BYTE:
            return
        if lane.polled != slot:
            self._close_wait(task, lane)
            lane.polled = slot
        lane.last_poll = self.now()

    def _close_wait(self, task: Task, lane: _Lane) -> None:
        slot = lane.polled
        if slot is not None:
            lane.polled = None
            credit = (slot.byte - _CREDIT_BYTE) // 8 if slot.byte < _HEADER_BYTES else None
            self._add(task, lane, "wait", lane.last_poll, peer=credit, slot=slot)
            if credit is None:
                lane.waited = slot

    def _span(self, task: Task, lane: _Lane, kind: str, **details: Any) -> None:
        """A span that ends now; what came before it was a wait."""
        self._close_wait(task, lane)
        self._add(task, lane, kind, self.now(), **details)

    def _add(self, task: Task, lane: _Lane, kind: str, end: int, **details: Any) -> None:
        assert task.program is not None
        op, since, lane.since = task.program.op, lane.since, end
        self._spans.append(Span(kind, task.rank, task.who, op, since, end, **details))

    def _publish(self, rank: int, lane: str, slot: Slot | None, when: int) -> None:
        if slot is not None and slot.byte >= _HEADER_BYTES:
            self._signals.append(Signal(when, rank, lane, slot))


def _active(pointers: Any, mask: Any) -> Any:
    """The addresses that an access touches."""
    addresses = pointers.data.ravel()
    if mask is None or mask.data.all():
        return addresses
    return addresses[np.broadcast_to(mask.data, pointers.data.shape).ravel()]


_current: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar(
    "interlace_recorder", default=None
)


def current() -> Recorder | None:
    """The recorder of the block that the caller is in."""
    return _current.get()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record what runs inside the block; see the module for where to put it."""
    recorder = Recorder()
    token = _current.set(recorder)
    try:
        yield recorder
    finally:
        _current.reset(token)
