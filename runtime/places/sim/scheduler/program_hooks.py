"""The scheduler's hooks of the interpreter, called at every memory access of a program.

Each access is a point where another task may go on. Stores may be delayed in buffers, and observers are
notified. The hooks detect polls, so a deadlock is found and not waited for. A poll that reads the same
values twice will read them again until memory changes, so its program does not run before that.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from interlace.runtime.core.accesses import Atomic, Handle, Lanes, Mask, Perform, threads_of
from interlace.runtime.core.errors import BlockedWait
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.places.sim.interpreter.session import active, active_addresses
from interlace.runtime.places.sim.scheduler.allocations import Allocations, Origin
from interlace.runtime.places.sim.scheduler.memory_check import BadAccess, MemoryCheck
from interlace.runtime.places.sim.scheduler.observer import Observer
from interlace.runtime.places.sim.scheduler.source_lines import polling, user_line
from interlace.runtime.places.sim.scheduler.store_buffers import StoreBuffers
from interlace.runtime.places.sim.scheduler.strategies import Strategy, Task

STALLED_POLLS = 20_000
VAIN_POLLS = 2500  # per task: polls that read the same as the last, by tasks that do little else
SMALL_READ = 64  # elements: the most that a program may read between two polls of a loop
TIRED = 1000  # points
SPINNING = 500  # plain loads without a change of memory; more of them count as polls
LONGEST_CIRCLE = 66  # reads: a poll of a slot per rank, and the reads around it
MORE_READS = 100  # by all programs woken in vain, before their reads count as polls again


class Read(NamedTuple):
    """A program's read: addresses, and their bytes."""

    addresses: bytes
    values: bytes


