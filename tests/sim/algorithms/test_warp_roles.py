"""``all_gather_matmul_roles_kernel`` by an emulator of the part of Gluon that it uses.

Triton has no interpreter for Gluon. Here the text of the kernel's file is run as Python: each role is a
coroutine, and whoever may go on next is drawn from a seed. Everything asynchronous is as late as is
allowed: a TMA load arrives at some time between its issue and the end of what waits for it, a product reads
its operands when it is waited for, a TMA store when it is. A place that is written again too early,
read too early, or never given free is a wrong result or a deadlock.

What it does not know: proxies, threads of a role, layouts. Those are for lint and the SASS.
"""

from __future__ import annotations

import inspect
import pathlib
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import greenlet
import pytest
import torch

import interlace
import interlace.kernels.fused
from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Extents, Table, Tiles
from interlace.kernels.tiling import first_tile, grouped_tile
from interlace.runtime.algorithms import gather_matmul
from interlace.runtime.compiler.catalogue import BY_ENGINE, MatmulVariant
from interlace.runtime.compiler.catalogue_group import RANKS, AbsentGroup, launched
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.tuning import table
from interlace.runtime.tuning.configuration import Configuration
from interlace.runtime.tuning.valid_configurations import shared_needed, without_effect

FILE = pathlib.Path(interlace.kernels.fused.__path__[0]) / "all_gather_matmul_roles.py"
BLOCK_M, BLOCK_N, BLOCK_K = 16, 32, 16
FLOAT = SimpleNamespace(primitive_bitwidth=32, element_ty=SimpleNamespace(primitive_bitwidth=32))
TILES = Tiles(BLOCK_M, BLOCK_N, BLOCK_K, 2, "kn", "ieee", True, True, True, False, True, "", "", "",
              2, True)  # fmt: skip


class DeadlockError(Exception):
    """No role can go on, and nothing is under way."""


class Scheduler:
    """Roles, and events that happen at some time, ``rare`` ones late: the seed draws what is next."""

    def __init__(self, seed: int) -> None:
        self.random, self.events, self.rare = random.Random(seed), [], []
        self.blocked: list[tuple[Any, Callable[[], bool]]] = []

    def until(self, condition: Callable[[], bool]) -> None:
        """Let others run, also if it holds already."""
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
    """A tile in shared memory; ``order`` as it is looked at."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def permute(self, order: tuple[int, ...]) -> Place:
        return Place(self.tensor.permute(order))

    def store(self, value: torch.Tensor) -> None:
        self.tensor.copy_(value)


class Pointer:
    """Into a flat tensor."""

    dtype = FLOAT

    def __init__(self, flat: torch.Tensor, offset: int = 0) -> None:
        self.flat, self.offset = flat, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.flat, self.offset + int(offset))


class Sums:
    """Accumulators, with products that are under way: they read their operands when waited for."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.tensor, self.under_way = torch.zeros(shape), []

    def begin(self, a: Place, b: Place, use_acc: bool) -> Sums:
        self.under_way.append((a, b, bool(use_acc)))
        return self

    def wait(self, left: int) -> Any:
        while len(self.under_way) > left:
            a, b, use_acc = self.under_way.pop(0)
            self.tensor = a.tensor @ b.tensor + (self.tensor if use_acc else 0)
        return self if left else self.tensor


class Descriptor:
    """A tensor map. Made anew at the same line, it is in the same memory."""

    made: ClassVar[dict[Any, Descriptor]] = {}

    @classmethod
    def make(cls, ptr: Pointer, shape: Any, strides: Any, block: Any, layout: Any) -> Descriptor:
        key = greenlet.getcurrent(), sys._getframe(1).f_lineno
        one = cls.made.setdefault(key, cls())
        one.ptr, one.block = ptr, block
        one.shape, one.strides = [int(each) for each in shape], [int(each) for each in strides]
        return one

    def window(self, corner: Any) -> tuple[torch.Tensor, list[int]]:
        """What there is of the block, and how much of it."""
        first = [int(each) for each in corner]
        there = [
            max(0, min(b, s - f)) for b, s, f in zip(self.block, self.shape, first, strict=True)
        ]
        offset = self.ptr.offset + sum(f * s for f, s in zip(first, self.strides, strict=True))
        if not all(there):
            return torch.empty(0), there
        return self.ptr.flat.as_strided(there, self.strides, offset), there


