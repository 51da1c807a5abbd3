"""Shards of uneven length made even and back, and metadata that ranks compare.

The semantics are those of ``torch/distributed/tensor/_collective_utils.py``, with errors that name what
differs, and a group.
"""

from typing import Any

import torch
from torch.distributed.tensor import _collective_utils as utilities

from interlace.groups.specs import bound
from interlace.runtime.core.call import Call


def _checked(name: str, tensor: torch.Tensor, dim: int, size: Any, *, within: bool = False) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: tensor must be a tensor, got {type(tensor).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{name}: pad_dim must be an int, got {dim!r}")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{name}: pad_dim {dim} is no dimension of shape {tuple(tensor.shape)}")
    most = tensor.size(dim) if within else "any"
    if isinstance(size, int) and (size < 0 or (isinstance(most, int) and size > most)):
        raise ValueError(
            f"{name}: pad_size must be within 0..{most} for shape {tuple(tensor.shape)}, got {size}"
        )
    return dim % tensor.dim()


def pad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int | torch.SymInt) -> torch.Tensor:
    """``tensor`` with ``pad_size`` zeros more at the end of ``pad_dim``; itself if that is 0.

    Differentiable. Raises ValueError for a dimension that is not there, or a negative size.

    >>> pad_tensor(torch.ones(2), 0, 1)
    tensor([1., 1., 0.])
    """
    dim = _checked("pad_tensor", tensor, pad_dim, pad_size)
    return utilities.pad_tensor(tensor, dim, pad_size)


def unpad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int | torch.SymInt) -> torch.Tensor:
    """A view of ``tensor`` without the last ``pad_size`` of ``pad_dim``; itself if that is 0.

    Raises ValueError for a dimension that is not there, or a size that it has not.

    >>> unpad_tensor(torch.arange(3), 0, 1)
    tensor([0, 1])
    """
    dim = _checked("unpad_tensor", tensor, pad_dim, pad_size, within=True)
    return utilities.unpad_tensor(tensor, dim, pad_size)


def fill_empty_tensor_to_shards(
    shards: list[torch.Tensor], shard_dim: int, num_empty_tensors: int
) -> list[torch.Tensor]:
    """``shards``, the same list, with as many tensors of length 0 along ``shard_dim`` at its end.

    Raises ValueError if ``shards`` is empty, which says no shape, or has no such dimension. Semantics:
    ``torch.distributed.tensor._collective_utils.fill_empty_tensor_to_shards``.

    >>> [each.shape[0] for each in fill_empty_tensor_to_shards([torch.ones(2, 3)], 0, 2)]
    [2, 0, 0]
    """
    if not num_empty_tensors:
        return shards
    if not shards:
        raise ValueError("fill_empty_tensor_to_shards: shards is empty, so no shape is known")
    dim = _checked("fill_empty_tensor_to_shards", shards[0], shard_dim, 0)
    return utilities.fill_empty_tensor_to_shards(shards, dim, num_empty_tensors)


def check_tensor_meta(
    local_tensor: torch.Tensor, check_shape_stride: bool = False, *, group: Any = None
) -> None:
    """Raise ValueError, on all ranks of ``group``, unless their ``local_tensor`` agree. Collective.

    Raises TypeError if it is no tensor. Compared, on the host, are dtype and requires_grad; with
    ``check_shape_stride`` shape and strides too. ``group`` is anything that names one, by default all
    ranks. The message names what differs, both values and a rank. Nothing of the tensor is read: it may be
    a meta tensor.

    >>> interlace.run(lambda: check_tensor_meta(torch.ones(2, device="meta")), 2)
    [None, None]
    """
    communicator = bound(group)
    with communicator.accepting("check_tensor_meta"):
        if not isinstance(local_tensor, torch.Tensor):
            raise TypeError(f"local_tensor must be a tensor, got {type(local_tensor).__name__}")
        terms: list[tuple[str, Any]] = [
            ("check_shape_stride", check_shape_stride),
            ("the dtype of local_tensor", local_tensor.dtype),
            ("requires_grad of local_tensor", local_tensor.requires_grad),
        ]
        if check_shape_stride:
            terms.append(("shape of local_tensor", tuple(local_tensor.shape)))
            terms.append(("stride of local_tensor", tuple(local_tensor.stride())))
    communicator.told(Call("check_tensor_meta", tuple(terms)))


def spec_to_bytes(spec: Any) -> int:
    """Bytes of the whole tensor that a ``DTensorSpec`` describes.

    Raises ValueError if it has no tensor_meta. Semantics:
    ``torch.distributed.tensor._collective_utils.spec_to_bytes``.

    >>> from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    >>> meta = TensorMeta(torch.Size([4, 2]), (2, 1), torch.float32)
    >>> spec_to_bytes(DTensorSpec(None, (), tensor_meta=meta))
    32
    """
    if spec.tensor_meta is None:
        raise ValueError(f"spec: {spec} has no tensor_meta, which has the dtype and the shape")
    return int(utilities.spec_to_bytes(spec))
