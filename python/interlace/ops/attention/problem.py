"""One attention: the tokens of each rank, the keys that a query sees, and the layout of tensors.

Tensors are ``[tokens, batches, heads, head size]`` here, whatever the caller's layout, with any strides but
the last; values, results and their gradients may have another head size than queries and keys. Keys and
values of a rank travel together, *packed*: ``[tokens, elements]``, for each token all keys, then all
values. A *run* is a stretch of a rank's tokens that is contiguous in the sequence as well. With balance
"zigzag" a rank has two: the longer first half of its tokens, and the rest.

The file also has float64 references of attention and its gradients, and bounds for correct results.
``reference.py`` names the sources of the bounds. To the errors of sums and roundings attention adds the
exponential. If a score is off by e, the weight is off by ``exp(e) - 1``, relative. This counts twice: for
the weight and for the sum by which it is divided. An exponential errs by 2 units and by one per unit of its
argument. Weights and the gradients of scores are rounded to the dtype of the values before they are
multiplied. Near zero a rounding errs by half of the smallest number of the dtype, whatever the value. This
counts once for every key that a query sees, times the factor of the weight. In the output, weights are
rounded before the division by their sum, when the largest is 1; in the gradients, after it. Bounds are per
element, to first order, with all terms added up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import AttentionTiles, Queries
from interlace.ops.collectives.launch import other_ranks, sources
from interlace.ops.matmul.operands import DESCRIPTOR_ALIGNMENT, input_precision
from interlace.ops.matmul.reference import (
    Bounded,
    gamma,
    half_denormal,
    rounded,
    unit_roundoff,
)
from interlace.ops.op.op import Example, Setting, constant
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Workspace
from interlace.runtime.tuning.configuration import Configuration

BALANCES = ("zigzag", "contiguous")
NO_LIMIT = -1
LOG2E = 1.0 / math.log(2.0)
POINTER_KEYS = 64
"""The most keys of a tile without TMA: the addresses of 128 rows of 128 spill on 9.0 (16 bytes)."""


class Run(NamedTuple):
    """``rows`` tokens of a shard from ``first`` on; they begin at ``position`` in the sequence."""

    first: int
    rows: int
    position: int


@dataclass(frozen=True)
class AttentionMask:
    """``window``: how many keys before and after its own position a query sees, -1 for all."""

    causal: bool
    window: tuple[int, int] = (NO_LIMIT, NO_LIMIT)

    def span(self, position: int, total: int) -> tuple[int, int]:
        """Return the range (begin, end) of positions that the query at ``position`` of ``total`` sees."""
        before, after = self.window
        low = 0 if before == NO_LIMIT else max(0, position - before)
        high = total if after == NO_LIMIT else min(total, position + after + 1)
        return low, min(high, position + 1) if self.causal else high


@dataclass(frozen=True)
class TokenShards:
    lengths: tuple[int, ...]
    balance: str

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def world_size(self) -> int:
        return len(self.lengths)

    def runs(self, rank: int) -> list[Run]:
        """Return the non-empty runs of a rank, in the order of its tokens."""
        length = self.lengths[rank]
        if self.balance == "contiguous":
            found = [Run(0, length, sum(self.lengths[:rank]))]
        else:
            found = [Run(*run) for run in formulas.zigzag_runs(rank, self.lengths)]
        return [run for run in found if run.rows]

    def places(self, ranks: Sequence[int], device: torch.device | None) -> torch.Tensor:
        """Return int64 ``[tokens of ranks]``: the position of each in the sequence."""
        runs = [run for rank in ranks for run in self.runs(rank)]
        at = [torch.arange(run.position, run.position + run.rows, device=device) for run in runs]
        return torch.cat(at) if at else torch.empty(0, dtype=torch.int64, device=device)

    def sees(self, rank: int, source: int, mask: AttentionMask) -> bool:
        """Return whether a query of ``rank`` sees a key of ``source``; packed sequences may rule it out."""
        for run in self.runs(rank):
            low, _ = mask.span(run.position, self.total)
            _, high = mask.span(run.position + run.rows - 1, self.total)
            if any(low < k.position + k.rows and k.position < high for k in self.runs(source)):
                return True
        return False

    def sources(self, rank: int, mask: AttentionMask) -> list[int]:
        """Return the ranks whose keys ``rank`` needs, in rank order."""
        return [s for s in range(self.world_size) if self.sees(rank, s, mask)]

    def spans(
        self, ranks: Sequence[int], mask: AttentionMask, documents: torch.Tensor | None
    ) -> torch.Tensor:
        """Return int64 ``[tokens of ranks, 2]``: the range of keys that each query sees.

        ``documents``: where packed sequences begin, and the end of the last; tokens beyond see nothing.
        """
        before, after = mask.window
        position = self.places(ranks, None if documents is None else documents.device)
        low = torch.zeros_like(position) if before == NO_LIMIT else (position - before).clamp(min=0)
        high = torch.full_like(position, self.total)
        if after != NO_LIMIT:
            high = (position + after + 1).clamp(max=self.total)
        if mask.causal:
            high = torch.minimum(high, position + 1)
        if documents is not None:
            ends = documents.to(torch.int64)
            # the last sequence that begins at or before the token: an empty one has no token
            number = torch.searchsorted(ends, position, right=True)
            inside = number < len(ends)
            low = torch.maximum(low, ends[(number - 1).clamp(min=0)])
            high = torch.minimum(high, ends[number.clamp(max=len(ends) - 1)])
            high = torch.where(inside, high, 0)
        return torch.stack([low, high], 1)

    def part_line(
        self, source: int, number: int, row: int, slots: tuple[int, int] = (0, 0)
    ) -> formulas.Line:
        """Return a line of the kernels' table of parts; ``row``: where the source's keys begin."""
        runs = [*self.runs(source), Run(0, 0, 0), Run(0, 0, 0)][:2]
        line: formulas.Line = formulas.key_part_line(source, number, row, runs, slots)
        return line


class AttentionResult(NamedTuple):
    """The results of a forward, with gradients: all that a backward needs besides the problem.

    ``output`` and its ``grad`` are ``[tokens, b, h, v]``, the gradient contiguous along the last. ``lse``,
    the natural logarithm of the sums of exponentials, and its gradient, if any, are ``[b, h, tokens]``.
    """

    grad: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    lse_grad: torch.Tensor | None = None

    def delta(self) -> torch.Tensor:
        """Return fp32 or wider ``[b, h, tokens]``, which is subtracted in the gradients of scores."""
        wide = wide_dtype(self.grad.dtype)
        sums = (self.grad.to(wide) * self.output.to(wide)).sum(-1).permute(1, 2, 0)
        return (sums if self.lse_grad is None else sums - self.lse_grad).contiguous()


@dataclass
class AttentionProblem:
    """The input of every method. ``first_head``, ``per_key``: see ``kernels/arguments.py``.

    ``ranks``: the ranks whose tokens all tensors have, one after another; None: this rank's.
    ``heads_first``: packed keys lie in memory as torch's products read them, all keys ``[b, h, tokens, d]``
    and then all values.
    """

    communicator: Communicator
    op: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    shards: TokenShards
    mask: AttentionMask
    documents: torch.Tensor | None
    scale: float
    per_key: int
    first_head: int = 0
    ranks: tuple[int, ...] | None = None
    heads_first: bool = False

    @property
    def whose(self) -> tuple[int, ...]:
        return (self.rank,) if self.ranks is None else self.ranks

    @property
    def wide(self) -> torch.dtype:
        return wide_dtype(self.query.dtype)

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def row_elements(self) -> int:
        return sum(math.prod(each.shape[1:]) for each in (self.key, self.value))

    def packed(self) -> torch.Tensor:
        """Pack keys and values of this rank, as they travel."""
        rows = self.key.new_empty(self.key.shape[0], self.row_elements)
        for to, each in zip(self.keys_and_values(rows), (self.key, self.value), strict=True):
            to.copy_(each)
        return rows

    def packed_in(self, workspace: Workspace, owner: int, offset: int, rows: int) -> torch.Tensor:
        return workspace.data(owner, offset, (rows, self.row_elements), self.key.dtype)

    def keys_and_values(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the packed keys and values: ``[tokens, batches, heads, size]`` each."""
        if not self.heads_first:
            return self.parts_of_rows(packed)
        shapes = [(*each.shape[1:3], len(packed), each.shape[3]) for each in (self.key, self.value)]
        key, value = torch.split(packed.view(-1), [math.prod(shape) for shape in shapes])
        return key.view(shapes[0]).permute(2, 0, 1, 3), value.view(shapes[1]).permute(2, 0, 1, 3)

    def parts_of_rows(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split packed rows like :meth:`keys_and_values`, without ``heads_first``: for gradients."""
        shapes = [each.shape[1:] for each in (self.key, self.value)]
        key, value = torch.split(packed, [math.prod(shape) for shape in shapes], 1)
        return key.view(len(packed), *shapes[0]), value.view(len(packed), *shapes[1])

    def sources(self) -> list[int]:
        """Return the ranks whose keys are seen, in rank order."""
        return sorted({s for rank in self.whose for s in self.shards.sources(rank, self.mask)})

    def after_the_caller(self) -> None:
        """Make the compute stream wait for the work that the caller has issued until now."""
        self.communicator.compute.wait_event(self.communicator.place.record_current())

    def give(self, total: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        """Copy packed sums to ``grads`` of keys and of values, on the compute stream."""

        def copy() -> None:
            for grad, part in zip(grads, self.parts_of_rows(total), strict=True):
                grad.copy_(part)

        self.communicator.compute.call(copy, "gradients of the own keys")

    def empty_total(self) -> torch.Tensor:
        """Return an empty tensor for the packed gradients of this rank's keys."""
        shape = self.shards.lengths[self.rank], self.row_elements
        return self.key.new_empty(shape, dtype=self.wide)

    def spans(self) -> torch.Tensor:
        """Return the range of keys that each query sees."""
        rank = self.whose
        if self.documents is not None:
            return self.shards.spans(rank, self.mask, self.documents)
        key = ("attention spans", self.shards, self.mask, rank)
        table = self.communicator.table(
            key, lambda: self.shards.spans(rank, self.mask, None).tolist(), passing=True
        )
        return table.view(-1, 2) if table.numel() > 1 else table.new_empty(0, 2)

    def arrivals(self) -> list[int]:
        """Return the sources in the order in which keys arrive: this rank first, then as peers send."""
        needed = set(self.sources())
        return [source for source in sources(self.communicator) if source in needed]

    def readers(self) -> list[int]:
        """Return the other ranks that need this rank's keys, the next rank first."""
        peers = other_ranks(self.communicator)
        return [peer for peer in peers if self.shards.sees(peer, self.rank, self.mask)]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_argument(tensor: torch.Tensor) -> Queries:
    """Return ``[tokens, batches, heads, size]`` as an argument of a kernel."""
    return Queries(tensor, *tensor.stride()[:3])


def attention_tiles(
    communicator: Communicator,
    configuration: Configuration,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    packed: bool = True,
) -> AttentionTiles:
    """``head_dim``: queries and keys; ``value_dim``: values and results; ``packed``: the keys' layout."""
    sizes, place = (head_dim, value_dim), communicator.place
    aligned = all(size * dtype.itemsize % DESCRIPTOR_ALIGNMENT == 0 for size in sizes)
    descriptors = packed and aligned and configuration.descriptors and place.descriptors
    block_n = configuration.block_n if descriptors else min(configuration.block_n, POINTER_KEYS)
    block_d, block_v = (max(16, 1 << (size - 1).bit_length()) for size in sizes)
    blocks = configuration.block_m, block_n, block_d, block_v
    return AttentionTiles(*blocks, *sizes, input_precision(dtype), descriptors, place.compiled)


def unit_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with its last dimension contiguous; a copy only if it is not."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


# -- examples of arguments -------------------------------------------------------------------------

HEADS, KEY_HEADS, HEAD = 2, 1, 4


def example_queries(setting: Setting) -> torch.Tensor:
    return setting.numbers(1, setting.own, HEADS, HEAD)


def _keys(setting: Setting) -> torch.Tensor:
    return setting.numbers(1, setting.own, KEY_HEADS, HEAD)


EXAMPLES: dict[str, Example] = {
    "query": example_queries,
    "key": _keys,
    "value": _keys,
    "cu_seqlens": constant(None),
    "lengths": constant(None),
    "block_table": constant(None),
    "method": constant("auto"),
    "causal": constant(True),
    "scale": constant(0.5),
    "window": constant(None),
    "layout": constant("bshd"),
    "balance": constant("contiguous"),
}


Tensor = torch.Tensor
MERGES = 16  # roundings of an element where partial results are merged


class AttentionReference:
    """A reference for ``[batch, heads, tokens, size]``; keys may have fewer heads. Results are float64."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
    ) -> None:
        self.dtype = query.dtype
        self._unit = unit_roundoff(torch.float64 if self.dtype == torch.float64 else torch.float32)
        self.groups = query.shape[1] // key.shape[1]
        self._query = query.double()
        self._key, self._value = (
            each.double().repeat_interleave(self.groups, 1) for each in (key, value)
        )
        self._scale, self._mask, factor = scale, mask, abs(scale)
        self._count, size = query.shape[2], query.shape[3]
        score = (self._query @ self._key.mT * scale).masked_fill(~mask, -math.inf)
        self.lse = score.logsumexp(-1)
        self.weight = torch.nan_to_num(score.softmax(-1))
        largest = score.amax(-1, keepdim=True)
        reach = torch.where(mask, largest - score, 0).nan_to_num(posinf=0, neginf=0)
        of_score = gamma(size + 6, self._unit) * (self._query.abs() @ self._key.abs().mT) * factor
        of_score = torch.where(mask, of_score + self._unit * (score.abs() + reach + 3), 0)
        self._score_error = of_score.nan_to_num(posinf=0).amax(-1, keepdim=True)
        # relative errors of the weight and of the sum, then the roundings
        self._relative = 2 * torch.expm1(self._score_error) + gamma(
            self._count + MERGES, self._unit
        )
        self._rounded_weight = self._relative + unit_roundoff(self.dtype)
        self._near_zero = half_denormal(self.dtype) * mask.double()
        self._exact = self.weight @ self._value

    def output(self) -> Bounded:
        error = self._rounded_weight * (self.weight @ self._value.abs()) * 2
        largest = self.weight.amax(-1, keepdim=True)  # it is 1 when it is rounded
        error = error + largest * (self._near_zero @ self._value.abs())
        return self._exact, rounded(error, self._exact, self.dtype)

    def sums(self) -> Bounded:
        error = self._score_error.squeeze(-1) + self._relative.squeeze(-1)
        unit = self._unit * (self.lse.abs().nan_to_num(posinf=0) + MERGES)
        return self.lse, error + unit

    def gradients(self, grad: Tensor) -> tuple[Bounded, Bounded, Bounded]:
        """Return the gradients of query, key and value, for ``grad`` of the output."""
        grad = grad.double()
        size = grad.shape[-1]
        of_value = self.weight.mT @ grad
        value_error = (self._rounded_weight * self.weight).mT @ grad.abs() * 2
        value_error = value_error + self._near_zero.mT @ grad.abs()
        of_weight = grad @ self._value.mT
        output, output_error = self.output()
        delta = (grad * output).sum(-1, keepdim=True)
        unit = gamma(size + 4, self._unit)
        weight_error = unit * (grad.abs() @ self._value.abs().mT)
        delta_error = (grad.abs() * (output_error + unit * output.abs())).sum(-1, keepdim=True)
        of_score = self.weight * (of_weight - delta)
        spread = self.weight * (of_weight.abs() + delta.abs())
        score_error = 2 * self._rounded_weight * spread + self.weight * (weight_error + delta_error)
        score_error = score_error + unit_roundoff(self.dtype) * of_score.abs() + self._near_zero
        more = gamma(self._count + MERGES, self._unit)
        of_query, factor = of_score @ self._key * self._scale, abs(self._scale)
        query_error = (score_error + more * spread) @ self._key.abs() * factor
        of_key = of_score.mT @ self._query * self._scale
        key_error = (score_error + more * spread).mT @ self._query.abs() * factor
        value_error = value_error + more * (self.weight.mT @ grad.abs())
        return (
            (of_query, rounded(query_error, of_query, self.dtype)),
            self._of_keys(of_key, key_error),
            self._of_keys(of_value, value_error),
        )

    def _of_keys(self, value: Tensor, error: Tensor) -> Bounded:
        """Sum over the heads of queries that see one head of keys."""
        batch, heads, tokens, size = value.shape
        shape = batch, heads // self.groups, self.groups, tokens, size
        value, error = value.view(shape).sum(2), error.view(shape).sum(2)
        return value, rounded(error, value, self.dtype)
