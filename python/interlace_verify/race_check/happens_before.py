"""The race detector: vector clocks over everything that a simulated run does.

An *agent* is a program of a kernel, a stream, or the user code of a rank, which counts as its current
stream. A release passes on everything that its agent knows. It covers the agent's own lanes only up to
the last barrier, because Triton puts no ``bar.sync`` between a store and a release. These order accesses::

    program order                          of each component; between them, from a barrier on
    release -> acquire of the same slot    if each is within the other's scope; later read-modify-writes
                                           pass it on, and so do later atomic stores of the agent that
                                           released; other agents' atomic stores and plain stores end it
    fence, then a relaxed signal           as a release (and relaxed read, then fence: as an acquire),
                                           within the fence's scope, too
    NVSHMEM's quiet                        as a fence, also for threads that meet its thread in a barrier
    launch, end of a kernel                between the stream and all programs
    items of a stream, events              in their order
    allocation, ``interlace.barrier``      between all work before it and all after it, on all ranks
    host messages                          nothing: work on GPUs does not wait for them

Two accesses of the same bytes are a race if they are not ordered, at least one is a store, and not both are
atomic. The outcome of the schedule does not matter. To find the reason, the detector runs again without
one of the ``Rules``: if the race is gone, that rule is the reason.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from interlace.runtime.core.accesses import Atomic, Handle, Lanes, Mask, Numbers, threads_of
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.places.sim.interpreter.session import active, active_addresses
from interlace.runtime.places.sim.scheduler.source_lines import program_lines, task_lines
from interlace.runtime.places.sim.scheduler.strategies import Task
from interlace_verify.race_check.agents import LANES, ONE, SCOPES, SYS, Agent, Rules, join_clocks
from interlace_verify.race_check.collector import (
    Asked,
    Collector,
    PresentAccess,
    does_of,
    stream_atomic,
)
from interlace_verify.race_check.shadow import WRITES, Conflict, KnownTimes, byte_ranges

HandedOn = dict[tuple[Agent, int, int], Numbers]
"""The clocks that a word passes on, by the agent that released it, the scope, and the agent's thread."""


