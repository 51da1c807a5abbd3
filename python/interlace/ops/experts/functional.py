"""The functional forms of the ops of experts, in ``interlace.functional``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments.words import BlockFormatName, FunctionalGroup, FusedAlgorithm
from interlace.ops.experts.dispatch import arguments_of, name_results
from interlace.ops.experts.grouped import GroupedArguments
from interlace.ops.experts.grouped_combine import (
    ROUTED,
    GroupedCombineArguments,
    RoutedCombineArguments,
)
from interlace.ops.experts.routing import DispatchHandle, Received, choice, flat, routing_for
from interlace.ops.matmul import block_scaled
from interlace.ops.matmul.formats import Scaled
from interlace.ops.op.calls import check, flag, ints, keeps, refuse, run, run_record

Tensor = torch.Tensor


def dispatch(
    x: Tensor | Scaled | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_experts: int,
    *,
    num_max_dispatch_tokens_per_rank: int | None = None,
    capacity: int | None = None,
    low_latency: bool = False,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: FusedAlgorithm = "auto",
) -> tuple[Received, DispatchHandle]:
    """Send tokens to the ranks of their experts, like :func:`interlace.experts.dispatch`.

    ``x`` ``(t, hidden)``, ``topk_idx`` and ``topk_weights`` ``(t, k)``; dtypes and results as for that
    function. If ``x`` is an :class:`interlace.Scaled`, so is ``received.x``. With
    ``num_max_dispatch_tokens_per_rank`` ``received.x`` has rows for the worst case, and unused rows are
    zero. Without it a graph has an unbacked size, and waits for it when it runs. ``low_latency``: like
    :func:`interlace.experts.low_latency_dispatch`. Gradients go to ``x`` and ``topk_weights``: a combine.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics: DeepEP's ``dispatch``,
    with the bound as its ``num_worst_tokens``.

    >>> def on_rank():
    ...     x, idx = torch.full((1, 2), 1.0 + interlace.get_rank()), torch.tensor([[0]])
    ...     how = {"num_max_dispatch_tokens_per_rank": 1}
    ...     received, handle = functional.dispatch(x, idx, None, 2, **how)
    ...     return received.x.tolist(), functional.combine(received.x, handle).tolist()
    >>> interlace.run(on_rank, 2)
    [([[1.0, 1.0], [2.0, 2.0]], [[1.0, 1.0]]), ([[0.0, 0.0], [0.0, 0.0]], [[2.0, 2.0]])]
    """
    flag("dispatch", group, tag, "low_latency", low_latency)
    most, how = num_max_dispatch_tokens_per_rank, {"capacity": capacity, "low_latency": low_latency}
    operands: Any = x, topk_idx, topk_weights, num_experts
    try:
        record, terms = arguments_of(
            *operands, num_max_dispatch_tokens_per_rank=most, algorithm=algorithm, **how
        )
    except (TypeError, ValueError) as error:
        refuse("dispatch", group, tag, error)
    check("dispatch", group, tag, x=record.input, topk_idx=topk_idx, topk_weights=topk_weights)
    with terms:
        return name_results(run_record("dispatch", group, tag, record), record, group, x)


def _matrix(op: str, tag: str, handle: DispatchHandle, name: str, rows: Tensor) -> Any:
    try:
        return flat(handle, name, rows)
    except ValueError as error:
        refuse(op, handle.group, tag, error)


def combine(
    y: Tensor,
    handle: DispatchHandle,
    *,
    weighted: bool = True,
    tag: str = "",
    algorithm: FusedAlgorithm = "auto",
) -> Tensor:
    """Send rows back to their tokens and sum them by slot, like :func:`interlace.experts.combine`.

    ``y``: ``(rows, n)``, with the rows of the dispatch that returned ``handle``. Returns ``(tokens, n)``.
    ``weighted``: multiply by the weights that were passed to the dispatch. Gradients go to ``y`` and the
    weights: a dispatch.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics: DeepEP's ``combine``.

    >>> def on_rank():
    ...     idx, how = torch.tensor([[0, 1]]), {"num_max_dispatch_tokens_per_rank": 1}
    ...     weights = torch.tensor([[0.5, 2.0]])
    ...     received, handle = functional.dispatch(torch.ones(1, 2), idx, weights, 2, **how)
    ...     return functional.combine(received.x * 2, handle).tolist()
    >>> interlace.run(on_rank, 2)
    [[[5.0, 5.0]], [[5.0, 5.0]]]
    """
    if not isinstance(handle, DispatchHandle):
        text = f"handle must be the handle of a dispatch, got {type(handle).__name__}"
        refuse("combine", None, tag, TypeError(text))
    group = handle.group
    check("combine", group, tag, y=y)
    flag("combine", group, tag, "weighted", weighted)
    rows = _matrix("combine", tag, handle, "y", y)
    weights = handle.topk_weights if weighted else None
    tensors = (rows, handle.segments, handle.topk_idx, weights)
    kept = weights is not None and keeps([weights])
    routing = handle.routing._replace(algorithm=algorithm)
    return run("combine", group, tag, *tensors, kept, *routing)[0]  # type: ignore[no-any-return]


def grouped_matmul_combine(
    input: Tensor | Scaled,
    weight: Tensor | Scaled,
    splits: Sequence[int] | DispatchHandle,
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    *,
    home_splits: Sequence[int] | None = None,
    bias: Tensor | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor:
    """Multiply experts' rows by their weights and sum by token: :func:`interlace.grouped_matmul_combine`.

    ``input`` ``(r, k)``, ``weight`` ``(E / W, k, n)``, ``bias`` ``(E / W, n)``, ``topk_idx`` and
    ``topk_weights`` ``(t, K)``. Splits are lists of ints. ``splits``: this rank's rows by expert and source
    rank. ``home_splits``: how many rows this rank has sent to each expert of the group, like
    ``input_splits`` of the grouped matmul before; the backward needs it. Alternatively ``splits`` is the
    handle of a dispatch, which replaces the other arguments. Its counts stay on the device, and the
    gradient is not differentiable.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics: ``torch._grouped_mm``,
    then ``torch.distributed.all_to_all_single``, then a weighted sum by token.

    >>> def on_rank():  # a token for the expert of each rank
    ...     rows, weight = torch.ones(2, 4), torch.ones(1, 4, 2)
    ...     experts = torch.tensor([[0, 1]])
    ...     how = {"home_splits": [1, 1]}
    ...     return functional.grouped_matmul_combine(rows, weight, [1, 1], experts, **how).tolist()
    >>> interlace.run(on_rank, 2)
    [[[8.0, 8.0]], [[8.0, 8.0]]]
    """
    op = "grouped_matmul_combine"
    if isinstance(splits, DispatchHandle):
        group = splits.group
        topk_idx, topk_weights = choice(splits, topk_idx, topk_weights)
    operands: Any = input, weight, bias, topk_idx, topk_weights
    about: Any = home_splits, splits, False, algorithm, out_dtype, format or ""
    record = GroupedCombineArguments(*operands, *about)
    blocks, record, terms = block_scaled.packed_by_functional(op, record, group, tag)
    factors = {"input": record.input, "weight": record.weight, "bias": bias}
    record.return_rows = topk_weights is not None and keeps([topk_weights])
    if isinstance(splits, DispatchHandle):
        check(op, group, tag, **factors, topk_weights=topk_weights)
        routing = routing_for(splits, topk_idx)._replace(algorithm=algorithm)
        rows = _matrix(op, tag, splits, "input", record.input)
        routed = RoutedCombineArguments(
            rows, record.weight, bias, splits.segments, record.topk_idx, topk_weights, record.return_rows,
            *routing, out_dtype, record.format,
        )  # fmt: skip
        with terms:
            return run_record(blocks.replace(op, ROUTED), group, tag, routed)[0]  # type: ignore[no-any-return]
    check(op, group, tag, **factors, topk_idx=topk_idx, topk_weights=topk_weights)
    record.splits = ints(op, group, tag, "splits", splits)
    record.home_splits = ints(op, group, tag, "home_splits", home_splits)
    with terms:
        return run_record(blocks, group, tag, record)[0]  # type: ignore[no-any-return]


def all_gather_grouped_matmul(
    input: Tensor | Scaled,
    weight: Tensor | Scaled,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    *,
    bias: Tensor | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    return_received: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multiply all ranks' rows by their experts' weights: :func:`interlace.all_gather_grouped_matmul`.

    ``input`` is ``(rows, k)``, by expert, ``weight`` ``(experts, k, n)``, ``bias`` ``(experts, n)``. Both
    splits are lists of ints. A graph must know the shape of the result, so ``output_splits``, by expert and
    source rank, is required. Returns the output, or ``(received, output)`` with ``return_received``.
    For gradients in a graph of symbolic lengths all ranks must have equally many rows.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics: an all-gather of rows,
    then a matmul for each expert, as ``torch._grouped_mm``.

    >>> def gathered():  # one expert, of which each rank has a slice
    ...     row, weight = torch.ones(1, 4), torch.ones(1, 4, 2)
    ...     return functional.all_gather_grouped_matmul(row, weight, [1], [1, 1]).tolist()
    >>> interlace.run(gathered, 2)
    [[[4.0, 4.0], [4.0, 4.0]], [[4.0, 4.0], [4.0, 4.0]]]
    """
    about: Any = input_splits, output_splits, return_received, algorithm, out_dtype
    record = GroupedArguments(input, weight, bias, *about)
    return _run_grouped("all_gather_grouped_matmul", group, tag, record, format)  # type: ignore[no-any-return]


