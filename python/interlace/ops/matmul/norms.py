"""Reductions with a norm of the rows: after a matmul, and for existing rows.

The ops of torch return a list: the normed rows, the sum with the residual, and, quantised by row, the
scales of the normed rows. In a block-scaled format the normed rows are packed bytes.

Let h be the sum with the residual and y its norm. The gradient of h is its own gradient plus y's gradient
through the norm. For this only h is kept. The residual gets this gradient; the input and the weight get it
reduced or gathered as in the op without a norm. A weight of the norm gets the gradient from the rows that a
rank norms. If rows are scattered, replicas of a weight sum their gradients, as sequence-parallel layers do.
Gathered rows return their gradients by a reduce-scatter. fp8 has no gradient.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import torch

from interlace.arguments import checks
from interlace.arguments.checks import checked_norm, checked_residual
from interlace.arguments.words import NormAlgorithm
from interlace.kernels.tiling import split_rows
from interlace.ops.collectives import launch, records as by_rank
from interlace.ops.collectives.stream_engine import check_nodes
from interlace.ops.matmul import launch_norms as algorithms, launch_reduce, reduce
from interlace.ops.matmul.formats import FORMATS, Scaled, packed_rows, unpacked_rows
from interlace.ops.matmul.launch_norms import WholeRows
from interlace.ops.matmul.operands import Linear, dense_output, partial_products, rows_of
from interlace.ops.matmul.reduce import (
    ALL_REDUCE,
    ALL_REDUCE_NORM,
    ONE_SHOT_BYTES,
    SCATTER,
    SCATTER_NORM,
    SCATTERED,
    TENSORS,
    ReductionArguments,
    check_factors,
    equal_part,
    factor_gradients,
)
from interlace.ops.matmul.reference import split
from interlace.ops.op import shapes
from interlace.ops.op.op import (
    EXAMPLES,
    Example,
    Op,
    OpGradient,
    OpVariant,
    Output,
    Started,
    fused_by,
    longest,
    own_rows,
    pad,
    requiring,
    start_form,
    wait,
    without_tensors,
)
from interlace.ops.op.recording import Ops
from interlace.runtime.core.call import PreparedCall
from interlace.runtime.core.communicator import Communicator, record_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.numerics.norms import (
    BY_ROW,
    QUANTIZE,
    QUANTIZED,
    NormTail,
    RowNorm,
    backward,
)
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.tuning import FUSED_DTYPES, LARGEST_LOW_LATENCY_BYTES

Tensor = torch.Tensor
_ops: Any = Ops()
Buffers = Sequence[Tensor] | None
"""Matrices for the results' rows: the normed rows, the sums, and, quantised, the scales."""

GATHERED_ROWS = OpVariant("gather_normed", {"gather_normed": True})
"""The case of these ops in which all ranks get the normed rows."""
NO_FP8 = (
    'algorithm="{}" with quantize needs compute capability 8.9 or more; use "unfused" or "auto"'
)
SMALLEST_FP8 = 89  # the lowest compute capability with which kernels can make fp8


def take_norm(record: ReductionArguments, norm: Any, quantize: Any) -> None:
    """Put a call's norm into the record of its arguments. Raise for a norm that does not fit."""
    if norm is None and record.weight is not None:
        if record.residual is not None or quantize is not None or record.gather_normed:
            raise ValueError("residual, quantize and gather_normed need a norm, but norm is None")
        return
    if not isinstance(norm, RowNorm):
        raise TypeError(
            f"norm must be an interlace.RMSNorm or interlace.LayerNorm, got {type(norm).__name__}"
        )
    eps = norm.eps
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps of norm must be a number, got {eps!r}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps of norm must be 0 or more and finite, got {eps}")
    words = (*QUANTIZE, *FORMATS)
    if quantize is not None and quantize not in words:
        raise ValueError(f"quantize must be None or one of {', '.join(words)}, got {quantize!r}")
    checks.flag("gather_normed", record.gather_normed)
    record.kind, record.eps, record.quantize = norm.kind, float(eps), quantize or ""
    record.norm_weight, record.norm_bias = norm.weight, norm.bias


