"""The rendezvous of the processes of one host: they exchange socket addresses and file descriptors.

Finding peers: every rank binds an unnamed (kernel-chosen) abstract unix socket and puts its address into
the store. The higher one of two ranks connects. Both ask the kernel which user the other process runs as.
A rank closes its listener when it is connected to every peer, because abstract sockets have no permissions
and a stranger could fill the backlog. Handing over: each rank sends every peer one message with the
descriptors attached (SCM_RIGHTS) and receives one from every peer. The connections buffer the messages, so
no order of sends can deadlock. Nothing in this file blocks.

Rejected: ``/proc/<pid>/fd/<fd>`` and ``pidfd_getfd``. Both need ptrace permission, which file capabilities,
``PR_SET_DUMPABLE`` and Yama can remove between processes of one user, and both need a shared pid namespace.
Abstract sockets need only a shared network namespace and leave no name in the file system. For the same
reason every process sends a pidfd of itself instead of its pid: a reused pid cannot cause an error.

The nonce: rank 0 draws 16 random bytes, and every key, message and segment header contains them. Rank 0
deletes the nonce before any rank can leave :func:`meet`, so the next generation under the same prefix waits
for a new nonce. Values that an earlier, crashed generation left behind have another nonce and are ignored.

A group's ranks meet to exchange their cards and to receive a nonce that only they know. Ranks without a
common group meet in a store. Ranks of a group meet in its control segments, which need no server and
outlive their processes. Therefore the survivors of a failed group can also meet.

How survivors agree (:func:`reunite`): every rank publishes the number of the attempt that it has reached
and waits until all live ranks have reached it. These ranks then join a new group. The group's name depends
on the set of its ranks, so only ranks that expect the same set can join it. Each rank publishes whether it
joined. An attempt has succeeded when all its ranks have published that they joined. It has failed when one
of them published a failure, or ended without publishing anything. Neither state changes later, and both
exclude each other, so every rank sees the same outcome. The published words and the ended ranks are kept in
a *roll*: on one host these are the control segments, which outlive their ranks, the pidfds and the
connections. A live rank that publishes nothing for a whole timeout (it may be stopped) is struck off, as if
it had ended: after that it cannot publish that it joined.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from interlace.runtime.core.errors import (
    GONE,
    CollectiveTimeoutError,
    InterlaceError,
    PeerDiedError,
)
from interlace.runtime.core.plain import UnreadableError
from interlace.runtime.processes.atomics import compare_and_swap
from interlace.runtime.processes.control import ATTEMPT, RESULT, WANTED
from interlace.runtime.processes.segment import LAYOUT_VERSION, MAGIC, NONCE_BYTES, compare
from interlace.runtime.processes.signed_store import (
    SECRET,
    STORE_POLL_SECONDS,
    glance,
    show_secret,
    shows_other_secret,
)
from interlace.runtime.processes.waiting import Interruption, Patience, ended_processes

if TYPE_CHECKING:
    from interlace.runtime.compat.torch_groups import Store


T = TypeVar("T")

Meanwhile = Callable[[Sequence[int]], None]
_MESSAGE = struct.Struct(f"<8sQ{NONCE_BYTES}sQQQQ")  # the layout of a Label
_CREDENTIALS = struct.Struct("3i")
_MOST_DESCRIPTORS = 8
PROBE_SECONDS = 0.1


class Label(NamedTuple):
    """The label of a message: its group, its sequence number, its sender and its receiver."""

    magic: bytes
    layout_version: int
    nonce: bytes
    world_size: int
    receiver: int
    sequence_number: int
    sender: int


class Rendezvous:
    """This rank's connections to its peers, through which they hand over descriptors."""

    def __init__(self, rank: int, world_size: int, nonce: bytes) -> None:
        self.nonce = nonce
        self._rank, self._world_size = rank, world_size
        self.addresses: dict[int, bytes] = {}  # by peer
        self._connections: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}
        self._unknown: list[socket.socket] = []  # connections whose rank is not known yet
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

    def meet_peers(self, step: Meanwhile) -> None:
        """Connect to every peer, and call ``step(missing ranks)`` meanwhile. Later connections are refused.

        The higher rank connects. A listener stays open until its rank is connected to all peers, so a
        refused connection means that the rank has ended or that its own connection has already arrived.
        """
        probed = time.monotonic()
        while missing := [peer for peer in self.addresses if peer not in self._connections]:
            moved = self._accept()
            for peer in missing:
                if peer < self._rank and (connection := self._dial(peer)) is not None:
                    label = self._label(sender=self._rank, receiver=peer)
                    try:
                        connection.send(_MESSAGE.pack(*label))
                    except ConnectionError:  # the peer has closed the connection meanwhile
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
                    if (connection := self._dial(peer)) is not None:
                        connection.close()
                except PeerDiedError:
                    self._accept()
                    if peer not in self._connections:
                        raise

    def _dial(self, peer: int) -> socket.socket | None:
        """Connect to the listener of ``peer``; return None if it is busy."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            connection.connect(self.addresses[peer])
            if (uid := _uid(connection)) != os.geteuid():
                raise PermissionError(f"a process of user {uid} has the socket")
            return connection
        except OSError as error:
            connection.close()
            if isinstance(error, BlockingIOError):
                return None
            if isinstance(error, ConnectionRefusedError):  # or it is in another network namespace
                raise self.died(peer, "joining, connecting to its unix socket") from None
            raise InterlaceError(
                f"rank {self._rank} cannot reach rank {peer} through its unix socket ({error})"
            ) from error

    def _accept(self) -> bool:
        """Accept connections and read which ranks they belong to. Return whether anything changed."""
        moved = False
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                moved = True
                connection.setblocking(False)
                if _uid(connection) == os.geteuid():
                    self._unknown.append(connection)
                else:
                    connection.close()  # abstract sockets have no permissions; strangers get no answer
        for connection in list(self._unknown):
            with contextlib.suppress(BlockingIOError):
                try:
                    message = connection.recv(_MESSAGE.size + 1)
                except ConnectionError:
                    message = b""
                self._unknown.remove(connection)
                try:  # a process that does not know the nonce is not a peer
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
        poll = select.poll()
        known = {peer: self._connections.get(peer) for peer in peers}
        ranks = {found.fileno(): peer for peer, found in known.items() if found is not None}
        for descriptor in ranks.keys() - {-1}:  # -1: another thread has closed it
            poll.register(descriptor, select.POLLRDHUP)
        ended = select.POLLRDHUP | select.POLLHUP
        return [ranks[descriptor] for descriptor, events in poll.poll(0) if events & ended]

    def died(self, peer: int, doing: str) -> PeerDiedError:
        return PeerDiedError(peer, self.pids.get(peer, 0), doing)

    def trade(self, descriptors: Sequence[int], step: Meanwhile) -> dict[int, list[int]]:
        """Send ``descriptors`` to all peers; return theirs. Call ``step(missing ranks)`` meanwhile."""
        self._sequence += 1
        received: dict[int, list[int]] = {}
        try:
            for peer in self._connections:
                while not self._send(peer, descriptors):
                    step([peer])
            while missing := [peer for peer in self._connections if peer not in received]:
                if not any([self._receive(peer, received) for peer in missing]):
                    step(missing)
        except BaseException:
            for taken in received.values():
                close_all(taken)
            raise
        return received

    def _label(self, *, sender: int, receiver: int) -> Label:
        size, sequence = self._world_size, self._sequence
        return Label(MAGIC, LAYOUT_VERSION, self.nonce, size, receiver, sequence, sender)

    def _send(self, peer: int, descriptors: Sequence[int]) -> bool:
        message = _MESSAGE.pack(*self._label(sender=self._rank, receiver=peer))
        try:
            with contextlib.suppress(ConnectionError):  # the peer's message will not arrive either
                socket.send_fds(self._connections[peer], [message], descriptors)
        except BlockingIOError:
            return False
        return True

    def _receive(self, peer: int, received: dict[int, list[int]]) -> bool:
        """Receive one message of ``peer``. Return False if there is none."""
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
        if sender != peer:  # None: the message belongs to an earlier trade, which this rank aborted
            close_all(descriptors)
            return True
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        received[peer] = descriptors
        return True

    def _sender(self, message: bytes, sequence: int) -> int | None:
        """Return the sender, or None if the message belongs to another group or to an earlier trade."""
        problem = f"rank {self._rank} got a message that is not of this group"
        if len(message) != _MESSAGE.size:
            raise InterlaceError(f"{problem}: it has {len(message)} bytes")
        found = Label(*_MESSAGE.unpack(message))
        if found.magic == MAGIC and found.nonce != self.nonce:
            return None  # from a crashed generation, which has found this rank's new address
        expected = self._label(sender=found.sender, receiver=self._rank)
        late = found.sequence_number < sequence
        if late and found._replace(sequence_number=sequence) == expected:
            return None
        compare(problem, (name.replace("_", " ") for name in Label._fields), found, expected)
        if found.sender not in self.addresses:
            raise InterlaceError(f"{problem}: sender rank {found.sender} is unexpected")
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
    """Return the user id of the process at the other end."""
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
    """Return ``read(value)`` of every rank, by rank, and a nonce that only these ranks know. Collective.

    All keys begin with ``key``. Raises CollectiveTimeoutError if ranks have not joined ``group`` within
    ``timeout`` seconds, and InterlaceError, with rank and key, if a value cannot be read. ``watch`` is
    called repeatedly with the values read so far, and raises if a rank will never come. The error of rank
    0's ``watch`` counts for all ranks: a rank whose own ``watch`` does not raise raises InterlaceError with
    the same text.
    """
    deadline = (probed := time.monotonic()) + timeout
    own_nonce = os.urandom(NONCE_BYTES).hex()
    nonce = ""
    found: dict[int, T] = {}

    def unread() -> list[int]:
        """Read the available values. Return the ranks without one."""
        for peer in (peer for peer in range(world_size) if peer not in found):
            if (value := glance(store, its_key := f"{key}/{nonce}/{peer}")) is not None:
                try:
                    found[peer] = read(bytes.fromhex(value.decode()))
                except (ValueError, InterlaceError) as error:
                    raise InterlaceError(
                        f"rank {rank}: the store's value of {its_key!r}, which rank {peer} of group "
                        f"{group!r} writes, is nothing that a rank writes but {value!r:.99} ({error})"
                    ) from error
        return [peer for peer in range(world_size) if peer not in found]

    def missing() -> list[int]:
        """Return the ranks without a value. Rank 0 replaces a nonce that a crashed run left behind."""
        nonlocal nonce
        current = (glance(store, key) or b"").decode(errors="replace")
        if rank == 0 and current != own_nonce:  # at the beginning, or if it was overwritten
            store.set(key, own_nonce)
            current = own_nonce
        if len(current) != 2 * NONCE_BYTES:
            return [0]
        if current != nonce:
            nonce = current
            found.clear()
            store.set(f"{key}/{nonce}/{rank}", value.hex())
        return unread()

    def is_open() -> list[int]:
        """Return whether rank 0 has deleted the nonce; until then it may still replace a stale one."""
        if nonce and (value := glance(store, f"{key}/{nonce}/open")) is not None:
            if value:  # rank 0 has failed
                watch(found)
                text = value.decode(errors="replace")
                raise InterlaceError(f"rank {rank}: joining has failed: {text}")
            return unread()
        return missing() or [0]

    def compare_secrets(ranks: list[int]) -> None:
        """Raise if one of ``ranks`` has another secret, which would look like a rank that never joins."""
        if differing := [peer for peer in ranks if shows_other_secret(store, key, peer)]:
            time.sleep(2 * PROBE_SECONDS)  # so that the others can see it before the store ends
            raise InterlaceError(
                f"rank {rank}: ranks {differing} have another {SECRET} than this rank, or none: set "
                f"the same value for all ranks of group {group!r}"
            )

    show_secret(store, key, rank)
    compare_secrets([peer for peer in range(world_size) if peer != rank])
    # poll, because Store.wait prints a warning on stderr when it times out
    while ranks := missing() if rank == 0 else is_open():
        if (now := time.monotonic()) > deadline:
            raise CollectiveTimeoutError(
                f"rank {rank}: ranks {ranks} have not joined group {group!r}", tuple(ranks)
            )
        if now > probed + PROBE_SECONDS:
            probed = now
            compare_secrets(ranks)
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
    """Delete this rank's keys. Every rank must have returned from :func:`meet`."""
    store.delete_key(f"{key}/{nonce}/{rank}")
    store.delete_key(f"{key}/secret/{rank}")
    if rank == 0:
        store.delete_key(f"{key}/{nonce}/open")


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


