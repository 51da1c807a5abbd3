"""The facts that a GPU is asked for: the report on recorded answers."""

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases.launches import on_cpu
from sim.benchmark.model_support import ROOT, module
from stand_ins import cupy_stand_in
from stand_ins.replaced import replaced

SMS = 4


class PlayedEvent:
    """An event that is reached at once, or never."""

    passes = True

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.passes


@pytest.fixture
def facts() -> Iterator[Any]:
    properties = SimpleNamespace(multi_processor_count=SMS)
    found = module("gpu_facts")
    with replaced(
        (torch.cuda, "Stream", lambda **options: SimpleNamespace(cuda_stream=7)),
        (torch.cuda, "stream", cupy_stand_in._Stream),
        (torch.cuda, "Event", PlayedEvent),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "get_device_properties", lambda device: properties),
        (torch, "zeros", on_cpu(torch.zeros)),
        (found, "PATIENCE", 0.01),
        (found, "COPIED", 64),
    ):
        yield found.Facts(cupy_stand_in)


def kernel(late_ns: list[int], sm: int) -> Any:
    """A kernel whose programs begin this late, all on this SM."""

    def run(grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
        sms, begun, _ = (int(each) for each in arguments)
        for program in range(grid[0]):
            ctypes.c_int32.from_address(sms + 4 * program).value = sm
            late = late_ns[program % len(late_ns)]
            ctypes.c_int64.from_address(begun + 8 * program).value = 1000 + late

    return run


def test_ctas_that_begin_late_are_counted(facts: Any) -> None:
    facts.spin = kernel([0], 3)
    for late_ns, late in (([0], 0), ([0, module("gpu_facts").LATE_NS + 1], SMS // 2)):
        facts.fat = kernel(late_ns, 0)
        assert facts.spinning(2) == {"their SMs": 1, "CTAs that begin late": late}


@pytest.mark.parametrize("late_ns", [280_000_000, 300_000_001, 900_000_000])
def test_a_kernel_that_waits_as_a_whole_has_not_run_beside_what_spins(
    facts: Any, late_ns: int
) -> None:
    facts.spin, facts.fat = kernel([0], 3), kernel([late_ns], 0)
    found = facts.spinning(8)
    assert found.startswith(f"the kernel waited {late_ns / 1e6:.0f} ms"), found


def test_spinning_kernels_that_begin_later_are_not_counted_as_beside(facts: Any) -> None:
    starts = iter([0, module("gpu_facts").LIMIT_NS])
    facts.spin = lambda *launch, **more: kernel([next(starts)], 0)(*launch, **more)
    facts.fat = kernel([20_000_000], 0)
    assert "1 were spinning when it began" in facts.spinning(2)


def test_ctas_have_the_shared_memory_of_the_largest_tile_that_ships() -> None:
    figures = (ROOT / "docs/reference/kernel-counts.md").read_text()
    row = next(each for each in figures.splitlines() if each.startswith("| shared memory, bytes"))
    _, triton, _, roles = row.split("|")[2:6]  # the ones of 3 stages ship
    assert f"{module('gpu_facts').SHARED:,}" == max(triton, roles).strip()


def test_what_runs_together_is_counted(facts: Any) -> None:
    limit, streams = module("gpu_facts").LIMIT_NS, module("gpu_facts").STREAMS
    for late_ns, together in (([0], streams), ([limit], streams)):
        facts.spin = kernel(late_ns, 0)
        assert facts.at_once()["together"] == together
    starts = iter([0] * 8 + [limit] * (streams - 8))
    facts.spin = lambda *launch, **more: kernel([next(starts)], 0)(*launch, **more)
    assert facts.at_once()["together"] == 8


def test_what_waits_for_the_kernel_is_told(facts: Any) -> None:
    facts.fat = kernel([0], 0)
    assert "goes on" in facts.copy(1)
    with replaced((PlayedEvent, "passes", False)):
        assert facts.copy(0) == "waits for the kernel: it needs SMs"


def test_a_dry_run_names_the_questions(capsys: pytest.CaptureFixture[str]) -> None:
    assert module("gpu_facts").main(["--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 9
