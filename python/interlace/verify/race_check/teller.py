"""The story of a schedule with races: their accesses are told, in memory of one rank too."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from interlace.runtime.core.errors import SourceText
from interlace.runtime.places.sim.scheduler.memory_check import BadAccess
from interlace.runtime.places.sim.scheduler.source_lines import program_lines, task_lines
from interlace.runtime.places.sim.scheduler.task import Task
from interlace.verify.race_check.agents import Agent
from interlace.verify.race_check.collector import At
from interlace.verify.race_check.findings import Access, Finding
from interlace.verify.race_check.happens_before import Detector
from interlace.verify.schedule_check.interleaving import Storyteller


class RaceTeller(Storyteller):
    """Notes what torch operators do to symmetric memory, too, and every access that ``findings`` name.

    ``detector`` has to see what happens before the teller does: it knows what memory of one rank is
    called, and finds the same again, with the number of the step of each access.
    """

    def __init__(
        self, seed: int, findings: Iterable[Finding], asked: Mapping[tuple[Any, ...], At]
    ) -> None:
        """``asked``: where the findings were, as :class:`Collector` has it."""
        super().__init__()
        self.detector = StepDetector(seed, asked, lambda: self._count)
        every = [access for each in findings for access in (each.first, each.second)]
        self._named = {(each.rank, each.who, each.lines) for each in every if each is not None}

    def _is_named(self, task: Task, lines: tuple[SourceText, ...]) -> bool:
        return (task.rank, self._who(task), lines) in self._named

    def _place(self, task: Task, address: int) -> str | None:
        found = super()._place(task, address)
        if found is None and self._is_named(task, program_lines()):
            found = self.detector.place(address)
        return found

    def on_bad_access(self, task: Task, bad: BadAccess) -> None:
        place = f" at {bad.memory}, byte {bad.offset}" if bad.memory else ""
        text = f"{bad.does}{place}: {bad.kind}"
        self._note(task, text, program_lines())

    def on_signals_seen(self, task: Task, slots: Any) -> None:
        before, lines = self._count, task_lines(task)
        super().on_signals_seen(task, slots)
        if self._count == before and self._is_named(task, lines):
            self._note(task, "has waited for signals", lines)

    def know(self, tensor: torch.Tensor, rank: int) -> None: ...

    def new(self, task: Task, tensor: torch.Tensor, op: str, *, writes: bool = True) -> None:
        if writes and self._memory.find(tensor.data_ptr()) is None:
            self.touch(task, tensor, op, stores=True)

    def touch(self, task: Task, tensor: torch.Tensor, op: str, *, stores: bool) -> None:
        place, lines = self._memory.find(tensor.data_ptr()), task_lines(task)
        if place is None and self._is_named(task, lines):
            place = self.detector.place(tensor.data_ptr())
        if place is not None:
            verb = "writes" if stores else "reads"
            self._note(task, f"{verb} ({op}) at {place}", lines)


class StepDetector(Detector):
    """A detector to which accesses differ by their step; ``step()`` is the number of the next one."""

    done = False  # when it has found all it still has to name memory

    def __init__(
        self, seed: int, asked: Mapping[tuple[Any, ...], At], step: Callable[[], int]
    ) -> None:
        super().__init__(seed, asked=asked)
        self._step = step

    def place(self, address: int) -> str | None:
        """The name of an address in memory that this run has touched."""
        segment = self._memory.at(address)
        return None if segment is None else f"{segment.label}, byte {address - segment.base}"

    def _access_of(self, agent: Agent, what: str, lines: tuple[SourceText, ...]) -> Access:
        return Access(agent.rank, agent.who, what, lines, self._step())
