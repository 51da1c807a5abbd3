"""Weak memory in the simulator: stores that become visible late, and out of order.

A GPU may make the stores of a program visible to other programs in any order and at any time, until
something orders them. The interpreter stores at once, as x86 nearly does, and so hides every missing
release. Here a store first goes into a buffer and is *drained* into memory later:

===========================  =========================================================================
at random, in any order      a few pieces at a time, as often as the seed says; perhaps never
release, scope sys           all that the program has stored before its last barrier, and what the one
                             thread that releases has stored itself (scalars)
release, scope gpu           the same becomes visible to its own rank only; scope cta: to its program
fence                        as a release, for later relaxed signals
end of the kernel            everything
before an own access         what overlaps it: a program sees its own stores, in order. Where threads are
                             told apart a thread sees those of others from a barrier or a release on
===========================  =========================================================================

So a missing release, a missing barrier, or a scope that is too narrow gives wrong results in some
schedule. It is a model of stores only: loads are never early, which leaves missing acquires to the
race detector.

A relaxed or volatile store is late like a plain one, or comes before those that are: PTX orders two of them
only where they overlap. Parts of a vector become visible together, which protocols of words with flags
count on. An atomic that reads and writes is never late.
"""

import ctypes
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from interlace.runtime.core.accesses import Handle, Lanes, Mask, Numbers, threads_of
from interlace.runtime.places.sim.interpreter.session import active, active_addresses
from interlace.runtime.places.sim.scheduler.observer import Observer
from interlace.runtime.places.sim.scheduler.strategies import Task

PIECES = 4
DRAIN_CHANCES = (0.0, 0.02, 0.1, 0.3)
AT_ONCE = 0.5  # the chance of a relaxed store


@dataclass(eq=False)
class _PendingStore:
    """Part of one store. ``scalar``: by the one thread that also releases; ``ordered``: a barrier has
    come after it; ``shown``: visible to the own program; ``rank_only``: to the own rank. ``threads``:
    that of each element, if known; ``met``: those that have met after it."""

    task: Task
    addresses: Numbers
    values: Any
    scalar: bool
    threads: Lanes = None
    ordered: bool = False
    shown: bool = False
    rank_only: bool = False
    met: Lanes = None
    low: int = field(init=False)
    high: int = field(init=False)  # the byte after the last

    def __post_init__(self) -> None:
        """Asked for at every load that comes while the store is pending."""
        self.low = int(self.addresses.min())
        self.high = int(self.addresses.max()) + self.values.dtype.itemsize

    def own(self, threads: Lanes) -> bool:
        """Whether it is by ``threads`` alone, or comes before whatever one of them does."""
        if threads is None or self.threads is None:
            return False
        met = self.met is not None and bool(np.isin(threads, self.met).any())
        return met or bool(np.isin(self.threads, threads).all())

    def hidden(self, addresses: Numbers, size: int, readers: Lanes) -> bool:
        """Whether these threads of its program, each of its own element, may not see it yet."""
        if readers is None or self.threads is None or self.ordered or self.shown:
            return False
        order = np.argsort(self.addresses)
        at = np.searchsorted(self.addresses[order], addresses + np.uint64(size)) - 1
        met = () if self.met is None else self.met
        return not ((self.threads[order][at] == readers) | np.isin(readers, met)).any()

    def perform(self) -> None:
        size = self.values.dtype.itemsize
        raw = self.values.tobytes()
        low, count = int(self.addresses[0]), len(self.addresses)
        if count == 1 or bool((np.diff(self.addresses) == size).all()):
            ctypes.memmove(low, raw, count * size)
            return
        for index, address in enumerate(self.addresses.tolist()):
            ctypes.memmove(address, raw[index * size : (index + 1) * size], size)

    def overlaps(self, addresses: Numbers, size: int) -> Any:
        """Which elements of ``size`` bytes share any with these, and do not only lie around."""
        own = np.sort(self.addresses)
        before = np.searchsorted(own, addresses + np.uint64(size)) - 1
        ends = own[before] + np.uint64(self.values.dtype.itemsize)
        return (before >= 0) & (ends > addresses)


