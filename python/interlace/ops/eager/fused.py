"""Kernels of the fused ops: the eager functions with outputs that are made first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.fused import gather, reduce
from interlace.ops.eager import shapes
from interlace.ops.eager.pending import Started
from interlace.runtime.core.call import PreparedCall
from interlace.runtime.core.communicator import Communicator


def gather_products(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    gather_dim: int,
    return_gathered: bool,
    out_dtype: torch.dtype | None,
    size: int,
) -> list[shapes.Product]:
    """What all_gather_matmul returns: a product per weight, then the gathered input if it is asked for."""
    if input.dim() < 2:
        raise ValueError(f"input must have at least 2 dimensions, got shape {tuple(input.shape)}")
    dim = shapes.dimension("gather_dim", gather_dim, input.dim())
    dtype = input.dtype if out_dtype is None else out_dtype
    products = []
    for each in weights:
        if each.dim() != 2:
            raise ValueError(f"weight must have 2 dimensions (k, n), got shape {tuple(each.shape)}")
        products.append(shapes.gathered_rows(input, dim, size, each.shape[1], dtype))
    if return_gathered:
        products.append(shapes.gathered_input(input, dim, size))
    return products


def all_gather_matmul(
    communicator: Communicator,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    gather_dim: int,
    return_gathered: bool,
    algorithm: str,
    out_dtype: torch.dtype | None,
) -> Started:
    weights, size = list(weights), communicator.world_size
    with communicator.accepting(gather.OP):
        products = gather_products(input, weights, gather_dim, return_gathered, out_dtype, size)
    outputs = [product.matrix for product in products]
    gathered = outputs.pop() if return_gathered else None
    work = communicator.call(
        gather.OP,
        gather.prepared,
        (input, weights, list(biases) or None, outputs, gathered),
        (gather.Options(gather_dim, return_gathered, algorithm, out_dtype),),
        async_op=True,
        fills=False,
    )
    return Started([product.view for product in products], work)


def reduce_product(
    input: torch.Tensor,
    weight: torch.Tensor,
    scatter_dim: int | None,
    out_dtype: torch.dtype | None,
    size: int,
) -> shapes.Product:
    """What matmul_reduce_scatter returns; with no ``scatter_dim``, what matmul_all_reduce does."""
    if input.dim() < 2 or weight.dim() != 2:
        raise ValueError(
            f"input must have at least 2 dimensions and weight 2, got shapes {tuple(input.shape)} and "
            f"{tuple(weight.shape)}"
        )
    dtype = input.dtype if out_dtype is None else out_dtype
    if scatter_dim is None:
        return shapes.product(input, weight.shape[1], dtype)
    dim = shapes.dimension("scatter_dim", scatter_dim, input.dim())
    return shapes.scattered_product(input, weight.shape[1], dim, size, dtype)


def matmul_reduce_scatter(
    communicator: Communicator,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *options: Any,
) -> Started:
    """``options``: reduce_op, scatter_dim, algorithm, out_dtype."""
    given = reduce.Options(*options)
    return _reduced(
        communicator, reduce.SCATTER, reduce.matmul_reduce_scatter, (input, weight, bias), given
    )


def matmul_all_reduce(
    communicator: Communicator,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    reduce_op: str,
    *options: Any,
) -> Started:
    """``options``: algorithm, out_dtype."""
    given = reduce.Options(reduce_op, None, *options)
    return _reduced(
        communicator, reduce.ALL_REDUCE, reduce.matmul_all_reduce, (input, weight, bias), given
    )


def _reduced(
    communicator: Communicator,
    op: str,
    check: Callable[..., PreparedCall],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    options: reduce.Options,
) -> Started:
    input, weight, _ = tensors
    dim, dtype, size = options.scatter_dim, options.out_dtype, communicator.world_size
    with communicator.accepting(op):
        product = reduce_product(input, weight, dim, dtype, size)
    work = communicator.call(
        op, check, (*tensors, product.matrix), (options,), async_op=True, fills=False
    )
    return Started([product.view], work)
