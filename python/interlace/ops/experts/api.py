"""The functions for experts: rows go to their experts, are multiplied by weights, and return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.words import BlockFormatName, FusedAlgorithm, Group, Splits
from interlace.groups.groups import check_group, resolve
from interlace.kernels.epilogue import Activation
from interlace.ops.experts import counted, grouped, grouped_combine
from interlace.ops.experts.combine import COMBINE, CombineArguments, combine_rows
from interlace.ops.experts.dispatch import (
    DISPATCH,
    DispatchArguments,
    arguments_of,
    dispatch_rows,
    name_results,
)
from interlace.ops.experts.grouped import GroupedArguments, row_counts
from interlace.ops.experts.grouped_combine import (
    OP,
    ROUTED,
    GroupedCombineArguments,
    RoutedCombineArguments,
)
from interlace.ops.experts.routing import (
    Assignment,
    DispatchHandle,
    Received,
    by_handle,
    check_experts,
    check_same_choice,
    choice,
    dispatch_number,
    flat,
    routing_for,
)
from interlace.ops.matmul import block_scaled
from interlace.ops.matmul.formats import Scaled, unpacked_rows
from interlace.ops.op.op import OPS, Op
from interlace.ops.op.recording import ContinuedWork, is_seen, run_recorded
from interlace.runtime.compat.torch_modes import modes_active
from interlace.runtime.core.communicator import Communicator, requires_gradients
from interlace.runtime.core.work import Work
from interlace.runtime.numerics.norms import activate

Tensor = torch.Tensor
BLOCK = 128
LARGEST = 448.0  # in float8_e4m3fn
SMALLEST = 1e-4  # the least maximum of a block, so that a block of zeros has a scale


def dispatch(
    x: Tensor | Scaled | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_experts: int,
    *,
    capacity: int | None = None,
    num_max_dispatch_tokens_per_rank: int | None = None,
    use_fp8: bool = False,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
) -> tuple[Received, DispatchHandle] | Work:
    """Send every token to the ranks that have its experts, and sort the rows there by expert.

    Rank r has the experts from ``r * num_experts / W`` on. A token travels once to each rank.

    Parameters
    ----------
    x : ``(t, hidden)``, this rank's tokens; ``t`` may differ between ranks. Or fp8 with its scales, a pair
        ``(values, scales)``, as :func:`quantize` returns it. Or an :class:`interlace.Scaled`: then
        ``received.x`` is one.
    topk_idx : integers ``(t, k)``: the experts of each token, -1 for none. A token names an expert once.
    topk_weights : ``(t, k)``, or None. They go with the rows, and :func:`combine` multiplies by them.
    num_experts : the number of experts of all ranks together.
    capacity : the most rows that this rank sends to one expert. Rows of later tokens are left out, and
        :func:`combine` takes them as 0. None: dropless.
    num_max_dispatch_tokens_per_rank : a bound of every rank's ``t``. With it ``received.x`` has the length
        for the worst case, unused rows are zero, and no host waits for its GPU: counts are in ``received``,
        on the device. None: ``received.x`` has the exact length, and the host of a GPU waits for it.
    use_fp8 : quantize ``x`` first. Then it is not differentiable.
    algorithm : "fused", Triton kernels; "pipelined", torch, rank after rank; "unfused", an all-to-all and
        torch; "auto".

    Returns
    -------
    ``(received, handle)``: a :class:`Received` and the handle that :func:`combine` needs.
    ``received.x`` has a row for each token and expert of this rank, sorted by expert, then by source rank,
    then in the order of the source's tokens. With ``async_op`` a :class:`Work` whose ``wait()`` returns the
    pair.

    Raises ValueError or TypeError naming the argument, both values and the rank, on every rank, before any
    data moves. Gradients go to ``x`` and ``topk_weights``.

    Semantics: DeepEP's ``Buffer.dispatch``, with the order of torch's ``symm_mem.all_to_all_vdev_2d``.

    >>> def on_rank():
    ...     tokens = torch.tensor([[1.0], [2.0]]) + 10 * interlace.get_rank()
    ...     experts = torch.tensor([[0, 1], [1, -1]])  # the second token has one expert
    ...     received, _ = interlace.experts.dispatch(tokens, experts, None, 2)
    ...     return received.x.flatten().tolist(), received.num_tokens_per_expert.tolist()
    >>> interlace.run(on_rank, 2)
    [([1.0, 11.0], [2]), ([1.0, 2.0, 11.0, 12.0], [4])]
    """
    most, options = num_max_dispatch_tokens_per_rank, {"capacity": capacity, "algorithm": algorithm}
    operands = x, topk_idx, topk_weights, num_experts
    return _dispatch(operands, most, use_fp8, group, async_op, **options)  # type: ignore[no-any-return]


def _dispatch(
    operands: tuple[Any, ...],
    most: int | None,
    use_fp8: bool,
    group: Group,
    async_op: bool,
    **how: Any,
) -> Any:
    x, topk_idx, *others = operands
    how["num_max_dispatch_tokens_per_rank"] = most
    communicator = resolve(group).on(x.values if isinstance(x, Scaled) else x, topk_idx)
    number = dispatch_number(communicator)
    with communicator.accepting(DISPATCH):
        checks.flag("use_fp8", use_fp8)
        if use_fp8:
            if isinstance(x, (tuple, list, Scaled)):
                raise ValueError(
                    "use_fp8 quantizes x, which has scales already; pass use_fp8=False"
                )
            x = quantize(x)
        arguments, terms = arguments_of(x, topk_idx, *others, **how)

    def finish(results: list[Tensor], _: Any = None) -> tuple[Received, DispatchHandle]:
        received, handle = name_results(results, arguments, communicator, x)
        return received, handle._replace(number=number)

    def run(record: DispatchArguments, async_op: bool) -> Any:
        with terms:
            return dispatch_rows(communicator, (record, None), async_op=async_op)

    floats = arguments.input, arguments.scales, arguments.topk_weights
    if requires_gradients(*floats, topk_idx):
        return run_recorded(OPS[DISPATCH], communicator, arguments, run, finish, async_op)
    results = run(arguments, async_op)
    return ContinuedWork(results, finish) if async_op else finish(results)


def combine(
    y: Tensor,
    handle: DispatchHandle,
    *,
    weighted: bool = True,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
) -> Tensor | Work:
    """Send every row back to its token's rank, and sum over the token's experts: ``(t, n)``.

    Parameters
    ----------
    y : ``(rows, n)``, the experts' results for the rows of ``received.x``; after a low-latency dispatch
        ``(experts, most rows, n)``. ``n`` may differ from ``hidden``.
    handle : the handle of the :func:`dispatch`; it may be used several times.
    weighted : multiply by the ``topk_weights`` of the dispatch, if it had any, in fp32 and on the token's
        rank.
    group : the handle's group. If ``handle`` is not a handle, this group raises the error.
    algorithm : as for :func:`dispatch`.

    Returns ``(t, n)`` of ``y``'s dtype, or with ``async_op`` a :class:`Work` whose ``wait()`` returns it:
    the sum over slots 0, 1, 2 ... in fp32, rounded once. A token without any row is 0. Raises ValueError or
    TypeError on every rank, before any data moves. Gradients go to ``y`` and ``topk_weights``.

    Semantics: DeepEP's ``Buffer.combine``, which leaves weights to the caller: for that pass
    ``weighted=False``, and multiply by ``received.topk_weights``.

    >>> def on_rank():
    ...     weights = torch.tensor([[0.5, 0.25]])
    ...     received, handle = interlace.experts.dispatch(
    ...         torch.ones(1, 2), torch.tensor([[0, 1]]), weights, num_experts=2
    ...     )
    ...     return interlace.experts.combine(received.x * 4, handle).tolist()
    >>> interlace.run(on_rank, 2)
    [[[3.0, 3.0]], [[3.0, 3.0]]]
    """
    handled = isinstance(handle, DispatchHandle)
    communicator = resolve(handle.group if handled else group).on(y)
    with communicator.accepting(COMBINE):
        if not handled:
            raise TypeError(f"handle must be the handle of a dispatch, got {type(handle).__name__}")
        check_group(group, handle.group)
        checks.flag("weighted", weighted)
        if not isinstance(y, Tensor):
            raise TypeError(f"y must be a tensor, got {checks.describe(y)}")
        rows = flat(handle, "y", y)
    weights = handle.topk_weights if weighted else None
    routing = handle.routing._replace(algorithm=algorithm)
    with by_handle(communicator, handle):
        segments, idx = handle.segments, handle.topk_idx
        record = CombineArguments(rows, segments, idx, weights, False, *routing)
        return _sums(COMBINE, communicator, record, combine_rows, async_op)  # type: ignore[no-any-return]


def _sums(
    op: str,
    communicator: Communicator,
    given: Any,
    form: Callable[..., Any],
    async_op: bool,
    *,
    as_op: Callable[[Any, Any], Any] = lambda given, made: given,
    look: Callable[..., bool] | None = is_seen,
) -> Any:
    """Return the sums by token, computed by ``form``. ``as_op`` adds the call's findings to arguments."""
    known: Op = block_scaled.op_of(op, getattr(given, "format", ""))
    if not requires_gradients(*known.tensors_of(given)):
        return form(communicator, (given, None), async_op=async_op)
    given.return_rows = requires_gradients(given.topk_weights)  # their gradient needs the rows
    outputs: list[Tensor] = []

    def run(record: Any, async_op: bool) -> Any:
        with communicator.accepting(OP if op == ROUTED else op):
            record = block_scaled.quantize_record(record)
            outputs.extend(known.outputs(record, communicator.world_size))
        return form(communicator, (record, outputs), async_op=async_op)

    def results(record: Any, result: Any) -> tuple[Any, list[Tensor]]:
        return as_op(record, result), outputs

    def finish(outputs: list[Tensor], _: Any) -> Tensor:
        return outputs[0]

    options: Any = {"results": results, "look": look}
    return run_recorded(known, communicator, given, run, finish, async_op, **options)