def share(text: str, seed: int, program: int, programs: int, case: Any) -> None:
    """Run one program of the kernel, with ``text`` for its file's."""
    scheduler, stores, arrived = Scheduler(seed), [], set()
    gathered = torch.full_like(case.all_rows, torch.nan)

    def arrive(slot: int, first: int, rows: int) -> None:
        gathered[first : first + rows] = case.all_rows[first : first + rows]
        arrived.add(slot)

    for source, _, rows, row, slot, _ in case.lines:
        if source != case.rank:
            scheduler.rare.append(lambda of=(slot, row, rows): arrive(*of))

    def load_tile(descriptor: Any, corner: Any, barrier: Barrier, place: Place) -> None:
        def event() -> None:
            data, (height, width) = descriptor.window(corner)
            place.tensor.zero_()
            place.tensor[:height, :width] = data.view(height, width)
            barrier.count(0, -4 * place.tensor.numel())

        scheduler.events.append(event)

    def finish_stores(left: int) -> None:
        while stores:
            descriptor, corner, place = stores.pop(0)
            data, (height, width) = descriptor.window(corner)
            data.copy_(place.tensor[:height, :width].reshape(data.shape))

    def allocate(dtype: Any, shape: list[int], layout: Any) -> Memory:
        kind = (lambda: Barrier()) if len(shape) == 2 else (lambda: Place(torch.zeros(shape[1:])))
        return Memory([kind() for _ in range(shape[0])], tuple(shape))

    def specialize(roles: Any, warps: list[int], registers: list[int]) -> None:
        scheduler.run([lambda role=role, given=given: role(*given) for role, given in roles])
        assert not stores

    gl = SimpleNamespace(
        program_id=lambda axis: program,
        num_programs=lambda axis: programs,
        num_warps=lambda: 1,
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
        warp_specialize=specialize,
        NVMMADistributedLayout=lambda **of: None,
    )
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=lambda barrier, count: None,
        wait=lambda barrier, phase: scheduler.until(lambda: barrier.passed(phase)),
        expect=lambda barrier, size: barrier.count(1, size),
        arrive=lambda barrier, count, pred=True: barrier.count(count if pred else 0, 0),
    )
    tma = SimpleNamespace(
        make_tensor_descriptor=Descriptor.make,
        async_copy_global_to_shared=load_tile,
        async_copy_shared_to_global=lambda *store: stores.append(store),
        store_wait=finish_stores,
    )
    hopper = SimpleNamespace(
        fence_async_shared=lambda: None,
        warpgroup_mma=lambda a, b, acc, use_acc, is_async: acc.begin(a, b, use_acc),
        warpgroup_mma_wait=lambda left, deps: deps[0].wait(left),
    )
    names: dict[str, Any] = {}
    exec(compile(re.sub("(?m)^@jit.*", "", text), str(FILE), "exec"), names)
    names |= {
        "gl": gl,
        "mbarrier": mbarrier,
        "tma": tma,
        "hopper": hopper,
        "_CHUNK": 6,
        "_OUTPUT": 2,
    }
    names |= {
        "tl": SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
        "first_tile": first_tile.fn,
        "grouped_tile": grouped_tile.fn,
        "current_epoch": lambda workspace: 1,
        "data_pointer": lambda *of: Pointer(gathered.view(-1)),
        "fence_descriptor_loads": lambda compiled: None,
        "activate": lambda part, tiles: SimpleNamespace(to=lambda dtype: part),
        "wait": lambda w, source, slot, epoch: scheduler.until(lambda: int(slot) // 8 in arrived),
    }
    Descriptor.made.clear()
    names["all_gather_matmul_roles_kernel"](
        SimpleNamespace(rank=case.rank, slot_offset=0),
        SimpleNamespace(ptr=Pointer(case.own.reshape(-1)), stride=case.inner),
        SimpleNamespace(
            ptr=Pointer(case.weight.view(-1)), stride_k=case.columns, stride_n=case.inner
        ),
        Pointer(case.output.view(-1)),
        Table(Pointer(torch.tensor(case.lines).view(-1)), len(case.lines)),
        Extents(len(case.own), len(case.all_rows), case.tiles),
        case.columns,
        case.inner,
        STAGES=3,
        TILES=case.TILES,
    )


def right(text: str, seed: int, layout: str = "kn", parts: int = 2, programs: int = 2) -> bool:
    """Whether all programs together give what torch gives, where no extent is a multiple of a block."""
    rows, rank, columns, inner = [40, 33, 20], 1, 80, 40
    numbers = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(-4, 5, shape, generator=numbers).float()  # noqa: E731
    all_rows, weight = draw(sum(rows), inner), draw(inner, columns)
    tiles_n = formulas.ceil_div(columns, BLOCK_N)
    size = formulas.chunk_rows(rows, BLOCK_M, 2)
    case = SimpleNamespace(
        rank=rank,
        columns=columns,
        inner=inner,
        all_rows=all_rows,
        own=all_rows[40:73].clone(),
        weight=weight.T.contiguous() if layout == "nk" else weight,
        output=torch.full((sum(rows) + BLOCK_M, columns), torch.nan),
        lines=formulas.chunk_lines(rank, 3, rows, size, BLOCK_M, tiles_n),
        tiles=formulas.tiles_of(rows, BLOCK_M, tiles_n),
        TILES=TILES._replace(DESCRIPTORS=layout, SUBTILE=parts),
    )
    for program in range(programs):
        share(text, seed, program, programs, case)
    output, beyond = case.output.split([sum(rows), BLOCK_M])
    return torch.equal(output, all_rows @ weight) and bool(beyond.isnan().all())


@pytest.mark.parametrize("programs", [1, 5, 40])
@pytest.mark.parametrize(("layout", "parts"), [("kn", 2), ("nk", 1), ("kn", 4)])
def test_every_order_gives_the_product(layout: str, parts: int, programs: int) -> None:
    text = FILE.read_text()
    for seed in range(4):
        assert right(text, seed, layout, parts, programs), seed


MUTANTS = {
    "a place given free while a product reads it": (r"mma_wait\(1,", "mma_wait(2,"),
    "the wait for a chunk is missing": (r"                wait\(.*\n", ""),
    "a part given free while it is stored": (r"( +)tma.store_wait\(0\)\n", ""),
    "loads wait for the wrong round": (r"(ring.empty.index\(place\), phase) \^ 1", r"\1"),
    "products do not wait for loads": (r" +mbarrier.wait\(ring.full.*\n", ""),
    "a part is overwritten before it is stored": (r" +mbarrier.wait\(output.empty.*\n", ""),
    "rows of the next chunk are stored": (r"\[rows, N\], \[N, 1\]", "[rows + 9, N], [N, 1]"),
    "the descriptor made anew for every chunk": (
        r"row = gl.load\(line \+ 3\)\n",
        "row = gl.load(line + 3) * 0\n"
        "                base = data_pointer(workspace, 0, input.ptr) + gl.load(line + 3) * K\n"
        "                rows = gl.load(line + 2)\n"
        "                gathered = tma.make_tensor_descriptor(base, [rows, K], [K, 1], A_BLOCK, A)\n",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_is_found(mutant: str) -> None:
    text, changed = re.subn(*MUTANTS[mutant], FILE.read_text())
    assert changed

    def found(seed: int) -> bool:
        try:
            return not right(text, seed, programs=1)
        except (DeadlockError, AssertionError):
            return True

    assert any(found(seed) for seed in range(8))


def launch(operands: MatmulVariant, **overrides: int) -> KernelLaunch:
    """What all-gather + matmul launches on sm_90 with these values of the configuration."""
    operands = replace(operands, overrides={**BY_ENGINE, **overrides})
    input, linear = operands.tensors(operands.rows)
    group, rows = AbsentGroup(), [operands.rows] * RANKS
    op = gather_matmul.all_gather_matmul_fused
    (made,) = launched(op, input, [linear], rows, None, operands.configuration(90), group=group)
    return made


def test_it_is_launched_with_the_same_arguments() -> None:
    # in two parts, which this kernel takes at least
    two = {"epilogue_subtile": 2}
    reference, roles = (
        launch(MatmulVariant(), **two),
        launch(MatmulVariant(), **two, warp_roles=True),
    )
    alone = launch(MatmulVariant(), warp_roles=True)
    assert alone.arguments["TILES"] == roles.arguments["TILES"]
    assert (reference.name, roles.name) == (
        "all_gather_matmul_kernel",
        "all_gather_matmul_roles_kernel",
    )
    assert (roles.grid, roles.num_warps) == (reference.grid, reference.num_warps)
    own = {name: roles.arguments[name] for name in ("extents", "STAGES")}
    assert own == {"extents": Extents(4096, RANKS * 4096, RANKS * 32 * 16), "STAGES": 3}
    shared = {name: value for name, value in roles.arguments.items() if name not in own}
    assert shared.keys() == {*inspect.signature(roles.kernel.fn).parameters} - own.keys()
    for name, value in shared.items():
        assert repr(value) == repr(reference.arguments[name]), name


@pytest.mark.parametrize(
    ("operands", "overrides"),
    [
        ({"bias": "n"}, {}),
        ({"dtype": "fp8e4nv", "layout": "nk", "scales": "row"}, {}),
        ({"dtype": "fp32"}, {"descriptors": True}),
        ({"tma": False}, {}),
        ({}, {"copiers": 8}),
        ({}, {"num_warps": 4}),
        ({}, {"output_descriptors": False}),
    ],
)
def test_where_it_cannot_be_the_reference_runs(
    operands: dict[str, Any], overrides: dict[str, int]
) -> None:
    made = launch(MatmulVariant(**operands), warp_roles=True, **overrides)
    assert made.name == "all_gather_matmul_kernel"


def test_it_is_for_one_architecture_and_never_the_default() -> None:
    assert without_effect(Configuration(warp_roles=True), 100)
    assert not without_effect(Configuration(warp_roles=True), 90)
    assert not any("warp_roles" in tile.values for tile in table.TILES)
    assert not any("warp_roles" in shape.values for shape in table.SHAPES)


def test_simulated_ranks_run_the_reference() -> None:
    def on_rank() -> torch.Tensor:
        with interlace.configured(warp_roles=True, copiers=0):
            return interlace.all_gather_matmul(torch.ones(2, 16), torch.ones(16, 16))

    for result in interlace.run(on_rank, 2):
        assert torch.equal(result, torch.full((4, 16), 16.0))


def test_both_places_of_the_output_count_as_shared_memory() -> None:
    plain = Configuration(block_n=256, epilogue_subtile=2, num_stages=3)
    more = shared_needed(replace(plain, warp_roles=True), 2) - shared_needed(plain, 2)
    assert more == 128 * 128 * 2
