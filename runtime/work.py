"""Work: the handle of an op that may still be running."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from interlace.runtime.errors import CollectiveTimeoutError
from interlace.runtime.place import Place
from interlace.runtime.stream import Event


@dataclass
class Outcome:
    """What the host part of an op leaves behind: its result and the point where it is there."""

    result: Any
    event: Event


class Work:
    """The handle that ``async_op=True`` returns; the surface of ``torch.distributed.Work``.

    The inputs of the op must not change before it has completed.
    """

    def __init__(self, op: str, place: Place, outcome: Future[Outcome]) -> None:
        self._op = op
        self._place = place
        self._outcome = outcome

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        """Order the caller's later work after the op.

        On a GPU the current stream waits and the host goes on at once; on a CPU this blocks.
        Returns the op's result, or True for an op that works in place, as torch does.

        ``timeout``, in seconds or a timedelta, bounds the blocking of the host in ``shm``; the
        group's own timeout always does, and in ``sim``, which has no clock, that of the run. Raises
        what the op failed with, on every later call again.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and seconds <= 0:
            seconds = None  # torch: zero means the group's timeout
        try:
            outcome = self._outcome.result(seconds)
        except (TimeoutError, FutureTimeoutError) as error:
            if self._outcome.done():
                raise
            raise CollectiveTimeoutError(
                f"rank {self._place.rank}: {self._op} has not finished within {seconds} s"
            ) from error
        self._place.hold_current(outcome.event, f"the end of {self._op}")
        self._place.check()
        return True if outcome.result is None else outcome.result

    def is_completed(self) -> bool:
        """True once the result is there, or the op has failed. Never blocks."""
        if not self._outcome.done():
            return False
        return self._outcome.exception() is not None or self._outcome.result().event.is_completed()

    def result(self) -> Any:
        """The result, as ``wait()`` returns it."""
        return self.wait()

    def __repr__(self) -> str:
        state = "completed" if self.is_completed() else "in progress"
        return f"<Work {self._op} on rank {self._place.rank}: {state}>"
