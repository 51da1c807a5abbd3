"""The control segments of a group on one host: small messages, counters and aborts in shared memory.

Every rank owns one segment. All ranks map it, and only the owner writes it, except for ABORTED, BELL and
RESULT. The words that follow the header page::

       0 SEQUENCE  int64, released by the owner: number of its last message
      64 ABORTED   int64, released by any rank: 1 + the rank that aborted the group, or 0
     128 LEFT      int64, released by the owner: 1 once it has closed the place
     192 REASON    length (int64) and text of the owner's own abort; written once, before ABORTED
    1280 ELSEWHERE  time (float64), length (int64) and text: the other group in which the owner waits
    1808 MEETING  int64, released by the owner: the group that it is about to join; length (int64) and bytes
         of its card, see ``rendezvous.py``
    2032 ATTEMPT, RESULT  int64, released by the owner: attempts to continue without ended ranks, and their
         outcome; the other ranks strike the owner off in RESULT, see ``rendezvous.py``
    2048 STAGED    int64, released by the owner: rounds whose data is in its ring
    2056 WANTED    int64, released by the owner: the ranks with which it wants to go on (``rendezvous.py``)
    2112 REDUCED   int64, released by the owner: rounds whose sums are in its ring
    2176 DONE      int64, released by the owner: rounds that it has read from all rings
    2240 ASLEEP    int64: the owner sleeps, or is about to, until rank n - 1 acts, or ANYONE
    2304 BELL      uint32, a futex: a rank that releases something while the owner sleeps increments it
    2432 MET       int64, released by the owner: meetings that it has reached in ops without a ring
    2496 CORE      int64: 1 + the core on which the owner runs, see :class:`CoreSpread`
    2504 WAITS  int64: 1 + the rank that the owner waits for; 0 at the beginning
    2512 SINCE  float64: the time of the last write of WAITS, by the monotonic clock
    2520 HOW    int64: how the owner computes, and since which message, see ``shm/message_steps.py``
    2528 CLAIM, SEEN  int64, released by the owner: the rank that it waits for, and the circle of waits that
         it has seen, see ``waiting.py``; ELSEWHERE has the text of CLAIM
    2560 MAIL_ASLEEP, 2624 its bell    as ASLEEP and BELL, for messages of two ranks (``shm/boxes.py``)
    2688 WRITES  bytes up to 4096, stored by the last rank: how all write, see ``shm/caches.py``
    4096 area for messages with even numbers
    4096 + AREA    area for messages with odd numbers
    after them     PLACES areas for the small data of a message, used in turn
    after them     counters of messages between two ranks, see ``shm/boxes.py``
    after them     the owner's record, see ``recorder.py``; its entry of a message has the message's length,
                   extent, range and offset of shared memory
    after them     rings for messages between two ranks; their memory is allocated at first use

A rank writes a message into its own segment only, and all ranks read it there. So an all-gather is one
release and W - 1 acquires per rank, for any W.

Two areas, used in turn, are enough. A rank overwrites message n - 2 with message n after it has finished
n - 1, so it has seen message n - 1 of every peer. A peer sends n - 1 only after it has read every n - 2.
So each rank that could still need the old message has announced, by a release that was acquired here, that
it does not. Two would also be enough for data, but writing lines that another core has just read takes
several times as long as writing lines that have left its cache meanwhile.
"""

import ctypes
import os
import platform
import struct
import sys
import time
from collections.abc import Callable, Sequence

from interlace.runtime.processes.recorder import (
    ENTRIES,
    ENTRY_WORDS,
    MESSAGES,
    REGION_BYTES,
    FlightRecorder,
)
from interlace.runtime.processes.segment import Mapping

LONGEST_SLEEP = 1e-3

FUTEX_NUMBERS = {"x86_64": 202, "AMD64": 202, "aarch64": 98}
_FUTEX = FUTEX_NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
FUTEX_WAIT, FUTEX_WAKE = 0, 1
EVERYONE = 1 << 30  # threads to wake
BELL = 64  # bytes from the word ASLEEP to the futex
ANYONE = -1  # value of ASLEEP

