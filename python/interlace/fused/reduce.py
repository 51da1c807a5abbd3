"""The fused ops after a matmul: reduce-scatter and all-reduce of the product.

A call is validated, agreed on with the other ranks (one small host message; a mismatch raises on every
rank before any data moves), brought into 2-D form, and handed to one of the algorithms in
``runtime/algorithms/matmul_reduce.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from interlace.arguments import checks
from interlace.fused.shapes import rows_of, unrows
from interlace.kernels.tiling import split_rows
from interlace.runtime.algorithms import matmul_reduce as algorithms
from interlace.runtime.algorithms import plain
from interlace.runtime.algorithms.operands import Linear
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.stream import Outcome
from interlace.runtime.numerics import activations
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.auto import choose_algorithm
from interlace.runtime.tuning.table import threshold


def matmul_reduce_scatter(
    communicator: Communicator,
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    reduce_op: str,
    scatter_dim: int,
    bias: torch.Tensor | None,
    async_op: bool,
    algorithm: str,
    out_dtype: torch.dtype | None,
    buffer: torch.Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """``buffer``: the matrix that gets the own part's rows, or columns transposed, if there is one."""
    op = "matmul_reduce_scatter"
    if communicator.plans is not None:
        known = communicator.plans.again(
            op,
            (input, weight, bias, buffer),
            (reduce_op, scatter_dim, algorithm, out_dtype, activation),
            async_op=async_op,
        )
        if known is not None:
            return known[0]
    rank, world_size = communicator.rank, communicator.world_size
    with communicator.accepting(op):
        request = _Product(
            op, input, weight, bias, reduce_op, algorithm, out_dtype, activation, communicator
        )
        dim = checks.dimension("scatter_dim", scatter_dim, request.input.dim(), rank)

    def host() -> Outcome:
        request.agree(dim)
        columns = request.weight.shape[1]
        along_n = dim == request.input.dim() - 1
        if along_n:
            # rows of the transposed product: (input @ weight).T = weight.T @ input.T
            flat = request.input.flatten(0, -2)
            left, right = request.weight.T, flat.T
            left = left if left.stride(1) == 1 else left.contiguous()
            length, per_index = columns, 1
        else:
            left, right = rows_of(request.input, dim), request.weight
            length = request.input.shape[dim]
            per_index = 1
            for i, extent in enumerate(request.input.shape[:-1]):
                per_index *= extent if i != dim else 1
        parts = split_rows(length, world_size)
        segments = [(first * per_index, count * per_index) for first, count in parts]
        first, count = parts[rank]
        shape = (count * per_index, right.shape[1])
        output = buffer
        if output is None:
            output = torch.empty(shape, dtype=request.dtype, device=left.device)
        elif output.shape != shape:
            raise ValueError(
                f"{op}: a traceable op scatters equal parts, the group's size {world_size} does not "
                f"divide {length}"
            )
        own_bias = request.bias
        if along_n and own_bias is not None:
            own_bias = own_bias[first : first + count]
        linear = Linear(right, own_bias, output, "m" if along_n else "n", request.activation)
        event = _reduce_scatter(communicator, left, linear, segments, request)
        if buffer is not None:
            return Outcome(None, event)
        if along_n:
            result = output.T.view(*request.input.shape[:-1], count)
        else:
            others = [e for i, e in enumerate(request.input.shape[:-1]) if i != dim]
            result = unrows(output, [count, *others], dim)
        return Outcome(result, event)

    return communicator.run(op, host, async_op=async_op)


