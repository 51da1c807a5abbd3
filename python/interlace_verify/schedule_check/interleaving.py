"""A schedule as a story: one line per step, in the order of execution."""

import itertools
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from interlace.runtime.core.accesses import Atomic, Handle, Lanes, Mask, Numbers
from interlace.runtime.core.errors import BlockedWait, DeadlockError, SourceText
from interlace.runtime.places.sim.interpreter.session import active, active_addresses
from interlace.runtime.places.sim.scheduler.allocations import Allocations, together
from interlace.runtime.places.sim.scheduler.observer import Observer
from interlace.runtime.places.sim.scheduler.source_lines import program_lines
from interlace.runtime.places.sim.scheduler.strategies import Task

LONGEST = 200
MOST_STEPS = 20_000
_ELEMENTS = re.compile(r"(.*?)(\d+) elements?( at .*, byte )(\d+)(.*)")


class Step(NamedTuple):
    """A step: ``task``, or the memory, does what ``text`` says; ``who`` names the task within its rank.

    ``lines`` of the source are innermost first. ``after``: numbers of the steps whose signals it has seen.
    ``nbytes``: the bytes that it accesses, if they are contiguous, otherwise 0. ``alone``: no other task
    can see it: a barrier, or an access of memory that no other task changes or reads.
    """

    task: str
    rank: int
    who: str
    text: str
    lines: tuple[SourceText, ...] = ()
    after: tuple[int, ...] = ()
    nbytes: int = 0
    alone: bool = False


@dataclass(frozen=True)
class Story:
    """The last steps of a run, starting with number ``first``, and the waits left in a deadlock."""

    seed: int
    first: int
    steps: tuple[Step, ...]
    blocked: tuple[BlockedWait, ...] = ()

    def lines(self, *, shared: bool = False) -> tuple[str, ...]:
        """Return one line per step. Repeated lines are counted. A long story keeps its end.

        ``shared``: leave out steps that no other task can see, if that leaves any.
        """
        told: list[str] = []
        kept = [step for step in self.steps if not step.alone] if shared else []
        kept = kept or [*self.steps]  # show all steps if none is shared
        for task, steps in itertools.groupby(kept, lambda step: step.task):
            told.append(f"{task}:")
            texts = (_with_lines(step) for step in _ranges(steps))
            for text, same in itertools.groupby(texts):
                times = len(list(same))
                told.append(f"    {text}" + (f"  ({times} times)" if times > 1 else ""))
        if len(told) > LONGEST:
            told = [f"... {len(told) - LONGEST} earlier lines are left out ...", *told[-LONGEST:]]
        return (*told, *map(str, self.blocked))

    def where(self, wait: BlockedWait) -> tuple[SourceText, ...]:
        """Return the known lines at which ``wait`` stands, innermost first."""
        if not isinstance(wait.where, SourceText):
            return ()
        frames = wait.where.frames
        rank_lines = (
            step.lines for step in self.steps[::-1] if step.rank == wait.rank and step.lines
        )
        return next((lines for lines in rank_lines if lines[0].frames == frames), (wait.where,))