def all_to_all_grouped_matmul(
    input: Tensor | Scaled,
    weight: Tensor | Scaled,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    *,
    bias: Tensor | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    return_received: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multiply rows by their weights on their experts' ranks: :func:`interlace.all_to_all_grouped_matmul`.

    ``input``, ``weight``, ``bias``, splits and result as for :func:`all_gather_grouped_matmul`, but
    ``weight`` and ``bias`` hold this rank's experts only: ``(experts / size, k, n)`` and
    ``(experts / size, n)``.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics:
    ``torch.distributed.all_to_all_single`` of rows, then ``torch._grouped_mm``.

    >>> def exchanged():  # a row for the expert of each rank
    ...     rows, weight = torch.ones(2, 4), torch.full((1, 4, 2), 1.0 + interlace.get_rank())
    ...     return functional.all_to_all_grouped_matmul(rows, weight, [1, 1], [1, 1]).tolist()
    >>> interlace.run(exchanged, 2)
    [[[4.0, 4.0], [4.0, 4.0]], [[8.0, 8.0], [8.0, 8.0]]]
    """
    about: Any = input_splits, output_splits, return_received, algorithm, out_dtype
    record = GroupedArguments(input, weight, bias, *about)
    return _run_grouped("all_to_all_grouped_matmul", group, tag, record, format)  # type: ignore[no-any-return]


def _run_grouped(
    op: str,
    group: FunctionalGroup,
    tag: str,
    record: GroupedArguments,
    format: BlockFormatName | None,
) -> Any:
    record.format = format or ""
    asked, input = record.return_received, record.input
    blocks, record, terms = block_scaled.packed_by_functional(op, record, group, tag)
    check(op, group, tag, input=record.input, weight=record.weight, bias=record.bias)
    flag(op, group, tag, "return_received", asked)
    for name in ("input_splits", "output_splits"):
        setattr(record, name, ints(op, group, tag, name, getattr(record, name)))
    record.return_received = asked or (not record.format and keeps([record.weight]))
    with terms:
        results = run_record(blocks, group, tag, record)
    return block_scaled.with_gathered(input, (results[1], results[0])) if asked else results[0]