_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wake(asleep: int) -> None:
    """Ring the bell of the rank whose ASLEEP word is at this address."""
    if _FUTEX is not None:
        futex = asleep + BELL
        ctypes.c_uint32.from_address(futex).value += 1
        _syscall(_FUTEX, ctypes.c_void_p(futex), FUTEX_WAKE, EVERYONE, None, None, 0)


class Bell:
    """This rank's bell, by the address of its ASLEEP word: one futex per rank.

    A rank that wants to sleep sets its ASLEEP word, polls once more, and then waits on its BELL. A rank
    that releases anything reads the ASLEEP words afterwards and rings for those that are set. A processor
    may read ASLEEP before the release is visible; then the bell does not ring. Therefore a sleep lasts at
    most a millisecond, which is the only cost of a missed bell.

    Without a futex (not Linux on x86-64 or AArch64) the rank sleeps for a short time instead.
    """

    def __init__(self, asleep: int) -> None:
        self._own_asleep = ctypes.c_int64.from_address(asleep)
        self._bell = ctypes.c_uint32.from_address(asleep + BELL)
        self._address = ctypes.c_void_p(asleep + BELL)

    def sleep(self, seconds: float, ready: Callable[[], bool]) -> None:
        """Sleep until the bell rings, at most ``seconds``. Return at once if ``ready()``."""
        seconds = min(seconds, LONGEST_SLEEP)
        if _FUTEX is None:
            time.sleep(seconds)
            return
        rung = self._bell.value
        self._own_asleep.value = ANYONE
        try:
            if not ready():
                timeout = ctypes.byref(_Timespec(0, int(seconds * 1e9)))
                still = ctypes.c_uint32(rung)
                _syscall(_FUTEX, self._address, FUTEX_WAIT, still, timeout, None, 0)
        finally:
            self._own_asleep.value = 0


SECONDS_BETWEEN = 5e-3  # between two nudges of one rank

# A PyDLL keeps the GIL: releasing it is not worth while for a call of a tenth of a microsecond.
_core = getattr(ctypes.PyDLL(None), "sched_getcpu", None)


def move(cores: Sequence[int], rank: int, allowed: Sequence[int]) -> int | None:
    """Return the core to which ``rank`` should move, or None. ``cores``: every rank's; unknown is negative.

    One of the ranks that see the same ``cores`` and have the same ``allowed`` cores moves. With cores
    ``[0, 0, 0, 1]`` and ``allowed`` 0 and 1, rank 2 moves to 1.
    """
    own_core = cores[rank]
    crowd = cores.count(own_core)
    if (
        crowd < 2
        or own_core not in allowed
        or rank != max(r for r, c in enumerate(cores) if c == own_core)
    ):
        return None
    counts = {core: cores.count(core) for core in sorted(allowed)}
    fullest = max(counts, key=counts.__getitem__)
    emptiest = min(counts, key=counts.__getitem__)
    return emptiest if own_core == fullest and crowd - counts[emptiest] >= 2 else None


class CoreSpread:
    """The cores of all ranks of a group. ``words[r]`` is one int64 that only rank r writes.

    If one core runs more ranks than another, a rank moves (docs/explanation/performance.md has times). A
    waiting rank keeps its core busy (politely), so an operating system that counts busy threads may leave
    three ranks on one core and one on the other for a long time. Only ranks know that they work in step.

    Each rank publishes now and then on which core it runs. If a move makes the distribution more even, the
    last rank on the fullest core moves to the emptiest one. A move is a nudge: the thread is bound to the
    other core and at once allowed all its cores again, so the operating system decides afterwards. A rank
    never moves to a core outside the thread's own affinity.

    If a published core is out of date when another rank reads it, there is one nudge too few or too many.
    """

    def __init__(self, words: Sequence[memoryview], rank: int) -> None:
        self._words, self._own, self._rank = words, words[rank], rank
        self._next = 0.0
        self._works = _core is not None and hasattr(os, "sched_setaffinity") and len(words) > 1

    def say(self) -> None:
        """Publish on which core this thread runs."""
        if self._works:
            self._own[0] = 1 + _core()  # type: ignore[misc]  # memory begins with 0: not said yet

    def look(self) -> None:
        """Move this thread to another core if the ranks are then spread more evenly."""
        if not self._works:
            return
        cores = [word[0] - 1 for word in self._words]
        if cores.count(cores[self._rank]) < 2:
            return
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SECONDS_BETWEEN
        try:
            allowed = os.sched_getaffinity(0)
            target = move(cores, self._rank, tuple(allowed))
            if target is not None:
                os.sched_setaffinity(0, (target,))
                try:
                    self._own[0] = 1 + target
                finally:
                    os.sched_setaffinity(0, allowed)
        except OSError:  # not permitted, or the allowed cores have changed meanwhile
            self._works = False


