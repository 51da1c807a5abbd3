"""Kernels that user code launches in a process of place ``shm``, ``kernel[grid](...)``.

Triton's stock interpreter runs the programs of a grid one after another and spins for ever in each
that waits. That will do until kernels wait for peers; so from the first memory that user code shares
with them, until the place is closed, launches go this way::

    drain      async ops of the worker come first, so ops and launches keep the order of the calls
    lock       one interpreter session at a time in a process: another thread's has to end
    run        all programs of the grid as coroutines, exact arithmetic, inline PTX
    idle       while all of them wait: politely, bounded by the group's timeout, looking out for
               peers that died and for aborts, in every group whose memory user code shares

The replacements stay in Triton's classes once they are there, because another thread may have a
session open when a place closes, and would put them back; without a place they do nothing.
"""

import os
import weakref
from collections.abc import Callable
from typing import Any

from interlace.runtime.compat.triton_interpreter import InterpretedFunction, KernelInterface
from interlace.runtime.core.errors import BlockedWait, InterlaceError
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.places.sim.choice import programs
from interlace.runtime.places.sim.interpreter import session
from interlace.runtime.places.sim.scheduler import trace
from interlace.runtime.places.sim.scheduler.scheduler import run_interpreted

_places: list[weakref.ref[Any]] = []  # of ShmPlace
_installed = False


def route(place: Any) -> None:
    """From now on kernels of user code may wait for the peers of ``place``. Idempotent."""
    _install()
    if place not in _open_places():
        _places.append(weakref.ref(place))


def unroute(place: Any) -> None:
    """Kernels do not wait for the peers of ``place`` any more. Idempotent."""
    _places[:] = [reference for reference in _places if reference() not in (None, place)]


def _open_places() -> list[Any]:
    return [place for reference in list(_places) if (place := reference()) is not None]


def _usable(places: list[Any]) -> list[Any]:
    """The places whose group has not failed. Raises what it has failed with if all have."""
    usable = []
    failure: InterlaceError | None = None
    for place in places:
        try:
            place.check()
            usable.append(place)
        except InterlaceError as error:
            failure = error
    if not usable:
        assert failure is not None
        raise failure
    return usable


class _Launches:
    """In place of a session's hooks, of which only the launch is called."""

    def launch(
        self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], options: dict[str, Any]
    ) -> None:
        places = _usable(_open_places())
        hooks = [place.group.idle_hook() for place in places]

        def idle(wait: BlockedWait) -> None:
            for hook in hooks:
                hook(wait)

        name, warps = kernel.__name__, options.get("num_warps", 4)
        launch = KernelLaunch(kernel, grid, arguments, name, num_warps=warps)
        how: dict[str, Any] = {"observer": trace.current(), "programs": programs(None)}
        run_interpreted(launch, places[0].rank, idle, **how)


def _install() -> None:
    """Replace how kernels are launched, once, when no session has replaced it for itself."""
    global _installed
    with session._session_lock:
        if _installed or session.is_open():
            return
        _installed = True
        stock_run, stock_getitem = InterpretedFunction.run, KernelInterface.__getitem__
        routed = session._launched(_Launches())  # type: ignore[arg-type]

        def run(kernel: Any, *args: Any, **named: Any) -> Any:
            return (routed if _open_places() else stock_run)(kernel, *args, **named)

        def getitem(kernel: Any, grid: Any) -> Callable[..., Any]:
            launch = stock_getitem(kernel, grid)

            def in_order(*args: Any, **named: Any) -> Any:
                # While a worker runs an op, its session answers for all launches of the process.
                for place in (places := _open_places()):
                    place.worker.drain()
                if not places:
                    return launch(*args, **named)
                with session._session_lock:
                    return launch(*args, **named)

            return in_order

        InterpretedFunction.run = run
        KernelInterface.__getitem__ = getitem


os.register_at_fork(after_in_child=_places.clear)
