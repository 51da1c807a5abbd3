"""Collectives of parts that differ in length along a dim, which return tensors and have gradients.

They move what :mod:`interlace.uneven`'s do. What those are told by all ranks, these find out: dtype, shape,
lengths and whether gradients are wanted go in one small message before the tensors.

=======================  ===============================================================================
op                       gradient of its input
=======================  ===============================================================================
``scatter_v``            ``gather_v`` of the parts' gradients, to the source
``gather_v``             ``scatter_v`` of the whole's gradient
``all_gather_v``         reduce_scatter: the sum of all ranks' gradients of this rank's part
``indexed_all_to_all_v`` all_to_all back, and ``index_add_``
=======================  ===============================================================================

A gradient is that of the sum of all ranks' losses. If any rank's input requires one, backward is collective:
every rank calls it on something made of its result. There are no second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace import checks, collectives, dense
from interlace.all_to_all import _all_to_all, whole_numbers
from interlace.groups import resolve
from interlace.roots import group_rank
from interlace.runtime.communicator import Communicator
from interlace.tensor import blocks as moves
from interlace.tensor.message import exchange
from interlace.tensor.placeholder import Placeholder
from interlace.tensor.recorded import recorded

Sizes = Sequence[int] | None


@dataclass(frozen=True)
class Said:
    """What a rank says of its tensor. ``shape`` is None where it has none."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    requires_grad: bool
    dim: int
    sizes: tuple[int, ...] | None
    device: str = ""  # its kind: a process group may serve several


def _checked_sizes(sizes: Sizes, communicator: Communicator) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    rank, count = communicator.rank, communicator.world_size
    lengths = tuple(whole_numbers("sizes", sizes, rank))
    if len(lengths) != count or min(lengths) < 0:
        raise ValueError(
            f"sizes must be one length per rank, {count}, none of them negative, got {list(lengths)} "
            f"on rank {rank}"
        )
    return lengths


def _says(tensor: torch.Tensor | None, dim: Any, sizes: Sizes, communicator: Communicator) -> Said:
    rank = communicator.rank
    lengths = _checked_sizes(sizes, communicator)
    if tensor is None:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"dim must be an int, got {dim!r} on rank {rank}")
        return Said(None, None, False, dim, lengths)
    if not tensor.dim():
        raise ValueError(f"tensor must have dimensions to be cut along, on rank {rank}")
    dim = checks.dimension("dim", dim, tensor.dim(), rank)
    needs = tensor.requires_grad and torch.is_grad_enabled()
    return Said(tuple(tensor.shape), tensor.dtype, needs, dim, lengths, tensor.device.type)


def with_data(name: str, tensor: Any, communicator: Communicator) -> torch.Tensor:
    """``tensor`` itself if an op can read it."""
    if isinstance(tensor, Placeholder):
        raise tensor._refuse(f"{name} on rank {communicator.rank}")
    dense.source(name, tensor, communicator)
    return tensor  # type: ignore[no-any-return]


def _same_sizes(parts: Sequence[Said], expected: Sequence[int], says: str) -> None:
    for rank, said in enumerate(parts):
        if said.sizes is not None and said.sizes != tuple(expected):
            raise ValueError(f"sizes is {list(said.sizes)} on rank {rank}, but {says}")


# -- one to all ----------------------------------------------------------------------------------------


