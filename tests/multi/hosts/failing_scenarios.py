"""Scenarios of hosts_ranks.py in which a group fails, and what every rank is told of it then."""

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import InterlaceError
from multi.hosts.hosts_scenarios import run

KILLED = (4, 3)


class Failing:
    """A scenario in a group of its own, in which something goes wrong."""

    def __init__(
        self, function: Callable[[Communicator], Any], ranks: Sequence[int], timeout: float
    ) -> None:
        self.function, self.ranks, self.timeout = function, list(ranks), timeout
        self.__name__ = function.__name__

    def __call__(self, group: Communicator) -> Any:
        return self.function(group)


def failure(group: Communicator) -> list[str]:
    """What this rank's barriers end with: the first that fails, and the next."""
    texts = []
    while len(texts) < 2:
        try:
            run(group, "barrier")
        except InterlaceError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def timing_out(group: Communicator) -> list[str]:
    """Rank 1 does not come to the barrier, and does not leave before the others have given up."""
    if group.rank != 1:
        return failure(group)
    texts: list[str] = []
    for _ in range(10):
        try:
            group.engine.recv(Call("recv"), torch.zeros(1), 0, 0).result(300)
        except InterlaceError as error:
            texts.append(f"{type(error).__name__}: {error}")
        try:
            group.place.check()
        except InterlaceError:
            break
    return texts[:1]


def timing_out_between_hosts(group: Communicator) -> list[str]:
    """As above; nobody waits within a host."""
    return timing_out(group)


def aborting(group: Communicator) -> list[str]:
    if group.rank == 0:
        run(group, "barrier")
        group.place.abort("enough")
    return failure(group)


def leaving(group: Communicator) -> list[str]:
    """Rank 0 closes its group in good order; the others still want something of it."""
    run(group, "barrier")
    if group.rank == 0:
        group.close()
        return []
    return failure(group)


def dying(group: Communicator) -> list[str]:
    """The last rank is killed while the others are in an op, or between two."""
    run(group, "barrier")
    if group.rank == group.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return failure(group)


def dying_while_others_receive(group: Communicator) -> list[str]:
    """As above, and the others wait for messages: the last rank of the other host is its only one."""
    run(group, "barrier")
    if group.rank == group.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    engine, call = group.engine, Call("recv")
    texts = []
    for peer in (group.world_size - 1, None):
        try:
            engine.recv(call, torch.zeros(1), peer, 0).result(300)
        except InterlaceError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


FAILING = (
    Failing(timing_out, range(5), 1.0),
    Failing(timing_out_between_hosts, (0, 3), 1.0),
    Failing(aborting, range(5), 300.0),
    Failing(leaving, range(5), 300.0),
    Failing(dying, range(5), 300.0),
    Failing(dying_while_others_receive, range(4), 300.0),
)
