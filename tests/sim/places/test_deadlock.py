"""Ranks that wait for each other are found in every order of steps, and no others are.

The real waits on control segments that let another rank go on before every access to them.
"""

import random
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import greenlet
import pytest

from interlace.runtime.core.errors import DeadlockError
from interlace.runtime.processes import waiting
from stand_ins.replaced import replaced

GROUPS = ((0, 1), (1, 2), (0, 2), (0, 1, 2))
RANKS = range(3)
SEEDS, STEPS = 100, 400

FAULTS = {
    "seen without a poll since": ("if now and now == before:", "if now:"),
    "what others have seen is not asked": ("all(control.seen", "any(control.seen"),
    "claims are not told apart": ("next(_numbers)", "1"),
}


class Group(types.SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Segments:
    """The control segments of one group, in the view of one rank."""

    def __init__(self, memory: dict[Any, int], group: tuple[int, ...], rank: int) -> None:
        self.memory, self.group, self.rank = memory, group, rank

    def _at(self, word: str, rank: int, value: int | None = None) -> int:
        greenlet.getcurrent().parent.switch()
        key = self.group, self.group[rank], word
        if value is not None:
            self.memory[key] = value
        return self.memory.get(key, 0)

    def make_claim(self, claim: int, text: str) -> None:
        self._at("claim", self.rank, claim)

    def claim(self, rank: int) -> int:
        return self._at("claim", rank)

    def see(self, circle: int) -> None:
        self._at("seen", self.rank, circle)

    def seen(self, rank: int) -> int:
        return self._at("seen", rank)

    def claim_text(self, rank: int) -> str:
        return ""

    def waits(self, rank: int, now: float) -> None:
        pass

    def say_elsewhere(self, text: str, now: float) -> None:
        pass


class Ranks:
    """Ranks that call the ops of ``programs``; each op waits for the members of its group."""

    def __init__(self, programs: Sequence[Sequence[tuple[int, ...]]], module: Any) -> None:
        self.memory: dict[Any, int] = {}
        self.waiting: dict[int, tuple[tuple[int, ...], int, int]] = {}
        self.ended: set[int] = set()
        self.found: list[tuple[int, bool]] = []
        self.module = module
        self.tasks = {r: greenlet.greenlet(lambda r=r: self._run(r, programs[r])) for r in RANKS}

    def _run(self, rank: int, program: Sequence[tuple[int, ...]]) -> None:
        groups = {
            ranks: Group(
                prefix=str(ranks),
                names=ranks,
                rank=ranks.index(rank),
                pids={index: 1 << 30 | other for index, other in enumerate(ranks)},
                control=Segments(self.memory, ranks, ranks.index(rank)),
                interruption=lambda *_: None,
            )
            for ranks in GROUPS
            if rank in ranks
        }

        def blame(group: Any) -> Any:
            everywhere = list(groups.values())
            return types.SimpleNamespace(
                group=group, everywhere=lambda: everywhere, whereabouts=lambda _: ""
            )

        for ranks in program:
            number = self.memory.get((ranks, rank, "sent"), 0) + 1
            groups[ranks].control._at("sent", ranks.index(rank), number)
            for index, peer in enumerate(ranks):
                self.waiting[rank] = ranks, peer, number
                wait = self.module.LastingWait(blame(groups[ranks]), self.module.Kind.OF_OP)
                while groups[ranks].control._at("sent", index) < number:
                    error = wait.look("op", (index,))
                    if error is not None:
                        assert type(error) is DeadlockError
                        self.found.append((rank, rank in self.stuck(rank)))
                        return
                del self.waiting[rank]
        self.ended.add(rank)

    def stuck(self, rank: int) -> set[int]:
        """Return the circle of waiting ranks that contains ``rank``."""
        chain = [rank]
        while chain[-1] in self.waiting:
            ranks, peer, number = self.waiting[chain[-1]]
            if self.memory.get((ranks, peer, "sent"), 0) >= number:
                return set()
            if peer in chain:
                return set(chain) if peer == rank else set()
            chain.append(peer)
        return set()

    def go_on(self, seed: int) -> None:
        order = random.Random(seed)
        for _ in range(STEPS):
            if not (living := [task for task in self.tasks.values() if not task.dead]):
                return
            task = order.choice(living)
            for _ in range(order.choice([1, 1, 2, 30])):
                if not task.dead:
                    task.switch()


def ranks_of(seed: int, module: Any) -> Ranks:
    order = random.Random(seed)
    calls = [order.choice(GROUPS) for _ in range(6)]
    programs = [[ranks for ranks in calls if rank in ranks] for rank in RANKS]
    for _ in range(order.choice([0, 1, 2])):
        program = order.choice(programs)
        if len(program) > 1:
            at = order.randrange(len(program) - 1)
            program[at], program[at + 1] = program[at + 1], program[at]
    ranks = Ranks(programs, module)
    ranks.go_on(seed)
    return ranks


def right(seed: int, module: Any) -> bool:
    """Return whether every finding is a deadlock, and all of its ranks find every deadlock."""
    ranks = ranks_of(seed, module)
    found = {rank for rank, _ in ranks.found}
    missed = {rank for rank in RANKS if ranks.stuck(rank) and rank not in found}
    return not missed and all(true for _, true in ranks.found)


def loaded(old: str = "", new: str = "") -> Any:
    """Return the module with one change; time runs fast for its waits."""
    source = Path(waiting.__file__).read_text()
    assert not old or source.count(old) == 1
    module = types.ModuleType("deadlock_of_test")
    code = compile(source.replace(old, new) if old else source, "deadlock", "exec")
    with replaced((sys.modules, module.__name__, module)):
        exec(code, vars(module))
    clock = iter(range(1 << 40))
    vars(module).update(
        alone=lambda: True,
        helpers_at_work=lambda: False,
        time=types.SimpleNamespace(monotonic=lambda: float(next(clock))),
    )
    return module


def test_deadlocks_are_found_and_nothing_else() -> None:
    module = loaded()
    assert [seed for seed in range(SEEDS) if not right(seed, module)] == []
    assert any(ranks_of(seed, module).found for seed in range(SEEDS))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_protocol_is_found(fault: str) -> None:
    module = loaded(*FAULTS[fault])
    assert not all(right(seed, module) for seed in range(SEEDS))
