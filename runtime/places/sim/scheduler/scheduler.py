"""The seeded scheduler: programs, streams and user code as coroutines of one thread.

A *task* is a greenlet: one program of a kernel, one stream that works through its queue, or the host code
of one rank. Tasks yield before and after every atomic, and sometimes at loads and stores. The next task is
drawn from a seeded generator. So a seed is a schedule, and the same seed gives the same schedule again:
neither clocks nor threads influence it.

A task may *block* on a condition. The scheduler detects polls: if a read-only atomic returns the same value
twice in a row, the program is spinning, and does not run again until memory changes. So if no task can run,
none ever will: that is a deadlock. It is found at once and reported with everything that is known about
every wait. In a place with other processes it only means that this process has to wait; the ``idle`` hook
then decides how, and for how long.
"""

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from interlace.runtime.core import errors
from interlace.runtime.core.launch import KernelLaunch, leaves
from interlace.runtime.numerics.reductions import UsualMode
from interlace.runtime.places.sim.interpreter import session
from interlace.runtime.places.sim.scheduler import recording, torch_state
from interlace.runtime.places.sim.scheduler.allocations import addresses_told
from interlace.runtime.places.sim.scheduler.memory_check import BadAccess
from interlace.runtime.places.sim.scheduler.observer import Observer
from interlace.runtime.places.sim.scheduler.program_hooks import (
    LONGEST_CIRCLE,
    VAIN_POLLS,
    ProgramHooks,
)
from interlace.runtime.places.sim.scheduler.source_lines import (
    LAUNCHED,
    at_lines,
    polling,
    program_line,
    raised_in,
    with_lines,
)
from interlace.runtime.places.sim.scheduler.strategies import (
    Program,
    Random,
    ScheduleSegment,
    Strategy,
    Task,
)

try:
    import greenlet
except ImportError:  # compiled kernels do not need it
    greenlet = None

GRACE = 1.0  # seconds after the timeout, for the scheduler to notice it by itself
QUIET_SECONDS = 20.0  # without an access: from then on, a checked program counts as endless
LAST_TRIES = 100  # polls that cannot succeed, before they are called a deadlock


Idle = Callable[[errors.BlockedWait], None]
Programs = Callable[[KernelLaunch, ProgramHooks], tuple[Callable[[], None], int]]
"""Maps (launch, hooks) to (a program, which a task runs; the number of its distinguished threads or 0)."""


def interpret(launch: KernelLaunch, hooks: ProgramHooks) -> tuple[Callable[[], None], int]:
    origin = functools.partial(hooks.memory.of_argument, launch.kernel, hooks.current.rank)
    return session.program_function(launch.kernel, launch.arguments, origin), 0


class OverdueError(BaseException):
    """Raised in a task from outside when the time of the run has passed."""


class TaskFailed(Exception):
    """An exception left a task; ``__cause__`` is the exception."""

    def __init__(self, task: Task) -> None:
        self.task = task
        super().__init__(task.who)


