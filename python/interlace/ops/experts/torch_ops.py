"""The ops of experts' rows: dispatch, combine, and a grouped matmul whose rows are combined.

A dispatch has room for the worst case, from ``max_tokens``; without it, 0, its result is as long as it is,
and of a size that a graph finds when it runs.

Grouped matmul + combine after a dispatch takes its segments: a graph needs to know no number of rows. Its
backward is an op of its own, and has none: the gradients of tokens are dispatched as tokens were, and
multiplied where they arrive. It is opaque to compilers, as torch's grouped matmul takes one dtype there.

Gradients: of dispatched tokens, what a combine of the rows' gradients gives; of combined rows, what a
dispatch of the tokens' gradients gives, times their weights; of a weight, its row times the gradient of its
token.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from interlace.arguments import checks
from interlace.ops.experts import combine as back
from interlace.ops.experts import dispatch as there
from interlace.ops.experts.assignment import Assignment
from interlace.ops.experts.combine import COMBINE as COMBINE
from interlace.ops.experts.dispatch import DISPATCH as DISPATCH
from interlace.ops.experts.grouped_combine import MATMUL_COMBINE as MATMUL_COMBINE
from interlace.ops.experts.grouped_combine import CombineOptions, grouped_matmul_combine
from interlace.ops.experts.routing import Routing
from interlace.ops.op.gradients import complete, wait
from interlace.ops.op.gradients import kept as kept_output
from interlace.ops.op.pending import Started
from interlace.ops.op.sim_dispatch import Ops
from interlace.runtime.core.communicator import Communicator

_ops: Any = Ops()
_check: Any = torch._check
Tensor = torch.Tensor

ROUTING = "int num_experts, int capacity, int max_tokens, bool packed"
DISPATCH_ARGUMENTS = (
    f"Tensor input, Tensor? scales, Tensor topk_idx, Tensor? topk_weights, {ROUTING}, str algorithm"
)
COMBINE_ARGUMENTS = (
    "Tensor input, Tensor segments, Tensor topk_idx, Tensor? topk_weights, "
    f"bool return_rows, {ROUTING}, str algorithm"
)
MATMUL_COMBINE_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? bias, Tensor topk_idx, Tensor? topk_weights, "
    "SymInt[] home_splits, SymInt[] splits, bool return_rows, str algorithm, ScalarType? out_dtype"
)
ROUTED = "routed_matmul_combine"
ROUTED_BACKWARD = f"{ROUTED}_backward"
ROUTED_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? bias, Tensor segments, Tensor topk_idx, Tensor? topk_weights, "
    f"bool return_rows, {ROUTING}, str algorithm, ScalarType? out_dtype"
)
ROUTED_BACKWARD_ARGUMENTS = (
    "Tensor grad, Tensor input, Tensor weight, Tensor segments, Tensor topk_idx, Tensor? topk_weights, "
    f"{ROUTING}, str algorithm"
)
ALIGNED = 16  # bytes, of all strides that torch's grouped matmul takes


def dispatched(*args: Any) -> list[Tensor]:
    """What a dispatch gives, made; its arguments, and the size of the group.

    Without a bound that is for tracers, in whose graphs the number of rows has no value.
    """
    input, scales, idx, weights, *given, size = args
    routing = Routing(*given)
    if input.dim() != 2 or idx.dim() != 2:
        raise ValueError(
            f"x and topk_idx must have 2 dimensions, got shapes {tuple(input.shape)} and "
            f"{tuple(idx.shape)}"
        )
    if routing.max_tokens:
        return there.bounded(routing, input, scales, idx, weights, size)
    rows: Any = torch.library.get_ctx().new_dynamic_size()
    return there.results(routing, input, scales, idx, weights, size, rows)


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
        inverse = inverse_of(idx, *ctx.routing[:2])
        of_given = torch.where(inverse < 0, 0.0, kept.view(-1)[inverse.clamp(min=0)])
    return (of_input, None, None, of_given, *[None] * 7)


def as_many(rows: Tensor, count: Any) -> Tensor:
    """The first ``count`` of rows that a dispatch has made, or zeros behind them."""
    made: Any = rows.shape[0]
    if isinstance(made, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # brings sympy

        if free_unbacked_symbols(made):
            _check(made == count)  # in a graph nobody adds to what a dispatch has made
            return rows
    return rows if made == count else F.pad(rows, (0, 0, 0, count - made))


def inverse_of(idx: Tensor, experts: int, capacity: int) -> Tensor:
    """The home row of each slot; it is not kept, as it takes less time than memory."""
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
    ctx.save_for_backward(idx, *more, *([kept_output(output[1])] if ctx.weighs else []))


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
        of_input = as_many(of_input, ctx.rows)
    if ctx.weighs:
        of_weights = of_slot_weights(
            weights, complete(more[1]), inverse_of(idx, *ctx.routing[:2]), grad
        )
    return (of_input, None, None, of_weights, *[None] * 8)


def of_slot_weights(weights: Any, home: Tensor, inverse: Tensor, grad: Tensor) -> Tensor:
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
    dtype = checks.output_dtype(out_dtype, input)
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
    ctx.save_for_backward(
        input, weight, idx, *more, *([kept_output(output[1])] if ctx.weighs else [])
    )


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
        of_weights = of_slot_weights(weights, complete(more[1]), chosen.inverse, grad)
    given = of_input if ctx.shared else None
    return (given, of_weight, of_bias, None, of_weights, *[None] * 7)


def routed_products(*args: Any) -> list[Tensor]:
    """What the op gives, made; its arguments, and the size of the group."""
    input, weight, _, _, idx, _, kept, *_, out_dtype, _ = args
    if input.dim() != 2 or weight.dim() != 3 or idx.dim() != 2:
        raise ValueError(
            "input and topk_idx must have 2 dimensions and weight 3, got shapes "
            f"{tuple(input.shape)}, {tuple(idx.shape)} and {tuple(weight.shape)}"
        )
    like = input.new_empty((0, weight.shape[2]), dtype=out_dtype or input.dtype)
    return back.combined(like, idx, kept)


def start_routed(communicator: Communicator, *args: Any) -> Started:
    input, weight, bias, segments, idx, weights, _, *routing, out_dtype = args
    with communicator.accepting(MATMUL_COMBINE):
        outputs = routed_products(*args, communicator.world_size)
    given = Routing(*routing)
    options = CombineOptions(None, given.algorithm, out_dtype, given)
    tensors = (input, weight, bias, idx, weights, segments, outputs)
    return Started(outputs, grouped_matmul_combine(communicator, tensors, (options,), True))


def setup_routed(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, weight, bias, segments, idx, weights, kept, *ctx.routing, _, ctx.size, ctx.name = inputs
    ctx.needed = [
        each is not None and each.requires_grad for each in (input, weight, bias, weights)
    ]
    if ctx.needed[-1] and not kept:
        raise RuntimeError(f"{MATMUL_COMBINE}: gradients of topk_weights need return_rows")
    ctx.set_materialize_grads(False)
    ctx.weighted = weights is not None
    more = [weights] if ctx.weighted else []
    more += [kept_output(output[1])] if ctx.needed[-1] else []
    ctx.save_for_backward(input, weight, segments, idx, *more)


def routed_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    input, weight, segments, idx, *more = ctx.saved_tensors
    made: list[Any]
    grad, made, of_weights = grads[0], [None] * 3, None
    if grad is None:
        return (None,) * 15
    weights = more[0] if ctx.weighted else None
    if any(ctx.needed[:3]):
        about = segments, idx, weights, *ctx.routing, ctx.size, ctx.name
        made = [wait(each) for each in getattr(_ops, ROUTED_BACKWARD)(grad, input, weight, *about)]
    if ctx.needed[3]:
        inverse = inverse_of(idx, *ctx.routing[:2])
        of_weights = of_slot_weights(weights, complete(more[1]), inverse, grad)
    of = [each if needed else None for each, needed in zip(made, ctx.needed, strict=False)]
    return (*of, None, None, of_weights, *[None] * 9)


def routed_gradients(*args: Any) -> list[Tensor]:
    """What the backward gives, made; its arguments, and the size of the group."""
    _, input, weight, *_ = args
    bias = weight.new_empty((weight.shape[0], weight.shape[2]))
    return [input.new_empty(input.shape), weight.new_empty(weight.shape), bias]


def start_routed_backward(communicator: Communicator, *args: Any) -> Started:
    grad, input, weight, segments, idx, weights, *given = args
    routing = Routing(*given)
    made = there.dispatch(communicator, (grad, None, idx, weights, None), (routing,), False)
    rows = made[0]
    if weights is not None:
        rows = rows * made[1].unsqueeze(1)
    rows = as_many(rows.to(weight.dtype), input.shape[0])
    return Started(_products(input, rows, weight, segments, routing.packed), None)


def _products(
    input: Tensor, rows: Tensor, weight: Tensor, segments: Tensor, packed: bool
) -> list[Tensor]:
    """The gradients of input, weight and bias, ``rows`` being those of the products."""
    experts, inner, columns = weight.shape
    if packed:
        many, wide = input.view(experts, -1, inner), rows.view(experts, -1, columns)
        of_input = torch.bmm(wide, weight.transpose(1, 2)).view(input.shape)
        return [of_input, torch.bmm(many.transpose(1, 2), wide), wide.sum(1)]
    if grouped_on_device(input, rows, weight):
        ends = segments[..., 1].sum(1).cumsum(0).to(torch.int32)
        row = torch.arange(input.shape[0], device=input.device)
        of_input = torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        of_input = of_input.masked_fill((row >= ends[-1]).unsqueeze(1), 0)
        of_weight = torch._grouped_mm(input.t(), rows, offs=ends)
        expert = torch.searchsorted(ends, row, right=True).clamp(max=experts - 1)
        wide = torch.zeros(experts, columns, device=rows.device)  # rows of no expert are 0
        return [of_input, of_weight, wide.index_add_(0, expert, rows.float()).to(rows.dtype)]
    counts = segments[..., 1].sum(1).tolist()
    rest = input.shape[0] - sum(counts)
    parts = [torch.split(each, [*counts, rest])[:-1] for each in (rows, input)]
    of_input = torch.cat([each @ weight[e].t() for e, each in enumerate(parts[0])])
    of_weight = torch.stack([of.t() @ each for each, of in zip(*parts, strict=True)])
    of_bias = torch.stack([each.sum(0) for each in parts[0]])
    return [F.pad(of_input, (0, 0, 0, rest)), of_weight, of_bias]


def multiplied(x: Tensor, weight: Tensor, segments: Tensor) -> Tensor:
    """Rows by expert times their weights; the host reads how many each has. Zeros where nothing came."""
    counts = segments[..., 1].sum(1).tolist()
    rest = x.shape[0] - sum(counts)
    parts = torch.split(x, [*counts, rest])[:-1]
    made = torch.cat([part @ weight[expert] for expert, part in enumerate(parts)])
    return F.pad(made, (0, 0, 0, rest))


# The same for graphs, which cannot read counts.
multiply_in_graph: Any = torch.library.custom_op("interlace::multiply", multiplied, mutates_args=())


@torch.library.custom_op("interlace::multiply_backward", mutates_args=())
def _multiply_backward(
    grad: Tensor, x: Tensor, weight: Tensor, segments: Tensor
) -> tuple[Tensor, Tensor]:
    of_x, of_weight, _ = _products(x, grad, weight, segments, False)
    return of_x, of_weight


def _setup_multiply(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients_of_multiply(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*_multiply_backward(grad, *ctx.saved_tensors), None)


multiply_in_graph.register_fake(lambda x, weight, _: x.new_empty(x.shape[0], weight.shape[2]))
multiply_in_graph.register_autograd(_gradients_of_multiply, setup_context=_setup_multiply)
_multiply_backward.register_fake(
    lambda grad, x, weight, _: (x.new_empty(x.shape), weight.new_empty(weight.shape))
)


def grouped_on_device(*tensors: Tensor) -> bool:
    """Whether torch has a grouped matmul for these that reads its counts on the device."""
    return all(
        each.is_cuda
        and each.dtype is torch.bfloat16
        and all(stride == 1 or not 2 * stride % ALIGNED for stride in each.stride())
        for each in tensors
    )
