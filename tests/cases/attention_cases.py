"""Calls of the attention over a sharded sequence: what every rank runs, and the bounds it is held to."""

import math
from dataclasses import dataclass
from typing import Any

import torch

import interlace
from interlace import nn, reference
from interlace.ops.attention.problem import AttentionReference, TokenShards
from interlace.runtime.tuning.configuration import override
from support import noise

METHODS = ("all_gather", "ring", "ulysses")
ALGORITHMS = ("fused", "pipelined", "unfused")


def visible(
    tokens: int,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``[tokens, tokens]``: whether a query sees a key, both by their position in the sequence."""
    query, key = torch.arange(tokens).unsqueeze(1), torch.arange(tokens)
    mask = torch.ones(tokens, tokens, dtype=torch.bool)
    if causal:
        mask &= key <= query
    before, after = window
    if before >= 0:
        mask &= key >= query - before
    if after >= 0:
        mask &= key <= query + after
    if cu_seqlens is not None:
        number = torch.bucketize(key, cu_seqlens.long(), right=True)
        mask &= (number == number.unsqueeze(1)) & (number < len(cu_seqlens))
    return mask


@dataclass(frozen=True)
class AttentionCase:
    """``lengths``: tokens of each rank.

    ``heads``: numbers of heads of queries and of keys. ``value_size``: size of value heads, None for the
    size of key heads.
    """

    lengths: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    size: int = 16
    value_size: int | None = None
    batch: int = 2
    causal: bool = True
    window: tuple[int, int] | None = None
    cu_seqlens: tuple[int, ...] | None = None
    balance: str = "zigzag"
    layout: str = "bshd"
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    tiles: tuple[int, int] = (16, 16)
    copiers: int = 1

    @property
    def documents(self) -> torch.Tensor | None:
        return None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, dtype=torch.int32)

    def whole(self, number: int, heads: int) -> torch.Tensor:
        """``[batch, tokens, heads, size]``, the same on all ranks: 0 queries, 1 keys, 2 values, 3 grads."""
        size = self.size if number < 2 or self.value_size is None else self.value_size
        return noise(0, number, (self.batch, sum(self.lengths), heads, size), self.dtype)

    def tensors(self) -> list[torch.Tensor]:
        return [self.whole(number, self.heads[number > 0]) for number in range(3)]

    def grads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of the output and of the logarithms."""
        grad = self.whole(3, self.heads[0])
        return grad, noise(0, 4, (self.batch, self.heads[0], sum(self.lengths)), torch.float32)


def attend(case: AttentionCase, method: str, algorithm: str) -> list[torch.Tensor]:
    """Return this rank's output, logarithms and gradients of q, k and v, without a comparison."""
    places = TokenShards(case.lengths, case.balance).places([interlace.get_rank()], None).tolist()
    own = [each[:, places].clone() for each in case.tensors()]
    grad = case.grads()[0][:, places]
    if case.layout == "sbhd":
        own, grad = [each.transpose(0, 1) for each in own], grad.transpose(0, 1)
    own = [each.requires_grad_() for each in own]
    block_m, block_n = case.tiles
    with override(block_m=block_m, block_n=block_n, copiers=case.copiers, chunks=2):
        output, lse = nn.functional.context_parallel_attention(
            *own,
            method=method,  # type: ignore[arg-type]
            algorithm=algorithm,  # type: ignore[arg-type]
            causal=case.causal,
            window=case.window,
            cu_seqlens=case.documents,
            balance=case.balance,  # type: ignore[arg-type]
            layout=case.layout,  # type: ignore[arg-type]
            scale=case.scale,
            return_lse=True,
        )
        (output * grad).sum().backward()
    found = [output.detach(), lse.detach(), *(each.grad for each in own)]
    if case.layout == "sbhd":
        found = [each if each is found[1] else each.transpose(0, 1) for each in found]
    return [interlace.functional.wait(each).clone() for each in found]


def ratios(case: AttentionCase, found: list[list[torch.Tensor]]) -> dict[str, float]:
    """How far the results of all ranks are from the reference, as multiples of what is allowed."""
    query, key, value = (each.transpose(1, 2) for each in case.tensors())
    mask = visible(
        sum(case.lengths),
        causal=case.causal,
        window=case.window or (-1, -1),
        cu_seqlens=case.documents,
    )
    scale = 1 / math.sqrt(case.size) if case.scale is None else case.scale
    known = AttentionReference(query, key, value, mask, scale)
    grads = known.gradients(case.grads()[0].transpose(1, 2))
    shards, worst = TokenShards(case.lengths, case.balance), dict[str, float]()
    names = ("output", "lse", "query", "key", "value")
    expected = (known.output(), known.sums(), *grads)
    for rank, tensors in enumerate(found):
        places = shards.places([rank], None).tolist()
        for name, made, (right, bound) in zip(names, tensors, expected, strict=True):
            if name == "lse":
                finite = right[..., places].isfinite()
                assert torch.equal(made.isneginf(), ~finite), (rank, "lse")
                made = torch.where(finite, made, 0)
                right, bound = torch.where(finite, right[..., places], 0), bound[..., places]
                bound = torch.where(finite, bound, 1)
            else:
                made = made.transpose(1, 2)
                right, bound = right[:, :, places], bound[:, :, places]
            ratio = reference.worst_ratio(made, right, bound)
            worst[name] = max(worst.get(name, 0.0), ratio)
    return worst


def check(case: AttentionCase, method: str, algorithm: str, **how: Any) -> None:
    world_size = len(case.lengths)
    found = interlace.run(attend, world_size, case, method, algorithm, **how)
    worst = ratios(case, found)
    assert max(worst.values()) <= 1, (case, method, algorithm, worst)
