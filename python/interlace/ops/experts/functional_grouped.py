"""The functional forms of the grouped matmuls; part of ``interlace.functional``.

See ``ops/experts/grouped.py`` for the order of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments.words import FunctionalGroup, FusedAlgorithm
from interlace.ops.op.calls import check, flag, ints, keeps, run_to_list

Tensor = torch.Tensor


def all_gather_grouped_matmul(
    input: Tensor,
    weight: Tensor,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    *,
    bias: Tensor | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    return_received: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """All ranks' rows, each times its expert's weight, as :func:`interlace.all_gather_grouped_matmul`.

    ``input``: ``(rows, k)``, by expert; ``weight``: ``(experts, k, n)``; ``bias``: ``(experts, n)``. Both
    splits are lists of ints: a graph must know the shape of the result, so ``output_splits``, by expert and
    source rank, has to be there. Returns the output, or ``(received, output)`` with ``return_received``.
    For gradients all ranks must have equally many rows.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics: an all-gather of rows,
    then a matmul for each expert, as ``torch._grouped_mm``.

    >>> def gathered():  # one expert, of which each rank has a slice
    ...     row, weight = torch.ones(1, 4), torch.ones(1, 4, 2)
    ...     return functional.all_gather_grouped_matmul(row, weight, [1], [1, 1]).tolist()
    >>> interlace.run(gathered, 2)
    [[[4.0, 4.0], [4.0, 4.0]], [[4.0, 4.0], [4.0, 4.0]]]
    """
    tensors, splits = (input, weight, bias), (input_splits, output_splits)
    options = (return_received, algorithm, out_dtype)
    return _grouped("all_gather_grouped_matmul", group, tag, tensors, splits, *options)  # type: ignore[no-any-return]


def all_to_all_grouped_matmul(
    input: Tensor,
    weight: Tensor,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    *,
    bias: Tensor | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    return_received: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rows at their experts' ranks, times their weights, as :func:`interlace.all_to_all_grouped_matmul`.

    ``input``, ``weight``, ``bias``, splits and result as for :func:`all_gather_grouped_matmul`, but
    ``weight`` has the own experts only, ``(experts / size, k, n)``, and ``bias`` theirs.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics:
    ``torch.distributed.all_to_all_single`` of rows, then ``torch._grouped_mm``.

    >>> def exchanged():  # a row for the expert of each rank
    ...     rows, weight = torch.ones(2, 4), torch.full((1, 4, 2), 1.0 + interlace.get_rank())
    ...     return functional.all_to_all_grouped_matmul(rows, weight, [1, 1], [1, 1]).tolist()
    >>> interlace.run(exchanged, 2)
    [[[4.0, 4.0], [4.0, 4.0]], [[8.0, 8.0], [8.0, 8.0]]]
    """
    tensors, splits = (input, weight, bias), (input_splits, output_splits)
    options = (return_received, algorithm, out_dtype)
    return _grouped("all_to_all_grouped_matmul", group, tag, tensors, splits, *options)  # type: ignore[no-any-return]


def _grouped(
    op: str,
    group: FunctionalGroup,
    tag: str,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    splits: tuple[Sequence[int], Sequence[int]],
    return_received: bool,
    *options: Any,
) -> Any:
    input, weight, bias = tensors
    check(op, group, tag, input=input, weight=weight, bias=bias)
    flag(op, group, tag, "return_received", return_received)
    sent = ints(op, group, tag, "input_splits", splits[0])
    received = ints(op, group, tag, "output_splits", splits[1])
    kept = keeps(return_received, [weight])
    made = run_to_list(op, group, tag, tensors, *tensors, sent, received, kept, *options)
    return (made[1], made[0]) if return_received else made[0]
