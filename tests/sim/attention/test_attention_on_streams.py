"""Attention on a stand-in for CUDA, in any order; the ring of keys needs each of its waits."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import interlace
from cases.attention_cases import METHODS, AttentionCase
from interlace import nn
from interlace.groups.groups import default_group
from interlace.ops.attention import context_parallel, key_transport
from interlace.ops.attention.context_parallel import AttentionArguments, AttentionBackwardArguments
from interlace.ops.attention.problem import TokenShards
from interlace.ops.collectives import launch as plain
from interlace.runtime.tuning.configuration import override
from interlace.tools.targets import TARGETS
from interlace.verify import races
from sim.cuda.test_cuda_streams import RUNS, read
from stand_ins.fake_cuda import CudaError, DeviceHang, FakeGpu, UseAfterFree
from stand_ins.fake_driver import install
from tiers import few, thorough

CASE = AttentionCase((7, 4, 6), heads=(6, 3), value_size=24, batch=1)
FOUR = replace(CASE, lengths=(7, 4, 6, 3))  # with fewer ranks none waits for room around a ring
COPY_ENGINE, COPIERS, RING = ("all_gather", 0), ("all_gather", 1), ("ring", 0)
WAYS = COPY_ENGINE, COPIERS, RING, ("ulysses", 0)


def exercise(gpu: FakeGpu, *ways: tuple[str, int], rounds: int = 3) -> Callable[[], bool]:
    """Run every way in flight in every round, with new values."""

    def on_rank() -> bool:
        places = (
            TokenShards(CASE.lengths, CASE.balance).places([interlace.get_rank()], None).tolist()
        )
        query, key, value = CASE.tensors()
        whole = [each.transpose(1, 2) for each in (query, key, value)]
        right = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
        right, seen = right.transpose(1, 2)[:, places], []
        for number in range(rounds):
            works = []
            for method, copiers in ways:
                # there at once: keys are packed by torch, which the stand-in does not put on a stream
                tensors = [each[:, places] for each in (query, key, value * (number + 1))]
                shape = *tensors[0].shape[:3], CASE.value_size
                made = torch.full(shape, math.nan), torch.empty(1, 6, len(places))
                options = {"method": method, "causal": True, "algorithm": "fused"}
                arguments = AttentionArguments(*tensors, None, **options)  # type: ignore[arg-type]
                given = default_group(), (arguments, made)
                with override(block_m=16, block_n=16, copiers=copiers, chunks=2):
                    works.append((context_parallel.attention(*given, async_op=True), made[0]))
            for work, output in works:
                work.wait()  # type: ignore[union-attr]
                seen.append((read(gpu, output), right * (number + 1)))
        torch.cuda.synchronize()
        return all(torch.allclose(made, known, 1e-4, 1e-4) for made, known in seen)

    return on_rank


def differentiate(gpu: FakeGpu, *methods: str, rounds: int = 2) -> Callable[[], bool]:
    """Run the gradients of every method in flight, with new gradients of the output in each round."""

    def on_rank() -> bool:
        places = (
            TokenShards(FOUR.lengths, FOUR.balance).places([interlace.get_rank()], None).tolist()
        )
        whole = [each.requires_grad_() for each in FOUR.tensors()]
        grad = FOUR.grads()[0]
        heads = [each.transpose(1, 2) for each in whole]
        made = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        right = torch.autograd.grad(made.transpose(1, 2), whole, grad)
        scores = heads[0] @ heads[1].repeat_interleave(2, 1).mT / math.sqrt(FOUR.size)
        later = torch.ones(scores.shape[-2:]).triu(1).bool()
        sums = scores.masked_fill(later, -math.inf).logsumexp(-1).detach()
        kept = [each.detach()[:, places] for each in (*whole, made.transpose(1, 2))]
        tensors, seen = [*kept, sums[..., places].contiguous()], []
        for number in range(1, rounds + 1):
            works = []
            for method in methods:
                into = [torch.full_like(each, math.nan) for each in tensors[:3]]
                options = {"method": method, "causal": True, "algorithm": "fused"}
                arguments = AttentionBackwardArguments(
                    grad[:, places] * number, None, *tensors, None, **options
                )
                given = default_group(), (arguments, into)
                with override(block_m=16, block_n=16, chunks=2):
                    works.append((context_parallel.attention_backward(*given, async_op=True), into))
            for work, into in works:
                work.wait()  # type: ignore[union-attr]
                seen += [
                    (read(gpu, mine), known[:, places] * number)
                    for mine, known in zip(into, right, strict=True)
                ]
        torch.cuda.synchronize()
        return all(torch.allclose(made, known, 1e-4, 1e-4) for made, known in seen)

    return on_rank


Gpus = Callable[[int], FakeGpu]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Install the stand-in of this seed, which runs more or less of its work at once."""
    return lambda seed: install(monkeypatch, FakeGpu(seed, eager=0.5 if seed % 2 else 0.05))


def holds(run: Any, gpu: FakeGpu, *ways: Any, backward: bool = False) -> bool:
    try:
        return all(run(differentiate(gpu, *ways), 4) if backward else run(exercise(gpu, *ways), 3))
    except (CudaError, DeviceHang, UseAfterFree):
        return False


@RUNS
@pytest.mark.parametrize("seed", range(4))
def test_right_whatever_runs_first(run: Any, seed: int, gpus: Gpus) -> None:
    gpu = gpus(seed)
    assert all(run(exercise(gpu, *WAYS), 3))
    for name in ("all_gather_attention", "attention", "merge_attention"):
        assert f"{name}_kernel" in gpu.launches


