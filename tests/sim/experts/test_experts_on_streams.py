"""Dispatch, combine, grouped matmul + combine on a stand-in for CUDA, whatever runs first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace import experts
from sim.cuda.test_cuda_streams import RUNS, filled, read
from stand_ins.fake_cuda import FakeGpu
from stand_ins.fake_driver import install

TOKENS, TOPK = 6, 2


def exercise(gpu: FakeGpu, rounds: int = 3) -> Callable[[], bool]:
    """Rows of other numbers in every round, several ops in flight."""

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
            seen.append((read(gpu, work.wait()), 2 * TOPK * value))
            outputs.append([read(gpu, product.wait()) for product in products])
            # a row is the number of its expert's rank
            sums.append((10.0 * number + 1 + idx // 2).sum(1, keepdim=True).expand(TOKENS, 16))
        torch.cuda.synchronize()
        right = all(bool((tensor == value).all()) for tensor, value in seen)
        pairs = zip(outputs, sums, strict=True)
        return right and all(torch.equal(one, expected) for each, expected in pairs for one in each)

    return on_rank


@RUNS
@pytest.mark.parametrize("seed", range(4))
def test_whatever_runs_first(run: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch, FakeGpu(seed, eager=0.5 if seed % 2 else 0.05))
    assert all(run(exercise(gpu), 3))
    for name in ("dispatch_send", "dispatch_receive", "combine", "grouped_matmul_combine"):
        assert f"{name}_kernel" in gpu.launches
