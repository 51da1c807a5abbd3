"""Hardware queues of a fake GPU: few, in order, and shared by independent streams.

CUDA passes the work of streams to the GPU through ``CUDA_DEVICE_MAX_CONNECTIONS`` queues, 8 by default. A
queue is in order. A kernel leaves it when the kernel begins, and a wait leaves it when the wait ends. Work
begins when its stream comes to it. So a wait holds up streams that share its queue (head-of-line blocking),
and the work that would end the wait may be in one of them.

torch takes streams from a pool of 32 per priority; the 33rd is the first again.
"""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

POOL = 32
PRIORITIES = 4  # that torch makes streams for, each in turn
CONNECTIONS = 0  # for a fake GPU without a number; 0: each stream has its own queue


class HardwareQueues:
    """The queues of all contexts; a process has one context."""

    def __init__(self, connections: int) -> None:
        self._connections = connections
        self._waiting: dict[Hashable, list[Any]] = defaultdict(list)  # items that have not begun
        self._queue_of: dict[int, Hashable] = {0: (None, 0)}
        self._pooled: dict[tuple[Hashable, int, int], int] = {}
        self._turn: dict[tuple[Hashable, int], Iterator[int]] = defaultdict(itertools.count)
        self._made: dict[Hashable, Iterator[int]] = defaultdict(itertools.count)

    def of_the_pool(self, context: Hashable, priority: int) -> tuple[Hashable, int, int]:
        """Return the stream of its pool that torch returns next."""
        urgent = int(priority < 0)
        return context, urgent, next(self._turn[context, urgent]) % POOL

    def known(self, pooled: tuple[Hashable, int, int]) -> int | None:
        return self._pooled.get(pooled)

    def add_pooled(self, handle: int, pooled: tuple[Hashable, int, int]) -> None:
        context, urgent, number = pooled
        self._pooled[pooled] = handle
        self._queue_of[handle] = context, (PRIORITIES * number + urgent) % self._connections

    def add(self, handle: int, context: Hashable) -> None:
        """A stream that torch's pool does not have."""
        self._queue_of[handle] = context, next(self._made[context]) % self._connections

    def enqueued(self, handle: int, item: Any) -> None:
        self._waiting[self._queue_of.get(handle, (None, 0))].append(item)

    def may_go_on(self, handle: int, item: Any) -> bool:
        """Return whether ``item``, the first of its stream, has begun or is at the head of its queue."""
        queue = self._waiting[self._queue_of.get(handle, (None, 0))]
        return all(each is not item for each in queue) or queue[0] is item

    def went_on(self, handle: int, item: Any, *, ended: bool) -> None:
        """Note that ``item`` has begun or ended; a wait begins only at its end."""
        queue = self._waiting[self._queue_of.get(handle, (None, 0))]
        if (ended or not item.blocks) and queue and queue[0] is item:
            queue.pop(0)


def hardware_queues(connections: int | None) -> HardwareQueues | None:
    """Return this many queues, or CONNECTIONS; None if each stream has its own."""
    count = CONNECTIONS if connections is None else connections
    return HardwareQueues(count) if count else None
