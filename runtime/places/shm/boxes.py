"""Boxes of shared memory, through which messages go from one rank to another, and the code that moves them.

A rank has two rings for every other rank. Their counters are in its control segment::

      0 PUT      int64, released by the owner: bytes of records that it has put into this ring
     64 TAKEN    int64, released by the owner: bytes that it has taken from the other rank's ring for it
    128 SENT, 192 RECEIVED    the same for the second ring, in pieces

The first ring has records: bytes of the record, tag, bytes of the message, number of its dtype, shift
(int64), and the data if it is short. A record does not wrap around at the ring's end: a negative length
says how much of the ring's end is skipped. Longer messages go through the second ring, in pieces of equal
size. The memory of each ring is allocated at its first use. A :class:`Pipe` is one direction of the second
ring, as one of its ends sees it. Machine code (``machine_code.ll``) or Python moves the pieces.

A rank that sleeps until one of its boxes changes says so in separate words (``Control.mail_bell``), because
it may sleep in an op at the same time.
"""

import ctypes
import functools
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.shm import machine_code
from interlace.runtime.places.shm.caches import Thresholds, own_caches
from interlace.runtime.processes.control import (
    BOX_BYTES,
    BOXES,
    BOXES_BYTES,
    LONGEST_SLEEP,
    RINGS,
    RINGS_BYTES,
    Control,
    wake,
)
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.segment import PAGE
from interlace.runtime.processes.waiting import CROWD, give_core_away

_PUT, _TAKEN, _SENT, _RECEIVED = 0, 8, 16, 24  # words
_MOVE = {
    name: number
    for names in (
        "PIECE SLOTS SPINS YIELDS IDLE LONG_YIELD CROWDED CROWDED_UNTIL ASLEEP",
        "OURS THEIRS DONE SHIFT RING MEMORY TOTAL MOVED PUTS PAST THEIR_ASLEEP",
    )
    for number, name in enumerate(names.split())
}
"""Words of the terms of a move: bytes of a piece, pieces of a ring; polls, yields, ns without progress, as
in ``machine_code.py``; the address of this rank's word ASLEEP, or 0 not to sleep. Words of a pipe:
addresses of the counters of pieces done by this end and by the other; this end's count; by how many slots
piece 0 is shifted in the ring; the ring, the message's memory, its bytes, the bytes moved; whether this end
puts or takes pieces; whether past the caches; the other end's word ASLEEP."""
_SPINS, _IDLE = _MOVE["SPINS"], _MOVE["IDLE"]
_DONE, _SHIFT, _RING, _MEMORY, _TOTAL, _MOVED, _PUTS, _PAST = range(
    _MOVE["DONE"], _MOVE["PAST"] + 1
)
_PIPE = 11  # words
_RECORD = struct.Struct("<5q")
_SLOTS = 4  # pieces of a ring, at least
_MOST = 2 << 20  # bytes of both rings
_SHORT = 8 << 10  # data that is kept until a receive asks for it is copied twice
_PIECE = 64 << 10  # bytes, at most

# ctypes.memmove would release the GIL for every few bytes.
copy = ctypes.PyDLL(None).memmove
copy.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


class Record(NamedTuple):
    """The beginning of a message. ``data`` is the address of its bytes, None if they come in pieces."""

    tag: int
    nbytes: int
    dtype: int
    shift: int
    data: int | None
    end: int  # the count of bytes of all records up to and including this one


class Pipe:
    """One end of the ring of pieces from one rank to another. It moves one message at a time."""

    def __init__(self, control: Control, boxes: "Boxes", rank: int, peer: int, puts: bool) -> None:
        own_word, theirs = (_SENT, _RECEIVED) if puts else (_RECEIVED, _SENT)
        self._ours = control.words[rank], boxes.word(peer) + own_word
        self._theirs = control.words[peer], boxes.word(rank) + theirs
        owner, other = (rank, peer) if puts else (peer, rank)
        ring = control.bases[owner] + boxes.ring(other, pieces=True)
        self._piece, self._slots, self._puts = boxes.piece, boxes.slots, puts
        self.words = (ctypes.c_int64 * _PIPE)(
            *(words.address + 8 * index for words, index in (self._ours, self._theirs)),
            0, 0, ring, 0, 0, 0, puts, 0, control.mail_asleep(peer),
        )  # fmt: skip
        self.address = ctypes.addressof(self.words)
        self._ring = functools.partial(control.ring_for, peer)

    def shift(self) -> int:
        """The shift for the message that is announced next: it begins at slot 0 of an empty ring."""
        words, (theirs, index) = self.words, self._theirs
        if self.finished and theirs.acquired(index) == words[_DONE]:
            words[_SHIFT] = -words[_DONE] % self._slots
        return words[_SHIFT]

    def begin(self, address: int, nbytes: int, shift: int, *, past: bool) -> None:
        """Begin a message to or from ``address``, through the caches or ``past``; 0 drops its bytes."""
        words = self.words
        words[_SHIFT] = shift
        words[_MEMORY], words[_TOTAL] = address, nbytes
        words[_MOVED], words[_PAST] = 0, past

    def let_go(self) -> None:
        self.words[_MEMORY] = 0

    @property
    def finished(self) -> bool:
        return self.words[_MOVED] >= self.words[_TOTAL]

    def move(self) -> bool:
        """Move the next piece in Python, if possible. Return whether it was moved."""
        words = self.words
        done, moved = words[_DONE], words[_MOVED]
        (theirs, index), (own_words, own_index) = self._theirs, self._ours
        ahead = done - theirs.acquired(index)
        if self.finished or not (ahead < self._slots if self._puts else ahead < 0):
            return False
        size = min(self._piece, words[_TOTAL] - moved)
        slot = words[_RING] + (done + words[_SHIFT]) % self._slots * self._piece
        if memory := words[_MEMORY]:
            both = (slot, memory + moved) if self._puts else (memory + moved, slot)
            ctypes.memmove(*both, size)
        words[_DONE], words[_MOVED] = done + 1, moved + size
        own_words.release(own_index, done + 1)
        self._ring()
        return True


