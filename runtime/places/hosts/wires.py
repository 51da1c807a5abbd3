"""TCP connections between a rank and those on other hosts, for the bytes of collectives.

One connection per pair, used by whichever thread runs an op, one at a time. That thread sends and receives
itself: no other has to be woken, and what has been sent is on its way before anybody asks for it. Every
rank runs the same ops in the same order, so the order of bytes says what they are.

========  ==========================================================================================
post      hands bytes to the kernel as far as it takes them now; the rest is kept
take      returns when the asked bytes have come; meanwhile it hands on what is kept. Few bytes are received
          with what has come behind them, which is there then when it is asked for
drop      takes bytes that nobody wants
flush     returns when nothing is kept, or no more of what was posted up to some point
========  ==========================================================================================

Who posts and then waits for a rank of its own host, instead of calling ``take``, may keep bytes back for
which others wait. No circle of such waits closes if all ranks run the same program, and a rank flushes
what it has posted for a step before it waits for its own host in a later step than that in which the others
take it: the rank that is furthest behind can always go on.

gloo is not used for these: it needs an answer of the receiver before it sends, moves the bytes in threads
of its own, and no wait of it can be ended.

Both ends of a new connection prove that they know the job's secret.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import select
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import Callable, Mapping

from interlace.runtime.core import plain
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.hosts.joining import UnconnectedError
from interlace.runtime.processes.signed_store import DIGEST_BYTES
from interlace.runtime.processes.worker import Helper

Buffer = bytes | bytearray | memoryview
Proof = Callable[[int, int], bytes]
"""What the rank of the first number says to that of the second."""

_RANK = struct.Struct("<i")
_HELLO = _RANK.size + DIGEST_BYTES
_NOW, _ALL = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL)
_SEND = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_PIECES = 16  # of memory in one call of the kernel
_POLL_SECONDS = 0.1
_AHEAD = 16 << 10  # bytes; fewer are not received alone
_TCP_CLOSE = 7  # of the kernel's tcp_states.h
_DROPPED = 1 << 20  # bytes at once


class WireError(Exception):
    """The connection with the rank ``peer`` has ended."""

    def __init__(self, peer: int, why: object) -> None:
        super().__init__(f"the connection with rank {peer} has ended: {why}")
        self.peer = peer


class Wires:
    """One rank's connections. ``waits(peer)``, if set, is called before a wait for that rank."""

    waits: Callable[[int], object] | None = None

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._sockets: dict[int, socket.socket] = {}
        self._ends = select.poll()
        self._kept: dict[int, deque[memoryview]] = {}
        self._space: dict[int, memoryview] = {}
        self._ahead: dict[
            int, memoryview
        ] = {}  # of the space, what has come before it was asked for
        self._sent: dict[int, int] = {}
        self.posted: dict[int, int] = {}
        """Bytes in all, by rank."""
        self._listener: socket.socket | None = None

    # -- connecting ----------------------------------------------------------------------------

    def listen(self, address: str) -> tuple[str, int]:
        """Where others reach this rank from now on."""
        family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[
            0
        ]
        self._listener = socket.socket(family, kind, protocol)
        self._listener.bind(where)
        self._listener.listen(1024)
        host, port = self._listener.getsockname()[:2]
        return host, port

    def connect(
        self,
        addresses: dict[int, tuple[str, int]],
        proof: Proof,
        timeout: float,
        over: Callable[[], bool],
    ) -> None:
        """Connect with the ranks at these addresses, which do the same. ``over``: nobody waits for it."""
        until, listener = time.monotonic() + timeout, self._listener
        assert listener is not None
        first = [peer for peer in addresses if peer < self.rank]
        peer = self.rank
        try:
            for peer in first:
                wire = self._sockets[peer] = socket.create_connection(addresses[peer], timeout)
                wire.sendall(_RANK.pack(self.rank) + proof(self.rank, peer))
            self._accept(addresses.keys() - first, proof, until, over)
            for peer in first:
                said = _exactly(self._sockets[peer], DIGEST_BYTES)
                if not hmac.compare_digest(said, proof(peer, self.rank)):
                    raise InterlaceError(
                        f"rank {self.rank}: who answers for rank {peer} does not know the job's secret"
                    )
        except OSError as error:
            raise WireError(peer, error) from error
        finally:
            listener.close()
            self._listener = None
        for peer, wire in self._sockets.items():
            wire.settimeout(None)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._kept[peer] = deque()
            self._space[peer] = memoryview(bytearray(_AHEAD))
            self._ahead[peer] = self._space[peer][:0]
            self._sent[peer] = self.posted[peer] = 0
            self._ends.register(wire, select.POLLRDHUP)

    def _accept(
        self, missing: set[int], proof: Proof, until: float, over: Callable[[], bool]
    ) -> None:
        """Let those in who prove that they are one of the ``missing`` ranks; strangers wait for nothing."""
        listener, strangers = self._listener, dict[int, tuple[socket.socket, bytearray]]()
        assert listener is not None
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        try:
            while missing:
                if over() or time.monotonic() > until:
                    raise UnconnectedError(
                        f"rank {self.rank}: ranks {sorted(missing)} have not connected"
                    )
                for descriptor, _ in poll.poll(_POLL_SECONDS * 1000):
                    if descriptor == listener.fileno():
                        wire = listener.accept()[0]
                        strangers[wire.fileno()] = wire, bytearray()
                        poll.register(wire, select.POLLIN)
                        continue
                    wire, said = strangers[descriptor]
                    with contextlib.suppress(OSError):
                        more = wire.recv(_HELLO - len(said), socket.MSG_DONTWAIT)
                        said += more
                        if more and len(said) < _HELLO:
                            continue
                    poll.unregister(descriptor)
                    del strangers[descriptor]
                    (peer,) = _RANK.unpack_from(said.ljust(_HELLO))
                    known = peer in missing and hmac.compare_digest(
                        said[_RANK.size :], proof(peer, self.rank)
                    )
                    if known:
                        missing.discard(peer)
                        self._sockets[peer] = wire
                        with contextlib.suppress(OSError):  # who has ended meanwhile is found later
                            wire.sendall(proof(self.rank, peer))
                    else:
                        wire.close()
        finally:
            for wire, _ in strangers.values():
                wire.close()

    # -- moving --------------------------------------------------------------------------------

    def post(self, peer: int, *parts: Buffer) -> None:
        """Begin to send these bytes, which must not change until they are flushed."""
        for part in parts:
            if count := len(part):
                self._kept[peer].append(memoryview(part))
                self.posted[peer] += count
        self._push(peer)

    def _push(self, peer: int) -> None:
        """Hand to the kernel what it takes."""
        kept, wire = self._kept[peer], self._sockets[peer]
        try:
            while kept:
                some = kept if len(kept) <= _PIECES else [kept[n] for n in range(_PIECES)]
                sent = wire.sendmsg(some, (), _SEND)
                self._sent[peer] += sent
                while sent:
                    first = kept.popleft()
                    if sent < len(first):
                        kept.appendleft(first[sent:])
                        return
                    sent -= len(first)
        except BlockingIOError:
            return
        except OSError as error:
            raise WireError(peer, error) from error

    def take(self, peer: int, *into: Buffer) -> None:
        """Receive as many bytes as these have, one after the other, which can be written to."""
        wanted, ahead = [memoryview(part) for part in into if len(part)], self._ahead[peer]
        while wanted:
            if count := min(len(ahead), len(wanted[0])):
                wanted[0][:count] = ahead[:count]
                ahead = self._ahead[peer] = ahead[count:]
            elif sum(map(len, wanted)) < _AHEAD:
                ahead = self._space[peer][: self._received(peer, [self._space[peer]], 0)]
            else:
                count = self._received(peer, wanted, _ALL)
            while count:
                first = wanted.pop(0)
                if count < len(first):
                    wanted.insert(0, first[count:])
                count -= min(count, len(first))

    def drop(self, peer: int, count: int) -> None:
        """Receive so many bytes, to no purpose."""
        nowhere = bytearray(min(count, _DROPPED))
        while count > 0:
            self.take(peer, memoryview(nowhere)[: min(count, _DROPPED)])
            count -= _DROPPED

    def _received(self, peer: int, views: list[memoryview], how: int) -> int:
        """How many bytes have been put into ``views``, at least one; waits for that."""
        wire = self._sockets[peer]
        try:
            while any(self._kept.values()):
                try:
                    count = wire.recvmsg_into(views, 0, _NOW)[0]
                    break
                except BlockingIOError:
                    self._wait(peer)
                    self._turn(peer)
            else:
                self._wait(peer)
                count = wire.recvmsg_into(views, 0, how)[0]
        except OSError as error:
            raise WireError(peer, error) from error
        if count == 0:
            raise WireError(peer, "closed")
        return count

    def _wait(self, peer: int) -> None:
        if self.waits is not None:
            self.waits(peer)

    def flush(self, posted: Mapping[int, int] | None = None) -> None:
        """Send what has been posted; only as far as to these counts of bytes, if any are passed."""
        for peer, count in (self.posted if posted is None else posted).items():
            while self._sent[peer] < count:
                self._wait(peer)
                self._turn(None)

    def _turn(self, receiving: int | None) -> None:
        """Wait until ``receiving`` has sent something, or something that is kept can be sent; send that."""
        poll, sending = select.poll(), {}
        for peer, kept in self._kept.items():
            if kept or peer == receiving:
                wire = self._sockets[peer]
                if kept:
                    sending[wire.fileno()] = peer
                poll.register(
                    wire, select.POLLOUT * bool(kept) | select.POLLIN * (peer == receiving)
                )
        for descriptor, what in poll.poll():
            if descriptor in sending and what & ~select.POLLIN:
                self._push(sending[descriptor])

    def ended(self) -> list[int]:
        """The ranks that have closed their ends, even if there is something left to read."""
        closed = {descriptor for descriptor, _ in self._ends.poll(0)}
        return [peer for peer, wire in self._sockets.items() if wire.fileno() in closed]

    def wire(self, peer: int) -> socket.socket:
        """The connection with ``peer``, for who does not use the methods above."""
        return self._sockets[peer]

    # -- ending --------------------------------------------------------------------------------

    def sever(self, how: int = socket.SHUT_RDWR) -> None:
        """End all connections; whoever waits for one, here or at its other end, stops waiting."""
        for wire in list(self._sockets.values()):
            with contextlib.suppress(OSError):
                wire.shutdown(how)

    def see_off(self, until: float) -> None:
        """Leave it to a thread to close the connections when all that was sent has come to the peers.

        A connection that is closed before answers what comes with a reset, and then forgets the rest.
        """
        sent = {peer: wire for peer, wire in self._sockets.items() if _under_way(wire)}
        if sent:
            with contextlib.suppress(RuntimeError):  # no thread: the kernel does what it can
                Helper("interlace leaving", _see_off, ([*sent.values()], until)).start()
                for peer in sent:
                    del self._sockets[peer]

    def forget(self) -> None:
        """Give the descriptors back. Nobody waits any more; what another process has of them lives on."""
        if self._listener is not None:
            self._listener.close()
        for wire in self._sockets.values():
            wire.close()
        for each in (self._sockets, self._kept, self._space, self._ahead):
            each.clear()


