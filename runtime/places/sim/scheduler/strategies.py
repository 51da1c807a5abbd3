"""The strategies by which the scheduler explores interleavings: they choose the next task.

A task may be interrupted at a *point*: before every load, store and atomic of a program, between the pieces
of a copy, and at every call that waits. The scheduler asks a strategy twice. At a memory
access it asks whether to interrupt, and after an interruption, which task goes on. Both answers may depend
only on a seed, so a seed is a schedule.

=============  ====================================================================================
Random         any task that can run, with equal chances; memory accesses sometimes interrupt
Priority       probabilistic concurrency testing (Burckhardt et al., ASPLOS 2010): tasks have random
               priorities, the highest one runs, and at ``depth - 1`` random points it becomes the
               lowest. Finds a bug that needs ``depth`` ordered events with a known probability.
Replay         a list of segments (task, points), recorded by another run
=============  ====================================================================================
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from interlace.runtime.core.errors import BlockedWait


@dataclass
class Program:
    """The position of a task in a launch: the ``index``-th program, at ``position`` of ``grid``.

    ``threads``: the number of its threads, if accesses have their threads; otherwise 0.
    """

    kernel: str
    op: str
    index: int
    position: tuple[int, int, int]
    grid: tuple[int, int, int]
    threads: int = 0


@dataclass(eq=False)
class Task:
    """One coroutine. ``ready`` is None when it can run; otherwise it is the condition that it waits for.

    ``name`` is the same in every schedule; ``number`` counts the rank's tasks with the same ``who``.
    ``owner`` is the stream that the task works for. ``polls``: it is suspended in a poll, and may stop
    polling if it goes on. Since it changed memory, ``seen`` has its polls and reads, ``loads`` its number
    of plain loads, and ``idled`` the number of points at which it could have been interrupted. ``changes``
    counts its changes of memory. If ``watched``, ``seen`` has all its reads, for code that decides when it
    waits (``ptx/machine/machine.py``). ``known`` has its last polls, by addresses. ``busy`` counts the
    steps since its last poll without a new value, and ``looked`` has its changes at that time.
    ``torch_state``: see ``torch_state.py``.
    """

    rank: int
    who: str
    name: str
    greenlet: Any
    number: int = 0
    program: Program | None = None
    owner: Any = None
    ready: Callable[[], bool] | None = None
    waiting: Callable[[], BlockedWait] | None = None
    polls: bool = False
    seen: list[Any] = field(default_factory=list)
    idled: int = 0
    loads: int = 0
    changes: int = 0
    watched: bool = False
    known: dict[bytes, bytes] = field(default_factory=dict)
    busy: int = 0
    looked: int = 0
    on_finish: Callable[[], None] | None = None
    torch_state: Any = None

    def can_run(self) -> bool:
        return self.ready is None or self.ready()


MEMORY_SWITCH = 0.2


class ScheduleSegment(NamedTuple):
    """``task`` ran for ``points`` points before another task ran."""

    task: str
    points: int


class Strategy(Protocol):
    def interrupts(self) -> bool:
        """Return whether to interrupt a task that is about to access memory."""

    def passes(self) -> None:
        """Note that a task is interrupted, whatever the strategy has decided."""

    def tires(self) -> None:
        """Let other tasks go first: the running task has run for long without a change of memory."""

    def choose(self, tasks: Sequence[Task]) -> Task | None:
        """Return a task that can run; None if none can."""


class Random:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def interrupts(self) -> bool:
        return self._random.random() < MEMORY_SWITCH

    def passes(self) -> None: ...

    def tires(self) -> None: ...

    def choose(self, tasks: Sequence[Task]) -> Task | None:
        count = len(tasks)
        first = int(self._random.random() * count)
        for step in range(count):
            task = tasks[(first + step) % count]
            if task.can_run():
                return task
        return None


class Priority:
    """Always the task of highest priority; ``depth - 1`` times within ``length`` points it changes.

    ``by_rank``: priorities first follow a random order of the ranks, so that kernels and streams of one
    rank are far behind. Its user code is not, because otherwise no other rank could begin its next op.
    """

    def __init__(
        self, seed: int, *, depth: int = 3, length: int = 2000, by_rank: bool = False
    ) -> None:
        self._random = random.Random(seed)
        self._by_rank = by_rank
        self._of_rank: dict[int, float] = {}
        self._priorities: dict[Task, float] = {}
        self._changes = {self._random.randrange(length) for _ in range(depth - 1)}
        self._point = 0
        self._lowest = 0.0
        self._last: Task | None = None
        self._tasks: list[Task] = []  # the last tasks; their order, if known, is in ``_order``
        self._order: list[Task] = []

    def interrupts(self) -> bool:
        # Only a change of priorities makes an interruption useful.
        if self._point in self._changes:
            return True
        self._point += 1
        return False

    def passes(self) -> None:
        if self._point in self._changes:
            self._demote()
        self._point += 1

    def tires(self) -> None:
        self._demote()

    def _first(self, task: Task) -> float:
        fraction = self._random.random()
        if not self._by_rank:
            return fraction
        if task.owner is None and task.program is None:
            return 2 + fraction
        return self._of_rank.setdefault(task.rank, self._random.random()) + fraction / 1e3

    def _demote(self) -> None:
        self._lowest -= 1
        if self._last is not None:
            self._priorities[self._last] = self._lowest
            self._order = []

    def choose(self, tasks: Sequence[Task]) -> Task | None:
        if tasks != self._tasks:
            self._tasks = list(tasks)
            for task in tasks:
                if task not in self._priorities:
                    self._priorities[task] = self._first(task)
            self._order = []
        if not self._order:
            self._order = sorted(tasks, key=lambda task: -self._priorities[task])
        for task in self._order:
            if task.can_run():
                self._last = task
                return task
        return None


def for_seed(seed: int) -> Strategy:
    """Return a check's strategy: in turn random as in ``interlace.run``, priorities, and by rank."""
    if seed % 3 == 0:
        return Random(seed)
    return Priority(seed, by_rank=seed % 3 == 2)


class Replay:
    """Follow ``segments``, except those whose task cannot run; then run each task while it can run."""

    def __init__(self, segments: Sequence[ScheduleSegment]) -> None:
        self._segments = list(segments)
        self._next = 0
        self._left = 0
        self._name = ""
        self._tired = False

    def interrupts(self) -> bool:
        if self._name and self._left > 0:
            self._left -= 1
            return self._left == 0
        return False

    def passes(self) -> None:
        if self._left > 0:
            self._left -= 1

    def tires(self) -> None:
        self._tired = self._left == 0  # segments, if any are left, decide who goes on

    def choose(self, tasks: Sequence[Task]) -> Task | None:
        current = next((task for task in tasks if task.name == self._name), None)
        if self._left > 0 and current is not None and current.can_run():
            return current
        while self._next < len(self._segments):
            name, points = self._segments[self._next]
            self._next += 1
            task = next((task for task in tasks if task.name == name), None)
            if task is not None and task.can_run():
                self._name, self._left = name, points
                return task
        self._left = 0
        if current is not None and current.can_run() and not self._tired:
            return current
        first = 0 if current is None else tasks.index(current) + 1
        self._tired = False
        for task in (*tasks[first:], *tasks[:first]):
            if task.can_run():
                self._name = task.name
                return task
        return None
