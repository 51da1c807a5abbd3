"""Agents of a run, with vector clocks: who can act, what each one knows, how far its atomics reach."""

from dataclasses import dataclass
from typing import Any

import numpy as np

SCOPES = {"cta": 0, "gpu": 1, "sys": 2}
SYS = SCOPES["sys"]


@dataclass(frozen=True)
class Rules:
    """The rules that hold. Off: every release has a barrier, every atomic is acq_rel, or of scope sys."""

    barriers: bool = True
    orders: bool = True
    scopes: bool = True


class Agent:
    """One who acts. ``clock`` is what it knows of every component's time; its own begin with ``first``."""

    components = 2

    def __init__(self, number: int, first: int, rank: int, who: str) -> None:
        self.number, self.first, self.rank, self.who = number, first, rank, who
        self.lanes, self.thread = first, first + 1
        self.clock = np.zeros(first + self.components, np.int64)
        self.clock[self.lanes] = self.clock[self.thread] = 1
        self.barred = [0, 0]
        self.fenced: dict[int, Any] = {}
        self.pending: Any = None
        self.for_lanes: Any = None

    def owns(self, component: Any) -> Any:
        return (component >= self.first) & (component < self.first + self.components)

    def begin(self, known: Any) -> None:
        """A program of a launch that knows what was before."""
        self.learn(known)
        self.barred = [int(self.clock[self.lanes]), int(self.clock[self.thread])]
        self.tick()
        self.fenced = {SYS: known}
        self.pending = self.for_lanes = None

    def end(self) -> Any:
        """The end of a program: what whoever waits for it knows then."""
        for late in (self.pending, self.for_lanes):
            if late is not None:
                self.learn(late)
        clock = self.clock.copy()
        self.tick()
        return clock

    def learn(self, other: Any) -> None:
        self.clock = joined(self.clock, other)

    def now(self) -> tuple[int, int]:
        """The time of the lanes, and of the one thread."""
        return int(self.clock[self.lanes]), int(self.clock[self.thread])

    def tick(self) -> None:
        self.clock[self.lanes] += 1
        self.clock[self.thread] += 1

    def released(self, *, all_threads: bool, each_thread: bool) -> Any:
        """What it hands on: of the own lanes what was before the last barrier, unless ``all_threads``.

        ``each_thread``: every thread releases, and has only its own scalars behind it, too.
        """
        clock = self.clock.copy()
        if not all_threads:
            clock[self.lanes] = self.barred[0]
            if each_thread:
                clock[self.thread] = self.barred[1]
        return clock

    def has_released(self, threads: Any = None, *, all_threads: bool) -> None:
        """Later accesses are not covered by the release."""
        self.clock[self.thread] += 1
        if all_threads:
            self.clock[self.lanes] += 1

    def barrier(self) -> None:
        """All threads have met: each knows what the others did, and what they have acquired."""
        self.barred = [int(self.clock[self.lanes]), int(self.clock[self.thread])]
        if self.for_lanes is not None:
            self.learn(self.for_lanes)
            self.for_lanes = None
        self.tick()


class ThreadsAgent(Agent):
    """A program whose accesses tell threads apart: a component for each.

    ``clock`` is what all threads know, since the last barrier; of the own components, what was before it.
    ``times``: of every thread now. ``acquired``, ``pending`` and ``fenced``, by thread: what it alone
    knows; what it has read without acquiring; what it has released with a fence, by scope.
    """

    def __init__(self, number: int, first: int, rank: int, who: str, threads: int) -> None:
        self.components = threads
        super().__init__(number, first, rank, who)
        self.times = np.ones(threads, np.int64)

    def begin(self, known: Any) -> None:
        self.learn(known)
        self.acquired: dict[int, Any] = {}
        self.waiting: dict[int, Any] = {}
        self.fences: dict[int, dict[int, Any]] = {}
        self.before = known
        self.barrier()

    def now(self) -> tuple[int, int]:
        latest = int(self.times.max())
        return latest, latest

    def end(self) -> Any:
        for late in self.waiting.values():
            self.learn(late)
        self.barrier()
        return self.clock.copy()

    def barrier(self) -> None:
        for clock in self.acquired.values():
            self.learn(clock)
        self.acquired.clear()
        self.clock = self.clock.copy()
        self.clock[self.first : self.first + self.components] = self.times
        self.times = np.full(self.components, self.times.max() + 1)

    def known_by(self, thread: int) -> Any:
        return joined(self.acquired.get(thread), self.clock)

    def released_by(self, thread: int, *, all_threads: bool) -> Any:
        """What ``thread`` hands on: of the others' accesses, those before the last barrier."""
        clock = self.known_by(thread).copy()
        if all_threads:
            clock[self.first : self.first + self.components] = self.times
        clock[self.first + thread] = self.times[thread]
        return clock

    def has_released(self, threads: Any = None, *, all_threads: bool) -> None:
        """Later accesses of ``threads`` are not covered by the release."""
        self.times[slice(None) if all_threads else threads] += 1

    def acquire(self, thread: int, clock: Any) -> None:
        self.acquired[thread] = joined(self.acquired.get(thread), clock)


def joined(one: Any, other: Any) -> Any:
    """The componentwise maximum; clocks grow as agents appear. ``one`` None: there is no clock yet."""
    if one is None:
        return other
    if len(one) < len(other):
        one, other = other, one
    result = one.copy()
    np.maximum(result[: len(other)], other, out=result[: len(other)])
    return result


def reaches(scope: int, agent: Agent, other: Agent) -> bool:
    """Whether ``other`` is within the scope of what ``agent`` does."""
    if scope == SYS or agent is other:
        return True
    return scope == SCOPES["gpu"] and agent.rank == other.rank
