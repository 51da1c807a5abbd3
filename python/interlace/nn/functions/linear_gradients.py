"""The linear functions as autograd sees them: forward, and backward in the order that overlaps.

``linear.py`` says what overlaps with what. Backward works on matrices, with one row per token and
the rows of one rank's shard together.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.autograd.function import once_differentiable

from interlace.nn.functions import weight_gradients
from interlace.nn.functions.weight_gradients import DeferredWeightGradients, gather
from interlace.ops.collectives.rootless import _all_reduce
from interlace.ops.matmul import gather as gather_matmul
from interlace.ops.matmul import reduce
from interlace.ops.matmul.gather import AllGatherMatmulArguments
from interlace.ops.matmul.operands import multiply, rows_of, unrows
from interlace.ops.matmul.reduce import MatmulAllReduceArguments, MatmulReduceScatterArguments
from interlace.ops.op.pending import Started, finish
from interlace.runtime.core.communicator import Communicator

Tensor = torch.Tensor
StepOfFunction = TypeVar("StepOfFunction", bound=Callable[..., Any])


@dataclass(frozen=True)
class Layer:
    """A call's way to communicate: not at all without a ``communicator``, which a lone rank has not."""

    communicator: Communicator | None
    dim: int
    sharded: bool  # along the sequence, over the communicator
    fused: bool
    save_gathered: bool = False
    deferred: DeferredWeightGradients | None = None
    out_dtype: torch.dtype | None = None

    @staticmethod
    def of(communicator: Communicator, dim: int, *, sharded: Any, **options: Any) -> "Layer":
        """The layer on these ranks, of which there may be one."""
        if communicator.world_size == 1:
            return Layer(None, 0, False, **options)
        return Layer(communicator, dim if sharded else 0, bool(sharded), **options)


def _on_all_ranks(op: str) -> Callable[[StepOfFunction], StepOfFunction]:
    """A step of an autograd function which, where it fails on one rank, fails on all as ``op``."""

    def around(step: StepOfFunction) -> StepOfFunction:
        @functools.wraps(step)
        def run(ctx: Any, *given: Any) -> Any:
            layer = given[0] if isinstance(given[0], Layer) else ctx.layer
            if layer.communicator is None:
                return step(ctx, *given)
            with layer.communicator.accepting(op):
                return step(ctx, *given)

        return cast(StepOfFunction, run)

    return around


def casts(input: Tensor) -> bool:
    """Whether autocast casts the operands of a linear function of ``input``: as torch, none of float64."""
    return torch.is_autocast_enabled(input.device.type) and input.dtype != torch.float64


