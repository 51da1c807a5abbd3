"""The fused ops on scaled operands: fp8 matrices whose numbers are multiplied by scales.

The product is ``(input * input_scale) @ (weight * weight_scale) + bias``, computed by ``torch._scaled_mm``,
which decides about dtypes and shapes. If one scale is by row or column and the other single, the single one
is repeated.

"unfused" sends rows in fp8, with their own scales if they have some, and all of it is in flight. A whole
product that is reduced is computed before the call returns, and reduced in ``out_dtype``, in flight.
"fused" is one Triton kernel, in flight as a whole. It multiplies fp8 where it arrives and accumulates in
fp32. Products of a reduction are scaled before they are sent, in ``out_dtype``. There are no gradients.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch

from interlace.arguments import checks
from interlace.arguments.checks import copied_back
from interlace.arguments.words import ScaledAlgorithm
from interlace.kernels.tiling import split_rows
from interlace.ops.collectives import launch as collective_algorithms, records as by_rank
from interlace.ops.matmul import gather, launch_gather, launch_reduce, reduce
from interlace.ops.matmul.operands import DESCRIPTOR_ALIGNMENT, Linear, factors, rows_of
from interlace.ops.op import shapes
from interlace.ops.op.op import Example, Op, OpGradient, Output, Setting, Started, constant
from interlace.runtime.core.call import Call, Terms
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import current
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import tuning
from interlace.runtime.tuning.tuning import choose_scaled_algorithm

GATHER, SCATTER = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ALGORITHMS: tuple[str, ...] = get_args(ScaledAlgorithm)
KERNEL_OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)

Tensor = torch.Tensor
FP8_WIDTH = 16
_scaled_mm: Any = torch._scaled_mm


@dataclasses.dataclass
class AllGatherScaledMatmulArguments:
    """The arguments of the op; see :func:`interlace.functional.all_gather_scaled_matmul`."""

    input: Tensor
    weights: list[Tensor]
    input_scale: Tensor
    weight_scales: list[Tensor]
    biases: list[Tensor | None]
    gather_dim: int
    return_gathered: bool
    out_dtype: torch.dtype | None
    use_fast_accum: bool
    algorithm: str = "auto"


@dataclasses.dataclass
class ScaledMatmulReduceScatterArguments:
    """The arguments of the op; see :func:`interlace.functional.scaled_matmul_reduce_scatter`."""

    input: Tensor
    weight: Tensor
    input_scale: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    reduce_op: str
    scatter_dim: int
    out_dtype: torch.dtype | None
    use_fast_accum: bool
    algorithm: str = "auto"

    @property
    def operands(self) -> "ScaledOperands":
        return ScaledOperands(
            self.input, self.weight, self.input_scale, self.weight_scale, self.bias
        )


class ScaledOperands(NamedTuple):
    """The operands of one product: fp8 matrices, their scales, and a bias."""

    input: Tensor
    weight: Tensor
    input_scale: Tensor
    weight_scale: Tensor
    bias: Tensor | None


def scaled_mm(
    input: Tensor, weight: Tensor, *scales: Tensor, bias: Any = None, **options: Any
) -> Tensor:
    """Call ``torch._scaled_mm``, also for empty matrices, which it does not accept."""
    if input.numel() and weight.numel():
        product: Tensor = _scaled_mm(input, weight, *scales, bias, **options)
        return product
    product = input.new_zeros((len(input), weight.shape[1]), dtype=options["out_dtype"])
    return product if bias is None else product + bias


def repeat_scales(
    input: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the scales. If one is by row or column and the other single, the single one is repeated."""
    if input_scale.numel() == weight_scale.numel() == 1:
        return input_scale, weight_scale
    by_row = input_scale.reshape(-1, 1).expand(input.shape[0], 1).contiguous()
    return by_row, weight_scale.reshape(1, -1).expand(1, weight.shape[1]).contiguous()