@functools.cache
def _machine_code() -> Callable[..., int] | None:
    if not machine_code.available():
        return None
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p,
        ctypes.c_int64,
    )  # fmt: skip
    move: Callable[..., int] = kind(
        machine_code.compile_ir(machine_code.module_ir("move", words=_MOVE), "move")
    )
    return move


class Boxes:
    """All boxes of a group, as one rank sees them. For one thread at a time, except ``wanted``."""

    def __init__(self, group: HostGroup) -> None:
        size, self._rank, control = group.world_size, group.rank, group.control
        assert control is not None
        assert size * BOX_BYTES <= BOXES_BYTES
        self._group, self._control = group, control
        self._both = min(_MOST, RINGS_BYTES // size) & -PAGE
        self._bytes = self._both // 8 & -PAGE  # size of the ring of records
        self.inline = min(_SHORT, self._bytes // _SLOTS - _RECORD.size & ~63)  # most in a record
        self.piece = min(_PIECE, (self._both - self._bytes) // _SLOTS & ~63)
        self.slots = (self._both - self._bytes) // self.piece
        self.outputs = Thresholds.of(own_caches(), size).outputs  # larger ones go past the caches
        self._put, self._taken = [0] * size, [0] * size
        self._pipes: dict[tuple[int, bool], Pipe] = {}
        self._allocated: set[tuple[int, bool]] = set()
        self._wanted = ctypes.c_int64()  # the number of threads that want to use this object
        self._watched = (ctypes.c_int64 * (2 * (1 + 2 * size)))()
        self._watched[0] = ctypes.addressof(self._wanted)
        for at, peer in enumerate(control.peers, 1):
            self._watched[2 * at] = control.bases[peer] + 8 * (self.word(self._rank) + _PUT)
        put_word = self.word(self._rank) + _PUT
        self._puts = [(peer, control.views[peer], put_word) for peer in control.peers]
        self._at = {peer: 2 * at + 1 for at, peer in enumerate(control.peers, 1)}
        self._move = _machine_code()
        # With more ranks than cores, sleeping is better than yielding again and again.
        self._spins, yields = (machine_code.PAUSES, machine_code.TURNS) if group.spins else (1, 0)
        self._terms = [
            (ctypes.c_int64 * 9)(self.piece, self.slots, 0, yields, 0, *CROWD, asleep)
            for asleep in (0, control.mail_asleep(self._rank))
        ]

    def word(self, other: int) -> int:
        """Return the index of the first word of any rank's box for ``other``."""
        return BOXES + other * BOX_BYTES >> 3

    def ring(self, other: int, *, pieces: bool) -> int:
        """Return the offset of any rank's ring of pieces, or of records, for ``other`` in its segment."""
        return RINGS + other * self._both + (self._bytes if pieces else 0)

    def prepare(self, peer: int, *, pieces: bool) -> None:
        """Allocate this rank's ring for ``peer``. Raises InterlaceError if memory is short."""
        if (peer, pieces) not in self._allocated:
            assert self._group.segment is not None
            nbytes = self._both - self._bytes if pieces else self._bytes
            self._group.segment.reserve(self.ring(peer, pieces=pieces), nbytes)
            self._allocated.add((peer, pieces))

    def put(self, peer: int, tag: int, nbytes: int, dtype: int, data: int, shift: int) -> bool:
        """Put a record, with short data, into the box for ``peer``. Return False if there is no room."""
        words, base = self._control.words[self._rank], self.word(peer)
        ring = self.ring(peer, pieces=False)
        short = nbytes <= self.inline
        length = _RECORD.size + (nbytes + 7 & ~7 if short else 0)
        before = self._put[peer]
        at = before % self._bytes
        skipped = self._bytes - at if self._bytes - at < length else 0
        after = before + skipped + length
        if after - self._room(peer) > self._bytes:
            return False
        if skipped:
            words.view[ring + at >> 3] = -skipped
            at = 0
        first = ring + at >> 3
        _RECORD.pack_into(words.bytes, 8 * first, length, tag, nbytes, dtype, shift)
        if short and nbytes:
            copy(words.address + 8 * first + _RECORD.size, data, nbytes)
        self._put[peer] = after
        words.release(base + _PUT, after)
        self._control.ring_for(peer)
        return True

    def begun(self, peer: int) -> bool:
        """Return whether a part of the next record has left. Here records leave whole, so it is False."""
        return False

    def _room(self, peer: int) -> int:
        """Return the bytes of this rank's records that ``peer`` has taken."""
        return self._control.words[peer].acquired(self.word(self._rank) + _TAKEN)

    def arrived(self) -> list[int]:
        """Return the peers whose boxes have something new."""
        taken = self._taken
        return [peer for peer, view, index in self._puts if view[index] > taken[peer]]

    def peek(self, peer: int) -> Record | None:
        """Return the next record in ``peer``'s box, or None. It stays there until it is taken."""
        words, base, taken = self._control.words[peer], self.word(self._rank), self._taken[peer]
        ring = self.ring(self._rank, pieces=False)
        put = words.acquired(base + _PUT)
        while put > taken:
            at = taken % self._bytes
            first = ring + at >> 3
            length, tag, nbytes, dtype, shift = _RECORD.unpack_from(words.bytes, 8 * first)
            if length == at - self._bytes:
                taken -= length
                continue
            short = 0 <= nbytes <= self.inline
            if nbytes < 0 or length != _RECORD.size + (nbytes + 7 & ~7 if short else 0):
                break
            data = words.address + 8 * first + _RECORD.size if short else None
            return Record(tag, nbytes, dtype, shift, data, taken + length)
        if put > taken:
            raise InterlaceError(f"rank {peer} sent an invalid message header")
        return None

    def take(self, peer: int, record: Record) -> None:
        """Free ``record``. Wakes a rank that waits for room, if there was little."""
        before, index = self._taken[peer], self.word(self._rank) + _PUT
        self._taken[peer] = self._watched[self._at[peer]] = record.end
        self._control.words[self._rank].release(self.word(peer) + _TAKEN, record.end)
        if self._control.views[peer][index] - before > self._bytes // 2:
            self._control.ring_for(peer)

    def pipe(self, peer: int, *, puts: bool) -> Pipe:
        """Return this rank's end of the ring to ``peer``, or from it."""
        found = self._pipes.get((peer, puts))
        if found is None:
            found = self._pipes[peer, puts] = Pipe(self._control, self, self._rank, peer, puts)
        return found

    def start(self, pipe: Pipe) -> None:
        """Move the available pieces, at most once around the ring: the caller may have more to do."""
        words, total = pipe.words, pipe.words[_TOTAL]
        words[_TOTAL] = min(total, self.slots * self.piece)
        self.move([pipe], (), 0.0, sleep=False)
        words[_TOTAL] = total

    def move(
        self, pipes: Sequence[Pipe], blocked: Sequence[int], seconds: float, *, sleep: bool,
        peers: Sequence[int] = (),
    ) -> bool:  # fmt: skip
        """Move pieces until a message is complete, a record arrives, or one for ``blocked`` has room.

        Also returns when another thread wants this object (:meth:`want`). Returns True then, and False if
        nothing moved for ``seconds``. ``peers``, for whom the caller waits, are not used here.
        """
        watched, count = self._watched, 1 + len(self._at)
        for peer in blocked:
            words, index = self._control.words[peer], self.word(self._rank) + _TAKEN
            watched[2 * count], watched[2 * count + 1] = words.address + 8 * index, self._room(peer)
            count += 1
        if self._move is None:
            return self._by_python(pipes, count, seconds, sleep=sleep)
        terms = self._terms[sleep]
        terms[_IDLE] = int(seconds * 1e9)
        terms[_SPINS] = self._spins if seconds else 0
        addresses = (ctypes.c_int64 * len(pipes))(*[pipe.address for pipe in pipes])
        return self._move(terms, addresses, len(pipes), watched, count) >= 0

    def _by_python(self, pipes: Sequence[Pipe], count: int, seconds: float, *, sleep: bool) -> bool:
        words = [ctypes.c_int64.from_address(self._watched[2 * k]) for k in range(count)]

        def has_changed() -> bool:
            return any(word.value > self._watched[2 * k + 1] for k, word in enumerate(words))

        def has_moved() -> bool:
            return any([pipe.move() for pipe in pipes])

        until = time.monotonic() + seconds
        while True:
            if any(pipe.finished for pipe in pipes) or has_changed():
                return True
            if has_moved():
                until = time.monotonic() + seconds
            elif time.monotonic() >= until:
                return False
            elif sleep:
                self._control.mail_bell.sleep(LONGEST_SLEEP, lambda: has_changed() or has_moved())
            else:
                give_core_away()

    def want(self, threads: int) -> None:
        """Announce that so many other threads want to use this object, which ends a :meth:`move`."""
        self._wanted.value = threads
        if threads:
            wake(self._control.mail_asleep(self._rank))
