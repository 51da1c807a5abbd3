"""Kernels of the fused ops on scaled operands: fp8 matrices whose numbers are multiplied by scales.

The product is ``(input * input_scale) @ (weight * weight_scale) + bias``, taken by ``torch._scaled_mm``,
which has the last word on dtypes and shapes. A scale is float32 and is either one for all numbers, or one
per row of ``input``, ``[..., 1]``, and per column of ``weight``, ``(1, n)``. One of either kind beside one
of the other is repeated. The one for all of a gathered input has to be equal on all ranks.

============================  ========================================================================
all_gather_scaled_matmul      rows travel in fp8, each with its own scale, if it has one; then the
                              matmuls. In flight as a whole.
scaled_matmul_reduce_scatter  the whole product first, before the call returns; then it is reduced, in
                              ``out_dtype``, in flight.
============================  ========================================================================

That is ``algorithm`` "unfused". "fused" is one kernel (``scaled_kernels.py``), in flight as a whole, which
accumulates in fp32; products of a reduction are scaled before they travel, in ``out_dtype``.

``out_dtype`` is bfloat16 if none is given. There are no gradients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch

from interlace.arguments import checks, dense
from interlace.arguments.words import ScaledAlgorithm
from interlace.ops.collectives import eager as plain
from interlace.ops.collectives import launch as collective_algorithms
from interlace.ops.matmul import gather, reduce, scaled_kernels
from interlace.ops.matmul.operands import rows_of
from interlace.ops.matmul.scaled_kernels import ReduceOptions, ScaledOperands
from interlace.ops.op import shapes
from interlace.ops.op.pending import Started
from interlace.runtime.core.call import Call, Terms
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import current
from interlace.runtime.core.stream import Outcome
from interlace.runtime.tuning.auto import choose_scaled_algorithm

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ALGORITHMS: tuple[str, ...] = get_args(ScaledAlgorithm)

Tensor = torch.Tensor
_scaled_mm: Any = torch._scaled_mm


def scaled_mm(
    input: Tensor, weight: Tensor, *scales: Tensor, bias: Any = None, **options: Any
) -> Tensor:
    """``torch._scaled_mm``, which takes no empty matrices."""
    if input.numel() and weight.numel():
        product: Tensor = _scaled_mm(input, weight, *scales, bias, **options)
        return product
    product = input.new_zeros((len(input), weight.shape[1]), dtype=options["out_dtype"])
    return product if bias is None else product + bias


class GatherOptions(NamedTuple):
    """The arguments of all_gather_scaled_matmul that follow the tensors."""

    gather_dim: int
    return_gathered: bool
    out_dtype: torch.dtype | None
    use_fast_accum: bool
    algorithm: str = "auto"


def multiply(operands: ScaledOperands, options: GatherOptions | ReduceOptions) -> Tensor:
    """The product of two matrices; ``input_scale`` has one element or is ``(rows, 1)``."""
    input, weight, input_scale, weight_scale, bias = operands
    rows, columns = input.shape[0], weight.shape[1]
    by_row = input_scale.numel() != 1 or weight_scale.numel() != 1
    if by_row:
        input_scale = input_scale.reshape(-1, 1).expand(rows, 1).contiguous()
        weight_scale = weight_scale.reshape(1, -1).expand(1, columns).contiguous()
    return scaled_mm(
        input.contiguous(),
        weight,
        input_scale,
        weight_scale,
        bias=bias,
        out_dtype=options.out_dtype or torch.bfloat16,
        use_fast_accum=options.use_fast_accum,
    )


def is_by_row(input: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether ``scale`` is per row of ``input``, as torch takes one number for one row, or for all."""
    if scale.shape == (*input.shape[:-1], 1):
        return True
    if scale.numel() != 1:
        raise ValueError(
            f"input_scale must have one element or shape {(*input.shape[:-1], 1)}, got "
            f"{tuple(scale.shape)} for input of {tuple(input.shape)}"
        )
    return False


