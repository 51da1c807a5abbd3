"""The vocabulary of protocols: steps, the processes that take them, and what they share.

Steps work on *words* (signal slots, credits, flags, status words; 0 at first) and on *cells* (regions of
data in symmetric memory, with :data:`EMPTY` at first). Reports print the names of both. An access to cells
has a begin and an end, so that two accesses can overlap. All other steps are atomic, as on the device. An
access of a process's private memory is not a step.

A process takes its steps in order. Jumps only go forward, and rounds are written out one after another,
so every run of a protocol ends.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

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
class BeginRead:
    """Begin to read ``cells``, which should all hold ``content``."""

    cells: tuple[str, ...]
    content: str

    def __str__(self) -> str:
        return f"begins to read {', '.join(self.cells)}"


@dataclass(frozen=True)
class EndRead:
    """End the read of ``cells``."""

    cells: tuple[str, ...]

    def __str__(self) -> str:
        return f"ends reading {', '.join(self.cells)}"


@dataclass(frozen=True)
class BeginWrite:
    """Begin to write ``content`` into ``cells``."""

    cells: tuple[str, ...]
    content: str

    def __str__(self) -> str:
        return f"begins to write {self.content} into {', '.join(self.cells)}"


@dataclass(frozen=True)
class EndWrite:
    """End the write into ``cells``."""

    cells: tuple[str, ...]

    def __str__(self) -> str:
        return f"ends writing {', '.join(self.cells)}"


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
    """Return the cells whose access a step begins or ends."""
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
