"""Connections between ranks on several hosts: packets by gloo, and noticing that a rank is gone.

There is one gloo group per group of ranks, connecting all pairs, of which only send and recv are used. It
carries packets of a fixed size (:class:`Packet`): "I have left", "abort, because ...", "which rank do you
wait for?". Ranks on different hosts have separate connections for bytes: for collectives (``wires.py``),
and for messages between two ranks (``mail.py``).

One thread per peer always listens for the peer's packets, so sending one never takes long. When a process
ends, the kernel closes its connections, and every other rank's listener notices which rank is gone.

If one rank fails, the waits of all ranks end: it sends the reason to all, then closes its own connections
for bytes, which wakes its own threads. The connections for packets stay until the rank leaves the group,
because the remaining ranks use them to agree on how to continue (``regroup.py``). A rank whose packets end
without "I have left" is gone. A separate thread watches the group's timeout, so that a rank that times out
can still say so.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hmac
import math
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from interlace.runtime.core import plain
from interlace.runtime.core.errors import (
    OF_PARENT,
    UNREACHABLE,
    AbortedError,
    CollectiveTimeoutError,
    InterlaceError,
    PeerDiedError,
    of_another_rank,
)
from interlace.runtime.places.hosts.host_map import connected, let_go, listening_address
from interlace.runtime.places.hosts.wires import WireError, Wires, read_address
from interlace.runtime.processes.dump import aborted_by, follow
from interlace.runtime.processes.signed_store import DIGEST_BYTES, PolledStore, digest
from interlace.runtime.processes.worker import Helper, apart

if TYPE_CHECKING:
    from interlace.runtime.compat.torch_groups import Store

PACKET_BYTES = 2048
LONGEST_REASON = PACKET_BYTES - 256  # bytes
LEFT, ABORT, ASKED, AWAITS, ROW, VALUE = range(1, 7)
_CONTENTS: dict[int, Any] = dict.fromkeys((LEFT, ASKED, AWAITS), type(None))
_CONTENTS |= {ABORT: bytes, ROW: (int, int, int), VALUE: (bytes, bytes, bytes)}
_LENGTH = struct.Struct("<I")


@dataclass
class Packet:
    """One control packet: its kind, and the fields that this kind uses."""

    kind: int
    tag: int = 0
    number: int = 0
    content: Any = None

    def pack(self) -> torch.Tensor:
        raw = plain.dumps((self.kind, self.tag, self.number, self.content))
        assert len(raw) <= PACKET_BYTES - _LENGTH.size, len(raw)
        whole = (_LENGTH.pack(len(raw)) + raw).ljust(PACKET_BYTES, b"\0")
        return torch.frombuffer(bytearray(whole), dtype=torch.uint8)

    @staticmethod
    def unpack(packet: torch.Tensor) -> Packet:
        """Parse a packet. UnreadableError unless :meth:`pack` could have made it."""
        raw = packet.numpy().tobytes()
        (length,) = _LENGTH.unpack_from(raw)
        fields = plain.loads(raw[_LENGTH.size : _LENGTH.size + length])
        if isinstance(fields, tuple) and len(fields) == 4:
            found = Packet(*fields)
            known = _CONTENTS.get(found.kind) if isinstance(found.kind, int) else None
            content = found.content
            types = tuple(map(type, content)) if isinstance(content, tuple) else type(content)
            numbers = isinstance(found.tag, int) and isinstance(found.number, int)
            if known == types and numbers and found.number >= 0:
                return found
        raise plain.UnreadableError(f"a packet of {length} bytes no rank sends: {fields!r:.99}")


_JOINING, CONTROL, _SEVER = 1, 2, 3  # tags

_EVER = timedelta(days=300)
_GOODBYE = timedelta(seconds=1)
_MOMENT = timedelta(milliseconds=1)
_GRACE, _VERDICT, _TICK = 0.1, 5.0, 0.25  # seconds
_ANSWER = 1.0  # seconds for a rank to say for which rank it waits; a stopped process says nothing
# Seconds after the timeout until gloo ends a wait and closes all connections. Finding out which ranks are
# late takes less; a rank whose connection ends before that is reported as dead.
LATE = 5.0
_JUST_NOW = 1.0  # seconds
_CARD_BYTES = 128

_links: weakref.WeakSet[HostLinks] = weakref.WeakSet()

T = TypeVar("T")


class HostLinks:
    """This rank's connections to all ranks of a group.

    ``pids`` are the ranks' processes, for error messages, and ``far`` the ranks on other hosts.
    ``timeout``, in seconds, bounds connecting and transfers; ``bound()`` bounds a wait of the running op.
    ``on_failure`` is called once, in any thread, with the error of the group. ``awaited()`` returns the
    rank for which this one waits, here or on its own host, or None.
    """

    def __init__(
        self,
        rank: int,
        pids: Sequence[int],
        far: Sequence[int],
        *,
        timeout: float,
        bound: Callable[[], float],
        on_failure: Callable[[InterlaceError], None],
        awaited: Callable[[], int | None],
    ) -> None:
        self.rank, self.world_size, self.timeout = rank, len(pids), timeout
        self.pids, self._far, self.bound, self._on_failure = pids, far, bound, on_failure
        self._awaited, self._asking = awaited, threading.Lock()
        self._answers: dict[int, Future[Any]] = {}
        self._failure: InterlaceError | None = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._ended = threading.Event()
        self._left: set[int] = set()
        self.waiting: tuple[float, str, int, float] | None = None
        """This rank's wait: its end, its op, the awaited rank, and its length in seconds."""
        self.wires, self._until = Wires(rank), 0.0
        self.records, self.pieces = Wires(rank), Wires(rank)
        """The connections for messages; ``mail.py`` releases them."""
        self._by_name = {"wires": self.wires, "records": self.records, "pieces": self.pieces}
        self.doing = ""
        """The op that this rank is in, for errors."""
        self.peers = [peer for peer in range(self.world_size) if peer != rank]
        self._threads = [Helper(f"rank {peer}", self._listen, (peer,)) for peer in self.peers]
        self._threads.append(Helper("timeout", self._watch))
        self._gloo: Any = None
        self._descriptors: dict[int, int] = {}  # gloo's
        self._ticked, self._woke = math.inf, -math.inf
        self._under_way: dict[int, deque[Any]] = {peer: deque() for peer in self.peers}
        """Packets that may be in flight. If a wait for one ended, gloo would close all connections."""
        _links.add(self)

    def connect(
        self, store: Store, address: str | None, step: Callable[[], None], secret: bytes, group: str
    ) -> None:
        """Connect to all ranks of ``group``, which prove that they know ``secret``. Collective.

        ``address`` is this rank's. ``step()`` is called meanwhile. It bounds the wait and may raise; gloo
        is then left waiting.
        """
        polled = PolledStore(store, f"{group}/links", self._closed.is_set)
        at = listening_address(address)
        listening = [wires.listen(at) for wires in self._by_name.values()]

        def connect() -> None:
            size, timeout = self.world_size, self.timeout
            self._gloo, self._descriptors = connected(polled, self.rank, size, address, timeout)
            if not self._closed.is_set():
                own_address = (listening[0][0], *[port for _, port in listening])
                self._authenticate(secret, group, own_address)

        self.doing = f"joining group {group!r}"
        apart("interlace connecting", connect, step)
        self.doing = ""

    def give_up(self) -> None:
        """Clean up after connecting has failed: end the thread, and let peers notice."""
        self._closed.set()
        if self._gloo is not None:
            self._sever()
        for wires in self._by_name.values():
            wires.sever()

    def start(
        self, on_packet: Callable[[int, Packet], None], on_gone: Callable[[int], None]
    ) -> None:
        """Listen, once. A peer's thread calls ``on_packet(peer, packet)``; at its end ``on_gone(peer)``."""
        self._on_packet, self._on_gone = on_packet, on_gone
        self._ticked = time.monotonic()
        for thread in self._threads:
            thread.start()

    def _authenticate(self, secret: bytes, group: str, listening: tuple[object, ...]) -> None:
        """Make every peer prove first that it knows the job's secret; its proof has where it listens."""

        def proof(sender: int, receiver: int, where: str = "gloo") -> bytes:
            text = f"{sender} to {receiver} by {where}"
            return digest(secret, group.encode(), text.encode())

        card = plain.dumps(listening).ljust(_CARD_BYTES)
        cards = {peer: proof(self.rank, peer) + card for peer in self.peers}
        received = self._trade(cards, DIGEST_BYTES + _CARD_BYTES)
        addresses: dict[int, tuple[str, list[int]]] = {}
        for peer, message in received.items():
            if not hmac.compare_digest(message[:DIGEST_BYTES], proof(peer, self.rank)):
                self._sever()
                raise InterlaceError(
                    f"rank {self.rank}: who has connected as rank {peer} does not know the job's secret"
                )
            if peer in self._far:
                addresses[peer] = read_address(message[DIGEST_BYTES:].rstrip(), len(self._by_name))
        try:
            for number, (name, wires) in enumerate(self._by_name.items()):
                known = functools.partial(proof, where=name)
                at = {peer: (host, ports[number]) for peer, (host, ports) in addresses.items()}
                wires.connect(at, known, self.timeout, self._closed.is_set)
        except WireError as error:
            raise self.broken(error.peer, error, "joining") from None
        # no rank continues while others still wait
        self._trade(dict.fromkeys(self.peers, b"1"), 1)

    def _trade(self, messages: Mapping[int, bytes], nbytes: int) -> dict[int, bytes]:
        bare = {peer: bytearray(message) for peer, message in messages.items()}
        sent = {peer: torch.frombuffer(data, dtype=torch.uint8) for peer, data in bare.items()}
        received = {peer: torch.zeros(nbytes, dtype=torch.uint8) for peer in messages}
        begun: list[tuple[int, Any]] = []
        peer, bound = self.rank, timedelta(seconds=self.bound() + LATE)
        try:
            for begin, tensors in ((self._gloo.recv, received), (self._gloo.send, sent)):
                for peer, tensor in tensors.items():
                    begun.append((peer, begin([tensor], peer, _JOINING)))
            while begun:
                peer, work = begun.pop()
                work.wait(bound)
        except RuntimeError as error:
            raise self.broken(peer, error, "joining") from None
        return {peer: tensor.numpy().tobytes() for peer, tensor in received.items()}

    def _wait_for(self, peer: int) -> None:
        """Note that the running op waits for ``peer``; its timeout counts from its first wait."""
        bound = self.bound()
        self._until = self._until or time.monotonic() + bound
        self.waiting = (self._until, self.doing, peer, bound)

    @contextlib.contextmanager
    def moving(self, doing: str) -> Iterator[Wires]:
        """Wrap the moving of bytes. Afterwards, no unsent bytes are left on this rank."""
        self.check()
        self._until = 0.0
        self.wires.waits = self._wait_for  # no longer than needed: they would keep each other alive
        try:
            for peer in self.wires.ended():  # it has finished this op, or has failed before it
                if not self._says_that_it_leaves(peer):
                    raise WireError(peer, "closed")
            yield self.wires
            self.wires.flush()
        except WireError as error:
            raise self.broken(error.peer, error, doing) from None
        finally:
            self.waiting = self.wires.waits = None

    def _listen(self, peer: int) -> None:
        packet = torch.zeros(PACKET_BYTES, dtype=torch.uint8)
        while True:
            try:
                self._gloo.recv([packet], peer, CONTROL).wait(_EVER)
            except RuntimeError as error:
                if self._overslept():  # then the peer may well have closed it
                    self._on_gone(self.rank)
                self._on_gone(peer)
                self._lost(peer, error)
                return
            try:
                received = Packet.unpack(packet)
            except InterlaceError as error:
                self.fail(InterlaceError(f"rank {peer} sent rank {self.rank} {error}"))
                self._on_gone(peer)
                return
            if received.kind == LEFT:
                self._left.add(peer)
            elif received.kind == ASKED:
                late = self._awaited()
                if self._failure is None:  # otherwise the asking rank learns of that
                    self.send_all(Packet(AWAITS, number=0 if late is None else 1 + late), [peer])
            elif received.kind == AWAITS:
                _settle(self._answers.pop(peer, Future()), received.number.__int__)
            elif received.kind == ABORT:
                text = received.content.decode(errors="replace")
                self.fail(AbortedError(aborted_by(peer, text)), tell=False)
            else:
                self._on_packet(peer, received)

    def _listener(self, peer: int) -> threading.Thread:
        return self._threads[self.peers.index(peer)]

    def _lost(self, peer: int, error: Exception) -> None:
        """Handle the end of a connection: fail the group, unless the peer left or the group has failed."""
        if peer not in self._left:
            self._ended.wait(_GRACE)  # a survivor closes its connections: some rank says why
        if self._failure is not None or self._closed.is_set() or peer in self._left:
            return
        doing = self.doing or "no op, between two of them"
        self.fail(PeerDiedError(peer, self.pids[peer], doing, UNREACHABLE))

    def _watch(self) -> None:
        """End a wait that exceeds the group's timeout. Notice if this process was stopped."""
        while not self._closed.wait(min(_TICK, self.timeout / 10)):
            if (now := time.monotonic()) - self._ticked > self.timeout:
                self._woke = now
            self._ticked = math.inf  # asking other ranks who is late takes a while
            waiting = self.waiting
            if waiting is not None and now > waiting[0] and self._failure is None:
                _, doing, peer, bound = waiting
                late = self.culprit(peer)
                text = f"rank {self.rank}: {doing} has waited {bound:g} s for ranks {[late]}"
                self.fail(CollectiveTimeoutError(text, (late,)))
            self._ticked = time.monotonic()

    def _overslept(self) -> bool:
        """Return whether this process was stopped until now, for so long that others may have continued."""
        now = time.monotonic()
        return now - self._ticked > self.timeout or now < self._woke + _JUST_NOW

    def culprit(self, rank: int) -> int:
        """Return the rank for which ``rank`` waits in the end, by asking it and the ranks after it."""
        with self._asking:
            return follow(rank, self._ask, self.rank)

    def _ask(self, rank: int) -> int | None:
        self._answers[rank] = answer = Future[Any]()
        try:
            self.check()
            self.send_all(Packet(ASKED), [rank])
            number = answer.result(_ANSWER)
        except (InterlaceError, TimeoutError, FutureTimeoutError):
            return None
        return number - 1 if 0 < number <= self.world_size else None

    @property
    def failure(self) -> InterlaceError | None:
        """The group's error; a copy, because an exception collects tracebacks."""
        return self._failure and copy.copy(self._failure)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def has_left(self, peer: int) -> bool:
        return peer in self._left

    def check(self) -> None:
        """Raise the group's error, or that it is closed."""
        if (failure := self.failure) is not None:
            raise failure
        self.check_open()

    def check_open(self) -> None:
        if self._closed.is_set():
            raise InterlaceError(f"rank {self.rank}: the group is closed")

    def broken(self, peer: int, error: Exception, doing: str) -> InterlaceError:
        """Return why a connection has ended, as the listener of that peer has found out or soon will."""
        left = self._says_that_it_leaves(peer)
        if self._failure is None and not self._closed.is_set():
            if left:
                text = f"rank {peer} has left the group, and rank {self.rank} waits for it in"
                self.fail(of_another_rank(InterlaceError(f"{text} {doing}")))
            else:
                self._lost(peer, error)
        return self.failure or InterlaceError(f"rank {self.rank}: {doing}: the group is closed")

    def _says_that_it_leaves(self, peer: int) -> bool:
        """Return whether a peer whose connection ended announced it; wait a moment for that."""
        listener = self._listener(peer)
        if listener.ident is not None and listener is not threading.current_thread():
            until = time.monotonic() + _VERDICT  # earlier packets of the peer are read there first
            while listener.is_alive() and not self._ended.is_set() and time.monotonic() < until:
                if peer in self._left:
                    break
                listener.join(_MOMENT.total_seconds())
        return peer in self._left

    def fail(self, error: InterlaceError, *, tell: bool = True) -> None:
        """End every wait of this rank with ``error``; with ``tell``, of all ranks. Idempotent."""
        with self._lock:
            if self._failure is not None or self._closed.is_set():
                return
            self._failure = error
        self._ended.set()
        for answer in list(self._answers.values()):
            _settle(answer, self.check)
        self._on_failure(error)
        if tell:
            reason = error.args[0] if error.args else type(error).__name__
            packet = Packet(ABORT, content=str(reason).encode()[:LONGEST_REASON])
            self.send_all(packet, self.peers)
        for wires in self._by_name.values():
            wires.sever()

    def send_all(self, packet: Packet, peers: Sequence[int]) -> None:
        """Send a packet to the ``peers`` that have not left. Never waits."""
        message = packet.pack()
        for peer in peers:
            if peer not in self._left:
                with contextlib.suppress(RuntimeError):
                    self._under_way[peer].append(self._gloo.send([message], peer, CONTROL))

    def forget_mail(self) -> None:
        """Release the connections for messages, which are no longer used, once all bytes have arrived."""
        for wires in (self.records, self.pieces):
            if self._failure is None:
                wires.see_off(time.monotonic() + self.timeout)
            wires.forget()

    def _sever(self) -> None:
        """Close all connections for packets. A wait for a lost rank fails at once, so each is tried."""
        nothing = torch.zeros(1, dtype=torch.uint8)
        for peer in self.peers:
            with contextlib.suppress(RuntimeError):
                self._gloo.recv([nothing], peer, _SEVER).wait(_MOMENT)

    def close(self) -> None:
        """Tell the peers that this rank has left, and close the connections. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self._ended.set()
        self.send_all(Packet(LEFT), self.peers)
        for peer in self.peers:
            if (under_way := self._under_way[peer]) and self._listener(peer).is_alive():
                with contextlib.suppress(RuntimeError):
                    under_way[-1].wait(_GOODBYE)  # and with it the earlier ones
        self.wires.sever()
        # in good order: closing the receiving side would answer by a reset
        for wires in (self.records, self.pieces):
            wires.sever(socket.SHUT_WR if self._failure is None else socket.SHUT_RDWR)
        self._sever()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(5.0)
        self.wires.forget()
        self._under_way.clear()
        self._gloo = None  # and its descriptors; nothing here refers to the rest of the group now
        nothing: Any = lambda *_: None  # noqa: E731
        self._on_failure = self._on_packet = self._on_gone = nothing
        self._awaited = self.bound = nothing


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    """Complete ``future`` with the function's result, unless it is done already."""
    with contextlib.suppress(InvalidStateError):
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


def _after_fork_in_child() -> None:
    """Disable the parent's connections: a child that fails must not tell the parent's peers."""
    for links in list(_links):
        links._failure, links.peers = InterlaceError(f"rank {links.rank}: {OF_PARENT}"), []
        let_go(links._descriptors)
        for wires in links._by_name.values():
            wires.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
