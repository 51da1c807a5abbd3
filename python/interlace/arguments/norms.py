"""``interlace.RMSNorm`` and ``interlace.LayerNorm``: which norm an op does, and their checks."""

from typing import Any

import torch

from interlace.arguments import checks
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.numerics.norms import RowNorm as RowNorm

Tensor = torch.Tensor


def RMSNorm(weight: Tensor | None = None, eps: float = 1e-6) -> RowNorm:  # a norm's name
    """For ``norm=``: ``torch.nn.functional.rms_norm`` over the last dimension, of ``n`` numbers.

    ``weight``: ``(n,)`` in the output's dtype or float32, or None for none. ``eps`` is 1e-6 by default, as
    in Llama and in vLLM; torch's own default is the dtype's ``eps``. Not a module: a layer's norm is
    ``interlace.RMSNorm(layer.weight, layer.eps)``.

    Raises ValueError or TypeError where an op gets it, naming what does not fit.

    >>> interlace.RMSNorm(torch.ones(4)).eps
    1e-06
    """
    return RowNorm("rms", eps, weight)


def LayerNorm(
    weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> RowNorm:
    """For ``norm=``: ``torch.nn.functional.layer_norm`` over the last dimension.

    ``weight`` and ``bias``: ``(n,)`` in the output's dtype or float32, or None for none. ``eps`` as in
    torch. Raises as :func:`RMSNorm`.

    >>> interlace.LayerNorm(torch.ones(4), torch.zeros(4)).eps
    1e-05
    """
    return RowNorm("layer", eps, weight, bias)


def checked_norm(
    communicator: Communicator, norm: RowNorm, columns: int, dtype: torch.dtype
) -> RowNorm:
    """The norm with dense vectors, if they fit rows of ``columns`` numbers of ``dtype``."""
    vectors = []
    for name, value in (("weight of norm", norm.weight), ("bias of norm", norm.bias)):
        if value is not None:
            value = checks.tensor(name, value, communicator)
            if tuple(value.shape) != (columns,):
                raise ValueError(f"{name} must have shape ({columns},), got {tuple(value.shape)}")
            if value.dtype not in (dtype, torch.float32):
                raise TypeError(
                    f"{name} is {value.dtype}, the output is {dtype}; float32 is taken too"
                )
            value = value.contiguous()
        vectors.append(value)
    return RowNorm(norm.kind, norm.eps, *vectors)


def checked_residual(
    communicator: Communicator, residual: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor | None:
    """A residual of the output's shape and dtype, or None."""
    if residual is None:
        return None
    given = checks.tensor("residual", residual, communicator)
    if tuple(given.shape) != shape:
        raise ValueError(f"residual must have the output's shape {shape}, got {tuple(given.shape)}")
    checks.same_dtype("residual", given.dtype, "the output", dtype)
    return given
