"""Tools of tests of the backend of torch.distributed."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import interlace


def begin(store: Any, backend: str = "interlace") -> None:
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def own(value: float = 1.0, size: int = 2) -> torch.Tensor:
    return torch.full((size,), value + interlace.get_rank())


def values(tensors: Any) -> list[Any]:
    return [tensor.tolist() for tensor in tensors]


class Tagged(torch.Tensor):
    """A subclass that only changes what functions return."""


class Recorder(TorchDispatchMode):
    """A mode like the modes of profilers and counters of flops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
