"""Messages between two ranks of a group on several hosts: ``shm/mail.py`` over shared memory and TCP.

``Mail`` and ``Messages`` work here as for the ranks of one host. :class:`SpanningBoxes` are boxes of shared
memory for the ranks of this host, and two connections for each other rank. One carries records, with the
data of short messages; the other carries the bytes of longer ones, in the order of their records. So a
message that no receive has asked for stays in the connection's buffers and at its sender, and later records
arrive all the same.

A thread cannot wait for shared memory and for connections at once. If it waits for ranks of one kind, it
sleeps until one of them has something, and checks the others now and then, more often if it waits for both.

When a connection ends, its rank has left or is gone; ``links.py`` knows which.
"""

import ctypes
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from typing import Any

from interlace.runtime.core.errors import AbortedError, InterlaceError
from interlace.runtime.places.hosts.links import HostLinks
from interlace.runtime.places.shm.boxes import Boxes, Pipe, Record
from interlace.runtime.processes.control import LONGEST_SLEEP, Control
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.waiting import Kind, Patience

_RECORD = struct.Struct("<4q")  # tag, bytes of the message, its dtype, bytes that follow here
_SHORT = 8 << 10
_BUFFER = 64 << 10  # for received records
_AT_ONCE = 1 << 20  # bytes of one message, before other messages have their turn
_BOTH_SECONDS = 1e-4  # between two checks of ranks of either kind
_SEND, _RECEIVE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, socket.MSG_DONTWAIT


class SpanningGroup:
    """The group of all ranks, as messages see it, and its Blame; see HostGroup and Blame."""

    within = False

    def __init__(self, links: HostLinks, host: HostGroup) -> None:
        self._links, self._host = links, host
        self._local = {rank: index for index, rank in enumerate(host.names)}
        self.rank = self.name = links.rank
        self.world_size, self.bound = links.world_size, links.bound
        self.check_usable = links.check
        self.boxes: SpanningBoxes | None = None
        self.awaited: Sequence[int] = ()
        """The rank for which a message was waited for at the last check."""

    @property
    def blame(self) -> "SpanningGroup":
        """This object. It is not stored, because it would keep itself alive."""
        return self

    def new_boxes(self) -> "SpanningBoxes":
        self.boxes = SpanningBoxes(self._links, self._host, self._local)
        return self.boxes

    @property
    def control(self) -> Control | None:
        """The control segments of this host's ranks; None after the group is left."""
        return None if self._links.closed else self._host.control

    def patience(self, *, kind: Kind, bound: float, since: float) -> Patience:
        """Return the state of one wait. Deadlocks are detected within one host only."""
        judge: Any = self
        return Patience(self.rank, bound, self.interruption, judge=judge, since=since)

    def interruption(self, doing: str, waited_for: Sequence[int]) -> InterlaceError | None:
        """Return why a wait for these ranks can never end, or None."""
        self.awaited = waited_for
        if (failure := self._links.failure) is not None:
            return failure
        if self._links.closed:
            return InterlaceError(f"rank {self.rank}: {doing}: the group is closed")
        for peer in waited_for:
            if self._over(peer):
                return self._links.broken(peer, ConnectionError("closed"), doing)
        return None

    def has_left(self, rank: int) -> bool:
        """Return whether it has left and all that it sent has arrived."""
        return self._links.has_left(rank) and self._over(rank)

    def _over(self, rank: int) -> bool:
        local = self._local.get(rank)
        if local is not None:
            return rank != self.rank and self._host.has_left(local)
        return self.boxes is not None and self.boxes.far[rank].over()

    def abort(self, reason: str) -> None:
        self._links.fail(AbortedError(f"rank {self.rank} aborted the group: {reason}"))

    def culprits(self, waited_for: Sequence[int]) -> list[int]:
        """Return the ranks for which these ranks wait in the end."""
        return sorted({self._links.culprit(rank) for rank in waited_for})

    def whereabouts(self, ranks: Sequence[int]) -> str:
        """Return "": where ranks wait instead is known only within one host."""
        return ""

    def ended(self, error: InterlaceError) -> None:
        """Handle a wait that ended with ``error``: end the waits of all ranks."""
        self._links.fail(error)


