"""The rendezvous of the processes of one host: addresses, and file descriptors handed over.

Finding: every rank binds an unnamed (kernel-chosen) abstract unix socket and puts its address into
the store. Handing over: a rank connects to every peer's socket, sends one message with the
descriptors attached (SCM_RIGHTS), and takes one message from everyone. A socket's backlog holds
the messages of all peers, so nobody has to accept before others can send, and no order can
deadlock.

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

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError
from interlace.runtime.places.one_host.segment import LAYOUT_VERSION, MAGIC, NONCE_BYTES, compare

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_MESSAGE = struct.Struct(f"<8sQ{NONCE_BYTES}sQQQQ")  # a Label
_CREDENTIALS = struct.Struct("3i")
_MOST_DESCRIPTORS = 8
_STORE_POLL_SECONDS = 2e-3


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
    """This rank's socket and the addresses of all peers. Hands descriptors over."""

    def __init__(self, rank: int, world_size: int, nonce: bytes) -> None:
        self.nonce = nonce
        self._rank, self._world_size = rank, world_size
        self.addresses: dict[int, bytes] = {}  # of the peers
        self._sequence = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind("")  # the kernel chooses a free abstract name
            self._listener.listen(world_size)
            self._listener.setblocking(False)
            self.address: bytes = self._listener.getsockname()
        except BaseException:
            self._listener.close()
            raise

    def trade(
        self, descriptors: Sequence[int], step: Callable[[Sequence[int]], None]
    ) -> dict[int, Delivery]:
        """Send ``descriptors`` to all and take theirs. ``step(missing ranks)`` is called meanwhile."""
        self._sequence += 1
        for peer in self.addresses:
            self._send(peer, descriptors)
        received: dict[int, Delivery] = {}
        try:
            while len(received) < len(self.addresses):
                if not self._accept(received):
                    step([peer for peer in self.addresses if peer not in received])
        except BaseException:
            for delivery in received.values():
                close_all(delivery.descriptors)
            raise
        return received

    def _label(self, *, sender: int, receiver: int) -> Label:
        size, sequence = self._world_size, self._sequence
        return Label(MAGIC, LAYOUT_VERSION, self.nonce, size, receiver, sequence, sender)

    def _send(self, peer: int, descriptors: Sequence[int]) -> None:
        message = _MESSAGE.pack(*self._label(sender=self._rank, receiver=peer))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                connection.connect(self.addresses[peer])
                socket.send_fds(connection, [message], descriptors)
            except OSError as error:
                raise InterlaceError(
                    f"rank {self._rank} cannot reach rank {peer} through its unix socket "
                    f"({error}): its process has ended, it is in another network namespace, or "
                    "the store still holds keys of an earlier generation"
                ) from error

    def _accept(self, received: dict[int, Delivery]) -> bool:
        """Take one message if there is one; False if not."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return False
        with connection:
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _gid = _CREDENTIALS.unpack(raw)
            if uid != os.geteuid():
                return True  # abstract sockets have no permissions; strangers are not answered
            connection.settimeout(1.0)  # the sender sends right after it has connected
            try:
                message, descriptors, flags, _ = socket.recv_fds(
                    connection, _MESSAGE.size + 1, _MOST_DESCRIPTORS
                )
            except TimeoutError:
                return True
        try:
            rank = self._sender(message, flags, received)
        except BaseException:
            close_all(descriptors)
            raise
        if rank is None:
            close_all(descriptors)
            return True
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        received[rank] = Delivery(pid, descriptors)
        return True

    def _sender(self, message: bytes, flags: int, received: dict[int, Delivery]) -> int | None:
        """The sender; None for one of an earlier trade, which this rank has given up."""
        what = f"rank {self._rank} got a message that is not of this group"
        if len(message) != _MESSAGE.size or flags & socket.MSG_CTRUNC:
            raise InterlaceError(f"{what}: {len(message)} bytes, flags {flags:#x}")
        found = Label(*_MESSAGE.unpack(message))
        expected = self._label(sender=found.sender, receiver=self._rank)
        late = found.sequence_number < self._sequence
        if late and found._replace(sequence_number=self._sequence) == expected:
            return None
        compare(what, (name.replace("_", " ") for name in Label._fields), found, expected)
        if found.sender not in self.addresses or found.sender in received:
            raise InterlaceError(f"{what}: sender rank {found.sender} is unexpected")
        return found.sender

    def close(self) -> None:
        self._listener.close()


def connect(
    store: Store | None, rank: int, world_size: int, *, prefix: str, timeout: float
) -> Rendezvous:
    """Agree on a nonce through ``store`` and learn the addresses of all ranks.

    ``prefix`` names the group and its generation. The caller must call :func:`forget_group` on all
    ranks once everyone has connected, and must not let any rank go on before all have. A group of one
    rank needs no store.
    """
    rendezvous = Rendezvous(rank, world_size, os.urandom(NONCE_BYTES))
    if world_size == 1:
        return rendezvous
    assert store is not None
    try:
        addresses, nonce = meet(
            store, rank, world_size, rendezvous.address, prefix, f"{prefix}/nonce", timeout
        )
    except BaseException:
        rendezvous.close()
        raise
    rendezvous.nonce = bytes.fromhex(nonce)
    rendezvous.addresses = {peer: each for peer, each in enumerate(addresses) if peer != rank}
    return rendezvous


def forget_group(
    store: Store | None, rank: int, world_size: int, prefix: str, nonce: bytes
) -> None:
    """Delete all that this rank has left in the store; all ranks must have connected."""
    if store is not None and world_size > 1:
        forget(store, rank, f"{prefix}/nonce", nonce.hex())
        if rank == 0:
            store.delete_key(f"{prefix}/nonce")


def meet(
    store: Store, rank: int, world_size: int, value: bytes, group: str, key: str, timeout: float
) -> tuple[list[bytes], str]:
    """Every rank's ``value``, by rank, and a nonce that only these ranks have. Collective.

    All keys begin with ``key``. Raises CollectiveTimeoutError that names the ranks which have not joined
    ``group`` within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    if rank == 0:
        store.set(key, os.urandom(NONCE_BYTES).hex())
    nonce, keys = "", {}

    def missing() -> list[int]:
        """Ranks without a value. A nonce of a run that crashed is replaced by rank 0's new one."""
        nonlocal nonce, keys
        if not store.check([key]) or not (current := store.get(key).decode()):
            return [0]
        if current != nonce:
            nonce = current
            keys = {peer: f"{key}/{nonce}/{peer}" for peer in range(world_size)}
            store.set(keys[rank], value.hex())
        return [peer for peer, its_key in keys.items() if not store.check([its_key])]

    def opened() -> list[int]:
        """Rank 0 has taken the nonce back; until then a new one may still replace a stale one."""
        if store.check([f"{key}/{nonce}/open"]):
            return []
        return missing() or [0]

    # polls: Store.wait prints a warning on stderr when it times out
    while ranks := missing() if rank == 0 else opened():
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"rank {rank}: ranks {ranks} have not joined group {group!r}", tuple(ranks)
            )
        time.sleep(_STORE_POLL_SECONDS)
    if rank == 0:
        store.set(key, "")  # deleted, it would let a get that follows a check wait forever
        store.set(f"{key}/{nonce}/open", "")
    return [bytes.fromhex(store.get(each).decode()) for each in keys.values()], nonce


def forget(store: Store, rank: int, key: str, nonce: str) -> None:
    """Delete this rank's keys. Every rank must have come back from :func:`meet`."""
    store.delete_key(f"{key}/{nonce}/{rank}")
    if rank == 0:
        store.delete_key(f"{key}/{nonce}/open")


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
