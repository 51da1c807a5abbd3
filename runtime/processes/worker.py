"""Threads of interlace's own; one runs functions in the order of submission: async ops of a CPU place.

They end before Python does. One that came back from torch into an interpreter that is gone would abort the
process: Python before 3.14 ends such a thread by unwinding it, and torch's functions let nothing through.
So a process begins its end by leaving all groups, which ends what waits in threads; then they are joined.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import itertools
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

from interlace.runtime.core.errors import AbortedError
from interlace.runtime.processes import dump as record

END_SECONDS = 3.0  # for what leaves, and for functions in threads, when the process ends
JOIN_SECONDS = 2.0  # for the threads then

T = TypeVar("T")


class Helper(threading.Thread):
    """A thread that calls no op of its own accord, nor what may call one while ``at_work`` is false.

    One that is ``endless`` does nothing but wait, and is not joined.
    """

    def __init__(
        self,
        name: str,
        target: Callable[..., object],
        args: tuple[object, ...] = (),
        at_work: Callable[[], object] = lambda: False,
        *,
        endless: bool = False,
    ) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self.at_work, self.endless = at_work, endless


def apart(name: str, function: Callable[[], T], step: Callable[[], None]) -> T:
    """What ``function`` returns, which a thread runs. ``step`` is called meanwhile; if it raises, so does
    this, and the thread is left to itself."""
    worker = OrderedWorker(name)
    try:
        future = worker.submit(function)
        while not future.done():
            step()
        return future.result()
    finally:
        worker.close(0.0)


class OrderedWorker:
    """Runs functions one after another in a daemon thread, which starts with the first of them.

    A function sees the context variables and the inference mode of the thread that submitted it.
    ``unfinished`` counts what was submitted and has not finished; once it is 0, what that wrote is visible.
    The thread ends, too, when nobody has the worker any more and what was submitted has finished.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Condition()
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.unfinished = 0
        self._closed = False
        weakref.finalize(self, self._items.put, None).atexit = False

    @property
    def inside(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue ``function``; the future has its result or exception."""
        future: Future[T] = Future()
        context = contextvars.copy_context()
        if torch.is_inference_mode_enabled():  # whose tensors nobody outside may write
            function = torch.inference_mode()(function)
        with self._lock:
            if self._closed:
                raise AbortedError(f"{self._name} is closed")
            if self._thread is None:  # started first: without it nothing is queued
                own = weakref.ref(self)
                at_work = lambda: (worker := own()) is not None and worker.unfinished  # noqa: E731
                self._thread = Helper(self._name, _run, (self._items,), at_work)
                try:
                    self._thread.start()
                except RuntimeError:  # there can be no more threads
                    self._thread = None
                    raise
            self.unfinished += 1
            self._items.put(functools.partial(self._perform, future, function, context))
        return future

    def drain(self) -> None:
        """Block until everything submitted has finished; at once in the worker itself."""
        if self._thread is not None and not self.inside:
            with self._lock:
                self._lock.wait_for(lambda: self.unfinished == 0)

    def close(self, timeout: float = 5.0) -> bool:
        """End the thread, whether it has. What has not started fails; what runs has ``timeout`` seconds."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._items.put(None)
        if thread is not None and not self.inside:
            thread.join(timeout)
            return not thread.is_alive()
        return True

    def _perform(
        self, future: Future[T], function: Callable[[], T], context: contextvars.Context
    ) -> None:
        """Run what was submitted, in the thread."""
        try:
            if self._closed:
                raise AbortedError(f"{self._name} was closed before this op started")
            result = context.run(function)
        except BaseException as error:
            self._one_finished()
            future.set_exception(error)
        else:
            self._one_finished()
            future.set_result(result)

    def _one_finished(self) -> None:
        """Before the future is set: who has waited for the future finds the worker idle."""
        with self._lock:
            self.unfinished -= 1
            self._lock.notify_all()


def _run(items: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """The thread of a worker. While it waits, it keeps neither the worker nor an op's tensors alive."""
    # A tensor may come to require grad while its op is queued: the result of a functional op does.
    torch.set_grad_enabled(False)
    while (item := items.get()) is not None:
        item()
        del item


class Member(Protocol):
    """What takes part in a group until it is closed."""

    def abort(self, reason: str) -> None:
        """Tell the others why this rank ends."""

    def close(self) -> None:
        """Leave the group in good order. Idempotent."""


_members: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
_numbers = itertools.count()


_ends = 0.0


def ends() -> float:
    """When threads must have ended, by the monotonic clock; 0 while the process does not end."""
    return _ends


def close_at_exit(member: Member, instead_of: Member | None = None) -> None:
    """Have ``member`` closed when the process ends, before those that were named earlier.

    It closes what it is there ``instead_of``, if anything.
    """
    for number, other in list(_members.items()):
        if other is instead_of:
            del _members[number]
    _members[next(_numbers)] = member


def _at_exit() -> None:
    """Leave in good order, so that peers still at work do not take this process for a dead one."""
    global _ends
    _ends = time.monotonic() + END_SECONDS
    uncaught = getattr(sys, "last_value", None)
    members = [member for _, member in sorted(_members.items())]
    if uncaught is not None:
        why = f"its process ended with {type(uncaught).__name__}: {uncaught}"
        record.dump_last(why)
        for member in members:
            member.abort(why)
    with contextlib.ExitStack() as stack:  # whatever one of them raises, the others are closed
        for member in members:
            stack.callback(member.close)
    for thread in threading.enumerate():
        if isinstance(thread, Helper) and not thread.endless:
            thread.join(max(0.0, _ends + JOIN_SECONDS - time.monotonic()))


os.register_at_fork(after_in_child=_members.clear)  # they are the parent's
atexit.register(_at_exit)