SURE_SECONDS = 10.0  # how long to wait for the end of a process that closed its connection
_STRUCK = -1  # the result of a rank that the others have struck off
SocketCard = tuple[int, bytes]  # a process id and the address of its socket
_KEY_BYTES, _PID_BYTES = 7, 8


class MeetingPoint(Protocol):
    """The operations that the ranks of a new group need until all of them are connected."""

    def cards(self, group: object, own_card: bytes) -> tuple[list[SocketCard], bytes]:
        """Return every rank's card, by rank, and a nonce that only these ranks know. Collective."""

    def forget(self) -> None:
        """Delete everything that this rank has stored. Every rank must have connected."""

    def tell(self, text: str) -> None:
        """Publish why this rank does not join."""

    def told(self, rank: int) -> str:
        """Return why ``rank`` does not join, or "" if it has published nothing."""


class StoreMeeting:
    """A meeting in a store, under the prefix of the new group. ``watch``: see ``meet``."""

    def __init__(self, store: Store, watch: Callable[[object], None] = lambda found: None) -> None:
        self._store, self._watch = store, watch
        self._rank, self._key, self._nonce = 0, "", ""

    def cards(self, group: Any, own_card: bytes) -> tuple[list[SocketCard], bytes]:
        self._rank, self._key = group.rank, f"{group.prefix}/nonce"
        known = (
            group.rank,
            group.world_size,
            own_card,
            _card,
            group.prefix,
            self._key,
            group.timeout,
        )
        found, self._nonce = meet(self._store, *known, self._watch)
        return found, bytes.fromhex(self._nonce)

    def forget(self) -> None:
        forget(self._store, self._rank, self._key, self._nonce)

    def tell(self, text: str) -> None:
        if self._nonce:
            self._store.set(self._why(self._rank), text)

    def told(self, rank: int) -> str:
        return (glance(self._store, self._why(rank)) or b"").decode(errors="replace")

    def _why(self, rank: int) -> str:
        return f"{self._key}/{self._nonce}/why/{rank}"


