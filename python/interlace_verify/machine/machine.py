"""The machine that runs a PTX kernel: all threads of a program, in groups at the same instruction.

A program starts as one group. If its threads branch apart, it becomes several groups; groups that meet at
an instruction merge. The group that is furthest behind runs next (``module.py`` has the order), so that
threads wait where their paths meet. A group in a loop that polls memory which others write lets the others
run first. In some intervals between barriers, which the seed draws for each block, warps run apart. Only a
barrier merges them. So code that works only while warps happen to run together fails in some schedules.

Other programs run only between accesses that the hooks see.

A loop that changes nothing is a wait or never ends. A *round* ends when every group of threads that can run
has gone back in a loop. Rounds in which the program changes no memory are watched. Loops that poll memory
which others write (``module.py`` finds them) are watched from their first round, and may change the
program's own, shared memory; other loops are watched later. As soon as the rounds read nothing new, the
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

PATIENCE = 32  # rounds of loops that do not look like waits
IDLE_STEPS = 5_000_000  # instructions in loops without global memory that count as an endless loop
MORE_ROUNDS = 100  # by all programs woken in vain, before their loops count as waits again
LONGEST_CIRCLE = 66  # rounds: a poll of one slot per rank, and what goes with it


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
        """Wait for the last ``polls`` words, if the round will repeat unchanged."""
        seen = self._task.seen
        if len(seen) < polls:
            return False
        self._program.hooks.spin(list(dict.fromkeys(seen[-polls:])))
        seen.clear()
        return True

    def over(self, kernel: str, step: Instruction, *, looks: bool) -> None:
        """End a round at ``step``. ``looks``: its loops poll memory that others write."""
        if self._threads.idle_steps > IDLE_STEPS:
            raise _endless(
                kernel, step, f"{IDLE_STEPS} instructions without an access of global memory"
            )
        if self._are_idle(looks=looks):
            raise _endless(kernel, step, "neither memory nor registers change")

    def _are_idle(self, *, looks: bool) -> bool:
        """Return whether rounds read and change nothing. If they read but change nothing, wait."""
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
        if self._moved:  # these rounds did change the program's own memory
            self._begin()
            return False
        return same


def _endless(kernel: str, step: Instruction, why: str) -> InterlaceError:
    return InterlaceError(
        f"PTX: a loop of {kernel} never ends: {why}; line {step.line}, where it goes back: {step.text}"
    )


APART = 1 / 8  # the share of intervals between barriers in which warps run apart
_ENDS = ("ret", "exit")


@dataclass(eq=False)
class _ThreadGroup:
    """Threads at the same instruction. ``waits``: they wait for the others of their barrier or warp.

    ``rounds``: the number of rounds in polling loops, plus one for each :data:`PATIENCE` rounds in other
    loops, which ``back`` counts. ``looks``: whether the loop in which it went back in the program's present
    round polls; None if it has not gone back. ``team``: groups of different teams do not merge.
    ``barrier``: the number and the thread count of the barrier that it waits at. ``counted``: the action on
    its result. ``until``: whether its wait has ended.
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
    """One program of ``kernel``. ``variables`` are addresses; ``origins`` are by slot."""

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
        count, thread_count = kernel.threads, math.prod(kernel.block)
        nbytes = -(-(kernel.static_bytes + dynamic_bytes) // 16) * 16
        whole = np.full(nbytes + 128, POISON, np.uint8)  # aligned as on the hardware
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
        self.threads = Threads(self.program, registers, numbers, thread_count, told_apart=True)
        self.threads.heard = hooks.observed or hooks.buffers is not None
        self.step = kernel.steps[0]
        self._groups = [_ThreadGroup(numbers < thread_count, 0, thread_count)]
        self._arrived: dict[int, int] = {}  # arrivals by number of a barrier
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
        """Return the present instruction and its source lines, innermost first."""
        places = self.kernel.places.get(self.step.line, ())
        if places:
            return self.step.opcode, places
        return f"line {self.step.line} of the PTX of {self.kernel.name}: {self.step.text}", ()

    # -- groups ------------------------------------------------------------------------------------

    def _next(self) -> _ThreadGroup:
        """Return the next group to run. Groups that have met are merged first."""
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
        team_groups = [group for group in ready if group.team == team]
        return min(team_groups, key=lambda group: (group.rounds, order[group.at]))

    def _perhaps_part(self) -> None:
        """At random, split a program that is one group into one group for each warp."""
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
                    met.waits, met.until = False, None  # perhaps all have arrived now
        self._groups = list(by_place.values())

    def _go_on(self, group: _ThreadGroup) -> None:
        """Run ``group`` until it waits, splits or ends, or comes to where others may run or join it."""
        threads, kernel = self.threads, self.kernel
        steps, registers = kernel.steps, threads.registers
        other_groups = [each for each in self._groups if each is not group]
        alone = all(other.waits and other.until is None for other in other_groups)
        stops = {other.at for other in other_groups} if alone else kernel.joins
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
                    self._let_go(number, for_count)  # a barrier does not wait for ended threads
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
        """Let ``group`` start another round of a loop. It may have to wait, or the loop may be endless."""
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
            self.step = next((read for read in reads if looks(read)), (reads or [step])[-1])
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
        """Send each thread to the target of its index. Threads that do not branch go on."""
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
        """Return whether ``group`` goes on after an instruction that orders or waits."""
        if event in (BLOCK_BARRIER, ARRIVAL):
            barriers = [each for come in self.program.barriers for each in self._one_by_one(*come)]
        if event == BLOCK_BARRIER:
            return self._meet(group, barriers)
        if event == ARRIVAL:
            for number, count, mask in barriers:  # threads do not wait for it
                arrived = self._arrived.get(number, 0) + int(np.count_nonzero(mask))
                self._arrived[number] = arrived
                self.program.hooks.arrival(-1 - number, self.threads.numbers[mask])
                self._let_go(number, count)
        elif event == WARP_BARRIER:
            for numbers in tiles(self.step, self.threads, taken):
                self.program.hooks.barrier(numbers)
        elif event == MBARRIER_WAIT:
            group.waits, group.until = True, self.program.until
            return False
        return True

    def _meet(self, group: _ThreadGroup, barriers: Sequence[tuple[int, int, Any]]) -> bool:
        """Let ``group`` arrive at barriers, and split if they differ. Return whether it goes on."""
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
        """If more threads arrive than a barrier takes, return one arrival per warp, in random order."""
        arrived_count = sum(
            group.count for group in self._groups if group.barrier == (number, count)
        )
        arrived_count += self._arrived.get(number, 0)
        if not count or arrived_count + np.count_nonzero(mask) <= count:
            return [(number, count, mask)]
        warps = self.threads.numbers // WARP
        found = [(number, count, mask & (warps == warp)) for warp in np.unique(warps[mask])]
        self._random.shuffle(found)
        return found

    def _let_go(self, number: int, count: int) -> bool:
        """Release a barrier if it is complete; return whether it was. ``count`` 0: all live threads."""
        waiting_groups = [
            group for group in self._groups if group.barrier and group.barrier[0] == number
        ]
        here = sum(each.count for each in waiting_groups)
        arrived = self._arrived.get(number, 0)
        if here + arrived < (count or sum(group.count for group in self._groups)):
            return False
        if not waiting_groups:  # all threads have arrived without waiting
            del self._arrived[number]
            return True
        self.threads.mask = np.logical_or.reduce([each.mask for each in waiting_groups])
        hooks, numbers = self.program.hooks, self.threads.numbers[self.threads.mask]
        if self._arrived.pop(number, 0) or number == CLUSTER:
            if number != CLUSTER:  # there the arrival was reported before the wait
                hooks.arrival(-1 - number, numbers)
            hooks.tell("on_phase", -1 - number)
            hooks.tell("on_awaited", -1 - number, numbers)
        else:
            self.step = self.kernel.steps[waiting_groups[0].at]
            hooks.barrier(None if here == self.threads.block else numbers)
        if (counted := waiting_groups[0].counted) is not None:
            counted(self.threads)
        for each in waiting_groups:
            each.waits, each.barrier, each.counted = False, None, None
            each.rounds = each.team = 0
            each.at += 1
        return True
