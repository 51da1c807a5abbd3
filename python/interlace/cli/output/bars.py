"""Times as bars: in the terminal, or as the picture that a file's name asks for."""

import shutil
from collections.abc import Sequence
from typing import Any

from interlace.cli.output.consoles import write
from interlace.cli.output.files import refuse_format, require_matplotlib

TERMINAL = "-"
Times = Sequence[tuple[str, Sequence[tuple[str, float]]]]
"""What was measured, each with the microseconds of its candidates by name."""


def file_of(path: str | None) -> str | None:
    """The file of ``--plot``; None for the terminal. Raises ValueError for a format that nobody writes."""
    if path is None or path == TERMINAL:
        return None
    refuse_format(path)
    return path


def draw(console: Any, path: str, times: Times) -> None:
    if path == TERMINAL:
        for text in lines(times, shutil.get_terminal_size().columns):
            write(console, text)
    else:
        _write(path, times)
        write(console, f"Plot: {path}")


def lines(times: Times, width: int) -> list[str]:
    """A bar per candidate; those of one title are as long as their times, the longest fills ``width``.

    >>> print(*lines([("64 KiB", [("auto", 50.0), ("gloo", 200.0)])], 41), sep="\\n")
    64 KiB
      auto  ######                      50 us
      gloo  ######################     200 us
    """
    names = max((len(name) for _, bars in times for name, _ in bars), default=0)
    room = max(10, width - names - 15)
    found = []
    for title, bars in times:
        longest = max((each for _, each in bars), default=1.0)
        found.append(title)
        for name, each in bars:
            bar = "#" * max(1, round(room * each / longest))
            found.append(f"  {name:<{names}}  {bar:<{room}}{each:>8,.0f} us")
    return found


def _write(path: str, times: Times) -> None:
    count = sum(len(bars) for _, bars in times)
    figure = require_matplotlib()(figsize=(9, 1 + 0.3 * count + 0.5 * len(times)))
    heights = [max(1, len(bars)) for _, bars in times]
    panels = figure.subplots(len(times), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (title, bars) in zip(panels, times, strict=True):
        panel.barh([name for name, _ in bars], [each for _, each in bars])
        panel.invert_yaxis()
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlabel("time of a call, us")
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
