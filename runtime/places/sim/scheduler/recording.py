"""The recording of a run: spans and signals of every rank, and figures derived from them.

Time is in thousandths of ``Recording.unit``: a schedule step in ``sim``; in ``shm`` a microsecond of the
clock that all processes of a host share.

:func:`write_trace` makes Chrome trace JSON of recordings, for https://ui.perfetto.dev or chrome://tracing.
It has one process per rank, one thread per program or stream, and a complete event per tile, sum, copy,
wait and stream item. An arrow leads from each publish to the wait that it ended. The format counts
microseconds: a schedule step is written as one.

:class:`Recorder` records tiles, copies, waits and signals of every rank, from its memory operations.
Kernels contain no code for it. The interpreter's hooks show every store and atomic of every program with
its addresses, and that is enough::

    store into a peer's memory        bytes that leave this rank
    store into this rank's output     a tile is complete
    atomic that writes slots          publish: a chunk has arrived at the rank of each
    atomic that reads slots           wait, from the first poll to the last, for the slot that came last

Each of these events ends a span of its program, so a program's spans follow each other without gaps.
Streams add their copies, signals and items. Recording is enabled for a block of code::

    with recording() as recorder:
        interlace.run(fn, 4)
    whole = merge([recorder.recording()])

In ``sim`` the block encloses the run. In ``shm`` it is inside ``fn``, and each rank returns its part for
:func:`~interlace.runtime.places.sim.scheduler.recording.merge`. Compiled kernels are not recorded.
"""

import contextvars
import json
import pathlib
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from interlace.kernels.signal import CREDIT_WORDS, HEADER_WORDS
from interlace.runtime.core.accesses import Atomic, Handle, Mask
from interlace.runtime.core.errors import SourceText
from interlace.runtime.places.sim.interpreter.session import active, active_addresses
from interlace.runtime.places.sim.scheduler.observer import Observer
from interlace.runtime.places.sim.scheduler.source_lines import program_lines
from interlace.runtime.places.sim.scheduler.strategies import Task

TICKS = 1000  # ticks per unit of time
STEPS, MICROSECONDS = "schedule steps", "microseconds"


class Slot(NamedTuple):
    """A signal slot: the rank that has it, the buffer's number on that rank, and the byte."""

    rank: int
    buffer: int
    byte: int


class RecordedSpan(NamedTuple):
    """An action of a program or a stream (``lane``) of ``rank``, from ``start`` to ``end``.

    ``kind``: "tile", "sum", "copy", "wait", "store", or "item" for an item of a stream. ``peer``: for a
    tile the rank whose rows it multiplies, for a copy its destination, for a wait the awaited rank.
    ``nbytes``: bytes into other ranks' memory. ``slot``: the last slot that was awaited before a tile.
    ``lines``: source lines, innermost first.
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
    lines: tuple[SourceText, ...] = ()


class Signal(NamedTuple):
    """A publish: ``source`` set ``slot`` at ``time``, from ``lane``, for ``op``."""

    time: int
    source: int
    lane: str
    op: str
    slot: Slot


@dataclass
class Recording:
    """All spans and signals of a run, in the order of time."""

    unit: str
    spans: list[RecordedSpan]
    signals: list[Signal]

    def bytes_sent(self, rank: int) -> int:
        """Return the payload that ``rank`` wrote into other ranks' memory, without signals."""
        return sum(span.nbytes for span in self.spans if span.rank == rank)

    def extent(self) -> tuple[int, int]:
        """Return the first and the last moment of programs."""
        spans = [span for span in self.spans if span.kind != "item"] or self.spans
        if not spans:
            return 0, 1
        return min(span.start for span in spans), max(span.end for span in spans)

    def arrivals(self, rank: int) -> list[Signal]:
        return [s for s in self.signals if s.slot.rank == rank and s.source != rank]

    def tiles(self, rank: int) -> list[RecordedSpan]:
        return [span for span in self.spans if span.rank == rank and span.kind == "tile"]

    def overlap(self, rank: int) -> tuple[int, int] | None:
        """Return how many tiles ended before the op's last chunk came, and all; None without chunks."""
        last = {signal.op: signal.time for signal in self.arrivals(rank)}
        tiles = [tile for tile in self.tiles(rank) if tile.op in last]
        return (sum(tile.end < last[tile.op] for tile in tiles), len(tiles)) if tiles else None

    def ended_by(self) -> dict[RecordedSpan, Signal]:
        by_slot = _by_slot(self.signals)
        found = {}
        for span in self.spans:
            if span.kind == "wait" and span.slot in by_slot:
                found[span] = _latest(by_slot[span.slot], span.end)
        return found


