"""Kernels of the fused ops: the eager functions with outputs that are made first.

What follows the tensors in an op's arguments are the fields of its options, in their order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.ops.matmul import gather, reduce
from interlace.ops.op import shapes
from interlace.ops.op.pending import Started
from interlace.runtime.core.communicator import Communicator

Tensor = torch.Tensor


def gather_products(
    input: Tensor, weights: Sequence[Tensor], options: gather.GatherMatmulOptions, size: int
) -> list[shapes.Output]:
    """The results of all_gather_matmul: a product per weight, then the gathered input if asked for."""
    if input.dim() < 2:
        raise ValueError(f"input must have at least 2 dimensions, got shape {tuple(input.shape)}")
    dim = shapes.dimension("gather_dim", options.gather_dim, input.dim())
    dtype = checks.output_dtype(options.out_dtype, input)
    products = []
    for each in weights:
        if each.dim() != 2:
            raise ValueError(f"weight must have 2 dimensions (k, n), got shape {tuple(each.shape)}")
        products.append(shapes.gathered_rows(input, dim, size, each.shape[1], dtype))
    if options.return_gathered:
        products.append(shapes.gathered_input(input, dim, size))
    return products


def all_gather_matmul(
    communicator: Communicator,
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *given: Any,
) -> Started:
    options, weights = gather.GatherMatmulOptions(*given), list(weights)
    with communicator.accepting(gather.OP):
        products = gather_products(input, weights, options, communicator.world_size)
    outputs = [product.matrix for product in products]
    gathered = outputs.pop() if options.return_gathered else None
    tensors = (input, weights, list(biases) or None, outputs, gathered)
    work = gather.gather_matmul(communicator, tensors, (options,), True)
    return Started([product.view for product in products], work)


def reduce_product(
    input: Tensor, weight: Tensor, options: reduce.MatmulReduceOptions, size: int
) -> shapes.Output:
    """The result of matmul_reduce_scatter or, with no ``scatter_dim``, of matmul_all_reduce."""
    if input.dim() < 2 or weight.dim() != 2:
        raise ValueError(
            f"input must have at least 2 dimensions and weight 2, got shapes {tuple(input.shape)} and "
            f"{tuple(weight.shape)}"
        )
    dtype = checks.output_dtype(options.out_dtype, input)
    if options.scatter_dim is None:  # all rows, as where the last dimension is gathered
        return shapes.gathered_rows(input, input.dim() - 1, size, weight.shape[1], dtype)
    dim = shapes.dimension("scatter_dim", options.scatter_dim, input.dim())
    return shapes.scattered_product(input, weight.shape[1], dim, options.length, size, dtype)


def all_reduce_options(reduce_op: str, algorithm: str, dtype: Any) -> reduce.MatmulReduceOptions:
    return reduce.MatmulReduceOptions(reduce_op, None, None, algorithm, dtype, op=reduce.ALL_REDUCE)


def _reduced(
    options_of: Callable[..., reduce.MatmulReduceOptions],
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *given: Any,
) -> Started:
    options = options_of(*given)
    with communicator.accepting(options.op):
        product = reduce_product(input, weight, options, communicator.world_size)
    tensors = (input, weight, bias, product.matrix)
    work = reduce.FORMS[options.op](communicator, tensors, (options,), True)
    return Started([product.view], work)


matmul_reduce_scatter = functools.partial(_reduced, reduce.MatmulReduceOptions)
matmul_all_reduce = functools.partial(_reduced, all_reduce_options)
