"""A rank's record of its last ops, in memory that all ranks of its host map, and the code that reads it.

The region, which only the rank itself writes::

    0         ABOUT    length (int64), then plain data about the rank: the group, its ranks, processes
    4096      MESSAGES the last ENTRIES messages to all ranks, by number; peers read fields of them, too
              OTHERS   as many entries of all other ops: of two ranks, of hosts, on GPUs;
               their words are peer (-1: all ranks), tag, and the op's number of its kind
              LOG      generation (int64), then two halves of texts, used in turn: length (2 bytes), text

An entry is eight int64 words: its number, four words of the op, when it began and when it ended (monotonic
ns of the last tick, 1 to 10 ms before; 0 while it is running), and where in the log the texts of its op and
its call site are::

    generation << 48 | offset of the op << 24 | offset of the call site

A text is written once and used for as long as it is kept. When one half of the log is full, the other half
is begun anew. So the texts of an entry exist if its generation is the log's or the previous one.

The call site is the innermost frame outside interlace and torch. Its depth depends on the called function,
so the depth is remembered with the op, and only one frame is read then. An op whose steps
differ in call depth, as on several hosts, has several depths. All are remembered.

A reader may be a peer (in shared memory), another process, or a reader of files. It does not trust the
writer: every length and offset is checked before use, and an invalid text is shown as "?".
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeVar

from interlace.runtime.core import plain

T = TypeVar("T")

ENTRIES, ENTRY_WORDS = 256, 8
ENTRY, HALF, MOST_TEXT = 8 * ENTRY_WORDS, 24 << 10, 1 << 10
MESSAGES = 4096
OTHERS = MESSAGES + ENTRIES * ENTRY
LOG = OTHERS + ENTRIES * ENTRY
REGION_BYTES = LOG + 4096 + 2 * HALF
TEXTS = LOG + 8
BEGAN, ENDED = 5, 6  # words of an entry
GENERATION, OFFSET = 48, 24  # shifts
_OP = -1 << OFFSET

_INSIDE = ("interlace", "torch", "contextlib", "interlace_backend", "threading", "concurrent")
_MOST_OPS = 1024  # remembered; the operands of ranks make many
_RESERVE, _NOWHERE = MOST_TEXT + 4096, 1 << 30
_COUNT, _WORD = struct.Struct("<H"), struct.Struct("<q")
_now = functools.partial(time.clock_gettime_ns, 6)  # CLOCK_MONOTONIC_COARSE, as in machine code
_ENTRY, _frame = struct.Struct("<8q"), sys._getframe
_entry = _ENTRY.pack_into

Site = tuple[CodeType, int]
caller: contextvars.ContextVar[Site | None] = contextvars.ContextVar("caller", default=None)
"""The call site of an op that runs in another thread than its caller's."""


@functools.lru_cache(maxsize=4096)
def _inside(module: str | None) -> bool:
    return str(module).partition(".")[0] in _INSIDE


