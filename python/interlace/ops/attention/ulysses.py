"""Attention with heads in place of tokens (DeepSpeed's Ulysses), between two all-to-alls.

Rank r has query heads ``[r * H / W, (r + 1) * H / W)``, rounded down, and the key heads that they see. With
few key heads several ranks may have the same one. Every rank pushes the queries, keys and values for those
heads to rank r; results go back the same way::

    rank 1  copies   q, k, v of heads 0 -> 0 | of heads 2 -> 2 |              | results -> 0 | -> 2
            compute  own tokens' keys | keys of 0 | keys of 2 | merge, all tokens of heads 1

Like in the other methods, a partial result covers the keys of one rank, and so the bits are the same.

In backward the gradients of keys come back in fp32. If ranks share a head of keys there are several of
these, which are added up in the order of the ranks.

Tensors that travel have tokens first and heads last but one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from interlace.ops.attention.blocks import Blocks, blocks_of, differentiate_all
from interlace.ops.attention.problem import AttentionProblem, AttentionResult
from interlace.ops.collectives.launch import other_ranks, wait_for_all
from interlace.runtime.core.call import Call
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor


class HeadShards:
    """The heads of each rank: ``queries[r]`` and ``keys[r]`` are slices of all heads.

    ``copies[r]``: a slice of all ranks' key heads, one rank's after another; some heads occur repeatedly.
    """

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
        ends = accumulate((_count(key) for key in self.keys), initial=0)
        self.copies = [slice(a, b) for a, b in pairwise(ends)]


def _count(heads: slice) -> int:
    return int(heads.stop - heads.start)


class Piece(NamedTuple):
    """Tensors that travel as packed rows, one after another in each: ``[tokens, batches, heads, size]``
    for each of ``sizes``; ``heads``: the heads of each rank."""

    batches: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    heads: Sequence[slice]

    def _lines(self, rank: int | None) -> tuple[int, int]:
        return self.batches, self.heads[-1].stop if rank is None else _count(self.heads[rank])

    def shape(self, rows: int, rank: int | None = None) -> tuple[int, int]:
        return rows, math.prod(self._lines(rank)) * sum(self.sizes)

    def nbytes(self, rows: int, rank: int | None = None) -> int:
        return math.prod(self.shape(rows, rank)) * self.dtype.itemsize

    def tensors(self, packed: Tensor, rank: int | None = None) -> list[Tensor]:
        lines = self._lines(rank)
        parts = torch.split(packed, [math.prod(lines) * size for size in self.sizes], 1)
        shapes = [(len(packed), *lines, size) for size in self.sizes]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def piece(heads: Sequence[slice], *tensors: Tensor, dtype: torch.dtype | None = None) -> Piece:
    sizes = tuple(tensor.shape[3] for tensor in tensors)
    return Piece(tensors[0].shape[1], sizes, dtype or tensors[0].dtype, heads)


PieceParts = Sequence[Tensor]


def tokens_first(sums: Tensor) -> Tensor:
    """Convert ``[batches, heads, tokens]`` to the layout in which it travels."""
    return sums.permute(2, 0, 1).unsqueeze(-1)


def heads_first(moved: Tensor) -> Tensor:
    return moved.squeeze(-1).permute(1, 2, 0)


class ByPushes:
    """Moves by pushes: each rank stores its data at its place in the readers' workspace; publishes once.

    Results have arrived when the compute stream reaches them, here and in :class:`ByEngine`.
    """

    def __init__(
        self, problem: AttentionProblem, forth: Sequence[Piece], back: Sequence[Piece]
    ) -> None:
        self._problem, lengths = problem, problem.shards.lengths
        ranks, total = range(len(lengths)), problem.shards.total
        self._layout = Layout(2 * len(lengths))
        add = self._layout.add_data
        self._there = [(each, add(max(each.nbytes(total, r) for r in ranks))) for each in forth]
        self._back = [(each, add(each.nbytes(max(lengths)))) for each in back]
        self._begins = [0, *accumulate(lengths)]

    def exchange(self, step: Callable[[], None]) -> Event:
        """Run ``step``, in which heads go to ranks and back."""

        def body(workspace: Workspace) -> None:
            self._workspace = workspace
            step()

        problem = self._problem
        return problem.communicator.enqueue(problem.op, self._layout, body)

    def to_heads(self, pieces: Sequence[PieceParts]) -> list[Tensor]:
        """Send own tokens; for each piece return packed rows: all tokens of this rank's heads."""
        communicator, rank = self._problem.communicator, self._problem.rank
        copying, total = communicator.copying, self._problem.shards.total
        data, own_tokens = self._workspace.data, slice(self._begins[rank], self._begins[rank + 1])
        copying.wait_credits(self._workspace)
        for peer in [rank, *other_ranks(communicator)]:
            for tensors, (each, room) in zip(pieces, self._there, strict=True):
                theirs = data(peer, room, each.shape(total, peer), each.dtype)[own_tokens]
                for to, tensor in zip(each.tensors(theirs, peer), tensors, strict=True):
                    if to.numel():
                        part = tensor[..., each.heads[peer], :]
                        copying.copy(to, part, f"heads to rank {peer}")
            if peer != rank:
                copying.publish(self._workspace, peer, rank)
        communicator.compute.wait_event(copying.record())
        wait_for_all(communicator, self._workspace, 0)
        return [data(rank, room, each.shape(total, rank), each.dtype) for each, room in self._there]

    def to_tokens(self, pieces: Sequence[PieceParts]) -> list[list[Tensor]]:
        """Send all tokens of this rank's heads; for each piece return own tokens of all heads."""
        communicator, rank = self._problem.communicator, self._problem.rank
        compute, lengths = communicator.compute, self._problem.shards.lengths
        data = self._workspace.data
        for peer in [*other_ranks(communicator), rank]:
            own_tokens = slice(self._begins[peer], self._begins[peer + 1])
            for tensors, (each, room) in zip(pieces, self._back, strict=True):
                theirs = data(peer, room, each.shape(lengths[peer]), each.dtype)
                for to, part in zip(each.tensors(theirs), tensors, strict=True):
                    if part[own_tokens].numel():
                        heads_of_rank = to[..., each.heads[rank], :]
                        compute.copy(heads_of_rank, part[own_tokens], f"results to rank {peer}")
            if peer != rank:
                compute.publish(self._workspace, peer, len(lengths) + rank)
        wait_for_all(communicator, self._workspace, len(lengths))
        return [
            each.tensors(data(rank, room, each.shape(lengths[rank]), each.dtype))
            for each, room in self._back
        ]