def _check(operands: ScaledOperands) -> None:
    """Check operands for faults on which ranks would disagree if torch found them."""
    input, weight, input_scale, weight_scale, bias = operands
    if input.dim() < 2 or weight.dim() != 2 or weight.shape[0] != input.shape[-1]:
        raise ValueError(
            f"input must be [..., k] and weight (k, n), got {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    for name, operand in (("input", input), ("weight", weight)):
        if operand.dtype not in FLOAT8:
            raise TypeError(f"{name} must be float8_e4m3fn or float8_e5m2, got {operand.dtype}")
    for name, scale in (("input_scale", input_scale), ("weight_scale", weight_scale)):
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {scale.dtype}")
    is_by_row(input, input_scale)
    columns = weight.shape[1]
    if weight_scale.numel() != 1 and tuple(weight_scale.shape) != (1, columns):
        raise ValueError(
            f"weight_scale must have one element or shape (1, {columns}), got {tuple(weight_scale.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (columns,):
        raise ValueError(f"bias must have shape ({columns},), got {tuple(bias.shape)}")


def _wants_kernel(
    communicator: Communicator, algorithm: str, rows: int, inner: int, columns: int
) -> bool:
    """Whether ``algorithm`` is "fused", or "auto" takes the kernel if it can; equal on all ranks."""
    checks.one_of("algorithm", algorithm, ALGORITHMS)
    empty = not rows * inner * columns
    chosen = choose_scaled_algorithm(communicator.place, rows, empty=empty)
    return not empty and (algorithm == "fused" or (algorithm == "auto" and chosen == "fused"))


def _agreed(
    communicator: Communicator, op: str, algorithm: str, terms: Terms, part: Any, why: str
) -> tuple[bool, list[Any]]:
    """Whether all ranks' kernels can, and the parts. Raises for unequal terms, or "fused" where not."""
    terms = (*terms, ("configuration", current().overrides))
    parts, why_not = zip(*communicator.parts(Call(op, terms, part=(part, why))), strict=True)
    for rank, why in enumerate(why_not):
        if why and algorithm == "fused":
            raise ValueError(f'{op}: algorithm="fused" cannot do this: {why}, on rank {rank}')
    return not any(why_not), list(parts)


def operands(
    input: Tensor,
    weights: Sequence[Tensor],
    input_scale: Tensor,
    weight_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> list[ScaledOperands]:
    """The operands of each weight's product, checked."""
    if len(weight_scales) != len(weights) or len(biases) not in (0, len(weights)):
        raise ValueError(
            f"weight_scales and biases must be as many as the {len(weights)} weights, got "
            f"{len(weight_scales)} and {len(biases)}"
        )
    vectors = biases or [None] * len(weights)
    found = [
        ScaledOperands(input, weight, input_scale, scale, bias)
        for weight, scale, bias in zip(weights, weight_scales, vectors, strict=True)
    ]
    for each in found:
        _check(each)
    return found


def gathered_products(
    found: Sequence[ScaledOperands], options: GatherOptions, size: int
) -> list[shapes.Output]:
    """A product per weight, then the gathered input, which is always made."""
    input = found[0].input
    if options.gather_dim in (-1, input.dim() - 1):
        raise ValueError(
            f"gather_dim={options.gather_dim} is the contracted dimension, along which scales cannot be "
            "gathered"
        )
    dtype, weights = options.out_dtype or torch.bfloat16, [each.weight for each in found]
    unscaled = gather.AllGatherMatmulArguments(
        input, weights, [], options.gather_dim, True, out_dtype=dtype
    )
    return gather.results(unscaled, size)


def all_gather_scaled_matmul(communicator: Communicator, *given: Any) -> Started:
    """``given``: the arguments of :func:`operands`, then the fields of :class:`GatherOptions`."""
    op, options = "all_gather_scaled_matmul", GatherOptions(*given[5:])
    input, weights, input_scale, weight_scales, _ = given[:5]
    with communicator.accepting(op):
        for each in (input, input_scale, *weights, *weight_scales):
            checks.tensor("each operand", each, communicator)
        found = operands(*given[:5])
        products = gathered_products(found, options, communicator.world_size)
        inner, columns = input.shape[-1], [weight.shape[1] for weight in weights]
        rows = products[-1].matrix.shape[0]
        kernel = _wants_kernel(communicator, options.algorithm, rows, inner, max(columns))
    *outputs, gathered = products
    dim = options.gather_dim % input.dim()
    by_row = is_by_row(input, input_scale)
    shard = rows_of(input, dim).contiguous()
    scale = rows_of(input_scale, dim).contiguous() if by_row else input_scale

    def start() -> Outcome:
        why = ""
        if kernel:
            why = scaled_kernels.why_not(communicator, inner, weights, options.out_dtype)
        terms = (
            ("shape of input", tuple(input.shape)),
            ("gather_dim", dim),
            ("dtype of input", input.dtype),
            ("whether input_scale is by row", by_row),
            ("algorithm", options.algorithm),
            ("use_fast_accum", options.use_fast_accum),
        )
        can, widths = _agreed(communicator, op, options.algorithm, terms, columns, why)
        if kernel and can:
            event = scaled_kernels.gather(
                communicator,
                [each._replace(input=shard, input_scale=scale) for each in found],
                by_row,
                [output.matrix for output in outputs],
                gathered.matrix if options.return_gathered else None,
                options.use_fast_accum,
                [each for width in widths for each in width],
            )
            return Outcome(None, event)
        _gather(communicator, shard.view(torch.uint8), gathered.matrix.view(torch.uint8))
        whole_scale = scale
        if by_row:
            whole_scale = scale.new_empty(gathered.matrix.shape[0], 1)
            _gather(communicator, scale, whole_scale)

        def multiply_all() -> None:
            for each, output in zip(found, outputs, strict=True):
                whole = each._replace(input=gathered.matrix, input_scale=whole_scale)
                output.matrix.copy_(multiply(whole, options))

        communicator.compute.call(multiply_all, "scaled matmul")
        return Outcome(None, communicator.compute.record())

    work = communicator.run(op, start, async_op=True)
    views = [product.view for product in (products if options.return_gathered else outputs)]
    return Started(views, work)


def _gather(communicator: Communicator, part: torch.Tensor, whole: torch.Tensor) -> None:
    if whole.numel():
        parts = whole.view(-1).chunk(communicator.world_size)
        collective_algorithms.gather_made(communicator, part.reshape(-1), list(parts))


OP = "scaled_matmul_reduce_scatter"


def scattered(found: ScaledOperands, options: ReduceOptions, size: int) -> shapes.Output:
    """``[.., n / size, .., columns]``."""
    dtype = options.out_dtype or torch.bfloat16
    dim = options.scatter_dim
    product = reduce.MatmulReduceScatterArguments(
        found.input, found.weight, None, options.reduce_op, dim, out_dtype=dtype
    )
    return reduce.result(product, size)


def product(found: ScaledOperands, options: ReduceOptions, rank: int) -> Tensor:
    """``rank``'s whole product, ``[..., n]``, with its part of the bias, which the sum has once."""
    _check(found)
    input, scale = found.input, found.input_scale
    matrices = found._replace(
        input=rows_of(input, 0),
        input_scale=rows_of(scale, 0) if is_by_row(input, scale) else scale,
        bias=found.bias if _is_average(options) or rank == 0 else None,
    )
    return multiply(matrices, options).view(*input.shape[:-1], found.weight.shape[1])


def _is_average(options: ReduceOptions) -> bool:
    return checks.one_of("reduce_op", options.reduce_op, checks.REDUCE_OPS) == "avg"


def scaled_matmul_reduce_scatter(communicator: Communicator, *given: Any) -> Started:
    """``given``: the fields of :class:`ScaledOperands`, then those of :class:`ReduceOptions`."""
    found, options = ScaledOperands(*given[:5]), ReduceOptions(*given[5:])
    input, weight = found.input, found.weight
    with communicator.accepting(OP):
        for each in found[:4]:
            checks.tensor("each operand", each, communicator)
        average = _is_average(options)
        _check(found)
        rows, inner = input.numel() // max(1, input.shape[-1]), input.shape[-1]
        made = scattered(found, options, communicator.world_size)
        columns = weight.shape[1]
        kernel = _wants_kernel(communicator, options.algorithm, rows, inner, columns)
    if kernel:
        terms = (
            ("the shape of input without k", tuple(input.shape[:-1])),
            ("the columns of weight", columns),
            ("scatter_dim", options.scatter_dim % input.dim()),
            ("reduce_op", "avg" if average else "sum"),
            ("out_dtype", made.view.dtype),
            ("use_fast_accum", options.use_fast_accum),
            ("algorithm", options.algorithm),
            ("whether there is a bias", found.bias is not None),
        )
        why = scaled_kernels.why_not(communicator, inner, [weight], made.view.dtype)

        def agree() -> Outcome:
            can, inners = _agreed(communicator, OP, options.algorithm, terms, inner, why)
            return Outcome(max(inners) if can else 0, None)

        output = made.view if made.view.is_contiguous() else shapes.like(made.view)
        if largest := communicator.run(OP, agree, async_op=False):

            def start() -> Outcome:
                event = scaled_kernels.reduce(
                    communicator, found, made.matrix, options, average=average, inner=largest
                )
                return Outcome(None, dense.copied_back(communicator, [output], [made.view], event))

            return Started([output], communicator.run(OP, start, async_op=True))
    with communicator.accepting(OP):
        whole = product(found, options, communicator.rank)
    return plain.reduce_scatter(communicator, whole, options.reduce_op, options.scatter_dim)


def _no_gradient(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("interlace's ops on scaled operands have no gradients")


NO_GRADIENT = (lambda ctx, inputs, output: None, _no_gradient)
