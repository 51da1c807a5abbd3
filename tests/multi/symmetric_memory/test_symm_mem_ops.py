"""``torch.ops.symm_mem`` without a GPU: as torch's own fallbacks, and for torch's own callers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import interlace
from multi.symmetric_memory import symm_mem_ranks
from support import SCALES_BY_ROW
from tiers import thorough


def on_ranks(function: Any, world_size: int, path: Path, *args: Any) -> list[Any]:
    return interlace.run(function, world_size, str(path / "store"), *args, place="shm")


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("backend", ["interlace", "gloo"])
def test_as_torch(tmp_path: Path, backend: str, world_size: int) -> None:
    """Numbers, shapes, strides and dtypes, and those that torch's fake kernels tell its compiler."""
    results = on_ranks(symm_mem_ranks.against_torch, world_size, tmp_path, backend, False)
    for found in results:
        assert len(found) > 35
        assert {case: what for case, what in found.items() if what} == {}


@pytest.mark.skipif(
    not SCALES_BY_ROW, reason="before torch 2.12 a CPU multiplies no rows with scales"
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_scaled_as_torch(tmp_path: Path, world_size: int) -> None:
    results = on_ranks(symm_mem_ranks.against_torch, world_size, tmp_path, "interlace", True)
    for found in results:
        assert len(found) == 23
        assert {case: what for case, what in found.items() if what} == {}


@pytest.mark.parametrize("backend", ["interlace", "gloo"])
def test_collectives(tmp_path: Path, backend: str) -> None:
    results = on_ranks(symm_mem_ranks.collectives, 4, tmp_path, backend)
    shard = [[0.0, 1.0], [2.0, 3.0]]

    def plus(value: float, factor: float = 1.0) -> list[list[float]]:
        return [[factor * number + value for number in row] for row in shard]

    total = plus(60.0, 4.0)
    for rank, result in enumerate(results):
        gathered = [row for source in range(4) for row in plus(10.0 * source)]
        assert result.pop("gathered") == gathered
        assert result.pop("multimem gather") == gathered
        assert result.pop("scattered") == plus(15.0)
        assert result.pop("root") == (total if rank == 1 else [[-1.0, -1.0]] * 2)
        if rank > 0:
            assert result.pop("of some") == plus(60.0, 3.0)
            rows = [[sum(row)] for source in (1, 2, 3) for row in plus(10.0 * source)]
            assert result.pop("product of some") == rows
        assert len(result) == 10
        assert result == dict.fromkeys(result, total)


def test_layer_with_gradients(tmp_path: Path) -> None:
    """Calls by group name from an autograd function, as torchtitan makes them."""
    assert on_ranks(symm_mem_ranks.layer, 2, tmp_path) == [[True, True]] * 2


@thorough
def test_inductors_own_pass(tmp_path: Path) -> None:
    """``_micro_pipeline_tp`` replaces collective and matmul by torch's ops, which run here."""
    pair = ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]
    for calls, right in on_ranks(symm_mem_ranks.pipelined, 2, tmp_path):
        assert calls == [*pair, "fused_all_gather_scaled_matmul"]
        assert right == [True] * 2


def test_graphs_of_inductors_own_pass(tmp_path: Path) -> None:
    """The patterns of torch's own tests of ``micro_pipeline_tp_pass``: their ops run here, as unfused."""
    for found in on_ranks(symm_mem_ranks.graphs, 2, tmp_path):
        assert len(found) >= 23
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


@thorough
@pytest.mark.parametrize("first", ["interlace", "torch.distributed._symmetric_memory"])
def test_order_of_imports(first: str) -> None:
    """Kernels are there whether torch has defined its ops before or after; its others stay."""
    second = {"interlace": "torch.distributed._symmetric_memory"}.get(first, "interlace")
    program = f"""
import torch, sys, warnings
warnings.simplefilter("error")
import {first}
import {second}
from interlace.symmetric_memory.registration import NAMES
has = torch._C._dispatch_has_kernel_for_dispatch_key
print(sum(has("symm_mem::" + name, "CPU") for name in NAMES), len(NAMES))
print(has("symm_mem::fused_all_gather_matmul", "CUDA"), "interlace.ops.library" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["18", "18", "True", "False"], done.stderr
