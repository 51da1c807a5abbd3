"""Attention layers, without and with projections, over a sequence that is split over the ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.types import Device

from interlace.arguments.words import FusedAlgorithm, Group
from interlace.nn.linear_functions import casts
from interlace.nn.sharding import OnGroup, check_equal, positive
from interlace.ops.attention.functional import (
    AttentionMethod,
    Balance,
    SequenceLayout,
    all_to_all_matmul,
    attention_of_heads,
    check_options,
    context_parallel_attention,
    matmul_all_to_all,
    positions_of_ranks,
)
from interlace.ops.attention.problem import TokenShards
from interlace.ops.op.calls import ints, refuse
from interlace.runtime.compat.torch_modes import modes_active
from interlace.runtime.core.call import Call

Tensor = torch.Tensor


def _options(layer: object) -> dict[str, Any]:
    names = ("causal", "scale", "window", "group", "layout", "balance", "algorithm")
    return {name: getattr(layer, name) for name in names}


class ContextParallelAttention(OnGroup):
    """:func:`interlace.nn.functional.context_parallel_attention` as a module.

    It replaces Megatron-core's ``DotProductAttention`` (with ``context_parallel_size`` above 1), or
    TransformerEngine's, between the projections. Its options are the options of the function.

    Forward: ``q``, ``k`` and ``v`` are ``[batch, tokens, heads, size]`` or as ``layout`` says; ``v`` may
    have any head size. ``cu_seqlens`` is ``[n + 1]``. Raises ValueError or TypeError as the function does;
    the constructor raises those about options.

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
        options = method, causal, scale, window, layout, balance, algorithm
        check_options("ContextParallelAttention", self.group, *options)
        self.method, self.causal, self.scale, self.window = method, causal, scale, window
        self.layout, self.balance, self.algorithm = layout, balance, algorithm

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        options = {**_options(self), "method": self.method, "cu_seqlens": cu_seqlens}
        return context_parallel_attention(q, k, v, **options)  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return f"{self.method}, causal={self.causal}, {self.balance}, world_size={self.group.world_size}"