def _compute_dtype(input: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(input.device.type) if casts(input) else input.dtype


def _as_is(kind: str) -> Any:
    """Around matmuls whose operands were cast."""
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if dtype == input.dtype:
        return torch.nn.functional.linear(input, weight, bias)
    output = input.new_empty(*input.shape[:-1], weight.shape[0], dtype=dtype)
    multiply(output.flatten(0, -2), input.flatten(0, -2), weight.t(), bias)
    return output


def _finished(started: Started) -> list[Tensor]:
    """The outputs, complete, as tensors of their own: autograd forbids to change views in place."""
    return [each.data for each in finish(started)]


def _deferred(layer: Layer) -> DeferredWeightGradients | None:
    """Where this backward leaves the weights' gradients, if it does."""
    return layer.deferred if layer.deferred is not None and layer.deferred.accepts() else None


def _of_weights(
    layer: Layer,
    deferred: DeferredWeightGradients | None,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    input: Tensor,
    over: Communicator | None,
) -> list[Tensor | None]:
    """The weights' gradients, or what stands for deferred ones, for which ``input`` may be a shard."""
    if deferred is None:
        return [
            weight_gradients.gradient(weight, grad, input, fused=layer.fused)
            for weight, grad in zip(weights, grads, strict=True)
        ]
    deferred.add(weights, grads, input, communicator=over, fused=layer.fused)
    return [weight_gradients.placeholder(w) if layer.fused else None for w in weights]


class ColumnParallelLinearFunction(torch.autograd.Function):
    """Arguments: the layer, the number of weights, the input, the weights, the biases."""

    @staticmethod
    @_on_all_ranks("column_parallel_linear")
    def forward(ctx: Any, layer: Layer, count: int, input: Tensor, *given: Any) -> Any:
        dtype = _compute_dtype(input)
        own = input.to(dtype)
        weights = [each.to(dtype) for each in given[:count]]
        biases = [None if each is None else each.to(dtype) for each in given[count:]]
        kept = own
        with _as_is(input.device.type):
            if layer.sharded:
                assert layer.communicator is not None
                keep = layer.save_gathered and any(ctx.needs_input_grad[3 : 3 + count])
                matrices = [weight.t() for weight in weights]
                call = AllGatherMatmulArguments(
                    own, matrices, biases, layer.dim, keep, out_dtype=layer.out_dtype
                )
                outputs = _finished(gather_matmul.start(layer.communicator, call))
                if keep:
                    kept = outputs.pop()
            else:
                made = layer.out_dtype or dtype
                outputs = [_linear(own, w, b, made) for w, b in zip(weights, biases, strict=True)]
        ctx.layer, ctx.shape, ctx.gathered = layer, input.shape, kept is not own
        ctx.input_dtype = input.dtype
        ctx.parameters = given[:count]
        ctx.bias_dtypes = [None if each is None else each.dtype for each in given[count:]]
        ctx.save_for_backward(kept, *weights)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    @_on_all_ranks("column_parallel_linear, backward")
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        layer: Layer = ctx.layer
        kept, *weights = ctx.saved_tensors
        count, needed = len(weights), ctx.needs_input_grad
        used = [index for index, grad in enumerate(grads) if grad is not None]
        wanted = [index for index in used if needed[3 + index]]
        with _as_is(kept.device.type):
            rows = {i: rows_of(grads[i].to(kept.dtype), layer.dim) for i in used}  # type: ignore[union-attr]
            input = rows_of(kept, layer.dim)
            over = layer.communicator if layer.sharded and not ctx.gathered else None
            # under way while the gradient of the input is computed
            deferred = _deferred(layer) if wanted else None
            whole = gather(over if wanted and deferred is None else None, input)
            started = None
            if needed[2] and used:
                started = _start_of_input(
                    layer, [rows[i] for i in used], [weights[i] for i in used]
                )
            (input,) = finish(whole)
            learning = [ctx.parameters[i] for i in wanted]
            found = _of_weights(layer, deferred, learning, [rows[i] for i in wanted], input, over)
        of_weights = dict(zip(wanted, found, strict=True))
        of_biases: list[Tensor | None] = [None] * count
        for i in used:
            if needed[3 + count + i]:
                of_biases[i] = grads[i].flatten(0, -2).sum(0).to(ctx.bias_dtypes[i])  # type: ignore[union-attr]
        of_input = None
        if started is not None:
            of_input = _unrows(_finished(started)[0], ctx.shape, layer.dim).to(ctx.input_dtype)
        return (None, None, of_input, *[of_weights.get(i) for i in range(count)], *of_biases)


def _unrows(matrix: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """A matrix of rows in the order of ``dim``, as the leading dimensions of ``shape``."""
    others = [length for index, length in enumerate(shape[:-1]) if index != dim]
    return unrows(matrix, [shape[dim], *others], dim)


def _start_of_input(layer: Layer, grads: list[Tensor], weights: list[Tensor]) -> Started:
    """The sum of ``grads[i] @ weights[i]`` over all i and ranks, in flight; own rows of it if sharded."""
    grad = grads[0] if len(grads) == 1 else torch.cat(grads, 1)
    weight = weights[0] if len(weights) == 1 else torch.cat(weights, 0)
    over = layer.communicator
    if over is None:
        return Started([grad @ weight], None)
    if not layer.sharded:
        return reduce.start(over, MatmulAllReduceArguments(grad, weight, None, "sum"))
    return reduce.start(over, MatmulReduceScatterArguments(grad, weight, None, "sum", 0))


class RowParallelLinearFunction(torch.autograd.Function):
    """Arguments: the layer, the input, the weight, the bias."""

    @staticmethod
    @_on_all_ranks("row_parallel_linear")
    def forward(ctx: Any, layer: Layer, input: Tensor, weight: Tensor, bias: Any) -> Tensor:
        dtype = _compute_dtype(input)
        own, matrix = input.to(dtype), weight.to(dtype)
        vector = None if bias is None else bias.to(dtype)
        communicator = layer.communicator
        with _as_is(input.device.type):
            if communicator is None:
                output = _linear(own, matrix, vector, layer.out_dtype or dtype)
            else:
                product = own, matrix.t(), vector, "sum"
                call: MatmulReduceScatterArguments | MatmulAllReduceArguments
                if layer.sharded:
                    call = MatmulReduceScatterArguments(
                        *product, layer.dim, out_dtype=layer.out_dtype
                    )
                else:
                    call = MatmulAllReduceArguments(*product, out_dtype=layer.out_dtype)
                (output,) = _finished(reduce.start(communicator, call))
        ctx.layer, ctx.parameter = layer, weight
        ctx.input_dtype, ctx.bias_dtype = input.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(own, matrix)
        return output

    @staticmethod
    @once_differentiable
    @_on_all_ranks("row_parallel_linear, backward")
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer: Layer = ctx.layer
        kept, weight = ctx.saved_tensors
        _, shared, weighed, biased = ctx.needs_input_grad
        over = layer.communicator if layer.sharded else None
        of_input = of_weight = of_bias = bias_sum = None
        with _as_is(kept.device.type):
            rows = rows_of(grad.to(kept.dtype), layer.dim)
            started = None
            if shared and over is None:
                started = Started([rows @ weight], None)
            elif shared and over is not None:
                call = AllGatherMatmulArguments(rows, [weight], [], 0, return_gathered=weighed)
                started = gather_matmul.start(over, call)
            gathered = gather(over if weighed and not shared else None, rows)
            if biased:
                wide = torch.promote_types(grad.dtype, torch.float32)
                of_bias = grad.flatten(0, -2).sum(0, dtype=wide)
                if over is not None:
                    bias_sum = _all_reduce(over, (of_bias,), async_op=True)
            (whole,) = finish(gathered)
            if started is not None:
                of_input, *rest = _finished(started)
                whole = rest[0] if rest else whole
            if weighed:
                input = rows_of(kept, layer.dim)
                (of_weight,) = _of_weights(
                    layer, _deferred(layer), [ctx.parameter], [whole], input, None
                )
        if of_input is not None:
            of_input = _unrows(of_input, kept.shape, layer.dim).to(ctx.input_dtype)
        if of_bias is not None:
            if bias_sum is not None:
                bias_sum.wait()
            of_bias = of_bias.to(ctx.bias_dtype)
        return None, of_input, of_weight, of_bias