def merge(parts: Sequence[Recording]) -> Recording:
    """Merge the recordings of all processes; fill in the awaited ranks, and the ranks of tiles' rows."""
    assert parts, "nothing was recorded"
    signals = sorted(signal for part in parts for signal in part.signals)
    by_slot = _by_slot(signals)

    def resolve(span: RecordedSpan) -> RecordedSpan:
        if span.peer is not None or span.kind not in ("tile", "wait"):
            return span
        if span.slot is None:
            return span._replace(peer=span.rank)  # a tile of rows that were present from the start
        published = by_slot.get(span.slot)
        return span._replace(peer=_latest(published, span.end).source) if published else span

    spans = [resolve(span) for part in parts for span in part.spans]
    return Recording(parts[0].unit, sorted(spans, key=lambda s: (s.start, s.end)), signals)


def _by_slot(signals: Sequence[Signal]) -> dict[Slot, list[Signal]]:
    found: dict[Slot, list[Signal]] = {}
    for signal in signals:
        found.setdefault(signal.slot, []).append(signal)
    return found


def _latest(signals: Sequence[Signal], end: int) -> Signal:
    """Return the last signal by ``end``. A waiter may note the time before the publisher, hence max."""
    return signals[max(0, bisect_right([signal.time for signal in signals], end) - 1)]


GAP = 20 * TICKS
ChromeEvent = dict[str, Any]


def write_trace(path: pathlib.Path, parts: Sequence[tuple[str, Recording]]) -> None:
    """Write each (title, recording) after the previous one, on one time axis."""
    trace, offset = _Trace(), 0
    for title, recording in parts:
        start, end = recording.extent()
        start = min([start, *(span.start for span in recording.spans)])
        end = max([end, *(span.end for span in recording.spans)])
        trace.add(title, recording, offset - start)
        offset += end - start + GAP
    unit = parts[0][1].unit if parts else ""
    content = {
        "traceEvents": trace.names() + trace.events,
        "displayTimeUnit": "ms",
        "otherData": {"time": unit, "note": f"1 us in this file stands for 1 of: {unit}"},
    }
    path.write_text(json.dumps(content), encoding="ascii")


class _Trace:
    """Events of a trace. ``threads`` are numbered in the order of their first events, by rank and lane."""

    def __init__(self) -> None:
        self.events: list[ChromeEvent] = []
        self.threads: dict[tuple[int, str], int] = {}

    def add(self, title: str, recording: Recording, shift: int) -> None:
        def where(rank: int, lane: str, time: float) -> ChromeEvent:
            thread = self.threads.setdefault((rank, lane), len(self.threads))
            return {"pid": rank, "tid": thread, "ts": (time + shift) / TICKS}

        first_arrow = len(self.events)
        for span in recording.spans:
            details = {"op": title}
            if span.peer is not None:
                details["peer"] = f"rank {span.peer}"
            if span.nbytes:
                details["bytes sent"] = str(span.nbytes)
            if span.slot is not None:
                details["slot at byte"] = str(span.slot.byte)
            event = {"ph": "X", "name": title_of(span), "cat": span.kind, "args": details}
            duration = {"dur": max(span.end - span.start, 1) / TICKS}
            self.events.append({**event, **where(span.rank, span.lane, span.start), **duration})
        for number, (wait, signal) in enumerate(recording.ended_by().items(), first_arrow):
            arrow = {"name": "chunk", "cat": "signal", "id": number}
            # An arrow belongs to the slice around it: a publish gets a separate slice, and the other end
            # is just inside the wait.
            sent = where(signal.source, signal.lane, signal.time)
            to = f"publish to rank {signal.slot.rank}"
            ended = where(wait.rank, wait.lane, max(wait.end - 1, signal.time))
            self.events += [
                {"ph": "X", "name": to, "cat": "signal", "dur": 1 / TICKS, **sent, "args": {}},
                {"ph": "s", **arrow, **sent},
                {"ph": "f", "bp": "e", **arrow, **ended},
            ]

    def names(self) -> list[ChromeEvent]:
        """Return the events that name and order processes and threads."""
        events: list[ChromeEvent] = []

        def name(kind: str, rank: int, thread: int, text: str, index: int) -> None:
            where = {"ph": "M", "pid": rank, "tid": thread}
            events.append({**where, "name": f"{kind}_name", "args": {"name": text}})
            events.append({**where, "name": f"{kind}_sort_index", "args": {"sort_index": index}})

        for rank in sorted({rank for rank, _ in self.threads}):
            name("process", rank, 0, f"rank {rank}", rank)
        for (rank, lane), thread in sorted(self.threads.items()):
            name("thread", rank, thread, lane, thread)
        return events


