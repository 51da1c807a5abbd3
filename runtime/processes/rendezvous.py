"""The rendezvous of the processes of one host: addresses, and file descriptors handed over.

Finding: every rank binds an unnamed (kernel-chosen) abstract unix socket and puts its address into
the store. Of two ranks the higher one connects; both ask the kernel for the other's user. When a rank is
connected with all it closes its listener: abstract sockets have no permissions, and whoever could still
connect could fill its backlog. Handing over: a rank sends everyone one message with the descriptors
attached (SCM_RIGHTS), and takes one from everyone. Connections hold the messages, so no order can
deadlock; nothing here blocks.

Rejected: ``/proc/<pid>/fd/<fd>`` and ``pidfd_getfd``. Both ask for ptrace permission, which file
capabilities, ``PR_SET_DUMPABLE`` and Yama take away between processes of one user, and both need a
shared pid namespace. Abstract sockets need a shared network namespace only and leave no name
behind. For the same reason every process sends a pidfd of itself instead of its pid: no reuse of a
pid can deceive.

The nonce: rank 0 draws 16 random bytes and every key, message and segment header carries them.
Rank 0 takes the nonce back before any rank can leave :func:`meet`, so the next generation under the
same prefix waits for its own. Whatever an earlier, crashed generation left is found to be foreign.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError, PeerDiedError
from interlace.runtime.processes.segment import LAYOUT_VERSION, MAGIC, NONCE_BYTES, compare
from interlace.runtime.processes.signed_store import STORE_POLL_SECONDS, glance

if TYPE_CHECKING:
    from interlace.runtime.compat.torch_groups import Store

T = TypeVar("T")

_MESSAGE = struct.Struct(f"<8sQ{NONCE_BYTES}sQQQQ")  # a Label
_CREDENTIALS = struct.Struct("3i")
_MOST_DESCRIPTORS = 8
PROBE_SECONDS = 0.1


class Label(NamedTuple):
    """The label of a message: its group, its number, its sender and its receiver."""

    magic: bytes
    layout_version: int
    nonce: bytes
    world_size: int
    receiver: int
    sequence_number: int
    sender: int


@dataclass
class Delivery:
    """One peer's message: its process id and descriptors, which the receiver owns."""

    pid: int
    descriptors: list[int]


