"""Differentiable collectives of parts that differ in length along a dim.

They move what :mod:`interlace.ops.collectives.uneven`'s do, and return tensors. What those are told by all
ranks, these find out: dtype, shape, lengths and whether gradients are wanted go in one small message before
the tensors.

=======================  ===============================================================================
op                       gradient of its input
=======================  ===============================================================================
``scatter_v``            ``gather_v`` of the parts' gradients, to the source
``gather_v``             ``scatter_v`` of the whole's gradient
``all_gather_v``         reduce_scatter: the sum of all ranks' gradients of this rank's part
``indexed_all_to_all_v`` all_to_all back, and ``index_add_``
=======================  ===============================================================================

A gradient is that of the sum of all ranks' losses. If any rank's input requires one, backward is
collective: every rank calls it on something made of its result. There are no second derivatives.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.groups.groups import resolve
from interlace.ops.collectives import rootless
from interlace.ops.collectives.all_to_all import _all_to_all, one_length_per_rank
from interlace.ops.op.sim_backward import in_rank
from interlace.runtime.core import plain
from interlace.runtime.core.communicator import Communicator
from interlace.tensor import blocks, facts
from interlace.tensor.placeholder import Placeholder


def scatter_v(
    tensor: torch.Tensor | None,
    sizes: facts.Sizes = None,
    dim: int = 0,
    *,
    src: int | None = None,
    group_src: int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """This rank's part, ``sizes[rank]`` long along ``dim``, of the tensor of rank ``src``.

    Parameters
    ----------
    tensor : on the source, of any dtype and shape but 0-dim. Elsewhere None, or a :class:`Placeholder`,
        whose shape and dtype are compared with the source's tensor. Receivers need to know nothing else.
    sizes : lengths by rank; by default those of ``torch.chunk``, with zeros at the end. Other ranks may
        leave them out.
    dim : the same on every rank; may count from the end.
    src, group_src : the source as a rank of the default group, 0 by default, or of ``group``.

    The result is a new, dense tensor, and requires gradients if the source's tensor does. Raises ValueError
    or TypeError on every rank before the tensor moves. As ``torch.distributed.scatter``, of unequal parts.

    >>> def part():
    ...     whole = torch.arange(5.0) if interlace.get_rank() == 0 else None
    ...     return interlace.tensor.scatter_v(whole, [3, 2] if whole is not None else None)
    >>> interlace.run(part, 2)
    [tensor([0., 1., 2.]), tensor([3., 4.])]
    """
    op = "scatter_v"
    communicator = resolve(group)
    with communicator.accepting(op):
        root = checks.group_rank("src", src, group_src, communicator, default=0)
        tensor = facts.source_tensor(tensor, root, communicator)
        own = facts.checked_facts(tensor, dim, sizes, communicator)
    terms = (("root", root), facts.gradient_mode())
    parts = facts.exchange(
        communicator, op, terms, own, lambda parts: facts.check_source(parts, root)
    )
    source: facts.TensorFacts = parts[root]
    assert source.shape is not None
    total = source.shape[source.dim]
    lengths = source.sizes or blocks.chunk_lengths(total, communicator.world_size)
    cuts = blocks.along(source.shape, source.dim, lengths)
    return scattered(communicator, tensor, cuts, root, source)


def scattered(
    communicator: Communicator,
    tensor: torch.Tensor | None,
    cuts: Sequence[blocks.Block],
    root: int,
    source: facts.TensorFacts,
) -> torch.Tensor:
    """This rank's block of ``tensor`` of ``root`` (see ``source``); in backward ``root`` gets the sum."""
    assert source.shape is not None and source.dtype is not None
    communicator = communicator.on(Placeholder((), device=source.device))
    whole = blocks.CutTensor(communicator, source.shape, source.dtype, cuts)
    is_root = communicator.rank == root
    part = whole.scatter(tensor.detach() if is_root and tensor is not None else None, root)
    assert part is not None
    if not source.requires_grad:
        return part

    def gradient(grad: torch.Tensor | None) -> torch.Tensor | None:
        mine = facts.gradient_here(communicator, "scatter_v", grad, part.shape, whole.dtype)
        total = whole.gather_sum(mine, root)
        if is_root:
            return total
        device, ranks = communicator.place.device, [communicator.ranks[root]]
        return Placeholder(whole.shape, dtype=whole.dtype, device=device, ranks=ranks)

    return facts.recorded(communicator, "scatter_v", part, tensor, gradient)


