"""An emulator of the part of Gluon that kernels use whose warps have roles.

Triton has no interpreter for Gluon. Here the text of the kernel's files is run as Python: each role is a
coroutine, and a seed draws the next role. Everything asynchronous is as late as allowed. A TMA load arrives
at some time between its issue and the end of a wait for it. A product reads its operands when it is
awaited. A TMA store reads its source when that read is awaited, and arrives when its arrival is awaited. A
place that is written or read too early, or never freed, is a wrong result or a deadlock.

The emulator has no proxies, threads of a role, and layouts. Lint and the SASS check these.
"""

from __future__ import annotations

import functools
import pathlib
import random
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import greenlet
import torch

import interlace.kernels.matmul
from interlace.kernels.arguments import Tiles
from interlace.kernels.tiling import first_tile, grouped_tile

FOLDER = pathlib.Path(interlace.kernels.matmul.__path__[0])
BLOCK_M, BLOCK_N, BLOCK_K = 16, 32, 16
FLOAT = SimpleNamespace(primitive_bitwidth=32, element_ty=SimpleNamespace(primitive_bitwidth=32))
TILES = Tiles(BLOCK_M, BLOCK_N, BLOCK_K, 2, "kn", "ieee", True, True, True, False, True, "", "", "",
              2, True)  # fmt: skip


def text_of(op: str) -> str:
    """Return the text of the kernel's file, followed by the shared functions that it imports."""
    return "".join((FOLDER / f"{name}.py").read_text() for name in (f"{op}_roles", "warp_roles"))


class DeadlockError(Exception):
    """Raised if no role can continue and no event is pending."""


class Scheduler:
    """Runs roles and timed events, ``rare`` ones late; the seed draws the next one."""

    def __init__(self, seed: int) -> None:
        self.random, self.events, self.rare = random.Random(seed), [], []
        self.blocked: list[tuple[Any, Callable[[], bool]]] = []

    def until(self, condition: Callable[[], bool]) -> None:
        """Let others run until the condition holds, at least once."""
        self.blocked.append((greenlet.getcurrent(), condition))
        greenlet.getcurrent().parent.switch()

    def run(self, roles: list[Callable[[], None]]) -> None:
        made = [greenlet.greenlet(role) for role in roles]
        self.blocked = [(role, lambda: True) for role in made]
        while not all(role.dead for role in made):
            able = [each for each in self.blocked if each[1]()]
            choices = [*able, *self.events]
            if self.rare and (not choices or self.random.random() < 0.02):
                self.rare.pop(0)()
                continue
            if not choices:
                raise DeadlockError
            chosen = self.random.choice(choices)
            if callable(chosen):
                self.events.remove(chosen)
                chosen()
            else:
                self.blocked.remove(chosen)
                chosen[0].switch()


class Barrier:
    """An mbarrier for one arrival."""

    def __init__(self) -> None:
        self.rounds, self.pending, self.bytes = 0, 1, 0

    def passed(self, phase: int) -> bool:
        return self.rounds % 2 != int(phase)

    def count(self, arrivals: int, expected: int) -> None:
        self.pending -= arrivals
        self.bytes += expected
        assert self.pending >= 0
        if self.pending == self.bytes == 0:
            self.rounds, self.pending = self.rounds + 1, 1


class Memory:
    """Shared memory: places, as tensors or barriers."""

    def __init__(self, places: list[Any], shape: tuple[int, ...]) -> None:
        self.places, self.shape, self.dtype = places, shape, FLOAT
        self.type = SimpleNamespace(layout=None)

    def index(self, place: int) -> Any:
        return self.places[int(place)]


class Place:
    """A tile in shared memory; ``order`` is the view of its dimensions."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def permute(self, order: tuple[int, ...]) -> Place:
        return Place(self.tensor.permute(order))

    def store(self, value: torch.Tensor) -> None:
        self.tensor.copy_(value)


class Pointer:
    """A pointer into a flat tensor."""

    dtype = FLOAT

    def __init__(self, flat: torch.Tensor, offset: int = 0) -> None:
        self.flat, self.offset = flat, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.flat, self.offset + int(offset))


class Sums:
    """Accumulators with products in flight, which read their operands when they are awaited."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.tensor, self.under_way = torch.zeros(shape), []

    @classmethod
    def of(cls, acc: Sums | torch.Tensor) -> Sums:
        """Return ``acc``, or new accumulators with the values of an awaited sum."""
        if isinstance(acc, Sums):
            return acc
        made = cls(tuple(acc.shape))
        made.tensor = acc
        return made

    def begin(self, a: Place, b: Place, use_acc: bool) -> Sums:
        self.under_way.append((a, b, bool(use_acc)))
        return self

    def wait(self, left: int) -> Any:
        while len(self.under_way) > left:
            a, b, use_acc = self.under_way.pop(0)
            self.tensor = a.tensor @ b.tensor + (self.tensor if use_acc else 0)
        return self if left else self.tensor


