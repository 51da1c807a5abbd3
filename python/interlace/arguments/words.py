"""The words that arguments take, as types for checkers; what checks them at run time derives from these.

And, as ``TypedDict``s for overloads, the options of the fused ops that do not decide what a call returns.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, Protocol, TypedDict

import torch
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from interlace.kernels.epilogue import Activation
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
Sizes = Sequence[int] | None
Timeout = timedelta | float | None
No = Literal[False]
Yes = Literal[True]


class FunctionalOptions(TypedDict, total=False):
    group: FunctionalGroup
    tag: str
    out_dtype: torch.dtype | None


class FunctionalGather(FunctionalOptions, total=False):
    bias: Tensor | Sequence[Tensor | None] | None
    save_gathered: bool
    algorithm: FusedAlgorithm


class FunctionalGrouped(FunctionalOptions, total=False):
    bias: Tensor | None
    algorithm: FusedAlgorithm


class FunctionalScaled(FunctionalOptions, total=False):
    bias: Tensor | Sequence[Tensor | None] | None
    use_fast_accum: bool
    algorithm: ScaledAlgorithm


class FusedOptions(TypedDict, total=False):
    group: Group
    algorithm: FusedAlgorithm
    out_dtype: torch.dtype | None


class FusedGather(FusedOptions, total=False):
    gather_dim: int
    bias: Tensor | Sequence[Tensor | None] | None
    activation: Activation | Sequence[Activation | None] | None


class FusedGatherNow(FusedGather, total=False):
    async_op: No


class FusedGatherLater(FusedGather):
    async_op: Yes


class FusedReduce(FusedOptions, total=False):
    reduce_op: FusedReduceOp
    bias: Tensor | None
    activation: Activation | None


class FusedScatter(FusedReduce, total=False):
    scatter_dim: int


class FusedReduceNorm(FusedReduce, total=False):
    residual: Tensor | None


class FusedScatterNorm(FusedReduceNorm, total=False):
    scatter_dim: int
    gather_normed: bool


class RowNormOptions(TypedDict, total=False):
    """Of a reduction of rows that are there already."""

    reduce_op: FusedReduceOp
    bias: Tensor | None
    residual: Tensor | None
    group: Group
    algorithm: NormAlgorithm


class RowScatterNorm(RowNormOptions, total=False):
    scatter_dim: int
    gather_normed: bool


class FunctionalReduce(FunctionalOptions, total=False):
    bias: Tensor | None
    residual: Tensor | None
    algorithm: FusedAlgorithm


class FunctionalScatterNorm(FunctionalReduce, total=False):
    gather_normed: bool


class FunctionalRows(TypedDict, total=False):
    reduce_op: FusedReduceOp
    bias: Tensor | None
    residual: Tensor | None
    group: FunctionalGroup
    tag: str
    algorithm: NormAlgorithm


class FunctionalScatterRows(FunctionalRows, total=False):
    scatter_dim: int
    gather_normed: bool


class FusedGrouped(FusedOptions, total=False):
    bias: Tensor | None
    activation: Activation | None


class FusedGroupedNow(FusedGrouped, total=False):
    async_op: No


class FusedGroupedLater(FusedGrouped):
    async_op: Yes


class DispatchOptions(TypedDict, total=False):
    capacity: int | None
    num_max_dispatch_tokens_per_rank: int | None
    use_fp8: bool
    group: Group
    algorithm: FusedAlgorithm
