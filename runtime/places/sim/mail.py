"""Messages from rank to rank in ``sim``: one mailbox per group, matched in the order of the calls.

::

    send     copies the tensor, and is done; a later end tells what is refused, see ``MessageEnd``
    recv     a future; a message that fits settles it, whoever of the two comes first
    matched  the receiver's mail stream copies the message into the tensor, after the receiver's work
             before the recv and the sender's before the send; the future has the end of that copy

A receive that nobody waits for and nothing arrives for stays open, as it would elsewhere.
"""

import contextvars
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from interlace.runtime.core.call import MessageEnd, mismatch, take_first
from interlace.runtime.core.errors import BlockedWait
from interlace.runtime.core.memory import bytes_of
from interlace.runtime.core.stream import Event, Outcome, Stream
from interlace.runtime.places.sim.scheduler.scheduler import Scheduler


@dataclass(frozen=True, eq=False)
class Message:
    """``data``: a copy of what rank ``source`` had when it reached ``sent``, as bytes; ``refused``: its."""

    source: int
    destination: int
    tag: int
    dtype: torch.dtype
    data: torch.Tensor
    sent: Event
    refused: deque[Exception]


@dataclass(eq=False)
class Receive(MessageEnd):
    """A receive of ``rank``; ``source`` is None for any. Its copy runs on ``stream`` after ``posted``."""

    rank: int
    source: int | None
    tag: int
    tensor: torch.Tensor
    stream: Stream
    posted: Event
    scheduler: Scheduler
    waiting: Callable[[], BlockedWait]
    refused: deque[Exception]

    def __post_init__(self) -> None:
        super().__init__()
        self._context = contextvars.copy_context()  # callbacks are the receiver's, not the sender's

    def fits(self, message: Message) -> bool:
        to = (message.destination, message.tag) == (self.rank, self.tag)
        return to and self.source in (None, message.source)

    def settle(self, message: Message) -> None:
        self._context.run(self._settle, message)

    def _settle(self, message: Message) -> None:
        numel = message.data.nbytes // message.dtype.itemsize
        about = self.tag, message.source, message.dtype, numel
        problem = mismatch(self.tensor, self.rank, *about)
        if problem is not None:
            self.set_exception(problem)
            if message.source != self.rank:
                message.refused.append(type(problem)(*problem.args))
            return
        self.stream.wait_event(self.posted)
        self.stream.wait_event(message.sent)
        self.stream.copy(bytes_of(self.tensor), message.data, f"from rank {message.source}")
        self.set_result(Outcome(None, self.stream.record(), lambda: message.source))

    def result(self, timeout: float | None = None) -> Outcome:
        """The outcome; blocks the user task. ``timeout`` is void: here is no clock but the run's."""
        if not self.done():
            self.scheduler.block(self.done, self.waiting)
        return super().result(0)


@dataclass
class Mailbox:
    """Messages sent and not yet received, receives asked for and not yet met; refusals, by sender."""

    messages: list[Message] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    refused: defaultdict[int, deque[Exception]] = field(default_factory=lambda: defaultdict(deque))

    def post(self, message: Message) -> None:
        """Give ``message`` to the first receive that it fits, now or later."""
        receive = take_first(self.receives, lambda each: each.fits(message))
        if receive is None:
            self.messages.append(message)
        else:
            receive.settle(message)

    def take(self, receive: Receive) -> None:
        """Give ``receive`` the first message that fits, now or later."""
        message = take_first(self.messages, receive.fits)
        if message is None:
            self.receives.append(receive)
        else:
            receive.settle(message)
