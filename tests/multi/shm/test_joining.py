"""Joining a group of one host: who may connect, and what the others hear when a rank does not come."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import HashStore

from guard import busy
from interlace.runtime.core.errors import InterlaceError, PeerDiedError
from interlace.runtime.places.one_host.group import HostGroup
from interlace.runtime.places.one_host.rendezvous import Rendezvous
from interlace.runtime.places.one_host.segment import NONCE_BYTES
from interlace.runtime.places.one_host.signed_store import SignedStore

NONCE = bytes(range(16))
IDLE = 8
LONG = 600.0


def both(join: Callable[[int], Any]) -> list[Future[Any]]:
    """What ``join(rank)`` comes to on two ranks, which are threads; all that waits is bounded."""
    with ThreadPoolExecutor(2) as threads:
        return [threads.submit(join, rank) for rank in range(2)]


def wait(missing: Sequence[int]) -> None:
    time.sleep(1e-3)


def pair(one: Rendezvous, other: Rendezvous) -> list[Rendezvous]:
    one.addresses, other.addresses = {1: other.address}, {0: one.address}
    return [one, other]


@contextmanager
def strangers(store: HashStore, prefix: str) -> Iterator[list[socket.socket]]:
    """Whoever reads the store connects to all sockets named there, as often as these let it, and waits."""
    ended, held = threading.Event(), []

    def connect() -> None:
        while not ended.wait(1e-3):
            if not store.check([f"{prefix}/nonce"]):
                continue
            nonce = store.get(f"{prefix}/nonce").decode()
            if len(nonce) != 2 * NONCE_BYTES:
                continue
            for rank in range(2):
                key = f"{prefix}/nonce/{nonce}/{rank}"
                if not store.check([key]):
                    continue
                # an abstract name, which is five characters behind a NUL
                address = bytes.fromhex(store.get(key).decode())[-6:]
                for _ in range(IDLE):
                    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    connection.setblocking(False)
                    try:
                        connection.connect(address)
                    except OSError:
                        connection.close()
                        break
                    held.append(connection)

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        yield held
    finally:
        ended.set()
        thread.join()
        for connection in held:
            connection.close()


def test_connections_of_strangers_hold_nobody_up() -> None:
    store, prefix = HashStore(), "interlace/strangers/0"

    def join(rank: int) -> list[bytes]:
        group = HostGroup(store, rank, 2, timeout=20.0 * busy(), prefix=prefix)
        try:
            assert len(group.allocate(1 << 20, "an allocation")) == 2
            return group.exchange(b"%d" % rank, "the end")
        finally:
            group.close()

    with strangers(store, prefix) as held:
        assert [each.result() for each in both(join)] == [[b"0", b"1"]] * 2
        assert held


def test_nobody_can_connect_once_all_have() -> None:
    ends = pair(Rendezvous(0, 2, NONCE), Rendezvous(1, 2, NONCE))
    addresses = [end.address for end in ends]
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(addresses[0])  # the control: until then it can
    both(lambda rank: ends[rank].meet_peers(wait))
    for address in addresses:
        late = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with pytest.raises(ConnectionRefusedError):
            late.connect(address)
        late.close()
    for end in (*ends, stranger):
        end.close()


def test_connection_of_another_generation_is_let_go() -> None:
    """Rank 1 of a group that crashed knows the new socket of rank 0, and connects first."""
    before = len(os.listdir("/proc/self/fd"))
    new, old, right = (Rendezvous(r, 2, n) for r, n in ((0, NONCE), (1, bytes(16)), (1, NONCE)))
    old.addresses = {0: new.address}
    old.meet_peers(wait)
    ends = pair(new, right)
    both(lambda rank: ends[rank].meet_peers(wait))
    read_end, write_end = os.pipe()
    found = both(lambda rank: ends[rank].trade((read_end,), wait))
    assert [list(each.result()) for each in found] == [[1], [0]]
    assert old.hung_up() == [0]
    for delivery in (d for each in found for d in each.result().values()):
        os.close(*delivery.descriptors)
    for end in (read_end, write_end):
        os.close(end)
    for end in (new, old, right):
        end.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("living", [0, 1])
def test_rank_that_ended_before_it_connected_is_named_at_once(living: int) -> None:
    ends = pair(Rendezvous(0, 2, NONCE), Rendezvous(1, 2, NONCE))
    dead = 1 - living
    ends[living].pids = {dead: 4711}
    ends[dead].close()
    until = time.monotonic() + LONG

    def step(missing: Sequence[int]) -> None:
        assert time.monotonic() < until
        wait(missing)

    with pytest.raises(PeerDiedError, match=rf"rank {dead} \(pid 4711\) died .* joining"):
        ends[living].meet_peers(step)
    ends[living].close()


def test_why_a_rank_could_not_join_is_said_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store, mapped = HashStore(), HostGroup._map

    def fails_on_one(group: HostGroup, *rest: Any) -> Any:
        if group.rank == 1:
            raise InterlaceError("there is no room for it")
        return mapped(group, *rest)

    monkeypatch.setattr(HostGroup, "_map", fails_on_one)
    started = time.monotonic()
    found = both(lambda rank: HostGroup(store, rank, 2, timeout=LONG, prefix="interlace/fails/0"))
    said = [str(each.exception()) for each in found]
    expected = "there is no room for it"
    assert said == [f"rank 1 could not join: InterlaceError: {expected}", expected]
    assert time.monotonic() - started < LONG / 4


@pytest.mark.parametrize("planted", ["00" * NONCE_BYTES, "garbage", ""])
def test_what_strangers_write_into_a_signed_store_is_overwritten(planted: str) -> None:
    store, key = HashStore(), "interlace/planted/0/nonce"
    store.set(key, planted)

    def join(rank: int) -> list[bytes]:
        if rank:
            while len(store.get(key)) < 2 * NONCE_BYTES or store.get(key) == planted.encode():
                time.sleep(1e-3)
            store.set(key, planted)  # over what rank 0 has just written
        signed = SignedStore(store, b"secret")
        group = HostGroup(signed, rank, 2, timeout=20.0 * busy(), prefix="interlace/planted/0")
        try:
            return group.exchange(b"%d" % rank, "the end")
        finally:
            group.close()

    assert [each.result() for each in both(join)] == [[b"0", b"1"]] * 2
