"""The race detector's memory of accesses and findings, and its part for fences and the async proxy.

TMA, bulk copies, ``wgmma`` and mbarriers use the async proxy. No thread does an asynchronous access itself:
it happens at any time between its start and its end. It comes after everything that the thread that starts
it knows. It comes after stores by threads only if a proxy fence follows these stores. Other accesses come
after it if they have seen its end, by waiting for its group or at an mbarrier; the end is a proxy fence
itself. After a wait with ``.read`` the stores of the group may still be pending.

A proxy fence counts on either side. Barriers, releases and mbarriers pass on what it covers. The start of a
kernel is a proxy fence. A write of memory that a thread has read needs no proxy fence, nor does a tensor
map. A fence of one state space counts as a fence of all.
"""

import ctypes
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from interlace.runtime.core.accesses import AsyncAccess, Atomic, Handle, Lanes, Numbers
from interlace.runtime.core.errors import SourceText
from interlace.runtime.places.sim.scheduler.memory_check import BadAccess
from interlace.runtime.places.sim.scheduler.observer import Observer
from interlace.runtime.places.sim.scheduler.source_lines import program_lines
from interlace.runtime.places.sim.scheduler.strategies import Task
from interlace_verify.race_check.agents import (
    ONE,
    SCOPES,
    SYS,
    Agent,
    AsyncAgent,
    Rules,
    SignalLog,
    join_clocks,
    reaches,
)
from interlace_verify.race_check.findings import Access, FailedSignal, Finding, Reach
from interlace_verify.race_check.shadow import (
    WRITES,
    Conflict,
    Index,
    KnownTimes,
    ShadowMemory,
    ShadowSegment,
)

Asked = Mapping[tuple[object, ...], tuple[int, int]]
"""The findings to look for, by key: the accesses before each, and the component that it conflicts with."""


class PresentAccess(NamedTuple):
    """The access that is checked: its site, and its cells of ``size`` bytes in a segment.

    ``actors``: the component of ``agent`` that does it, or the thread of each cell if threads are known.
    """

    agent: Agent
    site: int
    size: int
    segment: ShadowSegment
    cells: Index
    actors: Any

    @property
    def by(self) -> Lanes:
        return self.actors if isinstance(self.actors, np.ndarray) else None

    @property
    def numbers(self) -> Any:
        cells = self.cells
        return range(cells.start, cells.stop) if isinstance(cells, slice) else cells


