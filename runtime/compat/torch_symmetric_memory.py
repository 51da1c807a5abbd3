"""torch's symmetric memory, as far as interlace reaches into it. Tried with torch 2.11, 2.13, 2.14, 2.15.

All of these have the names. Nothing was allocated with them: that was tried on machines without a GPU.
NVSHMEM's are there in builds for CUDA only, so they are asked for when used.
"""

from typing import Any

import torch

from interlace.runtime.compat.releases import needed
from interlace.runtime.compat.torch_groups import c10d

MEMORY = ("empty_strided_p2p", "rendezvous", "get_backend", "set_backend", "has_multicast_support")
__all__ = ["c10d", "empty", "nvshmem_available", "register_bare_group", "registered", "tensor_over"]

GROUPS = ("_register_process_group", "_resolve_process_group", "_unregister_process_group")

with needed("torch", "torch's symmetric memory"):
    for _name in MEMORY:
        getattr(c10d._SymmetricMemory, _name)
    for _name in GROUPS:
        getattr(c10d, _name)
    _storage_at: Any = torch._C._construct_storage_from_data_pointer


def register_bare_group(name: str, store: Any, rank: int, world_size: int) -> Any:
    """A group without a backend under ``name``, which is all that a rendezvous asks for. Keep the store."""
    group = c10d.ProcessGroup(store, rank, world_size)
    c10d._register_process_group(name, group)
    return group


def registered(name: str) -> Any:
    """torch's process group of that name, None if there is none."""
    try:
        return c10d._resolve_process_group(name)
    except RuntimeError:
        return None


def empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """Symmetric memory of this rank, as bytes."""
    made: torch.Tensor = c10d._SymmetricMemory.empty_strided_p2p(
        (nbytes,), (1,), torch.uint8, device
    )
    return made


def tensor_over(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor at ``address``, which owns nothing; ``device``'s streams copy a peer's memory, too."""
    storage = _storage_at(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


def nvshmem_available() -> bool | None:
    """Whether torch finds NVSHMEM's host library; None of a torch that was built without NVSHMEM."""
    ask = getattr(c10d, "_is_nvshmem_available", None)
    return None if ask is None else bool(ask())
