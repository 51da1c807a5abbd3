"""Meetings of the ranks that make a group: each learns the others' cards, and a nonce of theirs alone.

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
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol

from interlace.runtime.core.errors import (
    GONE,
    CollectiveTimeoutError,
    InterlaceError,
    PeerDiedError,
)
from interlace.runtime.core.plain import UnreadableError
from interlace.runtime.processes import rendezvous
from interlace.runtime.processes.atomics import compare_and_swap
from interlace.runtime.processes.control import ATTEMPT, RESULT, WANTED
from interlace.runtime.processes.segment import NONCE_BYTES
from interlace.runtime.processes.signed_store import glance
from interlace.runtime.processes.waiting import Interruption, Patience, ended_processes

if TYPE_CHECKING:
    from interlace.runtime.compat.torch_groups import Store

SURE_SECONDS = 10.0  # for the end of a process to be seen that has hung up
_STRUCK = -1  # the result of a rank that the others have given up
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
    """Ranks meet in a store, under the prefix of the group that they make. ``watch``: see ``meet``."""

    def __init__(self, store: Store, watch: Callable[[Any], None] = lambda found: None) -> None:
        self._store, self._watch = store, watch
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
            self._watch,
        )
        return found, bytes.fromhex(self._nonce)

    def forget(self) -> None:
        rendezvous.forget(self._store, self._rank, self._key, self._nonce)

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


def connect(group: Any, meeting: MeetingPoint | None) -> rendezvous.Rendezvous:
    """Agree on a nonce and learn the addresses of all ranks in ``meeting``; a rank alone needs none.

    The caller must call ``meeting.forget`` on all ranks once everyone has connected, and must not let any
    rank go on before all have.
    """
    own, ends = os.getpid().to_bytes(_PID_BYTES, "little"), None
    try:
        ends = rendezvous.Rendezvous(group.rank, group.world_size, os.urandom(NONCE_BYTES))
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
    roll: Roll, ranks: Sequence[int] | None, join: Callable[[Sequence[int], str, Interruption], Any]
) -> tuple[Any, list[int]]:
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
