"""The machine that runs a PTX kernel: all threads of a program, in groups at the same instruction.

A program starts as one group. Where its threads branch apart it becomes several; groups that meet at an
instruction are one again. Of several groups the one that is furthest behind goes on (``module.py`` has the
order), so that threads wait where their ways meet, unless it is in a loop that looks at what others write:
then it is the others' turn. A barrier holds a group until all threads that it is for are there, an
instruction of a whole warp until the warp is, and a wait for an mbarrier until its phase is complete.

Now and then, from one barrier to the next, warps go apart: drawn by the seed, block by block. Nothing but a
barrier makes them one again, so what only happens to work while warps run together does not.

Between the accesses that the hooks see nothing is a step of its own to other programs.

Loops that change nothing are waits for others, or never end. A *round* is over when every group of
threads that can go on has gone back in a loop. Rounds in which the program changes no memory are
watched: from the first on if those are loops that look at what others write (``module.py`` says which),
which may change their own, shared memory, else from a later one. As soon as they read nothing new, the
program waits for the words that they read, until others change one. Rounds that read nothing, and leave
every register as it was, never end.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from interlace.runtime.core.accesses import Numbers
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.sim.scheduler.program_hooks import ProgramHooks
from interlace_verify.machine.bulk_copies import finish
from interlace_verify.machine.local import POISON, ThreadMemory
from interlace_verify.machine.module import PtxKernel, SourcePlace, looks
from interlace_verify.machine.shared import PtxProgram
from interlace_verify.machine.warps import complete, tiles
from interlace_verify.ptx.instruction import Instruction
from interlace_verify.ptx.special import WARP, Threads
from interlace_verify.ptx.waits import ARRIVAL, BLOCK_BARRIER, CLUSTER, MBARRIER_WAIT, WARP_BARRIER

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
        self._known: set[object] = set()
        self._around: dict[object, None] = {}
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


APART = 1 / 8  # of the intervals between barriers, those in which warps go apart
_ENDS = ("ret", "exit")


@dataclass(eq=False)
class _ThreadGroup:
    """Threads at the same instruction. ``waits``: for the others of their barrier or warp.

    ``rounds``: how often it has gone round in loops that look at what others write, and how often it has
    gone ``back`` so many times in others; ``looks``: of the loop in which it went back in this round of the
    program, None before that. ``team``: groups of different teams do not become one. ``barrier``: the
    number of that which it waits at, and how many it is for; ``counted``: what that gives it; ``until``:
    whether what it waits for is there.
    """

    mask: Numbers
    at: int
    count: int
    rounds: int = 0
    back: int = 0
    looks: bool | None = None
    waits: bool = False
    team: int = 0
    barrier: tuple[int, int] | None = None
    counted: Callable[[Threads], None] | None = None
    until: Callable[[], bool] | None = None


class PtxMachine:
    """One program of ``kernel``.

    ``parameters`` are values by name, ``variables`` addresses; ``dynamic_bytes``: of shared memory.
    ``origins``: of the addresses in registers, by slot.
    """

    def __init__(
        self,
        kernel: PtxKernel,
        builder: Any,
        hooks: ProgramHooks,
        parameters: Mapping[str, Any],
        dynamic_bytes: int,
        variables: Mapping[str, Any],
        origins: Mapping[int, Any],
    ) -> None:
        self.kernel = kernel
        count, there = kernel.threads, math.prod(kernel.block)
        nbytes = -(-(kernel.static_bytes + dynamic_bytes) // 16) * 16
        whole = np.full(nbytes + 128, POISON, np.uint8)  # aligned, as the hardware has it
        skipped = -whole.ctypes.data % 128
        arrays = {name: each for name, each in parameters.items() if isinstance(each, bytes)}
        addresses = {n: np.frombuffer(each, np.uint8).ctypes.data for n, each in arrays.items()}
        self.program = PtxProgram(
            builder,
            hooks,
            parameters={**parameters, **{n: np.uint64(at) for n, at in addresses.items()}},
            arrays={addresses[name]: value for name, value in arrays.items()},
            draw=random.Random(f"{hooks.seed} {hooks.current.name}"),
            shared=whole[skipped : skipped + nbytes],
            local=ThreadMemory(count, kernel.local_bytes),
            variables=variables,
            extents=kernel.block,
            origins=origins,
        )
        registers = list(kernel.registers)
        numbers = np.arange(count, dtype=np.uint32)
        self.threads = Threads(self.program, registers, numbers, there, told_apart=True)
        self.threads.heard = hooks.observed or hooks.buffers is not None
        self.step = kernel.steps[0]
        self._groups = [_ThreadGroup(numbers < there, 0, there)]
        self._arrived: dict[int, int] = {}  # by number of a barrier
        self._random = self.program.draw
        self._spins = Spins(self.program, self.threads)

    def run(self) -> None:
        self._perhaps_part()
        self.program.hooks.begin(self.program.base, len(self.program.shared))
        with np.errstate(all="ignore"):
            while self._groups:
                self._go_on(self._next())
        finish(self.program)

    def where(self) -> tuple[str, tuple[SourcePlace, ...]]:
        """The instruction that runs, and the lines of the source that it is from, innermost first."""
        places = self.kernel.places.get(self.step.line, ())
        if places:
            return self.step.opcode, places
        return f"line {self.step.line} of the PTX of {self.kernel.name}: {self.step.text}", ()

    # -- groups ------------------------------------------------------------------------------------

    def _next(self) -> _ThreadGroup:
        """The group whose turn it is; those that have met are one."""
        if len(self._groups) > 1:
            self._merge()
        if len(self._groups) == 1 and not self._groups[0].waits:
            return self._groups[0]
        for group in self._groups:
            if group.until is not None and group.until():
                group.waits, group.until = False, None
        ready = [group for group in self._groups if not group.waits]
        if len(ready) == 1:
            return ready[0]
        if not ready:
            steps = sorted({self.kernel.steps[group.at].text for group in self._groups})
            raise InterlaceError(
                f"PTX: threads of a program of {self.kernel.name} wait for each other, at "
                f"{'; '.join(steps)}"
            )
        rounds = min(group.rounds for group in ready)
        order, teams = self.kernel.order, sorted({g.team for g in ready if g.rounds == rounds})
        team = teams[0] if len(teams) == 1 else self._random.choice(teams)
        own = [group for group in ready if group.team == team]
        return min(own, key=lambda group: (group.rounds, order[group.at]))

    def _perhaps_part(self) -> None:
        """Of a program that is one group, now and then make one of each warp."""
        if len(self._groups) > 1 or self._random.random() >= APART:
            return
        (whole,) = self._groups
        warps = np.arange(len(whole.mask)) // WARP
        masks = [whole.mask & (warps == warp) for warp in range(int(warps[-1]) + 1)]
        counted = [(mask, int(np.count_nonzero(mask))) for mask in masks]
        self._groups = [
            _ThreadGroup(mask, whole.at, count, team=team)
            for team, (mask, count) in enumerate(counted)
            if count
        ]

    def _merge(self) -> None:
        places = [(group.team, group.at, group.barrier) for group in self._groups]
        if len(set(places)) == len(places):
            return
        by_place: dict[object, _ThreadGroup] = {}
        for place, group in zip(places, self._groups, strict=True):
            met = by_place.setdefault(place, group)
            if met is not group:
                met.mask = met.mask | group.mask
                met.count += group.count
                met.rounds = max(met.rounds, group.rounds)
                if met.barrier is None:
                    met.waits, met.until = False, None  # perhaps all are there now
        self._groups = list(by_place.values())

    def _go_on(self, group: _ThreadGroup) -> None:
        """Run ``group`` until it waits, splits or ends, or comes where others may go on or join it."""
        threads, kernel = self.threads, self.kernel
        steps, registers = kernel.steps, threads.registers
        others = [each for each in self._groups if each is not group]
        alone = all(each.waits and each.until is None for each in others)
        stops = {each.at for each in others} if alone else kernel.joins
        whole = None if group.count == kernel.threads else group.mask
        at = group.at
        while True:
            threads.mask = whole
            for step in kernel.runs.get(at, ()):
                self.step = step
                step.action(threads)
                at += 1
            self.step = step = steps[at]
            name = step.mnemonic
            if step.guard >= 0:
                taken = registers[step.guard] if step.wanted else ~registers[step.guard]
                if whole is not None:
                    taken = taken & whole
                count = int(np.count_nonzero(taken))
            else:
                taken, count = group.mask, group.count
            group.at = at
            if name == "bra":
                if count and count < group.count:
                    self._split(group, step, taken, count)
                    return
                if count and step.target <= at:
                    self._go_back(group, at, step)
                at = step.target if count else at + 1
            elif not count:
                at += 1
            elif name == "brx":
                threads.mask = taken
                step.action(threads)
                self._fan_out(group, step, taken)
                return
            elif name in _ENDS:
                group.mask = group.mask & ~taken
                group.count -= count
                group.at = at + 1
                if not group.count:
                    self._groups.remove(group)
                for number, for_count in {each.barrier for each in self._groups if each.barrier}:
                    self._let_go(number, for_count)  # nobody waits for those who have left
                return
            else:
                if (
                    at in kernel.warp_wide
                    and count < kernel.threads
                    and not complete(step, threads, taken)
                ):
                    group.waits = True
                    return
                if count < group.count:
                    threads.mask = taken
                event = step.action(threads)
                if event is not None and not self._go_past(event, group, taken):
                    return
                at += 1
            if at in stops:
                group.at = at
                return

    def _go_back(self, group: _ThreadGroup, at: int, step: Instruction) -> None:
        """``group`` goes round in a loop; perhaps it waits for others, or will never end."""
        group.looks = at in self.kernel.spinning
        group.back += 1
        if group.looks or group.back % PATIENCE == 0:
            group.rounds += 1
        self.threads.idle_steps += at - step.target + 1
        going = [each for each in self._groups if not each.waits]
        if all(each.looks is not None for each in going):
            rounds_look = all(each.looks for each in going)
            for each in going:
                each.looks = None
            body = self.kernel.steps[step.target : at]
            reads = [each for each in body if each.mnemonic in ("ld", "atom")]
            self.step = next((each for each in reads if looks(each)), (reads or [step])[-1])
            polls = self.kernel.polling.get(at, 0) if len(going) == 1 else 0
            if not (polls and self._spins.waits(polls)):
                self._spins.over(self.kernel.name, step, looks=rounds_look)

    def _split(self, group: _ThreadGroup, step: Instruction, taken: Any, count: int) -> None:
        apart = _ThreadGroup(taken, step.target, count, group.rounds, team=group.team)
        self._groups.append(apart)
        group.mask = group.mask & ~taken
        group.count -= count
        group.at += 1

    def _fan_out(self, group: _ThreadGroup, step: Instruction, taken: Any) -> None:
        """Each thread goes where its index says; those that do not branch go on."""
        chosen = np.broadcast_to(self.program.branch, taken.shape)
        for index in np.unique(chosen[taken]).tolist():
            if index >= len(step.targets):
                raise InterlaceError(
                    f"PTX: index {index} of {len(step.targets)} targets; line {step.line}: {step.text}"
                )
            mask = taken & (chosen == index)
            count = int(np.count_nonzero(mask))
            at = step.targets[index]
            self._groups.append(_ThreadGroup(mask, at, count, group.rounds, team=group.team))
            group.count -= count
        group.mask, group.at = group.mask & ~taken, group.at + 1
        if not group.count:
            self._groups.remove(group)

    def _go_past(self, event: int, group: _ThreadGroup, taken: Any) -> bool:
        """Whether ``group`` goes on after an instruction that orders or waits."""
        if event in (BLOCK_BARRIER, ARRIVAL):
            barriers = [each for come in self.program.barriers for each in self._one_by_one(*come)]
        if event == BLOCK_BARRIER:
            return self._meet(group, barriers)
        if event == ARRIVAL:
            for number, count, mask in barriers:
                self._arrive(number, count, mask)
        elif event == WARP_BARRIER:
            for numbers in tiles(self.step, self.threads, taken):
                self.program.hooks.barrier(numbers)
        elif event == MBARRIER_WAIT:
            group.waits, group.until = True, self.program.until
            return False
        return True

    def _meet(self, group: _ThreadGroup, barriers: Sequence[tuple[int, int, Any]]) -> bool:
        """At barriers: whether ``group`` goes on, because all that one is for are there.

        Who is at none of them goes on by itself, and so do those at different ones.
        """
        whole = len(barriers) == 1 and int(np.count_nonzero(barriers[0][2])) == group.count
        alone, at, parts = whole and len(self._groups) == 1, group.at, [group]
        if not whole:
            group.mask = group.mask & ~np.logical_or.reduce([mask for _, _, mask in barriers])
            group.count, group.at = int(np.count_nonzero(group.mask)), at + 1
            if not group.count:
                self._groups.remove(group)
            parts = [
                _ThreadGroup(mask, at, int(np.count_nonzero(mask)), group.rounds, team=group.team)
                for _, _, mask in barriers
            ]
            self._groups += parts
        goes_on = False
        for part, (number, count, _) in zip(parts, barriers, strict=True):
            part.waits, part.barrier, part.counted = True, (number, count), self.program.counted
            goes_on |= self._let_go(number, count)
        if not goes_on:
            return False
        self._merge()
        self._perhaps_part()
        return alone and self._groups == [group]

    def _one_by_one(self, number: int, count: int, mask: Numbers) -> list[tuple[int, int, Any]]:
        """Where more come to a barrier than it is for, warps do so by themselves, in any order."""
        there = sum(each.count for each in self._groups if each.barrier == (number, count))
        there += self._arrived.get(number, 0)
        if not count or there + np.count_nonzero(mask) <= count:
            return [(number, count, mask)]
        warps = self.threads.numbers // WARP
        found = [(number, count, mask & (warps == warp)) for warp in np.unique(warps[mask])]
        self._random.shuffle(found)
        return found

    def _arrive(self, number: int, count: int, mask: Numbers) -> None:
        """At a barrier that these threads do not wait for."""
        self._arrived[number] = self._arrived.get(number, 0) + int(np.count_nonzero(mask))
        self.program.hooks.arrival(-1 - number, self.threads.numbers[mask])
        self._let_go(number, count)

    def _let_go(self, number: int, count: int) -> bool:
        """Whether all are at a barrier that is for ``count``, 0: for all that have not ended."""
        there = [each for each in self._groups if each.barrier and each.barrier[0] == number]
        here = sum(each.count for each in there)
        arrived = self._arrived.get(number, 0)
        if here + arrived < (count or sum(each.count for each in self._groups)):
            return False
        if not there:  # all have only arrived
            del self._arrived[number]
            return True
        self.threads.mask = np.logical_or.reduce([each.mask for each in there])
        hooks, numbers = self.program.hooks, self.threads.numbers[self.threads.mask]
        if self._arrived.pop(number, 0) or number == CLUSTER:
            if number != CLUSTER:  # where who waits has told before what it tells
                hooks.arrival(-1 - number, numbers)
            hooks.tell("on_phase", -1 - number)
            hooks.tell("on_awaited", -1 - number, numbers)
        else:
            self.step = self.kernel.steps[there[0].at]
            hooks.barrier(None if here == self.threads.block else numbers)
        if (counted := there[0].counted) is not None:
            counted(self.threads)
        for each in there:
            each.waits, each.barrier, each.counted = False, None, None
            each.rounds = each.team = 0
            each.at += 1
        return True
