"""Boxes of shared memory, through which messages go from one rank to another, and what moves their bytes.

A rank has two rings for every other, of which the counters are in its control segment::

      0 PUT      int64, released by the owner: bytes of records that it has put into this ring
     64 TAKEN    int64, released by the owner: bytes that it has taken from the other's ring for it
    128 SENT, 192 RECEIVED    the same of the second ring, in pieces

The first has records: bytes of the record, tag, bytes of the message, number of its dtype, shift (int64),
and the data if it is short. A record does not go on at the ring's beginning: a negative length says how
much of the ring's end is left out. Larger messages go through the second, in pieces of equal size. The
memory of each is allocated when it is used first. A :class:`Pipe` is one direction of the second, as one of
its ends sees it; machine code (``machine_code.ll``) moves pieces, or Python.

A rank that sleeps until one of its boxes changes says so in words of its own (``Control.mail_bell``): it
may sleep in an op at the same time.
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
"""Words of the terms of a move: bytes of a piece, pieces of a ring; polls, turns given away, ns without
progress; as in ``machine_code.py``; the address of the own word ASLEEP, or 0 not to sleep. And of a
pipe: addresses of the counters of pieces that this end and the other have done; this end's count, and
how many slots further on in the ring piece 0 would be; the ring, the message's memory, its bytes, those
moved; whether
this end puts or takes pieces, and whether past the caches; the other end's word ASLEEP."""
_SPINS, _IDLE = _MOVE["SPINS"], _MOVE["IDLE"]
_DONE, _SHIFT, _RING, _MEMORY, _TOTAL, _MOVED, _PUTS, _PAST = range(
    _MOVE["DONE"], _MOVE["PAST"] + 1
)
_PIPE = 11  # words
_RECORD = struct.Struct("<5q")
_SLOTS = 4  # pieces of a ring, at least
_MOST = 2 << 20  # bytes of both rings
_SHORT = 8 << 10  # what is kept until it is asked for is copied twice
_PIECE = 64 << 10  # bytes, at most

# That of ctypes gives the GIL up for every few bytes.
copy = ctypes.PyDLL(None).memmove
copy.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


class Record(NamedTuple):
    """What begins a message. ``data`` is the address of its bytes, None if they come in pieces.

    ``shift``: of the slots of its pieces, see ``Pipe``.
    """

    tag: int
    nbytes: int
    dtype: int
    shift: int
    data: int | None
    end: int  # of the bytes of records that have been taken with this one


class Pipe:
    """One end of the ring of pieces from one rank to another. One message at a time is on its way."""

    def __init__(self, control: Control, boxes: "Boxes", own: int, peer: int, puts: bool) -> None:
        ours, theirs = (_SENT, _RECEIVED) if puts else (_RECEIVED, _SENT)
        self._ours = control.words[own], boxes.word(peer) + ours
        self._theirs = control.words[peer], boxes.word(own) + theirs
        owner, other = (own, peer) if puts else (peer, own)
        ring = control.bases[owner] + boxes.ring(other, pieces=True)
        self._piece, self._slots, self._puts = boxes.piece, boxes.slots, puts
        self.words = (ctypes.c_int64 * _PIPE)(
            *(words.address + 8 * index for words, index in (self._ours, self._theirs)),
            0, 0, ring, 0, 0, 0, puts, 0, control.mail_asleep(peer),
        )  # fmt: skip
        self.address = ctypes.addressof(self.words)
        self._ring = functools.partial(control.ring_for, peer)

    def shift(self) -> int:
        """The shift of the message that is announced next: if the ring is empty it begins at slot 0."""
        words, (theirs, index) = self.words, self._theirs
        if self.finished and theirs.acquired(index) == words[_DONE]:
            words[_SHIFT] = -words[_DONE] % self._slots
        return words[_SHIFT]

    def begin(self, address: int, nbytes: int, shift: int, *, past: bool) -> None:
        """A message, to or from ``address``; 0 lets its bytes go. ``past`` the caches or through them."""
        words = self.words
        words[_SHIFT] = shift
        words[_MEMORY], words[_TOTAL] = address, nbytes
        words[_MOVED], words[_PAST] = 0, past

    def let_go(self) -> None:
        """The rest of the message goes nowhere."""
        self.words[_MEMORY] = 0

    @property
    def finished(self) -> bool:
        return self.words[_MOVED] >= self.words[_TOTAL]

    def move(self) -> bool:
        """Move the next piece, by Python, if it can be; whether it was."""
        words = self.words
        done, moved = words[_DONE], words[_MOVED]
        (theirs, index), (ours, own_index) = self._theirs, self._ours
        ahead = done - theirs.acquired(index)
        if self.finished or not (ahead < self._slots if self._puts else ahead < 0):
            return False
        size = min(self._piece, words[_TOTAL] - moved)
        slot = words[_RING] + (done + words[_SHIFT]) % self._slots * self._piece
        if memory := words[_MEMORY]:
            both = (slot, memory + moved) if self._puts else (memory + moved, slot)
            ctypes.memmove(*both, size)
        words[_DONE], words[_MOVED] = done + 1, moved + size
        ours.release(own_index, done + 1)
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
        machine_code.compiled(machine_code.module_ir("move", words=_MOVE), "move")
    )
    return move


