"""Errors that nobody has caught: their printed traceback, and the word to torchrun of who failed first.

Of an error that interlace raises on purpose, the frames within interlace are not printed. A rank that ends
because another one has failed lets torchrun find that one first: torchrun calls the root cause what it saw
first, and counts in seconds.
"""

import atexit
import json
import linecache
import os
import sys
import time
import traceback
from collections.abc import Iterator
from types import TracebackType

from interlace.runtime.compat.environment import debugging
from interlace.runtime.core.errors import AbortedError, InterlaceError, PeerDiedError

LATER = 10  # seconds, at most: torchrun ends all processes as soon as it has seen one fail
_AROUND = ("concurrent.futures", "contextlib", "functools", "threading")  # of what is hidden


def install() -> None:
    """Let uncaught errors go through here, to whoever printed them before."""
    before = sys.excepthook

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        hidden = 0
        if not debugging():
            hidden = _hide(error)
        if hidden:  # said first: the last line is the error's
            note = f"{hidden} frames of interlace are not shown; INTERLACE_DEBUG=debug shows them"
            print(note, file=sys.stderr)
        before(kind, error, error.__traceback__ if hidden else trace)
        if any(map(_is_of_another, _chain(error))):
            _follow(str(error))

    sys.excepthook = uncaught


def _is_of_another(error: BaseException) -> bool:
    return isinstance(error, (AbortedError, PeerDiedError)) or hasattr(error, "elsewhere")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, and what it was raised from or beside, each once."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _hide(error: BaseException | None) -> int:
    """Take frames of interlace out of the traceback of ``error``, and of its causes; how many.

    Not out of those of a fault within interlace: its frames are needed.
    """
    count, meant = 0, False
    for raised in _chain(error):
        kept, hidden, inside = [], 0, False
        trace = raised.__traceback__
        while trace is not None:
            name = str(trace.tb_frame.f_globals.get("__name__", ""))
            ours = name.startswith(("interlace.", "interlace_verify."))
            inside = ours or (inside and name.startswith(_AROUND))
            hidden += inside
            kept += [] if inside else [trace]
            trace = trace.tb_next
        told = isinstance(raised, InterlaceError) or "told" in vars(raised)
        on_purpose = told or (inside and _is_raised(raised))
        if kept and (on_purpose or (meant and not inside)):
            count += hidden
            for each in reversed(kept):
                trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
            raised.__traceback__ = trace
        meant = meant or on_purpose
    return count


def _is_raised(error: BaseException) -> bool:
    """Whether a statement of its innermost frame says so: what nobody meant is no ``raise``."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")


def _follow(text: str) -> None:
    """Another rank is to blame: say so in torchrun's file, and let that rank end before this one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    stamp = str(int(time.time()) + LATER)
    said: dict[str, object] = {"message": text, "extraInfo": {"timestamp": stamp}}
    if not os.path.exists(path):
        with open(path, "w") as file:
            json.dump({"message": said}, file)
    atexit.register(time.sleep, LATER)  # what is to be printed comes before