def gather_v(
    tensor: torch.Tensor,
    sizes: facts.Sizes = None,
    dim: int = 0,
    *,
    dst: int | None = None,
    group_dst: int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """On rank ``dst``: every rank's ``tensor``, one after another along ``dim``. Elsewhere a Placeholder.

    Parameters
    ----------
    tensor : of any dtype, of equal shape off ``dim`` on all ranks, of any length along it.
    sizes : lengths by rank, if they are known; compared with the tensors'.
    dst, group_dst : the receiver as a rank of the default group, 0 by default, or of ``group``.

    The :class:`Placeholder` has shape and dtype of the whole, and requires gradients as it does:
    ``backward`` of what is made of it takes part in the gradients of all ranks, which ``dst`` sends. Raises
    ValueError or TypeError on every rank before the tensors move. As ``torch.distributed.gather``, of
    unequal parts.

    >>> def whole():
    ...     return interlace.tensor.gather_v(torch.ones(1 + interlace.get_rank()))
    >>> interlace.run(whole, 2)
    [tensor([1., 1., 1.]), Placeholder(shape=(3,), dtype=torch.float32, device=cpu, ranks=(0,))]
    """
    op = "gather_v"
    communicator = resolve(group).on(tensor)
    with communicator.accepting(op):
        root = checks.group_rank("dst", dst, group_dst, communicator, default=0)
    whole, needs = facts.shared(op, tensor, sizes, dim, communicator, (("root", root),))
    return gathered(whole, tensor, root, needs)


def gathered(
    whole: blocks.CutTensor, tensor: torch.Tensor, root: int, requires_grad: bool
) -> torch.Tensor:
    """The whole on ``root``, a Placeholder elsewhere; in backward every rank gets its block's gradient."""
    communicator, own = whole.communicator, tensor.detach()
    result = whole.gather(own, root)
    is_root = result is not None
    if result is None:
        ranks = [communicator.ranks[root]]
        result = Placeholder(whole.shape, dtype=own.dtype, device=own.device, ranks=ranks)
    if not requires_grad:
        return result

    def gradient(grad: torch.Tensor | None) -> torch.Tensor | None:
        given = None
        if is_root:
            given = facts.gradient_here(communicator, "gather_v", grad, whole.shape, own.dtype)
        part = whole.scatter(given, root)
        return torch.zeros_like(own) if part is None else part

    return facts.recorded(communicator, "gather_v", result, tensor, gradient)


def all_gather_v(
    tensor: torch.Tensor,
    sizes: facts.Sizes = None,
    dim: int = 0,
    *,
    group: Group = None,
    accumulate: str | None = "fp32",
) -> torch.Tensor:
    """On all ranks: every rank's ``tensor``, one after another along ``dim``.

    Parameters
    ----------
    tensor, sizes : as for :func:`gather_v`, which have any length along ``dim``.
    accumulate : of the gradients, which are summed over ranks in rank order: "fp32", rounded once to their
        dtype (wider dtypes keep theirs), or None, rounded to their dtype after each addition.

    Raises ValueError or TypeError on every rank before the tensors move.

    >>> def whole():
    ...     return interlace.tensor.all_gather_v(torch.ones(1 + interlace.get_rank())).tolist()
    >>> interlace.run(whole, 2)
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    op = "all_gather_v"
    communicator = resolve(group).on(tensor)
    with communicator.accepting(op):
        facts.check_accumulate(accumulate)
    terms = (("accumulate", accumulate),)
    whole, needs = facts.shared(op, tensor, sizes, dim, communicator, terms)
    own, result = tensor.detach(), whole.empty(whole.shape)
    in_rank(lambda: rootless._all_gather(communicator, (whole.parts(result), own)))
    if not needs:
        return result

    def gradient(grad: torch.Tensor | None) -> torch.Tensor:
        given = facts.gradient_here(communicator, op, grad, whole.shape, own.dtype)
        return _reduced(communicator, whole.parts(given), own, accumulate)

    return facts.recorded(communicator, op, result, tensor, gradient)


def _reduced(
    communicator: Communicator, parts: list[torch.Tensor], own: torch.Tensor, accumulate: str | None
) -> torch.Tensor:
    """The sum over ranks of their ``parts[own rank]``, in rank order."""
    if blocks.wide(own.dtype) == blocks.wide(own.dtype, accumulate):
        out = torch.empty_like(own, memory_format=torch.contiguous_format)
        rootless._reduce_scatter(communicator, (out, parts))
        return out
    received = [torch.empty_like(own) for _ in parts]
    _all_to_all(communicator, (received, parts))
    total = torch.zeros_like(own)
    for each in received:
        total.add_(each)
    return total


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
    group: Group = None,
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
    whole = blocks.CutTensor(communicator, shape, own.dtype, blocks.along(shape, dim, lengths))
    result = whole.empty(shape)
    bits = blocks.bits(own)  # torch selects numbers of some dtypes only
    sent = [bits.index_select(dim, each).view(own.dtype) for each in picked]
    in_rank(lambda: _all_to_all(communicator, (whole.parts(result), sent)))
    if not any(each.requires_grad for each in parts):
        return result

    def gradient(grad: torch.Tensor | None) -> torch.Tensor:
        given = facts.gradient_here(communicator, op, grad, whole.shape, own.dtype)
        back = [torch.empty_like(each) for each in sent]
        _all_to_all(communicator, (back, whole.parts(given)))
        wide = blocks.wide(own.dtype, accumulate)
        total = torch.zeros(own.shape, dtype=wide, device=own.device)
        for where, each in zip(picked, back, strict=True):
            total.index_add_(dim, where, each.to(wide))
        return total.to(own.dtype)

    return facts.recorded(communicator, op, result, tensor, gradient)


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
