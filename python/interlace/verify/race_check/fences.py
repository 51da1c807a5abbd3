"""The race detector's half for fences, and for the async proxy: TMA, bulk copies, ``wgmma``, mbarriers.

An asynchronous access is done by nobody's thread, at any time from its start to its end. It comes after
what the thread that starts it knows, and of stores by threads after those only that a proxy fence stands
behind. Others come after it when they have seen its end: by waiting for its group, or at an mbarrier;
the end is a proxy fence by itself. Of groups that were only read (``.read``) the stores may still come.

A proxy fence counts on either side, and what it has covered is handed on like all that is known: by
barriers, releases and mbarriers. A start of a kernel is one. That memory is written again which a thread
has read needs none, nor does a tensor map; fences of one state space are taken for fences of all.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from interlace.runtime.core.accesses import AsyncAccess
from interlace.runtime.core.errors import SourceText
from interlace.runtime.places.sim.scheduler.source_lines import program_lines
from interlace.runtime.places.sim.scheduler.task import Task
from interlace.verify.race_check.agents import (
    SCOPES,
    SYS,
    Agent,
    AsyncAgent,
    Rules,
    ThreadsAgent,
    fenced_for,
    joined,
)
from interlace.verify.race_check.collector import Collector
from interlace.verify.race_check.shadow import WRITES, Index, KnownTimes, ShadowSegment


class Fences(Collector):
    rules: Rules
    events: int
    ordering: set[SourceText]
    loads: set[SourceText]
    received: set[SourceText]
    _agents: dict[Any, Agent]

    def _known(self, agent: Any, threads: Any = None, *, multicast: bool = False) -> KnownTimes:
        """What an access comes after; of ``threads``, one for each element, where they are told apart."""
        whole = self._by_switch if multicast else self._lengthened
        agent.clock = self._lengthened(agent.clock)
        clock = whole(agent.clock)
        if threads is None:
            return KnownTimes(clock, agent, self._owners, multicast=multicast)
        found: dict[int, tuple[list[int], Any]] = {}
        for thread in set(threads.tolist()):
            if (told := agent.acquired.get(thread)) is not None:
                found.setdefault(id(told), ([], told))[0].append(thread)
        more = [(these, whole(told)) for these, told in found.values()]
        own = agent.first + threads
        return KnownTimes(clock, agent, self._owners, own, more, multicast=multicast)

    def _lengthened(self, clock: Any) -> Any:
        """``clock``, with a place for every component there is."""
        missing = len(self._owners) - len(clock)
        return np.concatenate([clock, np.zeros(missing, np.int64)]) if missing > 0 else clock

    def _note_load(self, agent: Any, segment: ShadowSegment, cells: Index) -> None:
        """Note the line of a load, and whether it reads what another has written since the launch."""
        lines = program_lines()[:1]
        self.loads.update(lines)
        if self.received.issuperset(lines):
            return
        written, before = segment.written[cells], self._lengthened(agent.before)
        others = (written["component"] < agent.first) | (
            written["component"] >= agent.first + agent.BLOCKS * agent.components
        )
        if (others & (written["time"] > before[written["component"]])).any():
            self.received.update(lines)

    def _by_multicast(self, pointers: Any) -> bool:
        """Whether an access is by a multicast address, and that makes a difference."""
        return self.rules.proxies and getattr(pointers, "multicast", False)

    def _mirror(self, agent: Any, thread: int | None, *, multicast: bool, puts: bool) -> int:
        """Where an atomic is noted, from its component: the mirror of a multicast address, or of puts."""
        putting = agent.putting if thread is None else agent.putting[thread]
        block = agent.PUTS * bool(puts and putting and self.rules.puts)
        return (agent.ALIAS if multicast else block) * agent.components  # type: ignore[no-any-return]

    def fenced(self, clock: Any) -> Any:
        """``clock``, all of which the async proxy comes after."""
        return self._mirrored(clock, Agent.ASYNC)

    def aliased(self, clock: Any) -> Any:
        """``clock``, all of which accesses by any address of the same memory come after."""
        return self._mirrored(clock, Agent.ALIAS)

    def delivered(self, clock: Any) -> Any:
        """``clock``, with all puts that were begun by then."""
        return self._mirrored(clock, Agent.PUTS)

    def _mirrored(self, clock: Any, block: int) -> Any:
        clock, (bases, mirrors) = self._lengthened(clock).copy(), self._components(block)
        clock[mirrors] = np.maximum(clock[mirrors], clock[bases])
        return clock

    def _by_switch(self, clock: Any) -> Any:
        """What accesses by multicast addresses come after, in the place of what others do."""
        clock = self._lengthened(clock).copy()
        bases, mirrors = self._components(Agent.ALIAS)
        clock[bases], clock[mirrors] = clock[mirrors], clock[bases]
        return clock

    def _components(self, block: int) -> tuple[Any, Any]:
        """All components, and their mirrors of a block."""
        agents = self._agents.values()
        bases = np.concatenate([each.first + np.arange(each.components) for each in agents])
        counts = np.repeat(*np.array([(a.components,) * 2 for a in agents]).T)
        return bases, bases + block * counts

    def on_alias_fence(self, task: Task | None, threads: Any = None) -> None:
        if task is None:
            return
        agent: Any = self._agent(task)
        if threads is None:
            agent.clock = self.aliased(agent.clock)
            agent.tick()
            return
        agent.aliased_times[threads] = agent.times[threads]
        for thread in threads.tolist():
            agent.acquired[thread] = self.aliased(agent.released_by(thread, all_threads=False))
        agent.has_released(threads, all_threads=not self.rules.barriers)

    def on_puts(self, task: Task | None, threads: Any, *, begin: bool) -> None:
        if task is not None:
            agent: Any = self._agent(task)
            if threads is None:
                agent.putting = begin
            else:
                agent.putting[threads] = begin

    def on_fence(
        self, task: Task | None, sem: str, scope: str, threads: Any = None, *, puts: bool = True
    ) -> None:
        if task is None:
            return
        self.ordering.update(program_lines()[:1])
        agent: Any = self._agent(task)
        if threads is not None:
            self._fence_threads(agent, sem, scope, threads, puts)
            return
        level, all_threads = SCOPES[scope] if self.rules.scopes else SYS, not self.rules.barriers
        for clock in fenced_for(agent, level, agent.pending) if sem != "release" else ():
            agent.learn(clock)
        if sem == "acquire":
            return
        if puts:
            agent.clock = self.delivered(agent.clock)
        agent.fenced[level] = agent.released(all_threads=all_threads, each_thread=False)
        agent.has_released(all_threads=all_threads)

    def _fence_threads(
        self, agent: ThreadsAgent, sem: str, scope: str, threads: Any, puts: bool
    ) -> None:
        level = SCOPES[scope] if self.rules.scopes else SYS
        if puts and sem != "acquire":
            agent.delivered_times[threads] = agent.times[threads]
        for thread in threads.tolist():
            waiting = agent.waiting.get(thread, {}) if sem != "release" else {}
            for clock in fenced_for(agent, level, waiting):
                agent.acquire(thread, clock)
            if sem != "acquire":
                own = agent.released_by(thread, all_threads=not self.rules.barriers)
                own = self.delivered(own) if puts else own
                fences = agent.fences.setdefault(thread, {SYS: agent.before})
                fences[level] = joined(fences.get(level), own)
        if sem == "acquire":
            return
        agent.has_released(threads, all_threads=not self.rules.barriers)

    def on_quiet(self, task: Task | None, threads: Any = None) -> None:
        if task is not None:
            agent: Any = self._agent(task)
            agent.quiet(threads)
            agent.has_released(threads, all_threads=threads is None)

    def on_proxy_fence(self, task: Task | None, threads: Any) -> None:
        if task is None:
            return
        agent = self._agent(task)
        agent.fenced_times[threads] = agent.times[threads]
        agent.change(threads, self.fenced)
        agent.has_released(threads, all_threads=not self.rules.barriers)

    def on_async(
        self, task: Task | None, copy: AsyncAccess, pointers: Any, *, does: str, stores: bool
    ) -> None:
        if task is None:
            return
        agent, size = self._agent(task), pointers.get_element_ty().primitive_bitwidth // 8
        queue = self._started(agent, copy)
        site = self._site(agent, f"{does} (async)", program_lines())
        known, fenced = (KnownTimes(clock, queue, self._owners) for clock in queue.known)
        time = queue.base + copy.time
        for segment, cells in self._memory.find(pointers.data.ravel(), size):
            self.events += 1
            kind = "write-write" if stores else "write-read"
            self._report(kind, segment.unordered_store(cells, fenced), site, segment, size)
            atomics = segment.unordered(segment.atomics, cells, fenced)
            if does != "reduces":
                changes = (each for each in atomics if stores or each.extra & WRITES)
                self._report("mixed access", changes, site, segment, size)
            if stores:
                loads = segment.unordered(segment.loads, cells, known)
                self._report("read-write", loads, site, segment, size)
            if does == "reduces":
                extra = WRITES | SCOPES["gpu"]
                segment.note(segment.atomics, cells, queue.thread, time, site, extra)
            elif stores:
                segment.note_store(cells, queue.thread, time, site)
            else:
                self._unwritten(segment, cells, site, size)
                self._note_load(agent, segment, cells)
                segment.note(segment.loads, cells, queue.lanes, time, site)

    def _started(self, agent: ThreadsAgent, copy: AsyncAccess) -> AsyncAgent:
        """The queue of ``copy``, which knows what its thread did when it started it."""
        queue = agent.queues.get(copy.queue)
        if queue is None:
            key = "async", agent.number, copy.queue
            queue = self._queue(key, agent)
            queue.base, queue.time = int(queue.clock[queue.thread]), 0
            agent.queues[copy.queue] = queue
        if queue.time < copy.time:
            queue.time = copy.time
            components, time = queue.until(copy.time, reads_only=False)
            queue.clock[components] = time
            own = agent.released_by(copy.thread, all_threads=not self.rules.barriers)
            fenced = self._lengthened(own)
            if self.rules.proxies:
                bases, mirrors = self._components(Agent.ASYNC)
                fenced = fenced.copy()
                fenced[bases] = fenced[mirrors]
            queue.known = self._lengthened(own), fenced
        return queue

    def _queue(self, key: Any, agent: ThreadsAgent) -> AsyncAgent:
        found = self._agents.get(key)
        if found is None:
            found = AsyncAgent(len(self._agents), len(self._owners), agent.rank, agent.who)
            self._agents[key] = found
            self._owners += [found] * (found.BLOCKS * found.components)
        assert isinstance(found, AsyncAgent)
        return found

    def on_async_end(
        self, task: Task | None, queue: Any, time: int, threads: Any, *, reads_only: bool
    ) -> None:
        if task is None:
            return
        agent = self._agent(task)
        components, at = agent.queues[queue].until(time, reads_only=reads_only)

        def ended(clock: Any) -> Any:
            clock = self._lengthened(clock).copy()
            clock[components] = np.maximum(clock[components], at)
            return clock

        agent.change(threads, ended)

    def on_arrival(
        self,
        task: Task | None,
        mbarrier: int,
        threads: Iterable[int] = (),
        copies: tuple[Any, int] | None = None,
    ) -> None:
        if task is None:
            return
        agent = self._agent(task)
        told = agent.mbarriers.setdefault(mbarrier, [None, None])
        for thread in threads:
            own = agent.released_by(int(thread), all_threads=not self.rules.barriers)
            told[0] = joined(told[0], own)
            agent.has_released(np.array([thread]), all_threads=not self.rules.barriers)
        if copies is not None:
            components, time = agent.queues[copies[0]].until(copies[1], reads_only=False)
            clock = np.zeros(len(self._owners), np.int64)
            clock[components] = time
            told[0] = joined(told[0], clock)

    def on_phase(self, task: Task | None, mbarrier: int) -> None:
        if task is not None:
            told = self._agent(task).mbarriers.setdefault(mbarrier, [None, None])
            told[1] = told[0]

    def on_awaited(self, task: Task | None, mbarrier: int, threads: Any) -> None:
        if task is None:
            return
        agent = self._agent(task)
        _, done = agent.mbarriers.get(mbarrier, (None, None))
        if done is not None:
            agent.change(threads, lambda clock: joined(clock, done))