def multiply(
    operands: ScaledOperands,
    record: AllGatherScaledMatmulArguments | ScaledMatmulReduceScatterArguments,
) -> Tensor:
    """Return the product of two matrices; ``input_scale`` has one element or is ``(rows, 1)``."""
    input, weight, input_scale, weight_scale, bias = operands
    return scaled_mm(
        input.contiguous(),
        weight,
        *repeat_scales(input, weight, input_scale, weight_scale),
        bias=bias,
        out_dtype=record.out_dtype or torch.bfloat16,
        use_fast_accum=record.use_fast_accum,
    )


def is_by_row(input: Tensor, scale: Tensor) -> bool:
    """Return whether ``scale`` is per row of ``input``; for one row, torch takes it as a single scale."""
    if scale.shape == (*input.shape[:-1], 1):
        return True
    if scale.numel() != 1:
        raise ValueError(
            f"input_scale must have one element or shape {(*input.shape[:-1], 1)}, got "
            f"{tuple(scale.shape)} for input of {tuple(input.shape)}"
        )
    return False


def _check(operands: ScaledOperands) -> None:
    """Check operands for errors that torch would not find on all ranks."""
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
    """Return whether to use the kernel: "fused", or "auto" if it can. This is equal on all ranks."""
    checks.one_of("algorithm", algorithm, ALGORITHMS)
    empty = not rows * inner * columns
    chosen = choose_scaled_algorithm(communicator.place, rows, empty=empty)
    return not empty and (algorithm == "fused" or (algorithm == "auto" and chosen == "fused"))


def _agree(
    communicator: Communicator, op: str, algorithm: str, terms: Terms, part: Any, why: str
) -> tuple[bool, list[Any]]:
    """Return whether all kernels can, and the parts. Raise for unequal terms or an impossible "fused"."""
    terms = (*terms, ("configuration", current().overrides))
    parts, why_not = zip(*communicator.parts(Call(op, terms, part=(part, why))), strict=True)
    for rank, why in enumerate(why_not):
        if why and algorithm == "fused":
            raise ValueError(f'{op}: algorithm="fused" cannot do this: {why}, on rank {rank}')
    return not any(why_not), list(parts)


def operands(record: AllGatherScaledMatmulArguments) -> list[ScaledOperands]:
    """Return the checked operands of each weight's product."""
    weights, weight_scales, biases = record.weights, record.weight_scales, record.biases
    if len(weight_scales) != len(weights) or len(biases) not in (0, len(weights)):
        raise ValueError(
            f"weight_scales and biases must be as many as the {len(weights)} weights, got "
            f"{len(weight_scales)} and {len(biases)}"
        )
    vectors = biases or [None] * len(weights)
    found = [
        ScaledOperands(record.input, weight, record.input_scale, scale, bias)
        for weight, scale, bias in zip(weights, weight_scales, vectors, strict=True)
    ]
    for each in found:
        _check(each)
    return found


def gathered_products(record: AllGatherScaledMatmulArguments, size: int) -> list[Output]:
    """Make a product per weight, then the gathered input, which is always made."""
    input = record.input
    if record.gather_dim in (-1, input.dim() - 1):
        raise ValueError(
            f"gather_dim={record.gather_dim} is the contracted dimension, along which scales cannot be "
            "gathered; gather along another one"
        )
    dtype = record.out_dtype or torch.bfloat16
    unscaled = gather.AllGatherMatmulArguments(
        input, record.weights, [], record.gather_dim, True, out_dtype=dtype
    )
    return gather.results(unscaled, size)


def _views(record: AllGatherScaledMatmulArguments, size: int) -> list[Tensor]:
    operands(record)
    views = [each.view for each in gathered_products(record, size)]
    return views if record.return_gathered else views[:-1]