class Scheduler(ProgramHooks):
    """Runs tasks in an order drawn from ``seed``.

    ``idle`` is called when every task is blocked, with one of the blocked waits; without ``idle`` this is a
    :class:`DeadlockError`. ``programs`` makes programs of launches. ``timeout`` bounds the whole run in
    seconds of wall time; ``quiet`` bounds the time without an action of a program that the scheduler sees.
    ``on_bad_access`` is called with invalid accesses, and the run goes on; without it, an invalid access is
    a :class:`MemoryAccessError` of the program.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        strategy: Strategy | None = None,
        store_buffers: bool = False,
        observer: Observer | None = None,
        idle: Idle | None = None,
        timeout: float | None = None,
        quiet: float = math.inf,
        block_polls: bool = True,
        programs: Programs = interpret,
        on_bad_access: Callable[[Task, BadAccess], None] | None = None,
    ) -> None:
        if greenlet is None:
            raise errors.PlaceUnavailableError(
                "kernels are interpreted by greenlets here, and greenlet is not installed: "
                "pip install greenlet"
            )
        of_buffers = seed if store_buffers else None
        strategy = strategy or Random(seed)
        super().__init__(strategy, observer, of_buffers, block_polls, on_bad_access)
        self.memory.complete = idle is None
        self.seed = seed
        self.steps = 0
        self.finished: list[str] = []
        self.segments: list[ScheduleSegment] = []
        self._idle = idle
        self._programs = programs
        self.compiled_for: int | None = getattr(programs, "arch", None)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._timeout, self._quiet = timeout, quiet
        self._tasks: list[Task] = []
        self._hub = greenlet.getcurrent()
        self._builder: Any = None
        self.rank_states: list[torch_state.RankState] = [torch_state.Generators()]
        self._woken = 0
        self._given_up = False
        self._stuck_after = 0
        self._turn = (
            0  # at most LAST_TRIES; counts while polls read nothing new although memory changes
        )
        self._spawned: Counter[tuple[int, str]] = Counter()
        self._digest = hashlib.blake2b(digest_size=8)

    def spawn(
        self,
        rank: int,
        kind: str,
        function: Callable[[], object],
        *,
        program: Program | None = None,
        owner: Any = None,
        on_finish: Callable[[], None] | None = None,
    ) -> Task:
        """Add a task; it starts when it is first drawn."""
        number = self._spawned[rank, kind]
        self._spawned[rank, kind] += 1
        name = f"rank {rank} {kind}" + (f" #{number}" if number else "")
        task = Task(rank, kind, name, None, number, program, owner, on_finish=on_finish)
        # A greenlet that ends continues in its parent, which must be the loop and not the spawner.
        task.greenlet = greenlet.greenlet(function, self._hub)
        task.greenlet.gr_context = context = contextvars.copy_context()
        if program is not None and owner is not None:
            context.run(LAUNCHED.set, owner.running)
        self._tasks.append(task)
        return task

    def spawn_programs(self, launch: KernelLaunch, rank: int) -> Callable[[], bool]:
        """Add every program of ``launch``; the returned function says whether all have ended."""
        for name, argument in leaves(launch.arguments).items():
            value = getattr(argument, "base", argument)  # a descriptor has a base
            if isinstance(value, torch.Tensor):
                found = self.memory.of_tensor(value, rank)
                if found.owners is None:
                    found.call(value, name)
        function, threads = self._programs(launch, self)

        def body() -> None:
            function()
            if self.buffers:  # its delayed stores may stay invisible for a while
                self.give_way()

        grid = launch.extents
        count = left = grid[0] * grid[1] * grid[2]
        parent = self.current
        self.observer.on_launch(parent, launch)
        tasks: list[Task] = []
        kept = [function]  # keeps the launch's memory, for stores that outlive their program

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if not left and self.buffers is not None:
                self.buffers.end(tasks)
                self.progress()
            if not left:
                kept.clear()

        for index in range(count):
            rest, x = divmod(index, grid[0])
            z, y = divmod(rest, grid[1])
            task = self.spawn(
                rank,
                f"{launch.name} program {index}",
                body,
                program=Program(launch.name, launch.op, index, (x, y, z), grid, threads),
                owner=parent.owner,
                on_finish=one_ended,
            )
            tasks.append(task)
            self.observer.on_program(task, parent)
        return lambda: not left

    def give_way(self) -> None:
        """Let the scheduler choose the next task. InterlaceError in a thread that is not the rank's."""
        task = self._current
        if task is not None and greenlet.getcurrent() is not task.greenlet:
            raise errors.InterlaceError(
                f"rank {task.rank}: a simulated rank cannot wait for others in thread "
                f"{threading.current_thread().name!r}, as in hooks of tensors; use "
                'place="shm", whose ranks are processes'
            )
        # User code may be inside a kernel that the user has launched, so every task has a grid.
        builder = self._builder
        grid = getattr(builder, "grid_dim", None), getattr(builder, "grid_idx", None)
        self.strategy.passes()
        self.points += 1
        self.tire()
        self._hub.switch()
        builder.grid_dim, builder.grid_idx = grid

    def block(self, ready: Callable[[], bool], waiting: Callable[[], errors.BlockedWait]) -> None:
        """Suspend the current task until ``ready()``; ``waiting`` describes it in a report."""
        task = self.current
        before = task.ready, task.waiting
        task.ready, task.waiting = ready, waiting
        try:
            self.give_way()
        except errors.InterlaceError:  # the task does not wait
            task.ready, task.waiting = before
            raise

    def digest(self) -> str:
        return self._digest.hexdigest()

    def run(self) -> None:
        """Run until every task has finished.

        Raises :class:`TaskFailed` for an exception in a task, :class:`DeadlockError`,
        :class:`CollectiveTimeoutError`, or the errors of ``idle``. All tasks have ended afterwards.
        """
        assert greenlet.getcurrent() is self._hub, "run() belongs to the thread that made it"
        with session.session(self) as builder, self._watchdog(), addresses_told(self._address):
            self._builder = builder
            try:
                while self._tasks:
                    self._step()
            finally:
                self._end_all()
                for state in self.rank_states:
                    state.turn_to(None)

    def _address(self, asked: torch.Tensor | torch.UntypedStorage) -> None:
        if self.inside and self.memory.complete and asked.device.type == "cpu":
            self.memory.taken(asked, self.current.rank)

    @contextlib.contextmanager
    def _watchdog(self) -> Iterator[None]:
        """End a task that neither yields nor accesses memory when the time has passed."""
        if self._timeout is None or self._timeout > threading.TIMEOUT_MAX:
            yield
            return
        thread, lock, over = threading.get_ident(), threading.Lock(), threading.Event()
        interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
        end = time.monotonic() + self._timeout + GRACE

        def watch() -> None:
            seen, since = None, time.monotonic()
            while (now := time.monotonic()) < end and now - since < self._quiet:
                if over.wait(min(end - now, self._quiet / 4)):
                    return
                task, mark = self._current, (self.steps, self.points)
                if mark != seen or task is None or task.program is None:
                    seen, since = mark, time.monotonic()
            with lock:
                if not over.is_set():
                    interrupt(ctypes.c_ulong(thread), ctypes.py_object(OverdueError))

        dog = threading.Thread(target=watch, daemon=True)
        try:
            dog.start()  # inside, so that Ctrl-C cannot leave the thread behind
            yield
        finally:
            with lock:
                over.set()

    def _step(self) -> None:
        self.steps += 1
        if self._deadline is not None and (self.steps % 256 == 0 or self.long_step):
            self.long_step = False
            self._check_deadline()
        if self._given_up:
            self._given_up = False
            self._call_them_waits()
            self._nothing_ready()
            return
        task = self.strategy.choose(self._tasks)
        if task is None:
            self._nothing_ready()
            return
        task.ready = task.waiting = None
        self._digest.update(f"{task.rank}:{task.who};".encode())
        if not self.segments or self.segments[-1].task != task.name:
            self._close_segment()
            self.segments.append(ScheduleSegment(task.name, 0))
            self.points = 0
        self._current = task
        if task.program is None:
            self.memory.nobodys.clear()  # user code may make tensors
        elif not task.greenlet:
            self._builder.grid_dim = task.program.grid
            self._builder.grid_idx = task.program.position
        try:
            torch_state.switch(task, self.rank_states)
        except greenlet.GreenletExit:
            raise
        except OverdueError as overdue:
            self._tasks.remove(task)
            raise self._endless(task, overdue) from None
        except BaseException as error:
            self._tasks.remove(task)
            if task.program is not None and isinstance(error, AssertionError):
                error = _of_program(task, error)
            raise TaskFailed(task) from error
        finally:
            self._current = None
        task.busy += 1
        if task.busy > LONGEST_CIRCLE or task.greenlet.dead:
            self.vain = 0
        turn = self.vain * LAST_TRIES // (VAIN_POLLS * len(self._tasks))
        if turn >= LAST_TRIES:  # programs only poll, and change only memory that no task waits for
            self._call_them_waits()
            raise errors.DeadlockError(self.blocked(), self.seed, self.finished)
        if turn > self._turn:  # they may not wait, but only read the same for long
            self._let_polls_try()
        self._turn = turn
        if task.greenlet.dead:
            self.points += 1  # so that a replay does not interrupt it just before its end
            self._tasks.remove(task)
            self.stalled = self._woken = 0
            if task.program is not None:
                self.observer.on_program_end(task)
            if task.on_finish is not None:
                task.on_finish()

    def _endless(self, task: Task, overdue: OverdueError) -> errors.EndlessTaskError:
        late = self._deadline is not None and time.monotonic() > self._deadline
        limit = self._timeout if late else self._quiet
        symptom = "not finished within" if late else "nothing has happened for"
        text = at_lines(
            f"{symptom} {limit:g} s (seed {self.seed}): {task.name} neither ends nor touches memory",
            raised_in(overdue),
        )
        error = errors.EndlessTaskError(text)
        error.frames = text.frames
        return error

    def recorded(self) -> tuple[ScheduleSegment, ...]:
        """Return the segments that ran, in order, for ``strategies.Replay``."""
        self._close_segment()
        return tuple(self.segments)

    def _close_segment(self) -> None:
        if self.segments:
            self.segments[-1] = self.segments[-1]._replace(points=self.points)

    def blocked(self) -> list[errors.BlockedWait]:
        waits = [task.waiting() for task in self._tasks if task.waiting is not None]
        return sorted(waits, key=lambda wait: (wait.rank, wait.who))

    def _nothing_ready(self) -> None:
        if self.buffers:
            self.buffers.drain_all()
            return
        if self._idle is None and self._wake_polls():
            return
        waits = self.blocked()
        if self._idle is None:
            if self._woken:
                del self.segments[self._stuck_after :]  # the last tries are not recorded
            raise errors.DeadlockError(waits, self.seed, self.finished)
        self._idle(waits[0])

    def _call_them_waits(self) -> None:
        """Mark running programs as waiting for the words that they have polled last."""
        for task in self._tasks:
            if task.program is not None and task.waiting is None and task.greenlet:
                addresses = np.frombuffer(b"".join(task.known), np.uint64)
                words = dict.fromkeys(addresses.tolist())
                task.waiting = functools.partial(polling, task, None, [*words], self.memory)

    def _wake_polls(self) -> bool:
        """Let polls try again, at most LAST_TRIES times: a program may stop after some polls."""
        if not self._woken:
            self._stuck_after = len(self.segments)
            self.observer.on_stuck()
        self._woken += 1
        return self._woken <= LAST_TRIES and self._let_polls_try()

    def _let_polls_try(self) -> bool:
        polling_tasks = [task for task in self._tasks if task.polls and task.waiting is not None]
        for task in polling_tasks:
            task.ready = None
        self.woken = max(1, len(polling_tasks))
        return bool(polling_tasks)

    def _check_deadline(self) -> None:
        assert self._deadline is not None
        if time.monotonic() > self._deadline:
            lines = [str(wait) for wait in self.blocked()]
            lines += [
                f"{task.name} runs at {program_line(task)}"
                for task in self._tasks
                if task.waiting is None and task.program is not None and task.greenlet
            ]
            waits = "\n".join(f"  {line}" for line in lines)
            raise errors.CollectiveTimeoutError(
                f"not finished within {self._timeout:g} s (seed {self.seed}); waiting:\n{waits}"
            )

    def _end_all(self) -> None:
        """Unwind every task; user code may run its finally clauses but may not block again."""
        for task in self._tasks:
            if task.greenlet:
                self._current = task
                for _ in range(100):
                    try:
                        torch_state.switch(task, self.rank_states, ended_by=greenlet.GreenletExit)
                    except BaseException:
                        break
                    if task.greenlet.dead:
                        break
        self._current = None
        self._tasks.clear()

    def give_up_on_polls(self) -> None:
        """Call it a deadlock: programs have polled in turn for long, and no memory has changed."""
        self.stalled, self._given_up = 0, True
        self.give_way()

    def changed(self) -> None:
        """Note that memory has changed, and let the scheduler choose the next task."""
        self.progress()
        self.give_way()

    def progress(self) -> None:
        """Note that memory has changed, so a poll may read a new value."""
        self.stalled = self._woken = 0
        if self._current is not None:
            self._current.seen.clear()
            self._current.loads = 0
            self._current.changes += 1


def _of_program(task: Task, error: AssertionError) -> errors.KernelAssertionError:
    """Return ``error`` with the program, and the lines where the condition did not hold."""
    text = with_lines(error)
    failure = errors.KernelAssertionError(f"{task.who}: {text}")
    failure.frames, failure.__cause__ = text.frames, error
    return failure


def run_interpreted(
    launch: KernelLaunch, rank: int, idle: Idle, programs: Programs = interpret
) -> None:
    """Run a kernel to its end in this thread; call ``idle`` while all programs wait for peers."""
    scheduler = Scheduler(idle=idle, observer=recording.current(), programs=programs)
    scheduler.spawn(rank, "launch", lambda: scheduler.spawn_programs(launch, rank))
    try:
        with UsualMode():
            scheduler.run()
    except TaskFailed as failure:
        assert failure.__cause__ is not None
        raise failure.__cause__ from None
