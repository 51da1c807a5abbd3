"""Lengths of zero, in every place a length can be: each has its own way through the code."""

import pytest
import torch

import interlace
from support import noise, poisoned

ALGORITHMS = ("fused", "pipelined", "unfused", "auto")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("lead", [(4,), (2, 3), (0,), (2, 0)])
def test_no_inner_length_gives_the_bias(algorithm: str, lead: tuple[int, ...]) -> None:
    """K = 0: sums of nothing are zero."""
    bias = torch.tensor([1.0, 2.0])

    def on_rank() -> list[torch.Tensor]:
        x, w = torch.empty(*lead, 0), torch.empty(0, 2)
        options = {"bias": bias, "algorithm": algorithm}
        return [
            interlace.all_gather_matmul(x, w, **options),
            interlace.matmul_reduce_scatter(x, w, **options),
            interlace.matmul_reduce_scatter(x, w, scatter_dim=-1, **options),
            interlace.matmul_all_reduce(x, w, **options),
        ]

    with poisoned():
        results = interlace.run(on_rank, 2)
    for rank, (gathered, part, columns, whole) in enumerate(results):
        assert torch.equal(gathered, bias.expand(2 * lead[0], *lead[1:], 2))
        assert torch.equal(part, bias.expand((lead[0] + 1 - rank) // 2, *lead[1:], 2))
        assert torch.equal(columns, bias[rank : rank + 1].expand(*lead, 1))
        assert torch.equal(whole, bias.expand(*lead, 2))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_without_inner_length(algorithm: str) -> None:
    def on_rank() -> torch.Tensor:
        rank = interlace.get_rank()
        x, w = torch.ones(3, 2 * rank), torch.ones(2 * rank, 4)
        return interlace.matmul_all_reduce(x, w, algorithm=algorithm)

    with poisoned():
        for result in interlace.run(on_rank, 3):
            assert torch.equal(result, torch.full((3, 4), 6.0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_columns_still_gathers(algorithm: str) -> None:
    def on_rank() -> tuple[torch.Tensor, list[torch.Tensor]]:
        shard = noise(interlace.get_rank(), 1, (3, 8))
        weights = [torch.empty(8, 0), torch.empty(8, 0)]
        return interlace.all_gather_matmul(
            shard, weights, return_gathered=True, algorithm=algorithm
        )

    with poisoned():
        for gathered, outputs in interlace.run(on_rank, 2):
            assert torch.equal(gathered, torch.cat([noise(r, 1, (3, 8)) for r in range(2)]))
            assert [output.shape for output in outputs] == [(6, 0), (6, 0)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_without_columns_still_sends(algorithm: str) -> None:
    """n may differ between ranks; one that computes nothing must send and must not fall behind."""

    def on_rank() -> list[torch.Tensor]:
        rank, kept = interlace.get_rank(), []
        for call in range(4):
            weight = noise(0, 50, (8, 0 if rank == 0 else 5))
            gathered, _ = interlace.all_gather_matmul(
                noise(rank, call, (4, 8)), weight, algorithm=algorithm, return_gathered=True
            )
            kept.append(gathered)
        return kept

    for seed in range(3):
        with poisoned():
            results = interlace.run(on_rank, 3, seed=seed)
        for kept in results:
            for call, gathered in enumerate(kept):
                assert torch.equal(gathered, torch.cat([noise(r, call, (4, 8)) for r in range(3)]))
