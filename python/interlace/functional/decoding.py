"""The functional form of decoding over caches that are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.arguments import checks
from interlace.arguments.words import FunctionalGroup, ScaledAlgorithm
from interlace.functional.calls import check, number, refuse, run_to_list

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