def norm_of(record: ReductionArguments) -> RowNorm:
    return RowNorm(record.kind, record.eps, record.norm_weight, record.norm_bias)


class CheckedNorm:
    """The checked norm of a call and its residual.

    If ``dim`` is not None, it is the dimension of ``input`` that is scattered in ``parts``, (first, count)
    by rank. ``own`` are the leading lengths of this rank's part. Rows are ``columns`` numbers of ``dtype``.
    """

    def __init__(
        self,
        communicator: Communicator,
        record: ReductionArguments,
        input: Tensor,
        dim: int | None,
        parts: Sequence[tuple[int, int]],
        columns: int,
        dtype: torch.dtype,
    ) -> None:
        *self._lengths, _ = input.shape
        self.own, self.gathers = list(self._lengths), record.gather_normed
        if dim == len(self.own):
            raise ValueError(f"scatter_dim {dim} is the last dimension, but norm needs whole rows")
        if dim is not None:
            self.own[dim] = parts[communicator.rank][1]
        elif self.gathers:
            raise ValueError("gather_normed needs scattered rows, but here all ranks have all rows")
        self.quantize, self._input, self._dim = record.quantize or None, input, dim or 0
        self._columns, self._dtype = columns, dtype
        self.format = FORMATS.get(record.quantize)
        if self.format is not None:
            self.format.check_shape("the normed tensor", (*self.own, columns))
        self.norm = checked_norm(communicator, norm_of(record), columns, dtype)
        shape = (*self.own, columns)
        self.residual = checked_residual(communicator, record.residual, shape, dtype)

    def terms(self) -> tuple[Any, ...]:
        """Return the norm's properties on which ranks must agree."""
        norm = self.norm
        return (
            ("norm", norm.kind),
            ("eps of norm", norm.eps),
            ("quantize", self.quantize),
            ("gather_normed", self.gathers),
            ("whether there is a residual", self.residual is not None),
            ("dtype of weight of norm", None if norm.weight is None else norm.weight.dtype),
            ("dtype of bias of norm", None if norm.bias is None else norm.bias.dtype),
        )

    def rows(self, buffers: Buffers, first: int = 0) -> "NormedRows":
        """Make memory for the results, or use ``buffers``. ``first`` is the index of this rank's first row.

        If all ranks' normed rows are gathered, the sum and the residual have only this rank's rows.
        """
        residual = None if self.residual is None else matrix_of(self.residual, self._dim)
        result, matrices = None, buffers
        if matrices is None:
            rows = (self._lengths if self.gathers else self.own), self.own, self._dim
            outputs = _outputs(self._input, rows, self._columns, self._dtype, self.quantize)
            matrices = [output.matrix for output in outputs]
            result = pair_results([output.view for output in outputs], self.quantize)
        normed, total, *scales = matrices
        scale = scales[0] if scales else None
        if not self.gathers:
            tail = NormTail(self.norm, residual, normed, scale, self.format)
            return NormedRows(total, tail, None, result)
        part = slice(first, first + total.shape[0])
        scale_part = None if scale is None else scale[part]
        tail = NormTail(self.norm, residual, normed[part], scale_part, self.format)
        return NormedRows(total, tail, WholeRows(normed, scale, None), result)


def pair_results(results: Sequence[Tensor], quantize: str | None) -> Any:
    """Return a call's result from the op's results: ``(normed, sum)``, or ``((fp8, scales), sum)``.

    In a block-scaled format ``normed`` are packed rows, which become a :class:`Scaled`.
    """
    normed, total, *scales = results
    if quantize in FORMATS:
        return unpacked_rows(normed, FORMATS[quantize], total.shape[-1]), total
    return ((normed, *scales) if scales else normed), total


def list_results(results: Any) -> list[Tensor]:
    """Return the op's results from the result of :func:`pair_results`."""
    normed, total = results
    if isinstance(normed, Scaled):
        return [packed_rows(normed), total]
    return [normed[0], total, normed[1]] if isinstance(normed, tuple) else [normed, total]


