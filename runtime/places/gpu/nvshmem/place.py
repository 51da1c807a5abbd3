"""The place ``nvshmem``: processes on several nodes, one per GPU.

Within a node it is the place ``cuda``: ranks address each other's memory. To other nodes kernels put, by
NVSHMEM; what does that is linked with its device library, and only that is. Which ranks share a node is
what NVSHMEM has mapped, so on a machine whose nodes share one NVLink domain there is one node, and
nothing is put.

Streams signal by kernels only: stream memory operations need the peer's address too.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.kernels.node_puts import LIBRARY
from interlace.runtime.compat import torch_symmetric_memory as symmetric
from interlace.runtime.compiler.nvshmem_library import device_library
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.core.memory import SymmetricBuffer
from interlace.runtime.core.place import Nodes, Place, table
from interlace.runtime.places.gpu import driver
from interlace.runtime.places.gpu.nvshmem import memory as nvshmem
from interlace.runtime.places.gpu.processes.memory import MemoryRefused
from interlace.runtime.places.gpu.processes.process_place import DeviceProcessPlace

PROBE_BYTES = 16


class NvshmemPlace(DeviceProcessPlace):
    """One rank on one GPU, of all ranks that NVSHMEM was begun with. Making it is collective.

    Raises PlaceUnavailableError on all ranks if one lacks a GPU, torch with NVSHMEM, or the library.
    """

    name = "nvshmem"

    def __init__(self, processes: Place, device: torch.device, *, timeout: float) -> None:
        super().__init__(processes, device, timeout=timeout)
        self._modules: set[int] = set()  # that have their state
        library = self._agree_that_all_can()
        known = self.rank, self.world_size, device, self.exchange
        memory = self._memory = nvshmem.NvshmemMemory(*known)
        try:
            _, probe = memory.made(PROBE_BYTES)
        except MemoryRefused as error:
            raise PlaceUnavailableError(f"rank {self.rank}: NVSHMEM: {error}") from error
        mine = bytes(bool(address) for address in probe.buffer_ptrs)
        mapped = self.exchange(mine, "joining NVSHMEM")
        nodes = nvshmem.nodes_of([[bool(there) for there in row] for row in mapped])
        if len(set(nodes)) > 1:
            self.nodes = Nodes(tuple(nodes), "nvshmem", {"extern_libs": ((LIBRARY, library),)})

    def reunited(self, ranks: Sequence[int] | None) -> tuple[Place, list[int]]:
        raise PlaceUnavailableError(
            "NVSHMEM ends with any of its ranks; restart all, for which torchrun has --max-restarts"
        )

    def _agree_that_all_can(self) -> str:
        """The path of the device library, once every rank has all that it needs."""
        library, problem = "", nvshmem.problem()
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
