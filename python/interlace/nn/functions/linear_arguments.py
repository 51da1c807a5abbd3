"""Checks of the linear functions' arguments; messages as in ``interlace.arguments.checks``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks, dense
from interlace.nn.functions.linear_gradients import Layer
from interlace.nn.functions.weight_gradients import DeferredWeightGradients, check_main_grad
from interlace.runtime.core.communicator import Communicator

Tensor = torch.Tensor


def checked_input(
    input: Any, dim_name: str, dim: Any, communicator: Communicator
) -> tuple[Tensor, int]:
    rank = communicator.rank
    source = dense.source("input", input, communicator)
    checks.float_dtype("input", source.dtype, rank)
    if source.dim() < 2:
        raise ValueError(
            f"input must have at least 2 dimensions, got shape {tuple(source.shape)} on rank {rank}"
        )
    dim = checks.dimension(dim_name, dim, source.dim(), rank)
    if dim == source.dim() - 1:
        raise ValueError(
            f"{dim_name} must not be the last dimension, which is contracted, got {dim} for shape "
            f"{tuple(source.shape)} on rank {rank}"
        )
    return source, dim


def checked_weights(
    weights: Any,
    biases: Any,
    input: Tensor,
    communicator: Communicator,
    names: tuple[str, str] | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    rank = communicator.rank
    if isinstance(weights, Tensor) or not isinstance(weights, Sequence) or not weights:
        raise TypeError(
            f"weights must be a non-empty sequence of tensors, got {type(weights).__name__} on rank {rank}"
        )
    vectors: Any = [None] * len(weights) if biases is None else biases
    if isinstance(vectors, Tensor) or not isinstance(vectors, Sequence):
        raise TypeError(
            f"biases must be a sequence like weights, got {type(biases).__name__} on rank {rank}"
        )
    if len(vectors) != len(weights):
        raise ValueError(
            f"biases has {len(vectors)} entries, weights has {len(weights)}, on rank {rank}"
        )
    casting = torch.is_autocast_enabled(input.device.type)
    for index, (weight, bias) in enumerate(zip(weights, vectors, strict=True)):
        name, bias_name = names or (f"weights[{index}]", f"biases[{index}]")
        matrix = dense.source(name, weight, communicator)
        if matrix.dim() != 2 or matrix.shape[1] != input.shape[-1]:
            raise ValueError(
                f"{name} must have shape (out, {input.shape[-1]}) for input of shape "
                f"{tuple(input.shape)}, got {tuple(matrix.shape)}, on rank {rank}"
            )
        if bias is not None:
            vector = dense.source(bias_name, bias, communicator)
            if tuple(vector.shape) != (matrix.shape[0],):
                raise ValueError(
                    f"{bias_name} must have shape ({matrix.shape[0]},) to match {name}, got "
                    f"{tuple(vector.shape)} on rank {rank}"
                )
            if not casting:
                checks.same_dtype(bias_name, vector.dtype, "input", input.dtype, rank)
        if not casting:
            checks.same_dtype(name, matrix.dtype, "input", input.dtype, rank)
    return list(weights), list(vectors)


def check_layer(layer: Layer, input: Tensor, weights: dict[str, Tensor], rank: int) -> None:
    """Raise unless ``layer`` can do with these weights what it is to do."""
    learning = {n: w for n, w in weights.items() if w.requires_grad and torch.is_grad_enabled()}
    for name, weight in learning.items() if layer.fused else ():
        if not hasattr(weight, "__fsdp_param__"):  # Megatron's FSDP has the buffer
            check_main_grad(name, weight, rank)
    deferred: Any = layer.deferred
    if deferred is not None and not isinstance(deferred, DeferredWeightGradients):
        raise TypeError(
            f"deferred must be a DeferredWeightGradients or None, got {type(deferred).__name__} "
            f"on rank {rank}"
        )
    if deferred is not None and not all(weight.is_leaf for weight in learning.values()):
        raise ValueError(
            f"deferred: gradients of weights that are results of other ops cannot wait, on rank {rank}"
        )
    checks.output_dtype(layer.out_dtype, input, rank)
