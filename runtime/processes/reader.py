"""Reading of records: of peers in shared memory, of another process from outside, and of files.

Who reads may not trust who wrote: every length and place is checked before it is used, and what is no text
of a record is shown as "?".
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from typing import Any

from interlace.runtime.core import plain
from interlace.runtime.processes import recorder as at

_ENTRY, _WORD, _COUNT = struct.Struct("<8q"), struct.Struct("<q"), struct.Struct("<H")
_FOOT = struct.Struct("<q8s")
_MAGIC = b"ilrecord"
MOST_BYTES = 64 << 20  # of a file


@plain.record
@dataclass(frozen=True)
class PastOp:
    """An op of a rank. Times are of the monotonic clock, in ns; ``ended`` is 0 if it has not ended.

    ``terms`` are those of its call; ``site`` is (function, file, line), or None; ``peer`` is the rank with
    which it is, -1 if with all.
    """

    number: int
    op: str
    terms: Any
    site: Any
    began: int
    ended: int
    peer: int = -1
    tag: int = 0

    def __str__(self) -> str:
        shown = ""
        if isinstance(self.terms, tuple):
            shown = " ".join(
                str(term[1]).removeprefix("torch.")
                for term in self.terms
                if isinstance(term, tuple) and len(term) == 2 and term[1] != "auto"
            )
        elif isinstance(self.terms, bool):
            shown = "refused"
        peer = "" if self.peer < 0 else f" {self.peer} tag {self.tag}"
        return f"{self.op}{peer} {shown}".strip()


@plain.record
@dataclass(frozen=True)
class RankRecord:
    """What a rank of a group did last.

    ``ranks`` are those of the group on its host, as ranks of the job, and ``rank`` is one of these by its
    place there; ``pids`` are their processes. ``whole`` are all ranks of a group on several hosts, or on
    GPUs, whose ops are no messages of the host's ranks; else empty. ``waits`` is for whom the rank has
    said at ``since`` (s) that it waits, by place, or None. ``now`` and ``wall`` are when it was read, in ns
    of the monotonic clock and since 1970.
    """

    group: str
    rank: int
    ranks: Any
    pids: Any
    whole: Any
    waits: int | None
    since: float
    failed: str
    messages: Any
    others: Any
    now: int
    wall: int

    def __post_init__(self) -> None:
        numbers = (self.ranks, self.pids, self.whole)
        fits = (
            all(type(each) is tuple and {*map(type, each)} <= {int} for each in numbers)
            and all(type(each) is int for each in (self.rank, self.now, self.wall))
            and type(self.group) is type(self.failed) is str
            and type(self.since) is float
            and 0 <= self.rank < len(self.ranks) == len(self.pids)
            and (self.waits is None or (type(self.waits) is int and self.waits < len(self.ranks)))
            and type(self.messages) is type(self.others) is list
            and {*map(type, self.messages), *map(type, self.others)} <= {PastOp}
        )
        for op in [*self.messages, *self.others] if fits else []:
            counts = {*map(type, (op.number, op.began, op.ended, op.peer, op.tag))}
            fits = fits and type(op.op) is str and counts == {int} and _is_site(op.site)
        if not fits:
            raise plain.UnreadableError("these bytes are no record of a rank")

    @property
    def name(self) -> int:
        """The rank of the job."""
        return int(self.ranks[self.rank])

    @property
    def pid(self) -> int:
        return int(self.pids[self.rank])

    @property
    def collectives(self) -> list[PastOp]:
        """The ops of all ranks, in their order; without what hosts do for them."""
        found = [op for op in self.others if op.peer < 0] if self.whole else self.messages
        return sorted(found, key=lambda op: op.number)

    @property
    def transfers(self) -> list[PastOp]:
        """The ops between two ranks, in their order."""
        return sorted((op for op in self.others if op.peer >= 0), key=lambda op: op.number)


def _is_site(site: Any) -> bool:
    return site is None or (type(site) is tuple and [*map(type, site)] == [str, str, int])


def read_rank(region: bytes, waits: int | None, since: float, failed: str) -> RankRecord:
    """The record in a ``region`` of memory, with what the rank says elsewhere; UnreadableError if none."""
    (length,) = _WORD.unpack_from(region)
    if not 0 < length <= at.MESSAGES - 8 or len(region) < at.REGION_BYTES:
        raise plain.UnreadableError(f"no record is in these {len(region)} bytes")
    who = plain.loads(region[8 : 8 + length])
    if type(who) is not tuple or len(who) != 5:
        raise plain.UnreadableError("these bytes do not say whose record they are")
    messages, others = (_entries(region, start) for start in (at.MESSAGES, at.OTHERS))
    for_whom = None if waits is None or waits < 0 else waits
    clocks = time.monotonic_ns(), time.time_ns()
    return RankRecord(*who, for_whom, since, failed, messages, others, *clocks)


def _entries(region: bytes, start: int) -> list[PastOp]:
    found = []
    entries = _ENTRY.iter_unpack(region[start : start + at.ENTRIES * at.ENTRY])
    for slot, (number, peer, tag, count, _, began, ended, told) in enumerate(entries):
        if number > 0 and number % at.ENTRIES == slot and began > 0:
            op, terms = _op(_text(region, told, told >> at.OFFSET))
            site = _text(region, told, told)
            site = site if _is_site(site) else None
            if start == at.MESSAGES:
                peer, tag, count = -1, 0, number
            found.append(PastOp(count, op, terms, site, began, max(ended, 0), peer, tag))
    return found


def _op(text: Any) -> tuple[str, Any]:
    if type(text) is tuple and len(text) == 3 and type(text[0]) is str:
        return text[0], text[1]
    return "?", None


def _text(region: bytes, told: int, offset: int) -> Any:
    """The text at ``offset``; None if there is none, or another one by now."""
    (generation,) = _WORD.unpack_from(region, at.LOG)
    place = (offset & ((1 << at.OFFSET) - 1)) - 1
    if generation - (told >> at.GENERATION) not in (0, 1) or not 0 <= place < 2 * at.HALF - 2:
        return None
    (length,) = _COUNT.unpack_from(region, at.TEXTS + place)
    start = at.TEXTS + place + 2
    try:
        return plain.loads(region[start : min(start + length, at.TEXTS + 2 * at.HALF)])
    except plain.UnreadableError:
        return None


def foot(records: list[RankRecord]) -> bytes:
    """``records`` as the end of a file, whatever is before."""
    body = plain.dumps(records)
    return body + _FOOT.pack(len(body), _MAGIC)


def read_file(path: str) -> list[RankRecord]:
    """The records at the end of a file; UnreadableError if there are none. Runs nothing of it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be a pipe
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        data = file.read(size) if _FOOT.size <= size <= MOST_BYTES else b""
    return read_foot(data, path)


def read_foot(data: bytes, what: str) -> list[RankRecord]:
    """The records at the end of ``data``."""
    length, magic = _FOOT.unpack(data[-_FOOT.size :]) if len(data) >= _FOOT.size else (0, b"")
    if magic != _MAGIC or not 0 <= length <= len(data) - _FOOT.size:
        raise plain.UnreadableError(f"{what} is no file of the flight recorder")
    found = plain.loads(data[len(data) - _FOOT.size - length : -_FOOT.size])
    if type(found) is not list or not {*map(type, found)} <= {RankRecord}:
        raise plain.UnreadableError(f"{what} has no records at its end")
    return found
