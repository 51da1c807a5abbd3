"""Agents of a run and their vector clocks: what each one knows and how far its atomics reach.

Also the log of signals: which words agents have written, and which agents have read them. Two accesses that
are not ordered often have a signal between them that should order them; the finding names this signal.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from interlace.runtime.core.accesses import Lanes, Numbers
from interlace.runtime.core.errors import SourceText

SCOPES = {"cta": 0, "gpu": 1, "sys": 2}
SYS = SCOPES["sys"]
LANES, ONE = 0, 1  # the components of an agent whose threads are not known
Times = dict[int, int]  # the time of each component


@dataclass(frozen=True)
class Rules:
    """The rules that hold. The detector makes an assumption for each rule that is off.

    ``barriers``: every release has a barrier before it; ``barriers_after``: every wait has one after it.
    ``puts``: every signal covers all puts. ``releases``, ``acquires``, ``scopes``: every atomic releases,
    acquires, has scope sys. ``proxies``: no access needs a proxy fence. Two rules are about one line:
    ``ignored``: its barriers do not count; ``ordered``: its atomics acquire and release.
    """

    barriers: bool = True
    barriers_after: bool = True
    puts: bool = True
    releases: bool = True
    acquires: bool = True
    scopes: bool = True
    proxies: bool = True
    ignored: SourceText | None = None
    ordered: SourceText | None = None


class Agent:
    """An actor of a run, with a component of all clocks for each of its ``threads``.

    If its threads are not known (0), it has two components: LANES for accesses by all threads, and ONE for
    the thread that does scalars and atomics, and for streams and user code. They know the same.

    ``clock``: what all threads know. Its own components, from ``first`` on, hold the time before the last
    barrier. ``own``: the present time of each component, then its times in the mirrors. ``putting``:
    whether a thread's stores are puts. These are by thread: ``acquired``, the clock that it alone knows,
    and ``waiting``, clocks that it has read without acquiring, by the agent that released them. ``fences``
    are clocks that it has released with a fence, by scope. ``arrivals`` had arrived at a quiet of it or of
    a thread that it met. ``mbarriers``, by address: the clocks of arrivals in the present phase, and the
    clock that a wait for the previous phase learns. ``queues``: asynchronous accesses, by name.

    Each agent has its components four times. The second block is a *mirror*: the part of a component's time
    that is also known to be ordered before accesses of the async proxy. Only a proxy fence raises it. The
    third block is for accesses by another address of the same memory: a multicast address or the ordinary
    one. A store by a multicast address is noted there, so that an access after it by the ordinary address
    needs a ``fence.proxy.alias`` between the two. The fourth block is for puts, which are noted there: any
    fence or release delivers them, but the signal of a later put does not.
    """

    BLOCKS = 4
    ASYNC, ALIAS, PUTS = range(1, BLOCKS)

    def __init__(self, number: int, first: int, rank: int, who: str, threads: int = 0) -> None:
        self.number, self.first, self.rank, self.who = number, first, rank, who
        self.threads, self.components = threads, threads or 2
        self.clock: Numbers = np.zeros(first + self.BLOCKS * self.components, np.int64)
        self.own: Numbers = np.zeros((self.BLOCKS, self.components), np.int64)
        self.own[0] = 1
        self.mirrors = False  # whether any time is in a mirror
        self.putting = np.zeros(self.components, np.bool_)
        self.ends: list[int] = []  # the ends of its launches
        self.observed: dict[Any, Times] = {}  # by word, the writes whose value it has read
        self._forget(self.clock)

    def _forget(self, known: Numbers) -> None:
        self.before = known  # the clock before the program
        self.acquired: dict[int, Numbers] = {}
        self.waiting: dict[int, dict[Agent, Numbers]] = {}
        self.fences: dict[int, dict[int, Numbers]] = {}
        self.arrivals: dict[int, Numbers] = {}
        self.loaded: dict[int, list[Any]] = {}
        self.over: set[tuple[int, int]] = set()
        self.mbarriers: dict[int, list[object]] = {}
        self.queues: dict[object, AsyncAgent] = {}

    def owns(self, component: Any) -> Any:
        return (component >= self.first) & (component < self.first + self.components)

    def acting(self, threads: Lanes) -> list[int]:
        """Return the threads that fence or release if ``threads`` do; None: they are not known."""
        return [ONE] if threads is None else threads.tolist()

    def _whose(self, thread: int) -> int:
        """Return the thread that has the fences and the waits of ``thread``."""
        return thread if self.threads else ONE

    def begin(self, known: Numbers) -> None:
        """Begin a program of a launch, which knows everything before the launch."""
        self.learn(known)
        self._forget(known)
        self.barrier()

    def end(self) -> Numbers:
        """End the program and return the clock that an agent that waits for it learns."""
        for each in self.waiting.values():
            for clock in each.values():
                self.learn(clock)
        for queue in self.queues.values():
            self.learn(queue.clock)
        self.barrier()
        self.ends.append(int(self.clock[self.first]))
        return self.clock

    def had_ended(self, component: int, time: int, known: Numbers) -> bool:
        """Return whether ``known`` has the end of the launch in which ``component`` acted at ``time``."""
        if not self.owns(component) or component >= len(known):
            return False
        return any(time <= end <= known[component] for end in self.ends)

    def has_observed(self, word: tuple[int, int], thread: int | None) -> Times:
        return self.observed.get((word, None), {}) | self.observed.get((word, thread), {})

    def learn(self, other: Numbers) -> None:
        self.clock = join_clocks(self.clock, other)

    def now(self) -> Numbers:
        """Return the time of each component; of known threads, the latest of all."""
        times: Numbers = self.own[0].copy()
        if self.threads:
            times[:] = times.max()
        return times

    def barrier(self, threads: Lanes = None) -> None:
        """Note a barrier of all threads or of ``threads``, which then all have the time of the latest."""
        times, lanes = self.own[0], slice(None) if threads is None else threads
        self._hand_on(range(self.components) if threads is None else threads.tolist())
        times[lanes] = times[lanes].max()
        if threads is not None and len(threads) < self.components:
            known = self._put_own(self._known_to(threads), threads)
            self.acquired.update(dict.fromkeys(threads.tolist(), known))
        else:
            self.loaded.clear()
            self.observed = {(word, None): writes for (word, _), writes in self.observed.items()}
            self.clock = self._put_own(self._known_to(self.acquired), slice(None))
            self.acquired.clear()
        times[lanes] += 1

    def quiet(self, threads: Lanes) -> None:
        """Note that stores of ``threads`` have arrived; signals after a barrier pass this on."""
        for thread in self.acting(threads):
            self.arrivals[thread] = self.released_by(thread, all_threads=threads is None)

    def _hand_on(self, threads: Iterable[int]) -> None:
        """Give each of ``threads``, which meet, what has arrived of the stores of all of them."""
        known, clocks = None, [self.arrivals[each] for each in threads if each in self.arrivals]
        for clock in {id(each): each for each in clocks}.values():
            known = join_clocks(known, clock)
        if known is None:
            return
        for thread in threads:
            self.arrivals[thread] = known
            self.fence(thread, SYS, known)

    def fenced(self, thread: int) -> dict[int, Numbers]:
        """Return the clocks that a relaxed signal of ``thread`` releases, by scope."""
        return self.fences.get(self._whose(thread), {SYS: self.before})

    def fence(self, thread: int, scope: int, clock: Numbers) -> None:
        """Let later relaxed signals of ``thread`` release ``clock``, within ``scope``."""
        fences = self.fences.setdefault(thread, {SYS: self.before})
        fences[scope] = join_clocks(fences.get(scope), clock)

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
            known = join_clocks(known, clock)
        return known

    def _put_own(self, clock: Numbers, threads: Any) -> Numbers:
        """Add the present times of ``threads`` to ``clock``; fences of others may have raised it."""
        end = self.first + self.own.size
        own_times = clock[self.first : end].reshape(self.own.shape)
        own_times[:, threads] = np.maximum(own_times[:, threads], self.own[:, threads])
        return clock

    def released_by(self, thread: int, *, all_threads: bool) -> Numbers:
        """Return the clock that ``thread`` releases: other threads' accesses before the last barrier.

        If several threads whose numbers are not known release (LANES), each covers only its own accesses.
        """
        covered: Any = [] if thread == LANES and not self.threads else thread
        known = join_clocks(self.acquired.get(thread), self.clock).copy()
        return self._put_own(known, slice(None) if all_threads else covered)

    def has_released(self, threads: Lanes = None, *, all_threads: bool) -> None:
        """Advance the times of ``threads``, because the release does not cover later accesses."""
        self.own[0, slice(None) if all_threads else self.acting(threads)] += 1

    def hand_over(self) -> Numbers:
        """Return what it knows and did, for an agent that begins or goes on after this point."""
        clock = self.released_by(ONE, all_threads=True)
        self.has_released(all_threads=True)
        return clock

    def acquire(self, thread: int, clock: Numbers) -> None:
        if thread == ONE and not self.threads:
            self.learn(clock)
        else:
            self.acquired[thread] = join_clocks(self.acquired.get(thread), clock)

    def read_without_acquire(self, thread: int, sender: "Agent", clock: Numbers) -> None:
        """Note a clock that ``thread`` acquires if it fences later."""
        waiting = self.waiting.setdefault(self._whose(thread), {})
        waiting[sender] = join_clocks(waiting.get(sender), clock)

    def order(self, block: int, threads: Lanes) -> None:
        """Note in a mirror that accesses of ``threads`` up to now are ordered as it says."""
        lanes = slice(None) if threads is None else threads
        self.own[block, lanes] = self.own[0, lanes]
        self.mirrors = True

    def change(self, threads: Lanes, changed: Callable[[Numbers], Numbers]) -> None:
        """Replace the clock that each of ``threads`` knows by ``changed(clock)``."""
        if threads is None:
            self.clock = changed(self.clock)
            return
        changed_clocks: dict[int, Numbers] = {}
        for thread in threads.tolist():
            known = self.acquired.get(thread)
            if id(known) not in changed_clocks:
                changed_clocks[id(known)] = changed(join_clocks(known, self.clock).copy())
            self.acquired[thread] = changed_clocks[id(known)]


class AsyncAgent(Agent):
    """Asynchronous accesses that end one after another. The order of their starts orders nothing.

    LANES is the component of reads, ONE the component of writes. ``known``: what the present access comes
    after, and the part of it that also holds for the async proxy. ``time``: its number.
    """

    base = time = 0
    known: Any = None

    def owns(self, component: Any) -> Any:
        return component < 0

    def until(self, time: int, *, reads_only: bool) -> tuple[list[int], int]:
        """Return (components, time) of all accesses up to the one with number ``time``."""
        owned = [self.first] if reads_only else [self.first, self.first + ONE]
        return [*owned, *(each + self.components for each in owned)], self.base + time


def join_clocks(one: Numbers | None, other: Numbers) -> Numbers:
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


class Seen(NamedTuple):
    """A word, written at one site at ``time`` and read at another. ``known``: the writer's clock then."""

    address: int
    size: int
    written: int
    seen: int
    time: Numbers
    known: Numbers


class SignalLog:
    """The last write of each agent to each word by an atomic, and the last read of it by each other."""

    def __init__(self) -> None:
        self._written: dict[int, dict[int, tuple[int, Numbers, Any]]] = {}
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
            written = seen.time[(component - first.first) % first.components]
            return seen if time <= written else None
        read_words = (each for (reader, _), each in self._seen.items() if reader == second.number)
        behind = (e for e in read_words if component < len(e.known) and time <= e.known[component])
        return next(behind, None)

    def writers(self, address: int) -> int:
        return len(self._written[address])
