"""Work: the handle of an op that may still be running."""

import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

import torch

from interlace.runtime.compat.torch_groups import Work as TorchWork, is_synchronous
from interlace.runtime.core.call import MessageEnd
from interlace.runtime.core.errors import CollectiveTimeoutError
from interlace.runtime.core.place import Place, PlaceControl
from interlace.runtime.core.stream import Continued, Outcome

ZERO = timedelta(0)


class Work(TorchWork):
    """The handle that ``async_op=True`` returns: a complete ``torch.distributed.Work``.

    The inputs of the op must not change before it has completed. ``outputs`` are the tensors it fills, of
    any shape. Raises the op's error in :meth:`wait` and the other methods that wait, not before.

    >>> def on_rank():
    ...     tensor = torch.ones(2)
    ...     work = interlace.all_reduce(tensor, async_op=True)
    ...     work.wait(timeout=60)  # seconds
    ...     return work.is_completed(), work.exception(), work.result()[0] is tensor
    >>> interlace.run(on_rank, 2)
    [(True, None, True), (True, None, True)]
    """

    _future: torch.futures.Future[Any] | None = None
    kept = True
    """Whether its caller may wait again; nobody can wait again for a synchronous op."""

    def __init__(
        self,
        op: str,
        place: Place,
        outcome: Future[Outcome] | None,
        outputs: Sequence[torch.Tensor] = (),
    ) -> None:
        """``outcome`` is None for an op that has completed; ``outputs`` are the tensors it fills."""
        super().__init__()
        self._op = op
        self._place = place
        self._outcome = outcome
        self._outputs = list(outputs)
        self._number = 0 if outcome is None else place.calls
        self._succeeded = False  # the op was seen to have completed before the group failed

    def wait(self, timeout: timedelta | float | None = ZERO) -> Any:
        """Order the caller's later work after the op.

        On a GPU the current stream waits and the host goes on at once; on a CPU this blocks.
        Returns the op's result, or True for an op that works in place, as torch does.

        ``timeout``, in seconds or a timedelta, bounds the blocking of the host in ``shm``. The group's own
        timeout always bounds it, and in ``sim``, which has no clock, the timeout of the run. Raises the
        op's error, and raises it again on every later call.
        """
        if self._outcome is None:
            return True
        seconds = None
        if timeout is not ZERO:
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            if seconds is not None and seconds <= 0:
                seconds = None  # torch: zero means the group's timeout
        try:
            outcome = self._outcome.result(seconds)
        except (TimeoutError, FutureTimeoutError) as error:
            if self._outcome.done():
                raise
            late = tuple(self._place.late(getattr(self._outcome, "peers", ())))
            text = f"rank {self._place.rank}: {self._op} has not finished within {seconds} s"
            text += f"; it waits for ranks {list(late)}" if late else ""
            raise CollectiveTimeoutError(text, late) from error
        except BaseException as error:
            if not _is_settled(self._outcome):  # a signal handler raised it, and the op still runs
                self._given_up(
                    f"{self._op} was still running after {type(error).__name__} interrupted its wait"
                )
            raise
        if outcome.event is not None:
            self._place.hold_current(outcome.event, f"the end of {self._op}")
        self._place.check()
        return True if outcome.result is None else outcome.result

    def synchronize(self) -> None:
        """Order the caller's later work after the op, as ``wait()`` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make the current stream wait for the op; on a CPU the same as ``wait()``."""
        self.wait()

    def _given_up(self, text: str) -> None:
        """Abort the group, because a wait was interrupted, once no caller can wait again."""
        assert self._outcome is not None
        caller = sys._getframe(2)
        # by names, because reading a frame's variables keeps them alive
        while caller.f_globals["__name__"].startswith("interlace.runtime.core.") and caller.f_back:
            caller = caller.f_back
        if self.kept and not is_synchronous(caller):
            over = weakref.finalize(self, _abandon, self._outcome, self._place, text)
            over.atexit = False
        else:
            self._place.abort(text)

    def is_completed(self) -> bool:
        """True once the result is ready, or the op has failed. Never blocks."""
        if self._outcome is None:
            return True
        if not self._outcome.done():
            return False
        if self.exception() is not None:
            return True
        event = self._outcome.result().event
        if event is not None and not event.is_completed():
            return False
        self._succeeded = True
        return True

    def is_success(self) -> bool:
        """True once the op has completed without an error. Never blocks."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of the op; None while it runs or if it succeeded. Never blocks.

        On a GPU an op fails with its group, unless it was seen to have completed before. If the ranks'
        calls differ, the op fails as soon as that is known, whatever it has computed.
        """
        if self._outcome is None or not self._outcome.done():
            return None
        error = self._outcome.exception()
        if error is None and self._outcome.result().event is not None:
            return self._place.failure_of(self._number, completed=self._succeeded)
        return error

    def result(self) -> Any:
        """Wait, and return the op's result; of an op in place the list of tensors that it has filled."""
        value = self.wait()
        return self._outputs if value is True else value

    def source_rank(self) -> int:
        """Wait for the receive, and return the rank, within the group, that sent the message.

        Raises ValueError for an op that is not a receive.
        """
        self.wait()
        source = None if self._outcome is None else self._outcome.result().source
        if source is None:
            raise ValueError(f"{self._op} has no source rank: only receives have one")
        return source()

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of tensors that the op fills; for a functional op, of its result."""
        # Several threads that ask at once each make a future, and all get the first one.
        return self._future or vars(self).setdefault(
            "_future", self._ordered_future() or self._future_of_the_end()
        )

    def _future_of_the_end(self) -> torch.futures.Future[Any]:
        settled: torch.futures.Future[None] = torch.futures.Future()
        # set_exception() would set a value that only Python sees as an error. An exception of a callback
        # is an error for C++ as well.
        future = settled.then(lambda _: self._value())
        if self._outcome is None:
            settled.set_result(None)
        else:
            self._outcome.add_done_callback(lambda _: _settle(settled))
        return future

    def _ordered_future(self) -> torch.futures.Future[Any] | None:
        """Return a future that orders streams, if the op was enqueued on streams."""
        outcome = self._outcome
        if outcome is None or not outcome.done() or outcome.exception() is not None:
            return None
        event = outcome.result().event
        return None if event is None else self._place.future_of(event, self._value())

    def _value(self) -> Any:
        """Return the future's value, once the launch side has ended; raise the op's error."""
        result = None if self._outcome is None else self._outcome.result().result
        return self._outputs if result is None else result

    def __repr__(self) -> str:
        state = "completed" if self.is_completed() else "in progress"
        return f"<Work {self._op} on rank {self._place.rank}: {state}>"


def _is_settled(outcome: Future[Outcome]) -> bool:
    """Return whether the op has ended; moves no messages."""
    if isinstance(outcome, MessageEnd):
        return outcome.settled
    return Future.done(outcome) if isinstance(outcome, Continued) else outcome.done()


def _abandon(outcome: Future[Outcome], place: PlaceControl, text: str) -> None:
    """Abort the group if the op runs without a handle: no caller can know when its tensors are free."""
    if not _is_settled(outcome):
        place.abort(f"{text}, and its handle no longer exists")


def _settle(future: torch.futures.Future[None]) -> None:
    """Set the result. Callbacks raise nothing here, but a signal handler may, before it is done."""
    try:
        future.set_result(None)
    except BaseException:
        if not future.done():
            future.set_result(None)
        raise