Buffer = bytes | memoryview

LARGEST_MESSAGE = 64 << 10
SMALL_DATA = 64 << 10
PLACES = 16
LONGEST_REASON = 1 << 10
BOX_BYTES, BOXES_BYTES = 256, 16 << 10  # for one rank; for the largest number of ranks

_LEFT, _REASON, _ELSEWHERE, _MEETING = 128, 192, 1280, 1808
_LONGEST_ELSEWHERE, _LONGEST_CARD = 512, 208
ATTEMPT, RESULT, WANTED = 2032 // 8, 2040 // 8, 2056 // 8
SEQUENCE, ABORTED = 0, 64 // 8
STAGED, REDUCED, DONE, MET, HOW = 2048 // 8, 2112 // 8, 2176 // 8, 2432 // 8, 2520 // 8
CLAIM, SEEN = 2528 // 8, 2536 // 8
_ASLEEP, _CORE, _WAITS, _SINCE, _MAIL, _WRITES = 2240, 2496, 2504, 2512, 2560, 2688
_AREAS = 4096
_TEXT = 64
AREA = LARGEST_MESSAGE
_INT64, _FLOAT64 = struct.Struct("<q"), struct.Struct("<d")
_DATA = (_AREAS + 2 * AREA + 4095) & ~4095
BOXES = _DATA + PLACES * SMALL_DATA
RECORD = BOXES + BOXES_BYTES
RINGS = RECORD + REGION_BYTES + 4095 & ~4095
RINGS_BYTES = 16 << 20
CONTROL_BYTES = RINGS + RINGS_BYTES
HEADERS = RECORD + MESSAGES  # the messages' entries of the record


def _area(sequence: int) -> int:
    return _AREAS + (sequence & 1) * AREA


def check_size(payload: bytes, rank: int, doing: str) -> None:
    """Raise ValueError if ``payload`` is too long for one message."""
    if len(payload) > LARGEST_MESSAGE:
        raise ValueError(
            f"rank {rank}: payload of {doing} has {len(payload)} bytes, "
            f"an exchange takes at most {LARGEST_MESSAGE}"
        )


def said(segment: Buffer) -> tuple[int, float, str]:
    """Return what the owner of the segment at this address has published, see :meth:`Control.says_of`."""
    (word,), (since,) = _INT64.unpack_from(segment, _WAITS), _FLOAT64.unpack_from(segment, _SINCE)
    (length,) = _INT64.unpack_from(segment, _REASON)
    text = bytes(segment[_REASON + _TEXT : _REASON + _TEXT + min(max(length, 0), LONGEST_REASON)])
    return word - 1, since, text.decode(errors="replace")


