"""Linear layers split over a group, with all communication inside or beside their matmuls.

Weights are as ``torch.nn.Linear`` keeps them, ``[out, in]``. A column-parallel weight is this rank's rows
of the whole one, a row-parallel weight its columns (Megatron-LM, Shoeybi et al. 2019). Under sequence
parallelism (Korthikanti et al. 2022) activations outside the pair are shards along the sequence::

    layer    forward                  backward
    column   all_gather_matmul        all_gather of the input     beside   matmul_reduce_scatter of the
                                      the weights' gradients      beside   ... input's gradient
    row      matmul_reduce_scatter    all_gather_matmul: the input's gradient, and the gathered one
                                      the weight's gradient       beside   all_reduce of the bias'

Without it, activations are whole on all ranks. Then column-parallel layers communicate only in backward
(``matmul_all_reduce``), row-parallel ones only in forward. A collective is started before the matmul that
hides it, and waited for after it. Streams and events give the order, so ``CUDA_DEVICE_MAX_CONNECTIONS``
may have any value.

Backward computes only the gradients that the arguments require, and skips the collectives for others. So
``requires_grad`` must be the same on all ranks, which they compare in forward under sequence parallelism.
Shards must be equal. Gradients have no gradients themselves.

Backward works on matrices, with one row per token and the rows of one rank's shard together: ``grad`` is
``[tokens, out]``, ``input`` ``[tokens, in]``. The gradient of a weight is computed at once or later, and
returned or added to ``weight.main_grad``. This is Megatron-core's convention: a buffer beside the weight,
usually wider, to which the backward of every microbatch adds.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.autograd.function import once_differentiable

from interlace.arguments import checks
from interlace.arguments.words import BlockFormatName, Group
from interlace.groups.groups import resolve
from interlace.ops.collectives import records
from interlace.ops.collectives.rootless import _all_reduce
from interlace.ops.matmul.block_scaled import (
    are_scaled,
    check_scales_of,
    gathered_rows,
    op_of,
    product,
    product_of_rows,
)
from interlace.ops.matmul.formats import Scaled, format_named, packed_rows
from interlace.ops.matmul.gather import AllGatherMatmulArguments, start_gradients
from interlace.ops.matmul.operands import multiply, rows_of, unrows
from interlace.ops.matmul.reduce import ReductionArguments, start_gathers
from interlace.ops.op.op import Started, finish
from interlace.ops.op.recording import start_unrecorded
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import needing

Tensor = torch.Tensor


def column_parallel_linear(
    input: Tensor,
    weights: Sequence[Tensor] | Sequence[Scaled],
    biases: Sequence[Tensor | None] | None = None,
    *,
    group: Group,
    gather_dim: int = 0,
    sequence_parallel: bool = True,
    gradient_accumulation_fusion: bool = False,
    save_gathered: bool = False,
    deferred: DeferredWeightGradients | None = None,
    out_dtype: torch.dtype | None = None,
    format: BlockFormatName | None = None,
    names: Sequence[str] | None = None,
) -> list[Tensor]:
    """Return this rank's columns of ``[whole_input @ w.t() + b for w, b in zip(weights, biases)]``.

    Parameters
    ----------
    input : ``[..., in]``, 2-D or more; with ``sequence_parallel`` this rank's equal shard along
        ``gather_dim``, as ``[s / world size, b, in]``, otherwise the whole, the same on all ranks.
    weights : ``[out_local, in]`` each; one gather serves all of them. Or all are :class:`interlace.Scaled`,
        for inference.
    biases : ``[out_local]`` or None for each weight.
    group : anything that :func:`interlace.groups.resolve` takes.
    gather_dim : the sequence dimension, 0 for ``[s, b, h]``, 1 for ``[b, s, h]``; not the last.
    gradient_accumulation_fusion : add the weights' gradients to their ``main_grad`` (fp32 or bf16, summed
        in fp32) instead of returning them. ``weight.grad`` then stays None. If the weight has Megatron's
        attribute ``grad_added_to_main_grad``, this is set to True, and ``weight.grad`` is a placeholder
        with undefined values.
    save_gathered : keep the gathered input for backward; otherwise backward gathers it again.
    deferred : the object that takes the weights' gradients until its ``run()``.
    out_dtype : dtype of the outputs, by default the input's.
    format : multiply in a block-scaled format, such as "mxfp8", forward and backward; see
        docs/how-to/train/formats.md.
        The default is the format of scaled weights.
    names : names of the modules with these weights and biases, for errors: ``"q"`` gives ``q.weight`` and
        ``q.bias``, ``""`` gives ``weight`` and ``bias``. The default gives ``weights[0]`` and
        ``biases[0]``.

    The gradient of ``input`` is summed over the group, and scattered like ``input``. Inside
    ``torch.autocast`` operands are cast as ``torch.nn.functional.linear`` casts them.

    Raises ValueError or TypeError naming the argument, both values and the rank, on all ranks.
    Semantics: Megatron-core's ``ColumnParallelLinear``.

    >>> def step():
    ...     x, w = torch.ones(2, 4, requires_grad=True), torch.ones(3, 4)
    ...     (y,) = nn.column_parallel_linear(x, [w], group=None)
    ...     y.sum().backward()
    ...     return tuple(y.shape), x.grad[0, 0].item()
    >>> interlace.run(step, 2)
    [((4, 3), 6.0), ((4, 3), 6.0)]
    """
    communicator = resolve(group).on(input)
    with communicator.accepting("column_parallel_linear"):
        source, dim = _checked_input(input, "gather_dim", gather_dim, communicator)
        packed, kind = _packed_weights(weights, source, input.requires_grad, format)
        matrices, vectors, called = _checked_weights(
            packed, biases, source, communicator, names, kind
        )
        layer = Layer.of(
            communicator,
            dim,
            sharded=sequence_parallel,
            fused=gradient_accumulation_fusion,
            save_gathered=save_gathered,
            deferred=deferred,
            out_dtype=out_dtype,
            format=kind,
        )
        _check_layer(layer, source, dict(zip(called, matrices, strict=True)))
        communicator.check_recordable(source, *matrices, *vectors)
    run = ColumnParallelLinearFunction.apply
    with needing(_learnt(layer, {"input": [input], "a weight": matrices})):
        return list(run(layer, len(matrices), input, *matrices, *vectors))  # type: ignore[no-untyped-call]


def row_parallel_linear(
    input: Tensor,
    weight: Tensor | Scaled,
    bias: Tensor | None = None,
    *,
    group: Group,
    scatter_dim: int = 0,
    sequence_parallel: bool = True,
    gradient_accumulation_fusion: bool = False,
    deferred: DeferredWeightGradients | None = None,
    out_dtype: torch.dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor:
    """Return this rank's shard, or all, of ``(sum over ranks of input @ weight.t()) + bias``.

    Parameters
    ----------
    input : ``[..., in_local]``, 2-D or more, whole along the sequence.
    weight : ``[out, in_local]``.
    bias : ``[out]``, the same on all ranks; added once, to the sum. With ``sequence_parallel`` a rank sees
        only its own rows. The bias' gradient is then summed over the group: the same on all ranks.
    scatter_dim : the sequence dimension, whose length must be a multiple of the group's size; not the last.
    sequence_parallel : return this rank's shard along ``scatter_dim``; otherwise the whole, on all ranks.
    group, gradient_accumulation_fusion, deferred, out_dtype, format : as for
        :func:`column_parallel_linear`. The weight may also be scaled.

    Raises ValueError or TypeError naming the argument, both values and the rank, on all ranks. Semantics:
    Megatron-core's ``RowParallelLinear``, whose reduce-scatter follows its matmul; here it is part of it.

    >>> def step():
    ...     x, w = torch.ones(2, 4, requires_grad=True), torch.ones(3, 4)
    ...     y = nn.row_parallel_linear(x, w, group=None)
    ...     y.sum().backward()
    ...     return y.tolist(), x.grad[0, 0].item()
    >>> interlace.run(step, 2)
    [([[8.0, 8.0, 8.0]], 3.0), ([[8.0, 8.0, 8.0]], 3.0)]
    """
    communicator = resolve(group).on(input)
    with communicator.accepting("row_parallel_linear"):
        source, dim = _checked_input(input, "scatter_dim", scatter_dim, communicator)
        packed, kind = _packed_weights([weight], source, input.requires_grad, format)
        (matrix,), _, _ = _checked_weights(packed, [bias], source, communicator, [""], kind)
        layer = Layer.of(
            communicator,
            dim,
            sharded=sequence_parallel,
            fused=gradient_accumulation_fusion,
            deferred=deferred,
            out_dtype=out_dtype,
            format=kind,
        )
        _check_layer(layer, source, {"weight": matrix})
        communicator.check_recordable(source, matrix, bias)
    with needing(_learnt(layer, {"input": [input], "weight": [matrix], "bias": [bias]})):
        return RowParallelLinearFunction.apply(layer, input, matrix, bias)  # type: ignore[no-any-return,no-untyped-call]


def _learnt(layer: Layer, tensors: dict[str, Sequence[Tensor | None]]) -> str:
    """Return in words which gradients need communication in backward: ranks compare them in forward."""
    if not (layer.sharded and torch.is_grad_enabled()):
        return ""
    return " and ".join(
        name
        for name, operands in tensors.items()
        if any(operand is not None and operand.requires_grad for operand in operands)
    )


def _checked_input(
    input: object, dim_name: str, dim: object, communicator: Communicator
) -> tuple[Tensor, int]:
    source = checks.source("input", input, communicator)
    checks.float_dtype("input", source.dtype)
    if source.dim() < 2:
        raise ValueError(f"input must have at least 2 dimensions, got shape {tuple(source.shape)}")
    dim = checks.index(dim_name, dim, source.dim())
    if dim == source.dim() - 1:
        raise ValueError(
            f"{dim_name} must not be the last dimension, which is contracted, got {dim} for shape "
            f"{tuple(source.shape)}"
        )
    return source, dim


def _packed_weights(
    weights: Any, input: Tensor, learning: bool, format: BlockFormatName | None
) -> tuple[Any, str]:
    """Return the weights, block-scaled ones as packed rows, and the format of all.

    ``learning``: the input requires a gradient.
    """
    if format is not None:
        format_named(format)
    if not are_scaled(*weights):
        return weights, format or ""
    if learning and torch.is_grad_enabled():
        raise RuntimeError(
            "a linear function of a scaled weight has no gradient for its input; call it under "
            "torch.no_grad()"
        )
    packed: list[Any] = []
    for index, each in enumerate(weights):
        if not isinstance(each, Scaled):
            packed.append(each)
            continue
        if format not in (None, each.format):
            raise ValueError(
                f"weights[{index}] must have the format {format!r} of the call and the other weights; got "
                f"{each.format!r}"
            )
        format = each.format  # type: ignore[assignment]
        if each.inner != -1 or each.shape[1:] != input.shape[-1:]:
            raise ValueError(
                "input must have as many features as a scaled weight, whose shape is (out, in) and whose "
                f"blocks are along in; got input of shape {tuple(input.shape)} and weights[{index}] of "
                f"shape {tuple(each.shape)} with blocks along dimension {each.inner}"
            )
        check_scales_of(f"weights[{index}]", each)
        packed.append(packed_rows(each))
    return packed, format or ""


def _checked_weights(
    weights: object,
    biases: object,
    input: Tensor,
    communicator: Communicator,
    modules: Sequence[str] | None,
    format: str,
) -> tuple[list[Tensor], list[Tensor | None], list[str]]:
    """Return weights, biases and names of weights; ``modules``: names of the modules that own them."""
    if isinstance(weights, Tensor) or not isinstance(weights, Sequence) or not weights:
        raise TypeError(
            f"weights must be a non-empty sequence of tensors, got {type(weights).__name__}"
        )
    vectors: Any = [None] * len(weights) if biases is None else biases
    checks.entries("biases", vectors, "weights", len(weights))
    names = [(f"weights[{index}]", f"biases[{index}]") for index in range(len(weights))]
    if modules is not None:
        names = [(f"{m}.weight".lstrip("."), f"{m}.bias".lstrip(".")) for m in modules]
    casting = casts(input)
    for (name, bias_name), weight, bias in zip(names, weights, vectors, strict=True):
        matrix, features = checks.source(name, weight, communicator), input.shape[-1]
        packed = bool(format) and matrix.dtype == torch.uint8
        if packed:
            features = format_named(format).row_bytes(features)
        if matrix.dim() != 2 or matrix.shape[1] != features:
            raise ValueError(
                f"input must have as many features as {name} of shape (out, in) = "
                f"{tuple(matrix.shape)}, got input of shape {tuple(input.shape)}"
            )
        if bias is not None:
            vector = checks.source(bias_name, bias, communicator)
            if tuple(vector.shape) != (matrix.shape[0],):
                raise ValueError(
                    f"{bias_name} must have shape ({matrix.shape[0]},) to match {name}, got "
                    f"{tuple(vector.shape)}"
                )
            if not casting:
                checks.same_dtype(bias_name, vector.dtype, "input", input.dtype)
        if not casting and not packed:
            checks.same_dtype(name, matrix.dtype, "input", input.dtype)
    return list(weights), list(vectors), [name for name, _ in names]


def _check_layer(layer: Layer, input: Tensor, weights: dict[str, Tensor]) -> None:
    learning = {n: w for n, w in weights.items() if w.requires_grad and torch.is_grad_enabled()}
    for name, weight in learning.items() if layer.fused else ():
        if not hasattr(weight, "__fsdp_param__"):  # Megatron's FSDP provides the buffer
            check_main_grad(name, weight)
    deferred: Any = layer.deferred
    if deferred is not None and not isinstance(deferred, DeferredWeightGradients):
        raise TypeError(
            f"deferred must be a DeferredWeightGradients or None, got {type(deferred).__name__}"
        )
    if deferred is not None and not all(weight.is_leaf for weight in learning.values()):
        raise ValueError(
            "deferred: weights must be leaves, got a weight that is the result of an op"
        )
    checks.output_dtype(layer.out_dtype, input)
    if not layer.format:
        return
    if layer.save_gathered:
        raise ValueError(
            f"save_gathered must be False with format={layer.format!r}: gathered input has blocks along "
            "the features, but the weights' gradients need blocks along the rows"
        )


StepOfFunction = TypeVar("StepOfFunction", bound=Callable[..., Any])


@dataclass(frozen=True)
class Layer:
    """How a call communicates: not at all if ``communicator`` is None, as on a single rank."""

    communicator: Communicator | None
    dim: int
    sharded: bool  # along the sequence, over the communicator
    fused: bool
    save_gathered: bool = False
    deferred: DeferredWeightGradients | None = None
    out_dtype: torch.dtype | None = None
    format: str = ""

    @staticmethod
    def of(communicator: Communicator, dim: int, *, sharded: bool, **options: Any) -> Layer:
        """Return the layer on these ranks, of which there may be one."""
        if communicator.world_size == 1:
            return Layer(None, 0, False, **options)
        return Layer(communicator, dim if sharded else 0, bool(sharded), **options)

    def prepare(self, ctx: Any) -> None:
        """Set the attributes that the gradients of the ops read, for matrices in place of tensors."""
        ctx.layer, ctx.format, ctx.name = self, self.format, self.communicator
        ctx.size = self.communicator.world_size if self.communicator else 1
        ctx.dim, ctx.lengths, ctx.algorithm, ctx.reduced = 0, None, "auto", not self.sharded


def on_all_ranks(op: str) -> Callable[[StepOfFunction], StepOfFunction]:
    """Decorate a step of an autograd function: if it fails on one rank, it fails on all as ``op``.

    The first argument of forward is a communicator, has one, or is None. Backward uses the same one.
    """

    def around(step: StepOfFunction) -> StepOfFunction:
        @functools.wraps(step)
        def run(ctx: Any, *given: object) -> object:
            if not hasattr(ctx, "communicator"):
                ctx.communicator = getattr(given[0], "communicator", given[0])
            if ctx.communicator is None:
                return step(ctx, *given)
            with ctx.communicator.accepting(op):
                return step(ctx, *given)

        return cast(StepOfFunction, run)

    return around


def casts(input: Tensor) -> bool:
    """Return whether autocast casts the operands of a linear function; as in torch, never float64."""
    return torch.is_autocast_enabled(input.device.type) and input.dtype != torch.float64


def _compute_dtype(input: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(input.device.type) if casts(input) else input.dtype


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight if weight.dtype == torch.uint8 else weight.to(dtype)


def _as_is(kind: str) -> Any:
    """Return a context for matmuls whose operands have been cast."""
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def _linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, format: str
) -> Tensor:
    if format:
        output = product(input, weight.t(), format, torch.float32)
        return (output if bias is None else output + bias).to(dtype)
    if dtype == input.dtype:
        return torch.nn.functional.linear(input, weight, bias)
    output = input.new_empty(*input.shape[:-1], weight.shape[0], dtype=dtype)
    multiply(output.flatten(0, -2), input.flatten(0, -2), weight.t(), bias)
    return output


def _finish(result: Started | Tensor) -> list[Tensor]:
    """Return the complete outputs as separate tensors: autograd forbids in-place changes of views."""
    return [output.data for output in finish(result)] if isinstance(result, Started) else [result]


def _deferral_of(layer: Layer) -> DeferredWeightGradients | None:
    """Return the object where this backward leaves the weights' gradients, or None."""
    return layer.deferred if layer.deferred is not None and layer.deferred.accepts() else None