class MemoryMeeting:
    """A meeting of ranks of ``whole`` in its control segments, one meeting at a time; see ``Patience``."""

    def __init__(self, whole: Any, ranks: Sequence[int], prefix: str, over: Interruption) -> None:
        assert whole.control is not None
        self._control, self._nonce, self._ranks = whole.control, whole.nonce, ranks
        self._patience = Patience(whole.rank, whole.timeout, over)
        self._key = _number(f"{ranks} {prefix}")

    def cards(self, group: Any, own_card: bytes) -> tuple[list[SocketCard], bytes]:
        self._control.post(self._key, own_card)
        found: dict[int, SocketCard] = {}
        while missing := [rank for rank in self._ranks if rank not in found]:
            for rank in missing:
                if (card := self._control.posted(rank, self._key)) is not None:
                    found[rank] = _card(card)
                elif text := self.told(self._ranks.index(rank)):
                    raise InterlaceError(text)
            if not found.keys() & set(missing):
                self._patience.step(f"joining group {group.prefix!r}", missing)
        cards = [found[rank] for rank in self._ranks]
        nonce = hashlib.blake2b(self._nonce + repr(cards).encode(), digest_size=NONCE_BYTES)
        return cards, nonce.digest()

    def forget(self) -> None:
        """Do nothing: the next card replaces this one."""

    def tell(self, text: str) -> None:
        self._control.post(-self._key, text.encode())

    def told(self, rank: int) -> str:
        return (self._control.posted(self._ranks[rank], -self._key) or b"").decode(errors="replace")


