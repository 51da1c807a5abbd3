"""The protocol explorer: every interleaving of a few ranks and rounds, visited one state at a time.

:func:`explore` starts a protocol (:mod:`interlace.verify.protocols.steps`) in its first state and goes
on, breadth first, until no new state is left. It reports

deadlocks    states in which a process has not finished and none can go on
violations   two overlapping accesses to a cell of which one writes, a read that finds other contents
             than it should, an end that ``at_end`` objects to

each with the shortest interleaving that leads there. No search is cut off silently: more states than
allowed are an error.

Reduction
---------
With ``reduced=True`` three kinds of steps are taken as soon as they can be, instead of in every order
with all others. Whatever is wrong ahead of a state that this leaves out is wrong ahead of one that is
kept (in the field's terms they are persistent sets of one step; as every run ends, nothing is put off
for ever):

*Publish and wait on a growing word*: one process publishes it, never a smaller value, and others do no
more than wait for ``>=``. A wait that may go on may do so ever after; a publish lets others go on and
holds nobody back. So both commute with whatever other processes can do meanwhile.

*The begin of an access*: nothing holds it back, so "now" is one of its real times. What others do up to
a later begin either leaves its cells alone, and commutes, or touches them, and so overlaps with the
access that has begun now: if one of them writes, that is a violation, and a real one.

*The end of a read* of cells that no other process is writing or has still to write: nobody can tell.

Interleaved are all other ends of accesses, and steps on other words: flags that are swapped, words
with several writers, waits that may give up. The tests compare both ways on small sizes. Either way
memory is sequentially consistent: weak memory is the race detector's business.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from interlace.runtime.core.errors import InterlaceError
from interlace.verify.protocols.machine import ProtocolMachine
from interlace.verify.protocols.steps import Protocol

MAX_STATES = 5_000_000


class StateLimitError(InterlaceError):
    """A protocol has more states than were allowed, so nothing is known about it."""


@dataclass(frozen=True)
class Counterexample:
    """Something wrong, and the steps that lead there from the start, one text per step."""

    text: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.text, *(f"{n:5}  {step}" for n, step in enumerate(self.steps, 1))])


@dataclass(frozen=True)
class Exploration:
    """The findings of :func:`explore`.

    ``depth``: how many interleaved steps the state takes that is farthest from the start.
    ``deadlocks`` and ``violations`` have one entry per different text, the nearest first.
    """

    name: str
    ranks: int
    rounds: int
    reduced: bool
    states: int
    transitions: int
    depth: int
    seconds: float
    deadlocks: tuple[Counterexample, ...]
    violations: tuple[Counterexample, ...]

    @property
    def clean(self) -> bool:
        """Neither deadlocks nor violations."""
        return not self.deadlocks and not self.violations

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.ranks} ranks, {self.rounds} rounds: {self.states:,} states"
            f"{' (reduced)' if self.reduced else ''}, {self.transitions:,} transitions, depth "
            f"{self.depth}, {self.seconds:.2f} s: {len(self.deadlocks)} deadlocks, "
            f"{len(self.violations)} violations"
        ]
        lines += [f"first deadlock: {found}" for found in self.deadlocks[:1]]
        lines += [f"first violation: {found}" for found in self.violations[:1]]
        return "\n".join(lines)


def explore(
    protocol: Protocol, *, reduced: bool = False, max_states: int = MAX_STATES
) -> Exploration:
    """Visit every state of ``protocol``; with ``reduced``, leave out orders of steps that commute.

    Raises ``ValueError`` for a protocol that is not well formed (an end without its begin, a jump past
    the last step, values, steps of a process or contents beyond 255), and :class:`StateLimitError`
    beyond ``max_states``.

    Example::

        >>> from interlace.verify.protocols.patterns import push
        >>> from interlace.verify.protocols.explorer import explore
        >>> explore(push(2, 2)).clean
        True
    """
    if max_states < 1:
        raise ValueError(f"max_states: must be at least 1, got {max_states}")
    started = time.perf_counter()
    machine = ProtocolMachine(protocol, reduced=reduced)
    processes = range(len(protocol.processes))
    # What is wrong, and the way there: a state by its number, and who took the wrong step from it.
    deadlocks: dict[str, tuple[int, int | None]] = {}
    violations: dict[str, tuple[int, int | None]] = {}
    first = bytearray(machine.first)
    wrong = machine.settle(first, processes)
    states = [bytes(first)]
    numbers = {states[0]: 0}
    came_from = [(0, 0)]  # by number of state: the state before it, and who went on from there
    transitions = depth = number = 0
    next_level = 1
    if wrong:
        violations[wrong] = (0, None)
        number = 1
    while number < len(states):
        if number == next_level:
            depth += 1
            next_level = len(states)
        before = states[number]
        after = bytearray(before)
        held = True
        for process in machine.choices(before):
            outcome = machine.step(after, process)
            if outcome is None:
                continue
            held = False
            transitions += 1
            if outcome or (outcome := machine.settle(after, (process,))):
                violations.setdefault(outcome, (number, process))
            else:
                key = bytes(after)
                if key not in numbers:
                    numbers[key] = len(states)
                    states.append(key)
                    came_from.append((number, process))
            after = bytearray(before)
        if len(states) > max_states:
            raise StateLimitError(
                f"{protocol.name}: more than {max_states:,} states; take fewer ranks or rounds"
            )
        if held:
            if blocked := machine.blocked(before):
                deadlocks.setdefault(blocked, (number, None))
            elif objection := machine.wrong_end(before):
                violations.setdefault(objection, (number, None))
        number += 1

    def counterexample(text: str, state: int, process: int | None) -> Counterexample:
        way = [] if process is None else [process]
        while state:
            state, process = came_from[state]
            way.append(process)
        return Counterexample(text, tuple(_replayed(machine, reversed(way))))

    return Exploration(
        protocol.name,
        protocol.ranks,
        protocol.rounds,
        reduced,
        len(states),
        transitions,
        depth,
        time.perf_counter() - started,
        tuple(counterexample(text, *way) for text, way in deadlocks.items()),
        tuple(counterexample(text, *way) for text, way in violations.items()),
    )


def _replayed(machine: ProtocolMachine, way: Iterable[int]) -> list[str]:
    """All steps of a run in words, given who goes on wherever there is a choice."""
    state = bytearray(machine.first)
    told: list[str] = []
    wrong = machine.settle(state, range(len(machine.protocol.processes)), told)
    for process in way:
        assert not wrong
        told.append(machine.tell(state, process))
        wrong = machine.step(state, process) or machine.settle(state, (process,), told)
    return told
