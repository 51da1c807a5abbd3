"""Attention to keys that travel to the queries, on streams, and gradients of keys that travel back.

The compute stream works on arrived keys while the copy stream fetches the next ones. On a CPU, where
streams run their items at once and a peer's memory is as fast as the own, staged keys are not copied.
Contributions to the gradients of others' keys are fp32 or wider, and are read in place.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Rows, Table
from interlace.kernels.attention import forward
from interlace.ops.attention.blocks import KernelBlocks, blocks_of
from interlace.ops.attention.problem import AttentionProblem, AttentionResult, rows_argument
from interlace.ops.matmul import operands
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.numerics.reductions import fold
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor


class StagedKeys:
    """All ranks stage their keys in their own workspace, and readers take them from there.

    ``layout``, the op's, gets the needed regions, here and in the classes below.
    """

    def __init__(self, problem: AttentionProblem, layout: Layout) -> None:
        self._problem = problem
        self._slots = layout.add_slots(problem.shards.world_size)
        rows = max(problem.shards.lengths)
        self._offset = layout.add_data(rows * problem.row_elements * problem.key.element_size())
        layout.pulled = True

    def _of(self, workspace: Workspace, source: int) -> Tensor:
        rows = self._problem.shards.lengths[source]
        return self._problem.packed_in(workspace, source, self._offset, rows)

    def travel(self, workspace: Workspace) -> Iterator[tuple[int, Tensor | None]]:
        """Yield (source, its packed keys) in the order of arrival; keys stay until the next iteration.

        Around a ring, also yield the sources whose keys only pass, without keys.
        """
        problem, communicator = self._problem, self._problem.communicator
        compute, copying, rank = communicator.compute, communicator.copying, problem.rank
        copying.wait_credits(workspace)
        own_keys = self._of(workspace, rank)
        key, value = problem.keys_and_values(own_keys)
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
    """Keys go from rank to rank: each passes on the keys from the rank before, and has memory for two.

    In step s a rank has the keys of rank - s: its own, then those in buffer s % 2. Slots: "arrived" of
    every step, set by the rank before; "free" of every step, set by the next rank when it has computed with
    that step's keys, and has sent them on, so its buffer may be filled again::

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

    def travel(self, workspace: Workspace) -> Iterator[tuple[int, Tensor | None]]:
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
            yield source, packed if source in needed else None
            if 0 < step < steps - 2:
                copying.wait_event(compute.record())
                copying.publish(workspace, before, self._free + step)


class StagedSums:
    """Contributions stay in the workspace of their rank; each rank adds up all for it, in rank order."""

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
        """Return memory for the contribution to ``source``'s keys, free when the stream reaches it."""
        return self._of(workspace, self._problem.rank, source)

    def publish(self, workspace: Workspace, source: int, complete: bool) -> None:
        """Publish it if it is ``complete``; called after every step of keys, also without contribution."""
        rank = self._problem.rank
        if complete and source != rank:
            self._problem.communicator.compute.publish(workspace, source, self._slots + rank)

    def total(self, workspace: Workspace) -> Tensor:
        """Return the gradients of the own keys, packed."""
        problem, compute = self._problem, self._problem.communicator.compute
        rank = problem.rank
        makers = sorted([*problem.readers(), *({rank} & set(problem.sources()))])
        for maker in makers:
            if maker != rank:
                compute.wait(workspace, maker, self._slots + maker)
        parts = [self._of(workspace, maker, rank) for maker in makers]
        total = problem.empty_total()

        def add_up() -> None:
            if parts:
                fold("sum", parts, total)
            else:
                total.zero_()

        compute.call(add_up, "gradients of the own keys")
        return total


class RingSums:
    """Each rank sums the contributions to its keys in the order in which these go round; memory for two.

    In step s a rank makes its contribution to rank - s, in buffer s % 2. Slots: "made" of every step, set
    by rank + s; "taken" of every step, set by rank - s when it has added that up, after the next step, so
    that no rank waits for a rank in the same step::

        rank 1  for 1 | for 0      | taken 1? for 3 | taken 0? for 2 |
                      | + own      | + of 2         | + of 3         | + of 0
    """

    def __init__(self, problem: AttentionProblem, layout: Layout) -> None:
        self._problem, self._steps = problem, problem.shards.world_size
        self._made, self._taken = (layout.add_slots(self._steps) for _ in range(2))
        nbytes = max(problem.shards.lengths) * problem.row_elements * problem.wide.itemsize
        self._buffers = [layout.add_data(nbytes) for _ in range(2)]
        layout.pulled = True
        self._total = problem.empty_total()
        self._used: dict[int, int] = {}  # by buffer, the step of its last use

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

    def publish(self, workspace: Workspace, source: int, complete: bool) -> None:
        compute = self._problem.communicator.compute
        step = (self._problem.rank - source) % self._steps
        if complete and step:
            compute.publish(workspace, source, self._made + step)
        if step:
            self._take(workspace, step - 1)
        else:
            compute.call(self._total.zero_, "no gradients yet")

    def _take(self, workspace: Workspace, step: int) -> None:
        problem, compute = self._problem, self._problem.communicator.compute
        rank = problem.rank
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


