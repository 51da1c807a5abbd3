"""The place ``nvshmem``: processes on several nodes, one per GPU.

Within a node it works like the place ``cuda``: ranks address each other's memory. To other nodes, kernels
put by NVSHMEM. Only kernels that put are linked with its device library. NVSHMEM's mappings determine which
ranks share a node. If all nodes of a machine share one NVLink domain, it is one node: no kernel puts.

Streams signal only by kernels, because stream memory operations also need the peer's address.

torch allocates with ``nvshmem_malloc``, which all processes call together, and asks NVSHMEM for each peer's
mapping. A null pointer means that the peer is reached only over the network. torch requires two
things more than in ``memory.py``. The backend is chosen for the whole process, before its first symmetric
tensor. And the group of all processes is registered as "0", by ``torch.distributed`` or here. A rank's
number in that group is its number for NVSHMEM.

A kernel that is linked with NVSHMEM's device library has a copy of NVSHMEM's state in constant memory of
its module. It has to be filled in once per loaded module: ``NvshmemPlace._loaded``.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.kernels.node_puts import LIBRARY
from interlace.runtime.compat import torch_groups as symmetric
from interlace.runtime.compiler.nvshmem_library import device_library
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.core.memory import SymmetricBuffer
from interlace.runtime.core.place import Nodes, Place, table
from interlace.runtime.places.gpu import driver
from interlace.runtime.places.gpu.memory import Exchange, MemoryRefused, TorchMemory, together
from interlace.runtime.places.gpu.process_place import DeviceProcessPlace

BACKEND, EVERYONE = "NVSHMEM", "0"


def nvshmem_problem() -> str:
    """Return why this process cannot use NVSHMEM through torch. If it can, select it and return ""."""
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
    """Symmetric memory of a group of all processes. Every method is collective."""

    kind = "NVSHMEM"

    def __init__(
        self, rank: int, world_size: int, device: torch.device, exchange: Exchange
    ) -> None:
        super().__init__(rank, world_size, device, exchange)
        everyone = symmetric.registered_group(EVERYONE)
        if everyone is None:  # NVSHMEM starts with this group and lives as long as the process
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
        """Return zeroed memory of this rank, and torch's handle of all ranks' memory, which keeps it alive.

        Its ``buffer_ptrs`` are 0 for ranks over the network. MemoryRefused, on all ranks, if one fails.
        """
        with together(self._exchange):
            memory = self._own(nbytes)
            return memory, symmetric.c10d._SymmetricMemory.rendezvous(memory, self._name)


def nodes_of(mapped: Sequence[Sequence[bool]]) -> list[int]:
    """Return each rank's node, by its first rank, from ``mapped[rank][peer]``; or raise."""
    nodes = [min(peer for peer, addressed in enumerate(row) if addressed) for row in mapped]
    for rank, row in enumerate(mapped):
        for peer, addressed in enumerate(row):
            if addressed != (nodes[peer] == nodes[rank]):
                verb = "addresses" if addressed else "does not address"
                raise PlaceUnavailableError(
                    f"rank {rank} {verb} rank {peer}'s memory, but their peers differ: {nodes} are not "
                    "nodes whose ranks all address each other"
                )
    return nodes


PROBE_BYTES = 16


class NvshmemPlace(DeviceProcessPlace):
    """One rank on one GPU, of all ranks with which NVSHMEM was started. Making it is collective."""

    name = "nvshmem"

    def __init__(self, processes: Place, device: torch.device, *, timeout: float) -> None:
        super().__init__(processes, device, timeout=timeout)
        self._modules: set[int] = set()  # modules that have their state
        library = self._agree_that_all_can()
        known = self.rank, self.world_size, device, self.exchange
        memory = self._memory = NvshmemMemory(*known)
        try:
            _, probe = memory.made(PROBE_BYTES)
        except MemoryRefused as error:
            raise PlaceUnavailableError(f"rank {self.rank}: NVSHMEM: {error}") from error
        reachable = bytes(bool(address) for address in probe.buffer_ptrs)
        mapped = self.exchange(reachable, "joining NVSHMEM")
        nodes = nodes_of([[bool(addressed) for addressed in row] for row in mapped])
        if len(set(nodes)) > 1:
            self.nodes = Nodes(tuple(nodes), "nvshmem", {"extern_libs": ((LIBRARY, library),)})

    def reunited(self, ranks: Sequence[int] | None) -> tuple[Place, list[int]]:
        raise PlaceUnavailableError(
            "NVSHMEM ends with any of its ranks; restart all, for which torchrun has --max-restarts"
        )

    def _agree_that_all_can(self) -> str:
        """Return the path of the device library, once every rank has all that it needs."""
        library, problem = "", nvshmem_problem()
        if not problem:
            major, minor = torch.cuda.get_device_capability(self.device)
            try:
                library = device_library(10 * major + minor)
            except PlaceUnavailableError as error:
                problem = str(error)
        problems = self.exchange(problem.encode()[:2000], "joining NVSHMEM")
        for rank, text in enumerate(problems):
            if text:
                raise PlaceUnavailableError(
                    f'place "nvshmem" is for ranks on several nodes, and rank {rank} cannot use it: '
                    f"{text.decode(errors='replace')}"
                )
        return library

    def _allocate(self, nbytes: int) -> SymmetricBuffer:
        try:
            memory, handle = self._memory.made(nbytes)
        except MemoryRefused as error:
            raise PlaceUnavailableError(
                f"rank {self.rank}: {nbytes} bytes of NVSHMEM's memory (its heap has "
                f"NVSHMEM_SYMMETRIC_SIZE bytes): {error}"
            ) from error
        parts = [
            handle.get_buffer(rank, (nbytes,), torch.uint8) if address else memory[:0]
            for rank, address in enumerate(handle.buffer_ptrs)
        ]
        parts[self.rank] = memory
        addresses = [int(address or 0) for address in handle.buffer_ptrs]
        addresses[self.rank] = memory.data_ptr()
        return SymmetricBuffer(
            self.rank,
            nbytes,
            table(addresses, self._memory.numbers).to(self.device),
            parts,
            multicast=0 if self.nodes is not None else int(handle.multicast_ptr or 0),
            owner=handle,
        )

    def _loaded(self, compiled: Any) -> None:
        libraries = dict(getattr(compiled.metadata, "extern_libs", None) or ())
        if LIBRARY in libraries and compiled.module not in self._modules:
            symmetric.c10d._nvshmemx_cumodule_init(compiled.module)
            self._modules.add(compiled.module)

    def subgroup(self, ranks: tuple[int, ...], generation: int) -> Place:
        if len(ranks) != self.world_size:
            raise PlaceUnavailableError(
                f"rank {self.rank}: NVSHMEM's memory is made by all {self.world_size} ranks together; a "
                f"group of {len(ranks)} of them, {list(ranks)}, cannot have any"
            )
        return super().subgroup(ranks, generation)

    def _stream_words(self) -> driver.Driver | None:
        return None