class ByEngine:
    def __init__(
        self, problem: AttentionProblem, forth: Sequence[Piece], back: Sequence[Piece]
    ) -> None:
        self._problem, self._there, self._back = problem, forth, back

    def exchange(self, step: Callable[[], None]) -> Event:
        self._problem.after_the_caller()
        step()
        return self._problem.communicator.compute.record()

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], name: str) -> None:
        communicator, op = self._problem.communicator, f"{self._problem.op} of {name}"
        if communicator.world_size == 1:
            communicator.compute.copy(outputs[0], inputs[0], name)
            return
        # an engine waits for the work that the caller has issued; the parts are now among it
        communicator.place.hold_current(communicator.compute.record(), f"the parts of {op}")
        terms = ("rows", self._problem.shards.lengths), ("dtype", inputs[0].dtype)
        flat = [[part.view(-1) for part in parts] for parts in (outputs, inputs)]
        event = communicator.engine.all_to_all(Call(op, terms), *flat)
        if event is not None:
            communicator.compute.wait_event(event)

    def to_heads(self, pieces: Sequence[PieceParts]) -> list[Tensor]:
        problem, whole = self._problem, list[Tensor]()
        rank, lengths = problem.rank, problem.shards.lengths
        copy = problem.communicator.compute.copy
        for number, (tensors, each) in enumerate(zip(pieces, self._there, strict=True)):
            new = tensors[0].new_empty
            sent = [new(each.shape(lengths[rank], r)) for r in range(len(lengths))]
            for peer, (packed, heads) in enumerate(zip(sent, each.heads, strict=True)):
                for to, tensor in zip(each.tensors(packed, peer), tensors, strict=True):
                    copy(to, tensor[..., heads, :], "heads")
            whole.append(new(each.shape(sum(lengths), rank)))
            self._exchange(torch.split(whole[-1], list(lengths)), sent, f"heads, {number}")
        return whole

    def to_tokens(self, pieces: Sequence[PieceParts]) -> list[list[Tensor]]:
        problem, whole = self._problem, list[list[Tensor]]()
        rank, lengths = problem.rank, problem.shards.lengths
        copy = problem.communicator.compute.copy
        for number, (tensors, each) in enumerate(zip(pieces, self._back, strict=True)):
            new, rows = tensors[0].new_empty, lengths[rank]
            dense = new(each.shape(sum(lengths), rank))
            for to, tensor in zip(each.tensors(dense, rank), tensors, strict=True):
                copy(to, tensor, "tokens")
            came = [new(each.shape(rows, r)) for r in range(len(lengths))]
            self._exchange(came, torch.split(dense, list(lengths)), f"tokens, {number}")
            whole.append(each.tensors(new(each.shape(rows))))
            for peer, (packed, heads) in enumerate(zip(came, each.heads, strict=True)):
                for to, part in zip(whole[-1], each.tensors(packed, peer), strict=True):
                    copy(to[..., heads, :], part, "tokens")
        return whole