def _ranges(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield ``steps``, with neighbours that do the same to adjacent bytes as one step."""
    before: Step | None = None
    for step in steps:
        both = before and _join(before, step)
        if before is not None and both is None:
            yield before
        before = both or step
    if before is not None:
        yield before


def _join(one: Step, other: Step) -> Step | None:
    last, found = _ELEMENTS.match(one.text), _ELEMENTS.match(other.text)
    if not (last and found and one.nbytes and other.nbytes and one.lines == other.lines):
        return None
    behind = int(found[4]) == int(last[4]) + one.nbytes
    if not behind or found.group(1, 3, 5) != last.group(1, 3, 5):
        return None
    text = f"{last[1]}{in_words(int(last[2]) + int(found[2]))}{last[3]}{last[4]}{last[5]}"
    return one._replace(text=text, nbytes=one.nbytes + other.nbytes)


def _with_lines(step: Step) -> str:
    return step.text + (f"  [{', called from '.join(step.lines)}]" if step.lines else "")


class Storyteller(Observer):
    """Notes signals, items of streams, and accesses of symmetric memory. Other memory is private."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=MOST_STEPS)
        self._spans: deque[tuple[Collection[int] | None, bool]] = deque(maxlen=MOST_STEPS)
        self._count = 0
        self._memory = Allocations()
        self._stuck: int | None = None
        self._written: dict[int, tuple[Task, int]] = {}  # a signal's last writer, and its step
        self._seen: set[tuple[Task, int]] = set()

    def story(self, seed: int, error: BaseException | None = None) -> Story:
        """Return the story of the run of ``seed``, which ``error`` ended."""
        first, steps = self._count - len(self._steps), tuple(self._with_others())
        if not isinstance(error, DeadlockError):
            return Story(seed, first, steps)
        end = None if self._stuck is None else max(0, self._stuck - first)
        return Story(seed, first, steps[:end], tuple(error.blocked))

    def _note(
        self,
        task: Task,
        text: str,
        lines: tuple[SourceText, ...],
        after: Any = (),
        nbytes: int = 0,
        span: Collection[int] | None = None,
        writes: bool = False,
    ) -> None:
        step = Step(task.name, task.rank, self._who(task), text, lines, tuple(after), nbytes)
        self._add(step, span, writes=writes)

    def _who(self, task: Task) -> str:
        launch = f" of launch {task.number + 1}" if task.number and task.program else ""
        return task.who + launch

    def _place(self, task: Task, address: int) -> str | None:
        """Return the name of an address, or None if the story leaves out its accesses."""
        return self._memory.find(address)

    def _add(
        self, step: Step, span: Collection[int] | None = None, *, writes: bool = False
    ) -> None:
        """Add a step. ``span``: the words that it accesses, or None if others see it in another way."""
        self._steps.append(step)
        self._spans.append((span, writes))
        self._count += 1

    def _with_others(self) -> Iterator[Step]:
        """Yield the steps, and set ``alone`` for those that other tasks cannot see."""
        users: dict[int, dict[str, bool]] = {}  # by word and task: whether the task changes it
        for step, (span, writes) in zip(self._steps, self._spans, strict=True):
            for word in span or ():
                by_task = users.setdefault(word, {})
                by_task[step.task] = by_task.get(step.task, False) or writes
        shared_words = {
            word for word, tasks in users.items() if len(tasks) > 1 and any(tasks.values())
        }
        for step, (span, _) in zip(self._steps, self._spans, strict=True):
            yield step._replace(alone=span is not None and shared_words.isdisjoint(span))

    def on_stuck(self) -> None:
        self._stuck = self._count

    def _access(self, task: Task, verb: str, pointers: Handle, mask: Mask) -> None:
        addresses = active_addresses(pointers, mask)
        if not len(addresses):
            return
        place = self._place(task, int(addresses[0]))
        if place is not None:
            size = pointers.get_element_ty().primitive_bitwidth // 8
            behind = bool((np.diff(addresses.astype(np.int64)) == size).all())
            text = f"{verb} {in_words(len(addresses))} at {place}"
            nbytes, span = len(addresses) * size * behind, _words(addresses, size)
            writes = verb == "stores"
            self._note(task, text, program_lines(), nbytes=nbytes, span=span, writes=writes)

    def on_allocate(self, rank: int, memory: Any, label: str) -> None:
        self._memory.put(memory.data_ptr(), memory.nbytes, label)

    def on_visible(self, task: Task, address: int, elements: int, nbytes: int) -> None:
        place = self._memory.find(address)
        if place is not None:
            text = f"{in_words(elements)} at {place}, stored by {task.name}: visible now"
            step = Step("memory", task.rank, task.who, text, nbytes=nbytes)
            self._add(step, _words([address], nbytes), writes=True)

    def on_load(self, task: Task, pointers: Handle, mask: Mask) -> None:
        self._access(task, "loads", pointers, mask)

    def on_store(self, task: Task, pointers: Handle, mask: Mask) -> None:
        self._access(task, "stores", pointers, mask)

    def on_atomic(self, task: Task, atomic: Atomic, result: Handle) -> None:
        addresses = active_addresses(atomic.pointers, atomic.mask).tolist()
        if not addresses:
            return
        place = together(self._place(task, address) or "own memory" for address in addresses)
        span = _words(addresses, atomic.pointers.get_element_ty().primitive_bitwidth // 8)
        before = active(result.data, atomic.pointers, atomic.mask)
        seen, *other_values = dict.fromkeys(before)
        more = (
            f" and {other_values[0] if len(other_values) == 1 else f'{len(other_values)} more'}"
            if other_values
            else ""
        )
        verb = "polls" if atomic.reads_only else f"{atomic.kind} ({atomic.sem}, {atomic.scope})"
        if atomic.compare is not None:  # a failed swap only reads
            wanted = np.broadcast_to(atomic.compare.data, result.data.shape)
            swapped = before == active(wanted, atomic.pointers, atomic.mask)
            addresses = [each for each, done in zip(addresses, swapped, strict=True) if done]
        after = self._awaited_steps(task, addresses) if atomic.acquires else ()
        sees = "" if atomic.kind == "store" else f", sees {seen}{more}"
        text, writes = f"{verb} at {place}{sees}", bool(addresses) and not atomic.reads_only
        self._note(task, text, program_lines(), after, span=span, writes=writes)
        if not atomic.reads_only:
            self._written.update(dict.fromkeys(addresses, (task, self._count - 1)))

    def _awaited_steps(self, task: Task, addresses: list[int]) -> list[int]:
        """Return other tasks' steps that wrote these signals and that ``task`` has not seen yet."""
        found = {self._written[address] for address in addresses if address in self._written}
        new = sorted({step for writer, step in found if writer is not task})
        new = [step for step in new if (task, step) not in self._seen]
        self._seen.update((task, step) for step in new)
        return new

    def on_barrier(self, task: Task, threads: Lanes = None) -> None:
        met = "" if threads is None else f" of threads {threads.min()} to {threads.max()}"
        self._note(task, f"barrier{met}", program_lines(), span=())

    def on_signal(self, task: Task, slot: Any, op: str) -> None:
        self._note(
            task, f"publishes {self._memory.find(slot.data_ptr())} ({op})", _enqueued_at(task)
        )
        self._written[slot.data_ptr()] = task, self._count - 1

    def on_signals_seen(self, task: Task, slots: Any) -> None:
        addresses = [slots.data_ptr() + each * slots.itemsize for each in range(slots.numel())]
        after = self._awaited_steps(task, addresses)
        if after:
            self._note(task, "has waited for signals", _enqueued_at(task), after)

    def on_item(self, task: Task, stream: str, label: str, start: int, copied_to: object) -> None:
        self._note(task, f"has done: {label}", _enqueued_at(task))


def _words(addresses: Sequence[int] | Numbers, size: int) -> set[int]:
    """Return the 4-byte words that elements of ``size`` bytes at ``addresses`` overlap."""
    first = np.asarray(addresses, np.uint64)
    last = first + np.uint64(max(0, size - 1))
    ends = np.concatenate([first, *(first + np.uint64(at) for at in range(4, size, 4)), last])
    return {*(ends // np.uint64(4)).tolist()}


def _enqueued_at(task: Task) -> tuple[SourceText, ...]:
    return (task.owner.running,) if task.owner is not None else ()


def in_words(count: int, what: str = "element") -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
