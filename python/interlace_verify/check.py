"""``interlace.verify.check``: races and schedules of a function, for tests that need no report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from interlace_verify.race_check.check import SEEDS, races
from interlace_verify.race_check.findings import RaceReport
from interlace_verify.schedule_check.check import RUN_SECONDS, ScheduleReport, schedules

SCHEDULES = 50


class VerificationError(AssertionError):
    """Raised by :func:`check` if ``report`` is not clean. Its message is the report's text."""

    def __init__(self, report: RaceReport | ScheduleReport) -> None:
        super().__init__(str(report))
        self.report = report


def check(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    seeds: int | Iterable[int] = SEEDS,
    n: int = SCHEDULES,
    check: Callable[[list[Any]], Any] | None = None,
    deterministic: bool = True,
    workers: int | None = 1,
    timeout: float = RUN_SECONDS,
    **kwargs: Any,
) -> None:
    """Raise an error if :func:`races` or :func:`schedules`, also with late stores, finds anything.

    For tests, which do not print a report. See there for ``fn``, ``world_size``, ``args`` and ``kwargs``.

    Parameters
    ----------
    seeds : schedules of the race check.
    n, check, deterministic, workers : as for schedules; ``n`` with immediate stores, ``n`` with late ones.
    timeout : seconds per schedule.

    Raises
    ------
    VerificationError : an AssertionError whose message is the first report that is not clean.
    TypeError, ValueError : an argument is wrong.

    >>> interlace.verify.check(interlace.get_rank, 2, seeds=1, n=2)
    """
    __tracebackhide__ = True  # for pytest

    def clean(report: RaceReport | ScheduleReport) -> None:
        __tracebackhide__ = True
        if not report.clean:
            raise VerificationError(report)

    clean(races(fn, world_size, *args, seeds=seeds, timeout=timeout, **kwargs))
    options: dict[str, Any] = {"check": check, "deterministic": deterministic, "workers": workers}
    for late in (False, True):
        found = schedules(
            fn, world_size, *args, n=n, store_buffers=late, timeout=timeout, **options, **kwargs
        )
        clean(found)
