"""The fused ops as they are called: on tensors whose gradients are recorded, or on plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.norms import RowNorm
from interlace.arguments.words import (
    FP8,
    FusedAlgorithm,
    FusedReduceOp,
    Group,
    Normed,
    Quantized,
    Tensors,
    Unscaled,
)
from interlace.groups.groups import resolve
from interlace.kernels.epilogue import Activation
from interlace.ops.matmul import gather, norms
from interlace.ops.matmul.reduce import ALL_REDUCE, SCATTER, ReduceArguments
from interlace.runtime.core.work import Work

Tensor = torch.Tensor


def all_gather_matmul(
    input: Tensor,
    weight: Tensors,
    *,
    gather_dim: int = 0,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    activation: Activation | Sequence[Activation | None] | None = None,
    group: Group = None,
    return_gathered: bool = False,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | list[Tensor] | tuple[Tensor, Tensor | list[Tensor]] | Work:
    """``torch.cat(shards of all ranks, gather_dim) @ weight + bias``, gathering inside the matmul.

    Parameters
    ----------
    input : this rank's shard, ``[..., k]``, 2-D or more. Shards may differ in length along
        ``gather_dim``; all other lengths agree. Any strides.
    weight : ``(k, n)`` with any strides (a transposed ``nn.Linear.weight`` is read in place), or a
        sequence of weights that share the gather. ``n`` may differ between ranks.
    gather_dim : dimension of ``input`` that is sharded; the last one too.
    bias : ``(n,)``; for several weights a sequence with one entry (or None) each.
    activation : "relu", "gelu", "gelu_tanh" (gelu's approximation) or "silu" of the output, taken before
        it is rounded; for several weights also a sequence with one entry (or None) each.
    return_gathered : also return the gathered input, contiguous along ``gather_dim``.
    algorithm : "fused" (Triton kernel), "pipelined" (torch matmuls as chunks arrive), "unfused", "auto".
    out_dtype : dtype of the output, default the input's. float64 only by "unfused" or "auto".

    Returns
    -------
    The output ``[..., n]`` (a list for several weights), or ``(gathered, output)`` with
    ``return_gathered``; with ``async_op`` a :class:`Work` whose ``wait()`` returns it. For
    ``gather_dim`` other than 0 the output is a permuted view, as in torch's fused ops.

    Raises ValueError or TypeError naming the argument, both values and the rank.

    Gradients are recorded; all ranks' tensors must require them alike, or all ranks refuse. The activation
    is then torch's, after the op, because its gradient needs what it was taken of, and shorter shards
    travel with zeros behind them.

    Semantics: ``torch.ops.symm_mem.fused_all_gather_matmul``.

    >>> interlace.run(lambda: interlace.all_gather_matmul(torch.ones(2, 8), torch.ones(8, 4)).sum(), 2)
    [tensor(128.), tensor(128.)]
    """
    given = gather.AllGatherMatmulArguments(
        input, weight, bias, gather_dim, return_gathered, algorithm, out_dtype, activation
    )
    if requires_gradients(input, weight, bias):
        made = gather.record(given, group, async_op)
        if made is not None:
            return made  # type: ignore[no-any-return]
        checks.warn_without_gradients(gather.OP)
    return gather.gather_matmul(resolve(group).on(input), given, None, async_op)  # type: ignore[no-any-return]


def matmul_reduce_scatter(
    input: Tensor,
    weight: Tensor,
    *,
    reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    norm: RowNorm | None = None,
    quantize: FP8 | Unscaled | None = None,
    gather_normed: bool = False,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | Normed | Quantized | Work:
    """This rank's part of ``sum over ranks of (input @ weight)``, scattered as it is computed.

    Parameters
    ----------
    input : ``[..., k]``, 2-D or more, any strides; ``k`` may differ between ranks.
    weight : ``(k, n)`` with any strides.
    reduce_op : "sum" or "avg" (sum divided by the world size).
    scatter_dim : dimension of the output that is split over ranks as ``torch.chunk`` does: parts of
        ``ceil(length / world size)``, trailing ranks get what is left, which may be nothing.
    bias : ``(n,)``, added once to the reduced output.
    activation : as for :func:`all_gather_matmul`, of the reduced output and the bias.
    norm : an :class:`RMSNorm` or :class:`LayerNorm` of whole rows, taken in the op's tail; any
        ``scatter_dim`` but the last.
    residual : with ``norm``, what is added before it, of the shape and dtype of the output, any strides.
    quantize : with ``norm``, None or "fp8": the normed rows as float8_e4m3fn with a float32 scale for each
        row, ``[..., 1]``, as ``torch._scaled_mm`` takes them: their largest number divided by 448, and at
        least 1e-12. The normed rows are fp8 times scale. "fp8_static": as float8_e4m3fn as they are, of a
        norm whose weight was divided by a scale that is known before.
    gather_normed : with ``norm``, all ranks get all ranks' normed rows, as by an all-gather; the residual
        stays scattered. The chain of a sequence-parallel block, in one op.
    algorithm, out_dtype : as for :func:`all_gather_matmul`. Partial products travel in ``out_dtype``.

    Returns
    -------
    The own part, or with ``async_op`` a :class:`Work` whose ``wait()`` returns it. Sums are taken in
    fp32 in rank order, so results are bit-identical from run to run. For ``scatter_dim`` other than 0
    the output is a permuted view, as in torch's fused ops.

    With ``norm`` it is ``(normed, residual)``: the sum with the residual, rounded once, and its norm, which
    is that of the rounded sum; quantised, ``((fp8, scales), residual)``.

    Raises ValueError or TypeError naming the argument, both values and the rank.

    Gradients are recorded, of unequal parts too; all ranks' tensors must require them alike, or all ranks
    refuse.

    Semantics: ``torch.ops.symm_mem.fused_matmul_reduce_scatter``; with ``norm`` followed by an addition and
    ``torch.nn.functional.rms_norm`` or ``layer_norm``, in fp32, where torch rounds after each.

    >>> interlace.run(lambda: interlace.matmul_reduce_scatter(torch.ones(4, 8), torch.ones(8, 1)), 2)
    [tensor([[16.],
            [16.]]), tensor([[16.],
            [16.]])]
    """
    given = ReduceArguments(
        input, weight, bias, residual, reduce_op=reduce_op, scatter_dim=scatter_dim,
        algorithm=algorithm, out_dtype=out_dtype, gather_normed=gather_normed, activation=activation,
    )  # fmt: skip
    return run_reduction(SCATTER, given, norm, quantize, group, async_op)  # type: ignore[no-any-return]


def matmul_all_reduce(
    input: Tensor,
    weight: Tensor,
    *,
    reduce_op: FusedReduceOp = "sum",
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    norm: RowNorm | None = None,
    quantize: FP8 | Unscaled | None = None,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | Normed | Quantized | Work:
    """``sum over ranks of (input @ weight) + bias`` on every rank, bitwise equal on all of them.

    ``input``: ``[..., k]``, ``weight``: ``(k, n)``, and the rest as for :func:`matmul_reduce_scatter`, but
    ``bias`` must be the same on all ranks, of which each adds it to a part of the rows. Small outputs go
    one-shot, in one kernel that sends every tile to every rank; larger ones as matmul + reduce-scatter and
    an all-gather of the parts. ``residual``, which must be the same on all ranks, ``norm`` and ``quantize``
    as there; the normed rows and the residual are on every rank.

    Raises ValueError or TypeError naming the argument, both values and the rank. Semantics:
    ``torch.matmul``, then ``torch.distributed.all_reduce``.

    >>> interlace.run(lambda: interlace.matmul_all_reduce(torch.ones(1, 8), torch.ones(8, 1)), 2)
    [tensor([[16.]]), tensor([[16.]])]
    """
    given = ReduceArguments(
        input, weight, bias, residual, reduce_op=reduce_op, algorithm=algorithm,
        out_dtype=out_dtype, activation=activation,
    )  # fmt: skip
    return run_reduction(ALL_REDUCE, given, norm, quantize, group, async_op)  # type: ignore[no-any-return]


def run_reduction(
    op: str, given: ReduceArguments, norm: Any, quantize: Any, group: Group, async_op: bool
) -> Any:
    """An eager reduction of a product, or of rows that are there already."""
    communicator = resolve(group)
    with communicator.accepting(op):
        if given.op != op:  # by a None, which no caller may give
            if op in (SCATTER, ALL_REDUCE):
                checks.tensor("weight", given.weight, communicator)
            checks.integer("scatter_dim", given.scatter_dim)
        norms.take_norm(given, norm, quantize)
    vectors = given.residual, given.norm_weight, given.norm_bias
    if requires_gradients(given.input, given.weight, given.bias, *vectors):
        return norms.record(given, norm, quantize, group, async_op)
    return norms.FORMS[op](communicator.on(given.input), given, None, async_op)


def requires_gradients(*tensors: Any) -> bool:
    """Whether autograd is to know of a call with these tensors and lists of tensors."""
    if not torch.is_grad_enabled():
        return False
    for each in tensors:
        if isinstance(each, torch.Tensor):
            if each.requires_grad:
                return True
        elif isinstance(each, (list, tuple)) and requires_gradients(*each):
            return True
    return False
