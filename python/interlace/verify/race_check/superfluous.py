"""Barriers without which a run would be in order as well: asked by leaving them out, line by line.

Only of programs whose threads are told apart. Of one that is interpreted it is not known which of its
threads a barrier is for.
"""

import linecache
import re
from collections.abc import Callable, Iterable

from interlace.runtime.core.errors import SourceText
from interlace.runtime.scheduler.source_lines import program_lines
from interlace.runtime.scheduler.task import Task
from interlace.verify.race_check.happens_before import Detector

_WRITTEN = re.compile(r"barrier|syncthreads|bar\.sync")
_OURS = re.compile(r"/interlace/(kernels|verify)/")
SEEDS = 2  # that are asked again


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