WAYS: dict[str, type[StagedKeys | RingKeys]] = {"all_gather": StagedKeys, "ring": RingKeys}
BACK: dict[str, type[StagedSums | RingSums]] = {"all_gather": StagedSums, "ring": RingSums}


def attention_on_the_way(
    problem: AttentionProblem,
    method: str,
    output: Tensor,
    lse: Tensor,
    configuration: Configuration | None,
) -> Event:
    problem = replace(problem, heads_first=configuration is None)
    layout, blocks = Layout(), blocks_of(problem, configuration)
    keys = WAYS[method](problem, layout)

    def body(workspace: Workspace) -> None:
        for source, packed in keys.travel(workspace):
            if packed is not None:
                blocks.attend(source, packed)
        blocks.merge(output, lse)

    return problem.communicator.enqueue(problem.op, layout, body)


def attention_backward(
    problem: AttentionProblem,
    method: str,
    result: AttentionResult,
    grads: tuple[Tensor, Tensor, Tensor],
    configuration: Configuration | None,
) -> Event:
    """Compute ``grads`` of query, key and value, in the problem's layout; ``method`` moves keys again."""
    problem = replace(problem, heads_first=configuration is None)
    layout, blocks = Layout(), blocks_of(problem, configuration)
    keys = WAYS[method](problem, layout)
    sums = BACK[method](problem, layout)

    def body(workspace: Workspace) -> None:
        # peers may still read the last op's data here
        problem.communicator.compute.wait_credits(workspace)
        blocks.begin_backward(result)
        for source, packed in keys.travel(workspace):
            if packed is not None:
                blocks.differentiate(source, packed, sums.room(workspace, source))
            sums.publish(workspace, source, packed is not None)
        blocks.query_gradient(grads[0])
        problem.give(sums.total(workspace), grads[1:])

    return problem.communicator.enqueue(problem.op, layout, body)


def all_gather_attention_fused(
    problem: AttentionProblem, output: Tensor, lse: Tensor, configuration: Configuration
) -> Event:
    """Gather all ranks' keys, wait and compute in one kernel; its programs or the copy engine send."""
    communicator, shards, rank = problem.communicator, problem.shards, problem.rank
    packed, lengths = problem.packed(), shards.lengths
    blocks = KernelBlocks(problem, problem.query.shape, configuration)
    blocks.begin(problem.query)
    size = max(1, formulas.ceil_div(max(lengths), configuration.chunks))
    arrivals, readers = problem.arrivals(), problem.readers()
    all_lines = formulas.send_lines(rank, shards.world_size, lengths, size)
    lines = [line for line in all_lines if line[0] in readers]

    def slots_of(source: int) -> tuple[int, int]:
        """Return the first slot of the chunks of ``source``, and how many there are."""
        first = formulas.chunk_slots(lengths[:source], size)
        return first, formulas.ceil_div(lengths[source], size)

    def part_line(source: int) -> formulas.Line:
        number, row = blocks.sources.index(source), sum(lengths[:source])
        return shards.part_line(source, number, row, slots_of(source))

    key = shards, problem.mask, size
    parts = communicator.table(
        ("attention arrivals", *key), lambda: [part_line(s) for s in arrivals], passing=True
    )
    sends = communicator.table(("attention sends", *key), lambda: lines, passing=True)
    nbytes = shards.total * problem.row_elements * packed.element_size()
    layout = Layout(formulas.chunk_slots(lengths, size), nbytes)

    arguments = {
        "keys": Rows(packed, packed.stride(0)),
        "queries": rows_argument(blocks.query),
        "spans": blocks.spans,
        "partials": blocks.partials,
        "sends": Table(sends, len(lines)),
        "parts": Table(parts, len(arrivals)),
        "heads": blocks.heads,
        "scale": blocks.scale,
        "TILES": blocks.tiles,
    }

    def arriving() -> Iterator[tuple[int, int]]:
        for source in [arrival for arrival in arrivals if arrival != rank]:
            first, count = slots_of(source)
            for slot in range(first, first + count):
                yield source, slot

    options = operands.launch_options(configuration)
    launch = forward.all_gather_attention_kernel, arguments, options
    about = problem.op, layout, configuration, launch, (lines, packed), blocks.query_tiles, arriving

    def merge(_: Workspace) -> None:
        blocks.merge(output, lse)

    return operands.enqueue_with_sends(communicator, *about, merge)
