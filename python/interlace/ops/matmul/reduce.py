"""The fused ops that reduce a product; ``launch_reduce.py`` has their algorithms, on matrices.

If the product is scattered, the gradient of its input is an all_gather_matmul. The gradient of its weight
is the input times the gathered gradient. Unequal parts are padded with zeros, which are then cut off. If
all ranks have the product, the gradients are an all_reduce, then matmuls.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.kernels.tiling import split_rows
from interlace.ops.collectives import launch as plain, records as by_rank
from interlace.ops.matmul import launch_reduce as algorithms
from interlace.ops.matmul.block_scaled import call_in, packed_parts, product, product_of_rows
from interlace.ops.matmul.formats import OPERAND_FORMATS, format_term
from interlace.ops.matmul.operands import (
    Linear,
    checked_bias,
    factors,
    gathered_rows,
    partial_products,
    rows_of,
    scattered_product,
)
from interlace.ops.matmul.reference import split
from interlace.ops.op import shapes
from interlace.ops.op.op import (
    Op,
    OpGradient,
    Output,
    Started,
    fused_by,
    longest,
    names_of_tensors,
    pad,
    requiring,
    rows,
    start_form,
    wait,
    without_tensors,
)
from interlace.ops.op.recording import Ops, call
from interlace.runtime.core.call import PreparedCall, Terms
from interlace.runtime.core.communicator import Communicator, record_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import tuning
from interlace.runtime.tuning.table import threshold
from interlace.runtime.tuning.tuning import choose_algorithm

SCATTER, ALL_REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
SCATTER_NORM, ALL_REDUCE_NORM = "reduce_scatter_norm", "all_reduce_norm"
ONE_SHOT_BYTES = threshold("one_shot_bytes")
Tensor = torch.Tensor
_ops: Any = Ops()


@dataclasses.dataclass
class ReductionArguments:
    """The arguments of all reductions: of a product, or of existing rows if ``weight`` is None. They are
    scattered, or on all ranks if ``scatter_dim`` is None. They have a norm if ``kind`` is set.

    ``length``: of this rank's part, None for an equal part. ``quantize``: "" for None.
    """

    input: Annotated[Any, "Tensor"]
    weight: Annotated[Any, "Tensor"] = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    reduce_op: Annotated[Any, "str"] = "sum"
    scatter_dim: Annotated[int | None, "int"] = None
    length: Annotated[Any, "SymInt?"] = None
    algorithm: str = "auto"
    out_dtype: torch.dtype | None = None
    kind: str = ""
    eps: float = 0.0
    quantize: str = ""
    gather_normed: bool = False
    activation: Annotated[str | None, ""] = None
    format: str = ""

    @property
    def op(self) -> str:
        if self.weight is None:
            return ALL_REDUCE_NORM if self.scatter_dim is None else SCATTER_NORM
        return ALL_REDUCE if self.scatter_dim is None else SCATTER


TENSORS = names_of_tensors(ReductionArguments)


def prepare(
    communicator: Communicator, record: ReductionArguments, buffers: Sequence[Tensor] | None
) -> PreparedCall:
    """Check either op. ``buffers``: a matrix for the result's rows, or its columns transposed."""
    request = CheckedReduce(communicator, record)
    start = request.summed if request.dim is None else request.scattered
    return functools.partial(start, buffers[0] if buffers else None), (), None


FORMS = {
    op: record_form(op, ReductionArguments, TENSORS, prepare, format="")
    for op in (SCATTER, ALL_REDUCE)
}


class Scattering(NamedTuple):
    """A product whose rows are scattered: its factors, and the rows by owner, (first row, rows).

    The scattered dimension has ``length`` indices; this rank has ``own`` of them from ``first`` on. Each
    index is as many rows as the product of ``others``.
    """

    left: Tensor
    right: Tensor
    segments: list[tuple[int, int]]
    length: int
    first: int
    own: int
    others: list[int]
    along: str


