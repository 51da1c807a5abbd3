"""The GPU benchmark, on simulated ranks: what it measures is right, and it would notice if it were not."""

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import interlace
from sim.benchmark.model_support import ROOT, module
from stand_ins.replaced import replaced
from tiers import thorough

BENCHMARKS = ROOT / "benchmarks"

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: run benchmarks/gpu.py itself"
)


def gpu_module() -> Any:
    """benchmarks/gpu.py; "gpu" is a folder of tests as well."""
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", BENCHMARKS / "gpu.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    "part", ["matmul", "variants", "ops", "virtual", "slow-link", "small", "host"]
)
def test_a_dry_run_gets_right_results(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_module().main(["--dry-run", "--part", part]) == 0
    printed = capsys.readouterr().out
    assert "wrong" not in printed and "FAILED" not in printed and "not written" in printed


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_module().main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().out


def test_a_wrong_result_has_no_times_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    lone = module("gpu_parts.lone_rank").LoneRank
    send = lone.copy_engine

    def shifted(self: Any, host: torch.Tensor) -> Any:  # every row is its neighbour's
        return send(self, host.roll(1, 0))

    with replaced((lone, "copy_engine", shifted)):
        assert gpu_module().main(["--dry-run", "--part", "slow-link"]) == 1
    assert "wrong results" in capsys.readouterr().out


def test_a_case_that_fails_is_told_and_the_next_begins(capsys: pytest.CaptureFixture[str]) -> None:
    lone = module("gpu_parts.lone_rank").LoneRank
    consumer = lone.consumer

    def too_large(self: Any, *given: Any, **named: Any) -> Any:
        if self.configuration.num_stages == 4:
            raise MemoryError("out of shared memory")
        return consumer(self, *given, **named)

    with replaced((lone, "consumer", too_large)):
        assert gpu_module().main(["--dry-run", "--part", "variants"]) == 1
    printed = capsys.readouterr().out
    assert "rank 0: MemoryError: out of shared memory" in printed and "wrong" not in printed
    assert "1 of 6 cases failed" in printed and printed.count("fraction_of_torch") == 5


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[1:2]
import gpu
from gpu_parts import shapes
from types import SimpleNamespace

def part(dry_run, repetitions):
    for count, record in enumerate(shapes.variants(True, 1)):
        if count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield record

gpu.torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))  # results are written
gpu.circumstances = lambda: {"device": "none"}
gpu._part = lambda name: part
gpu.main(["--part", "variants", "--out", sys.argv[2]])
"""


@thorough
def test_what_was_measured_before_a_kill_is_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "of" / "it.json"
    command = [sys.executable, "-c", KILLED, str(BENCHMARKS), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = json.loads(out.read_text())
    assert found["device"] == "none" and len(found["records"]) == 2
    assert all(each["correct"] and each["configuration"] for each in found["records"])
    for each in found["records"]:
        assert each["case"] in done.stdout


def test_the_lone_rank_really_waits() -> None:
    lone_rank, timing = module("gpu_parts.lone_rank"), module("gpu_parts.timing")

    def unset() -> None:
        lone = lone_rank.LoneRank(2, 32, 16, 16, torch.float32)
        lone.gathered.zero_()
        launch = lone.consumer(torch.zeros(16, 16), torch.zeros(32, 16))
        timing.launch_now(launch, lone.group.compute)
        lone.settle()

    with pytest.raises(interlace.DeadlockError):
        interlace.run(unset, 1)


def test_spread() -> None:
    timing = module("gpu_parts.timing")
    assert timing.Time.of([5.0, 1.0, 2.0, 4.0, 3.0]) == timing.Time(3.0, 2.0, 4.0)


def test_a_lone_rank_has_the_chunks_of_a_rank_among_eight() -> None:
    lone_rank = module("gpu_parts.lone_rank")

    def chunks() -> int:
        return int(lone_rank.LoneRank(8, 1024, 2048, 4096, torch.bfloat16).configuration.chunks)

    with replaced((lone_rank.configuration, "capability_of", lambda place: 90)):
        assert interlace.run(chunks, 1) == [1]
