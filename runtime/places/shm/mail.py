"""Messages from one rank to another: their ends, the waits for them, and the threads that move them.

Messages move even while no rank is in a call. A thread that waits for one moves all of them. While messages
are in flight and no thread waits, a thread of interlace moves them. One thread moves messages at a time. A
wait changes only counters in shared memory while it spends time, so an exception of a signal handler does
no harm there. The timeout of a message is its op's timeout, from the op's beginning, however often it is
waited for.

A send ends when its bytes have left the tensor. If its receiver refuses them, it says so in a message back
with a negative tag (``MessageEnd`` says how the sender learns of it). Accepted messages need no answer.

A message begins with a record in a box of shared memory (``boxes.py``), which includes short data; longer
data follows in pieces. Messages of one sender follow one another. A short one that no receive has asked for
is kept until one does, so tags may be received in any order. A longer one stays with its sender meanwhile.
It is also kept if a later message is asked for, or if a waiting thread here has nothing else to do,
because its sender may wait for its end. Without memory to keep it, it stays with its sender.

A :class:`Messages` is for one thread at a time. If an exception interrupts :meth:`Messages.advance` (a
signal handler's may come anywhere) while there is something to do, the group is aborted, because its state
is unknown.
"""

import ctypes
import functools
import os
import threading
import time
import weakref
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from interlace.runtime.core.call import Call, MessageEnd, mismatch
from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError
from interlace.runtime.core.stream import NOTHING, Outcome
from interlace.runtime.places.shm.boxes import Boxes, Pipe, Record, copy
from interlace.runtime.processes import dump as record
from interlace.runtime.processes.group import LOOK
from interlace.runtime.processes.waiting import Kind, Patience
from interlace.runtime.processes.worker import Helper, ends

