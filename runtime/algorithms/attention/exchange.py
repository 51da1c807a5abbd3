"""Attention with heads in place of tokens: an all-to-all before it gives each rank all tokens of some
heads, one behind it the own tokens of all heads (DeepSpeed's Ulysses).

Rank r has query heads ``[r * H / W, (r + 1) * H / W)``, rounded down, and the key heads that they see; of
few key heads several ranks may have the same one. Its queries, those keys and values come from every rank,
which pushes them where they belong; results go back the same way::

    rank 1  copies   q, k, v of heads 0 -> 0 | of heads 2 -> 2 |              | results -> 0 | -> 2
            compute  own tokens' keys | keys of 0 | keys of 2 | merge, all tokens of heads 1

Partial results are those over the keys of one rank each, as in the other methods, and so have their bits.
``fused`` computes by Triton kernels, ``pipelined`` by torch.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from interlace.runtime.algorithms.attention.kernel_blocks import KernelBlocks
from interlace.runtime.algorithms.attention.problem import AttentionProblem, Blocks
from interlace.runtime.algorithms.attention.torch_blocks import TorchBlocks
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor


class HeadShards:
    """Which heads are whose: ``queries[r]`` and ``keys[r]`` are slices of all heads."""

    def __init__(self, world_size: int, heads: int, per_key: int) -> None:
        bounds = [rank * heads // world_size for rank in range(world_size + 1)]
        self.queries = [slice(a, b) for a, b in pairwise(bounds)]
        self.keys = [
            slice(q.start // per_key, -(-q.stop // per_key)) if q.stop > q.start else slice(0, 0)
            for q in self.queries
        ]
        self.first = [
            q.start - k.start * per_key for q, k in zip(self.queries, self.keys, strict=True)
        ]

    def queries_of(self, rank: int) -> int:
        return self.queries[rank].stop - self.queries[rank].start

    def keys_of(self, rank: int) -> int:
        return self.keys[rank].stop - self.keys[rank].start


class HeadExchange:
    """The rooms of every rank's workspace for what comes to it, and the sends that fill them.

    ``there``: tensors ``[tokens, batches, heads of the rank, size]`` of all tokens, such as queries, each
    source's at its place; ``back``: of the own tokens and all heads.
    """

    def __init__(self, problem: AttentionProblem, layout: Layout) -> None:
        self.problem, shards = problem, problem.shards
        world = shards.world_size
        self.heads = HeadShards(world, problem.query.shape[2], problem.per_key)
        self.begins = [0, *accumulate(shards.lengths)]
        self.layout = layout
        self.most_queries = max(self.heads.queries_of(r) for r in range(world))
        self.most_keys = max(self.heads.keys_of(r) for r in range(world))

    def room(self, rows: int, heads: int, dtype: torch.dtype) -> int:
        _, batches, _, size = self.problem.query.shape
        return self.layout.add_data(rows * batches * heads * size * dtype.itemsize)

    def view(
        self,
        workspace: Workspace,
        owner: int,
        room: int,
        source: int,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor:
        """The part of a room of ``owner`` that is for tokens of ``source``; ``shape``: of one token."""
        begin = self.begins[source] * torch.Size(shape).numel() * dtype.itemsize
        rows = self.problem.shards.lengths[source]
        return workspace.data(owner, room + begin, (rows, *shape), dtype)

    def whole(
        self, workspace: Workspace, room: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        total = self.problem.shards.total
        return workspace.data(self.problem.rank, room, (total, *shape), dtype)

    def others(self) -> list[int]:
        world, rank = self.problem.shards.world_size, self.problem.rank
        return [(rank + step) % world for step in range(1, world)]

    def arrivals(self) -> list[int]:
        world, rank = self.problem.shards.world_size, self.problem.rank
        return [(rank - step) % world for step in range(world)]

    def query_shape(self, rank: int) -> tuple[int, int, int]:
        _, batches, _, size = self.problem.query.shape
        return batches, self.heads.queries_of(rank), size

    def key_shape(self, rank: int) -> tuple[int, int, int, int]:
        _, batches, _, size = self.problem.key.shape
        return 2, batches, self.heads.keys_of(rank), size

    def part(self) -> AttentionProblem:
        """The problem that this rank works on: all queries, of its heads."""
        problem, rank = self.problem, self.problem.rank
        own = self.heads.keys[rank]
        key = problem.key[:, :, own]
        return replace(
            problem, key=key, value=problem.value[:, :, own], first_head=self.heads.first[rank]
        )

    def sources(self) -> list[int]:
        """The ranks whose keys somebody sees: all that have tokens."""
        return [source for source, length in enumerate(self.problem.shards.lengths) if length]

    def blocks(self, configuration: Configuration | None) -> Blocks:
        part, ranks = self.part(), range(self.problem.shards.world_size)
        spans, sources = part.spans(ranks), self.sources()
        shape = self.problem.shards.total, *self.query_shape(self.problem.rank)
        if configuration is None:
            return TorchBlocks(part, shape, spans, sources, ranks)
        return KernelBlocks(part, shape, spans, sources, configuration)


def exchanged_attention(
    problem: AttentionProblem, output: Tensor, lse: Tensor, configuration: Configuration | None
) -> Event:
    """Results come back in the dtype of the queries, logarithms of the sums in fp32 or wider."""
    communicator, rank, shards = problem.communicator, problem.rank, problem.shards
    layout, dtype = Layout(), problem.query.dtype
    exchange = HeadExchange(problem, layout)
    heads, total = exchange.heads, shards.total
    there, back = layout.add_slots(shards.world_size), layout.add_slots(shards.world_size)
    query_room = exchange.room(total, exchange.most_queries, dtype)
    key_room = exchange.room(2 * total, exchange.most_keys, dtype)
    rows = max(shards.lengths)
    _, batches, all_heads, size = problem.query.shape
    output_room = layout.add_data(rows * batches * all_heads * size * dtype.itemsize)
    lse_room = layout.add_data(rows * batches * all_heads * lse.dtype.itemsize)

    blocks = exchange.blocks(configuration)

    def body(workspace: Workspace) -> None:
        compute, copying = communicator.compute, communicator.copying
        copying.wait_credits(workspace)
        for peer in [rank, *exchange.others()]:
            if heads.queries_of(peer):
                queries = exchange.view(
                    workspace, peer, query_room, rank, exchange.query_shape(peer), dtype
                )
                copying.copy(
                    queries, problem.query[:, :, heads.queries[peer]], f"queries to rank {peer}"
                )
                keys = exchange.view(
                    workspace, peer, key_room, rank, exchange.key_shape(peer), dtype
                )
                for index, tensor in enumerate((problem.key, problem.value)):
                    copying.copy(
                        keys[:, index], tensor[:, :, heads.keys[peer]], f"keys to rank {peer}"
                    )
            if peer != rank:
                copying.publish(workspace, peer, there + rank)
        compute.wait_event(copying.record())
        for source in exchange.arrivals():
            if source != rank:
                compute.wait(workspace, source, there + source)
        own_heads = heads.queries_of(rank)
        if own_heads:
            query = exchange.whole(workspace, query_room, exchange.query_shape(rank), dtype)
            made = problem.query.new_empty(query.shape)
            sums = lse.new_empty(batches, own_heads, total)
            blocks.begin(query)
            for source in exchange.arrivals():
                if shards.lengths[source]:
                    packed = exchange.view(
                        workspace, rank, key_room, source, exchange.key_shape(rank), dtype
                    )
                    blocks.attend(source, packed)
            blocks.merge(made, sums)
        for peer in [*exchange.others(), rank]:
            first, last = exchange.begins[peer], exchange.begins[peer + 1]
            if own_heads and first < last:
                shape = last - first, batches, all_heads, size
                theirs = workspace.data(peer, output_room, shape, dtype)
                compute.copy(
                    theirs[:, :, heads.queries[rank]], made[first:last], f"results to rank {peer}"
                )
                reach = workspace.data(
                    peer, lse_room, (batches, all_heads, last - first), lse.dtype
                )
                compute.copy(
                    reach[:, heads.queries[rank]], sums[..., first:last], f"sums to rank {peer}"
                )
            if peer != rank:
                compute.publish(workspace, peer, back + rank)
        for source in exchange.arrivals():
            if source != rank:
                compute.wait(workspace, source, back + source)
        mine = workspace.data(rank, output_room, output.shape, dtype)
        compute.copy(output, mine, "results")
        compute.copy(lse, workspace.data(rank, lse_room, lse.shape, lse.dtype), "sums")

    return communicator.enqueue(problem.op, layout, body)
