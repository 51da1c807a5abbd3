"""A new group of ranks that have links already: a store to meet in, and the roll of the remaining ranks.

The roll says which ranks of a group on several hosts remain: what every rank has published, and which ranks
all agree are gone. On one host it is in memory that outlives its ranks (``MemoryRoll`` in
``processes/rendezvous.py``). Here every rank keeps a copy: a *row* for each rank, numbered as it changes. A
rank sends its own row to all others. For a rank that is gone (its connection ended or it has left), it
sends to all the last row that it knows, and again if it learns of a later one. A rank that receives such a
row also counts that rank as gone, and ignores it from then on.

A rank is certainly gone when all live ranks have sent the same row for every rank that is gone. Any later
row of such a rank could only come from another rank that is gone, and those are ignored.

Ranks that cannot reach each other strike each other off: after the timeout each side continues alone.

The store is for ranks that have links, for a group that some of them make, and needs no server. A rank
sends a value that it sets to the ranks with which it makes the group. They keep it until they ask for it,
because a value may arrive before a rank knows of the group. Rejected: a TCPStore of one of them. If that
rank ended, the meeting would end, and torch resolves the names of both ends of each connection, which may
take seconds.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence, Set
from datetime import timedelta
from typing import Any

from interlace.runtime.compat.torch_groups import Store
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.hosts.links import LATE, ROW, VALUE, HostLinks, Packet
from interlace.runtime.processes.control import ATTEMPT, RESULT, WANTED

_PART_BYTES = 1536
_Values = dict[bytes, tuple[int, bytes]]  # by key: the number of its bytes, and those received


class Told:
    """The values that the ranks of a group have sent each other for groups that they make."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.groups: dict[bytes, _Values] = {}

    def take(self, packet: Packet) -> None:
        """Take a part of a value. The parts of one value arrive in order."""
        group, key, part = packet.content
        with self.changed:
            values = self.groups.setdefault(group, {})
            whole, before = values.get(key, (0, b""))
            begun = before if len(before) < whole else b""  # otherwise the key is set again
            values[key] = packet.number, begun + part
            self.changed.notify_all()


class LinkStore(Store):
    """The store of the group ``name``, which ``ranks`` make, over ``links``. Close it afterwards."""

    def __init__(self, links: HostLinks, messages: Told, name: str, ranks: Sequence[int]) -> None:
        super().__init__()
        self._links, self._told, self._group = links, messages, _digest(name)
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


_COLUMNS = {ATTEMPT: 1, RESULT: 2, WANTED: 3}

_LastWords = tuple[int, int, int, int]


class HostsRoll:
    """The roll of the ranks that ``links`` connect; ``prefix`` names their group."""

    def __init__(self, links: HostLinks, prefix: str) -> None:
        self.rank, self.world_size, self.prefix = links.rank, links.world_size, prefix
        self.pids = dict(enumerate(links.pids))
        self._links, self._lock = links, threading.RLock()
        self._members: Set[int] = frozenset(range(links.world_size))
        self._rows: list[_LastWords] = [(0, 0, 0, 0)] * links.world_size
        self._heard: list[dict[int, _LastWords]] = [{} for _ in self._rows]
        """The rows that each rank has sent about ranks that are gone."""
        self._gone: set[int] = set()
        self._lost = 0.0  # the time when the last of them was lost
        self._certain: Set[int] = frozenset()
        self._telling = False

    @property
    def timeout(self) -> float:
        return self._links.timeout + LATE  # some ranks learn of a failure so much later than others

    def begin(self, members: Sequence[int]) -> None:
        self._links.check_open()
        with self._lock:
            self._members = frozenset(members)
        self.tell()

    def said(self, rank: int, word: int) -> int:
        return self._rows[rank][_COLUMNS[word]]

    def say(self, word: int, value: int) -> None:
        with self._lock:
            row: Any = list(self._rows[self.rank])
            row[0] += 1
            row[_COLUMNS[word]] = value
            self._rows[self.rank] = tuple(row)
            self._send(self.rank)

    def gone(self) -> Set[int]:
        with self._lock:
            live = self._members - self._gone - {self.rank}
            lost = self._members & self._gone
            if all(self._heard[p].get(rank) == self._rows[rank] for p in live for rank in lost):
                self._certain = lost
            return self._certain | ({self.rank} & self._gone)

    def strike_off(self, ranks: Sequence[int], before: int) -> None:
        """Also strike off ranks that sent no rows about lost ranks for a timeout, and count as late."""
        with self._lock:
            late = {rank for rank in ranks if self.said(rank, RESULT) < before} - self._gone
            if not late and time.monotonic() > self._lost + self.timeout:
                live = self._members - self._gone - {self.rank}
                late = {p for p in live if not self._heard[p].keys() >= self._gone & self._members}
            self.tell()
            for rank in late:
                self.lose(rank)

    def tell(self) -> None:
        """Send rows from now on: a rank continues without those that are gone, or is about to."""
        with self._lock:
            if not self._telling:
                self._telling = True
                for rank in self._gone:
                    self._send(rank)

    def lose(self, rank: int) -> None:
        with self._lock:
            if rank not in self._gone:
                self._gone.add(rank)
                self._lost = time.monotonic()
                if self._telling:
                    self._send(rank)

    def take(self, source: int, packet: Packet) -> None:
        """Take a row that ``source`` sends: its row, or the row of a rank that is gone."""
        about, row = packet.tag, (packet.number, *packet.content)
        with self._lock:
            if source in self._gone or not 0 <= about < self.world_size:
                return
            if about == source:
                self._rows[source] = row
            elif about == self.rank:
                self._gone.add(self.rank)
            elif source in self._members:
                self.tell()
                self._heard[source][about] = row
                if row[0] > self._rows[about][0]:
                    self._rows[about] = row
                    self._gone.discard(about)  # so that it is sent again
                self.lose(about)

    def _send(self, about: int) -> None:
        """Send a row to all live ranks, and to the rank that it is about."""
        number, *content = self._rows[about]
        deaf = self._gone - {about}
        peers = [peer for peer in self._links.peers if peer not in deaf]
        self._links.send_all(Packet(ROW, about, number, tuple(content)), peers)
