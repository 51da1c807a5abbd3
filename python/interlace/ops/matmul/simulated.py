"""Ops done to all ranks of a group at once, for one process that plays all of them.

A function gets one list per tensor argument, with an entry per rank in the order of the group, and returns
the outputs, a list per rank. Plain arguments are the same on all ranks, except the sizes of an all_to_all.
Shapes, rounding and the order of sums are those of the ops themselves, whose parts these are made of.

=========  ==============================================
argument   what it is here
=========  ==============================================
inputs     ``[tensor of rank 0, tensor of rank 1, ...]``
weights    ``[[tensor, ...] of rank 0, ...]``
size       how many ranks, always last
=========  ==============================================
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from interlace.arguments import checks, reduce_ops
from interlace.ops.matmul import eager as fused
from interlace.ops.matmul import eager_scaled as scaled
from interlace.ops.matmul import scaled_kernels
from interlace.ops.matmul.gather import GatherMatmulOptions
from interlace.ops.matmul.operands import multiply, rows_of
from interlace.ops.matmul.reduce import MatmulReduceOptions
from interlace.ops.op import shapes
from interlace.runtime.numerics import reductions

Tensors = list[torch.Tensor]
Outputs = list[Tensors]


def alike(op: str, name: str, tensors: Sequence[torch.Tensor], but: int | None = None) -> None:
    """ValueError or TypeError unless dtypes are equal, and shapes, apart from dimension ``but``."""
    for what, kind, values in (
        ("dtype", TypeError, [tensor.dtype for tensor in tensors]),
        ("shape", ValueError, [_lengths(tensor, but) for tensor in tensors]),
    ):
        checks.equal_on_all(op, f"{what} of {name}", values, kind=kind)


def _lengths(tensor: torch.Tensor, but: int | None) -> tuple[Any, ...]:
    skipped = None if but is None else but % tensor.dim()
    return tuple(n for i, n in enumerate(tensor.shape) if i != skipped)


def _rooted(name: str, root: int, size: int) -> None:
    if not 0 <= root < size:
        raise ValueError(f"{name} must be within 0..{size - 1}, a rank of the group, got {root}")


def _copies(tensor: torch.Tensor, size: int) -> Outputs:
    return [[tensor]] + [[tensor.clone()] for _ in range(size - 1)]


def _reduced(op: str, inputs: Tensors, reduce_op: Any) -> torch.Tensor:
    alike(op, "input", inputs)
    name, _ = checks.reduce_op(reduce_op)
    reduce_ops.check_dtype(op, name, "input", inputs[0].dtype)
    total = shapes.like(inputs[0])
    if not (total.is_meta or isinstance(total, FakeTensor)):
        reductions.fold(name, [each.contiguous() for each in inputs], total)
    return total


def all_reduce(inputs: Tensors, reduce_op: str, size: int) -> Outputs:
    return _copies(_reduced("all_reduce", inputs, reduce_op), size)


def reduce(inputs: Tensors, reduce_op: str, dst: int, size: int) -> Outputs:
    _rooted("dst", dst, size)
    total = _reduced("reduce", inputs, reduce_op)
    return [[total if rank == dst else torch.zeros_like(total)] for rank in range(size)]


def reduce_scatter(inputs: Tensors, reduce_op: str, scatter_dim: int, size: int) -> Outputs:
    shapes.scattered(inputs[0], scatter_dim, size)  # which says what is wrong
    return _slices(_reduced("reduce_scatter", inputs, reduce_op), scatter_dim, size)


def _slices(tensor: torch.Tensor, dim: int, size: int) -> Outputs:
    return [[shapes.like(part).copy_(part)] for part in tensor.tensor_split(size, dim)]


def _gathered(op: str, inputs: Tensors, dim: int, size: int) -> torch.Tensor:
    alike(op, "input", inputs)
    whole = shapes.gathered(inputs[0], dim, size)
    for part, input in zip(whole.tensor_split(size, dim), inputs, strict=True):
        part.copy_(input)
    return whole


def all_gather(inputs: Tensors, gather_dim: int, size: int) -> Outputs:
    return _copies(_gathered("all_gather", inputs, gather_dim, size), size)


def gather(inputs: Tensors, dst: int, gather_dim: int, size: int) -> Outputs:
    _rooted("dst", dst, size)
    whole = _gathered("gather", inputs, gather_dim, size)
    return [[whole if rank == dst else torch.zeros_like(whole)] for rank in range(size)]


def scatter(inputs: Tensors, src: int, scatter_dim: int, size: int) -> Outputs:
    _rooted("src", src, size)
    alike("scatter", "input", inputs)
    shapes.scattered(inputs[0], scatter_dim, size)
    return _slices(inputs[src], scatter_dim, size)


def broadcast(inputs: Tensors, src: int, size: int) -> Outputs:
    _rooted("src", src, size)
    alike("broadcast", "input", inputs)
    return [[shapes.like(inputs[src]).copy_(inputs[src])] for _ in range(size)]


def permute(inputs: Tensors, src_dst: Sequence[int], size: int) -> Outputs:
    alike("permute", "input", inputs)
    shapes.permutation(src_dst, size)
    return [
        [shapes.like(inputs[0]).copy_(inputs[list(src_dst).index(rank)])] for rank in range(size)
    ]


def all_to_all(
    inputs: Tensors,
    output_split_sizes: list[Sequence[int] | None],
    input_split_sizes: list[Sequence[int] | None],
    size: int,
) -> Outputs:
    outputs = [
        shapes.exchanged(input, received, sent, size)
        for input, received, sent in zip(inputs, output_split_sizes, input_split_sizes, strict=True)
    ]
    alike("all_to_all", "input", inputs, but=0)
    pairs = zip(inputs, input_split_sizes, strict=True)
    parts = [_split(rank, *each, size) for rank, each in enumerate(pairs)]
    for target, (output, lengths) in enumerate(zip(outputs, output_split_sizes, strict=True)):
        for source, place in enumerate(_split(target, output, lengths, size)):
            part = parts[source][target]
            if part.shape != place.shape:
                raise ValueError(
                    f"all_to_all: rank {source} sends {part.shape[0]} rows to rank {target}, which "
                    f"expects {place.shape[0]}"
                )
            place.copy_(part)
    return [[output] for output in outputs]


def _split(
    rank: int, tensor: torch.Tensor, sizes: Sequence[int] | None, size: int
) -> Sequence[torch.Tensor]:
    lengths = [tensor.shape[0] // size] * size if sizes is None else list(sizes)
    if sum(lengths) != tensor.shape[0]:
        raise ValueError(
            f"all_to_all: input_split_sizes {lengths} of rank {rank} do not add up to the "
            f"{tensor.shape[0]} rows of its input"
        )
    return torch.split(tensor, lengths)


def rank(inputs: Tensors, size: int) -> Outputs:
    return [[torch.tensor(rank, device=inputs[0].device)] for rank in range(size)]


def _vector(bias: torch.Tensor | None, columns: int, input: torch.Tensor) -> torch.Tensor | None:
    if bias is not None:
        if tuple(bias.shape) != (columns,):
            raise ValueError(f"bias must have shape ({columns},), got {tuple(bias.shape)}")
        checks.same_dtype("bias", bias.dtype, "input", input.dtype)
    return bias


def all_gather_matmul(
    inputs: Tensors, weights: list[Tensors], biases: list[list[torch.Tensor | None]], *rest: Any
) -> Outputs:
    *given, size = rest
    op, options = "all_gather_matmul", GatherMatmulOptions(*given)
    checks.algorithm_and_dtype(inputs[0], options)
    rows = [[weight.shape[0] for weight in each] for each in weights]
    checks.equal_on_all(op, "rows of weight", rows)
    whole = _gathered(op, inputs, options.gather_dim, size)
    dim = options.gather_dim % whole.dim()
    along_k = dim == whole.dim() - 1
    if along_k and options.algorithm not in ("auto", "unfused"):
        raise ValueError(
            f"algorithm={options.algorithm!r} cannot gather along the contracted dimension"
        )
    matrix = whole.flatten(0, -2) if along_k else rows_of(whole, dim)
    results = []
    for input, own, vectors in zip(inputs, weights, biases, strict=True):
        products = fused.gather_products(input, own, options, size)
        for number, weight in enumerate(own):
            checks.same_dtype("weight", weight.dtype, "input", input.dtype)
            bias = _vector(vectors[number] if vectors else None, weight.shape[1], input)
            multiply(products[number].matrix, matrix, weight, bias)
        if options.return_gathered:
            products[-1].view.copy_(whole)
        results.append([product.view for product in products])
    return results


def _matmul_reduced(
    options_of: Callable[..., MatmulReduceOptions],
    inputs: Tensors,
    weights: Tensors,
    biases: list[torch.Tensor | None],
    *rest: Any,
) -> Outputs:
    *given, size = rest
    options = options_of(*given)
    op = options.op
    products = [
        fused.reduce_product(input, weight, options, size).view
        for input, weight in zip(inputs, weights, strict=True)
    ]
    checks.algorithm_and_dtype(inputs[0], options)
    alike(op, "input", inputs, but=-1)
    alike(op, "weight", weights, but=0)
    checks.same_dtype("weight", weights[0].dtype, "input", inputs[0].dtype)
    checks.one_of("reduce_op", options.reduce_op, checks.REDUCE_OPS)
    checks.equal_on_all(op, "whether there is a bias", [bias is not None for bias in biases])
    dtype, partials = products[0].dtype, []
    for input, weight in zip(inputs, weights, strict=True):
        partial = input.new_empty([*input.shape[:-1], weight.shape[1]], dtype=dtype)
        multiply(partial.flatten(0, -2), rows_of(input, 0), weight, None)
        partials.append(partial if dtype is torch.float64 else partial.float())
    total = _reduced(op, partials, options.reduce_op)
    for rank, (product, vector) in enumerate(zip(products, biases, strict=True)):
        bias = _vector(vector, total.shape[-1], inputs[rank])
        whole = total if bias is None else total + bias
        if options.scatter_dim is not None:
            whole = whole.tensor_split(size, options.scatter_dim)[rank]
        product.copy_(whole)  # rounded once
    return [[product] for product in products]


matmul_reduce_scatter = functools.partial(_matmul_reduced, MatmulReduceOptions)
matmul_all_reduce = functools.partial(_matmul_reduced, fused.all_reduce_options)


def all_gather_scaled_matmul(
    inputs: Tensors,
    weights: list[Tensors],
    input_scales: Tensors,
    weight_scales: list[Tensors],
    biases: list[list[torch.Tensor | None]],
    *rest: Any,
) -> Outputs:
    *given, size = rest
    op, options = "all_gather_scaled_matmul", scaled.GatherOptions(*given)
    alike(op, "input_scale", input_scales)
    results = []
    for number, own in enumerate(weights):
        operands = scaled.operands(
            inputs[0], own, input_scales[0], weight_scales[number], biases[number]
        )
        products = scaled.gathered_products(operands, options, size)
        *outputs, gathered = products
        gathered.view.copy_(_gathered(op, inputs, options.gather_dim, size))
        scale = input_scales[number]
        if scaled.is_by_row(inputs[0], scale):
            whole = _gathered(op, input_scales, options.gather_dim, size)
            scale = rows_of(whole, options.gather_dim)
        for each, output in zip(operands, outputs, strict=True):
            each = each._replace(input=gathered.matrix, input_scale=scale)
            output.matrix.copy_(scaled.multiply(each, options))
        results.append([p.view for p in (products if options.return_gathered else outputs)])
    return results


def scaled_matmul_reduce_scatter(*arguments: Any) -> Outputs:
    *given, size = arguments
    options = scaled_kernels.ReduceOptions(*given[5:])
    partials = [
        scaled.product(scaled_kernels.ScaledOperands(*of_rank), options, rank)
        for rank, of_rank in enumerate(zip(*given[:5], strict=True))
    ]
    return reduce_scatter(partials, options.reduce_op, options.scatter_dim, size)
