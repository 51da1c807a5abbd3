"""The facts that a GPU is asked for: what is told of answers that are played."""

import ctypes
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases.launches import on_cpu
from stand_ins import cupy_stand_in

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SMS = 4


class PlayedEvent:
    """Reached at once, or never."""

    passes = True

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.passes


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    properties = SimpleNamespace(multi_processor_count=SMS)
    for name, value in (
        ("Stream", lambda **options: SimpleNamespace(cuda_stream=7)),
        ("stream", cupy_stand_in._Stream),
        ("Event", PlayedEvent),
        ("synchronize", lambda: None),
        ("get_device_properties", lambda device: properties),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", on_cpu(torch.zeros))
    module = importlib.import_module("gpu_facts")
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    monkeypatch.setattr(module, "COPIED", 64)
    return module


def kernel(late_ns: list[int], sm: int) -> Any:
    """A kernel whose programs begin so late, all on this SM."""

    def run(grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
        sms, begun, _ = (int(each) for each in arguments)
        for program in range(grid[0]):
            ctypes.c_int32.from_address(sms + 4 * program).value = sm
            late = late_ns[program % len(late_ns)]
            ctypes.c_int64.from_address(begun + 8 * program).value = 1000 + late

    return run


def test_ctas_that_begin_late_are_counted(module: Any) -> None:
    facts = module.Facts(cupy_stand_in)
    facts.spin = kernel([0], 3)
    for late_ns, late in (([0], 0), ([0, module.LATE_NS + 1], SMS // 2)):
        facts.fat = kernel(late_ns, 0)
        assert facts.spinning(2) == {"their SMs": 1, "CTAs that begin late": late}


@pytest.mark.parametrize("late_ns", [280_000_000, 300_000_001, 900_000_000])
def test_a_kernel_that_waits_as_a_whole_has_not_run_beside_what_spins(
    module: Any, late_ns: int
) -> None:
    facts = module.Facts(cupy_stand_in)
    facts.spin, facts.fat = kernel([0], 3), kernel([late_ns], 0)
    found = facts.spinning(8)
    assert found.startswith(f"the kernel waited {late_ns / 1e6:.0f} ms"), found


def test_spinning_kernels_that_begin_later_are_not_counted_as_beside(module: Any) -> None:
    facts, starts = module.Facts(cupy_stand_in), iter([0, module.LIMIT_NS])
    facts.spin = lambda *launch, **more: kernel([next(starts)], 0)(*launch, **more)
    facts.fat = kernel([20_000_000], 0)
    assert "1 were spinning when it began" in facts.spinning(2)


def test_ctas_have_the_shared_memory_of_the_largest_tile_that_ships(module: Any) -> None:
    figures = (BENCHMARKS.parent / "docs" / "performance.md").read_text()
    row = next(each for each in figures.splitlines() if each.startswith("| shared memory, bytes"))
    _, triton, _, roles = row.split("|")[2:6]  # those of 3 stages ship
    assert f"{module.SHARED:,}" == max(triton, roles).strip()


def test_what_runs_together_is_counted(module: Any) -> None:
    facts = module.Facts(cupy_stand_in)
    for late_ns, together in (([0], module.STREAMS), ([module.LIMIT_NS], module.STREAMS)):
        facts.spin = kernel(late_ns, 0)
        assert facts.at_once()["together"] == together
    starts = iter([0] * 8 + [module.LIMIT_NS] * (module.STREAMS - 8))
    facts.spin = lambda *launch, **more: kernel([next(starts)], 0)(*launch, **more)
    assert facts.at_once()["together"] == 8


def test_what_waits_for_the_kernel_is_told(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = module.Facts(cupy_stand_in)
    facts.fat = kernel([0], 0)
    assert "goes on" in facts.copy(1)
    monkeypatch.setattr(PlayedEvent, "passes", False)
    assert facts.copy(0) == "waits for the kernel: it needs SMs"


def test_a_dry_run_names_the_questions(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    sys.path.insert(0, str(BENCHMARKS))
    try:
        assert importlib.import_module("gpu_facts").main(["--dry-run"]) == 0
    finally:
        sys.path.pop(0)
    assert len(capsys.readouterr().out.splitlines()) == 9
