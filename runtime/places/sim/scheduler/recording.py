"""The recording of a run: spans and signals of every rank, and what follows from them.

Time is in thousandths of ``Recording.unit``: a schedule step in ``sim``, in ``shm`` a microsecond of the
clock that all processes of a host share. ``trace.py`` makes recordings.

:func:`write_trace` makes Chrome trace JSON of them, for https://ui.perfetto.dev or chrome://tracing:
one process per rank, one thread per program or stream; a complete event per tile, sum, copy, wait and
stream item; an arrow from each publish to the wait that it ended. The format counts microseconds: a
schedule step is written as one.
"""

import json
import pathlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from interlace.runtime.core.errors import SourceText

TICKS = 1000  # of time per unit
STEPS, MICROSECONDS = "schedule steps", "microseconds"


class Slot(NamedTuple):
    """A signal slot: whose memory, which buffer of that rank, which byte."""

    rank: int
    buffer: int
    byte: int


class RecordedSpan(NamedTuple):
    """Something that a program or a stream (``lane``) of ``rank`` did from ``start`` to ``end``.

    ``kind``: "tile", "sum", "copy", "wait", "store", or "item" for an entry of a stream. ``peer``: of
    a tile whose rows it multiplies, of a copy where it goes, of a wait who was waited for. ``nbytes``
    went into other ranks' memory. ``slot``: what was waited for, last before a tile. ``lines``: those of
    the source, innermost first.
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
        """Payload that ``rank`` wrote into other ranks' memory; signals are not counted."""
        return sum(span.nbytes for span in self.spans if span.rank == rank)

    def extent(self) -> tuple[int, int]:
        """The first and the last moment of programs."""
        spans = [span for span in self.spans if span.kind != "item"] or self.spans
        if not spans:
            return 0, 1
        return min(span.start for span in spans), max(span.end for span in spans)

    def arrivals(self, rank: int) -> list[Signal]:
        """Chunks that other ranks published to ``rank``."""
        return [s for s in self.signals if s.slot.rank == rank and s.source != rank]

    def tiles(self, rank: int) -> list[RecordedSpan]:
        return [span for span in self.spans if span.rank == rank and span.kind == "tile"]

    def overlap(self, rank: int) -> tuple[int, int] | None:
        """The number of tiles done before the op's last chunk came, and of all; None without chunks."""
        last = {signal.op: signal.time for signal in self.arrivals(rank)}
        tiles = [tile for tile in self.tiles(rank) if tile.op in last]
        return (sum(tile.end < last[tile.op] for tile in tiles), len(tiles)) if tiles else None

    def ended_by(self) -> dict[RecordedSpan, Signal]:
        """The publish that ended each wait for a slot."""
        by_slot = _by_slot(self.signals)
        found = {}
        for span in self.spans:
            if span.kind == "wait" and span.slot in by_slot:
                found[span] = _latest(by_slot[span.slot], span.end)
        return found


def merge(parts: Sequence[Recording]) -> Recording:
    """One recording of what each process recorded; fills in who was waited for, and whose rows."""
    assert parts, "nothing was recorded"
    signals = sorted(signal for part in parts for signal in part.signals)
    by_slot = _by_slot(signals)

    def resolved(span: RecordedSpan) -> RecordedSpan:
        if span.peer is not None or span.kind not in ("tile", "wait"):
            return span
        if span.slot is None:
            return span._replace(peer=span.rank)  # a tile of rows that were there from the start
        published = by_slot.get(span.slot)
        return span._replace(peer=_latest(published, span.end).source) if published else span

    spans = [resolved(span) for part in parts for span in part.spans]
    return Recording(parts[0].unit, sorted(spans, key=lambda s: (s.start, s.end)), signals)


def _by_slot(signals: Sequence[Signal]) -> dict[Slot, list[Signal]]:
    found: dict[Slot, list[Signal]] = {}
    for signal in signals:
        found.setdefault(signal.slot, []).append(signal)
    return found


def _latest(signals: Sequence[Signal], end: int) -> Signal:
    """The last one by ``end``. A waiter may note the time before the publisher does, hence max."""
    return signals[max(0, bisect_right([signal.time for signal in signals], end) - 1)]


GAP = 20 * TICKS
ChromeEvent = dict[str, Any]


def write_trace(path: pathlib.Path, parts: Sequence[tuple[str, Recording]]) -> None:
    """Write (title, recording) one after another on one time axis."""
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
    """``threads`` are numbered as they are met, by rank and lane."""

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
            # An arrow hangs on the slice around it: publishing gets one of its own, and the other end is
            # just inside the wait.
            sent = where(signal.source, signal.lane, signal.time)
            to = f"publish to rank {signal.slot.rank}"
            ended = where(wait.rank, wait.lane, max(wait.end - 1, signal.time))
            self.events += [
                {"ph": "X", "name": to, "cat": "signal", "dur": 1 / TICKS, **sent, "args": {}},
                {"ph": "s", **arrow, **sent},
                {"ph": "f", "bp": "e", **arrow, **ended},
            ]

    def names(self) -> list[ChromeEvent]:
        """Events that name processes and threads, and say their order."""
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
    """The span in words."""
    if span.label:
        return span.label
    return {
        "tile": f"tile, rows of rank {span.peer}",
        "sum": "sum over ranks",
        "copy": f"copy to rank {span.peer}",
        "wait": f"wait for rank {span.peer}",
    }.get(span.kind, span.kind)
