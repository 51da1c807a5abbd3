"""The router of a mixture of experts: which experts a token takes, and by what it weighs them.

All in fp32, by torch, on this rank's tokens alone. Legend: T tokens, E experts, K of them for each token.
"""

import math
from typing import NamedTuple

import torch

from interlace.ops.experts.routing import by_expert

Tensor = torch.Tensor
SMALLEST = 1e-20  # added to a sum of scores, which sigmoids may leave at 0
BEST = 2  # experts of a group by which it is chosen


class Routed(NamedTuple):
    """``chosen`` and ``weights`` ``[T, K]``; ``kept`` is ``chosen`` with -1 where a row is dropped.

    ``share`` ``[T, E]``: the scores of a token, which add up to 1.
    """

    chosen: Tensor
    weights: Tensor
    kept: Tensor
    share: Tensor


class Router(NamedTuple):
    """The options of a router; see :class:`interlace.nn.MoE`."""

    num_experts: int
    topk: int
    scoring: str
    normalize: bool
    scale: float
    groups: int
    topk_groups: int
    capacity_factor: float | None
    drop: str

    def __call__(self, logits: Tensor, bias: Tensor | None) -> Routed:
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        ranked = scores.detach() if bias is None else scores.detach() + bias
        chosen = self._in_best_groups(ranked).topk(self.topk).indices
        weights = scores.gather(1, chosen)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST)
        share = scores
        if self.scoring != "softmax":
            share = scores / (scores.sum(-1, keepdim=True) + SMALLEST)
        return Routed(chosen, weights * self.scale, self._kept(chosen, weights.detach()), share)

    def _in_best_groups(self, ranked: Tensor) -> Tensor:
        """Experts of other groups are not to be chosen."""
        if self.topk_groups == self.groups:
            return ranked
        by_group = ranked.view(-1, self.groups, self.num_experts // self.groups)
        best = by_group.topk(min(BEST, by_group.shape[-1])).values.sum(-1).topk(self.topk_groups)
        taken = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best.indices, True)
        return by_group.masked_fill(~taken.unsqueeze(-1), -torch.inf).view(ranked.shape)

    def _kept(self, chosen: Tensor, weights: Tensor) -> Tensor:
        if self.capacity_factor is None or not chosen.numel():
            return chosen
        capacity = math.ceil(chosen.numel() / self.num_experts * self.capacity_factor)
        flat = chosen.view(-1)
        order = torch.arange(flat.numel(), device=flat.device)
        if self.drop == "probs":
            order = weights.reshape(-1).argsort(descending=True, stable=True)
        _, _, position = by_expert(flat[order], self.num_experts)
        dropped = torch.empty_like(flat, dtype=torch.bool)
        dropped[order] = position >= capacity
        return flat.masked_fill(dropped, -1).view(chosen.shape)