class HeadProblem:
    """This rank's heads of ``problem``, and the pieces that are exchanged for them."""

    def __init__(self, problem: AttentionProblem, configuration: Configuration | None) -> None:
        self.problem, rank = problem, problem.rank
        world, query = problem.shards.world_size, problem.query
        self.heads = heads = HeadShards(world, query.shape[2], problem.per_key)
        self.queries = piece(heads.queries, query)
        self.keys = piece(heads.keys, problem.key, problem.value)
        self.results = self.queries._replace(sizes=(problem.value.shape[3],))
        self.sums = self.queries._replace(sizes=(1,), dtype=problem.wide)
        key, value = (each[:, :, heads.keys[rank]] for each in (problem.key, problem.value))
        all_ranks, first = tuple(range(world)), heads.first[rank]
        self.own = replace(problem, key=key, value=value, first_head=first, ranks=all_ranks)
        own_heads = heads.queries[rank]
        shape = problem.shards.total, query.shape[1], _count(own_heads), query.shape[3]
        self.blocks: Blocks | None = None
        if math.prod(shape):
            self.blocks = blocks_of(self.own, configuration, shape)


def exchanged_attention(
    problem: AttentionProblem,
    output: Tensor,
    lse: Tensor,
    configuration: Configuration | None,
    *,
    by_engine: bool,
) -> Event:
    """Run the op. Results return in the dtype of the queries, log of the sums in fp32 or wider."""
    on_heads, copy = HeadProblem(problem, configuration), problem.communicator.compute.copy
    pieces = [on_heads.queries, on_heads.keys], [on_heads.results, on_heads.sums]
    way = (ByEngine if by_engine else ByPushes)(problem, *pieces)

    def attend() -> None:
        rows, packed = way.to_heads([(problem.query,), (problem.key, problem.value)])
        (query,) = on_heads.queries.tensors(rows, problem.rank)
        attended = query.new_empty(*query.shape[:3], problem.value.shape[3])
        sums = lse.new_empty(query.shape[1], query.shape[2], query.shape[0])
        if on_heads.blocks is not None:
            on_heads.blocks.begin(query)
            on_heads.blocks.attend(None, packed)
            on_heads.blocks.merge(attended, sums)
        (results,), (logarithms,) = way.to_tokens([(attended,), (tokens_first(sums),)])
        copy(output, results, "results")
        copy(tokens_first(lse), logarithms, "sums")

    return way.exchange(attend)


def exchanged_backward(
    problem: AttentionProblem,
    result: AttentionResult,
    grads: tuple[Tensor, Tensor, Tensor],
    configuration: Configuration | None,
    *,
    by_engine: bool,
) -> Event:
    on_heads, rank = HeadProblem(problem, configuration), problem.rank
    more = [] if result.lse_grad is None else [tokens_first(result.lse_grad)]
    by_query = [result.grad, result.output, tokens_first(result.lse), *more]
    both = problem.key, problem.value
    of_queries = [piece(on_heads.heads.queries, each) for each in by_query]
    of_keys = piece(on_heads.heads.copies, *both, dtype=problem.wide)
    pieces = [on_heads.queries, on_heads.keys, *of_queries], [on_heads.queries, of_keys]
    way = (ByEngine if by_engine else ByPushes)(problem, *pieces)

    def differentiate() -> None:
        rows, packed, *more = way.to_heads(
            [(problem.query,), both, *((each,) for each in by_query)]
        )
        (query,) = on_heads.queries.tensors(rows, rank)
        grad, output, *sums = (
            tensor
            for each, rows in zip(of_queries, more, strict=True)
            for tensor in each.tensors(rows, rank)
        )
        of_query, total = torch.empty_like(query), problem.shards.total
        of_keys_total = query.new_empty(of_keys.shape(total, rank), dtype=of_keys.dtype)
        if on_heads.blocks is not None:
            of_heads = AttentionResult(grad, output, *map(heads_first, sums))
            on_heads.blocks.begin(query)
            differentiate_all(
                on_heads.own, on_heads.blocks, packed, of_heads, of_query, of_keys_total
            )
        (of_own_query,), parts = way.to_tokens([(of_query,), of_keys.tensors(of_keys_total, rank)])
        problem.communicator.compute.copy(grads[0], of_own_query, "gradient of the query")
        problem.give(_add_gradients(on_heads, parts), grads[1:])

    return way.exchange(differentiate)


def _add_gradients(on_heads: HeadProblem, parts: Sequence[Tensor]) -> Tensor:
    """Add up the gradients of the own keys, which have arrived for each head, in rank order."""
    heads, problem = on_heads.heads, on_heads.problem
    total = problem.empty_total()

    def add_up() -> None:
        total.zero_()
        for to, part in zip(problem.parts_of_rows(total), parts, strict=True):
            for keys, copies in zip(heads.keys, heads.copies, strict=True):
                to[..., keys, :] += part[..., copies, :]

    problem.communicator.compute.call(add_up, "sums over heads")
    return total
