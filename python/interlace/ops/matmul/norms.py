"""Reductions whose rows are normed: after a matmul, and of rows that are there already.

As ``reduce.py``, whose checks and choices the matmuls have. Results are a pair, what is normed and the sum
with the residual; quantised, what is normed is a pair itself, fp8 and scales.

As ops they all return a list: the normed rows, the sum with the residual, and, quantised, the scales of the
normed rows. With h the sum with the residual and y its norm, the gradient of h is that of y through the
norm, for which h is kept and nothing else, and its own. It is the residual's; reduced or gathered as by the
op without a norm it gives those of the input and the weight. A weight of the norm gets what comes of the
rows that a rank norms: of the own rows where they are scattered, so replicas of a weight sum their
gradients, as sequence-parallel layers do; of all rows, on every rank, where all ranks have them. Rows that
were gathered give their gradients back by a reduce-scatter. fp8 has no gradient.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, get_args

import torch

from interlace.arguments import checks
from interlace.arguments import norms as arguments
from interlace.arguments.norms import NormOptions
from interlace.arguments.words import NormAlgorithm
from interlace.kernels.tiling import split_rows
from interlace.ops.collectives import low_latency
from interlace.ops.collectives import reference as by_rank
from interlace.ops.collectives.chosen_algorithm import check_nodes
from interlace.ops.matmul import launch_norms as algorithms
from interlace.ops.matmul import reduce
from interlace.ops.matmul.launch_norms import WholeRows
from interlace.ops.matmul.operands import Linear, partial_products, rows_of, unrows
from interlace.ops.matmul.reduce import (
    ALL_REDUCE,
    ONE_SHOT_BYTES,
    SCATTER,
    MatmulReduceOptions,
    check_factors,
    equal_part,
    factor_gradients,
)
from interlace.ops.op import shapes
from interlace.ops.op.gradients import longest, padded, wait
from interlace.ops.op.op import Op, OpGradient, OpVariant
from interlace.ops.op.pending import Started
from interlace.ops.op.registry import Ops
from interlace.runtime.core.call import PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.numerics.norms import QUANTIZED, NormTail, RowNorm, backward
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.auto import FUSED_DTYPES, LARGEST_LOW_LATENCY_BYTES

Tensor = torch.Tensor
_ops: Any = Ops()
Buffers = Sequence[Tensor] | None
"""Matrices for the results' rows: the normed, the sums, and, quantised, the scales."""

ALL_REDUCE_NORM, SCATTER_NORM = "all_reduce_norm", "reduce_scatter_norm"
GATHERED_ROWS = OpVariant("gather_normed", {"gather_normed": True})
"""The latter where all ranks get the normed rows."""
NO_FP8 = (
    'algorithm="{}" with quantize needs compute capability 8.9 or more; use "unfused" or "auto"'
)
SMALLEST_FP8 = 89  # the compute capability from which on kernels can make fp8


@dataclasses.dataclass
class MatmulReduceScatterNormArguments:
    """The arguments of the op; ``length``: of the own part, None for an equal one."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    reduce_op: str
    scatter_dim: int
    length: torch.SymInt | None
    algorithm: str
    out_dtype: torch.dtype | None
    kind: str
    eps: float
    quantize: str
    gather_normed: bool
    op: ClassVar[str] = "matmul_reduce_scatter_norm"


@dataclasses.dataclass
class MatmulAllReduceNormArguments:
    """The arguments of the op; nothing is scattered."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    reduce_op: str
    algorithm: str
    out_dtype: torch.dtype | None
    kind: str
    eps: float
    quantize: str
    scatter_dim: ClassVar[None] = None
    length: ClassVar[None] = None
    gather_normed: ClassVar[bool] = False
    op: ClassVar[str] = "matmul_all_reduce_norm"


@dataclasses.dataclass
class AllReduceNormArguments:
    """The arguments of the op; nothing is multiplied or scattered, and results are of the input's dtype."""

    input: Tensor
    bias: Tensor | None
    residual: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    reduce_op: str
    algorithm: str
    kind: str
    eps: float
    quantize: str
    weight: ClassVar[None] = None
    scatter_dim: ClassVar[None] = None
    length: ClassVar[None] = None
    out_dtype: ClassVar[None] = None
    gather_normed: ClassVar[bool] = False
    op: ClassVar[str] = ALL_REDUCE_NORM


