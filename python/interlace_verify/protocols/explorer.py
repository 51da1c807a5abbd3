"""The protocol explorer visits every interleaving of a few ranks and rounds, one state at a time.

Steps work on *words* (signal slots, credits, flags; 0 at first) and on *cells* (regions of data in
symmetric memory, with :data:`EMPTY` at first). An access to cells has a begin and an end, so that two
accesses can overlap. All other steps are atomic, as on the device. Jumps only go forward, and rounds are
written out one after another, so every run ends.

A violation is two overlapping accesses to a cell, one of them a write, a read that finds other contents
than it should, or an end that ``at_end`` rejects. The search is breadth first, so a report has the shortest
interleaving. It is never cut off silently: it is an error if there are more states than allowed.

With ``reduced=True`` three kinds of steps are taken as soon as possible. Other orders of these steps are
left out. An error that can follow a state that is left out can also follow a state that is kept. (In the
field's terms the steps are persistent sets of size one. As every run ends, no step is ignored for ever.)

*Publish and wait on a growing word*: one process publishes the word, never with a smaller value, and others
only wait for ``>=``. A wait that can finish can still finish later. A publish lets others go on and holds
no process back. So both commute with all steps that other processes can take in the meantime.

*The begin of an access*: a begin never waits, so "now" is one of its possible times. A step of another
process before a later begin either leaves its cells alone, and commutes, or accesses them. Then it overlaps
with the access that begins now. If one of the two writes, this is a violation, and a real one.

*The end of a read* of cells that no other process is writing or will still write: its time has no effect.

The tests compare both searches on small sizes. In both, memory is sequentially consistent: the race
detector checks weak memory.

A state is a string of bytes: the number of each process's next step, then the words, then the numbers of
the cells' contents. This is enough: the next steps show which accesses are in progress.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from interlace.runtime.core.errors import InterlaceError

EMPTY = "nothing"


@dataclass(frozen=True)
class Publish:
    """Set ``word`` to ``value``.

    >>> str(Publish("slot", 1))
    'publishes slot = 1'
    """

    word: str
    value: int

    def __str__(self) -> str:
        return f"publishes {self.word} = {self.value}"


@dataclass(frozen=True)
class Wait:
    """Wait until ``word >= value``, or, if ``exact``, ``word == value``.

    With ``giving_up`` the wait may time out: at any time or, with ``only_after``, once that word is not 0.
    A wait that times out takes the next ``giving_up`` steps. Otherwise these steps are left out.

    >>> str(Wait("slot", 1))
    'waits for slot >= 1'
    """

    word: str
    value: int
    exact: bool = False
    giving_up: int | None = None
    only_after: str | None = None

    def __str__(self) -> str:
        return f"waits for {self.word} {'==' if self.exact else '>='} {self.value}"


@dataclass(frozen=True)
class CompareAndSwap:
    """Set ``word`` to ``new`` if it is ``old``. Wait if it is not.

    With ``otherwise`` it does not wait: the next ``otherwise`` steps are left out instead.

    >>> str(CompareAndSwap("lock", 0, 1))
    'swaps lock from 0 to 1'
    """

    word: str
    old: int
    new: int
    otherwise: int | None = None

    def __str__(self) -> str:
        if self.old == self.new:
            return f"checks that {self.word} is {self.old}"
        return f"swaps {self.word} from {self.old} to {self.new}"


@dataclass(frozen=True)
class CellStep:
    """A step on ``cells``. A read begins if they should all hold ``content``."""

    cells: tuple[str, ...]
    content: str = ""
    text: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.text.format(self.content)} {', '.join(self.cells)}"


class BeginRead(CellStep):
    """Begin to read ``cells``, which should all hold ``content``."""

    text = "begins to read"


class EndRead(CellStep):
    text = "ends reading"


class BeginWrite(CellStep):
    """Begin to write ``content`` into ``cells``."""

    text = "begins to write {} into"


class EndWrite(CellStep):
    text = "ends writing"


ProtocolStep = Publish | Wait | CompareAndSwap | BeginRead | EndRead | BeginWrite | EndWrite


def read(cells: Iterable[str], content: str) -> list[ProtocolStep]:
    """Return the begin and the end of a read of ``cells``.

    >>> [str(step) for step in read(["a", "b"], "data")]
    ['begins to read a, b', 'ends reading a, b']
    """
    names = tuple(cells)
    return [BeginRead(names, content), EndRead(names)]


def write(cells: Iterable[str], content: str) -> list[ProtocolStep]:
    """Return the begin and the end of a write of ``content`` into ``cells``.

    >>> [str(step) for step in write(["a"], "data")]
    ['begins to write data into a', 'ends writing a']
    """
    names = tuple(cells)
    return [BeginWrite(names, content), EndWrite(names)]


def words_of(step: ProtocolStep) -> list[str]:
    """Return the words that a step reads or sets, the one that it waits for first."""
    if isinstance(step, Publish | CompareAndSwap):
        return [step.word]
    if isinstance(step, Wait):
        return [step.word] if step.only_after is None else [step.word, step.only_after]
    return []


def cells_of(step: ProtocolStep) -> tuple[str, ...]:
    return () if isinstance(step, Publish | Wait | CompareAndSwap) else step.cells


def left_out_by(step: ProtocolStep) -> int | None:
    """Return the number of following steps that a step may leave out."""
    if isinstance(step, Wait):
        return step.giving_up
    return step.otherwise if isinstance(step, CompareAndSwap) else None


@dataclass(frozen=True)
class Process:
    """A sequence of steps: a rank, or a program or stream of a rank. Reports call it ``name``.

    >>> Process("rank 0", (*write(["buffer"], "data"), Publish("slot", 1))).name
    'rank 0'
    """

    name: str
    steps: tuple[ProtocolStep, ...]


@dataclass(frozen=True)
class Protocol:
    """Processes that share words and cells.

    ``at_end`` is called after all processes have finished, with the value of every word and the content of
    every cell by name. It returns an error text, or an empty text.

    >>> from interlace_verify import explore
    >>> sender = Process("rank 0", (*write(["buffer"], "data"), Publish("slot", 1)))
    >>> receiver = Process("rank 1", (Wait("slot", 1), *read(["buffer"], "data")))
    >>> protocol = Protocol("hand-over", 2, 1, (sender, receiver))
    >>> explore(protocol).clean
    True
    >>> def hasty(process):
    ...     return [step for step in process.steps if not isinstance(step, Wait)]
    >>> explore(protocol.rewritten("no wait", hasty)).clean
    False
    """

    name: str
    ranks: int
    rounds: int
    processes: tuple[Process, ...]
    at_end: Callable[[Mapping[str, int | str]], str] | None = None

    def rewritten(
        self, fault: str, rule: Callable[[Process], Iterable[ProtocolStep]]
    ) -> "Protocol":
        """Return a variant for a negative control: every process takes the steps ``rule(process)``.

        Raises ``ValueError`` if no step changes, because such a control would test nothing.
        """
        processes = tuple(
            replace(process, steps=tuple(rule(process))) for process in self.processes
        )
        if processes == self.processes:
            raise ValueError(f"rule: {fault!r} changes no step of the protocol {self.name!r}")
        return replace(self, name=f"{self.name}, {fault}", processes=processes)


LARGEST = 255


class _Code(NamedTuple):
    """A step, compiled. ``word``, ``only_after`` and ``cells`` are positions in the state."""

    kind: type[ProtocolStep] | None = None  # None: the process has finished
    at_once: bool = False
    word: int = 0
    value: int = 0
    new: int = 0
    skip_to: int = -1
    only_after: int = -1
    cells: tuple[int, ...] = ()
    mask: int = 0  # the same cells as bits
    exact: bool = False


def growing_words(protocol: Protocol) -> set[str]:
    """Return the words that one process publishes, never with a smaller value, and others only wait for."""
    publishers: dict[str, Process] = {}
    last: dict[str, int] = {}
    other_words: set[str] = set()
    for process in protocol.processes:
        for step in process.steps:
            if isinstance(step, Publish):
                alone = publishers.setdefault(step.word, process) is process
                if not alone or step.value < last.get(step.word, 0):
                    other_words.add(step.word)
                last[step.word] = step.value
            # a publish can disable a wait that may time out or that compares exactly
            elif not isinstance(step, Wait) or step.exact or step.giving_up is not None:
                other_words.update(words_of(step))
    return set(publishers) - other_words


def open_accesses(process: Process) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Return the cells that the process is reading, and writing, before each step and at the end."""
    nothing: frozenset[str] = frozenset()
    at = {0: (nothing, nothing)}
    end = len(process.steps)
    for number, step in enumerate(process.steps):
        place = f"protocol: {process.name}, step {number + 1} ({step})"
        if number not in at:
            raise ValueError(f"{place}: the step before it always leaves it out")
        reading, writing = at[number]
        cells = frozenset(cells_of(step))
        if isinstance(step, BeginRead | BeginWrite) and cells & (reading | writing):
            raise ValueError(f"{place}: the process already accesses one of these cells")
        begun = reading if isinstance(step, EndRead) else writing
        if isinstance(step, EndRead | EndWrite) and not cells <= begun:
            raise ValueError(f"{place}: the process has not begun this access")
        if isinstance(step, BeginRead | EndRead):
            reading ^= cells
        else:
            writing ^= cells
        left_out = left_out_by(step) or 0
        for target in {number + 1, number + 1 + left_out}:
            if not number < target <= end:
                left = end - number - 1
                raise ValueError(f"{place}: cannot leave out {left_out} of {left} steps")
            if at.setdefault(target, (reading, writing)) != (reading, writing):
                raise ValueError(
                    f"{place}: leaves out the begin or the end of an access, but not both"
                )
    if any(at[end]):
        cells = at[end][0] | at[end][1]
        raise ValueError(f"protocol: {process.name} does not end the access to {set(cells)}")
    return [at[number] for number in range(end + 1)]