def _number(text: str) -> int:
    """Return a positive int64 that is different for each text."""
    digest = hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).digest()
    return 1 + int.from_bytes(digest, "little")


def connect(group: Any, meeting: MeetingPoint | None) -> Rendezvous:
    """Agree on a nonce and learn the addresses of all ranks in ``meeting``. A single rank needs no meeting.

    The caller must call ``meeting.forget`` on all ranks once every rank has connected, and no rank may
    continue before that.
    """
    own_pid, ends = os.getpid().to_bytes(_PID_BYTES, "little"), None
    try:
        ends = Rendezvous(group.rank, group.world_size, os.urandom(NONCE_BYTES))
        if meeting is None:
            return ends
        found, ends.nonce = meeting.cards(group, own_pid + ends.address)
    except BaseException as error:
        cause = reason(meeting, group.rank, {}, error)
        if ends is not None:
            ends.close()
        raise cause from (None if cause is error else error)
    for peer, (pid, address) in enumerate(found):
        if peer != group.rank:
            ends.pids[peer], ends.addresses[peer] = pid, address
    return ends


def _card(raw: bytes) -> SocketCard:
    """Parse a card of the store: the process id and the address of one rank."""
    pid, address = raw[:_PID_BYTES], raw[_PID_BYTES:]
    if not address.startswith(b"\0"):
        raise UnreadableError(
            "the value that a rank has put into the store is not the address of an abstract socket"
        )
    return int.from_bytes(pid, "little"), address


