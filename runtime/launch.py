"""One launch of a kernel: what to run, over which grid, with which arguments, in which place.

The same :class:`KernelLaunch` is compiled by Triton on a GPU and interpreted, by ``scheduler.py``, on a
CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class KernelLaunch:
    """``kernel[grid](**arguments)`` with compile options; ``op`` names the user's call.

    ``grid``: a number of programs, or up to three extents.
    """

    kernel: Any
    grid: int | tuple[int, ...]
    arguments: dict[str, Any]
    op: str
    num_warps: int = 4
    num_stages: int = 3

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def extents(self) -> tuple[int, int, int]:
        """The grid in all three dimensions."""
        given = (self.grid,) if isinstance(self.grid, int) else tuple(self.grid)
        x, y, z = (*given, 1, 1)[:3]
        return int(x), int(y), int(z)

    def compiled(self) -> None:
        """Launch on the current CUDA stream."""
        self.kernel[self.extents](
            **self.arguments, num_warps=self.num_warps, num_stages=self.num_stages
        )

    def compile_only(self) -> None:
        """Compile and load the kernel without running it."""
        self.kernel.warmup(
            **self.arguments,
            grid=self.extents,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )._init_handles()
