"""Interlace's own threads. One kind runs functions in the order of submission: async ops of a CPU place.

They must end before Python does. A thread that returned from torch into a finalized interpreter would abort
the process: Python before 3.14 ends such a thread by unwinding it, and torch's functions do not let an
exception through. Therefore a process first leaves all groups, which ends the waits in threads, and then
joins the threads.
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

END_SECONDS = 3.0  # for members to leave and functions to end when the process ends
JOIN_SECONDS = 2.0  # for the threads to end afterwards

T = TypeVar("T")


class Helper(threading.Thread):
    """A thread that calls no op by itself, and no code that may call one while ``at_work`` is false.

    An ``endless`` one only waits, and is not joined.
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
    """Run ``function`` in a thread and return its result. Call ``step`` meanwhile; if ``step`` raises,
    raise the same error and leave the thread alone."""
    worker = OrderedWorker(name)
    try:
        future = worker.submit(function)
        while not future.done():
            step()
        return future.result()
    finally:
        worker.close(0.0)


class OrderedWorker:
    """Runs functions one after another in a daemon thread, which starts with the first function.

    A function has the context variables and the inference mode of the thread that submitted it.
    ``unfinished`` counts the submitted functions that have not finished; when it is 0, their writes are
    visible. The thread also ends when no reference to the worker is left and all functions have finished.
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
        """Queue ``function``. The future receives its result or exception."""
        future: Future[T] = Future()
        context = contextvars.copy_context()
        if torch.is_inference_mode_enabled():  # others must not write tensors of this mode
            function = torch.inference_mode()(function)
        with self._lock:
            if self._closed:
                raise AbortedError(f"{self._name} is closed")
            if self._thread is None:  # start it first: without a thread nothing is queued
                worker_of = weakref.ref(self)
                at_work = lambda: (worker := worker_of()) is not None and worker.unfinished  # noqa: E731
                thread = Helper(self._name, _run, (self._items,), at_work)
                thread.start()
                self._thread = thread
            self.unfinished += 1
            self._items.put(functools.partial(self._perform, future, function, context))
        return future

    def drain(self) -> None:
        """Block until all submitted functions have finished. Return at once in the worker's own thread."""
        if self._thread is not None and not self.inside:
            with self._lock:
                self._lock.wait_for(lambda: self.unfinished == 0)

    def close(self, timeout: float = 5.0) -> bool:
        """End the thread and return whether it has ended. Functions that have not started fail; a running
        one has ``timeout`` seconds."""
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
        """Count down before the future is set: a caller that waits for the future finds the worker idle."""
        with self._lock:
            self.unfinished -= 1
            self._lock.notify_all()


def _run(items: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Run the thread of a worker. While it waits, it keeps neither the worker nor an op's tensors alive."""
    # A tensor may begin to require grad while its op is queued, as the result of a functional op does.
    torch.set_grad_enabled(False)
    while (item := items.get()) is not None:
        item()
        del item


class Member(Protocol):
    """An object that takes part in a group until it is closed."""

    def abort(self, reason: str) -> None:
        """Tell the other ranks why this rank ends."""

    def close(self) -> None:
        """Leave the group in good order. Idempotent."""


_members: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
_numbers = itertools.count()


_ends = 0.0


def ends() -> float:
    """Return when threads must have ended, by the monotonic clock; 0 unless the process is ending."""
    return _ends


def close_at_exit(member: Member, instead_of: Member | None = None) -> None:
    """Close ``member`` at the process's end, before earlier members; it closes ``instead_of`` itself."""
    for number, other in list(_members.items()):
        if other is instead_of:
            del _members[number]
    _members[next(_numbers)] = member


def _at_exit() -> None:
    """Leave all groups in good order, so that working peers do not report this process as dead."""
    global _ends
    _ends = time.monotonic() + END_SECONDS
    uncaught = getattr(sys, "last_value", None)
    members = [member for _, member in sorted(_members.items())]
    if uncaught is not None:
        why = f"its process ended with {type(uncaught).__name__}: {uncaught}"
        record.dump_last(why)
        for member in members:
            member.abort(why)
    with contextlib.ExitStack() as stack:  # if closing one raises, the others are closed as well
        for member in members:
            stack.callback(member.close)
    for thread in threading.enumerate():
        if isinstance(thread, Helper) and not thread.endless:
            thread.join(max(0.0, _ends + JOIN_SECONDS - time.monotonic()))


os.register_at_fork(after_in_child=_members.clear)  # they belong to the parent
atexit.register(_at_exit)
