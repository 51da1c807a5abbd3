"""Loops of a program's threads that change nothing: waits for others, and loops that never end.

A *round* is over when every group of threads that can go on has gone back in a loop. Rounds in which the
program changes no memory are watched: from the first on if those are loops that look at what others write
(``module.py`` says which), which may change their own, shared memory, else from a later one. As soon as
they read nothing new, the program waits for the words that they read, until others change one. Rounds that
read nothing, and leave every register as it was, never end.
"""

from typing import Any

from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.ptx.instruction import Instruction
from interlace.runtime.ptx.special import Threads

PATIENCE = 32  # rounds of loops that do not look as if they waited
IDLE_STEPS = (
    5_000_000  # instructions in loops that touch no global memory are taken for an endless one
)
MORE_ROUNDS = 100  # of all programs woken in vain, before their loops are taken for waits again
LONGEST_CIRCLE = 66  # rounds: a poll of a slot per rank, and what goes with it


class Spins:
    """The rounds of one program since it last changed memory."""

    def __init__(self, program: Any, threads: Threads) -> None:
        self._program, self._threads, self._task = program, threads, program.hooks.current
        self._changes = self._own_changes = 0
        self._more = 0
        self._begin()

    def _begin(self) -> None:
        self._quiet = self._new = self._old = 0
        self._moved = False  # whether rounds have changed the program's own memory
        self._known: set[Any] = set()
        self._around: dict[Any, None] = {}
        self._registers: list[Any] = []
        self._task.watched = False
        self._task.seen.clear()

    def waits(self, polls: int) -> bool:
        """After a round of a loop that will see and do the same again: wait for its last ``polls``.

        Not if memory has changed since they began, or another thread would have.
        """
        seen = self._task.seen
        if len(seen) < polls:
            return False
        self._program.hooks.spin(list(dict.fromkeys(seen[-polls:])))
        seen.clear()
        return True

    def over(self, kernel: str, step: Instruction, *, looks: bool) -> None:
        """A round is over, with ``step``; ``looks``: of loops that look at what others write."""
        if self._threads.idle_steps > IDLE_STEPS:
            raise _endless(
                kernel, step, f"{IDLE_STEPS} instructions without a look at global memory"
            )
        if self._are_idle(looks=looks):
            raise _endless(kernel, step, "neither memory nor registers change")

    def _are_idle(self, *, looks: bool) -> bool:
        """Whether rounds read nothing and change nothing; if they only change nothing, wait."""
        task = self._task
        moved = self._own_changes != self._program.changes
        if task.changes != self._changes or (moved and not looks):
            self._begin()
        self._moved |= moved
        self._changes, self._own_changes = task.changes, self._program.changes
        if self._more:
            self._more -= 1
            task.seen.clear()
            return False
        self._quiet += 1
        if not task.watched and (looks or self._quiet >= PATIENCE):
            task.watched, self._registers = True, list(self._threads.registers)
            task.seen.clear()
            return False
        if not task.watched:
            return False
        reads, registers = list(dict.fromkeys(task.seen)), list(self._threads.registers)
        task.seen.clear()
        known = self._known.issuperset(reads) and bool(self._new)
        same = not moved and all(
            (a is b) or (a == b).all() for a, b in zip(registers, self._registers, strict=True)
        )
        self._registers = registers
        if not known:
            self._known.update(reads)
            self._around.clear()
            self._new, self._old = min(self._new + 1, LONGEST_CIRCLE), 0
            return False
        self._around.update(dict.fromkeys(reads))
        self._old += 1
        if self._old < (self._new if looks or same else PATIENCE):
            return False
        if self._around:
            changed = self._program.hooks.spin(list(self._around))
            tries = max(1, MORE_ROUNDS // self._program.hooks.woken)
            self._more = 0 if changed or same else tries
            self._begin()
            self._quiet = PATIENCE if same else 0
            return False
        if self._moved:  # they were not rounds that change nothing
            self._begin()
            return False
        return same


def _endless(kernel: str, step: Instruction, why: str) -> InterlaceError:
    return InterlaceError(
        f"PTX: a loop of {kernel} never ends: {why}; line {step.line}, where it goes back: {step.text}"
    )
