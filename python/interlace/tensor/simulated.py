"""Backward on simulated ranks, whose collectives wait for each other.

Ranks of "sim" are coroutines of one thread, and torch's autograd engine keeps one queue per thread: a rank
that gave way inside of it would find its own nodes run by another. So a rank's engine runs in a thread of
its own, and what has to communicate goes back to the coroutine::

    coroutine of the rank                    thread of its engine
    ---------------------                    --------------------
    loss.backward()  -- starts -->           nodes ...
    (waits)                                  a node of ours: on_rank(function)
    function(), gives way to other ranks     (waits)
    result           ------------->          nodes ...
    returns          <-------------          end

One of the two waits at any time, and the coroutine never lets another rank run while its engine does, so a
seed is a schedule as before. Ops of this package that a hook calls in backward go back too. Everywhere else
both functions do nothing but call.

What stays out of reach: torch's hooks on saved tensors, which activation checkpointing sets, are kept per
thread as well. A region that communicates can be checkpointed by ranks that are processes.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from interlace.runtime.communicator import Communicator
from interlace.runtime.errors import InterlaceError
from interlace.runtime.place_cuda_virtual import VirtualRankPlace

Result = TypeVar("Result")
Answer = tuple[bool, Any]  # whether it is a result, or what was raised

LOOK_UP = 1.0  # seconds after which a wait looks whether somebody has interrupted the thread

_relay: contextvars.ContextVar[_Relay | None] = contextvars.ContextVar("relay", default=None)
_simulated: contextvars.ContextVar[bool] = contextvars.ContextVar("simulated", default=False)


class _Relay:
    """Between the coroutine of a rank and the thread of its engine."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[Callable[[], Any] | Answer] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def ask(self, function: Callable[[], Any]) -> Any:
        """In the thread: what ``function`` returns, or raises, in the coroutine."""
        self.asked.put(function)
        return _opened(_next(self.answers))

    def serve(self) -> Any:
        """In the coroutine: do what the thread asks for, until it ends."""
        while True:
            asked = _next(self.asked)
            if isinstance(asked, tuple):
                return _opened(asked)
            self.answers.put(_answer(asked))


def _next(waiting: queue.SimpleQueue[Any]) -> Any:
    while True:
        try:
            return waiting.get(timeout=LOOK_UP)
        except queue.Empty:
            continue


def _answer(function: Callable[[], Any]) -> Answer:
    try:
        return True, function()
    except BaseException as error:  # GreenletExit too: the engine has to end then
        return False, error


def _opened(answer: Answer) -> Any:
    if answer[0]:
        return answer[1]
    raise answer[1]


def on_rank(function: Callable[[], Result]) -> Result:
    """``function()``, where the calling rank may communicate."""
    relay = _relay.get()
    return function() if relay is None else relay.ask(function)


def prepare(communicator: Communicator) -> None:
    """Before a node is recorded that communicates in backward.

    Raises InterlaceError on virtual ranks of a GPU: torch runs the nodes of all of them in one thread, the
    device's, where one that waits for another would wait for what is queued behind it.
    """
    place = communicator.place
    if communicator.world_size == 1:
        return
    if place.name == "sim":
        _install()
        _simulated.set(True)
    elif isinstance(place, VirtualRankPlace):
        raise InterlaceError(
            f"rank {communicator.rank}: gradients of interlace.tensor need ranks that are processes: "
            'interlace.run(..., place="cuda", processes=True); or call it under torch.no_grad()'
        )


def _install() -> None:
    module: Any = torch.autograd
    engine = module._engine_run_backward
    if getattr(engine, "on_simulated_ranks", False):
        return

    def run(*args: Any, **kwargs: Any) -> Any:
        if not _simulated.get() or _relay.get() is not None:
            return engine(*args, **kwargs)
        return _in_thread(lambda: engine(*args, **kwargs))

    run.on_simulated_ranks = True  # type: ignore[attr-defined]
    module._engine_run_backward = run


def _in_thread(function: Callable[[], Any]) -> Any:
    relay = _Relay()

    def relayed() -> Any:
        _relay.set(relay)
        return function()

    context = contextvars.copy_context()
    grad_enabled = torch.is_grad_enabled()

    def main() -> None:
        with torch.set_grad_enabled(grad_enabled):
            relay.asked.put(_answer(lambda: context.run(relayed)))

    thread = threading.Thread(target=main, name="backward of a simulated rank", daemon=True)
    thread.start()
    try:
        return relay.serve()
    finally:
        thread.join()