def start_gather(communicator: Communicator, record: AllGatherScaledMatmulArguments) -> Started:
    input, weights, input_scale = record.input, record.weights, record.input_scale
    with communicator.accepting(GATHER):
        for each in (input, input_scale, *weights, *record.weight_scales):
            checks.tensor("each operand", each, communicator)
        found = operands(record)
        products = gathered_products(record, communicator.world_size)
        inner, columns = input.shape[-1], [weight.shape[1] for weight in weights]
        rows = products[-1].matrix.shape[0]
        kernel = _wants_kernel(communicator, record.algorithm, rows, inner, max(columns))
    *outputs, gathered = products
    dim = record.gather_dim % input.dim()
    by_row = is_by_row(input, input_scale)
    shard = rows_of(input, dim).contiguous()
    scale = rows_of(input_scale, dim).contiguous() if by_row else input_scale

    def start() -> Outcome:
        reason = ""
        if kernel:
            reason = why_not(communicator, inner, weights, record.out_dtype)
        terms = (
            ("shape of input", tuple(input.shape)),
            ("gather_dim", dim),
            ("dtype of input", input.dtype),
            ("whether input_scale is by row", by_row),
            ("algorithm", record.algorithm),
            ("use_fast_accum", record.use_fast_accum),
        )
        can, widths = _agree(communicator, GATHER, record.algorithm, terms, columns, reason)
        if kernel and can:
            event = gather_fused(
                communicator,
                [each._replace(input=shard, input_scale=scale) for each in found],
                by_row,
                [output.matrix for output in outputs],
                gathered.matrix if record.return_gathered else None,
                record.use_fast_accum,
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
                output.matrix.copy_(multiply(whole, record))

        communicator.compute.call(multiply_all, "scaled matmul")
        return Outcome(None, communicator.compute.record())

    work = communicator.run(GATHER, start, async_op=True)
    views = [product.view for product in (products if record.return_gathered else outputs)]
    return Started(views, work)


def _gather(communicator: Communicator, part: Tensor, whole: Tensor) -> None:
    if whole.numel():
        parts = whole.view(-1).chunk(communicator.world_size)
        collective_algorithms.gather_made(communicator, part.reshape(-1), list(parts))


def scattered_output(record: ScaledMatmulReduceScatterArguments, size: int) -> Output:
    dtype, dim = record.out_dtype or torch.bfloat16, record.scatter_dim
    unscaled = reduce.ReductionArguments(
        record.input, record.weight, scatter_dim=dim, out_dtype=dtype
    )
    return reduce.result(unscaled, size)


def product(record: ScaledMatmulReduceScatterArguments, rank: int) -> Tensor:
    """Return ``rank``'s whole product, ``[..., n]``, with its part of the bias, which the sum has once."""
    found, input, scale = record.operands, record.input, record.input_scale
    _check(found)
    matrices = found._replace(
        input=rows_of(input, 0),
        input_scale=rows_of(scale, 0) if is_by_row(input, scale) else scale,
        bias=found.bias if _is_average(record) or rank == 0 else None,
    )
    return multiply(matrices, record).view(*input.shape[:-1], found.weight.shape[1])


def _is_average(record: ScaledMatmulReduceScatterArguments) -> bool:
    return checks.one_of("reduce_op", record.reduce_op, checks.REDUCE_OPS) == "avg"


def start_reduce(communicator: Communicator, record: ScaledMatmulReduceScatterArguments) -> Started:
    input, weight, found = record.input, record.weight, record.operands
    with communicator.accepting(SCATTER):
        for each in found[:4]:
            checks.tensor("each operand", each, communicator)
        average = _is_average(record)
        _check(found)
        rows, inner = input.numel() // max(1, input.shape[-1]), input.shape[-1]
        result = scattered_output(record, communicator.world_size)
        columns = weight.shape[1]
        kernel = _wants_kernel(communicator, record.algorithm, rows, inner, columns)
    if kernel:
        terms = (
            ("the shape of input without k", tuple(input.shape[:-1])),
            ("the columns of weight", columns),
            ("scatter_dim", record.scatter_dim % input.dim()),
            ("reduce_op", "avg" if average else "sum"),
            ("out_dtype", result.view.dtype),
            ("use_fast_accum", record.use_fast_accum),
            ("algorithm", record.algorithm),
            ("whether there is a bias", found.bias is not None),
        )
        reason = why_not(communicator, inner, [weight], result.view.dtype)

        def agree() -> Outcome:
            can, inners = _agree(communicator, SCATTER, record.algorithm, terms, inner, reason)
            return Outcome(max(inners) if can else 0, None)

        output = result.view if result.view.is_contiguous() else shapes.like(result.view)
        if largest := communicator.run(SCATTER, agree, async_op=False):

            def start() -> Outcome:
                event = reduce_fused(
                    communicator, record, result.matrix, average=average, inner=largest
                )
                return Outcome(None, copied_back(communicator, [output], [result.view], event))

            return Started([output], communicator.run(SCATTER, start, async_op=True))
    with communicator.accepting(SCATTER):
        whole = product(record, communicator.rank)
    return by_rank.REDUCE_SCATTER.begin(communicator, (whole, record.reduce_op, record.scatter_dim))


# -- by one kernel ---------------------------------------------------------------------------------


def why_not(
    communicator: Communicator, inner: int, weights: Sequence[Tensor], out_dtype: torch.dtype | None
) -> str:
    """Return why the kernels cannot multiply these operands; "" if they can."""
    for weight in weights:
        across, along = weight.stride()
        columns = weight.shape[1]  # a stride matters only with a second row or column
        if (inner > 1 and across != 1) or (columns > 1 and along < inner):
            return f"weight must be contiguous along k, strides are {weight.stride()}"
        if not communicator.place.interpreted and (inner | columns) % DESCRIPTOR_ALIGNMENT:
            return f"k and n must be multiples of 16, weight is {tuple(weight.shape)}"
    if out_dtype is not None and out_dtype not in KERNEL_OUTPUTS:
        return f"out_dtype must be float32, float16 or bfloat16, got {out_dtype}"
    return ""


def _linear(
    operands: ScaledOperands, output: Tensor, by_row: bool, fast_accum: bool, **more: Any
) -> Linear:
    """Return a product of matrices for kernels, with scales ``by_row`` and by column, or single ones."""
    input, weight, row_scale, scale, bias = operands
    if by_row:
        row_scale = row_scale.reshape(-1).expand(input.shape[0]).contiguous()
        scale = scale.reshape(-1).expand(weight.shape[1]).contiguous()
    how = {"scales": "row" if by_row else "tensor", "fast_accum": fast_accum, **more}
    return Linear(weight, bias, output, scale=scale, row_scale=row_scale, **how)


def gather_fused(
    communicator: Communicator,
    operands: Sequence[ScaledOperands],
    by_row: bool,
    outputs: Sequence[Tensor],
    gathered: Tensor | None,
    fast_accum: bool,
    columns: Sequence[int],
) -> Event:
    """Run the kernel. ``operands``: one input, own rows; ``outputs``: all rows; ``columns``: by rank."""
    input = operands[0].input
    rows, inner = input.shape
    by_row = by_row or any(operand.weight_scale.numel() != 1 for operand in operands)
    targets = [
        _linear(each, output, by_row, fast_accum)
        for each, output in zip(operands, outputs, strict=True)
    ]
    problem = tuning.gather_problem(
        communicator.world_size, input.dtype, rows, tuple(columns), inner, fast_accum=fast_accum
    )
    config = tuning.choose(communicator, problem, "fused").configuration
    return launch_gather.all_gather_matmul_fused(
        communicator, input, targets, [rows] * communicator.world_size, gathered, config
    )


def reduce_fused(
    communicator: Communicator,
    record: ScaledMatmulReduceScatterArguments,
    output: Tensor,
    *,
    average: bool,
    inner: int,
) -> Event:
    """Write ``output``, the matrix of this rank's part. ``inner`` is the largest k of all ranks."""
    input, weight, row_scale, column_scale, bias = record.operands
    dim, size = record.scatter_dim % input.dim(), communicator.world_size
    by_row = row_scale.numel() != 1 or column_scale.numel() != 1
    left, right, along = factors(input, weight, dim)
    if along == "m":
        right = right if right.stride(0) == 1 else right.T.contiguous().T
        row_scale, column_scale = column_scale, row_scale
        bias = None if bias is None else bias.tensor_split(size)[communicator.rank]
    elif row_scale.numel() != 1:
        row_scale = rows_of(row_scale, dim)
    matrices, fast = (
        ScaledOperands(left, right, row_scale, column_scale, bias),
        record.use_fast_accum,
    )
    linear = _linear(matrices, output, by_row, fast, bias_along=along, average=average)
    rows, columns = output.shape
    op = "matmul_reduce_scatter"
    problem = tuning.Problem(op, input.dtype, rows, columns, inner, size, fast)
    config = tuning.choose(communicator, problem, "fused").configuration
    segments = split_rows(left.shape[0], size)
    return launch_reduce.matmul_reduce_scatter_fused(communicator, left, linear, segments, config)


# -- as ops of torch -------------------------------------------------------------------------------


def _backward(ctx: Any, grads: Any) -> Any:
    raise RuntimeError("interlace's ops on scaled operands have no gradients")


def gather_reference(
    ranks: Sequence[AllGatherScaledMatmulArguments], size: int
) -> list[list[Tensor]]:
    op, dim = "all_gather_scaled_matmul", ranks[0].gather_dim
    scales = [rank.input_scale for rank in ranks]
    by_rank.alike(op, "input_scale", scales)
    results = []
    for record in ranks:
        products_of = operands(record)
        products = gathered_products(record, size)
        *outputs, gathered = products
        gathered.view.copy_(by_rank.gather_all(op, by_rank.inputs(ranks), dim, size))
        scale = record.input_scale
        if is_by_row(record.input, scale):
            scale = rows_of(by_rank.gather_all(op, scales, dim, size), dim)
        for each, output in zip(products_of, outputs, strict=True):
            each = each._replace(input=gathered.matrix, input_scale=scale)
            output.matrix.copy_(multiply(each, record))
        results.append([p.view for p in (products if record.return_gathered else outputs)])
    return results


def reduce_reference(
    ranks: Sequence[ScaledMatmulReduceScatterArguments], size: int
) -> list[list[Tensor]]:
    partials = [product(each, rank) for rank, each in enumerate(ranks)]
    return by_rank.scatter_all(partials, ranks[0].reduce_op, ranks[0].scatter_dim, size)


def _fp8(setting: Setting, rows: int, columns: int) -> Tensor:
    """Return fp8 numbers: rows of a matrix have at least ``FP8_WIDTH`` of them."""
    return dataclasses.replace(setting, dtype=torch.float8_e4m3fn).numbers(rows, columns)


def _right(setting: Setting) -> Tensor:
    return _fp8(setting, FP8_WIDTH, FP8_WIDTH).t()


def _scales(setting: Setting, *shape: int) -> Tensor:
    return dataclasses.replace(setting, dtype=torch.float32).numbers(*shape).abs() + 1


_EXAMPLES: dict[str, Example] = {
    "out_dtype": lambda setting: setting.dtype,
    "use_fast_accum": constant(False),
}
_NO_GRADIENT = OpGradient(lambda ctx, given, output: None, _backward)
OPS = (
    Op(
        GATHER,
        AllGatherScaledMatmulArguments,
        start_gather,
        _views,
        _NO_GRADIENT,
        communicates={},
        several=True,
        reference=gather_reference,
        algorithms={"fused": ("all_gather_matmul_kernel",), "unfused": ()},
        examples={
            **_EXAMPLES,
            "input": lambda setting: _fp8(setting, setting.own, FP8_WIDTH),
            "weights": lambda setting: [_right(setting)],
            "input_scale": lambda setting: _scales(setting, setting.own, 1),
            "weight_scales": lambda setting: [_scales(setting, 1, FP8_WIDTH)],
            "biases": constant([None]),
        },
    ),
    Op(
        SCATTER,
        ScaledMatmulReduceScatterArguments,
        start_reduce,
        lambda given, size: shapes.like(scattered_output(given, size).view),
        _NO_GRADIENT,
        communicates={},
        reference=reduce_reference,
        algorithms={"fused": ("matmul_reduce_scatter_kernel",), "unfused": ()},
        examples={
            **_EXAMPLES,
            "input": lambda setting: _fp8(setting, setting.total, FP8_WIDTH),
            "weight": _right,
            "input_scale": lambda setting: _scales(setting, setting.total, 1),
            "weight_scale": lambda setting: _scales(setting, 1, FP8_WIDTH),
            "bias": constant(None),
        },
    ),
)
