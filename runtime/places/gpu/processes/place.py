"""The place ``cuda`` for processes, one per rank, on the GPUs of one node; also several on one GPU.

Symmetric memory is torch's (``memory.py``); where torch's allocator refuses on some rank, it is by CUDA
IPC (``ipc.py``).

Ranks on one GPU take turns on it, a time slice each, for each is a process: right, and slow.
"""

import torch

from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.core.memory import SymmetricBuffer
from interlace.runtime.core.place import Place
from interlace.runtime.places.gpu.processes.ipc import IpcMemory
from interlace.runtime.places.gpu.processes.memory import MemoryRefused, TorchMemory
from interlace.runtime.places.gpu.processes.process_place import DeviceProcessPlace


class CudaPlace(DeviceProcessPlace):
    """One rank on one GPU, whose peers' memory is mapped; see :class:`DeviceProcessPlace`."""

    name = "cuda"

    def __init__(self, processes: Place, device: torch.device, *, timeout: float) -> None:
        super().__init__(processes, device, timeout=timeout)
        self._overlapping = False

    @property
    def memory_kind(self) -> str:
        """The kind of the group's symmetric memory, by what makes it; "" before there is any."""
        return "" if self._memory is None else str(self._memory.kind)

    def _allocate(self, nbytes: int) -> SymmetricBuffer:
        if self.world_size == 1:
            own = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            return SymmetricBuffer.over(0, [own])
        if self._memory is not None:
            again: SymmetricBuffer = self._memory.allocate(nbytes, overlapping=self._overlapping)
            return again
        # the group's first memory decides its kind: the first that all ranks can have
        properties = torch.cuda.get_device_properties(self.device)
        name = str(getattr(properties, "uuid", self.device))
        names = self.exchange(name.encode(), "an allocation of symmetric memory")
        self._overlapping = len(set(names)) < self.world_size
        kinds, reasons = [self._by_torch], []
        if self.processes.direct_access:  # of one host
            kinds.append(lambda: IpcMemory(self.processes, self.device, self.exchange))
        for make in kinds:
            memory = make()
            try:
                buffer = memory.allocate(nbytes, overlapping=self._overlapping)
            except MemoryRefused as error:
                memory.close()
                reasons.append(f"{memory.kind}: {error}")
                continue
            self._memory = memory
            return buffer
        raise PlaceUnavailableError(
            f"rank {self.rank}: the group's GPUs cannot share memory; {'; '.join(reasons)}"
        )

    def _by_torch(self) -> TorchMemory | IpcMemory:
        known = self.rank, self.world_size, self.device, self.exchange
        return TorchMemory(*known, seconds=self.timeout)