class StoreBuffers:
    """The stores of a run that are not visible yet."""

    def __init__(self, seed: int, observer: Observer) -> None:
        self._observer = observer
        self._random = random.Random(~seed)
        self._chance = self._random.choice(DRAIN_CHANCES)
        self._pending: list[_PendingStore] = []

    def __len__(self) -> int:
        return len(self._pending)

    def store(
        self, task: Task, pointers: Handle, value: Any, mask: Mask, *, relaxed: bool = False
    ) -> None:
        """``relaxed``: each thread its own elements; who fences later may be the same."""
        addresses = active_addresses(pointers, mask)
        if not addresses.size:
            return
        values = active(value.data, pointers, mask)
        self._drain_overlapping(task, addresses, values.dtype.itemsize)
        threads = threads_of(pointers)
        scalar = threads is None and pointers.data.size == 1
        together = pointers.data.shape[-1] if relaxed and pointers.data.ndim > 1 else 1
        groups = np.arange(addresses.size) // together
        for some in np.array_split(np.unique(groups), min(PIECES, groups[-1] + 1)):
            part = slice(*np.searchsorted(groups, (some[0], some[-1] + 1)))
            pending = _PendingStore(
                task,
                addresses[part].copy(),
                values[part].copy(),
                scalar,
                None if threads is None else threads[part],
                ordered=relaxed and threads is None,
            )
            if relaxed and self._random.random() < AT_ONCE:
                pending.perform()
            else:
                self._pending.append(pending)

    def before_load(self, task: Task, pointers: Handle, *, newest: bool = False) -> None:
        """A thread sees its own stores, what its program has been shown, and what its rank has been given.

        ``newest``: it sees all of its program.
        """
        if self._pending:
            addresses = np.asarray(pointers.data).ravel()
            bits = pointers.get_element_ty().primitive_bitwidth
            readers = None if newest else threads_of(pointers)
            self._drain_overlapping(task, addresses, max(1, bits // 8), readers)

    def barrier(self, task: Task, threads: Lanes = None) -> None:
        """Order what all threads, or ``threads``, stored before whatever any of them does next."""
        if threads is not None:
            self._split(task, threads)
        for pending in self._pending:
            if pending.task is task and threads is None:
                pending.ordered = True
            elif pending.task is task and threads is not None and pending.own(threads):
                before = () if pending.met is None else pending.met
                pending.met = np.union1d(before, threads)

    def release(
        self, task: Task, scope: str, *, each_thread: bool = False, threads: Lanes = None
    ) -> None:
        """Make ordered stores visible. ``each_thread``: not even scalars are without a barrier.

        ``threads``: those that release, each what it has stored itself.
        """
        if threads is not None:
            self._split(task, threads)
        chosen = [
            p
            for p in self._pending
            if (
                p.task is task
                # shown: who releases may have seen it, and hands it on
                and (p.ordered or p.shown or (p.scalar and not each_thread) or p.own(threads))
            )
            or (p.rank_only and p.task.rank == task.rank)
        ]
        if scope == "sys":
            self._drain(chosen)
        for pending in () if scope == "sys" else chosen:
            pending.shown |= pending.task is task
            pending.rank_only |= scope == "gpu"

    def _split(self, task: Task, threads: Numbers) -> None:
        """Part what ``threads`` have stored from what others have."""
        parted = []
        for pending in self._pending:
            whole = pending.task is not task or pending.ordered or pending.own(threads)
            if whole or pending.threads is None:
                parted.append(pending)
                continue
            own = np.isin(pending.threads, threads)
            if own.all() or not own.any():
                parted.append(pending)
                continue
            for part in (own, ~own):
                addresses, values = pending.addresses[part], pending.values[part]
                own_threads = pending.threads[part]
                parted.append(
                    replace(pending, addresses=addresses, values=values, threads=own_threads)
                )
        self._pending = parted

    def end(self, tasks: Sequence[Task]) -> None:
        """The end of a kernel orders everything of its programs, and what they have acquired."""
        programs = set(map(id, tasks))
        ranks = {task.rank for task in tasks}
        self._drain(
            p
            for p in self._pending
            if id(p.task) in programs or (p.rank_only and p.task.rank in ranks)
        )

    def sometimes(self) -> bool:
        """Called at every point; whether anything became visible."""
        if self._pending and self._random.random() < self._chance:
            self._drain([self._random.choice(self._pending)])
            return True
        return False

    def drain_all(self) -> None:
        self._drain(self._pending)

    def _drain_overlapping(
        self, task: Task, addresses: Numbers, size: int, readers: Lanes = None
    ) -> None:
        if not self._pending or not addresses.size:
            return
        low, high = int(addresses.min()), int(addresses.max()) + size
        self._drain(
            p
            for p in self._pending
            if (p.task is task or (p.rank_only and p.task.rank == task.rank))
            and p.low < high
            and low < p.high
            and (found := p.overlaps(addresses, size)).any()
            and not (
                p.task is task
                and p.hidden(addresses[found], size, None if readers is None else readers[found])
            )
        )

    def _drain(self, chosen: Iterable[_PendingStore]) -> None:
        gone = set()
        for pending in chosen:
            pending.perform()
            gone.add(id(pending))
            low, count = int(pending.addresses[0]), len(pending.addresses)
            self._observer.on_visible(pending.task, low, count, pending.high - pending.low)
        if gone:
            self._pending = [p for p in self._pending if id(p) not in gone]