@dataclasses.dataclass
class ReduceScatterNormArguments:
    """The arguments of the op; nothing is multiplied, and results are of the input's dtype."""

    input: Tensor
    bias: Tensor | None
    residual: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    reduce_op: str
    scatter_dim: int
    length: torch.SymInt | None
    algorithm: str
    kind: str
    eps: float
    quantize: str
    gather_normed: bool
    weight: ClassVar[None] = None
    out_dtype: ClassVar[None] = None
    op: ClassVar[str] = SCATTER_NORM


NormArguments = (
    MatmulReduceScatterNormArguments
    | MatmulAllReduceNormArguments
    | AllReduceNormArguments
    | ReduceScatterNormArguments
)


class NormedRows(NamedTuple):
    """Results as matrices. ``whole``: all ranks' rows, of which the others are this rank's."""

    sum: Tensor
    tail: NormTail
    whole: WholeRows | None

    def result(self, lengths: Sequence[int], own: Sequence[int], dim: int) -> Any:
        """What a call returns; leading ``lengths`` of the normed, and ``own`` of the sum, dim first."""
        normed, scale = self.tail.normed, self.tail.scale
        if self.whole is not None:
            normed, scale = self.whole.normed, self.whole.scale
        made: Any = unrows(normed, lengths, dim)
        if scale is not None:
            made = made, unrows(scale, lengths, dim)
        return made, unrows(self.sum, own, dim)


def normed_rows(
    like: Tensor,
    norm: RowNorm,
    residual: Tensor | None,
    quantize: str | None,
    dtype: torch.dtype,
    buffers: Buffers,
    extents: tuple[int, int],
    own: tuple[int, int] | None = None,
) -> NormedRows:
    """Memory for the results: ``extents`` are rows and columns of the normed.

    ``own``: of these the first own row, and how many; the sum and the residual have own rows only.
    """
    rows, columns = extents
    count = rows if own is None else own[1]
    if buffers is None:
        made = QUANTIZED if quantize else dtype
        buffers = [
            like.new_empty(rows, columns, dtype=made),
            like.new_empty(count, columns, dtype=dtype),
        ]
        if quantize == arguments.BY_ROW:
            buffers.append(like.new_empty(rows, 1, dtype=torch.float32))
    normed, total, *scales = buffers
    scale = scales[0] if scales else None
    if own is None:
        return NormedRows(total, NormTail(norm, residual, normed, scale), None)
    part = slice(own[0], own[0] + count)
    tail = NormTail(norm, residual, normed[part], None if scale is None else scale[part])
    return NormedRows(total, tail, WholeRows(normed, scale, None))


def kernel_makes_fp8(communicator: Communicator) -> bool:
    """Whether the processors that kernels run on, or are interpreted for, have fp8."""
    place = communicator.place
    capability = configuration.capability_of(place)
    if capability is None:  # interpreted, or run as PTX of 9.0, which has descriptors, or of 8.0
        return not place.compiled or place.descriptors
    return capability >= SMALLEST_FP8


def prepared(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    buffers: Buffers,
    options: MatmulReduceOptions,
    norm: NormOptions,
) -> PreparedCall:
    """Either op of ``reduce.py`` with a norm, checked."""
    request = NormedReduce(
        communicator, (input, weight, bias), (residual, norm_weight, norm_bias), options, norm
    )
    start = request.summed_normed if options.op == ALL_REDUCE else request.scattered_normed
    return functools.partial(start, buffers), (), None


FORMS = {op: internal_form(op, prepared, fills=False) for op in (SCATTER, ALL_REDUCE)}