class Boxes:
    """All boxes of a group, as one rank sees them. Not for several threads at once, but for ``wanted``."""

    def __init__(self, group: HostGroup) -> None:
        size, self._rank, control = group.world_size, group.rank, group.control
        assert control is not None
        assert size * BOX_BYTES <= BOXES_BYTES
        self._group, self._control = group, control
        self._both = min(_MOST, RINGS_BYTES // size) & -PAGE
        self._bytes = self._both // 8 & -PAGE  # of the ring of records
        self.inline = min(_SHORT, self._bytes // _SLOTS - _RECORD.size & ~63)  # most in a record
        self.piece = min(_PIECE, (self._both - self._bytes) // _SLOTS & ~63)
        self.slots = (self._both - self._bytes) // self.piece
        self.outputs = Thresholds.of(own_caches(), size).outputs  # from so much on past the caches
        self._put, self._taken = [0] * size, [0] * size
        self._pipes: dict[tuple[int, bool], Pipe] = {}
        self._allocated: set[tuple[int, bool]] = set()
        self._wanted = ctypes.c_int64()  # how many threads want to use this
        self._watched = (ctypes.c_int64 * (2 * (1 + 2 * size)))()
        self._watched[0] = ctypes.addressof(self._wanted)
        for at, peer in enumerate(control.peers, 1):
            self._watched[2 * at] = control.bases[peer] + 8 * (self.word(self._rank) + _PUT)
        own = self.word(self._rank) + _PUT
        self._puts = [(peer, control.views[peer], own) for peer in control.peers]
        self._at = {peer: 2 * at + 1 for at, peer in enumerate(control.peers, 1)}
        self._move = _machine_code()
        # With more ranks than cores a turn is better slept through than given away again and again.
        self._spins, yields = (machine_code.PAUSES, machine_code.TURNS) if group.spins else (1, 0)
        self._terms = [
            (ctypes.c_int64 * 9)(self.piece, self.slots, 0, yields, 0, *CROWD, asleep)
            for asleep in (0, control.mail_asleep(self._rank))
        ]

    def word(self, other: int) -> int:
        """The index of the first word of anybody's box for ``other``."""
        return BOXES + other * BOX_BYTES >> 3

    def ring(self, other: int, *, pieces: bool) -> int:
        """Where anybody's ring of pieces, or of records, for ``other`` is in its segment."""
        return RINGS + other * self._both + (self._bytes if pieces else 0)

    def prepare(self, peer: int, *, pieces: bool) -> None:
        """See that there is memory of the own ring for ``peer``. Raises InterlaceError if it is short."""
        if (peer, pieces) not in self._allocated:
            assert self._group.segment is not None
            nbytes = self._both - self._bytes if pieces else self._bytes
            self._group.segment.reserve(self.ring(peer, pieces=pieces), nbytes)
            self._allocated.add((peer, pieces))

    # -- records -------------------------------------------------------------------------------

    def put(self, peer: int, tag: int, nbytes: int, dtype: int, data: int, shift: int) -> bool:
        """Put a record, with data that is short, into the box for ``peer``; False if there is no room."""
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
        """Whether a part of the record that is put next has left: here records leave whole."""
        return False

    def _room(self, peer: int) -> int:
        """Bytes of the own records that ``peer`` has taken."""
        return self._control.words[peer].acquired(self.word(self._rank) + _TAKEN)

    def arrived(self) -> list[int]:
        """The peers in whose boxes there is something new."""
        taken = self._taken
        return [peer for peer, view, index in self._puts if view[index] > taken[peer]]

    def peek(self, peer: int) -> Record | None:
        """The next record in ``peer``'s box, if there is one. It stays there until it is taken."""
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
            raise InterlaceError(f"rank {peer} has put what is no message into its box")
        return None

    def take(self, peer: int, record: Record) -> None:
        """``record`` is needed no more. Who waits for room is woken: there was little then."""
        before, index = self._taken[peer], self.word(self._rank) + _PUT
        self._taken[peer] = self._watched[self._at[peer]] = record.end
        self._control.words[self._rank].release(self.word(peer) + _TAKEN, record.end)
        if self._control.views[peer][index] - before > self._bytes // 2:
            self._control.ring_for(peer)

    # -- pieces --------------------------------------------------------------------------------

    def pipe(self, peer: int, *, puts: bool) -> Pipe:
        """This rank's end of the ring to ``peer``, or from it."""
        found = self._pipes.get((peer, puts))
        if found is None:
            found = self._pipes[peer, puts] = Pipe(self._control, self, self._rank, peer, puts)
        return found

    def start(self, pipe: Pipe) -> None:
        """Move what can be moved now, once around the ring at most: its caller may have more to do."""
        words, total = pipe.words, pipe.words[_TOTAL]
        words[_TOTAL] = min(total, self.slots * self.piece)
        self.move([pipe], (), 0.0, sleep=False)
        words[_TOTAL] = total

    def move(
        self, pipes: Sequence[Pipe], blocked: Sequence[int], seconds: float, *, sleep: bool,
        peers: Sequence[int] = (),
    ) -> bool:  # fmt: skip
        """Move pieces until a message has gone whole, a record came, or one for ``blocked`` has room.

        Or until somebody wants this (:meth:`want`): True. False if for ``seconds`` nothing has moved.
        For whom the caller waits, ``peers``, makes no difference here.
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

        def changed() -> bool:
            return any(word.value > self._watched[2 * k + 1] for k, word in enumerate(words))

        def moved() -> bool:
            return any([pipe.move() for pipe in pipes])

        until = time.monotonic() + seconds
        while True:
            if any(pipe.finished for pipe in pipes) or changed():
                return True
            if moved():
                until = time.monotonic() + seconds
            elif time.monotonic() >= until:
                return False
            elif sleep:
                self._control.mail_bell.sleep(LONGEST_SLEEP, lambda: changed() or moved())
            else:
                give_core_away()

    def want(self, threads: int) -> None:
        """So many other threads want to use this: end the :meth:`move` of the one that does."""
        self._wanted.value = threads
        if threads:
            wake(self._control.mail_asleep(self._rank))
