"""float64 references of every op, and bounds for the error of a correct result.

A bound is derived only from the dtypes. It has three sources. Two of them are standard (Higham, *Accuracy
and Stability of Numerical Algorithms*, chapter 3), with ``u`` a unit roundoff and ``S = |A| |B|``:

accumulation  a sum of n products, in any order, errs by at most ``gamma(n) * S``, where
              ``gamma(n) = n u / (1 - n u)`` and u is fp32's (or float64's if float64 is accumulated)
rounding      each rounding of x to a dtype errs by ``u |x|``, and near zero by half its smallest denormal
activation    makes an error of x at most its steepest slope times as large, and errs by itself by at most
              ``ACTIVATION_ROUNDINGS`` roundings of fp32, relative to x

Sums over ranks round each rank's part to the output's dtype, add the parts in fp32 and round again.

Functions that are named after an op return two float64 tensors: the value, and the largest error of a
correct result. They share no formula with ``Op.reference``, which rounds as the op does and computes
LocalTensors.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.kernels.tiling import split_rows
from interlace.ops.matmul.formats import E4M3, FP4, Scaled
from interlace.runtime.numerics.norms import SLOPES, RowNorm, activate

# Relative to x, for a product of x and a bounded function of an exponential or of erf. A GPU's exponential
# errs by 2 units and by one per unit of its argument, whose factor is at most 0.23. erf, tanh and quotients
# of torch and of CUDA err by at most 4.
ACTIVATION_ROUNDINGS = 8
Bounded = tuple[torch.Tensor, torch.Tensor]


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of a rounding to nearest: half the distance from 1 to the next."""
    return torch.finfo(dtype).eps / 2


def half_denormal(dtype: torch.dtype) -> float:
    """Return the largest absolute error of one rounding near zero."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps / 2


def accumulation_unit(*dtypes: torch.dtype) -> float:
    """Return the unit roundoff of sums: fp32's, unless all is float64. This is safe for float64 output."""
    wide = all(dtype == torch.float64 for dtype in dtypes)
    return unit_roundoff(torch.float64 if wide else torch.float32)


def gamma(count: int, unit: float) -> float:
    """Return the largest relative error of ``count`` successive roundings."""
    return count * unit / (1 - count * unit)