class CheckedReduce:
    """The checked arguments of either op. ``more_terms``: more values on which ranks must agree."""

    more_terms: Terms = ()

    def __init__(self, communicator: Communicator, record: ReductionArguments) -> None:
        self.op, self.communicator = record.op, communicator
        operands = checks.operands(communicator, record.input, record.weight, record.bias, record)
        self.input, self.algorithm, self.dtype = operands.input, operands.algorithm, operands.dtype
        (self.weight,), (self.bias,) = operands.weights, operands.biases
        (self.activation,) = operands.activations
        self.format = OPERAND_FORMATS.get(record.format)
        self.dim = None
        reduce_op = checks.one_of("reduce_op", record.reduce_op, checks.REDUCE_OPS)
        self.average = reduce_op == "avg"
        if record.scatter_dim is not None:
            self.dim = checks.index("scatter_dim", record.scatter_dim, self.input.dim())
            checks.part("length", record.length, self._parts(), communicator.rank)
        self.largest_inner = self.input.shape[-1]

    def _parts(self) -> list[tuple[int, int]]:
        """Return first index and length by rank along the scattered dimension."""
        length = (*self.input.shape[:-1], self.weight.shape[1])[self.dim]  # type: ignore[index]
        parts: list[tuple[int, int]] = split_rows(length, self.communicator.world_size)
        return parts

    def scattering(self) -> Scattering:
        """Return the factors of the product, and the rows by owner."""
        input, dim, parts = self.input, self.dim, self._parts()
        assert dim is not None
        left, right, along = factors(input, self.weight, dim)
        left = left if left.stride(1) == 1 else left.contiguous()
        off_dim = [extent for i, extent in enumerate(input.shape[:-1]) if i != dim]
        length, per_index = input.shape[dim], math.prod(off_dim)
        if along == "m":
            length, per_index = self.weight.shape[1], 1
        segments = [(first * per_index, count * per_index) for first, count in parts]
        first, own_length = parts[self.communicator.rank]
        return Scattering(left, right, segments, length, first, own_length, off_dim, along)

    def scattered(self, buffer: Tensor | None) -> Outcome:
        self.agree()
        scattering = self.scattering()
        output = buffer
        if buffer is None:
            assert self.dim is not None
            about = self.weight.shape[1], self.dim, scattering.own, self.communicator.world_size
            output, view = scattered_product(self.input, *about, self.dtype)
        assert output is not None
        assert output.shape == (
            scattering.segments[self.communicator.rank][1],
            scattering.right.shape[1],
        )
        bias, along, format = self.bias, scattering.along, self.format
        if along == "m" and bias is not None:
            bias = bias[scattering.first : scattering.first + scattering.own]
        if along == "m" and format is not None:
            format = format.of_transposed
        linear = Linear(
            scattering.right,
            bias,
            output,
            along,
            self.activation,
            average=self.average,
            format=format,
        )
        event = self.reduce_scatter(scattering.left, linear, scattering.segments)
        return Outcome(view if buffer is None else None, event)

    def summed(self, buffer: Tensor | None) -> Outcome:
        self.agree()
        input, weight, output = self.input, self.weight, buffer
        if buffer is None:
            about = input.dim() - 1, None, weight.shape[1], self.dtype
            output, view = gathered_rows(input, *about)
        assert output is not None
        linear = Linear(
            weight,
            self.bias,
            output,
            "n",
            self.activation,
            average=self.average,
            format=self.format,
        )
        event = self.all_reduce(rows_of(input, 0), linear)
        return Outcome(view if buffer is None else None, event)

    def agree(self) -> None:
        """Exchange terms with all ranks and raise on any mismatch; find the largest ``k``."""
        *lengths, inner = self.input.shape
        terms = (
            format_term(self.format.name if self.format else ""),
            ("dtype of input", self.input.dtype),
            ("the shape of input without k", tuple(lengths)),
            ("the columns of weight", self.weight.shape[1]),
            ("scatter_dim", self.dim),
            ("reduce_op", "avg" if self.average else "sum"),
            ("algorithm", self.algorithm),
            ("out_dtype", self.dtype),
            ("whether there is a bias", self.bias is not None),
            ("activation", self.activation or None),
            *self.more_terms,
        )
        call = self.communicator.call_of(self.op, terms, inner)
        self.largest_inner = max(self.communicator.parts(call))

    def choice(self, op: str, rows: int, columns: int) -> tuning.Choice:
        """Choose for ``op`` by the table, the cache or the model; ``rows``: the longest part."""
        size, inner = self.communicator.world_size, self.largest_inner
        about = rows, columns, inner, size
        problem = tuning.Problem(op, self.input.dtype, *about, **tuning.tuned_as(self.format))
        return tuning.choose(self.communicator, problem, self.algorithm)

    def chosen(self, rows: int, columns: int, tuned: str) -> str:
        """Return the algorithm when every rank's shapes are known; ``tuned``: the choice's algorithm."""
        empty = not rows * columns * self.largest_inner
        if self.algorithm != "auto" and not empty:
            return self.algorithm
        wide = torch.float64 if self.dtype == torch.float64 else self.input.dtype
        return choose_algorithm(self.communicator.place, wide, rows, 0, empty=empty, tuned=tuned)

    def reduce_scatter(
        self,
        left: Tensor,
        linear: Linear,
        segments: list[tuple[int, int]],
        algorithm: str = "",
    ) -> Event:
        """Compute ``left @ linear``, reduced, by ``algorithm`` or by the choice for these shapes."""
        communicator = self.communicator
        rows, columns = left.shape[0], linear.weight.shape[1]
        choice = self.choice(SCATTER, max(count for _, count in segments), columns)
        algorithm = algorithm or self.chosen(rows, columns, choice.algorithm)
        name_algorithm(algorithm)
        if algorithm == "fused":
            return algorithms.matmul_reduce_scatter_fused(
                communicator, left, linear, segments, choice.configuration
            )
        run = algorithms.matmul_reduce_scatter_unfused
        if algorithm == "pipelined":
            run = algorithms.matmul_reduce_scatter_pipelined
        return run(communicator, left, linear, segments)

    def all_reduce(self, left: Tensor, linear: Linear) -> Event:
        """Compute the reduced product on all ranks: one-shot, or this rank's rows first, then a gather."""
        communicator, output = self.communicator, linear.output
        rows, columns = left.shape[0], linear.weight.shape[1]
        choice = self.choice(ALL_REDUCE, rows, columns)
        algorithm = self.chosen(rows, columns, choice.algorithm)
        one_shot = communicator.place.nodes is None and output.nbytes <= ONE_SHOT_BYTES
        if algorithm == "fused" and one_shot:
            name_algorithm("fused")
            return algorithms.matmul_all_reduce_fused(
                communicator, left, linear, choice.configuration
            )
        segments = split_rows(rows, communicator.world_size)
        parts = [output[first : first + count] for first, count in segments]
        own_rows = parts[communicator.rank]
        own_linear = dataclasses.replace(linear, output=own_rows)
        self.reduce_scatter(left, own_linear, segments, algorithm)
        flat = [part.view(-1) for part in parts]
        return plain.gather_made(communicator, own_rows.view(-1), flat)


