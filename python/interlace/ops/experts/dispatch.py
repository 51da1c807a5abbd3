"""Dispatch: rows of tokens to their experts; ``routing.py`` says in which order.

A call is validated, agreed on with the other ranks (a mismatch raises on every rank before any data moves),
and handed to an algorithm of ``launch_dispatch.py``. With a bound of tokens the fused one needs no
count on the host: who goes where is found by torch on the device, and what follows may come from a plan.

With a bound the result has room for the worst case; without it, 0, the result is as long as it is, and of a
size that a graph finds when it runs. The gradient of the rows is a combine of the rows' gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

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
    RoutingArguments,
    agreed,
    assignment_of,
    measured,
    resolved,
    senders_of,
    weights_of,
)
from interlace.ops.op.gradients import wait
from interlace.ops.op.op import Op, OpGradient
from interlace.ops.op.pending import Started
from interlace.ops.op.registry import Ops
from interlace.runtime.core.call import PreparedCall, Terms
from interlace.runtime.core.communicator import Communicator, composed_form, internal_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.stream import Event, Outcome

DISPATCH = "dispatch"
Tensor = torch.Tensor
MOVED_DTYPES = (*checks.FLOAT_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
_ops: Any = Ops()
_check: Any = torch._check


@dataclass
class DispatchArguments(RoutingArguments):
    input: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    num_experts: int
    capacity: int
    max_tokens: int
    packed: bool
    algorithm: str


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
    :func:`results`.
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
        given = DispatchArguments(x, scales, topk_idx, weights, *routing)
        made = results(given, communicator.world_size)
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
            arguments = DispatchArguments(x, scales, assignment.topk_idx, weights, *routing)
            made = results(arguments, communicator.world_size, rows)
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
"""Of ``(x, scales, topk_idx, topk_weights, outputs)`` and ``(routing,)``: what :func:`results` lists."""


def _named(made: list[Tensor], scaled: bool, weighted: bool) -> DispatchResult:
    rows, *rest, segments = made
    scales = rest.pop(0) if scaled else None
    return DispatchResult(rows, scales, rest[0] if weighted else None, segments)


def results(given: DispatchArguments, size: int, rows: Any = None) -> list[Tensor]:
    """Tensors for what a dispatch gives; zeros with a bound, as not all rows will be written then.

    ``rows``: their number, without a bound; None for tracers, in whose graphs it has no value.
    """
    x, scales, idx, routing = given.input, given.scales, given.topk_idx, given.routing
    if x.dim() != 2 or idx.dim() != 2:
        raise ValueError(
            f"x and topk_idx must have 2 dimensions, got shapes {tuple(x.shape)} and {tuple(idx.shape)}"
        )
    if routing.max_tokens:
        rows = routing.bound(idx.shape[1], size)
    elif rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()
    made = [x.new_empty(rows, x.shape[1])]
    if scales is not None:
        made.append(scales.new_empty(rows, scales.shape[1]))
    if given.topk_weights is not None:
        made.append(given.topk_weights.new_empty(rows, dtype=torch.float32))
    if routing.max_tokens:
        for each in made:
            (each if each.element_size() > 1 else each.view(torch.uint8)).zero_()
    segments = routing.num_experts // size, size, 3
    return [*made, idx.new_empty(segments, dtype=torch.int64)]


def start(communicator: Communicator, given: DispatchArguments) -> Started:
    made = None
    if given.max_tokens:
        with communicator.accepting(DISPATCH):
            made = results(given, communicator.world_size)
    tensors = (given.input, given.scales, given.topk_idx, given.topk_weights, made)
    if made is None:
        return Started(dispatch(communicator, tensors, (given.routing,), False), None)
    return Started(made, dispatch(communicator, tensors, (given.routing,), True))


def save(ctx: Any, given: DispatchArguments, output: Sequence[Tensor]) -> None:
    ctx.routing, ctx.weighted = given.routing, given.topk_weights is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1], given.topk_idx)


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> Mapping[str, Tensor]:
    segments, idx = ctx.saved_tensors
    segments = wait(segments)
    of_rows, of_weights = grads[0], grads[-2] if ctx.weighted else None

    def combined(rows: Tensor, return_rows: bool) -> list[Tensor]:
        about = segments, idx, None, return_rows, *ctx.routing, ctx.size, ctx.name
        return list(_ops.combine(rows, *about))

    found = {}
    if of_rows is not None:
        found["input"] = wait(combined(of_rows, False)[0])
    if of_weights is not None:
        home = wait(combined(of_weights.view(-1, 1), True)[1]).view(-1)
        inverse = ctx.routing.inverse(idx)
        found["topk_weights"] = torch.where(inverse < 0, 0.0, home[inverse.clamp(min=0)])
    return found


def as_many(rows: Tensor, count: Any) -> Tensor:
    """The first ``count`` of rows that a dispatch has made, or zeros behind them."""
    made: Any = rows.shape[0]
    if isinstance(made, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # brings sympy

        if free_unbacked_symbols(made):
            _check(made == count)  # in a graph nobody adds to what a dispatch has made
            return rows
    return rows if made == count else F.pad(rows, (0, 0, 0, count - made))


GRADIENT = OpGradient(save, backward)
COMMUNICATES = {"x or topk_weights": ("input", "topk_weights")}
OPS = (Op(DISPATCH, DispatchArguments, start, results, GRADIENT, COMMUNICATES, several=True),)
