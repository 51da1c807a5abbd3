"""Every kernel at sizes past 2^31 elements, by address only (see ``address_only``).

The launches are real, made from tensors without memory.
"""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from interlace.kernels import products as matmul
from interlace.ops.collectives import launch as plain
from interlace.ops.matmul import launch_gather as gather_matmul, launch_reduce as matmul_reduce
from interlace.ops.matmul.operands import Linear
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import HEADER_WORDS, WORD, Layout, SymmetricBuffer, Workspace
from interlace.runtime.tuning.configuration import Configuration
from stand_ins.address_only import Memory, run_programs

HUGE = (1 << 26) + 77  # times 64 columns: 4.3e9 elements
HUGE_FLAT = (1 << 32) + 123
WORLD = 2
CONFIGURATION = Configuration(block_m=64, block_n=64, block_k=64, copy_rows=64, copy_columns=64)


class FakeCommunicator:
    """A communicator that can only lay out a workspace and launch."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self.memory, self.rank, self.world_size = memory, rank, WORLD
        self.place = mock.Mock(interpreted=True, direct_access=False, nodes=None)
        self.place.program_limit = 1 << 30
        self.compute = self.copying = mock.Mock()
        self.compute.launch = lambda launch: self.launches.append(launch)
        self.launches: list[KernelLaunch] = []
        self.derived: dict[Any, Any] = {}

    def table(self, key: Any, rows: Callable[[], Any]) -> torch.Tensor:
        return torch.tensor([value for row in rows() for value in row] or [0])

    def enqueue(self, op: str, layout: Layout, body: Callable[[Workspace], None]) -> None:
        slots, data = HEADER_WORDS * WORD, (HEADER_WORDS + layout.slots) * WORD
        peers = torch.tensor([self.memory.fake(data + layout.nbytes) for _ in range(WORLD)])
        buffer = SymmetricBuffer(self.rank, data + layout.nbytes, peers, [])
        body(Workspace(0, buffer, slots, data, WORLD, op))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launched(build: Callable[[FakeCommunicator], None], rank: int) -> tuple[Memory, KernelLaunch]:
    memory = Memory()
    communicator = FakeCommunicator(memory, rank)
    build(communicator)
    (launch,) = communicator.launches
    return memory, launch


def assert_lawful(build: Callable[[FakeCommunicator], None], tiles: int) -> None:
    for rank in range(WORLD):
        checker = run_programs(*launched(build, rank), tiles)
        assert checker.bad == [], f"rank {rank}"
        assert checker.touched > 1 << 32, "no address far enough out to prove anything"


def tiles_of(rows: int, columns: int) -> int:
    return -(-rows // 64) * -(-columns // 64)


SHAPES = [(HUGE, 96), (33, HUGE)]
PATHS = [
    ("pointers", False, False),
    ("pointers transposed", False, True),
    ("kn", True, False),
    ("nk", True, True),
]


def operands(columns: int, path: tuple[str, bool, bool]) -> tuple[torch.Tensor, Configuration]:
    _, descriptors, transposed = path
    weight = meta(columns, 64).T if transposed else meta(64, columns)
    values = {**CONFIGURATION.__dict__, "descriptors": descriptors}
    return weight, Configuration(**values)


def launch_gather(communicator: Any, rows: int, weight: torch.Tensor, how: Configuration) -> None:
    columns = weight.shape[1]
    linear = Linear(weight, meta(columns), meta(WORLD * rows, columns))
    lengths = [rows] * WORLD
    gather_matmul.all_gather_matmul_fused(
        communicator, meta(rows, 64), [linear], lengths, None, how
    )


def launch_scatter(
    communicator: Any, rows: int, weight: torch.Tensor, how: Configuration, along: str = "n"
) -> None:
    columns, parts = weight.shape[1], [(0, rows), (rows, rows)]
    bias = meta(columns if along == "n" else rows)
    linear = Linear(weight, bias, meta(rows, columns), along, average=True)
    matmul_reduce.matmul_reduce_scatter_fused(
        communicator, meta(WORLD * rows, 64), linear, parts, how
    )


def launch_reduce(communicator: Any, rows: int, weight: torch.Tensor, how: Configuration) -> None:
    linear = Linear(weight, meta(weight.shape[1]), meta(rows, weight.shape[1]))
    matmul_reduce.matmul_all_reduce_fused(communicator, meta(rows, 64), linear, how)


MATMULS: dict[str, tuple[Callable[..., None], int]] = {
    "all_gather_matmul": (launch_gather, WORLD),
    "matmul_reduce_scatter": (launch_scatter, WORLD),
    "matmul_reduce_scatter, m": (functools.partial(launch_scatter, along="m"), WORLD),
    "matmul_all_reduce": (launch_reduce, 1),
}
"""By op what launches it, and how many times the tiles of a rank's rows it has."""


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[0])
@pytest.mark.parametrize("op", MATMULS)
def test_matmuls(op: str, rows: int, columns: int, path: tuple[str, bool, bool]) -> None:
    (launch, times), (weight, configuration) = MATMULS[op], operands(columns, path)
    assert_lawful(
        lambda communicator: launch(communicator, rows, weight, configuration),
        times * tiles_of(rows, columns),
    )


