"""Messages of a rank to and from another host, at once."""

import threading
from types import SimpleNamespace
from typing import Any

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.places.hosts import packets
from interlace.runtime.places.hosts.packets import Packet
from interlace.runtime.places.hosts.transfers import HostTransfers

LONG = 30.0  # seconds, of which a run that is right needs none


class OneWay:
    """Links to rank 1, which sends the bytes of its message once it has heard of this rank's."""

    rank, world_size, failure = 0, 2, None

    def __init__(self) -> None:
        self.heard = threading.Event()
        self.problem = ""

    def bound(self) -> float:
        return LONG

    def check(self) -> None:
        pass

    def fail(self, error: Exception) -> None:
        self.problem = str(error)

    def send_payload(self, tensor: torch.Tensor, peer: int, slot: int) -> None:
        pass

    def send_packet(self, peer: int, packet: Packet) -> None:
        if packet.kind == packets.ANNOUNCED:
            self.heard.set()

    def receive_payload(self, tensor: torch.Tensor, peer: int, slot: int) -> None:
        if not self.heard.wait(LONG):
            raise RuntimeError("rank 1 has heard nothing")
        tensor.fill_(7)


def test_a_rank_that_receives_is_heard_meanwhile() -> None:
    links: Any = OneWay()
    group: Any = SimpleNamespace(names=(0,), control=None)
    transfers = HostTransfers(links, group, lambda: None)  # type: ignore[arg-type,return-value]
    into = torch.zeros(4)
    received = transfers.recv(Call("recv"), into, 1, 0)
    transfers.on_packet(1, Packet(packets.ANNOUNCED, 0, 0, (torch.float32, 4)))
    transfers.send(Call("send"), torch.zeros(4), 1, 0)
    received.result(2 * LONG)
    assert into.tolist() == [7] * 4 and not links.problem
    transfers.close()
