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

Meetings of the ranks that make a group: each learns the others' cards, and a nonce of theirs alone.

Ranks that know nothing of each other yet meet in a store. Ranks of a group meet in its control segments,
which need no server and outlive its processes: so the survivors of a group meet, too, and go on.

How survivors agree (:func:`reunite`). Every rank says to which attempt it has come, and waits until all
that live have come to it. These then join a new group, under a name of its own for each set of ranks:
only ranks that mean the same ones can join it. Each says whether it has. An attempt has succeeded when
all its ranks have said that they joined, and has failed when one of them said that it has not, or is
gone and has said nothing. Both stay true for ever, and exclude each other, so that every rank sees the
same. What ranks have said, and who is gone, is kept in a *roll*: on one host the control segments, which
outlive their ranks, the pidfds and connections. A rank that lives and says nothing for a whole timeout,
stopped perhaps, is struck off, as if it had ended: after that it cannot say that it joined.
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
from dataclasses import dataclass
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
from interlace.runtime.processes.signed_store import STORE_POLL_SECONDS, glance
from interlace.runtime.processes.waiting import Interruption, Patience, ended_processes

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


SURE_SECONDS = 10.0  # for the end of a process to be seen that has hung up
_STRUCK = -1  # the result of a rank that the others have given up
SocketCard = tuple[int, bytes]  # a process and the address of its socket
_KEY_BYTES, _PID_BYTES = 7, 8


class MeetingPoint(Protocol):
    """What the ranks of a group that is being made need until all are connected."""

    def cards(self, group: object, own: bytes) -> tuple[list[SocketCard], bytes]:
        """The card of every rank of ``group``, by rank, and a nonce of theirs alone. Collective."""

    def forget(self) -> None:
        """Take away what this rank has left. Every rank must have connected."""

    def tell(self, text: str) -> None:
        """Say why this rank does not join."""

    def told(self, rank: int) -> str:
        """Why ``rank`` does not join; empty if it has not said so."""


class StoreMeeting:
    """Ranks meet in a store, under the prefix of the group that they make. ``watch``: see ``meet``."""

    def __init__(self, store: Store, watch: Callable[[object], None] = lambda found: None) -> None:
        self._store, self._watch = store, watch
        self._rank, self._key, self._nonce = 0, "", ""

    def cards(self, group: Any, own: bytes) -> tuple[list[SocketCard], bytes]:
        self._rank, self._key = group.rank, f"{group.prefix}/nonce"
        found, self._nonce = meet(
            self._store,
            group.rank,
            group.world_size,
            own,
            _card,
            group.prefix,
            self._key,
            group.timeout,
            self._watch,
        )
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
    """Ranks of ``whole`` meet in its control segments, one meeting at a time. ``hopeless``: why not."""

    def __init__(
        self, whole: Any, ranks: Sequence[int], prefix: str, hopeless: Interruption
    ) -> None:
        assert whole.control is not None
        self._control, self._nonce, self._ranks = whole.control, whole.nonce, ranks
        self._patience = Patience(whole.rank, whole.timeout, hopeless)
        self._key = _number(f"{ranks} {prefix}")

    def cards(self, group: Any, own: bytes) -> tuple[list[SocketCard], bytes]:
        self._control.post(self._key, own)
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
        """Nothing: the next card takes the place of this one."""

    def tell(self, text: str) -> None:
        self._control.post(-self._key, text.encode())

    def told(self, rank: int) -> str:
        return (self._control.posted(self._ranks[rank], -self._key) or b"").decode(errors="replace")


def _number(text: str) -> int:
    """A positive int64 that no other text has."""
    digest = hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).digest()
    return 1 + int.from_bytes(digest, "little")


