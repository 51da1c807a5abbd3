"""Ranks that end on the way to a group of several hosts, at every step of it, are named by all others."""

import os
import re
from typing import Any

import pytest
from torch.distributed import TCPStore

from faults.crew import crew, joined, tried
from guard import MOST
from interlace.runtime.places.hosts.links import HostLinks
from interlace.runtime.places.hosts.wires import Wires
from interlace.runtime.processes import rendezvous
from interlace.runtime.processes.rendezvous import StoreMeeting
from interlace.runtime.processes.signed_store import PolledStore
from tiers import few, thorough

STEPS = {
    "meets its host": (StoreMeeting, "cards", 1),
    "has met its host": (StoreMeeting, "forget", 1),
    "publishes its address": (PolledStore, "set", 1),
    "reads addresses": (PolledStore, "get", 1),
    "connects with the first": (PolledStore, "get", 3),
    "has connected once": (PolledStore, "set", 2),
    "says the secret": (HostLinks, "_authenticate", 1),
    "connects for bytes": (Wires, "connect", 1),
    "has connected with those before it": (Wires, "_accept", 1),
}
"""By name, the function that a rank does not survive, and at which of its calls."""


def ends_at(step: str) -> None:
    owner, name, number = STEPS[step]
    known, calls = getattr(owner, name), 0

    def called(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os._exit(1)
        return known(*arguments)

    setattr(owner, name, called)


def ends(join: Any, end: Any, victim: int, step: str) -> None:
    """Rank ``victim`` ends at this step; the others report their errors."""
    meet = rendezvous.meet

    def met(store: Any, rank: int, *rest: Any) -> Any:
        rendezvous.meet = meet
        found = meet(store, rank, *rest)
        if rank == victim:
            ends_at(step)
        return found

    rendezvous.meet = met

    def work() -> None:
        api = join()
        while True:
            api.barrier()

    end.send(tried(work))


LONG = 2 * MOST
"""A timeout that no test reaches."""


def all_name(victim: int, place: str, size: int, step: str, timeout: float) -> None:
    with crew(place, size, ends, victim, step, timeout=timeout) as team:
        said = team.all_said([rank for rank in team.ranks if rank != victim], MOST)
    for each in said:
        found = rf"rank {victim} \(pid \d+\) died|ranks \[{victim}\] have not joined"
        assert re.search(found, each.text), said


@pytest.mark.parametrize(
    ("step", "victim"),
    few([(step, rank) for step in STEPS for rank in (0, 3)], ("connects with the first", 3)),
)
def test_who_ends_is_named_on_all_hosts_long_before_the_timeout(step: str, victim: int) -> None:
    all_name(victim, "hosts", 4, step, LONG)


@thorough
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("step", list(STEPS)[2:])
def test_who_ends_alone_on_its_host_is_named_at_the_timeout(step: str, size: int) -> None:
    """No process of the same host sees the end: the rank only stops to answer."""
    all_name(size - 1, "one each", size, step, 5.0)


def serves(join: Any, end: Any, port: int) -> None:
    """Ranks join by a store that rank 0 serves, which ends when all have a card."""
    about = TCPStore("127.0.0.1", port, is_master=False)
    rank = about.add("ranks", 1) - 1
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        about.set("port", str(store.port))
        ends_at("meets its host")
    else:
        store = TCPStore("127.0.0.1", int(about.get("port")), is_master=False)
    end.send(rank)
    end.send(tried(lambda: joined("hosts", store, rank, 4, LONG)))


@thorough
def test_the_end_of_the_rank_that_serves_the_store_is_named() -> None:
    """Without the store no rank can tell the others."""
    about = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with crew("hosts", 4, serves, about.port) as team:
        ranks = team.all_said(seconds=MOST)
        said = {rank: team.said(n, MOST) for n, rank in enumerate(ranks) if rank}
    for each in said.values():
        assert re.search(r"rank 0 \(pid \d+\) died|which is that of rank 0 unless", each.text), said
