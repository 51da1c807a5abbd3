"""The place ``hosts``: one rank per process, on several hosts, without symmetric memory between them.

Fused algorithms and symmetric memory need a group of one host's ranks, as ``interlace.new_group`` makes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from interlace.runtime.core.call import CALLS
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.engine import Engine
from interlace.runtime.core.errors import (
    AbortedError,
    InterlaceError,
    PeerDiedError,
    PlaceUnavailableError,
)
from interlace.runtime.core.memory import SymmetricBuffer
from interlace.runtime.core.place import Place
from interlace.runtime.places.hosts.engine import HostsEngine
from interlace.runtime.places.hosts.host_map import Card, HostMap, Joining, own_address
from interlace.runtime.places.hosts.links import ROW, HostLinks, Packet
from interlace.runtime.places.hosts.mail import SpanningGroup
from interlace.runtime.places.hosts.pieces import Frames
from interlace.runtime.places.hosts.regroup import HostsRoll, LinkStore, Told
from interlace.runtime.places.shm.mail import Mail
from interlace.runtime.places.shm.place import PENDING_SECONDS, CpuPlace, ShmPlace
from interlace.runtime.processes import dump as record, rendezvous
from interlace.runtime.processes.control import check_size
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.rendezvous import StoreMeeting
from interlace.runtime.processes.signed_store import job_secret, need_secret
from interlace.runtime.processes.waiting import Interruption
from interlace.runtime.processes.worker import Helper, close_at_exit

if TYPE_CHECKING:
    from interlace.runtime.compat.torch_groups import Store


class HostsPlace(CpuPlace):
    """One rank of a group on several hosts. All ranks make it. An abort of ``parent`` also ends its waits.

    ``near`` is the group of this host's ranks, if these have met already. ``hopeless`` then finds out why
    the other ranks cannot meet.
    """

    name = "hosts"
    direct_access = mapped = False

    def __init__(
        self,
        store: Store,
        rank: int,
        cards: Sequence[Card],
        *,
        timeout: float,
        prefix: str,
        near: HostGroup | None = None,
        parent: HostsPlace | None = None,
        hopeless: Interruption | None = None,
    ) -> None:
        self.rank, self.world_size = rank, len(cards)
        self.map = HostMap.of([card.host for card in cards])
        self.frames = Frames(self.map, rank)
        self.local_ranks = self.map.hosts[self.map.index(rank)]
        """The ranks of this group on this rank's host, by local rank."""
        self._cards, self._prefix, self._timeout = cards, prefix, timeout
        self._parent = parent
        need_secret(rank)
        self.lock, self._told = threading.RLock(), Told()
        self._engine_lock = threading.Lock()
        self._local_communicator: Communicator | None = None
        self._known: tuple[int, ...] = tuple(range(self.world_size))
        self._children: weakref.WeakSet[HostsPlace] = weakref.WeakSet()
        joining = Joining(store, rank, cards, timeout=timeout, prefix=prefix, hopeless=hopeless)
        self._joining: Joining | None = joining
        try:
            self._join(store, near, joining)
        except BaseException as error:
            cause = joining.why(error)
            self._give_up()
            raise cause from (None if cause is error else error)
        self._joining = None
        self.joining = time.monotonic() - self.group.since
        self._links.start(_weakly(self._on_packet), self._roll.lose)
        self.group.beyond = self._links.culprit
        if parent is not None:
            parent._children.add(self)
        close_at_exit(self, instead_of=self.local)  # which is closed after the messages
        weakref.finalize(self, _leave_dropped, self._links, self._mail).atexit = False

    def _join(self, store: Store, near: HostGroup | None, joining: Joining) -> None:
        """Meet the ranks of this host, then the ranks of other hosts."""
        rank, timeout, prefix, cards = self.rank, self._timeout, self._prefix, self._cards
        try:
            self.group = near or HostGroup(
                StoreMeeting(store, joining.look),
                self.local_ranks.index(rank),
                len(self.local_ranks),
                timeout=timeout,
                prefix=f"{prefix}/host {self.map.index(rank)}",
            )
        except PeerDiedError as error:  # its rank is one of the host's group
            by_pid = {cards[peer].pid: peer for peer in self.local_ranks}
            raise PeerDiedError(by_pid[error.pid], error.pid, error.doing) from error
        self.group.name, self.group.names, self.group.within = rank, self.local_ranks, True
        processes = repr([(card.host, card.pid) for card in self._cards]).encode()
        self.group.tag = hashlib.blake2b(processes, digest_size=4).hexdigest()
        self.local = ShmPlace(self.group)
        self.worker = self.local.worker
        address = own_address(cards, rank)
        self.address = address or socket.gethostname()
        """The address at which ranks on other hosts reach this one."""
        self._links = HostLinks(
            rank,
            [card.pid for card in cards],
            [peer for peer in range(len(cards)) if peer not in self.local_ranks],
            timeout=timeout,
            bound=self.group.bound,
            on_failure=_weakly(self._on_failure),
            awaited=_weakly(self._awaited_rank),
        )
        self._spanning = SpanningGroup(self._links, self.group)
        self._mail = Mail(self._spanning, self._spanning.new_boxes)
        self._roll = HostsRoll(self._links, prefix)
        self._links.connect(store, address, joining.step, job_secret(), prefix)

    def _give_up(self) -> None:
        """Leave what has been joined; the other ranks know the reason."""
        if hasattr(self, "_links"):
            self._links.give_up()
        if hasattr(self, "local"):
            self.local.close()

    def local_engine(self) -> Engine:
        with self._engine_lock:
            if self._local_communicator is None:
                self._local_communicator = Communicator(self.local, self.local_ranks)
                self.known_as(self._known)
            return self._local_communicator.engine

    def known_as(self, ranks: Sequence[int]) -> None:
        self._known = tuple(ranks)
        record.known_as(self.group, [ranks[rank] for rank in self.local_ranks], ranks)

    def subgroup(self, ranks: tuple[int, ...], generation: int) -> Place:
        name = f"{'-'.join(map(str, ranks))}/{generation}"
        near = self.group.subgroup(self._near(ranks), name)
        over = lambda doing, waited_for: self.trouble(doing)  # noqa: E731
        return self._of_some(ranks, f"{self._prefix}/{name}", near, over, parent=self)

    def _near(self, ranks: Sequence[int]) -> list[int]:
        return [self.local_ranks.index(rank) for rank in ranks if rank in self.local_ranks]

    def reunited(self, ranks: Sequence[int] | None) -> tuple[Place, list[int]]:
        place, left = rendezvous.reunite(self._roll, ranks, self._joined)
        with contextlib.suppress(InterlaceError):
            place.exchange(b"", "going on")  # all ranks have made it and need no old links
        return place, left

    def _joined(self, left: Sequence[int], name: str, over: Interruption) -> Place:
        """Make the place of the ranks ``left``: ranks of a host join first, by shared memory."""
        near = self.group.of_some(self._near(left), name, over)
        return self._of_some(left, name, near, over)

    def _of_some(
        self, ranks: Sequence[int], prefix: str, near: HostGroup, over: Interruption, **of: Any
    ) -> Place:
        """Make the place of ``ranks``; those on this host have met in ``near``. ``of``: see HostsPlace."""
        if near.world_size == len(ranks):
            return ShmPlace(near)
        rank, cards = ranks.index(self.rank), [self._cards[peer] for peer in ranks]
        of |= {"timeout": self._timeout, "prefix": prefix, "near": near, "hopeless": over}
        try:
            with closing(LinkStore(self._links, self._told, prefix, ranks)) as store:
                return HostsPlace(store, rank, cards, **of)
        except BaseException:
            near.close()
            raise

    def set_timeout(self, seconds: float) -> None:
        self._timeout = self._links.timeout = seconds
        self.local.set_timeout(seconds)

    @contextmanager
    def guarded(self, doing: str) -> Iterator[None]:
        """Wrap joint work: an error in it fails the group, with ranks of this group."""
        self.check()
        self._links.check_open()
        before, self._links.doing = self._links.doing, doing
        try:
            yield
        except InterlaceError as error:
            if self._links.failure is None:  # so it is an error of the host's own group
                self._links.fail(error)
            raise (self._links.failure or error) from None
        except BaseException as error:
            text = f"{doing}: {type(error).__name__}: {error}"
            self._links.fail(InterlaceError(f"rank {self.rank}: {text}"))
            raise
        finally:
            self._links.doing = before

    def _awaited_rank(self) -> int | None:
        if (waiting := self._links.waiting) is not None:
            return waiting[2]
        if self._mail.awaited and len(awaited := self._spanning.awaited) == 1:
            return awaited[0]
        local = self.group.blame.awaited(self.group.rank)
        return None if local is None else self.local_ranks[local]

    def late(self, peers: Sequence[int] = ()) -> Sequence[int]:
        if not peers and (awaited := self._awaited_rank()) is not None:
            peers = (awaited,)
        return sorted({self._links.culprit(peer) for peer in peers})

    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        with record.recording_op(self.group, payload if payload.startswith(CALLS) else doing):
            return self.exchanged(payload, doing)

    def exchanged(self, payload: bytes, doing: str) -> list[bytes]:
        """Exchange within each host; then every rank sends its host's messages to its twins."""
        check_size(payload, self.rank, doing)
        with self.lock, self.guarded(doing):
            payloads = self.group.exchange(payload, doing)
            with self._links.moving(doing) as wires:
                return self.frames.trade(wires, payloads)

    def new_engine(self, communicator: object) -> Engine:
        return HostsEngine(self, self._links, self._mail)

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        raise PlaceUnavailableError(
            f"rank {self.rank}: symmetric memory, and the ops and algorithms that need it, take ranks "
            f"that share a host; this group is on several ({self.map}). Use a group of one host's ranks"
        )

    def check(self) -> None:
        """Raise the error of the group, or of one that contains it. A closed group has not failed."""
        if (failure := self._links.failure) is not None:
            raise failure
        if self._parent is not None:
            self._parent.check()

    def trouble(self, doing: str) -> InterlaceError | None:
        try:
            self.check()
        except InterlaceError as error:
            return error
        return None

    def abort(self, reason: str) -> None:
        self._links.fail(AbortedError(f"rank {self.rank} aborted the group: {reason}"))

    def _on_packet(self, source: int, packet: Packet) -> None:
        if packet.kind == ROW:
            self._roll.take(source, packet)
        else:
            self._told.take(packet)

    def _on_failure(self, error: InterlaceError) -> None:
        """Handle a failure of the group: called once, in the thread that found it."""
        if self._joining is not None:
            self._joining.tell(error)
        self.group.abort(str(error))
        for child in list(self._children):
            child._links.fail(error, tell=False)  # other ranks learn of it as this rank did
        self._roll.tell()

    def close(self) -> None:
        """Leave the group after its ops and messages. Idempotent."""
        if not self.worker.close(PENDING_SECONDS):
            self._leave()  # ends the waits in the group
            self.worker.close()
        self._mail.close(self._leave)

    def _leave(self) -> None:
        if (failure := self.group.failure()) is not None:  # found while this rank was elsewhere
            self._links.fail(failure)
        _leave(self._links, self._mail)
        if self._local_communicator is not None:
            self._local_communicator.close()
        self.local.close()


def _leave(links: HostLinks, mail: Mail) -> None:
    links.close()
    mail.at_rest(links.forget_mail)


def _leave_dropped(links: HostLinks, mail: Mail) -> None:
    """Leave for a place that was garbage-collected; in a thread, because that may happen anywhere."""
    if not links.closed:
        Helper("interlace leaving", mail.close, (lambda: _leave(links, mail),)).start()


def _weakly(method: Callable[..., object]) -> Callable[..., Any]:
    """Return ``method`` with a weak reference to its object; it does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> Any:
        found = reference()
        return None if found is None else found(*arguments)

    return call
