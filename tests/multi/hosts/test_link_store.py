"""The store of a group of ranks with links, and the ranks that count as gone after a loss."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.hosts import regroup as rolls
from interlace.runtime.places.hosts.links import PACKET_BYTES, ROW, Packet
from interlace.runtime.places.hosts.regroup import HostsRoll, LinkStore, Told
from interlace.runtime.processes.control import ATTEMPT

LONG = timedelta(seconds=600)


class Wires:
    """The links of ``rank``; packets arrive at once."""

    timeout = LONG.total_seconds()

    def __init__(self, rank: int, told: list[Told]) -> None:
        self.rank, self._told = rank, told

    def send_all(self, packet: Packet, peers: list[int]) -> None:
        for peer in peers:
            self._told[peer].take(Packet.unpack(packet.pack()))


def stores(told: list[Told], ranks: list[int], name: str) -> list[LinkStore]:
    wires: list[Any] = [Wires(rank, told) for rank in ranks]
    return [LinkStore(each, told[each.rank], name, ranks) for each in wires]


@pytest.mark.parametrize("size", [0, 7, 3 * PACKET_BYTES])
def test_what_one_sets_the_others_get(size: int) -> None:
    told = [Told() for _ in range(3)]
    [one] = stores(told[:1], [0], "alone")
    one, other = stores(told, [0, 2], "the group")
    one.set("key", bytes(range(256)) * size)
    other.set("another", "text")
    assert other.get("key") == one.get("key") == bytes(range(256)) * size
    one.set("key", "anew")
    assert other.get("key") == one.get("key") == b"anew"
    assert one.check(["key", "another"]) and not one.check(["key", "none"])
    assert not told[1].groups
    [elsewhere] = stores([told[0]], [0], "another group")
    assert not elsewhere.check(["key"])
    one.close()
    other.close()
    assert not any(each.groups for each in told)


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
