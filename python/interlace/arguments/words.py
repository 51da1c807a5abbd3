"""The words that arguments take, as types for checkers; the checks at run time use these types."""

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from interlace.kernels.epilogue import Activation as Activation
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.numerics import reductions
from interlace.runtime.tuning.files import Algorithm

ReduceOp = dist.ReduceOp
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
"""The forms of a group that :func:`interlace.groups.resolve` takes."""


class NamedGroup(Protocol):
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
"""Like :data:`Normed`: the normed rows as fp8, and their scales."""
FP8 = Literal["fp8"]
Unscaled = Literal["fp8_static"]
BlockFormatName = Literal["fp8_block128", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"]
"""Block-scaled formats, see ``ops/matmul/formats.py``."""
Splits = Sequence[int] | Tensor

PREMUL_SUM = "premul_sum"
OPS: tuple[str, ...] = (*get_args(ReduceName), PREMUL_SUM)

Factor = float | torch.Tensor | None

NAMES: dict[object, str] = {
    **{name: name for name in OPS},
    **{name.upper(): name for name in OPS},
    **{getattr(ReduceOp.RedOpType, name.upper()): name for name in OPS},
}


def check_dtype(name: str, op: str, argument: str, dtype: torch.dtype) -> None:
    try:
        reductions.check("sum" if op == PREMUL_SUM else op, dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name}: {argument} of dtype {dtype} cannot be reduced with op {op!r}: {error}"
        ) from error
    if op == PREMUL_SUM and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"{name}: op premul_sum needs floating or complex {argument}, got {dtype}")


def check_factor(factor: Factor, argument: str, tensor: torch.Tensor) -> None:
    """Raise unless a PREMUL_SUM's factor is a number, or broadcasts to the shape of ``tensor``."""
    values = torch.as_tensor(factor)
    if values.layout is not torch.strided or values.is_meta:
        raise TypeError("op: the factor of premul_sum must be a dense tensor")
    if values.is_complex() and not tensor.is_complex():
        raise TypeError(f"op: the factor of premul_sum is complex, {argument} is {tensor.dtype}")
    if values.numel() == 1:
        return
    lengths = zip(reversed(values.shape), reversed(tensor.shape), strict=False)
    if values.dim() > tensor.dim() or any(extent not in (1, length) for extent, length in lengths):
        raise ValueError(
            f"op: the factor of premul_sum has shape {tuple(values.shape)}, {argument} has "
            f"{tuple(tensor.shape)}"
        )


def dense(tensor: torch.Tensor, op: str, factor: Factor) -> tuple[torch.Tensor, str]:
    """Return the tensor that an engine reduces, times the factor of a PREMUL_SUM, and the engine's op."""
    if factor is None:
        return tensor.contiguous(), op
    if isinstance(factor, torch.Tensor):
        factor = factor.detach().to(tensor.device)
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # fp8 has no multiplication
    # a factor of one element has a shape, and may have more dimensions than the tensor
    return (wide * factor).to(tensor.dtype).view(tensor.shape).contiguous(), "sum"