class Detector(Collector):
    def __init__(
        self,
        seed: int,
        rules: Rules | None = None,
        asked: Asked | None = None,
        step: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(seed, rules or Rules(), asked, step)
        self.launches: list[KernelLaunch] = []
        self._tasks: dict[Task, Agent] = {}
        self._forks: dict[Task, Numbers] = {}
        self._parents: dict[Task, Task] = {}
        self._events: dict[object, Numbers] = {}
        self._meetings: dict[object, Any] = {}
        self._streams: dict[tuple[int, str], int] = {}
        self._changes = 0  # events except those that only read words
        self._looks: dict[object, Any] = {}  # the last read of a word, by reader

    def _agent(self, task: Task) -> Agent:
        agent = self._tasks.get(task)
        if agent is None:
            key = ("host", task.rank) if task.owner is None else ("stream", task.owner)
            agent = self._tasks[task] = self._named(key, task.rank, task.who)
        self._acting = agent
        self._changes += 1
        return agent

    # -- order -------------------------------------------------------------------------------------

    def on_launch(self, task: Task, launch: KernelLaunch) -> None:
        agent = self._agent(task)
        self._forks[task] = self.mirrored(agent.hand_over(), agent.ASYNC, agent.ALIAS, agent.PUTS)
        if hasattr(launch.kernel, "fn"):  # not PTX
            self.launches.append(launch)
        for argument in launch.arguments.values():
            value = getattr(argument, "base", argument)  # the tensor of a descriptor
            if isinstance(value, torch.Tensor):
                self.know(value, task.rank)

    def on_program(self, task: Task, parent: Task) -> None:
        assert task.program is not None
        above = self._agent(parent)
        key = ("program", above.number, task.program.index)
        launch = f" of launch {task.number + 1}" if task.number else ""
        threads = task.program.threads
        agent = self._tasks[task] = self._named(key, task.rank, task.who + launch, threads)
        self._parents[task] = parent
        agent.begin(self._forks[parent])

    def on_program_end(self, task: Task) -> None:
        agent = self._tasks.pop(task, None)
        parent = self._parents.pop(task, None)
        if agent is None or parent is None:
            return
        self._agent(parent).learn(self.mirrored(agent.end(), agent.ALIAS, agent.PUTS))

    def on_record(self, task: Task, event: object) -> None:
        self._events[event] = self._agent(task).hand_over()

    def on_wait_event(self, task: Task, event: object) -> None:
        if event in self._events:
            self._agent(task).learn(self._events[event])

    def on_meeting(self, task: Task, meeting: Any, ranks: int) -> None:
        clock = self._agent(task).hand_over()
        self._meetings[meeting] = join_clocks(self._meetings.get(meeting), clock)

    def on_met(self, task: Task, meeting: Any) -> None:
        self._agent(task).learn(self._meetings[meeting])

    # -- memory ------------------------------------------------------------------------------------

    def new(self, task: Task, tensor: torch.Tensor, op: str, *, writes: bool = True) -> None:
        """Note that ``op`` allocated and wrote ``tensor``, unless it is known symmetric memory."""
        if not self._memory.is_symmetric(tensor.data_ptr()):
            self.know(tensor, task.rank, fresh=True)
            if writes:
                self.touch(task, tensor, op, stores=True)
            else:
                self.events += 1
                self._undefine(tensor)

    def on_load(self, task: Task, pointers: Handle, mask: Mask) -> None:
        self._plain(task, pointers, mask, stores=False)

    def on_store(self, task: Task, pointers: Handle, mask: Mask) -> None:
        self._plain(task, pointers, mask, stores=True)

    def _plain(self, task: Task, pointers: Handle, mask: Mask, *, stores: bool) -> None:
        addresses = active_addresses(pointers, mask)
        if not len(addresses):
            return
        agent, threads = self._agent(task), threads_of(pointers)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        does = "loads"
        if stores:
            puts = agent.putting[... if threads is None else threads].any()
            does = "puts" if puts else "stores"
        site = self._site(agent, does_of(does, pointers), program_lines())
        if threads is None:
            # one thread stores a scalar, and all threads load it
            thread = ONE if stores and pointers.data.size == 1 else LANES
            for segment, cells in self._memory.find(addresses, size):
                access = PresentAccess(agent, site, size, segment, cells, thread)
                self._access(access, stores=stores, pointers=pointers)
            return
        addresses, unchanged = pointers.data.ravel(), getattr(pointers, "unchanged", False)
        if stores and (bits := getattr(pointers, "stored", None)) is not None:
            self._of_one_instruction(site, addresses, threads, bits.ravel())
        over: set[tuple[int, int]] = set()
        if not getattr(pointers, "shared", False):
            over = agent.has_accessed(site, addresses, threads, stores=stores)

        def repeats(earlier: Conflict) -> bool:
            pair = (site, earlier.site) if stores else (earlier.site, site)
            again = pair in over or (unchanged and earlier.site == site)
            return again and self._owners[earlier.component] is agent

        for segment, lanes in self._memory.parts(addresses):
            cells, each = segment.cells_of(addresses[lanes], size)
            by = np.repeat(threads[lanes].astype(np.int64), each)
            access = PresentAccess(agent, site, size, segment, cells, by)
            self._access(access, stores=stores, pointers=pointers, repeats=repeats)

    def touch(self, task: Task, tensor: torch.Tensor, op: str, *, stores: bool) -> None:
        """Note that a torch operator of a stream or of user code read or wrote ``tensor``."""
        agent, size = self._agent(task), tensor.element_size()
        verb = "writes" if stores else "reads"
        site = self._site(agent, f"{verb} ({op})", task_lines(task))
        for low, nbytes in byte_ranges(tensor):
            segment = self._memory.at(low)
            if segment is not None and low + nbytes <= segment.end:
                cells = segment.range(low, low + nbytes)
                access = PresentAccess(agent, site, size, segment, cells, ONE)
                self._access(access, stores=stores)

    def _access(
        self,
        access: PresentAccess,
        *,
        stores: bool,
        pointers: Any = None,
        repeats: Callable[[Conflict], bool] = lambda conflict: False,
    ) -> None:
        """Check and note an access. If it ``repeats`` another one, the two do not conflict."""
        agent, segment, cells = access.agent, access.segment, access.cells
        multicast = self._by_multicast(pointers)
        known = self._known(agent, access.by)
        known.constant = access.site if getattr(pointers, "constant", False) else -1
        before = self._known(agent, access.by, multicast=True) if multicast else known
        self.events += 1
        earlier = segment.unordered_store(cells, before)
        conflicts = [each for each in earlier if not repeats(each)]
        self._report("write-write" if stores else "write-read", conflicts, access)
        all_atomics = segment.unordered(segment.atomics, cells, before, apart=True)
        atomics = [each for each in all_atomics if stores or each.extra & WRITES]
        atomics = [atomic for atomic in atomics if not self._has_observed(atomic, access)]
        self._note_polls(access, *([], []) if stores else (atomics, conflicts))
        self._report("mixed access", atomics, access)
        components, times = agent.first + access.actors, agent.own[0, access.actors]
        if stores:
            loads = segment.unordered(segment.loads, cells, known)
            self._report("read-write", (load for load in loads if not repeats(load)), access)
            puts = agent.PUTS * (agent.putting[access.actors] & self.rules.puts)
            mirror = (agent.ALIAS if multicast else puts) * agent.components
            if len(conflicts) == len(earlier):
                segment.note_store(cells, components + mirror, times, access.site)
            return
        if pointers is not None:
            self._unwritten(access)
            self._note_load(access)
        if getattr(pointers, "incoherent", False):
            launched = self._lengthened(agent.before)
            known_then = KnownTimes(launched, agent, self._owners, np.int64(-1))
            atomics_since = segment.unordered(segment.atomics, cells, known_then)
            written = (each for each in atomics_since if each.extra & WRITES)
            late = (*segment.unordered_store(cells, known_then), *written)
            self._report("stale load", late, access)
        segment.note(segment.loads, cells, components, times, access.site, known=known)

    # -- atomics -----------------------------------------------------------------------------------

    def on_atomic(self, task: Task, atomic: Atomic, result: Handle) -> None:
        addresses = active_addresses(atomic.pointers, atomic.mask)
        if not len(addresses):
            return
        changes, agent, lines = self._changes, self._agent(task), program_lines()
        if self.rules.ordered in lines[:1]:
            atomic = replace(atomic, sem="acq_rel")
        success = np.ones(len(addresses), bool)
        if atomic.compare is not None:
            shape = atomic.pointers.data.shape
            done = np.broadcast_to(result.data == atomic.compare.data, shape).ravel()
            success = done if len(done) == len(addresses) else success
        size = max(1, atomic.pointers.get_element_ty().primitive_bitwidth // 8)
        self.ordering.update(lines[:1])
        does = does_of(f"{atomic.kind} ({atomic.sem}, {atomic.scope})", atomic.pointers)
        threads = threads_of(atomic.pointers)
        if atomic.reads_only and not atomic.releases:
            self._changes = changes
            acting_threads = (
                (atomic.by_lanes, atomic.each_thread) if threads is None else threads.tobytes()
            )
            look = changes, lines, does, size, addresses.tobytes()
            all_addresses = {*addresses.tolist(), *(addresses + np.uint64(size - 1)).tolist()}
            words = {(agent, acting_threads, address >> 2) for address in all_addresses}
            if all(self._looks.get(word) == look for word in words):  # a poll without a new value
                self.events += len(addresses)
                return
            self._looks.update(dict.fromkeys(words, look))
        site = self._site(agent, does, lines)
        before = active(result.data, atomic.pointers, atomic.mask) if atomic.looks else None
        for position, address in enumerate(addresses.tolist()):
            thread = None if threads is None else int(threads[position])
            access = self._accessed(agent, atomic, address, size, site, thread)
            if before is not None:
                self._unwritten(access, before[position])
            self._one_atomic(access, address, atomic, bool(success[position]), thread)
        if atomic.releases or not self.rules.releases:
            agent.has_released(threads, all_threads=not self.rules.barriers)

    def on_signal(self, task: Task, slot: torch.Tensor, op: str) -> None:
        agent = self._agent(task)
        site = self._site(agent, f"publishes ({op})", task_lines(task))
        atomic = stream_atomic("xchg", "release")
        address, size = slot.data_ptr(), slot.element_size()
        access = self._accessed(agent, atomic, address, size, site)
        self._one_atomic(access, address, atomic, True)
        agent.has_released(all_threads=not self.rules.barriers)

    def on_signals_seen(self, task: Task, slots: torch.Tensor) -> None:
        agent = self._agent(task)
        site = self._site(agent, "waits", task_lines(task))
        atomic = stream_atomic("load", "acquire")
        size = slots.element_size()
        for index in range(slots.numel()):
            address = slots.data_ptr() + size * index
            access = self._accessed(agent, atomic, address, size, site)
            self._one_atomic(access, address, atomic, True)

    def _accessed(
        self,
        agent: Agent,
        atomic: Atomic,
        address: int,
        size: int,
        site: int,
        thread: int | None = None,
    ) -> PresentAccess:
        """Return the access of one element of ``atomic``; ``thread`` None: threads are not known."""
        segment, cells = self._at(address, size)
        if thread is None:
            several = atomic.pointers is not None and atomic.by_lanes
            return PresentAccess(agent, site, size, segment, cells, LANES if several else ONE)
        cells = np.arange(cells.start, cells.stop) if isinstance(cells, slice) else cells
        return PresentAccess(agent, site, size, segment, cells, np.full(len(cells), thread))

    def _one_atomic(
        self,
        access: PresentAccess,
        address: int,
        atomic: Atomic,
        success: bool,
        thread: int | None = None,
    ) -> None:
        self.events += 1
        agent, segment, cells, by = access.agent, access.segment, access.cells, access.by
        writes = success and not atomic.reads_only
        scope = SCOPES[atomic.scope] if self.rules.scopes else SYS
        multicast = self._by_multicast(atomic.pointers)
        known = self._known(agent, by)
        before = self._known(agent, by, multicast=True) if multicast else known
        plain: Iterable[Conflict] = segment.unordered_store(cells, before)
        for each in plain if atomic.looks else ():  # possibly a signal
            self._signals.note_poll(agent, self._owners[each.component], each.time, each.site)
        if writes:
            plain = [*plain, *segment.unordered(segment.loads, cells, known)]
        self._report("mixed access", plain, access)
        extra = scope | (WRITES if writes else 0)
        for conflict in segment.unordered(segment.atomics, cells, known):
            other, either = self._owners[conflict.component], extra | conflict.extra
            if either & WRITES and not self._reach(agent, scope, other, conflict.extra & 3):
                self._report("narrow scope", [conflict], access)
        word = address, access.size
        word_writes = segment.writes.setdefault(word, {})
        if atomic.kind != "store":
            strong = (
                (c, w)
                for c, w in word_writes.items()
                if self._reach(agent, scope, self._owners[c], w[1])
            )
            times = {component: time for component, (time, _) in strong}
            agent.observed[word, thread] = times
        actor = access.actors if thread is None else thread
        mirror = self._mirror(agent, actor, multicast=multicast, puts=writes)
        component, time = agent.first + actor + mirror, int(agent.own[0, actor])
        segment.note(segment.atomics, cells, component, time, access.site, extra, known)
        if writes:
            if atomic.kind == "store":
                word_writes.clear()
            word_writes[component] = time, scope
        self._signals.note(agent, word, access.site, writes=writes)
        messages = segment.messages.setdefault(word, {})
        self._receive(agent, messages, scope, atomic, ONE if thread is None else thread)
        if writes:
            if atomic.kind == "store":
                for each in [key for key in messages if key[0] is not agent or key[2] != actor]:
                    del messages[each]
            self._send(agent, messages, scope, atomic, actor)

    def _receive(
        self, agent: Agent, messages: HandedOn, scope: int, atomic: Atomic, thread: int
    ) -> None:
        if atomic.each_thread and not agent.threads:
            thread = LANES  # after a barrier all threads know what each has acquired
        for (sender, sent_scope, _), clock in messages.items():
            if not self._reach(agent, scope, sender, sent_scope):
                continue
            if atomic.acquires or not self.rules.acquires:
                agent.acquire(thread, clock)
                if not self.rules.barriers_after:
                    agent.learn(clock)
            else:
                agent.read_without_acquire(thread, sender, clock)

    def _send(
        self, agent: Agent, messages: HandedOn, scope: int, atomic: Atomic, thread: int
    ) -> None:
        sent = agent.fenced(thread)
        if atomic.releases or not self.rules.releases:
            released_clock = agent.released_by(thread, all_threads=not self.rules.barriers)
            sent = {scope: self.mirrored(released_clock, agent.PUTS)}
        for sent_scope, clock in sent.items():
            key = (agent, min(scope, sent_scope), thread)
            messages[key] = join_clocks(messages.get(key), clock)

    def on_barrier(self, task: Task, threads: Lanes = None) -> None:
        if self.rules.ignored is not None and self.rules.ignored in program_lines()[:1]:
            return
        agent = self._agent(task)
        agent.barrier(threads)
        if agent.threads:
            self.barriers.update(program_lines()[:1])
