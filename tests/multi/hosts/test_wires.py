"""Connections between hosts for bytes of collectives, and the store of a group that is made by them."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from interlace.runtime.core import plain
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.hosts import regroup as rolls
from interlace.runtime.places.hosts.links import ROW, Packet
from interlace.runtime.places.hosts.regroup import HostsRoll, LinkStore, Told
from interlace.runtime.places.hosts.wires import Wires, read_address
from interlace.runtime.processes.control import ATTEMPT
from interlace.runtime.processes.signed_store import digest

MORE = 64 << 20  # bytes that no kernel keeps for a connection


def proof(sender: int, receiver: int) -> bytes:
    return digest(b"secret", b"%d to %d" % (sender, receiver))


def false_proof(sender: int, receiver: int) -> bytes:
    return digest(b"guess", b"%d to %d" % (sender, receiver))


def connected(count: int) -> list[Wires]:
    wires = [Wires(rank) for rank in range(count)]
    at = [each.listen("127.0.0.1") for each in wires]

    def connect(rank: int) -> None:
        others = {peer: at[peer] for peer in range(count) if peer != rank}
        wires[rank].connect(others, proof, 60.0, lambda: False)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(connect, range(count)))
    return wires


@pytest.fixture
def pair() -> Iterator[list[Wires]]:
    wires = connected(2)
    yield wires
    for each in wires:
        each.sever()
        each.forget()


def test_both_send_more_than_the_kernel_keeps(pair: list[Wires]) -> None:
    """Each side starts to receive before it has sent everything, and sends the rest meanwhile."""
    sent = [bytes([1 + rank]) * MORE for rank in range(2)]

    def swap(rank: int) -> bool:
        pair[rank].post(1 - rank, sent[rank])
        into = bytearray(MORE)
        pair[rank].take(1 - rank, into)
        pair[rank].flush()
        return into == sent[1 - rank]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(swap, range(2))) == [True, True]


def test_flush_up_to_a_point_does_not_wait_for_what_was_posted_later(pair: list[Wires]) -> None:
    pair[0].post(1, b"first")
    posted = dict(pair[0].posted)
    pair[0].post(1, bytes(MORE))  # nobody takes it
    pair[0].flush(posted)
    said = bytearray(5)
    pair[1].take(0, said)
    assert said == b"first"
    waiting = threading.Thread(target=pair[0].flush)  # the control
    waiting.start()
    pair[1].take(0, bytearray(MORE))
    waiting.join()


def test_strangers_are_turned_away_and_keep_nobody_waiting() -> None:
    wires = [Wires(rank) for rank in range(2)]
    at = [each.listen("127.0.0.1") for each in wires]
    silent = socket.create_connection(at[0])
    guessing = socket.create_connection(at[0])
    guessing.sendall(b"\1\0\0\0" + false_proof(1, 0))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(wires[0].connect, {1: at[1]}, proof, 60.0, lambda: False)
        assert guessing.recv(1) == b""
        wires[1].connect({0: at[0]}, proof, 60.0, lambda: False)
        first.result()
    wires[1].post(0, b"here")
    said = bytearray(4)
    wires[0].take(1, said)
    assert said == b"here"
    for each in (silent, guessing):
        each.close()
    for wire in wires:
        wire.forget()


def test_who_answers_proves_that_it_knows_the_secret() -> None:
    """A rank that was led to another port sends no bytes there."""
    lured, other = Wires(1), socket.create_server(("127.0.0.1", 0))
    lured.listen("127.0.0.1")
    address: tuple[str, int] = other.getsockname()

    def answer() -> None:
        wire, _ = other.accept()
        wire.sendall(false_proof(0, 1))
        wire.close()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(answer)
        with pytest.raises(InterlaceError, match="who answers for rank 0 does not know"):
            lured.connect({0: address}, proof, 60.0, lambda: False)
    lured.forget()
    other.close()


def test_who_has_closed_its_end_is_seen_before_what_it_has_sent_is_read(pair: list[Wires]) -> None:
    pair[0].post(1, b"the last")
    assert pair[0].ended() == pair[1].ended() == []
    pair[0].sever()
    while pair[1].ended() != [0]:  # a connection may take a moment for it
        pass


def test_an_address_is_a_host_and_ports() -> None:
    assert read_address(plain.dumps(("host", 1, 2)), 2) == ("host", [1, 2])
    for other in (("host", 1, "2"), ("host", 1), ["host", 1, 2], None):
        with pytest.raises(plain.UnreadableError, match="not an address"):
            read_address(plain.dumps(other), 2)


def test_connecting_ends_when_nobody_waits_for_it() -> None:
    wires = Wires(0)
    wires.listen("127.0.0.1")
    with pytest.raises(InterlaceError, match=r"ranks \[1\] have not connected"):
        wires.connect({1: ("127.0.0.1", 1)}, proof, 60.0, lambda: True)


LONG = timedelta(seconds=600)


class StoreWires:
    """The links of ``rank``; packets arrive at once."""

    timeout = LONG.total_seconds()

    def __init__(self, rank: int, told: list[Told]) -> None:
        self.rank, self._told = rank, told

    def send_all(self, packet: Packet, peers: list[int]) -> None:
        for peer in peers:
            self._told[peer].take(Packet.unpack(packet.pack()))


def stores(told: list[Told], ranks: list[int], name: str) -> list[LinkStore]:
    wires: list[Any] = [StoreWires(rank, told) for rank in ranks]
    return [LinkStore(each, told[each.rank], name, ranks) for each in wires]


def test_waits_end() -> None:
    told = [Told(), Told()]
    one, other = stores(told, [0, 1], "the group")
    with pytest.raises(InterlaceError, match=r"nobody has said \['key'\]"):
        one.wait(["key"], timedelta(0))
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(one.wait, ["key"], LONG)
        other.set("key", "value")
        waiting.result()
        begun = threading.Event()
        waiting = threads.submit(lambda: (begun.set(), one.wait(["never"], LONG)))
        begun.wait()
        one.close()
        with pytest.raises(InterlaceError, match="nobody has said"):
            waiting.result()


BEFORE = 2  # any RESULT of the first attempt is at least this


class RollWires:
    """The links of rank 0 of four; they keep its packets."""

    rank, world_size, timeout = 0, 4, 60.0
    pids, peers = (100, 101, 102, 103), (1, 2, 3)

    def __init__(self) -> None:
        self.told: set[int] = set()

    def check_open(self) -> None:
        pass

    def send_all(self, packet: Packet, peers: list[int]) -> None:
        self.told.add(packet.tag)


def test_who_has_had_no_time_to_tell_of_a_loss_is_not_struck_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 is stopped, all ranks time out at the same moment, and rank 3 reports it last."""
    now = 1000.0
    monkeypatch.setattr(rolls.time, "monotonic", lambda: now)
    wires: Any = RollWires()
    roll = HostsRoll(wires, "group")
    roll.begin(range(4))
    roll.say(ATTEMPT, 1)
    of_rank_1 = Packet(ROW, 1, 0, (0, 0, 0))
    roll.take(2, of_rank_1)
    assert roll.gone() == set()  # for rank 3 may know more of it
    roll.strike_off([1], BEFORE)
    assert wires.told == {0, 1}
    roll.take(3, of_rank_1)
    assert roll.gone() == {1}


def test_who_never_tells_of_a_loss_is_struck_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait one timeout after they learned of the loss."""
    now = 1000.0
    monkeypatch.setattr(rolls.time, "monotonic", lambda: now)
    wires: Any = RollWires()
    roll = HostsRoll(wires, "group")
    roll.begin(range(4))
    roll.lose(1)
    roll.take(2, Packet(ROW, 1, 0, (0, 0, 0)))
    now += roll.timeout + 1
    roll.strike_off([1], BEFORE)
    assert wires.told == {1, 3}
    roll.take(2, Packet(ROW, 3, 0, (0, 0, 0)))
    assert roll.gone() == {1, 3}
