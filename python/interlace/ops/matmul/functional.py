"""The functional forms of the fused matmuls and norms; part of ``interlace.functional``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from interlace.arguments.checks import RowNorm
from interlace.arguments.words import (
    FP8,
    BlockFormatName,
    FunctionalGroup,
    FusedAlgorithm,
    FusedReduceOp,
    NormAlgorithm,
    Normed,
    Quantized,
    ScaledAlgorithm,
    Tensors,
    Unscaled,
)
from interlace.groups.specs import bound
from interlace.ops.matmul import block_scaled
from interlace.ops.matmul.formats import NormedScaled, Scaled
from interlace.ops.matmul.gather import OP, AllGatherMatmulArguments, as_lists
from interlace.ops.matmul.norms import pair_results, take_norm
from interlace.ops.matmul.reduce import (
    ALL_REDUCE,
    ALL_REDUCE_NORM,
    SCATTER,
    SCATTER_NORM,
    ReductionArguments,
)
from interlace.ops.matmul.scaled import (
    AllGatherScaledMatmulArguments,
    ScaledMatmulReduceScatterArguments,
)
from interlace.ops.op.calls import check, keeps, name_of, own_length, refuse, run_record

Tensor = torch.Tensor


def all_gather_matmul(
    input: Tensor | Scaled,
    weight: Tensors | Scaled | Sequence[Scaled],
    gather_dim: int = 0,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    return_gathered: bool = False,
    save_gathered: bool = True,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor | list[Tensor] | tuple[Tensor, Tensor | list[Tensor]]:
    """Return ``all_gather(input, gather_dim) @ weight + bias``, as :func:`interlace.all_gather_matmul`.

    ``input``: this rank's shard, ``[..., k]``; shards must be equal. ``weight``: ``(k, n)``, or a list of
    weights, which makes the output a list. ``bias``: ``(n,)``, or a list with one bias or None for each.
    Returns ``[..., n]``, or ``(gathered, output)`` with ``return_gathered``. ``save_gathered``: keep the
    gathered input for the weights' gradients. Otherwise backward gathers it again while it computes the
    input's gradient; with a ``format`` it always does. Other parameters: as for the eager op.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics:
    ``torch.ops.symm_mem.fused_all_gather_matmul``.

    >>> def gathered():
    ...     return functional.all_gather_matmul(torch.ones(2, 8), torch.ones(8, 3)).shape
    >>> interlace.run(gathered, 2)
    [torch.Size([4, 3]), torch.Size([4, 3])]
    """
    record = AllGatherMatmulArguments(
        input, weight, bias, gather_dim, return_gathered, algorithm, out_dtype, format=format or ""
    )
    return gather(record, group, tag, save_gathered=save_gathered)  # type: ignore[no-any-return]


def gather(
    record: AllGatherMatmulArguments,
    group: FunctionalGroup,
    tag: str = "",
    *,
    save_gathered: bool = True,
) -> Any:
    """Start all_gather_matmul on a record with weights and biases as callers pass them."""
    op, form, input, asked = OP, OP, record.input, record.return_gathered
    terms: AbstractContextManager[None] = nullcontext()
    if record.format or isinstance(input, Scaled) or isinstance(record.weights, Scaled):
        form, record, terms = block_scaled.packed_by_functional(op, record, group, tag)
    weight, bias = record.weights, record.biases
    check(op, group, tag, {"gather_dim": record.gather_dim}, input=record.input)
    several = not isinstance(weight, Tensor)
    if several and (not isinstance(weight, (list, tuple)) or not weight):
        text = f"weight must be a tensor or a list of tensors, got {type(weight).__name__}"
        refuse(op, group, tag, TypeError(text))
    weights: list[Any] = list(weight) if several else [weight]
    biases: list[Any] = list(bias) if isinstance(bias, (list, tuple)) else [bias] * len(weights)
    if len(biases) != len(weights):
        text = f"bias has {len(biases)} entries, weight has {len(weights)}"
        refuse(op, group, tag, ValueError(text))
    for each in weights:
        check(op, group, tag, weight=each)
    for each in biases:
        if each is not None:
            check(op, group, tag, bias=each)
    record.weights, record.biases = as_lists(weights, biases)
    saved = save_gathered and not record.format and keeps(weights)
    record.return_gathered = asked or saved
    with terms:
        packed_call = run_record(form, group, tag, record)
    outputs = packed_call[: len(weights)] if several else packed_call[0]
    return (
        block_scaled.with_gathered(input, (packed_call[len(weights)], outputs))
        if asked
        else outputs
    )


def _blocks(op: str, group: FunctionalGroup, tag: str, input: Any, weights: Any) -> list[Scaled]:
    try:
        found = block_scaled.operands(input, weights)
    except (TypeError, ValueError) as error:
        refuse(op, group, tag, error)
    if not block_scaled.is_traced():
        block_scaled.agree_on_scales(bound(group, tag), op, found)
    return found


def matmul_reduce_scatter(
    input: Tensor | Scaled,
    weight: Tensor | Scaled,
    reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: RowNorm | None = None,
    quantize: FP8 | Unscaled | BlockFormatName | None = None,
    gather_normed: bool = False,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor | Normed | Quantized | NormedScaled:
    """Return this rank's part of ``reduce_scatter(input @ weight, reduce_op, scatter_dim) + bias``.

    As :func:`interlace.matmul_reduce_scatter`. If parts are unequal, a graph has the length of this rank's
    part: it must be traced on a rank, and an export needs equal parts. ``input`` is ``[..., k]``,
    ``weight`` ``(k, n)``. ``bias`` ``(n,)`` is added once, to the reduced rows. ``reduce_op``: "sum" or
    "avg". ``residual``, ``norm``, ``quantize``, ``gather_normed``: as for the eager op. With a norm it
    returns ``(normed, residual)``.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics:
    ``torch.ops.symm_mem.fused_matmul_reduce_scatter``.

    >>> def reduced():
    ...     return functional.matmul_reduce_scatter(torch.ones(4, 8), torch.ones(8, 3))[0].tolist()
    >>> interlace.run(reduced, 2)
    [[16.0, 16.0, 16.0], [16.0, 16.0, 16.0]]
    """
    record = ReductionArguments(
        input, weight, bias, residual, reduce_op=reduce_op, scatter_dim=scatter_dim,
        algorithm=algorithm, out_dtype=out_dtype, gather_normed=gather_normed, format=format or "",
    )  # fmt: skip
    return reduce(SCATTER, record, norm, quantize, group, tag)  # type: ignore[no-any-return]


def matmul_all_reduce(
    input: Tensor | Scaled,
    weight: Tensor | Scaled,
    reduce_op: FusedReduceOp = "sum",
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: RowNorm | None = None,
    quantize: FP8 | Unscaled | BlockFormatName | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor | Normed | Quantized | NormedScaled:
    """Return ``all_reduce(input @ weight, reduce_op) + bias``, as :func:`interlace.matmul_all_reduce`.

    ``input`` is ``[..., k]``, ``weight`` ``(k, n)``. ``bias`` ``(n,)`` is the same on all ranks, and each
    rank adds it to a part of the rows. Returns ``[..., n]``. ``reduce_op``: "sum" or "avg". ``residual``,
    ``norm``, ``quantize``: as for the eager op. With a norm it returns ``(normed, residual)``.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics: ``torch.matmul``, then
    ``torch.distributed.all_reduce``.

    >>> def summed():
    ...     return functional.matmul_all_reduce(torch.ones(1, 8), torch.ones(8, 2)).tolist()
    >>> interlace.run(summed, 2)
    [[[16.0, 16.0]], [[16.0, 16.0]]]
    """
    record = ReductionArguments(
        input, weight, bias, residual, reduce_op=reduce_op, algorithm=algorithm, out_dtype=out_dtype,
        format=format or "",
    )  # fmt: skip
    return reduce(ALL_REDUCE, record, norm, quantize, group, tag)  # type: ignore[no-any-return]


def all_reduce_norm(
    input: Tensor,
    *,
    norm: RowNorm,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    quantize: FP8 | Unscaled | BlockFormatName | None = None,
    reduce_op: FusedReduceOp = "sum",
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: NormAlgorithm = "auto",
) -> Normed | Quantized | NormedScaled:
    """Return the norm of ``h = all_reduce(input, reduce_op) + bias + residual``, and ``h``.

    As :func:`interlace.all_reduce_norm`. ``input`` is ``[..., n]``, ``bias`` ``(n,)``. ``residual`` has the
    shape of ``input``, and is the same on all ranks. Returns ``(normed, h)``, or ``((fp8, scales), h)``, or
    ``(scaled, h)``.

    Raises ValueError or TypeError on every rank, before any data moves; RuntimeError in the backward of
    fp8. Semantics: ``torch.distributed.all_reduce``, then ``torch.nn.functional.rms_norm`` or
    ``layer_norm``.

    >>> def normed():
    ...     y, h = functional.all_reduce_norm(torch.ones(1, 2), norm=interlace.RMSNorm(eps=0.0))
    ...     return y.tolist(), h.tolist()
    >>> interlace.run(normed, 2)[0]
    ([[1.0, 1.0]], [[2.0, 2.0]])
    """
    record = ReductionArguments(
        input, None, bias, residual, reduce_op=reduce_op, algorithm=algorithm
    )
    return reduce(ALL_REDUCE_NORM, record, norm, quantize, group, tag)  # type: ignore[no-any-return]


def reduce_scatter_norm(
    input: Tensor,
    *,
    norm: RowNorm,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    quantize: FP8 | Unscaled | BlockFormatName | None = None,
    gather_normed: bool = False,
    reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: NormAlgorithm = "auto",
) -> Normed | Quantized | NormedScaled:
    """Return the norm of ``h = reduce_scatter(input, reduce_op, scatter_dim) + bias + residual``, and
    ``h``.

    As :func:`interlace.reduce_scatter_norm`; unequal parts as in :func:`matmul_reduce_scatter`. ``input``
    is ``[..., n]``, ``bias`` ``(n,)``. ``residual`` has the shape of this rank's part. Returns ``(normed,
    h)``, or ``((fp8, scales), h)``, or ``(scaled, h)``; with ``gather_normed`` all ranks' normed rows.

    Raises ValueError or TypeError on every rank, before any data moves; RuntimeError in the backward of
    fp8. Semantics: ``torch.distributed.reduce_scatter_tensor``, then ``torch.nn.functional.rms_norm`` or
    ``layer_norm``, then ``torch.distributed.all_gather_into_tensor``.

    >>> def normed():
    ...     y, h = functional.reduce_scatter_norm(torch.ones(2, 2), norm=interlace.RMSNorm(eps=0.0))
    ...     return y.tolist(), h.tolist()
    >>> interlace.run(normed, 2)[0]
    ([[1.0, 1.0]], [[2.0, 2.0]])
    """
    record = ReductionArguments(
        input, None, bias, residual, reduce_op=reduce_op, scatter_dim=scatter_dim,
        algorithm=algorithm, gather_normed=gather_normed,
    )  # fmt: skip
    return reduce(SCATTER_NORM, record, norm, quantize, group, tag)  # type: ignore[no-any-return]


def reduce(
    op: str,
    record: ReductionArguments,
    norm: Any,
    quantize: Any,
    group: FunctionalGroup,
    tag: str = "",
) -> Any:
    """Start a reduction of a product, or of existing rows; ``op`` is the eager one."""
    scatters, multiplies = op in (SCATTER, SCATTER_NORM), op in (SCATTER, ALL_REDUCE)
    form = op
    terms: AbstractContextManager[None] = nullcontext()
    scaled = isinstance(record.input, Scaled) or isinstance(record.weight, Scaled)
    if multiplies and (record.format or scaled):
        form, record, terms = block_scaled.packed_by_functional(op, record, group, tag)
    factors: dict[str, Any] = {"input": record.input}
    if multiplies:
        factors = {"input": record.input, "weight": record.weight}
    dims = {"scatter_dim": record.scatter_dim} if scatters else None
    check(op, group, tag, dims, **factors, bias=record.bias)
    *_, columns = factors.values()
    if scatters:
        record.length = own_length(group, tag, record.input, columns, record.scatter_dim)
    record.reduce_op = name_of(record.reduce_op)
    if norm is not None and multiplies:
        form = f"{form}_norm"
    try:
        take_norm(record, norm, quantize)
    except (TypeError, ValueError) as error:
        refuse(op, group, tag, error)
    if record.kind:
        of_norm = {"weight of norm": record.norm_weight, "bias of norm": record.norm_bias}
        check(op, group, tag, None, input=record.input, residual=record.residual, **of_norm)
    with terms:
        made = run_record(form, group, tag, record)
    return pair_results(made, record.quantize) if record.kind else made


def all_gather_scaled_matmul(
    input: Tensor,
    weight: Tensors,
    input_scale: Tensor,
    weight_scale: Tensors,
    gather_dim: int = 0,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    return_gathered: bool = False,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    algorithm: ScaledAlgorithm = "auto",
) -> Tensor | list[Tensor] | tuple[Tensor, Tensor | list[Tensor]]:
    """Return ``(all_gather(input * input_scale, gather_dim) @ (weight * weight_scale)) + bias``, sent as
    fp8.

    ``input``: float8, ``[..., k]``, equal shards, gathered along any dimension but the last.
    ``input_scale``: float32, one element that is the same on all ranks, or ``[..., 1]``, one per row, which
    is gathered with the rows. ``weight``: float8 ``(k, n)``, or a list. ``weight_scale``: one element or
    ``(1, n)`` for each weight. ``bias``: ``(n,)``. ``out_dtype`` is bfloat16 by default.
    ``return_gathered``: also return the gathered, unscaled ``input``, as the first result. ``algorithm``:
    "fused" (one Triton kernel that multiplies fp8 where it arrives; weights must be contiguous along k),
    "unfused" (``torch._scaled_mm`` after the gather), "auto".

    Raises ValueError or TypeError on every rank, before any data moves; RuntimeError in backward: there are
    no gradients. Semantics: ``torch.ops.symm_mem.fused_all_gather_scaled_matmul``.

    >>> def gathered():
    ...     one, x = torch.tensor(0.5), torch.ones(2, 16).to(torch.float8_e4m3fn)
    ...     weight = torch.ones(16, 16).to(torch.float8_e4m3fn).t()  # contiguous along k
    ...     return functional.all_gather_scaled_matmul(x, weight, one, one)[3, :2].tolist()
    >>> interlace.run(gathered, 2)
    [[4.0, 4.0], [4.0, 4.0]]
    """
    op = "all_gather_scaled_matmul"
    several = isinstance(weight, (list, tuple))
    weights: list[Any] = list(weight) if several else [weight]
    scales: list[Any] = (
        list(weight_scale) if isinstance(weight_scale, (list, tuple)) else [weight_scale]
    )
    if len(scales) != len(weights):
        text = f"weight_scale has {len(scales)} entries, weight has {len(weights)}"
        refuse(op, group, tag, ValueError(text))
    if blocks := _blocks(
        op, group, tag, (input, input_scale), list(zip(weights, scales, strict=True))
    ):
        options: Any = {"bias": bias, "return_gathered": return_gathered, "out_dtype": out_dtype}
        about: Any = blocks[0], blocks[1:] if several else blocks[1], gather_dim
        return all_gather_matmul(*about, group=group, tag=tag, algorithm=algorithm, **options)
    biases: list[Any] = list(bias) if isinstance(bias, (list, tuple)) else [bias] * len(weights)
    if all(each is None for each in biases):
        biases = []
    for number, (each, scale) in enumerate(zip(weights, scales, strict=True)):
        named = {f"weight[{number}]": each, f"weight_scale[{number}]": scale}
        dims = {"gather_dim": gather_dim}
        check(op, group, tag, dims, input=input, input_scale=input_scale, **named)
    record = AllGatherScaledMatmulArguments(
        input, weights, input_scale, scales, biases, gather_dim, return_gathered, out_dtype,
        use_fast_accum, algorithm,
    )  # fmt: skip
    results = run_record(op, group, tag, record)
    outputs = results[: len(weights)] if several else results[0]
    return (results[len(weights)], outputs) if return_gathered else outputs


def scaled_matmul_reduce_scatter(
    input: Tensor,
    weight: Tensor,
    input_scale: Tensor,
    weight_scale: Tensor,
    reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0,
    *,
    bias: Tensor | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    algorithm: ScaledAlgorithm = "auto",
) -> Tensor:
    """Return ``reduce_scatter((input * input_scale) @ (weight * weight_scale), ...) + bias``.

    ``input``, ``weight``, ``input_scale``, ``weight_scale`` and ``out_dtype``, the dtype in which products
    are sent, are as for :func:`all_gather_scaled_matmul`. But every rank may have another scale. Any
    dimension of the product may be scattered. ``reduce_op``: "sum" or "avg". ``bias``, ``(n,)``, must be
    equal on all ranks and is added once. ``algorithm``: as there; with "unfused" the matmul is complete
    when the call returns, and the reduction is in flight.

    Raises ValueError or TypeError on every rank, before any data moves; RuntimeError in backward: there are
    no gradients. Semantics: ``torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter``, which adds the bias
    on every rank.

    >>> def reduced():
    ...     one, x = torch.tensor(0.5), torch.ones(2, 16).to(torch.float8_e4m3fn)
    ...     weight = torch.ones(16, 16).to(torch.float8_e4m3fn).t()
    ...     return functional.scaled_matmul_reduce_scatter(x, weight, one, one)[0, :2].tolist()
    >>> interlace.run(reduced, 2)
    [[8.0, 8.0], [8.0, 8.0]]
    """
    op, dims = "scaled_matmul_reduce_scatter", {"scatter_dim": scatter_dim}
    if blocks := _blocks(op, group, tag, (input, input_scale), [(weight, weight_scale)]):
        about: Any = blocks[0], blocks[1], reduce_op, scatter_dim
        options: Any = {"bias": bias, "out_dtype": out_dtype, "algorithm": algorithm}
        return matmul_reduce_scatter(*about, group=group, tag=tag, **options)  # type: ignore[return-value]
    scales = {"input_scale": input_scale, "weight_scale": weight_scale}
    check(op, group, tag, dims, input=input, weight=weight, **scales)
    record = ScaledMatmulReduceScatterArguments(
        input, weight, input_scale, weight_scale, bias, name_of(reduce_op), scatter_dim, out_dtype,
        use_fast_accum, algorithm,
    )  # fmt: skip
    return run_record(op, group, tag, record)  # type: ignore[no-any-return]