def scatter_v(
    tensor: torch.Tensor | None,
    sizes: Sizes = None,
    dim: int = 0,
    *,
    src: int | None = None,
    group_src: int | None = None,
    group: Any = None,
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

    >>> import interlace, torch
    >>> def part():
    ...     whole = torch.arange(5.0) if interlace.get_rank() == 0 else None
    ...     return interlace.tensor.scatter_v(whole, [3, 2] if whole is not None else None)
    >>> interlace.run(part, 2)
    [tensor([0., 1., 2.]), tensor([3., 4.])]
    """
    op = "scatter_v"
    communicator = resolve(group)
    rank = communicator.rank
    with moves.refused_by_all(communicator, op):
        root = group_rank("src", src, group_src, communicator, default=0)
        if rank == root:
            tensor = with_data("tensor", tensor, communicator.on(tensor))
        elif tensor is not None and not isinstance(tensor, Placeholder):
            raise TypeError(
                f"tensor must be None or a Placeholder where it does not come from, the source is group "
                f"rank {root}, got a {type(tensor).__name__} on rank {rank}"
            )
        own = _says(tensor, dim, sizes, communicator)

    def check(parts: list[Said]) -> None:
        _fit_source(parts, root)

    parts = exchange(communicator, op, (("root", root), _grad_mode()), own, check)
    source: Said = parts[root]
    assert source.shape is not None and source.dtype is not None
    lengths = source.sizes or moves.chunk_lengths(source.shape[source.dim], communicator.world_size)
    cuts = moves.along(source.shape, source.dim, lengths)
    there = communicator.on(Placeholder((), device=source.device))
    return scattered(there, tensor, cuts, root, source.shape, source.dtype, source.requires_grad)


def _grad_mode() -> tuple[str, bool]:
    return "torch.is_grad_enabled()", torch.is_grad_enabled()


def _fit_source(parts: list[Said], root: int) -> None:
    source: Said = parts[root]
    assert source.shape is not None
    ndim, total = len(source.shape), source.shape[source.dim]
    lengths = source.sizes or moves.chunk_lengths(total, len(parts))
    if sum(lengths) != total:
        raise ValueError(
            f"sizes {list(lengths)} add up to {sum(lengths)} on rank {root}, its tensor of shape "
            f"{source.shape} has {total} along dim {source.dim}"
        )
    for rank, said in enumerate(parts):
        if said.shape is not None and (said.shape, said.dtype) != (source.shape, source.dtype):
            raise ValueError(
                f"tensor is {said.shape} of {said.dtype} on rank {rank}, {source.shape} of "
                f"{source.dtype} on the source, rank {root}"
            )
        if said.dim not in (source.dim, source.dim - ndim):
            raise ValueError(
                f"dim is {said.dim} on rank {rank}, {source.dim} of {ndim} on the source, rank {root}"
            )
    _same_sizes(parts, lengths, f"{list(lengths)} on the source, rank {root}")


def scattered(
    communicator: Communicator,
    tensor: torch.Tensor | None,
    cuts: Sequence[moves.Block],
    root: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
) -> torch.Tensor:
    """This rank's block of ``tensor`` of ``root``; in backward ``root`` gets the sum of the gradients."""
    is_root = communicator.rank == root
    whole = tensor.detach() if is_root and tensor is not None else None
    part = moves.scatter(communicator, whole, cuts, root, dtype)
    assert part is not None
    if not requires_grad:
        return part
    device = communicator.place.device

    def gradient(grad: torch.Tensor | None) -> torch.Tensor | None:
        mine = _gradient_here(communicator, "scatter_v", grad, part.shape, dtype)
        whole = moves.gather_sum(communicator, mine, cuts, root, shape)
        if is_root:
            return whole
        return Placeholder(shape, dtype=dtype, device=device, ranks=[communicator.ranks[root]])

    return recorded(communicator, part, tensor, gradient)


def _gradient_here(
    communicator: Communicator,
    op: str,
    grad: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of a result that is on this rank, with its data; zeros if nothing was made of it."""
    if grad is None:
        return torch.zeros(tuple(shape), dtype=dtype, device=communicator.place.device)
    with moves.refused_by_all(communicator, op):
        return with_data(f"the gradient of {op}'s result", grad, communicator)


# -- all to one ----------------------------------------------------------------------------------------


def _shared(
    op: str,
    tensor: Any,
    sizes: Sizes,
    dim: int,
    communicator: Communicator,
    terms: tuple[tuple[str, Any], ...] = (),
) -> tuple[list[Said], tuple[int, ...], list[moves.Block], bool]:
    """What all ranks say of their parts, the whole's shape, where the parts lie, whether gradients flow."""
    with moves.refused_by_all(communicator, op):
        own = _says(with_data("tensor", tensor, communicator), dim, sizes, communicator)
    terms = (("dtype of tensor", own.dtype), ("dim", own.dim), *terms, _grad_mode())
    parts: list[Said] = exchange(communicator, op, terms, own, _fit_parts)
    shapes = [said.shape for said in parts if said.shape is not None]
    lengths = [shape[own.dim] for shape in shapes]
    whole = (*shapes[0][: own.dim], sum(lengths), *shapes[0][own.dim + 1 :])
    needs = any(said.requires_grad for said in parts)
    return parts, whole, moves.along(whole, own.dim, lengths), needs


def _fit_parts(parts: list[Said]) -> None:
    first, dim = parts[0].shape, parts[0].dim
    assert first is not None
    for rank, said in enumerate(parts):
        shape = said.shape
        assert shape is not None
        if len(shape) != len(first) or _off(shape, dim) != _off(first, dim):
            raise ValueError(
                f"tensor must be equal in shape off dim {dim} on all ranks, got {first} on rank 0, {shape} "
                f"on rank {rank}"
            )
    found = [said.shape[dim] for said in parts if said.shape is not None]
    _same_sizes(parts, found, f"the tensors have {found} along dim {dim}, by rank")


def _off(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def gather_v(
    tensor: torch.Tensor,
    sizes: Sizes = None,
    dim: int = 0,
    *,
    dst: int | None = None,
    group_dst: int | None = None,
    group: Any = None,
) -> torch.Tensor:
    """On rank ``dst``: every rank's ``tensor``, one after another along ``dim``. Elsewhere a Placeholder.

    Parameters
    ----------
    tensor : of any dtype, of equal shape off ``dim`` on all ranks, of any length along it.
    sizes : lengths by rank, if they are known; compared with the tensors'.
    dst, group_dst : the receiver as a rank of the default group, 0 by default, or of ``group``.

    The :class:`Placeholder` has shape and dtype of the whole, and requires gradients as it does: ``backward``
    of what is made of it takes part in the gradients of all ranks, which ``dst`` sends. Raises ValueError or
    TypeError on every rank before the tensors move. As ``torch.distributed.gather``, of unequal parts.

    >>> import interlace, torch
    >>> def whole():
    ...     return interlace.tensor.gather_v(torch.ones(1 + interlace.get_rank()))
    >>> interlace.run(whole, 2)
    [tensor([1., 1., 1.]), Placeholder(shape=(3,), dtype=torch.float32, device=cpu, ranks=(0,))]
    """
    op = "gather_v"
    communicator = resolve(group).on(tensor)
    with moves.refused_by_all(communicator, op):
        root = group_rank("dst", dst, group_dst, communicator, default=0)
    _, shape, cuts, needs = _shared(op, tensor, sizes, dim, communicator, (("root", root),))
    return gathered(communicator, tensor, cuts, root, shape, needs)


def gathered(
    communicator: Communicator,
    tensor: torch.Tensor,
    cuts: Sequence[moves.Block | None],
    root: int,
    shape: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """The whole on ``root``, a Placeholder elsewhere; in backward every rank gets its block's gradient."""
    is_root = communicator.rank == root
    own = tensor.detach()
    whole = moves.gather(communicator, own, cuts, root, shape)
    if whole is None:
        whole = Placeholder(
            shape, dtype=tensor.dtype, device=tensor.device, ranks=[communicator.ranks[root]]
        )
    if not requires_grad:
        return whole

    def gradient(grad: torch.Tensor | None) -> torch.Tensor | None:
        given = None
        if is_root:
            given = _gradient_here(communicator, "gather_v", grad, shape, own.dtype)
        part = moves.scatter(communicator, given, cuts, root, own.dtype)
        return torch.zeros_like(own) if part is None else part

    return recorded(communicator, whole, tensor, gradient)


# -- all to all ----------------------------------------------------------------------------------------


def all_gather_v(
    tensor: torch.Tensor,
    sizes: Sizes = None,
    dim: int = 0,
    *,
    group: Any = None,
    accumulate: str | None = "fp32",
) -> torch.Tensor:
    """On all ranks: every rank's ``tensor``, one after another along ``dim``.

    Parameters
    ----------
    tensor, sizes : as for :func:`gather_v`.
    accumulate : of the gradients, which are summed over ranks in rank order: "fp32", rounded once to their
        dtype (wider dtypes keep theirs), or None, rounded to their dtype after each addition.

    Raises ValueError or TypeError on every rank before the tensors move.

    >>> import interlace, torch
    >>> def whole():
    ...     return interlace.tensor.all_gather_v(torch.ones(1 + interlace.get_rank())).tolist()
    >>> interlace.run(whole, 2)
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    op = "all_gather_v"
    communicator = resolve(group).on(tensor)
    with moves.refused_by_all(communicator, op):
        _check_accumulate(accumulate, communicator)
    terms = (("accumulate", accumulate),)
    _, shape, cuts, needs = _shared(op, tensor, sizes, dim, communicator, terms)
    own = tensor.detach()
    whole = moves.empty(communicator, shape, own.dtype)
    collectives._all_gather(communicator, [moves.cut(whole, each) for each in cuts], own, False)
    if not needs:
        return whole

    def gradient(grad: torch.Tensor | None) -> torch.Tensor:
        given = _gradient_here(communicator, op, grad, shape, own.dtype)
        parts = [moves.cut(given, each) for each in cuts]
        return _reduced(communicator, parts, own, accumulate)

    return recorded(communicator, whole, tensor, gradient)


def _check_accumulate(accumulate: Any, communicator: Communicator) -> None:
    if accumulate is not None:
        checks.one_of("accumulate", accumulate, ("fp32",), communicator.rank)


def _reduced(
    communicator: Communicator,
    parts: list[torch.Tensor],
    own: torch.Tensor,
    accumulate: str | None,
) -> torch.Tensor:
    """The sum over ranks of their ``parts[own rank]``, in rank order."""
    if moves.wide(own.dtype) == moves.wide(own.dtype, accumulate):
        out = torch.empty_like(own, memory_format=torch.contiguous_format)
        collectives._reduce_scatter(communicator, out, parts, "sum", False)
        return out
    received = [torch.empty_like(own) for _ in parts]
    _all_to_all(communicator, received, parts)
    total = torch.zeros_like(own)
    for each in received:
        total.add_(each)
    return total


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
    sizes : ``sizes[s][r]`` is how much rank s picks for rank r, if that is known; compared with ``indices``.
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
        _check_accumulate(accumulate, communicator)
        said = _says(with_data("tensor", tensor, communicator), dim, None, communicator)
        assert said.shape is not None
        dim = said.dim
        picked = _checked_indices(indices, said.shape[dim], communicator)
        matrix = None if sizes is None else _checked_matrix(sizes, communicator)
    counts = tuple(len(each) for each in picked)
    terms = (
        ("dtype of tensor", said.dtype),
        ("dim", dim),
        ("accumulate", accumulate),
        _grad_mode(),
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
    _all_to_all(communicator, [moves.cut(whole, each) for each in cuts], sent)
    if not any(each[1] for each in parts):
        return whole

    def gradient(grad: torch.Tensor | None) -> torch.Tensor:
        given = _gradient_here(communicator, op, grad, whole.shape, own.dtype)
        back = [torch.empty_like(each) for each in sent]
        _all_to_all(communicator, back, [moves.cut(given, each) for each in cuts])
        wide = moves.wide(own.dtype, accumulate)
        total = torch.zeros(own.shape, dtype=wide, device=device)
        for where, each in zip(picked, back, strict=True):
            total.index_add_(dim, where, each.to(wide))
        return total.to(own.dtype)

    assert len(picked) == count
    return recorded(communicator, whole, tensor, gradient)


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
    checked = [_checked_sizes(row, communicator) for row in rows]
    return tuple(row for row in checked if row is not None)


def _fit_picked(parts: list[Any], dim: int) -> None:
    first = parts[0][0]
    for rank, (shape, _, _, matrix) in enumerate(parts):
        if len(shape) != len(first) or _off(shape, dim) != _off(first, dim):
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
