# Written by tests/stubs.py from the signatures of the functions.
from collections.abc import (
    Sequence,
)
from interlace.arguments.words import (
    FunctionalGroup, FusedAlgorithm,
)
from interlace.ops.attention.functional import (
    AttentionMethod, Balance, SequenceLayout, attention_of_heads as attention_of_heads,
    positions_of_ranks as positions_of_ranks, shard_sequence as shard_sequence,
    unshard_sequence as unshard_sequence,
)
from torch import (
    Tensor,
)
from typing import (
    Any, Literal, overload,
)

__all__ = [
    "attention_of_heads", "context_parallel_attention", "positions_of_ranks", "shard_sequence",
    "unshard_sequence",
]
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, *, method: AttentionMethod = "auto", causal: bool = False,
    scale: float | None = None, window: Sequence[int] | None = None, cu_seqlens: Tensor | None = None,
    group: FunctionalGroup = None, tag: str = "", layout: SequenceLayout = "bshd",
    balance: Balance = "zigzag", algorithm: FusedAlgorithm = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, *, method: AttentionMethod = "auto", causal: bool = False,
    scale: float | None = None, window: Sequence[int] | None = None, cu_seqlens: Tensor | None = None,
    group: FunctionalGroup = None, tag: str = "", layout: SequenceLayout = "bshd",
    balance: Balance = "zigzag", algorithm: FusedAlgorithm = "auto", return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, *, method: AttentionMethod = "auto", causal: bool = False,
    scale: float | None = None, window: Sequence[int] | None = None, cu_seqlens: Tensor | None = None,
    group: FunctionalGroup = None, tag: str = "", layout: SequenceLayout = "bshd",
    balance: Balance = "zigzag", algorithm: FusedAlgorithm = "auto", return_lse: bool,
) -> Any: ...
