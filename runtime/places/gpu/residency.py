"""Residency: which kernels that wait for peers, of several groups, run on a GPU together.

A persistent kernel that waits for its peers keeps its multiprocessors until they have come. Where the
kernels of two groups are each on one rank first, and do not fit together, neither can ever begin on the
other rank::

    rank 0   | group A's kernel, all SMs: waits for rank 1 |   group B's has no SM
    rank 1   | group B's kernel, all SMs: waits for rank 0 |   group A's has no SM

So on each rank kernels of several groups run side by side only if all of their programs fit; otherwise the
later one, in the order of the calls, waits on its stream for the end of the earlier. Then, if ranks call
the ops of groups that they share in one order, as torch.distributed asks for, nothing blocks: of all ops
under way the first waits for no other op on any rank, and what runs beside it leaves it room.

A program is taken to fill a multiprocessor. Signal kernels, of one warp, are left out: they have the one
that ``program_limit`` leaves. Copies and torch code wait for nobody while they hold one.

What has to wait for another joins it: from then on both are one *chain*, which never needs more than its
largest op. One group by itself is one chain and costs nothing, as its ops follow each other anyway.

Not seen: ops that a graph replays. Whoever replays graphs of several groups at the same time orders the
replays alike on all ranks, on one stream.
"""

import threading
from typing import Any

from interlace.runtime.places.gpu.stream import Point


class Chain:
    """Ops that run one after another. ``group`` is that of the last one, which has ``ends``."""

    __slots__ = ("ends", "group", "in_op", "largest")

    def __init__(self, group: int) -> None:
        self.group = group
        self.ends: list[Point] = []
        self.largest = self.in_op = 0


class Residency:
    """The kernels of one rank on one GPU of ``capacity`` multiprocessors; ``alone``: the only chain."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._chains: dict[int, Chain] = {}  # by group, the one whose last op is oldest first
        self.alone: Chain | None = None
        self._lock = threading.RLock()  # a collection of garbage may close a group within

    def admit(self, group: int, programs: int, where: Any) -> list[Point]:
        """``group`` is about to launch so many programs of its op at ``where``; what they must wait for."""
        chains = self._chains
        with self._lock:
            own = chains.get(group)
            if own is None:
                own = chains[group] = Chain(group)
            own.in_op += programs
            own.largest = max(own.largest, min(own.in_op, self.capacity))
            waited: list[Point] = []
            others = [chain for chain in chains.values() if chain is not own]
            while others and own.largest + sum(each.largest for each in others) > self.capacity:
                other = others.pop(0)
                waited += other.ends
                own.largest = max(own.largest, other.largest)
                chains.pop(other.group, None)
            own.ends.append(Point(where))
            self._count()
            return waited

    def ended(self, group: int, where: Any) -> None:
        """The end of ``group``'s op was enqueued at ``where``, after all its kernels."""
        own = self._chains.get(group)
        if own is None or not own.in_op:
            return
        with self._lock:
            own.largest = max(own.largest, min(own.in_op, self.capacity))
            own.in_op = 0
            own.ends = [Point(where)]
            self._chains.pop(group, None)
            self._chains[group] = own  # the youngest
            self._count()

    def forget(self, group: int) -> None:
        with self._lock:
            self._chains.pop(group, None)
            self._count()

    def _count(self) -> None:
        self.alone = next(iter(self._chains.values())) if len(self._chains) == 1 else None


_of_devices: dict[Any, Residency] = {}


def residency(key: Any, capacity: int, known: dict[Any, Residency] | None = None) -> Residency:
    """The residency of ``key``, one for all groups: among ``known``, or of a GPU of this process."""
    return (_of_devices if known is None else known).setdefault(key, Residency(capacity))
