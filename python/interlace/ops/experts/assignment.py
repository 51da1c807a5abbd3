"""Who goes where, from a rank's choice of experts: torch operators on the device, nothing is waited for.

Legend: T tokens have k slots; ``topk_idx[t, j]`` is the expert of slot j, below 0 for none. A *row* is a
token in a slot that has an expert. Home rows are sorted by expert, then by token and slot. ``capacity``
bounds the rows that a rank sends to one expert: later ones are left out, as if the slot had none.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from interlace.kernels.experts.dispatch import COUNT_NUMBERS

Tensor = torch.Tensor


class SentTokens(NamedTuple):
    """What the kernels of a dispatch have to know of an assignment.

    ``facts``, int32 ``[T, 3 k]``: expert, position and the weight's bits, slot by slot each. ``tokens``,
    int64 ``[W, T]``: the tokens for each rank first, in their order. ``lines``, int64 ``[W, 2 + E]``, by
    rank: tokens, the rows for ranks before it, rows by its experts.
    """

    facts: Tensor
    tokens: Tensor
    lines: Tensor


def by_expert(flat: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """By slot: the expert, ``experts`` for none; the order by expert; the position in an expert."""
    # slots without an expert are behind all others
    key = torch.where((flat < 0) | (flat >= experts), experts, flat)
    order = torch.argsort(key, stable=True)
    counts = flat.new_zeros(experts + 1).scatter_add_(0, key, torch.ones_like(flat))
    begins = counts.cumsum(0) - counts
    position = torch.empty_like(flat)
    position[order] = torch.arange(flat.numel(), device=flat.device)
    return key, order, position - begins[key]


@dataclass(frozen=True)
class Assignment:
    """``topk_idx`` ``[T, k]``, int64; ``experts`` of all ranks together; ``capacity`` 0: no bound."""

    topk_idx: Tensor
    experts: int
    world_size: int
    capacity: int = 0

    @property
    def per_rank(self) -> int:
        return self.experts // self.world_size

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor, Tensor]:
        return by_expert(self.topk_idx.reshape(-1), self.experts)

    @cached_property
    def position(self) -> Tensor:
        """``[T, k]``: which of the rows for its expert, -1 of a slot that has no row."""
        key, _, position = self._sorted
        valid = key < self.experts
        if self.capacity:
            valid = valid & (position < self.capacity)
        return torch.where(valid, position, -1).view(self.topk_idx.shape)

    @cached_property
    def counts(self) -> Tensor:
        """Rows by expert, of all the group's."""
        key, valid = self._sorted[0], (self.position.view(-1) >= 0).to(torch.int64)
        return valid.new_zeros(self.experts + 1).scatter_add_(0, key, valid)[: self.experts]

    @cached_property
    def inverse(self) -> Tensor:
        """``[T, k]``: the home row of a slot, -1 of none."""
        begins = torch.nn.functional.pad(self.counts.cumsum(0) - self.counts, (0, 1))
        row = begins[self._sorted[0]].view(self.topk_idx.shape) + self.position
        return torch.where(self.position < 0, -1, row)

    def slots(self, rows: int) -> Tensor:
        """``token * k + slot`` of the ``rows`` home rows, in their order."""
        order = self._sorted[1]
        return order[self.position.view(-1)[order] >= 0] if self.capacity else order[:rows]

    # -- for the kernels -------------------------------------------------------------------------------

    @cached_property
    def _on(self) -> Tensor:
        """``[W, T]``: whether a token has a row on a rank."""
        ranks = torch.where(self.position < 0, -1, self.topk_idx // self.per_rank)
        every = torch.arange(self.world_size, device=ranks.device)
        return (ranks.unsqueeze(0) == every.view(-1, 1, 1)).any(-1)

    def sent(self, weights: Tensor | None) -> SentTokens:
        idx, position = self.topk_idx.to(torch.int32), self.position.to(torch.int32)
        bits = torch.zeros_like(idx) if weights is None else weights.view(torch.int32)
        counts = self.counts.view(self.world_size, self.per_rank)
        return SentTokens(
            torch.cat([idx, position, bits], 1).contiguous(),
            torch.argsort(~self._on, dim=1, stable=True),
            count_lines(self._on.sum(1), counts),
        )


def count_lines(tokens: Tensor, counts: Tensor) -> Tensor:
    """The kernels' lines for each rank, from its tokens, ``[W]``, and its experts' rows, ``[W, E]``."""
    rows = counts.sum(1)
    head = torch.stack([tokens, rows.cumsum(0) - rows], 1)
    assert head.shape[1] == COUNT_NUMBERS
    return torch.cat([head, counts], 1).contiguous()


def known_segments(routes_counts: Tensor, rank: int, per_rank: int, expert_rows: int = 0) -> Tensor:
    """int64 ``[E, W, 3]`` as the kernels have it, from ``[W, experts]``, all ranks' rows by expert."""
    mine = routes_counts[:, rank * per_rank : (rank + 1) * per_rank]
    begins = routes_counts.cumsum(1) - routes_counts
    count = mine.t().contiguous()
    first = (count.view(-1).cumsum(0) - count.view(-1)).view(count.shape)
    if expert_rows:
        every = torch.arange(per_rank, device=count.device).unsqueeze(1)
        first = every * expert_rows + count.cumsum(1) - count
    home = begins[:, rank * per_rank : (rank + 1) * per_rank].t()
    return torch.stack([first, count, home], 2).contiguous()
