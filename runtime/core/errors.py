"""Typed errors: all errors that interlace raises, except plain misuse.

Misuse of an argument is a ``ValueError`` or ``TypeError`` that names the argument, both values and
the rank. Every other error derives from :class:`InterlaceError`, so one ``except`` clause catches it.
"""

import contextlib
import copyreg
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

OF_PARENT = (
    "this group belongs to the parent process; a forked child has to make its own (start processes with "
    "the spawn method)"
)

DIED = "died while this rank was in"
REPLACED = (
    "lives, but has closed its connections, as a process that starts another program does (exec), while "
    "this rank was in"
)
GONE = "died, or has left the group, while this rank was in"
UNREACHABLE = "died, or the connection to it broke, while this rank was in"


class InterlaceError(RuntimeError):
    """Base of every error that is not a misuse of an argument.

    ``frames``: lines of source that the text names, as (path, line), innermost first.
    """

    frames: tuple[tuple[str, int], ...] = ()

    def __reduce__(self) -> tuple[object, ...]:
        """Copy by its text and attributes, whatever arguments its class takes."""
        new = copyreg.__newobj__  # type: ignore[attr-defined]
        return new, (type(self), *self.args), vars(self)


Raised = TypeVar("Raised", bound=Exception)


def of_another_rank(error: Raised) -> Raised:
    """Return ``error``, marked as caused by another rank, which ends by that error itself."""
    error.elsewhere = True  # type: ignore[attr-defined]
    return error


class PlaceUnavailableError(InterlaceError):
    """The requested place cannot run here (no GPU, no memfd, kernels compiled the other way)."""


class StoreGoneError(InterlaceError):
    """The process that serves the store has ended; without a launcher this is the process of rank 0."""


class AbortedError(InterlaceError):
    """This rank stopped because another rank failed or the group was shut down."""


class DifferentOpsError(ValueError):
    """Ranks called different ops at the same time, so one of them may be a call ahead of another.

    It aborts the group: every later call on it raises an InterlaceError at once that names this mismatch.
    """


class PeerDiedError(InterlaceError):
    """A peer process ended, or became unreachable, while this rank depended on it; ``how`` says which."""

    def __init__(self, rank: int, pid: int, doing: str, ending: str = DIED) -> None:
        self.rank, self.pid, self.doing, self.how = rank, pid, doing, ending
        super().__init__(f"rank {rank} (pid {pid}) {ending} {doing}")


class SourceText(str):
    """Text that names source, as "signal.py:69 in publish"; ``frames``: (path, line), innermost first."""

    frames: tuple[tuple[str, int], ...]

    def __new__(cls, text: str, frames: tuple[tuple[str, int], ...] = ()) -> "SourceText":
        source = super().__new__(cls, text)
        source.frames = frames
        return source


@dataclass(frozen=True)
class BlockedWait:
    """One wait that can never end: the rank and its program, the awaited memory, and the line of source.

    ``seen`` and ``expected`` are values of the signal slot, ``source`` is the rank of the group that
    publishes it. They are None if they are not known.
    """

    rank: int
    who: str
    waiting_for: str
    seen: int | None = None
    expected: int | None = None
    where: str = ""
    source: int | None = None

    def __str__(self) -> str:
        values = "" if self.seen is None else f", seen {self.seen}"
        values += "" if self.expected is None else f", expected {self.expected}"
        place = f" at {self.where}" if self.where else ""
        return f"rank {self.rank} {self.who} waits for {self.waiting_for}{values}{place}"


class DeadlockError(InterlaceError):
    """No rank can go on, neither its programs nor its user code; among processes, no rank that it names.

    ``blocked`` lists every :class:`BlockedWait`. ``seed`` replays the schedule; it is None for processes.
    """

    def __init__(
        self, blocked: list[BlockedWait], seed: int | None = None, finished: Sequence[str] = ()
    ) -> None:
        self.blocked, self.seed, self.finished = blocked, seed, finished
        why = "ranks wait for each other" if seed is None else f"nothing can run (seed {seed})"
        lines = [f"deadlock: {why}:"]
        lines += [f"  {wait}" for wait in blocked]
        lines += [f"  {line}" for line in finished]
        super().__init__("\n".join(lines))


class MemoryAccessError(InterlaceError):
    """A kernel accessed memory that it may not access; ``kind`` is one of ``interlace.verify.KINDS``."""

    def __init__(self, message: str, kind: str) -> None:
        self.kind = kind
        super().__init__(message)


class InlineAssemblyError(InterlaceError, NotImplementedError):
    """Inline PTX that the interpreter cannot run, or that no assembler accepts."""


class KernelAssertionError(InterlaceError, AssertionError):
    """A condition of a kernel does not hold: ``tl.device_assert``, ``assert`` or ``tl.assume``."""


class CollectiveTimeoutError(InterlaceError):
    """A wait has timed out. The error names the operation and the ranks that it waited for."""

    def __init__(self, message: str, waited_for: tuple[int, ...] = ()) -> None:
        self.waited_for = waited_for
        super().__init__(message)


class EndlessTaskError(CollectiveTimeoutError):
    """A program, or code of a rank, runs for ever and reads no memory that other ranks may change."""


class RankError(InterlaceError):
    """An exception of one rank, raised in the caller of ``interlace.run``.

    It is also an instance of the original exception's class wherever Python allows such a class, so
    ``except ValueError`` still catches a rank's ``ValueError``. The original is ``__cause__``.
    """

    def __init__(self, rank: int, original: BaseException, details: str = "") -> None:
        self.rank, self.original, self.details = rank, original, details
        self.args = (rank, original)

    def __str__(self) -> str:
        text = f"rank {self.rank}: {type(self.original).__name__}: {self.original}"
        return f"{text}\n{self.details}" if self.details else text


def users_traceback(error: BaseException) -> str:
    """Return the traceback of ``error`` from the first call outside this project, or all of it."""
    first = error.__traceback__
    while first is not None and _is_own(first.tb_frame):
        first = first.tb_next
    return "".join(traceback.format_exception(type(error), error, first or error.__traceback__))


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "interlace"


def rank_error(rank: int, original: BaseException, details: str = "") -> RankError:
    """Wrap ``original``, raised on ``rank``, in a :class:`RankError` that is also of its class."""
    if isinstance(original, RankError):
        return original
    base = type(original)
    error = RankError(rank, original, details)
    if isinstance(original, Exception):
        # The layouts of some built-in exceptions cannot be combined.
        with contextlib.suppress(TypeError):
            namespace = {"__init__": RankError.__init__}
            error = type(f"Rank{base.__name__}", (RankError, base), namespace)(
                rank, original, details
            )
    error.__cause__ = original
    return error
