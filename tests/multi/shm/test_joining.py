"""Joining a group of one host: permitted connections, and errors of the others if a rank does not come."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError, PeerDiedError
from interlace.runtime.places.connect import connect_place
from interlace.runtime.places.hosts.host_map import Card
from interlace.runtime.processes import group as group_module, rendezvous
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.rendezvous import Rendezvous, StoreMeeting, meet, reason
from interlace.runtime.processes.segment import NONCE_BYTES
from interlace.runtime.processes.signed_store import SignedStore
from ranks import LONG, run

NONCE = bytes(range(16))
IDLE = 8


def wait(missing: Sequence[int]) -> None:
    time.sleep(1e-3)


def pair(one: Rendezvous, other: Rendezvous) -> list[Rendezvous]:
    one.addresses, other.addresses = {1: other.address}, {0: one.address}
    return [one, other]


@pytest.fixture
def ends() -> Iterator[list[Rendezvous]]:
    """Return the ends of two ranks, which have each other's addresses."""
    made = pair(Rendezvous(0, 2, NONCE), Rendezvous(1, 2, NONCE))
    yield made
    for each in made:
        each.close()


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        yield made


def all_meet(ends: list[Rendezvous]) -> bool:
    return run(range(2), lambda rank: ends[rank].meet_peers(wait)) == [None, None]


def test_connections_of_strangers_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store, held, meet_peers = HashStore(), [], Rendezvous.meet_peers

    def met(ends: Rendezvous, step: Any) -> None:
        for _ in range(IDLE):
            held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            held[-1].connect(ends.address)
        meet_peers(ends, step)

    def join(rank: int) -> list[bytes]:
        meeting = StoreMeeting(store)
        group = HostGroup(meeting, rank, 2, timeout=LONG, prefix="interlace/strangers/0")
        try:
            assert len(group.allocate(1 << 20, "an allocation")) == 2
            return group.exchange(b"%d" % rank, "the end")
        finally:
            group.close()

    monkeypatch.setattr(Rendezvous, "meet_peers", met)
    assert run(range(2), join) == [[b"0", b"1"]] * 2
    assert len(held) == 2 * IDLE
    for connection in held:
        connection.close()


def test_nobody_can_connect_once_all_have(ends: list[Rendezvous], stranger: socket.socket) -> None:
    addresses = [end.address for end in ends]
    stranger.connect(addresses[0])  # the control: until then it can
    assert all_meet(ends)
    for address in addresses:
        late = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with pytest.raises(ConnectionRefusedError):
            late.connect(address)
        late.close()


@pytest.mark.parametrize("said", [b"garbage" * 7, b"", bytes(72), b"x" * 10_000], ids=len)
def test_garbage_of_a_stranger_ends_nothing(
    ends: list[Rendezvous], stranger: socket.socket, said: bytes
) -> None:
    stranger.connect(ends[0].address)
    stranger.send(said)
    assert all_meet(ends)
    assert stranger.recv(1) == b""  # it was closed


IMPOSTOR = """
import os, socket, sys
try:
    os.setuid(65534)
except OSError as error:
    sys.exit(f"{error}")
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
stranger.connect(bytes.fromhex(sys.argv[1]))
stranger.send(bytes.fromhex(sys.argv[2]))
try:
    print(len(stranger.recv(1)))
except ConnectionResetError:
    print(0)
"""


def test_a_process_of_another_user_is_no_rank_whatever_it_knows(ends: list[Rendezvous]) -> None:
    """The stranger sends the same data as rank 1, and is first."""
    label = rendezvous._MESSAGE.pack(*ends[1]._label(sender=1, receiver=0))
    command = [sys.executable, "-ISc", IMPOSTOR, ends[0].address.hex(), label.hex()]
    stranger = subprocess.Popen(command, stdout=-1, stderr=-1, text=True)
    while stranger.poll() is None:  # it is closed before any other has come
        assert not ends[0]._connections
        ends[0]._accept()
        time.sleep(1e-3)
    said, problem = stranger.communicate()
    if problem:
        pytest.skip(f"this process cannot become another user: {problem}")
    assert said == "0\n"
    assert all_meet(ends)


