"""The launch side of virtual ranks on a GPU: the order of loads and launches on the fake one.

This order keeps ranks from blocking each other on a real GPU. Every kernel of an op is loaded on every rank
before any rank launches one, and no rank continues before all have launched.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton

import interlace
from interlace.runtime.core.launch import KernelLaunch, outside
from interlace.runtime.places.gpu import watchdog
from interlace.runtime.places.gpu.launch import LaunchCache, PreparedLaunch
from stand_ins.fake_cuda import FakeGpu
from stand_ins.fake_driver import MULTIPROCESSORS, installed
from stand_ins.fake_host import run_virtual
from stand_ins.replaced import replaced
from tiers import thorough

Log = list[tuple[str, int, str]]


@pytest.fixture
def log() -> Iterator[Log]:
    """Replace the GPU, and log the preparations and launches of ranks in order."""
    entries: Log = []
    known: dict[PreparedLaunch, tuple[int, str]] = {}

    def preparing(
        self: LaunchCache, launch: KernelLaunch, stream: int, capture: int
    ) -> PreparedLaunch:
        prepared = noted_prepare(self, launch, stream, capture)
        known[prepared] = (outside(launch.arguments)["rank"], launch.name)
        if launch.op != "a signal":  # which is loaded ahead of its first use
            entries.append(("load", *known[prepared]))
        return prepared

    def running(self: PreparedLaunch, stream: int) -> None:
        entries.append(("launch", *known[self]))
        noted_run(self, stream)

    with installed(FakeGpu()):
        noted_prepare, noted_run = LaunchCache.prepare, PreparedLaunch.run
        noting = (LaunchCache, "prepare", preparing), (PreparedLaunch, "run", running)
        with replaced(*noting):
            yield entries


def call_ops() -> None:
    x, w = torch.ones(640, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16)
    interlace.all_gather_matmul(x, w, return_gathered=True)
    interlace.matmul_reduce_scatter(x, w, algorithm="fused")
    interlace.all_gather_matmul(x, w, algorithm="pipelined", async_op=True).wait()
    interlace.all_reduce(torch.ones(5), algorithm="kernel")


def test_all_ranks_load_before_any_launches(log: Log) -> None:
    world_size = 3
    interlace.run(call_ops, world_size, place="cuda")
    assert {rank for _, rank, _ in log} == {0, 1, 2}
    loading: dict[int, list[str]] = {rank: [] for rank in range(world_size)}
    phase, ops = "load", 0
    for what, rank, kernel in log:
        if what == "load":
            if phase == "launch":  # the next op begins only when all of this one is launched
                assert not any(loading.values())
                ops += 1
            loading[rank].append(kernel)
        else:
            assert all(loading[r] or phase == "launch" for r in range(world_size))
            assert loading[rank].pop(0) == kernel
        phase = what
    assert ops == 3 and not any(loading.values())


@thorough
@pytest.mark.parametrize("world_size", [1, 4, 16])
def test_grids_of_all_ranks_fit_the_gpu(log: Log, world_size: int) -> None:
    programs: list[int] = []
    compiled = KernelLaunch.compiled

    def noting(launch: KernelLaunch) -> object:
        programs.append(launch.extents[0])
        return compiled(launch)

    with replaced((KernelLaunch, "compiled", noting)):
        interlace.run(call_ops, world_size, place="cuda")
    assert programs and max(programs) * world_size <= MULTIPROCESSORS


def test_every_op_ends_with_the_credit(log: Log) -> None:
    interlace.run(call_ops, 2, place="cuda")
    launches = [kernel for what, rank, kernel in log if what == "launch" and rank == 1]
    assert launches[:2] == ["all_gather_matmul_kernel", "finish_kernel"]
    assert launches.count("finish_kernel") == 4 and launches[-1] == "finish_kernel"


def test_a_wait_that_gave_up_is_reported() -> None:
    header = [6, 1, 100, 1, 2, 1064, 7, 6, 3]
    error = watchdog.signal_report(0, header)
    assert error is not None and error.waited_for == (2,)
    assert "waiting for rank 2: slot at byte 1064 was 6, expected 7" in str(error)
    assert watchdog.signal_report(0, [6, 0, 100, 0, 0, 0, 0, 0, 0]) is None


def test_the_environment_is_left_alone(log: Log) -> None:
    before = dict(os.environ)
    interlace.run(call_ops, 2, place="cuda")
    assert dict(os.environ) == before


@pytest.mark.parametrize("options", [{}, {"processes": True}], ids=["virtual", "processes"])
def test_refuses_without_a_gpu(options: dict[str, Any]) -> None:
    with pytest.raises(interlace.InterlaceError, match="torch sees no CUDA device"):
        interlace.run(call_ops, 1, place="cuda", **options)


def test_refuses_interpreted() -> None:
    with pytest.raises(interlace.InterlaceError, match="TRITON_INTERPRET is set"):
        run_virtual(call_ops, 1, FakeGpu(), (triton.knobs.runtime, "interpret", True))


@pytest.mark.parametrize("place", ["sim", "shm"])
def test_processes_is_for_cuda(place: str) -> None:
    with pytest.raises(ValueError, match=r'processes must be a bool, and is for place="cuda"'):
        interlace.run(call_ops, 2, place=place, processes=True)
