"""The functional forms of decoding and of head exchange; in ``interlace.functional``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.words import FunctionalGroup, FusedAlgorithm, ScaledAlgorithm
from interlace.ops.op.calls import check, keeps, number, refuse, run, run_to_list

Tensor = torch.Tensor


def distributed_decode(
    q: Tensor,
    kv_cache: Sequence[Tensor],
    *,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: ScaledAlgorithm = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens to ranks' parts of caches: :func:`interlace.distributed_decode`.

    ``q``, ``kv_cache``, ``lengths``, ``block_table``, ``scale`` and ``algorithm`` as there. Returns the
    output, of the shape of ``q`` with the head size of the values, and the natural logarithms of the sums
    of exponentials, ``[batch, heads]`` or ``[batch, heads, tokens]``. A graph has one op for it. No
    gradients: a backward raises RuntimeError.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics:
    ``torch.nn.functional.scaled_dot_product_attention`` of the whole cache.

    >>> def decoded():
    ...     keys, values = torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1, 4), 1.0 + interlace.get_rank())
    ...     return functional.distributed_decode(torch.zeros(1, 2, 4), (keys, values))[0][0, 0].tolist()
    >>> interlace.run(decoded, 2)
    [[1.5, 1.5, 1.5, 1.5], [1.5, 1.5, 1.5, 1.5]]
    """
    op = "distributed_decode"
    try:
        key, value = checks.keys_and_values(kv_cache)
    except TypeError as error:
        refuse(op, group, tag, error)
    check(op, group, tag, None, q=q, **{"kv_cache[0]": key, "kv_cache[1]": value})
    number(op, group, tag, "scale", scale)
    tensors = (q, key, value, lengths, block_table)
    output, lse = run_to_list(op, group, tag, tensors, *tensors, scale, algorithm)
    return output, lse


def matmul_all_to_all(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    length: int | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: FusedAlgorithm = "auto",
) -> Tensor:
    """All ranks' rows of ``input @ weight + bias``, and of its columns this rank's part.

    The projection before an attention over heads: a rank has some tokens, and gets some heads of all.

    Parameters
    ----------
    input : this rank's rows, ``[m, ..., k]``; of unequal ``m``, also 0, ``length`` says the sum.
    weight : ``(k, n)``, the same on all ranks, whose number divides ``n``; any strides. Rank r gets the
        columns from ``r * n / W`` on.
    bias : ``(n,)``, the same on all ranks.
    length : of the result along dimension 0, by default ``W * m``.
    algorithm : "fused" (one Triton kernel stores each tile where it is needed), "pipelined" (torch, a
        product per receiver), "unfused" (torch, then a plain all-to-all), "auto".

    Returns ``[length, ..., n / W]``, by rank. Differentiable: the gradient of the input is
    :func:`all_to_all_matmul` with the transposed weight; those of weight and bias are of this rank's rows.

    Raises ValueError or TypeError naming the argument, both values and the rank, on every rank, before any
    data moves. Semantics: a matmul, then ``torch.distributed.all_to_all_single`` of its columns; what
    :func:`all_gather_matmul` gives with this rank's columns of the weight, but products travel.
    Triton-distributed has it as "Ulysses SP GEMM + all-to-all".

    >>> def projected():
    ...     y = functional.matmul_all_to_all(torch.ones(1, 2), torch.arange(4.0).expand(2, 4))
    ...     return y.tolist()
    >>> interlace.run(projected, 2)
    [[[0.0, 2.0], [0.0, 2.0]], [[4.0, 6.0], [4.0, 6.0]]]
    """
    op = "matmul_all_to_all"
    check(op, group, tag, _ints(length), input=input, weight=weight, bias=bias)
    return run(op, group, tag, input, weight, bias, length, algorithm, tensors=3)


def all_to_all_matmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    length: int | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: FusedAlgorithm = "auto",
) -> Tensor:
    """This rank's rows of all ranks' columns, times ``weight``, plus ``bias``.

    The projection behind an attention over heads: a rank has some heads of all tokens, gets some tokens.

    Parameters
    ----------
    input : all rows, by rank, of this rank's columns: ``[m, ..., k / W]``.
    weight : ``(k, n)``, the same on all ranks; any strides. Rank r's columns meet its rows from
        ``r * k / W`` on.
    bias : ``(n,)``, the same on all ranks, added once.
    length : this rank's part of dimension 0, by default ``m / W``; the sum over ranks is ``m``.
    algorithm : "fused" (one Triton kernel multiplies each rank's columns when they are there), "pipelined"
        (torch, behind pushes), "unfused" (a plain all-to-all, then torch), "auto".

    Returns ``[length, ..., n]``. Of "fused" the sum over ranks is in fp32 in their order: the same bits in
    every run. Differentiable: the gradient of the input is :func:`matmul_all_to_all` with the transposed
    weight; those of weight and bias are of this rank's rows.

    Raises ValueError or TypeError naming the argument, both values and the rank, on every rank, before any
    data moves. Semantics: ``torch.distributed.all_to_all_single``, then a matmul; what
    :func:`matmul_reduce_scatter` gives with this rank's rows of the weight, but its inputs travel.
    Triton-distributed has it as "Ulysses SP all-to-all + GEMM".

    >>> def projected():
    ...     return functional.all_to_all_matmul(torch.ones(2, 1), torch.tensor([[1.0], [2.0]])).tolist()
    >>> interlace.run(projected, 2)
    [[[3.0]], [[3.0]]]
    """
    op = "all_to_all_matmul"
    check(op, group, tag, _ints(length), input=input, weight=weight, bias=bias)
    given = (input, weight, bias, length, keeps(False, [weight]), algorithm)
    output: Tensor = run_to_list(op, group, tag, (input, weight, bias), *given)[0]
    return output


def _ints(length: Any) -> dict[str, Any]:
    return {} if length is None else {"length": length}
