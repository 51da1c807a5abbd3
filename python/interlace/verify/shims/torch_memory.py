"""``_SymmetricMemory``, on which torch's own ``torch.distributed._symmetric_memory`` is built.

The functions of that module are torch's, unchanged: ``empty``, ``rendezvous``, ``get_symm_mem_workspace``,
``_get_backend_stream``, the pipelines of asynchronous tensor parallelism. Semantics of what is here:
``torch._C._distributed_c10d._SymmetricMemory`` of torch 2.13.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.symmetric_memory import functions, handle
from interlace.verify.shims.torch_cuda import get_device_capability, run_streams

_groups: dict[int, str] = {}  # of allocations that were told one, by address


class MemoryOfTorch(handle.SymmetricMemory):
    """The handle, and the functions that torch has on its class."""

    signal_pad_size: Any = functions.DEFAULT_SIGNAL_PAD_SIZE

    @staticmethod
    def empty_strided_p2p(
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: Any,
        group_name: str | None = None,
        alloc_id: int | None = None,
    ) -> torch.Tensor:
        """Symmetric memory of this rank, kept to the end of the run: to free it waits for the device.

        ``alloc_id``, which asks for the same memory again, is ignored.
        """
        functions.set_signal_pad_size(MemoryOfTorch.signal_pad_size)
        elements = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        whole = functions.empty(max(elements, 0), dtype=dtype)
        run_streams().kept.append(whole)
        _groups.pop(whole.data_ptr(), None)
        if group_name is not None:
            _groups[whole.data_ptr()] = group_name
        return whole.as_strided(tuple(size), tuple(stride))

    @staticmethod
    def rendezvous(tensor: torch.Tensor, group_name: str | None = None) -> Any:
        """The handle; None for a tensor that is not in symmetric memory."""
        if not functions.is_symm_mem_tensor(tensor):
            return None
        known = _groups.get(tensor.untyped_storage().data_ptr())
        return functions.rendezvous(tensor, group_name or known)

    @staticmethod
    def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
        return functions.is_symm_mem_tensor(tensor)

    @staticmethod
    def has_multicast_support(device_type: Any = None, device_idx: int = 0) -> bool:
        """From sm_90 on, where ``multicast_ptr`` is an address for multimem instructions."""
        return get_device_capability() >= (9, 0)

    @staticmethod
    def get_backend(device: Any) -> str:
        return "CUDA"

    @staticmethod
    def set_backend(name: str) -> None:
        """All backends are the same memory here."""

    @staticmethod
    def set_group_info(group_name: str, rank: int, world_size: int, store: Any) -> None:
        """A group is known by its name already."""

    @staticmethod
    def get_mempool_allocator(device: Any) -> None:
        """There are no pools."""
