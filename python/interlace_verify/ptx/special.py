"""The threads that run inline PTX, and the special registers that they read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from interlace.runtime.core.accesses import Atomic, Hooks, Lanes, Numbers

WARP = 32
CLOCK_STEP = 1000
"""The duration of a clock read, in cycles or nanoseconds: no real clock influences a schedule."""


@dataclass(eq=False)
class PtxSession:
    """The state that all threads of a session share.

    ``barriers``: the barriers at which threads have just arrived, each with its number, its thread count
    (0: all) and the mask of the arrived threads. ``counted``: the action on their result when all have met.
    ``extents``: the extents of a program's threads, if it has several. ``origins``: the origins of the
    addresses in registers, by slot.
    """

    builder: Any
    hooks: Hooks
    clock: int = 0
    barriers: list[tuple[int, int, Numbers]] = field(default_factory=list)
    counted: Callable[[Any], None] | None = None
    extents: tuple[int, int, int] | None = None
    origins: Mapping[int, object] = field(default_factory=dict)

    def atomic_in_shared(self, atomic: Atomic, perform: object) -> Any:
        """Perform an atomic in shared memory, for programs that have it."""
        raise NotImplementedError


@dataclass(eq=False, slots=True)
class Threads:
    """Threads of a program that run the same text. Registers are arrays with an element per thread.

    ``numbers``: the numbers of these threads in the ``block`` of the program. ``mask``: the threads that
    run the present instruction, None for all. ``alone``: one thread stands for all. ``told_apart``: hooks
    get the thread of each access; ``heard``: hooks are installed. ``polls_plainly``: since the last
    branch back the threads have loaded, but done nothing that lets other programs run. ``idle_steps``: the
    instructions in loops since the last access of memory or a clock.
    """

    session: Any  # a PtxSession, or a PtxProgram
    registers: list[Numbers]
    numbers: Numbers
    block: int = 1
    mask: Numbers | None = None
    alone: bool = False
    told_apart: bool = False
    heard: bool = True
    polls_plainly: bool = False
    idle_steps: int = 0

    def active(self, values: Numbers) -> Any:
        """Return the elements of ``values`` (an array, or a scalar for all) of the running threads."""
        if not values.ndim:
            count = len(self.numbers) if self.mask is None else np.count_nonzero(self.mask)
            return values.repeat(count)
        return values if self.mask is None else values[self.mask]

    def everyone(self) -> Numbers:
        return np.ones(len(self.numbers), np.bool_) if self.mask is None else self.mask

    def who(self) -> Lanes:
        """Return the numbers of the running threads, or None if hooks do not need them."""
        return self.active(self.numbers) if self.told_apart else None

    def set(self, slot: int, bits: Numbers) -> None:
        if self.mask is not None:
            bits = np.where(self.mask, bits, self.registers[slot])
        elif not bits.ndim:
            bits = bits.repeat(len(self.numbers))
        self.registers[slot] = bits

    def set_active(self, slot: int, bits: Numbers) -> None:
        """Put ``bits``, which are only for the running threads, into a register."""
        if self.mask is None:
            self.registers[slot] = bits
        else:
            kept = self.registers[slot].copy()
            kept[self.mask] = bits
            self.registers[slot] = kept


Reader = Callable[[Threads], Any]
U32 = np.uint32


def constant(value: object) -> Reader:
    return lambda threads: value


def _grid(name: str, axis: int) -> Reader:
    return lambda threads: U32(getattr(threads.session.builder, name)[axis])


def _thread(axis: int) -> Reader:
    def read(threads: Threads) -> Any:
        x, y, z = threads.session.extents or (threads.block, 1, 1)
        if (y, z) == (1, 1):
            return U32(0) if axis else threads.numbers
        return threads.numbers // U32((1, x, x * y)[axis]) % U32((x, y, z)[axis])

    return read


def _threads(axis: int) -> Reader:
    return lambda threads: U32((threads.session.extents or (threads.block, 1, 1))[axis])


def _clock(shift: int) -> Reader:
    def read(threads: Threads) -> Any:
        threads.idle_steps = 0
        threads.session.clock += CLOCK_STEP
        return np.uint64(threads.session.clock >> shift)

    return read


def _program_number(threads: Threads) -> Any:
    """Return the program's number as its multiprocessor: each program has its own."""
    builder = threads.session.builder
    (x, y, z), (width, height, _) = builder.grid_idx, builder.grid_dim
    return U32((z * height + y) * width + x)


def _lane_mask(of: Callable[[Any], Any]) -> Reader:
    def read(threads: Threads) -> Any:
        one = np.uint64(1) << (threads.numbers % U32(WARP)).astype(np.uint64)
        return of(one).astype(U32)

    return read


SPECIAL: dict[str, Reader] = {
    "%laneid": lambda threads: threads.numbers % U32(WARP),
    "%warpid": lambda threads: threads.numbers // U32(WARP),
    "%nwarpid": lambda threads: U32(-(-threads.block // WARP)),
    "%warpsize": constant(U32(WARP)),
    "WARP_SZ": constant(U32(WARP)),
    "%smid": _program_number,
    "%nsmid": lambda threads: U32(np.prod(threads.session.builder.grid_dim)),
    "%gridid": constant(np.uint64(0)),
    "%lanemask_eq": _lane_mask(lambda one: one),
    "%lanemask_lt": _lane_mask(lambda one: one - np.uint64(1)),
    "%lanemask_le": _lane_mask(lambda one: 2 * one - np.uint64(1)),
    "%lanemask_gt": _lane_mask(lambda one: ~(2 * one - np.uint64(1))),
    "%lanemask_ge": _lane_mask(lambda one: ~(one - np.uint64(1))),
}
for _name in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo"):
    SPECIAL[_name] = _clock(0)
for _name in ("%clock_hi", "%globaltimer_hi"):
    SPECIAL[_name] = _clock(32)
for _axis, _letter in enumerate("xyz"):
    SPECIAL[f"%ctaid.{_letter}"] = _grid("grid_idx", _axis)
    SPECIAL[f"%nctaid.{_letter}"] = _grid("grid_dim", _axis)
    SPECIAL[f"%tid.{_letter}"] = _thread(_axis)
    SPECIAL[f"%ntid.{_letter}"] = _threads(_axis)