class Losing(HashStore):
    """A store that deletes the keys of rank 1 before any read."""

    def __init__(self) -> None:
        super().__init__()
        self._one_at_a_time = threading.Lock()  # no write comes between the deletion and the read

    def _lose(self, key: str) -> None:
        if key.endswith("/1"):
            self.delete_key(key)

    def set(self, key: str, value: str | bytes) -> None:
        with self._one_at_a_time:
            super().set(key, value)  # type: ignore[arg-type]

    def check(self, keys: list[str]) -> bool:
        with self._one_at_a_time:
            there = super().check(keys)
            for key in keys:
                self._lose(key)
            return there

    def compare_set(self, key: str, *values: str) -> bytes:
        with self._one_at_a_time:
            self._lose(key)
            return super().compare_set(key, *values)


def test_joining_does_not_wait_for_a_key_that_was_deleted() -> None:
    store = Losing()
    store.set_timeout(timedelta(seconds=LONG))

    def join(rank: int) -> Any:
        return meet(store, rank, 2, b"mine", bytes, "g", "g/key", 0.5)

    errors = run(range(2), join)
    assert isinstance(errors[0], CollectiveTimeoutError)
    assert "ranks [1] have not joined group 'g'" in str(errors[0])


@pytest.mark.parametrize("key", ["hosts", "host/nonce"])
@pytest.mark.parametrize("garbage", ["what", "00", "6e6f2063617264"])
def test_garbage_in_the_store_is_named(key: str, garbage: str) -> None:
    prefix = "interlace/garbage/0"

    class Replacing(HashStore):
        def set(self, its: str, value: str | bytes) -> None:
            replaced = its.startswith(f"{prefix}/{key}") and its.endswith("/1")
            super().set(its, garbage if replaced else value)

    store = Replacing()

    def join(rank: int) -> Any:
        if key == "hosts":
            return connect_place(store, rank, 2, timeout=LONG, name="garbage")
        return HostGroup(StoreMeeting(store), rank, 2, timeout=LONG, prefix=f"{prefix}/host")

    errors = run(range(2), join)
    for rank, error in enumerate(errors):
        assert type(error) is InterlaceError, error
        assert f"rank {rank}: the store's value of '{prefix}/{key}/" in str(error)
        assert "/1', which rank 1 of group" in str(error) and garbage in str(error)


def test_connection_of_another_generation_is_let_go() -> None:
    before = len(os.listdir("/proc/self/fd"))
    new, old, right = (Rendezvous(r, 2, n) for r, n in ((0, NONCE), (1, bytes(16)), (1, NONCE)))
    old.addresses = {0: new.address}
    old.meet_peers(wait)
    ends = pair(new, right)
    assert all_meet(ends)
    read_end, write_end = os.pipe()
    found = run(range(2), lambda rank: ends[rank].trade((read_end,), wait))
    assert [list(each) for each in found] == [[1], [0]]
    assert old.hung_up([0]) == [0]
    for descriptors in (descriptors for each in found for descriptors in each.values()):
        os.close(*descriptors)
    for end in (read_end, write_end):
        os.close(end)
    for end in (new, old, right):
        end.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("living", [0, 1])
def test_rank_that_ended_before_it_connected_is_named_at_once(
    ends: list[Rendezvous], living: int
) -> None:
    dead = 1 - living
    ends[living].pids = {dead: 4711}
    ends[dead].close()
    with pytest.raises(PeerDiedError, match=rf"rank {dead} \(pid 4711\) died .* joining"):
        ends[living].meet_peers(wait)


KILLED = """
import os, sys
from torch.distributed import TCPStore
from interlace.runtime.processes import rendezvous
from interlace.runtime.places.connect import connect_place

def end(*rest):
    os.kill(os.getpid(), 9)

if sys.argv[2] == "all":
    rendezvous.StoreMeeting.cards = end
else:
    rendezvous.STORE_POLL_SECONDS = -1  # time.sleep raises: its card is there, and others are missing
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
connect_place(store, 1, int(sys.argv[3]), timeout=3600, name="cards")
"""


@pytest.mark.parametrize("come", ["all", "some"])
def test_rank_that_is_killed_after_its_card_is_named_at_once(come: str) -> None:
    """The rank has published its process but no address. If rank 3 has not joined, only rank 0 can
    identify the process.
    """
    size = 3 if come == "all" else 4
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(store.port), come, str(size)], stderr=subprocess.DEVNULL
    )

    def join(rank: int) -> Any:
        return connect_place(store, rank, size, timeout=LONG, name="cards")

    try:
        for rank, error in zip((0, 2), run((0, 2), join), strict=True):
            assert isinstance(error, InterlaceError)
            assert isinstance(error, PeerDiedError) or (come == "some" and rank == 2)
            assert f"rank 1 (pid {child.pid}) died" in str(error)
    finally:
        child.kill()
        child.wait()


