"""A plain collective at one size: through interlace, through torch.distributed, and on one rank alone.

The size is that of ``timing/figures.py``, rounded down to whole elements for every rank. Results land in
poisoned memory. Where a result replaces the input, inputs of timed calls are zeros: a sum of sums of sums
would overflow. "Alone" is the baseline ``torch``: copies and sums of what all ranks bring, from the rank's
own memory, without a rank waiting for another.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.benchmark.timing import payload
from interlace.benchmark.timing.figures import bus_factor
from interlace.benchmark.timing.subject import Setting

Tensors = tuple[Any, ...]


def torchs(*names: str) -> Any:
    """torch.distributed's function of the first of these names that this release has."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


class Plain(ABC):
    """One collective of a rank. ``whole`` elements are the size, ``part`` those of one rank."""

    op: str
    algorithms: tuple[str, ...] = ("auto",)
    reduces = True  # where an algorithm depends on it
    least_ranks = 1
    has_size = True

    def __init__(self, setting: Setting, nbytes: int) -> None:
        self.setting = setting
        self.rank, self.world_size = setting.rank, setting.world_size
        itemsize = torch.empty((), dtype=setting.dtype).element_size()
        self.part = max(1, nbytes // (itemsize * self.world_size))
        self.whole = self.part * self.world_size
        self.own = self.rank * self.part  # the first element of this rank's part
        self.nbytes = self.whole * itemsize
        self.bus_factor: float | None = bus_factor(self.op, self.world_size)

    @classmethod
    def refuse(cls, world_size: int) -> None:
        """Raise ValueError if the op cannot be with so many ranks."""
        if world_size < cls.least_ranks:
            raise ValueError(
                f"--world-size {world_size}: {cls.op} needs at least {cls.least_ranks} ranks"
            )

    @property
    def message_bytes(self) -> int:
        """What a rank sends to each other one, at once."""
        return self.nbytes

    # -- data ----------------------------------------------------------------------------------------

    def of(self, rank: int, call: int, first: int = 0, count: int | None = None) -> torch.Tensor:
        """What ``rank`` brings to ``call``: all elements, or ``count`` of them."""
        count = self.whole if count is None else count
        return payload.vector(first, count, rank, call, self.setting.dtype, self.setting.device)

    def empty(self, count: int) -> torch.Tensor:
        output = torch.empty(count, dtype=self.setting.dtype, device=self.setting.device)
        return payload.poison(output)

    @abstractmethod
    def inputs(self, call: int) -> Tensors:
        """Arguments of :meth:`ours` and :meth:`theirs`."""

    def timed_inputs(self, call: int) -> Tensors:
        return self.inputs(call)

    # -- three ways to do it, all returning what check() takes ------------------------------------------

    @abstractmethod
    def call(self, library: Any, *tensors: Any, **how: Any) -> Any:
        """The collective of ``library``, interlace or torch.distributed: their names are the same."""

    def ours(self, algorithm: str) -> Callable[..., Any]:
        how = {"algorithm": algorithm} if len(self.algorithms) > 1 else {}
        return functools.partial(self.call, interlace, **how)

    def theirs(self, *tensors: Any) -> Any:
        """Through torch.distributed's default group."""
        return self.call(dist, *tensors)

    @abstractmethod
    def alone_inputs(self, call: int) -> Tensors:
        """Arguments of :meth:`alone`."""

    def alone(self, output: Any, source: Any) -> Any:
        return output.copy_(source)

    @abstractmethod
    def check(self, result: torch.Tensor, call: int, rounds_often: bool = False) -> float: ...

    # -- what several have in common ----------------------------------------------------------------------

    def _own_parts(self, call: int) -> list[torch.Tensor]:
        """What every rank brings for this one."""
        return [self.of(r, call, self.own, self.part) for r in range(self.world_size)]

    def _sum(self, result: torch.Tensor, first: int, call: int, rounds_often: bool) -> float:
        return payload.error_of_sum(result, first, self.world_size, call, rounds_often=rounds_often)
