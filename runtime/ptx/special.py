"""The threads that run inline PTX, and the special registers that they read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WARP = 32
THREADS = 128
"""What ``%ntid.x`` says: the threads of four warps, which is Triton's default."""
CLOCK_STEP = 1000
"""A read of a clock takes so long, in cycles or nanoseconds: no real clock enters a schedule."""


@dataclass(eq=False)
class PtxSession:
    """State that all threads of a session share."""

    builder: Any
    hooks: Any
    clock: int = 0


@dataclass(eq=False, slots=True)
class Thread:
    """One thread of a program, which runs one asm statement.

    ``alone``: it stands for all threads. ``polls_plainly``: since it last branched back it has
    loaded, and done nothing that lets other programs go on. ``idle_steps``: instructions in loops since
    it last touched memory or a clock.
    """

    session: PtxSession
    registers: list[int]
    number: int
    alone: bool
    polls_plainly: bool = False
    idle_steps: int = 0


Reader = Callable[[Thread], Any]


def constant(value: int) -> Reader:
    return lambda thread: value


def _grid(name: str, axis: int) -> Reader:
    return lambda thread: int(getattr(thread.session.builder, name)[axis])


def _clock(shift: int) -> Reader:
    def read(thread: Thread) -> int:
        thread.idle_steps = 0
        thread.session.clock += CLOCK_STEP
        return thread.session.clock >> shift

    return read


def _program_number(thread: Thread) -> int:
    """Stands for the multiprocessor: as if every program had one of its own."""
    builder = thread.session.builder
    (x, y, z), (width, height, _) = builder.grid_idx, builder.grid_dim
    return int((z * height + y) * width + x)


SPECIAL: dict[str, Reader] = {
    "%tid.x": lambda thread: thread.number,
    "%ntid.x": constant(THREADS),
    "%laneid": lambda thread: thread.number % WARP,
    "%warpid": lambda thread: thread.number // WARP,
    "%nwarpid": constant(THREADS // WARP),
    "%warpsize": constant(WARP),
    "WARP_SZ": constant(WARP),
    "%smid": _program_number,
    "%lanemask_eq": lambda thread: 1 << thread.number % WARP,
    "%lanemask_lt": lambda thread: (1 << thread.number % WARP) - 1,
    "%lanemask_le": lambda thread: (2 << thread.number % WARP) - 1,
    "%lanemask_gt": lambda thread: -(2 << thread.number % WARP),
    "%lanemask_ge": lambda thread: -(1 << thread.number % WARP),
}
for _name in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo"):
    SPECIAL[_name] = _clock(0)
for _name in ("%clock_hi", "%globaltimer_hi"):
    SPECIAL[_name] = _clock(32)
for _axis, _letter in enumerate("xyz"):
    SPECIAL[f"%ctaid.{_letter}"] = _grid("grid_idx", _axis)
    SPECIAL[f"%nctaid.{_letter}"] = _grid("grid_dim", _axis)
    SPECIAL.setdefault(f"%tid.{_letter}", constant(0))
    SPECIAL.setdefault(f"%ntid.{_letter}", constant(1))

OF_THREADS = tuple(n for n in SPECIAL if n.startswith(("%tid", "%lane", "%warpid")))
"""Special registers in which the threads of a program differ."""