def matrix_of(tensor: Tensor, dim: int) -> Tensor:
    """Return the rows of a tensor, or the tensor as one row, as a dense matrix with ``dim`` first."""
    return (rows_of(tensor, dim) if tensor.dim() > 1 else tensor[None]).contiguous()


class NormedRows(NamedTuple):
    """Results as matrices. ``whole``: all ranks' rows; the other matrices are this rank's part of them.

    ``result``: the result of an eager call, or None if the caller has made the matrices.
    """

    sum: Tensor
    tail: NormTail
    whole: WholeRows | None
    result: Any


def kernel_makes_fp8(communicator: Communicator) -> bool:
    """Return whether the processors on which kernels run, or for which they are interpreted, have fp8."""
    place = communicator.place
    capability = configuration.capability_of(place)
    if (
        capability is None
    ):  # interpreted, or run as PTX: 9.0 has descriptors and fp8, 8.0 has neither
        return not place.compiled or place.descriptors
    return capability >= SMALLEST_FP8


def in_kernel(communicator: Communicator, quantize: str | None) -> bool:
    """Return whether kernels can quantise normed rows so. Block formats need only integers."""
    return quantize not in QUANTIZE or kernel_makes_fp8(communicator)


class NormedReduce(reduce.CheckedReduce):
    """The checked arguments of a matmul with a norm."""

    def __init__(self, communicator: Communicator, record: ReductionArguments) -> None:
        super().__init__(communicator, record)
        parts = [] if self.dim is None else self._parts()
        about = self.input, self.dim, parts, self.weight.shape[1], self.dtype
        self.normed = CheckedNorm(communicator, record, *about)
        self.more_terms = self.normed.terms()

    def scattered_normed(self, buffers: Buffers) -> Outcome:
        self.agree()
        scattering = self.scattering()
        rows = self.normed.rows(buffers, scattering.segments[self.communicator.rank][0])
        linear = self._linear(scattering.right, rows)
        event = self.reduce_scatter_normed(scattering.left, linear, scattering.segments, rows.whole)
        return Outcome(rows.result, event)

    def summed_normed(self, buffers: Buffers) -> Outcome:
        self.agree()
        rows = self.normed.rows(buffers)
        event = self.all_reduce_normed(rows_of(self.input, 0), self._linear(self.weight, rows))
        return Outcome(rows.result, event)

    def _linear(self, weight: Tensor, rows: NormedRows) -> Linear:
        options = {"average": self.average, "tail": rows.tail, "format": self.format}
        return Linear(weight, self.bias, rows.sum, "n", self.activation, **options)  # type: ignore[arg-type]

    def chosen(self, rows: int, columns: int, tuned: str) -> str:
        algorithm = super().chosen(rows, columns, tuned)
        if algorithm != "fused" or self.communicator.place.nodes is not None:
            return algorithm  # between nodes torch norms the rows
        if in_kernel(self.communicator, self.normed.quantize):
            return algorithm
        if self.algorithm == "fused":
            raise ValueError(NO_FP8.format("fused"))
        return "unfused"

    def _by_words(self, output: Tensor) -> bool:
        """Return whether "auto" may use a low-latency kernel, and its words suffice for the product."""
        place = self.communicator.place
        if self.algorithm != "auto" or place.direct_access or not place.all_mapped:
            return False
        simple = output.dtype in FUSED_DTYPES and output.numel() > 0 and not self.activation
        possible = in_kernel(self.communicator, self.normed.quantize)
        return simple and possible and not launch.why_no_rows(output)

    def reduce_scatter_normed(
        self,
        left: Tensor,
        linear: Linear,
        segments: list[tuple[int, int]],
        whole: WholeRows | None,
        algorithm: str = "",
    ) -> Event:
        """Compute ``left @ linear``, reduced and normed; with ``whole`` all ranks get its rows."""
        rows, columns = left.shape[0], linear.weight.shape[1]
        choice = self.choice(f"{SCATTER}_norm", max(count for _, count in segments), columns)
        algorithm = algorithm or self.chosen(rows, columns, choice.algorithm)
        if algorithm == "fused":
            name_algorithm(algorithm)
            return launch_reduce.matmul_reduce_scatter_fused(
                self.communicator, left, linear, segments, choice.configuration, whole
            )
        event = self.reduce_scatter(left, linear, segments, algorithm)
        if whole is None:
            return event
        return algorithms.gather(self.communicator, whole, segments, event)

    def all_reduce_normed(self, left: Tensor, linear: Linear) -> Event:
        """Run one-shot, or this rank's rows first, then a gather. Few rows use words that carry flags."""
        communicator, output, tail = self.communicator, linear.output, linear.tail
        assert tail is not None
        rows, columns = left.shape[0], linear.weight.shape[1]
        choice = self.choice(f"{ALL_REDUCE}_norm", rows, columns)
        algorithm = self.chosen(rows, columns, choice.algorithm)
        if algorithm == "unfused" and self._by_words(output):
            name_algorithm("low_latency")
            return algorithms.product_in_words(communicator, left, linear)
        one_shot = communicator.place.nodes is None and output.nbytes <= ONE_SHOT_BYTES
        if algorithm == "fused" and one_shot:
            name_algorithm("fused")
            return launch_reduce.matmul_all_reduce_fused(
                communicator, left, linear, choice.configuration
            )
        segments = split_rows(rows, communicator.world_size)
        first, count = segments[communicator.rank]
        own_rows = output[first : first + count]
        part = dataclasses.replace(linear, output=own_rows, tail=tail.part(first, count))
        whole = WholeRows(tail.normed, tail.scale, output)
        return self.reduce_scatter_normed(left, part, segments, whole, algorithm)