class NormedReduce(reduce.CheckedReduce):
    """The checked arguments of a matmul with a norm."""

    def __init__(
        self,
        communicator: Communicator,
        product: tuple[Any, Any, Any],
        normed: arguments.NormTensors,
        options: MatmulReduceOptions,
        norm: NormOptions,
    ) -> None:
        super().__init__(communicator, *product, options)
        self.options = norm
        columns = self.weight.shape[1]
        self.norm = arguments.checked(communicator, *normed[1:], columns, self.dtype, norm)
        *lengths, _ = self.input.shape
        if self.dim is not None:
            if self.dim == len(lengths):
                raise ValueError(
                    f"scatter_dim {self.dim} is the last dimension, and norm is of whole rows"
                )
            lengths[self.dim] = self._parts()[communicator.rank][1]
        elif norm.gather_normed:
            raise ValueError("gather_normed is for what is scattered; here all ranks have all rows")
        shape = (*lengths, columns)
        self.residual = arguments.residual_of(communicator, normed[0], shape, self.dtype)
        self.more_terms = arguments.terms(self.norm, self.residual, norm)

    def _rows(self, dim: int, *where: Any) -> NormedRows:
        residual = None if self.residual is None else rows_of(self.residual, dim).contiguous()
        quantize = self.options.quantize
        return normed_rows(self.input, self.norm, residual, quantize, self.dtype, *where)

    def scattered_normed(self, buffers: Buffers) -> Outcome:
        """Start matmul_reduce_scatter with a norm."""
        self.agree()
        made, dim = self.scattering(), self.dim
        assert dim is not None
        first, count = made.segments[self.communicator.rank]
        columns = made.right.shape[1]
        if self.options.gather_normed:
            total = sum(count for _, count in made.segments)
            rows = self._rows(dim, buffers, (total, columns), (first, count))
        else:
            rows = self._rows(dim, buffers, (count, columns))
        linear = Linear(
            made.right, self.bias, rows.sum, "n", self.activation, average=self.average,
            tail=rows.tail,
        )  # fmt: skip
        event = self.reduce_scatter_normed(made.left, linear, made.segments, rows.whole)
        if buffers is not None:
            return Outcome(None, event)
        own = [made.own, *made.others]
        lengths = [made.length, *made.others] if self.options.gather_normed else own
        return Outcome(rows.result(lengths, own, dim), event)

    def summed_normed(self, buffers: Buffers) -> Outcome:
        """Start matmul_all_reduce with a norm."""
        self.agree()
        left = rows_of(self.input, 0)
        rows = self._rows(0, buffers, (left.shape[0], self.weight.shape[1]))
        linear = Linear(
            self.weight, self.bias, rows.sum, "n", self.activation, average=self.average,
            tail=rows.tail,
        )  # fmt: skip
        event = self.all_reduce_normed(left, linear)
        if buffers is not None:
            return Outcome(None, event)
        lengths = self.input.shape[:-1]
        return Outcome(rows.result(lengths, lengths, 0), event)

    def chosen(self, rows: int, columns: int, tuned: str) -> str:
        algorithm = super().chosen(rows, columns, tuned)
        if algorithm != "fused" or self.communicator.place.nodes is not None:
            return algorithm  # between nodes torch norms the rows
        if self.options.quantize is None or kernel_makes_fp8(self.communicator):
            return algorithm
        if self.algorithm == "fused":
            raise ValueError(NO_FP8.format("fused"))
        return "unfused"

    def _by_words(self, output: Tensor) -> bool:
        """Whether the choice is free, and the words of a low-latency kernel do for the product."""
        place = self.communicator.place
        if self.algorithm != "auto" or place.direct_access or not place.all_mapped:
            return False
        simple = output.dtype in FUSED_DTYPES and output.numel() > 0 and not self.activation
        possible = self.options.quantize is None or kernel_makes_fp8(self.communicator)
        return simple and possible and not low_latency.why_no_rows(output)

    def reduce_scatter_normed(
        self,
        left: Tensor,
        linear: Linear,
        segments: list[tuple[int, int]],
        whole: WholeRows | None,
        algorithm: str = "",
    ) -> Event:
        """``left @ linear``, reduced and normed; with ``whole`` all ranks get what it has."""
        rows, columns = left.shape[0], linear.weight.shape[1]
        choice = self.choice(f"{SCATTER}_norm", max(count for _, count in segments), columns)
        algorithm = algorithm or self.chosen(rows, columns, choice.algorithm)
        if algorithm == "fused":
            name_algorithm(algorithm)
            return algorithms.matmul_reduce_scatter_fused(
                self.communicator, left, linear, segments, choice.configuration, whole
            )
        event = self.reduce_scatter(left, linear, segments, algorithm)
        if whole is None:
            return event
        return algorithms.gather(self.communicator, whole, segments, event)

    def all_reduce_normed(self, left: Tensor, linear: Linear) -> Event:
        """One-shot, or the own rows first, which then go to all; a token's by words that carry flags."""
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
            return algorithms.matmul_all_reduce_fused(
                communicator, left, linear, choice.configuration
            )
        segments = split_rows(rows, communicator.world_size)
        first, count = segments[communicator.rank]
        own = output[first : first + count]
        mine = dataclasses.replace(linear, output=own, tail=tail.part(first, count))
        whole = WholeRows(tail.normed, tail.scale, output)
        return self.reduce_scatter_normed(left, mine, segments, whole, algorithm)


