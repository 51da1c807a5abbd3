"""``torch.distributed._symmetric_memory`` on a CPU: symmetric memory for the user's own kernels.

Code that was written for torch's symmetric memory runs in the places ``sim`` and ``shm`` after a change of
one import::

    import interlace.symmetric_memory as symm_mem

    tensor = symm_mem.empty(1024, dtype=torch.float32)      # on each rank alone
    hdl = symm_mem.rendezvous(tensor, group)                 # on all ranks together
    hdl.barrier()
    kernel[(4,)](hdl.buffer_ptrs_dev, hdl.signal_pad_ptrs_dev, hdl.rank, hdl.world_size)

Kernels that are launched in this way may wait for programs of the same grid and of other ranks. In ``sim``
every program of every rank is a coroutine of one seeded scheduler. In ``shm`` every program of a launch is
a coroutine; waits for peers yield, are limited in time, and end when a peer dies.

Differences from torch
----------------------
- Tensors live on the CPU, ``device`` is None or "cpu". Multicast is in ``sim`` only.
- ``group`` of :func:`rendezvous` may be None or a group of interlace, and :func:`rendezvous` compares the
  arguments of the ranks. A wrong argument is a ValueError or TypeError on every rank.
- In ``shm`` a launch runs after the async ops that this rank submitted before it: a CPU has no streams.
- ``set_signal_pad_size`` holds for tensors made afterwards by the calling rank.

In place ``cuda`` use torch's own.
"""

from interlace.symmetric_memory.functions import (
    SymmetricMemory,
    empty,
    get_backend,
    get_signal_pad_size,
    is_nvshmem_available,
    is_symm_mem_tensor,
    rendezvous,
    set_signal_pad_size,
)

__all__ = [
    "SymmetricMemory",
    "empty",
    "get_backend",
    "get_signal_pad_size",
    "is_nvshmem_available",
    "is_symm_mem_tensor",
    "rendezvous",
    "set_signal_pad_size",
]