# -- existing rows ---------------------------------------------------------------------------------


class _CheckedRows:
    """The checked arguments of all_reduce_norm and reduce_scatter_norm."""

    def __init__(self, communicator: Communicator, record: ReductionArguments) -> None:
        self.communicator, self.op = communicator, record.op
        self.input = checks.tensor("input", record.input, communicator)
        if self.input.dim() < 1:
            raise ValueError("input must have at least 1 dimension, got a 0-dim tensor")
        checks.float_dtype("input", self.input.dtype)
        self.columns = self.input.shape[-1]
        self.reduction = checks.one_of("reduce_op", record.reduce_op, checks.REDUCE_OPS)
        dim, self.dim = None, 0
        if record.scatter_dim is not None:
            dim = self.dim = checks.index("scatter_dim", record.scatter_dim, self.input.dim())
            checks.part("length", record.length, self._parts(), communicator.rank)
        self.bias = checks.bias_of("bias", record.bias, (self.columns,), self.input, communicator)
        about = self.input, dim, self._parts(), self.columns, self.input.dtype
        self.normed, self.free = CheckedNorm(communicator, record, *about), False
        self.algorithm = self._algorithm(record.algorithm)

    def _algorithm(self, record: Any) -> str:
        """Return the algorithm, chosen if it is "auto"; between nodes it is always "unfused"."""
        algorithm = checks.one_of("algorithm", record, get_args(NormAlgorithm))
        place, dtype = self.communicator.place, self.input.dtype
        if algorithm == "low_latency":
            why_not = launch.why_no_rows(self.input, scattered=self.op == SCATTER_NORM)
            if why_not:
                raise ValueError(f'algorithm="low_latency" cannot do this: {why_not}')
            check_nodes(algorithm, self.communicator)
        checks.fused_dtype(algorithm, "input", dtype)
        possible = in_kernel(self.communicator, self.normed.quantize)
        if algorithm in ("fused", "low_latency") and not possible:
            raise ValueError(NO_FP8.format(algorithm))
        if place.nodes is not None:
            return "unfused"
        if algorithm != "auto":
            return algorithm
        if dtype not in FUSED_DTYPES or not possible or not place.mapped:
            return "unfused"
        self.free = True
        if place.direct_access:
            return "pipelined"
        small = self.input.nbytes <= LARGEST_LOW_LATENCY_BYTES
        return "low_latency" if small and self._in_words() else "fused"

    def _in_words(self) -> bool:
        return not launch.why_no_rows(self.input, scattered=self.op == SCATTER_NORM)

    def _measured(self) -> tuple[str, tuning.Measured]:
        """Return the algorithm and its measured values, the same on all ranks, which have agreed."""
        op = GATHERED_ROWS.name if self.normed.gathers else self.op
        rows, size = self.input.numel() // max(1, self.columns), self.communicator.world_size
        problem = tuning.Problem(op, self.input.dtype, rows, self.columns, 1, size)
        algorithm = self.algorithm
        if self.free:
            found = tuning.measured_choice(self.communicator, problem).algorithm
            if found and (found != "low_latency" or self._in_words()):
                algorithm = found
        return algorithm, tuning.measured_choice(self.communicator, problem, algorithm)

    def _parts(self) -> list[tuple[int, int]]:
        parts: list[tuple[int, int]] = split_rows(
            self.input.shape[self.dim], self.communicator.world_size
        )
        return parts

    def start(self, buffers: Buffers) -> Outcome:
        terms = (
            ("dtype of input", self.input.dtype),
            ("shape of input", tuple(self.input.shape)),
            ("scatter_dim", self.dim if self.op == SCATTER_NORM else None),
            ("reduce_op", self.reduction),
            ("algorithm", self.algorithm),
            ("whether there is a bias", self.bias is not None),
            *self.normed.terms(),
        )
        communicator, columns = self.communicator, self.columns
        communicator.parts(communicator.call_of(self.op, terms, None))
        left = matrix_of(self.input, self.dim)
        segments, first = None, 0
        if self.op == SCATTER_NORM:
            off_dim = [n for i, n in enumerate(self.input.shape[:-1]) if i != self.dim]
            per_index = math.prod(off_dim)
            segments = [(first * per_index, count * per_index) for first, count in self._parts()]
            first = segments[communicator.rank][0]
        rows = self.normed.rows(buffers, first)
        nothing = self.input.new_empty(0, columns)
        average = self.reduction == "avg"
        linear = Linear(nothing, self.bias, rows.sum, average=average, tail=rows.tail)
        algorithm, measured = self._measured()
        name_algorithm(algorithm)
        event = algorithms.RowReduction(
            communicator, self.op, left, linear, segments, rows.whole, measured
        ).run(algorithm)
        return Outcome(rows.result, event)


