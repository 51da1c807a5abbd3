"""Every rank picks positions of its tensor for every rank: an all_to_all with a gather in front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.collectives.all_to_all import _all_to_all
from interlace.groups.groups import resolve
from interlace.ops.simulated_backward import in_rank
from interlace.runtime.core.communicator import Communicator
from interlace.tensor.uneven import blocks as moves
from interlace.tensor.uneven.message import exchange
from interlace.tensor.uneven.recorded import recorded
from interlace.tensor.uneven.said import (
    check_accumulate,
    checked_sizes,
    gradient_here,
    gradient_mode,
    off,
    says,
    with_data,
)


def indexed_all_to_all_v(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]] | None = None,
    dim: int = 0,
    *,
    group: Any = None,
    accumulate: str | None = "fp32",
) -> torch.Tensor:
    """What every rank picks of its tensor for this one, one after another along ``dim``, in rank order.

    Parameters
    ----------
    tensor : of any dtype, of equal shape off ``dim`` on all ranks.
    indices : for each rank, the positions along ``dim`` that it gets, a 1-D tensor of ints. A position may
        go to several ranks, or several times to one, or nowhere.
    sizes : ``sizes[s][r]`` is how much rank s picks for rank r, if known; compared with ``indices``.
    accumulate : of the gradients, which are summed over all places a position went to: "fp32", rounded once
        to their dtype (wider dtypes keep theirs), or None, rounded to their dtype after each addition.

    Raises ValueError or TypeError on every rank before the tensors move.

    >>> import interlace, torch
    >>> def picked():
    ...     own = torch.arange(3) + 10 * interlace.get_rank()
    ...     return interlace.tensor.indexed_all_to_all_v(own, [torch.tensor([2]), torch.tensor([0, 1])])
    >>> interlace.run(picked, 2)
    [tensor([ 2, 12]), tensor([ 0,  1, 10, 11])]
    """
    op = "indexed_all_to_all_v"
    communicator = resolve(group).on(tensor)
    rank, count = communicator.rank, communicator.world_size
    with moves.refused_by_all(communicator, op):
        check_accumulate(accumulate, communicator)
        said = says(with_data("tensor", tensor, communicator), dim, None, communicator)
        assert said.shape is not None
        dim = said.dim
        picked = _checked_indices(indices, said.shape[dim], communicator)
        matrix = None if sizes is None else _checked_matrix(sizes, communicator)
    counts = tuple(len(each) for each in picked)
    terms = (
        ("dtype of tensor", said.dtype),
        ("dim", dim),
        ("accumulate", accumulate),
        gradient_mode(),
    )
    own_part = (said.shape, said.requires_grad, counts, matrix)
    parts = exchange(communicator, op, terms, own_part, lambda parts: _fit_picked(parts, dim))
    own = tensor.detach()
    device = own.device
    picked = [each.to(device=device, dtype=torch.int64) for each in picked]
    lengths = [each[2][rank] for each in parts]
    whole = moves.empty(
        communicator, (*said.shape[:dim], sum(lengths), *said.shape[dim + 1 :]), own.dtype
    )
    cuts = moves.along(whole.shape, dim, lengths)
    sent = [own.index_select(dim, each) for each in picked]
    into = [moves.cut(whole, each) for each in cuts]
    in_rank(lambda: _all_to_all(communicator, into, sent))
    if not any(each[1] for each in parts):
        return whole

    def gradient(grad: torch.Tensor | None) -> torch.Tensor:
        given = gradient_here(communicator, op, grad, whole.shape, own.dtype)
        back = [torch.empty_like(each) for each in sent]
        _all_to_all(communicator, back, [moves.cut(given, each) for each in cuts])
        wide = moves.wide(own.dtype, accumulate)
        total = torch.zeros(own.shape, dtype=wide, device=device)
        for where, each in zip(picked, back, strict=True):
            total.index_add_(dim, where, each.to(wide))
        return total.to(own.dtype)

    assert len(picked) == count
    return recorded(communicator, op, whole, tensor, gradient)


def _checked_indices(indices: Any, length: int, communicator: Communicator) -> list[torch.Tensor]:
    rank, count = communicator.rank, communicator.world_size
    if not isinstance(indices, (list, tuple)) or len(indices) != count:
        found = len(indices) if isinstance(indices, (list, tuple)) else type(indices).__name__
        raise TypeError(f"indices must be a list of {count} tensors, got {found} on rank {rank}")
    for peer, each in enumerate(indices):
        if not isinstance(each, torch.Tensor) or each.dtype not in (torch.int64, torch.int32):
            kind = each.dtype if isinstance(each, torch.Tensor) else type(each).__name__
            raise TypeError(f"indices[{peer}] must be a tensor of ints, got {kind} on rank {rank}")
        if each.dim() != 1:
            raise ValueError(
                f"indices[{peer}] must have 1 dimension, got shape {tuple(each.shape)} on rank {rank}"
            )
        if len(each) and not 0 <= int(each.min()) <= int(each.max()) < length:
            raise ValueError(
                f"indices[{peer}] must be within 0..{length - 1}, got {int(each.min())}.."
                f"{int(each.max())} on rank {rank}"
            )
    return list(indices)


def _checked_matrix(sizes: Any, communicator: Communicator) -> tuple[tuple[int, ...], ...]:
    count, rank = communicator.world_size, communicator.rank
    rows = list(sizes)
    if len(rows) != count:
        raise ValueError(
            f"sizes must have one row per rank, {count}, got {len(rows)} on rank {rank}"
        )
    checked = [checked_sizes(row, communicator) for row in rows]
    return tuple(row for row in checked if row is not None)


def _fit_picked(parts: list[Any], dim: int) -> None:
    first = parts[0][0]
    for rank, (shape, _, _, matrix) in enumerate(parts):
        if len(shape) != len(first) or off(shape, dim) != off(first, dim):
            raise ValueError(
                f"tensor must be equal in shape off dim {dim} on all ranks, got {first} on rank 0, {shape} "
                f"on rank {rank}"
            )
        for sender, (_, _, counts, _) in enumerate(parts):
            if matrix is not None and matrix[sender] != counts:
                raise ValueError(
                    f"sizes[{sender}] is {list(matrix[sender])} on rank {rank}, indices of rank {sender} "
                    f"pick {list(counts)}"
                )
