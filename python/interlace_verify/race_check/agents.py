"""Agents of a run and their vector clocks: what each one knows and how far its atomics reach.

Also the log of signals: which words agents have written, and which agents have read them. Two accesses that
are not ordered often have a signal between them that should order them; the finding names this signal.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from interlace.runtime.core.accesses import Lanes, Numbers

SCOPES = {"cta": 0, "gpu": 1, "sys": 2}
SYS = SCOPES["sys"]
Pending = dict["Agent", Numbers]
Times = dict[int, int]  # the time of each component


@dataclass(frozen=True)
class Rules:
    """The rules that hold. The detector makes an assumption for each rule that is off.

    ``barriers``: every release has a barrier before it; ``barriers_after``: every wait has one after it.
    ``puts``: every signal covers all puts. ``releases``, ``acquires``, ``scopes``: every atomic releases,
    acquires, has scope sys. ``proxies``: no access needs a proxy fence.
    """

    barriers: bool = True
    barriers_after: bool = True
    puts: bool = True
    releases: bool = True
    acquires: bool = True
    scopes: bool = True
    proxies: bool = True


class Agent:
    """An actor of a run. ``clock`` is what it knows of every component's time; its own start at ``first``.

    ``pending``: clocks that it has read without acquiring, by the agent that released them. ``arrived``:
    what had arrived everywhere at its last quiet.

    Each agent has its components four times. The second block is a *mirror*: the part of a component's time
    that is also known to be ordered before accesses of the async proxy. Only a proxy fence raises it. The
    third block is for accesses by another address of the same memory: a multicast address or the ordinary
    one. A store by a multicast address is noted there, so that an access after it by the ordinary address
    needs a ``fence.proxy.alias`` between the two. The fourth block is for puts, which are noted there: any
    fence or release delivers them, but the signal of a later put does not.
    """

    components = 2
    BLOCKS = 4
    ASYNC, ALIAS, PUTS = range(1, BLOCKS)

    def __init__(self, number: int, first: int, rank: int, who: str) -> None:
        self.number, self.first, self.rank, self.who = number, first, rank, who
        self.lanes, self.thread = first, first + 1
        self.clock: Numbers = np.zeros(first + self.BLOCKS * self.components, np.int64)
        self.clock[self.lanes] = self.clock[self.thread] = 1
        self.barred = [0, 0]
        self.putting: Any = False
        self.before: Numbers = self.clock  # the clock before the program
        self.fenced: dict[int, Numbers] = {}
        self.pending: Pending = {}
        self.for_lanes: Numbers | None = None
        self.arrived: Numbers | None = None
        self.ends: list[tuple[int, int]] = []  # the ends of its launches, in both components
        self.observed: dict[Any, Times] = {}  # by word, the writes whose value it has read

    def owns(self, component: Any) -> Any:
        return (component >= self.first) & (component < self.first + self.components)

    def begin(self, known: Numbers) -> None:
        """Begin a program of a launch, which knows everything before the launch."""
        self.learn(known)
        self.barred = [int(self.clock[self.lanes]), int(self.clock[self.thread])]
        self.tick()
        self.before, self.fenced = known, {SYS: known}
        self.pending, self.for_lanes, self.arrived = {}, None, None

    def end(self) -> Numbers:
        """End the program and return the clock that an agent that waits for it learns."""
        for late in (*self.pending.values(), self.for_lanes):
            if late is not None:
                self.learn(late)
        self.tick()  # an agent that knows this time knows the end
        self._has_ended()
        clock: Numbers = self.clock.copy()
        self.tick()
        return clock

    def _has_ended(self) -> None:
        self.ends.append((int(self.clock[self.lanes]), int(self.clock[self.thread])))

    def had_ended(self, component: int, time: int, known: Numbers) -> bool:
        """Return whether ``known`` has the end of the launch in which ``component`` acted at ``time``."""
        if not self.owns(component) or component >= len(known):
            return False
        which = int(component == self.thread)
        return any(time <= each[which] <= known[component] for each in self.ends)

    def observe(self, word: tuple[int, int], thread: int | None, writes: Times) -> None:
        """Note that the agent or one ``thread`` of it has read the value of ``word`` after ``writes``."""
        self.observed[word, thread] = writes

    def has_observed(self, word: tuple[int, int], thread: int | None) -> Times:
        return self.observed.get((word, None), {}) | self.observed.get((word, thread), {})

    def learn(self, other: Numbers) -> None:
        self.clock = joined(self.clock, other)

    def now(self) -> tuple[int, int]:
        """Return the time of the lanes and the time of the one thread."""
        return int(self.clock[self.lanes]), int(self.clock[self.thread])

    def tick(self) -> None:
        self.clock[self.lanes] += 1
        self.clock[self.thread] += 1

    def released(self, *, all_threads: bool, each_thread: bool) -> Numbers:
        """Return the clock that a release passes on: its own lanes up to the last barrier, or all lanes.

        ``each_thread``: every thread releases, and a release covers only its own thread's scalars.
        """
        clock: Numbers = self.clock.copy()
        if not all_threads:
            clock[self.lanes] = self.barred[0]
            for block in (self.ALIAS, self.PUTS):
                mirror = self.lanes + block * self.components
                clock[mirror] = min(clock[mirror], self.barred[0])
            if each_thread:
                clock[self.thread] = self.barred[1]
        return clock

    def has_released(self, threads: Lanes = None, *, all_threads: bool) -> None:
        """Advance the time, because the release does not cover later accesses."""
        self.clock[self.thread] += 1
        if all_threads:
            self.clock[self.lanes] += 1

    def barrier(self) -> None:
        """Note a barrier: each thread knows what the others did and acquired."""
        self.barred = [int(self.clock[self.lanes]), int(self.clock[self.thread])]
        if self.for_lanes is not None:
            self.learn(self.for_lanes)
            self.for_lanes = None
        if self.arrived is not None:
            self.fenced[SYS] = joined(self.fenced.get(SYS), self.arrived)
        self.tick()

    def quiet(self, _: Any) -> None:
        """Note that all stores of all threads have arrived; signals after a barrier pass this on."""
        self.arrived = self.clock.copy()


class ThreadsAgent(Agent):
    """A program whose threads are known: it has one component for each thread.

    ``clock``: what all threads know since the last barrier. Its own components hold the time before it.
    ``times``: the present time of every thread. ``fenced_times``, ``aliased_times`` and
    ``delivered_times``: the time of a thread's last order of the kind of each mirror. ``putting``: whether
    a thread's stores are puts. These are by thread: ``acquired``, the clock that it alone knows, and
    ``waiting``, clocks that it has read without acquiring. ``fences`` are clocks that it has released with
    a fence, by scope. ``arrivals`` had arrived at a quiet of it or of a thread that it met. ``mbarriers``,
    by address: the clocks of arrivals in the present phase, and the clock that a wait for the previous
    phase learns. ``queues``: asynchronous accesses, by name.
    """

    def __init__(self, number: int, first: int, rank: int, who: str, threads: int) -> None:
        self.components = threads
        super().__init__(number, first, rank, who)
        self.times = np.ones(threads, np.int64)
        self.fenced_times = np.zeros(threads, np.int64)
        self.aliased_times = np.zeros(threads, np.int64)
        self.delivered_times = np.zeros(threads, np.int64)
        self.putting = np.zeros(threads, np.bool_)

    def begin(self, known: Numbers) -> None:
        self.learn(known)
        self.acquired: dict[int, Numbers] = {}
        self.waiting: dict[int, Pending] = {}
        self.fences: dict[int, dict[int, Numbers]] = {}
        self.arrivals: dict[int, Numbers] = {}
        self.loaded: dict[int, list[Any]] = {}
        self.over: set[tuple[int, int]] = set()
        self.mbarriers: dict[int, list[object]] = {}
        self.queues: dict[object, AsyncAgent] = {}
        self.before = known
        self.barrier()

    def now(self) -> tuple[int, int]:
        latest = int(self.times.max())
        return latest, latest

    def end(self) -> Any:
        waited = [clock for each in self.waiting.values() for clock in each.values()]
        late = [*waited, *(each.clock for each in self.queues.values())]
        for clock in late:
            self.learn(clock)
        self.barrier()
        self._has_ended()
        return self.clock.copy()

    def barrier(self, threads: Lanes = None) -> None:
        """Note a barrier of all threads or of ``threads``, which then all have the time of the latest.

        A mark of several threads has the time of one of them, which is compared with the others' times.
        """
        those = slice(None) if threads is None else threads
        self._hand_on(range(self.components) if threads is None else threads.tolist())
        self.times[those] = self.times[those].max()
        if threads is not None and len(threads) < self.components:
            known = self._put_own(self._known_to(threads), threads)
            self.acquired.update(dict.fromkeys(threads.tolist(), known))
            self.times[threads] += 1
            return
        self.loaded.clear()
        self.observed = {(word, None): writes for (word, _), writes in self.observed.items()}
        self.clock = self._put_own(self._known_to(self.acquired), slice(None))
        self.acquired.clear()
        self.times = np.full(self.components, self.times.max() + 1)

    def quiet(self, threads: Numbers) -> None:
        for thread in threads.tolist():
            self.arrivals[thread] = self.released_by(thread, all_threads=False)

    def _hand_on(self, threads: Iterable[int]) -> None:
        """Give each of ``threads``, which meet, what has arrived of the stores of all of them."""
        known, told = None, [self.arrivals[each] for each in threads if each in self.arrivals]
        for clock in {id(each): each for each in told}.values():
            known = joined(known, clock)
        if known is None:
            return
        for thread in threads:
            self.arrivals[thread] = known
            fences = self.fences.setdefault(thread, {SYS: self.before})
            fences[SYS] = joined(fences.get(SYS), known)

    def has_accessed(
        self, site: int, addresses: Numbers, threads: Numbers, *, stores: bool
    ) -> set[tuple[int, int]]:
        """Return pairs (site of a store, site of a load) that one thread has done there, the load first.

        If a block has fewer elements than a program has threads, Triton lets all threads load. One of the
        threads with the same element stores; the loads of the others are not used. In shared memory Triton
        puts a barrier between the two.
        """
        if not stores:
            self.loaded.setdefault(site, []).append((addresses, threads))
            return self.over
        for load, accesses in self.loaded.items():
            if (pair := (site, load)) not in self.over:
                accesses[:] = [tuple(map(np.concatenate, zip(*accesses, strict=True)))]
                ((loaded, by),) = accesses
                if ((loaded == addresses[0]) & (by == threads[0])).any():
                    self.over.add(pair)
        return self.over

    def _known_to(self, threads: Iterable[int]) -> Numbers:
        """Return what at least one of ``threads`` knows of others."""
        found = {
            id(clock): clock for t in threads if (clock := self.acquired.get(int(t))) is not None
        }
        known: Numbers = self.clock.copy()
        for clock in found.values():
            known = joined(known, clock)
        return known

    def _put_own(self, clock: Numbers, threads: Numbers | slice | int) -> Numbers:
        every = self.times, self.fenced_times, self.aliased_times, self.delivered_times
        for block, times in enumerate(every):
            own = clock[self.first + block * self.components :][: self.components]
            own[threads] = np.maximum(
                own[threads], times[threads]
            )  # fences of other threads may have raised it
        return clock

    def known_by(self, thread: int) -> Numbers:
        return joined(self.acquired.get(thread), self.clock)

    def released_by(self, thread: int, *, all_threads: bool) -> Numbers:
        """Return the clock that ``thread`` releases: other threads' accesses before the last barrier."""
        return self._put_own(self.known_by(thread).copy(), slice(None) if all_threads else thread)

    def has_released(self, threads: Lanes = None, *, all_threads: bool) -> None:
        """Advance the times of ``threads``, because the release does not cover later accesses."""
        self.times[slice(None) if all_threads else threads] += 1

    def acquire(self, thread: int, clock: Numbers) -> None:
        self.acquired[thread] = joined(self.acquired.get(thread), clock)

    def change(self, threads: Numbers, changed: Callable[[Numbers], Numbers]) -> None:
        """Replace the clock that each of ``threads`` knows by ``changed(clock)``."""
        made: dict[int, Numbers] = {}
        for thread in threads.tolist():
            known = self.acquired.get(thread)
            if id(known) not in made:
                made[id(known)] = changed(joined(known, self.clock).copy())
            self.acquired[thread] = made[id(known)]