def prepare(
    communicator: Communicator, record: ReductionArguments, buffers: Buffers
) -> PreparedCall:
    """Check any reduction: with a norm, or of a product without a norm."""
    start: Callable[[Buffers], Outcome]
    if record.weight is None:
        start = _CheckedRows(communicator, record).start
    elif not record.kind:
        return reduce.prepare(communicator, record, buffers)
    else:
        request = NormedReduce(communicator, record)
        start = request.summed_normed if request.dim is None else request.scattered_normed
    return functools.partial(start, buffers), (), None


EAGER = (SCATTER, ALL_REDUCE, ALL_REDUCE_NORM, SCATTER_NORM)
FORMS = {op: record_form(op, ReductionArguments, TENSORS, prepare, format="") for op in EAGER}

# -- as ops of torch -------------------------------------------------------------------------------


def results(record: ReductionArguments, size: Any) -> list[Output]:
    """Make the normed rows, the sum with the residual, and, quantised by row, the scales."""
    input = record.input
    if record.weight is not None:
        check_factors(input, record.weight)
    elif not input.dim():
        raise ValueError("input must have at least 1 dimension, got a 0-dim tensor")
    columns = input.shape[-1] if record.weight is None else record.weight.shape[1]
    lengths = list(input.shape[:-1])
    dtype = checks.output_dtype(record.out_dtype, input)
    dim, own_lengths = 0, lengths
    if record.scatter_dim is not None:
        dim = shapes.dimension("scatter_dim", record.scatter_dim, input.dim())
        if dim == len(lengths):
            raise ValueError(f"scatter_dim {dim} is the last dimension, but norm needs whole rows")
        part = shapes.own_length(lengths[dim], size, f"dimension {dim} of input", record.length)
        own_lengths = [part if i == dim else n for i, n in enumerate(lengths)]
    normed = lengths if record.gather_normed else own_lengths
    return _outputs(input, (normed, own_lengths, dim), columns, dtype, record.quantize)


