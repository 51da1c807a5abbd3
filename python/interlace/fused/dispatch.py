"""Dispatch and combine: rows of tokens to their experts, and back.

Order of rows
-------------
A token has k slots, each with an expert or none. A *row* is a token in one of its slots. At its expert's
rank rows are by expert, then by source rank, then as the source's tokens are: the order of the grouped
matmuls (``fused/grouped.py``). ``segments[e][s]`` says of the rows of expert e from rank s where they
begin, how many they are, and which of the source's rows the first of them is, if these are sorted by
expert.

A call is validated, agreed on with the other ranks (one small host message; a mismatch raises on every rank
before any data moves), and handed to an algorithm of ``runtime/algorithms/experts``.
"""

from typing import Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.runtime.algorithms.experts.assignment import Assignment
from interlace.runtime.algorithms.experts.combine import Combine, Home
from interlace.runtime.algorithms.experts.dispatch import (
    Bounds,
    Dispatch,
    DispatchResult,
    sender_programs,
)
from interlace.runtime.core.call import Call, PreparedCall
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.hooks import profiled_op
from interlace.runtime.core.stream import Outcome
from interlace.runtime.tuning import configuration
from interlace.runtime.tuning.auto import FUSED_DTYPES

DISPATCH, COMBINE = "dispatch", "combine"
Tensor = torch.Tensor
MOVED_DTYPES = (*checks.FLOAT_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)


class Received(NamedTuple):
    """What a dispatch has brought: rows by expert, then by source rank, then as the source's tokens are.

    Attributes
    ----------
    x : ``(rows, hidden)``; of a low-latency dispatch ``(experts, most rows, hidden)``.
    scales : a row each for the rows of ``x``, if it came with scales; else None.
    topk_weights : float32 ``(rows,)``, if there were weights; else None.
    segments : int64 ``(experts of this rank, ranks, 3)``, on the device: where the rows of an expert from a
        rank begin, how many they are, and which of that rank's rows, sorted by expert, is the first.

    >>> def on_rank():
    ...     received, _ = interlace.experts.dispatch(torch.ones(1, 4), torch.tensor([[0, 1]]), None, 2)
    ...     return received.x.shape[0], received.splits.tolist(), received.offsets.tolist()
    >>> interlace.run(on_rank, 2)
    [(2, [[1, 1]], [2]), (2, [[1, 1]], [2])]
    """

    x: Tensor
    scales: Tensor | None
    topk_weights: Tensor | None
    segments: Tensor

    @property
    def splits(self) -> Tensor:
        """Rows by expert and source rank, as the grouped matmuls have them."""
        return self.segments[..., 1]

    @property
    def num_tokens_per_expert(self) -> Tensor:
        """Rows of each of this rank's experts."""
        return self.splits.sum(1)

    @property
    def offsets(self) -> Tensor:
        """int32, where each expert's rows end: ``offs`` of ``torch._grouped_mm``; not of low latency."""
        return self.num_tokens_per_expert.cumsum(0).to(torch.int32)


class DispatchHandle(NamedTuple):
    """What a combine has to know of its dispatch. ``group`` is the one that dispatched.

    ``inverse``, int64 ``(tokens, k)``: which row a slot is of those that this rank has sent, sorted by
    expert; -1 of a slot without an expert, or beyond the capacity.

    >>> def on_rank():
    ...     experts = torch.tensor([[1], [0], [-1]])
    ...     _, handle = interlace.experts.dispatch(torch.ones(3, 4), experts, None, 2)
    ...     return handle.inverse.flatten().tolist()
    >>> interlace.run(on_rank, 2)
    [[1, 0, -1], [1, 0, -1]]
    """

    segments: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    routing: "Routing"
    group: Any

    @property
    def inverse(self) -> Tensor:
        """int64 ``(tokens, k)``: the home row of each slot, -1 of none; computed anew each time."""
        routing = self.routing
        idx = self.topk_idx.to(torch.int64)
        return Assignment(idx, routing.num_experts, 1, routing.capacity).inverse


