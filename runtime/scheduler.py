"""The seeded scheduler: programs, streams and host code as coroutines of one thread.

A *task* is a greenlet: one program of a kernel, one stream that works through its queue, or the host
code of one rank. Tasks give way before and after every atomic, and now and then at loads and stores;
which one goes on is drawn from a seeded generator, so a seed is a schedule, and the same seed is the
same schedule again. Nothing else enters: no clock, no thread.

A task may *block* on a condition. A program that polls is found out: when a read-only atomic returns
the same value twice in a row the program is spinning, and is not run again until the memory changes.
So when no task can run, none ever will: that is a deadlock, found at once and reported with everything
that is known about every wait. In a place with other processes it only means that this process has to
wait, and the ``idle`` hook decides how and how long.
"""

from __future__ import annotations

import contextvars
import ctypes
import hashlib
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import greenlet
import numpy as np

from interlace.runtime import interpreter
from interlace.runtime.errors import BlockedWait, CollectiveTimeoutError, DeadlockError

MEMORY_SWITCH = 0.2
STALLED_POLLS = 20_000


@dataclass
class Program:
    """Where a task stands in a launch."""

    kernel: str
    op: str
    index: int
    count: int


@dataclass(eq=False)
class Task:
    """One coroutine. ``ready`` is None when it can run, else the condition it waits for."""

    rank: int
    who: str
    greenlet: Any
    program: Program | None = None
    ready: Callable[[], bool] | None = None
    waiting: Callable[[], BlockedWait] | None = None
    last_poll: tuple[bytes, bytes] | None = None
    on_finish: Callable[[], None] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class TaskFailed(Exception):
    """An exception left a task; ``__cause__`` is the exception."""

    def __init__(self, task: Task) -> None:
        self.task = task
        super().__init__(task.who)


