"""Dispatch, combine, grouped matmul + combine on a stand-in for CUDA, whatever runs first."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace import experts
from interlace.groups.groups import default_group
from interlace.runtime.places.gpu.agreement import Agreement
from sim.cuda.test_cuda_streams import RUNS, filled, read
from stand_ins import fake_host
from stand_ins.fake_cuda import FakeGpu
from stand_ins.fake_driver import install
from tiers import few

TOKENS, TOPK = 6, 2


def exercise(gpu: FakeGpu, rounds: int = 3) -> Callable[[], bool]:
    """Run several ops in flight, with other numbers of rows in every round."""

    def on_rank() -> bool:
        rank, world_size = interlace.get_rank(), interlace.get_world_size()
        seen: list[tuple[torch.Tensor, float]] = []
        outputs: list[list[torch.Tensor]] = []
        sums: list[torch.Tensor] = []
        for number in range(rounds):
            value = 10.0 * number + rank + 1
            first = torch.arange(TOKENS) + rank + number
            idx = torch.stack([first, first + 1], 1) % (2 * world_size)
            how: dict[str, Any] = {"algorithm": "fused" if number else "unfused", "async_op": True}
            bound = {"num_max_dispatch_tokens_per_rank": TOKENS} if number == 1 else {}
            x = filled(gpu, value, TOKENS, 16)
            work = experts.dispatch(x, idx, None, 2 * world_size, **bound, **how)
            received, handle = work.wait()
            doubled = filled(gpu, 0.0, *received.x.shape)
            gpu.do(lambda to=doubled, of=received.x: to.copy_(of * 2))
            work = experts.combine(doubled, handle, **how)
            splits = [[0] * world_size for _ in range(2)]
            for source in range(world_size):
                theirs = torch.arange(TOKENS) + source + number
                chosen = torch.stack([theirs, theirs + 1], 1) % (2 * world_size)
                for e in range(2):
                    splits[e][source] = int((chosen == 2 * rank + e).sum())
            rows = filled(gpu, value, sum(map(sum, splits)), 16)
            weight = torch.eye(16).expand(2, 16, 16).contiguous()
            flat = [count for each in splits for count in each]
            products = [
                interlace.grouped_matmul_combine(
                    rows, weight, flat, idx, algorithm=algorithm, async_op=True
                )
                for algorithm in ("fused", "pipelined", "unfused")
            ]
            sent = torch.bincount(idx.flatten(), minlength=2 * world_size)
            bound = {"num_max_rows_per_rank": TOKENS * TOPK, "algorithm": "fused", "async_op": True}
            rows = filled(gpu, value, TOKENS * TOPK, 16)
            counted = interlace.all_to_all_grouped_matmul(rows, weight, sent, **bound)
            seen.append((read(gpu, work.wait()), 2 * TOPK * value))
            outputs.append([read(gpu, product.wait()) for product in products])
            # a row is the number of its expert's rank
            sums.append((10.0 * number + 1 + idx // 2).sum(1, keepdim=True).expand(TOKENS, 16))
            outputs.append([read(gpu, counted.wait()[0])])
            came = torch.tensor([10.0 * number + source + 1 for source in range(world_size)])
            came = came.repeat(2).repeat_interleave(torch.tensor(flat))
            rest = world_size * TOKENS * TOPK - len(came)
            sums.append(torch.nn.functional.pad(came, (0, rest)).unsqueeze(1).expand(-1, 16))
        torch.cuda.synchronize()
        right = all(bool((tensor == value).all()) for tensor, value in seen)
        pairs = zip(outputs, sums, strict=True)
        return right and all(torch.equal(one, expected) for each, expected in pairs for one in each)

    return on_rank


Gpus = Callable[..., FakeGpu]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Install the stand-in of this seed."""
    return lambda seed, eager: install(monkeypatch, FakeGpu(seed, eager=eager))


@RUNS
@pytest.mark.parametrize("seed", range(4))
def test_whatever_runs_first(run: Any, seed: int, gpus: Gpus) -> None:
    gpu = gpus(seed, 0.5 if seed % 2 else 0.05)
    assert all(run(exercise(gpu), 3))
    names = "dispatch_send", "dispatch_receive", "combine", "grouped_matmul_combine"
    for name in (*names, "counted_grouped_matmul"):
        assert f"{name}_kernel" in gpu.launches


@RUNS
@pytest.mark.parametrize("algorithm", ["fused", "pipelined", "unfused"])
@pytest.mark.parametrize("bound", [{}, {"num_max_rows_per_rank": 4}], ids=["splits", "bound"])
def test_a_lone_rank_waits_for_its_caller(run: Any, bound: Any, algorithm: str, gpus: Gpus) -> None:
    """No collective comes first that would delay the products until the rows are there."""
    gpu = gpus(0, 0.05)

    def on_rank() -> bool:
        seen = []
        for number in range(4):
            rows, how = filled(gpu, 1.0 + number, 4, 16), {"algorithm": algorithm, **bound}
            given: Any = rows, torch.eye(16)[None], torch.tensor([4])
            work: Any = interlace.all_to_all_grouped_matmul(*given, async_op=True, **how)
            seen.append(read(gpu, work.wait()[0]))
        torch.cuda.synchronize()
        return all(bool((each == 1.0 + number).all()) for number, each in enumerate(seen))

    assert run(on_rank, 1) == [True]


