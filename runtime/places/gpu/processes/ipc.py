"""Symmetric memory of processes on one host by CUDA IPC, through CuPy, where torch's allocator refuses.

``cudaMalloc`` on every rank, a 64-byte handle per allocation to all peers, ``cudaIpcOpenMemHandle`` there.
It works without the virtual memory API and with several ranks on one GPU, and has no multicast.

An allocation must not be freed while a peer has it open. So a group has a board in memory of the host, on
which a rank notes that it has closed what it had opened; what a rank allocated waits for the notes of all
peers, and is looked at again whenever memory is made or given back. What a rank that was killed had open
stays until this process ends.
"""

from typing import Any

import torch

from interlace.runtime.compat.torch_symmetric_memory import tensor_over
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.core.memory import WORD, SymmetricBuffer
from interlace.runtime.core.place import Place
from interlace.runtime.places.gpu.processes.memory import Exchange, agreed, together, value

LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
HANDLE_BYTES = 64

_given_up: "list[_Exported]" = []


def cupy() -> Any:
    """The module CuPy; PlaceUnavailableError where it is missing."""
    try:
        import cupy
    except ImportError as error:
        raise PlaceUnavailableError(
            "sharing GPU memory by CUDA IPC needs CuPy; install cupy-cuda13x, or cupy-cuda12x for CUDA 12"
        ) from error
    return cupy


class _Exported:
    """Memory of this rank that peers have open, until ``board`` says that they have closed it."""

    def __init__(self, address: int, device: int) -> None:
        self.address, self.device = address, device
        self.board: list[memoryview] = []

    def free_if_closed(self) -> bool:
        if not all(words[0] for words in self.board):
            return False
        module = cupy()
        with module.cuda.Device(self.device):
            module.cuda.runtime.free(self.address)
        return True


def sweep() -> None:
    """Free what was given up and no peer has open any more."""
    _given_up[:] = [each for each in _given_up if not each.free_if_closed()]


class IpcMemory:
    """Symmetric memory of one group by CUDA IPC; ``place``: of its processes. Making it is collective."""

    kind = "CUDA IPC"

    def __init__(self, place: Place, device: torch.device, exchange: Exchange) -> None:
        self._rank, self._world_size, self._exchange = place.rank, place.world_size, exchange
        self._device, self._index = device, device.index or 0
        self._exported: list[_Exported] = []
        self._opened: list[int] = []
        board = place.allocate(WORD)  # smaller than a header: an abort writes nothing there
        self._memory = [part.numpy() for part in board.peer_bytes]
        self._board = [part.data.cast("B").cast("q") for part in self._memory]

    def allocate(self, nbytes: int, *, overlapping: bool) -> SymmetricBuffer:
        """Implements ``TorchMemory.allocate``, by memory that each rank exports and its peers open."""
        sweep()
        addresses = [0] * self._world_size
        with together(self._exchange):
            module = cupy()
            runtime = module.cuda.runtime
            with module.cuda.Device(self._index):
                own = _Exported(runtime.malloc(nbytes), self._index)
                self._exported.append(own)
                runtime.memset(own.address, 0, nbytes)
                runtime.deviceSynchronize()  # peers may write once they have met
                handles = agreed(self._exchange, value(runtime.ipcGetMemHandle(own.address)))
                for rank, handle in enumerate(handles):
                    if rank == self._rank:
                        addresses[rank] = own.address
                    else:
                        addresses[rank] = runtime.ipcOpenMemHandle(handle, LAZY_PEER_ACCESS)
                        self._opened.append(addresses[rank])
        parts = [tensor_over(address, nbytes, self._device) for address in addresses]
        return SymmetricBuffer.over(self._rank, parts)

    def close(self) -> None:
        """Close what is open, and give up the own memory. Waits for the GPU. Idempotent."""
        if not self._board:
            return
        module = cupy()
        with module.cuda.Device(self._index):
            module.cuda.runtime.deviceSynchronize()
            for address in self._opened:
                module.cuda.runtime.ipcCloseMemHandle(address)
        self._board[self._rank][0] = 1
        for exported in self._exported:
            exported.board = self._board
        _given_up.extend(self._exported)
        self._exported, self._opened, self._board = [], [], []
        sweep()
