"""A recording as a panel of the page of ``--html``: spans in lanes, arrows from publishes to waits."""

from bisect import bisect_right

from interlace.cli.output.page import PageEvent, PageView, Panel
from interlace.runtime.places.sim.scheduler.chrome_trace import title_of
from interlace.runtime.places.sim.scheduler.recording import TICKS, Recording


def panel_of(title: str, text: str, recording: Recording) -> Panel:
    """``recording`` with its story. An arrow begins at the span before the publish that ended a wait."""
    lanes = sorted({(span.rank, span.lane) for span in recording.spans})
    view, (first, _) = PageView(title, recording.unit, lanes), recording.extent()
    ends: dict[tuple[int, str], list[tuple[int, int]]] = {lane: [] for lane in lanes}
    for number, span in enumerate(recording.spans):
        lane, does, peer = (span.rank, span.lane), title_of(span), span.peer or 0
        start, end = (span.start - first) / TICKS, (span.end - first) / TICKS
        where = lanes.index(lane), start, end
        view.events.append(PageEvent(*where, span.kind, does, span.lines, peer=peer))
        ends[lane].append((span.end, number))
    numbers = {span: number for number, span in enumerate(recording.spans)}
    for wait, signal in recording.ended_by().items():
        before = sorted(ends.get((signal.source, signal.lane), []))
        place = bisect_right(before, (signal.time, len(numbers)))
        if place and signal.time > wait.start:  # else nobody had to wait
            view.arrows.append((before[place - 1][1], numbers[wait], "wait"))
    return Panel(title, text, [view])