Rotary = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class UlyssesAttention(OnGroup):
    """Self-attention of a transformer, with projections, over a sequence that is split over the ranks.

    Heads are exchanged for tokens inside the matmuls before and after the attention. A tile of queries,
    keys and values is stored on the rank that computes its heads. The output projection multiplies each
    rank's heads as they arrive. See :func:`interlace.functional.matmul_all_to_all`.

    Parameters
    ----------
    hidden_size : features of the input.
    num_heads, num_kv_heads, head_dim : as for :class:`QKVParallelLinear`. The group's size should divide
        both numbers of heads. If it does not, heads are exchanged between the projections, and
        ``algorithm="fused"`` raises an error.
    bias : add biases in the projections to queries, keys and values; ``out_bias``: in the output's.
    causal, scale, window, layout, balance, algorithm : as for :class:`ContextParallelAttention`.

    Weights are whole on every rank: ``nn.Linear`` modules ``q``, ``k``, ``v`` and ``out``, made in this
    order. Their gradients are for this rank's tokens only. Sum them over the group like the gradients of
    replicas (DDP, FSDP).

    Forward: ``input`` ``[batch, tokens, hidden]``, or as ``layout`` says; the output has the same shape.
    ``lengths``: every rank's number of tokens, if they differ. It must be the same on all ranks, which is
    checked except in graphs. ``cu_seqlens``: as for the function.
    ``rotary(q, k, positions)``: called with queries and keys in that layout, and with an int64 ``[tokens]``
    tensor, the positions of their tokens in the sequence; returns both.

    Raises ValueError or TypeError naming the argument, the values and the rank.

    >>> def forward():
    ...     layer = nn.UlyssesAttention(8, 4, 2, causal=True)
    ...     return layer(torch.ones(1, 3, 8)).shape
    >>> interlace.run(forward, 2)
    [torch.Size([1, 3, 8]), torch.Size([1, 3, 8])]
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool = False,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: Sequence[int] | None = None,
        group: Group = None,
        layout: SequenceLayout = "bshd",
        balance: Balance = "zigzag",
        algorithm: FusedAlgorithm = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        options = "auto", causal, scale, window, layout, balance, algorithm
        check_options("UlyssesAttention", self.group, *options)
        with self.group.accepting("UlyssesAttention"):
            kv = num_heads if num_kv_heads is None else num_kv_heads
            positive(hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=kv)
            size = hidden_size // num_heads if head_dim is None else head_dim
            positive(head_dim=size)
            if num_heads % kv:
                raise ValueError(f"num_kv_heads must divide num_heads {num_heads}, got {kv}")
            self.fusible = not (num_heads % self.group.world_size or kv % self.group.world_size)
            if algorithm == "fused" and not self.fusible:
                raise ValueError(
                    f'algorithm="fused" needs heads that world size {self.group.world_size} divides, got '
                    f'num_heads {num_heads} and num_kv_heads {kv}; use "unfused" or "auto"'
                )
        self._found_alike = False
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, kv, size
        self.causal, self.scale, self.window = causal, scale, window
        self.layout, self.balance, self.algorithm = layout, balance, algorithm
        kind: Any = {"device": device, "dtype": dtype}
        self.q = torch.nn.Linear(hidden_size, num_heads * size, bias, **kind)
        self.k = torch.nn.Linear(hidden_size, kv * size, bias, **kind)
        self.v = torch.nn.Linear(hidden_size, kv * size, bias, **kind)
        self.out = torch.nn.Linear(num_heads * size, hidden_size, out_bias, **kind)

    def forward(
        self,
        input: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        lengths: Sequence[int] | None = None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        options = {**_options(self), "cu_seqlens": cu_seqlens}
        if rotary is not None and not callable(rotary):
            text = f"rotary must be callable or None, got {rotary!r}"
            refuse("UlyssesAttention", self.group, "", TypeError(text))
        lengths = self._lengths(input, lengths)
        if not self._found_alike and self.group.world_size > 1:
            parameters = self.named_parameters()
            by_message = {
                f"{name} of UlyssesAttention has other values": each for name, each in parameters
            }
            check_equal("UlyssesAttention", self.group, by_message)
            self._found_alike = True
        step = self._fused if self.fusible else self._beside
        return self._on_all_ranks(step, input, lengths, rotary, options)

    def _fused(
        self, input: Tensor, lengths: Sequence[int], rotary: Rotary | None, options: dict[str, Any]
    ) -> Tensor:
        """Run the projections with the exchange of heads in their matmuls."""
        tokens = lengths[self.group.rank]
        x = input.transpose(0, 1) if self.layout == "bshd" else input
        with_group: Any = {"group": self.group, "algorithm": self.algorithm}
        total, size = sum(lengths), self.head_dim
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        weight, bias = self._by_rank()
        heads_of_rank = matmul_all_to_all(x, weight.t(), bias=bias, length=total, **with_group)
        per_rank = [head // self.group.world_size for head in heads]
        parts = torch.split(heads_of_rank, [n * size for n in per_rank], -1)
        q, k, v = (each.unflatten(-1, (n, size)) for each, n in zip(parts, per_rank, strict=True))  # type: ignore[no-untyped-call]
        if self.layout == "bshd":
            q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        if rotary is not None:
            positions = positions_of_ranks(lengths, balance=self.balance).to(input.device)
            q, k = rotary(q, k, positions)
        y = attention_of_heads(q, k, v, length=tokens, **options).flatten(-2)
        y = y.transpose(0, 1) if self.layout == "bshd" else y
        out = self.out
        output = all_to_all_matmul(y, out.weight.t(), bias=out.bias, length=tokens, **with_group)
        return output.transpose(0, 1) if self.layout == "bshd" else output

    def _lengths(self, input: object, lengths: object) -> list[int]:
        op, world, hidden = "UlyssesAttention", self.group.world_size, self.q.in_features
        if not isinstance(input, Tensor):
            text = f"input must be a tensor, got {type(input).__name__}"
            refuse(op, self.group, "", TypeError(text))
        if input.dim() != 3 or input.shape[2] != hidden:
            text = f"input must have 3 dimensions and {hidden} features, got shape {tuple(input.shape)}"
            refuse(op, self.group, "", ValueError(text))
        if input.dtype != self.q.weight.dtype and not casts(input):
            text = f"input is {input.dtype}, weights of {op} are {self.q.weight.dtype}"
            refuse(op, self.group, "", TypeError(text))
        tokens = input.shape[1 if self.layout == "bshd" else 0]
        lengths_of = [tokens] * world
        if lengths is not None:
            lengths_of = ints(op, self.group, "", "lengths", lengths)
        if len(lengths_of) != world or lengths_of[self.group.rank] != tokens:
            text = (
                f"lengths must have {world} entries, this rank's must be {tokens}; got {lengths_of}"
            )
            refuse(op, self.group, "", ValueError(text))
        if not torch.compiler.is_compiling() and not modes_active():
            # positions follow from the lengths, and no rank can see the others' lengths
            self.group.told(Call(op, (("lengths", tuple(lengths_of)),)))
        return lengths_of

    def _by_rank(self) -> tuple[Tensor, Tensor | None]:
        """Return the weights and biases of queries, keys and values, grouped by the rank of their heads."""
        world = self.group.world_size

        def together(parts: Sequence[Tensor]) -> Tensor:
            by_rank = [part.view(world, -1, *part.shape[1:]) for part in parts]
            return torch.cat(by_rank, 1).flatten(0, 1)

        linears = self.q, self.k, self.v
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return together([linear.weight for linear in linears]), together(biases) if biases else None

    def _beside(
        self, input: Tensor, lengths: Sequence[int], rotary: Rotary | None, options: dict[str, Any]
    ) -> Tensor:
        """Project this rank's tokens, and exchange heads in the attention."""
        q, k, v = (
            each(input).unflatten(-1, (-1, self.head_dim)) for each in (self.q, self.k, self.v)
        )
        if rotary is not None:
            shards = TokenShards(tuple(lengths), self.balance)
            q, k = rotary(q, k, shards.places([self.group.rank], input.device))
        y: Any = context_parallel_attention(q, k, v, method="ulysses", **options)
        output: Tensor = self.out(y.flatten(-2))
        return output

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}, {self.balance}, world_size={self.group.world_size}"
        )
