"""A console to print on, and progress of long commands: bars of rich on a terminal, otherwise lines.

Ranks in other processes write their progress to a file, which a thread of the caller reads. A process that
measures itself calls :meth:`Progress.at` between blocks and has no such thread.
"""

import contextlib
import functools
import os
import pathlib
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_MARKUP = re.compile(r"\[/?[a-z ]*\]")
WIDEST = 10_000  # columns of a table that is not printed on a terminal


class PlainConsole:
    """A console without rich, with the methods of ``rich.console.Console`` that the commands use."""

    def __init__(self, *, stderr: bool = False) -> None:
        self._stderr = stderr

    def print(self, text: object = "", *, markup: bool = True, **style: object) -> None:
        line = _MARKUP.sub("", str(text)) if markup else str(text)
        print(line, file=sys.stderr if self._stderr else sys.stdout)

    def out(self, text: str, **style: object) -> None:
        self.print(text, markup=False)


def new_console(*, stderr: bool = False) -> Any:
    """Return rich's console, or a plain one; numbers in a text are not coloured."""
    try:
        from rich.console import Console
    except ImportError:
        return PlainConsole(stderr=stderr)
    return Console(stderr=stderr, highlight=False)


def write(console: Any, text: str, style: str = "") -> None:
    """Print a line unchanged: words in brackets are not markup, and the line is not wrapped."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def new_table(**options: Any) -> Any:
    """Return a table of rich with a line below the headings, which looks the same on every terminal."""
    from rich.box import Box
    from rich.table import Table

    blank = "    \n"
    box = Box(f"{blank}{blank} -- \n{5 * blank}", ascii=True)
    return Table(box=box, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), **options)


def write_table(console: Any, table: Any) -> None:
    """Print a table of rich: on a terminal as wide as the terminal, elsewhere as wide as the table."""
    if not console.is_terminal:
        table.width = console.measure(
            table, options=console.options.update(max_width=WIDEST)
        ).maximum
    console.print(table, crop=console.is_terminal)


PERIOD = 0.2
LINE_PERIOD = 10.0
Tick = Callable[[int, int], None]


def _write_tick(path: str, done: int, total: int) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(f"{done} {total}\n")


class Progress:
    """Progress over ``count`` sizes, which are the steps of a bar; has a temporary ``folder``."""

    def __init__(self, command: str, count: int, *, shown: bool = True) -> None:
        self._count, self._shown = count, shown
        name = f"interlace-{command}-{secrets.token_hex(8)}"
        self.folder = os.path.join(tempfile.gettempdir(), name)
        # before the folder exists: a signal may arrive as soon as it does
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        os.mkdir(self.folder, 0o700)
        self._bar: Any = None
        self._task: Any = None
        self._number = 0
        self._last = 0.0

    def __enter__(self) -> "Progress":
        if self._shown:  # only the caller draws
            self._bar = _bars("TaskProgressColumn", auto_refresh=False)
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=float(self._count))
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._remove()

    def begin(self, number: int, text: str) -> None:
        self._number = number
        if self._bar is not None:
            self._bar.update(self._task, description=text, completed=float(number), refresh=True)
        elif self._shown:
            print(f"{number + 1} of {self._count}: {text}", file=sys.stderr, flush=True)

    def at(self, done: int, total: int) -> None:
        """Note that the share ``done / total`` of the size is done."""
        now = time.monotonic()
        if self._bar is None or now - self._last < PERIOD:
            return
        self._last = now
        share = done / total if total else 0.0
        self._bar.update(self._task, completed=self._number + share, refresh=True)

    @contextlib.contextmanager
    def on_ranks(self, *, apart: bool) -> Iterator[Tick]:
        """Yield a function for ranks, ``tick(done, total)``; ranks in other processes use a file."""
        if not apart:
            yield self.at
            return
        path = f"{self.folder}/progress-{self._number}"
        tick = functools.partial(_write_tick, path)
        if self._bar is None:
            yield tick
            return
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(PERIOD):
                with contextlib.suppress(OSError, ValueError):  # not there, or incomplete
                    done, total = pathlib.Path(path).read_text("ascii").split()
                    self.at(int(done), int(total))

        thread = threading.Thread(target=watch, name="interlace bench progress", daemon=True)
        thread.start()
        try:
            yield tick
        finally:
            ended.set()
            thread.join()
            with contextlib.suppress(OSError):
                os.unlink(path)


@contextlib.contextmanager
def count_in_bar() -> Iterator[Callable[[str, int | None], Callable[..., None]]]:
    """Yield a function that begins a bar, of a text and a count; call its result after each step."""
    bars = _bars("MofNCompleteColumn")
    if bars is None:
        yield lines
        return
    with bars:

        def begin(text: str, total: int | None) -> Callable[..., None]:
            task = bars.add_task(text, total=total)
            return lambda *done: bars.advance(task)

        yield begin


def lines(
    text: str, total: int | None, now: Callable[[], float] = time.monotonic
) -> Callable[..., None]:
    """Return a function to call after each of ``total`` steps: it prints a line at times and at the end."""
    done, begun = 0, now()
    last = begun

    def tell() -> None:
        took = now() - begun
        words = [f"{text}: {done}" + (f" of {total}" if total else ""), f"{took:.0f} s"]
        if total and 0 < done < total:
            words.append(f"about {took / done * (total - done):.0f} s left")
        print(", ".join(words), file=sys.stderr, flush=True)

    def step(*_: object) -> None:
        nonlocal done, last
        done += 1
        if done == total or now() - last >= LINE_PERIOD:
            last = now()
            tell()

    tell()
    return step


def _bars(column: str, **how: Any) -> Any:
    """Return rich's bars on stderr, where ``column`` shows the progress; None without a terminal."""
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        getattr(progress, column)(),
        progress.TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # other output goes above the bars
        **how,
    )
