"""``_SymmetricMemory``, on which torch's own ``torch.distributed._symmetric_memory`` is built.

The functions of that module are torch's, unchanged: ``empty``, ``rendezvous``, ``get_symm_mem_workspace``,
``_get_backend_stream``, the pipelines of asynchronous tensor parallelism. Semantics of what is here:
``torch._C._distributed_c10d._SymmetricMemory`` of torch 2.13.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from interlace.symmetric_memory import functions, handle, torch_ops
from interlace.symmetric_memory.registration import NAMES
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


class PacketOnRanks(OpOverloadPacket):
    """An op of ``torch.ops.symm_mem`` that is called as interlace's function, and is an op otherwise.

    As ops of torch they would wait within pybind11, and ranks that take turns there end the process.
    """

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(torch_ops, self.__name__)(*args, **kwargs)


class OverloadOnRanks(OpOverload):
    """The same of its overload ``default``."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(torch_ops, self.overloadpacket.__name__)(*args, **kwargs)


def replace_ops(leaving: contextlib.ExitStack) -> None:
    """Have :data:`NAMES` call interlace until ``leaving`` is left, also by whoever has an op already."""
    for name in NAMES:
        packet: Any = getattr(torch.ops.symm_mem, name)
        for op, kind in ((packet, PacketOnRanks), (packet.default, OverloadOnRanks)):
            leaving.callback(setattr, op, "__class__", type(op))
            op.__class__ = kind
