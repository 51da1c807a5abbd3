"""Ways of keys to the queries, on streams: each gives the keys of one rank after another, as they come.

``StagedKeys``  all ranks stage theirs in their own workspace, readers take them from there
``RingKeys``    from rank to rank: each sends on what it has from the one before, and has room for two

In both the compute stream works on what is there while the copy stream brings what is next. On a CPU, where
streams run their items at once and a peer's memory is as good as the own, staged keys are not copied.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from interlace.ops.attention.problem import AttentionProblem
from interlace.runtime.core.memory import Layout, Workspace

Tensor = torch.Tensor
Behind = Callable[[Workspace, int], None]


def no_step(workspace: Workspace, step: int) -> None:
    return


class Travelling(Protocol):
    """A way for keys. ``Layout`` of the op: what it needs is added there when it is made."""

    def travel(
        self, workspace: Workspace, behind: Behind = no_step
    ) -> Iterator[tuple[int, Tensor]]:
        """(source, its packed keys) in the order of arrival; they stay until the next is asked for.

        ``behind``: what is done behind every step.
        """


class StagedKeys:
    """See the module."""

    def __init__(self, problem: AttentionProblem, layout: Layout) -> None:
        self._problem = problem
        self._slots = layout.add_slots(problem.shards.world_size)
        rows = max(problem.shards.lengths)
        self._offset = layout.add_data(rows * problem.row_elements * problem.key.element_size())
        layout.pulled = True

    def _of(self, workspace: Workspace, source: int) -> Tensor:
        rows = self._problem.shards.lengths[source]
        return self._problem.packed_in(workspace, source, self._offset, rows)

    def travel(
        self, workspace: Workspace, behind: Behind = no_step
    ) -> Iterator[tuple[int, Tensor]]:
        problem, communicator = self._problem, self._problem.communicator
        compute, copying, rank = communicator.compute, communicator.copying, problem.rank
        copying.wait_credits(workspace)
        mine = self._of(workspace, rank)
        key, value = problem.keys_and_values(mine)
        copying.copy(key, problem.key, "stage keys")
        copying.copy(value, problem.value, "stage values")
        for reader in problem.readers():
            copying.publish(workspace, reader, self._slots + rank)
        compute.wait_event(copying.record())
        for source in problem.arrivals():
            packed = self._of(workspace, source)
            if source != rank:
                direct = communicator.place.direct_access
                (compute if direct else copying).wait(workspace, source, self._slots + source)
                if not direct:
                    brought = torch.empty_like(packed)
                    copying.copy(brought, packed, f"keys of rank {source}")
                    compute.wait_event(copying.record())
                    packed = brought
            yield source, packed


class RingKeys:
    """See the module. In step s a rank has the keys of rank - s: its own, then what came to buffer s % 2.

    Slots: "arrived" of every step, set by the rank before; "free" of every step, set by the next rank when
    it has computed with what came in that step, and has sent it on, so its buffer may be filled again::

        rank 1  copies   own -> 2 | of 0 -> 2     | free 1? of 3 -> 2 |
                compute  own      | of 0          | of 3              | of 2
    """

    def __init__(self, problem: AttentionProblem, layout: Layout) -> None:
        self._problem, self._steps = problem, problem.shards.world_size
        self._own = problem.packed()
        self._arrived = layout.add_slots(self._steps)
        self._free = layout.add_slots(self._steps)
        nbytes = max(problem.shards.lengths) * problem.row_elements * problem.key.element_size()
        self._buffers = [layout.add_data(nbytes) for _ in range(2)]

    def _buffer(self, workspace: Workspace, owner: int, step: int, source: int) -> Tensor:
        rows = self._problem.shards.lengths[source]
        return self._problem.packed_in(workspace, owner, self._buffers[step % 2], rows)

    def travel(
        self, workspace: Workspace, behind: Behind = no_step
    ) -> Iterator[tuple[int, Tensor]]:
        problem, communicator, steps = self._problem, self._problem.communicator, self._steps
        compute, copying, rank = communicator.compute, communicator.copying, problem.rank
        after, before = (rank + 1) % steps, (rank - 1) % steps
        needed = set(problem.sources())
        packed = self._own
        copying.wait_credits(workspace)
        for step in range(steps):
            source = (rank - step) % steps
            if step:
                packed = self._buffer(workspace, rank, step, source)
                copying.wait(workspace, before, self._arrived + step)
                compute.wait_event(copying.record())
            if step + 1 < steps:
                if step > 1:
                    copying.wait(workspace, after, self._free + step - 1)
                theirs = self._buffer(workspace, after, step + 1, source)
                copying.copy(theirs, packed, f"keys of rank {source}")
                copying.publish(workspace, after, self._arrived + step + 1)
            if source in needed:
                yield source, packed
            behind(workspace, step)
            if 0 < step < steps - 2:
                copying.wait_event(compute.record())
                copying.publish(workspace, before, self._free + step)
