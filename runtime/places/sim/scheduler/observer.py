"""Observers of a simulated run: every access, launch, event and allocation, as it happens.

The scheduler, streams and places report to one :class:`Observer`. The recorder of ``recording.py`` is one,
the race detector of ``interlace.verify`` another. Observers look on: they never change what happens,
so a seed means the same schedule with and without them.
"""

from collections.abc import Callable, Hashable, Iterable

import torch

from interlace.runtime.core.accesses import AsyncAccess, Atomic, Handle, Lanes, Mask
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.places.sim.scheduler.strategies import Task


class Observer:
    """Sees nothing; subclasses override what they care for.

    ``task`` is who does it: a program of a kernel, a stream, or the user code of a rank. User code
    stands for its rank's current stream too, because its torch operators run there. ``pointers`` and
    ``mask`` are the interpreter's handles; those of PTX know which thread each element is of
    (``threads_of``).
    """

    def attach(self, steps: Callable[[], int]) -> None:
        """A run begins; ``steps()`` is how far it has come."""

    # -- memory ----------------------------------------------------------------------------------

    def on_load(self, task: Task, pointers: Handle, mask: Mask) -> None:
        """A program has loaded."""

    def on_store(self, task: Task, pointers: Handle, mask: Mask) -> None:
        """A program has stored."""

    def on_atomic(self, task: Task, atomic: Atomic, result: Handle) -> None:
        """An atomic was performed; ``result`` is the handle of what it returned."""

    def on_barrier(self, task: Task, threads: Lanes = None) -> None:
        """All threads of a program have met, or ``threads``, where they are told apart."""

    def on_fence(
        self, task: Task, sem: str, scope: str, threads: Lanes = None, *, puts: bool = True
    ) -> None:
        """PTX has fenced, with an order and within a scope; in these threads, if they are told apart.

        ``puts``: what they have put before is ordered, too.
        """

    def on_puts(self, task: Task, threads: Lanes, *, begin: bool) -> None:
        """What ``threads`` store from here on is put, until it ends."""

    def on_quiet(self, task: Task, threads: Lanes = None) -> None:
        """What threads have stored has arrived everywhere; as of a fence, but whoever tells of it."""

    def on_proxy_fence(self, task: Task, threads: Lanes) -> None:
        """Threads have fenced between their accesses and those of the async proxy."""

    def on_alias_fence(self, task: Task, threads: Lanes = None) -> None:
        """... between their accesses by a multicast address and those by other addresses."""

    def on_async(
        self, task: Task, copy: AsyncAccess, pointers: Handle, *, does: str, stores: bool
    ) -> None:
        """An asynchronous access begins, of everything that ``pointers`` point to."""

    def on_async_end(
        self, task: Task, queue: object, time: int, threads: Lanes, *, reads_only: bool
    ) -> None:
        """``threads`` have seen the end of all in ``queue`` up to number ``time``, or of their reads."""

    def on_arrival(
        self,
        task: Task,
        mbarrier: int,
        threads: Iterable[int] = (),
        copies: tuple[Hashable, int] | None = None,
    ) -> None:
        """Threads have arrived at the mbarrier of an address, or ``copies`` of a queue up to a number."""

    def on_phase(self, task: Task, mbarrier: int) -> None:
        """The phase of an mbarrier is complete."""

    def on_awaited(self, task: Task, mbarrier: int, threads: Lanes) -> None:
        """``threads`` have seen that."""

    def on_allocate(self, rank: int, memory: torch.Tensor, label: str) -> None:
        """``memory`` is new symmetric memory of ``rank``; ``label`` names it in messages."""

    def on_shared_memory(self, task: Task, base: int, nbytes: int) -> None:
        """A program whose PTX is run begins, with shared memory of its own at ``base``."""

    def on_undefined(self, memory: torch.Tensor) -> None:
        """What is in ``memory`` is undefined, and poison until somebody writes."""

    def on_visible(self, task: Task, address: int, elements: int, nbytes: int) -> None:
        """A store of ``task`` that was held back becomes visible."""

    def on_stuck(self) -> None:
        """Nothing can run; programs that poll try a few more times before it is called a deadlock."""

    # -- order -----------------------------------------------------------------------------------

    def on_launch(self, task: Task, launch: KernelLaunch) -> None:
        """``task`` starts a kernel; its programs are spawned next."""

    def on_program(self, task: Task, parent: Task) -> None:
        """``task`` is a program of the kernel that ``parent`` starts."""

    def on_program_end(self, task: Task) -> None:
        """A program has ended; its parent goes on when all have."""

    def on_record(self, task: Task, event: object) -> None:
        """``event`` marks the point that ``task`` has reached."""

    def on_wait_event(self, task: Task, event: object) -> None:
        """``task`` goes on after ``event``, which has completed."""

    def on_meeting(self, task: Task, meeting: object, ranks: int) -> None:
        """One of ``ranks`` user tasks has arrived at a meeting that orders all their work."""

    def on_met(self, task: Task, meeting: object) -> None:
        """All have arrived, and ``task`` leaves the meeting."""

    def on_signal(self, task: Task, slot: torch.Tensor, op: str) -> None:
        """A stream has published ``slot``, an int64 of symmetric memory, for ``op``."""

    def on_signals_seen(self, task: Task, slots: torch.Tensor) -> None:
        """A stream has waited for ``slots`` and acquired what was published with them."""

    def on_item(
        self, task: Task, stream: str, label: str, start: int, copied_to: torch.Tensor | None
    ) -> None:
        """An item of a stream has ended; a copy if ``copied_to`` is its destination."""

    def now(self) -> int:
        """The observer's clock, for ``start`` of an item."""
        return 0