def connect(group: Any, meeting: MeetingPoint | None) -> Rendezvous:
    """Agree on a nonce and learn the addresses of all ranks in ``meeting``; a rank alone needs none.

    The caller must call ``meeting.forget`` on all ranks once everyone has connected, and must not let any
    rank go on before all have.
    """
    own, ends = os.getpid().to_bytes(_PID_BYTES, "little"), None
    try:
        ends = Rendezvous(group.rank, group.world_size, os.urandom(NONCE_BYTES))
        if meeting is None:
            return ends
        found, ends.nonce = meeting.cards(group, own + ends.address)
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
    """The process and the address that a rank has put into the store."""
    pid, address = raw[:_PID_BYTES], raw[_PID_BYTES:]
    if not address.startswith(b"\0"):
        raise UnreadableError(
            "what a rank has put into the store is no address of an abstract socket"
        )
    return int.from_bytes(pid, "little"), address


def reason(
    meeting: MeetingPoint | None, rank: int, pids: Mapping[int, int], error: BaseException
) -> BaseException:
    """Why joining has failed: of a peer that has hung up, its reason. Others find it here.

    ``pids``: of the peers, by rank; ``error`` may count the ranks of a larger group.
    """
    with contextlib.suppress(Exception):  # the store may be what has failed
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
    """What every rank of a group has said of how it goes on, and who is gone. It outlives its ranks."""

    rank: int
    world_size: int
    prefix: str
    pids: dict[int, int]

    @property
    def timeout(self) -> float:
        """Seconds after which a rank that says nothing is struck off."""

    def begin(self, members: Sequence[int]) -> None:
        """From now on only ``members`` count. Raises InterlaceError if the group is closed."""

    def said(self, rank: int, what: int) -> int:
        """The last WANTED, ATTEMPT, or RESULT of ``rank``: twice the attempt, and 1 if it has joined."""

    def say(self, what: int, value: int) -> None:
        """Say it to all, for ever."""

    def gone(self) -> Set[int]:
        """Who has ended, left or was struck off, whose last word is known: the caller, too."""

    def strike_off(self, ranks: Sequence[int], before: int) -> None:
        """Count those of ``ranks`` as gone whose RESULT is less than ``before``."""


class MemoryRoll:
    """The roll of ``group``, of one host: words of the control segments, pidfds and connections."""

    def __init__(self, group: Any) -> None:
        if group.control is None:
            group.check_usable()
        self.rank, self.world_size = group.rank, group.world_size
        self.prefix, self.pids, self._pidfds = group.prefix, group.pids, group.pidfds
        self._hung_up = group.hung_up
        self._control, self._release = group.control, group.release
        self.timeout = group.timeout

    def begin(self, members: Sequence[int]) -> None:
        """Nothing: what ranks say is where all can read it."""

    def said(self, rank: int, what: int) -> int:
        return int(self._control.words[rank].acquired(what))

    def say(self, what: int, value: int) -> None:
        before = self.said(self.rank, what)
        if what == RESULT:
            self._swap(self.rank, before, value)  # which fails if the rank was struck off
        else:
            self._release(what, value)

    def gone(self) -> Set[int]:
        everyone = range(self.world_size)
        struck = {rank for rank in everyone if self.said(rank, RESULT) == _STRUCK}
        left = {rank for rank in everyone if self._control.has_left(rank)}
        ended = (*ended_processes(self._pidfds), *self._hung_up(self._pidfds))
        return struck | left | set(ended)

    def strike_off(self, ranks: Sequence[int], before: int) -> None:
        for rank in ranks:
            if (said := self.said(rank, RESULT)) < before:
                self._swap(rank, said, _STRUCK)

    def _swap(self, rank: int, old: int, new: int) -> None:
        if old != _STRUCK:
            compare_and_swap(self._control.words[rank].address + 8 * RESULT, old, new)


