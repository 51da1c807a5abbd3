"""Groups that span hosts: the ranks of each host, every op between hosts, and failures."""

import itertools
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

import interlace
from cases import support_table
from cases.api_cases import numbers
from interlace.runtime.core import plain
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.numerics import reductions
from interlace.runtime.places.connect import connect_place
from interlace.runtime.places.hosts import host_map
from interlace.runtime.places.hosts.engine import Partial
from interlace.runtime.places.hosts.host_map import Card, HostMap
from interlace.runtime.places.shm.place import ShmPlace
from interlace.runtime.processes import rendezvous
from multi.hosts import hosts_scenarios as scenarios
from multi.hosts.hosts_scenarios import DIES, RANKS, main
from processes import heard, started
from ranks import members, run
from tiers import thorough


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the output of hosts_scenarios.py. Its ranks and namespaces end with their processes."""
    with started(main, 1, tmp_path_factory.mktemp("hosts")) as (_, (end,)):
        return heard(end)


@thorough
def test_two_network_namespaces_are_two_hosts(outcome: Any) -> None:
    problem, hosts, *_ = outcome
    if problem:
        pytest.skip(f"no network namespaces on this machine: {problem}")
    assert HostMap.of(hosts).hosts == ((0, 1, 2), (3, 4))


def test_every_scenario_on_every_rank(outcome: Any) -> None:
    *_, codes, failed = outcome
    assert not failed, "\n".join(failed)
    assert codes == [-signal.SIGKILL if rank == DIES else 0 for rank in RANKS]


# -- ranks of one host -----------------------------------------------------------------------------


def test_host_map() -> None:
    found = HostMap.of(["b", "a", "b", "c", "a"])
    assert found.hosts == ((0, 2), (1, 4), (3,))
    assert [found.index(rank) for rank in range(5)] == [0, 1, 0, 2, 1]
    assert str(found) == "host 0: ranks [0, 2]; host 1: ranks [1, 4]; host 2: ranks [3]"


def test_processes_of_one_host_know_it() -> None:
    assert interlace.run(host_map.this_host, 2, place="shm") == [host_map.this_host()] * 2


def test_address_towards_the_store() -> None:
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    assert host_map.store_address(PrefixStore("a", PrefixStore("b", store))) == "127.0.0.1"


def test_the_host_of_the_store_finds_its_address_on_the_way_to_another() -> None:
    """Rank 0 knows only "localhost" as its address; the route to rank 1 gives the real one."""
    cards = [Card("a", 1, "127.0.0.1"), Card("b", 2, "127.0.0.1"), Card("b", 3, "::1")]
    assert host_map.own_address(cards, 0) == "127.0.0.1"
    cards[1] = Card("b", 2, "192.0.2.7")
    assert host_map.own_address(cards, 1) == "192.0.2.7"
    assert host_map.own_address(cards, 0) == host_map.address_towards("192.0.2.7")


def test_what_a_crashed_group_left_is_ignored() -> None:
    store, stale = HashStore(), bytes(16).hex()
    store.set("p/hosts", stale)
    for rank in range(3):
        store.set(f"p/hosts/{stale}/{rank}", plain.dumps(Card("stale", rank, None)).hex())
    cards = [Card("fresh", rank, None) for rank in range(3)]

    def join(rank: int) -> Any:
        own = plain.dumps(cards[rank])
        return rendezvous.meet(store, rank, 3, own, Card.unpack, "p", "p/hosts", 20)

    assert [found for found, _ in run(range(3), join)] == [cards] * 3


def test_several_hosts_need_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INTERLACE_SECRET", raising=False)
    monkeypatch.delenv("INTERLACE_TRUST_NETWORK", raising=False)
    store = HashStore()

    def join(rank: int) -> Any:
        return connect_place(store, rank, 2, timeout=600, name="open", host=f"host {rank}")

    for error in run(range(2), join):
        assert type(error) is PlaceUnavailableError
        assert "needs a secret of the job. Set INTERLACE_SECRET" in str(error)


def test_one_rank_needs_no_store() -> None:
    place = connect_place(None, 0, 1, timeout=5, name="alone")
    assert isinstance(place, ShmPlace)
    place.close()


# -- rounding --------------------------------------------------------------------------------------


def test_the_mean_of_numbers_that_no_signed_number_holds() -> None:
    large, two, other = (torch.tensor([n], dtype=torch.uint64) for n in (2**63, 2, 2**62))
    mean = scenarios.in_two_steps(Partial.of("avg", torch.uint64), [[large, two], [other]])
    assert mean.item() == 2**62


def test_two_steps_give_what_one_gives() -> None:
    for op, dtype in itertools.product(reductions.REDUCE_OPS, reductions.DTYPES):
        if support_table.defined(op, dtype):
            parts = [numbers(rank, 1, 40, dtype) for rank in range(6)]
            expected = torch.empty_like(parts[0])
            reductions.fold(op, parts, expected)
            found = scenarios.in_two_steps(Partial.of(op, dtype), [parts[:3], parts[3:]])
            wide = torch.complex128 if dtype.is_complex else torch.float64
            exact = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
            torch.testing.assert_close(found.to(wide), expected.to(wide), **exact)


def test_a_rank_that_leaves_does_not_fail_the_op_that_it_has_finished() -> None:
    """Another rank of the other host has sent nothing yet at that time."""
    groups = members(4, hosts=2)
    left, place, late = threading.Event(), groups[1].place, groups[1].place.group.exchange

    def exchange(payload: bytes, doing: str) -> list[bytes]:
        found: list[bytes] = late(payload, doing)
        left.wait()
        while place._links.wires.ended() != [2]:
            time.sleep(0.01)
        return found

    place.group.exchange = exchange

    def on_rank(rank: int) -> list[bytes]:
        found = groups[rank].place.exchange(str(rank).encode(), "exchange")
        groups[rank].close()
        if rank == 2:
            left.set()
        return found

    assert run(range(4), on_rank) == [[b"0", b"1", b"2", b"3"]] * 4
