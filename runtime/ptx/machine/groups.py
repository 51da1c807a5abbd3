"""Asynchronous work of threads, in groups that they commit and wait for; one kind waits for its own only.

Work is done as late as it may be, when its thread waits for its group: who looks before, or does not wait,
sees what was there before.
"""

from collections.abc import Callable

import numpy as np

from interlace.runtime.ptx.instruction import Action, Instruction
from interlace.runtime.ptx.special import WARP, Threads
from interlace.runtime.ptx.types import TYPES, Array


class AsyncWork:
    """What one instruction has started, for the threads in ``pending`` not done yet.

    ``perform`` does it for those threads whose mask the ``Threads`` have, and the ``copies`` of its results
    that were made before. ``group``: of every thread, the number of its commit group; -1 before.
    ``targets``: of a copy, where each thread's ``size`` bytes go, all from ``low`` to ``high``. None if
    nobody listens. ``text``: what has started it.
    """

    targets: Array | None = None
    size, low, high, text = 0, np.uint64(0), np.uint64(0), ""

    def __init__(self, pending: Array, perform: Callable[[Threads], None]) -> None:
        self.pending, self.perform = pending.copy(), perform
        self.group = np.full(len(pending), -1)
        self.copies: list[Action] = []


class AsyncGroups:
    """All work of one kind that the ``count`` threads of a program have not waited for, oldest first."""

    def __init__(self, count: int) -> None:
        self._committed = np.zeros(count, np.int64)
        self._work: list[AsyncWork] = []

    def start(self, threads: Threads, perform: Callable[[Threads], None]) -> AsyncWork:
        self._work.append(AsyncWork(threads.everyone(), perform))
        return self._work[-1]

    def commit(self, threads: Threads) -> None:
        those = threads.everyone()
        for work in self._work:
            work.group = np.where(those & (work.group < 0), self._committed, work.group)
        self._committed[those] += 1

    def wait(self, threads: Threads, left: int) -> None:
        """Until all but the last ``left`` groups of these threads are done."""
        those, last = threads.everyone(), self._committed - left
        self._perform(threads, [(w, those & (w.group >= 0) & (w.group < last)) for w in self._work])

    def reach(self, threads: Threads, last: AsyncWork) -> None:
        """Until these threads' warps have done ``last``, and what was started before."""
        those = np.repeat(threads.everyone().reshape(-1, WARP).any(axis=1), WARP)
        self._perform(threads, [(w, those) for w in self._work[: self._work.index(last) + 1]])

    def started(self) -> list[AsyncWork]:
        return list(self._work)

    def finish(self, threads: Threads, works: list[AsyncWork], those: Array) -> None:
        """What ``those`` threads have started and not done, of ``works``."""
        self._perform(threads, [(work, those) for work in works])

    def _perform(self, threads: Threads, chosen: list[tuple[AsyncWork, Array]]) -> None:
        before = threads.mask
        for work, those in chosen:
            due = those & work.pending
            if due.any():
                threads.mask, work.pending = due, work.pending & ~due
                for action in (work.perform, *work.copies):
                    action(threads)
        threads.mask = before
        self._work = [work for work in self._work if work.pending.any()]


def build_commit(instruction: Instruction, kind: str) -> Action:
    instruction.finish(0)
    return lambda threads: groups_of(threads, kind).commit(threads)


def build_wait(instruction: Instruction, kind: str) -> Action:
    instruction.finish(1)
    left = instruction.literal(instruction.operands[0], TYPES["u32"]) or 0
    return lambda threads: groups_of(threads, kind).wait(threads, left)


def groups_of(threads: Threads, kind: str) -> AsyncGroups:
    groups: dict[str, AsyncGroups] = threads.session.groups
    return groups.setdefault(kind, AsyncGroups(len(threads.numbers)))
