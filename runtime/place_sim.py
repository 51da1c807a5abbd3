"""The place ``sim``: all ranks in one process, every schedule reproducible from its seed.

Host code of a rank, its streams and all programs of its kernels are tasks of one scheduler. A stream is
a queue; while it has items, one task works through them in order. Tasks of different streams and ranks
interleave wherever work on GPUs could overlap: between the pieces of a copy, around every atomic.

Torch code of the user runs at once in the host task, so waiting for an op blocks that task, and reading
an output before waiting reads what is there: the same mistake as on a GPU, with the same effect.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace.kernels.signal import CREDIT_WORDS, EPOCH_WORD
from interlace.runtime import trace
from interlace.runtime.errors import BlockedWait, rank_error
from interlace.runtime.launch import KernelLaunch
from interlace.runtime.memory import DATA_ALIGNMENT, SymmetricBuffer, Workspace
from interlace.runtime.place import Place
from interlace.runtime.scheduler import MEMORY_SWITCH, Scheduler, TaskFailed, user_line
from interlace.runtime.stream import Event, Stream

COPY_PIECES = 3


@dataclass
class _Group:
    """What the ranks of one group share: messages and buffers, by sequence number."""

    exchanges: dict[int, dict[int, bytes]] = field(default_factory=dict)
    allocations: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)


class SimWorld:
    """One simulated run: its scheduler and the groups of its ranks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.tracer: Any = None
        self._groups: dict[Any, _Group] = {}

    def group(self, key: Any) -> _Group:
        return self._groups.setdefault(key, _Group())


class SimEvent(Event):
    """Set when the stream reaches it."""

    def __init__(self, place: SimPlace, *, completed: bool = False) -> None:
        self._place = place
        self.completed = completed

    def is_completed(self) -> bool:
        return self.completed

    def synchronize(self) -> None:
        self._place.hold_current(self, "an event")


class SimStream(Stream):
    """A queue of items and, while there are any, a task that runs them."""

    def __init__(self, place: SimPlace, name: str) -> None:
        self._place = place
        self._name = name
        self._scheduler = place.world.scheduler
        self._items: deque[tuple[str, Callable[[], None], torch.Tensor | None]] = deque()
        self._busy = False

    def _enqueue(
        self, label: str, item: Callable[[], None], copied_to: torch.Tensor | None = None
    ) -> None:
        self._items.append((label, item, copied_to))
        if not self._busy:
            self._busy = True
            self._scheduler.spawn(self._place.global_rank, f"stream {self._name}", self._work_off)

    def _work_off(self) -> None:
        while self._items:
            label, item, copied_to = self._items.popleft()
            tracer = self._place.world.tracer
            start = 0 if tracer is None else tracer.now()
            item()
            self._scheduler.progress()
            if tracer is not None:
                tracer.on_item(self._place.global_rank, self._name, label, start, copied_to)
            self._scheduler.give_way()
        self._busy = False

    def _block(
        self, ready: Callable[[], bool], what: str, values: Callable[[], tuple[int, int]] | None
    ) -> None:
        def describe() -> BlockedWait:
            seen, expected = (None, None) if values is None else values()
            return BlockedWait(
                self._place.global_rank, f"stream {self._name}", what, seen, expected
            )

        if not ready():
            self._scheduler.block(ready, describe)

    def launch(self, launch: KernelLaunch) -> None:
        def item() -> None:
            done = False

            def finished() -> None:
                nonlocal done
                done = True

            launch.spawn(self._scheduler, self._place.global_rank, finished)
            self._block(lambda: done, f"{launch.name} of {launch.op}", None)

        self._enqueue(launch.name, item)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, label: str) -> None:
        def item() -> None:
            if destination.dim() == 0 or destination.shape[0] < COPY_PIECES:
                destination.copy_(source)
                return
            pieces = zip(destination.chunk(COPY_PIECES), source.chunk(COPY_PIECES), strict=True)
            for to_part, from_part in pieces:
                to_part.copy_(from_part)
                self._scheduler.progress()
                self._scheduler.give_way()

        self._enqueue(label, item, destination)

    def call(self, function: Callable[[], Any], label: str) -> None:
        def item() -> None:
            function()

        self._enqueue(label, item)

    def publish(self, workspace: Workspace, peer: int, slot: int) -> None:
        def item() -> None:
            view = workspace.slots(peer, slot, 1)
            view[0] = _epoch(workspace)
            tracer = self._place.world.tracer
            if tracer is not None:
                tracer.on_publish(self._place.global_rank, self._name, workspace.op, view)

        self._enqueue(f"publish slot {slot} of rank {peer}", item)

    def wait(self, workspace: Workspace, source: int, slot: int) -> None:
        def item() -> None:
            view = workspace.slots(workspace.rank, slot, 1)
            epoch = _epoch(workspace)
            self._block(
                lambda: int(view[0]) >= epoch,
                f"slot {slot} from rank {source} in {workspace.op}",
                lambda: (int(view[0]), epoch),
            )

        self._enqueue(f"wait slot {slot} from rank {source}", item)

    def wait_credits(self, workspace: Workspace) -> None:
        def item() -> None:
            credits = _credits(workspace, workspace.rank)
            epoch = _epoch(workspace) - 1
            self._block(
                lambda: int(credits.min()) >= epoch,
                f"credit of rank {int(credits.argmin())} in {workspace.op}",
                lambda: (int(credits.min()), epoch),
            )

        self._enqueue("wait for credits", item)

    def finish(self, workspace: Workspace) -> None:
        def item() -> None:
            epoch = _epoch(workspace)
            for peer in range(workspace.world_size):
                _credits(workspace, peer)[workspace.rank] = epoch
                self._scheduler.progress()
                self._scheduler.give_way()
            workspace.header(workspace.rank)[EPOCH_WORD] = epoch

        self._enqueue("finish", item)

    def record(self) -> Event:
        event = SimEvent(self._place)

        def item() -> None:
            event.completed = True

        self._enqueue("event", item)
        return event

    def wait_event(self, event: Event) -> None:
        if event.is_completed():
            return
        self._enqueue("wait for event", lambda: self._block(event.is_completed, "an event", None))