class ProtocolMachine:
    """A compiled ``protocol``. ``reduced``: take steps that commute with all others at once."""

    def __init__(self, protocol: Protocol, *, reduced: bool) -> None:
        self.protocol = protocol
        self._reduced = reduced
        steps = [step for process in protocol.processes for step in process.steps]
        self._words = sorted({word for step in steps for word in words_of(step)})
        self._cells = sorted({cell for step in steps for cell in cells_of(step)})
        contents = {s.content for s in steps if isinstance(s, BeginRead | BeginWrite)}
        self._contents = [EMPTY, *sorted(contents - {EMPTY})]
        self._check(steps)
        count = len(protocol.processes)
        self._at = {name: count + i for i, name in enumerate([*self._words, *self._cells])}
        self.first = bytes(count + len(self._at))
        growing = growing_words(protocol)
        self._codes = [
            [*(self._compiled(s, at, growing) for at, s in enumerate(process.steps)), _Code()]
            for process in protocol.processes
        ]
        accesses = [open_accesses(process) for process in protocol.processes]
        self._reading = [[self._mask(reading) for reading, _ in line] for line in accesses]
        self._writing = [[self._mask(writing) for _, writing in line] for line in accesses]
        self._still_written = list(map(self._ahead, self._codes, self._writing))
        # by word: the processes that may go on at once after a publish
        self._waiting: list[list[int]] = [[] for _ in self.first]
        for number, line in enumerate(self._codes):
            for word in {code.word for code in line if code.kind is Wait and code.at_once}:
                self._waiting[word].append(number)

    def _check(self, steps: Iterable[ProtocolStep]) -> None:
        longest = max((len(process.steps) for process in self.protocol.processes), default=0)
        if not longest:
            raise ValueError(f"protocol: {self.protocol.name!r} has no steps")
        values = [s.value for s in steps if isinstance(s, Publish | Wait)]
        values += [v for s in steps if isinstance(s, CompareAndSwap) for v in (s.old, s.new)]
        if min([0, *values]) < 0 or max(longest, len(self._contents) - 1, *values, 0) > LARGEST:
            raise ValueError(
                f"protocol: {self.protocol.name!r} is too large: values of words, steps per process and "
                f"contents must be at most {LARGEST}; it has values from {min(values, default=0)} to "
                f"{max(values, default=0)}, {longest} steps and {len(self._contents) - 1} contents"
            )

    def _mask(self, cells: Iterable[str]) -> int:
        return sum(1 << self._at[cell] for cell in cells)

    @staticmethod
    def _ahead(line: list[_Code], writing: list[int]) -> list[int]:
        """Return, for each step, the cells that the process is writing or will write later."""
        ahead, masks = 0, []
        for code, now in zip(reversed(line), reversed(writing), strict=True):
            ahead |= now | (code.mask if code.kind is BeginWrite else 0)
            masks.append(ahead)
        return masks[::-1]

    def _compiled(self, step: ProtocolStep, at: int, growing: set[str]) -> _Code:
        left_out = left_out_by(step)
        skip_to = -1 if left_out is None else at + 1 + left_out
        words = [self._at[word] for word in words_of(step)]
        if isinstance(step, CompareAndSwap):
            return _Code(CompareAndSwap, False, words[0], step.old, step.new, skip_to)
        if isinstance(step, Publish | Wait):
            at_once = self._reduced and step.word in growing
            if isinstance(step, Publish):
                return _Code(Publish, at_once, words[0], step.value)
            code = _Code(Wait, at_once, words[0], step.value, 0, skip_to, [*words, -1][1])
            return code._replace(exact=step.exact)
        cells, mask = tuple(self._at[cell] for cell in step.cells), self._mask(step.cells)
        code = _Code(type(step), cells=cells, mask=mask)
        if isinstance(step, EndRead | EndWrite):
            return code
        return code._replace(at_once=self._reduced, value=self._contents.index(step.content))

    def step(self, state: bytearray, process: int) -> str | None:
        """Take the next step of ``process`` in place. Return its violation or "", or None if it waits."""
        at = state[process]
        kind, _, word, value, new, skip_to, only_after, cells, mask, exact = self._codes[process][
            at
        ]
        next_at = at + 1
        if kind is Publish:
            state[word] = value
        elif kind is Wait:
            if state[word] == value or (state[word] > value and not exact):
                next_at = max(next_at, skip_to)
            elif skip_to < 0 or (only_after >= 0 and not state[only_after]):
                return None
        elif kind is CompareAndSwap:
            if state[word] == value:
                state[word] = new
            elif skip_to < 0:
                return None
            else:
                next_at = skip_to
        elif kind is BeginRead or kind is BeginWrite:
            for other, writing in enumerate(self._writing):
                if other != process and (
                    writing[state[other]] & mask
                    or (kind is BeginWrite and self._reading[other][state[other]] & mask)
                ):
                    doing = "writing" if writing[state[other]] & mask else "reading"
                    return f"{self.tell(state, process)}, which {self._name(other)} is {doing}"
            for cell in cells:
                if kind is BeginWrite:
                    state[cell] = value
                elif state[cell] != value:
                    return self._wrong_content(state, process, cell)
        elif kind is None:
            return None
        state[process] = next_at
        return ""

    def choices(self, state: bytes) -> list[int]:
        """Return the processes that may take a step in a settled state; the others finished or wait."""
        return [p for p, line in enumerate(self._codes) if not line[state[p]].at_once]

    def settle(
        self, state: bytearray, processes: Iterable[int], story: list[str] | None = None
    ) -> str:
        """Take the steps that come at once, of ``processes`` and those they wake; return a violation."""
        pending = list(processes)
        while pending:
            process = pending.pop()
            line = self._codes[process]
            while True:
                code = line[state[process]]
                if not code.at_once and not self._last_read(state, process, code):
                    break
                text = "" if story is None else self.tell(state, process)
                wrong = self.step(state, process)
                if wrong is None:
                    break
                if story is not None:
                    story.append(text)
                if wrong:
                    return wrong
                if code.kind is Publish:
                    pending += [
                        other
                        for other in self._waiting[code.word]
                        if self._codes[other][state[other]].word == code.word
                    ]
        return ""

    def _last_read(self, state: bytearray, process: int, code: _Code) -> bool:
        """Return whether this ends a read of cells that no other process will write any more."""
        if code.kind is not EndRead or not self._reduced:
            return False
        for other, ahead in enumerate(self._still_written):
            if other != process and ahead[state[other]] & code.mask:
                return False
        return True

    def tell(self, state: bytes | bytearray, process: int) -> str:
        step = self.protocol.processes[process].steps[state[process]]
        text = f"{self._name(process)} {step}"
        if left_out_by(step) is None:
            return text
        code, seen = self._codes[process][state[process]], state[self._at[words_of(step)[0]]]
        if seen == code.value or (seen > code.value and isinstance(step, Wait) and not step.exact):
            return text
        return f"{text}{', times out' if isinstance(step, Wait) else ''} (it is {seen})"

    def blocked(self, state: bytes) -> str:
        """Return the waits of processes that have not finished in a deadlock."""
        lines = []
        for number, process in enumerate(self.protocol.processes):
            if state[number] < len(process.steps):
                step = process.steps[state[number]]
                lines.append(f"{process.name} {step} (it is {state[self._at[words_of(step)[0]]]})")
        return "; ".join(lines)

    def wrong_end(self, state: bytes) -> str:
        """Return the error that ``at_end`` finds after all have finished, or ""."""
        if self.protocol.at_end is None:
            return ""
        values: dict[str, int | str] = {word: state[self._at[word]] for word in self._words}
        values |= {cell: self._contents[state[self._at[cell]]] for cell in self._cells}
        return self.protocol.at_end(values)

    def _name(self, process: int) -> str:
        return self.protocol.processes[process].name

    def _wrong_content(self, state: bytearray, process: int, cell: int) -> str:
        step = self.protocol.processes[process].steps[state[process]]
        assert isinstance(step, BeginRead)
        name = self._cells[cell - len(self.first) + len(self._cells)]
        found = self._contents[state[cell]]
        return f"{self._name(process)} reads {found} in {name} instead of {step.content}"


