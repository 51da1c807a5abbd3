"""The launch side on a fake GPU: the order of loads and launches, and the host's cost of a repeated call.

This order keeps ranks from blocking each other on a real GPU. Every kernel of an op is loaded on every rank
before any rank launches one, and no rank continues before all have launched.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton

import interlace
from interlace import functional
from interlace.groups.groups import default_group
from interlace.runtime.core.launch import KernelLaunch, outside
from interlace.runtime.places.gpu import device_place
from interlace.runtime.places.gpu.launch import LaunchCache, PreparedLaunch
from sim.benchmark.model_support import module
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


CALLS = 10_000


@pytest.fixture
def host_cost() -> Iterator[Any]:
    """Return the benchmark with a stub of the driver; this is rank 0 of two, alone on its GPU."""
    if torch.cuda.is_available():
        pytest.skip("the stub is for machines without a GPU")
    benchmark = module("host_cost")
    with replaced((device_place, "_of_devices", {})), benchmark.stubbed(2, peers=False):
        yield benchmark


def blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def kept_by(call: Callable[[], object], times: int) -> int:
    """Return the growth of Python's memory blocks in ``times`` calls."""
    for _ in range(200):
        call()
    before = blocks()
    for _ in range(times):
        call()
    return blocks() - before


@thorough
def test_ten_thousand_calls_keep_no_memory(host_cost: Any) -> None:
    for name, call in host_cost.candidates(torch.device("cpu")).items():
        assert kept_by(call, CALLS) < CALLS // 20, name


def test_works_that_nobody_waits_for_keep_no_memory(host_cost: Any) -> None:
    x = torch.zeros(64)
    assert kept_by(lambda: interlace.all_reduce(x, async_op=True), CALLS) < CALLS // 20


def test_a_leak_is_found(host_cost: Any) -> None:
    x, kept = torch.zeros(64), []
    assert kept_by(lambda: kept.append(interlace.all_reduce(x, async_op=True)), 500) > 500


def test_events_are_used_again(host_cost: Any) -> None:
    made = 0

    class Counted(host_cost._Event):  # type: ignore[misc, name-defined]
        def __init__(self, **options: Any) -> None:
            nonlocal made
            made += 1

    x = torch.zeros(64)
    with replaced((torch.cuda, "Event", Counted)):
        for _ in range(100):
            interlace.all_reduce(x, async_op=True).wait()
    assert 0 < made < 10


def test_every_call_is_planned_and_asks_the_driver_for_little(host_cost: Any) -> None:
    for name, call in host_cost.candidates(torch.device("cpu")).items():
        for _ in range(4):
            call()
        hits = default_group().plans.hits
        host_cost.driver.clear()
        call()
        assert default_group().plans.hits == hits + 1, name
        asked = host_cost.driver
        limit = (2, 2) if "asynchronous" in name else (0, 0)
        assert (asked["events"], asked["waits"]) == limit, (name, asked)
        assert asked["launches"] <= 2, (name, asked)


FUNCTIONS = {
    "all_gather_matmul": 88,
    "matmul_reduce_scatter": 96,
    "matmul_all_reduce": 96,
    "all_gather_matmul, asynchronous": 128,
    "all_reduce": 72,
    "all_reduce, asynchronous": 112,
    "all_gather": 80,
    "all_gather, asynchronous": 118,
    "reduce_scatter": 94,
    "broadcast": 72,
    "combine": 160,
    "grouped_matmul_combine": 185,
    "functional.all_gather_matmul": 184,
    "functional.matmul_reduce_scatter": 194,
}
"""The most functions in Python, the stub's among them, that a call enters whose like was made before.

So many take about as long on every machine. One more that a feature needs in every call is a reason to
look for another that it does not need, before a number here grows.
"""


def functions_entered_by(call: Callable[[], object]) -> int:
    entered = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def other_calls() -> dict[str, Callable[[], object]]:
    """Return functional calls, and combines of rows whose counts stay on the device."""
    rows, weight = torch.zeros(8, 16), torch.zeros(2, 16, 8)
    experts = torch.tensor([[0, 3]] * 8)
    x, w = torch.zeros(128, 512), torch.zeros(512, 1024)
    how: Any = {"algorithm": "fused"}
    received, handle = interlace.experts.dispatch(
        rows, experts, torch.ones(8, 2), 4, num_max_dispatch_tokens_per_rank=8, **how
    )
    return {
        "combine": lambda: interlace.experts.combine(received.x, handle, **how),
        "grouped_matmul_combine": lambda: interlace.grouped_matmul_combine(
            received.x, weight, handle, **how
        ),
        "functional.all_gather_matmul": lambda: functional.all_gather_matmul(x, w, **how).wait(),
        "functional.matmul_reduce_scatter": lambda: functional.matmul_reduce_scatter(
            x, w, **how
        ).wait(),
    }


def test_a_call_enters_few_functions(host_cost: Any) -> None:
    calls = host_cost.candidates(torch.device("cpu")) | other_calls()
    assert calls.keys() == FUNCTIONS.keys()
    for name, call in calls.items():
        for _ in range(4):
            call()
        entered = min(functions_entered_by(call) for _ in range(3))
        assert entered <= FUNCTIONS[name], name
