"""Linear layers split over a group, with all communication inside or beside their matmuls.

Weights are as ``torch.nn.Linear`` keeps them, ``[out, in]``. A column-parallel weight is this rank's rows
of the whole one, a row-parallel weight its columns (Megatron-LM, Shoeybi et al. 2019). Under sequence
parallelism (Korthikanti et al. 2022) activations outside the pair are shards along the sequence::

    layer    forward                  backward
    column   all_gather_matmul        all_gather of the input     beside   matmul_reduce_scatter of the
                                      the weights' gradients      beside   ... input's gradient
    row      matmul_reduce_scatter    all_gather_matmul: the input's gradient, and the gathered one
                                      the weight's gradient       beside   all_reduce of the bias'

Without it, activations are whole on all ranks: column-parallel layers communicate in backward alone
(``matmul_all_reduce``), row-parallel ones in forward alone. A collective is started before the matmul that
it hides behind, and waited for after it. The order is that of streams and events, so
``CUDA_DEVICE_MAX_CONNECTIONS`` may have any value.

Backward computes what ``requires_grad`` of the arguments asks for, and skips the collectives of what it
does not: it must be the same on all ranks. Under sequence parallelism they compare it in forward. Shards
must be equal. Gradients have no gradients themselves.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.groups.groups import resolve
from interlace.nn.functions.linear_gradients import (
    ColumnParallelLinearFunction,
    Layer,
    RowParallelLinearFunction,
    casts,
)
from interlace.nn.functions.weight_gradients import DeferredWeightGradients, check_main_grad
from interlace.ops.op.sim_backward import prepare
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import needing

Tensor = torch.Tensor


def column_parallel_linear(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    group: Group,
    gather_dim: int = 0,
    sequence_parallel: bool = True,
    gradient_accumulation_fusion: bool = False,
    save_gathered: bool = False,
    deferred: DeferredWeightGradients | None = None,
    out_dtype: torch.dtype | None = None,
    names: Sequence[str] | None = None,
) -> list[Tensor]:
    """``[whole_input @ w.t() + b for w, b in zip(weights, biases)]``, this rank's columns of each.

    Parameters
    ----------
    input : ``[..., in]``, 2-D or more; with ``sequence_parallel`` this rank's equal shard along
        ``gather_dim``, as ``[s / world size, b, in]``, else the whole, the same on all ranks.
    weights : ``[out_local, in]`` each; one gather feeds all of them.
    biases : ``[out_local]`` or None for each weight.
    group : anything that :func:`interlace.groups.resolve` takes.
    gather_dim : the sequence dimension, 0 for ``[s, b, h]``, 1 for ``[b, s, h]``; not the last.
    gradient_accumulation_fusion : add the weights' gradients to their ``main_grad`` (fp32 or bf16, summed
        in fp32) instead of returning them; ``weight.grad`` then stays None, or is a placeholder of
        undefined values if the weight has Megatron's attribute ``grad_added_to_main_grad``, set to True.
    save_gathered : keep the gathered input for backward, where it is gathered again otherwise.
    deferred : leave the weights' gradients there, for its ``run()``.
    out_dtype : dtype of the outputs, default the input's.
    names : of the modules whose weights and biases they are, for errors: those of ``"q"`` are ``q.weight``
        and ``q.bias``, of ``""`` ``weight`` and ``bias``; by default ``weights[0]`` and ``biases[0]``.

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
        called = None if names is None else [f"{name}.weight".lstrip(".") for name in names]
        matrices, vectors = _checked_weights(weights, biases, source, communicator, called)
        layer = Layer.of(
            communicator,
            dim,
            sharded=sequence_parallel,
            fused=gradient_accumulation_fusion,
            save_gathered=save_gathered,
            deferred=deferred,
            out_dtype=out_dtype,
        )
        called = called or [f"weights[{index}]" for index in range(len(matrices))]
        _check_layer(layer, source, dict(zip(called, matrices, strict=True)))
        prepare(communicator, source, *matrices, *vectors)
    run = ColumnParallelLinearFunction.apply
    with needing(_learnt(layer, {"input": [input], "a weight": matrices})):
        return list(run(layer, len(matrices), input, *matrices, *vectors))  # type: ignore[no-untyped-call]