def read_address(data: bytes, count: int) -> tuple[str, list[int]]:
    """Where another rank says that it listens: its host, and so many ports."""
    found = plain.loads(data)
    if not isinstance(found, tuple) or [*map(type, found)] != [str] + [int] * count:
        raise plain.UnreadableError(f"these bytes are no address: {found!r:.99}")
    host, *ports = found
    return host, ports


def _under_way(wire: socket.socket) -> bool:
    """Whether something that was sent has not come to the peer, and can; what comes here is let go."""
    try:
        while wire.recv(_DROPPED, _NOW):
            pass
    except BlockingIOError:
        pass
    except OSError:
        return False
    ended = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE
    return not ended and any(fcntl.ioctl(wire, termios.TIOCOUTQ, bytes(4)))


def _see_off(wires: list[socket.socket], until: float) -> None:
    nap = 1e-3
    while wires and time.monotonic() < until:
        time.sleep(nap := min(2 * nap, 0.05))
        for wire in [*wires]:
            if not _under_way(wire):
                wire.close()
                wires.remove(wire)
    for wire in wires:
        wire.close()


def _exactly(wire: socket.socket, count: int) -> bytes:
    """The next ``count`` bytes."""
    said = b""
    while len(said) < count:
        more = wire.recv(count - len(said))
        if not more:
            raise ConnectionError("closed")
        said += more
    return said
