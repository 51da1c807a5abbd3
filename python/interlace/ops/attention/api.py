"""Attention of new tokens to a cache of keys and values that is spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.words import Group, ScaledAlgorithm
from interlace.groups.groups import resolve
from interlace.ops.attention.decode import OP, DecodeArguments, decode
from interlace.ops.op import registry

Tensor = torch.Tensor


def distributed_decode(
    q: Tensor,
    kv_cache: Sequence[Tensor],
    *,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
    group: Group = None,
    algorithm: ScaledAlgorithm = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new tokens, the same on all ranks, to keys and values of which each rank has a part.

    Parameters
    ----------
    q : queries, ``[batch, heads, size]``, or ``[batch, tokens, heads, size]`` of several tokens (that were
        guessed, for instance). The same on all ranks.
    kv_cache : keys and values of this rank's part of the sequences, each ``[batch, tokens, heads, size]``,
        read in place; where torch computes, 16 bits are widened and pages put together, as far as
        ``lengths`` say. Tokens may differ between ranks; heads divide those of ``q``. Heads of keys have
        the size of those of ``q``, heads of values any size. With ``block_table`` each ``[pages, tokens of
        a page, heads, size]``.
    lengths : int32 or int64 ``[batch]``, or ``[batch, tokens]``, for every token of ``q``: how many of this
        rank's keys are seen; by default all. What is behind the most that a token of a sequence sees is not
        read (by torch on a GPU it is, without an effect). None at all is fine. Of n new tokens
        whose keys are the last of this rank's L, the i-th sees ``L - n + 1 + i``.
    block_table : int32 or int64 ``[batch, n]``: the pages of this rank that have a sequence's keys, in its
        order, as vLLM and FlashInfer have them. What is behind ``lengths`` may have any number.
    scale : of the scores, by default ``1 / sqrt(size)``.
    algorithm : "fused" (Triton kernels over the own keys, and one low-latency exchange of partial results
        and their logarithms; of more than 64 KiB a plain all-gather), "unfused" (torch), "auto".
    return_lse : also return the natural logarithms of the sums of exponentials, ``[batch, heads]`` or
        ``[batch, heads, tokens]``.

    Returns
    -------
    The output, of the shape of ``q`` with the head size of the values, on all ranks with the same bits:
    results are merged in the order of the ranks, in fp32. 0 where no rank has a key. No gradients: a
    backward raises RuntimeError.

    Raises ValueError or TypeError naming the argument, both values and the rank, on all ranks, before any
    data moves.

    Semantics: ``torch.nn.functional.scaled_dot_product_attention`` of the whole cache; split as in flash
    decoding. Triton-distributed's distributed flash decode and FlashInfer's ``merge_state`` have the same
    parts; here the exchange and the merge are one kernel.

    >>> def decoded():
    ...     keys, values = torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1, 4), 1.0 + interlace.get_rank())
    ...     return interlace.distributed_decode(torch.zeros(1, 2, 4), (keys, values))[0, :, 0].tolist()
    >>> interlace.run(decoded, 2)
    [[1.5, 1.5], [1.5, 1.5]]
    """
    communicator = resolve(group).on(q)
    with communicator.accepting(OP):
        key, value = checks.keys_and_values(kv_cache)
        checks.flag("return_lse", return_lse)
    tensors = q, key, value, lengths, block_table
    if torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in tensors):
        given: Any = {"lengths": lengths, "block_table": block_table, "scale": scale}
        recorded = registry.functional(OP)  # whose backward says that there is none
        made = recorded(q, kv_cache, group=group, algorithm=algorithm, **given)
        output, lse = map(registry.functional("wait"), made)
    else:
        arguments = DecodeArguments(q, key, value, lengths, block_table, scale, algorithm)
        output, lse = decode(communicator, (arguments,))  # type: ignore[misc]
    return (output, lse) if return_lse else output
