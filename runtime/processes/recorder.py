"""The writer of a rank's record: what it did last, written into memory that all ranks of its host map.

The region, which only the rank itself writes::

    0         ABOUT    length (int64), then who the rank is, as plain data: the group, its ranks, processes
    4096      MESSAGES the last ENTRIES messages to all ranks, by number; also what peers read of them
              OTHERS   as many entries of what are no such messages: ops of two ranks, of hosts, on GPUs;
               their words are peer (-1: all ranks), tag, and the op's number of its kind
              LOG      generation (int64), then two halves of texts, used in turn: length (2 bytes), text

An entry is eight int64 words: number, four of the op's own, when it began and when it ended (monotonic ns
of the last tick, 1 to 10 ms before; 0 while it is under way), and where in the log its op and its call
site are::

    generation << 48 | offset of the op << 24 | offset of the call site

A text is written once for as long as it is kept; a half is begun anew when the other is full, so the texts
of an entry are there if its generation is the log's or the one before.

The call site is the innermost frame outside of interlace and torch. How deep it is depends on what the
caller has called, so it is remembered with the op: only one frame is then looked at. An op that has steps
of its own call, as on several hosts, has several depths, all of which are remembered.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import struct
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeVar

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
_MOST_OPS = 1024  # remembered; the parts of ranks make many
_RESERVE, _NOWHERE = MOST_TEXT + 4096, 1 << 30
_COUNT, _WORD = struct.Struct("<H"), struct.Struct("<q")
_now = functools.partial(time.clock_gettime_ns, 6)  # CLOCK_MONOTONIC_COARSE, as machine code
_entry, _frame = struct.Struct("<8q").pack_into, sys._getframe

Site = tuple[CodeType, int]
caller: contextvars.ContextVar[Site | None] = contextvars.ContextVar("caller", default=None)
"""The call site of an op that runs in another thread than its caller's."""


@functools.lru_cache(maxsize=4096)
def _inside(module: str | None) -> bool:
    return str(module).partition(".")[0] in _INSIDE


def outside(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """The innermost frame from ``frame`` on that is not of interlace or torch, and how many are within."""
    depth = 0
    while frame is not None and _inside(frame.f_globals.get("__name__")):
        frame, depth = frame.f_back, depth + 1
    return frame, depth


def called_from(function: Callable[[], T]) -> Callable[[], T]:
    """``function``, for another thread: what it begins is called from here."""
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
        self._lines: dict[tuple[int, int], tuple[CodeType, int]] = {}  # keeps what has the address
        self._placed: dict[bytes, int] = {}
        self._generation, self._room, self._at = 0, HALF, 0
        self._others, self._lock = itertools.count(1), threading.RLock()
        self._numbers = itertools.count(1), itertools.count(1)  # of ops of two ranks, of all

    def about(self, who: object) -> None:
        """Say who the rank is."""
        text = plain.dumps(who)
        if 8 + len(text) <= MESSAGES:
            self._bytes[8 : 8 + len(text)] = text
            self._words[0] = len(text)

    def told(self, op: bytes | str) -> int:
        """The last word of an entry of ``op``: its text, or the message of its call."""
        try:
            depth, code, instruction, told = self._ops[op]
            frame = _frame(depth)
            if frame.f_lasti != instruction or frame.f_code is not code:  # not where it was last
                told = told & _OP | self._sites[id(frame.f_code) << 12 | frame.f_lasti]
        except (KeyError, ValueError):  # so deep is nothing in this thread
            told = self._learned(op)
        return told

    def begins(
        self, ring: int, number: int, one: int, two: int, three: int, four: int, told: int
    ) -> None:
        """Write entry ``number`` of MESSAGES or OTHERS."""
        at = ring + number % ENTRIES * ENTRY
        _entry(self._bytes, at, number, one, two, three, four, _now(), 0, told)

    def ended(self, number: int) -> None:
        """The op of message ``number`` has ended."""
        self._words[(MESSAGES >> 3) + number % ENTRIES * ENTRY_WORDS + ENDED] = _now()

    def other(self, op: bytes | str, peer: int = -1, tag: int = 0) -> int:
        """Another op begins; its entry's number. ``peer``: with whom, -1 for all ranks."""
        number = next(self._others)
        count = next(self._numbers[peer < 0])
        self.begins(OTHERS, number, peer, tag, count, 0, self.told(op))
        return number

    def other_ended(self, number: int) -> None:
        at = (OTHERS >> 3) + number % ENTRIES * ENTRY_WORDS
        if self._words[at] == number:
            self._words[at + ENDED] = _now()

    def _learned(self, op: bytes | str) -> int:
        """Where the texts of ``op`` and of its call site are; for the callee of what it began in."""
        with self._lock:
            place = caller.get()  # in a thread where no depth leads to the caller
            for depth in self._depths.get(op, ()) if place is None else ():
                with contextlib.suppress(KeyError, ValueError):  # not as deep this time
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
        told = self._described(op) if known is None else known[3] & _OP
        if place is not None:
            self._ops.setdefault(op, (_NOWHERE, None, -1, told))
            return told | self._site(*place)
        if frame is None:
            self._ops[op] = depth + 1, None, -1, told
            return told
        code = frame.f_code
        site = self._sites[id(code) << 12 | frame.f_lasti] = self._site(code, frame.f_lineno)
        self._depths.setdefault(op, set()).add(depth + 1)
        self._ops[op] = depth + 1, code, frame.f_lasti, told | site
        return told | site

    def _described(self, op: bytes | str) -> int:
        """Where the text of ``op`` is, which may be the message of its call."""
        name, terms = op, None
        if isinstance(op, bytes):
            name, terms, _ = plain.loads(op)  # a rank's own part may be long, or nobody's business
        text = plain.dumps((name, terms, None))
        if len(text) > MOST_TEXT:
            text = plain.dumps((name[:99], None, None))
        return self._generation << GENERATION | self._put(text) << OFFSET

    def _site(self, code: CodeType, line: int) -> int:
        """The offset in the log of the text of this line, of code that stays while that is kept."""
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
        """The offset in the log at which ``text`` is from now on."""
        if (found := self._placed.get(text)) is not None:
            return found
        at = TEXTS + self._at
        _COUNT.pack_into(self._bytes, at, len(text))
        self._bytes[at + 2 : at + 2 + len(text)] = text
        offset = self._placed[text] = 1 + self._at
        self._at, self._room = self._at + 2 + len(text), self._room - 2 - len(text)
        return offset
