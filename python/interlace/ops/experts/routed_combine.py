"""Grouped matmul + combine after a dispatch, and its backward, as ops; and products of its rows by torch.

The op takes the dispatch's segments: a graph needs to know no number of rows. Its backward is an op of its
own, and has none: the gradients of tokens are dispatched as tokens were, and multiplied where they arrive.
It is opaque to compilers, as torch's grouped matmul takes one dtype there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from interlace.ops.experts.combine import home_rows, of_slot_weights
from interlace.ops.experts.dispatch import as_many, dispatch
from interlace.ops.experts.grouped import of_weights
from interlace.ops.experts.grouped_combine import (
    COMMUNICATES,
    FACTORS,
    MATMUL_COMBINE,
    CombineOptions,
    grouped_matmul_combine,
    results,
)
from interlace.ops.experts.routing import RoutingArguments
from interlace.ops.op.gradients import wait
from interlace.ops.op.op import Op, OpGradient, requiring
from interlace.ops.op.pending import Started
from interlace.ops.op.registry import Ops
from interlace.runtime.core.communicator import Communicator

_ops: Any = Ops()
Tensor = torch.Tensor

ROUTED = "routed_matmul_combine"
ROUTED_BACKWARD = f"{ROUTED}_backward"
ALIGNED = 16  # bytes, of all strides that torch's grouped matmul takes


@dataclass
class RoutedCombineArguments(RoutingArguments):
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    segments: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    return_rows: bool
    num_experts: int
    capacity: int
    max_tokens: int
    packed: bool
    algorithm: str
    out_dtype: torch.dtype | None


@dataclass
class RoutedGradientArguments(RoutingArguments):
    grad: Tensor
    input: Tensor
    weight: Tensor
    segments: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    num_experts: int
    capacity: int
    max_tokens: int
    packed: bool
    algorithm: str


def start(communicator: Communicator, given: RoutedCombineArguments) -> Started:
    with communicator.accepting(MATMUL_COMBINE):
        outputs = results(given, communicator.world_size)
    options = CombineOptions(None, given.algorithm, given.out_dtype, given.routing)
    factors = (given.input, given.weight, given.bias)
    tensors = (*factors, given.topk_idx, given.topk_weights, given.segments, outputs)
    return Started(outputs, grouped_matmul_combine(communicator, tensors, (options,), True))


def save(ctx: Any, given: RoutedCombineArguments, output: Sequence[Tensor]) -> None:
    ctx.needed, ctx.routing = requiring(given), given.routing
    home = home_rows(MATMUL_COMBINE, ctx.needed, given.return_rows, output)
    ctx.set_materialize_grads(False)
    about = given.segments, given.topk_idx, given.topk_weights
    ctx.save_for_backward(given.input, given.weight, *about, home)


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> Mapping[str, Tensor]:
    input, weight, segments, idx, weights, home = ctx.saved_tensors
    found: dict[str, Tensor] = {}
    grad = grads[0]
    if grad is None:
        return found
    if ctx.needed.intersection(FACTORS):
        about = segments, idx, weights, *ctx.routing, ctx.size, ctx.name
        made = getattr(_ops, ROUTED_BACKWARD)(grad, input, weight, *about)
        for name, each in zip(FACTORS, made, strict=True):
            complete = wait(each)
            if name in ctx.needed:
                found[name] = complete
    if home is not None:
        found["topk_weights"] = of_slot_weights(weights, home, ctx.routing.inverse(idx), grad)
    return found


def gradients(given: RoutedGradientArguments, size: int) -> list[Tensor]:
    """Tensors for the gradients of input, weight and bias."""
    weight = given.weight
    bias = weight.new_empty((weight.shape[0], weight.shape[2]))
    return [given.input.new_empty(given.input.shape), weight.new_empty(weight.shape), bias]


def start_backward(communicator: Communicator, given: RoutedGradientArguments) -> Started:
    tensors = (given.grad, None, given.topk_idx, given.topk_weights, None)
    rows, *weights = dispatch(communicator, tensors, (given.routing,), False)[:-1]
    if weights:
        rows = rows * weights[0].unsqueeze(1)
    rows = as_many(rows.to(given.weight.dtype), given.input.shape[0])
    about = given.weight, given.segments, given.packed
    return Started(_of_products(given.input, rows, *about), None)


def _of_products(
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
    of_bias = torch.stack([each.sum(0) for each in parts[0]])
    return [F.pad(of_input, (0, 0, 0, rest)), of_weights(parts[1], parts[0]), of_bias]


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
    of_x, of_weight, _ = _of_products(x, grad, weight, segments, False)
    return of_x, of_weight


def _gradients_of_multiply(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*_multiply_backward(grad, *ctx.saved_tensors), None)


multiply_in_graph.register_fake(lambda x, weight, _: x.new_empty(x.shape[0], weight.shape[2]))
multiply_in_graph.register_autograd(
    _gradients_of_multiply,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
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


GRADIENT = OpGradient(save, backward)
OPS = (
    Op(ROUTED, RoutedCombineArguments, start, results, GRADIENT, COMMUNICATES, several=True),
    Op(ROUTED_BACKWARD, RoutedGradientArguments, start_backward, gradients, several=True),
)