def reunite(
    roll: Roll, ranks: Sequence[int] | None, join: Callable[[Sequence[int], str, Interruption], T]
) -> tuple[T, list[int]]:
    """A group of those of ``ranks``, by default of all, that live; and who they are in ``roll``'s.

    Collective over them; that group may have failed, but must not be closed. ``join(ranks, name, over)``
    joins, and waits no longer once ``over`` finds why. Raises CollectiveTimeoutError that names those of
    ``ranks`` which live and do not come, PeerDiedError if one of them does not live.
    """
    doing = f"going on with what is left of group {roll.prefix!r}"
    wanted = range(roll.world_size) if ranks is None else ranks
    roll.begin(wanted)
    attempt, left = roll.said(roll.rank, ATTEMPT), list(wanted)
    roll.say(WANTED, number := 0 if ranks is None else _number(repr(left)))

    def result(rank: int) -> int:
        """Of this attempt: 1 if ``rank`` has joined, 0 if it has not, less if it has not said."""
        return roll.said(rank, RESULT) - 2 * attempt

    def gone() -> Set[int]:
        lost = roll.gone()
        others = sorted(rank for rank in lost if roll.said(rank, RESULT) // 2 > attempt)
        if others or roll.rank in lost:
            went = f"ranks {others}" if others else "the others"
            raise InterlaceError(f"rank {roll.rank}: {went} went on without this one")
        return lost

    def over(doing: str, waited_for: Sequence[int]) -> InterlaceError | None:
        """Why this attempt of ``left`` has failed."""
        lost = gone()
        for rank in left:
            if result(rank) == 0 or (rank in lost and result(rank) < 0):
                return PeerDiedError(rank, roll.pids[rank], doing, GONE)
        return None

    def compare() -> None:
        """Raise if one that has come means others, once all that have come have seen that, too."""
        come = [rank for rank in left if roll.said(rank, ATTEMPT) >= attempt]
        if others := [rank for rank in come if roll.said(rank, WANTED) != number]:
            roll.say(RESULT, 2 * attempt)
            patience = Patience(roll.rank, roll.timeout, lambda doing, waited_for: None)
            with contextlib.suppress(InterlaceError):  # what each meant stays to be seen so long
                while late := [rank for rank in silent() if rank in come]:
                    patience.step(doing, late)
            mine = "all that live" if ranks is None else f"ranks {list(ranks)} in this order"
            raise ValueError(f"rank {roll.rank}: {doing}, {mine}: ranks {others} name others")

    def absent() -> list[int]:
        nonlocal left
        if lost := gone():
            left = [rank for rank in left if rank not in lost]
        late = [rank for rank in left if roll.said(rank, ATTEMPT) < attempt]
        compare()
        return late

    def silent() -> list[int]:
        lost = gone()
        return [rank for rank in left if result(rank) < 0 and rank not in lost]

    def again() -> bool:
        """Whether others have seen why this attempt failed, and try again."""
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
        lost = gone()
        if ranks is not None and (dead := sorted(lost & set(ranks))):
            raise PeerDiedError(dead[0], roll.pids[dead[0]], doing, GONE)
        left = [rank for rank in wanted if rank not in lost]
        attempt = max(attempt + 1, *(roll.said(rank, ATTEMPT) for rank in left))
        roll.say(ATTEMPT, attempt)
        await_all(absent)
        digest = hashlib.blake2b(f"{roll.prefix} {left} {attempt}".encode(), digest_size=8)
        name = f"{roll.prefix.partition(' after ')[0]} after {digest.hexdigest()}"
        made: Any = None
        problem: Exception | None = None
        try:
            made = join(left, name, over)
        except Exception as error:
            problem = error
        try:
            roll.say(RESULT, 2 * attempt + (made is not None))
            await_all(silent)
            if made is not None and all(result(rank) == 1 for rank in left):
                return made, left
            deadline = time.monotonic() + min(SURE_SECONDS, roll.timeout)
            while gone().isdisjoint(left) and not again():
                if time.monotonic() > deadline:
                    raise problem or InterlaceError(
                        f"rank {roll.rank}: {doing}: others cannot join"
                    )
                time.sleep(1e-3)
        except BaseException:
            if made is not None:
                made.close()
            raise
        if made is not None:
            made.close()
