"""The eager fused matmuls, also those that end with a norm of the rows, with or without gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.checks import LayerNorm as LayerNorm, RMSNorm as RMSNorm, RowNorm
from interlace.arguments.words import (
    FP8,
    BlockFormatName,
    FusedAlgorithm,
    FusedReduceOp,
    Group,
    NormAlgorithm,
    Normed,
    Quantized,
    Tensors,
    Unscaled,
)
from interlace.groups.groups import resolve
from interlace.kernels.epilogue import Activation
from interlace.ops.matmul import block_scaled, gather, norms
from interlace.ops.matmul.formats import NormedScaled, Scaled
from interlace.ops.matmul.reduce import (
    ALL_REDUCE,
    ALL_REDUCE_NORM,
    SCATTER,
    SCATTER_NORM,
    ReductionArguments,
    own_part,
)
from interlace.ops.op.op import longest, pad, wait
from interlace.ops.op.recording import Ops, run_recorded
from interlace.runtime.core.call import Terms
from interlace.runtime.core.communicator import Communicator, requires_gradients
from interlace.runtime.core.context import comparing
from interlace.runtime.core.work import Work
from interlace.runtime.numerics.norms import activate, unrounded_norm

_ops: Any = Ops()
Tensor = torch.Tensor


def all_gather_matmul(
    input: Tensor | Scaled,
    weight: Tensors | Scaled | Sequence[Scaled],
    *,
    gather_dim: int = 0,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    activation: Activation | Sequence[Activation | None] | None = None,
    group: Group = None,
    return_gathered: bool = False,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor | list[Tensor] | tuple[Tensor, Tensor | list[Tensor]] | Work:
    """Return ``torch.cat(shards of all ranks, gather_dim) @ weight + bias``; gather inside the matmul.

    Parameters
    ----------
    input : this rank's shard, ``[..., k]``, 2-D or more, with any strides. Shards may differ in length
        along ``gather_dim``; all other lengths must agree.
    weight : ``(k, n)`` with any strides (a transposed ``nn.Linear.weight`` is read in place), or a
        sequence of weights that share the gather. ``n`` may differ between ranks.
    gather_dim : dimension of ``input`` that is sharded; the last one is allowed.
    bias : ``(n,)``; for several weights a sequence with one entry (or None) each.
    activation : "relu", "gelu", "gelu_tanh" (gelu's approximation) or "silu", applied to the output before
        it is rounded; for several weights also a sequence with one entry (or None) each.
    return_gathered : also return the gathered input, contiguous along ``gather_dim``.
    algorithm : "fused" (Triton kernel), "pipelined" (torch matmuls as chunks arrive), "unfused", "auto".
    out_dtype : dtype of the output, by default the input's. float64 only with "unfused" or "auto".
    format : quantise ``input`` and ``weight`` to a block-scaled format, such as "mxfp8", if they are
        tensors. So do the matmuls of the backward, each in blocks along its own k: see
        docs/how-to/train/formats.md. Not with ``return_gathered``, nor for the last dimension.

    Returns
    -------
    The output ``[..., n]`` (a list for several weights), or ``(gathered, output)`` with
    ``return_gathered``; with ``async_op`` a :class:`Work` whose ``wait()`` returns it. For
    ``gather_dim`` other than 0 the output is a permuted view, as in torch's fused ops.

    Raises ValueError or TypeError naming the argument, both values and the rank.

    Gradients are recorded. All ranks' tensors must require the same gradients, otherwise all ranks raise an
    error. With gradients torch applies the activation after the op, as its gradient needs its input.

    Semantics: ``torch.ops.symm_mem.fused_all_gather_matmul``.

    >>> interlace.run(lambda: interlace.all_gather_matmul(torch.ones(2, 8), torch.ones(8, 4)).sum(), 2)
    [tensor(128.), tensor(128.)]
    """
    record = gather.AllGatherMatmulArguments(
        input, weight, bias, gather_dim, return_gathered, algorithm, out_dtype, activation,
        format=format or "",
    )  # fmt: skip
    communicator = resolve(group)
    learning = requires_gradients(input, weight, bias)
    run: Any = _recorded_gather if learning else gather.gather_matmul
    if format or isinstance(input, Scaled) or isinstance(weight, Scaled):
        call: Any = run, communicator, gather.OP, record, async_op
        return block_scaled.run_packed(*call, gathers=return_gathered)  # type: ignore[no-any-return]
    return run(communicator.on(input), record, async_op=async_op)  # type: ignore[no-any-return]


def matmul_reduce_scatter(
    input: Tensor | Scaled,
    weight: Tensor | Scaled,
    *,
    reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    norm: RowNorm | None = None,
    quantize: FP8 | Unscaled | BlockFormatName | None = None,
    gather_normed: bool = False,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor | Normed | Quantized | NormedScaled | Work:
    """Return this rank's part of ``sum over ranks of (input @ weight)``, scattered as it is computed.

    Parameters
    ----------
    input : ``[..., k]``, 2-D or more, any strides; ``k`` may differ between ranks, except in a
        block-scaled format.
    weight : ``(k, n)`` with any strides.
    reduce_op : "sum" or "avg" (sum divided by the world size).
    scatter_dim : dimension of the output that is split over ranks as ``torch.chunk`` does: parts of
        ``ceil(length / world size)``. The last ranks get the rest, which may be empty.
    bias : ``(n,)``, added once to the reduced output.
    activation : as for :func:`all_gather_matmul`, applied to the reduced output with the bias.
    norm : an :class:`RMSNorm` or :class:`LayerNorm` over whole rows, computed at the end of the op; with
        any ``scatter_dim`` but the last.
    residual : with ``norm``, a tensor to add before it, with the output's shape and dtype, any strides.
    quantize : with ``norm``, None or "fp8": the normed rows as float8_e4m3fn with a float32 scale for each
        row, ``[..., 1]``, as ``torch._scaled_mm`` takes them. The scale is the row's largest absolute value
        divided by 448, and at least 1e-12. The normed rows are fp8 times scale. "fp8_static": the normed
        rows as float8_e4m3fn, without scales; divide the norm's weight by a known scale first. A
        block-scaled format, such as "mxfp8" or "nvfp4": the :class:`Scaled` that :func:`quantize` makes
        from the normed rows in fp32. For nvfp4 its ``whole`` is 1; divide the norm's weight by another one.
    gather_normed : with ``norm``, all ranks get all ranks' normed rows, as from an all-gather; the residual
        stays scattered. This is the chain of a sequence-parallel block in one op.
    algorithm, out_dtype, format : as for :func:`all_gather_matmul`. Partial products are sent in
        ``out_dtype``.

    Returns
    -------
    This rank's part, or with ``async_op`` a :class:`Work` whose ``wait()`` returns it. Sums are taken in
    fp32 in rank order, so results are bit-identical from run to run. For ``scatter_dim`` other than 0
    the output is a permuted view, as in torch's fused ops.

    With ``norm`` it is ``(normed, residual)``: ``residual`` is the sum with the residual, rounded once, and
    ``normed`` is the norm of the rounded sum. Quantised: ``((fp8, scales), residual)`` or ``(scaled,
    residual)``.

    Raises ValueError or TypeError naming the argument, both values and the rank.

    Gradients are recorded, also for unequal parts. All ranks' tensors must require the same gradients,
    otherwise all ranks raise an error.

    Semantics: ``torch.ops.symm_mem.fused_matmul_reduce_scatter``. With ``norm`` an addition and
    ``torch.nn.functional.rms_norm`` or ``layer_norm`` follow, in fp32, whereas torch rounds after each.

    >>> interlace.run(lambda: interlace.matmul_reduce_scatter(torch.ones(4, 8), torch.ones(8, 1)), 2)
    [tensor([[16.],
            [16.]]), tensor([[16.],
            [16.]])]
    """
    record = ReductionArguments(  # by position, as names take twice the time
        input, weight, bias, residual, None, None, reduce_op, scatter_dim, None, algorithm, out_dtype,
        "", 0.0, "", gather_normed, activation, format or "",
    )  # fmt: skip
    return run_reduction(SCATTER, record, norm, quantize, group, async_op)  # type: ignore[no-any-return]


def matmul_all_reduce(
    input: Tensor | Scaled,
    weight: Tensor | Scaled,
    *,
    reduce_op: FusedReduceOp = "sum",
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    norm: RowNorm | None = None,
    quantize: FP8 | Unscaled | BlockFormatName | None = None,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor | Normed | Quantized | NormedScaled | Work:
    """Return ``sum over ranks of (input @ weight) + bias`` on every rank, with the same bits on all ranks.

    ``input``: ``[..., k]``, ``weight``: ``(k, n)``; other parameters are as for
    :func:`matmul_reduce_scatter`. But ``bias`` must be the same on all ranks: each rank adds it to a part
    of the rows. Small outputs use one kernel that sends every tile to every rank (one-shot). Larger outputs
    use a matmul + reduce-scatter and an all-gather of the parts. ``residual`` must be the same on all
    ranks. With ``norm`` the normed rows and the residual are on every rank.

    Raises ValueError or TypeError naming the argument, both values and the rank. Semantics:
    ``torch.matmul``, then ``torch.distributed.all_reduce``.

    >>> interlace.run(lambda: interlace.matmul_all_reduce(torch.ones(1, 8), torch.ones(8, 1)), 2)
    [tensor([[16.]]), tensor([[16.]])]
    """
    record = ReductionArguments(
        input, weight, bias, residual, None, None, reduce_op, None, None, algorithm, out_dtype,
        "", 0.0, "", False, activation, format or "",
    )  # fmt: skip
    return run_reduction(ALL_REDUCE, record, norm, quantize, group, async_op)  # type: ignore[no-any-return]


def all_reduce_norm(
    input: Tensor,
    *,
    norm: RowNorm,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    quantize: FP8 | Unscaled | BlockFormatName | None = None,
    reduce_op: FusedReduceOp = "sum",
    group: Group = None,
    async_op: bool = False,
    algorithm: NormAlgorithm = "auto",
) -> Normed | Quantized | NormedScaled | Work:
    """Return ``h = sum over ranks of input + bias + residual`` and its norm, on every rank, in one op.

    Parameters
    ----------
    input : ``[..., n]``, with equal shapes on all ranks, any strides; float32, float16, bfloat16 or
        float64.
    norm : an :class:`RMSNorm` or :class:`LayerNorm` over whole rows of ``n``.
    residual : has the shape and dtype of ``input``. ``residual``, ``bias`` ``(n,)`` and the vectors of
        ``norm`` must be the same on all ranks. This is not checked: the algorithm decides which rank's
        values are used.
    quantize : as for :func:`matmul_reduce_scatter`.
    reduce_op : "sum" or "avg".
    algorithm : "fused" is one Triton kernel; for more than 256 KiB it has two steps: every rank norms a
        part of the rows, then all ranks gather the parts. "pipelined" uses torch's operators, also in
        parts. "unfused" is an all-reduce, then the norm of all rows. "low_latency" is one kernel whose
        words carry their own flags, for up to 64 KiB, every row in whole KiB. "auto" chooses one.

    Returns ``(normed, h)``, quantised ``((fp8, scales), h)`` or ``(scaled, h)``, or with ``async_op`` a
    :class:`Work` whose ``wait()`` returns that. h is summed in fp32 in rank order and rounded once. The
    norm is computed from the rounded h, in fp32. Every rank gets the same bits.

    Raises ValueError or TypeError naming the argument, both values and the rank, on every rank.

    Semantics: ``torch.distributed.all_reduce``, an addition, ``torch.nn.functional.rms_norm`` or
    ``layer_norm``; torch rounds after each of them, and "unfused" rounds after the all-reduce. Nothing is
    in place: h is a new tensor. Gradients are recorded. A row's largest value comes from its fp32 norm.

    >>> def normed():
    ...     h = torch.full((1, 2), 1.0 + interlace.get_rank())
    ...     return interlace.all_reduce_norm(h, norm=interlace.RMSNorm(torch.ones(2), 0.0))
    >>> interlace.run(normed, 2)[0]
    (tensor([[1., 1.]]), tensor([[3., 3.]]))
    """
    record = ReductionArguments(
        input, None, bias, residual, reduce_op=reduce_op, algorithm=algorithm
    )
    return run_reduction(ALL_REDUCE_NORM, record, norm, quantize, group, async_op)  # type: ignore[no-any-return]


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
    group: Group = None,
    async_op: bool = False,
    algorithm: NormAlgorithm = "auto",
) -> Normed | Quantized | NormedScaled | Work:
    """Return ``h``, this rank's part of the sum of ``input`` with bias and residual, and its norm.

    Parameters
    ----------
    input, norm, bias, quantize, reduce_op : as for :func:`all_reduce_norm`, at least 2-D.
    residual : has the shape of this rank's part.
    scatter_dim : any but the last; parts as in :func:`matmul_reduce_scatter`, also uneven or empty ones.
    gather_normed : all ranks get all ranks' normed rows: reduce-scatter, norm and all-gather of a
        sequence-parallel block in one op. Normed rows are stored once here and once at every peer, as they
        are computed, without a shard between.
    algorithm : as for :func:`all_reduce_norm`, without "low_latency".

    Returns
    -------
    ``(normed, h)``, quantised ``((fp8, scales), h)`` or ``(scaled, h)``, or with ``async_op`` a
    :class:`Work`. For ``scatter_dim`` other than 0 they are permuted views.

    Raises ValueError or TypeError naming the argument, both values and the rank, on every rank.

    Semantics: ``torch.distributed.reduce_scatter_tensor``, an addition, ``torch.nn.functional.rms_norm`` or
    ``layer_norm``, and ``torch.distributed.all_gather_into_tensor``.

    >>> def normed():
    ...     h = torch.full((2, 2), 1.0 + interlace.get_rank())
    ...     return interlace.reduce_scatter_norm(h, norm=interlace.RMSNorm(torch.ones(2), 0.0))
    >>> interlace.run(normed, 2)[0]
    (tensor([[1., 1.]]), tensor([[3., 3.]]))
    """
    record = ReductionArguments(
        input, None, bias, residual, reduce_op=reduce_op, scatter_dim=scatter_dim,
        algorithm=algorithm, gather_normed=gather_normed,
    )  # fmt: skip
    return run_reduction(SCATTER_NORM, record, norm, quantize, group, async_op)  # type: ignore[no-any-return]


def run_reduction(
    op: str, record: ReductionArguments, norm: Any, quantize: Any, group: Group, async_op: bool
) -> Any:
    """Run an eager reduction of a product, or of existing rows."""
    communicator = resolve(group)
    with communicator.accepting(op):
        if record.op != op:  # the caller passed None for a required argument
            if op in (SCATTER, ALL_REDUCE):
                checks.tensor("weight", record.weight, communicator)
            checks.integer("scatter_dim", record.scatter_dim)
        norms.take_norm(record, norm, quantize)
    vectors = record.residual, record.norm_weight, record.norm_bias
    learning = requires_gradients(record.input, record.weight, record.bias, *vectors)
    run = _recorded_reduction if learning else norms.FORMS[op]
    scaled = isinstance(record.input, Scaled) or isinstance(record.weight, Scaled)
    if (record.format or scaled) and op in (SCATTER, ALL_REDUCE):
        return block_scaled.run_packed(run, communicator, op, record, async_op)
    return run(communicator.on(record.input), record, async_op=async_op)


# -- calls whose gradients are recorded ------------------------------------------------------------


def _recorded_gather(
    communicator: Communicator, given: gather.AllGatherMatmulArguments, async_op: bool
) -> Any:
    """Run the gather with gradients. torch applies the activation afterwards, for its gradient."""
    several = not isinstance(given.weights, Tensor)
    count = len(given.weights) if isinstance(given.weights, (list, tuple)) else 1
    with communicator.accepting(gather.OP):
        names = checks.activations(given.activation, count, several)
    asked, learning = given.return_gathered, requires_gradients(given.weights)
    plain = dataclasses.replace(
        given, activation=None, recorded=True,
        return_gathered=asked or (learning and not given.format),
    )  # fmt: skip

    def results(record: gather.AllGatherMatmulArguments, result: Any) -> Any:
        outputs, lengths = result or (None, None)
        weights, biases = gather.as_lists(record.weights, record.biases)
        return dataclasses.replace(record, weights=weights, biases=biases, lengths=lengths), outputs

    def finish(outputs: list[Tensor], _: Any) -> Any:
        done = [
            activate(each, name) if name else each
            for each, name in zip(outputs, names, strict=False)
        ]
        result = done if several else done[0]
        return (outputs[count], result) if asked else result

    def run(record: gather.AllGatherMatmulArguments, async_op: bool) -> Any:
        if record.format:
            record = block_scaled.quantize_record(record)
        return gather.gather_matmul(communicator, record, async_op=async_op)

    op = block_scaled.op_of(gather.OP, given.format)
    with gather.taking_any_lengths():
        return run_recorded(op, communicator, plain, run, finish, async_op, results=results)


def _recorded_reduction(
    communicator: Communicator, given: ReductionArguments, async_op: bool
) -> Any:
    """Run the reduction with gradients. torch applies an activation and then the norm."""
    terms: Terms = ()
    plain = dataclasses.replace(given, activation=None)
    with communicator.accepting(given.op):
        name = checks.activation("activation", given.activation)
        if name and given.kind:
            if given.quantize:
                raise ValueError("quantize has no gradient; call the op under torch.no_grad()")
            terms = norms.NormedReduce(communicator, block_scaled.quantize_record(given)).more_terms
            nothing: Any = dict.fromkeys(("residual", "norm_weight", "norm_bias"))
            plain = dataclasses.replace(plain, kind="", gather_normed=False, **nothing)
    op = block_scaled.op_of(norms.full_name(plain) if plain.kind else plain.op, plain.format)

    def results(record: ReductionArguments, result: Any) -> Any:
        outputs = norms.list_results(result) if record.kind and result else [result]
        name = checks.one_of("reduce_op", record.reduce_op, checks.REDUCE_OPS)
        length = own_part(record, communicator)
        return dataclasses.replace(record, reduce_op=name, length=length), outputs

    def finish(outputs: list[Tensor], _: Any) -> Any:
        if plain.kind:
            return norms.pair_results(outputs, plain.quantize)
        total = activate(outputs[0], name)
        return _norm_by_torch(communicator, given, total) if given.kind else total

    def run(record: ReductionArguments, async_op: bool) -> Any:
        packed_call = block_scaled.quantize_record(record)
        return norms.FORMS[record.op](communicator, packed_call, async_op=async_op)

    compared = comparing(("activation", name), *terms) if name else contextlib.nullcontext()
    with compared:
        return run_recorded(
            op, communicator, plain, run, finish, async_op, results=results, differs=bool(name)
        )


def _norm_by_torch(communicator: Communicator, record: ReductionArguments, total: Tensor) -> Any:
    total = total if record.residual is None else total + record.residual
    normed = unrounded_norm(total, norms.norm_of(record)).to(total.dtype)
    if record.gather_normed:
        dim = checks.index("scatter_dim", record.scatter_dim, total.dim())
        length, size = record.input.shape[dim], communicator.world_size
        part = pad(normed, dim, longest(length, size))
        normed = wait(_ops.all_gather(part, dim, size, communicator)).narrow(dim, 0, length)
    return normed, total