class Scheduler:
    """Runs tasks in an order drawn from ``seed``.

    ``idle`` is called when every task is blocked, with one of the blocked waits; without it that is a
    :class:`DeadlockError`. ``timeout`` bounds the whole run in seconds of wall time.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        idle: Callable[[BlockedWait], None] | None = None,
        timeout: float | None = None,
        memory_switch: float = MEMORY_SWITCH,
        block_polls: bool = True,
    ) -> None:
        self.seed = seed
        self.steps = 0
        self.finished: list[str] = []
        self.observer: Any = None
        self._random = random.Random(seed)
        self._idle = idle
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._timeout = timeout
        self._memory_switch = memory_switch
        self._block_polls = block_polls
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self._hub: Any = greenlet.getcurrent()
        self._builder: Any = None
        self._stalled = 0
        self._digest = hashlib.blake2b(digest_size=8)

    # -- tasks ---------------------------------------------------------------------------------

    def spawn(
        self,
        rank: int,
        who: str,
        function: Callable[[], Any],
        *,
        program: Program | None = None,
        on_finish: Callable[[], None] | None = None,
    ) -> Task:
        """Add a task; it starts when it is first drawn."""
        task = Task(rank, who, None, program, on_finish=on_finish)

        def body() -> None:
            function()

        # a greenlet that ends continues in its parent, which must be the loop and not the spawner
        task.greenlet = greenlet.greenlet(body, self._hub)
        task.greenlet.gr_context = contextvars.copy_context()
        self._tasks.append(task)
        return task

    @property
    def current(self) -> Task:
        """The task that runs now."""
        assert self._current is not None, "not inside a task"
        return self._current

    @property
    def inside(self) -> bool:
        """Whether a task is running."""
        return self._current is not None

    def give_way(self) -> None:
        """Let the scheduler choose who goes on."""
        # host code may be inside a kernel that the user has launched, so every task has a grid
        builder = self._builder
        grid = getattr(builder, "grid_dim", None), getattr(builder, "grid_idx", None)
        self._hub.switch()
        builder.grid_dim, builder.grid_idx = grid

    def block(self, ready: Callable[[], bool], waiting: Callable[[], BlockedWait]) -> None:
        """Suspend the current task until ``ready()``; ``waiting`` describes it in a report."""
        task = self.current
        task.ready, task.waiting = ready, waiting
        self.give_way()

    def digest(self) -> str:
        """A fingerprint of the schedule so far."""
        return self._digest.hexdigest()

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every task has finished.

        Raises :class:`TaskFailed` for an exception in a task, :class:`DeadlockError`,
        :class:`CollectiveTimeoutError`, or what ``idle`` raises. All tasks have ended afterwards.
        """
        assert greenlet.getcurrent() is self._hub, "run() belongs to the thread that made it"
        with interpreter.session(self) as builder:
            self._builder = builder
            try:
                while self._tasks:
                    self._step()
            finally:
                self._end_all()

    def _step(self) -> None:
        self.steps += 1
        if self._deadline is not None and self.steps % 256 == 0:
            self._check_deadline()
        task = self._draw()
        if task is None:
            self._nothing_ready()
            return
        self._digest.update(f"{task.rank}:{task.who};".encode())
        self._current = task
        if task.program is not None and not task.greenlet:
            self._builder.grid_dim = (task.program.count, 1, 1)
            self._builder.grid_idx = (task.program.index, 0, 0)
        try:
            task.greenlet.switch()
        except greenlet.GreenletExit:
            raise
        except BaseException as error:
            self._tasks.remove(task)
            raise TaskFailed(task) from error
        finally:
            self._current = None
        if task.greenlet.dead:
            self._tasks.remove(task)
            self._stalled = 0
            if task.on_finish is not None:
                task.on_finish()

    def _draw(self) -> Task | None:
        tasks = self._tasks
        count = len(tasks)
        first = int(self._random.random() * count)
        for step in range(count):
            task = tasks[(first + step) % count]
            if task.ready is None or task.ready():
                task.ready = task.waiting = None
                return task
        return None

    def blocked(self) -> list[BlockedWait]:
        """Every wait that is going on, in the order of ranks."""
        waits = [task.waiting() for task in self._tasks if task.waiting is not None]
        return sorted(waits, key=lambda wait: (wait.rank, wait.who))

    def _nothing_ready(self) -> None:
        waits = self.blocked()
        if self._idle is None:
            raise DeadlockError(waits, self.seed, self.finished)
        self._idle(waits[0])

    def _check_deadline(self) -> None:
        assert self._deadline is not None
        if time.monotonic() > self._deadline:
            waits = "\n".join(f"  {wait}" for wait in self.blocked())
            raise CollectiveTimeoutError(
                f"not finished within {self._timeout} s (seed {self.seed}); waiting:\n{waits}"
            )

    def _end_all(self) -> None:
        """Unwind every task; host code may run its finally clauses but not block again."""
        for task in self._tasks:
            if task.greenlet:
                self._current = task
                for _ in range(100):
                    try:
                        task.greenlet.throw(greenlet.GreenletExit)
                    except BaseException:
                        break
                    if task.greenlet.dead:
                        break
        self._current = None
        self._tasks.clear()

    # -- hooks of the interpreter session ------------------------------------------------------

    def load(self, pointers: Any, mask: Any, perform: Callable[[], Any]) -> Any:
        self._maybe_give_way()
        result = perform()
        if self.observer is not None:
            self.observer.on_load(self._current, pointers, mask)
        return result

    def store(self, pointers: Any, mask: Any, perform: Callable[[], Any]) -> Any:
        self._maybe_give_way()
        result = perform()
        self.progress()
        if self.observer is not None:
            self.observer.on_store(self._current, pointers, mask)
        return result

    def atomic(self, pointers: Any, mask: Any, reads_only: bool, perform: Callable[[], Any]) -> Any:
        if self._current is None:
            return perform()
        self.give_way()
        result = perform()
        if not reads_only:
            self.progress()
        elif self._block_polls:
            seen = (pointers.data.tobytes(), result.data.tobytes())
            if self.current.last_poll == seen:
                self._block_on_memory(pointers, mask, result)
                result = perform()
                seen = (seen[0], result.data.tobytes())
            self.current.last_poll = seen
            self._count_stalled()
        if self.observer is not None:
            self.observer.on_atomic(self._current, pointers, mask, reads_only, result)
        return result

    def barrier(self) -> None:
        if self.observer is not None:
            self.observer.on_barrier(self._current)

    def progress(self) -> None:
        """Memory has changed, so a program that polls may see something new."""
        self._stalled = 0
        if self._current is not None:
            self._current.last_poll = None

    def _maybe_give_way(self) -> None:
        if self._current is not None and self._random.random() < self._memory_switch:
            self.give_way()

    def _count_stalled(self) -> None:
        """Programs that poll several slots in turn never repeat a poll; count them instead."""
        self._stalled += 1
        if self._stalled > STALLED_POLLS:
            self._stalled = 0
            for task in self._tasks:
                if task.program is not None and task.waiting is None:
                    task.waiting = _polling(task, None)
            self._nothing_ready()

    def _block_on_memory(self, pointers: Any, mask: Any, result: Any) -> None:
        addresses = pointers.data.ravel()
        values = np.ascontiguousarray(result.data).ravel()
        if mask is not None:
            chosen = np.broadcast_to(mask.data, pointers.data.shape).ravel()
            addresses, values = addresses[chosen], values[chosen]
        size = values.dtype.itemsize
        watched = [(int(a), v.tobytes()) for a, v in zip(addresses, values, strict=True)]

        def changed() -> bool:
            return any(ctypes.string_at(a, size) != value for a, value in watched)

        seen = int(values[0]) if values.size == 1 else None
        self.block(changed, _polling(self.current, seen))


def _polling(task: Task, seen: int | None) -> Callable[[], BlockedWait]:
    """Describe a program that polls, from the frames it is suspended in."""

    def describe() -> BlockedWait:
        frames = interpreter.source_frames(task.greenlet.gr_frame)
        expected = source = slot = None
        where = ""
        for frame in frames:
            if frame.f_code.co_name == "wait" and "epoch" in frame.f_locals:
                values = frame.f_locals
                expected = _scalar(values["epoch"])
                source = _scalar(values.get("source"))
                slot = _scalar(values.get("slot_byte"))
            elif not where or where.startswith("signal.py"):
                name = os.path.basename(frame.f_code.co_filename)
                where = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        what = "a slot" if slot is None else f"slot at byte {slot} from rank {source}"
        return BlockedWait(task.rank, task.who, what, seen, expected, where, source)

    return describe


def user_line(task: Task) -> str:
    """Where in the user's code a suspended host task stands."""
    frame = task.greenlet.gr_frame
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("interlace", "torch", "contextlib", "concurrent")):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _scalar(value: Any) -> int | None:
    handle = getattr(value, "handle", None)
    if handle is not None:
        return int(handle.data.ravel()[0])
    return value if isinstance(value, int) else None
