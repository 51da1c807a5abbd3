"""All-to-all of picked positions: every rank picks some of its tensor for every rank."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from interlace.groups.groups import resolve
from interlace.ops.collectives.all_to_all import _all_to_all, one_length_per_rank
from interlace.ops.op.sim_backward import in_rank
from interlace.runtime.core import plain
from interlace.runtime.core.communicator import Communicator
from interlace.tensor.uneven import blocks, facts
from interlace.tensor.uneven.recorded import recorded


@plain.record
class _Picked(NamedTuple):
    """A rank's message to the others. ``counts``: positions by receiver; ``matrix``: the caller's sizes."""

    shape: tuple[int, ...]
    requires_grad: bool
    counts: tuple[int, ...]
    matrix: tuple[tuple[int, ...], ...] | None


def indexed_all_to_all_v(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]] | None = None,
    dim: int = 0,
    *,
    group: Any = None,
    accumulate: str | None = "fp32",
) -> torch.Tensor:
    """The parts that all ranks pick of their tensors for this one, along ``dim``, in rank order.

    Parameters
    ----------
    tensor : of any dtype, of equal shape off ``dim`` on all ranks.
    indices : for each rank, the positions along ``dim`` that it gets, a 1-D tensor of ints. A position may
        go to several ranks, or several times to one, or nowhere.
    sizes : ``sizes[s][r]`` is how much rank s picks for rank r, if known; compared with ``indices``.
    accumulate : of the gradients, which are summed over all places a position went to: "fp32", rounded once
        to their dtype (wider dtypes keep theirs), or None, rounded to their dtype after each addition.

    Raises ValueError or TypeError on every rank before the tensors move.

    >>> def picked():
    ...     own = torch.arange(3) + 10 * interlace.get_rank()
    ...     return interlace.tensor.indexed_all_to_all_v(own, [torch.tensor([2]), torch.tensor([0, 1])])
    >>> interlace.run(picked, 2)
    [tensor([ 2, 12]), tensor([ 0,  1, 10, 11])]
    """
    op = "indexed_all_to_all_v"
    communicator = resolve(group).on(tensor)
    rank = communicator.rank
    with communicator.accepting(op):
        facts.check_accumulate(accumulate)
        facts.with_data("tensor", tensor, communicator)
        about = facts.checked_facts(tensor, dim, None, communicator)
        assert about.shape is not None
        dim = about.dim
        picked = _checked_indices(indices, about.shape[dim], communicator)
        matrix = None
        if sizes is not None:
            rows = list(sizes)
            if len(rows) != communicator.world_size:
                raise ValueError(
                    f"sizes must have one row per rank, {communicator.world_size}, got {len(rows)}"
                )
            matrix = tuple(one_length_per_rank("sizes", row, len(rows)) for row in rows)
    counts = tuple(len(each) for each in picked)
    named = (("dtype of tensor", about.dtype), ("dim", dim), ("accumulate", accumulate))
    terms = (*named, facts.gradient_mode())
    mine = _Picked(about.shape, about.requires_grad, counts, matrix)
    check = functools.partial(_check, dim)
    parts: list[_Picked] = facts.exchange(communicator, op, terms, mine, check)
    own = tensor.detach()
    picked = [each.to(device=own.device, dtype=torch.int64) for each in picked]
    lengths = [each.counts[rank] for each in parts]
    shape = (*about.shape[:dim], sum(lengths), *about.shape[dim + 1 :])
    whole = blocks.empty(communicator, shape, own.dtype)
    cuts = blocks.along(whole.shape, dim, lengths)
    bits = blocks.bits(own)  # torch selects numbers of some dtypes only
    sent = [bits.index_select(dim, each).view(own.dtype) for each in picked]
    into = [blocks.cut(whole, each) for each in cuts]
    in_rank(lambda: _all_to_all(communicator, (into, sent)))
    if not any(each.requires_grad for each in parts):
        return whole

    def gradient(grad: torch.Tensor | None) -> torch.Tensor:
        given = facts.gradient_here(communicator, op, grad, whole.shape, own.dtype)
        back = [torch.empty_like(each) for each in sent]
        _all_to_all(communicator, (back, [blocks.cut(given, each) for each in cuts]))
        wide = blocks.wide(own.dtype, accumulate)
        total = torch.zeros(own.shape, dtype=wide, device=own.device)
        for where, each in zip(picked, back, strict=True):
            total.index_add_(dim, where, each.to(wide))
        return total.to(own.dtype)

    return recorded(communicator, op, whole, tensor, gradient)


def _checked_indices(indices: Any, length: int, communicator: Communicator) -> list[torch.Tensor]:
    count = communicator.world_size
    if not isinstance(indices, (list, tuple)) or len(indices) != count:
        found = len(indices) if isinstance(indices, (list, tuple)) else type(indices).__name__
        raise TypeError(f"indices must be a list of {count} tensors, got {found}")
    for peer, each in enumerate(indices):
        if not isinstance(each, torch.Tensor) or each.dtype not in (torch.int64, torch.int32):
            kind = each.dtype if isinstance(each, torch.Tensor) else type(each).__name__
            raise TypeError(f"indices[{peer}] must be a tensor of ints, got {kind}")
        if each.dim() != 1:
            raise ValueError(f"indices[{peer}] must be 1-D, got shape {tuple(each.shape)}")
        if len(each) and not 0 <= int(each.min()) <= int(each.max()) < length:
            raise ValueError(
                f"indices[{peer}] must be within 0..{length - 1}, got {int(each.min())}.."
                f"{int(each.max())}"
            )
    return list(indices)


def _check(dim: int, parts: list[_Picked]) -> None:
    facts.check_equal_beside(dim, [each.shape for each in parts])
    for rank, own in enumerate(parts):
        for sender, other in enumerate(parts if own.matrix else ()):
            assert own.matrix is not None
            if own.matrix[sender] != other.counts:
                raise ValueError(
                    f"sizes[{sender}] is {list(own.matrix[sender])} on rank {rank}, indices of rank "
                    f"{sender} pick {list(other.counts)}"
                )