def _of_weights(
    layer: Layer,
    deferred: DeferredWeightGradients | None,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    input: Tensor,
    over: Communicator | None,
) -> list[Tensor | None]:
    """Return the weights' gradients, or placeholders for deferred ones, whose ``input`` may be a shard."""
    if deferred is None:
        return [
            weight_gradient(weight, grad, input, fused=layer.fused, format=layer.format)
            for weight, grad in zip(weights, grads, strict=True)
        ]
    about: Any = {"communicator": over, "fused": layer.fused, "format": layer.format}
    deferred.add(weights, grads, input, **about)
    return [gradient_placeholder(w) if layer.fused else None for w in weights]


class ColumnParallelLinearFunction(torch.autograd.Function):
    """An autograd function of the layer, the number of weights, the input, the weights and the biases."""

    @staticmethod
    @on_all_ranks("column_parallel_linear")
    def forward(ctx: Any, layer: Layer, count: int, input: Tensor, *given: Any) -> Any:
        dtype = _compute_dtype(input)
        shard = input.to(dtype)
        weights = [_cast(each, dtype) for each in given[:count]]
        biases = [None if each is None else each.to(dtype) for each in given[count:]]
        kept = shard
        with _as_is(input.device.type):
            if layer.sharded:
                assert layer.communicator is not None
                keep = layer.save_gathered and any(ctx.needs_input_grad[3 : 3 + count])
                matrices = [weight.t() for weight in weights]
                call = AllGatherMatmulArguments(
                    shard,
                    matrices,
                    biases,
                    layer.dim,
                    keep,
                    out_dtype=layer.out_dtype,
                    format=layer.format,
                )
                op = op_of("all_gather_matmul", layer.format)
                outputs = _finish(op.start(layer.communicator, call))
                if keep:
                    kept = outputs.pop()
            else:
                out_dtype = layer.out_dtype or dtype
                pairs = zip(weights, biases, strict=True)
                outputs = [_linear(shard, w, b, out_dtype, layer.format) for w, b in pairs]
        layer.prepare(ctx)
        ctx.shape, ctx.with_gathered = input.shape, kept is not shard or not layer.sharded
        ctx.input_dtype = input.dtype
        ctx.parameters = given[:count]
        ctx.bias_dtypes = [None if each is None else each.dtype for each in given[count:]]
        ctx.save_for_backward(kept, *weights)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    @on_all_ranks("column_parallel_linear, backward")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        layer: Layer = ctx.layer
        kept, *weights = ctx.saved_tensors
        count, needed = len(weights), ctx.needs_input_grad
        used = [index for index, grad in enumerate(grads) if grad is not None]
        wanted = [index for index in used if needed[3 + index]]
        with _as_is(kept.device.type):
            rows = {i: rows_of(grads[i].to(kept.dtype), layer.dim) for i in used}  # type: ignore[union-attr]
            input = rows_of(kept, layer.dim)
            over = None if ctx.with_gathered else layer.communicator
            deferred = _deferral_of(layer) if wanted else None
            ctx.shared, ctx.weighed = needed[2], [deferred is None for _ in wanted]
            products, factors = [rows[i] for i in used], [weights[i].t() for i in used]
            # the gather runs while the gradient of the input is computed
            whole, of_input = start_gradients(ctx, input, products, factors, start=start_unrecorded)
            input = _finish(whole)[0]
            learning = [ctx.parameters[i] for i in wanted]
            found = _of_weights(layer, deferred, learning, [rows[i] for i in wanted], input, over)
        of_weights = dict(zip(wanted, found, strict=True))
        of_biases: list[Tensor | None] = [None] * count
        for i in used:
            if needed[3 + count + i]:
                of_biases[i] = grads[i].flatten(0, -2).sum(0).to(ctx.bias_dtypes[i])  # type: ignore[union-attr]
        if of_input is not None:
            of_input = _unrows(_finish(of_input)[0], ctx.shape, layer.dim).to(ctx.input_dtype)
        return (None, None, of_input, *[of_weights.get(i) for i in range(count)], *of_biases)