class _Product:
    """The validated arguments that matmul_reduce_scatter and matmul_all_reduce share."""

    def __init__(
        self,
        op: str,
        input: Any,
        weight: Any,
        bias: Any,
        reduce_op: Any,
        algorithm: Any,
        out_dtype: Any,
        activation: Any,
        communicator: Communicator,
    ) -> None:
        rank = communicator.rank
        self.op = op
        self.communicator = communicator
        self.input = checks.tensor("input", input, communicator)
        checks.float_dtype("input", self.input.dtype, rank)
        if self.input.dim() < 2:
            raise ValueError(
                f"input must have at least 2 dimensions, got shape {tuple(self.input.shape)} "
                f"on rank {rank}"
            )
        self.weight = checks.matrix(
            "weight", weight, self.input, self.input.shape[-1], communicator
        )
        self.bias = checks.bias_vector("bias", bias, self.weight.shape[1], self.input, communicator)
        self.average = checks.one_of("reduce_op", reduce_op, checks.REDUCE_OPS, rank) == "avg"
        self.algorithm = checks.one_of("algorithm", algorithm, checks.ALGORITHMS, rank)
        self.dtype = checks.output_dtype(out_dtype, self.input, rank)
        checks.fused_algorithm_allowed(self.algorithm, self.input.dtype, self.dtype, rank)
        self.activation = activations.checked("activation", activation, rank)
        self.inner = [self.input.shape[-1]]

    def agree(self, dim: int | None) -> None:
        """Exchange with all ranks and raise on any mismatch; learns every rank's ``k``."""
        rank = self.communicator.rank
        names = {
            "the shape of input without k": tuple(self.input.shape[:-1]),
            "the columns of weight": self.weight.shape[1],
            "scatter_dim": dim,
            "reduce_op": "avg" if self.average else "sum",
            "algorithm": self.algorithm,
            "out_dtype": self.dtype,
            "whether there is a bias": self.bias is not None,
            "activation": self.activation or None,
            "configuration": configuration.override_key(),
        }
        mine = (tuple(names.values()), self.input.dtype, self.input.shape[-1])
        answers = self.communicator.agree(self.op, mine)
        dtypes = [answer[1] for answer in answers]
        checks.equal_on_all(self.op, "dtype of input", dtypes, rank, kind=TypeError)
        for index, name in enumerate(names):
            checks.equal_on_all(self.op, name, [a[0][index] for a in answers], rank)
        self.inner = [answer[2] for answer in answers]

    def choose(self, op: str, rows: int, columns: int) -> tuning.Choice:
        """What the table, the cache or the model has for ``op``; ``rows`` of the longest part."""
        size, inner = self.communicator.world_size, max(self.inner)
        problem = tuning.Problem(op, self.input.dtype, rows, columns, inner, size)
        return tuning.choose(self.communicator, problem, self.algorithm)

    def chosen(self, rows: int, columns: int, tuned: str) -> str:
        """The algorithm, once every rank's shapes are known; ``tuned`` is what :meth:`choose` says."""
        empty = not rows * columns * max(self.inner)
        if self.algorithm != "auto" and not empty:
            return self.algorithm
        wide = torch.float64 if self.dtype == torch.float64 else self.input.dtype
        return choose_algorithm(self.communicator.place, wide, rows, 0, empty=empty, tuned=tuned)


def _reduce_scatter(
    communicator: Communicator,
    left: torch.Tensor,
    linear: Linear,
    segments: list[tuple[int, int]],
    request: _Product,
    algorithm: str = "",
) -> Any:
    """By ``algorithm``, or by what is chosen for these shapes."""
    rows, columns = left.shape[0], linear.weight.shape[1]
    longest = max(count for _, count in segments)
    choice = request.choose("matmul_reduce_scatter", longest, columns)
    algorithm = algorithm or request.chosen(rows, columns, choice.algorithm)
    if algorithm == "fused":
        return algorithms.matmul_reduce_scatter_fused(
            communicator, left, linear, segments, choice.configuration, average=request.average
        )
    if algorithm == "pipelined":
        return algorithms.matmul_reduce_scatter_pipelined(
            communicator, left, linear, segments, average=request.average
        )
    return algorithms.matmul_reduce_scatter_unfused(
        communicator, left, linear, segments, average=request.average
    )


ONE_SHOT_BYTES = threshold("one_shot_bytes")


def matmul_all_reduce(
    communicator: Communicator,
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    reduce_op: str,
    bias: torch.Tensor | None,
    async_op: bool,
    algorithm: str,
    out_dtype: torch.dtype | None,
    buffer: torch.Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """``buffer``: the matrix that gets all rows, if there is one."""
    op = "matmul_all_reduce"
    if communicator.plans is not None:
        known = communicator.plans.again(
            op,
            (input, weight, bias, buffer),
            (reduce_op, algorithm, out_dtype, activation),
            async_op=async_op,
        )
        if known is not None:
            return known[0]
    with communicator.accepting(op):
        request = _Product(
            op, input, weight, bias, reduce_op, algorithm, out_dtype, activation, communicator
        )

    def host() -> Outcome:
        request.agree(None)
        left = rows_of(request.input, 0)
        columns = request.weight.shape[1]
        output = buffer
        if output is None:
            output = torch.empty(left.shape[0], columns, dtype=request.dtype, device=left.device)
        one_shot = output.numel() * output.element_size() <= ONE_SHOT_BYTES
        choice = request.choose(op, left.shape[0], columns)
        chosen = request.chosen(left.shape[0], columns, choice.algorithm)
        if chosen == "fused" and one_shot:
            event = algorithms.matmul_all_reduce_fused(
                communicator,
                left,
                Linear(request.weight, request.bias, output, activation=request.activation),
                choice.configuration,
                average=request.average,
            )
        else:
            event = _two_shot(communicator, left, output, request, chosen)
        if buffer is not None:
            return Outcome(None, event)
        return Outcome(unrows(output, request.input.shape[:-1], 0), event)

    return communicator.run(op, host, async_op=async_op)


def _two_shot(
    communicator: Communicator,
    left: torch.Tensor,
    output: torch.Tensor,
    request: _Product,
    algorithm: str,
) -> Any:
    """Reduce-scatter the product into the own rows of ``output``, then gather the others' rows."""
    segments = split_rows(left.shape[0], communicator.world_size)
    parts = [output[first : first + count] for first, count in segments]
    own = parts[communicator.rank]
    linear = Linear(request.weight, request.bias, own, activation=request.activation)
    _reduce_scatter(communicator, left, linear, segments, request, algorithm)
    return plain.all_gather_copy(communicator, own.view(-1), [part.view(-1) for part in parts])
