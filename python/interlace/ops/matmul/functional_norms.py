"""The functional forms of the reductions whose rows are normed; part of ``interlace.functional``."""

from __future__ import annotations

from typing import Any

import torch

from interlace.arguments.norms import BY_ROW, RowNorm, check_options, taken_apart
from interlace.arguments.words import (
    FP8,
    FunctionalGroup,
    FusedReduceOp,
    NormAlgorithm,
    Normed,
    Quantized,
    Unscaled,
)
from interlace.ops.op.calls import check, name_of, own_length, refuse, run_to_list

Tensor = torch.Tensor


def run_normed(
    op: str,
    group: FunctionalGroup,
    tag: str,
    tensors: tuple[Any, ...],
    norm: Any,
    residual: Any,
    reduce_op: Any,
    given: tuple[Any, ...],
    quantize: Any,
    *gather: bool,
) -> Any:
    """Start an op that norms rows; ``given``: its options after ``reduce_op`` and before the norm's."""
    try:
        vectors, options = taken_apart(norm, residual, quantize, *gather)
        check_options(options)
    except (TypeError, ValueError) as error:
        refuse(op, group, tag, error)
    names = ("residual", "weight of norm", "bias of norm")
    check(op, group, tag, None, input=tensors[0], **dict(zip(names, vectors, strict=True)))
    how = (options.kind, float(options.eps), options.quantize or "", *gather)
    own = (*tensors, *vectors, name_of(reduce_op), *given, *how)
    made = run_to_list(op, group, tag, (*tensors, *vectors), *own)
    return ((made[0], made[2]) if quantize == BY_ROW else made[0]), made[1]


def all_reduce_norm(
    input: Tensor,
    *,
    norm: RowNorm,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    quantize: FP8 | Unscaled | None = None,
    reduce_op: FusedReduceOp = "sum",
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: NormAlgorithm = "auto",
) -> Normed | Quantized:
    """``norm(all_reduce(input, reduce_op) + bias + residual)`` and what was normed.

    As :func:`interlace.all_reduce_norm`: ``input``, ``[..., n]``, and ``residual``, which is the same on
    all ranks, of its shape; ``bias``, ``(n,)``. Returns ``(normed, residual)``, or ``((fp8, scales),
    residual)``.

    Raises ValueError or TypeError on every rank, before any data moves; RuntimeError in the backward of
    fp8. Semantics: ``torch.distributed.all_reduce``, then ``torch.nn.functional.rms_norm`` or
    ``layer_norm``.

    >>> def normed():
    ...     y, h = functional.all_reduce_norm(torch.ones(1, 2), norm=interlace.RMSNorm(eps=0.0))
    ...     return y.tolist(), h.tolist()
    >>> interlace.run(normed, 2)[0]
    ([[1.0, 1.0]], [[2.0, 2.0]])
    """
    op = "all_reduce_norm"
    check(op, group, tag, input=input, bias=bias)
    tensors, given = (input, bias), (algorithm,)
    made = run_normed(op, group, tag, tensors, norm, residual, reduce_op, given, quantize)
    return made  # type: ignore[no-any-return]


def reduce_scatter_norm(
    input: Tensor,
    *,
    norm: RowNorm,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    quantize: FP8 | Unscaled | None = None,
    gather_normed: bool = False,
    reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: NormAlgorithm = "auto",
) -> Normed | Quantized:
    """``norm(reduce_scatter(input, reduce_op, scatter_dim) + bias + residual)`` and what was normed.

    As :func:`interlace.reduce_scatter_norm`; unequal parts as of :func:`matmul_reduce_scatter`. ``input``,
    ``[..., n]``; ``residual`` is of
    the shape of the own part; ``bias``, ``(n,)``. Returns ``(normed, residual)``, or ``((fp8, scales),
    residual)``; with ``gather_normed`` all ranks' normed rows.

    Raises ValueError or TypeError on every rank, before any data moves; RuntimeError in the backward of
    fp8. Semantics: ``torch.distributed.reduce_scatter_tensor``, then ``torch.nn.functional.rms_norm`` or
    ``layer_norm``, then ``torch.distributed.all_gather_into_tensor``.

    >>> def normed():
    ...     y, h = functional.reduce_scatter_norm(torch.ones(2, 2), norm=interlace.RMSNorm(eps=0.0))
    ...     return y.tolist(), h.tolist()
    >>> interlace.run(normed, 2)[0]
    ([[1.0, 1.0]], [[2.0, 2.0]])
    """
    op = "reduce_scatter_norm"
    check(op, group, tag, {"scatter_dim": scatter_dim}, input=input, bias=bias)
    own = scatter_dim, own_length(group, tag, input, input, scatter_dim)
    tensors, given = (input, bias), (*own, algorithm)
    how = (norm, residual, reduce_op, given, quantize, gather_normed)
    return run_normed(op, group, tag, tensors, *how)  # type: ignore[no-any-return]