# -- rows that are there already -------------------------------------------------------------------


class ReduceNormOptions(NamedTuple):
    """A call's arguments that are no tensors. ``scatter_dim`` is None where all ranks end with all rows."""

    reduce_op: Any = "sum"
    scatter_dim: int | None = None
    length: int | None = None
    algorithm: str = "auto"

    @staticmethod
    def of(given: Any) -> "ReduceNormOptions":
        """Those of an op's arguments."""
        return ReduceNormOptions(given.reduce_op, given.scatter_dim, given.length, given.algorithm)

    @property
    def op(self) -> str:
        return ALL_REDUCE_NORM if self.scatter_dim is None else SCATTER_NORM


def prepared_rows(
    communicator: Communicator,
    input: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    buffers: Buffers,
    options: ReduceNormOptions,
    norm: NormOptions,
) -> PreparedCall:
    """Either op on rows that are there already, checked."""
    tensors = (residual, norm_weight, norm_bias)
    request = _CheckedRows(communicator, input, bias, tensors, options, norm)
    return functools.partial(request.start, buffers), (), None


ROW_FORMS = {
    op: internal_form(op, prepared_rows, fills=False) for op in (ALL_REDUCE_NORM, SCATTER_NORM)
}


class _CheckedRows:
    """The checked arguments of all_reduce_norm and reduce_scatter_norm."""

    def __init__(
        self,
        communicator: Communicator,
        input: Any,
        bias: Any,
        normed: arguments.NormTensors,
        options: ReduceNormOptions,
        norm: NormOptions,
    ) -> None:
        self.communicator, self.options, self.op = communicator, norm, options.op
        self.input = checks.tensor("input", input, communicator)
        if self.input.dim() < 1:
            raise ValueError("input must have at least 1 dimension, got a 0-dim tensor")
        checks.float_dtype("input", self.input.dtype)
        *lengths, columns = self.input.shape
        self.reduction = checks.one_of("reduce_op", options.reduce_op, checks.REDUCE_OPS)
        self.dim, self.columns = 0, columns
        if options.scatter_dim is not None:
            self.dim = checks.index("scatter_dim", options.scatter_dim, self.input.dim())
            if self.dim == len(lengths):
                raise ValueError(
                    f"scatter_dim {self.dim} is the last dimension, and norm is of whole rows"
                )
            lengths[self.dim] = self._parts()[communicator.rank][1]
            checks.part("length", options.length, self._parts(), communicator.rank)
        elif norm.gather_normed:
            raise ValueError("gather_normed is for what is scattered; here all ranks have all rows")
        dtype = self.input.dtype
        self.bias = checks.bias_of("bias", bias, (columns,), self.input, communicator)
        self.norm = arguments.checked(communicator, *normed[1:], columns, dtype, norm)
        shape = (*lengths, columns)
        self.residual = arguments.residual_of(communicator, normed[0], shape, dtype)
        self.own_lengths, self.free = lengths, False
        self.algorithm = self._algorithm(options.algorithm)

    def _algorithm(self, given: Any) -> str:
        """The algorithm, chosen if it is "auto"; between nodes it is "unfused" whatever is asked for."""
        algorithm = checks.one_of("algorithm", given, get_args(NormAlgorithm))
        place, dtype = self.communicator.place, self.input.dtype
        if algorithm == "low_latency":
            why_not = low_latency.why_no_rows(self.input, scattered=self.op == SCATTER_NORM)
            if why_not:
                raise ValueError(f'algorithm="low_latency" cannot do this: {why_not}')
            check_nodes(algorithm, self.communicator)
        in_kernel = dtype in FUSED_DTYPES
        if algorithm in ("fused", "low_latency") and not in_kernel:
            raise TypeError(
                f'algorithm="{algorithm}" supports float32, float16 and bfloat16, input is {dtype}; '
                f'use "unfused" or "auto"'
            )
        makes_fp8 = self.options.quantize is None or kernel_makes_fp8(self.communicator)
        if algorithm in ("fused", "low_latency") and not makes_fp8:
            raise ValueError(NO_FP8.format(algorithm))
        if place.nodes is not None:
            return "unfused"
        if algorithm != "auto":
            return algorithm
        if not in_kernel or not makes_fp8 or not place.mapped:
            return "unfused"
        self.free = True
        if place.direct_access:
            return "pipelined"
        small = self.input.nbytes <= LARGEST_LOW_LATENCY_BYTES
        return "low_latency" if small and self._in_words() else "fused"

    def _in_words(self) -> bool:
        """Whether one low-latency exchange does."""
        return not low_latency.why_no_rows(self.input, scattered=self.op == SCATTER_NORM)

    def _measured(self) -> tuple[str, tuning.Measured]:
        """The algorithm, and what was measured of it; the same on all ranks, which have agreed."""
        op = GATHERED_ROWS.name if self.options.gather_normed else self.op
        rows, size = self.input.numel() // max(1, self.columns), self.communicator.world_size
        problem = tuning.Problem(op, self.input.dtype, rows, self.columns, 1, size)
        algorithm = self.algorithm
        if self.free:
            found = tuning.measured(self.communicator, problem).algorithm
            if found and (found != "low_latency" or self._in_words()):
                algorithm = found
        return algorithm, tuning.measured(self.communicator, problem, algorithm)

    def _parts(self) -> list[tuple[int, int]]:
        parts: list[tuple[int, int]] = split_rows(
            self.input.shape[self.dim], self.communicator.world_size
        )
        return parts

    def start(self, buffers: Buffers) -> Outcome:
        """Agree with all ranks, and start."""
        terms = (
            ("dtype of input", self.input.dtype),
            ("shape of input", tuple(self.input.shape)),
            ("scatter_dim", self.dim if self.op == SCATTER_NORM else None),
            ("reduce_op", self.reduction),
            ("algorithm", self.algorithm),
            ("whether there is a bias", self.bias is not None),
            *arguments.terms(self.norm, self.residual, self.options),
        )
        communicator, columns = self.communicator, self.columns
        communicator.parts(communicator.call_of(self.op, terms, None))
        left = rows_of(self.input, self.dim) if self.input.dim() > 1 else self.input[None]
        left = left.contiguous()
        residual = self.residual
        if residual is not None:
            residual = rows_of(residual, self.dim) if residual.dim() > 1 else residual[None]
            residual = residual.contiguous()
        others = [n for i, n in enumerate(self.input.shape[:-1]) if i != self.dim]
        segments, length = None, left.shape[0]
        extents, own = (length, columns), None
        if self.op == SCATTER_NORM:
            per_index = math.prod(others)
            segments = [(first * per_index, count * per_index) for first, count in self._parts()]
            if self.options.gather_normed:
                own = segments[communicator.rank]
            else:
                extents = (segments[communicator.rank][1], columns)
        how = self.options.quantize, self.input.dtype, buffers, extents, own
        rows = normed_rows(self.input, self.norm, residual, *how)
        nothing = self.input.new_empty(0, columns)
        average = self.reduction == "avg"
        linear = Linear(nothing, self.bias, rows.sum, average=average, tail=rows.tail)
        algorithm, measured = self._measured()
        name_algorithm(algorithm)
        event = algorithms.RowReduction(
            communicator, self.op, left, linear, segments, rows.whole, measured
        ).run(algorithm)
        if buffers is not None:
            return Outcome(None, event)
        if self.input.dim() == 1:
            return Outcome(rows.result([], [], 0), event)
        mine = [self.own_lengths[self.dim], *others]
        whole = [self.input.shape[self.dim], *others]
        gathers = self.options.gather_normed
        return Outcome(rows.result(whole if gathers else mine, mine, self.dim), event)


