"""Uncaught errors: prints a shorter traceback, and reports to torchrun which rank failed first.

If interlace raises an error on purpose, the frames within interlace are not printed. A rank that ends
because another rank has failed delays its end: torchrun takes the failure that it sees first as the root
cause, and counts time in seconds.
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
_AROUND = ("concurrent.futures", "contextlib", "functools", "threading")  # hidden with our frames


def install() -> None:
    """Handle uncaught errors here, then pass them to the previous ``sys.excepthook``."""
    before = sys.excepthook

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        hidden = 0
        if not debugging():
            hidden = _hide(error)
        if hidden:  # printed first: the last line is the error itself
            note = f"{hidden} frames of interlace are not shown; INTERLACE_DEBUG=debug shows them"
            print(note, file=sys.stderr)
        before(kind, error, error.__traceback__ if hidden else trace)
        of_another = AbortedError, PeerDiedError
        if any(isinstance(e, of_another) or hasattr(e, "elsewhere") for e in _chain(error)):
            _follow(str(error))

    sys.excepthook = uncaught


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error``, its causes and its contexts, each once."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _hide(error: BaseException | None) -> int:
    """Remove interlace's frames from the tracebacks, unless the fault is interlace's; return how many."""
    count, meant = 0, False
    for raised in _chain(error):
        kept, hidden, inside = [], 0, False
        trace = raised.__traceback__
        while trace is not None:
            name = str(trace.tb_frame.f_globals.get("__name__", ""))
            is_ours = name.startswith(("interlace.", "interlace_verify."))
            inside = is_ours or (inside and name.startswith(_AROUND))
            hidden += inside
            kept += [] if inside else [trace]
            trace = trace.tb_next
        is_intended = isinstance(raised, InterlaceError) or "told" in vars(raised)
        on_purpose = is_intended or (inside and _is_raised(raised))
        if kept and (on_purpose or (meant and not inside)):
            count += hidden
            for each in reversed(kept):
                trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
            raised.__traceback__ = trace
        meant = meant or on_purpose
    return count


def _is_raised(error: BaseException) -> bool:
    """Return whether a ``raise`` statement raised it in its innermost frame: then it was on purpose."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")


def _follow(text: str) -> None:
    """Note in torchrun's file that another rank is the cause, and let that rank end before this one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    stamp = str(int(time.time()) + LATER)
    report: dict[str, object] = {"message": text, "extraInfo": {"timestamp": stamp}}
    if not os.path.exists(path):
        with open(path, "w") as file:
            json.dump({"message": report}, file)
    atexit.register(time.sleep, LATER)  # output is printed before
