"""The vocabulary of protocols: steps, the processes that take them, and what they share.

Steps work on *words* (signal slots, credits, flags, status words; 0 at first) and on *cells* (regions
of data in symmetric memory; they hold :data:`EMPTY` at first). Both are named by text, and these texts
are what reports print. An access to cells has a begin and an end, so that two can overlap. Everything
else is atomic, as it is on the device. What a process does with its own memory is no step.

A process takes its steps in order. Jumps go forward only and rounds are written out one after another,
so every run of a protocol ends.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

EMPTY = "nothing"


@dataclass(frozen=True)
class Publish:
    """Set ``word`` to ``value``, whatever it was.

    >>> str(Publish("slot", 1))
    'publishes slot = 1'
    """

    word: str
    value: int

    def __str__(self) -> str:
        return f"publishes {self.word} = {self.value}"


@dataclass(frozen=True)
class Wait:
    """Hold until ``word >= value``, or, if ``exact``, ``word == value``.

    With ``giving_up`` the wait may end without that, at any time or, with ``only_after``, once that
    word is not 0. The next ``giving_up`` steps are for this case; otherwise they are left out.

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
    """Set ``word`` to ``new`` where it is ``old``. Where it is not, hold.

    With ``otherwise`` it does not hold: the next ``otherwise`` steps are left out instead.

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
class BeginRead:
    """Start to read ``cells``, all of which should hold ``content``."""

    cells: tuple[str, ...]
    content: str

    def __str__(self) -> str:
        return f"begins to read {', '.join(self.cells)}"


@dataclass(frozen=True)
class EndRead:
    """The read of ``cells`` is over."""

    cells: tuple[str, ...]

    def __str__(self) -> str:
        return f"ends reading {', '.join(self.cells)}"


@dataclass(frozen=True)
class BeginWrite:
    """Start to write ``content`` into ``cells``."""

    cells: tuple[str, ...]
    content: str

    def __str__(self) -> str:
        return f"begins to write {self.content} into {', '.join(self.cells)}"


@dataclass(frozen=True)
class EndWrite:
    """The write into ``cells`` is over."""

    cells: tuple[str, ...]

    def __str__(self) -> str:
        return f"ends writing {', '.join(self.cells)}"


ProtocolStep = Publish | Wait | CompareAndSwap | BeginRead | EndRead | BeginWrite | EndWrite


def read(cells: Iterable[str], content: str) -> list[ProtocolStep]:
    """A read of ``cells``: its begin and its end.

    >>> [str(step) for step in read(["a", "b"], "data")]
    ['begins to read a, b', 'ends reading a, b']
    """
    names = tuple(cells)
    return [BeginRead(names, content), EndRead(names)]


def write(cells: Iterable[str], content: str) -> list[ProtocolStep]:
    """A write of ``content`` into ``cells``: its begin and its end.

    >>> [str(step) for step in write(["a"], "data")]
    ['begins to write data into a', 'ends writing a']
    """
    names = tuple(cells)
    return [BeginWrite(names, content), EndWrite(names)]


def words_of(step: ProtocolStep) -> list[str]:
    """The words that a step looks at or sets, the one that it waits for first."""
    if isinstance(step, Publish | CompareAndSwap):
        return [step.word]
    if isinstance(step, Wait):
        return [step.word] if step.only_after is None else [step.word, step.only_after]
    return []


def cells_of(step: ProtocolStep) -> tuple[str, ...]:
    """The cells whose access a step begins or ends."""
    return () if isinstance(step, Publish | Wait | CompareAndSwap) else step.cells


def left_out_by(step: ProtocolStep) -> int | None:
    """The number of following steps that a step may leave out."""
    if isinstance(step, Wait):
        return step.giving_up
    return step.otherwise if isinstance(step, CompareAndSwap) else None


@dataclass(frozen=True)
class Process:
    """One sequence of steps: a rank, or a program or stream of it. Reports call it ``name``.

    >>> Process("rank 0", (*write(["buffer"], "data"), Publish("slot", 1))).name
    'rank 0'
    """

    name: str
    steps: tuple[ProtocolStep, ...]


@dataclass(frozen=True)
class Protocol:
    """Processes that share words and cells.

    ``at_end`` gets every word's value and every cell's content, by name, once all processes have
    finished, and returns what is wrong with them, or an empty text.

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
        """A variant for a negative control: every process takes the steps ``rule(process)``.

        Raises ``ValueError`` if nothing changes: a control that is none would go unnoticed.
        """
        processes = tuple(
            replace(process, steps=tuple(rule(process))) for process in self.processes
        )
        if processes == self.processes:
            raise ValueError(f"rule: {fault!r} changes no step of the protocol {self.name!r}")
        return replace(self, name=f"{self.name}, {fault}", processes=processes)
