"""The ops of experts' rows: dispatch, combine, and a grouped matmul whose rows are combined.

A graph must know the shape of what comes out: a dispatch has room for the worst case there, from
``max_tokens``; without it, 0, its result is as long as it is.

Gradients: of dispatched tokens, what a combine of the rows' gradients gives; of combined rows, what a
dispatch of the tokens' gradients gives, times their weights; of a weight, its row times the gradient of its
token.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from interlace.fused import combine as back
from interlace.fused import dispatch as there
from interlace.fused.combine import COMBINE as COMBINE
from interlace.fused.dispatch import DISPATCH as DISPATCH
from interlace.fused.grouped_combine import MATMUL_COMBINE as MATMUL_COMBINE
from interlace.fused.grouped_combine import CombineOptions, grouped_matmul_combine
from interlace.fused.routing import Routing
from interlace.ops.eager.pending import Started
from interlace.ops.gradients import wait
from interlace.ops.undispatched import Ops
from interlace.runtime.algorithms.experts.assignment import Assignment
from interlace.runtime.core.communicator import Communicator

_ops: Any = Ops()
Tensor = torch.Tensor

_ROUTING = "int num_experts, int capacity, int max_tokens, bool packed"
DISPATCH_ARGUMENTS = (
    "Tensor input, Tensor? scales, Tensor topk_idx, Tensor? topk_weights, "
    f"{_ROUTING}, str algorithm"
)
COMBINE_ARGUMENTS = (
    "Tensor input, Tensor segments, Tensor topk_idx, Tensor? topk_weights, "
    f"bool return_rows, {_ROUTING}, str algorithm"
)
MATMUL_COMBINE_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? bias, Tensor topk_idx, Tensor? topk_weights, "
    "SymInt[] home_splits, SymInt[] splits, bool return_rows, str algorithm, ScalarType? out_dtype"
)


def dispatched(*args: Any) -> list[Tensor]:
    """What a dispatch gives, made; its arguments, and the size of the group."""
    input, scales, idx, weights, *given, size = args
    routing = Routing(*given)
    if not routing.max_tokens:
        raise ValueError("a graph needs num_max_dispatch_tokens_per_rank, to know shapes")
    if input.dim() != 2 or idx.dim() != 2:
        raise ValueError(
            f"x and topk_idx must have 2 dimensions, got shapes {tuple(input.shape)} and "
            f"{tuple(idx.shape)}"
        )
    return there.bounded(routing, input, scales, idx, weights, size)


def start_dispatch(communicator: Communicator, *args: Any) -> Started:
    input, scales, idx, weights, *given = args
    outputs = None
    if Routing(*given).max_tokens:
        with communicator.accepting(DISPATCH):
            outputs = dispatched(*args, communicator.world_size)
    tensors = (input, scales, idx, weights, outputs)
    if outputs is None:
        made: Any = there.dispatch(communicator, tensors, (Routing(*given),), False)
        return Started(made, None)
    return Started(outputs, there.dispatch(communicator, tensors, (Routing(*given),), True))


def setup_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, scales, idx, weights, *ctx.routing, ctx.algorithm, ctx.size, ctx.name = inputs
    ctx.scaled, ctx.weighted = scales is not None, weights is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1], idx)


def dispatch_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    segments, idx = ctx.saved_tensors
    segments = wait(segments)
    of_rows, of_weights = grads[0], grads[-2] if ctx.weighted else None

    def combined(rows: Tensor, kept: bool) -> list[Tensor]:
        about = segments, idx, None, kept
        return list(_ops.combine(rows, *about, *ctx.routing, ctx.algorithm, ctx.size, ctx.name))

    of_input = None if of_rows is None else wait(combined(of_rows, False)[0])
    of_given = None
    if of_weights is not None:
        kept = wait(combined(of_weights.view(-1, 1), True)[1])
        inverse = _inverse(ctx, idx)
        of_given = torch.where(inverse < 0, 0.0, kept.view(-1)[inverse.clamp(min=0)])
    return (of_input, None, None, of_given, *[None] * 7)


def _inverse(ctx: Any, idx: Tensor) -> Tensor:
    """The home row of each slot; it is not kept, as it takes less time than memory."""
    experts, capacity, *_ = ctx.routing
    return Assignment(idx.to(torch.int64), experts, 1, capacity).inverse


def combined(*args: Any) -> list[Tensor]:
    """What a combine gives, made; its arguments, and the size of the group."""
    input, _, idx, _, return_rows, *_ = args
    return back.combined(input, idx, return_rows)


def start_combine(communicator: Communicator, *args: Any) -> Started:
    *tensors, _, experts, capacity, most, packed, algorithm = args
    with communicator.accepting(COMBINE):
        if tensors[0].dim() != 2:
            raise ValueError(f"y must have 2 dimensions, got shape {tuple(tensors[0].shape)}")
        outputs = combined(*args, communicator.world_size)
    routing = Routing(experts, capacity, most, packed, algorithm)
    return Started(outputs, back.combine(communicator, (*tensors, outputs), (routing,), True))


def setup_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, _, idx, weights, kept, *ctx.routing, ctx.algorithm, ctx.size, ctx.name = inputs
    ctx.rows, ctx.shared = input.shape[0], input.requires_grad
    ctx.weighted = weights is not None
    ctx.weighs = weights is not None and weights.requires_grad
    if ctx.weighs and not kept:
        raise RuntimeError("combine: gradients of topk_weights need return_rows")
    ctx.set_materialize_grads(False)
    more = [weights] if ctx.weighted else []
    ctx.save_for_backward(idx, *more, *([output[1]] if ctx.weighs else []))


def combine_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    idx, *more = ctx.saved_tensors
    grad, of_input, of_weights = grads[0], None, None
    if grad is None:
        return (None,) * 12
    weights = more[0] if ctx.weighted else None
    if ctx.shared:
        about = (*ctx.routing, ctx.algorithm, ctx.size, ctx.name)
        made = _ops.dispatch(grad, None, idx, weights, *about)
        of_input = wait(made[0])
        if weights is not None:
            of_input = (of_input * wait(made[1]).unsqueeze(1)).to(grad.dtype)
        if of_input.shape[0] != ctx.rows:  # rows that nothing was dispatched to
            of_input = F.pad(of_input, (0, 0, 0, ctx.rows - of_input.shape[0]))
    if ctx.weighs:
        of_weights = _of_weights(weights, wait(more[1]), _inverse(ctx, idx), grad)
    return (of_input, None, None, of_weights, *[None] * 8)


def _of_weights(weights: Any, home: Tensor, inverse: Tensor, grad: Tensor) -> Tensor:
    """Of the weight of each slot: its row times the gradient of its token, in at least fp32."""
    wide = torch.promote_types(weights.dtype, torch.float32)
    rows = home[inverse.clamp(min=0)].to(wide)
    product = torch.einsum("tkn,tn->tk", rows, grad.to(wide))
    return torch.where(inverse < 0, 0.0, product).to(weights.dtype)


def products(*args: Any) -> list[Tensor]:
    """What grouped matmul + combine gives, made; its arguments, and the size of the group."""
    input, weight, _, idx, *_ = args
    return_rows, _, out_dtype, _ = args[-4:]
    if input.dim() != 2 or weight.dim() != 3 or idx.dim() != 2:
        raise ValueError(
            "input and topk_idx must have 2 dimensions and weight 3, got shapes "
            f"{tuple(input.shape)}, {tuple(idx.shape)} and {tuple(weight.shape)}"
        )
    dtype = input.dtype if out_dtype is None else out_dtype
    shape = idx.shape[0], weight.shape[2]
    made = [input.new_empty(shape, dtype=dtype)]
    if return_rows:
        made.append(input.new_empty((idx.numel(), weight.shape[2]), dtype=dtype))
    return made


def start_products(communicator: Communicator, *args: Any) -> Started:
    *tensors, _, splits, _, algorithm, out_dtype = args
    with communicator.accepting(MATMUL_COMBINE):
        outputs = products(*args, communicator.world_size)
        options = CombineOptions(list(splits), algorithm, out_dtype)
    work = grouped_matmul_combine(communicator, (*tensors, None, outputs), (options,), True)
    return Started(outputs, work)


def setup_products(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, weight, bias, idx, weights, home, splits, kept, ctx.algorithm, _, ctx.size, ctx.name = (
        inputs
    )
    ctx.home, ctx.splits = list(home), list(splits)
    ctx.shared, ctx.weighed = input.requires_grad, weight.requires_grad
    ctx.biased = bias is not None and bias.requires_grad
    ctx.weighted = weights is not None
    ctx.weighs = weights is not None and weights.requires_grad
    if ctx.weighs and not kept:
        raise RuntimeError(f"{MATMUL_COMBINE}: gradients of topk_weights need return_rows")
    ctx.set_materialize_grads(False)
    more = [weights] if ctx.weighted else []
    ctx.save_for_backward(input, weight, idx, *more, *([output[1]] if ctx.weighs else []))


def products_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    input, weight, idx, *more = ctx.saved_tensors
    grad, of_input, of_weight, of_bias, of_weights = grads[0], None, None, None, None
    if grad is None:
        return (None,) * 12
    experts, topk = int(weight.shape[0]), int(idx.shape[1])
    ranks = len(ctx.splits) // experts
    weights = more[0] if ctx.weighted else None
    chosen = Assignment(idx.to(torch.int64), experts * ranks, ranks)
    if ctx.shared or ctx.weighed or ctx.biased:
        slots = chosen.slots(sum(ctx.home))
        rows = grad[slots // topk]
        if weights is not None:
            rows = rows * weights.reshape(-1)[slots].unsqueeze(1)
        # the products of rows that travel, as in forward; and the rows, for the weight's gradient
        of_input, received = _ops.all_to_all_grouped_matmul(
            rows.to(weight.dtype), weight.transpose(1, 2), None, ctx.home, ctx.splits, True,
            ctx.algorithm, None, ctx.size, ctx.name,
        )  # fmt: skip
        of_input, received = wait(of_input), wait(received)
        lengths = [sum(ctx.splits[e * ranks : (e + 1) * ranks]) for e in range(experts)]
        parts = torch.split(received, lengths)
        if ctx.weighed:
            inputs = torch.split(input, lengths)
            pairs = zip(inputs, parts, strict=True)
            of_weight = torch.stack([a.t() @ part for a, part in pairs])
        if ctx.biased:
            of_bias = torch.stack([part.sum(0) for part in parts])
    if ctx.weighs:
        of_weights = _of_weights(weights, wait(more[1]), chosen.inverse, grad)
    given = of_input if ctx.shared else None
    return (given, of_weight, of_bias, None, of_weights, *[None] * 7)