def rounded(error: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the error bound of ``value`` (itself off by ``error``) after a rounding to ``dtype``."""
    return error + unit_roundoff(dtype) * (value.abs() + error) + half_denormal(dtype)


def _product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return input.double() @ weight.double()


def _product_error(
    input: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, extra: int
) -> torch.Tensor:
    """Return a bound on the product's error before rounding. ``extra``: operations after K products."""
    unit = accumulation_unit(input.dtype, out_dtype)
    magnitude = _product(input.abs(), weight.abs())
    # 3 more: rounding both operands from float64 to a narrower dtype, and the last addition
    return gamma(input.shape[-1] + 3 + extra, unit) * magnitude


def _activation_bound(
    error: torch.Tensor, value: torch.Tensor, name: str, unit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the error bound of an activation of ``value``, itself off by ``error``, and its value."""
    rounding = ACTIVATION_ROUNDINGS * unit * (value.abs() + error) if name else 0.0
    return SLOPES[name] * error + rounding, activate(value, name)


def matmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "",
    roundings: int = 1,  # to out_dtype; 2: also before bias and activation, as some of torch's on CPU
) -> Bounded:
    """Return ``activation(input @ weight + bias)`` and its bound, elementwise ``[..., n]``."""
    value, error = _product(input, weight), _product_error(input, weight, out_dtype, 1)
    unit = accumulation_unit(input.dtype, out_dtype)
    for _ in range(roundings - 1):
        error = rounded(error, value, out_dtype)
    if bias is not None:
        value = value + bias.double()
        error = error + unit * (value.abs() + error)
        if activation and roundings > 1:
            error = rounded(error, value, out_dtype)
    error, value = _activation_bound(error, value, activation, unit)
    return value, rounded(error, value, out_dtype)


def all_gather_matmul(
    shards: Sequence[torch.Tensor],
    weight: torch.Tensor,
    out_dtype: torch.dtype,
    gather_dim: int = 0,
    **options: Any,
) -> Bounded:
    """Return ``activation(cat(shards, gather_dim) @ weight + bias)``; ``options``: see :func:`matmul`.

    >>> all_gather_matmul([torch.ones(1, 2), torch.ones(1, 2)], torch.ones(2, 1), torch.float32)[0].tolist()
    [[2.0], [2.0]]
    """
    return matmul(torch.cat(list(shards), gather_dim), weight, out_dtype, **options)


def matmul_all_reduce(
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    reduce_op: str = "sum",
    activation: str = "",
) -> Bounded:
    """Return ``activation(sum or average of inputs[r] @ weights[r], + bias)``, each rounded once."""
    parts = [
        (_product(a, b), _product_error(a, b, out_dtype, 0))
        for a, b in zip(inputs, weights, strict=True)
    ]
    unit = accumulation_unit(inputs[0].dtype, out_dtype)
    value, error = sum_of_rounded(parts, out_dtype, unit, reduce_op)
    if bias is not None:
        value = value + bias.double()
        error = error + unit * (value.abs() + error)
    error, value = _activation_bound(error, value, activation, unit)
    return value, rounded(error, value, out_dtype)


def scaled_matmul(
    input: torch.Tensor, weight: torch.Tensor, input_scale: torch.Tensor, weight_scale: torch.Tensor
) -> Bounded:
    """Return ``(input * input_scale) @ (weight * weight_scale)`` in fp32, unrounded.

    A scale is one more rounding.

    >>> one, two = torch.ones(1, 1), torch.tensor(2.0)
    >>> scaled_matmul(one, one, two, two)[0].tolist()
    [[4.0]]
    """
    scales = input_scale.double() * weight_scale.double()
    error = _product_error(input, weight, torch.float32, 3) * scales.abs()
    return _product(input, weight) * scales, error


def sum_of_rounded(
    parts: Sequence[Bounded], dtype: torch.dtype, unit: float, reduce_op: str = "sum"
) -> Bounded:
    """Return the sum or average of ``parts``, each rounded to ``dtype`` before it is sent; not rounded.

    >>> part = torch.ones(1).double(), torch.zeros(1).double()
    >>> sum_of_rounded([part, part], torch.float32, 0.0, "avg")[0].tolist()
    [1.0]
    """
    errors = [rounded(error, value, dtype) for value, error in parts]
    magnitudes = [value.abs() + error for (value, _), error in zip(parts, errors, strict=True)]
    total, error = (
        torch.stack([value for value, _ in parts]).sum(0),
        _sum_error(errors, magnitudes, unit),
    )
    if reduce_op == "avg":
        return total / len(parts), error / len(parts)
    return total, error


def with_residual(total: Bounded, residual: torch.Tensor | None, dtype: torch.dtype) -> Bounded:
    """Add a residual to a sum, before the sum is rounded or after: both are correct."""
    if residual is None:
        return total
    value, error = total[0] + residual.double(), total[1]
    return value, rounded(error, value, dtype)


def _sum_error(
    errors: Sequence[torch.Tensor], magnitudes: Sequence[torch.Tensor], unit: float
) -> torch.Tensor:
    """Return a bound for a sum of terms that are off by ``errors``; an average is one operation more."""
    return sum(errors) + gamma(len(errors) + 1, unit) * torch.stack(list(magnitudes)).sum(0)


def combine(rows: Bounded, weights: torch.Tensor | None, out_dtype: torch.dtype) -> Bounded:
    """Return the sum over slots of a token's rows, ``(t, k, n)``, times ``weights`` ``(t, k)``.

    >>> row = torch.ones(1, 2, 1).double()
    >>> combine((row, 0 * row), torch.tensor([[0.5, 2.0]]), torch.float32)[0].tolist()
    [[2.5]]
    """
    value, error = rows
    unit = accumulation_unit(out_dtype)
    if weights is not None:
        scale = weights.double().unsqueeze(-1)
        value, error = value * scale, error * scale.abs()
        error = error + unit * (value.abs() + error)
    slots = range(value.shape[1])
    total = _sum_error([error[:, k] for k in slots], [value[:, k].abs() for k in slots], unit)
    return value.sum(1), rounded(total, value.sum(1), out_dtype)


def norm(rows: torch.Tensor, record: RowNorm, out_dtype: torch.dtype) -> Bounded:
    """Norm whole rows along the last dimension; ``rows`` are exact.

    >>> norm(torch.tensor([[3.0, -3.0]]), RowNorm("rms", 0.0), torch.float32)[0].tolist()
    [[1.0, -1.0]]
    """
    unit, x = accumulation_unit(rows.dtype, out_dtype), rows.double()
    sums = gamma(rows.shape[-1] + 8, unit)
    off = torch.zeros_like(x)
    if record.kind == "layer":
        off = off + sums * x.abs().mean(-1, keepdim=True)  # the error of the mean
        x = x - x.mean(-1, keepdim=True)
    off = off + unit * (x.abs() + off)
    variance = x.square().mean(-1, keepdim=True)
    wrong = (2 * x.abs() * off + off.square()).mean(-1, keepdim=True) + sums * variance
    # 8 units: a GPU's reciprocal square root errs by 2, and more steps are rounded
    relative = wrong / (variance + record.eps) + 8 * unit
    value = x / (variance + record.eps).sqrt()
    error = off / (variance + record.eps).sqrt() * (1 + relative) + value.abs() * relative
    for vector, add in ((record.weight, False), (record.bias, True)):
        if vector is not None:
            value = value + vector.double() if add else value * vector.double()
            error = error if add else error * vector.double().abs()
            error = error + unit * (value.abs() + error)
    return value, rounded(error, value, out_dtype)


def dequantized(scaled: tuple[torch.Tensor, torch.Tensor], exact: Bounded) -> Bounded:
    """Return ``exact`` with the error of fp8 times scale; ``scaled``: the fp8 and scales to check."""
    values, scale = scaled
    value, error = exact
    step = scale.double()
    return value, error + unit_roundoff(values.dtype) * (
        value.abs() + error
    ) + step * half_denormal(values.dtype)


def block_scaled(scaled: Scaled, exact: Bounded) -> Bounded:
    """Return ``exact`` with the error of a block-scaled format; ``scaled``: the result to check."""
    value, error = exact
    largest, kind = value.abs() + error, scaled.kind
    unit, near_zero = 0.25, 0.25  # e2m1 numbers: 0, 0.5, 1, 1.5, ...
    if kind.values != FP4:
        unit, near_zero = unit_roundoff(kind.values), half_denormal(kind.values)
    if kind.scale == E4M3:  # a scale that was rounded down makes the largest numbers saturate
        error = error + unit_roundoff(E4M3) * largest
    step = scaled.packed().scales.double().repeat_interleave(kind.block, -1)
    step = step[..., : value.shape[-1]]
    step = step if scaled.whole is None else step * scaled.whole
    return value, error + torch.maximum(unit * largest, near_zero * step)


def split(whole: torch.Tensor, world_size: int, dim: int = 0) -> list[torch.Tensor]:
    """Return the parts of all ranks, as from ``torch.chunk``; the last ranks' may be empty."""
    parts = split_rows(whole.shape[dim], world_size)
    return [whole.narrow(dim, first, count) for first, count in parts]


def reduce(inputs: Sequence[torch.Tensor], reduce_op: str = "sum") -> Bounded:
    """Return the sum or average over ranks of tensors with equal shapes, in their dtype."""
    dtype = inputs[0].dtype
    value = torch.stack([tensor.double() for tensor in inputs]).sum(0)
    magnitudes = [tensor.double().abs() for tensor in inputs]
    exact = [torch.zeros_like(value)] * len(inputs)
    error = _sum_error(exact, magnitudes, accumulation_unit(dtype))
    if reduce_op == "avg":
        value, error = value / len(inputs), error / len(inputs)
    return value, rounded(error, value, dtype)


def worst_ratio(actual: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the largest error as a multiple of its bound: at most 1 is correct, nan anywhere gives inf.

    >>> worst_ratio(torch.tensor([1.5]), torch.tensor([1.0]).double(), torch.tensor([0.25]).double())
    2.0
    """
    if actual.shape != reference.shape:
        raise ValueError(
            f"actual has shape {tuple(actual.shape)}, reference has {tuple(reference.shape)}"
        )
    if not actual.numel():
        return 0.0
    error = (actual.double() - reference).abs()
    ratio = torch.where(error == 0, 0.0, error / bound)
    return float(torch.nan_to_num(ratio, nan=torch.inf, posinf=torch.inf).max())
