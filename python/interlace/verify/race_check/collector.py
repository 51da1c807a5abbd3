"""Memory and accesses of a run by number, its signals, and all that a detector has found in it."""

import ctypes
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from interlace.runtime.core.accesses import Atomic
from interlace.runtime.core.errors import SourceText
from interlace.runtime.places.sim.scheduler.memory_check import BadAccess
from interlace.runtime.places.sim.scheduler.observer import Observer
from interlace.runtime.places.sim.scheduler.source_lines import program_lines
from interlace.runtime.places.sim.scheduler.task import Task
from interlace.verify.race_check.agents import Agent, reaches
from interlace.verify.race_check.causes import Reach
from interlace.verify.race_check.findings import Access, FailedSignal, Finding
from interlace.verify.race_check.shadow import Conflict, Index, ShadowMemory, ShadowSegment
from interlace.verify.race_check.signals import SignalLog

At = tuple[int, int]


class Collector(Observer):
    """``found``: the first finding of each :attr:`Finding.key`; ``reaches``: how far each goes.

    ``first_at``: which conflict that was, by key: the number of accesses before it, and whose it conflicts
    with. ``asked``: the ``first_at`` of another detector of the same schedule. Then it looks for these
    conflicts only, and is ``done`` when it has found all.
    """

    _acting: Agent
    _agent: Callable[[Task], Any]

    def __init__(self, seed: int, asked: Mapping[tuple[Any, ...], At] | None = None) -> None:
        self.seed, self.events = seed, 0
        self._missing = None if asked is None else dict(asked)
        self.first_at: dict[tuple[Any, ...], At] = {}
        self._memory = ShadowMemory()
        self._owners: list[Agent] = []  # by component
        self._sites: dict[Access, int] = {}
        self._accesses: list[Access] = []  # by the number of the site
        self._signals = SignalLog()
        self._last: dict[tuple[int, int], tuple[int, int, int]] = {}  # plain access of each thread
        self.polls: set[tuple[str, tuple[SourceText, ...]]] = set()  # plain, of plain stores
        self.found: dict[tuple[Any, ...], Finding] = {}
        self.reaches: dict[tuple[Any, ...], Reach] = {}

    @property
    def done(self) -> bool:
        return self._missing == {}

    @property
    def weak_atomics(self) -> list[Access]:
        """Those that do not both acquire and release."""
        weak = re.compile(r"\((relaxed|acquire|release), ")
        return [each for each in self._accesses if weak.search(each.what)]

    def on_allocate(self, rank: int, memory: torch.Tensor, label: str) -> None:
        self._memory.add(memory.data_ptr(), memory.nbytes, label, symmetric=True)

    def on_shared_memory(self, task: Task | None, base: int, nbytes: int) -> None:
        if task is not None and nbytes:
            self._memory.add(base, nbytes, f"shared memory of rank {task.rank} {task.who}")
            if (segment := self._memory.at(base)) is not None:
                segment.poison = ctypes.string_at(base, 1)

    def know(self, tensor: torch.Tensor, rank: int, *, fresh: bool = False) -> None:
        """Register the storage of ``tensor``; ``fresh``: it was allocated just now."""
        storage = tensor.untyped_storage()
        base, nbytes = storage.data_ptr(), storage.nbytes()
        fresh = fresh and not self._memory.is_symmetric(base)
        # symmetric memory is known by itself, and may be a part of a storage
        if tensor.numel() and (fresh or self._memory.at(tensor.data_ptr()) is None):
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._memory.add(base, nbytes, f"a {dtype} tensor of {shape} on rank {rank}")

    def on_undefined(self, memory: torch.Tensor) -> None:
        self._undefine(memory)

    def _undefine(self, tensor: torch.Tensor) -> None:
        segment = self._memory.at(tensor.data_ptr()) if tensor.numel() else None
        if segment is not None:
            segment.poison = ctypes.string_at(tensor.data_ptr(), tensor.element_size())

    def _at(self, address: int, size: int) -> tuple[ShadowSegment, Index]:
        """The cells of one element."""
        return next(self._memory.find(np.array([address], np.uint64), size))

    def _site(self, agent: Agent, what: str, lines: tuple[SourceText, ...]) -> int:
        """The number of an access, which stands for it in the shadow memory."""
        access = self._access_of(agent, what, lines)
        if access not in self._sites:
            self._sites[access] = len(self._accesses)
            self._accesses.append(access)
        return self._sites[access]

    def on_bad_access(self, task: Task, bad: BadAccess) -> None:
        """An access that is wrong by itself, and is left out."""
        agent = self._agent(task)
        access = self._access_of(agent, bad.does, program_lines())
        memory = f"{bad.memory} ({bad.nbytes} bytes)" if bad.nbytes else bad.memory
        where = memory, bad.offset, bad.count, self.seed
        finding = Finding(bad.kind, None, access, *where, index=bad.index)
        self._found(finding, np.arange(bad.count), 1)

    def _access_of(self, agent: Agent, what: str, lines: tuple[SourceText, ...]) -> Access:
        return Access(agent.rank, agent.who, what, lines)

    def _report(
        self, kind: str, conflicts: Iterable[Conflict], site: int, segment: ShadowSegment, size: int
    ) -> None:
        for conflict in conflicts:
            offsets = segment.bytes_of(conflict.cells)
            count = segment.elements(int(offsets[0]), len(conflict.cells), size)
            where = segment.label, int(offsets[0]), count, self.seed
            first, second = self._accesses[conflict.site], self._accesses[site]
            self._found(Finding(kind, first, second, *where, kind), offsets, size, conflict)

    def _unwritten(
        self, segment: ShadowSegment, cells: Index, site: int, size: int, seen: Any = None
    ) -> None:
        """Report a load of what nobody has written, if it is. ``seen``: what was there, of one element."""
        if segment.poison and len(unwritten := segment.unwritten(cells, seen)):
            offsets = segment.bytes_of(unwritten)
            first = int(offsets[0])
            where = segment.label, first, segment.elements(first, len(unwritten), size), self.seed
            access, index = self._accesses[site], str(first // size)
            finding = Finding("uninitialised", None, access, *where, index=index)
            self._found(finding, offsets, size)

    def _of_one_instruction(self, site: int, addresses: Any, threads: Any, bits: Any) -> None:
        """Report that ``threads`` store different ``bits`` to one address, if they do."""
        if (addresses[1:] > addresses[:-1]).all():  # as usually
            return
        order = np.argsort(addresses, kind="stable")
        at, stored = addresses[order], bits[order]
        differ = np.flatnonzero((at[1:] == at[:-1]) & (stored[1:] != stored[:-1]))
        if not len(differ):
            return
        size = bits.itemsize
        segment, _ = self._at(int(at[differ[0]]), size)
        starts = np.unique(at[differ]).astype(np.int64) - segment.base
        offsets = (starts[:, None] + np.arange(size)).ravel()
        first, second = (
            f"thread {threads[order[place]]} stores {stored[place]:#x}"
            for place in (differ[0], differ[0] + 1)
        )
        offset = int(starts[0])
        where = segment.label, offset, len(starts), self.seed
        index = f"{offset // size}: {first}, {second}"
        finding = Finding("different values", None, self._accesses[site], *where, index=index)
        self._found(finding, offsets, size)

    def _found(
        self, finding: Finding, offsets: Any, size: int, conflict: Conflict | None = None
    ) -> None:
        key, whose = finding.key, -1
        if conflict is not None:  # of a mirror the component: rules say which mirror it is
            owner = self._owners[conflict.component]
            whose = owner.first + (conflict.component - owner.first) % owner.components
        at = self.events, whose
        asked = self._missing is None or self._missing.get(key) == at
        if key not in self.found and asked:
            self.first_at[key] = at
            if conflict is not None:
                signal = self._signal(conflict)
                poll = self._signals.polled(owner, conflict.time, self._acting)
                polled = None if poll is None or signal else self._accesses[poll]
                finding = replace(finding, signal=signal, polled=polled)
            self.found[key] = finding
            if self._missing is not None:
                del self._missing[key]
        self.reaches.setdefault(key, Reach()).note(finding, offsets, size)

    def _reach(self, agent: Agent, scope: int, other: Agent, other_scope: int) -> bool:
        """Whether two atomics, of ``agent`` and of ``other``, are within each other's scope."""
        return reaches(scope, agent, other) and reaches(other_scope, other, agent)

    def _signal(self, conflict: Conflict) -> FailedSignal | None:
        """The signal that should have ordered the present access behind that of ``conflict``."""
        first = self._owners[conflict.component]
        seen = self._signals.between(first, conflict.component, conflict.time, self._acting)
        segment = None if seen is None else self._memory.at(seen.address)
        if seen is None or segment is None:
            return None
        offset = seen.address - segment.base
        writers = self._signals.writers(seen.address)
        accesses = self._accesses[seen.written], self._accesses[seen.seen]
        ended = first.had_ended(conflict.component, conflict.time, seen.known)
        index = offset // seen.size
        return FailedSignal(segment.label, offset, index, writers, *accesses, ended)

    def _note_polls(
        self,
        place: tuple[ShadowSegment, Index],
        site: int,
        size: int,
        threads: Any | None,
        atomics: Sequence[Conflict],
        stores: Sequence[Conflict],
    ) -> None:
        """Remember loads that waited: of what atomics wrote, or, repeated, of one word of a plain store."""
        segment, cells = place
        numbers = range(cells.start, cells.stop) if isinstance(cells, slice) else cells
        who = self._acting.number, -1 if threads is None else int(threads[0])
        last, self._last[who] = self._last.get(who), (segment.base, int(numbers[0]), site)
        again = last == self._last[who] and len(numbers) * segment.cell == size
        if again and stores:
            access = self._accesses[site]
            self.polls.add((access.what, access.lines))
        for each in (*atomics, *(stores if again else ())):
            self._signals.note_poll(self._acting, self._owners[each.component], each.time, site)

    def _has_observed(
        self, conflict: Conflict, place: tuple[ShadowSegment, Index], size: int, threads: Any | None
    ) -> bool:
        """Whether the acting agent has read the value that this atomic wrote to each of its words.

        Then it comes after the atomic: PTX counts observation order as causality order.
        """
        segment, cells = place
        numbers = range(cells.start, cells.stop) if isinstance(cells, slice) else cells.tolist()
        by = {} if threads is None else dict(zip(numbers, threads.tolist(), strict=True))
        for word in conflict.cells[:: max(1, size // segment.cell)].tolist():
            thread = by.get(word)
            address = segment.base + word * segment.cell
            observed = self._acting.has_observed((address, size), thread)
            if conflict.time > observed.get(conflict.component, -1):
                return False
        return True


def does_of(what: str, pointers: Any) -> str:
    return what + " by multicast" * getattr(pointers, "multicast", False)


def stream_atomic(kind: str, sem: str) -> Atomic:
    """The atomic of ``publish_kernel`` and ``wait_kernel``, which streams do themselves in ``sim``."""
    return Atomic(None, None, kind, sem, "sys", reads_only=kind == "load")
