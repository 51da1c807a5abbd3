"""Ranks that count as gone on several hosts, when reports of the others come in an unlucky order."""

from typing import Any

import pytest

from interlace.runtime.places.hosts import regroup as rolls
from interlace.runtime.places.hosts.links import ROW, Packet
from interlace.runtime.places.hosts.regroup import HostsRoll
from interlace.runtime.processes.control import ATTEMPT

BEFORE = 2  # any RESULT of the first attempt is at least this


class Wires:
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
    wires: Any = Wires()
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
    wires: Any = Wires()
    roll = HostsRoll(wires, "group")
    roll.begin(range(4))
    roll.lose(1)
    roll.take(2, Packet(ROW, 1, 0, (0, 0, 0)))
    now += roll.timeout + 1
    roll.strike_off([1], BEFORE)
    assert wires.told == {1, 3}
    roll.take(2, Packet(ROW, 3, 0, (0, 0, 0)))
    assert roll.gone() == {1, 3}
