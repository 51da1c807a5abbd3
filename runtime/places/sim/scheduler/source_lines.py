"""Source lines of programs and of user code, from the frames in which they are suspended."""

import ast
import contextvars
import functools
import linecache
import os
import re
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from interlace.runtime.core.errors import BlockedWait, InterlaceError, RankError, SourceText
from interlace.runtime.core.laboratory import PACKAGE
from interlace.runtime.places.sim.interpreter.session import outwards, source_frames
from interlace.runtime.places.sim.scheduler.allocations import Allocations, together
from interlace.runtime.places.sim.scheduler.strategies import Task

# Files whose polls belong to a calling kernel: that kernel waits.
_SIGNALS = ("signal.py", "slots.py", "flagged_words.py")
LAUNCHED = contextvars.ContextVar[SourceText | None]("interlace_launched", default=None)
"""The launch of a program by a stream, and where it was enqueued if the run is observed."""
_COMPARED = re.compile(r"(==|!=|<=|>=|<|>)\s*(\w+)")


def polling(
    task: Task, seen: int | None, words: list[int], memory: Allocations, values: Sequence[int] = ()
) -> BlockedWait:
    """Describe a program that polls ``words``, from the frames in which it is suspended.

    ``values``: the last values read from the words; ``seen``: the first word's value, if only it counts.
    """
    suspended = task.greenlet.gr_frame
    frames = source_frames(suspended)
    expected = source = None
    words_seen = together(map(memory.name, words)) if words else "a slot"
    if seen is None and len(values) > 1:
        more = f" and {len(values) - 2} more" * (len(values) > 2)
        words_seen += f", seen {values[0]} and {values[1]}{more}"
    where = SourceText("")
    for frame in frames:
        if frame.f_code.co_name == "wait" and "epoch" in frame.f_locals:
            found = frame.f_locals
            expected = _scalar(found["epoch"])
            source = _scalar(found.get("source"))
            words_seen = f"slot at byte {_scalar(found.get('slot_byte'))} from rank {source}"
        elif frame.f_code.co_name == "wait_slots" and (
            late := _late(frame.f_locals, words, values)
        ):
            expected, source, byte, seen = late
            words_seen = f"slot at byte {byte} from rank {source}"
        elif not where or where.startswith(_SIGNALS):
            where = place_of(frame)
    if frames and expected is None:
        expected = _expected_number(frames[0])
    for frame in outwards(suspended):
        inside = frame.f_globals.get("__name__") == f"{PACKAGE}.ptx.inline_assembly"
        if inside and (text := getattr(frame.f_locals.get("step"), "text", "")):
            where = SourceText(f"{where}, inline PTX: {text}", where.frames)
            break
    if not frames and (lines := _ptx_lines(suspended)):
        where = SourceText(", called from ".join(lines), lines[0].frames)
    return BlockedWait(task.rank, task.who, words_seen, seen, expected, where, source)


def _late(
    found: dict[str, Any], words: Sequence[int], values: Sequence[int]
) -> tuple[int, int, int, int] | None:
    """Return the first late slot of ``wait_slots``: the epoch, the source, the byte, the slot's value."""
    epoch, read = _scalar(found.get("epoch")), dict(zip(words, values, strict=False))
    names = ("pointers", "sources", "slot_bytes")
    if epoch is None or any(name not in found for name in names):
        return None
    columns = (found[name].handle.data.ravel().tolist() for name in names)
    for address, source, byte in zip(*columns, strict=True):
        if read.get(address, epoch) < epoch:
            return epoch, source, byte, read[address]
    return None


def _expected_number(frame: FrameType) -> int | None:
    """Return the number, a literal or a scalar variable, with which the poll's line compares; or None."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    found = _COMPARED.findall(line)
    if not found:
        return None
    operator, name = found[-1]
    if operator == "==" and line.lstrip().startswith("while"):
        return None  # the loop ends when that value changes
    return int(name) if name.isdigit() else _scalar(frame.f_locals.get(name))


def program_line(task: Task) -> str:
    frames = source_frames(task.greenlet.gr_frame)
    return place_of(frames[0]) if frames else "its beginning"


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's code at or above ``frame``; None if there is none."""
    libraries = ("interlace", "torch", "contextlib", "concurrent", "numpy", "triton")
    around = outwards(frame)
    return next(
        (f for f in around if not f.f_globals.get("__name__", "").startswith(libraries)), None
    )


def user_line(task: Task) -> str:
    return line_of(user_frame(task.greenlet.gr_frame))


