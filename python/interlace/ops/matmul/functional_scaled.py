"""The functional forms of the fused ops on scaled (fp8) operands; part of ``interlace.functional``.

See ``ops/matmul/scaled.py`` for what scales are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments.words import (
    FunctionalGroup,
    FusedReduceOp,
    ScaledAlgorithm,
    Tensors,
)
from interlace.ops.op.calls import check, run, run_to_list

Tensor = torch.Tensor


def all_gather_scaled_matmul(
    input: Tensor,
    weight: Tensors,
    input_scale: Tensor,
    weight_scale: Tensors,
    gather_dim: int = 0,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    return_gathered: bool = False,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    algorithm: ScaledAlgorithm = "auto",
) -> Tensor | list[Tensor] | tuple[Tensor, Tensor | list[Tensor]]:
    """``(all_gather(input * input_scale, gather_dim) @ (weight * weight_scale)) + bias``; fp8 travels.

    ``input``: float8, ``[..., k]``, equal shards, gathered along any dimension but the last.
    ``input_scale``: float32, one element that is the same on all ranks, or ``[..., 1]``, one per row, which
    is gathered with the rows. ``weight``: float8 ``(k, n)``, or several; ``weight_scale``: one element or
    ``(1, n)`` for each; ``bias``: ``(n,)``. ``out_dtype`` is bfloat16 by default. ``return_gathered``
    gives the gathered, unscaled ``input`` first. ``algorithm``: "fused" (one Triton kernel that multiplies
    fp8 where it arrives; weights must be contiguous along k), "unfused" (``torch._scaled_mm`` after the
    gather), "auto".

    Raises ValueError or TypeError on every rank, before any data moves; RuntimeError in backward: there are
    no gradients. Semantics: ``torch.ops.symm_mem.fused_all_gather_scaled_matmul``.

    >>> def gathered():
    ...     one, x = torch.tensor(0.5), torch.ones(2, 16).to(torch.float8_e4m3fn)
    ...     weight = torch.ones(16, 16).to(torch.float8_e4m3fn).t()  # contiguous along k
    ...     return functional.all_gather_scaled_matmul(x, weight, one, one)[3, :2].tolist()
    >>> interlace.run(gathered, 2)
    [[4.0, 4.0], [4.0, 4.0]]
    """
    op = "all_gather_scaled_matmul"
    several = not isinstance(weight, Tensor)
    weights: list[Any] = list(weight) if several else [weight]
    scales: list[Any] = (
        list(weight_scale) if isinstance(weight_scale, (list, tuple)) else [weight_scale]
    )
    biases: list[Any] = list(bias) if isinstance(bias, (list, tuple)) else [bias] * len(weights)
    if all(each is None for each in biases):
        biases = []
    for number, (each, scale) in enumerate(zip(weights, scales, strict=False)):
        named = {f"weight[{number}]": each, f"weight_scale[{number}]": scale}
        dims = {"gather_dim": gather_dim}
        check(op, group, tag, dims, input=input, input_scale=input_scale, **named)
    own = (
        input, weights, input_scale, scales, biases, gather_dim, return_gathered, out_dtype,
        use_fast_accum, algorithm,
    )  # fmt: skip
    tensors = (input, input_scale, *weights, *scales, *biases)
    made = run_to_list(op, group, tag, tensors, *own)
    outputs = list(made[: len(weights)]) if several else made[0]
    return (made[len(weights)], outputs) if return_gathered else outputs


def scaled_matmul_reduce_scatter(
    input: Tensor,
    weight: Tensor,
    input_scale: Tensor,
    weight_scale: Tensor,
    reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0,
    *,
    bias: Tensor | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    algorithm: ScaledAlgorithm = "auto",
) -> Tensor:
    """``reduce_scatter((input * input_scale) @ (weight * weight_scale), reduce_op, scatter_dim) + bias``.

    ``input``, ``weight``, ``input_scale``, ``weight_scale`` and ``out_dtype``, in which products travel, as
    for :func:`all_gather_scaled_matmul`, but every rank may have another scale; any dimension of the
    product may be scattered. ``reduce_op``: "sum" or "avg". ``bias``, ``(n,)``, equal on all ranks, is
    added once. ``algorithm`` as there; with "unfused" the matmul is done when the call returns, and the
    reduction is in flight.

    Raises ValueError or TypeError on every rank, before any data moves; RuntimeError in backward: there are
    no gradients. Semantics: ``torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter``, which adds the bias
    on every rank.

    >>> def reduced():
    ...     one, x = torch.tensor(0.5), torch.ones(2, 16).to(torch.float8_e4m3fn)
    ...     weight = torch.ones(16, 16).to(torch.float8_e4m3fn).t()
    ...     return functional.scaled_matmul_reduce_scatter(x, weight, one, one)[0, :2].tolist()
    >>> interlace.run(reduced, 2)
    [[8.0, 8.0], [8.0, 8.0]]
    """
    op, dims = "scaled_matmul_reduce_scatter", {"scatter_dim": scatter_dim}
    operands = {"weight": weight, "input_scale": input_scale, "weight_scale": weight_scale}
    check(op, group, tag, dims, input=input, **operands)
    given = (reduce_op, scatter_dim, out_dtype, use_fast_accum, algorithm)
    return run(op, group, tag, input, *operands.values(), bias, *given, tensors=5)
