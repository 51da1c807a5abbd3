"""The recording of a run: spans and signals of every rank, and what follows from them.

Time is in thousandths of ``Recording.unit``: a schedule step in ``sim``, in ``shm`` a microsecond of the
clock that all processes of a host share. ``trace.py`` makes recordings.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
