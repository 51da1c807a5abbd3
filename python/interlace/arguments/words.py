"""The words that arguments take, as types for checkers; what checks them at run time derives from these."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from interlace.kernels.epilogue import Activation as Activation
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.tuning.cache import Algorithm

RunPlace = Literal["sim", "shm", "cuda", "ptx"]
FusedAlgorithm = Literal["auto", Algorithm]
ScaledAlgorithm = Literal["auto", "fused", "unfused"]
CollectiveAlgorithm = Literal["auto", "kernel", "copy", "multimem", "low_latency"]
NormAlgorithm = Literal["auto", "fused", "pipelined", "unfused", "low_latency"]
BroadcastAlgorithm = Literal["auto", "copy", "low_latency"]
FusedReduceName = Literal["sum", "avg"]
ReduceName = Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
FusedReduceOp = FusedReduceName | ReduceOp | ReduceOp.RedOpType
AnyReduceOp = ReduceName | ReduceOp | ReduceOp.RedOpType

Group = (
    Communicator
    | ProcessGroup
    | DeviceMesh
    | tuple[DeviceMesh, int | str]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | str
    | None
)
"""What :func:`interlace.groups.resolve` takes."""


class NamedGroup(Protocol):
    """An :class:`interlace.GroupSpec`."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None: ...


FunctionalGroup = Group | NamedGroup
Tensor = torch.Tensor
Tensors = Tensor | Sequence[Tensor]
PerRank = Tensor | list[Tensor]
Normed = tuple[Tensor, Tensor]
"""The normed rows, and the sum with the residual."""
Quantized = tuple[tuple[Tensor, Tensor], Tensor]
"""As :data:`Normed`, the normed rows as fp8 and their scales."""
FP8 = Literal["fp8"]
Unscaled = Literal["fp8_static"]
Splits = Sequence[int] | Tensor
