"""Files that a command writes at its end: their names, early checks of them, and bar charts of times."""

import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from interlace.arguments.paths import refuse_empty, refuse_unwritable
from interlace.output.consoles import write


def refuse_outputs(
    outputs: Mapping[str, str | None], inputs: Mapping[str, str | None] | None = None
) -> None:
    """Raise ValueError unless each of ``outputs`` can be written and differs from the other files."""
    named: dict[str | tuple[int, int], str] = {}
    for option, path in {**(inputs or {}), **outputs}.items():
        if path is None:
            continue
        if option in outputs:
            refuse_unwritable(option, path)
        file = pathlib.Path(path)
        if file.exists() and not file.is_file():
            continue  # a device, such as /dev/null, may be named twice
        known = (
            (file.stat().st_dev, file.stat().st_ino) if file.exists() else os.path.realpath(file)
        )
        if option in outputs and known in named:
            raise ValueError(f"{named[known]} and {option} name the same file, {path}")
        named[known] = option


def refuse_unreadable(option: str, path: str) -> None:
    """Raise ValueError naming ``option`` unless there is a readable file at ``path``."""
    refuse_empty(option, path)
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot be read: {error.strerror}") from None


def refuse_no_folder(option: str, path: str) -> None:
    """Raise ValueError naming ``option`` unless ``path`` is a writable folder, or can become one."""
    refuse_empty(option, path)
    where, target = f"{option} {path}", pathlib.Path(path).absolute()
    existing = next(each for each in (target, *target.parents) if each.exists())
    if not existing.is_dir():
        raise ValueError(f"{where}: {existing} is a file; name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{where}: {existing} cannot be written")


def refuse_format(path: str) -> None:
    refuse_empty("--plot", path)
    known = require_matplotlib()().canvas.get_supported_filetypes()
    suffix = pathlib.Path(path).suffix.lstrip(".").lower()
    if suffix not in known:
        raise ValueError(
            f"--plot {path}: the ending {suffix!r} must be one of {', '.join(sorted(known))}"
        )


def require_matplotlib() -> Any:
    """Return matplotlib's Figure. Raise ValueError that says how to install it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib, which is not installed: pip install 'interlace[plot]'"
        ) from None
    return Figure


def file_to_write(path: str | None, usual: pathlib.Path | None, variable: str) -> pathlib.Path:
    """Return the file of ``--cache``, or the usual one, unless ``variable`` disables that."""
    if path is not None:
        refuse_empty("--cache", path)
        return pathlib.Path(path).absolute()
    if usual is None:
        raise ValueError(
            f"{variable}={os.environ[variable]}: there is no file to write; give --cache FILE"
        )
    return usual


def tell_written(
    console: object, file: pathlib.Path, usual: pathlib.Path | None, variable: str
) -> None:
    """Print the name of the file and, if it is not the usual one, the variable that selects it."""
    write(console, f"written: {file}")
    if usual != file:
        write(console, f"to use it: {variable}={file}")


TERMINAL = "-"
Times = Sequence[tuple[str, Sequence[tuple[str, float]]]]
"""Titles of measurements, each with the microseconds of its candidates by name."""


def file_of(path: str | None) -> str | None:
    """Return the file of ``--plot``; None for the terminal. Raise ValueError for an unknown format."""
    if path is None or path == TERMINAL:
        return None
    refuse_format(path)
    return path


def draw_bars(console: object, path: str, times: Times) -> None:
    if path == TERMINAL:
        for text in bar_lines(times, shutil.get_terminal_size().columns):
            write(console, text)
    else:
        _write(path, times)
        write(console, f"Plot: {path}")


def bar_lines(times: Times, width: int) -> list[str]:
    """Return a bar per candidate, in proportion to its time; the longest of a title fills ``width``.

    >>> print(*bar_lines([("64 KiB", [("auto", 50.0), ("gloo", 200.0)])], 41), sep="\\n")
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