class ProgramHooks:
    """The half of a scheduler that is its session's :class:`interlace.runtime.core.accesses.Hooks`."""

    seed: int
    give_way: Callable[[], None]
    block: Callable[[Callable[[], bool], Callable[[], BlockedWait]], None]
    progress: Callable[[], None]
    give_up_on_polls: Callable[[], None]
    spawn_programs: Callable[[KernelLaunch, int], Callable[[], bool]]
    user_stream: Callable[[], Any] = staticmethod(lambda: None)
    """Returns the stream on which running user code enqueues, if it has streams."""

    def __init__(
        self,
        strategy: Strategy,
        observer: Observer | None,
        seed: int | None,
        block_polls: bool,
        on_bad_access: Callable[[Task, BadAccess], None] | None = None,
    ) -> None:
        """``seed``: the seed of store buffers; None for no buffers."""
        self.strategy = strategy
        self.observer = Observer() if observer is None else observer
        self.observed = observer is not None
        self.buffers = None if seed is None else StoreBuffers(seed, self.observer)
        self.block_polls = block_polls
        self.memory = Allocations()
        self._check = MemoryCheck(self.memory, on_bad_access)
        self.points = self.stalled = self.vain = 0
        self.woken = 1  # programs at a time, of those whose polls read nothing new
        self.long_step = False
        self._current: Task | None = None

    @property
    def current(self) -> Task:
        assert self._current is not None, "not inside a task"
        return self._current

    @property
    def inside(self) -> bool:
        return self._current is not None

    def load(self, pointers: Handle, mask: Mask, perform: Perform) -> Any:
        task = self._current
        if task is None:
            return perform()
        self._maybe_give_way(task)
        if self.buffers is not None:
            self.buffers.before_load(task, pointers)
        mask = self._check.allowed(task, pointers, mask, "loads", writes=False, atomic=False)
        result = perform(mask)
        task.loads += 1
        if task.program is not None and task.program.threads:
            if task.watched:
                task.seen.append(_read(pointers, mask, result))
        elif pointers.data.size > SMALL_READ:
            task.seen.clear()
        elif task.loads > SPINNING:
            result = self._suspend_poll(pointers, mask, result, partial(perform, mask))
        elif task.seen:
            task.seen.append(_read(pointers, mask, result))
        self.observer.on_load(task, pointers, mask)
        return result

    def store(self, pointers: Handle, value: object, mask: Mask, perform: Perform) -> Any:
        task = self._current
        if task is None:
            return perform()
        self._maybe_give_way(task)
        mask = self._check.allowed(task, pointers, mask, "stores", writes=True, atomic=False)
        if self.buffers is None or task.program is None:
            perform(mask)
        else:
            self.buffers.store(task, pointers, value, mask)
        self.progress()
        self.observer.on_store(task, pointers, mask)

    def atomic(self, atomic: Atomic, perform: Perform) -> Any:
        task = self._current
        if task is None:
            return perform()
        self.give_way()
        does, writes = f"{atomic.kind} ({atomic.sem}, {atomic.scope})", not atomic.reads_only
        pointers = atomic.pointers
        mask = self._check.allowed(task, pointers, atomic.mask, does, writes=writes, atomic=True)
        if mask is not atomic.mask:
            atomic = replace(atomic, mask=mask)
            perform = partial(perform, mask)
        if self.buffers is not None:
            self.buffers.before_load(task, pointers, newest=atomic.kind != "load")
            if atomic.releases:
                by_lanes, threads = atomic.by_lanes, threads_of(pointers)
                self.buffers.release(task, atomic.scope, each_thread=by_lanes, threads=threads)
            elif atomic.value is not None:
                self.buffers.store(task, pointers, atomic.value, atomic.mask, relaxed=True)
                self.progress()
                self.observer.on_atomic(task, atomic, atomic.value)
                return atomic.value
        result = perform()
        if atomic.reads_only or (atomic.compare is None and _is_unchanged(atomic, result)):
            result = self._suspend_poll(pointers, atomic.mask, result, perform)
        elif atomic.compare is not None and not _any(result.data == atomic.compare.data):
            # A compare-and-swap that did not swap has only read.
            result = self._suspend_poll(pointers, atomic.mask, result, perform, atomic.compare)
        else:
            self.progress()
        self.observer.on_atomic(task, atomic, result)
        return result

    def origin(self, address: int) -> Origin | None:
        """Return the memory that a program means by a number; see ``interpreter/session.py``."""
        allocation = self.memory.of_number(address, self.current.rank) if self.inside else None
        return None if allocation is None else Origin(allocation, address)

    def misplaced(self, address: int, align: int, count: int, does: str, memory: str) -> None:
        if self.inside:
            self._check.misplaced(self.current, address, align, count, does, memory)

    def left_open(
        self, kind: str, does: str, text: str, *, at: int | None = None, count: int = 1
    ) -> None:
        """Report an action whose result is undefined to the collector of findings; the program goes on."""
        if self.inside:
            task = self.current
            memory = "" if at is None else f"shared memory of rank {task.rank} {task.who}"
            self._check.note(task, BadAccess(kind, does, memory, 0, at or 0, count, text))

    def barrier(self, threads: Lanes = None) -> None:
        if not self.inside:
            return
        if self.buffers is not None:
            self.buffers.barrier(self.current, threads)
        self.observer.on_barrier(self.current, threads)

    def fence(self, sem: str, scope: str, threads: Lanes = None, *, puts: bool = True) -> None:
        if not self.inside:
            return
        if self.buffers is not None and sem != "acquire":
            self.buffers.release(self.current, scope, threads=threads)
            self.progress()
        self.observer.on_fence(self.current, sem, scope, threads, puts=puts)

    def arrival(self, barrier: int, threads: Any) -> None:
        """Release the stores of threads that arrive at a barrier at which other threads may wait."""
        if self.buffers is not None:
            self.buffers.release(self.current, "cta", threads=threads)
        self.observer.on_arrival(self.current, barrier, threads)

    def proxy_fence(self, threads: Lanes, *, alias: bool) -> None:
        if self.inside:
            self.tell("on_alias_fence" if alias else "on_proxy_fence", threads)

    def begin(self, base: int, nbytes: int) -> None:
        """Note the start of a program with distinguished threads, whose shared memory is at ``base``."""
        self.observer.on_shared_memory(self.current, base, nbytes)

    def shared(self, pointers: Handle, *, stores: bool) -> None:
        """Notify observers of a program's access to its shared memory; the scheduler ignores it."""
        tell = self.observer.on_store if stores else self.observer.on_load
        tell(self.current, pointers, None)

    def shared_atomic(self, atomic: Atomic, result: Handle) -> None:
        """Note that a program has changed its shared memory by an atomic."""
        if self.buffers is not None and atomic.releases:
            self.buffers.release(self.current, atomic.scope, threads=threads_of(atomic.pointers))
        self.observer.on_atomic(self.current, atomic, result)

    def tell(self, event: str, *arguments: object, **named: object) -> None:
        """Notify observers of an event of the running program's asynchronous accesses."""
        getattr(self.observer, event)(self.current, *arguments, **named)

    def asynchronous(
        self, pointers: Handle, mask: Mask, perform: Perform, *, value: object, does: str
    ) -> Any:
        """Do an asynchronous access, which may store ``value``, at its end; observers know of its start."""
        task, writes = self.current, does != "loads"
        mask = self._check.allowed(task, pointers, mask, does, writes=writes, atomic=False)
        if self.buffers is not None:
            self.buffers.before_load(task, pointers)
        result = None
        if does == "stores" and self.buffers is not None:
            self.buffers.store(task, pointers, value, mask)
        else:
            result = perform(mask)
        if writes:
            self.progress()
        return result

    def pause(self) -> None:
        if self.inside:
            self.give_way()

    def launch(
        self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], options: dict[str, Any]
    ) -> None:
        """Launch a kernel on the running task's stream; wait for its end if user code has no streams."""
        task = self.current
        name = kernel.__name__
        warps, stages = options.get("num_warps", 4), options.get("num_stages", 3)
        launch = KernelLaunch(kernel, grid, arguments, name, num_warps=warps, num_stages=stages)
        stream = self.user_stream()
        if stream is not None:
            stream.launch(launch)
            return

        def describe() -> BlockedWait:
            where = user_line(task)
            return BlockedWait(task.rank, task.who, f"the end of kernel {name}", where=where)

        ended = self.spawn_programs(launch, task.rank)
        if not ended():
            self.block(ended, describe)

    def _maybe_give_way(self, task: Task) -> None:
        if self.buffers is not None and self.buffers.sometimes():
            self.progress()
        if self.strategy.interrupts() or task.idled >= TIRED:
            self.give_way()
        else:
            self.points += 1
            task.idled += 1

    def tire(self) -> None:
        """Let other tasks go first after many points without a change: the task may wait for them."""
        task = self.current
        task.idled += 1
        if task.idled > TIRED:
            task.idled = 0
            self.long_step = True
            self.strategy.tires()

    def _suspend_poll(
        self, pointers: Handle, mask: Mask, result: Handle, perform: Perform, tries: Any = None
    ) -> Any:
        """Suspend the program if it is in a loop that has read the same values twice in a row.

        ``tries``: the value that a compare-and-swap expects; another try may succeed.
        """
        if not self.block_polls:
            return result
        task = self.current
        apart = task.program is not None and task.program.threads
        task.seen.append(_read(pointers, mask, result))
        self._look(task, task.seen[-1])
        circle = [] if apart else _circle(task.seen)
        if circle and task.program is not None:
            value = int(result.data.ravel()[0]) if result.data.size == 1 else None
            if not self._block_on_memory(task, dict.fromkeys(reversed(circle)), value):
                more = max(1, MORE_READS // self.woken)  # its loop may end by itself
                task.loads = min(task.loads, SPINNING - more)
            task.seen.clear()
            result = perform()
            if tries is not None and _any(result.data == tries.data):
                self.progress()
                return result
            task.seen.append(_read(pointers, mask, result))
        if not task.watched:
            del task.seen[: -2 * LONGEST_CIRCLE]
        # Polls that never repeat, because their addresses always differ, are counted instead.
        self.stalled += 1
        if self.stalled > STALLED_POLLS:
            self.give_up_on_polls()
        return result

    def _look(self, task: Task, read: Read) -> None:
        """Count polls that read nothing new, even if their program changes memory between two of them."""
        if task.known.get(read.addresses) == read.values:
            self.vain += task.changes != task.looked  # a task without changes is suspended instead
            task.busy, task.looked = 0, task.changes
            return
        self.vain = 0
        if len(task.known) > LONGEST_CIRCLE:
            task.known.clear()
        task.known[read.addresses] = read.values

    def spin(self, reads: Sequence[Read]) -> bool:
        """Suspend a program that waits in a loop; return whether one of its ``reads`` has changed since."""
        if self.inside and self.block_polls:
            return self._block_on_memory(self.current, reads, None)
        return True

    def _block_on_memory(self, task: Task, reads: Iterable[Read], seen: int | None) -> bool:
        # The values that were read, not the present ones: another process may have written meanwhile.
        cells: dict[tuple[int, bytes], None] = {}
        for read in reads:
            addresses = np.frombuffer(read.addresses, np.uint64).tolist()
            size = len(read.values) // max(1, len(addresses))
            for index, address in enumerate(addresses):
                cells[address, read.values[index * size : (index + 1) * size]] = None
        pieces: list[tuple[int, bytes]] = []  # adjacent words are compared together
        for address, value in sorted(cells):
            if pieces and pieces[-1][0] + len(pieces[-1][1]) == address:
                address, value = pieces[-1][0], pieces.pop()[1] + value
            pieces.append((address, value))

        def has_changed() -> bool:
            return any(ctypes.string_at(at, len(value)) != value for at, value in pieces)

        task.polls = True
        words = [address for address, _ in cells]
        if seen is not None:
            words = words[:1]  # ``seen`` is the value of this word
        elif len(cells) == 1:
            seen = int.from_bytes(pieces[0][1], "little", signed=True)
        values = [int.from_bytes(value, "little", signed=True) for _, value in cells]
        self.block(has_changed, lambda: polling(task, seen, words, self.memory, values))
        task.polls = False
        return has_changed()


def _any(these: Any) -> bool:
    return bool(np.count_nonzero(these))  # faster than any() for a few elements


def _is_unchanged(atomic: Atomic, before: Any) -> bool:
    """Return whether memory is unchanged: a test-and-set of a set flag, a maximum already stored."""
    read = _read(atomic.pointers, atomic.mask, before)
    addresses = np.frombuffer(read.addresses, np.uint64).tolist()
    if not addresses or len({*addresses}) > SMALL_READ:
        return False
    size = len(read.values) // len(addresses)
    now = {address: ctypes.string_at(address, size) for address in addresses}
    return b"".join(map(now.__getitem__, addresses)) == read.values


def _circle(seen: list[Read]) -> list[Read]:
    """Return the end of ``seen`` if it repeats the reads before it; otherwise []."""
    last = seen[-1]
    for length in range(1, min(len(seen) // 2, LONGEST_CIRCLE) + 1):
        if seen[-1 - length] == last and seen[-length:] == seen[-2 * length : -length]:
            return seen[-length:]
    return []


def _read(pointers: Handle, mask: Mask, result: Handle) -> Read:
    """Return the read of a load or a poll, without the elements that its mask left out."""
    addresses, values = active_addresses(pointers, mask), active(result.data, pointers, mask)
    return Read(np.ascontiguousarray(addresses).tobytes(), values.tobytes())
