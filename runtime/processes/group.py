"""A group of processes on one host: messages, shared segments, waits, and the detection of ended peers.

After a failed collective the ranks may disagree about the outcome. The group then refuses further
collectives, and has to be aborted, closed and created again.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from interlace.kernels.signal import MAX_WORLD_SIZE
from interlace.runtime.core.call import CALLS
from interlace.runtime.core.context import current
from interlace.runtime.core.errors import (
    DIED,
    OF_PARENT,
    REPLACED,
    AbortedError,
    BlockedWait,
    CollectiveTimeoutError,
    InterlaceError,
    PeerDiedError,
    of_another_rank,
)
from interlace.runtime.processes import dump as record, rendezvous
from interlace.runtime.processes.control import (
    ABORTED,
    CONTROL_BYTES,
    LONGEST_SLEEP,
    RINGS_BYTES,
    SEQUENCE,
    Control,
    check_size,
)
from interlace.runtime.processes.dump import Blame, aborted_by
from interlace.runtime.processes.recorder import MESSAGES
from interlace.runtime.processes.segment import (
    Identity,
    Mapping,
    SharedRanges,
    SharedSegment,
    agreed_identities,
    map_segment,
)
from interlace.runtime.processes.waiting import (
    SPINS,
    Interruption,
    Kind,
    LastingWait,
    Patience,
    ended_processes,
    usable_cores,
)
from interlace.runtime.processes.worker import close_at_exit

SETTLE_SECONDS = 0.02
_CLOSED = "the group is closed"
END_SECONDS = 0.02  # between the end of a process's connections and the end of the process
LOOK = 8  # after this many messages the ranks check again whether they share the cores evenly


class HostGroup:
    """One rank's membership in a group of processes. Joining is collective.

    The ranks find each other in ``meeting`` (a group of one needs none); ``prefix`` names the group and its
    generation there. ``timeout``, in seconds, bounds joining and every later wait. If ``parent``, a group
    that contains this one, is aborted, the waits of this group also end. ``names`` are the ranks that
    errors show. ``beyond(name)`` returns the rank for which that rank waits in the end, as far as peers
    know.
    """

    def __init__(
        self,
        meeting: rendezvous.MeetingPoint | None,
        rank: int,
        world_size: int,
        *,
        timeout: float,
        prefix: str,
        parent: HostGroup | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not within world size {world_size}")
        if world_size > (most := MAX_WORLD_SIZE):
            raise ValueError(f"world size {world_size} is more than the {most} ranks of one host")
        if world_size > 1 and meeting is None:
            raise ValueError(f"store must not be None for world size {world_size}")
        self.rank, self.world_size, self.since = rank, world_size, time.monotonic()
        self.name, self.names = rank, tuple(range(world_size))
        self.beyond: Callable[[int], int] = lambda name: name
        self.prefix, self.timeout = prefix, timeout
        self._meeting = meeting if world_size > 1 else None
        self._parent = parent
        self.sequence = 0
        self._unusable = ""
        self.dumped, self.tag = False, ""  # whether the record was written; the tag of its files
        self.within = False  # part of a group on several hosts, which records some ops itself
        self.control: Control | None = None  # None while joining and after leaving
        self.blame = Blame(self)
        self.options: Any = None  # torch's options of an op that the caller waits for
        self._joining = False
        self.segment: SharedSegment | None = None
        self._leave: weakref.finalize[[], HostGroup] | None = None
        self.spins = world_size <= usable_cores()  # whether a wait may keep a core busy
        self._spins = SPINS if self.spins else 1
        self.collective_lock = threading.RLock()
        self._abort_lock = threading.RLock()
        self.pidfds: dict[int, int] = {}
        weakref.finalize(self, _close_values, self.pidfds).atexit = False
        self.pids: dict[int, int] = {rank: os.getpid()}
        self.shared_ranges = SharedRanges(rank)
        self._rendezvous = rendezvous.connect(self, self._meeting)
        self.nonce, self.hung_up = self._rendezvous.nonce, self._rendezvous.hung_up
        self._joining = True
        record.register(self)
        try:
            self._join()
        except BaseException as error:
            cause = rendezvous.reason(self._meeting, rank, self._rendezvous.pids, error)
            self.close()
            raise cause from (None if cause is error else error)
        self._joining, self._meeting = False, None
        close_at_exit(self)

    def subgroup(self, ranks: Sequence[int], name: str) -> HostGroup:
        """Join a group of some of the ranks. An abort of this group also ends that one."""
        self.check_usable()
        return self.of_some(ranks, f"{self.prefix}/{name}", self.interruption, parent=self)

    def of_some(
        self, ranks: Sequence[int], name: str, over: Interruption, parent: HostGroup | None = None
    ) -> HostGroup:
        """Join a group of ``ranks``. ``over`` finds out why there cannot be one."""
        meeting = rendezvous.MemoryMeeting(self, ranks, name, over)
        rank, size, timeout = ranks.index(self.rank), len(ranks), self.timeout
        return HostGroup(meeting, rank, size, timeout=timeout, prefix=name, parent=parent)

    def _join(self) -> None:
        """Exchange control segments and pidfds, check them, and delete the store's keys."""
        # A program that inspects this process from outside looks for this descriptor.
        self.segment = segment = self.new_segment(CONTROL_BYTES, later=RINGS_BYTES)
        pidfd = os.pidfd_open(os.getpid())
        patience = Patience(self.rank, self.timeout, self.interruption)
        doing = f"joining group {self.prefix!r}"
        step = functools.partial(patience.step, doing)
        try:
            self._rendezvous.meet_peers(step)
            received = self._rendezvous.trade((segment.descriptor, pidfd), step)
            self.pids |= self._rendezvous.pids
            for peer, descriptors in received.items():
                self.pidfds[peer] = descriptors.pop()
            ranks, size = range(self.world_size), self.world_size
            identities = [Identity(self.nonce, rank, size, CONTROL_BYTES) for rank in ranks]
            self.control = Control(self.rank, self._map(segment.mapping, received, identities))
            self._leave = weakref.finalize(self, self.control.leave)  # if nobody closes it
            self._leave.atexit = False
            record.known_as(self, self.names)
        finally:
            os.close(pidfd)
        self.exchange(b"", doing)  # every rank has read the keys
        if self._meeting is not None:
            self._meeting.forget()
        self.exchange(b"", doing)  # the keys are deleted: the next generation cannot find them

    def _map(
        self, mapping: Mapping, received: dict[int, list[int]], identities: Sequence[Identity]
    ) -> list[Mapping]:
        """Check and map the segments of the peers, and close their descriptors."""
        try:
            return [
                mapping if rank == self.rank else map_segment(received[rank][0], identity)
                for rank, identity in enumerate(identities)
            ]
        finally:
            for descriptors in received.values():
                rendezvous.close_all(descriptors)

    def new_segment(self, nbytes: int, later: int = 0) -> SharedSegment:
        """Create a segment of ``nbytes`` zeroed bytes that no peer knows yet. Not collective."""
        return SharedSegment(Identity(self.nonce, self.rank, self.world_size, nbytes), later)

    def allocate(self, nbytes: int, doing: str) -> list[Mapping]:
        """Allocate a segment of ``nbytes`` zeroed bytes on every rank and map them all here. Collective.

        Either all ranks succeed or all raise: InterlaceError with the rank and the size if memory is short,
        ValueError if the ranks ask for different sizes.
        """
        self.check_usable()
        segment, problem = None, ""
        identity = Identity(self.nonce, self.rank, self.world_size, nbytes)
        try:
            segment = SharedSegment(identity)
        except (InterlaceError, OSError) as error:
            problem = str(error)
        try:
            return self._share(segment, identity, problem, doing)
        finally:
            if segment is not None:
                segment.close()

    def share(self, segment: SharedSegment, doing: str) -> list[Mapping]:
        """Share an existing segment as :meth:`allocate` does a new one. Several groups may share it."""
        return self._share(segment, segment.identity, "", doing)

    def _share(
        self, segment: SharedSegment | None, identity: Identity, problem: str, doing: str
    ) -> list[Mapping]:
        """Exchange headers or reasons for failure; then exchange the descriptors of these headers."""
        with self.collective_lock:
            self.check_usable()
            identities = self._compare(identity, problem, doing)
            assert segment is not None  # otherwise its problem was raised
            mappings: list[Mapping] = []
            try:
                received = self._rendezvous.trade((segment.descriptor,), self._trading(doing))
                mappings = self._map(segment.mapping, received, identities)
            except (PeerDiedError, AbortedError, CollectiveTimeoutError):
                raise
            except (InterlaceError, OSError) as error:
                problem = str(error)
            self._compare(identity, problem, doing)
        return mappings

    def _trading(self, doing: str) -> Callable[[Sequence[int]], None]:
        """Return a function to call during one trade while descriptors are missing. A rank that cannot send
        or receive them reports it in its next message; the others then stop waiting for it, after they have
        received what it sent before.
        """
        control, sequence, patience = self.control, self.sequence, self.patience()
        assert control is not None
        before: set[int] = set()  # the ranks that were ahead at the last look

        def step(missing: Sequence[int]) -> None:
            nonlocal before
            words = control.words
            ahead = {rank for rank in missing if words[rank].acquired(SEQUENCE) > sequence}
            if gone := [self.names[rank] for rank in sorted(ahead & before)]:
                raise InterlaceError(f"ranks {gone} have sent no descriptor of their memory")
            before = ahead
            if not ahead:
                patience.step(doing, missing)

        return step

    def _compare(self, identity: Identity, problem: str, doing: str) -> list[Identity]:
        """Return all ranks' headers. All raise the same error if one has a problem or sizes differ."""
        answers = self.exchange(identity.pack() + problem.encode(), doing)
        return agreed_identities(answers, self.names)

    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        """All-gather at most 64 KiB without a kernel; ``doing`` names the op in errors. Collective."""
        check_size(payload, self.name, doing)
        with self.collective_lock:
            if self.world_size == 1:
                self.check_usable()
                return [payload]
            self.check()  # messages left by peers of an aborted group must not let this rank continue
            op = payload if payload.startswith(CALLS) else doing
            control, sequence = self.begin(payload)
            kept = control.recorder
            kept.begins(MESSAGES, sequence, len(payload), 0, 0, 0, kept.told(op))
            control.send(sequence)
            self.await_message(sequence, doing)
            kept.ended(sequence)
            return [
                payload if rank == self.rank else control.message(rank, sequence)
                for rank in range(self.world_size)
            ]

    def begin(self, payload: bytes) -> tuple[Control, int]:
        """Write the next message, but not its record, without sending it. Needs ``collective_lock``."""
        control = self.control
        if self._unusable or control is None:
            self.check_usable()
            raise InterlaceError(f"rank {self.name}: the group is still joining")
        self.sequence = sequence = self.sequence + 1
        if control.written[sequence & 1] is not payload:  # write the same object only once
            control.write(sequence, payload)
        if not sequence % LOOK:
            control.spread.say()
        return control, sequence

    def await_message(self, sequence: int, doing: str) -> None:
        control = self.control
        assert control is not None
        self.await_word(control.peers, SEQUENCE, sequence, doing)
        if not sequence % LOOK:
            control.spread.look()

    def await_word(self, peers: Sequence[int], index: int, value: int, doing: str) -> None:
        """Return when word ``index`` of these peers' control segments is at least ``value``."""
        control = self.control
        assert control is not None
        for peer in peers:
            if control.words[peer].acquired(index) < value:
                self._await(control, peer, index, value, doing)
                control.words[peer].acquired(index)

    def release(self, index: int, value: int) -> None:
        """Store a word of this rank's control segment, after all earlier writes."""
        control = self.control
        assert control is not None
        control.words[self.rank].release(index, value)
        control.ring()

    def _await(self, control: Control, peer: int, index: int, value: int, doing: str) -> None:
        """Poll one word of ``peer``. If this fails, the group is unusable afterwards."""
        view = control.views[peer]
        for _ in range(self._spins):
            if view[index] >= value:
                return
        patience, waited_for = self.patience(), (peer,)
        try:
            while view[index] < value:
                patience.step(doing, waited_for, lambda: view[index] >= value)
        except BaseException as error:
            self._unusable = f"an earlier exchange failed ({error})"
            raise

    def wait_until(
        self, predicate: Callable[[], bool], doing: str, waited_for: Sequence[int]
    ) -> None:
        """Poll ``predicate``. Raise if a rank of ``waited_for`` is gone, on abort and on timeout."""
        self.check_usable()
        patience = self.patience()
        peers = [rank for rank in waited_for if rank != self.rank]
        while not predicate():
            patience.step(doing, peers)

    def patience(
        self, timeout: float | None = None, kind: Kind = Kind.OF_OP, **of: float
    ) -> Patience:
        """Return the state of one wait; call its ``step`` after every failed poll. ``of``: see Patience.

        ``timeout`` is the caller's own bound of this wait. When it expires, the group is not aborted.
        """
        wait, seconds = LastingWait(self.blame, kind), timeout or of.pop("bound", 0) or self.bound()
        bell, judge = self.control.bell if self.control else None, None if timeout else wait
        spins = int(of.pop("spins", self._spins))
        return Patience(self.name, seconds, wait.look, spins=spins, bell=bell, judge=judge, **of)

    def bound(self) -> float:
        """Return the timeout, in seconds, of a wait in the current op."""
        options = self.options
        seconds = options.timeout.total_seconds() if options is not None else 0.0
        return seconds if seconds > 0 else current().bound_seconds or self.timeout

    def idle_hook(self) -> Callable[[BlockedWait], None]:
        """Return a function for one launch, to be called whenever all its programs wait for peers.

        It bounds one wait: the timeout starts again when another wait is reported. The report names one
        program of many, so the launch may wait for any peer. A peer that has left in good order has
        finished its part of every op.
        """
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        patience: Patience | None = None
        last = ""

        def idle(wait: BlockedWait) -> None:
            nonlocal patience, last
            doing = str(wait)
            if patience is None or doing != last:
                patience, last = self.patience(kind=Kind.OF_MANY), doing
            patience.step(doing, [rank for rank in peers if not self.has_left(rank)])

        return idle

    def interruption(self, doing: str, waited_for: Sequence[int]) -> InterlaceError | None:
        """Return why a wait for these ranks can never end, or None. Root causes come first.

        A peer's death comes before an abort, because the abort is often another survivor's reaction to that
        death. If a peer aborted the group before it died, the abort is the cause.
        """
        if self._unusable:
            return InterlaceError(f"rank {self.name}: {doing}: {self._unusable}")
        control = self.control
        ends = self._rendezvous
        if self._joining and self._meeting is not None and (gone := ends.hung_up(ends.pids)):
            reports = filter(None, map(self._meeting.told, gone))
            return next(map(InterlaceError, reports), ends.died(gone[0], doing))
        if control is None:
            return None
        awaited = {rank: self.pidfds[rank] for rank in waited_for if rank in self.pidfds}
        death = self._death(control, awaited, doing)
        failure = self.failure()
        if death is not None or failure is not None:
            # if another survivor aborted the group, the death of any rank is the cause
            return death or self._death(control, self.pidfds, doing) or failure
        for rank in waited_for:
            if control.has_left(rank):  # a death may be the reason
                left = f"rank {self.names[rank]} has left the group"
                text = f"{left}, and rank {self.name} waits for it in {doing}"
                error = of_another_rank(InterlaceError(text))
                return self._death(control, self.pidfds, doing) or error
        return None

    def _death(self, control: Control, pidfds: dict[int, int], doing: str) -> PeerDiedError | None:
        """Return the error for a rank of ``pidfds`` that died or now runs another program, or None."""
        ended = ended_processes(pidfds)
        for rank in (*ended, *self.hung_up(pidfds)):
            if not control.reason(rank) and not control.has_left(rank):
                died = rank in ended or ended_processes({rank: pidfds[rank]}, END_SECONDS)
                end = DIED if died else REPLACED
                return PeerDiedError(self.names[rank], self.pids[rank], doing, end)
        return None

    def failure(self) -> InterlaceError | None:
        """Return the error with which this group, or a group that contains it, was aborted; or None."""
        if self.control is not None and (found := self.control.aborted_by()) is not None:
            return AbortedError(aborted_by(self.names[found[0]], found[1]))
        return self._parent.failure() if self._parent is not None else None

    def check(self) -> None:
        """Raise if this group, or a group that contains it, has failed. A closed group has not failed."""
        control = self.control
        if self._unusable or control is None:
            if self._unusable != _CLOSED:
                self.check_usable()
        elif (control.own_view[ABORTED] or self._parent) and (failure := self.failure()):
            raise failure

    def check_during(self, doing: str, waited_for: Sequence[int]) -> None:
        """If the group was aborted, raise the reason. A death among these ranks comes before the abort."""
        failure = self.failure()
        if failure is not None:
            raise self.interruption(doing, waited_for) or failure

    def has_left(self, rank: int) -> bool:
        return self.control is not None and self.control.has_left(rank)

    def abort(self, reason: str, blamed: Sequence[int] = ()) -> None:
        """End all waits of all ranks with an AbortedError. The first abort's ``reason`` is kept."""
        with self._abort_lock:
            if (control := self.control) is not None:
                control.abort(reason)
        record.dump(self, reason, blamed)

    def disown(self, reason: str) -> None:
        """Refuse every later collective with ``reason``, and never touch the memory again."""
        self._unusable, self.control = reason, None
        if self._leave is not None:
            self._leave.detach()
        self._rendezvous.close()

    def close(self, linger: float = 0.0) -> None:
        """Tell the peers that this rank has left, and release descriptors and memory. Idempotent.

        ``linger``: seconds that this rank also waits for rank 0 to leave. Rank 0 often serves the store: a
        rank that returned earlier could begin the next generation in a store that is about to end.
        """
        self._unusable = self._unusable or _CLOSED
        control, self.control = self.control, None
        if self._leave is not None:
            self._leave()
        if self.segment is not None:
            self.segment.close()
        if control is not None:
            self._await_first(control, linger)
        self._rendezvous.close()
        _close_values(self.pidfds)

    def _await_first(self, control: Control, seconds: float) -> None:
        if self.rank == 0 or seconds <= 0:
            return
        deadline = time.monotonic() + seconds
        pidfd = {0: self.pidfds[0]} if 0 in self.pidfds else {}
        while not control.has_left(0) and time.monotonic() < deadline:
            if ended_processes(pidfd):
                return
            time.sleep(LONGEST_SLEEP)
        time.sleep(SETTLE_SECONDS)  # rank 0 leaves first and then stops the store

    def check_usable(self) -> None:
        if self._unusable:
            raise InterlaceError(f"rank {self.name}: {self._unusable}")


def _close_values(descriptors: dict[int, int]) -> None:
    """Close each descriptor once, whether the group was closed or garbage-collected."""
    values = list(descriptors.values())
    descriptors.clear()
    rendezvous.close_all(values)


def _after_fork_in_child() -> None:
    for group in Blame.everywhere():
        group.disown(OF_PARENT)


os.register_at_fork(after_in_child=_after_fork_in_child)