def line_of(frame: FrameType | None) -> SourceText:
    """Return the frame's line, as in "file.py:12"; empty for None."""
    if frame is None:
        return SourceText("")
    path, number = frame.f_code.co_filename, frame.f_lineno
    return SourceText(f"{os.path.basename(path)}:{number}", ((path, number),))


def place_of(frame: FrameType) -> SourceText:
    """Return the frame's line and function: "file.py:12 in function"."""
    line = line_of(frame)
    return SourceText(f"{line} in {frame.f_code.co_name}", line.frames)


def with_lines(error: BaseException) -> SourceText:
    """Return ``error``'s text with the lines in kernels and user code, unless it has lines already."""
    text = str(error).strip()
    if not text or text.endswith(":"):
        text = f"{text.removesuffix(':') or type(error).__name__} without a message"
    raised = error.original if isinstance(error, RankError) else error
    if isinstance(raised, InterlaceError) and raised.frames:
        return SourceText(text, raised.frames)
    lines = _compiled_lines(raised)
    refused = isinstance(raised, NotImplementedError)  # a kernel's request, at a line of the kernel
    if isinstance(raised, InterlaceError) and not lines and not refused:
        return SourceText(text)
    return at_lines(text, lines or raised_in(raised))


def at_lines(text: str, lines: list[SourceText]) -> SourceText:
    """Return ``text``, followed by ``lines``, which begin with the outermost."""
    at = f" at {', called from '.join(lines[::-1])}" if lines else ""
    return SourceText(text + at, tuple(frame for line in lines[::-1] for frame in line.frames))


def raised_in(error: BaseException) -> list[SourceText]:
    """Return the lines of kernels and user code through which ``error`` has passed, outermost first."""
    lines = []
    for frame, number in traceback.walk_tb(error.__traceback__):
        if _is_ours(frame) or user_frame(frame) is frame:
            path = frame.f_code.co_filename
            place = f"{os.path.basename(path)}:{number} in {frame.f_code.co_name}"
            lines.append(SourceText(place, ((path, number),)))
    return lines


def _compiled_lines(error: BaseException | None) -> list[SourceText]:
    """Return the lines, outermost first, of compiled code that raised ``error`` or its cause, if any."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if found := [line for line in _ptx_lines(frame, around=False) if line.frames]:
                return found[::-1]
        error = error.__cause__
    return []


def program_lines() -> tuple[SourceText, ...]:
    """Return the lines of the running program, innermost first; empty outside of kernels."""
    frame = sys._getframe()
    frames = source_frames(frame)
    lines = tuple(map(place_of, frames))
    launched = LAUNCHED.get()
    if lines and launched is not None and launched.frames and all(map(_is_ours, frames)):
        lines += (launched,)  # a user knows no other line of a kernel of interlace
    return lines or _ptx_lines(frame)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("interlace.kernels.")


def task_lines(task: Task) -> tuple[SourceText, ...]:
    """Return the user's line, for user code and for items that user code has enqueued."""
    if task.owner is not None:
        return (task.owner.running,)
    frame = user_frame(sys._getframe(2))
    return () if frame is None else (place_of(frame),)


def _ptx_lines(frame: FrameType, *, around: bool = True) -> tuple[SourceText, ...]:
    """Return the line that the machine at or above ``frame`` runs, or its module parses, if any."""
    for each in outwards(frame) if around else (frame,):
        where = each.f_locals.get("where") if _is_machine(each, "module") else None
        if _is_machine(each, "machine"):
            where = getattr(each.f_locals.get("self"), "where", None)
        if where is not None:
            text, places = where()
            return tuple(_written(*place) for place in places) or (SourceText(text),)
    return ()


def _is_machine(frame: FrameType, name: str) -> bool:
    return bool(frame.f_globals.get("__name__") == f"{PACKAGE}.machine.{name}")


@functools.cache
def _written(path: str, number: int) -> SourceText:
    """Return a line from a compiler: where its call expression begins, and its function."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        tree = ast.Module([], [])
    first, function = number, ""
    for node in ast.walk(tree):  # outer nodes first
        if not isinstance(node, (ast.Call, ast.FunctionDef)):
            continue
        if node.lineno <= number <= (node.end_lineno or 0):
            if isinstance(node, ast.Call):
                first = node.lineno
            else:
                function = f" in {node.name}"
    return SourceText(f"{os.path.basename(path)}:{first}{function}", ((path, first),))


def _scalar(value: object) -> int | None:
    handle = getattr(value, "handle", None)
    if handle is not None:
        return int(handle.data.ravel()[0]) if handle.data.size == 1 else None
    return value if isinstance(value, int) else None
