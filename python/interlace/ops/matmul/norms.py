"""Reductions whose rows are normed: after a matmul, and of rows that are there already.

As ``reduce.py``, whose checks and choices the matmuls have. Results are a pair, what is normed and the sum
with the residual; quantised, what is normed is a pair itself, fp8 and scales.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch

from interlace.arguments import checks
from interlace.arguments import norms as arguments
from interlace.arguments.norms import NormOptions
from interlace.arguments.words import NormAlgorithm
from interlace.kernels.tiling import split_rows
from interlace.ops.collectives import low_latency
from interlace.ops.collectives.chosen_algorithm import check_nodes
from interlace.ops.matmul import launch_norms as algorithms
from interlace.ops.matmul import reduce
from interlace.ops.matmul.launch_norms import WholeRows
from interlace.ops.matmul.operands import Linear, rows_of, unrows
from interlace.ops.matmul.reduce import ALL_REDUCE, ONE_SHOT_BYTES, SCATTER, MatmulReduceOptions
from interlace.runtime.core.call import PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.numerics.norms import QUANTIZED, NormTail, RowNorm
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.auto import FUSED_DTYPES, LARGEST_LOW_LATENCY_BYTES

Tensor = torch.Tensor
Buffers = Sequence[Tensor] | None
"""Matrices for the results' rows: the normed, the sums, and, quantised, the scales."""

ALL_REDUCE_NORM, SCATTER_NORM = "all_reduce_norm", "reduce_scatter_norm"
GATHER_NORMED = "gather_normed"
"""What the latter is called in rows of ``tune`` where all ranks get the normed rows."""
NO_FP8 = (
    'algorithm="{}" with quantize needs compute capability 8.9 or more; use "unfused" or "auto"'
)
SMALLEST_FP8 = 89  # the compute capability from which on kernels can make fp8


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
        op = GATHER_NORMED if self.options.gather_normed else self.op
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
