"""Partial results over the keys of one source, merged, and their gradients: by torch, or by Triton kernels.

On a CPU torch uses its own flash attention, which takes one size of heads: the smaller ones are filled up
with zeros. If a mask is only causal, all keys are seen, or none, or a triangle, so no mask is made.
Operands of 16 bits are widened first: partial results are fp32.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Heads, Partials, Rows, RowSums, Spans, TablePart
from interlace.kernels.attention import backward, forward
from interlace.ops.attention.problem import (
    LOG2E,
    NO_LIMIT,
    AttentionProblem,
    AttentionResult,
    attention_tiles,
    rows_argument,
    unit_rows,
)
from interlace.ops.matmul.operands import launch_options
from interlace.runtime.core.call import Call
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor
_aten: Any = torch.ops.aten
WHOLE, TRIANGLE, MASKED = "whole", "triangle", "masked"


class TorchBlocks:
    """The queries of one call, and their results so far, by torch; see :class:`KernelBlocks`."""

    def __init__(self, problem: AttentionProblem, shape: Sequence[int]) -> None:
        self._problem, self._sources = problem, problem.sources()
        self._spans, self._wide = problem.spans(), problem.wide
        self._heads, self._rows = shape[2], slice(0, shape[0])
        mask = problem.mask
        simple = problem.documents is None and mask.window == (NO_LIMIT, NO_LIMIT)
        self._simple = simple and problem.scale > 0  # torch fills with -inf, then scales
        self._partials: dict[int, list[tuple[slice, Tensor, Tensor]]] = {}

    def begin(self, query: Tensor) -> None:
        self._given = query

    @functools.cached_property
    def _query(self) -> Tensor:
        """``[b, h, tokens, size]``, widened, dense; on the stream: the query may not exist before."""
        return self._given.permute(1, 2, 0, 3).to(self._wide).contiguous()

    def _call(self, function: Any, label: str) -> None:
        self._problem.communicator.compute.call(function, label)

    def _mask(self, source: int) -> Tensor:
        """Return ``[queries, keys]``: which keys of ``source`` a query sees."""
        positions = self._problem.shards.places([source], self._spans.device)
        return (self._spans[:, :1] <= positions) & (positions < self._spans[:, 1:])

    def _pairs(self, source: int) -> list[tuple[slice, int, str]]:
        """Return rows of queries, how many first keys of ``source`` they see, and the kind of mask.

        No row is in two pairs: a run of queries sees the keys of another rank's first runs.
        """
        problem, shards = self._problem, self._problem.shards
        keys = shards.lengths[source]
        if not self._simple:
            return [(self._rows, keys, MASKED)]
        if not problem.mask.causal:
            return [(self._rows, keys, WHOLE)]
        found: list[tuple[slice, int, str]] = []
        begin = 0
        for rank in problem.whose:
            runs = shards.runs(rank) if rank != source else []
            if rank == source and keys:
                found.append((slice(begin, begin + keys), keys, TRIANGLE))
            for run in runs:
                seen = sum(k.rows for k in shards.runs(source) if k.position < run.position)
                rows = slice(begin + run.first, begin + run.first + run.rows)
                if found and found[-1][1:] == (seen, WHOLE) and found[-1][0].stop == rows.start:
                    rows = slice(found.pop()[0].start, rows.stop)
                if seen:
                    found.append((rows, seen, WHOLE))
            begin += shards.lengths[rank]
        return found

    def _heads_first(self, packed: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values, ``[b, h, tokens, size]``, widened, rows dense, for products."""
        key, value = (self._groups(self._dense(each)) for each in packed)
        return key, value

    def _dense(self, key: Tensor) -> Tensor:
        key = key.permute(1, 2, 0, 3)
        if key.dtype != self._wide or key.stride(-2) != key.shape[-1]:
            key = key.new_empty(key.shape, dtype=self._wide).copy_(key)
        return key

    def _groups(self, key: Tensor) -> Tensor:
        """Repeat keys for every head of queries, unless heads form equal groups."""
        heads, key_heads = self._heads, key.shape[1]
        problem = self._problem
        if heads == key_heads * problem.per_key and not problem.first_head:
            return key
        return key[:, self._head_index(key.device)]

    def _head_index(self, device: torch.device) -> Tensor:
        heads = torch.arange(self._heads, device=device)
        return (heads + self._problem.first_head) // self._problem.per_key

    def _visible_keys(
        self, source: int, packed: Tensor
    ) -> Iterator[tuple[slice, Tensor | None, bool, Tensor, Tensor]]:
        """Yield (rows of queries, mask, whether it is causal, the keys, the values) of each product."""
        pairs = self._pairs(source)
        if pairs:
            most = max(count for _, count, _ in pairs)
            both = self._problem.keys_and_values(packed)
            keys = self._heads_first([each[:most] for each in both])
        for rows, count, relation in pairs:
            mask = self._mask(source) if relation == MASKED else None
            if mask is None or bool(mask.any()):
                key, value = (each[:, :, :count] for each in keys)
                yield rows, mask, relation == TRIANGLE, key, value

    def _by_source(self, source: int | None, packed: Tensor) -> list[tuple[int, Tensor]]:
        if source is not None:
            return [(source, packed)]
        parts = torch.split(packed, list(self._problem.shards.lengths))
        return [(each, parts[each]) for each in self._sources]

    def attend(self, source: int | None, packed: Tensor) -> None:
        for each, keys in self._by_source(source, packed):
            self._attend(each, keys)

    def _attend(self, source: int, packed: Tensor) -> None:
        def run() -> None:
            found = self._partials[source] = []
            for rows, mask, causal, key, value in self._visible_keys(source, packed):
                query = self._query[:, :, rows]
                result = attended(query, key, value, mask, causal, self._problem.scale)
                found.append((rows, *result))

        self._call(run, f"attention to keys of rank {source}")

    def merge(self, output: Tensor, lse: Tensor) -> None:
        def run() -> None:
            parts = [part for source in self._sources for part in self._partials[source]]
            with self._given_to(output) as total:
                lse.copy_(merged(parts, total))

        self._call(run, "merge")

    @contextlib.contextmanager
    def _given_to(self, output: Tensor) -> Iterator[Tensor]:
        """Yield a wide ``[b, h, tokens, size]`` for the result of ``output``; itself if it is wide."""
        wide = output if output.dtype == self._wide else torch.empty_like(output, dtype=self._wide)
        yield wide.permute(1, 2, 0, 3)
        if wide is not output:
            output.copy_(wide)

    def begin_backward(self, result: AttentionResult) -> None:
        self._of_query: dict[int, list[tuple[slice, Tensor]]] = {}

        def prepare() -> None:
            self._grad, self._out = (
                each.permute(1, 2, 0, 3).to(self._wide) for each in (result.grad, result.output)
            )
            nothing = result.lse == float("-inf")
            self._lse = torch.where(nothing, float("inf"), result.lse).to(self._wide)
            # it includes the gradient of the sums' logarithms, which torch's own kernel does not know
            self._delta = None if result.lse_grad is None else result.delta().to(self._wide)

        self._call(prepare, "sums of rows")

    def differentiate(self, source: int | None, packed: Tensor, contribution: Tensor) -> None:
        parts = self._by_source(source, packed), self._by_source(source, contribution)
        for (each, keys), (_, sums) in zip(*parts, strict=True):
            self._differentiate(each, keys, sums)

    def _differentiate(self, source: int, packed: Tensor, contribution: Tensor) -> None:
        def run() -> None:
            of_query = self._of_query[source] = []
            parts = self._problem.parts_of_rows(contribution)
            sums = [RowTotal(part.permute(1, 2, 0, 3)) for part in parts]
            for rows, mask, causal, key, value in self._visible_keys(source, packed):
                of = self._grad[:, :, rows], self._out[:, :, rows], self._lse[:, :, rows]
                delta = None if self._delta is None else self._delta[:, :, rows]
                query, scale = self._query[:, :, rows], self._problem.scale
                grads = differentiated(query, key, value, of, delta, mask, causal, scale)
                of_query.append((rows, grads[0]))
                for total, grad in zip(sums, grads[1:], strict=True):
                    of_keys = self._of_key_heads(grad, self._problem.key.shape[2])
                    total.add(slice(0, key.shape[2]), of_keys)
            for total in sums:
                total.end()

        self._call(run, f"gradients of keys of rank {source}")

    def _of_key_heads(self, grad: Tensor, key_heads: int) -> Tensor:
        if grad.shape[1] == key_heads:
            return grad
        batches, _, rows, size = grad.shape
        total = grad.new_zeros(batches, key_heads, rows, size)
        for head, of in enumerate(self._head_index(torch.device("cpu")).tolist()):
            total[:, of] += grad[:, head]
        return total

    def query_gradient(self, output: Tensor) -> None:
        def run() -> None:
            with self._given_to(output) as total:
                sums = RowTotal(total)
                for source in self._sources:
                    for part in self._of_query[source]:
                        sums.add(*part)
                sums.end()

        self._call(run, "gradient of the query")


def attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output, ``[b, h, m, v]``, and the log of the sums, -inf for queries that see nothing."""
    if query.is_cpu:
        added = None if mask is None else _add(mask, query.dtype)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *_of_one_size(query, key, value), 0.0, causal, attn_mask=added, scale=scale
        )
        if mask is not None:  # torch returns 0 for queries that see nothing
            lse = lse.masked_fill(~mask.any(-1), float("-inf"))
        return out[..., : value.shape[-1]], lse
    score = _scores(query, key, mask, causal, scale)
    lse = score.logsumexp(-1)
    base = torch.where(lse == float("-inf"), 0, lse)
    return torch.exp(score - base.unsqueeze(-1)) @ _repeat_keys(value, query), lse


def differentiated(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of: tuple[Tensor, Tensor, Tensor],
    delta: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value, the latter two by query head or by key head.

    ``of``: the output's gradient, the output, and the log of the sums, inf for queries that see nothing.
    ``delta``: the sum of their products, per row, if it is more than that.
    """
    grad, out, lse = of
    if query.is_cpu and delta is None:
        added = None if mask is None else _add(mask, query.dtype)
        padded = _of_one_size(grad, query, key, value, out)
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *padded, lse, 0.0, causal, attn_mask=added, scale=scale
        )
        of_query, of_key, of_value = (
            each[..., : of.shape[-1]] for each, of in zip(grads, (query, key, value), strict=True)
        )
        return of_query, of_key, of_value
    delta = (grad * out).sum(-1) if delta is None else delta
    score = _scores(query, key, mask, causal, scale)
    weight = torch.exp(score - lse.unsqueeze(-1))
    whole = _repeat_keys(key, query), _repeat_keys(value, query)
    of_score = weight * (grad @ whole[1].mT - delta.unsqueeze(-1)) * scale
    return of_score @ whole[0], of_score.mT @ query, weight.mT @ grad


