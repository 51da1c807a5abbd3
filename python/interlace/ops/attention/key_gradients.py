"""Ways back of what ranks make for the gradients of others' keys, fp32 or wider.

``StagedSums``  all that a rank makes stays in its workspace; each rank adds up what all have made for it,
                in the order of the ranks
``RingSums``    room for two ranks' keys: a rank has what it made in a step taken before the step after the
                next. Keys of rank r go round from r to r - 1, and in this order sums are made

In both, what is made is read where it lies.
"""

from typing import Protocol

import torch

from interlace.ops.attention.problem import AttentionProblem
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.numerics.reductions import fold

Tensor = torch.Tensor


class KeySums(Protocol):
    """``Layout`` of the op: what is needed is added there when it is made."""

    def room(self, workspace: Workspace, source: int) -> Tensor:
        """Where this rank makes what it gives to the keys of ``source``, free when the stream is there."""

    def made(self, workspace: Workspace, source: int) -> None:
        """It is made."""

    def step(self, workspace: Workspace, step: int) -> None:
        """Behind every step of keys that travel, also where there was nothing to make."""

    def total(self, workspace: Workspace) -> Tensor:
        """The gradients of the own keys, packed."""


class StagedSums:
    """See the module."""

    def __init__(self, problem: AttentionProblem, layout: Layout) -> None:
        self._problem, shards = problem, problem.shards
        self._slots = layout.add_slots(shards.world_size)
        self._offset = layout.add_data(shards.total * problem.row_elements * problem.wide.itemsize)
        layout.pulled = True

    def _of(self, workspace: Workspace, maker: int, owner: int) -> Tensor:
        problem, lengths = self._problem, self._problem.shards.lengths
        begin = sum(lengths[:owner]) * problem.row_elements * problem.wide.itemsize
        shape = lengths[owner], problem.row_elements
        return workspace.data(maker, self._offset + begin, shape, problem.wide)

    def room(self, workspace: Workspace, source: int) -> Tensor:
        return self._of(workspace, self._problem.rank, source)

    def made(self, workspace: Workspace, source: int) -> None:
        rank = self._problem.rank
        if source != rank:
            self._problem.communicator.compute.publish(workspace, source, self._slots + rank)

    def step(self, workspace: Workspace, step: int) -> None:
        return

    def total(self, workspace: Workspace) -> Tensor:
        problem, compute = self._problem, self._problem.communicator.compute
        rank = problem.rank
        makers = sorted([*problem.readers(), *({rank} & set(problem.sources()))])
        for maker in makers:
            if maker != rank:
                compute.wait(workspace, maker, self._slots + maker)
        parts = [self._of(workspace, maker, rank) for maker in makers]
        total = empty_total(problem)

        def add_up() -> None:
            if parts:
                fold("sum", parts, total)
            else:
                total.zero_()

        compute.call(add_up, "gradients of the own keys")
        return total


class RingSums:
    """See the module. In step s a rank makes what it gives to rank - s, in buffer s % 2.

    Slots: "made" of every step, set by rank + s; "taken" of every step, set by rank - s when it has added
    that up, behind the next step, so that nobody waits for somebody who is in the same step::

        rank 1  for 1 | for 0      | taken 1? for 3 | taken 0? for 2 |
                      | + own      | + of 2         | + of 3         | + of 0
    """

    def __init__(self, problem: AttentionProblem, layout: Layout) -> None:
        self._problem, self._steps = problem, problem.shards.world_size
        self._made, self._taken = (layout.add_slots(self._steps) for _ in range(2))
        nbytes = max(problem.shards.lengths) * problem.row_elements * problem.wide.itemsize
        self._buffers = [layout.add_data(nbytes) for _ in range(2)]
        layout.pulled = True
        self._total = empty_total(problem)
        self._used: dict[int, int] = {}  # of a buffer, in which step

    def _of(self, workspace: Workspace, maker: int, step: int) -> Tensor:
        problem = self._problem
        owner = (maker - step) % self._steps
        shape = problem.shards.lengths[owner], problem.row_elements
        return workspace.data(maker, self._buffers[step % 2], shape, problem.wide)

    def room(self, workspace: Workspace, source: int) -> Tensor:
        rank, compute = self._problem.rank, self._problem.communicator.compute
        step = (rank - source) % self._steps
        before = self._used.get(step % 2, 0)
        if before:  # the own part of step 0 is taken in the order of the stream
            compute.wait(workspace, (rank - before) % self._steps, self._taken + before)
        self._used[step % 2] = step
        return self._of(workspace, rank, step)

    def made(self, workspace: Workspace, source: int) -> None:
        rank = self._problem.rank
        if source != rank:
            step = (rank - source) % self._steps
            self._problem.communicator.compute.publish(workspace, source, self._made + step)

    def step(self, workspace: Workspace, step: int) -> None:
        if not step:
            self._problem.communicator.compute.call(self._total.zero_, "no gradients yet")
        else:
            self._take(workspace, step - 1)

    def _take(self, workspace: Workspace, step: int) -> None:
        problem, compute, rank = (
            self._problem,
            self._problem.communicator.compute,
            self._problem.rank,
        )
        maker = (rank + step) % self._steps
        if rank not in problem.shards.sources(maker, problem.mask):
            return
        if step:
            compute.wait(workspace, maker, self._made + step)
        part, total = self._of(workspace, maker, step), self._total
        compute.call(lambda: total.add_(part), f"gradients made by rank {maker}")
        if step:
            compute.publish(workspace, maker, self._taken + step)

    def total(self, workspace: Workspace) -> Tensor:
        self._take(workspace, self._steps - 1)
        return self._total


def empty_total(problem: AttentionProblem) -> Tensor:
    shape = problem.shards.lengths[problem.rank], problem.row_elements
    return problem.key.new_empty(shape, dtype=problem.wide)