class FarPipe:
    """One direction of the connection for pieces; see ``boxes.Pipe``."""

    def __init__(self, wire: socket.socket, puts: bool) -> None:
        self.wire, self.puts, self.ended, self.broken = wire, puts, False, False
        self._memory: memoryview | None = None
        self._total, self._busy = 0, False
        # Bytes moved before, and by each call since: an exception of a signal handler may come after any
        # step of Python, but not between such a call and its count.
        self._moved: tuple[int, list[int]] = 0, []

    def shift(self) -> int:
        return 0

    def begin(self, address: int, nbytes: int, shift: int, *, past: bool) -> None:
        memory = (ctypes.c_ubyte * nbytes).from_address(address) if address else None
        self._memory = None if memory is None else memoryview(memory).cast("B")
        self._moved, self._total = (0, []), nbytes

    def let_go(self) -> None:
        self._memory = None

    @property
    def finished(self) -> bool:
        return self._count() == self._total

    def _count(self) -> int:
        before, counts = self._moved
        self._moved = moved, _ = before + sum(counts), list[int]()
        return moved

    def move(self) -> bool:
        """Move some of its bytes, if possible now. Return whether any were moved."""
        moved, wire = self._count(), self.wire
        size = min(self._total - moved, _AT_ONCE)
        if not size or self.ended or self._busy:
            return False
        if self._memory is None:  # the bytes are dropped
            some = memoryview(bytearray(min(size, _BUFFER)))
        else:
            some = self._memory[moved : moved + size]
        call = wire.send if self.puts else wire.recv_into
        flags = _SEND if self.puts else _RECEIVE
        step = map(call, *((some,), (flags,)) if self.puts else ((some,), (0,), (flags,)))
        try:
            self._busy = True  # a message that a signal handler begins moves nothing here
            self._moved[1].extend(step)
        except BlockingIOError:
            return False
        except OSError:
            self.ended = self.broken = True
        finally:
            self._busy = False
        self.ended = self.ended or self._count() == moved
        return not self.ended


class FarBox:
    """The connections with a rank on another host: ``records``, and ``pieces``."""

    def __init__(
        self, peer: int, records: socket.socket, pieces: socket.socket, inline: int
    ) -> None:
        self.peer, self.wire, self._inline = peer, records, inline
        self.put_pipe, self.take_pipe = FarPipe(pieces, True), FarPipe(pieces, False)
        self.readable = self.ended = self.broken = False
        self.begun = False
        self._unsent = b""  # the rest of the record that is being sent
        self._buffer = bytearray(_BUFFER)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._first = self._last = 0  # the range of unread bytes in the buffer

    def put(self, tag: int, nbytes: int, dtype: int, data: int) -> bool:
        """Send a record with short data. Return False if not all of it can be sent now; then call it again.

        If a part of it has been sent (``begun``), the same record must be the next one again.
        """
        if self.begun:
            self.begun = not self._push()
            return not self.begun
        follows = nbytes if nbytes <= self._inline else 0
        self._unsent = _RECORD.pack(tag, nbytes, dtype, follows) + ctypes.string_at(data, follows)
        whole = len(self._unsent)
        if self._push():
            return True
        self.begun = len(self._unsent) < whole
        return False

    def _push(self) -> bool:
        try:
            count = self.wire.send(self._unsent, _SEND)
        except BlockingIOError:
            return False
        except OSError:  # reported once all received bytes are read
            self.broken = True
            return False
        self._unsent = self._unsent[count:]
        return not self._unsent

    def peek(self) -> Record | None:
        while True:
            have = self._last - self._first
            if have >= _RECORD.size:
                tag, nbytes, dtype, follows = _RECORD.unpack_from(self._buffer, self._first)
                if nbytes < 0 or follows not in {0, nbytes} or follows > _SHORT:
                    raise InterlaceError(f"rank {self.peer} sent an invalid message header")
                if have >= (length := _RECORD.size + follows):
                    data = self._address + self._first + _RECORD.size
                    short = data if follows == nbytes else None
                    return Record(tag, nbytes, dtype, 0, short, self._first + length)
            if not self._fill():
                return None

    def take(self, record: Record) -> None:
        self._first = record.end

    def _fill(self) -> bool:
        """Receive more records. Return whether there were any."""
        if not self.readable or self.ended:
            return False
        have = self._last - self._first
        if self._first:
            self._buffer[:have] = self._buffer[self._first : self._last]
            self._first, self._last = 0, have
        room = memoryview(self._buffer)[have:]
        try:
            count = self.wire.recv_into(room, 0, _RECEIVE)
        except BlockingIOError:
            count = -1
        except OSError:
            count, self.broken = 0, True
        self.ended = count == 0
        self.readable = count == len(room)
        self._last += max(count, 0)
        return count > 0

    @property
    def unread(self) -> bool:
        return self.readable or self._last > self._first

    def over(self) -> bool:
        """Return whether nothing can arrive any more: all is read, and a connection broke or both ended."""
        self.readable = True  # read again
        if self.peek() is not None:
            return False
        pipes = (self.put_pipe, self.take_pipe)
        try:
            more = self.take_pipe.wire.recv(1, _RECEIVE | socket.MSG_PEEK)
        except BlockingIOError:
            more = None
        except OSError:
            self.broken, more = True, b""
        if more:
            return False
        broken = self.broken or any(pipe.broken for pipe in pipes)
        return broken or (self.ended and more is not None)


