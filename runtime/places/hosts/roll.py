"""Who is left of a group on several hosts: what every rank has said, and who is gone, as all agree.

On one host that is in memory which outlives its ranks (``MemoryRoll`` in ``one_host/meetings.py``). Here
every rank keeps a copy: a *row* for each rank, numbered as it changes. A rank tells all others its own row.
Of one that is gone, whose connection has ended or who has left, it tells all the last row that it knows,
and again if it learns of a later one. Who is told so counts that rank as gone, too, and hears it no more.

A rank is gone for certain when all that live have told the same row of everyone that is gone. What they
could still learn of such a rank would have to come from another one that is gone, and nobody hears those.

Ranks that cannot reach each other strike each other off: each side of a network that has come apart goes
on alone, after the timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence, Set
from typing import Any

from interlace.runtime.places.hosts.links import LATE, HostLinks
from interlace.runtime.places.hosts.packets import ROW, Packet
from interlace.runtime.processes.control import ATTEMPT, RESULT, WANTED

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
        """What each rank has told of those that are gone."""
        self._gone: set[int] = set()
        self._lost = 0.0  # when the last of them was
        self._certain: Set[int] = frozenset()
        self._telling = False

    @property
    def timeout(self) -> float:
        return (
            self._links.timeout + LATE
        )  # for ranks may hear of a failure so much later than others

    def begin(self, members: Sequence[int]) -> None:
        self._links.check_open()
        with self._lock:
            self._members = frozenset(members)
        self.tell()

    def said(self, rank: int, what: int) -> int:
        return self._rows[rank][_COLUMNS[what]]

    def say(self, what: int, value: int) -> None:
        with self._lock:
            row: Any = list(self._rows[self.rank])
            row[0] += 1
            row[_COLUMNS[what]] = value
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
        """Also those who for a whole timeout have not told of who is gone, so that these count as late."""
        with self._lock:
            late = {rank for rank in ranks if self.said(rank, RESULT) < before} - self._gone
            if not late and time.monotonic() > self._lost + self.timeout:
                live = self._members - self._gone - {self.rank}
                late = {p for p in live if not self._heard[p].keys() >= self._gone & self._members}
            self.tell()
            for rank in late:
                self.lose(rank)

    def tell(self) -> None:
        """Tell from now on who is gone: somebody goes on without them, or is about to."""
        with self._lock:
            if not self._telling:
                self._telling = True
                for rank in self._gone:
                    self._send(rank)

    def lose(self, rank: int) -> None:
        """``rank`` is gone."""
        with self._lock:
            if rank not in self._gone:
                self._gone.add(rank)
                self._lost = time.monotonic()
                if self._telling:
                    self._send(rank)

    def take(self, source: int, packet: Packet) -> None:
        """A row that ``source`` tells: its own, or that of a rank that is gone."""
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
                    self._gone.discard(about)  # to tell it again
                self.lose(about)

    def _send(self, about: int) -> None:
        """Tell a row to all that live, and to the one whose it is."""
        number, *content = self._rows[about]
        deaf = self._gone - {about}
        peers = [peer for peer in self._links.peers if peer not in deaf]
        self._links.send_all(Packet(ROW, about, number, tuple(content)), peers)