@RUNS
@pytest.mark.parametrize("seed", range(2))
def test_gradients_whatever_runs_first(run: Any, seed: int, gpus: Gpus) -> None:
    gpu = gpus(seed)
    assert all(run(differentiate(gpu, *METHODS), 4))
    for name in ("queries", "keys"):
        assert f"attention_{name}_backward_kernel" in gpu.launches


plain_send = plain.send_by_copy_engine


def _published_first(communicator: Any, workspace: Any, lines: Any, tensors: Any) -> None:
    communicator.copying.wait_credits(workspace)
    for peer, *_, slot in lines:
        communicator.copying.publish(workspace, peer, slot)
    plain_send(communicator, workspace, lines, tensors)


@RUNS
@pytest.mark.parametrize("way", [COPY_ENGINE, RING], ids=["copy engine", "ring"])
def test_control_keys_that_are_not_waited_for(way: tuple[str, int], run: Any, gpus: Gpus) -> None:
    wait = "                compute.wait_event(copying.record())\n            if step + 1"
    nothing = "                pass\n            if step + 1"
    without = changed(key_transport, "RingKeys", wait, nothing)
    with (
        mock.patch.dict(key_transport.WAYS, ring=without),
        mock.patch.object(plain, "send_by_copy_engine", _published_first),
    ):
        assert not all(holds(run, gpus(seed), way) for seed in range(8))


NOT_WAITED = {
    "staged": ("all_gather", "StagedSums", "compute.wait(workspace, maker, self._slots + maker)"),
    "made": ("ring", "RingSums", "compute.wait(workspace, maker, self._made + step)"),
    "taken": (
        "ring",
        "RingSums",
        "compute.wait(workspace, (rank - before) % self._steps, self._taken + before)",
    ),
}


@RUNS
@pytest.mark.parametrize("fault", NOT_WAITED)
def test_control_contributions_that_are_not_waited_for(fault: str, run: Any, gpus: Gpus) -> None:
    method, name, line = NOT_WAITED[fault]
    without = changed(key_transport, name, line, "pass")
    with mock.patch.dict(key_transport.BACK, {method: without}):
        assert not all(holds(run, gpus(seed), method, backward=True) for seed in range(8))


RING_TARGET = TARGETS["attention"].variants["ring fused"]
BACK = TARGETS["attention_backward"].variants["ring fused"]


def changed(module: ModuleType, name: str, old: str, new: str) -> Callable[..., Any]:
    """Return a class of ``module`` with this line of its source replaced."""
    source = inspect.getsource(module)
    assert source.count(old) == 1
    names: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), names)
    ring: Callable[..., Any] = names[name]
    return ring


@thorough
@pytest.mark.parametrize("target", [RING_TARGET, BACK], ids=["forward", "backward"])
def test_four_ranks_have_no_race(target: Callable[[], Any]) -> None:
    report = races(target, 4, seeds=1)
    assert report.clean, report


def found(target: Callable[[], Any], world_size: int, kind: str = "") -> bool:
    """Return whether some schedule has a race of this kind."""
    for seed in range(6):
        report = races(target, world_size, seeds=[seed])
        if not report.clean:
            return any(kind in str(finding) for finding in report.findings)
    return False


@pytest.mark.parametrize(
    ("line", "world_size"),
    few([("self._taken + before)", 4), ("self._made + step)", 3)], ("self._made + step)", 3)),
)
def test_gradients_that_go_round_are_waited_for(line: str, world_size: int) -> None:
    source = inspect.getsource(key_transport)
    (wait,) = [each for each in source.splitlines() if "compute.wait(" in each and line in each]
    mutant = changed(key_transport, "RingSums", wait, wait.split("compute")[0] + "pass")
    with mock.patch.dict(key_transport.BACK, ring=mutant):
        assert found(BACK, world_size)


@pytest.mark.parametrize(
    ("line", "kind", "world_size"),
    [
        ("        copying.wait_credits(workspace)\n        for step", "read-write", 3),
        (" " * 20 + "copying.wait(workspace, after, self._free + step - 1)", "read-write", 4),
        (" " * 16 + "copying.wait(workspace, before, self._arrived + step)", "write-read", 3),
    ],
    ids=["credits", "room", "arrival"],
)
def test_without_one_of_its_waits_there_is_a_race(line: str, kind: str, world_size: int) -> None:
    indent = line[: len(line) - len(line.lstrip())]
    rest = "\n        for step" if "for step" in line else ""
    mutant = changed(key_transport, "RingKeys", line, f"{indent}pass{rest}")
    with mock.patch.dict(key_transport.WAYS, ring=mutant):
        assert found(RING_TARGET, world_size, kind)


def test_its_memory_does_not_grow_with_the_ranks() -> None:
    def on_rank(method: str) -> int:
        q = torch.zeros(1, 64, 2, 64, requires_grad=True)
        how: Any = {"method": method, "algorithm": "pipelined"}
        nn.functional.context_parallel_attention(q, q, q, **how).sum().backward()
        return default_group().workspace_bytes

    held = {
        (m, w): max(interlace.run(on_rank, w, m)) for m in ("ring", "all_gather") for w in (3, 8)
    }
    assert held["ring", 8] == held["ring", 3] and held["all_gather", 8] > held["all_gather", 3]
