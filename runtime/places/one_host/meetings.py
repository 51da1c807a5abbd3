"""Meetings of the ranks that make a group: each learns the others' cards, and a nonce of theirs alone.

Ranks that know nothing of each other yet meet in a store. Ranks of a group meet in its control segments,
which need no server and outlive its processes: so the survivors of a group meet, too, and go on.

How survivors agree (:func:`reunite`). Every rank says to which attempt it has come, and waits until all
that live have come to it; the end of a process is known for certain, by its pidfd. These then join a new
group, under a name that says who they are: only ranks that mean the same ones can join it. Who has joined
says so. An attempt has succeeded when all its ranks have said so, and has failed when one of them ended
before it could: both stay true for ever, and exclude each other, so that every rank sees the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from interlace.runtime.core.errors import InterlaceError, PeerDiedError
from interlace.runtime.places.one_host import rendezvous
from interlace.runtime.places.one_host.control import ATTEMPT, JOINED
from interlace.runtime.places.one_host.segment import NONCE_BYTES
from interlace.runtime.places.one_host.signed_store import glance
from interlace.runtime.places.one_host.waiting import Interruption, Patience, ended_processes

if TYPE_CHECKING:
    from interlace.runtime.compat.torch_groups import Store

SURE_SECONDS = 10.0  # for the end of a process to be seen that has hung up
SocketCard = tuple[int, bytes]  # a process and the address of its socket
_KEY_BYTES, _PID_BYTES = 7, 8


class MeetingPoint(Protocol):
    """What the ranks of a group that is being made need until all are connected."""

    def cards(self, group: Any, own: bytes) -> tuple[list[SocketCard], bytes]:
        """The card of every rank of ``group``, by rank, and a nonce of theirs alone. Collective."""

    def forget(self) -> None:
        """Take away what this rank has left. Every rank must have connected."""

    def tell(self, text: str) -> None:
        """Say why this rank does not join."""

    def told(self, rank: int) -> str:
        """Why ``rank`` does not join; empty if it has not said so."""


class StoreMeeting:
    """Ranks meet in a store, under the prefix of the group that they make."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rank, self._key, self._nonce = 0, "", ""

    def cards(self, group: Any, own: bytes) -> tuple[list[SocketCard], bytes]:
        self._rank, self._key = group.rank, f"{group.prefix}/nonce"
        found, self._nonce = rendezvous.meet(
            self._store,
            group.rank,
            group.world_size,
            own,
            _card,
            group.prefix,
            self._key,
            group.timeout,
        )
        return found, bytes.fromhex(self._nonce)

    def forget(self) -> None:
        rendezvous.forget(self._store, self._rank, self._key, self._nonce)

    def tell(self, text: str) -> None:
        self._store.set(self._why(self._rank), text)

    def told(self, rank: int) -> str:
        return (glance(self._store, self._why(rank)) or b"").decode(errors="replace")

    def _why(self, rank: int) -> str:
        return f"{self._key}/{self._nonce}/why/{rank}"


class MemoryMeeting:
    """Ranks of ``whole`` meet in its control segments, one meeting at a time. ``hopeless``: why not."""

    def __init__(self, whole: Any, ranks: Sequence[int], hopeless: Interruption) -> None:
        assert whole.control is not None
        self._control, self._nonce, self._ranks = whole.control, whole.nonce, ranks
        self._patience = Patience(whole.rank, whole.timeout, hopeless)
        self._key = 0

    def cards(self, group: Any, own: bytes) -> tuple[list[SocketCard], bytes]:
        digest = hashlib.blake2b(f"{self._ranks} {group.prefix}".encode(), digest_size=_KEY_BYTES)
        self._key = 1 + int.from_bytes(digest.digest(), "little")
        self._control.post(self._key, own)
        found: dict[int, SocketCard] = {}
        while missing := [rank for rank in self._ranks if rank not in found]:
            for rank in missing:
                if (card := self._control.posted(rank, self._key)) is not None:
                    found[rank] = _card(card)
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