class SpanningBoxes:
    """The boxes of a group on several hosts; see ``shm/boxes.py``. ``local`` are this host's ranks."""

    def __init__(self, links: HostLinks, host: HostGroup, local: dict[int, int]) -> None:
        self._rank, self._local, self._names = links.rank, local, host.names
        self._near = Boxes(host)
        self.inline, self.outputs = min(_SHORT, self._near.inline), self._near.outputs
        self.far = {
            peer: FarBox(peer, links.records.wire(peer), links.pieces.wire(peer), self.inline)
            for peer in links.peers
            if peer not in local
        }
        self._records, self._by_number = select.poll(), dict[int, FarBox]()
        for box in self.far.values():
            self._by_number[number := box.wire.fileno()] = box
            self._records.register(number, select.POLLIN)
        self._wanted, self._event = 0, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._event).atexit = False

    def prepare(self, peer: int, *, pieces: bool) -> None:
        if peer in self._local:
            self._near.prepare(self._local[peer], pieces=pieces)

    def put(self, peer: int, tag: int, nbytes: int, dtype: int, data: int, shift: int) -> bool:
        if peer in self._local:
            return self._near.put(self._local[peer], tag, nbytes, dtype, data, shift)
        return self.far[peer].put(tag, nbytes, dtype, data)

    def begun(self, peer: int) -> bool:
        return peer in self.far and self.far[peer].begun

    def arrived(self) -> list[int]:
        near = [self._names[index] for index in self._near.arrived()]
        for number, _ in self._records.poll(0):
            self._by_number[number].readable = True
        return near + [peer for peer, box in self.far.items() if box.unread]

    def peek(self, peer: int) -> Record | None:
        local = self._local.get(peer)
        return self.far[peer].peek() if local is None else self._near.peek(local)

    def take(self, peer: int, record: Record) -> None:
        if peer in self._local:
            self._near.take(self._local[peer], record)
        else:
            self.far[peer].take(record)

    def pipe(self, peer: int, *, puts: bool) -> Pipe | FarPipe:
        if peer in self._local:
            return self._near.pipe(self._local[peer], puts=puts)
        return self.far[peer].put_pipe if puts else self.far[peer].take_pipe

    def want(self, threads: int) -> None:
        self._wanted = threads
        self._near.want(threads)
        if threads:
            os.eventfd_write(self._event, 1)

    def start(self, pipe: Pipe | FarPipe) -> None:
        if isinstance(pipe, Pipe):
            self._near.start(pipe)
        else:
            pipe.move()

    def move(
        self, pipes: Sequence[Pipe | FarPipe], blocked: Sequence[int], seconds: float, *,
        sleep: bool, peers: Sequence[int] = (),
    ) -> bool:  # fmt: skip
        """See ``Boxes.move``. ``peers``: the ranks for which the caller waits."""
        far = [pipe for pipe in pipes if isinstance(pipe, FarPipe)]
        near = [pipe for pipe in pipes if isinstance(pipe, Pipe)]
        near_blocked = [self._local[peer] for peer in blocked if peer in self._local]
        beyond = bool(far) or any(peer in self.far for peer in (*peers, *blocked))
        here = bool(near or near_blocked) or any(peer in self._local for peer in peers)
        turn = _BOTH_SECONDS if here and beyond else LONGEST_SLEEP if here else seconds
        until = time.monotonic() + seconds
        while True:
            moved = any([pipe.move() for pipe in far])
            if self._wanted or any(pipe.finished for pipe in far):
                return True
            now = time.monotonic()
            until = now + seconds if moved else until
            left = 0.0 if moved else min(turn, max(0.0, until - now))
            if self._look(0.0 if here else left, far, blocked):
                return True
            if len(self._local) > 1:
                left = left if here else 0.0
                if self._near.move(near, near_blocked, left, sleep=sleep and left > 0):
                    return True
            if not moved and now >= until:
                return False

    def _look(self, seconds: float, pipes: Sequence[FarPipe], blocked: Sequence[int]) -> bool:
        """Wait until a connection is usable. Return whether there is a record, or room for one."""
        poll, boxes, wanted = select.poll(), dict[int, FarBox](), dict[int, int]()
        poll.register(self._event, select.POLLIN)
        for peer, box in self.far.items():
            if not box.ended:
                boxes[number := box.wire.fileno()] = box
                poll.register(number, select.POLLIN | select.POLLOUT * (peer in blocked))
        for pipe in pipes:
            if not pipe.ended:
                events = select.POLLOUT if pipe.puts else select.POLLIN
                wanted[number] = wanted.get(number := pipe.wire.fileno(), 0) | events
                poll.register(number, wanted[number])
        found = False
        for number, events in poll.poll(seconds * 1e3):
            if number == self._event:
                os.eventfd_read(number)
            elif number in boxes:
                found, box = True, boxes[number]
                box.readable = box.readable or bool(events & ~select.POLLOUT)
        return found
