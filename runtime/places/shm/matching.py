"""The messages in flight between this rank and others, matched with the receives that ask for them.

A message begins with a record in a box of shared memory (``boxes.py``), which includes short data; longer
data follows in pieces. Messages of one sender follow one another. A short one that no receive has asked for
is kept until one does, so tags may be received in any order. A longer one stays with its sender meanwhile.
It is kept, too, if a later message is asked for, or if a waiting thread here has nothing else to do,
because its sender may wait for its end. Without memory to keep it, it stays with its sender.

An object is for one thread at a time. If an exception interrupts :meth:`Messages.advance` (a signal
handler's may come anywhere) while there is something to do, the group is aborted, because its state is
unknown.
"""

import ctypes
import functools
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace.runtime.core.call import MessageEnd, mismatch
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.core.stream import NOTHING, Outcome
from interlace.runtime.places.shm.boxes import Boxes, Pipe, Record, copy

_REFUSALS = {-1: ValueError, -2: TypeError}  # by tag
_NUMBER = {
    value: zlib.crc32(str(value).encode())  # the same in every version of torch
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_DTYPES = {number: dtype for dtype, number in _NUMBER.items()}


@functools.cache
def _outcome(source: int) -> Outcome:
    """Return the outcome of a receive from ``source``."""
    return Outcome(None, None, lambda: source)


@dataclass(eq=False, slots=True)
class Sending:
    """A message to be sent. ``future`` is None for a refusal, whose end is not awaited."""

    tensor: torch.Tensor
    peer: int
    tag: int
    future: MessageEnd | None
    shift: int = 0


@dataclass(eq=False, slots=True)
class Receiving:
    """A message that a receive asks for, from ``peer`` or from any rank."""

    tensor: torch.Tensor
    peer: int | None
    tag: int
    future: MessageEnd

    def fits(self, peer: int, tag: int) -> bool:
        return self.tag == tag and (self.peer is None or self.peer == peer)


@dataclass(eq=False, slots=True)
class _Arriving:
    """A message whose record has arrived; ``whole`` if all of it has."""

    peer: int
    tag: int
    nbytes: int
    dtype: torch.dtype
    shift: int = 0
    wanted: Receiving | None = None
    buffer: torch.Tensor | None = None  # if no receive had asked for it when its data came
    whole: bool = False


@dataclass(eq=False)
class _Traffic:
    """The messages in flight between this rank and another."""

    outgoing: deque[Sending] = field(default_factory=deque)  # without a record yet
    leaving: deque[Sending] = field(default_factory=deque)  # in pieces, one after another
    incoming: deque[_Arriving] = field(default_factory=deque)  # in pieces
    put: Pipe | None = None  # of the first that leaves
    take: Pipe | None = None  # of the first that arrives, once it has a place

    @property
    def over(self) -> bool:
        return not (self.outgoing or self.leaving or self.incoming)


class Messages:
    """All messages of a group that this rank sends or receives, through ``boxes`` or an object like
    them."""

    def __init__(self, group: Any, boxes: Any, refused: Callable[[Exception], object]) -> None:
        self._group, self._rank, self._refused = group, group.rank, refused
        self.boxes: Boxes = boxes
        self._traffic: dict[int, _Traffic] = {}  # only peers with messages in flight
        self._all_traffic: defaultdict[int, _Traffic] = defaultdict(_Traffic)
        self._begun: deque[Sending | Receiving] = deque()
        self._advancing = self._changing = False
        self._ends: deque[tuple[MessageEnd, Outcome, Exception | None]] = deque()
        self._awaited = set[MessageEnd]()  # all whose end was not reported yet
        self._receiving: list[Receiving] = []
        self._kept: list[_Arriving] = []

    @property
    def unasked(self) -> bool:
        """Return whether a message waits for a receive, and later messages with it."""
        return any(t.incoming and t.take is None for t in [*self._traffic.values()])

    @property
    def leaving(self) -> bool:
        """Return whether an outgoing message is awaited, or may be."""
        sends = [s for t in [*self._traffic.values()] for s in (*t.outgoing, *t.leaving)]
        return any(sending.future is not None for sending in sends)

    def futures(self) -> list[MessageEnd]:
        """Return the ends that a thread may await."""
        return [*self._awaited]

    def move(self, seconds: float, *, sleep: bool, peers: Sequence[int] = ()) -> bool:
        """Move pieces until there is something to handle. Return False if nothing moves for ``seconds``.

        ``peers``: the ranks for which the caller waits.
        """
        under_way = [
            *self._traffic.items()
        ]  # a message that a signal handler begins is moved by the next call
        pipes = [t.put for _, t in under_way if t.put is not None and t.leaving]
        pipes += [t.take for _, t in under_way if t.take is not None]
        blocked = [peer for peer, t in under_way if t.outgoing]
        return self.boxes.move(pipes, blocked, seconds, sleep=sleep, peers=peers)

    def advance(self, begins: Sending | Receiving | None = None, *, idle: bool = False) -> None:
        """Handle all that has happened, and the message that ``begins``. ``idle``: nothing did for a while.

        Ends are reported at its end, because their callbacks may begin messages. A message that a signal
        handler begins meanwhile is handled at its end, too.
        """
        if begins is not None:
            self._begun.append(begins)
            if begins.future is not None:
                self._awaited.add(begins.future)
        if self._advancing:
            return
        self._changing = False
        try:
            self._advancing = True
            self._advance(idle)
            while self._begun:
                self._advance(idle)
        except BaseException as error:
            if self._changing:
                what = f"{type(error).__name__}: {error}".removesuffix(": ")
                self._group.abort(f"an exception while messages moved: {what}")
            raise
        finally:
            self._advancing = False
        if self._ends:
            self._tell()

    def _advance(self, idle: bool) -> None:
        self._changing = bool(self._changing or self._begun or self._traffic)
        while self._begun:
            begins = self._begun.popleft()
            if isinstance(begins, Sending):
                self._begin_to_send(begins.peer, begins)
            else:
                self._begin_to_receive(begins)
        if self._traffic:
            for peer, traffic in [*self._traffic.items()]:
                self._announce(peer, traffic)
                self._see_to_pieces(traffic)
        for peer in self.boxes.arrived():
            self._changing = True
            while (found := self.boxes.peek(peer)) is not None and self._read(peer, found):
                self.boxes.take(peer, found)
        if self._traffic:
            for peer, traffic in [*self._traffic.items()]:
                while traffic.incoming and traffic.take is None:
                    self._place(peer, traffic, idle)
                    if traffic.take is None:
                        break
                    self._see_to_pieces(traffic)
                if traffic.over:
                    del self._traffic[peer]

    def _with(self, peer: int) -> _Traffic:
        """Return the traffic with ``peer``, which is kept from now on."""
        traffic = self._traffic[peer] = self._all_traffic[peer]
        return traffic

    def _ended(
        self, future: MessageEnd | None, outcome: Outcome = NOTHING, error: Exception | None = None
    ) -> None:
        """Give ``future`` its outcome, or ``error``, once all else has been handled."""
        if future is not None:
            self._ends.append((future, outcome, error))

    def _tell(self) -> None:
        """Report the known ends. A callback may report the same end, and others."""
        while self._ends:
            end = future, outcome, error = self._ends[0]
            if future.settled:
                future.tell()  # an exception may have interrupted it before
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(outcome)
            self._awaited.discard(future)
            if self._ends and self._ends[0] is end:
                self._ends.popleft()

    def has_begun_to_leave(self, future: MessageEnd) -> bool:
        """Return whether its receiver has a part of it while the rest is still in the caller's tensor."""
        return any(
            sending.future is future
            for peer, t in [*self._traffic.items()]
            for sending in (*t.leaving, *([*t.outgoing][:1] if self.boxes.begun(peer) else ()))
        )

    def fail(self, future: MessageEnd, error: InterlaceError) -> None:
        """End it with ``error``. If it has begun to leave or to arrive, the rest is still moved."""
        self._receiving = [r for r in self._receiving if r.future is not future]
        for peer, traffic in [*self._traffic.items()]:
            going = [*traffic.leaving]
            for number, sending in enumerate([*traffic.outgoing]):
                if number == 0 and self.boxes.begun(peer):
                    going.append(sending)
                elif sending.future is future:
                    traffic.outgoing.remove(sending)
            for sending in going:
                if sending.future is future:
                    sending.future = None
            for number, message in enumerate([*traffic.incoming]):
                if message.wanted is not None and message.wanted.future is future:
                    message.wanted = None
                    if number == 0 and traffic.take is not None:
                        traffic.take.let_go()
                    else:
                        self._kept.insert(0, message)
        future.set_exception(error)
        self._awaited.discard(future)

    # -- sending -------------------------------------------------------------------------------

    def _begin_to_send(self, peer: int, sending: Sending) -> None:
        if peer != self._rank:
            traffic = self._all_traffic[peer]
            traffic.outgoing.append(sending)
            self._announce(peer, traffic)
            self._see_to_pieces(traffic)
            if not traffic.over:
                self._traffic[peer] = traffic
            return
        tensor = sending.tensor  # to this rank itself: it arrives when it is sent
        if not self._arrived(peer, sending.tag, tensor.nbytes, tensor.dtype, tensor.data_ptr()):
            raise MemoryError(f"send to rank {peer}: no memory to keep {tensor.nbytes} bytes")
        self._ended(sending.future)

    def _announce(self, peer: int, traffic: _Traffic) -> None:
        """Put records of messages to ``peer``, as far as there is room."""
        while traffic.outgoing:
            first = traffic.outgoing[0]
            tensor, future = first.tensor, first.future
            short = (nbytes := tensor.nbytes) <= self.boxes.inline
            try:
                self.boxes.prepare(peer, pieces=False)
                if not short:
                    self.boxes.prepare(peer, pieces=True)
            except (InterlaceError, OSError) as error:
                traffic.outgoing.popleft()
                self._ended(
                    future, error=InterlaceError(f"send to rank {peer} (tag {first.tag}): {error}")
                )
                continue
            if not short:
                traffic.put = traffic.put or self.boxes.pipe(peer, puts=True)
                queue = traffic.leaving
                first.shift = queue[-1].shift if queue else traffic.put.shift()
            about = nbytes, _NUMBER[tensor.dtype], tensor.data_ptr(), first.shift
            if not self.boxes.put(peer, first.tag, *about):
                return
            traffic.outgoing.popleft()
            if not short:
                traffic.leaving.append(first)
                if len(traffic.leaving) == 1:
                    self._leave(traffic)
            else:
                self._ended(future)

    def _leave(self, traffic: _Traffic) -> None:
        """Begin to send the first message in pieces. As many pieces leave at once as there is room for."""
        assert traffic.put is not None
        first = traffic.leaving[0]
        traffic.put.begin(first.tensor.data_ptr(), first.tensor.nbytes, first.shift, past=False)
        self.boxes.start(traffic.put)

    def _see_to_pieces(self, traffic: _Traffic) -> None:
        """Handle messages whose last piece has been moved."""
        while traffic.put is not None and traffic.leaving and traffic.put.finished:
            future = traffic.leaving.popleft().future
            if traffic.leaving:
                self._leave(traffic)
            self._ended(future)
        if traffic.take is not None and traffic.take.finished:
            message, traffic.take = traffic.incoming.popleft(), None
            message.whole = True
            if message.wanted is not None:
                self._finish(message.wanted, message)

    # -- receiving -----------------------------------------------------------------------------

    def _begin_to_receive(self, receiving: Receiving) -> None:
        for kept in self._kept:
            if receiving.fits(kept.peer, kept.tag):
                self._kept.remove(kept)
                kept.wanted = receiving
                if kept.whole:
                    self._finish(receiving, kept)
                return
        self._receiving.append(receiving)

    def _place(self, peer: int, traffic: _Traffic, idle: bool) -> None:
        """Give the next message from ``peer`` a place, if it is asked for or in the way.

        The part that has arrived goes there at once.
        """
        first, wanted = traffic.incoming[0], traffic.incoming[0].wanted
        if wanted is not None:
            fits = self._mismatch(wanted, first) is None
            address = wanted.tensor.data_ptr() if fits else 0
        else:
            urgent = any(message.wanted for message in traffic.incoming)
            if not (idle or urgent):
                return
            first.buffer = self._memory(first, urgent)
            if first.buffer is None:
                return
            address = first.buffer.data_ptr()
        pipe = self.boxes.pipe(peer, puts=False)
        pipe.begin(address, first.nbytes, first.shift, past=first.nbytes >= self.boxes.outputs)
        traffic.take = pipe
        self.boxes.start(pipe)

    def _memory(self, message: _Arriving, urgent: bool) -> torch.Tensor | None:
        """Return memory to keep a message. Without memory, None, or an error if it is ``urgent``."""
        try:
            return torch.empty(message.nbytes, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:
            if not urgent:
                return None
            text = f"no memory to keep {message.nbytes} bytes from rank {message.peer} (tag {message.tag})"
            raise InterlaceError(f"rank {self._group.name}: {text}, not yet asked for") from error

    def _read(self, peer: int, found: Record) -> bool:
        """Handle a record. Return False if there is no memory to keep its data."""
        if found.dtype not in _DTYPES:
            raise InterlaceError(f"rank {peer} has put what is no message into its box")
        if found.tag not in _REFUSALS:
            about = found.nbytes, _DTYPES[found.dtype], found.data, found.shift
            return self._arrived(peer, found.tag, *about)
        text = ctypes.string_at(found.data or 0, found.nbytes).decode(errors="replace")
        self._refused(_REFUSALS[found.tag](text))
        return True

    def _arrived(
        self,
        peer: int,
        tag: int,
        nbytes: int,
        dtype: torch.dtype,
        data: int | None,
        shift: int = 0,
    ) -> bool:
        """Handle a message that arrived, with its data or without. False if there is no memory for it."""
        message = _Arriving(peer, tag, nbytes, dtype, shift, whole=data is not None)
        for wanted in self._receiving:
            if wanted.fits(peer, tag):
                self._receiving.remove(wanted)
                message.wanted = wanted
                if data is not None:
                    self._finish(wanted, message, data)
                break
        else:
            if data is not None:
                message.buffer = self._memory(message, urgent=False)
                if message.buffer is None:
                    return False
                ctypes.memmove(message.buffer.data_ptr(), data, nbytes)
            self._kept.append(message)
        if data is None:
            self._with(peer).incoming.append(message)
        return True

    def _mismatch(self, wanted: Receiving, message: _Arriving) -> Exception | None:
        tensor, dtype = wanted.tensor, message.dtype
        if tensor.dtype == dtype and tensor.nbytes == message.nbytes:
            return None
        numel = message.nbytes // dtype.itemsize
        return mismatch(tensor, self._rank, message.tag, message.peer, dtype, numel)

    def _finish(self, wanted: Receiving, message: _Arriving, data: int = 0) -> None:
        """Finish ``message``, all of which is in its buffer or at ``data``: copy it where it is
        ``wanted``."""
        peer, error = message.peer, self._mismatch(wanted, message)
        if error is not None:
            if peer != self._rank:
                self._refuse(peer, error)
            self._ended(wanted.future, error=error)
            return
        if message.buffer is not None:
            data = message.buffer.data_ptr()
        if data and message.nbytes:
            copy(wanted.tensor.data_ptr(), data, message.nbytes)
        self._ended(wanted.future, _outcome(peer))

    def _refuse(self, peer: int, error: Exception) -> None:
        """Tell the sender, which may never listen: no thread waits for this message or moves it."""
        text = bytearray(str(error).encode()[: self.boxes.inline])
        tag = next(tag for tag, kind in _REFUSALS.items() if isinstance(error, kind))
        said = torch.frombuffer(text, dtype=torch.uint8)
        self._begin_to_send(peer, Sending(said, peer, tag, None))