def flat_blocks() -> int:
    return -(-HUGE_FLAT // CONFIGURATION.block_elements)


FLAT = meta(HUGE_FLAT)
COLLECTIVES: dict[str, tuple[Callable[[Any], None], int]] = {
    "all_gather": (
        lambda communicator: plain.all_gather_kernel(
            communicator, FLAT, meta(2 * HUGE_FLAT), [HUGE_FLAT] * 2, CONFIGURATION
        ),
        4,
    ),
    "reduce_scatter": (
        lambda communicator: plain.reduce_scatter_kernel(
            communicator, meta(2 * HUGE_FLAT), FLAT, [HUGE_FLAT] * 2, CONFIGURATION, average=False
        ),
        WORLD * flat_blocks(),
    ),
    "all_reduce": (
        lambda communicator: plain.all_reduce_kernel(
            communicator, FLAT, FLAT, CONFIGURATION, average=False
        ),
        flat_blocks(),
    ),
}


@pytest.mark.parametrize("op", COLLECTIVES)
def test_collectives(op: str) -> None:
    assert_lawful(*COLLECTIVES[op])


@triton.jit
def int32_rows(x_ptr, y_ptr, stride, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    offsets = row * stride + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets))


@pytest.mark.parametrize("wide", [True, False])
def test_control_an_int32_row_offset_is_seen(wide: bool) -> None:
    arguments = {"x_ptr": meta(HUGE, 64), "y_ptr": meta(HUGE, 64), "stride": 64}
    launch = KernelLaunch(int32_rows, 1, {**arguments, "BLOCK": 64, "WIDE": wide}, "copy")
    checker = run_programs(Memory(), launch, HUGE)
    assert bool(checker.bad) != wide
    if not wide:
        assert any("wraps" in bad for bad in checker.bad)
        assert any("at 0x" in bad for bad in checker.bad)


def test_control_an_address_past_the_end_is_seen() -> None:
    arguments = {"x_ptr": meta(HUGE, 64), "y_ptr": meta(HUGE, 63), "stride": 64}
    launch = KernelLaunch(int32_rows, 1, {**arguments, "BLOCK": 64, "WIDE": True}, "copy")
    assert run_programs(Memory(), launch, HUGE).bad


@triton.jit
def int32_tile_offsets(tile, BLOCK: tl.constexpr):
    return tile * BLOCK + tl.arange(0, BLOCK)


def test_control_the_shipped_kernel_with_int32_tile_offsets_is_seen() -> None:
    weight, configuration = operands(96, PATHS[0])
    with mock.patch.object(matmul, "tile_offsets", int32_tile_offsets):
        launch = launched(lambda each: launch_reduce(each, HUGE, weight, configuration), 0)
        checker = run_programs(*launch, tiles_of(HUGE, 96))
    assert any("wraps" in bad for bad in checker.bad)
