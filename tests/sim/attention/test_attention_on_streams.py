"""Attention on a stand-in for CUDA, in any order: keys by the copy engine, by copiers, around a ring."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import interlace
from cases.attention_cases import AttentionCase
from interlace.attention import calls
from interlace.attention.calls import AttentionOptions
from interlace.groups.groups import default_group
from interlace.runtime.algorithms import plain
from interlace.runtime.algorithms.attention import moves, travelling
from interlace.runtime.algorithms.attention.shards import TokenShards
from interlace.runtime.tuning.configuration import override
from sim.attention.test_ring import changed
from sim.cuda.test_cuda_streams import RUNS, read
from stand_ins.fake_cuda import CudaError, DeviceHang, FakeGpu, UseAfterFree
from stand_ins.fake_driver import install

CASE = AttentionCase((7, 4, 6), heads=(6, 3), batch=1)
COPY_ENGINE, COPIERS, RING = ("all_gather", 0), ("all_gather", 1), ("ring", 0)
WAYS = COPY_ENGINE, COPIERS, RING, ("ulysses", 0)


def exercise(gpu: FakeGpu, *ways: tuple[str, int], rounds: int = 3) -> Callable[[], bool]:
    """Every way in flight in every round; values are others in each."""

    def on_rank() -> bool:
        places = TokenShards(CASE.lengths, CASE.balance).positions(interlace.get_rank())
        query, key, value = CASE.tensors()
        whole = [each.transpose(1, 2) for each in (query, key, value)]
        right = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
        right, seen = right.transpose(1, 2)[:, places], []
        for number in range(rounds):
            works = []
            for method, copiers in ways:
                # there at once: keys are packed by torch, which the stand-in does not put on a stream
                tensors = [each[:, places] for each in (query, key, value * (number + 1))]
                made = torch.full_like(tensors[0], math.nan), torch.empty(1, 6, len(places))
                given = default_group(), (*tensors, None, *made)
                options = AttentionOptions(method, causal=True, algorithm="fused")
                with override(block_m=16, block_n=16, copiers=copiers, chunks=2):
                    works.append((calls.attention(*given, (options,), True), made[0]))
            for work, output in works:
                work.wait()  # type: ignore[union-attr]
                seen.append((read(gpu, output), right * (number + 1)))
        torch.cuda.synchronize()
        return all(torch.allclose(made, known, 1e-4, 1e-4) for made, known in seen)

    return on_rank


def holds(run: Any, monkeypatch: pytest.MonkeyPatch, seed: int, *ways: tuple[str, int]) -> bool:
    gpu = install(monkeypatch, FakeGpu(seed, eager=0.5 if seed % 2 else 0.05))
    try:
        return all(run(exercise(gpu, *ways), 3))
    except (CudaError, DeviceHang, UseAfterFree):
        return False


@RUNS
@pytest.mark.parametrize("seed", range(4))
def test_right_whatever_runs_first(run: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch, FakeGpu(seed, eager=0.5 if seed % 2 else 0.05))
    assert all(run(exercise(gpu, *WAYS), 3))
    for name in ("all_gather_attention", "attention", "merge_attention"):
        assert f"{name}_kernel" in gpu.launches


def _published_first(communicator: Any, workspace: Any, lines: Any, tensors: Any) -> None:
    communicator.copying.wait_credits(workspace)
    for peer, *_, slot in lines:
        communicator.copying.publish(workspace, peer, slot)
    plain_send(communicator, workspace, lines, tensors)


plain_send = plain.send_by_copy_engine


@RUNS
@pytest.mark.parametrize("way", [COPY_ENGINE, RING], ids=["copy engine", "ring"])
def test_control_keys_that_are_not_waited_for(
    way: tuple[str, int], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "                compute.wait_event(copying.record())\n            if step + 1"
    without = changed(moves, "RingKeys", line, "                pass\n            if step + 1")
    monkeypatch.setitem(travelling.WAYS, "ring", without)
    monkeypatch.setattr(plain, "send_by_copy_engine", _published_first)
    assert not all(holds(run, monkeypatch, seed, way) for seed in range(8))
