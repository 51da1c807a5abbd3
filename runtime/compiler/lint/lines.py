"""Source lines of compiled instructions: what stands before what, and how a report names them.

An instruction of an inlined function has a *chain* of frames, innermost first: the line in the
function, the line that called it, and so on to the kernel. Order in the source is the order of the
lines in the outermost function in which two chains differ.
"""

import ast
import functools
import os
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from interlace.runtime.core.errors import SourceText


@dataclass(frozen=True)
class Frame:
    """A position in a file. Columns tell calls on one line apart."""

    path: str
    line: int
    column: int = 0


FrameChain = tuple[Frame, ...]


def later(chain: FrameChain, other: FrameChain) -> bool:
    """Whether ``chain`` stands after ``other`` in the source; False where the order is unknown."""
    for frame, against in zip(reversed(chain), reversed(other), strict=False):
        if frame != against:
            known = frame.line and against.line and frame.path == against.path
            return bool(known) and frame.line > against.line
    return False


def describe(chain: FrameChain) -> SourceText:
    """The innermost line and the kernel's: "a.py:69 in f, called at b.py:9"; no ``f`` if a file is gone."""
    if not chain or not chain[0].line:
        return SourceText("")
    text = place(chain[0], name_function=len(chain) > 1)
    if len(chain) > 1:
        text += f", called at {place(chain[-1], name_function=False)}"
    return SourceText(text, tuple((frame.path, frame.line) for frame in chain))


def place(frame: Frame, name_function: bool = True) -> str:
    """One frame: "signal.py:69 in publish"."""
    statement = _statements(frame.path).get(frame.line)
    line, function = statement or (frame.line, "")
    place = f"{os.path.basename(frame.path)}:{line}"
    return f"{place} in {function}" if function and name_function else place


@functools.lru_cache(maxsize=64)
def _statements(path: str) -> dict[int, tuple[int, str]]:
    """By line: the first line of its statement (calls are placed at their last), and the function."""
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {}
    return dict(_spans(tree, ""))


def _spans(node: ast.AST, function: str) -> Iterator[tuple[int, tuple[int, str]]]:
    """The lines of every statement: outer ones first, so that a dictionary keeps the innermost."""
    for child in ast.iter_child_nodes(node):
        inside = function
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inside = child.name
        if isinstance(child, ast.stmt):
            for line in range(child.lineno, (child.end_lineno or child.lineno) + 1):
                yield line, (child.lineno, inside)
        yield from _spans(child, inside)
