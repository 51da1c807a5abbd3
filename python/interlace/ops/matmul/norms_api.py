"""Reductions that end with a norm of the rows, as they are called."""

from __future__ import annotations

import torch

from interlace.arguments.norms import LayerNorm as LayerNorm
from interlace.arguments.norms import RMSNorm as RMSNorm
from interlace.arguments.norms import RowNorm
from interlace.arguments.words import (
    FP8,
    FusedReduceOp,
    Group,
    NormAlgorithm,
    Normed,
    Quantized,
    Unscaled,
)
from interlace.ops.matmul.api import run_reduction
from interlace.ops.matmul.reduce import ALL_REDUCE_NORM, SCATTER_NORM, ReduceArguments
from interlace.runtime.core.work import Work

Tensor = torch.Tensor


def all_reduce_norm(
    input: Tensor,
    *,
    norm: RowNorm,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    quantize: FP8 | Unscaled | None = None,
    reduce_op: FusedReduceOp = "sum",
    group: Group = None,
    async_op: bool = False,
    algorithm: NormAlgorithm = "auto",
) -> Normed | Quantized | Work:
    """``h = sum over ranks of input + bias + residual`` and its norm, on every rank, in one op.

    Parameters
    ----------
    input : ``[..., n]``, of equal shape on all ranks, any strides; float32, float16, bfloat16 or float64.
    norm : an :class:`RMSNorm` or :class:`LayerNorm` of whole rows of ``n``.
    residual : of the shape and dtype of ``input``. It, ``bias``, ``(n,)``, and the vectors of ``norm`` must
        be the same on all ranks, which is not compared: whose numbers count depends on the algorithm.
    quantize : None or "fp8": the normed rows as float8_e4m3fn with a float32 scale for each row, ``[...,
        1]``, as ``torch._scaled_mm`` takes them: the row's largest number divided by 448, at least 1e-12.
        "fp8_static": as float8_e4m3fn as they are, of a norm whose weight was divided by a known scale.
    reduce_op : "sum" or "avg".
    algorithm : "fused" (one Triton kernel; more than 256 KiB in two shots: every rank norms a part of the
        rows, and all gather), "pipelined" (torch's operators, likewise in parts), "unfused" (all-reduce,
        then the norm of all rows), "low_latency" (one kernel whose words carry their own flags, for up to
        64 KiB, every row in whole KiB), "auto".

    Returns ``(normed, h)``, or ``((fp8, scales), h)``, or with ``async_op`` a :class:`Work` whose
    ``wait()`` returns that. h is summed in fp32 in rank order and rounded once; the norm is that of the
    rounded h, in fp32. Every rank gets the same bits.

    Raises ValueError or TypeError naming the argument, both values and the rank, on every rank.

    Semantics: ``torch.distributed.all_reduce``, an addition, ``torch.nn.functional.rms_norm`` or
    ``layer_norm``, where torch rounds after each, and "unfused" after the all-reduce. Like vLLM's fused
    all-reduce + RMSNorm + quantisation, FlashInfer's ``trtllm_allreduce_fusion`` and Kraken's
    ``all_reduce_bias_rms_norm``. It differs: nothing is in place, h is a new tensor; sums do not depend on
    the order of arrival; the largest number of a row is taken of its fp32 norm; the norm may be a
    ``LayerNorm``; it has gradients; the groups of blocks with a scale each that FlashInfer makes for fp4,
    it does not make.

    >>> def normed():
    ...     h = torch.full((1, 2), 1.0 + interlace.get_rank())
    ...     return interlace.all_reduce_norm(h, norm=interlace.RMSNorm(torch.ones(2), 0.0))
    >>> interlace.run(normed, 2)[0]
    (tensor([[1., 1.]]), tensor([[3., 3.]]))
    """
    given = ReduceArguments(input, None, bias, residual, reduce_op=reduce_op, algorithm=algorithm)
    return run_reduction(ALL_REDUCE_NORM, given, norm, quantize, group, async_op)  # type: ignore[no-any-return]


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
    group: Group = None,
    async_op: bool = False,
    algorithm: NormAlgorithm = "auto",
) -> Normed | Quantized | Work:
    """``h``, this rank's part of the sum over ranks of ``input``, with bias and residual, and its norm.

    Parameters
    ----------
    input, norm, bias, quantize, reduce_op : as for :func:`all_reduce_norm`, at least 2-D.
    residual : of the shape of the own part.
    scatter_dim : any but the last; parts as of :func:`matmul_reduce_scatter`, also uneven or empty.
    gather_normed : all ranks get all ranks' normed rows: reduce-scatter, norm and all-gather of a
        sequence-parallel block in one op. Normed rows are stored once here and once at every peer, as they
        are made; there is no shard of them.
    algorithm : as there, without "low_latency".

    Returns
    -------
    ``(normed, h)``, or ``((fp8, scales), h)``, or with ``async_op`` a :class:`Work`. For ``scatter_dim``
    other than 0 they are permuted views.

    Raises ValueError or TypeError naming the argument, both values and the rank, on every rank.

    Semantics: ``torch.distributed.reduce_scatter_tensor``, an addition, ``torch.nn.functional.rms_norm`` or
    ``layer_norm``, and ``torch.distributed.all_gather_into_tensor``; like the reduce-scatter + norm +
    all-gather of vLLM's sequence parallelism and FlashInfer's two-shot ``trtllm_allreduce_fusion``, from
    which it differs as :func:`all_reduce_norm` does.

    >>> def normed():
    ...     h = torch.full((2, 2), 1.0 + interlace.get_rank())
    ...     return interlace.reduce_scatter_norm(h, norm=interlace.RMSNorm(torch.ones(2), 0.0))
    >>> interlace.run(normed, 2)[0]
    (tensor([[1., 1.]]), tensor([[3., 3.]]))
    """
    given = ReduceArguments(
        input, None, bias, residual, reduce_op=reduce_op, scatter_dim=scatter_dim,
        algorithm=algorithm, gather_normed=gather_normed,
    )  # fmt: skip
    return run_reduction(SCATTER_NORM, given, norm, quantize, group, async_op)  # type: ignore[no-any-return]
