"""Ranks of tests that are threads of one process, or processes, on one host or on several."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed import FileStore, HashStore

from guard import MOST
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.places.connect import connect_place
from interlace.runtime.processes import control

SECRET = {"INTERLACE_SECRET": "of this test"}  # of the environment
LONG = 2 * MOST  # no test lasts so long: a wait that has ended in one has not ended by this


def run(ranks: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    """What ``function(rank)`` returns or raises, by rank; ranks are threads."""

    def caught(rank: Any) -> Any:
        try:
            return function(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(caught, ranks))


def members(
    name: str, count: int, timeout: float = LONG, host: Callable[[int], str] | None = None
) -> list[Communicator]:
    """A group of threads, by rank."""
    store = HashStore()

    def join(rank: int) -> Communicator:
        own = None if host is None else host(rank)
        place = connect_place(store, rank, count, timeout=timeout, name=name, host=own)
        return Communicator(place, range(count))

    with mock.patch.dict(os.environ, SECRET):
        groups = run(range(count), join)
    for group in groups:
        assert isinstance(group, Communicator), groups
        # what it has said while joining would count as long as anything said later
        group.place.group.control.own_view[control._WAITS // 8] = 0
    return groups


def close(groups: Sequence[Communicator]) -> None:
    run(groups, Communicator.close)


def on_hosts(rank: int) -> str:
    """Each rank is on a host of its own."""
    return f"host {rank}"


def joined(rank: int, folder: str | Path, timeout: float = LONG, hosts: int = 2) -> Communicator:
    """A process's group of two ranks, on hosts of their own or on one."""
    store = FileStore(f"{folder}/store", 2)
    with mock.patch.dict(os.environ, SECRET):
        host = on_hosts(rank % hosts)
        place = connect_place(store, rank, 2, timeout=LONG, name="two", host=host)
    place.set_timeout(timeout)
    return Communicator(place, range(2))
