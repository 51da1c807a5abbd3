"""A page about a run: lanes by rank and program, arrows, and the source of every access, in one HTML file.

``data/report.html`` draws it and needs nothing else, not even a network. This file has its data: panels,
each with a text and *views*. A view is one schedule.
"""

import json
import linecache
import os
import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import NamedTuple

from interlace.runtime.core.errors import SourceText


class PageEvent(NamedTuple):
    """An activity of a lane. ``mark`` is "", "red" or "blocked", ``peer`` the peer of a tile."""

    lane: int
    start: float
    end: float
    kind: str
    text: str
    lines: Sequence[SourceText] = ()
    mark: str = ""
    peer: int = 0


@dataclass
class PageView:
    """A schedule; ``arrows`` are (from, to, "wait", "red" or "blocked") by number of the event."""

    title: str
    unit: str
    lanes: list[tuple[int, str]]
    events: list[PageEvent] = field(default_factory=list)
    arrows: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass
class Panel:
    """A finding if ``bad``, otherwise a run; ``table`` begins with its head. Empty views are not shown."""

    title: str
    text: str
    views: list[PageView] = field(default_factory=list)
    bad: bool = False
    lines: Sequence[SourceText] = ()
    table: Sequence[Sequence[str]] = ()


def write_page(
    path: str, title: str, verdict: str, facts: str, panels: Sequence[Panel], *, bad: bool
) -> None:
    """Write the page to ``path``; it includes the source files that panels name."""
    sources = Sources()
    content = {
        "title": title,
        "verdict": verdict,
        "bad": bad,
        "facts": facts,
        "panels": [_panel(panel, sources) for panel in panels],
        "files": sources.files,
        "frames": list(sources.frames),
    }
    # the content must not end the element that holds it
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    template = (resources.files("interlace") / "data" / "report.html").read_text("ascii")
    pathlib.Path(path).write_text(template.replace("@DATA@", text), encoding="ascii")


def _panel(panel: Panel, sources: "Sources") -> dict[str, object]:
    """Return ``panel`` for JSON; its lines become part of ``sources``."""
    views = []
    for view in (each for each in panel.views if each.events):
        events = [[*event[:5], sources.of(event.lines), *event[6:]] for event in view.events]
        views.append({**vars(view), "events": events})
    return {**vars(panel), "views": views, "lines": sources.of(panel.lines)}


class Sources:
    """Source files by path. ``frames`` are distinct (path, line, text), referred to by their numbers."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, object]] = {}
        self.frames: dict[tuple[str, int, str], int] = {}

    def of(self, lines: Iterable[SourceText]) -> list[int]:
        """Return the numbers of the frames of ``lines`` whose source is available."""
        found = []
        for line in lines:
            for place, (path, number) in enumerate(line.frames):
                if path not in self.files and (source := linecache.getlines(path)):
                    name = os.path.relpath(path)
                    short = path if name.startswith("..") else name
                    text = [each.rstrip("\n") for each in source]
                    self.files[path] = {"name": short, "lines": text}
                if path in self.files:
                    label = str(line) if not place else f"{os.path.basename(path)}:{number}"
                    found.append(self.frames.setdefault((path, number, label), len(self.frames)))
        return found
