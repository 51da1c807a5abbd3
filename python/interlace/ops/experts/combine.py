"""Combine: rows of experts go back to their tokens, and are summed; ``routing.py`` has the order.

As a dispatch (``dispatch.py``): with its bound of tokens the fused algorithm knows no count on the
host, and comes from a plan.

Gradients: of the rows, what a dispatch of the tokens' gradients gives, times their weights; of a weight,
its row times the gradient of its token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.arguments import checks
from interlace.ops.experts.assignment import Assignment
from interlace.ops.experts.dispatch import as_many
from interlace.ops.experts.launch_combine import Combine, Home
from interlace.ops.experts.launch_dispatch import Bounds, HostRoutes, row_moves
from interlace.ops.experts.routing import (
    Routing,
    RoutingArguments,
    agreed,
    assignment_of,
    measured,
    most_dispatched,
    resolved,
    senders_of,
    weights_of,
)
from interlace.ops.op.gradients import complete, kept, wait
from interlace.ops.op.op import Op, OpGradient, requiring
from interlace.ops.op.pending import Started
from interlace.ops.op.registry import Ops
from interlace.runtime.core.call import PreparedCall
from interlace.runtime.core.communicator import Communicator, composed_form, internal_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.stream import Outcome
from interlace.runtime.tuning.auto import FUSED_DTYPES

COMBINE = "combine"
BY_TORCH = ("pipelined", "unfused")
Tensor = torch.Tensor
_ops: Any = Ops()


@dataclass
class CombineArguments(RoutingArguments):
    input: Tensor
    segments: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    return_rows: bool
    num_experts: int
    capacity: int
    max_tokens: int
    packed: bool
    algorithm: str


def _prepared(
    communicator: Communicator,
    rows: Tensor,
    segments: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    outputs: list[Tensor] | None,
    routing: Routing,
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    """Checked on this rank: the form that goes on, its tensors and options.

    ``outputs``: as :func:`results_of` makes them. Without them the result is the sums.
    """
    rows = checks.tensor("y", rows, communicator)
    checks.float_dtype("y", rows.dtype)
    if rows.dim() != 2:
        raise ValueError(f"y must have 2 dimensions (rows, n), got {tuple(rows.shape)}")
    checks.one_of("algorithm", routing.algorithm, checks.ALGORITHMS)
    algorithm = resolved(communicator, routing.algorithm)
    if algorithm == "fused" and routing.algorithm == "fused" and rows.dtype not in FUSED_DTYPES:
        raise TypeError(
            f'algorithm="fused" supports float32, float16 and bfloat16, y is {rows.dtype}; use '
            'another one or "auto"'
        )
    if not rows.shape[1] or (algorithm == "fused" and rows.dtype not in FUSED_DTYPES):
        algorithm = "unfused"
    assignment = assignment_of(communicator, routing, topk_idx, None)
    weights = weights_of(communicator, topk_weights, assignment.topk_idx)
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    segments = checked_segments(communicator, segments, routing, "y", rows)
    tokens, most = len(assignment.topk_idx), most_dispatched(communicator)
    if not routing.max_tokens and most and tokens > most:
        raise ValueError(f"topk_idx has {tokens} rows, no dispatch has had more than {most}")
    if algorithm == "fused":
        tensors = rows, segments, assignment.inverse, weights, outputs
        return (_planned if routing.max_tokens else _unplanned), tensors, (routing,)
    return _counted, (rows, weights, outputs), (assignment, algorithm, routing)


def checked_segments(
    communicator: Communicator, segments: Tensor, routing: Routing, name: str, rows: Tensor
) -> Tensor:
    """Those of a handle, if ``rows``, an argument of this ``name``, can be what its dispatch has made."""
    segments = checks.tensor("handle.segments", segments, communicator)
    expected = routing.num_experts // communicator.world_size, communicator.world_size, 3
    if tuple(segments.shape) != expected:
        raise ValueError(
            f"the handle is of a group with segments {tuple(segments.shape)}, not {expected}"
        )
    if communicator.place.interpreted and segments.numel():
        last = int((segments[..., 0] + segments[..., 1]).max())
        if rows.shape[0] < last:
            raise ValueError(
                f"{name} has {rows.shape[0]} rows, the dispatch has made {last} of them"
            )
    return segments


def _on_device(
    communicator: Communicator,
    rows: Tensor,
    segments: Tensor,
    inverse: Tensor,
    weights: Tensor | None,
    outputs: list[Tensor] | None,
    routing: Routing,
) -> PreparedCall:
    """By the kernel, counts on the device."""

    def start() -> Outcome:
        terms = (("dtype of y", rows.dtype), ("n of y", rows.shape[1]))
        most, _ = agreed(communicator, COMBINE, routing, inverse.shape, terms)
        home = home_of(rows, inverse, weights, outputs)
        event = None
        if most:
            name_algorithm("fused")
            senders = senders_of(communicator, COMBINE)
            bounds = Bounds(most, senders, routing.expert_rows(communicator.world_size))
            columns = rows.shape[1]
            chosen = row_moves(communicator.place, max(1, columns * rows.element_size() // 4))
            problem = rows.dtype, most * inverse.shape[1], columns
            chosen = measured(communicator, COMBINE, *problem, "fused").over(chosen)
            event = Combine(communicator, rows, home).fused(segments, bounds, chosen)
        return Outcome(None if outputs else home.output, event)

    return start, (), None


def _with_counts(
    communicator: Communicator,
    rows: Tensor,
    weights: Tensor | None,
    outputs: list[Tensor] | None,
    assignment: Assignment,
    algorithm: str,
    routing: Routing,
) -> PreparedCall:
    """By torch; the host knows all ranks' counts."""

    def start() -> Outcome:
        terms, shape = (
            (("dtype of y", rows.dtype), ("n of y", rows.shape[1])),
            assignment.topk_idx.shape,
        )
        most, counts = agreed(communicator, COMBINE, routing, shape, terms, assignment.counts)
        assert counts is not None
        way = algorithm if most else "unfused"
        if routing.algorithm == "auto" and communicator.place.nodes is None:
            problem = rows.dtype, int(counts.sum(1).max()), rows.shape[1]
            named = measured(communicator, COMBINE, *problem).algorithm
            way = named if named in BY_TORCH else way
        name_algorithm(way)
        routes = HostRoutes(assignment, counts, routing.expert_rows(communicator.world_size))
        home = home_of(rows, assignment.inverse, weights, outputs)
        op = Combine(communicator, rows, home)
        event = (op.pipelined if way == "pipelined" else op.unfused)(routes)
        return Outcome(None if outputs else home.output, event)

    return start, (), None


