"""``interlace.RMSNorm`` and ``interlace.LayerNorm``: which norm an op does, and their checks."""

from typing import Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.numerics.norms import BY_ROW as BY_ROW
from interlace.runtime.numerics.norms import QUANTIZE
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


class NormOptions(NamedTuple):
    """What a call says about its norm that is no tensor."""

    kind: str
    eps: float
    quantize: str | None = None
    gather_normed: bool = False


NormTensors = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The residual, weight and bias of the norm."""


def taken_apart(
    norm: Any, residual: Any, quantize: Any = None, gather_normed: bool = False
) -> tuple[NormTensors, NormOptions]:
    """The tensors and the rest of what a call says about its norm; TypeError if ``norm`` is none."""
    if not isinstance(norm, RowNorm):
        raise TypeError(
            f"norm must be an interlace.RMSNorm or interlace.LayerNorm, got {type(norm).__name__}"
        )
    tensors = residual, norm.weight, norm.bias
    return tensors, NormOptions(norm.kind, norm.eps, quantize, gather_normed)


def check_options(options: NormOptions) -> None:
    eps = options.eps
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps of norm must be a number, got {eps!r}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps of norm must be 0 or more and finite, got {eps}")
    if options.quantize is not None and options.quantize not in QUANTIZE:
        raise ValueError(
            f"quantize must be None or one of {', '.join(QUANTIZE)}, got {options.quantize!r}"
        )
    checks.flag("gather_normed", options.gather_normed)


def checked(
    communicator: Communicator,
    weight: Any,
    bias: Any,
    columns: int,
    dtype: torch.dtype,
    options: NormOptions,
) -> RowNorm:
    """The norm, if it fits rows of ``columns`` numbers of ``dtype``."""
    check_options(options)
    vectors = []
    for name, value in (("weight of norm", weight), ("bias of norm", bias)):
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
    return RowNorm(options.kind, float(options.eps), *vectors)


def residual_of(
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


def terms(norm: RowNorm, residual: Tensor | None, options: NormOptions) -> tuple[Any, ...]:
    """On what about the norm ranks have to agree."""
    return (
        ("norm", options.kind),
        ("eps of norm", norm.eps),
        ("quantize", options.quantize),
        ("gather_normed", options.gather_normed),
        ("whether there is a residual", residual is not None),
        ("dtype of weight of norm", None if norm.weight is None else norm.weight.dtype),
        ("dtype of bias of norm", None if norm.bias is None else norm.bias.dtype),
    )


def given(
    residual: Any, norm: Any, quantize: Any, gather_normed: Any
) -> tuple[NormTensors, NormOptions | None]:
    """The tensors of a call's norm, and the rest, which is None without one; ValueError for half of one."""
    if norm is not None:
        return taken_apart(norm, residual, quantize, gather_normed)
    if residual is not None or quantize is not None or gather_normed:
        raise ValueError(
            "residual, quantize and gather_normed are for a call with norm, which is None"
        )
    return (None, None, None), None
