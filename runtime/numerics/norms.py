"""Norms of rows by torch, in fp32 (float64 in float64), and their gradients; activations by name.

Rows are matrices ``[rows, N]``; a weight and a bias are ``[N]`` or None. The algorithms that multiply with
torch, and autograd, use these functions for what the kernels do in registers. The kernels have other
functions for activations (``kernels/epilogue.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from interlace.kernels.epilogue import ACTIVATIONS as NAMES

KINDS = ("rms", "layer")
QUANTIZED = torch.float8_e4m3fn
LARGEST = torch.finfo(QUANTIZED).max
SMALLEST_SCALE = 1e-12  # so that a row of zeros has a nonzero scale
BY_ROW = "fp8"
QUANTIZE = (BY_ROW, "fp8_static")
"""With a scale for every row; with one scale known in advance, by which the norm's weight is divided."""


class RowNorm(NamedTuple):
    """``kind``: "rms" (``torch.nn.functional.rms_norm``) or "layer" (``layer_norm``), over whole rows."""

    kind: str
    eps: float
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def unrounded_norm(rows: torch.Tensor, norm: RowNorm) -> torch.Tensor:
    """Return the normed rows, in fp32 or float64."""
    dtype = wide(rows.dtype)
    weight = None if norm.weight is None else norm.weight.to(dtype)
    bias = None if norm.bias is None else norm.bias.to(dtype)
    if norm.kind == "rms":
        return F.rms_norm(rows.to(dtype), rows.shape[-1:], weight, norm.eps)
    return F.layer_norm(rows.to(dtype), rows.shape[-1:], weight, bias, norm.eps)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``rows`` as fp8 and their scales ``[rows, 1]`` in fp32: ``rows`` are fp8 times scale."""
    scale = rows.abs().amax(-1, keepdim=True) / LARGEST
    scale = scale.to(torch.float32).clamp(min=SMALLEST_SCALE)
    # a quotient may round to more than the largest value, and torch's cast does not saturate
    return (rows / scale).clamp(-LARGEST, LARGEST).to(QUANTIZED), scale


@dataclass
class NormTail:
    """The end of a reduction: ``residual`` is added to the rows of a sum, and they are normed.

    ``normed`` and ``scale`` are filled. With a scale, ``[rows, 1]``, ``normed`` is fp8; without one it may
    be. All are matrices with one row for each of the sum. ``format`` is a ``BlockFormat`` of
    ``ops/matmul/formats.py``; then ``normed`` has packed rows.
    """

    norm: RowNorm
    residual: torch.Tensor | None
    normed: torch.Tensor
    scale: torch.Tensor | None = None
    format: Any = None

    def part(self, first: int, count: int) -> "NormTail":
        names = "residual", "normed", "scale"
        whole = {name: getattr(self, name) for name in names}
        parts: Any = {n: None if t is None else t[first : first + count] for n, t in whole.items()}
        return replace(self, **parts)

    def finish(self, rows: torch.Tensor) -> None:
        """Norm ``rows``, to which the residual was added."""
        if self.format is not None:
            self.normed.copy_(self.format.packed_rows(unrounded_norm(rows, self.norm)))
            return
        if not rows.numel():
            if self.scale is not None:
                self.scale.fill_(SMALLEST_SCALE)
            return
        y = unrounded_norm(rows, self.norm)
        if self.scale is None:
            # the scale was known in advance; torch's cast does not saturate
            static = self.normed.dtype == QUANTIZED
            self.normed.copy_(y.clamp(-LARGEST, LARGEST) if static else y)
        else:
            values, scale = quantize_rows(y)
            self.normed.copy_(values)
            self.scale.copy_(scale)


def backward(
    rows: torch.Tensor, norm: RowNorm, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of rows, weight and bias, in fp32 or float64; ``grad`` is of the normed rows."""
    x, grad = rows.to(wide(rows.dtype)), grad.to(wide(rows.dtype))
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    deviation = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    x = x * deviation
    scaled = grad if norm.weight is None else grad * norm.weight.to(grad.dtype)
    of_rows = scaled - x * (scaled * x).mean(-1, keepdim=True)
    if norm.kind == "layer":
        of_rows = of_rows - scaled.mean(-1, keepdim=True)
    dims = list(range(grad.dim() - 1))
    return of_rows * deviation, (grad * x).sum(dims), grad.sum(dims)


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
assert tuple(_FUNCTIONS) == ("", *NAMES), "kernels/epilogue.py has others"

# The steepest slope of each: gelu 1.1290, its approximation 1.1290, silu 1.0999.
SLOPES = {"": 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}


def activate(x: torch.Tensor, name: str) -> torch.Tensor:
    return _FUNCTIONS[name](x)
