"""The host side of virtual ranks on a GPU, with a stand-in for the CUDA calls: what is launched when.

Nothing is computed here. What is checked is the order that keeps ranks from blocking each other on a
real GPU: every kernel of an op is loaded on every rank before any rank launches one, and no rank goes
on before all have launched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

import interlace
from interlace.runtime import place_cuda
from interlace.runtime.launch import KernelLaunch

Log = list[tuple[str, int, str]]


class FakeStream:
    def __init__(self, *args: Any, **options: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_event(self, event: Any) -> None: ...


class FakeEvent:
    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Pretend that there is a GPU; what ranks load and launch, in order."""
    entries: Log = []

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        yield

    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda: None,
        "current_stream": lambda: FakeStream(),
        "stream": on,
        "Stream": FakeStream,
        "Event": FakeEvent,
        "get_device_capability": lambda device: (9, 0),
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(place_cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)

    def note(what: str) -> Any:
        return lambda launch: entries.append((what, launch.arguments["rank"], launch.name))

    monkeypatch.setattr(KernelLaunch, "compile_only", note("load"))
    monkeypatch.setattr(KernelLaunch, "compiled", note("launch"))
    return entries


def call_ops() -> None:
    x, w = torch.ones(640, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16)
    interlace.all_gather_matmul(x, w, return_gathered=True)
    interlace.matmul_reduce_scatter(x, w, algorithm="fused")
    interlace.all_gather_matmul(x, w, algorithm="pipelined", async_op=True).wait()
    interlace.all_reduce(torch.ones(5))


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


def test_grids_of_all_ranks_fit_the_gpu(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[int] = []
    monkeypatch.setattr(KernelLaunch, "compiled", lambda launch: programs.append(launch.grid))
    for world_size in (1, 4, 16):
        programs.clear()
        interlace.run(call_ops, world_size, place="cuda")
        assert max(programs) * world_size <= 132


def test_every_op_ends_with_the_credit(log: Log) -> None:
    interlace.run(call_ops, 2, place="cuda")
    launches = [kernel for what, rank, kernel in log if what == "launch" and rank == 1]
    assert launches[:2] == ["all_gather_matmul_kernel", "finish_kernel"]
    assert launches.count("finish_kernel") == 4 and launches[-1] == "finish_kernel"


def test_an_error_is_raised_and_names_the_rank(log: Log) -> None:
    def fails() -> None:
        if interlace.get_rank() == 1:
            raise KeyError("lost")
        call_ops()

    with pytest.raises(KeyError, match="rank 1"):
        interlace.run(fails, 3, place="cuda")


def test_a_wait_that_gave_up_is_reported() -> None:
    header = [6, 1, 100, 1, 2, 1064, 7, 6, 3]
    error = place_cuda.signal_report(0, header)
    assert error is not None and error.waited_for == (2,)
    assert "waiting for rank 2: slot at byte 1064 was 6, expected 7" in str(error)
    assert place_cuda.signal_report(0, [6, 0, 100, 0, 0, 0, 0, 0, 0]) is None