# -- as ops of torch -------------------------------------------------------------------------------


def norm_options(given: NormArguments) -> NormOptions:
    """The part of an op's arguments that is its norm's."""
    return NormOptions(given.kind, given.eps, given.quantize or None, given.gather_normed)


def results(given: NormArguments, size: Any) -> list[shapes.Output]:
    """The normed rows, the sum with the residual, and, quantised by row, the scales."""
    input = given.input
    if given.weight is not None:
        check_factors(input, given.weight)
    elif not input.dim():
        raise ValueError("input must have at least 1 dimension, got a 0-dim tensor")
    columns = input.shape[-1] if given.weight is None else given.weight.shape[1]
    lengths = list(input.shape[:-1])
    dtype = checks.output_dtype(given.out_dtype, input)
    dim, own = 0, lengths
    if given.scatter_dim is not None:
        dim = shapes.dimension("scatter_dim", given.scatter_dim, input.dim())
        if dim == len(lengths):
            raise ValueError(f"scatter_dim {dim} is the last dimension, and norm is of whole rows")
        part = shapes.divided(lengths[dim], size, f"dimension {dim} of input", given.length)
        own = [part if i == dim else n for i, n in enumerate(lengths)]
    normed, made = lengths if given.gather_normed else own, QUANTIZED if given.quantize else dtype
    found = [_output(input, normed, dim, columns, made), _output(input, own, dim, columns, dtype)]
    if given.quantize == arguments.BY_ROW:
        found.append(_output(input, normed, dim, 1, torch.float32))
    return found


