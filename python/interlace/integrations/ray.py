"""Actors of Ray as ranks: Ray chooses where they run, so torchrun is not needed.

:func:`run` makes the actors, lets them join a group, and calls a function on all of them. In your own
actors, :func:`meeting` and :func:`join` do the same.
"""

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from interlace.groups.groups import shutdown
from interlace.launcher import check_run
from interlace.runtime.compat import launchers
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.core.place import positive_seconds

T = TypeVar("T")

__all__ = ["join", "meeting", "run"]


def meeting() -> dict[str, str]:
    """Return the address, a free port and a new secret of the meeting; call it on the actor that is rank 0.

    The result is a dict of variables for :func:`join`. The port is free at the time of the call, so join
    soon.
    """
    from ray.util import get_node_ip_address

    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    return {
        "MASTER_ADDR": str(get_node_ip_address()),
        "MASTER_PORT": port,
        "INTERLACE_SECRET": secrets.token_hex(),
    }


def join(rank: int, world_size: int, meeting: Mapping[str, str]) -> None:
    """Make the calling actor's process ``rank`` of ``world_size``, as torchrun would.

    ``meeting``: the result of :func:`meeting` on rank 0. The first op, :func:`interlace.init` or torch's
    ``init_process_group("interlace")`` then makes the group, and raises its errors. An actor with a GPU
    sees only that GPU, so its number on the host is 0. Raises TypeError or ValueError naming the argument.
    """
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank must be at least 0 and less than world_size {world_size}, got {rank}"
        )
    if not isinstance(meeting, Mapping) or not all(isinstance(e, str) for e in meeting.values()):
        raise TypeError(f"meeting must be the result of meeting(), got {type(meeting).__name__}")
    if absent := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in meeting]:
        raise ValueError(
            f"meeting must be the result of meeting(), but has no {' and no '.join(absent)}"
        )
    identity = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    try:
        launchers.variables({**meeting, **identity})
    except ValueError as error:
        raise ValueError(f"meeting: {error}") from None
    os.environ.update(meeting, **identity)


class RayRank:
    """The class of an actor, which is one rank."""

    def meeting(self) -> dict[str, str]:
        return meeting()

    def run(
        self,
        rank: int,
        world_size: int,
        meeting: Mapping[str, str],
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        join(rank, world_size, meeting)
        try:
            return fn(*args, **kwargs)
        finally:
            shutdown()


def run(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    options: Mapping[str, object] | None = None,
    start_timeout: float | timedelta = 300.0,
    **kwargs: object,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on ``world_size`` actors of Ray, its ranks; return the results by rank.

    Parameters
    ----------
    options : the actors' options, as in ``Actor.options``: ``{"num_gpus": 1}``, a placement group.
    start_timeout : seconds, or a timedelta, in which Ray must start all actors. ``fn`` may take longer;
        its ops have the timeout of their group.

    Raises
    ------
    PlaceUnavailableError : the cluster had no room for all actors in that time.
    Exception : the first exception of ``fn`` or of joining on a rank, as Ray passes it on; the actors end.
    """
    check_run(fn, world_size)
    seconds = positive_seconds("start_timeout", start_timeout)
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a mapping or None, got {type(options).__name__}")
    try:
        import ray
    except ImportError as error:
        raise ImportError("actors as ranks need Ray: pip install ray") from error
    actors = [ray.remote(RayRank).options(**(options or {})).remote() for _ in range(world_size)]
    try:
        meetings = [actor.meeting.remote() for actor in actors]
        started, absent = ray.wait(meetings, num_returns=world_size, timeout=seconds)
        if absent:
            raise PlaceUnavailableError(
                f"Ray has started {len(started)} of {world_size} actors in {seconds:g} s; with options "
                f"{dict(options or {})} there is no room for the others: the cluster has "
                f"{ray.cluster_resources()}, of which {ray.available_resources()} are free"
            )
        where = ray.get(meetings[0])
        call = world_size, where, fn, args, kwargs
        waiting = [actor.run.remote(rank, *call) for rank, actor in enumerate(actors)]
        order = {each: rank for rank, each in enumerate(waiting)}
        results: list[Any] = [None] * world_size
        while waiting:
            # the first rank that fails, not the lowest one
            (ended,), waiting = ray.wait(waiting)
            results[order[ended]] = ray.get(ended)
        return results
    finally:
        for actor in actors:
            ray.kill(actor)