# -- repeated calls ----------------------------------------------------------------------------------

READS = "item", "tolist", "cpu", "numpy", "__int__", "__bool__", "__float__", "__index__"
ROUNDS, KNOWN = 8, 4


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.local, list[str]]:
    """Make the host wait if ``of.this`` is set: in reads of tensors, and in messages of others."""
    of, seen = threading.local(), []

    def noted(owner: type, name: str) -> None:
        known = getattr(owner, name)

        def noting(*args: Any, **more: Any) -> Any:
            if getattr(of, "this", False):
                seen.append(name)
            return known(*args, **more)

        monkeypatch.setattr(owner, name, noting)

    for name in READS:
        noted(torch.Tensor, name)
    for name in ("_exchange", "_asked_again"):
        noted(Agreement, name)
    noted(FakeGpu, "synchronize")
    return of, seen


def layer(x: torch.Tensor, idx: torch.Tensor, kind: str) -> list[torch.Tensor]:
    """Expert e multiplies by e, and then by 1."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    weights = torch.ones(idx.shape) if kind != "unweighted" else None
    if kind == "two ops":
        rows, sent = experts.permute(x, idx, 2 * world_size, num_out_tokens=idx.numel())
        bound = {"num_max_rows_per_rank": (TOKENS + 1) * TOPK}
        weight = torch.stack([(2 * rank + e + 1) * torch.eye(16) for e in range(2)])
        hidden, home = interlace.all_to_all_grouped_matmul(rows, weight, sent, **bound)
        eye = torch.eye(16).expand(2, 16, 16)
        return [interlace.grouped_matmul_combine(hidden, eye, home, idx, weights)]
    if kind == "low latency":
        few = x, idx, TOKENS + 1, 2 * world_size
        received, handle = experts.low_latency_dispatch(*few, use_fp8=False, algorithm="fused")
        handle = handle._replace(topk_weights=weights)
    else:
        bound = None if kind == "as long as it is" else TOKENS + 1
        how: dict[str, Any] = {"num_max_dispatch_tokens_per_rank": bound, "capacity": TOKENS}
        received, handle = experts.dispatch(
            x, idx, weights, 2 * world_size, **how, algorithm="fused"
        )
    if kind == "as long as it is":
        torch.cuda.synchronize()  # reading a tensor of this GPU's does not
    weight = torch.stack([(2 * rank + e) * torch.eye(16) for e in range(2)])
    return [
        interlace.grouped_matmul_combine(received.x, weight, handle, algorithm="fused"),
        experts.combine(received.x, handle, algorithm="fused"),
    ]


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_host_waits_for_nothing_in_a_combine(world_size: int, held_up: Any, gpus: Gpus) -> None:
    of, seen = held_up
    gpus(3, 0.0)

    def on_rank() -> None:
        for number in range(ROUNDS):
            tokens = TOKENS - (interlace.get_rank() + number) % 3
            x, idx = torch.ones(tokens, 16), torch.arange(2 * tokens).view(-1, 2) + number
            how: Any = {"algorithm": "fused"}
            received, handle = experts.dispatch(x, idx % world_size, None, world_size, **how)
            torch.cuda.synchronize()
            of.this = number >= KNOWN
            result = experts.combine(received.x, handle, **how)
            of.this = False
            torch.cuda.synchronize()
            assert torch.equal(result, 2 * x)

    fake_host.run(on_rank, world_size)
    assert not seen, seen


KINDS = "weighted", "unweighted", "low latency", "as long as it is", "two ops"
EVERY = itertools.product(KINDS, (1, 3))


@pytest.mark.parametrize(
    ("kind", "world_size"),
    few(EVERY, ("weighted", 3), ("as long as it is", 3), ("two ops", 3)),
)
def test_the_host_waits_for_nothing_when_a_call_is_repeated(
    kind: str, world_size: int, held_up: Any, gpus: Gpus
) -> None:
    of, seen = held_up
    gpus(3, 0.0)  # which does nothing while a host enqueues

    def on_rank() -> int:
        rank, tokens = interlace.get_rank(), TOKENS - interlace.get_rank()
        wrong, plans, known = [], default_group().plans, 0
        for number in range(ROUNDS):
            if number == KNOWN:
                known = plans.hits
            generator = torch.Generator().manual_seed(10 * number + rank)
            x = torch.randint(-3, 4, (tokens, 16), generator=generator).float()
            first = torch.randint(0, 2 * world_size, (tokens,), generator=generator)
            second = first + 1 + number % (2 * world_size - 1)
            idx = torch.stack([first, second % (2 * world_size)], 1)
            idx[0, 0] = -1
            of.this = number >= KNOWN
            results = layer(x, idx, kind)
            of.this = False
            torch.cuda.synchronize()
            times = (idx + 1).sum(1, keepdim=True)  # 0 for the slot without an expert
            if not torch.equal(sum(results), x * times):  # type: ignore[arg-type]
                wrong.append(number)
        assert not wrong, wrong
        return int(plans.hits - known)

    hits = fake_host.run(on_rank, world_size)
    if kind == "as long as it is":  # then it waits, which is seen
        assert {"tolist", *(["_exchange"] if world_size > 1 else [])} <= set(seen), seen
        return
    assert not seen, seen
    ops = 2 if kind == "two ops" else 3
    assert hits == [ops * (ROUNDS - KNOWN)] * world_size, hits