def test_only_the_end_of_a_process_that_can_be_seen_is_believed() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    own = Card("here", os.getpid(), None, "1")
    for other in (Card("there", child.pid, None, "1"), Card("here", child.pid, None, "2"), own):
        own.check_living("joining", {1: other})
    with pytest.raises(PeerDiedError, match=rf"rank 1 \(pid {child.pid}\) died .* joining"):
        own.check_living("joining", {1: Card("here", child.pid, None, "1")})


def test_why_a_rank_could_not_join_is_said_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store, mapped = HashStore(), group_module.map_segment

    def fails_on_one(descriptor: int, identity: Any) -> Any:
        if identity.rank == 0:
            raise InterlaceError("there is no room for it")
        return mapped(descriptor, identity)

    def memory() -> list[str]:
        links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return sorted(path for path in links if "interlace" in os.path.realpath(path))

    monkeypatch.setattr(group_module, "map_segment", fails_on_one)
    before = memory()

    def join(rank: int) -> Any:
        return HostGroup(StoreMeeting(store), rank, 2, timeout=LONG, prefix="interlace/fails/0")

    said = run(range(2), join)
    expected = "there is no room for it"
    first = f"rank 1 could not join: InterlaceError: {expected}"
    assert [str(each) for each in said] == [first, expected]
    assert memory() == before, "while the exceptions, and so what they hold, are still there"


def test_a_reason_is_that_of_the_process_whatever_its_rank_elsewhere() -> None:
    """The numbers of ranks in a larger group differ; the error once had another rank's reason."""
    death, said = PeerDiedError(1, 77, "joining"), []
    meeting: Any = SimpleNamespace(
        told={0: "of rank 0", 1: "of rank 1"}.__getitem__, tell=said.append
    )
    assert str(reason(meeting, 2, {0: 77, 1: 78}, death)) == "of rank 0"
    assert reason(meeting, 2, {0: 75, 1: 76}, death) is death
    assert said == ["rank 2 could not join: InterlaceError: of rank 0", str(death)]


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
        prefix = "interlace/planted/0"
        group = HostGroup(StoreMeeting(signed), rank, 2, timeout=LONG, prefix=prefix)
        try:
            return group.exchange(b"%d" % rank, "the end")
        finally:
            group.close()

    assert run(range(2), join) == [[b"0", b"1"]] * 2


@pytest.mark.parametrize("other", [b"another", b""])
def test_ranks_with_different_secrets_say_so_at_once(other: bytes) -> None:
    store, prefix = HashStore(), "interlace/secrets/0"

    def join(rank: int) -> str:
        secret = other if rank else b"secret"
        signed = SignedStore(store, secret) if secret else store
        with pytest.raises(InterlaceError) as error:
            HostGroup(StoreMeeting(signed), rank, 2, timeout=LONG, prefix=prefix)
        return str(error.value)

    for rank, text in enumerate(run(range(2), join)):
        assert text == (
            f"rank {rank}: ranks [{1 - rank}] have another INTERLACE_SECRET than this rank, or none: "
            f"set the same value for all ranks of group {prefix!r}"
        )


def test_a_joined_group_leaves_nothing_in_the_store() -> None:
    store = HashStore()

    def join(rank: int) -> None:
        connect_place(SignedStore(store, b"secret"), rank, 2, timeout=LONG, name="clean").close()

    before = store.num_keys()
    run(range(2), join)
    assert store.num_keys() == before


def test_the_store_may_end_once_a_rank_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    forget, ended = rendezvous.forget, threading.Event()

    def slowly(store: Any, rank: int, key: str, nonce: str) -> None:
        if rank:
            ended.wait(0.5)  # in vain, however slow this is: rank 0 waits for this one
            assert not ended.is_set()
        forget(store, rank, key, nonce)

    monkeypatch.setattr(rendezvous, "forget", slowly)
    store = HashStore()

    def join(rank: int) -> None:
        place = connect_place(store, rank, 2, timeout=LONG, name="joining")
        ended.set()
        place.close()

    assert run(range(2), join) == [None, None]
