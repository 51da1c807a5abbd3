"""Torch's process groups and symmetric memory, as far as interlace uses their internals.

Tried with torch 2.11, 2.13, 2.14 and 2.15. A group in Python (``process_group/group.py``) overrides methods
of ``ProcessGroup``. The releases differ::

    names      2.13 calls ``_allgather_base`` and others ``all_gather_single`` and so on, and keeps the old
               names; older releases have only the old names: :func:`torchs_own`, :func:`under_old_name`
    recorder   2.15 attaches its flight recorder to a new group by a C++ backend that our groups do not
               have, so it would record nothing: :func:`leave_unrecorded`
    gather     2.14 has ``gather_single``, for one tensor, which dispatches an op of its own

NVSHMEM's functions exist only in builds for CUDA, so they are looked up when they are used.
"""

import functools
import inspect
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist

from interlace.runtime.compat.releases import requiring
from interlace.runtime.compat.torch_modes import disable

OPTIONS = (
    *("AllToAllOptions", "AllgatherOptions", "AllreduceCoalescedOptions", "AllreduceOptions"),
    *("BarrierOptions", "BroadcastOptions", "GatherOptions", "ReduceOptions"),
    *("ReduceScatterOptions", "ScatterOptions"),
)

with requiring("torch", "torch's process groups"):
    import torch._C._distributed_c10d as _c10d
    from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
        HashStore,
        PrefixStore,
        Store,
        TCPStore,
        Work,
        _create_work_from_future,
        _register_work,
        _resolve_process_group,
    )

    for _name in OPTIONS:
        getattr(_c10d, _name)
    resolve: Any = _resolve_process_group
    default_store: Any = dist.distributed_c10d._get_default_store

c10d: Any = _c10d
"""The module, for its options and for classes that not every build has, such as ``ProcessGroupGloo``."""

__all__ = [
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "Work",
    "_create_work_from_future",
    "_register_work",
]

_synchronous = {inspect.unwrap(function).__code__ for function in (dist.send, dist.recv)}


def is_synchronous(frame: FrameType) -> bool:
    """Return whether the frame is of a torch op that waits before it returns and returns no Work."""
    return frame.f_code in _synchronous


ProcessGroup: Any = dist.ProcessGroup  # torch does not call it as its overloads say


def of_members(
    store: object, rank: int, ranks: Sequence[int], name: str, timeout: timedelta
) -> ProcessGroup:
    """Return torch's group of backend "interlace" of these global ranks, as ``new_group`` for all ranks."""
    c10d: Any = dist.distributed_c10d
    about = len(ranks), rank, list(ranks), dist.Backend("interlace"), store, name
    group, _ = c10d._new_process_group_helper(*about, timeout=timeout)
    c10d._world.pg_group_ranks[group] = {whole: part for part, whole in enumerate(ranks)}
    return group


def leave_unrecorded(name: str) -> None:
    """Keep torch's flight recorder off groups of backend ``name``, as for groups that record themselves."""
    known: Any = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    known.add(name)


def keep_outside_compilation(group_class: type) -> None:
    """Keep Dynamo out of a class's methods and their callees: it fails in a method of an opaque object."""
    for method in vars(group_class).values():
        if isinstance(method, FunctionType):
            disable(method)


OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


@functools.cache
def torchs_own(name: str) -> Any:
    """Return torch's own method, for a call from a function with the same name as the method.

    pybind11 recognises a call of the base class by the name of the calling function. With another name it
    would call the override again, in an endless recursion.
    """
    known = name if hasattr(ProcessGroup, name) else OLD_NAMES[name]
    method = getattr(ProcessGroup, known)

    def own(self: Any, *args: object) -> Any:
        return method(self, *args)

    own.__code__ = own.__code__.replace(co_name=known)
    return own


def under_old_name(new: str) -> property:
    """Return our method under its old name; torch's own while the group calls it (``_above``).

    torch looks for an override under the old name last. It would find ours when it runs its own method, and
    end its search there. Before 2.13 it knows only the old name and must find ours under it.
    """
    old = getattr(ProcessGroup, OLD_NAMES[new])
    has_both = hasattr(ProcessGroup, new)

    def method(self: Any) -> Any:
        return old.__get__(self) if has_both and self._above else getattr(self, new)

    return property(method)


MEMORY = ("empty_strided_p2p", "rendezvous", "get_backend", "set_backend", "has_multicast_support")

GROUPS = ("_register_process_group", "_resolve_process_group", "_unregister_process_group")

with requiring("torch", "torch's symmetric memory"):
    for _name in MEMORY:
        getattr(c10d._SymmetricMemory, _name)
    for _name in GROUPS:
        getattr(c10d, _name)
    _storage_at: Any = torch._C._construct_storage_from_data_pointer


def register_bare_group(name: str, store: object, rank: int, world_size: int) -> Any:
    """Register a group without backend under ``name``, which suffices for a rendezvous. Keep the store."""
    group = c10d.ProcessGroup(store, rank, world_size)
    c10d._register_process_group(name, group)
    return group


def registered_group(name: str) -> Any:
    try:
        return c10d._resolve_process_group(name)
    except RuntimeError:
        return None


def empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate symmetric memory of this rank, as bytes."""
    tensor: torch.Tensor = c10d._SymmetricMemory.empty_strided_p2p(
        (nbytes,), (1,), torch.uint8, device
    )
    return tensor


def tensor_over(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a uint8 tensor at ``address`` that owns nothing. ``device`` also copies peers' memory."""
    storage = _storage_at(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


def nvshmem_available() -> bool | None:
    """Return whether torch finds NVSHMEM's host library; None if torch was built without NVSHMEM."""
    ask = getattr(c10d, "_is_nvshmem_available", None)
    return None if ask is None else bool(ask())