# -- as ops of torch -------------------------------------------------------------------------------


def check_factors(input: Tensor, weight: Tensor) -> None:
    if input.dim() < 2 or weight.dim() != 2:
        raise ValueError(
            f"input must have at least 2 dimensions and weight 2, got shapes {tuple(input.shape)} and "
            f"{tuple(weight.shape)}"
        )


def result(record: ReductionArguments, size: int) -> Output:
    """Make this rank's part of the product, or all of it."""
    input, weight = record.input, record.weight
    check_factors(input, weight)
    dtype = checks.output_dtype(record.out_dtype, input)
    if record.scatter_dim is None:  # all rows, as if the last dimension were gathered
        return gathered_rows(input, input.dim() - 1, None, weight.shape[1], dtype)
    dim = shapes.dimension("scatter_dim", record.scatter_dim, input.dim())
    return scattered_product(input, weight.shape[1], dim, record.length, size, dtype)


def start(communicator: Communicator, record: ReductionArguments) -> Started:
    with communicator.accepting(record.op):
        output = result(record, communicator.world_size)
    return start_form(FORMS[record.op], communicator, record, [output])


def _save(ctx: Any, record: ReductionArguments, output: Tensor) -> None:
    ctx.arguments, ctx.needs = without_tensors(record), requiring(record)
    ctx.save_for_backward(record.input, record.weight)


