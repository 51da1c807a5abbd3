"""The store of a group that is made by ranks with links: values arrive whole, and waits for them end."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.hosts.links import PACKET_BYTES, Packet
from interlace.runtime.places.hosts.regroup import LinkStore, Told

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