def connect(group: Any, meeting: MeetingPoint | None) -> rendezvous.Rendezvous:
    """Agree on a nonce and learn the addresses of all ranks in ``meeting``; a rank alone needs none.

    The caller must call ``meeting.forget`` on all ranks once everyone has connected, and must not let any
    rank go on before all have.
    """
    ends = rendezvous.Rendezvous(group.rank, group.world_size, os.urandom(NONCE_BYTES))
    if meeting is None:
        return ends
    own = os.getpid().to_bytes(_PID_BYTES, "little") + ends.address
    try:
        found, ends.nonce = meeting.cards(group, own)
    except BaseException:
        ends.close()
        raise
    for peer, (pid, address) in enumerate(found):
        if peer != group.rank:
            ends.pids[peer], ends.addresses[peer] = pid, address
    return ends


def _card(raw: bytes) -> SocketCard:
    """The process and the address that a rank has put into the store."""
    pid, address = raw[:_PID_BYTES], raw[_PID_BYTES:]
    if not address.startswith(b"\0"):
        raise ValueError("no address of an abstract socket")
    return int.from_bytes(pid, "little"), address


def reason(meeting: MeetingPoint | None, rank: int, error: BaseException) -> BaseException:
    """Why joining has failed: of a peer that has hung up, its reason. Others find this rank's."""
    with contextlib.suppress(Exception):  # the store may be what has failed
        if meeting is None:
            pass
        elif not isinstance(error, PeerDiedError):
            meeting.tell(f"rank {rank} could not join: {type(error).__name__}: {error}")
        elif text := meeting.told(error.rank):
            return InterlaceError(text)
    return error


def reunite(
    group: Any, ranks: Sequence[int] | None, join: Callable[[Sequence[int], str, MeetingPoint], Any]
) -> tuple[Any, list[int]]:
    """A group of those of ``ranks``, by default of all, that live; and who they are in ``group``.

    Collective over them; ``group`` may have failed, but must not be closed. ``join(ranks, name, meeting)``
    joins. Raises CollectiveTimeoutError that names ranks which live and do not come,
    PeerDiedError if one of ``ranks`` does not live.
    """
    control = group.control
    if control is None:
        group.check_usable()
    assert control is not None
    doing = f"going on with what is left of group {group.prefix!r}"
    wanted = range(group.world_size) if ranks is None else ranks
    words = control.words
    attempt = words[group.rank].acquired(ATTEMPT)

    def gone() -> set[int]:
        return {*ended_processes(group.pidfds), *(r for r in wanted if control.has_left(r))}

    def behind(word: int, among: Sequence[int]) -> list[int]:
        return [rank for rank in among if words[rank].acquired(word) < attempt]

    def over(doing: str, waited_for: Sequence[int]) -> InterlaceError | None:
        """Why this attempt of ``left`` has failed."""
        for rank in sorted(gone().intersection(left)):
            if words[rank].acquired(JOINED) < attempt:
                return PeerDiedError(rank, group.pids[rank], doing)
        if any(words[rank].acquired(ATTEMPT) > attempt for rank in left):
            return InterlaceError(f"rank {group.rank}: {doing}: others have begun again")
        return None

    while True:
        lost = gone()
        if ranks is not None and (dead := sorted(lost.intersection(ranks))):
            raise PeerDiedError(dead[0], group.pids[dead[0]], doing)
        if without := [rank for rank in lost if words[rank].acquired(JOINED) > attempt]:
            raise InterlaceError(f"rank {group.rank}: ranks {without} went on without this one")
        left = [rank for rank in wanted if rank not in lost]
        attempt = max(attempt + 1, *(words[rank].acquired(ATTEMPT) for rank in left))
        group.release(ATTEMPT, attempt)
        patience = Patience(group.rank, group.timeout, lambda doing, waited_for: None)
        while late := behind(ATTEMPT, left):
            patience.step(doing, late)
            lost = gone()
            left = [rank for rank in left if rank not in lost]
        name = f"{group.prefix}/{'-'.join(map(str, left))}/attempt {attempt}"
        try:
            made = join(left, name, MemoryMeeting(group, left, over))
        except InterlaceError:
            deadline = time.monotonic() + min(SURE_SECONDS, group.timeout)
            while over(doing, left) is None:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1e-3)
            continue
        group.release(JOINED, attempt)
        try:
            while late := behind(JOINED, left):
                patience.step(doing, late)
                if over(doing, left) is not None:
                    break
            else:
                return made, left
        except BaseException:
            made.close()
            raise
        made.close()
