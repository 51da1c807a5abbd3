"""Runs as they would be with one line of a kernel changed: their schedules are run again.

Barriers without which it would be in order as well, left out line by line; only of programs whose threads
are told apart, as of one that is interpreted it is not known which of its threads a barrier is for. And
atomics that would order two accesses if they acquired and released, as of a counter that is relaxed, whose
last program signals by another word: no signal between the two accesses is to blame.
"""

import linecache
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from interlace.runtime.core.accesses import Atomic
from interlace.runtime.core.errors import SourceText
from interlace.runtime.places.sim.scheduler.source_lines import program_lines
from interlace.runtime.places.sim.scheduler.task import Task
from interlace.verify.race_check.collector import At
from interlace.verify.race_check.findings import Access
from interlace.verify.race_check.happens_before import Detector

_WRITTEN = re.compile(r"barrier|syncthreads|bar\.sync")
_OURS = re.compile(r"/interlace/(kernels|verify)/")
SEEDS = 2  # that are asked for barriers
MOST = 16  # lines of atomics that are asked

Asked = Mapping[tuple[Any, ...], At]


class DetectorWithout(Detector):
    """One that does not hear of the barriers of a ``line``, and is done with the first race."""

    def __init__(self, seed: int, line: SourceText) -> None:
        super().__init__(seed)
        self._line = line

    @property
    def done(self) -> bool:
        return bool(self.found)

    def on_barrier(self, task: Task | None, threads: object = None) -> None:
        if program_lines()[:1] != (self._line,):
            super().on_barrier(task, threads)


def superfluous(
    lines: Iterable[SourceText],
    seeds: Iterable[int],
    observed: Callable[[int, list[DetectorWithout]], object],
) -> tuple[SourceText, ...]:
    """Of ``lines``, which have barriers, those whose author may leave them out, each by itself.

    ``observed`` runs the schedule of a seed for some detectors.
    """
    left = sorted(filter(_is_written, lines), key=lambda line: line.frames)
    for seed in list(seeds)[:SEEDS]:
        if left:
            asked = [DetectorWithout(seed, line) for line in left]
            observed(seed, asked)
            left = [line for line, each in zip(left, asked, strict=True) if not each.done]
    return tuple(left)


def _is_written(line: SourceText) -> bool:
    """Whether it stands in the user's source, and is not the compiler's."""
    return any(
        _WRITTEN.search(linecache.getline(path, number)) and not _OURS.search(path)
        for path, number in line.frames
    )


class DetectorWith(Detector):
    """One for which atomics at the line of ``access`` acquire and release."""

    def __init__(self, seed: int, asked: Asked, access: Access) -> None:
        super().__init__(seed, asked=asked)
        self.access = access

    def on_atomic(self, task: Task | None, atomic: Atomic, result: Any) -> None:
        if program_lines()[:1] == self.access.lines[:1]:
            atomic = replace(atomic, sem="acq_rel")
        super().on_atomic(task, atomic, result)


def counters(
    detector: Detector, asked: Asked, observed: Callable[[list[DetectorWith]], object]
) -> dict[tuple[Any, ...], Access]:
    """By the key of a finding among those ``asked``: the atomic of such a line, if there is one.

    ``observed`` runs the schedule of the ``detector`` for others.
    """
    lines = {each.lines[0]: each for each in detector.weak_atomics if each.lines} if asked else {}
    others = [DetectorWith(detector.seed, asked, each) for each in [*lines.values()][:MOST]]
    if others:
        observed(others)
    ordering = (
        (key, each.access) for each in others[::-1] for key in asked if key not in each.found
    )
    return dict(ordering)
