"""Reduce operations by every name they go by: torch's ``ReduceOp``, its instances, and strings."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from interlace.runtime.numerics import reductions

ReduceOp = dist.ReduceOp

OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
PREMUL_SUM = "premul_sum"

Factor = float | torch.Tensor | None

_NAMES: dict[Any, str] = {
    **{name: name for name in OPS},
    **{name.upper(): name for name in OPS},
    **{getattr(ReduceOp.RedOpType, name.upper()): name for name in OPS},
}

_SUM: Any = ReduceOp.SUM


def parse(op: Any, rank: int) -> tuple[str, Factor]:
    """The name of ``op``, one of :data:`OPS`, and the factor of a PREMUL_SUM.

    ``op``: a string, ``ReduceOp.SUM`` and so on, ``ReduceOp.PREMUL_SUM(factor)``, or what a backend finds
    in the options of a call. Raises ValueError, or TypeError for what is no op at all.

    >>> parse("sum", 0), parse(ReduceOp.AVG, 0), parse(torch.distributed._make_nccl_premul_sum(0.5), 0)
    (('sum', None), ('avg', None), ('premul_sum', 0.5))
    """
    kind = type(op)
    if kind is str or kind is ReduceOp.RedOpType:
        name = _NAMES.get(op)
        if name is not None and name != PREMUL_SUM:
            return name, None
    elif kind is ReduceOp or isinstance(op, ReduceOp):
        if op == _SUM:  # its members' hashes and values take longer
            return "sum", None
        name = _NAMES.get(op.op)
        if name is not None and name != PREMUL_SUM:
            return name, None
        if name == PREMUL_SUM and (factor := _factor(op)) is not None:
            return PREMUL_SUM, factor
    if _NAMES.get(op if isinstance(op, str) else str(op).rsplit(".", 1)[-1]) == PREMUL_SUM:
        raise ValueError(
            f"op: premul_sum needs its factor, ReduceOp.PREMUL_SUM(factor), on rank {rank}"
        )
    raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r} on rank {rank}")


def _factor(op: Any) -> Factor:
    """What ``op`` multiplies with; its attribute ``factor`` in torch 2.13, earlier in its state only."""
    try:
        factor: Factor = op.__getstate__()[1]
    except RuntimeError:  # torch says so where there is none
        return None
    return factor


def check_dtype(name: str, op: str, argument: str, dtype: torch.dtype, rank: int) -> None:
    """Raise TypeError, naming the argument, unless ``op`` is defined for ``dtype``."""
    try:
        reductions.check("sum" if op == PREMUL_SUM else op, dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name}: {argument} of dtype {dtype} cannot be reduced with op {op!r}, on rank {rank}: {error}"
        ) from error
    if op == PREMUL_SUM and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(
            f"{name}: op premul_sum needs a floating or complex {argument}, got {dtype} on rank {rank}"
        )


def check_factor(factor: Factor, argument: str, tensor: torch.Tensor, rank: int) -> None:
    """Raise unless the factor of a PREMUL_SUM is a number for all of ``tensor``, or one for each element.

    It may lack dimensions of the tensor, or have them with length 1.
    """
    values = torch.as_tensor(factor)
    if values.layout is not torch.strided or values.is_meta:
        raise TypeError(f"op: the factor of premul_sum must be a dense tensor, on rank {rank}")
    if values.is_complex() and not tensor.is_complex():
        raise TypeError(
            f"op: the factor of premul_sum is complex, {argument} is {tensor.dtype}, on rank {rank}"
        )
    if values.numel() == 1:
        return
    lengths = zip(reversed(values.shape), reversed(tensor.shape), strict=False)
    if values.dim() > tensor.dim() or any(own not in (1, length) for own, length in lengths):
        raise ValueError(
            f"op: the factor of premul_sum has shape {tuple(values.shape)}, {argument} has "
            f"{tuple(tensor.shape)}, on rank {rank}"
        )


def scaled(tensor: torch.Tensor, factor: Factor) -> torch.Tensor:
    """A dense copy of ``tensor``, multiplied by the factor of a PREMUL_SUM; in the tensor's dtype."""
    if isinstance(factor, torch.Tensor):
        factor = factor.detach().to(tensor.device)
    assert factor is not None
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # fp8 has no product of its own
    # a factor of one element has a shape, and may have more dimensions than the tensor
    return (wide * factor).to(tensor.dtype).view(tensor.shape).contiguous()
