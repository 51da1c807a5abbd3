"""Threads of interlace's own; one runs functions in the order of submission: async ops of a CPU place."""

import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from interlace.runtime.core.errors import AbortedError

T = TypeVar("T")

_Item = tuple["Future[Any]", Callable[[], Any], contextvars.Context]


class Helper(threading.Thread):
    """A thread that calls no op of its own accord, nor what may call one while ``at_work`` is false."""

    def __init__(
        self,
        name: str,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        at_work: Callable[[], object] = lambda: False,
    ) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self.at_work = at_work


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
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Condition()
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.unfinished = 0
        self._closed = False

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
            self.unfinished += 1
            self._items.put((future, function, context))
            if self._thread is None:
                self._thread = Helper(self._name, self._run, at_work=lambda: self.unfinished)
                self._thread.start()
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

    def _run(self) -> None:
        # A tensor may come to require grad while its op is queued: the result of a functional op does.
        torch.set_grad_enabled(False)
        while (item := self._items.get()) is not None:
            future, function, context = item
            del item
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
            # A waiting worker must not keep the last op's tensors alive.
            result = None
            del future, function, context

    def _one_finished(self) -> None:
        """Before the future is set: who has waited for the future finds the worker idle."""
        with self._lock:
            self.unfinished -= 1
            self._lock.notify_all()
