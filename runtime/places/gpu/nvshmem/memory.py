"""Symmetric memory of processes on several nodes, from torch's NVSHMEM backend.

torch allocates with ``nvshmem_malloc``, which all processes call together, and asks NVSHMEM for each
peer's mapping: a null pointer says that the peer is reached over the network only. What torch needs,
beside what ``cuda_processes/memory.py`` says: the backend is chosen for the whole process,
before its first symmetric tensor; and the group of all processes is registered as "0", by
``torch.distributed`` or here. A rank's number in it is its number for NVSHMEM.

A kernel that was linked with NVSHMEM's device library has a copy of its state in constant memory of its
own module, which has to be filled in once per loaded module: ``NvshmemPlace._loaded``.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.runtime.compat import torch_symmetric_memory as symmetric
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.places.gpu.processes.memory import Exchange, TorchMemory, together

BACKEND, EVERYONE = "NVSHMEM", "0"


def problem() -> str:
    """Why this process cannot use NVSHMEM through torch; "" if it can, and then it is to be used."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    available = symmetric.nvshmem_available()
    if available is None:
        return f"this torch ({torch.__version__}) was built without NVSHMEM; install one for CUDA"
    if not available:
        return "torch finds no libnvshmem_host.so; install nvidia-nvshmem-cu12 or -cu13"
    backend = symmetric.c10d._SymmetricMemory.get_backend(torch.device("cuda"))
    if backend != BACKEND:
        try:
            symmetric.c10d._SymmetricMemory.set_backend(BACKEND)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            return (
                f"torch's symmetric memory is of backend {backend!r} in this process and stays so: "
                f"{first}"
            )
    return ""


class NvshmemMemory(TorchMemory):
    """Symmetric memory of a group of all processes. Everything is collective."""

    kind = "NVSHMEM"

    def __init__(
        self, rank: int, world_size: int, device: torch.device, exchange: Exchange
    ) -> None:
        super().__init__(rank, world_size, device, exchange)
        everyone = symmetric.registered(EVERYONE)
        if everyone is None:  # NVSHMEM is begun with it, and is as long as the process
            everyone = self._group
            symmetric.c10d._register_process_group(EVERYONE, everyone)
        number = everyone.rank()
        self.numbers = [int(each) for each in exchange(b"%d" % number, "joining NVSHMEM")]
        if everyone.size() != world_size:
            raise PlaceUnavailableError(
                f"rank {rank}: NVSHMEM's memory is made by all {everyone.size()} processes together, "
                f"and this group has {world_size}"
            )

    def made(self, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Zeroed memory of this rank, and torch's handle of every rank's, which keeps it all alive.

        Its ``buffer_ptrs`` are 0 of ranks over the network. MemoryRefused, on all ranks, if one fails.
        """
        with together(self._exchange):
            memory = self._own(nbytes)
            return memory, symmetric.c10d._SymmetricMemory.rendezvous(memory, self._name)


def nodes_of(mapped: Sequence[Sequence[bool]]) -> list[int]:
    """The node of each rank, named by its first, by ``mapped[rank][peer]``, or PlaceUnavailableError."""
    nodes = [min(peer for peer, there in enumerate(row) if there) for row in mapped]
    for rank, row in enumerate(mapped):
        for peer, there in enumerate(row):
            if there != (nodes[peer] == nodes[rank]):
                how = "addresses" if there else "does not address"
                raise PlaceUnavailableError(
                    f"rank {rank} {how} rank {peer}'s memory, but their peers differ: {nodes} are no "
                    "nodes within which all is mapped"
                )
    return nodes