_REFUSALS = {-1: ValueError, -2: TypeError}  # by tag
_NUMBER = {
    value: zlib.crc32(str(value).encode())  # the same in every version of torch
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_DTYPES = {number: dtype for dtype, number in _NUMBER.items()}


@functools.cache
def _outcome(source: int) -> Outcome:
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
    put: Pipe | None = None  # pipe of the first message that leaves
    take: Pipe | None = None  # pipe of the first that arrives, once it has a place

    @property
    def over(self) -> bool:
        return not (self.outgoing or self.leaving or self.incoming)


class Messages:
    """All messages of a group that this rank sends or receives. ``boxes`` may be an object like Boxes."""

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
        """Move pieces until there is something to handle. Return False if nothing moves for ``seconds``."""
        # a message that a signal handler begins is moved by the next call
        under_way = [*self._traffic.items()]
        pipes = [t.put for _, t in under_way if t.put is not None and t.leaving]
        pipes += [t.take for _, t in under_way if t.take is not None]
        blocked = [peer for peer, t in under_way if t.outgoing]
        return self.boxes.move(pipes, blocked, seconds, sleep=sleep, peers=peers)

    def advance(self, begins: Sending | Receiving | None = None, *, idle: bool = False) -> None:
        """Handle all that has happened, and the message that ``begins``. ``idle``: nothing did for a while.

        Ends are reported at its end, because their callbacks may begin messages. A message that a signal
        handler begins meanwhile is also handled at its end.
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
                text = f"send to rank {peer} (tag {first.tag}): {error}"
                self._ended(future, error=InterlaceError(text))
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
        """Give the next message from ``peer`` a place, if it is asked for or in the way."""
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
            raise InterlaceError(f"rank {peer} sent an invalid message header")
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
            traffic = self._traffic[peer] = self._all_traffic[peer]
            traffic.incoming.append(message)
        return True

    def _mismatch(self, wanted: Receiving, message: _Arriving) -> Exception | None:
        tensor, dtype = wanted.tensor, message.dtype
        if tensor.dtype == dtype and tensor.nbytes == message.nbytes:
            return None
        numel = message.nbytes // dtype.itemsize
        return mismatch(tensor, self._rank, message.tag, message.peer, dtype, numel)

    def _finish(self, wanted: Receiving, message: _Arriving, data: int = 0) -> None:
        """Finish ``message``, which is in its buffer or at ``data``: copy it where it is ``wanted``."""
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


_CHECK_SECONDS = 0.02
_STEP = 5e-3  # between two checks whether a wait can end
_SOON = 2e-4  # if nothing moves for so long, a message that no receive asked for may be in the way
_NAP, _LONG_NAP = 1e-3, 8e-3  # naps of an idle thread; each is twice the last one
_LINGER = 0.05  # the thread ends so long after the last message


class _Moving(MessageEnd):
    """The end of one transfer, with ``peer`` or, if None, with any rank. Waiting for it moves messages."""

    number = 0  # number of its entry in the record
    suspect = waited = early = followed = False
    _patience: Patience | None = None  # for waits that only the op's timeout bounds

    def __init__(self, mail: "Mail", op: str, peer: int | None, tag: int) -> None:
        self.mail, self.refused = mail, mail.refused
        self.op, self.peer, self.tag = op, peer, tag
        self.started, self.bound = time.monotonic(), mail.bound()

    @property
    def doing(self) -> str:
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        return f"{self.op} {'to' if self.op == 'send' else 'from'} {peer} (tag {self.tag})"

    @property
    def peers(self) -> Sequence[int]:
        return self.mail.others if self.peer is None else [self.peer]

    def result(self, timeout: float | None = None) -> Outcome:
        if not self.settled:
            self.mail.wait(self, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self.mail.wait(self, timeout)
        return super().exception(0)

    def done(self) -> bool:
        if not self.settled:
            self.mail.move()
        return self.settled

    def tell(self) -> None:
        if not self.settled:
            record.ended(self.mail._group, self.number)
        super().tell()

    def add_done_callback(self, fn: Callable[[Future[Outcome]], object]) -> None:
        self.followed = True
        super().add_done_callback(fn)

    def patience(self, group: Any, bounded: bool) -> Patience:
        """Return the state of one wait. Unless its caller has ``bounded`` it, the op's timeout does."""
        if bounded or self._patience is None:
            kind = Kind.OF_OP if not bounded else Kind.EARLY if self.early else Kind.OF_CALLER
            patience: Patience = group.patience(kind=kind, bound=self.bound, since=self.started)
            if bounded:
                return patience
            self._patience = patience
        return self._patience


_mails: "weakref.WeakSet[Mail]" = weakref.WeakSet()


class Mail:
    """The messages of a group, as one rank sees them. ``boxes`` are made with the first message.

    The group is a HostGroup, or ``SpanningGroup`` of ``hosts/mail.py``.
    """

    def __init__(self, group: Any, boxes: Callable[[], Any]) -> None:
        self._group, self._new_boxes, self.bound = group, boxes, group.bound
        self._rank = group.rank
        self.others = [peer for peer in range(group.world_size) if peer != group.rank]
        self._messages: Messages | None = None
        self._lock = threading.RLock()
        self.refused: deque[Exception] = deque()
        self._thread: threading.Thread | None = None
        self._then: Callable[[], object] | None = None  # closes the group
        self._begun = self._waits = 0  # counts of messages and of waits for them
        # An exception of a signal handler leaves nothing behind in these sets: a wait or a beginning is in
        # them only while it is within its ``try``.
        self._waiting: set[object] = set()
        self._entering: set[object] = set()
        self._mover: int | None = None  # the thread that moves messages
        _mails.add(self)

    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        """Begin to send. The future is done when ``tensor`` may be reused."""
        future = _Moving(self, call.op, peer, tag)
        self._begin(call, future, Sending(tensor, peer, tag, future))
        return future

    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        """Begin to receive from ``peer``, or from any rank if None."""
        future = _Moving(self, call.op, peer, tag)
        self._begin(call, future, Receiving(tensor, peer, tag, future))
        return future

    def _begin(self, call: Call, future: _Moving, message: Sending | Receiving) -> None:
        """Begin a message. Another thread that moves messages pauses meanwhile."""
        self._begun += 1
        try:
            self._entering.add(future)
            mover, messages = self._mover, self._messages
            moves = mover is not None and mover != threading.get_ident()
            if moves and messages is not None and self._group.control is not None:
                messages.boxes.want(1)
            with self._lock:
                self._group.check_usable()
                if self._messages is None:
                    self._messages = Messages(self._group, self._new_boxes(), self.refused.append)
                if not self._group.within:  # the record's entry with its own rank means any rank
                    other = self._rank if message.peer is None else message.peer
                    future.number = record.began(self._group, call.message, other, message.tag)
                self._messages.advance(message)
                if self._thread is None:
                    self._see_to_it(self._messages)
        except BaseException as error:
            if future in self._futures():  # in flight, and no caller will have its handle
                text = f"{future.doing} had begun, and then"
                self._group.abort(f"{text} {type(error).__name__}: {error}")
            raise
        finally:
            self._entering.discard(future)

    def move(self) -> None:
        """Move messages, unless another thread does so."""
        self._move_for(None, 0.0)

    def wait(self, future: _Moving, timeout: float | None) -> None:
        """Move messages until ``future`` is done. It fails if that is hopeless."""
        again, bounded, token = future.waited, timeout is not None, object()
        patience = future.patience(self._group, bounded) if again else None  # else it may be there
        deadline = None if timeout is None else time.monotonic() + timeout
        future.waited = True
        self._spread()
        try:
            self._waiting.add(token)
            while not future.settled:
                now = time.monotonic()
                seconds = _STEP if deadline is None else min(_STEP, deadline - now)
                if seconds <= 0:
                    future.waited = False
                    raise FutureTimeoutError
                try:
                    if patience is not None and patience.due(now):
                        patience.check(future.doing, self._senders(future), now)
                    self._move_for(future, seconds)
                    if patience is None and not future.settled:
                        patience = future.patience(self._group, bounded)
                except InterlaceError as error:
                    self._fail(future, error)
        finally:
            self._waiting.discard(token)

    def _spread(self) -> None:
        """Check now and then that ranks share cores evenly: waking a rank draws it to the waker's core."""
        self._waits += 1
        if not self._waits % LOOK and (control := self._group.control) is not None:
            control.spread.say()
            control.spread.look()

    def _move_for(self, future: _Moving | None, seconds: float) -> None:
        """Move messages, or let another thread do so, until something happens."""
        if self._mover not in (None, threading.get_ident()):
            if future is not None:
                future.sleep(seconds)
            return
        with self._lock:
            before, self._mover = self._mover, threading.get_ident()
            try:
                self._step(seconds, future)
            finally:
                self._mover = before

    def _step(self, seconds: float, future: _Moving | None = None) -> None:
        """Handle what has happened. Unless ``future`` is done, move until something happens again."""
        messages = self._messages
        if messages is None or self._group.control is None:
            return
        messages.advance()
        if future is not None and future.settled:
            return
        messages.boxes.want(len(self._entering))
        peers = () if future is None else future.peers
        if messages.unasked and seconds:
            if messages.move(min(seconds, _SOON), sleep=False, peers=peers):
                return
            messages.advance(idle=True)
        messages.move(seconds, sleep=seconds > 0, peers=peers)
        messages.advance()

    def _senders(self, future: _Moving) -> Sequence[int]:
        """Return the ranks for which ``future`` waits, without possible senders that have left."""
        here = [peer for peer in future.peers if not self._group.has_left(peer)]
        return here or future.peers

    def _futures(self) -> list[_Moving]:
        return [] if self._messages is None else cast("list[_Moving]", self._messages.futures())

    def _see_to_it(self, messages: Messages) -> None:
        """Start the thread that moves messages in flight, if there are any."""
        if self._thread is None and messages.futures():
            self._thread = Helper("interlace mail", self._run, at_work=self._at_work)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads can be started
                self._thread = None
                raise

    @property
    def awaited(self) -> bool:
        """Return whether a thread of the caller waits for a message."""
        return bool(self._waiting)

    def at_rest(self, function: Callable[[], object]) -> None:
        """Call ``function`` while no messages move."""
        with self._lock:
            function()

    def close(self, then: Callable[[], object]) -> None:
        """Call ``then`` when all messages in flight have ended: now, or in the thread.

        When the process ends, only outgoing messages are waited for, and not for long.
        """
        with self._lock:
            if self._messages is not None and self._has_to_end(self._messages):
                self._then = then
                self._see_to_it(self._messages)
                return
        then()

    def _has_to_end(self, messages: Messages) -> bool:
        if self._group.control is None:
            return False
        return messages.leaving and time.monotonic() < ends() if ends() else bool(self._futures())

    def _at_work(self) -> bool:
        """Return whether messages are outgoing or an end has followers, which may help a peer."""
        with self._lock:
            leaving = self._messages is not None and self._messages.leaving
            return leaving or any(future.followed for future in self._futures())

    def _run(self) -> None:
        try:
            with suppress(InterlaceError):  # it has aborted the group, and waits raise it
                self._keep_moving()
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _keep_moving(self) -> None:
        """Run the thread. It naps first, because a caller mostly waits soon for what it has begun."""
        last_check = last_use = time.monotonic()
        nap, known = _NAP, self._begun
        while True:
            time.sleep(nap)
            nap = min(2 * nap, _LONG_NAP)
            if self._waiting or self._entering:
                continue
            begun = self._begun
            self._move_for(None, _STEP)
            now = time.monotonic()
            with self._lock:
                futures = self._futures()
                if futures or known != self._begun:
                    last_use, known = now, self._begun
                if futures and begun == self._begun:
                    nap = _NAP  # otherwise other threads move the messages
                messages = self._messages
                closed = self._then is not None and not (messages and self._has_to_end(messages))
                if now - last_use > _LINGER or closed:
                    self._thread = None  # under the lock: the next message starts another
                    break
            if now - last_check > _CHECK_SECONDS:
                last_check, late = now, dict[int | None, tuple[int, ...]]()
                for future in futures:
                    self._check(future, late)
        if self._then is not None:
            self._then()

    def _check(self, future: _Moving, late: dict[int | None, tuple[int, ...]]) -> None:
        """Fail ``future`` if it can never end. A reason counts when it is found twice.

        ``late``: the ranks for which others wait in the end, where that is known; asking may take a second.
        """
        group, peer = self._group, future.peer
        error = group.interruption(future.doing, self._senders(future))
        if error is None and time.monotonic() - future.started > future.bound and future.suspect:
            if peer not in late:
                late[peer] = tuple(group.blame.culprits(future.peers))
            text = f"{future.doing} has waited {future.bound:g} s for ranks {[*late[peer]]}"
            error = CollectiveTimeoutError(f"rank {group.name}: {text}", late[peer])
        if error is not None and future.suspect:
            late_alone = isinstance(error, CollectiveTimeoutError) and not future.waited
            if not late_alone or (self._messages and self._messages.has_begun_to_leave(future)):
                group.blame.ended(error)  # otherwise no thread waits for it, and it ends alone
            self._fail(future, error)
        future.suspect = error is not None or time.monotonic() - future.started > future.bound

    def _fail(self, future: _Moving, error: InterlaceError) -> None:
        """End ``future`` with ``error``, unless it has ended meanwhile and no thread has seen that."""
        with self._lock:
            if self._messages is not None:
                self._step(0.0)
                if not future.settled:
                    self._messages.fail(future, error)


def _after_fork_in_child() -> None:
    """Forget the threads, which are the parent's. The groups are also, and say so themselves."""
    for mail in list(_mails):
        mail._lock, mail._mover, mail._thread = threading.RLock(), None, None
        mail._waiting.clear()
        mail._entering.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