class Control:
    """All control segments of a group, as one rank sees them. They stay mapped while this object lives."""

    def __init__(self, rank: int, mappings: Sequence[Mapping]) -> None:
        self._rank = rank
        self._bytes = [mapping.array().data for mapping in mappings]
        # here, because it needs Triton, and `inspect` does not
        from interlace.runtime.processes.atomics import Words

        self.words = [Words(mapping.data_address, mapping.array().data) for mapping in mappings]
        self.views = [words.view for words in self.words]
        self.bases = [mapping.data_address for mapping in mappings]
        self.peers = [peer for peer in range(len(self.bases)) if peer != rank]
        self.own_asleep = self.bases[rank] + _ASLEEP
        self.asleep = [self.bases[peer] + _ASLEEP for peer in self.peers]
        self.bell, self.mail_bell = Bell(self.own_asleep), Bell(self.mail_asleep(rank))
        peers = [self.views[peer] for peer in self.peers]
        self._sleepers = list(zip(peers, self.asleep, strict=True))
        self.spread = CoreSpread([view[_CORE // 8 : _CORE // 8 + 1] for view in self.views], rank)
        self._own = self.words[rank]
        self.own_view = self._own.view
        self.written: list[object] = [None, None]
        """The payload last written to the even and to the odd area."""
        self.recorder = FlightRecorder(self.record(rank))

    def record(self, rank: int) -> memoryview:
        return self._bytes[rank][RECORD : RECORD + REGION_BYTES]

    @property
    def writes(self) -> memoryview:
        return self._bytes[-1][_WRITES:_AREAS]

    def write(self, sequence: int, payload: bytes) -> None:
        """Write message ``sequence``; its entry is already in the record."""
        area = _area(sequence)
        self.written[sequence & 1] = None
        self._bytes[self._rank][area : area + len(payload)] = payload
        self.written[sequence & 1] = payload

    def send(self, sequence: int) -> None:
        """Release message ``sequence`` and all earlier writes."""
        self._own.release(SEQUENCE, sequence)
        self.ring()

    def ring(self) -> None:
        """Wake every peer that sleeps until this rank acts. Called after each release."""
        caller = 1 + self._rank
        for view, asleep in self._sleepers:
            if view[_ASLEEP // 8] in (ANYONE, caller):
                wake(asleep)

    def ring_for(self, peer: int) -> None:
        """Wake ``peer`` if it sleeps until a message moves; once, however long it takes to get a core."""
        if self.views[peer][_MAIL // 8]:
            self.views[peer][_MAIL // 8] = 0  # before the bell: the peer may sleep again by then
            wake(self.mail_asleep(peer))

    def mail_asleep(self, rank: int) -> int:
        """Return the address of ``rank``'s ASLEEP word for messages of two ranks."""
        return self.bases[rank] + _MAIL

    def length(self, rank: int) -> int:
        """Return the address of the length of ``rank``'s message 0. Message n uses entry n % ENTRIES."""
        return self.bases[rank] + HEADERS + 8

    def area(self, rank: int) -> int:
        """Return the address of ``rank``'s area for even messages; the odd one is AREA bytes later."""
        return self.bases[rank] + _AREAS

    def message(self, peer: int, sequence: int) -> bytes:
        """Return message ``sequence`` of ``peer``: a sent one that is not two messages old."""
        area = _area(sequence)
        return bytes(self._bytes[peer][area : area + self._header(peer, sequence, 1)])

    def says(self, peer: int, sequence: int, payload: bytes) -> bool:
        area = _area(sequence)
        return (
            self._header(peer, sequence, 1) == len(payload)
            and self._bytes[peer][area : area + len(payload)] == payload
        )

    def _header(self, peer: int, sequence: int, word: int) -> int:
        return int(self.views[peer][(HEADERS >> 3) + sequence % ENTRIES * ENTRY_WORDS + word])

    def extent(self, peer: int, sequence: int) -> int:
        return self._header(peer, sequence, 2)

    def where(self, peer: int, sequence: int) -> tuple[int, int]:
        """Return the shared range and the offset that ``peer`` sent with message ``sequence``."""
        return self._header(peer, sequence, 3), self._header(peer, sequence, 4)

    def data(self, peer: int) -> int:
        """Return the address of the first place for small data of ``peer``."""
        return self.bases[peer] + _DATA

    def waits(self, rank: int, now: float) -> None:
        self.own_view[_WAITS // 8] = 1 + rank
        _FLOAT64.pack_into(self._bytes[self._rank], _SINCE, now)

    def say_elsewhere(self, text: str, now: float) -> None:
        """Publish that this rank waits in an op of another group."""
        block, message = self._bytes[self._rank], text.encode()[:_LONGEST_ELSEWHERE]
        block[_ELSEWHERE + 16 : _ELSEWHERE + 16 + len(message)] = message
        _INT64.pack_into(block, _ELSEWHERE + 8, len(message))
        _FLOAT64.pack_into(block, _ELSEWHERE, now)

    def elsewhere(self, rank: int, since: float) -> str:
        """Return where else ``rank`` waits, or "" if it has published nothing ``since`` then."""
        (when,) = _FLOAT64.unpack_from(self._bytes[rank], _ELSEWHERE)
        return self.claim_text(rank) if when >= since else ""

    def make_claim(self, claim: int, text: str) -> None:
        """Publish for which rank this one waits, see ``waiting.py``."""
        self.say_elsewhere(text, 0.0)
        self._own.release(CLAIM, claim)

    def claim(self, rank: int) -> int:
        return self.words[rank].acquired(CLAIM)

    def see(self, circle: int) -> None:
        """Publish that this rank has seen the circle with this hash."""
        self._own.release(SEEN, circle)

    def seen(self, rank: int) -> int:
        return self.words[rank].acquired(SEEN)

    def claim_text(self, rank: int) -> str:
        """Return the text that ``rank`` has published last about where it waits."""
        theirs = self._bytes[rank]
        (length,) = _INT64.unpack_from(theirs, _ELSEWHERE + 8)
        text = bytes(theirs[_ELSEWHERE + 16 : _ELSEWHERE + 16 + min(length, _LONGEST_ELSEWHERE)])
        return text.decode(errors="replace")

    def says_of(self, rank: int) -> tuple[int, float, str]:
        """Return for whom ``rank`` waits, since when, and why it aborted the group, as published last."""
        return said(self._bytes[rank])

    def post(self, key: int, card: bytes) -> None:
        """Show ``card`` to ranks that know ``key``. It replaces the previous card."""
        block, words = self._bytes[self._rank], _MEETING // 8
        self._own.release(words, 0)
        self.own_view[words + 1] = len(card[:_LONGEST_CARD])
        block[_MEETING + 16 : _MEETING + 16 + len(card[:_LONGEST_CARD])] = card[:_LONGEST_CARD]
        self._own.release(words, key)

    def posted(self, rank: int, key: int) -> bytes | None:
        if self.words[rank].acquired(_MEETING // 8) != key:
            return None
        length = min(self.views[rank][_MEETING // 8 + 1], _LONGEST_CARD)
        card = bytes(self._bytes[rank][_MEETING + 16 : _MEETING + 16 + length])
        return card if self.words[rank].acquired(_MEETING // 8) == key else None

    def awaited(self, rank: int, since: float) -> int | None:
        """Return the rank for which ``rank`` waits, or None if it has published nothing ``since`` then."""
        word, (when,) = (
            self.views[rank][_WAITS // 8],
            _FLOAT64.unpack_from(self._bytes[rank], _SINCE),
        )
        return int(word) - 1 if when >= since and 0 < word <= len(self.bases) else None

    def abort(self, reason: str) -> None:
        """Abort the group on every rank. The first abort keeps its reason."""
        if self.reason(self._rank):
            return
        block = self._bytes[self._rank]
        text = (reason or "no reason given").encode()[:LONGEST_REASON]
        block[_REASON + _TEXT : _REASON + _TEXT + len(text)] = text
        _INT64.pack_into(block, _REASON, len(text))
        if not self._own.acquired(ABORTED):
            for words in self.words:
                words.release(ABORTED, self._rank + 1)

    def aborted_by(self) -> tuple[int, str] | None:
        word = self._own.acquired(ABORTED)
        return (word - 1, self.reason(word - 1)) if word else None

    def reason(self, rank: int) -> str:
        """Return why ``rank`` aborted the group, or "" if it did not."""
        return said(self._bytes[rank])[2]

    def leave(self) -> None:
        """Publish that this rank has left the group."""
        self._own.release(_LEFT // 8, 1)

    def has_left(self, rank: int) -> bool:
        return bool(self.words[rank].acquired(_LEFT // 8))