def _of_one_size(*tensors: Tensor) -> list[Tensor]:
    """Fill smaller heads with zeros at the end: torch's kernel takes one size only."""
    size = max(tensor.shape[-1] for tensor in tensors)
    return [
        tensor if tensor.shape[-1] == size else F.pad(tensor, (0, size - tensor.shape[-1]))
        for tensor in tensors
    ]


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    score = query @ _repeat_keys(key, query).mT * scale
    if causal:
        rows = torch.arange(score.shape[-1], device=score.device)
        mask = rows <= rows.unsqueeze(1)
    return score if mask is None else score.masked_fill(~mask, float("-inf"))


def _repeat_keys(key: Tensor, query: Tensor) -> Tensor:
    times = query.shape[1] // key.shape[1]
    return key if times == 1 else key.repeat_interleave(times, 1)


def _add(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))


class RowTotal:
    """Sums of rows ``[b, h, rows, size]``. First values are stored: ``total`` need not be zeros."""

    def __init__(self, total: Tensor) -> None:
        self._total, self._end = total, 0  # every row before this one has a value

    def add(self, rows: slice, part: Tensor, weight: Tensor | None = None) -> None:
        """Add ``part`` to ``rows``. ``weight``: of each row, ``[b, h, rows, 1]``."""
        self._zero(rows.start)
        old = min(self._end, rows.stop) - rows.start
        known, new = torch.split(self._total[:, :, rows], [old, part.shape[2] - old], 2)
        if weight is None:
            known += part[:, :, :old]
            new.copy_(part[:, :, old:])
        else:
            known.addcmul_(part[:, :, :old], weight[:, :, :old])
            torch.mul(part[:, :, old:], weight[:, :, old:], out=new)
        self._end = max(self._end, rows.stop)

    def _zero(self, begin: int) -> None:
        if self._end < begin:
            self._total[:, :, self._end : begin].zero_()
            self._end = begin

    def end(self) -> None:
        self._zero(self._total.shape[2])


