"""Weak memory in the simulator: stores that become visible late, and out of order.

A GPU may make the stores of a program visible to other programs in any order and at any time, until
an operation orders them. The interpreter stores at once, as x86 nearly does, and so hides every missing
release. Here a store first goes into a buffer and is *drained* into memory later:

===========================  =========================================================================
at random, in any order      a few pieces at a time, with the seed's frequency; perhaps never
release, scope sys           all stores of the program before its last barrier, and scalar stores of the
                             one thread that releases
release, scope gpu           the same becomes visible to its own rank only; scope cta: to its program
fence                        as a release, for later relaxed signals
end of the kernel            everything
before an own access         overlapping stores: a program sees its own stores, in order. Where threads are
                             distinguished, a thread sees other threads' stores after a barrier or release
===========================  =========================================================================

So a missing release, a missing barrier, or a scope that is too narrow gives wrong results in some
schedule. It models only stores: loads are never early, so the race detector has to find missing acquires.

A relaxed or volatile store is delayed like a plain one, or overtakes delayed stores: PTX orders two of them
only if they overlap. Parts of a vector become visible together, because protocols of words with flags
depend on it. An atomic that reads and writes is never delayed.
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
AT_ONCE = 0.5  # the probability that a relaxed store is visible at once


@dataclass(eq=False)
class _PendingStore:
    """Part of one store. ``scalar``: by the one thread that also releases. ``ordered``: a barrier has
    followed it. ``shown``: visible to its program. ``rank_only``: visible to its rank. ``threads``: the
    thread of each element, if known. ``met``: the threads that have met after it."""

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
        """Compute the bounds once: every load reads them while the store is pending."""
        self.low = int(self.addresses.min())
        self.high = int(self.addresses.max()) + self.values.dtype.itemsize

    def own(self, threads: Lanes) -> bool:
        """Return whether it is by ``threads`` alone, or ordered before their later accesses."""
        if threads is None or self.threads is None:
            return False
        met = self.met is not None and bool(np.isin(threads, self.met).any())
        return met or bool(np.isin(self.threads, threads).all())

    def hidden(self, addresses: Numbers, size: int, readers: Lanes) -> bool:
        """Return whether these threads of its program, one for each element, cannot see it yet."""
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
        """Return which elements of ``size`` bytes really share bytes with these."""
        sorted_addresses = np.sort(self.addresses)
        before = np.searchsorted(sorted_addresses, addresses + np.uint64(size)) - 1
        ends = sorted_addresses[before] + np.uint64(self.values.dtype.itemsize)
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
        """Delay a store. ``relaxed``: each thread stores its elements, and may be the one that fences."""
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
        """Drain the stores that a load must see: its thread's, those shown to its program, its rank's.

        ``newest``: it sees all stores of its program.
        """
        if self._pending:
            addresses = np.asarray(pointers.data).ravel()
            bits = pointers.get_element_ty().primitive_bitwidth
            readers = None if newest else threads_of(pointers)
            self._drain_overlapping(task, addresses, max(1, bits // 8), readers)

    def barrier(self, task: Task, threads: Lanes = None) -> None:
        """Order the stores of all threads, or of ``threads``, before their later accesses."""
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
        """Make ordered stores visible. ``each_thread``: even scalars need a barrier before.

        ``threads``: the threads that release, each its own stores.
        """
        if threads is not None:
            self._split(task, threads)
        chosen = [
            p
            for p in self._pending
            if (
                p.task is task
                # shown: the releasing thread may have seen it, and passes it on
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
        parted = []
        for pending in self._pending:
            whole = pending.task is not task or pending.ordered or pending.own(threads)
            if whole or pending.threads is None:
                parted.append(pending)
                continue
            selected = np.isin(pending.threads, threads)
            if selected.all() or not selected.any():
                parted.append(pending)
                continue
            for part in (selected, ~selected):
                addresses, values = pending.addresses[part], pending.values[part]
                own_threads = pending.threads[part]
                half = replace(pending, addresses=addresses, values=values, threads=own_threads)
                parted.append(half)
        self._pending = parted

    def end(self, tasks: Sequence[Task]) -> None:
        """Drain all stores of an ended kernel's programs, and all that they have acquired."""
        programs = set(map(id, tasks))
        ranks = {task.rank for task in tasks}
        self._drain(
            p
            for p in self._pending
            if id(p.task) in programs or (p.rank_only and p.task.rank in ranks)
        )

    def sometimes(self) -> bool:
        """Drain a random store now and then; return whether one became visible. Called at every point."""
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
