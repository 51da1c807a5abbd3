"""Messages between two ranks of a group that spans hosts; their receiver matches them.

A message is announced to its receiver by a control packet: tag, number, length, dtype. Its bytes wait at
the sender, who has begun to send them, until the receiver takes them: through shared memory from a rank
on the same host, by gloo from another host. The announcements of all ranks meet in one list, so a receive
from any source is served by whoever announced first, on whichever host::

    sender     begins to send the bytes, announces them              "message 7, tag 0, 4096 bytes"
    receiver   finds the first posted receive that fits, or keeps the announcement for a later one
               takes the bytes, acknowledges                         "message 7 received"
    sender     the future of its send is done     or fails, if the message does not fit the receive

No caller of ``send`` or ``recv`` waits. Announcements go through one thread, bytes that are received
through another: so a rank that receives is heard meanwhile, and both directions are used at once. Neither
waits for long: a packet's receiver always listens, and the bytes of an announced message are on their way.
What follows on the end of a message may wait for others: it runs in a thread of its own.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from interlace.runtime.core.call import Call, mismatch, take_first
from interlace.runtime.core.engine import Engine
from interlace.runtime.core.errors import AbortedError, CollectiveTimeoutError, InterlaceError
from interlace.runtime.core.stream import Outcome
from interlace.runtime.places.hosts import packets
from interlace.runtime.places.hosts.links import HostLinks
from interlace.runtime.places.hosts.packets import Packet
from interlace.runtime.places.one_host.group import HostGroup
from interlace.runtime.places.one_host.worker import Helper, OrderedWorker
from interlace.runtime.record import dump as record

_SLOTS = 1 << 20  # payloads under way between two ranks that may be told apart


@dataclass(eq=False)
class _Announced:
    source: int
    tag: int
    number: int
    dtype: torch.dtype
    numel: int


class _Transfer(Future[Outcome]):
    """The end of a transfer, which says for whom it is waited, and is in the record of its host's group."""

    def __init__(self, mail: HostTransfers, call: Call, peer: int | None, tag: int) -> None:
        super().__init__()
        other = mail.rank if peer is None else peer  # as in ``shm/mail.py``
        number = record.began(mail.group, call.message, other, tag)
        super().add_done_callback(lambda _: record.ended(mail.group, number))
        self.waited = False
        self._mail, self.peers = mail, () if peer is None else (peer,)
        self.started, self.bound = time.monotonic(), mail.bound()

    def add_done_callback(self, fn: Callable[[Future[Outcome]], object]) -> None:
        """``fn`` may wait for other messages, so a thread that moves some hands it to one of its own."""
        mail = self._mail

        def ended(end: Future[Outcome]) -> None:
            if isinstance(threading.current_thread(), Helper):
                mail.follow(lambda: fn(end))
            else:
                fn(end)

        super().add_done_callback(ended)

    def late(self, now: float) -> bool:
        return now - self.started > self.bound

    def result(self, timeout: float | None = None) -> Outcome:
        self._mail.awaited = None if self.done() or not self.peers else self.peers[0]
        self.waited = True
        try:
            return super().result(timeout)
        finally:
            self._mail.awaited, self.waited = None, False


@dataclass(eq=False)
class _Posted:
    tensor: torch.Tensor
    source: int | None
    tag: int
    future: _Transfer

    def fits(self, announced: _Announced) -> bool:
        return self.tag == announced.tag and self.source in (None, announced.source)


@dataclass(eq=False)
class _SendingToHost:
    """``work`` and ``tensor`` stay alive until the receiver has the bytes, whoever waits for it."""

    tensor: torch.Tensor
    work: Any
    tag: int
    future: _Transfer


