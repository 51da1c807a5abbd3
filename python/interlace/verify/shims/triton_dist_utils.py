"""``triton_dist.utils`` on a CPU: symmetric tensors. What else it has fails when it is called."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace import symmetric_memory

NVSHMEM_SIGNAL_DTYPE = torch.int64


def initialize_distributed(*args: Any, **kwargs: Any) -> Any:
    """The group of all ranks, where the shim of torch is there, too."""
    return dist.group.WORLD


def finalize_distributed() -> None:
    """Nothing: the group ends with the run."""


def nvshmem_create_tensor(shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in symmetric memory. Collective."""
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    tensor = symmetric_memory.empty(math.prod(extents), dtype=dtype)
    symmetric_memory.rendezvous(tensor)
    return tensor.view(extents)


def nvshmem_free_tensor_sync(tensor: torch.Tensor) -> None:
    """Nothing: memory ends with the run."""


def nvshmem_barrier_all_on_stream(stream: Any = None) -> None:
    """What all ranks did before is before what any does after; on the current stream."""
    interlace.barrier()


def dist_print(*args: Any, **kwargs: Any) -> None:
    """Nothing: a check has many runs."""


def __getattr__(name: str) -> Callable[..., Any]:
    """What a file may import for its own ``main``, which is not checked."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the shim of triton_dist.utils has no {name}")

    return missing