def reason(
    meeting: MeetingPoint | None, rank: int, pids: Mapping[int, int], error: BaseException
) -> BaseException:
    """Return why joining has failed, and publish it. If a peer closed its connection, return its reason."""
    with contextlib.suppress(Exception):  # the store itself may have failed
        if meeting is not None:
            if isinstance(error, PeerDiedError):
                lost = [peer for peer, pid in pids.items() if pid == error.pid]
                if text := "".join(map(meeting.told, lost)):
                    error = InterlaceError(text)
            text = str(error)
            if not isinstance(error, PeerDiedError) and " could not join: " not in text:
                text = f"rank {rank} could not join: {type(error).__name__}: {text}"
            meeting.tell(text)
            return InterlaceError(text) if isinstance(error, OSError) else error
    return error


class Roll(Protocol):
    """The published words of the ranks of a group that continues, and its ended ranks; it outlives them."""

    rank: int
    world_size: int
    prefix: str
    pids: dict[int, int]

    @property
    def timeout(self) -> float:
        """Return the seconds after which a rank that publishes nothing is struck off."""

    def begin(self, members: Sequence[int]) -> None:
        """Count only ``members`` from now on. Raises InterlaceError if the group is closed."""

    def said(self, rank: int, word: int) -> int:
        """Return the last of these words of ``rank``; RESULT is twice the attempt, plus 1 if it joined."""

    def say(self, word: int, value: int) -> None:
        """Publish a value to all ranks. It is never deleted."""

    def gone(self) -> Set[int]:
        """Return the ranks that ended, left or were struck off, maybe the caller: they publish no more."""

    def strike_off(self, ranks: Sequence[int], before: int) -> None:
        """Strike off the ``ranks`` whose RESULT is less than ``before``."""


class MemoryRoll:
    """The roll of a ``group`` on one host: words of the control segments, pidfds and connections."""

    def __init__(self, group: Any) -> None:
        if group.control is None:
            group.check_usable()
        self.rank, self.world_size = group.rank, group.world_size
        self.prefix, self.pids, self._pidfds = group.prefix, group.pids, group.pidfds
        self._hung_up = group.hung_up
        self._control, self._release = group.control, group.release
        self.timeout = group.timeout

    def begin(self, members: Sequence[int]) -> None:
        """Do nothing: all ranks can read the published words."""

    def said(self, rank: int, word: int) -> int:
        return int(self._control.words[rank].acquired(word))

    def say(self, word: int, value: int) -> None:
        before = self.said(self.rank, word)
        if word == RESULT:
            self._swap(self.rank, before, value)  # fails if the rank was struck off
        else:
            self._release(word, value)

    def gone(self) -> Set[int]:
        everyone = range(self.world_size)
        struck = {rank for rank in everyone if self.said(rank, RESULT) == _STRUCK}
        left = {rank for rank in everyone if self._control.has_left(rank)}
        ended = (*ended_processes(self._pidfds), *self._hung_up(self._pidfds))
        return struck | left | set(ended)

    def strike_off(self, ranks: Sequence[int], before: int) -> None:
        for rank in ranks:
            if (value := self.said(rank, RESULT)) < before:
                self._swap(rank, value, _STRUCK)

    def _swap(self, rank: int, old: int, new: int) -> None:
        if old != _STRUCK:
            compare_and_swap(self._control.words[rank].address + 8 * RESULT, old, new)


