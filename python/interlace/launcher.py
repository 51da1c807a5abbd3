"""``interlace.run``: a function on every rank, in one of the places, from one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from interlace import groups
from interlace.runtime import configuration
from interlace.runtime.place import Place

PLACES = ("sim", "shm", "cuda")
MAX_WORLD_SIZE = 64


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    place: str = "sim",
    seed: int = 0,
    timeout: float = 300.0,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ``world_size`` ranks; what it returned, by rank.

    Inside ``fn``, :func:`interlace.get_rank`, :func:`interlace.get_world_size`,
    :func:`interlace.barrier` and every op refer to the rank that runs it.

    Parameters
    ----------
    place : ``"sim"``, ranks simulated in this process in an order drawn from ``seed``; ``"shm"``, one
        process per rank on this host (``fn`` and its arguments must pickle); ``"cuda"``, virtual ranks
        that share the current GPU.
    seed : the schedule of ``"sim"``; the same seed is the same schedule.
    timeout : seconds after which the run is given up with a ``CollectiveTimeoutError``.

    Raises
    ------
    RankError : an exception on a rank, naming the rank; it is an instance of the exception's own class
        too, and ends the other ranks. DeadlockError : ranks wait for each other (``"sim"``).

    >>> import interlace
    >>> interlace.run(lambda: interlace.get_rank() * 10, 3)
    [0, 10, 20]
    """
    if place not in PLACES:
        raise ValueError(f"place must be one of {', '.join(PLACES)}, got {place!r}")
    check_run(fn, world_size, timeout)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r}")
    host = host_function(fn, args, kwargs)
    if place == "sim":
        from interlace.runtime.place_sim import run_sim

        return run_sim(host, world_size, seed=seed, timeout=timeout)
    if place == "cuda":
        from interlace.runtime.place_cuda import run_virtual_ranks

        return run_virtual_ranks(host, world_size, timeout=timeout)
    from interlace.runtime.processes import run_processes

    setup = functools.partial(_install, configuration.current_override())
    return run_processes(fn, args, kwargs, world_size, timeout=timeout, setup=setup)


def check_run(fn: Callable[..., Any], world_size: int, timeout: float) -> None:
    """Raise TypeError or ValueError for what cannot be run on ranks."""
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size must be an int, got {world_size!r}")
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size must be within 1..{MAX_WORLD_SIZE}, got {world_size}")
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be positive, got {timeout}")


def host_function(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Place], Any]:
    """What a rank of ``fn(*args, **kwargs)`` does with its place."""

    def host(place: Place) -> Any:
        groups.install(place)
        return fn(*args, **kwargs)

    return host


def _install(overrides: dict[str, int | bool], place: Place) -> None:
    """Set a new process up for a run as the caller's context is."""
    configuration.set_override(overrides)
    groups.install(place, all_threads=True)
