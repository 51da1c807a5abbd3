"""Kernels of the fused ops: the eager functions with outputs that are made first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.fused import gather, reduce
from interlace.fused.gather import Buffers
from interlace.ops.eager import shapes
from interlace.ops.eager.pending import Started
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
    op, weights = "all_gather_matmul", list(weights)
    try:
        products = gather_products(
            input, weights, gather_dim, return_gathered, out_dtype, communicator.world_size
        )
    except Exception:
        with communicator.accepting(op):
            raise
    matrices = [product.matrix for product in products]
    work = gather.all_gather_matmul(
        communicator,
        input,
        weights,
        gather_dim=gather_dim,
        bias=list(biases) or None,
        return_gathered=return_gathered,
        async_op=True,
        algorithm=algorithm,
        out_dtype=out_dtype,
        buffers=Buffers(matrices[: len(weights)], matrices[-1] if return_gathered else None),
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
    reduce_op: str,
    scatter_dim: int,
    algorithm: str,
    out_dtype: torch.dtype | None,
) -> Started:
    op = "matmul_reduce_scatter"
    try:
        product = reduce_product(input, weight, scatter_dim, out_dtype, communicator.world_size)
    except Exception:
        with communicator.accepting(op):
            raise
    work = reduce.matmul_reduce_scatter(
        communicator,
        input,
        weight,
        reduce_op=reduce_op,
        scatter_dim=scatter_dim,
        bias=bias,
        async_op=True,
        algorithm=algorithm,
        out_dtype=out_dtype,
        buffer=product.matrix,
    )
    return Started([product.view], work)


def matmul_all_reduce(
    communicator: Communicator,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    reduce_op: str,
    algorithm: str,
    out_dtype: torch.dtype | None,
) -> Started:
    op = "matmul_all_reduce"
    try:
        product = reduce_product(input, weight, None, out_dtype, communicator.world_size)
    except Exception:
        with communicator.accepting(op):
            raise
    work = reduce.matmul_all_reduce(
        communicator,
        input,
        weight,
        reduce_op=reduce_op,
        bias=bias,
        async_op=True,
        algorithm=algorithm,
        out_dtype=out_dtype,
        buffer=product.matrix,
    )
    return Started([product.view], work)
