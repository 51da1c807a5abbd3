"""Which ranks share a node, and how a rank reaches those of other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace.kernels.nodes import order

PUTS = ("nvshmem", "stores", "late")


@dataclass(frozen=True)
class Nodes:
    """``of[r]`` is the node of rank r, ``put`` the constexpr of ``kernels/nodes/moves.py``.

    ``options`` are Triton's for kernels that put: the library that they are linked with.
    """

    of: tuple[int, ...]
    put: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.put in PUTS, self.put

    def members(self, rank: int) -> list[int]:
        """The ranks of ``rank``'s node."""
        return list(order.members(self.of, self.of[rank]))

    def names(self) -> list[int]:
        """The nodes, in the order in which sums are taken."""
        return sorted(set(self.of))

    def partners(self, rank: int) -> list[int]:
        """The ranks of other nodes that put to ``rank`` or to which it puts, in any op."""
        puts = order.put_targets(rank, self.of)
        return sorted({*puts, *order.put_sources(rank, self.of)})


def table(mapped: Sequence[int], reached: Sequence[int]) -> torch.Tensor:
    """The table of peers: base addresses, 0 where there is none, then how to put to each rank."""
    return torch.tensor([*mapped, *reached], dtype=torch.int64)
