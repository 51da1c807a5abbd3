"""A console to print on: rich's where it is installed, else one that prints plainly."""

import re
import sys
from typing import Any

_MARKUP = re.compile(r"\[/?[a-z ]*\]")
WIDEST = 10_000  # columns of a table that is not for a terminal


class PlainConsole:
    """A console that needs no rich: as much of ``rich.console.Console`` as the commands use."""

    def __init__(self, *, stderr: bool = False) -> None:
        self._stderr = stderr

    def print(self, text: Any = "", *, markup: bool = True, **style: Any) -> None:
        line = _MARKUP.sub("", str(text)) if markup else str(text)
        print(line, file=sys.stderr if self._stderr else sys.stdout)

    def out(self, text: str, **style: Any) -> None:
        self.print(text, markup=False)


def new_console(*, stderr: bool = False) -> Any:
    """rich's console, or a plain one; figures in a text are not coloured."""
    try:
        from rich.console import Console
    except ImportError:
        return PlainConsole(stderr=stderr)
    return Console(stderr=stderr, highlight=False)


def write(console: Any, text: str, style: str = "") -> None:
    """Print a line as it is: words in brackets are no markup, and it is not broken."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def write_table(console: Any, table: Any) -> None:
    """Print rich's table: on a terminal as wide as that, elsewhere whole."""
    if not console.is_terminal:
        table.width = console.measure(
            table, options=console.options.update(max_width=WIDEST)
        ).maximum
    console.print(table, crop=console.is_terminal)