def _epoch(workspace: Workspace) -> int:
    """The epoch of the op that runs now on the workspace's channel."""
    return int(workspace.header(workspace.rank)[EPOCH_WORD]) + 1


def _credits(workspace: Workspace, rank: int) -> torch.Tensor:
    return workspace.header(rank)[CREDIT_WORDS : CREDIT_WORDS + workspace.world_size]


class SimPlace(Place):
    """One simulated rank of one group. ``members`` are ranks of the run, in group order."""

    name = "sim"
    device = torch.device("cpu")
    interpreted = True
    direct_access = False

    def __init__(self, world: SimWorld, members: tuple[int, ...], rank: int, key: Any) -> None:
        self.world = world
        self.rank = rank
        self.world_size = len(members)
        self.global_rank = members[rank]
        self._members = members
        self._key = key
        self._group = world.group(key)
        self._exchanged = 0
        self._allocated = 0

    def _meet(self, box: dict[int, Any], doing: str) -> None:
        """Block the host task until every rank has put something into ``box``."""

        def describe() -> BlockedWait:
            missing = [self._members[r] for r in range(self.world_size) if r not in box]
            return BlockedWait(
                self.global_rank,
                "host code",
                f"ranks {missing} to call {doing}",
                where=user_line(task),
            )

        task = self.world.scheduler.current
        if len(box) < self.world_size:
            self.world.scheduler.block(lambda: len(box) == self.world_size, describe)

    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        number, self._exchanged = self._exchanged, self._exchanged + 1
        box = self._group.exchanges.setdefault(number, {})
        box[self.rank] = payload
        self.world.scheduler.progress()
        self.world.scheduler.give_way()
        self._meet(box, doing)
        self._group.exchanges.pop(number - 2, None)  # everyone has left that one
        return [box[rank] for rank in range(self.world_size)]

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        number, self._allocated = self._allocated, self._allocated + 1
        box = self._group.allocations.setdefault(number, {})
        memory = torch.zeros(nbytes + DATA_ALIGNMENT, dtype=torch.uint8)
        shift = -memory.data_ptr() % DATA_ALIGNMENT
        box[self.rank] = memory[shift : shift + nbytes]
        if self.world.tracer is not None:
            self.world.tracer.on_allocate(self.global_rank, box[self.rank])
        self._meet(box, "an allocation of symmetric memory")
        peer_bytes = [box[rank] for rank in range(self.world_size)]
        peers = torch.tensor([part.data_ptr() for part in peer_bytes], dtype=torch.int64)
        return SymmetricBuffer(self.rank, nbytes, peers, peer_bytes)

    def new_stream(self, name: str, *, priority: bool = False) -> Stream:
        return SimStream(self, name)

    def record_current(self) -> Event:
        return SimEvent(self, completed=True)

    def hold_current(self, event: Event, waiting_for: str) -> None:
        def describe() -> BlockedWait:
            return BlockedWait(self.global_rank, "host code", waiting_for, where=user_line(task))

        task = self.world.scheduler.current
        if not event.is_completed():
            self.world.scheduler.block(event.is_completed, describe)

    def program_limit(self) -> int:
        return 8

    def subgroup(self, ranks: tuple[int, ...], generation: int) -> Place:
        members = tuple(self._members[rank] for rank in ranks)
        key = (self._key, members, generation)
        return SimPlace(self.world, members, ranks.index(self.rank), key)

    def abort(self, reason: str) -> None:
        """An exception of any task ends the whole run; there is nothing to tell the others."""

    def close(self) -> None:
        """Memory goes with the run."""


def run_sim(
    host: Callable[[SimPlace], Any],
    world_size: int,
    *,
    seed: int,
    timeout: float,
    tracer: Any = None,
    memory_switch: float = MEMORY_SWITCH,
) -> list[Any]:
    """Run ``host(place)`` once per rank; what each returned, by rank.

    ``tracer`` sees every memory operation; by default the recorder of ``trace.recording``, if any.
    """
    tracer = trace.current() if tracer is None else tracer
    switch = MEMORY_SWITCH if memory_switch is None else memory_switch
    scheduler = Scheduler(seed, timeout=timeout, memory_switch=switch)
    world = SimWorld(scheduler)
    world.tracer = scheduler.observer = tracer
    results: list[Any] = [None] * world_size
    members = tuple(range(world_size))
    if tracer is not None:
        tracer.attach(scheduler)

    def main(rank: int) -> None:
        results[rank] = host(SimPlace(world, members, rank, "world"))
        scheduler.finished.append(f"rank {rank} has returned")

    for rank in members:
        scheduler.spawn(rank, "host code", functools.partial(main, rank))
    try:
        scheduler.run()
    except TaskFailed as failure:
        assert failure.__cause__ is not None
        if isinstance(failure.__cause__, KeyboardInterrupt):
            raise failure.__cause__ from None
        raise rank_error(failure.task.rank, failure.__cause__) from failure.__cause__
    return results