def permute(
    x: Tensor | Scaled, topk_idx: Tensor, num_experts: int, *, num_out_tokens: int | None = None
) -> tuple[Tensor | Scaled, Tensor]:
    """Return the rows of ``x`` by expert, and their number for each expert, for the grouped matmuls.

    ``x`` ``(t, hidden)``, or an :class:`interlace.Scaled` of that shape, and then the rows are one, too.
    ``topk_idx`` integers ``(t, k)``, -1 for none. Returns ``(rows, splits)``: ``(r, hidden)`` sorted by
    expert, then by token, and int64 ``(num_experts,)``. No communication; gradients go to ``x``. The host
    of a GPU waits for ``r`` unless ``num_out_tokens`` is passed. With the maximum, ``t * k``, rows of slots
    without an expert are the last ones. Raises RuntimeError, torch's, for shapes that do not fit. On a CPU,
    without ``num_out_tokens``, raises ValueError for an expert out of range. Semantics: Megatron-core's
    ``permute``.

    >>> rows, splits = interlace.experts.permute(
    ...     torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [1, -1]]), 2
    ... )
    >>> rows.flatten().tolist(), splits.tolist()
    ([1.0, 1.0, 2.0], [1, 2])
    """
    if isinstance(x, Scaled):
        packed = block_scaled.packed_tokens(x)[0]
        rows: Any
        rows, counts = permute(packed, topk_idx, num_experts, num_out_tokens=num_out_tokens)
        return unpacked_rows(rows, x.kind, x.shape[-1]), counts
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor or an interlace.Scaled, got {checks.describe(x)}")
    traced = torch.compiler.is_compiling() or modes_active()
    if num_out_tokens is None and topk_idx.device.type == "cpu" and not traced:
        check_experts(topk_idx, num_experts)
    chosen = Assignment(topk_idx.to(torch.int64), num_experts, 1)
    slots = chosen.slots(int(chosen.counts.sum()) if num_out_tokens is None else num_out_tokens)
    return x[slots // topk_idx.shape[1]], chosen.counts


def low_latency_dispatch(
    x: Tensor,
    topk_idx: Tensor,
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    *,
    use_fp8: bool = True,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
) -> tuple[Received, DispatchHandle] | Work:
    """Dispatch few tokens into fixed places; every expert has places for all tokens that can arrive.

    ``x`` ``(t, hidden)``, ``t`` at most ``num_max_dispatch_tokens_per_rank``; ``topk_idx`` ``(t, k)``, -1
    for none. ``use_fp8`` sends float8_e4m3fn with a scale per 128 channels. Returns ``(received, handle)``.
    ``received.x`` is ``(experts of this rank, W * num_max_dispatch_tokens_per_rank, hidden)``.
    ``received.num_tokens_per_expert``, on the device, is the number of rows of each expert: its first rows;
    the others are zero. No host waits for counts of its GPU.

    Raises ValueError or TypeError on every rank, before any data moves. Gradients as for
    :func:`interlace.experts.dispatch`, without ``use_fp8``.

    Semantics: DeepEP's ``Buffer.low_latency_dispatch``; its ``packed_recv_x`` and ``packed_recv_count`` are
    ``received.x`` (with ``received.scales``) and ``received.num_tokens_per_expert``. Rows are in the order
    of source ranks, and there is no hook.

    >>> def on_rank():
    ...     x, experts = torch.full((1, 128), 1.0 + interlace.get_rank()), torch.tensor([[0, 1]])
    ...     received, handle = interlace.experts.low_latency_dispatch(x, experts, 2, 2)
    ...     counts = received.num_tokens_per_expert.tolist()
    ...     return tuple(received.x.shape), received.x.dtype, counts
    >>> interlace.run(on_rank, 2)[0]
    ((1, 4, 128), torch.float8_e4m3fn, [2])
    """
    most, operands = num_max_dispatch_tokens_per_rank, (x, topk_idx, None, num_experts)
    options = {"low_latency": True, "algorithm": algorithm}
    return _dispatch(operands, most, use_fp8, group, async_op, **options)  # type: ignore[no-any-return]


def low_latency_combine(
    y: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    handle: DispatchHandle,
    *,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
) -> Tensor | Work:
    """Send rows back to their tokens, times ``topk_weights`` ``(t, k)``, and sum them: ``(t, n)``.

    ``y`` ``(experts of this rank, W * num_max_dispatch_tokens_per_rank, n)``; only the rows that the
    dispatch filled are read. ``topk_idx``, ``handle`` and ``group`` are the dispatch's. Sums are computed
    as by :func:`interlace.experts.combine`. Raises ValueError or TypeError on every rank, before any data
    moves, also if ``topk_idx`` differs from the dispatch's. On a GPU the host compares only its shape; rows
    return by the dispatch's.

    Semantics: DeepEP's ``Buffer.low_latency_combine``.

    >>> def on_rank():
    ...     x, experts, weights = torch.ones(1, 2), torch.tensor([[0, 1]]), torch.tensor([[1.0, 3.0]])
    ...     received, handle = interlace.experts.low_latency_dispatch(x, experts, 1, 2, use_fp8=False)
    ...     return interlace.experts.low_latency_combine(received.x, experts, weights, handle).tolist()
    >>> interlace.run(on_rank, 2)
    [[[4.0, 4.0]], [[4.0, 4.0]]]
    """
    if isinstance(handle, DispatchHandle):  # otherwise combine refuses it
        communicator = resolve(handle.group).on(y)
        with communicator.accepting(COMBINE):
            check_same_choice(communicator, handle.topk_idx, topk_idx)
        handle = handle._replace(topk_weights=topk_weights)
    return combine(y, handle, group=group, async_op=async_op, algorithm=algorithm)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` as float8_e4m3fn, and float32 scales, one per 128 channels: ``x ~= values * scales``.

    ``x`` ``(..., hidden)``, ``hidden`` a multiple of 128; scales are ``(..., hidden / 128)``. A scale is
    the largest magnitude of its channels / 448. Not differentiable. Raises ValueError for another
    ``hidden``. Semantics: DeepEP's ``use_fp8``, its ``per_token_cast_to_fp8``.

    >>> values, scales = interlace.experts.quantize(torch.full((1, 128), 7.0))
    >>> values.dtype, values[0, 0].item(), round(448 * scales.item(), 4)
    (torch.float8_e4m3fn, 448.0, 7.0)
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {checks.describe(x)}")
    if x.shape[-1] % BLOCK:
        raise ValueError(f"hidden must be a multiple of {BLOCK}, got x of shape {tuple(x.shape)}")
    blocks = (
        x.detach().to(torch.float32).contiguous().view(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    )
    scales = blocks.abs().amax(-1).clamp(min=SMALLEST) / LARGEST
    values = (blocks / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.flatten(-2), scales


def dequantize(x: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the numbers for ``x`` in fp8 ``(..., hidden)`` and its ``scales``, as ``dtype``.

    Raises ValueError unless there is a scale per 128 channels. Semantics: the inverse of :func:`quantize`.

    >>> interlace.experts.dequantize(*interlace.experts.quantize(torch.full((1, 128), 7.0)))[0, 0].item()
    7.0
    """
    if x.shape[-1] != BLOCK * scales.shape[-1]:
        raise ValueError(
            f"x of shape {tuple(x.shape)} needs a scale per {BLOCK} channels, got {tuple(scales.shape)}"
        )
    blocks = x.to(torch.float32).contiguous().view(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    return (blocks * scales.unsqueeze(-1)).flatten(-2).to(dtype)


def all_gather_grouped_matmul(
    input: Tensor | Scaled,
    weight: Tensor | Scaled,
    input_splits: Splits,
    output_splits: Splits | None = None,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    group: Group = None,
    return_received: bool = False,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
    format: BlockFormatName | None = None,
) -> tuple[Tensor, ...] | Work:
    """Multiply the rows of all ranks by their experts' weights on every rank, as rows arrive.

    For tensor-parallel experts, where every rank has a slice of each: ``weight`` holds all E experts.

    Parameters
    ----------
    input : this rank's rows, ``(t, k)``, sorted by expert. ``t`` may differ between ranks. Any strides.
    weight : ``(E, k, n)`` with any strides; the ``(E, n, k)`` of stacked ``nn.Linear`` weights is read in
        place as ``weight.transpose(1, 2)``. ``n`` may differ between ranks.
    input_splits : rows for each of the E experts: ints, or a tensor of integers (the host waits for a
        tensor on a GPU). Their sum is ``t``.
    output_splits : the expected result's rows, E * W ints by expert and source rank; compared with the
        actual rows. None: not compared.
    bias : ``(E, n)``.
    activation, algorithm, out_dtype : as for :func:`interlace.all_gather_matmul`.
    return_received : also return the rows of all ranks in the order of ``output``.
    format : as for :func:`interlace.all_gather_matmul`. For a weight's gradient, blocks are along the rows
        of its expert, which come from all ranks. Not with ``return_received``.

    Returns
    -------
    ``(output, splits)``, or ``(received, output, splits)`` with ``return_received``; with ``async_op`` a
    :class:`Work` whose ``wait()`` returns it. ``output`` is ``(r, n)``, rows by expert, then by source
    rank, then in the source's order; ``splits`` is int64 ``(E, W)``, on the CPU.

    Raises ValueError or TypeError naming the argument, both values and the rank.

    Gradients are recorded, as by :func:`all_gather_matmul`.

    >>> def layer():
    ...     rank, weight = interlace.get_rank(), torch.stack([torch.ones(4, 1), 2 * torch.ones(4, 1)])
    ...     rows = torch.full((3, 4), float(1 + rank))
    ...     output, splits = interlace.all_gather_grouped_matmul(rows, weight, [1 + rank, 2 - rank])
    ...     return output.flatten().tolist(), splits.tolist()
    >>> interlace.run(layer, 2)[0]
    ([4.0, 8.0, 8.0, 8.0, 8.0, 16.0], [[1, 2], [2, 1]])
    """
    about: Any = (
        input_splits, output_splits, return_received, algorithm, out_dtype, activation, 0,
        grouped.GATHER, False, format or "",
    )  # fmt: skip
    call = GroupedArguments(input, weight, bias, *about)
    return _run_grouped(_grouped_matmul, group, call, async_op)  # type: ignore[no-any-return]


def all_to_all_grouped_matmul(
    input: Tensor | Scaled,
    weight: Tensor | Scaled,
    input_splits: Splits,
    output_splits: Splits | None = None,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    group: Group = None,
    return_received: bool = False,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
    num_max_rows_per_rank: int | None = None,
    format: BlockFormatName | None = None,
) -> tuple[Tensor, ...] | tuple[Tensor, DispatchHandle] | Work:
    """Send every row to the rank that has its expert, and multiply it by the expert's weight on arrival.

    For expert-parallel experts, which are spread over ranks: of E experts rank r has those from
    ``r * E / W`` on, and ``weight`` holds them, ``(E / W, k, n)``. ``input_splits`` still has all E, so the
    rows for one rank are contiguous, as for ``torch.distributed.all_to_all_single``. Splits may be uneven
    and may contain zeros.

    ``bias`` is ``(E / W, n)``, ``output_splits`` has E / W * W ints and ``splits`` is ``(E / W, W)``.
    Everything else is as for :func:`all_gather_grouped_matmul`. Raises what that does. Gradients do not
    need equal numbers of rows.

    To bring each row back to its place in ``input``, sort ``output`` by source, then by expert
    (``splits.T``), and call ``all_to_all_single`` with the sizes exchanged.

    With ``num_max_rows_per_rank``, a bound of every rank's rows, counts stay on the device.
    ``input_splits`` is a tensor there, whose sum may be less than ``t``: later rows are not sent.
    ``output`` has the length for the worst case, ``(W * num_max_rows_per_rank, n)``, and is zero in unused
    rows. In place of ``splits`` the op returns a handle, like a dispatch of the rows, for
    :func:`grouped_matmul_combine`. The fused algorithm is what "auto" uses there on GPUs of one node. With
    it no host waits for its GPU, nor for another rank if an equal call was made before. With gradients it
    does wait. ``n`` is the same on all ranks. ``output_splits`` and ``return_received`` are not allowed.

    >>> def layer():
    ...     rank = interlace.get_rank()
    ...     weight = torch.full((1, 4, 1), 10.0 ** rank)  # one expert per rank
    ...     rows = torch.full((3, 4), 1.0 + rank)
    ...     output, splits = interlace.all_to_all_grouped_matmul(rows, weight, [2, 1])
    ...     return output.flatten().tolist(), splits.tolist()
    >>> interlace.run(layer, 2)
    [([4.0, 4.0, 8.0, 8.0], [[2, 2]]), ([40.0, 80.0], [[1, 1]])]
    """
    about: Any = (
        input_splits, output_splits, return_received, algorithm, out_dtype, activation, 0,
        grouped.EXCHANGE, False, format or "",
    )  # fmt: skip
    call = GroupedArguments(input, weight, bias, *about)

    def run(communicator: Communicator, call: GroupedArguments, async_op: bool) -> Any:
        number = dispatch_number(communicator)  # also without a bound: other ranks may have one
        if num_max_rows_per_rank is not None:
            with communicator.accepting(call.op):
                call.max_rows = counted.checked_bound(num_max_rows_per_rank, call)
        return _grouped_matmul(communicator, call, async_op, number)

    return _run_grouped(run, group, call, async_op)  # type: ignore[no-any-return]


def grouped_matmul_combine(
    input: Tensor | Scaled,
    weight: Tensor | Scaled,
    splits: Splits | DispatchHandle,
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor | Work:
    """Multiply every row by its expert's weight, send it back, and sum over its token's experts.

    The other half of :func:`all_to_all_grouped_matmul`: with it a mixture-of-experts MLP is two fused ops.
    Each computed row is stored directly on its token's rank.

    Parameters
    ----------
    input : ``(r, k)``, rows by expert, then by source rank, as that op returns them; after a low-latency
        dispatch ``(E / W, most rows, k)``. Any strides.
    weight : ``(E / W, k, n)``, this rank's experts, with any strides.
    splits : E / W * W numbers of rows by expert and source rank, as that op returns them; the sum is ``r``.
        Or the handle of a dispatch, whose ``received.x``, row by row, has become ``input``. If the dispatch
        had a bound of tokens, counts stay on the device and no host waits for its GPU.
    topk_idx : integers ``(t, K)``: the experts of this rank's tokens, -1 for none. This rank's rows were
        sent sorted by expert, then by token and slot, as by :func:`interlace.experts.permute`. None with a
        handle, which has them.
    topk_weights : ``(t, K)``, the factors of rows, in fp32 and on the tokens' rank. None: the weights of
        the handle, or a plain sum.
    bias : ``(E / W, n)``, added to every row before it is weighted.
    algorithm, out_dtype, format : as for :func:`interlace.all_gather_grouped_matmul`.
    group : the handle's group, if there is a handle.

    Returns ``(t, n)``, or with ``async_op`` a :class:`Work` whose ``wait()`` returns it: the sum over slots
    0, 1, 2 ... in fp32 of rows that were rounded to the output's dtype. It does not depend on timing, nor
    on where experts are. A token without experts is 0.

    Raises ValueError or TypeError naming the argument, both values and the rank, on every rank, before any
    data moves. Gradients go to ``input``, ``weight``, ``bias`` and ``topk_weights``; the rows' gradients
    travel and are multiplied by :func:`all_to_all_grouped_matmul`.

    Semantics: ``torch._grouped_mm``, then DeepEP's ``combine``.

    >>> def layer():
    ...     rank = interlace.get_rank()
    ...     experts = torch.tensor([[0, 1], [1, 0]])  # experts of two tokens
    ...     rows, sent = interlace.experts.permute(torch.ones(2, 4), experts, 2)
    ...     up, down = torch.ones(1, 4, 3), torch.full((1, 3, 1), 1.0 + rank)
    ...     hidden, splits = interlace.all_to_all_grouped_matmul(rows, up, sent)
    ...     weights = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    ...     return interlace.grouped_matmul_combine(hidden, down, splits, experts, weights).tolist()
    >>> interlace.run(layer, 2)
    [[[12.0], [18.0]], [[12.0], [18.0]]]
    """
    communicator = resolve(splits.group if isinstance(splits, DispatchHandle) else group)
    operands: Any = input, weight, bias, topk_idx, topk_weights
    about: Any = [], splits, False, algorithm, out_dtype, format or ""
    record = GroupedCombineArguments(*operands, *about)
    run = functools.partial(_grouped_combine, group)
    if format or isinstance(input, Scaled) or isinstance(weight, Scaled):
        return block_scaled.run_packed(run, communicator, OP, record, async_op)  # type: ignore[no-any-return]
    return run(communicator.on(input), record, async_op)  # type: ignore[no-any-return]


def _grouped_combine(
    group: Group, communicator: Communicator, given: GroupedCombineArguments, async_op: bool
) -> Any:
    handle, form = given.splits, grouped_combine.grouped_matmul_combine
    if not isinstance(handle, DispatchHandle):

        def as_op(
            record: GroupedCombineArguments, home_splits: list[int]
        ) -> GroupedCombineArguments:
            splits = row_counts("splits", record.splits)
            return replace(record, home_splits=home_splits, splits=splits)

        return _sums(OP, communicator, given, form, async_op, as_op=as_op, look=None)
    with communicator.accepting(OP):
        check_group(group, handle.group)
    topk_idx, topk_weights = choice(handle, given.topk_idx, given.topk_weights)
    routing = routing_for(handle, topk_idx)._replace(algorithm=given.algorithm)
    with by_handle(communicator, handle):
        with communicator.accepting(OP):
            rows = flat(handle, "input", given.input)
        routed = RoutedCombineArguments(
            rows, given.weight, given.bias, handle.segments, topk_idx, topk_weights, False, *routing,
            given.out_dtype, given.format,
        )  # fmt: skip
        return _sums(ROUTED, communicator, routed, form, async_op)


def _run_grouped(
    run: Callable[..., Any], group: Group, record: GroupedArguments, async_op: bool
) -> Any:
    """Call ``run(communicator, given, async_op)``, with packed operands if they are block-scaled."""
    communicator = resolve(group)
    if record.format or isinstance(record.input, Scaled) or isinstance(record.weight, Scaled):
        call: Any = run, communicator, record.op, record, async_op
        return block_scaled.run_packed(*call, gathers=record.return_received)
    return run(communicator.on(record.input), record, async_op)


def _grouped_matmul(
    communicator: Communicator, record: GroupedArguments, async_op: bool, number: int = 0
) -> Any:
    def on_device(results: list[Tensor]) -> tuple[Tensor, DispatchHandle]:
        return results[0], counted.handle_of(communicator, record, results[1], number)

    if requires_gradients(record.input, record.weight, record.bias):
        return _recorded_grouped(communicator, record, on_device, async_op)
    if record.max_rows:
        results = counted.counted_grouped_matmul(communicator, (record,), (), async_op)
        return ContinuedWork(results, on_device) if async_op else on_device(results)
    return grouped.FORMS[record.op](communicator, (record,), (), async_op)


def _recorded_grouped(
    communicator: Communicator,
    record: GroupedArguments,
    on_device: Callable[[list[Tensor]], Any],
    async_op: bool,
) -> Any:
    """Run with torch's activation after the op: its gradient needs the values before the activation."""
    op = block_scaled.op_of(record.op, record.format)
    with communicator.accepting(record.op):
        name = checks.activation("activation", record.activation)
        known = counted.with_counts(communicator, record) if record.max_rows else record
    learning = not record.format and requires_gradients(record.weight)
    learning = record.return_received or learning
    plain = replace(known, activation=None, recorded=True, return_received=learning)

    def run(call: GroupedArguments, async_op: bool) -> Any:
        packed_call = block_scaled.quantize_record(call)
        return grouped.FORMS[call.op](communicator, (packed_call,), (), async_op)

    def results(call: GroupedArguments, result: Any) -> tuple[GroupedArguments, list[Tensor]]:
        outputs, routes = result
        sent = row_counts("input_splits", call.input_splits)
        received = [rows for each in routes.splits() for rows in each]
        return replace(call, input_splits=sent, output_splits=received), outputs

    def finish(outputs: list[Tensor], result: Any) -> Any:
        output, routes = activate(outputs[0], name), result[1]
        if record.max_rows:
            return on_device(counted.pad_results(output, routes, record))
        received = outputs[1] if record.return_received else None
        return grouped.result(received, output, routes.splits())

    options: Any = {"results": results, "look": None, "differs": bool(record.max_rows)}
    return run_recorded(op, communicator, plain, run, finish, async_op, **options)