def _output(
    like: Tensor, lengths: Sequence[Any], dim: int, columns: Any, dtype: Any
) -> shapes.Output:
    """``[*lengths, columns]``, in memory with ``dim`` first."""
    matrix = like.new_empty([math.prod(lengths), columns], dtype=dtype)
    if not lengths:
        return shapes.Output(matrix, matrix.view(columns))
    others = [n for i, n in enumerate(lengths) if i != dim]
    return shapes.output(matrix, matrix.view(lengths[dim], *others, columns).movedim(0, dim))


def start(communicator: Communicator, given: NormArguments) -> Started:
    factors = [given.input] if given.weight is None else [given.input, given.weight]
    options: Any = (ReduceNormOptions if given.weight is None else MatmulReduceOptions).of(given)
    form = (ROW_FORMS if given.weight is None else FORMS)[options.op]
    with communicator.accepting(options.op):
        made = results(given, communicator.world_size)
    vectors = given.bias, given.residual, given.norm_weight, given.norm_bias
    tensors = (*factors, *vectors, [each.matrix for each in made])
    work = form(communicator, tensors, (options, norm_options(given)), True)
    return Started([each.view for each in made], work)


OTHERS = ("bias", "residual", "norm_weight", "norm_bias")


def _save(ctx: Any, given: NormArguments, output: Sequence[Tensor]) -> None:
    ctx.options, ctx.norm = MatmulReduceOptions.of(given), norm_options(given)
    ctx.called = given.op
    ctx.needs = given.input.requires_grad, given.weight is not None and given.weight.requires_grad
    others = {name: getattr(given, name) for name in OTHERS}
    ctx.dtypes = {n: t.dtype for n, t in others.items() if t is not None and t.requires_grad}
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], given.input, given.weight, given.norm_weight, given.norm_bias)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    total, input, weight, norm_weight, norm_bias = ctx.saved_tensors
    total = wait(total)
    of_normed, of_sum = grads[0], grads[1]
    found: dict[str, Tensor | None] = {}
    if of_normed is not None:
        if ctx.norm.quantize:
            raise RuntimeError(
                f"interlace.{ctx.called} with quantize={ctx.norm.quantize!r} has no gradient"
            )
        if ctx.norm.gather_normed:
            of_normed = _own_rows(ctx, of_normed)
        norm = RowNorm(ctx.norm.kind, ctx.norm.eps, norm_weight, norm_bias)
        of_rows, found["norm_weight"], found["norm_bias"] = backward(total, norm, of_normed)
        of_sum = of_rows if of_sum is None else of_rows + of_sum
    if of_sum is None:
        return {}
    of_sum = found["residual"] = of_sum.to(total.dtype)
    columns = input.shape[-1] if weight is None else weight.shape[1]
    part = equal_part(of_sum, (*input.shape[:-1], columns), ctx.options, ctx.size)
    if weight is None:
        of_factors = {"input": _of_rows(ctx, input, part) if ctx.needs[0] else None}
    else:
        of_factors = factor_gradients(
            part, input, weight, options=ctx.options, needs=ctx.needs, size=ctx.size, name=ctx.name
        )
    found["bias"] = of_sum.flatten(0, -2).sum(0) if of_sum.dim() > 1 else of_sum
    of_others = {
        name: each.to(ctx.dtypes[name])
        for name, each in found.items()
        if each is not None and name in ctx.dtypes
    }
    return {**of_factors, **of_others}