def reunite(
    roll: Roll, ranks: Sequence[int] | None, join: Callable[[Sequence[int], str, Interruption], T]
) -> tuple[T, list[int]]:
    """Make a group of the live ``ranks`` (default: all). Return it and the members' ranks in ``roll``.

    Collective over the live ranks; their group may have failed, but must not be closed. ``join(ranks, name,
    over)`` joins the new group, and stops waiting once ``over`` returns an error. Raises
    CollectiveTimeoutError if live ``ranks`` do not come, and PeerDiedError if one of ``ranks`` has ended.
    """
    doing = f"going on with what is left of group {roll.prefix!r}"
    wanted = range(roll.world_size) if ranks is None else ranks
    roll.begin(wanted)
    attempt, left = roll.said(roll.rank, ATTEMPT), list(wanted)
    roll.say(WANTED, number := 0 if ranks is None else _number(repr(left)))

    def result(rank: int) -> int:
        """Return the outcome of this attempt: 1 if ``rank`` joined, 0 if it failed, negative if unknown."""
        return roll.said(rank, RESULT) - 2 * attempt

    def gone_ranks() -> Set[int]:
        lost = roll.gone()
        survivors = sorted(rank for rank in lost if roll.said(rank, RESULT) // 2 > attempt)
        if survivors or roll.rank in lost:
            went = f"ranks {survivors}" if survivors else "the others"
            raise InterlaceError(f"rank {roll.rank}: {went} went on without this one")
        return lost

    def over(doing: str, waited_for: Sequence[int]) -> InterlaceError | None:
        """Return why this attempt of the ranks ``left`` has failed, or None."""
        lost = gone_ranks()
        for rank in left:
            if result(rank) == 0 or (rank in lost and result(rank) < 0):
                return PeerDiedError(rank, roll.pids[rank], doing, GONE)
        return None

    def compare() -> None:
        """Raise if a rank that has come wants other ranks, once all that have come have seen it."""
        come = [rank for rank in left if roll.said(rank, ATTEMPT) >= attempt]
        if differing := [rank for rank in come if roll.said(rank, WANTED) != number]:
            roll.say(RESULT, 2 * attempt)
            patience = Patience(roll.rank, roll.timeout, lambda doing, waited_for: None)
            with contextlib.suppress(
                InterlaceError
            ):  # keeps this rank's WANTED readable for a while
                while late := [rank for rank in silent() if rank in come]:
                    patience.step(doing, late)
            wish = "all that live" if ranks is None else f"ranks {list(ranks)} in this order"
            raise ValueError(f"rank {roll.rank}: {doing}, {wish}: ranks {differing} name others")

    def absent() -> list[int]:
        nonlocal left
        if lost := gone_ranks():
            left = [rank for rank in left if rank not in lost]
        late = [rank for rank in left if roll.said(rank, ATTEMPT) < attempt]
        compare()
        return late

    def silent() -> list[int]:
        lost = gone_ranks()
        return [rank for rank in left if result(rank) < 0 and rank not in lost]

    def again() -> bool:
        """Return whether the others have seen why this attempt failed and have begun the next one."""
        return any(roll.said(rank, ATTEMPT) > attempt for rank in left)

    def await_all(missing: Callable[[], list[int]]) -> None:
        patience = Patience(roll.rank, roll.timeout, lambda doing, waited_for: None)
        while late := missing():
            try:
                patience.step(doing, late)
            except CollectiveTimeoutError:
                if ranks is not None:
                    raise
                roll.strike_off(late, 2 * attempt)
                patience = Patience(roll.rank, roll.timeout, lambda doing, waited_for: None)

    while True:
        lost = gone_ranks()
        if ranks is not None and (dead := sorted(lost & set(ranks))):
            raise PeerDiedError(dead[0], roll.pids[dead[0]], doing, GONE)
        left = [rank for rank in wanted if rank not in lost]
        attempt = max(attempt + 1, *(roll.said(rank, ATTEMPT) for rank in left))
        roll.say(ATTEMPT, attempt)
        await_all(absent)
        digest = hashlib.blake2b(f"{roll.prefix} {left} {attempt}".encode(), digest_size=8)
        name = f"{roll.prefix.partition(' after ')[0]} after {digest.hexdigest()}"
        group: Any = None
        problem: Exception | None = None
        try:
            group = join(left, name, over)
        except Exception as error:
            problem = error
        try:
            roll.say(RESULT, 2 * attempt + (group is not None))
            await_all(silent)
            if group is not None and all(result(rank) == 1 for rank in left):
                return group, left
            deadline = time.monotonic() + min(SURE_SECONDS, roll.timeout)
            while gone_ranks().isdisjoint(left) and not again():
                if time.monotonic() > deadline:
                    text = f"rank {roll.rank}: {doing}: others cannot join"
                    raise problem or InterlaceError(text)
                time.sleep(1e-3)
        except BaseException:
            if group is not None:
                group.close()
            raise
        if group is not None:
            group.close()
