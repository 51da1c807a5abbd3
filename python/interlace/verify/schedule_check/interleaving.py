"""A schedule as a story: who did what, in the order in which it happened, a line per step."""

import itertools
import sys
from typing import Any

from interlace.runtime.core.accesses import Atomic
from interlace.runtime.core.errors import DeadlockError
from interlace.runtime.interpreter.session import active_addresses, source_frames
from interlace.runtime.scheduler.observer import Observer
from interlace.runtime.scheduler.source_lines import MemoryNames, line_of
from interlace.runtime.scheduler.task import Task

LONGEST = 200


class Storyteller(Observer):
    """Notes signals, items of streams, and what programs do to symmetric memory; the rest is private."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, str]] = []
        self._memory = MemoryNames()
        self._stuck: int | None = None

    def lines(self, error: BaseException | None = None) -> tuple[str, ...]:
        """One line per step; repetitions of a line are counted. A long story keeps its end."""
        told: list[str] = []
        stuck = self._stuck if isinstance(error, DeadlockError) else None
        for task, steps in itertools.groupby(self._steps[:stuck], lambda step: step[0]):
            told.append(f"{task}:")
            for text, same in itertools.groupby(text for _, text in steps):
                times = len(list(same))
                told.append(f"    {text}" + (f"  ({times} times)" if times > 1 else ""))
        if len(told) > LONGEST:
            told = [f"... {len(told) - LONGEST} lines before this ...", *told[-LONGEST:]]
        if isinstance(error, DeadlockError):
            told += [str(wait) for wait in error.blocked]
        return tuple(told)

    def _note(self, task: Task | None, text: str) -> None:
        if task is not None:
            self._steps.append((task.name, text))

    def on_stuck(self) -> None:
        self._stuck = len(self._steps)

    def _access(self, task: Task | None, verb: str, pointers: Any, mask: Any) -> None:
        addresses = active_addresses(pointers, mask)
        place = self._memory.find(int(addresses[0])) if len(addresses) else None
        if task is None or place is None:
            return
        self._note(task, f"{verb} {_elements(len(addresses))} at {place}{_where()}")

    def on_allocate(self, rank: int, memory: Any, label: str) -> None:
        self._memory.put(memory.data_ptr(), memory.nbytes, label)

    def on_visible(self, task: Task, address: int, elements: int) -> None:
        place = self._memory.find(address)
        if place is not None:
            text = f"{_elements(elements)} at {place}, stored by {task.name}: visible now"
            self._steps.append(("memory", text))

    def on_load(self, task: Task | None, pointers: Any, mask: Any) -> None:
        self._access(task, "loads", pointers, mask)

    def on_store(self, task: Task | None, pointers: Any, mask: Any) -> None:
        self._access(task, "stores", pointers, mask)

    def on_atomic(self, task: Task | None, atomic: Atomic, result: Any) -> None:
        addresses = active_addresses(atomic.pointers, atomic.mask)
        if not len(addresses):
            return
        place = self._memory.find(int(addresses[0])) or "own memory"
        seen = result.data.ravel()[0]
        verb = "polls" if atomic.reads_only else f"{atomic.kind} ({atomic.sem}, {atomic.scope})"
        self._note(task, f"{verb} at {place}, sees {seen}{_where()}")

    def on_barrier(self, task: Task | None) -> None:
        self._note(task, f"barrier{_where()}")

    def on_signal(self, task: Task, slot: Any, op: str) -> None:
        self._note(task, f"publishes {self._memory.find(slot.data_ptr())} ({op})")

    def on_item(self, task: Task, stream: str, label: str, start: int, copied_to: Any) -> None:
        self._note(task, f"has done: {label}")


def _elements(count: int) -> str:
    return f"{count} elements" if count > 1 else "1 element"


def _where() -> str:
    line = line_of(next(iter(source_frames(sys._getframe(3))), None))
    return f"  [{line}]" if line else ""
