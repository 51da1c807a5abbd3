"""Messages from one rank to another on one host: boxes of shared memory, and who keeps them moving.

Every rank has a box for every other in its control segment::

      0 SENT   int64, released by the owner: pieces it has put into this box
     64 TAKEN  int64, released by the owner: pieces it has taken from the other's box for it
    128 SLOTS slots: tag, bytes of the message, dtype, bytes of the piece (int64), then the piece

A message is cut into pieces, which arrive in order; messages of one sender follow one another. Whoever
gets a message that nobody has asked for yet keeps it until somebody does, so tags may be received in
any order. Nobody has to be in a call for messages to move: who waits for one moves them all, and while
messages are under way that nobody waits for, a thread does.

A send ends when its bytes have left the tensor. If its receiver refuses them it says so in a message back,
whose tag is negative, and the sender hears of it as ``MessageEnd`` says; what fits costs nothing for this.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

import torch

from interlace.runtime.core.call import Call, MessageEnd, mismatch, take_first
from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError
from interlace.runtime.core.stream import Outcome
from interlace.runtime.places.one_host.bell import LONGEST_SLEEP
from interlace.runtime.places.one_host.control import BOXES, BOXES_BYTES, Control
from interlace.runtime.places.one_host.deadlock import Kind
from interlace.runtime.places.one_host.group import HostGroup
from interlace.runtime.places.one_host.worker import Helper
from interlace.runtime.record import dump as record

SLOTS = 4
_SENT, _TAKEN, _FIRST_SLOT, _HEADER = 0, 64, 128, 32
_CHECK_SECONDS = 0.02
_REFUSALS = {-1: ValueError, -2: TypeError}  # by tag

_memmove = ctypes.memmove
_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}


class _Moving(MessageEnd):
    """The end of one transfer. Waiting for it moves messages."""

    def __init__(self, mail: "Mail", doing: str, peers: Sequence[int]) -> None:
        super().__init__()
        self.refused = mail.refused
        self.mail, self.doing, self.peers, self.number = mail, doing, peers, 0
        self.started, self.bound = time.monotonic(), mail.bound()
        self.suspect = self.waited = self.early = self.followed = False

    def result(self, timeout: float | None = None) -> Outcome:
        if not self.settled:
            self.mail.wait(self, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self.mail.wait(self, timeout)
        return super().exception(0)

    def done(self) -> bool:
        if super().done():
            return True
        self.mail.move()
        return super().done()

    def set_result(self, result: Outcome) -> None:
        record.ended(self.mail._group, self.number)
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        record.ended(self.mail._group, self.number)
        super().set_exception(exception)

    def add_done_callback(self, fn: Callable[[Future[Outcome]], object]) -> None:
        self.followed = True
        super().add_done_callback(fn)

    @property
    def settled(self) -> bool:
        """Whether it is done; moves nothing."""
        return super().done()


@dataclass(eq=False)
class _Sending:
    tensor: torch.Tensor
    tag: int
    future: _Moving
    moved: int = 0


@dataclass(eq=False)
class _Receiving:
    tensor: torch.Tensor
    peer: int | None
    tag: int
    future: _Moving

    def fits(self, message: "_Arriving") -> bool:
        return self.tag == message.tag and self.peer in (None, message.peer)


@dataclass(eq=False)
class _Arriving:
    """A message of which at least the first piece has come."""

    peer: int
    tag: int
    nbytes: int
    dtype: torch.dtype
    wanted: _Receiving | None = None
    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    moved: int = 0
    target: int = 0


class Mail:
    """The boxes of a group, as one rank sees them."""

    def __init__(self, group: HostGroup) -> None:
        self._group, self.bound = group, group.bound
        self._rank = group.rank
        self._box = BOXES_BYTES // group.world_size & ~4095
        self._piece = (self._box - _FIRST_SLOT) // SLOTS & ~63
        self._lock = threading.RLock()
        self._sent = [0] * group.world_size
        self._taken = [0] * group.world_size
        self._sending: dict[int, deque[_Sending]] = {}
        self._receiving: list[_Receiving] = []
        self._arriving: dict[int, _Arriving] = {}
        self._kept: list[_Arriving] = []
        self.refused: deque[Exception] = deque()
        self._thread: threading.Thread | None = None

    # -- what the engine calls -----------------------------------------------------------------

    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        """Begin to send; done when ``tensor`` may be reused."""
        future = _Moving(self, f"{call.op} to rank {peer} (tag {tag})", [peer])
        with self._lock:
            self._group.check_usable()
            future.number = self._began(call, peer, tag)
            if peer == self._rank:
                self._keep(tensor, tag)
                future.set_result(Outcome(None, None))
            else:
                self._sending.setdefault(peer, deque()).append(_Sending(tensor, tag, future))
                self._move()
            self._see_to_it()
        return future

    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        """Begin to receive from ``peer``, or from anybody if None."""
        source = "any rank" if peer is None else f"rank {peer}"
        peers = range(self._group.world_size) if peer is None else (peer,)
        future = _Moving(
            self, f"{call.op} from {source} (tag {tag})", [p for p in peers if p != self._rank]
        )
        receiving = _Receiving(tensor, peer, tag, future)
        with self._lock:
            self._group.check_usable()
            future.number = self._began(call, peer, tag)
            self._move()  # what has come first is received first
            kept = take_first(self._kept, receiving.fits)
            if kept is None:
                self._receiving.append(receiving)
            else:
                kept.wanted = receiving
                if kept.moved == kept.nbytes:
                    self._finish(kept)
            self._move()
            self._see_to_it()
        return future

    def _began(self, call: Call, peer: int | None, tag: int) -> int:
        """The number in the record of what begins; a rank with itself stands for any rank."""
        if self._group.within:
            return 0
        return record.began(self._group, call.message, self._rank if peer is None else peer, tag)

    # -- keeping messages moving ---------------------------------------------------------------

    def move(self) -> bool:
        """Move what can be moved; whether anything was."""
        with self._lock:
            return self._move()

    def wait(self, future: _Moving, timeout: float | None) -> None:
        """Move messages until ``future`` is done; it fails if that is hopeless."""
        kind = Kind.OF_OP if timeout is None else Kind.EARLY if future.early else Kind.OF_CALLER
        patience = self._group.patience(bound=future.bound, kind=kind)
        deadline = None if timeout is None else time.monotonic() + timeout
        future.waited = True
        while not future.settled:
            if self.move() or future.settled:
                continue
            if deadline is not None and time.monotonic() > deadline:
                future.waited = False
                raise FutureTimeoutError
            try:
                senders = self._senders(future)
                patience.step(future.doing, senders, lambda: future.settled or self.move())
            except InterlaceError as error:
                self._fail(future, error)

    def _senders(self, future: _Moving) -> Sequence[int]:
        """For whom ``future`` waits: of several that may send, those who have left need not."""
        here = [peer for peer in future.peers if not self._group.has_left(peer)]
        return here or future.peers

    def _see_to_it(self) -> None:
        """Have a thread move what is under way, if there is anything."""
        if self._thread is None and (self._receiving or self._busy()):
            self._thread = Helper("interlace mail", self._run, at_work=self._at_work)
            self._thread.start()

    def _at_work(self) -> bool:
        """Whether messages are to go out, or something else follows on an end: that may help a peer."""
        with self._lock:
            return any(self._sending.values()) or any(each.followed for each in self._futures())

    def _busy(self) -> bool:
        return any(self._sending.values()) or any(m.wanted for m in self._arriving.values())

    def _run(self) -> None:
        try:
            self._keep_moving()
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _keep_moving(self) -> None:
        last_check, control = time.monotonic(), self._group.control
        while True:
            with self._lock:
                moved = self._move()
                futures = self._futures()
                if not futures:
                    self._thread = None  # under the lock: the next message starts another
                    return
            now = time.monotonic()
            if now - last_check > _CHECK_SECONDS:
                last_check = now
                for future in futures:
                    self._check(future)
            if not moved:
                if control is None:
                    time.sleep(LONGEST_SLEEP)
                else:
                    control.bell.sleep(LONGEST_SLEEP, self.move)

    def _futures(self) -> list[_Moving]:
        waiting = [receiving.future for receiving in self._receiving]
        waiting += [s.future for queue in self._sending.values() for s in queue if s.tag >= 0]
        waiting += [m.wanted.future for m in self._arriving.values() if m.wanted is not None]
        return waiting

    def _check(self, future: _Moving) -> None:
        """Fail ``future`` if it can never end. A reason counts when it is found twice."""
        group = self._group
        error = group.interruption(future.doing, self._senders(future))
        if error is None and time.monotonic() - future.started > future.bound:
            late = group.blame.culprits(future.peers)
            error = CollectiveTimeoutError(
                f"rank {group.name}: {future.doing} has waited {future.bound:g} s for ranks {late}",
                tuple(late),
            )
        if error is not None and future.suspect:
            if future.waited or not isinstance(error, CollectiveTimeoutError):
                group.blame.ended(error)  # what nobody waits for any more ends alone
            self._fail(future, error)
        future.suspect = error is not None

    def _fail(self, future: _Moving, error: InterlaceError) -> None:
        with self._lock:
            if future.settled:
                return
            self._receiving = [r for r in self._receiving if r.future is not future]
            for queue in self._sending.values():
                for sending in [s for s in queue if s.future is future]:
                    if sending.moved == 0:
                        queue.remove(sending)  # else its pieces go on: the receiver counts on them
            for message in self._arriving.values():
                if message.wanted is not None and message.wanted.future is future:
                    message.wanted = None
                    self._drop(message)
            future.set_exception(error)

    # -- pieces --------------------------------------------------------------------------------

    def _move(self) -> bool:
        control = self._group.control
        if control is None:
            return False
        moved = False
        for peer, queue in list(self._sending.items()):  # a callback may send, too
            while queue and self._put(control, peer, queue[0]):
                moved = True
                if queue[0].moved >= queue[0].tensor.nbytes:
                    sending = queue.popleft()
                    if not sending.future.settled:
                        sending.future.set_result(Outcome(None, None))
        for peer in range(self._group.world_size):  # this rank, too: it may send to itself
            while self._take(control, peer):
                moved = True
        if moved:
            control.ring()
        return moved

    def _box_for(self, other: int) -> int:
        """The offset of anybody's box for ``other`` in its segment."""
        return BOXES + other * self._box

    def _put(self, control: Control, peer: int, sending: _Sending) -> bool:
        """Put the next piece into the box for ``peer``, if there is room."""
        sent = self._sent[peer]
        theirs = self._box_for(self._rank) + _TAKEN
        if sent - control.words[peer].acquired(theirs >> 3) >= SLOTS:
            return False
        own = self._box_for(peer)
        slot = own + _FIRST_SLOT + sent % SLOTS * self._piece
        room = self._piece - _HEADER
        size = min(room, sending.tensor.nbytes - sending.moved)
        words = control.words[self._rank]
        index = slot >> 3
        words.view[index] = sending.tag
        words.view[index + 1] = sending.tensor.nbytes
        words.view[index + 2] = _NUMBER[sending.tensor.dtype]
        words.view[index + 3] = size
        _memmove(words.address + slot + _HEADER, sending.tensor.data_ptr() + sending.moved, size)
        sending.moved += size
        self._sent[peer] = sent + 1
        words.release((own + _SENT) >> 3, sent + 1)
        return True

    def _take(self, control: Control, peer: int) -> bool:
        """Take the next piece out of ``peer``'s box, if there is one."""
        taken = self._taken[peer]
        theirs = self._box_for(self._rank)
        words = control.words[peer]
        if words.acquired((theirs + _SENT) >> 3) <= taken:
            return False
        slot = theirs + _FIRST_SLOT + taken % SLOTS * self._piece
        tag, nbytes, number, size = words.view[slot >> 3 : (slot >> 3) + 4].tolist()
        message = self._arriving.get(peer)
        moved = 0 if message is None else message.moved
        if not (0 <= size <= self._piece - _HEADER and moved + size <= nbytes) or not (
            0 <= number < len(_DTYPES)
        ):
            raise InterlaceError(f"rank {peer} has put what is no piece of a message into its box")
        if message is None:
            message = self._begin(peer, tag, nbytes, _DTYPES[number])
        if message.target:
            _memmove(message.target + message.moved, words.address + slot + _HEADER, size)
        message.moved += size
        self._taken[peer] = taken + 1
        own = self._box_for(peer) + _TAKEN
        control.words[self._rank].release(own >> 3, taken + 1)
        if message.moved == nbytes:
            del self._arriving[peer]
            if message.wanted is not None:
                self._finish(message)
            elif tag in _REFUSALS:
                self._kept.remove(message)
                text = bytes(message.buffer.tolist()).decode(errors="replace")
                self.refused.append(_REFUSALS[tag](text))
        return True

    def _begin(self, peer: int, tag: int, nbytes: int, dtype: torch.dtype) -> _Arriving:
        """A new message: into the tensor of whoever asked for it, else into memory of our own."""
        message = self._arriving[peer] = self._matched(_Arriving(peer, tag, nbytes, dtype))
        wanted = message.wanted
        if wanted is not None and self._mismatch(wanted, message) is None:
            message.target = wanted.tensor.data_ptr() if nbytes else 0
        else:
            self._drop(message)
        return message

    def _keep(self, tensor: torch.Tensor, tag: int) -> None:
        """A message to oneself: it has arrived when it is sent."""
        message = self._matched(_Arriving(self._rank, tag, tensor.nbytes, tensor.dtype))
        self._drop(message)
        if tensor.nbytes:
            _memmove(message.target, tensor.data_ptr(), tensor.nbytes)
        message.moved = tensor.nbytes
        if message.wanted is not None:
            self._finish(message)

    def _drop(self, message: _Arriving) -> None:
        """Let what is still to come of a message go into memory of our own."""
        message.buffer = torch.empty(message.nbytes, dtype=torch.uint8)
        message.target = message.buffer.data_ptr() if message.nbytes else 0

    def _matched(self, message: _Arriving) -> _Arriving:
        """``message`` with the receive that waits for it, or among those that are kept for one."""
        message.wanted = take_first(self._receiving, lambda each: each.fits(message))
        if message.wanted is None:
            self._kept.append(message)
        return message

    def _mismatch(self, wanted: _Receiving, message: _Arriving) -> Exception | None:
        numel = message.nbytes // message.dtype.itemsize
        about = message.tag, message.peer, message.dtype, numel
        return mismatch(wanted.tensor, self._rank, *about)

    def _refuse(self, peer: int, error: Exception) -> None:
        """Tell the sender, who may never listen: nobody waits for this, and no thread moves it."""
        text = torch.frombuffer(bytearray(str(error).encode()), dtype=torch.uint8)
        tag = next(tag for tag, kind in _REFUSALS.items() if isinstance(error, kind))
        end = _Moving(self, "a refusal", [peer])
        self._sending.setdefault(peer, deque()).append(_Sending(text, tag, end))
        self._move()

    def _finish(self, message: _Arriving) -> None:
        wanted, peer = message.wanted, message.peer
        assert wanted is not None
        error = self._mismatch(wanted, message)
        if error is not None:
            if peer != self._rank:
                self._refuse(peer, error)
            wanted.future.set_exception(error)
            return
        if message.buffer.numel():
            _memmove(wanted.tensor.data_ptr(), message.buffer.data_ptr(), message.nbytes)
        wanted.future.set_result(Outcome(None, None, lambda: peer))
