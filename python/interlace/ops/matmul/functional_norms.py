"""The functional forms of the reductions whose rows are normed; part of ``interlace.functional``."""

from __future__ import annotations

import torch

from interlace.arguments.norms import RowNorm
from interlace.arguments.words import (
    FP8,
    FunctionalGroup,
    FusedReduceOp,
    NormAlgorithm,
    Normed,
    Quantized,
    Unscaled,
)
from interlace.ops.matmul.functional import reduce
from interlace.ops.matmul.reduce import ALL_REDUCE_NORM, SCATTER_NORM, ReduceArguments

Tensor = torch.Tensor


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
    given = ReduceArguments(input, None, bias, residual, reduce_op=reduce_op, algorithm=algorithm)
    return reduce(ALL_REDUCE_NORM, given, norm, quantize, group, tag)  # type: ignore[no-any-return]


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
    given = ReduceArguments(
        input, None, bias, residual, reduce_op=reduce_op, scatter_dim=scatter_dim,
        algorithm=algorithm, gather_normed=gather_normed,
    )  # fmt: skip
    return reduce(SCATTER_NORM, given, norm, quantize, group, tag)  # type: ignore[no-any-return]
