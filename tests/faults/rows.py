"""Rows of the table of faults: a fault that is provoked again and again, and what came of each trial."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

HEAD = "| fault | place | trials | as promised | p50 ms | p99 ms | max ms | holds | control |"


MOST_OF_CONTROL = 4
"""Trials: some faults come too early or too late for the protection to matter."""


@dataclass(frozen=True)
class Trial:
    """One provoked fault: whether all promises held, and their times in ms."""

    right: bool
    ms: Sequence[float] = ()
    said: str = ""
    """What was wrong, or why it could not be tried."""


class NotHere(Exception):
    """This machine, or this user, cannot provoke the fault."""


@dataclass(frozen=True)
class Plan:
    """How often a row provokes its fault.

    With ``broken`` the row runs without the protection, or expects another result: at least one trial has
    to fail.
    """

    trials: int
    seconds: float = 0.0
    broken: bool = False


@dataclass(frozen=True)
class Row:
    """A line of the table; ``trials`` in the long run, ``few`` in the short one and in the control.

    A soak has a ``share`` of the minutes instead, or ``few_seconds``. A row ``beside`` is another
    backend's, for comparison.
    """

    fault: str
    place: str
    measure: Callable[[Plan], Iterable[Trial]]
    trials: int = 1
    few: int = 1
    share: float = 0.0
    few_seconds: float = 0.0
    beside: bool = False


@dataclass
class Result:
    """The trials of a row, and of its control."""

    row: Row
    trials: list[Trial] = field(default_factory=list)
    missing: str = ""
    control: bool | None = None
    """Whether the control came out wrong, as it must."""

    @property
    def wrong(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.right]

    @property
    def holds(self) -> bool:
        """A row without trials is not a failure; a control that passes is a failure."""
        if self.missing or self.row.beside:
            return True
        return bool(self.trials) and not self.wrong and bool(self.control)

    def cells(self) -> list[str]:
        row, count = self.row, len(self.trials)
        if self.missing:
            return [row.fault, row.place, "-", "-", "-", "-", "-", f"not run: {self.missing}", "-"]
        ms = sorted(itertools.chain.from_iterable(trial.ms for trial in self.trials))
        times = [quantile(ms, share) for share in (0.5, 0.99, 1.0)]
        verdict = "beside" if row.beside else "no" if not count or self.wrong else "yes"
        control = {None: "-", True: "fails", False: "PASSES"}[self.control]
        right = str(count - len(self.wrong))
        return [row.fault, row.place, str(count), right, *times, verdict, control]


def quantile(ordered: Sequence[float], share: float) -> str:
    """Return the smallest number that at least ``share`` of them do not exceed."""
    if not ordered:
        return "-"
    found = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
    return f"{found:.0f}" if found >= 10 else f"{found:.2g}"


def ran(row: Row, *, short: bool, minutes: float) -> Result:
    """Provoke the fault as often as the row says, then the control."""
    result = Result(row)
    seconds = row.few_seconds if short else 60 * minutes * row.share
    try:
        result.trials = list(trials(row, Plan(row.few if short else row.trials, seconds)))
        if not row.beside:
            control = Plan(min(row.few, MOST_OF_CONTROL), row.few_seconds, broken=True)
            result.control = any(not trial.right for trial in trials(row, control))
    except NotHere as reason:
        result.missing = str(reason)
    return result


def trials(row: Row, plan: Plan) -> Iterator[Trial]:
    """Return the row's trials; an exception that ends the row early counts as a failed trial."""
    try:
        yield from row.measure(plan)
    except NotHere:
        raise
    except Exception as error:
        yield Trial(False, said=f"the measurement ended with {type(error).__name__}: {error}")


def table(results: Iterable[Result]) -> str:
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    lines += ["| " + " | ".join(result.cells()) + " |" for result in results]
    return "\n".join(lines) + "\n"
