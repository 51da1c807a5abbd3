"""The data that goes with messages of processes on one host, as tensors for torch's operators."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Places:
    """The data that goes with messages, of every rank, as tensors of one shape."""

    __slots__ = ("_at", "_count", "_places", "_ranks")

    def __init__(self, at: Callable[[int, int], torch.Tensor], count: int, ranks: int) -> None:
        """``at(rank, place)`` is a view of one of ``count`` places, which are used in turn."""
        self._at, self._count, self._ranks = at, count, ranks
        self._places: list[list[torch.Tensor] | None] = [None] * count

    def of(self, sequence: int) -> list[torch.Tensor]:
        """The tensors that go with message ``sequence``, by rank."""
        place = sequence % self._count
        parts = self._places[place]
        if parts is None:
            parts = self._places[place] = [self._at(rank, place) for rank in range(self._ranks)]
        return parts
