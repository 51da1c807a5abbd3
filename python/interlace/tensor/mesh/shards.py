"""Shards of uneven length made even and back, and metadata that ranks compare.

The semantics are those of ``torch/distributed/tensor/_collective_utils.py``, with errors that name what
differs, and a group.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed._local_tensor import maybe_run_for_local_tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, has_free_unbacked_symbols

from interlace.groups.specs import bound


def _does_nothing(pad_size: Any) -> bool:
    """Symbolic sizes are never taken for 0 while tracing, so that all ranks have the same graph."""
    if isinstance(pad_size, int):
        return pad_size == 0
    return not _are_we_tracing() and bool(guard_or_false(pad_size == 0))


def _checked(name: str, tensor: torch.Tensor, dim: int, size: Any, most: Any) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: tensor must be a tensor, got {type(tensor).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{name}: pad_dim must be an int, got {dim!r}")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{name}: pad_dim {dim} is no dimension of shape {tuple(tensor.shape)}")
    if isinstance(size, int) and (size < 0 or (isinstance(most, int) and size > most)):
        raise ValueError(
            f"{name}: pad_size must be within 0..{most} for shape {tuple(tensor.shape)}, got {size}"
        )
    return dim % tensor.dim()


@maybe_run_for_local_tensor
def pad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int | torch.SymInt) -> torch.Tensor:
    """``tensor`` with ``pad_size`` zeros more at the end of ``pad_dim``; itself if that is 0.

    Differentiable. Raises ValueError for a dimension that is not there, or a negative size.

    >>> import torch
    >>> pad_tensor(torch.ones(2), 0, 1)
    tensor([1., 1., 0.])
    """
    if _does_nothing(pad_size):
        return tensor
    dim = _checked("pad_tensor", tensor, pad_dim, pad_size, "any")
    if _are_we_tracing() and has_free_unbacked_symbols(tensor):
        shape: list[Any] = list(tensor.shape)
        shape[dim] = pad_size
        return torch.cat([tensor, tensor.new_zeros(shape)], dim)
    pad: list[Any] = [*[0, 0] * (tensor.dim() - dim - 1), 0, pad_size]
    return torch.nn.functional.pad(tensor, pad)


@maybe_run_for_local_tensor
def unpad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int | torch.SymInt) -> torch.Tensor:
    """A view of ``tensor`` without the last ``pad_size`` of ``pad_dim``; itself if that is 0.

    Raises ValueError for a dimension that is not there, or a size that it has not.

    >>> import torch
    >>> unpad_tensor(torch.arange(3), 0, 1)
    tensor([0, 1])
    """
    if _does_nothing(pad_size):
        return tensor
    known = isinstance(tensor, torch.Tensor) and -tensor.dim() <= pad_dim < tensor.dim()
    most = tensor.size(pad_dim) if known else "any"
    dim = _checked("unpad_tensor", tensor, pad_dim, pad_size, most)
    return tensor.narrow(dim, 0, tensor.size(dim) - pad_size)


def fill_empty_tensor_to_shards(
    shards: list[torch.Tensor], shard_dim: int, num_empty_tensors: int
) -> list[torch.Tensor]:
    """``shards``, the same list, with as many tensors of length 0 along ``shard_dim`` at its end.

    Raises ValueError if ``shards`` is empty, which says no shape, or has no such dimension. Semantics:
    ``torch.distributed.tensor._collective_utils.fill_empty_tensor_to_shards``.

    >>> import torch
    >>> [each.shape[0] for each in fill_empty_tensor_to_shards([torch.ones(2, 3)], 0, 2)]
    [2, 0, 0]
    """
    if not num_empty_tensors:
        return shards
    if not shards:
        raise ValueError("fill_empty_tensor_to_shards: shards is empty, so no shape is known")
    first = shards[0]
    dim = _checked("fill_empty_tensor_to_shards", first, shard_dim, 0, "any")
    empty = first.new_zeros([0 if d == dim else n for d, n in enumerate(first.shape)])
    shards.extend([empty] * num_empty_tensors)
    return shards


def check_tensor_meta(
    local_tensor: torch.Tensor, check_shape_stride: bool = False, *, group: Any = None
) -> None:
    """Raise ValueError, on all ranks of ``group``, unless their ``local_tensor`` agree. Collective.

    Raises TypeError if it is no tensor. Compared, on the host, are dtype and requires_grad; with
    ``check_shape_stride`` shape and strides too. ``group`` is anything that names one, by default all
    ranks. The message names what differs, both values and a rank. Nothing of the tensor is read: it may be
    a meta tensor.

    >>> import interlace, torch
    >>> interlace.run(lambda: check_tensor_meta(torch.ones(2, device="meta")), 2)
    [None, None]
    """
    communicator = bound(group)
    with communicator.accepting("check_tensor_meta"):
        if not isinstance(local_tensor, torch.Tensor):
            raise TypeError(
                f"local_tensor must be a tensor, got {type(local_tensor).__name__} "
                f"on rank {communicator.rank}"
            )
        names = ("dtype", "requires_grad")
        mine: dict[str, Any] = {name: getattr(local_tensor, name) for name in names}
        if check_shape_stride:
            mine |= {"shape": tuple(local_tensor.shape), "stride": tuple(local_tensor.stride())}
    first, *others = communicator.agree("check_tensor_meta", mine)
    for rank, theirs in enumerate(others, 1):
        if set(theirs) != set(first):
            raise ValueError(
                f"check_tensor_meta: check_shape_stride differs between ranks: {'shape' in first} on rank "
                f"0, {'shape' in theirs} on rank {rank}"
            )
        for name, value in first.items():
            if theirs[name] != value:
                raise ValueError(
                    f"check_tensor_meta: {name} of local_tensor differs between ranks: {value} on rank 0, "
                    f"{theirs[name]} on rank {rank}"
                )


def spec_to_bytes(spec: Any) -> int:
    """Bytes of the whole tensor that a ``DTensorSpec`` describes.

    Raises ValueError if it has no tensor_meta. Semantics:
    ``torch.distributed.tensor._collective_utils.spec_to_bytes``.

    >>> import torch
    >>> from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    >>> meta = TensorMeta(torch.Size([4, 2]), (2, 1), torch.float32)
    >>> spec_to_bytes(DTensorSpec(None, (), tensor_meta=meta))
    32
    """
    if spec.tensor_meta is None:
        raise ValueError(f"spec: {spec} has no tensor_meta, which has the dtype and the shape")
    return int(spec.tensor_meta.dtype.itemsize * math.prod(spec.tensor_meta.shape))