def title_of(span: RecordedSpan) -> str:
    if span.label:
        return span.label
    return {
        "tile": f"tile, rows of rank {span.peer}",
        "sum": "sum over ranks",
        "copy": f"copy to rank {span.peer}",
        "wait": f"wait for rank {span.peer}",
    }.get(span.kind, span.kind)


_HEADER_BYTES, _CREDIT_BYTE = 8 * HEADER_WORDS, 8 * CREDIT_WORDS

# The meaning of a kernel's stores: (into symmetric memory, elsewhere). Other kernels: a copy, a store.
_STORES = {
    "all_gather_matmul_kernel": ("copy", "tile"),
    "grouped_matmul_kernel": ("copy", "tile"),
    "grouped_matmul_combine_kernel": ("tile", "sum"),
    "combine_kernel": ("copy", "sum"),
    "matmul_reduce_scatter_kernel": ("tile", "sum"),
}


@dataclass
class _Lane:
    """The state of one program; ``since`` is the end of its last span."""

    since: int
    polled: Slot | None = None
    words: tuple[bytes, object] | None = None  # addresses that the last poll read, and their values
    last_poll: int = 0
    waited: Slot | None = None
    copied: int = 0
    copied_to: int | None = None
    lines: tuple[SourceText, ...] = ()


