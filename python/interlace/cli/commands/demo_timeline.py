"""Drawings of a recording: for the terminal, for a PNG, and as a panel of the page of ``--html``.

In the terminal each rank has two lanes, as wide as the console::

    rank 0  chunks |----3--2---1----|     the rank from which a chunk arrived; - while one is on its way
            tiles  |0000033..2221111|     whose rows the current tile multiplies; . while all wait

A lane is a row of cells. The activity that fills most of a cell is shown in it; work always wins over
waiting. A cell holds one arrival, so several arrivals at once spread sideways.
"""

import pathlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from interlace.output.files import require_matplotlib
from interlace.output.page import PageEvent, PageView, Panel
from interlace.runtime.places.sim.scheduler.recording import (
    STEPS,
    TICKS,
    RecordedSpan,
    Recording,
    title_of,
)

NAMES = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLORS = ("cyan", "yellow", "green", "magenta", "bright_blue", "bright_red", "white", "bright_cyan")
LABELS = ("rank {:<3} chunks ", "         tiles  ")
NARROWEST = 20
DRAWN = ("tile", "sum")


@dataclass
class Timeline:
    """A rich renderable: the lanes of every rank of ``recording``, and a ruler."""

    recording: Recording
    world_size: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        start, end = self.recording.extent()
        margin = len(LABELS[1]) + 2
        scale = Scale(start, end, max(NARROWEST, options.max_width - margin))
        glyphs = Glyphs(options.ascii_only)
        for rank in range(self.world_size):
            lanes = (
                _chunk_cells(self.recording, rank, scale, glyphs),
                _tile_cells(self.recording, rank, scale, glyphs),
            )
            for label, cells in zip(LABELS, lanes, strict=True):
                line = Text(label.format(rank), no_wrap=True)
                line.append(glyphs.edge, "dim")
                for glyph, style in cells:
                    line.append(glyph, style)
                yield line.append(glyphs.edge, "dim")
        last = f"{(end - start) / TICKS:,.0f} {STEPS}"
        if (
            self.recording.unit != STEPS
        ):  # the times of interpreted kernels must not look like real speed
            last = f"{(end - start) / TICKS / 1000:,.1f} ms in the interpreter"
        yield Text(" " * (margin - 1) + "0" + last.rjust(scale.cells - 1), "dim", no_wrap=True)


def legend(ascii_only: bool) -> Text:
    """Return a legend of a :class:`Timeline`, in five lines."""
    glyphs = Glyphs(ascii_only)
    text = Text(
        "  reading the timelines, where a rank is always the same digit and color:\n", "dim"
    )
    for lane, glyph, meaning in (
        ("chunks", f"{glyphs.under_way}1", "a chunk from rank 1 is on its way, and has arrived"),
        ("tiles", "1", "computes a tile of the rows that belong to rank 1"),
        ("", "+", "sums the parts of all ranks"),
        ("", glyphs.waiting, "all programs of the rank wait for chunks"),
    ):
        text.append(f"    {lane:<8}", "dim").append(f"{glyph:>2}", "bold")
        text.append(f"  {meaning}\n", "dim")
    text.rstrip()
    return text


class Glyphs:
    """Characters of the lanes, with replacements for consoles that have only ASCII."""

    def __init__(self, ascii_only: bool) -> None:
        self.under_way = "-" if ascii_only else "\u2500"
        self.waiting = "." if ascii_only else "\u00b7"
        self.edge = "|" if ascii_only else "\u2502"


class Scale:
    def __init__(self, start: int, end: int, cells: int) -> None:
        self.start, self.cells = start, cells
        self.per_cell = max(1, end - start) / cells

    def cell(self, time: int) -> int:
        return min(self.cells - 1, max(0, int((time - self.start) / self.per_cell)))

    def shares(self, span: RecordedSpan) -> Iterable[tuple[int, float]]:
        """Yield (cell, time in the cell) for every cell that ``span`` touches."""
        for cell in range(self.cell(span.start), self.cell(span.end) + 1):
            begin = self.start + cell * self.per_cell
            inside = min(span.end, begin + self.per_cell) - max(span.start, begin)
            yield cell, max(inside, 0.0)


ColouredCells = list[tuple[str, str]]


def name_of(rank: int | None) -> str:
    """Return a rank as one character."""
    return NAMES[rank] if rank is not None and rank < len(NAMES) else "?"


def color_of(rank: int | None) -> str:
    return COLORS[(rank or 0) % len(COLORS)]


def _chunk_cells(recording: Recording, rank: int, scale: Scale, glyphs: Glyphs) -> ColouredCells:
    """Return the cells of a line that shows the chunks that arrive at ``rank``."""
    cells: ColouredCells = [(" ", "")] * scale.cells
    for span in recording.spans:
        if span.kind == "copy" and span.peer == rank and span.rank != rank:
            for cell, _ in scale.shares(span):
                cells[cell] = (glyphs.under_way, "dim " + color_of(span.rank))
    taken: set[int] = set()
    for signal in recording.arrivals(rank):
        at = scale.cell(signal.time)
        near = [c for c in (at, at + 1, at - 1, at + 2) if 0 <= c < scale.cells and c not in taken]
        cell = near[0] if near else at
        taken.add(cell)
        cells[cell] = (name_of(signal.source), "bold " + color_of(signal.source))
    return cells


