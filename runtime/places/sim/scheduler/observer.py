"""Observers of a simulated run: they see every access, launch, event and allocation as it happens.

The scheduler, streams and places report to one :class:`Observer`, for example the recorder in
``recording.py`` or the race detector of ``interlace.verify``. Observers never change a run, so a seed means
the same schedule with and without them.
"""

from collections.abc import Callable, Hashable, Iterable

import torch

from interlace.runtime.core.accesses import AsyncAccess, Atomic, Handle, Lanes, Mask
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.places.sim.scheduler.strategies import Task


class Observer:
    """Observes nothing; subclasses override the methods that they need.

    ``task`` does the action: a program of a kernel, a stream, or the user code of a rank. User code also
    stands for its rank's current stream, because its torch operators run there. ``pointers`` and ``mask``
    are the interpreter's handles; handles of PTX have the thread of each element (``threads_of``).
    """

    def attach(self, steps: Callable[[], int]) -> None:
        """Note the start of a run; ``steps()`` returns its steps so far."""

    def on_load(self, task: Task, pointers: Handle, mask: Mask) -> None:
        """Note that a program has loaded."""

    def on_store(self, task: Task, pointers: Handle, mask: Mask) -> None:
        """Note that a program has stored."""

    def on_atomic(self, task: Task, atomic: Atomic, result: Handle) -> None:
        """Note an atomic; ``result`` is the handle of its result."""

    def on_barrier(self, task: Task, threads: Lanes = None) -> None:
        """Note that all threads of a program have met, or ``threads`` where they are distinguished."""

    def on_fence(
        self, task: Task, sem: str, scope: str, threads: Lanes = None, *, puts: bool = True
    ) -> None:
        """Note a fence of PTX, with its order and scope; of these threads, if they are distinguished.

        ``puts``: it also orders data that they have put before.
        """

    def on_puts(self, task: Task, threads: Lanes, *, begin: bool) -> None:
        """Note that ``threads``' stores are puts from here on, or, without ``begin``, no longer."""

    def on_quiet(self, task: Task, threads: Lanes = None) -> None:
        """Note that threads' stores have arrived everywhere, for a later signal by any thread."""

    def on_proxy_fence(self, task: Task, threads: Lanes) -> None:
        """Note that threads have fenced between their accesses and accesses of the async proxy."""

    def on_alias_fence(self, task: Task, threads: Lanes = None) -> None:
        """Note a fence between accesses by a multicast address and accesses by other addresses."""

    def on_async(
        self, task: Task, copy: AsyncAccess, pointers: Handle, *, does: str, stores: bool
    ) -> None:
        """Note the start of an asynchronous access to all memory that ``pointers`` point to."""

    def on_async_end(
        self, task: Task, queue: object, time: int, threads: Lanes, *, reads_only: bool
    ) -> None:
        """Note that ``threads`` saw the end, or the reads, of all in ``queue`` up to number ``time``."""

    def on_arrival(
        self,
        task: Task,
        mbarrier: int,
        threads: Iterable[int] = (),
        copies: tuple[Hashable, int] | None = None,
    ) -> None:
        """Note that threads, or ``copies`` of a queue up to a number, have arrived at an mbarrier."""

    def on_phase(self, task: Task, mbarrier: int) -> None:
        """Note that the phase of an mbarrier is complete."""

    def on_awaited(self, task: Task, mbarrier: int, threads: Lanes) -> None:
        """Note that ``threads`` have seen the completed phase."""

    def on_allocate(self, rank: int, memory: torch.Tensor, label: str) -> None:
        """Note new symmetric memory of ``rank``; ``label`` names it in messages."""

    def on_shared_memory(self, task: Task, base: int, nbytes: int) -> None:
        """Note the start of a program of PTX, whose shared memory is at ``base``."""

    def on_undefined(self, memory: torch.Tensor) -> None:
        """Note that ``memory`` is undefined, and poison until a rank writes it."""

    def on_visible(self, task: Task, address: int, elements: int, nbytes: int) -> None:
        """Note that a delayed store of ``task`` becomes visible."""

    def on_stuck(self) -> None:
        """Note that no task can run; polls get a few more tries before this is called a deadlock."""

    def on_launch(self, task: Task, launch: KernelLaunch) -> None:
        """Note that ``task`` starts a kernel; its programs are spawned next."""

    def on_program(self, task: Task, parent: Task) -> None:
        """Note that ``task`` is a program of the kernel that ``parent`` starts."""

    def on_program_end(self, task: Task) -> None:
        """Note the end of a program; its parent goes on when all have ended."""

    def on_record(self, task: Task, event: object) -> None:
        """Note that ``event`` marks the point that ``task`` has reached."""

    def on_wait_event(self, task: Task, event: object) -> None:
        """Note that ``task`` goes on after ``event``, which has completed."""

    def on_meeting(self, task: Task, meeting: object, ranks: int) -> None:
        """Note that one of ``ranks`` user tasks has reached a meeting that orders all their work."""

    def on_met(self, task: Task, meeting: object) -> None:
        """Note that ``task`` leaves the meeting, which all have reached."""

    def on_signal(self, task: Task, slot: torch.Tensor, op: str) -> None:
        """Note that a stream has published ``slot``, an int64 of symmetric memory, for ``op``."""

    def on_signals_seen(self, task: Task, slots: torch.Tensor) -> None:
        """Note that a stream has waited for ``slots`` and acquired the data published with them."""

    def on_item(
        self, task: Task, stream: str, label: str, start: int, copied_to: torch.Tensor | None
    ) -> None:
        """Note the end of a stream's item; it is a copy if ``copied_to`` is its destination."""

    def now(self) -> int:
        """Return the observer's time, for ``start`` of an item."""
        return 0