def merged(parts: Sequence[tuple[slice, Tensor, Tensor]], total: Tensor) -> Tensor:
    """Merge ``parts``, each for some rows, into ``total`` in order; return the log of the sums."""
    largest = total.new_full(total.shape[:3], float("-inf"))
    for rows, _, lse in parts:
        largest[:, :, rows] = torch.maximum(largest[:, :, rows], lse)
    base, sums = torch.where(largest == float("-inf"), 0, largest), torch.zeros_like(largest)
    weights = [torch.exp(lse - base[:, :, rows]) for rows, _, lse in parts]
    for (rows, _, _), weight in zip(parts, weights, strict=True):
        sums[:, :, rows] += weight
    divisor, into = torch.where(sums == 0, 1, sums), RowTotal(total)
    for (rows, out, _), weight in zip(parts, weights, strict=True):
        into.add(rows, out, weight.div_(divisor[:, :, rows]).unsqueeze(-1))
    into.end()
    return base + torch.log(sums)


MERGED = 4096  # elements of a tile that a program merges, which fit its registers


class KernelBlocks:
    """The queries of one call, and their results so far; launches go to the compute stream.

    ``shape`` is the query's, which may have more tokens than this rank's, and a part of the heads.
    ``begin`` passes the query. ``source`` None stands for packed keys of all ranks, one by one.
    """

    def __init__(
        self, problem: AttentionProblem, shape: Sequence[int], configuration: Configuration
    ) -> None:
        self._problem, self._configuration = problem, configuration
        self.sources = problem.sources()
        self._rows, batches, heads, size = shape
        self._all_heads = batches * heads
        value_size, dtype = problem.value.shape[3], problem.query.dtype
        self.tiles = attention_tiles(problem.communicator, configuration, size, value_size, dtype)
        key_heads = problem.key.shape[2]
        self.heads = Heads(batches, heads, key_heads, problem.per_key, problem.first_head)
        self.spans, self.scale = Spans(problem.spans(), 0), problem.scale * LOG2E
        shards, begins = problem.shards, [0, *accumulate(problem.shards.lengths)]
        # the parts of each source alone, then of all, if keys of all are contiguous
        self._parts = problem.communicator.table(
            ("attention parts", shards, tuple(self.sources)),
            lambda: [
                shards.part_line(s, i, among * begins[s])
                for among in (0, 1)
                for i, s in enumerate(self.sources)
            ],
            passing=True,
        )

    def begin(self, query: Tensor) -> None:
        self.query = unit_rows(query)

    def _partials(self, size: int) -> Partials:
        shape = max(1, len(self.sources)), self.heads.batches, self.heads.heads, self._rows
        new = functools.partial(self._problem.query.new_empty, dtype=torch.float32)
        return Partials(new(*shape, size), new(shape), self._rows)

    @functools.cached_property
    def partials(self) -> Partials:
        return self._partials(self.tiles.VALUE_DIM)

    @property
    def query_tiles(self) -> int:
        return formulas.ceil_div(self._rows, self.tiles.BLOCK_M) * self._all_heads

    def _launch(self, kernel: object, grid: tuple[int, ...], arguments: dict[str, object]) -> None:
        options = launch_options(self._configuration)
        launch = KernelLaunch(kernel, grid, arguments, self._problem.op, **options)
        self._problem.communicator.compute.launch(launch)

    def _keys(self, packed: Tensor, source: int | None) -> tuple[dict[str, object], int]:
        """Return arguments, and how many parts there are."""
        count = len(self.sources)
        part = (count, count) if source is None else (self.sources.index(source), 1)
        parts = TablePart(self._parts, *part)
        return {"keys": Rows(packed, packed.stride(0)), "parts": parts}, parts.count

    def attend(self, source: int | None, packed: Tensor) -> None:
        """Compute the partial result over the keys of ``source``, or of each source if None."""
        keys, count = self._keys(packed, source)
        if not self.query_tiles * count:
            return
        arguments = {
            **keys,
            "queries": rows_argument(self.query),
            "spans": self.spans,
            "partials": self.partials,
            "heads": self.heads,
            "scale": self.scale,
            "TILES": self.tiles,
        }
        self._launch(forward.attention_kernel, (self.query_tiles, count), arguments)

    def merge(self, output: Tensor, lse: Tensor) -> None:
        """Merge into ``output``, ``[tokens, b, h, v]``, and the log of the sums, ``[b, h, tokens]``."""
        if not self.query_tiles:
            return
        tiles = self.tiles._replace(BLOCK_M=max(16, MERGED // self.tiles.BLOCK_V))
        arguments = {
            "partials": self.partials,
            "output": rows_argument(output),
            "lse_ptr": lse,
            "heads": self.heads,
            "count": len(self.sources),
            "TILES": tiles,
        }
        grid = (formulas.ceil_div(self._rows, tiles.BLOCK_M) * self._all_heads,)
        self._launch(forward.merge_attention_kernel, grid, arguments)

    def begin_backward(self, result: AttentionResult) -> None:
        self._grad, lse = result.grad, result.lse
        reach, delta = (lse.new_empty(lse.shape, dtype=torch.float32) for _ in range(2))

        def prepare() -> None:
            # queries that see no key have weights of 0, not of 2 ** inf
            reach.copy_(torch.where(lse == float("-inf"), float("inf"), lse * LOG2E))
            delta.copy_(result.delta())

        self._problem.communicator.compute.call(prepare, "sums of rows")
        self._sums = RowSums(reach, delta, lse.shape[2])
        self._of_query = self._partials(self.tiles.HEAD_DIM)

    def differentiate(self, source: int | None, packed: Tensor, contribution: Tensor) -> None:
        """Compute a partial gradient of the query, and ``contribution``, fp32, to ``source``'s keys."""
        keys, count = self._keys(packed, source)
        arguments = {
            **keys,
            "queries": rows_argument(self.query),
            "grads": rows_argument(self._grad),
            "spans": self.spans,
            "sums": self._sums,
            "heads": self.heads,
            "scale": self.scale,
            "TILES": self.tiles,
        }
        if self.query_tiles * count:
            values = {**arguments, "partials": self._of_query}
            kernel = backward.attention_queries_backward_kernel
            self._launch(kernel, (self.query_tiles, count), values)
        longest = packed.shape[0] if source is not None else max(self._problem.shards.lengths)
        # here a program keeps keys and loops over queries, so the two tile sizes are exchanged
        turned = self.tiles._replace(BLOCK_M=self.tiles.BLOCK_N, BLOCK_N=self.tiles.BLOCK_M)
        tiles = formulas.ceil_div(longest, turned.BLOCK_N)
        of_heads = self.heads.batches * self.heads.key_heads
        if tiles * of_heads * count:
            more = {"output_ptr": contribution, "factor": self._problem.scale, "TILES": turned}
            kernel = backward.attention_keys_backward_kernel
            self._launch(kernel, (tiles, of_heads, count), {**arguments, **more})

    def query_gradient(self, output: Tensor) -> None:
        """Sum the partial gradients into ``output``, in the order of the ranks."""
        parts, scale = self._of_query.ptr[: len(self.sources)], self._problem.scale

        def add_up() -> None:
            total = torch.zeros_like(self._of_query.ptr[0])
            for part in parts:
                total += part
            output.copy_((total * scale).permute(2, 0, 1, 3))

        self._problem.communicator.compute.call(add_up, "gradient of the query")


Blocks = TorchBlocks | KernelBlocks


def blocks_of(
    problem: AttentionProblem,
    configuration: Configuration | None,
    shape: Sequence[int] | None = None,
) -> Blocks:
    """Return blocks by kernels with a ``configuration``, otherwise by torch. ``shape``: the query's."""
    of = problem.query.shape if shape is None else shape
    blocks: Blocks = (
        TorchBlocks(problem, of)
        if configuration is None
        else KernelBlocks(problem, of, configuration)
    )
    if shape is None:
        blocks.begin(problem.query)
    return blocks


def differentiate_all(
    problem: AttentionProblem,
    blocks: Blocks,
    packed: Tensor,
    result: AttentionResult,
    of_query: Tensor,
    of_keys: Tensor,
) -> None:
    """Compute gradients of queries and of all ``packed`` in ``of_query``, ``of_keys``, fp32 or wider."""
    blocks.begin_backward(result)
    parts = torch.split(of_keys, list(problem.shards.lengths))
    for source in set(range(len(parts))) - set(problem.sources()):
        problem.communicator.compute.call(parts[source].zero_, "keys that nobody sees")
    blocks.differentiate(None, packed, of_keys)
    blocks.query_gradient(of_query)


def _gather_keys(problem: AttentionProblem) -> Tensor:
    """Gather all ranks' packed keys, in rank order, with the plain collective."""
    communicator, lengths = problem.communicator, problem.shards.lengths
    packed = problem.packed()
    if problem.shards.world_size == 1:
        return packed
    whole = packed.new_empty(problem.shards.total, problem.row_elements)
    parts = [part.view(-1) for part in torch.split(whole, list(lengths))]
    terms = (("rows", lengths), ("row", problem.row_elements), ("dtype", packed.dtype))
    event = communicator.engine.all_gather(Call(problem.op, terms), parts, packed.view(-1))
    if event is not None:
        communicator.compute.wait_event(event)
    return whole


def attention_to_all(
    problem: AttentionProblem,
    output: Tensor,
    lse: Tensor,
    configuration: Configuration | None,
    *,
    gather: bool,
) -> Event:
    """Attend to keys that are all here, or that a plain collective must ``gather``."""
    packed = _gather_keys(problem) if gather else problem.packed()
    blocks = blocks_of(problem, configuration)
    problem.after_the_caller()
    blocks.attend(None, packed)
    blocks.merge(output, lse)
    return problem.communicator.compute.record()


def attention_to_all_backward(
    problem: AttentionProblem,
    result: AttentionResult,
    grads: tuple[Tensor, Tensor, Tensor],
    configuration: Configuration | None,
    *,
    gather: bool,
) -> Event:
    """Compute gradients. ``gather``: a plain collective also returns the gradients of gathered keys."""
    communicator, lengths = problem.communicator, problem.shards.lengths
    packed = _gather_keys(problem) if gather else problem.packed()
    blocks = blocks_of(problem, configuration)
    total = of_keys = torch.empty_like(packed, dtype=problem.wide)
    problem.after_the_caller()
    differentiate_all(problem, blocks, packed, result, grads[0], of_keys)
    if gather and problem.shards.world_size > 1:
        total = problem.empty_total()
        # an engine waits for the work that the caller has issued; now contributions are part of it
        event = communicator.compute.record()
        communicator.place.hold_current(event, f"the gradients of {problem.op}")
        terms = (("rows", lengths), ("row", problem.row_elements), ("dtype", problem.wide))
        call = Call(f"{problem.op} of keys", terms)
        flat = [part.view(-1) for part in torch.split(of_keys, list(lengths))]
        ended = communicator.engine.reduce_scatter(call, total.view(-1), flat, "sum")
        if ended is not None:
            communicator.compute.wait_event(ended)
    problem.give(total, grads[1:])
    return communicator.compute.record()
