"""A check that only says if a run is faulty: a mutant's schedule ends where the first race is found.

``interlace.verify.races`` goes on to the end and then runs the schedule again to say the cause.
"""

from collections.abc import Callable, Iterable
from typing import Any

from interlace import launcher
from interlace_verify.race_check.check import observed_run
from interlace_verify.race_check.happens_before import Detector
from interlace_verify.schedule_check.check import SimulatedRun


class FoundError(Exception):
    """An exception that ends the run at the first finding."""


class Stopping(Detector):
    """A detector that stops at its first finding."""

    def _report(self, *what: Any) -> None:
        super()._report(*what)
        for finding in self.found.values():
            raise FoundError(finding)


def first_fault(fn: Callable[[], Any], world_size: int, seeds: Iterable[int]) -> str:
    """Return the first race of ``fn`` in these schedules, or the error of one; "" if there is none."""
    run = SimulatedRun(launcher.rank_function(fn, (), {}), world_size, timeout=300.0)
    for seed in seeds:
        detector = Stopping(seed)
        error = observed_run(run, seed, detector)
        for finding in detector.found.values():
            return str(finding)
        if error is not None:
            return str(error)
    return ""