MAX_STATES = 5_000_000


class StateLimitError(InterlaceError):
    """Raised if a protocol has more states than allowed. The result is then unknown."""


@dataclass(frozen=True)
class Counterexample:
    """An error, and the steps that lead to it from the start, one text per step."""

    text: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.text, *(f"{n:5}  {step}" for n, step in enumerate(self.steps, 1))])


@dataclass(frozen=True)
class Exploration:
    """The findings of :func:`explore`.

    ``depth``: the number of interleaved steps to the state that is farthest from the start.
    ``deadlocks`` and ``violations`` have one entry for each different text, the nearest first.
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
        """Whether there are neither deadlocks nor violations."""
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

    Raises ``ValueError`` for a protocol that is not well formed: an end without its begin, or a jump past
    the last step. Values, steps per process and contents must be at most 255. Raises
    :class:`StateLimitError` if there are more than ``max_states`` states.

    Example::

        >>> from interlace_verify.protocols.patterns import push
        >>> from interlace_verify.protocols.explorer import explore
        >>> explore(push(2, 2)).clean
        True
    """
    if max_states < 1:
        raise ValueError(f"max_states: must be at least 1, got {max_states}")
    started = time.perf_counter()
    machine = ProtocolMachine(protocol, reduced=reduced)
    processes = range(len(protocol.processes))
    # Each error, and its way: the number of the state before, and the process that took the wrong step.
    deadlocks: dict[str, tuple[int, int | None]] = {}
    violations: dict[str, tuple[int, int | None]] = {}
    first = bytearray(machine.first)
    wrong = machine.settle(first, processes)
    states = [bytes(first)]
    numbers = {states[0]: 0}
    came_from = [(0, 0)]  # by state number: the state before, and the process that took the step
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
        return Counterexample(text, tuple(_replay(machine, reversed(way))))

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


def _replay(machine: ProtocolMachine, way: Iterable[int]) -> list[str]:
    """Return all steps of a run in words. ``way``: the process that goes on at each choice."""
    state = bytearray(machine.first)
    story: list[str] = []
    wrong = machine.settle(state, range(len(machine.protocol.processes)), story)
    for process in way:
        assert not wrong
        story.append(machine.tell(state, process))
        wrong = machine.step(state, process) or machine.settle(state, (process,), story)
    return story