class Recorder(Observer):
    def __init__(self) -> None:
        self._spans: list[RecordedSpan] = []
        self._signals: list[Signal] = []
        self._memory: list[tuple[int, int, Slot]] = []  # begin, end, the slot at the beginning
        self._buffers: Counter[int] = Counter()
        self._steps: Callable[[], int] | None = None
        self._lanes: dict[Task, _Lane] = {}
        self._last = 0

    def recording(self) -> Recording:
        """Return a recording of everything so far, for :func:`merge`."""
        unit = MICROSECONDS if self._steps is None else STEPS
        return Recording(unit, list(self._spans), list(self._signals))

    def now(self) -> int:
        """Return the time. It always increases in ``sim``, where one step may contain many events."""
        if self._steps is None:
            return time.monotonic_ns()
        self._last = max(self._last + 1, self._steps() * TICKS)
        return self._last

    def attach(self, steps: Callable[[], int]) -> None:
        self._steps = steps

    def on_allocate(self, rank: int, memory: torch.Tensor, label: str = "") -> None:
        begin = memory.data_ptr()
        self._memory.append((begin, begin + memory.nbytes, Slot(rank, self._buffers[rank], 0)))
        self._buffers[rank] += 1

    def _slot(self, address: int) -> Slot | None:
        for begin, end, first in reversed(self._memory):
            if begin <= address < end:
                return first._replace(byte=address - begin)
        return None

    def on_item(
        self, task: Task, stream: str, label: str, start: int, copied_to: torch.Tensor | None
    ) -> None:
        rank = task.rank
        lane, lines = f"stream {stream}", (task.owner.running,)
        span = RecordedSpan("item", rank, lane, "", start, self.now(), label=label, lines=lines)
        if copied_to is not None:
            to = self._slot(copied_to.data_ptr())
            peer = None if to is None else to.rank
            away = copied_to.nbytes if peer not in (None, rank) else 0
            span = span._replace(kind="copy", peer=peer, nbytes=away)
        self._spans.append(span)

    def on_signal(self, task: Task, slot: torch.Tensor, op: str) -> None:
        self._publish(task.rank, task.who, op, self._slot(slot.data_ptr()), self.now())

    def on_load(self, task: Task, pointers: Handle, mask: Mask) -> None:
        """Note the start of a program, if this is its first event."""
        if task.program is not None:
            self._lane(task)

    def on_store(self, task: Task, pointers: Handle, mask: Mask) -> None:
        """Record a tile, or a piece of a copy."""
        addresses = active_addresses(pointers, mask)
        if task.program is None or not addresses.size:
            return
        place = self._slot(int(addresses[0]))
        if place is not None and place.byte < _HEADER_BYTES:
            return
        inside, elsewhere = _STORES.get(task.program.kernel, ("copy", "store"))
        lane = self._lane(task)
        self._close_wait(task, lane)
        lane.lines = program_lines()
        away = place is not None and place.rank != task.rank
        nbytes = addresses.size * pointers.get_element_ty().primitive_bitwidth // 8 if away else 0
        if place is None:
            self._add(task, lane, elsewhere, self.now(), slot=lane.waited)
        elif inside == "copy":
            lane.copied += nbytes
            lane.copied_to = place.rank
        else:
            self._add(task, lane, inside, self.now(), peer=place.rank, nbytes=nbytes)

    def on_atomic(self, task: Task, atomic: Atomic, result: Handle) -> None:
        """Record a poll, or a publish."""
        addresses = active_addresses(atomic.pointers, atomic.mask)
        slot = self._slot(int(addresses[0])) if addresses.size else None
        if task.program is None or slot is None:
            return
        lane = self._lane(task)
        if atomic.reads_only:
            if slot.byte >= _CREDIT_BYTE:  # otherwise the program looks for an abort
                words = addresses.tobytes()
                values = active(result.data, atomic.pointers, atomic.mask)
                before, seen = lane.words or (b"", values)
                if before != words:  # successive polls of the same slots are one wait
                    self._close_wait(task, lane)
                    lane.polled, lane.lines = slot, program_lines()
                elif (came := np.flatnonzero(values != seen)).size:
                    lane.polled = self._slot(int(addresses[came[-1]]))
                lane.words = words, values
                lane.last_poll = self.now()
            return
        self._close_wait(task, lane)
        if lane.copied_to is not None:
            self._add(task, lane, "copy", self.now(), peer=lane.copied_to, nbytes=lane.copied)
            lane.copied, lane.copied_to = 0, None
        lane.since = self.now()
        for address in addresses.tolist():
            self._publish(task.rank, task.who, task.program.op, self._slot(address), lane.since)

    def _lane(self, task: Task) -> _Lane:
        lane = self._lanes.get(task)
        if lane is None:
            lane = self._lanes[task] = _Lane(self.now())
        return lane

    def _close_wait(self, task: Task, lane: _Lane) -> None:
        slot = lane.polled
        if slot is not None:
            lane.polled = lane.words = None
            credit = (slot.byte - _CREDIT_BYTE) // 8 if slot.byte < _HEADER_BYTES else None
            self._add(task, lane, "wait", lane.last_poll, peer=credit, slot=slot)
            if credit is None:
                lane.waited = slot

    def _add(self, task: Task, lane: _Lane, kind: str, end: int, **details: Any) -> None:
        assert task.program is not None
        op, since, lane.since = task.program.op, lane.since, end
        span = RecordedSpan(kind, task.rank, task.who, op, since, end, lines=lane.lines, **details)
        self._spans.append(span)

    def _publish(self, rank: int, lane: str, op: str, slot: Slot | None, when: int) -> None:
        if slot is not None and slot.byte >= _HEADER_BYTES:
            self._signals.append(Signal(when, rank, lane, op, slot))


_current: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar(
    "interlace_recorder", default=None
)
current: Callable[[], Recorder | None] = _current.get
"""Returns the recorder of the enclosing :func:`recording`, if there is one."""


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record the code inside the block; the module's docstring says where to put it."""
    recorder = Recorder()
    token = _current.set(recorder)
    try:
        yield recorder
    finally:
        _current.reset(token)