class Collector(Observer):
    """Collects findings. ``found``: the first finding of each :attr:`Finding.key`; ``reaches``: its extent.

    ``first_at``: by key, the place of this finding: the number of accesses before it, and the component it
    conflicts with. ``asked``: the ``first_at`` of another detector of the same schedule. If given, the
    collector looks for these conflicts only, and is ``done`` after the last of them. ``step``: returns the
    number of the next step of a story, by which the accesses then differ.
    """

    _acting: Agent
    _agent: Callable[[Task], Any]

    def __init__(
        self, seed: int, rules: Rules, asked: Asked | None, step: Callable[[], int] | None
    ) -> None:
        self.seed, self.rules, self.events, self._step = seed, rules, 0, step
        self._missing = None if asked is None else dict(asked)
        self.first_at: dict[tuple[object, ...], tuple[int, int]] = {}
        self._memory = ShadowMemory()
        self._agents: dict[object, Agent] = {}
        self._owners: list[Agent] = []  # by component
        self._sites: dict[Access, int] = {}
        self._accesses: list[Access] = []  # by the number of the site
        self._signals = SignalLog()
        self._last: dict[tuple[int, int], tuple[int, int, int]] = {}  # plain access of each thread
        self.polls: set[tuple[str, tuple[SourceText, ...]]] = set()  # plain polls of plain stores
        self.found: dict[tuple[object, ...], Finding] = {}
        self.reaches: dict[tuple[object, ...], Reach] = {}
        # lines of kernels: atomics and fences, loads, loads of values that another agent wrote since
        # the launch, and barriers in programs whose threads are known
        self.ordering, self.loads = set[SourceText](), set[SourceText]()
        self.received, self.barriers = set[SourceText](), set[SourceText]()

    @property
    def done(self) -> bool:
        if self.rules.ignored is not None:  # any race says that the barrier is needed
            return bool(self.found)
        return self._missing == {} and self._step is None  # for a story it still names memory

    @property
    def weak_atomics(self) -> list[Access]:
        """Return the atomics that do not both acquire and release."""
        weak = re.compile(r"\((relaxed|acquire|release), ")
        return [access for access in self._accesses if weak.search(access.what)]

    def on_allocate(self, rank: int, memory: torch.Tensor, label: str) -> None:
        self._memory.add(memory.data_ptr(), memory.nbytes, label, symmetric=True)

    def on_shared_memory(self, task: Task, base: int, nbytes: int) -> None:
        if nbytes:
            self._memory.add(base, nbytes, f"shared memory of rank {task.rank} {task.who}")
            if (segment := self._memory.at(base)) is not None:
                segment.poison = ctypes.string_at(base, 1)

    def know(self, tensor: torch.Tensor, rank: int, *, fresh: bool = False) -> None:
        """Register the storage of ``tensor``; ``fresh``: it was allocated just now."""
        storage = tensor.untyped_storage()
        base, nbytes = storage.data_ptr(), storage.nbytes()
        fresh = fresh and not self._memory.is_symmetric(base)
        # symmetric memory is registered on its own, and may be a part of a storage
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

    def place(self, address: int) -> str | None:
        """Return the name of an address in memory that this run has touched."""
        segment = self._memory.at(address)
        return None if segment is None else f"{segment.label}, byte {address - segment.base}"

    def _at(self, address: int, size: int) -> tuple[ShadowSegment, Index]:
        return next(self._memory.find(np.array([address], np.uint64), size))

    def _named(
        self, key: object, rank: int, who: str, threads: int = 0, kind: type[Agent] = Agent
    ) -> Agent:
        """Return the agent of ``key``; later launches of a stream, which are ordered, reuse it."""
        key = key, threads
        agent = self._agents.get(key)
        if agent is None:
            agent = kind(len(self._agents), len(self._owners), rank, who, threads)
            self._agents[key] = agent
            self._owners += [agent] * (agent.BLOCKS * agent.components)
        agent.who = who
        return agent

    def _site(self, agent: Agent, action: str, lines: tuple[SourceText, ...]) -> int:
        """Return the number of an access, by which the shadow memory refers to it."""
        access = self._access_of(agent, action, lines)
        if access not in self._sites:
            self._sites[access] = len(self._accesses)
            self._accesses.append(access)
        return self._sites[access]

    def on_bad_access(self, task: Task, bad: BadAccess) -> None:
        """Report an access that is wrong in itself. It is not executed."""
        agent = self._agent(task)
        access = self._access_of(agent, bad.does, program_lines())
        memory = f"{bad.memory} ({bad.nbytes} bytes)" if bad.nbytes else bad.memory
        where = memory, bad.offset, bad.count, self.seed
        finding = Finding(bad.kind, None, access, *where, index=bad.index)
        self._found(finding, np.arange(bad.count), 1)

    def _access_of(self, agent: Agent, action: str, lines: tuple[SourceText, ...]) -> Access:
        return Access(agent.rank, agent.who, action, lines, self._step and self._step())

    def _report(self, kind: str, conflicts: Iterable[Conflict], access: PresentAccess) -> None:
        segment, second = access.segment, self._accesses[access.site]
        for conflict in conflicts:
            offsets = segment.bytes_of(conflict.cells)
            count = segment.elements(int(offsets[0]), len(conflict.cells), access.size)
            where = segment.label, int(offsets[0]), count, self.seed
            finding = Finding(kind, self._accesses[conflict.site], second, *where, kind)
            self._found(finding, offsets, access.size, conflict)

    def _unwritten(self, access: PresentAccess, seen: object = None) -> None:
        """Report a load of memory that was not written. ``seen``: the value of one element, if known."""
        segment, size = access.segment, access.size
        if segment.poison and len(unwritten := segment.unwritten(access.cells, seen)):
            offsets = segment.bytes_of(unwritten)
            first = int(offsets[0])
            where = segment.label, first, segment.elements(first, len(unwritten), size), self.seed
            loads, index = self._accesses[access.site], str(first // size)
            finding = Finding("uninitialised", None, loads, *where, index=index)
            self._found(finding, offsets, size)

    def _of_one_instruction(
        self, site: int, addresses: Numbers, threads: Numbers, bits: Numbers
    ) -> None:
        if (addresses[1:] > addresses[:-1]).all():  # the usual case
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
        self, finding: Finding, offsets: Numbers, size: int, conflict: Conflict | None = None
    ) -> None:
        key, whose = finding.key, -1
        if conflict is not None:  # the component may be a mirror; the rules decide which one
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
        return reaches(scope, agent, other) and reaches(other_scope, other, agent)

    def _signal(self, conflict: Conflict) -> FailedSignal | None:
        """Return the signal that should order the present access after the one of ``conflict``."""
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
        self, access: PresentAccess, atomics: Sequence[Conflict], stores: Sequence[Conflict]
    ) -> None:
        """Note loads that poll: loads of atomics' values, or repeated loads of one plainly stored word."""
        segment, numbers, site = access.segment, access.numbers, access.site
        poller = self._acting.number, -1 if access.by is None else int(access.by[0])
        last, self._last[poller] = self._last.get(poller), (segment.base, int(numbers[0]), site)
        again = last == self._last[poller] and len(numbers) * segment.cell == access.size
        if again and stores:
            load = self._accesses[site]
            self.polls.add((load.what, load.lines))
        for each in (*atomics, *(stores if again else ())):
            self._signals.note_poll(self._acting, self._owners[each.component], each.time, site)

    def _has_observed(self, conflict: Conflict, access: PresentAccess) -> bool:
        """Return whether the acting agent has read the value that this atomic wrote to each of its words.

        The agent then comes after the atomic: PTX counts observation order as causality order.
        """
        segment, size, by = access.segment, access.size, dict[int, int]()
        if access.by is not None:
            by = dict(zip(map(int, access.numbers), access.by.tolist(), strict=True))
        for word in conflict.cells[:: max(1, size // segment.cell)].tolist():
            address = segment.base + word * segment.cell
            observed = self._acting.has_observed((address, size), by.get(word))
            if conflict.time > observed.get(conflict.component, -1):
                return False
        return True

    def _known(self, agent: Any, threads: Lanes = None, *, multicast: bool = False) -> KnownTimes:
        """Return what an access comes after. ``threads``: the thread of each element, if known."""
        whole = self._by_switch if multicast else self._lengthened
        agent.clock = self._lengthened(agent.clock)
        if threads is None:
            mirrors = multicast or agent.mirrors
            known = agent.released_by(ONE, all_threads=True) if mirrors else agent.clock
            return KnownTimes(whole(known), agent, self._owners, multicast=multicast)
        clock = whole(agent.clock)
        found: dict[int, tuple[list[int], Any]] = {}
        for thread in set(threads.tolist()):
            if (acquired_clock := agent.acquired.get(thread)) is not None:
                found.setdefault(id(acquired_clock), ([], acquired_clock))[0].append(thread)
        more = [(these, whole(acquired_clock)) for these, acquired_clock in found.values()]
        components = agent.first + threads
        return KnownTimes(clock, agent, self._owners, components, more, multicast=multicast)

    def _lengthened(self, clock: Numbers) -> Numbers:
        missing = len(self._owners) - len(clock)
        return np.concatenate([clock, np.zeros(missing, np.int64)]) if missing > 0 else clock

    def _note_load(self, access: PresentAccess) -> None:
        """Note the line of a load, and whether it reads what another agent wrote since the launch."""
        agent, lines = access.agent, program_lines()[:1]
        self.loads.update(lines)
        if self.received.issuperset(lines):
            return
        written = access.segment.written[access.cells]
        before = self._lengthened(agent.before)
        foreign = (written["component"] < agent.first) | (
            written["component"] >= agent.first + agent.BLOCKS * agent.components
        )
        if (foreign & (written["time"] > before[written["component"]])).any():
            self.received.update(lines)

    def _by_multicast(self, pointers: Handle) -> bool:
        """Return whether an access is by a multicast address, and the rules distinguish such accesses."""
        return self.rules.proxies and getattr(pointers, "multicast", False)

    def _mirror(self, agent: Agent, thread: int, *, multicast: bool, puts: bool) -> int:
        """Return the offset of an atomic's mirror: the multicast address's, or the one of puts."""
        block = agent.PUTS * bool(puts and agent.putting[thread] and self.rules.puts)
        return (agent.ALIAS if multicast else block) * agent.components

    def mirrored(self, clock: Numbers, *blocks: int) -> Numbers:
        """Return ``clock`` with all of it ordered as these mirrors say (:class:`Agent`)."""
        clock = self._lengthened(clock).copy()
        for block in blocks:
            bases, mirrors = self._components(block)
            clock[mirrors] = np.maximum(clock[mirrors], clock[bases])
        return clock

    def _by_switch(self, clock: Numbers) -> Numbers:
        """Return the clock of accesses by multicast addresses in place of the ordinary one."""
        clock = self._lengthened(clock).copy()
        bases, mirrors = self._components(Agent.ALIAS)
        clock[bases], clock[mirrors] = clock[mirrors], clock[bases]
        return clock

    def _components(self, block: int) -> tuple[Numbers, Numbers]:
        agents = self._agents.values()
        bases = np.concatenate([agent.first + np.arange(agent.components) for agent in agents])
        counts = np.repeat(*np.array([(a.components,) * 2 for a in agents]).T)
        return bases, bases + block * counts

    def on_alias_fence(self, task: Task, threads: Lanes = None) -> None:
        agent = self._agent(task)
        agent.order(agent.ALIAS, threads)
        if threads is None:
            agent.change(threads, lambda clock: self.mirrored(clock, agent.ALIAS))
        for thread in () if threads is None else threads.tolist():
            released_clock = agent.released_by(thread, all_threads=False)
            agent.acquired[thread] = self.mirrored(released_clock, agent.ALIAS)
        agent.has_released(threads, all_threads=threads is None or not self.rules.barriers)

    def on_puts(self, task: Task, threads: Lanes, *, begin: bool) -> None:
        self._agent(task).putting[slice(None) if threads is None else threads] = begin

    def on_fence(
        self, task: Task, sem: str, scope: str, threads: Lanes = None, *, puts: bool = True
    ) -> None:
        self.ordering.update(program_lines()[:1])
        agent, level = self._agent(task), SCOPES[scope] if self.rules.scopes else SYS
        all_threads = not self.rules.barriers
        if puts and sem != "acquire":
            agent.order(agent.PUTS, threads)
        for thread in agent.acting(threads):
            waiting = agent.waiting.get(thread, {}) if sem != "release" else {}
            for sender in [each for each in waiting if reaches(level, agent, each)]:
                agent.acquire(thread, waiting.pop(sender))
            if sem != "acquire":
                released_clock = agent.released_by(thread, all_threads=all_threads)
                agent.fence(
                    thread,
                    level,
                    self.mirrored(released_clock, agent.PUTS) if puts else released_clock,
                )
        if sem != "acquire":
            agent.has_released(threads, all_threads=all_threads)

    def on_quiet(self, task: Task, threads: Lanes = None) -> None:
        agent = self._agent(task)
        agent.quiet(threads)
        agent.has_released(threads, all_threads=threads is None)

    def on_proxy_fence(self, task: Task, threads: Lanes) -> None:
        agent = self._agent(task)
        agent.order(agent.ASYNC, threads)
        agent.change(threads, lambda clock: self.mirrored(clock, agent.ASYNC))
        agent.has_released(threads, all_threads=not self.rules.barriers)

    def on_async(
        self, task: Task, copy: AsyncAccess, pointers: Handle, *, does: str, stores: bool
    ) -> None:
        agent, size = self._agent(task), pointers.get_element_ty().primitive_bitwidth // 8
        queue = self._start(agent, copy)
        site = self._site(agent, f"{does} (async)", program_lines())
        known, fenced = (KnownTimes(clock, queue, self._owners) for clock in queue.known)
        time = queue.base + copy.time
        for segment, cells in self._memory.find(pointers.data.ravel(), size):
            self.events += 1
            access = PresentAccess(agent, site, size, segment, cells, ONE)
            kind = "write-write" if stores else "write-read"
            self._report(kind, segment.unordered_store(cells, fenced), access)
            atomics = segment.unordered(segment.atomics, cells, fenced)
            if does != "reduces":
                changes = (atomic for atomic in atomics if stores or atomic.extra & WRITES)
                self._report("mixed access", changes, access)
            if stores:
                loads = segment.unordered(segment.loads, cells, known)
                self._report("read-write", loads, access)
            if does == "reduces":
                extra = WRITES | SCOPES["gpu"]
                segment.note(segment.atomics, cells, queue.first + ONE, time, site, extra)
            elif stores:
                segment.note_store(cells, queue.first + ONE, time, site)
            else:
                self._unwritten(access)
                self._note_load(access)
                segment.note(segment.loads, cells, queue.first, time, site)

    def _start(self, agent: Agent, copy: AsyncAccess) -> AsyncAgent:
        """Return the queue of ``copy``, with the clock of its thread at the start of the copy."""
        queue = agent.queues.get(copy.queue)
        if queue is None:
            key = "async", agent.number, copy.queue
            queue = cast(AsyncAgent, self._named(key, agent.rank, agent.who, kind=AsyncAgent))
            queue.base, queue.time = int(queue.clock[queue.first + ONE]), 0
            agent.queues[copy.queue] = queue
        if queue.time < copy.time:
            queue.time = copy.time
            components, time = queue.until(copy.time, reads_only=False)
            queue.clock[components] = time
            released_clock = agent.released_by(copy.thread, all_threads=not self.rules.barriers)
            fenced = self._lengthened(released_clock)
            if self.rules.proxies:
                bases, mirrors = self._components(Agent.ASYNC)
                fenced = fenced.copy()
                fenced[bases] = fenced[mirrors]
            queue.known = self._lengthened(released_clock), fenced
        return queue

    def on_async_end(
        self, task: Task, queue: Any, time: int, threads: Lanes, *, reads_only: bool
    ) -> None:
        agent = self._agent(task)
        components, at = agent.queues[queue].until(time, reads_only=reads_only)

        def end_clock(clock: Numbers) -> Numbers:
            clock = self._lengthened(clock).copy()
            clock[components] = np.maximum(clock[components], at)
            return clock

        agent.change(threads, end_clock)

    def on_arrival(
        self,
        task: Task,
        mbarrier: int,
        threads: Iterable[int] = (),
        copies: tuple[object, int] | None = None,
    ) -> None:
        agent = self._agent(task)
        phase_clocks = agent.mbarriers.setdefault(mbarrier, [None, None])
        for thread in threads:
            released_clock = agent.released_by(int(thread), all_threads=not self.rules.barriers)
            phase_clocks[0] = join_clocks(phase_clocks[0], released_clock)
            agent.has_released(np.array([thread]), all_threads=not self.rules.barriers)
        if copies is not None:
            components, time = agent.queues[copies[0]].until(copies[1], reads_only=False)
            clock = np.zeros(len(self._owners), np.int64)
            clock[components] = time
            phase_clocks[0] = join_clocks(phase_clocks[0], clock)

    def on_phase(self, task: Task, mbarrier: int) -> None:
        phase_clocks = self._agent(task).mbarriers.setdefault(mbarrier, [None, None])
        phase_clocks[1] = phase_clocks[0]

    def on_awaited(self, task: Task, mbarrier: int, threads: Lanes) -> None:
        agent = self._agent(task)
        _, done = agent.mbarriers.get(mbarrier, (None, None))
        if done is not None:
            agent.change(threads, lambda clock: join_clocks(clock, done))


def does_of(action: str, pointers: Handle) -> str:
    return action + " by multicast" * getattr(pointers, "multicast", False)


def stream_atomic(kind: str, sem: str) -> Atomic:
    """Return the atomic of ``publish_kernel`` or ``wait_kernel``, which streams execute in ``sim``."""
    return Atomic(None, None, kind, sem, "sys", reads_only=kind == "load")
