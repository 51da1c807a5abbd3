"""A recording as Chrome trace JSON, for https://ui.perfetto.dev or chrome://tracing.

One process per rank, one thread per program or stream; a complete event per tile, sum, copy, wait and
stream item; an arrow from each publish to the wait that it ended. The format counts microseconds: a
schedule step is written as one.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from interlace.runtime.places.sim.scheduler.recording import TICKS, RecordedSpan, Recording

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