def row_parallel_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group,
    scatter_dim: int = 0,
    sequence_parallel: bool = True,
    gradient_accumulation_fusion: bool = False,
    deferred: DeferredWeightGradients | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``(sum over ranks of input @ weight.t()) + bias``: this rank's shard of it, or all of it.

    Parameters
    ----------
    input : ``[..., in_local]``, 2-D or more, whole along the sequence.
    weight : ``[out, in_local]``.
    bias : ``[out]``, the same on all ranks; added once, to the sum. With ``sequence_parallel`` a rank
        sees its own rows only, so the bias' gradient is summed over the group: the same on all ranks.
    scatter_dim : the sequence dimension, whose length the size of the group divides; not the last.
    sequence_parallel : give this rank's shard along ``scatter_dim``; else the whole, on all ranks.
    group, gradient_accumulation_fusion, deferred, out_dtype : as for :func:`column_parallel_linear`.

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
        _checked_weights([weight], [bias], source, communicator, ["weight"])
        layer = Layer.of(
            communicator,
            dim,
            sharded=sequence_parallel,
            fused=gradient_accumulation_fusion,
            deferred=deferred,
            out_dtype=out_dtype,
        )
        _check_layer(layer, source, {"weight": weight})
        prepare(communicator, source, weight, bias)
    with needing(_learnt(layer, {"input": [input], "weight": [weight], "bias": [bias]})):
        return RowParallelLinearFunction.apply(layer, input, weight, bias)  # type: ignore[no-any-return,no-untyped-call]


def _learnt(layer: Layer, tensors: dict[str, Sequence[Tensor | None]]) -> str:
    """For whose gradients a backward communicates, in words: what ranks compare in a forward that does."""
    if not (layer.sharded and torch.is_grad_enabled()):
        return ""
    return " and ".join(
        name
        for name, given in tensors.items()
        if any(each is not None and each.requires_grad for each in given)
    )


def _checked_input(
    input: Any, dim_name: str, dim: Any, communicator: Communicator
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


def _checked_weights(
    weights: Any,
    biases: Any,
    input: Tensor,
    communicator: Communicator,
    names: Sequence[str] | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    if isinstance(weights, Tensor) or not isinstance(weights, Sequence) or not weights:
        raise TypeError(
            f"weights must be a non-empty sequence of tensors, got {type(weights).__name__}"
        )
    vectors: Any = [None] * len(weights) if biases is None else biases
    checks.entries("biases", vectors, "weights", len(weights))
    casting = casts(input)
    for index, (weight, bias) in enumerate(zip(weights, vectors, strict=True)):
        name = f"weights[{index}]" if names is None else names[index]
        bias_name = f"biases[{index}]" if names is None else name[:-6] + "bias"
        matrix = checks.source(name, weight, communicator)
        if matrix.dim() != 2 or matrix.shape[1] != input.shape[-1]:
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
        if not casting:
            checks.same_dtype(name, matrix.dtype, "input", input.dtype)
    return list(weights), list(vectors)


def _check_layer(layer: Layer, input: Tensor, weights: dict[str, Tensor]) -> None:
    """Raise unless ``layer`` can do with these weights what it is to do."""
    learning = {n: w for n, w in weights.items() if w.requires_grad and torch.is_grad_enabled()}
    for name, weight in learning.items() if layer.fused else ():
        if not hasattr(weight, "__fsdp_param__"):  # Megatron's FSDP has the buffer
            check_main_grad(name, weight)
    deferred: Any = layer.deferred
    if deferred is not None and not isinstance(deferred, DeferredWeightGradients):
        raise TypeError(
            f"deferred must be a DeferredWeightGradients or None, got {type(deferred).__name__}"
        )
    if deferred is not None and not all(weight.is_leaf for weight in learning.values()):
        raise ValueError("deferred: gradients of weights that are results of other ops cannot wait")
    checks.output_dtype(layer.out_dtype, input)
