"""A store of ranks that have links already, for a group that some of them make: nobody has to serve it.

What a rank sets it tells those it makes the group with, who keep it until they ask for it: values may come
before a rank knows of the group. Rejected: a TCPStore of one of them. Its end would be that of the meeting,
and torch looks up the names of both ends of each of its connections, which may take seconds.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from interlace.runtime.compat.torch_groups import Store
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.hosts.links import HostLinks
from interlace.runtime.places.hosts.packets import VALUE, Packet

_PART_BYTES = 1536
_Values = dict[bytes, tuple[int, bytes]]  # by key: all its bytes, and those that have come


class Told:
    """What the ranks of a group have told each other of groups that they make."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.groups: dict[bytes, _Values] = {}

    def take(self, packet: Packet) -> None:
        """A part of a value. Those of one value come in order."""
        group, key, part = packet.content
        with self.changed:
            values = self.groups.setdefault(group, {})
            whole, before = values.get(key, (0, b""))
            begun = before if len(before) < whole else b""  # else the key is set again
            values[key] = packet.number, begun + part
            self.changed.notify_all()


class LinkStore(Store):
    """The store of the group ``name`` that ``ranks`` make, to whom ``links`` lead. To be closed then."""

    def __init__(self, links: HostLinks, told: Told, name: str, ranks: Sequence[int]) -> None:
        super().__init__()
        self._links, self._told, self._group = links, told, _digest(name)
        self._peers = [rank for rank in ranks if rank != links.rank]
        self._closed = False

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        for begin in range(0, max(1, len(data)), _PART_BYTES):
            content = (self._group, _digest(key), data[begin : begin + _PART_BYTES])
            packet = Packet(VALUE, number=len(data), content=content)
            self._told.take(packet)
            self._links.send_all(packet, self._peers)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._told.groups[self._group][_digest(key)][1]

    def check(self, keys: list[str]) -> bool:
        values = self._told.groups.get(self._group, {})
        found = [values.get(_digest(key)) for key in keys]
        return all(value is not None and value[0] == len(value[1]) for value in found)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._links.timeout if timeout is None else timeout.total_seconds()
        until = time.monotonic() + seconds
        with self._told.changed:
            while not self.check(keys):
                left = until - time.monotonic()
                if self._closed or left <= 0:
                    raise InterlaceError(f"rank {self._links.rank}: nobody has said {keys}")
                self._told.changed.wait(left)

    def close(self) -> None:
        with self._told.changed:
            self._closed = True
            self._told.groups.pop(self._group, None)
            self._told.changed.notify_all()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
