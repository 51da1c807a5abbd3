"""TCP connections between a rank and those on other hosts, for the bytes of collectives.

There is one connection per pair of ranks. The thread that runs an op uses it, one thread at a time. That
thread sends and receives itself: no other thread has to be woken, and bytes that were sent are on the wire
before any rank asks for them. Every rank runs the same ops in the same order, so the order of bytes says
what they are.

========  ==========================================================================================
post      gives bytes to the kernel as far as it accepts them now; the rest is kept
take      returns when the requested bytes have arrived; meanwhile it sends kept bytes. A few bytes
          are received together with the bytes after them, which a later call then finds at once
drop      receives bytes that are not needed
flush     returns when nothing is kept, or nothing that was posted up to some point
========  ==========================================================================================

A rank that posts bytes and then waits for its own host, instead of calling ``take``, may keep bytes for
which others wait. No circle of such waits forms if all ranks run the same program and follow one rule: a
rank flushes the bytes of a step before it waits for its own host in a later step than the one in which the
others take them. Then the rank that is furthest behind can always continue.

gloo is not used here: it needs an answer from the receiver before it sends, moves the bytes in other
threads, and its waits cannot be ended.
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
from interlace.runtime.places.hosts.host_map import UnconnectedError
from interlace.runtime.processes.signed_store import DIGEST_BYTES
from interlace.runtime.processes.worker import Helper

Buffer = bytes | bytearray | memoryview
Address = tuple[str, int]
Proof = Callable[[int, int], bytes]
"""Returns what the rank of the first number sends to that of the second as its proof."""

_RANK = struct.Struct("<i")
_HELLO = _RANK.size + DIGEST_BYTES
_NOW, _ALL = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL)
_SEND = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_PIECES = 16  # pieces of memory in one system call
_POLL_SECONDS = 0.1
_AHEAD = 16 << 10  # bytes; a smaller number is not received alone
_TCP_CLOSE = 7  # from the kernel's tcp_states.h
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
        self._ahead: dict[int, memoryview] = {}  # bytes that arrived before they were requested
        self._sent: dict[int, int] = {}
        self.posted: dict[int, int] = {}
        """The number of bytes posted so far, by rank."""
        self._listener: socket.socket | None = None

    def listen(self, address: str) -> Address:
        """Listen, and return the address at which others reach this rank from now on."""
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        self._listener = socket.socket(family, kind, protocol)
        self._listener.bind(where)
        self._listener.listen(1024)
        host, port = self._listener.getsockname()[:2]
        return host, port

    def connect(
        self, addresses: dict[int, Address], proof: Proof, timeout: float, over: Callable[[], bool]
    ) -> None:
        """Connect to the ranks at these addresses, which do the same, until ``over()`` returns True."""
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
                signature = _exactly(self._sockets[peer], DIGEST_BYTES)
                if not hmac.compare_digest(signature, proof(peer, self.rank)):
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
        """Accept ``missing`` ranks that prove who they are. Strangers do not delay anything."""
        listener, strangers = self._listener, dict[int, tuple[socket.socket, bytearray]]()
        assert listener is not None
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        try:
            while missing:
                if over() or time.monotonic() > until:
                    text = f"ranks {sorted(missing)} have not connected"
                    raise UnconnectedError(f"rank {self.rank}: {text}")
                for descriptor, _ in poll.poll(_POLL_SECONDS * 1000):
                    if descriptor == listener.fileno():
                        wire = listener.accept()[0]
                        strangers[wire.fileno()] = wire, bytearray()
                        poll.register(wire, select.POLLIN)
                        continue
                    wire, received = strangers[descriptor]
                    with contextlib.suppress(OSError):
                        more = wire.recv(_HELLO - len(received), socket.MSG_DONTWAIT)
                        received += more
                        if more and len(received) < _HELLO:
                            continue
                    poll.unregister(descriptor)
                    del strangers[descriptor]
                    (peer,) = _RANK.unpack_from(received.ljust(_HELLO))
                    known = peer in missing and hmac.compare_digest(
                        received[_RANK.size :], proof(peer, self.rank)
                    )
                    if known:
                        missing.discard(peer)
                        self._sockets[peer] = wire
                        with contextlib.suppress(OSError):  # if it has ended, that is found later
                            wire.sendall(proof(self.rank, peer))
                    else:
                        wire.close()
        finally:
            for wire, _ in strangers.values():
                wire.close()

    def post(self, peer: int, *parts: Buffer) -> None:
        """Begin to send these bytes, which must not change until they are flushed."""
        for part in parts:
            if count := len(part):
                self._kept[peer].append(memoryview(part))
                self.posted[peer] += count
        self._push(peer)

    def _push(self, peer: int) -> None:
        """Give the kernel as many bytes as it accepts."""
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
        """Receive as many bytes as these writable buffers have, one buffer after the other."""
        wanted, ahead = [memoryview(part) for part in into if len(part)], self._ahead[peer]
        while wanted:
            if count := min(len(ahead), len(wanted[0])):
                wanted[0][:count] = ahead[:count]
                ahead = self._ahead[peer] = ahead[count:]
            elif sum(map(len, wanted)) < _AHEAD:
                ahead = self._space[peer][: self._receive(peer, [self._space[peer]], 0)]
            else:
                count = self._receive(peer, wanted, _ALL)
            while count:
                first = wanted.pop(0)
                if count < len(first):
                    wanted.insert(0, first[count:])
                count -= min(count, len(first))

    def drop(self, peer: int, count: int) -> None:
        nowhere = bytearray(min(count, _DROPPED))
        while count > 0:
            self.take(peer, memoryview(nowhere)[: min(count, _DROPPED)])
            count -= _DROPPED

    def _receive(self, peer: int, views: list[memoryview], flags: int) -> int:
        """Receive at least one byte into ``views``, waiting if necessary. Return the number of bytes."""
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
                count = wire.recvmsg_into(views, 0, flags)[0]
        except OSError as error:
            raise WireError(peer, error) from error
        if count == 0:
            raise WireError(peer, "closed")
        return count

    def _wait(self, peer: int) -> None:
        if self.waits is not None:
            self.waits(peer)

    def flush(self, posted: Mapping[int, int] | None = None) -> None:
        """Send the posted bytes; with ``posted``, only up to these counts of bytes."""
        for peer, count in (self.posted if posted is None else posted).items():
            while self._sent[peer] < count:
                self._wait(peer)
                self._turn(None)

    def _turn(self, receiving: int | None) -> None:
        """Wait until ``receiving`` has sent something or kept bytes can be sent; send those."""
        poll, sending = select.poll(), {}
        for peer, kept in self._kept.items():
            if kept or peer == receiving:
                wire = self._sockets[peer]
                if kept:
                    sending[wire.fileno()] = peer
                events = select.POLLOUT * bool(kept) | select.POLLIN * (peer == receiving)
                poll.register(wire, events)
        for descriptor, what in poll.poll():
            if descriptor in sending and what & ~select.POLLIN:
                self._push(sending[descriptor])

    def ended(self) -> list[int]:
        """Return the ranks that have closed their ends, even if there are bytes left to read."""
        closed = {descriptor for descriptor, _ in self._ends.poll(0)}
        return [peer for peer, wire in self._sockets.items() if wire.fileno() in closed]

    def wire(self, peer: int) -> socket.socket:
        """Return the connection with ``peer``, for code that does not use the methods above."""
        return self._sockets[peer]

    def sever(self, direction: int = socket.SHUT_RDWR) -> None:
        """End all connections. This also ends waits for a connection, here and at its other end."""
        for wire in list(self._sockets.values()):
            with contextlib.suppress(OSError):
                wire.shutdown(direction)

    def see_off(self, until: float) -> None:
        """Start a thread that closes the connections when the peers have received all that was sent.

        A connection that is closed earlier answers arriving bytes with a reset and then loses the rest.
        """
        sent = {peer: wire for peer, wire in self._sockets.items() if _under_way(wire)}
        if sent:
            with contextlib.suppress(RuntimeError):  # without a thread: the kernel does what it can
                Helper("interlace leaving", _see_off, ([*sent.values()], until)).start()
                for peer in sent:
                    del self._sockets[peer]

    def forget(self) -> None:
        """Release the descriptors after all waits have ended. Copies in another process stay open."""
        if self._listener is not None:
            self._listener.close()
        for wire in self._sockets.values():
            wire.close()
        for each in (self._sockets, self._kept, self._space, self._ahead):
            each.clear()


def read_address(data: bytes, count: int) -> tuple[str, list[int]]:
    """Parse where another rank listens: its host, and ``count`` ports."""
    found = plain.loads(data)
    if not isinstance(found, tuple) or [*map(type, found)] != [str] + [int] * count:
        raise plain.UnreadableError(f"these bytes are not an address: {found!r:.99}")
    host, *ports = found
    return host, ports


def _under_way(wire: socket.socket) -> bool:
    """Return whether sent bytes can still arrive at the peer. Received bytes are discarded."""
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
    received = b""
    while len(received) < count:
        more = wire.recv(count - len(received))
        if not more:
            raise ConnectionError("closed")
        received += more
    return received
