"""``interlace.run`` runs a function on every rank, in one of the places."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar, get_args

from interlace import tracing
from interlace.arguments.words import RunPlace
from interlace.groups import groups
from interlace.ops.op import sim_backward
from interlace.runtime.core.context import CallContext, Overrides, current, set_context
from interlace.runtime.core.place import Place, positive_seconds
from interlace.runtime.places.gpu.driver import gpu_problem

T = TypeVar("T")
PLACES: tuple[RunPlace, ...] = get_args(RunPlace)
PTX_ARCH = 80
JOB_PLACES = ("hosts", "nvshmem")
MAX_WORLD_SIZE = 64
NOT_RUN_BY_A_CALL = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)


def run(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    place: RunPlace = "sim",
    seed: int = 0,
    timeout: float | timedelta = 300.0,
    processes: bool = False,
    arch: int | None = None,
    **kwargs: object,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on ``world_size`` ranks; return the results by rank.

    Inside ``fn``, :func:`interlace.get_rank`, :func:`interlace.get_world_size`,
    :func:`interlace.barrier` and every op refer to the rank that runs it. Type checkers accept keyword
    arguments of either ``fn`` or ``run``; to pass both, put those for ``fn`` in ``functools.partial``.

    Parameters
    ----------
    place : ``"sim"`` simulates ranks in this process in an order drawn from ``seed``. ``"shm"`` starts one
        process per rank on this host (``fn`` and its arguments must pickle). ``"cuda"`` has virtual ranks
        that share the current GPU, or with ``processes`` one process per rank, on the host's GPUs in turn.
        ``"ptx"`` is like ``"sim"``, but kernels are compiled for a GPU and their PTX is run on this CPU.
    processes : for ``"cuda"``. Ranks that share a GPU then take turns on it, which is slow.
    seed : the schedule of ``"sim"`` and ``"ptx"``; the same seed gives the same schedule.
    arch : for ``"ptx"``, the GPU that kernels are compiled for: 80, the default, is sm_80; or 90.
    timeout : seconds, or a timedelta, after which the run ends with a ``CollectiveTimeoutError``.

    Raises
    ------
    RankError : a rank raised an exception. It names the rank and is also an instance of the exception's
        class. The other ranks are ended.
    DeadlockError : ranks wait for each other (``"sim"``, ``"ptx"``).

    >>> interlace.run(lambda: interlace.get_rank() * 10, 3)
    [0, 10, 20]
    """
    if place in JOB_PLACES:
        raise ValueError(
            f'place "{place}" needs processes that run already, started by torchrun or joined by '
            f"torch.distributed.init_process_group; run() has {', '.join(PLACES)}"
        )
    if place not in PLACES:
        raise ValueError(f"place must be one of {', '.join(PLACES)}, got {place!r}")
    seconds = check_run(fn, world_size, timeout)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if not isinstance(processes, bool) or (processes and place != "cuda"):
        raise ValueError(f'processes must be a bool, and is for place="cuda", got {processes!r}')
    if arch is not None and place != "ptx":
        raise ValueError(f'arch is for place="ptx", got {arch!r} with place={place!r}')

    def start(fn: Callable[..., T]) -> list[T]:
        on_rank = rank_function(fn, args, kwargs)
        if place in ("sim", "ptx"):
            compiled_for = PTX_ARCH if arch is None and place == "ptx" else arch
            from interlace.runtime.places.sim.place import run_sim

            return run_sim(on_rank, world_size, seed=seed, timeout=seconds, arch=compiled_for)
        if place == "cuda" and not processes:
            from interlace.runtime.places.gpu.virtual_place import run_virtual_ranks

            return run_virtual_ranks(on_rank, world_size, timeout=seconds)
        from interlace.runtime.places.pool import default_pool

        install = _install_on_gpu if place == "cuda" else _install
        setup = functools.partial(install, current().overrides, seconds)
        try:
            return default_pool.run(
                fn, args, kwargs, world_size=world_size, timeout=seconds, setup=setup
            )
        except KeyboardInterrupt as stopped:  # the place where this process waited does not help
            raise stopped.with_traceback(None) from None

    return tracing.around(start, fn, place=place)


def check_run(
    fn: Callable[..., object],
    world_size: int,
    timeout: float | timedelta = 300.0,
    names: tuple[str, str] = ("fn", "world_size"),
    **flags: bool,
) -> float:
    """Return ``timeout`` in seconds. Raise TypeError or ValueError for a call that cannot run on ranks.

    ``names`` are the user's names of the first two arguments, and ``flags`` the bool arguments to check.
    """
    name, size = names
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"{size} must be an int, got {world_size!r}")
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"{size} must be within 1..{MAX_WORLD_SIZE}, got {world_size}")
    if not callable(fn):
        raise TypeError(f"{name} must be callable, got {type(fn).__name__}")
    plain = inspect.unwrap(fn)
    if any(kind(plain) for kind in NOT_RUN_BY_A_CALL):
        raise TypeError(f"{name} is async or a generator: a call would not run its body")
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{flag} must be a bool, got {value!r}")
    return positive_seconds("timeout", timeout)


def rank_function(
    fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Callable[[Place], object]:
    def on_rank(place: Place) -> object:
        if place.simulated and place.world_size > 1:
            sim_backward.install()
        groups.install(place)
        return _complete(fn(*args, **kwargs))

    return on_rank


def _complete(result: object) -> object:
    """Wait for ``result``: later no rank is there to wait. Between processes, sending it waits."""
    if "interlace.ops.op.async_tensor" not in sys.modules:
        return result  # no functional op has run
    from torch.utils._pytree import tree_leaves, tree_map_only

    from interlace.ops.op.async_tensor import AsyncTensor, wait

    if not any(isinstance(leaf, AsyncTensor) for leaf in tree_leaves(result)):
        return result
    return tree_map_only(AsyncTensor, wait, result)


def _install(overrides: Overrides, timeout: float, place: Place) -> Place:
    """Set up a new process like the caller's context."""
    set_context(CallContext(overrides=overrides))
    groups.install(place, all_threads=True)
    return place


def _install_on_gpu(overrides: Overrides, timeout: float, place: Place) -> Place:
    """Set up a process as :func:`_install` does, on one of the host's GPUs."""
    import torch

    from interlace.runtime.places import connect

    if not gpu_problem():
        torch.cuda.set_device(place.rank % torch.cuda.device_count())
    return _install(overrides, timeout, connect.on_gpu(place, timeout=timeout))