def _outputs(
    like: Tensor,
    rows: tuple[Sequence[Any], Sequence[Any], int],
    columns: Any,
    dtype: torch.dtype,
    quantize: str | None,
) -> list[Output]:
    """Make the results. ``rows``: leading lengths of the normed rows and of own rows, and the first dim."""
    normed, own_lengths, dim = rows

    def output(lengths: Sequence[Any], columns: Any, dtype: torch.dtype) -> Output:
        """Make ``[*lengths, columns]``, in memory with ``dim`` first."""
        matrix = like.new_empty([math.prod(lengths), columns], dtype=dtype)
        if not lengths:
            return Output(matrix, matrix.view(columns))
        off_dim = [n for i, n in enumerate(lengths) if i != dim]
        return dense_output(matrix, matrix.view(lengths[dim], *off_dim, columns).movedim(0, dim))

    if quantize in FORMATS:
        kind = FORMATS[quantize]
        kind.check_shape("the normed tensor", (*normed, columns))
        return [
            output(normed, kind.row_bytes(columns), torch.uint8),
            output(own_lengths, columns, dtype),
        ]
    outputs = [
        output(normed, columns, QUANTIZED if quantize else dtype),
        output(own_lengths, columns, dtype),
    ]
    return [*outputs, output(normed, 1, torch.float32)] if quantize == BY_ROW else outputs


def start(communicator: Communicator, record: ReductionArguments) -> Started:
    with communicator.accepting(record.op):
        outputs = results(record, communicator.world_size)
    return start_form(FORMS[record.op], communicator, record, outputs)


OTHERS = ("bias", "residual", "norm_weight", "norm_bias")


def _save(ctx: Any, record: ReductionArguments, output: Sequence[Tensor]) -> None:
    ctx.arguments, ctx.needs = without_tensors(record), requiring(record)
    vectors = {name: getattr(record, name) for name in OTHERS}
    ctx.dtypes = {n: t.dtype for n, t in vectors.items() if n in ctx.needs}
    ctx.called = full_name(record)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        output[1], record.input, record.weight, record.norm_weight, record.norm_bias
    )


def full_name(record: ReductionArguments) -> str:
    """Return the op of torch for these arguments, which have a norm."""
    return record.op if record.weight is None else f"{record.op}_norm"


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    total, input, weight, norm_weight, norm_bias = ctx.saved_tensors
    record, total = ctx.arguments, wait(total)
    of_normed, of_sum = grads[0], grads[1]
    found: dict[str, Tensor | None] = {}
    if of_normed is not None:
        if record.quantize:
            raise RuntimeError(
                f"interlace.{ctx.called} with quantize={record.quantize!r} has no gradient"
            )
        if record.gather_normed:
            of_normed = _own_rows(ctx, of_normed)
        norm = RowNorm(record.kind, record.eps, norm_weight, norm_bias)
        of_rows, found["norm_weight"], found["norm_bias"] = backward(total, norm, of_normed)
        of_sum = of_rows if of_sum is None else of_rows + of_sum
    if of_sum is None:
        return {}
    of_sum = found["residual"] = of_sum.to(total.dtype)
    columns = input.shape[-1] if weight is None else weight.shape[1]
    part = equal_part(of_sum, (*input.shape[:-1], columns), record, ctx.size)
    if weight is None:
        of_factors = {"input": _of_rows(ctx, input, part) if "input" in ctx.needs else None}
    else:
        of_factors = factor_gradients(ctx, part, input, weight)
    found["bias"] = of_sum.flatten(0, -2).sum(0) if of_sum.dim() > 1 else of_sum
    of_others = {
        name: each.to(ctx.dtypes[name])
        for name, each in found.items()
        if each is not None and name in ctx.dtypes
    }
    return {**of_factors, **of_others}


def _own_rows(ctx: Any, grad: Tensor) -> Tensor:
    """Return the sum of all ranks' gradients for this rank's rows."""
    dim, length = ctx.arguments.scatter_dim % grad.dim(), ctx.arguments.length
    if length is not None:
        grad = pad(grad, dim, ctx.size * longest(grad.shape[dim], ctx.size))
    part = wait(_ops.reduce_scatter(grad, "sum", dim, ctx.size, ctx.name))
    return part if length is None else part.narrow(dim, 0, length)


