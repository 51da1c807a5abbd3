"""Messages from one rank to another: their ends, the waits for them, and the threads that move them.

Messages move even while no rank is in a call. A thread that waits for one moves all of them
(``matching.py``). While messages are in flight and no thread waits, a thread of interlace moves them. One
thread moves messages at a time. A wait changes only counters in shared memory while it spends time, so an
exception of a signal handler does no harm there. The timeout of a message is that of its op, from the op's
beginning, however often it is waited for.

A send ends when its bytes have left the tensor. If its receiver refuses them, it says so in a message back
with a negative tag, and ``MessageEnd`` describes how the sender learns of it. Accepted messages need no
answer.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, cast

import torch

from interlace.runtime.core.call import Call, MessageEnd
from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError
from interlace.runtime.core.stream import Outcome
from interlace.runtime.places.shm.matching import Messages, Receiving, Sending
from interlace.runtime.processes import dump as record
from interlace.runtime.processes.deadlock import Kind
from interlace.runtime.processes.group import LOOK
from interlace.runtime.processes.waiting import Patience
from interlace.runtime.processes.worker import Helper, ends

_CHECK_SECONDS = 0.02
_STEP = 5e-3  # between two checks whether a wait can end
_SOON = 2e-4  # if nothing moves for so long, a message that no receive asked for may be in the way
_NAP, _LONG_NAP = 1e-3, 8e-3  # of the thread; each nap is twice the last one while it is idle
_LINGER = 0.05  # the thread ends so long after the last message


class _Moving(MessageEnd):
    """The end of one transfer, with ``peer`` or, if None, with any rank. Waiting for it moves messages."""

    number = 0  # of its entry in the record
    suspect = waited = early = followed = False
    _patience: Patience | None = None  # of waits that only the op's timeout bounds

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
        """Return the state of one wait. If its caller has not ``bounded`` it, the op's timeout bounds
        it."""
        if bounded or self._patience is None:
            kind = Kind.OF_OP if not bounded else Kind.EARLY if self.early else Kind.OF_CALLER
            made: Patience = group.patience(kind=kind, bound=self.bound, since=self.started)
            if bounded:
                return made
            self._patience = made
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

    # -- what the engine calls -----------------------------------------------------------------

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
                self._group.abort(
                    f"{future.doing} had begun, and then {type(error).__name__}: {error}"
                )
            raise
        finally:
            self._entering.discard(future)

    # -- keeping messages moving ---------------------------------------------------------------

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
        """Return whether a message in flight keeps the group open."""
        if self._group.control is None:
            return False
        return messages.leaving and time.monotonic() < ends() if ends() else bool(self._futures())

    def _at_work(self) -> bool:
        """Return whether messages are outgoing or an end has followers, which may help a peer."""
        with self._lock:
            leaving = self._messages is not None and self._messages.leaving
            return leaving or any(each.followed for each in self._futures())

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
    """Forget the threads, which are the parent's. The groups are, too, and say so themselves."""
    for mail in list(_mails):
        mail._lock, mail._mover, mail._thread = threading.RLock(), None, None
        mail._waiting.clear()
        mail._entering.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