class AsyncAgent(Agent):
    """Asynchronous accesses that end one after another. The order of their starts orders nothing.

    ``lanes`` is the component of reads, ``thread`` the component of writes. ``known``: what the present
    access comes after, and the part of it that also holds for the async proxy. ``time``: its number.
    """

    base = time = 0
    known: Any = None

    def owns(self, component: Any) -> Any:
        return component < 0

    def until(self, time: int, *, reads_only: bool) -> tuple[list[int], int]:
        """Return (components, time) of all accesses up to the one with number ``time``."""
        owned = [self.lanes] if reads_only else [self.lanes, self.thread]
        return [*owned, *(each + self.components for each in owned)], self.base + time


def joined(one: Numbers | None, other: Numbers) -> Numbers:
    """Return the componentwise maximum. Clocks grow as agents appear. ``one`` None: no clock yet."""
    if one is None:
        return other
    if len(one) < len(other):
        one, other = other, one
    result: Numbers = one.copy()
    np.maximum(result[: len(other)], other, out=result[: len(other)])
    return result


def reaches(scope: int, agent: Agent, other: Agent) -> bool:
    """Return whether ``other`` is within ``scope`` of ``agent``."""
    if scope == SYS or agent is other:
        return True
    return scope == SCOPES["gpu"] and agent.rank == other.rank


