"""Kernels and shapes of the reductions whose rows are normed; part of ``torch.ops.interlace``.

All return a list: the normed rows, the sum with the residual, and, quantised, the scales of the normed
rows.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.arguments.norms import BY_ROW, NormOptions
from interlace.ops.matmul import norms
from interlace.ops.matmul.norms import ReduceNormOptions
from interlace.ops.matmul.reduce import ALL_REDUCE, SCATTER, MatmulReduceOptions, check_factors
from interlace.ops.op import shapes
from interlace.ops.op.pending import Started
from interlace.ops.op.shapes import Output
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.numerics.norms import QUANTIZED

Tensor = torch.Tensor
MATMULS = {"matmul_reduce_scatter_norm": SCATTER, "matmul_all_reduce_norm": ALL_REDUCE}
ROWS = (norms.ALL_REDUCE_NORM, norms.SCATTER_NORM)


class NormCall(NamedTuple):
    """The arguments of an op that are no tensors, as the schemas have them; no ``out_dtype``: of rows."""

    reduce_op: str
    scatter_dim: int | None
    length: int | None
    algorithm: str
    out_dtype: torch.dtype | None
    norm: NormOptions


def call_of(op: str, *given: Any) -> NormCall:
    """``given`` by the schema of ``op``: see ``library.py``."""
    reduce_op, *rest = given
    scattered = op in ("matmul_reduce_scatter_norm", norms.SCATTER_NORM)
    dim, length = (rest.pop(0), rest.pop(0)) if scattered else (None, None)
    gather = rest.pop() if scattered else False
    algorithm, *dtype, kind, eps, quantize = rest
    options = NormOptions(kind, eps, quantize or None, gather)
    return NormCall(reduce_op, dim, length, algorithm, dtype[0] if dtype else None, options)


def _rows(like: Tensor, lengths: Sequence[Any], dim: int, columns: Any, dtype: Any) -> Output:
    """``[*lengths, columns]``, in memory with ``dim`` first."""
    matrix = like.new_empty([math.prod(lengths), columns], dtype=dtype)
    if not lengths:
        return Output(matrix, matrix.view(columns))
    others = [n for i, n in enumerate(lengths) if i != dim]
    return shapes.output(matrix, matrix.view(lengths[dim], *others, columns).movedim(0, dim))


def outputs(input: Tensor, columns: Any, call: NormCall, size: Any) -> list[Output]:
    """What an op gives for ``input`` and a product of so many columns."""
    lengths = list(input.shape[:-1])
    dtype = checks.output_dtype(call.out_dtype, input)
    dim, own = 0, lengths
    if call.scatter_dim is not None:
        dim = shapes.dimension("scatter_dim", call.scatter_dim, input.dim())
        if dim == len(lengths):
            raise ValueError(f"scatter_dim {dim} is the last dimension, and norm is of whole rows")
        part = shapes.divided(lengths[dim], size, f"dimension {dim} of input", call.length)
        own = [part if i == dim else n for i, n in enumerate(lengths)]
    normed = lengths if call.norm.gather_normed else own
    made = QUANTIZED if call.norm.quantize else dtype
    found = [_rows(input, normed, dim, columns, made), _rows(input, own, dim, columns, dtype)]
    if call.norm.quantize == BY_ROW:
        found.append(_rows(input, normed, dim, 1, torch.float32))
    return found


def matmul_outputs(
    op: str, input: Tensor, weight: Tensor, call: NormCall, size: Any
) -> list[Output]:
    check_factors(input, weight)
    return outputs(input, weight.shape[1], call, size)


def fake_matmul(op: str, input: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    """The results, from the arguments and the group's size, which comes last."""
    *given, size = rest
    call = call_of(op, *given[4:])
    return [each.view for each in matmul_outputs(op, input, weight, call, size)]


def fake_rows(op: str, input: Tensor, *rest: Any) -> list[Tensor]:
    *given, size = rest
    call = call_of(op, *given[4:])
    return [each.view for each in outputs(input, input.shape[-1], call, size)]


def _matmul(
    op: str, communicator: Communicator, input: Tensor, weight: Tensor, *rest: Any
) -> Started:
    bias, residual, norm_weight, norm_bias, *given = rest
    call, public = call_of(op, *given), MATMULS[op]
    with communicator.accepting(public):
        made = matmul_outputs(op, input, weight, call, communicator.world_size)
    options = MatmulReduceOptions.of(call)
    buffers = [each.matrix for each in made]
    tensors = (input, weight, bias, residual, norm_weight, norm_bias, buffers)
    work = norms.FORMS[public](communicator, tensors, (options, call.norm), True)
    return Started([each.view for each in made], work)


def _reduced(op: str, communicator: Communicator, input: Tensor, *rest: Any) -> Started:
    bias, residual, norm_weight, norm_bias, *given = rest
    call = call_of(op, *given)
    with communicator.accepting(op):
        if not input.dim():
            raise ValueError("input must have at least 1 dimension, got a 0-dim tensor")
        made = outputs(input, input.shape[-1], call, communicator.world_size)
    options = ReduceNormOptions(call.reduce_op, call.scatter_dim, call.length, call.algorithm)
    buffers = [each.matrix for each in made]
    tensors = (input, bias, residual, norm_weight, norm_bias, buffers)
    work = norms.ROW_FORMS[op](communicator, tensors, (options, call.norm), True)
    return Started([each.view for each in made], work)


START = {
    **{op: functools.partial(_matmul, op) for op in MATMULS},
    **{op: functools.partial(_reduced, op) for op in ROWS},
}
FAKE = {
    **{op: functools.partial(fake_matmul, op) for op in MATMULS},
    **{op: functools.partial(fake_rows, op) for op in ROWS},
}