class HostTransfers:
    """The point-to-point messages of one rank. ``group`` is that of its host's ranks."""

    def __init__(
        self, links: HostLinks, group: HostGroup, local_engine: Callable[[], Engine]
    ) -> None:
        self._links, self.rank, self.bound, self.group = links, links.rank, links.bound, group
        self._local = {rank: index for index, rank in enumerate(group.names)}
        self._local_engine: Any = local_engine
        self._within = Call("a message within the host")
        self._worker = OrderedWorker("interlace messages")
        self._announcer = OrderedWorker("interlace announcements")
        self._lock = threading.Lock()
        self._numbers = [0] * links.world_size
        self._announced: list[_Announced] = []
        self._posted: list[_Posted] = []
        self._sending: dict[tuple[int, int], _SendingToHost] = {}
        self._following = weakref.WeakSet[Helper]()
        self.awaited: int | None = None
        """For whom the caller waits."""

    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        """Begin to send; done when ``tensor`` may be reused."""
        self._links.check()
        content = tensor.dtype, tensor.numel()
        with self._lock:
            number = self._numbers[peer]
            self._numbers[peer] += 1
            work: Any = None
            if tensor.numel() and peer not in self._local:
                work = self._links.send_payload(tensor, peer, number % _SLOTS)
            elif tensor.numel() and peer != self.rank:
                work = self._local_engine().send(self._within, tensor, self._local[peer], number)
            end = _Transfer(self, call, peer, tag)
            sending = self._sending[peer, number] = _SendingToHost(tensor, work, tag, end)
            packet = Packet(packets.ANNOUNCED, tag, number, content)
            self._submit(lambda: self._post(peer, packet), self._announcer)
        self._fail_late()
        return sending.future

    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        """Begin to receive from ``peer``, or from whoever sends first if None."""
        self._links.check()
        posted = _Posted(tensor, peer, tag, _Transfer(self, call, peer, tag))
        with self._lock:
            announced = take_first(self._announced, posted.fits)
            if announced is None:
                self._posted.append(posted)
            else:
                self._submit(lambda: self._take(posted, announced))
        self._fail_late()
        return posted.future

    def _fail_late(self) -> None:
        """Fail a transfer that was added just after the group had failed."""
        failure = self._links.failure
        if failure is not None:
            self.fail(failure)

    def _submit(self, function: Callable[[], None], worker: OrderedWorker | None = None) -> None:
        """Let a thread do it. What goes wrong there fails the group, and so all futures."""

        def guarded() -> None:
            try:
                function()
            except InterlaceError as error:
                self._links.fail(error)
            except Exception as error:
                self._links.fail(InterlaceError(f"rank {self.rank}: a message failed: {error!r}"))

        with suppress(AbortedError):  # closed: all futures have failed
            (worker or self._worker).submit(guarded)

    def _post(self, peer: int, packet: Packet) -> None:
        if peer == self.rank:
            self.on_packet(peer, packet)
        else:
            self._links.send_packet(peer, packet)

    def on_packet(self, source: int, packet: Packet) -> None:
        """Take what ``source`` announces or acknowledges. Called in any thread; never waits."""
        if packet.kind in (packets.RECEIVED, packets.REFUSED):
            with self._lock:
                sent = self._sending.pop((source, packet.number), None)
            if sent is not None:
                end: Outcome | Exception = Outcome(None, None)
                if packet.kind == packets.REFUSED:
                    kind = TypeError if packet.tag else ValueError
                    end = kind(packet.content.decode(errors="replace"))
                _settle(sent.future, end)
        elif packet.kind == packets.ANNOUNCED:
            announced = _Announced(source, packet.tag, packet.number, *packet.content)
            with self._lock:
                posted = take_first(self._posted, lambda each: each.fits(announced))
                if posted is None:
                    self._announced.append(announced)
                    return
            self._submit(lambda: self._take(posted, announced))

    def _take(self, posted: _Posted, announced: _Announced) -> None:
        """Receive the bytes; into memory of our own if they do not fit the caller's tensor."""
        source, number, target = announced.source, announced.number, posted.tensor
        about = announced.tag, source, announced.dtype, announced.numel
        error = mismatch(target, self.rank, *about)
        if error is not None:
            target = torch.empty(announced.numel, dtype=announced.dtype)
        try:
            if target.numel():
                self._receive(target, source, number)
        except BaseException as problem:
            _settle(posted.future, problem)
            raise
        _settle(posted.future, error or Outcome(None, None, lambda: source))
        if error is None:
            self._post(source, Packet(packets.RECEIVED, number=number))
        else:
            text = str(error).encode()[: packets.LONGEST_REASON]
            self._post(source, Packet(packets.REFUSED, isinstance(error, TypeError), number, text))

    def _receive(self, target: torch.Tensor, source: int, number: int) -> None:
        if source == self.rank:
            target.copy_(self._sending[source, number].tensor.view(target.shape))
        elif source in self._local:
            self._local_engine().recv(self._within, target, self._local[source], number).result()
        else:
            self._links.receive_payload(target, source, number % _SLOTS)

    def follow(self, function: Callable[[], object]) -> None:
        """Run ``function``, which follows on the end of a message, in a thread of its own."""
        thread = Helper("interlace message's end", function, at_work=lambda: True)
        with self._lock:
            self._following.add(thread)
        thread.start()

    def pending(self) -> bool:
        """Whether a message is under way."""
        return bool(self._posted or self._sending)

    def expire(self) -> None:
        """End transfers that take longer than their bound; the group, if one is waited for."""
        now = time.monotonic()
        with self._lock:
            late = [
                (each.future, "recv from", each.source, each.tag)
                for each in self._posted
                if each.future.late(now)
            ]
            late += [
                (each.future, "send to", peer, each.tag)
                for (peer, _), each in self._sending.items()
                if each.future.late(now) and not each.future.done()
            ]
            ended = [future for future, *_ in late if not future.waited]
            self._posted = [each for each in self._posted if each.future not in ended]
        peers = {peer for _, _, peer, _ in late if peer is not None}
        culprits = {peer: self._links.culprit(peer) for peer in peers}  # asking takes a second
        for future, doing, peer, tag in late:
            behind = () if peer is None else (culprits[peer],)
            name = "any rank" if peer is None else f"rank {peer}"
            text = f"rank {self.rank}: {doing} {name} (tag {tag}) has waited {future.bound:g} s"
            text += f" for ranks {list(behind)}" if behind else ""
            error = CollectiveTimeoutError(text, behind)
            if future in ended:
                _settle(future, error)
            else:
                self._links.fail(error)

    def fail(self, error: InterlaceError) -> None:
        """End every transfer under way with ``error``."""
        with self._lock:
            futures = [sending.future for sending in self._sending.values()]
            futures += [posted.future for posted in self._posted]
            self._sending.clear()
            self._posted.clear()
        for future in futures:
            _settle(future, error)

    def close(self) -> None:
        self.fail(AbortedError(f"rank {self.rank} has closed the group"))
        for worker in (self._announcer, self._worker):
            worker.close(1.0)
        with self._lock:
            following = set(self._following) - {threading.current_thread()}
        for thread in following:
            thread.join(1.0)
        self._local_engine = None  # which holds the place


def _settle(future: Future[Outcome], end: Outcome | BaseException) -> None:
    with suppress(InvalidStateError):  # the group has failed at the same time
        if isinstance(end, BaseException):
            future.set_exception(end)
        else:
            future.set_result(end)
