"""Ops done to all ranks of a group at once, for one process that plays all of them.

A function gets the arguments of an op by rank, in the order of the group, and its size, and returns the
outputs, a list per rank. Plain arguments are the same on all ranks, except the sizes of an all_to_all.
Shapes, rounding and the order of sums are those of the ops themselves, whose parts these are made of.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from interlace.arguments import checks, reduce_ops
from interlace.ops.matmul import gather as gather_matmul
from interlace.ops.matmul import norms, scaled
from interlace.ops.matmul import reduce as matmul_reduce
from interlace.ops.matmul.gather import AllGatherMatmulArguments
from interlace.ops.matmul.operands import multiply, rows_of
from interlace.ops.matmul.reduce import MatmulReduceArguments, MatmulReduceOptions
from interlace.ops.matmul.scaled import (
    AllGatherScaledMatmulArguments,
    ScaledMatmulReduceScatterArguments,
)
from interlace.ops.op import shapes
from interlace.runtime.numerics import reductions
from interlace.runtime.numerics.norms import NormTail, RowNorm

Tensors = list[torch.Tensor]
Outputs = list[Tensors]


def inputs(ranks: Sequence[Any]) -> Tensors:
    return [each.input for each in ranks]


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


def reduced(op: str, inputs: Tensors, reduce_op: Any) -> torch.Tensor:
    alike(op, "input", inputs)
    name, _ = checks.reduce_op(reduce_op)
    reduce_ops.check_dtype(op, name, "input", inputs[0].dtype)
    total = shapes.like(inputs[0])
    if not (total.is_meta or isinstance(total, FakeTensor)):
        reductions.fold(name, [each.contiguous() for each in inputs], total)
    return total


def all_reduce(ranks: Sequence[Any], size: int) -> Outputs:
    return _copies(reduced("all_reduce", inputs(ranks), ranks[0].reduce_op), size)


def reduce(ranks: Sequence[Any], size: int) -> Outputs:
    dst = ranks[0].dst
    _rooted("dst", dst, size)
    total = reduced("reduce", inputs(ranks), ranks[0].reduce_op)
    return [[total if rank == dst else torch.zeros_like(total)] for rank in range(size)]


def reduce_scatter(ranks: Sequence[Any], size: int) -> Outputs:
    first = ranks[0]
    return _scattered(inputs(ranks), first.reduce_op, first.scatter_dim, size)


def _scattered(inputs: Tensors, reduce_op: str, dim: int, size: int) -> Outputs:
    shapes.scattered(inputs[0], dim, size)  # which says what is wrong
    return _slices(reduced("reduce_scatter", inputs, reduce_op), dim, size)


def _slices(tensor: torch.Tensor, dim: int, size: int) -> Outputs:
    return [[shapes.like(part).copy_(part)] for part in tensor.tensor_split(size, dim)]


def _gathered(op: str, inputs: Tensors, dim: int, size: int) -> torch.Tensor:
    alike(op, "input", inputs)
    whole = shapes.gathered(inputs[0], dim, size)
    for part, input in zip(whole.tensor_split(size, dim), inputs, strict=True):
        part.copy_(input)
    return whole


def all_gather(ranks: Sequence[Any], size: int) -> Outputs:
    return _copies(_gathered("all_gather", inputs(ranks), ranks[0].gather_dim, size), size)


def gather(ranks: Sequence[Any], size: int) -> Outputs:
    dst = ranks[0].dst
    _rooted("dst", dst, size)
    whole = _gathered("gather", inputs(ranks), ranks[0].gather_dim, size)
    return [[whole if rank == dst else torch.zeros_like(whole)] for rank in range(size)]


def scatter(ranks: Sequence[Any], size: int) -> Outputs:
    src, dim = ranks[0].src, ranks[0].scatter_dim
    _rooted("src", src, size)
    alike("scatter", "input", inputs(ranks))
    shapes.scattered(ranks[0].input, dim, size)
    return _slices(ranks[src].input, dim, size)


def broadcast(ranks: Sequence[Any], size: int) -> Outputs:
    src = ranks[0].src
    _rooted("src", src, size)
    alike("broadcast", "input", inputs(ranks))
    source = ranks[src].input
    return [[shapes.like(source).copy_(source)] for _ in range(size)]


def permute(ranks: Sequence[Any], size: int) -> Outputs:
    targets = list(ranks[0].src_dst)
    alike("permute", "input", inputs(ranks))
    shapes.permutation(targets, size)
    sources = [ranks[targets.index(rank)].input for rank in range(size)]
    return [[shapes.like(source).copy_(source)] for source in sources]


def all_to_all(ranks: Sequence[Any], size: int) -> Outputs:
    outputs = [
        shapes.exchanged(each.input, each.output_split_sizes, each.input_split_sizes, size)
        for each in ranks
    ]
    alike("all_to_all", "input", inputs(ranks), but=0)
    parts = [
        _split(rank, each.input, each.input_split_sizes, size) for rank, each in enumerate(ranks)
    ]
    for target, (output, own) in enumerate(zip(outputs, ranks, strict=True)):
        for source, place in enumerate(_split(target, output, own.output_split_sizes, size)):
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


def rank(ranks: Sequence[Any], size: int) -> Outputs:
    return [[torch.tensor(rank, device=ranks[0].input.device)] for rank in range(size)]


def _vector(bias: torch.Tensor | None, columns: int, input: torch.Tensor) -> torch.Tensor | None:
    if bias is not None:
        if tuple(bias.shape) != (columns,):
            raise ValueError(f"bias must have shape ({columns},), got {tuple(bias.shape)}")
        checks.same_dtype("bias", bias.dtype, "input", input.dtype)
    return bias


def all_gather_matmul(ranks: Sequence[AllGatherMatmulArguments], size: int) -> Outputs:
    op, first = "all_gather_matmul", ranks[0]
    checks.algorithm_and_dtype(first.input, first)
    columns = [[weight.shape[0] for weight in each.weights] for each in ranks]
    checks.equal_on_all(op, "rows of weight", columns)
    whole = _gathered(op, inputs(ranks), first.gather_dim, size)
    dim = first.gather_dim % whole.dim()
    along_k = dim == whole.dim() - 1
    if along_k and first.algorithm not in ("auto", "unfused"):
        raise ValueError(
            f"algorithm={first.algorithm!r} cannot gather along the contracted dimension"
        )
    matrix = whole.flatten(0, -2) if along_k else rows_of(whole, dim)
    made = []
    for each in ranks:
        results = gather_matmul.results(each, size)
        for number, weight in enumerate(each.weights):
            checks.same_dtype("weight", weight.dtype, "input", each.input.dtype)
            vector = each.biases[number] if each.biases else None
            bias = _vector(vector, weight.shape[1], each.input)
            multiply(results[number].matrix, matrix, weight, bias)
        if each.return_gathered:
            results[-1].view.copy_(whole)
        made.append([result.view for result in results])
    return made


def partial_products(ranks: Sequence[Any]) -> Tensors:
    """Each rank's input times its weight, in fp32 or wider."""
    found = []
    for each in ranks:
        input, dtype = each.input, checks.output_dtype(each.out_dtype, each.input)
        partial = input.new_empty([*input.shape[:-1], each.weight.shape[1]], dtype=dtype)
        multiply(partial.flatten(0, -2), rows_of(input, 0), each.weight, None)
        found.append(partial if dtype is torch.float64 else partial.float())
    return found