class Routing(NamedTuple):
    """What tensors of a dispatch are for, and its combine has to know.

    ``capacity``: rows that a rank may send to one expert, 0 for any. ``max_tokens``: a bound of every
    rank's tokens, by which results are as long as they can ever get; 0: as long as they are. ``packed``:
    every expert's rows begin where those of one before could end.
    """

    num_experts: int
    capacity: int = 0
    max_tokens: int = 0
    packed: bool = False
    algorithm: str = "auto"

    def bound(self, topk: int, world_size: int) -> int:
        """The most rows that a rank can get, from ``max_tokens``."""
        if self.packed:
            return self.num_experts // world_size * self.expert_rows(world_size)
        rows = self.max_tokens * topk
        if self.capacity:
            rows = min(rows, self.num_experts // world_size * self.capacity)
        return rows * world_size

    def expert_rows(self, world_size: int) -> int:
        return world_size * self.capacity if self.packed else 0


def routing_of(
    num_experts: Any, capacity: Any, max_tokens: Any, packed: bool, algorithm: str = "auto"
) -> Routing:
    """The numbers of a call, if they are any. When packed no expert gets more than all tokens."""
    for name, value in (
        ("capacity", capacity),
        ("num_max_dispatch_tokens_per_rank", max_tokens),
    ):
        wrong = isinstance(value, bool) or not isinstance(value, int) or value < 1
        if value is not None and wrong:
            raise ValueError(f"{name} must be a positive int or None, got {value!r}")
    if packed and max_tokens is None:
        raise ValueError("low_latency needs num_max_dispatch_tokens_per_rank")
    bound = (capacity or max_tokens) if packed else capacity
    return Routing(num_experts, bound or 0, max_tokens or 0, packed, algorithm)


class AgreedRows(NamedTuple):
    """What ranks have agreed on: counts of all ranks where they are on the host."""

    bounds: Bounds
    counts: Tensor | None


def resolved(communicator: Communicator, algorithm: str) -> str:
    """ "fused" or "unfused", alike on all ranks before anything is known of the others."""
    place = communicator.place
    if algorithm == "fused" and place.nodes is not None:
        raise ValueError(
            'algorithm="fused" works within one node, the group has several; use "unfused" or "auto"'
        )
    if algorithm != "auto":
        return algorithm
    return "unfused" if place.nodes is not None or place.direct_access else "fused"


def assignment_of(
    communicator: Communicator, routing: Routing, topk_idx: Any, tokens: int | None
) -> Assignment:
    """The choice of experts, if it fits. ``tokens``: of the input, None if there is none."""
    experts, world_size = (
        checks.integer("num_experts", routing.num_experts),
        communicator.world_size,
    )
    if experts < 1 or experts % world_size:
        raise ValueError(
            f"num_experts must be a multiple of the world size {world_size}, got {experts}"
        )
    idx = checks.tensor("topk_idx", topk_idx, communicator)
    if idx.is_floating_point() or idx.is_complex() or idx.dtype is torch.bool:
        raise TypeError(f"topk_idx must be a tensor of integers, got {idx.dtype}")
    if idx.dim() != 2 or not idx.shape[1]:
        raise ValueError(f"topk_idx must have 2 dimensions (tokens, k), got {tuple(idx.shape)}")
    if tokens is not None and idx.shape[0] != tokens:
        raise ValueError(f"topk_idx has {idx.shape[0]} rows, x has {tokens}")
    if routing.max_tokens and idx.shape[0] > routing.max_tokens:
        raise ValueError(
            f"num_max_dispatch_tokens_per_rank is {routing.max_tokens}, topk_idx has {idx.shape[0]} rows"
        )
    if idx.numel() and idx.device.type == "cpu" and int(idx.max()) >= experts:
        raise ValueError(f"topk_idx has expert {int(idx.max())}, there are {experts}")
    return Assignment(idx.to(torch.int64), experts, world_size, routing.capacity)


def weights_of(communicator: Communicator, topk_weights: Any, like: Tensor) -> Tensor | None:
    if topk_weights is None:
        return None
    weights = checks.tensor("topk_weights", topk_weights, communicator)
    if weights.shape != like.shape:
        raise ValueError(
            f"topk_weights has shape {tuple(weights.shape)}, topk_idx {tuple(like.shape)}"
        )
    if not weights.is_floating_point():
        raise TypeError(f"topk_weights must be a tensor of floats, got {weights.dtype}")
    return weights.to(torch.float32).contiguous()


def agreed(
    communicator: Communicator,
    op: str,
    routing: Routing,
    assignment: Assignment,
    counted: bool,
    terms: tuple[tuple[str, Any], ...],
) -> AgreedRows:
    """What all ranks say; raises alike on all. ``counted``: rows by expert are needed on the host."""
    place = communicator.place
    explicit = configuration.OVERRIDE.get()
    common = configuration.choose(place, torch.float32, 1, 1, 1)
    counts = tuple(assignment.counts.tolist()) if counted else None
    part = assignment.topk_idx.shape[0], counts, sender_programs(communicator, common)
    about = (
        ("k of topk_idx", assignment.topk_idx.shape[1]),
        ("num_experts", routing.num_experts),
        ("capacity", routing.capacity),
        ("num_max_dispatch_tokens_per_rank", routing.max_tokens),
        ("algorithm", routing.algorithm),
        ("configuration", explicit),
    )
    parts = communicator.parts(Call(op, (*terms, *about), part=part))
    most = routing.max_tokens or max(tokens for tokens, _, _ in parts)
    senders = min(each for _, _, each in parts)
    found = torch.tensor([each for _, each, _ in parts]) if counted else None
    expert_rows = routing.expert_rows(communicator.world_size)
    return AgreedRows(Bounds(most, senders, expert_rows), found)


def dispatch(
    communicator: Communicator,
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    outputs: list[Tensor] | None,
    routing: Routing,
) -> PreparedCall:
    """Dispatch, checked; its result is rows, scales if any, weights if any, segments.

    ``outputs``: these, if the caller has made them, for ``max_tokens``.
    """
    x = checks.tensor("x", x, communicator)
    if x.dtype not in MOVED_DTYPES:
        raise TypeError(f"x must be of floats or fp8, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"x must have 2 dimensions (tokens, hidden), got {tuple(x.shape)}")
    if scales is not None:
        scales = checks.tensor("the scales of x", scales, communicator)
        if scales.dim() != 2 or scales.shape[0] != x.shape[0]:
            raise ValueError(
                f"the scales of x must have 2 dimensions and {x.shape[0]} rows, got "
                f"{tuple(scales.shape)}"
            )
        scales = scales.contiguous()
    checks.one_of("algorithm", routing.algorithm, ("auto", "fused", "unfused"))
    assignment = assignment_of(communicator, routing, topk_idx, x.shape[0])
    weights = weights_of(communicator, topk_weights, assignment.topk_idx)
    algorithm = resolved(communicator, routing.algorithm)
    if not x.shape[1]:
        algorithm = "unfused"
    data = x.contiguous()

    def start() -> Outcome:
        terms = (
            ("dtype of x", data.dtype),
            ("hidden of x", data.shape[1]),
            ("scales of x", None if scales is None else (scales.shape[1], scales.dtype)),
            ("whether there are topk_weights", weights is not None),
        )
        counted = algorithm == "unfused" or not routing.max_tokens
        known = agreed(communicator, DISPATCH, routing, assignment, counted, terms)
        made = outputs
        if made is None:
            made = results(
                routing, data, scales, assignment.topk_idx, weights, known.counts, communicator
            )
        result = _named(made, scales is not None, weights is not None)
        op = Dispatch(communicator, data, scales, weights, assignment, known.bounds)
        way = algorithm if known.bounds.most_tokens else "unfused"
        if op_ranges := profiled_op.get():
            op_ranges.begin(way)
        if way == "unfused":
            counts = known.counts
            if counts is None:
                counts = torch.zeros(communicator.world_size, assignment.experts, dtype=torch.int64)
            event = op.unfused(result, counts)
        else:
            words = max(1, data.shape[1] * data.element_size() // 4)
            event = op.fused(
                result, configuration.choose(communicator.place, data.dtype, 16, words, words)
            )
        return Outcome(made if outputs is None else None, event)

    return start, (), None


def _named(made: list[Tensor], scaled: bool, weighted: bool) -> DispatchResult:
    rows, *rest, segments = made
    scales = rest.pop(0) if scaled else None
    return DispatchResult(rows, scales, rest[0] if weighted else None, segments)


def results(
    routing: Routing,
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    weights: Tensor | None,
    counts: Tensor | None,
    communicator: Communicator,
) -> list[Tensor]:
    """Tensors for what a dispatch gives; of ``max_tokens`` in the worst case, else of ``counts``."""
    world_size, rank = communicator.world_size, communicator.rank
    if routing.max_tokens:
        return bounded(routing, x, scales, topk_idx, weights, world_size)
    assert counts is not None
    per_rank = routing.num_experts // world_size
    rows = int(counts[:, rank * per_rank : (rank + 1) * per_rank].sum())
    return _results(routing, x, scales, topk_idx, weights, world_size, rows)


def bounded(
    routing: Routing,
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    weights: Tensor | None,
    world_size: int,
) -> list[Tensor]:
    """As of :func:`results`, from shapes alone; zeros, as not all rows will be written."""
    rows = routing.bound(topk_idx.shape[1], world_size)
    made = _results(routing, x, scales, topk_idx, weights, world_size, rows)
    for each in made[:-1]:
        (each if each.element_size() > 1 else each.view(torch.uint8)).zero_()
    return made


def _results(
    routing: Routing,
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    weights: Tensor | None,
    world_size: int,
    rows: int,
) -> list[Tensor]:
    made = [x.new_empty(rows, x.shape[1])]
    if scales is not None:
        made.append(scales.new_empty(rows, scales.shape[1]))
    if weights is not None:
        made.append(weights.new_empty(rows, dtype=torch.float32))
    segments = routing.num_experts // world_size, world_size, 3
    made.append(topk_idx.new_empty(segments, dtype=torch.int64))
    return made


def combine(
    communicator: Communicator,
    rows: Tensor,
    segments: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    outputs: list[Tensor] | None,
    return_rows: bool,
    routing: Routing,
) -> PreparedCall:
    """Combine, checked; its result is the sums and, if asked for, the home rows, ``[tokens * k, n]``."""
    rows = checks.tensor("y", rows, communicator)
    checks.float_dtype("y", rows.dtype)
    if rows.dim() != 2:
        raise ValueError(f"y must have 2 dimensions (rows, n), got {tuple(rows.shape)}")
    checks.one_of("algorithm", routing.algorithm, ("auto", "fused", "unfused"))
    algorithm = resolved(communicator, routing.algorithm)
    if algorithm == "fused" and routing.algorithm == "fused" and rows.dtype not in FUSED_DTYPES:
        raise TypeError(
            f'algorithm="fused" supports float32, float16 and bfloat16, y is {rows.dtype}; use '
            '"unfused" or "auto"'
        )
    if rows.dtype not in FUSED_DTYPES or not rows.shape[1]:
        algorithm = "unfused"
    assignment = assignment_of(communicator, routing, topk_idx, None)
    weights = weights_of(communicator, topk_weights, assignment.topk_idx)
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    shape = segments.shape
    expected = routing.num_experts // communicator.world_size, communicator.world_size, 3
    if tuple(shape) != expected:
        raise ValueError(f"the handle is of a group with segments {tuple(shape)}, not {expected}")
    if communicator.place.interpreted and segments.numel():
        last = int((segments[..., 0] + segments[..., 1]).max())
        if rows.shape[0] < last:
            raise ValueError(f"y has {rows.shape[0]} rows, the dispatch has made {last}")

    def start() -> Outcome:
        terms = (("dtype of y", rows.dtype), ("n of y", rows.shape[1]))
        counted = algorithm == "unfused"
        known = agreed(communicator, COMBINE, routing, assignment, counted, terms)
        made = outputs or combined(rows, assignment.topk_idx, return_rows)
        kept = made[1] if return_rows else None
        op = Combine(
            communicator,
            rows,
            segments,
            Home(assignment.inverse, weights, made[0], kept),
            known.bounds,
        )
        way = algorithm if known.bounds.most_tokens else "unfused"
        if op_ranges := profiled_op.get():
            op_ranges.begin(way)
        if way == "unfused":
            counts = known.counts
            if counts is None:
                counts = torch.zeros(communicator.world_size, assignment.experts, dtype=torch.int64)
            event = op.unfused(counts)
        else:
            columns = rows.shape[1]
            event = op.fused(
                configuration.choose(communicator.place, rows.dtype, 16, columns, columns)
            )
        return Outcome(made if outputs is None else None, event)

    return start, (), None


def combined(rows: Tensor, topk_idx: Tensor, return_rows: bool, dtype: Any = None) -> list[Tensor]:
    """Tensors for what a combine gives."""
    made = [rows.new_empty(topk_idx.shape[0], rows.shape[1], dtype=dtype)]
    if return_rows:
        made.append(rows.new_empty(topk_idx.numel(), rows.shape[1], dtype=dtype))
    return made