_planned = internal_form(COMBINE, _on_device, fills=False)
_unplanned = internal_form(COMBINE, _on_device)  # of rows that are as many as they are
_counted = internal_form(COMBINE, _with_counts)
combine = composed_form(COMBINE, _prepared)
"""Of ``(rows, segments, topk_idx, topk_weights, outputs)`` and ``(routing,)``."""


def home_of(
    rows: Tensor, inverse: Tensor, weights: Tensor | None, outputs: list[Tensor] | None
) -> Home:
    """Where ``rows`` come back to."""
    made = outputs or results_of(rows, inverse, False)
    return Home(inverse, weights, made[0], made[1] if made[1:] else None)


def results_of(
    rows: Tensor, topk_idx: Tensor, return_rows: bool, dtype: Any = None
) -> list[Tensor]:
    """Tensors for what a combine gives: the sums and, if asked for, the home rows, ``[tokens * k, n]``."""
    made = [rows.new_empty(topk_idx.shape[0], rows.shape[1], dtype=dtype)]
    if return_rows:
        made.append(rows.new_empty(topk_idx.numel(), rows.shape[1], dtype=dtype))
    return made


def results(given: CombineArguments, size: int) -> list[Tensor]:
    return results_of(given.input, given.topk_idx, given.return_rows)


def start(communicator: Communicator, given: CombineArguments) -> Started:
    with communicator.accepting(COMBINE):
        if given.input.dim() != 2:
            raise ValueError(f"y must have 2 dimensions, got shape {tuple(given.input.shape)}")
        outputs = results(given, communicator.world_size)
    tensors = (given.input, given.segments, given.topk_idx, given.topk_weights, outputs)
    return Started(outputs, combine(communicator, tensors, (given.routing,), True))


def save(ctx: Any, given: CombineArguments, output: Sequence[Tensor]) -> None:
    ctx.needed, ctx.routing, ctx.rows = requiring(given), given.routing, given.input.shape[0]
    home = home_rows(COMBINE, ctx.needed, given.return_rows, output)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(given.topk_idx, given.topk_weights, home)


def home_rows(
    op: str, needed: set[str], return_rows: bool, output: Sequence[Tensor]
) -> Tensor | None:
    """The rows that an op has brought home, to be saved, if gradients of ``topk_weights`` are needed."""
    if "topk_weights" not in needed:
        return None
    if not return_rows:
        raise RuntimeError(f"{op}: gradients of topk_weights need return_rows")
    return kept(output[1])


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> Mapping[str, Tensor]:
    idx, weights, home = ctx.saved_tensors
    found: dict[str, Tensor] = {}
    grad = grads[0]
    if grad is None:
        return found
    if "input" in ctx.needed:
        made = _ops.dispatch(grad, None, idx, weights, *ctx.routing, ctx.size, ctx.name)
        rows = wait(made[0])
        if weights is not None:
            rows = (rows * wait(made[1]).unsqueeze(1)).to(grad.dtype)
        found["input"] = as_many(rows, ctx.rows)
    if home is not None:
        inverse = ctx.routing.inverse(idx)
        found["topk_weights"] = of_slot_weights(weights, home, inverse, grad)
    return found


def of_slot_weights(weights: Tensor, home: Tensor, inverse: Tensor, grad: Tensor) -> Tensor:
    """Of the weight of each slot: its home row times its token's gradient, in at least fp32.

    ``home``: as :func:`home_rows` gives them.
    """
    wide = torch.promote_types(weights.dtype, torch.float32)
    rows = complete(home)[inverse.clamp(min=0)].to(wide)
    product = torch.einsum("tkn,tn->tk", rows, grad.to(wide))
    return torch.where(inverse < 0, 0.0, product).to(weights.dtype)


GRADIENT = OpGradient(save, backward)
COMMUNICATES = {"y": ("input",)}
OPS = (Op(COMBINE, CombineArguments, start, results, GRADIENT, COMMUNICATES, several=True),)
