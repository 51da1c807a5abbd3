"""The tokens of a sequence that a rank has, and the keys that a query sees: whole numbers alone.

Balance, of a sequence over W ranks, whose lengths may differ::

    contiguous   rank 0's tokens, then rank 1's ...
    zigzag       2 W chunks: rank r has chunk r and chunk 2 W - 1 - r, the longer first half of its tokens
                 and the rest. Under a causal mask every rank then has the same work.

A *run* is a stretch of a rank's tokens that follow each other in the sequence, too: one, or two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from interlace.kernels import launch_formulas as formulas

BALANCES = ("zigzag", "contiguous")
NO_LIMIT = -1


class Run(NamedTuple):
    """``rows`` tokens of a shard from ``first`` on: those of the sequence from ``position`` on."""

    first: int
    rows: int
    position: int


@dataclass(frozen=True)
class AttentionMask:
    """``window``: how many keys before and after its own position a query sees, -1 for all, as flash
    attention has it."""

    causal: bool
    window: tuple[int, int] = (NO_LIMIT, NO_LIMIT)

    def span(self, position: int, total: int) -> tuple[int, int]:
        """The positions that the query at ``position`` of ``total`` sees: from, to below."""
        before, after = self.window
        low = 0 if before == NO_LIMIT else max(0, position - before)
        high = total if after == NO_LIMIT else min(total, position + after + 1)
        return low, min(high, position + 1) if self.causal else high


@dataclass(frozen=True)
class TokenShards:
    """The tokens of each of ``lengths`` ranks."""

    lengths: tuple[int, ...]
    balance: str

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def world_size(self) -> int:
        return len(self.lengths)

    def runs(self, rank: int) -> list[Run]:
        """The runs of a rank, none of them empty, in the order of its tokens."""
        length = self.lengths[rank]
        if self.balance == "contiguous":
            found = [Run(0, length, sum(self.lengths[:rank]))]
        else:
            found = [Run(*run) for run in formulas.zigzag_runs(rank, self.lengths)]
        return [run for run in found if run.rows]

    def positions(self, rank: int) -> list[int]:
        """The place in the sequence of each of a rank's tokens."""
        return [run.position + row for run in self.runs(rank) for row in range(run.rows)]

    def places(self, ranks: Sequence[int], device: torch.device | None) -> torch.Tensor:
        """int64 ``[tokens of ranks]``: the place in the sequence of each."""
        runs = [run for rank in ranks for run in self.runs(rank)]
        at = [torch.arange(run.position, run.position + run.rows, device=device) for run in runs]
        return torch.cat(at) if at else torch.empty(0, dtype=torch.int64, device=device)

    def sees(self, rank: int, source: int, mask: AttentionMask) -> bool:
        """Whether some query of ``rank`` sees some key of ``source``; packed sequences may say no later."""
        for run in self.runs(rank):
            low, _ = mask.span(run.position, self.total)
            _, high = mask.span(run.position + run.rows - 1, self.total)
            if any(low < k.position + k.rows and k.position < high for k in self.runs(source)):
                return True
        return False

    def sources(self, rank: int, mask: AttentionMask) -> list[int]:
        """The ranks whose keys ``rank`` needs, in the order of the ranks."""
        return [s for s in range(self.world_size) if self.sees(rank, s, mask)]

    def spans(
        self, ranks: Sequence[int], mask: AttentionMask, documents: torch.Tensor | None
    ) -> torch.Tensor:
        """int64 ``[tokens of ranks, 2]``: what each of their queries sees.

        ``documents``: where packed sequences begin, and the end of the last; beyond it nothing is seen.
        """
        before, after = mask.window
        position = self.places(ranks, None if documents is None else documents.device)
        low = torch.zeros_like(position) if before == NO_LIMIT else (position - before).clamp(min=0)
        high = torch.full_like(position, self.total)
        if after != NO_LIMIT:
            high = (position + after + 1).clamp(max=self.total)
        if mask.causal:
            high = torch.minimum(high, position + 1)
        if documents is not None:
            ends = documents.to(torch.int64)
            # the last of those that begin at or before: an empty sequence has no token
            number = torch.searchsorted(ends, position, right=True)
            inside = number < len(ends)
            low = torch.maximum(low, ends[(number - 1).clamp(min=0)])
            high = torch.minimum(high, ends[number.clamp(max=len(ends) - 1)])
            high = torch.where(inside, high, 0)
        return torch.stack([low, high], 1)

    def part_line(
        self, source: int, number: int, row: int, slots: tuple[int, int] = (0, 0)
    ) -> formulas.Line:
        """A line of the kernels' table of parts; ``row``: where the source's keys begin."""
        runs = [*self.runs(source), Run(0, 0, 0), Run(0, 0, 0)][:2]
        line: formulas.Line = formulas.key_part_line(source, number, row, runs, slots)
        return line
