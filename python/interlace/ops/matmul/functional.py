"""The functional forms of the fused matmuls; part of ``interlace.functional``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import norms
from interlace.arguments.norms import RowNorm
from interlace.arguments.words import (
    FP8,
    FunctionalGroup,
    FusedAlgorithm,
    FusedReduceOp,
    Normed,
    Quantized,
    Tensors,
    Unscaled,
)
from interlace.ops.matmul.functional_norms import run_normed
from interlace.ops.op.calls import check, keeps, name_of, own_length, refuse, run, run_to_list

Tensor = torch.Tensor


def all_gather_matmul(
    input: Tensor,
    weight: Tensors,
    gather_dim: int = 0,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    return_gathered: bool = False,
    save_gathered: bool = True,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | list[Tensor] | tuple[Tensor, Tensor | list[Tensor]]:
    """``all_gather(input, gather_dim) @ weight + bias``, as :func:`interlace.all_gather_matmul`.

    ``input``: this rank's shard, ``[..., k]``; shards must be equal. ``weight``: ``(k, n)``, or a list of
    such, which makes the output a list; ``bias``: ``(n,)``, or a list with one or None for each. Returns
    ``[..., n]``, or ``(gathered, output)`` with ``return_gathered``. ``save_gathered``: keep the gathered
    input for the weights' gradients; without, it is gathered again in backward, while the gradient of the
    input is computed. ``algorithm`` and ``out_dtype`` as there.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics:
    ``torch.ops.symm_mem.fused_all_gather_matmul``.

    >>> def gathered():
    ...     return functional.all_gather_matmul(torch.ones(2, 8), torch.ones(8, 3)).shape
    >>> interlace.run(gathered, 2)
    [torch.Size([4, 3]), torch.Size([4, 3])]
    """
    check("all_gather_matmul", group, tag, {"gather_dim": gather_dim}, input=input)
    several = not isinstance(weight, Tensor)
    if several and (not isinstance(weight, (list, tuple)) or not weight):
        text = f"weight must be a tensor or a list of some, got {type(weight).__name__}"
        refuse("all_gather_matmul", group, tag, TypeError(text))
    weights: list[Any] = list(weight) if several else [weight]
    biases: list[Any] = list(bias) if isinstance(bias, (list, tuple)) else [bias] * len(weights)
    if len(biases) != len(weights):
        text = f"bias has {len(biases)} entries, weight has {len(weights)}"
        refuse("all_gather_matmul", group, tag, ValueError(text))
    for each in weights:
        check("all_gather_matmul", group, tag, weight=each)
    for each in biases:
        check("all_gather_matmul", group, tag, bias=each)
    if all(each is None for each in biases):
        biases = []
    elif any(each is None for each in biases):
        # a list of which some are None has no gradients in torch's custom ops
        biases = [
            w.new_zeros(w.shape[1:]) if b is None else b
            for w, b in zip(weights, biases, strict=True)
        ]
    kept = return_gathered or (save_gathered and keeps(False, weights))
    given = (input, weights, biases, gather_dim, kept, algorithm, out_dtype)
    made = run_to_list("all_gather_matmul", group, tag, (input, *weights, *biases), *given)
    outputs = list(made[: len(weights)]) if several else made[0]
    return (made[len(weights)], outputs) if return_gathered else outputs


def matmul_reduce_scatter(
    input: Tensor,
    weight: Tensor,
    reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: RowNorm | None = None,
    quantize: FP8 | Unscaled | None = None,
    gather_normed: bool = False,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | Normed | Quantized:
    """This rank's part of ``reduce_scatter(input @ weight, reduce_op, scatter_dim) + bias``.

    As :func:`interlace.matmul_reduce_scatter`. Of unequal parts a graph has the length of the own one: who
    traces must be a rank, and an export has equal parts. ``input``: ``[..., k]``; ``weight``: ``(k, n)``;
    ``bias``: ``(n,)``, added once, to the reduced rows. ``reduce_op``: "sum" or "avg". ``residual``,
    ``norm``, ``quantize``, ``gather_normed`` as there; with a norm it returns ``(normed, residual)``.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics:
    ``torch.ops.symm_mem.fused_matmul_reduce_scatter``.

    >>> def reduced():
    ...     return functional.matmul_reduce_scatter(torch.ones(4, 8), torch.ones(8, 3))[0].tolist()
    >>> interlace.run(reduced, 2)
    [[16.0, 16.0, 16.0], [16.0, 16.0, 16.0]]
    """
    op, dims = "matmul_reduce_scatter", {"scatter_dim": scatter_dim}
    check(op, group, tag, dims, input=input, weight=weight, bias=bias)
    own = scatter_dim, own_length(group, tag, input, weight, scatter_dim)
    if norm is not None:
        how = (norm, residual, reduce_op, (*own, algorithm, out_dtype), quantize)
        tensors = (input, weight, bias)
        return run_normed(f"{op}_norm", group, tag, tensors, *how, gather_normed)  # type: ignore[no-any-return]
    _without_norm(op, group, tag, residual, quantize, gather_normed)
    given = (name_of(reduce_op), *own, algorithm, out_dtype)
    return run(op, group, tag, input, weight, bias, *given, tensors=3)


def matmul_all_reduce(
    input: Tensor,
    weight: Tensor,
    reduce_op: FusedReduceOp = "sum",
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: RowNorm | None = None,
    quantize: FP8 | Unscaled | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | Normed | Quantized:
    """``all_reduce(input @ weight, reduce_op) + bias``, as :func:`interlace.matmul_all_reduce`.

    ``input``: ``[..., k]``; ``weight``: ``(k, n)``; ``bias``: ``(n,)``, the same on all ranks, of which
    each adds it to a part of the rows. Returns ``[..., n]``. ``reduce_op``: "sum" or "avg". ``residual``,
    ``norm``, ``quantize`` as there; with a norm it returns ``(normed, residual)``.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics: ``torch.matmul``, then
    ``torch.distributed.all_reduce``.

    >>> def summed():
    ...     return functional.matmul_all_reduce(torch.ones(1, 8), torch.ones(8, 2)).tolist()
    >>> interlace.run(summed, 2)
    [[[16.0, 16.0]], [[16.0, 16.0]]]
    """
    op = "matmul_all_reduce"
    check(op, group, tag, input=input, weight=weight, bias=bias)
    if norm is not None:
        how = (norm, residual, reduce_op, (algorithm, out_dtype), quantize)
        return run_normed(f"{op}_norm", group, tag, (input, weight, bias), *how)  # type: ignore[no-any-return]
    _without_norm(op, group, tag, residual, quantize, False)
    given = (name_of(reduce_op), algorithm, out_dtype)
    return run(op, group, tag, input, weight, bias, *given, tensors=3)


def _without_norm(op: str, group: FunctionalGroup, tag: str, *normed: Any) -> None:
    """Raise ValueError for what only a call with a norm takes: a residual, quantize, gather_normed."""
    residual, *others = normed
    try:
        norms.given(residual, None, *others)
    except ValueError as error:
        refuse(op, group, tag, error)