class Descriptor:
    """A tensor map. A new one from the same line is at the same address."""

    made: ClassVar[dict[Any, Descriptor]] = {}

    @classmethod
    def make(cls, ptr: Pointer, shape: Any, strides: Any, block: Any, layout: Any) -> Descriptor:
        key = greenlet.getcurrent(), sys._getframe(1).f_lineno
        one = cls.made.setdefault(key, cls())
        one.ptr, one.block = ptr, block
        one.shape, one.strides = [int(each) for each in shape], [int(each) for each in strides]
        return one

    def window(self, corner: Any) -> tuple[torch.Tensor, list[int]]:
        """Return the existing part of the block, and its size."""
        first = [int(each) for each in corner]
        there = [
            max(0, min(b, s - f)) for b, s, f in zip(self.block, self.shape, first, strict=True)
        ]
        offset = self.ptr.offset + sum(f * s for f, s in zip(first, self.strides, strict=True))
        if not all(there):
            return torch.empty(0), there
        return self.ptr.flat.as_strided(there, self.strides, offset), there


@functools.cache
def _code(text: str) -> Any:
    return compile(re.sub("(?m)^@jit.*", "", text), "kernel", "exec")


class Program:
    """One program of a kernel: its work in flight, and the names of its text."""

    def __init__(self, seed: int, program: int, programs: int) -> None:
        self.scheduler, self.stores, self.arriving = Scheduler(seed), [], []
        self.program, self.programs = program, programs

    def _load_tile(self, descriptor: Any, corner: Any, barrier: Barrier, place: Place) -> None:
        def event() -> None:
            data, (height, width) = descriptor.window(corner)
            place.tensor.zero_()
            place.tensor[:height, :width] = data.view(height, width)
            barrier.count(0, -4 * place.tensor.numel())

        self.scheduler.events.append(event)

    def read_stores(self, left: int = 0) -> None:
        """Wait until stores have read their sources."""
        while self.stores:
            descriptor, corner, place = self.stores.pop(0)
            data, (height, width) = descriptor.window(corner)
            self.arriving.append((data, place.tensor[:height, :width].reshape(data.shape).clone()))

    def complete_stores(self, compiled: bool = True) -> None:
        """Wait until stores have arrived."""
        self.read_stores()
        while self.arriving:
            data, stored = self.arriving.pop(0)
            data.copy_(stored)

    def _specialize(self, roles: Any, warps: list[int], registers: list[int]) -> None:
        self.scheduler.run([lambda role=role, given=given: role(*given) for role, given in roles])
        assert not self.stores
        self.complete_stores()

    def run(self, text: str, kernel: str, known: dict[str, Any], *arguments: Any) -> None:
        """``known``: replacements for functions of other files, and for constants."""
        names: dict[str, Any] = {}
        exec(_code(text), names)
        names |= self._gluon() | known
        Descriptor.made.clear()
        names[kernel](*arguments)

    def _gluon(self) -> dict[str, Any]:
        def allocate(dtype: Any, shape: list[int], layout: Any) -> Memory:
            barriers = len(shape) == 2
            kind = (lambda: Barrier()) if barriers else (lambda: Place(torch.zeros(shape[1:])))
            return Memory([kind() for _ in range(shape[0])], tuple(shape))

        gl = SimpleNamespace(
            program_id=lambda axis: self.program,
            num_programs=lambda axis: self.programs,
            num_warps=lambda: 1,
            arange=lambda first, end, layout: torch.arange(first, end),
            BlockedLayout=lambda *of: None,
            load=lambda pointer: pointer.flat[pointer.offset],
            where=lambda condition, one, other: one if condition else other,
            static_range=range,
            int32=torch.int32,
            int64=torch.int64,
            float32=torch.float32,
            zeros=lambda shape, dtype, layout: Sums(shape),
            split=lambda x: x.unbind(-1),
            permute=lambda x, order: x.permute(order),
            reshape=lambda x, shape: x.reshape(shape),
            NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *shape: None),
            allocate_shared_memory=allocate,
            warp_specialize=self._specialize,
            NVMMADistributedLayout=lambda **of: None,
        )
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: None,
            wait=lambda barrier, phase: self.scheduler.until(lambda: barrier.passed(phase)),
            expect=lambda barrier, size: barrier.count(1, size),
            arrive=lambda barrier, count, pred=True: barrier.count(count if pred else 0, 0),
        )
        tma = SimpleNamespace(make_tensor_descriptor=Descriptor.make, store_wait=self.read_stores)
        hopper = SimpleNamespace(
            fence_async_shared=lambda: None,
            warpgroup_mma=lambda a, b, acc, use_acc, is_async: Sums.of(acc).begin(a, b, use_acc),
            warpgroup_mma_wait=lambda left, deps: deps[0].wait(left),
        )
        return {
            "gl": gl,
            "mbarrier": mbarrier,
            "tma": tma,
            "_load_tile": self._load_tile,
            "_store_tile": lambda *store: self.stores.append(store),
            "hopper": hopper,
            "tl": SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
            "first_tile": first_tile.fn,
            "grouped_tile": grouped_tile.fn,
            "current_epoch": lambda workspace: 1,
            "activate": lambda part, tiles: SimpleNamespace(to=lambda dtype: part),
            "_OUTPUT": 2,
        }