def fenced_for(agent: Agent, scope: int, pending: Pending) -> list[Numbers]:
    """Remove and return the pending clocks that a fence of ``agent`` acquires: senders in its scope."""
    return [pending.pop(sender) for sender in list(pending) if reaches(scope, agent, sender)]


class Seen(NamedTuple):
    """A word at ``address``, written at one site and read at another.

    ``time``: the writer's time at the write; ``known``: the writer's clock then.
    """

    address: int
    size: int
    written: int
    seen: int
    time: tuple[int, int]
    known: Numbers

    def is_behind(self, component: int, time: int) -> bool:
        """Return whether the writer, a third agent, knew what ``component`` did at ``time``."""
        return component < len(self.known) and time <= self.known[component]


class SignalLog:
    """The last write of each agent to each word by an atomic, and the last read of it by each other."""

    def __init__(self) -> None:
        self._written: dict[int, dict[int, tuple[int, tuple[int, int], Any]]] = {}
        self._seen: dict[tuple[int, int], Seen] = {}
        self._by_rank: dict[tuple[int, int], Seen] = {}
        self._polled: dict[tuple[int, int], tuple[int, int]] = {}

    def note(self, agent: Agent, word: tuple[int, int], site: int, *, writes: bool) -> None:
        """Note that ``agent`` has read, and perhaps written, ``word``, given as its address and size."""
        address, size = word
        by_writer = self._written.setdefault(address, {})
        for writer, written in by_writer.items():
            if writer != agent.number:
                seen = Seen(address, size, written[0], site, *written[1:])
                self._seen[agent.number, writer] = self._by_rank[agent.rank, writer] = seen
        if writes:
            by_writer[agent.number] = site, agent.now(), agent.clock.copy()

    def note_poll(self, agent: Agent, writer: Agent, time: int, site: int) -> None:
        """Note that ``agent`` has read, unordered, a word that ``writer`` wrote at ``time``."""
        self._polled[agent.number, writer.number] = site, time

    def polled(self, first: Agent, time: int, second: Agent) -> int | None:
        """Return the site of such a read by ``second`` of a word that ``first`` wrote after its access."""
        site, written = self._polled.get((second.number, first.number), (None, 0))
        return site if time <= written else None

    def between(self, first: Agent, component: int, time: int, second: Agent) -> Seen | None:
        """Return the last signal that ``first`` wrote after its access at ``time`` and ``second`` has read.

        Another program of the rank of ``second`` may have read it instead, while ``second`` waited for that
        program. Or an agent may have written it that comes after ``first``, as a kernel after its stream.
        """
        by_rank = self._by_rank.get((second.rank, first.number))
        seen = self._seen.get((second.number, first.number), by_rank)
        if first is second:
            return None
        if seen is not None:
            lanes, thread = seen.time
            return seen if time <= (thread if component == first.thread else lanes) else None
        others = (each for (reader, _), each in self._seen.items() if reader == second.number)
        return next((each for each in others if each.is_behind(component, time)), None)

    def writers(self, address: int) -> int:
        """Return the number of agents that have written the word."""
        return len(self._written[address])
