"""Streams and events: the order in which a rank's kernels, copies and signals happen.

A stream runs its items one after another; items of different streams may overlap. This is CUDA's model,
and every place implements it.

An algorithm (an op's launch side) is a sequence of calls on two streams, written once for all places.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import SymmetricBuffer, Workspace

T = TypeVar("T")


class Settled(Future[T]):
    """A future that is done when it is made. Python's future costs the host ten times as much."""

    def __init__(self, value: T) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> T:
        return self._value

    def exception(self, timeout: float | None = None) -> None:
        return None

    def done(self) -> bool:
        return True

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        fn(self)


class Event(ABC):
    @abstractmethod
    def is_completed(self) -> bool:
        """True once everything enqueued before the point has finished. Never blocks."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until :meth:`is_completed`."""


@dataclass(slots=True)
class Outcome:
    """A launch side's result, ready at ``event`` (None: at once); ``source()``: the sender of a receive."""

    result: Any
    event: Event | None
    source: Callable[[], int] | None = None


NOTHING = Outcome(None, None)


class Continued(Future[Outcome]):
    """Done when ``first`` is done and ``change`` has changed its outcome; ``done()`` may move messages."""

    def __init__(self, first: Future[Outcome], change: Callable[[Outcome], Outcome]) -> None:
        super().__init__()
        self._first, self._change = first, change
        self.peers = getattr(first, "peers", ())
        first.add_done_callback(self._settle)

    def _settle(self, done: Future[Outcome]) -> None:
        try:
            self.set_result(self._change(done.result()))
        except BaseException as error:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Outcome:
        self._first.result(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._first.exception(timeout) or super().exception(timeout)

    def done(self) -> bool:
        return self._first.done() and super().done()


class Stream(ABC):
    """An ordered queue of work of one rank."""

    @abstractmethod
    def launch(self, launch: KernelLaunch) -> None:
        """Run a kernel over its grid."""

    @abstractmethod
    def copy(self, destination: torch.Tensor, source: torch.Tensor, label: str) -> None:
        """Copy between equal shapes; either side may be a peer's memory (the copy engine)."""

    @abstractmethod
    def call(self, function: Callable[[], object], label: str) -> None:
        """Run torch code whose kernels belong at this point of the stream."""

    @abstractmethod
    def publish(self, workspace: Workspace, peer: int, slot: int) -> None:
        """Release this stream's earlier writes to ``peer``: its ``slot`` gets the op's epoch."""

    @abstractmethod
    def wait(self, workspace: Workspace, source: int, slot: int) -> None:
        """Hold the stream until this rank's ``slot``, published by ``source``, has the op's epoch."""

    @abstractmethod
    def wait_credits(self, workspace: Workspace) -> None:
        """Hold the stream until every peer has finished the previous op on this channel."""

    @abstractmethod
    def finish(self, workspace: Workspace) -> None:
        """End the op on this rank: give every peer its credit, then advance the epoch."""

    def counted(self, buffer: SymmetricBuffer, programs: int) -> None:
        """End an op that has no workspace, whose ``programs`` count themselves in ``buffer``."""
        return

    @abstractmethod
    def record(self) -> Event:
        """Return a point after everything enqueued so far."""

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Hold the stream until ``event``, which may belong to another stream, has completed."""
