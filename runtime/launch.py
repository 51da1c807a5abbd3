"""One launch of a kernel: what to run, over which grid, with which arguments, in which place.

The same :class:`KernelLaunch` is compiled by Triton on a GPU and interpreted on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interlace.runtime import trace
from interlace.runtime.errors import BlockedWait
from interlace.runtime.interpreter import program_function

if TYPE_CHECKING:
    from interlace.runtime.scheduler import Scheduler


@dataclass
class KernelLaunch:
    """``kernel[(programs,)](**arguments)`` with compile options; ``op`` names the user's call."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    op: str
    num_warps: int = 4
    num_stages: int = 3

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def compiled(self) -> None:
        """Launch on the current CUDA stream."""
        self.kernel[(self.programs,)](
            **self.arguments, num_warps=self.num_warps, num_stages=self.num_stages
        )

    def compile_only(self) -> None:
        """Compile and load the kernel without running it."""
        self.kernel.warmup(
            **self.arguments,
            grid=(self.programs,),
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )._init_handles()

    def spawn(self, scheduler: Scheduler, rank: int, on_finish: Callable[[], None]) -> None:
        """Add every program as a task; ``on_finish`` is called once all have ended."""
        from interlace.runtime.scheduler import Program

        body = program_function(self.kernel, self.arguments)
        left = self.programs

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                on_finish()

        for index in range(self.programs):
            scheduler.spawn(
                rank,
                f"{self.name} program {index}",
                body,
                program=Program(self.name, self.op, index, self.programs),
                on_finish=one_ended,
            )

    def run_interpreted(
        self, rank: int, idle: Callable[[BlockedWait], None], *, seed: int = 0
    ) -> None:
        """Run to the end in this thread; ``idle`` is called while all programs wait for peers."""
        from interlace.runtime.scheduler import Scheduler, TaskFailed

        scheduler = Scheduler(seed, idle=idle)
        scheduler.observer = trace.current()
        scheduler.spawn(rank, "launch", lambda: self.spawn(scheduler, rank, on_finish=lambda: None))
        try:
            scheduler.run()
        except TaskFailed as failure:
            assert failure.__cause__ is not None
            raise failure.__cause__ from None
