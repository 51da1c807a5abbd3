"""The layer of attention over a sequence of which each rank has a part: no parameters."""

from collections.abc import Sequence

import torch

from interlace.arguments.words import FusedAlgorithm, Group
from interlace.nn.functions.attention import (
    AttentionMethod,
    Balance,
    SequenceLayout,
    context_parallel_attention,
)
from interlace.nn.parameters.sharding import OnGroup

Tensor = torch.Tensor


class ContextParallelAttention(OnGroup):
    """:func:`interlace.nn.functional.context_parallel_attention` as a module.

    Takes the place of Megatron-core's ``DotProductAttention`` (with ``context_parallel_size`` above 1), or
    of TransformerEngine's, between the projections. The options are those of the function.

    Forward: ``q``, ``k`` and ``v``, ``[batch, tokens, heads, size]`` or as ``layout`` says, and
    ``cu_seqlens``, ``[n + 1]``. Raises what the function does, when it is called.

    >>> def attended():
    ...     layer, x = nn.ContextParallelAttention(causal=True), torch.zeros(1, 2, 1, 4)
    ...     return layer(x, x, torch.ones(1, 2, 1, 4)).sum().item()
    >>> interlace.run(attended, 2)
    [8.0, 8.0]
    """

    def __init__(
        self,
        *,
        method: AttentionMethod = "auto",
        causal: bool = False,
        scale: float | None = None,
        window: Sequence[int] | None = None,
        group: Group = None,
        layout: SequenceLayout = "bshd",
        balance: Balance = "zigzag",
        algorithm: FusedAlgorithm = "auto",
    ) -> None:
        super().__init__(group)
        self.method, self.causal, self.scale, self.window = method, causal, scale, window
        self.layout, self.balance, self.algorithm = layout, balance, algorithm

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return context_parallel_attention(
            q,
            k,
            v,
            method=self.method,
            causal=self.causal,
            scale=self.scale,
            window=self.window,
            cu_seqlens=cu_seqlens,
            group=self.group,
            layout=self.layout,
            balance=self.balance,
            algorithm=self.algorithm,
        )

    def extra_repr(self) -> str:
        return f"{self.method}, causal={self.causal}, {self.balance}, world_size={self.group.world_size}"