def _matmul_reduced(ranks: Sequence[MatmulReduceArguments], size: int) -> Outputs:
    first, weights = ranks[0], [each.weight for each in ranks]
    op = MatmulReduceOptions.of(first).op
    products = [matmul_reduce.result(each, size).view for each in ranks]
    checks.algorithm_and_dtype(first.input, first)
    alike(op, "input", inputs(ranks), but=-1)
    alike(op, "weight", weights, but=0)
    checks.same_dtype("weight", weights[0].dtype, "input", first.input.dtype)
    checks.one_of("reduce_op", first.reduce_op, checks.REDUCE_OPS)
    checks.equal_on_all(op, "whether there is a bias", [each.bias is not None for each in ranks])
    total = reduced(op, partial_products(ranks), first.reduce_op)
    for rank, (product, each) in enumerate(zip(products, ranks, strict=True)):
        bias = _vector(each.bias, total.shape[-1], each.input)
        whole = total if bias is None else total + bias
        if each.scatter_dim is not None:
            whole = whole.tensor_split(size, each.scatter_dim)[rank]
        product.copy_(whole)  # rounded once
    return [[product] for product in products]


matmul_reduce_scatter = matmul_all_reduce = _matmul_reduced


def _normed(ranks: Sequence[norms.NormArguments], size: int) -> Outputs:
    """Sums in fp32, in the order of the ranks, rounded once with the bias and the residual."""
    first, whole = ranks[0], inputs(ranks)
    alike(first.op, "input", whole, but=None if first.weight is None else -1)
    residuals = [each.residual is None for each in ranks]
    checks.equal_on_all(first.op, "whether there is a residual", residuals)
    if first.weight is None:
        partials = [each if each.dtype is torch.float64 else each.float() for each in whole]
    else:
        partials = partial_products(ranks)
    total = reduced("all_reduce", partials, first.reduce_op)
    dim, made = first.scatter_dim, []
    for rank, given in enumerate(ranks):
        outputs = [each.view for each in norms.results(given, size)]
        own = total if dim is None else total.tensor_split(size, dim)[rank]
        for each in (given.bias, given.residual):
            own = own if each is None else own + each
        outputs[1].copy_(own)
        made.append(outputs)
    for rank, (given, outputs) in enumerate(zip(ranks, made, strict=True)):
        norm = RowNorm(given.kind, given.eps, given.norm_weight, given.norm_bias)
        for reader in made if given.gather_normed else [outputs]:
            places = [reader[0], *reader[2:]]
            if given.gather_normed:
                places = [each.tensor_split(size, dim or 0)[rank] for each in places]
            NormTail(norm, None, *places).finish(outputs[1])
    return made


matmul_reduce_scatter_norm = matmul_all_reduce_norm = all_reduce_norm = reduce_scatter_norm = (
    _normed
)


def all_gather_scaled_matmul(ranks: Sequence[AllGatherScaledMatmulArguments], size: int) -> Outputs:
    op, dim = "all_gather_scaled_matmul", ranks[0].gather_dim
    scales = [each.input_scale for each in ranks]
    alike(op, "input_scale", scales)
    results = []
    for given in ranks:
        operands = scaled.operands(given)
        products = scaled.gathered_products(given, size)
        *outputs, gathered = products
        gathered.view.copy_(_gathered(op, inputs(ranks), dim, size))
        scale = given.input_scale
        if scaled.is_by_row(given.input, scale):
            scale = rows_of(_gathered(op, scales, dim, size), dim)
        for each, output in zip(operands, outputs, strict=True):
            each = each._replace(input=gathered.matrix, input_scale=scale)
            output.matrix.copy_(scaled.multiply(each, given))
        results.append([p.view for p in (products if given.return_gathered else outputs)])
    return results


def scaled_matmul_reduce_scatter(
    ranks: Sequence[ScaledMatmulReduceScatterArguments], size: int
) -> Outputs:
    partials = [scaled.product(each, rank) for rank, each in enumerate(ranks)]
    return _scattered(partials, ranks[0].reduce_op, ranks[0].scatter_dim, size)