def _backward(ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
    input, weight = ctx.saved_tensors
    record, size = ctx.arguments, ctx.size
    grad = equal_part(grad, (*input.shape[:-1], weight.shape[1]), record, size)
    of_bias = grad.flatten(0, -2).sum(0) if "bias" in ctx.needs else None
    if of_bias is not None and record.scatter_dim in (-1, input.dim() - 1):
        # this rank added only its own part of the bias
        is_own = torch.arange(size, device=grad.device) == _ops.rank(of_bias, size, ctx.name)
        of_bias = (is_own.unsqueeze(1) * of_bias).flatten().narrow(0, 0, weight.shape[1])
    return {**factor_gradients(ctx, grad, input, weight), "bias": of_bias}


def own_part(record: ReductionArguments, communicator: Communicator) -> int | None:
    """Return the length of this rank's scattered part if parts are unequal, as the op takes it."""
    if record.scatter_dim is None:
        return None
    columns = record.input.shape[-1] if record.weight is None else record.weight.shape[1]
    dim = checks.index("scatter_dim", record.scatter_dim, record.input.dim())
    length = (*record.input.shape[:-1], columns)[dim]
    if not length % communicator.world_size:
        return None
    return int(split_rows(length, communicator.world_size)[communicator.rank][1])


def equal_part(part: Tensor, whole: Sequence[int], record: Any, size: int) -> Tensor:
    """Return this rank's part of a tensor of shape ``whole``, padded with zeros to the longest part."""
    if record.length is None:
        return part
    dim = record.scatter_dim % len(whole)
    return pad(part, dim, longest(whole[dim], size))


def factor_gradients(
    ctx: Any, grad: Tensor, input: Tensor, weight: Tensor
) -> dict[str, Tensor | None]:
    """Return gradients of factors that need one, from the product's gradient: all, or the equal part."""
    record, size, name = ctx.arguments, ctx.size, ctx.name
    shared, weighed = "input" in ctx.needs, "weight" in ctx.needs
    found: dict[str, Tensor | None] = {}
    if not (shared or weighed):
        return found
    grad = grad.to(input.dtype)
    if record.scatter_dim is None:
        total = wait(_ops.all_reduce(grad, "sum", size, name))
        if record.reduce_op == "avg":
            total = total / size
        if shared:
            found["input"] = product(total, weight.t(), record.format)
        if weighed:
            of_weight = product_of_rows(rows(input, 0), rows(total, 0), record.format)
            found["weight"] = of_weight.to(weight.dtype)
        return found
    if record.reduce_op == "avg":
        grad = grad / size
    dim = record.scatter_dim % input.dim()
    columns, factor, algorithm = dim == input.dim() - 1, weight.t(), record.algorithm
    length = weight.shape[1] if columns else input.shape[dim]
    if columns:
        algorithm = "auto"  # not all algorithms can gather the contracted dimension
        if record.length is not None:
            factor = pad(factor, 0, size * longest(length, size))
    whole, products = start_gathers(ctx, grad, factor, dim, algorithm)
    if shared:
        of_input, *gathered = products
        of_input = wait(of_input)
        # the padding follows all parts
        found["input"] = of_input if columns else of_input.narrow(dim, 0, length)
        whole = gathered[0] if gathered else whole
    if weighed:
        whole, left = wait(whole), input
        if not record.format:
            whole = rows(whole.narrow(dim, 0, length), dim)
        elif record.length is not None:
            left = pad(input, dim, size * longest(length, size))
        of_weight = product_of_rows(rows(left, dim), whole, record.format)
        found["weight"] = of_weight.to(weight.dtype)
    return found


def start_gathers(
    ctx: Any,
    grad: Tensor,
    factor: Tensor,
    dim: int,
    algorithm: str = "auto",
    start: Callable[..., Any] = call,
) -> tuple[Any, Any]:
    """Start to gather the product's gradient alone, and the input's gradient, maybe with the former.

    ``ctx.needs`` decides about both. With a format, they need different blocks. Linear layers also call it.
    """
    format, group, alone = ctx.arguments.format, (ctx.size, ctx.name), None
    shared, weighed = "input" in ctx.needs, "weight" in ctx.needs
    if weighed and format:
        alone = start("all_gather", packed_parts(rows(grad, dim), 1, format), 0, *group)
    elif weighed and not shared:
        alone = start("all_gather", grad, dim, *group)
    if not shared:
        return alone, None
    options = (dim, weighed and not format, algorithm, None, *group)
    return alone, call_in(start, format, "all_gather_matmul", grad, [factor], [], *options)


def _view(record: ReductionArguments, size: int) -> Tensor:
    return result(record, size).view


def reference(ranks: Sequence[ReductionArguments], size: int) -> list[list[Tensor]]:
    first, weights = ranks[0], [each.weight for each in ranks]
    op = first.op
    products = [result(each, size).view for each in ranks]
    checks.algorithm_and_dtype(first.input, first)
    by_rank.alike(op, "input", by_rank.inputs(ranks), but=-1)
    by_rank.alike(op, "weight", weights, but=0)
    checks.same_dtype("weight", weights[0].dtype, "input", first.input.dtype)
    checks.one_of("reduce_op", first.reduce_op, checks.REDUCE_OPS)
    checks.equal_on_all(op, "whether there is a bias", [each.bias is not None for each in ranks])
    total = by_rank.reduce_all(op, partial_products(ranks), first.reduce_op)
    for rank, (output, each) in enumerate(zip(products, ranks, strict=True)):
        bias = checked_bias(each.bias, total.shape[-1], each.input)
        whole = total if bias is None else total + bias
        if each.scatter_dim is not None:
            whole = split(whole, size, each.scatter_dim)[rank]
        output.copy_(whole)  # rounded once
    return [[output] for output in products]


NORM = ("residual", "norm_weight", "norm_bias", "kind", "eps", "quantize", "gather_normed")
SCATTERED = ("scatter_dim", "length", "gather_normed")
_GRADIENT = OpGradient(_save, _backward)
OPS = (
    Op(
        SCATTER,
        ReductionArguments,
        start,
        _view,
        _GRADIENT,
        {"input": ("input",), "weight": ("weight",)},
        reference=reference,
        without=(*NORM, "format"),
        algorithms=fused_by(f"{SCATTER}_kernel"),
    ),
    Op(
        ALL_REDUCE,
        ReductionArguments,
        start,
        _view,
        _GRADIENT,
        {"input or weight": ("input", "weight")},
        reference=reference,
        without=(*NORM, *SCATTERED, "format"),
        algorithms=fused_by(f"{ALL_REDUCE}_kernel"),
    ),
)