def _own_rows(ctx: Any, grad: Tensor) -> Tensor:
    """The gradients of all ranks for the own rows, summed."""
    dim, length = ctx.options.scatter_dim % grad.dim(), ctx.options.length
    if length is not None:
        grad = padded(grad, dim, ctx.size * longest(grad.shape[dim], ctx.size))
    own = wait(_ops.reduce_scatter(grad, "sum", dim, ctx.size, ctx.name))
    return own if length is None else own.narrow(dim, 0, length)


def _of_rows(ctx: Any, input: Tensor, part: Tensor) -> Tensor:
    """The gradient of rows that were reduced: summed or gathered."""
    if ctx.options.scatter_dim is None:
        whole = wait(_ops.all_reduce(part, "sum", ctx.size, ctx.name))
    else:
        dim = ctx.options.scatter_dim % input.dim()
        gathered = wait(_ops.all_gather(part, dim, ctx.size, ctx.name))
        whole = gathered.narrow(dim, 0, input.shape[dim])
    return whole / ctx.size if ctx.options.reduce_op == "avg" else whole


def reference(ranks: Sequence[NormArguments], size: int) -> list[list[Tensor]]:
    """Sums in fp32, in the order of the ranks, rounded once with the bias and the residual."""
    first, whole = ranks[0], by_rank.inputs(ranks)
    by_rank.alike(first.op, "input", whole, but=None if first.weight is None else -1)
    residuals = [each.residual is None for each in ranks]
    checks.equal_on_all(first.op, "whether there is a residual", residuals)
    if first.weight is None:
        partials = [each if each.dtype is torch.float64 else each.float() for each in whole]
    else:
        partials = partial_products(ranks)
    total = by_rank.reduced("all_reduce", partials, first.reduce_op)
    dim, made = first.scatter_dim, []
    for rank, given in enumerate(ranks):
        outputs = [each.view for each in results(given, size)]
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


# with gather_normed the gradients of the others are scattered first
_SCATTERED = {"input": ("input",), "bias, residual or norm": OTHERS}
OPS = tuple(
    Op(
        kind.op,
        kind,
        start,
        lambda given, size: [each.view for each in results(given, size)],
        OpGradient(_save, _backward),
        communicates,
        several=True,
        reference=reference,
        variants=tuple(variants),
    )
    for kind, communicates, *variants in (
        (
            MatmulReduceScatterNormArguments,
            {"input": ("input",), "weight": ("weight",), **_SCATTERED},
        ),
        (MatmulAllReduceNormArguments, {"input or weight": ("input", "weight")}),
        (AllReduceNormArguments, {"input": ("input",)}),
        (ReduceScatterNormArguments, _SCATTERED, GATHERED_ROWS),
    )
)
