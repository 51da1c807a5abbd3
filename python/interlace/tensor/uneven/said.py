"""What the ranks of an uneven collective say of their tensors, and whether that fits together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.arguments import checks, dense
from interlace.collectives.all_to_all import whole_numbers
from interlace.runtime.core.call import Terms
from interlace.runtime.core.communicator import Communicator
from interlace.tensor.uneven import blocks as moves
from interlace.tensor.uneven.message import exchange
from interlace.tensor.uneven.placeholder import Placeholder

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


def checked_sizes(sizes: Sizes, communicator: Communicator) -> tuple[int, ...] | None:
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


def says(tensor: torch.Tensor | None, dim: Any, sizes: Sizes, communicator: Communicator) -> Said:
    rank = communicator.rank
    lengths = checked_sizes(sizes, communicator)
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


def check_accumulate(accumulate: Any, communicator: Communicator) -> None:
    if accumulate is not None:
        checks.one_of("accumulate", accumulate, ("fp32",), communicator.rank)


def gradient_mode() -> tuple[str, bool]:
    return "torch.is_grad_enabled()", torch.is_grad_enabled()


def _same_sizes(parts: Sequence[Said], expected: Sequence[int], says: str) -> None:
    for rank, said in enumerate(parts):
        if said.sizes is not None and said.sizes != tuple(expected):
            raise ValueError(f"sizes is {list(said.sizes)} on rank {rank}, but {says}")


def fit_source(parts: list[Said], root: int) -> None:
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


def shared(
    op: str,
    tensor: Any,
    sizes: Sizes,
    dim: int,
    communicator: Communicator,
    terms: Terms = (),
) -> tuple[tuple[int, ...], list[moves.Block], bool]:
    """The whole's shape, where the parts of all ranks lie in it, whether any requires gradients."""
    with moves.refused_by_all(communicator, op):
        own = says(with_data("tensor", tensor, communicator), dim, sizes, communicator)
    terms = (("dtype of tensor", own.dtype), ("dim", own.dim), *terms, gradient_mode())
    parts: list[Said] = exchange(communicator, op, terms, own, _fit_parts)
    shapes = [said.shape for said in parts if said.shape is not None]
    lengths = [shape[own.dim] for shape in shapes]
    whole = (*shapes[0][: own.dim], sum(lengths), *shapes[0][own.dim + 1 :])
    needs = any(said.requires_grad for said in parts)
    return whole, moves.along(whole, own.dim, lengths), needs


def _fit_parts(parts: list[Said]) -> None:
    first, dim = parts[0].shape, parts[0].dim
    assert first is not None
    for rank, said in enumerate(parts):
        shape = said.shape
        assert shape is not None
        if len(shape) != len(first) or off(shape, dim) != off(first, dim):
            raise ValueError(
                f"tensor must be equal in shape off dim {dim} on all ranks, got {first} on rank 0, {shape} "
                f"on rank {rank}"
            )
    found = [said.shape[dim] for said in parts if said.shape is not None]
    _same_sizes(parts, found, f"the tensors have {found} along dim {dim}, by rank")


def off(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def gradient_here(
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