def _of_rows(ctx: Any, input: Tensor, part: Tensor) -> Tensor:
    """Return the gradient of rows that were reduced: summed or gathered."""
    if ctx.arguments.scatter_dim is None:
        whole = wait(_ops.all_reduce(part, "sum", ctx.size, ctx.name))
    else:
        dim = ctx.arguments.scatter_dim % input.dim()
        gathered = wait(_ops.all_gather(part, dim, ctx.size, ctx.name))
        whole = gathered.narrow(dim, 0, input.shape[dim])
    return whole / ctx.size if ctx.arguments.reduce_op == "avg" else whole


def reference(ranks: Sequence[ReductionArguments], size: int) -> list[list[Tensor]]:
    """Compute the op: sums in fp32, in rank order, rounded once with the bias and the residual."""
    first, whole = ranks[0], by_rank.inputs(ranks)
    op = full_name(first)
    by_rank.alike(op, "input", whole, but=None if first.weight is None else -1)
    residuals = [each.residual is None for each in ranks]
    checks.equal_on_all(op, "whether there is a residual", residuals)
    if first.weight is None:
        partials = [each if each.dtype is torch.float64 else each.float() for each in whole]
    else:
        partials = partial_products(ranks)
    total = by_rank.reduce_all("all_reduce", partials, first.reduce_op)
    dim, results_of = first.scatter_dim, []
    for rank, record in enumerate(ranks):
        outputs = [result.view for result in results(record, size)]
        part = total if dim is None else split(total, size, dim)[rank]
        for each in (record.bias, record.residual):
            part = part if each is None else part + each
        outputs[1].copy_(part)
        results_of.append(outputs)
    for rank, (record, outputs) in enumerate(zip(ranks, results_of, strict=True)):
        norm = norm_of(record)
        for reader in results_of if record.gather_normed else [outputs]:
            places = [reader[0], *reader[2:]]
            if record.gather_normed:
                places = [split(place, size, dim or 0)[rank] for place in places]
            normed, scale = (*places, None)[:2]
            kind = FORMATS.get(record.quantize)
            NormTail(norm, None, normed, scale, kind).finish(outputs[1])  # type: ignore[arg-type]
    return results_of


# with gather_normed, gradients of the other arguments are scattered first
_SCATTERED = {"input": ("input",), "bias, residual or norm": OTHERS}
_PRODUCT = {"input": ("input",), "weight": ("weight",), **_SCATTERED}
_ROWS = ("weight", "out_dtype")
_EXAMPLES: dict[str, Example] = {
    "kind": lambda setting: "rms" if setting.call % 2 else "layer",
    "norm_bias": lambda setting: None if setting.call % 2 else EXAMPLES["norm_weight"](setting),
    # after a gather, all ranks have read their rows, with or without a credit
    "gather_normed": lambda setting: setting.call != 1,
}
OPS = tuple(
    Op(
        name,
        ReductionArguments,
        start,
        lambda given, size: [result.view for result in results(given, size)],
        OpGradient(_save, _backward),
        communicates,
        several=True,
        reference=reference,
        variants=tuple(variants),
        without=(*without, "format"),
        algorithms=algorithms,
        examples=_EXAMPLES if "scatter_dim" in without else {**_EXAMPLES, "residual": own_rows},
    )
    for name, without, communicates, algorithms, *variants in (
        (f"{SCATTER}_norm", (), _PRODUCT, fused_by(f"{SCATTER}_norm_kernel")),
        (
            f"{ALL_REDUCE}_norm",
            SCATTERED,
            {"input or weight": ("input", "weight")},
            fused_by(f"{ALL_REDUCE}_norm_kernel"),
        ),
        (
            ALL_REDUCE_NORM,
            (*_ROWS, *SCATTERED),
            {"input": ("input",)},
            {**fused_by("reduce_norm_kernel"), "low_latency": ("low_latency_norm_kernel",)},
        ),
        (SCATTER_NORM, _ROWS, _SCATTERED, fused_by("reduce_norm_kernel"), GATHERED_ROWS),
    )
)
