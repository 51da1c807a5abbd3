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
    """One who acts. ``clock`` is what it knows of every component's time."""

    def __init__(self, number: int, rank: int, who: str) -> None:
        self.number, self.rank, self.who = number, rank, who
        self.lanes, self.thread = 2 * number, 2 * number + 1
        self.clock = np.zeros(2 * number + 2, np.int64)
        self.clock[self.lanes] = self.clock[self.thread] = 1
        self.barred = [0, 0]
        self.fenced: dict[int, Any] = {}
        self.pending: Any = None
        self.for_lanes: Any = None

    def learn(self, other: Any) -> None:
        self.clock = joined(self.clock, other)

    def tick(self) -> None:
        self.clock[self.lanes] += 1
        self.clock[self.thread] += 1

    def barrier(self) -> None:
        """All threads have met: each knows what the others did, and what they have acquired."""
        self.barred = [int(self.clock[self.lanes]), int(self.clock[self.thread])]
        if self.for_lanes is not None:
            self.learn(self.for_lanes)
            self.for_lanes = None
        self.tick()


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