def _tile_cells(recording: Recording, rank: int, scale: Scale, glyphs: Glyphs) -> ColouredCells:
    """Return the cells of a line that shows the tiles that ``rank`` computes."""
    work: list[dict[tuple[str, int | None], float]] = [
        defaultdict(float) for _ in range(scale.cells)
    ]
    waiting: set[int] = set()
    first_of_op: dict[str, int] = {}
    for span in recording.spans:
        if span.rank != rank or span.kind not in (*DRAWN, "wait"):
            continue
        first_of_op.setdefault(span.op, span.start)
        for cell, share in scale.shares(span):
            if span.kind == "wait":
                waiting.add(cell)
            else:
                work[cell][span.kind, span.peer] += share + 1e-9
    cells: ColouredCells = []
    for cell, candidates in enumerate(work):
        if not candidates:
            cells.append((glyphs.waiting, "dim") if cell in waiting else (" ", ""))
            continue
        kind, peer = max(candidates, key=lambda key: candidates[key])
        if kind == "sum":
            cells.append(("+", "black on white"))
        else:
            cells.append((name_of(peer), "black on " + color_of(peer)))
    for start in sorted(first_of_op.values())[1:]:
        cells[scale.cell(start)] = (glyphs.edge, "bold")
    return cells


def write_plot(path: pathlib.Path, parts: Sequence[tuple[str, Recording]], world_size: int) -> None:
    """Draw one panel per (title, recording): arrivals and the programs of every rank."""
    figure = require_matplotlib()(figsize=(12, 1.6 + len(parts) * (0.7 + 0.62 * world_size)))
    panels = figure.subplots(len(parts), 1, squeeze=False)[:, 0]
    for panel, (title, recording) in zip(panels, parts, strict=True):
        _plot_panel(panel, recording, world_size)
        panel.set_title(title, loc="left", fontsize=10, fontweight="bold")
    handles = [_patch(_shade(rank), f"rows of rank {rank}") for rank in range(min(world_size, 16))]
    handles += [_patch("0.35", "sum over ranks"), _patch("0.9", "waiting")]
    figure.legend(handles=handles, loc="lower center", ncol=min(len(handles), 9), frameon=False)
    figure.text(
        0.5,
        0.995,
        "upper line of a rank: chunks on their way to it, a triangle where one has arrived; "
        "below: its programs",
        ha="center",
        va="top",
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0.35 / figure.get_figheight(), 1, 0.985))
    figure.savefig(path, dpi=120)


def _plot_panel(panel: Any, recording: Recording, world_size: int) -> None:
    start, end = recording.extent()
    for rank in range(world_size):
        base = float(rank)
        own = [s for s in recording.spans if s.rank == rank and s.kind in (*DRAWN, "wait")]
        lanes = sorted({_program(s) for s in own if s.kind in DRAWN} or {_program(s) for s in own})
        height = 0.6 / max(1, len(lanes))
        for span in own:
            if _program(span) in lanes:
                y = base + 0.3 + lanes.index(_program(span)) * height
                shade = {"wait": "0.9", "sum": "0.35"}.get(span.kind, _shade(span.peer))
                _bar(panel, span, start, y, height * 0.9, shade)
        for span in recording.spans:
            if span.kind == "copy" and span.peer == rank and span.rank != rank:
                _bar(panel, span, start, base + 0.17, 0.06, _shade(span.rank))
        for signal in recording.arrivals(rank):
            x = (signal.time - start) / TICKS
            panel.plot(x, base + 0.17, "v", color=_shade(signal.source), markersize=6, mec="0.2")
    panel.set_xlim(0, (end - start) / TICKS)
    panel.set_ylim(world_size, 0)
    panel.set_yticks([rank + 0.5 for rank in range(world_size)])
    panel.set_yticklabels([f"rank {rank}" for rank in range(world_size)])
    panel.set_xlabel(recording.unit + ("" if recording.unit == STEPS else ", in the interpreter"))
    panel.spines[["top", "right"]].set_visible(False)


def _program(span: RecordedSpan) -> str:
    """Return the lane without the kernel's name: programs of successive ops share a line."""
    return span.lane.split(" ", 1)[-1]


def _bar(panel: Any, span: RecordedSpan, start: int, y: float, height: float, color: str) -> None:
    left, width = (span.start - start) / TICKS, (span.end - span.start) / TICKS
    panel.broken_barh([(left, width)], (y, height), facecolors=color, edgecolor="white", lw=0.3)


def _shade(rank: int | None) -> str:
    return f"C{(rank or 0) % 10}"


def _patch(color: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)


def panel_of(title: str, text: str, recording: Recording) -> Panel:
    """Return a panel of ``recording``. An arrow starts at the span before the publish that ended a wait."""
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
        if place and signal.time > wait.start:  # otherwise nothing had to wait
            view.arrows.append((before[place - 1][1], numbers[wait], "wait"))
    return Panel(title, text, [view])
