"""Dispatch: rows of tokens to their experts; ``routing.py`` says in which order.

A call is validated, agreed on with the other ranks (a mismatch raises on every rank before any data moves),
and handed to an algorithm of ``launch_dispatch.py``. With a bound of tokens the fused one needs no
count on the host: who goes where is found by torch on the device, and what follows may come from a plan.
"""

from collections.abc import Callable
from typing import Any

import torch

from interlace.arguments import checks
from interlace.ops.experts.assignment import Assignment, SentTokens
from interlace.ops.experts.launch_dispatch import (
    Bounds,
    Dispatch,
    DispatchResult,
    HostRoutes,
    row_moves,
)
from interlace.ops.experts.routing import (
    Routing,
    agreed,
    assignment_of,
    measured,
    resolved,
    senders_of,
    weights_of,
)
from interlace.runtime.core.call import PreparedCall, Terms
from interlace.runtime.core.communicator import Communicator, composed_form, internal_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.stream import Event, Outcome

DISPATCH = "dispatch"
Tensor = torch.Tensor
MOVED_DTYPES = (*checks.FLOAT_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)


def _prepared(
    communicator: Communicator,
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    outputs: list[Tensor] | None,
    routing: Routing,
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    """Checked on this rank: the form that goes on, its tensors and options.

    ``outputs``: rows, scales if any, weights if any, segments, if the caller has made them by
    :func:`bounded`.
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
    checks.one_of("algorithm", routing.algorithm, checks.ALGORITHMS)
    assignment = assignment_of(communicator, routing, topk_idx, x.shape[0])
    weights = weights_of(communicator, topk_weights, assignment.topk_idx)
    algorithm = resolved(communicator, routing.algorithm)
    if not x.shape[1]:
        algorithm = "unfused"
    x = x.contiguous()
    made = outputs
    if made is None and routing.max_tokens:
        made = bounded(routing, x, scales, topk_idx, weights, communicator.world_size)
    if algorithm == "fused" and routing.max_tokens:
        sent = assignment.sent(weights)
        about = weights is not None, outputs is not None, routing
        return _planned, (x, scales, *sent, made), about
    return (
        _counted,
        (x, scales, weights, made),
        (outputs is not None, assignment, algorithm, routing),
    )


def _terms(x: Tensor, scales: Tensor | None, weighted: bool) -> Terms:
    return (
        ("dtype of x", x.dtype),
        ("hidden of x", x.shape[1]),
        ("scales of x", None if scales is None else (scales.shape[1], scales.dtype)),
        ("whether there are topk_weights", weighted),
    )


def _fused(
    communicator: Communicator,
    op: Dispatch,
    sent: SentTokens,
    most: int,
    rows: int,
    routing: Routing,
) -> Event:
    """``most`` tokens and ``rows`` has the rank with most."""
    senders = senders_of(communicator, DISPATCH)
    bounds = Bounds(most, senders, routing.expert_rows(communicator.world_size))
    words = max(1, op.x.shape[1] * op.x.element_size() // 4)
    chosen = row_moves(communicator.place, words)
    problem = op.x.dtype, rows, op.x.shape[1]
    chosen = measured(communicator, DISPATCH, *problem, "fused").over(chosen)
    return op.fused(sent, bounds, chosen)


def _on_device(
    communicator: Communicator,
    x: Tensor,
    scales: Tensor | None,
    facts: Tensor,
    tokens: Tensor,
    lines: Tensor,
    made: list[Tensor],
    weighted: bool,
    given: bool,
    routing: Routing,
) -> PreparedCall:
    """By the kernels, counts on the device. ``given``: the caller has ``made``, which is no result then."""

    def start() -> Outcome:
        shape, terms = (x.shape[0], facts.shape[1] // 3), _terms(x, scales, weighted)
        most, _ = agreed(communicator, DISPATCH, routing, shape, terms)
        name_algorithm("fused")
        op = Dispatch(communicator, x, scales, _named(made, scales is not None, weighted))
        rows = most * shape[1]
        event = _fused(communicator, op, SentTokens(facts, tokens, lines), most, rows, routing)
        return Outcome(None if given else made, event)

    return start, (), None


def _with_counts(
    communicator: Communicator,
    x: Tensor,
    scales: Tensor | None,
    weights: Tensor | None,
    outputs: list[Tensor] | None,
    given: bool,
    assignment: Assignment,
    algorithm: str,
    routing: Routing,
) -> PreparedCall:
    """The host knows all ranks' counts: for results that are as long as they are, or by torch."""

    def start() -> Outcome:
        terms, shape = _terms(x, scales, weights is not None), assignment.topk_idx.shape
        most, counts = agreed(communicator, DISPATCH, routing, shape, terms, assignment.counts)
        assert counts is not None
        routes = HostRoutes(assignment, counts, routing.expert_rows(communicator.world_size))
        made = outputs
        if made is None:
            rows = int(routes.sizes()[:, communicator.rank].sum())
            made = results(
                routing, x, scales, assignment.topk_idx, weights, communicator.world_size, rows
            )
        result = _named(made, scales is not None, weights is not None)
        op, way = Dispatch(communicator, x, scales, result), algorithm if most else "unfused"
        rows = int(counts.sum(1).max())
        if routing.algorithm == "auto" and communicator.place.nodes is None and x.shape[1]:
            way = measured(communicator, DISPATCH, x.dtype, rows, x.shape[1]).algorithm or way
        name_algorithm(way)
        if way == "fused":
            event = _fused(communicator, op, assignment.sent(weights), most, rows, routing)
        else:
            event = (op.pipelined if way == "pipelined" else op.unfused)(routes, weights)
        return Outcome(None if given else made, event)

    return start, (), None


_planned = internal_form(DISPATCH, _on_device, fills=False)
_counted = internal_form(DISPATCH, _with_counts)
dispatch = composed_form(DISPATCH, _prepared)
"""Of ``(x, scales, topk_idx, topk_weights, outputs)`` and ``(routing,)``: what :func:`bounded` lists."""


def _named(made: list[Tensor], scaled: bool, weighted: bool) -> DispatchResult:
    rows, *rest, segments = made
    scales = rest.pop(0) if scaled else None
    return DispatchResult(rows, scales, rest[0] if weighted else None, segments)


def bounded(
    routing: Routing,
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    weights: Tensor | None,
    world_size: int,
) -> list[Tensor]:
    """Tensors for what a dispatch gives, from ``max_tokens``; zeros, as not all rows will be written."""
    rows = routing.bound(topk_idx.shape[1], world_size)
    made = results(routing, x, scales, topk_idx, weights, world_size, rows)
    for each in made[:-1]:
        (each if each.element_size() > 1 else each.view(torch.uint8)).zero_()
    return made


def results(
    routing: Routing,
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    weights: Tensor | None,
    world_size: int,
    rows: int,
) -> list[Tensor]:
    """Tensors for what a dispatch gives, of ``rows``, with nothing in them."""
    made = [x.new_empty(rows, x.shape[1])]
    if scales is not None:
        made.append(scales.new_empty(rows, scales.shape[1]))
    if weights is not None:
        made.append(weights.new_empty(rows, dtype=torch.float32))
    segments = routing.num_experts // world_size, world_size, 3
    made.append(topk_idx.new_empty(segments, dtype=torch.int64))
    return made