class Rendezvous:
    """This rank's connections to its peers, by which descriptors are handed over."""

    def __init__(self, rank: int, world_size: int, nonce: bytes) -> None:
        self.nonce = nonce
        self._rank, self._world_size = rank, world_size
        self.addresses: dict[int, bytes] = {}  # of the peers
        self._connections: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}
        self._unknown: list[socket.socket] = []  # have not said who they are
        self._sequence = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind("")  # the kernel chooses a free abstract name
            self._listener.listen(socket.SOMAXCONN)
            self._listener.setblocking(False)
            self.address: bytes = self._listener.getsockname()
        except BaseException:
            self._listener.close()
            raise

    def meet_peers(self, step: Callable[[Sequence[int]], None]) -> None:
        """Connect with every peer. ``step(missing ranks)`` is called meanwhile. Nobody else can afterwards.

        The higher rank connects. A listener stays open until its rank has all peers: one that refuses has
        come to an end, or its rank's connection is here.
        """
        probed = time.monotonic()
        while missing := [peer for peer in self.addresses if peer not in self._connections]:
            moved = self._accept()
            for peer in missing:
                if peer < self._rank and (connection := self._dial(peer)) is not None:
                    label = self._label(sender=self._rank, receiver=peer)
                    try:
                        connection.send(_MESSAGE.pack(*label))
                    except ConnectionError:  # it has given up meanwhile
                        connection.close()
                        raise self.died(peer, "joining, connecting to its unix socket") from None
                    self._connections[peer] = connection
                    moved = True
            if not moved:
                step(missing)
                if (now := time.monotonic()) > probed + PROBE_SECONDS:
                    probed = now
                    self._probe(missing)
        self._close_listener()

    def _probe(self, missing: Sequence[int]) -> None:
        for peer in missing:
            if peer > self._rank:
                try:
                    connection = self._dial(peer)
                except PeerDiedError:
                    self._accept()
                    if peer not in self._connections:
                        raise
                else:
                    if connection is not None:
                        connection.close()

    def _dial(self, peer: int) -> socket.socket | None:
        """A connection to the listener of ``peer``; None if it is busy."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            connection.connect(self.addresses[peer])
            uid = _uid(connection)
            if uid != os.geteuid():
                raise PermissionError(f"a process of user {uid} has the socket")
        except BlockingIOError:
            connection.close()
            return None
        except ConnectionRefusedError:  # also if it is in another network namespace
            connection.close()
            raise self.died(peer, "joining, connecting to its unix socket") from None
        except OSError as error:
            connection.close()
            raise InterlaceError(
                f"rank {self._rank} cannot reach rank {peer} through its unix socket ({error})"
            ) from error
        return connection

    def _accept(self) -> bool:
        """Take in who has connected, and who of these has said which rank it is. Whether anything moved."""
        moved = False
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                moved = True
                connection.setblocking(False)
                if _uid(connection) == os.geteuid():
                    self._unknown.append(connection)
                else:
                    connection.close()  # abstract sockets have no permissions; strangers are not answered
        for connection in list(self._unknown):
            with contextlib.suppress(BlockingIOError):
                try:
                    message = connection.recv(_MESSAGE.size + 1)
                except ConnectionError:
                    message = b""
                self._unknown.remove(connection)
                try:  # who does not know the nonce is nobody's peer, whatever it says
                    known = self.nonce in message
                    rank = self._sender(message, self._sequence) if known else None
                except BaseException:
                    connection.close()
                    raise
                if rank is None or rank < self._rank or rank in self._connections:
                    connection.close()
                else:
                    self._connections[rank], moved = connection, True
        return moved

    def hung_up(self, peers: Collection[int]) -> list[int]:
        """Those of ``peers`` that have closed their ends."""
        poll = select.poll()
        connections = [
            (peer, connection) for peer in peers if (connection := self._connections.get(peer))
        ]
        ranks = {connection.fileno(): peer for peer, connection in connections}
        for descriptor in ranks.keys() - {-1}:  # another thread closes them
            poll.register(descriptor, select.POLLRDHUP)
        ended = select.POLLRDHUP | select.POLLHUP
        return [ranks[descriptor] for descriptor, what in poll.poll(0) if what & ended]

    def died(self, peer: int, doing: str) -> PeerDiedError:
        return PeerDiedError(peer, self.pids.get(peer, 0), doing)

    def trade(
        self, descriptors: Sequence[int], step: Callable[[Sequence[int]], None]
    ) -> dict[int, Delivery]:
        """Send ``descriptors`` to all and take theirs. ``step(missing ranks)`` is called meanwhile."""
        self._sequence += 1
        received: dict[int, Delivery] = {}
        try:
            for peer in self._connections:
                while not self._send(peer, descriptors):
                    step([peer])
            while missing := [peer for peer in self._connections if peer not in received]:
                if not any([self._receive(peer, received) for peer in missing]):
                    step(missing)
        except BaseException:
            for delivery in received.values():
                close_all(delivery.descriptors)
            raise
        return received

    def _label(self, *, sender: int, receiver: int) -> Label:
        size, sequence = self._world_size, self._sequence
        return Label(MAGIC, LAYOUT_VERSION, self.nonce, size, receiver, sequence, sender)

    def _send(self, peer: int, descriptors: Sequence[int]) -> bool:
        message = _MESSAGE.pack(*self._label(sender=self._rank, receiver=peer))
        try:
            socket.send_fds(self._connections[peer], [message], descriptors)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True  # it has ended, which is found when its message does not come
        return True

    def _receive(self, peer: int, received: dict[int, Delivery]) -> bool:
        """Take one message of ``peer`` if there is one; False if not."""
        try:
            message, descriptors, flags, _ = socket.recv_fds(
                self._connections[peer], _MESSAGE.size + 1, _MOST_DESCRIPTORS
            )
        except (BlockingIOError, ConnectionError):
            return False
        if not message:
            return False
        try:
            if flags & socket.MSG_CTRUNC:
                raise InterlaceError(
                    f"rank {self._rank} cannot take the descriptors that rank {peer} has sent: too many "
                    "files are open in its process (ulimit -n)"
                )
            sender = self._sender(message, self._sequence)
        except BaseException:
            close_all(descriptors)
            raise
        if sender != peer:  # None: of an earlier trade, which this rank has given up
            close_all(descriptors)
            return True
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        received[peer] = Delivery(self.pids.get(peer, 0), descriptors)
        return True

    def _sender(self, message: bytes, sequence: int) -> int | None:
        """The sender; None for one of another group, or of an earlier trade."""
        what = f"rank {self._rank} got a message that is not of this group"
        if len(message) != _MESSAGE.size:
            raise InterlaceError(f"{what}: it has {len(message)} bytes")
        found = Label(*_MESSAGE.unpack(message))
        if found.magic == MAGIC and found.nonce != self.nonce:
            return None  # of a generation that crashed, whose process has found this rank's new address
        expected = self._label(sender=found.sender, receiver=self._rank)
        late = found.sequence_number < sequence
        if late and found._replace(sequence_number=sequence) == expected:
            return None
        compare(what, (name.replace("_", " ") for name in Label._fields), found, expected)
        if found.sender not in self.addresses:
            raise InterlaceError(f"{what}: sender rank {found.sender} is unexpected")
        return found.sender

    def _close_listener(self) -> None:
        for connection in (self._listener, *self._unknown):
            connection.close()
        self._unknown.clear()

    def close(self) -> None:
        self._close_listener()
        for connection in [*self._connections.values()]:
            connection.close()
        self._connections.clear()


def _uid(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return int(uid)


def meet(
    store: Store,
    rank: int,
    world_size: int,
    value: bytes,
    read: Callable[[bytes], T],
    group: str,
    key: str,
    timeout: float,
    watch: Callable[[dict[int, T]], None] = lambda found: None,
) -> tuple[list[T], str]:
    """``read`` of every rank's ``value``, by rank, and a nonce that only these ranks have. Collective.

    All keys begin with ``key``. Raises CollectiveTimeoutError that names the ranks which have not joined
    ``group`` within ``timeout`` seconds; InterlaceError with rank and key of a value that cannot be read.
    ``watch`` is called with what was read, now and then, and raises if a rank will never come. That of rank
    0 speaks for all: who does not see why itself raises InterlaceError with the same text.
    """
    deadline = (probed := time.monotonic()) + timeout
    own = os.urandom(NONCE_BYTES).hex()
    nonce = ""
    found: dict[int, T] = {}

    def unread() -> list[int]:
        """Read what there is; ranks without a value."""
        for peer in (peer for peer in range(world_size) if peer not in found):
            if (said := glance(store, its_key := f"{key}/{nonce}/{peer}")) is not None:
                try:
                    found[peer] = read(bytes.fromhex(said.decode()))
                except (ValueError, InterlaceError) as error:
                    raise InterlaceError(
                        f"rank {rank}: the store's value of {its_key!r}, which rank {peer} of group "
                        f"{group!r} writes, is nothing that a rank writes but {said!r:.99} ({error})"
                    ) from error
        return [peer for peer in range(world_size) if peer not in found]

    def missing() -> list[int]:
        """Ranks without a value. A nonce of a run that crashed is replaced by rank 0's new one."""
        nonlocal nonce
        current = (glance(store, key) or b"").decode(errors="replace")
        if rank == 0 and current != own:  # at first; and when somebody has put another one there
            store.set(key, own)
            current = own
        if len(current) != 2 * NONCE_BYTES:
            return [0]
        if current != nonce:
            nonce = current
            found.clear()
            store.set(f"{key}/{nonce}/{rank}", value.hex())
        return unread()

    def opened() -> list[int]:
        """Rank 0 has taken the nonce back; until then a new one may still replace a stale one."""
        if nonce and (said := glance(store, f"{key}/{nonce}/open")) is not None:
            if said:  # rank 0 has given up
                watch(found)
                text = said.decode(errors="replace")
                raise InterlaceError(f"rank {rank}: joining has failed: {text}")
            return unread()
        return missing() or [0]

    # polls: Store.wait prints a warning on stderr when it times out
    while ranks := missing() if rank == 0 else opened():
        if (now := time.monotonic()) > deadline:
            raise CollectiveTimeoutError(
                f"rank {rank}: ranks {ranks} have not joined group {group!r}", tuple(ranks)
            )
        if now > probed + PROBE_SECONDS:
            probed = now
            try:
                watch(found)
            except InterlaceError as error:
                if rank == 0 and nonce:
                    store.set(f"{key}/{nonce}/open", str(error))
                raise
        time.sleep(STORE_POLL_SECONDS)
    if rank == 0:
        store.delete_key(key)
        store.set(f"{key}/{nonce}/open", "")
    return [found[peer] for peer in range(world_size)], nonce


def forget(store: Store, rank: int, key: str, nonce: str) -> None:
    """Delete this rank's keys. Every rank must have come back from :func:`meet`."""
    store.delete_key(f"{key}/{nonce}/{rank}")
    if rank == 0:
        store.delete_key(f"{key}/{nonce}/open")


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