def outside(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """Return the innermost frame outside interlace and torch, from ``frame`` outwards, and its depth."""
    depth = 0
    while frame is not None and _inside(frame.f_globals.get("__name__")):
        frame, depth = frame.f_back, depth + 1
    return frame, depth


def called_from(function: Callable[[], T]) -> Callable[[], T]:
    """Return ``function`` for another thread; the ops that it begins have the present call site."""
    frame, _ = outside(_frame(1))
    site = None if frame is None else (frame.f_code, frame.f_lineno)

    def on_behalf() -> T:
        token = caller.set(site)
        try:
            return function()
        finally:
            caller.reset(token)

    return on_behalf


class FlightRecorder:
    """One rank's record, in ``region``."""

    def __init__(self, region: memoryview) -> None:
        self._bytes, self._words = region, region.cast("q")
        self._ops: dict[bytes | str, tuple[int, CodeType | None, int, int]] = {}
        self._depths: dict[bytes | str, set[int]] = {}
        self._sites: dict[int, int] = {}
        self._lines: dict[tuple[int, int], tuple[CodeType, int]] = {}  # keeps the code
        self._placed: dict[bytes, int] = {}
        self._generation, self._room, self._at = 0, HALF, 0
        self._others, self._lock = itertools.count(1), threading.RLock()
        self._numbers = (
            itertools.count(1),
            itertools.count(1),
        )  # for ops of two ranks and of all ranks

    def about(self, identity: object) -> None:
        text = plain.dumps(identity)
        if 8 + len(text) <= MESSAGES:
            self._bytes[8 : 8 + len(text)] = text
            self._words[0] = len(text)

    def told(self, op: bytes | str) -> int:
        """Return the last word of an entry of ``op``, which is its text or the message of its call."""
        try:
            depth, code, instruction, label = self._ops[op]
            frame = _frame(depth)
            if frame.f_lasti != instruction or frame.f_code is not code:  # another call site
                label = label & _OP | self._sites[id(frame.f_code) << 12 | frame.f_lasti]
        except (KeyError, ValueError):  # this thread's stack is not as deep
            label = self._learn_op(op)
        return label

    def begins(
        self, ring: int, number: int, one: int, two: int, three: int, four: int, label: int
    ) -> None:
        """Write entry ``number`` of MESSAGES or OTHERS."""
        at = ring + number % ENTRIES * ENTRY
        _entry(self._bytes, at, number, one, two, three, four, _now(), 0, label)

    def ended(self, number: int) -> None:
        self._words[(MESSAGES >> 3) + number % ENTRIES * ENTRY_WORDS + ENDED] = _now()

    def other(self, op: bytes | str, peer: int = -1, tag: int = 0) -> int:
        """Record the beginning of another op and return its entry's number. ``peer`` -1: all ranks."""
        number = next(self._others)
        count = next(self._numbers[peer < 0])
        self.begins(OTHERS, number, peer, tag, count, 0, self.told(op))
        return number

    def other_ended(self, number: int) -> None:
        at = (OTHERS >> 3) + number % ENTRIES * ENTRY_WORDS
        if self._words[at] == number:
            self._words[at + ENDED] = _now()

    def _learn_op(self, op: bytes | str) -> int:
        """Return where the texts of ``op`` and of its call site are; also remember the call depth."""
        with self._lock:
            place = caller.get()  # in a thread in which no depth leads to the caller
            for depth in self._depths.get(op, ()) if place is None else ():
                with contextlib.suppress(KeyError, ValueError):  # the stack is less deep this time
                    frame = _frame(depth + 1)
                    site = self._sites[id(frame.f_code) << 12 | frame.f_lasti]
                    return self._ops[op][3] & _OP | site
            found, depth = outside(_frame(2)) if place is None else (None, 0)
            return self._learn(op, place, found, depth)

    def _learn(
        self, op: bytes | str, place: Site | None, frame: FrameType | None, depth: int
    ) -> int:
        if self._room < _RESERVE or len(self._ops) >= _MOST_OPS:
            self._turn()
        known = self._ops.get(op)
        label = self._describe(op) if known is None else known[3] & _OP
        if place is not None:
            self._ops.setdefault(op, (_NOWHERE, None, -1, label))
            return label | self._site(*place)
        if frame is None:
            self._ops[op] = depth + 1, None, -1, label
            return label
        code = frame.f_code
        site = self._sites[id(code) << 12 | frame.f_lasti] = self._site(code, frame.f_lineno)
        self._depths.setdefault(op, set()).add(depth + 1)
        self._ops[op] = depth + 1, code, frame.f_lasti, label | site
        return label | site

    def _describe(self, op: bytes | str) -> int:
        """Return where the text of ``op`` is. ``op`` may be the message of its call."""
        name, terms = op, None
        if isinstance(op, bytes):
            name, terms, _ = plain.loads(op)  # a rank's own part may be long or private
        text = plain.dumps((name, terms, None))
        if len(text) > MOST_TEXT:
            text = plain.dumps((name[:99], None, None))
        return self._generation << GENERATION | self._put(text) << OFFSET

    def _site(self, code: CodeType, line: int) -> int:
        """Return the offset in the log of this line's text; the code object stays while it is kept."""
        found = self._lines.get((id(code), line))
        if found is None:
            text = plain.dumps((code.co_name[:99], code.co_filename[-400:], line))
            found = code, self._put(text)
            self._lines[id(code), line] = found
        return found[1]

    def _turn(self) -> None:
        """Begin the other half of the log."""
        self._generation += 1
        for kept in (self._ops, self._depths, self._sites, self._placed, self._lines):
            kept.clear()
        self._at, self._room = HALF * (self._generation & 1), HALF
        _WORD.pack_into(self._bytes, LOG, self._generation)

    def _put(self, text: bytes) -> int:
        if (found := self._placed.get(text)) is not None:
            return found
        at = TEXTS + self._at
        _COUNT.pack_into(self._bytes, at, len(text))
        self._bytes[at + 2 : at + 2 + len(text)] = text
        offset = self._placed[text] = 1 + self._at
        self._at, self._room = self._at + 2 + len(text), self._room - 2 - len(text)
        return offset


_FOOT = struct.Struct("<q8s")
_MAGIC = b"ilrecord"
MOST_BYTES = 64 << 20  # bytes of a file


@plain.record
@dataclass(frozen=True)
class PastOp:
    """An op of a rank. Times are in ns of the monotonic clock; ``ended`` is 0 while the op is running.

    ``terms`` are its call's; ``site`` is (function, file, line) or None; ``peer`` is the other rank
    of an op of two ranks, -1 if all ranks take part.
    """

    number: int
    op: str
    terms: object
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
    """The last ops of one rank of a group.

    ``ranks`` are the group's ranks on this host, as ranks of the job, and ``rank`` is an index into them;
    ``pids`` are their processes. ``whole`` are all ranks of a group on several hosts or on GPUs, whose ops
    are not messages of the host's ranks; otherwise empty. ``waits`` is the index of the rank for which this
    one has waited since ``since`` (s), or None. ``now`` and ``wall`` are the time of reading, in ns of the
    monotonic clock and since 1970.
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
            all(type(number) is tuple and {*map(type, number)} <= {int} for number in numbers)
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
            raise plain.UnreadableError("these bytes are not the record of a rank")

    @property
    def name(self) -> int:
        return int(self.ranks[self.rank])

    @property
    def pid(self) -> int:
        return int(self.pids[self.rank])

    @property
    def collectives(self) -> list[PastOp]:
        """Return the ops of all ranks in order, without the ones that hosts run on their behalf."""
        found = [op for op in self.others if op.peer < 0] if self.whole else self.messages
        return sorted(found, key=lambda op: op.number)

    @property
    def transfers(self) -> list[PastOp]:
        """Return the ops between two ranks, in order."""
        return sorted((op for op in self.others if op.peer >= 0), key=lambda op: op.number)


def _is_site(site: object) -> bool:
    return site is None or (type(site) is tuple and [*map(type, site)] == [str, str, int])


def read_rank(region: bytes, waits: int | None, since: float, failed: str) -> RankRecord:
    """Read the record in a ``region`` of memory; the rest is the rank's state. UnreadableError if none."""
    (length,) = _WORD.unpack_from(region)
    if not 0 < length <= MESSAGES - 8 or len(region) < REGION_BYTES:
        raise plain.UnreadableError(f"no record is in these {len(region)} bytes")
    identity = plain.loads(region[8 : 8 + length])
    if type(identity) is not tuple or len(identity) != 5:
        raise plain.UnreadableError("these bytes do not say whose record they are")
    messages, others = (_entries(region, start) for start in (MESSAGES, OTHERS))
    for_whom = None if waits is None or waits < 0 else waits
    clocks = time.monotonic_ns(), time.time_ns()
    return RankRecord(*identity, for_whom, since, failed, messages, others, *clocks)


def _entries(region: bytes, start: int) -> list[PastOp]:
    found = []
    entries = _ENTRY.iter_unpack(region[start : start + ENTRIES * ENTRY])
    for slot, (number, peer, tag, count, _, began, ended, label) in enumerate(entries):
        if number > 0 and number % ENTRIES == slot and began > 0:
            op, terms = _op(_text(region, label, label >> OFFSET))
            site = _text(region, label, label)
            site = site if _is_site(site) else None
            if start == MESSAGES:
                peer, tag, count = -1, 0, number
            found.append(PastOp(count, op, terms, site, began, max(ended, 0), peer, tag))
    return found


def _op(text: object) -> tuple[str, object]:
    if type(text) is tuple and len(text) == 3 and type(text[0]) is str:
        return text[0], text[1]
    return "?", None


def _text(region: bytes, label: int, offset: int) -> object:
    """Return the text at ``offset``, or None if there is none or it was replaced."""
    (generation,) = _WORD.unpack_from(region, LOG)
    place = (offset & ((1 << OFFSET) - 1)) - 1
    if generation - (label >> GENERATION) not in (0, 1) or not 0 <= place < 2 * HALF - 2:
        return None
    (length,) = _COUNT.unpack_from(region, TEXTS + place)
    start = TEXTS + place + 2
    try:
        return plain.loads(region[start : min(start + length, TEXTS + 2 * HALF)])
    except plain.UnreadableError:
        return None


def foot(records: list[RankRecord]) -> bytes:
    """Encode ``records`` as the end of a file, whatever comes before."""
    body = plain.dumps(records)
    return body + _FOOT.pack(len(body), _MAGIC)


def read_file(path: str) -> list[RankRecord]:
    """Read the records at the end of a file, without unpickling. UnreadableError if there are none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # the file may be a pipe
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        data = file.read(size) if _FOOT.size <= size <= MOST_BYTES else b""
    return read_foot(data, path)


def read_foot(data: bytes, source: str) -> list[RankRecord]:
    length, magic = _FOOT.unpack(data[-_FOOT.size :]) if len(data) >= _FOOT.size else (0, b"")
    if magic != _MAGIC or not 0 <= length <= len(data) - _FOOT.size:
        raise plain.UnreadableError(f"{source} is not a file of the flight recorder")
    found = plain.loads(data[len(data) - _FOOT.size - length : -_FOOT.size])
    if type(found) is not list or not {*map(type, found)} <= {RankRecord}:
        raise plain.UnreadableError(f"{source} has no records at its end")
    return found
