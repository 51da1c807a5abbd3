"""Messages from rank to rank in ``sim``: one mailbox per group, matched in the order of the calls.

::

    send     copies the tensor, and is done
    recv     a future; a message that fits settles it, whoever of the two comes first
    matched  the receiver's mail stream copies the message into the tensor, after the receiver's work
             before the recv and the sender's before the send; the future has the end of that copy

A receive that nobody waits for and nothing arrives for stays open, as it would elsewhere.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from interlace.runtime.core.errors import BlockedWait
from interlace.runtime.core.memory import bytes_of
from interlace.runtime.core.stream import Event, Outcome, Stream
from interlace.runtime.scheduler.scheduler import Scheduler


@dataclass(frozen=True, eq=False)
class Message:
    """``data`` is a copy of what rank ``source`` had when it reached ``sent``, as bytes."""

    source: int
    destination: int
    tag: int
    dtype: torch.dtype
    data: torch.Tensor
    sent: Event


class Receive(Future[Outcome]):
    """A receive of ``rank``; ``source`` is None for any. Its copy runs on ``stream`` after ``posted``."""

    def __init__(
        self,
        rank: int,
        source: int | None,
        tag: int,
        tensor: torch.Tensor,
        *,
        stream: Stream,
        posted: Event,
        scheduler: Scheduler,
        waiting: Callable[[], BlockedWait],
    ) -> None:
        super().__init__()
        self._rank, self._source, self._tag, self._tensor = rank, source, tag, tensor
        self._stream, self._posted = stream, posted
        self._scheduler, self._waiting = scheduler, waiting
        self._context = contextvars.copy_context()  # callbacks are the receiver's, not the sender's

    def fits(self, message: Message) -> bool:
        """Whether ``message`` is for this receive, by its envelope."""
        to = (message.destination, message.tag) == (self._rank, self._tag)
        return to and self._source in (None, message.source)

    def settle(self, message: Message) -> None:
        """Take ``message``."""
        self._context.run(self._settle, message)

    def _settle(self, message: Message) -> None:
        problem = self._mismatch(message)
        if problem is not None:
            self.set_exception(problem)
            return
        self._stream.wait_event(self._posted)
        self._stream.wait_event(message.sent)
        self._stream.copy(bytes_of(self._tensor), message.data, f"from rank {message.source}")
        self.set_result(Outcome(None, self._stream.record(), lambda: message.source))

    def _mismatch(self, message: Message) -> Exception | None:
        about = f"from rank {message.source} to rank {self._rank} with tag {self._tag}"
        if message.dtype != self._tensor.dtype:
            return TypeError(
                f"recv: dtype of tensor is {self._tensor.dtype} on rank {self._rank}, but the message "
                f"{about} is of {message.dtype}"
            )
        expected, sent = (
            n // message.dtype.itemsize for n in (self._tensor.nbytes, message.data.nbytes)
        )
        if expected != sent:
            return ValueError(
                f"recv: tensor has {expected} elements on rank {self._rank}, but the message {about} "
                f"has {sent}"
            )
        return None

    def result(self, timeout: float | None = None) -> Outcome:
        """The outcome; blocks the host task. ``timeout`` is void: here is no clock but the run's."""
        if not self.done():
            self._scheduler.block(self.done, self._waiting)
        return super().result(0)


@dataclass
class Mailbox:
    """What was sent and not yet received, and what was asked for and not yet sent, in order."""

    messages: list[Message] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)

    def post(self, message: Message) -> None:
        """Give ``message`` to the first receive that it fits, now or later."""
        for receive in self.receives:
            if receive.fits(message):
                self.receives.remove(receive)
                receive.settle(message)
                return
        self.messages.append(message)

    def take(self, receive: Receive) -> None:
        """Give ``receive`` the first message that fits, now or later."""
        for message in self.messages:
            if receive.fits(message):
                self.messages.remove(message)
                receive.settle(message)
                return
        self.receives.append(receive)