def _unrows(matrix: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    off_dim = [length for index, length in enumerate(shape[:-1]) if index != dim]
    return unrows(matrix, [shape[dim], *off_dim], dim)


class RowParallelLinearFunction(torch.autograd.Function):
    """An autograd function of the layer, the input, the weight and the bias."""

    @staticmethod
    @on_all_ranks("row_parallel_linear")
    def forward(ctx: Any, layer: Layer, input: Tensor, weight: Tensor, bias: Any) -> Tensor:
        dtype = _compute_dtype(input)
        local, matrix = input.to(dtype), _cast(weight, dtype)
        vector = None if bias is None else bias.to(dtype)
        communicator = layer.communicator
        with _as_is(input.device.type):
            if communicator is None:
                output = _linear(local, matrix, vector, layer.out_dtype or dtype, layer.format)
            else:
                dim = layer.dim if layer.sharded else None
                call = ReductionArguments(
                    local, matrix.t(), vector, scatter_dim=dim, out_dtype=layer.out_dtype,
                    format=layer.format,
                )  # fmt: skip
                (output,) = _finish(op_of(call.op, layer.format).start(communicator, call))
        layer.prepare(ctx)
        ctx.parameter, ctx.arguments = weight, ReductionArguments(None, format=layer.format)
        ctx.input_dtype, ctx.bias_dtype = input.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(local, matrix)
        return output

    @staticmethod
    @once_differentiable
    @on_all_ranks("row_parallel_linear, backward")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: Layer = ctx.layer
        kept, weight = ctx.saved_tensors
        _, shared, weighed, biased = ctx.needs_input_grad
        ctx.needs = {n for n, needs in (("input", shared), ("weight", weighed)) if needs}
        over = layer.communicator if layer.sharded else None
        of_input = of_weight = of_bias = bias_sum = None
        with _as_is(kept.device.type):
            rows = rows_of(grad.to(kept.dtype), layer.dim)
            whole = rows
            if over is not None:
                whole, of_input = start_gathers(ctx, rows, weight, 0, start=start_unrecorded)
            elif shared:
                of_input = product(rows, weight, layer.format)
            if biased:
                wide = torch.promote_types(grad.dtype, torch.float32)
                of_bias = grad.flatten(0, -2).sum(0, dtype=wide)
                if over is not None:
                    bias_sum = _all_reduce(over, (of_bias,), async_op=True)
            if of_input is not None:
                of_input, *rest = _finish(of_input)
                whole = rest[0] if rest else whole
            if weighed:
                input = rows_of(kept, layer.dim)
                (of_weight,) = _of_weights(
                    layer, _deferral_of(layer), [ctx.parameter], _finish(whole), input, None
                )
        if of_input is not None:
            of_input = _unrows(of_input, kept.shape, layer.dim).to(ctx.input_dtype)
        if of_bias is not None:
            if bias_sum is not None:
                bias_sum.wait()
            of_bias = of_bias.to(ctx.bias_dtype)
        return None, of_input, of_weight, of_bias


ROWS_AT_ONCE = 4096  # rows that are widened at once without a matmul with wider output
_HALF = (torch.float16, torch.bfloat16)


def _gradient_matrix(grad: Tensor, input: Tensor, format: str) -> Tensor:
    """Return ``grad.t() @ input``, ``[out, in]``. In a format the bits are as in the ops."""
    return product_of_rows(input, grad, format).t() if format else grad.t() @ input


def add_to_main_grad(weight: Tensor, grad: Tensor, input: Tensor, format: str = "") -> None:
    """Add ``grad.t() @ input`` to ``weight.main_grad``, summed in fp32, or fp64 if ``main_grad`` is fp64.

    A dtype of ``main_grad`` narrower than fp32 is rounded once. A weight of Megatron's FSDP
    (``__fsdp_param__``) gets its buffer here, which is overwritten.
    """
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()  # type: ignore[attr-defined]
        weight.main_grad.zero_()  # type: ignore[attr-defined]
    check_main_grad("the weight", weight)
    main: Tensor = weight.main_grad.detach()  # type: ignore[attr-defined]
    if format:
        main.add_(_gradient_matrix(grad, input, format))
        return
    narrow = grad.dtype in _HALF
    if main.dtype == grad.dtype and (grad.is_cuda or not narrow):
        main.addmm_(grad.t(), input)
        return
    if grad.is_cuda and narrow and main.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(main, grad.t(), input, torch.float32, out=main)
        return
    wide = torch.promote_types(main.dtype, torch.float32)
    total = main.to(wide)
    for part, rows in zip(
        torch.split(grad, ROWS_AT_ONCE), torch.split(input, ROWS_AT_ONCE), strict=True
    ):
        total.addmm_(part.to(wide).t(), rows.to(wide))
    if total is not main:
        main.copy_(total)


def check_main_grad(name: str, weight: Tensor) -> None:
    main = getattr(weight, "main_grad", None)
    if not isinstance(main, Tensor):
        raise ValueError(
            f"gradient_accumulation_fusion: {name} has main_grad {main!r}; set a buffer, such as "
            "weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)"
        )
    if main.shape != weight.shape:
        raise ValueError(
            f"gradient_accumulation_fusion: {name} has shape {tuple(weight.shape)}, but its main_grad has "
            f"{tuple(main.shape)}"
        )
    if not main.dtype.is_floating_point:
        raise TypeError(
            f"gradient_accumulation_fusion: main_grad of {name} must have a float dtype, got "
            f"{main.dtype}"
        )


def gradient_placeholder(weight: Tensor) -> Tensor | None:
    """Return autograd's gradient for a weight whose real gradient goes to ``main_grad``.

    This is None, unless the weight has the attribute ``grad_added_to_main_grad``. Megatron's data-parallel
    hooks run only if there is a gradient, and read the attribute to ignore its values.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)


def weight_gradient(
    weight: Tensor, grad: Tensor, input: Tensor, *, fused: bool, format: str = ""
) -> Tensor | None:
    """Return backward's gradient for ``weight``; ``fused``: add it to ``main_grad`` now."""
    if fused:
        add_to_main_grad(weight, grad, input, format)
        return gradient_placeholder(weight)
    return _gradient_matrix(grad, input, format).to(weight.dtype)


class _Deferred(NamedTuple):
    """Deferred gradients. ``communicator``: the group over which to gather ``input`` first, or None."""

    weights: Sequence[Tensor]
    grads: Sequence[Tensor]
    input: Tensor
    communicator: Communicator | None
    fused: bool
    format: str

    def start(self) -> Started:
        if self.communicator is None:
            return Started([self.input], None)
        return records.ALL_GATHER.begin(
            self.communicator, (gathered_rows(self.input, self.format), 0)
        )


class DeferredWeightGradients:
    """Weight gradients that are computed when the user asks, not in backward.

    Pass it to a layer as ``deferred=``. The layer's backward then stores here the tensors for the weights'
    gradients, and computes only the input's gradient. Pipeline schedules fill their bubbles with the rest.
    :meth:`run` computes the oldest ones and adds each to ``weight.grad``, or to ``main_grad`` with
    ``gradient_accumulation_fusion``. ``len()`` is the number of backwards that wait here.

    One object may serve any number of layers. It holds an input and the outputs' gradients per backward,
    and frees them as they are used. A sequence-parallel input is held as this rank's shard and gathered in
    :meth:`run`. So all ranks must call it for the same backwards, in the same order. Hooks on the weights'
    gradients do not run. Semantics: Megatron-core's ``wgrad_deferral_limit`` and TransformerEngine's
    ``delay_wgrad_compute``.

    >>> def step():
    ...     weight, deferred = torch.ones(2, 4, requires_grad=True), nn.DeferredWeightGradients()
    ...     (y,) = nn.column_parallel_linear(torch.ones(3, 4), [weight], group=None, deferred=deferred)
    ...     y.sum().backward()
    ...     waiting, before = len(deferred), weight.grad
    ...     deferred.run()
    ...     return waiting, before, weight.grad[0, 0].item(), len(deferred)
    >>> interlace.run(step, 2)
    [(1, None, 6.0, 0), (1, None, 6.0, 0)]
    """

    def __init__(self) -> None:
        self._pending: deque[_Deferred] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def accepts(self) -> bool:
        """Return whether a backward leaves its gradients here; otherwise it computes them at once."""
        return True

    def add(
        self,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        input: Tensor,
        *,
        communicator: Communicator | None = None,
        fused: bool = False,
        format: str = "",
    ) -> None:
        """Store the tensors of a backward. ``grads``: a matrix ``[tokens, out]`` per weight. ``input``:
        ``[tokens, in]``, or this rank's equal part of its rows, which :meth:`run` gathers.
        """
        self._pending.append(
            _Deferred(list(weights), list(grads), input, communicator, fused, format)
        )

    @torch.no_grad()
    def run(self, limit: int | None = None) -> int:
        """Compute the gradients of the ``limit`` oldest backwards (default: all), and return their number.

        The next input is gathered while gradients are computed. Raises TypeError or ValueError for a
        ``limit`` that is not a number of backwards; on all ranks, if the oldest input must be gathered.
        """
        over = self._pending[0].communicator if self._pending else None
        op = "DeferredWeightGradients.run"
        with contextlib.nullcontext() if over is None else over.accepting(op):
            if limit is not None and checks.integer("limit", limit) < 0:
                raise ValueError(f"limit must be at least 0, got {limit}")
        count = len(self) if limit is None else min(limit, len(self))
        following = self._pending[0].start() if count else None
        for left in range(count, 0, -1):
            pending, started = self._pending.popleft(), following
            assert started is not None
            (input,) = finish(started)
            following = self._pending[0].start() if left > 1 else None
            for weight, grad in zip(pending.weights, pending.grads, strict=True):
                if pending.fused:
                    add_to_main_grad(weight, grad, input, pending.format)
                else:
                    gradient = _gradient_matrix(grad, input, pending.format)
                    before = weight.grad
                    weight.grad = (
                        gradient.to(weight.dtype) if before is None else before.add_(gradient)
                    )
        return count
