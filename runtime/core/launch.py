"""One launch of a kernel: what to run, over which grid, with which arguments, in which place.

The same :class:`KernelLaunch` is compiled by Triton on a GPU (``places/gpu/launch.py``) and interpreted, by
``sim/scheduler/scheduler.py``, on a CPU.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from interlace.runtime.compat.triton_launcher import warmed_up
from interlace.runtime.core.kernel_arguments import compiled_with, constants


def checked_grid(grid: Iterable[Any]) -> tuple[int, ...]:
    if not isinstance(grid, Iterable):
        raise TypeError(f"grid must be a tuple of 1 to 3 whole numbers, got {grid!r}")
    extents = tuple(grid)
    whole = all(isinstance(each, (int, np.integer)) and each >= 0 for each in extents)
    if not whole or not 1 <= len(extents) <= 3:
        raise ValueError(f"grid must be 1 to 3 whole numbers from 0 on, got {extents}")
    return extents


@dataclass
class KernelLaunch:
    """``kernel[grid](**arguments)`` with compile options; ``op`` names the user's call.

    ``grid``: a number of programs, or up to three extents. ``options``: a dict with more of Triton's, for
    a GPU only, such as ``launch_cooperative_grid``. Arguments may be tuples with names, but no tuples in
    tuples.
    """

    kernel: Any
    grid: int | tuple[int, ...]
    arguments: dict[str, Any]
    op: str
    num_warps: int = 4
    num_stages: int = 3
    options: Any = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def values(self) -> list[Any]:
        """The arguments one by one: of a tuple the fields, but constants whole."""
        fixed = constants(self.kernel)
        return [
            value
            for name, given in self.arguments.items()
            for value in (given if isinstance(given, tuple) and name not in fixed else (given,))
        ]

    @property
    def extents(self) -> tuple[int, int, int]:
        given = (self.grid,) if isinstance(self.grid, int) else tuple(self.grid)
        x, y, z = (*given, 1, 1)[:3]
        return int(x), int(y), int(z)

    def compiled(self) -> Any:
        """The kernel for a GPU, compiled and loaded, not run: Triton's ``CompiledKernel``."""
        return warmed_up(
            self.kernel,
            compiled_with(self.kernel, self.arguments),
            grid=self.extents,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            **self.options,
        )
