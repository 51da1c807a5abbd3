"""Backward on simulated ranks: each rank's autograd engine has its own thread, and one runs at a time.

torch's engine keeps its queue of nodes, and its depth, per thread. Ranks of ``sim`` share a thread. If one
rank waited for another within a node's backward, the other rank's engine would take over its nodes, and run
them or fail. So the engine of a rank gets a thread. It passes every Python backward to the rank, because
only the rank can wait in the simulation::

    rank (a coroutine of the simulation)      engine (a thread)
    loss.backward() ........................> runs nodes of C++
    runs _Row.backward, waits for others <... comes to a node of Python, sleeps
    gives its result ......................> goes on
    returns <............................... has finished

One of the two always sleeps, so the seed determines the order of all steps. The rank also calls hooks that
unpack saved tensors, and so recomputes for ``torch.utils.checkpoint``. If the rank has modes of torch's
dispatcher, the rank dispatches the engine's ops, so that the modes see them. Hooks of tensors run in the
engine's thread, and communicate only through :func:`in_rank`. Other places, and a single simulated rank,
use torch's engine unchanged.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from interlace.groups import groups
from interlace.runtime.compat.torch_modes import DispatchMode

Result = TypeVar("Result")
_Answer = Future[Any]


class _EngineRequests:
    """Requests of an engine's thread to its rank: calls, one at a time, and the end of the thread."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[Callable[[], Any] | _Answer] = SimpleQueue()
        self.answers: SimpleQueue[_Answer] = SimpleQueue()
        self.ended: BaseException | None = None  # the error that ended the rank from outside

    def end(self, error: BaseException) -> None:
        """End all requests of the engine, earlier and later ones, with ``error``."""
        self.ended = error
        answer: _Answer = Future()
        answer.set_exception(error)
        self.answers.put(answer)


_thread = threading.local()  # has a ``channel`` in the thread of an engine
_graph: contextvars.ContextVar[int] = contextvars.ContextVar("graph", default=-1)
_installing = threading.Lock()
_GRACE = 1.0  # seconds for an engine whose rank has been ended; it may be in a hook that never ends
_torch: Any = torch.autograd
_C: Any = torch._C
_hooks: Any = torch.autograd.graph.saved_tensors_hooks
_node: Any = torch.autograd.function.BackwardCFunction
_run_here: Any = _torch._engine_run_backward
_graph_here: Callable[[], int] = _C._current_graph_task_id
_METHODS = [each for each in ("apply", "apply_boxed") if hasattr(_node, each)]  # torch 2.13: both
_apply_here: dict[str, Any] = {name: getattr(_node, name) for name in _METHODS}


def in_rank(function: Callable[[], Result]) -> Result:
    """Call ``function`` where the calling rank may communicate, also from a hook in its backward."""
    channel = _channel()
    return function() if channel is None else _ask_rank(channel, function)


def install() -> None:
    """Let simulated ranks compute gradients that communicate; call it before hooks on saved tensors."""
    with _installing:
        _torch._engine_run_backward = _run
        for name in _METHODS:
            setattr(_node, name, _in_rank(name))
        _hooks.__enter__ = _enter_hooks
        _C._current_graph_task_id = _current_graph


class _InRank(DispatchMode):
    """A mode in an engine's thread: the rank dispatches the engine's ops, below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def call_op() -> Any:
            with _C._AutoDispatchBelowADInplaceOrView():
                return func(*args, **(kwargs or {}))

        return in_rank(call_op)


def _outcome(call: Callable[[], Any]) -> _Answer:
    outcome: _Answer = Future()
    try:
        outcome.set_result(call())
    except BaseException as error:  # also a coroutine's end: raise it in the thread of the call
        outcome.set_exception(error)
    return outcome


def _channel() -> _EngineRequests | None:
    return getattr(_thread, "channel", None)


def _run(*args: Any, **kwargs: Any) -> Any:
    """Replace torch's ``_engine_run_backward``."""
    rank = groups.joined_group()
    if rank is None or not rank.place.simulated or rank.world_size == 1 or _channel() is not None:
        return _run_here(*args, **kwargs)
    channel, recording = _EngineRequests(), torch.is_grad_enabled()
    modes: Any = _InRank if _get_current_dispatch_mode_stack() else contextlib.nullcontext

    def engine() -> None:
        _thread.channel = channel
        with torch.set_grad_enabled(recording), modes():
            outcome = _outcome(lambda: _run_here(*args, **kwargs))
        if outcome.exception() is not None:
            _empty_queue()
        channel.asked.put(outcome)

    # with the rank's context, so that hooks also know their rank
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(engine,), name="backward", daemon=True)
    try:
        thread.start()
        while not isinstance(asked := channel.asked.get(), Future):
            channel.answers.put(_outcome(asked))
        thread.join()
    except BaseException as error:
        # Ctrl-C or a time limit: otherwise the engine would wait for an answer forever
        channel.end(error)
        if thread.is_alive():
            thread.join(_GRACE)
        raise
    return asked.result()


def _empty_queue() -> None:
    """Run and drop the nodes that an error has left in the queue of this thread's engine.

    Otherwise they would be freed with the thread, maybe after Python has ended, which aborts the process.
    The first node of a new backward in this thread comes after all of them.
    """
    with torch.enable_grad():
        (torch.ones((), requires_grad=True) * 1).backward()  # type: ignore[no-untyped-call]


def _in_rank(name: str) -> Callable[..., Any]:
    """Replace a method of ``BackwardCFunction`` with which the engine calls a Function's backward."""
    here = _apply_here[name]

    def apply(self: Any, *grads: Any) -> Any:
        channel = _channel()
        if channel is None:
            return here(self, *grads)
        return _asked_alike(channel, lambda: here(self, *grads))

    return apply


def _enter_hooks(self: Any) -> None:
    unpack_here = self.unpack_hook

    def unpack(packed: Any) -> Any:
        channel = _channel()
        if channel is None:
            return unpack_here(packed)
        return _asked_alike(channel, lambda: unpack_here(packed))

    _C._autograd._push_saved_tensors_default_hooks(self.pack_hook, unpack)


def _current_graph() -> int:
    """Replace torch's ``_current_graph_task_id``, to work also for a rank that helps its engine."""
    graph = _graph_here()
    return _graph.get() if graph == -1 else graph


def _asked_alike(channel: _EngineRequests, call: Callable[[], Any]) -> Any:
    """Call :func:`_ask_rank` with the grad mode and the number of the engine's backward."""
    recording, graph = torch.is_grad_enabled(), _graph_here()

    def ask() -> Any:
        token = _graph.set(graph)
        try:
            with torch.set_grad_enabled(recording):
                return call()
        finally:
            _graph.reset(token)

    return _ask_rank(channel, ask)


def _ask_rank(channel: _EngineRequests, call: Callable[[], Any]) -> Any:
    if channel.ended is not None:
        raise channel.ended
    channel.asked.put(call)
    return channel.answers.get().result()
