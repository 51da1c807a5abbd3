"""A mixture of experts on 4 simulated ranks, 2 experts each, by two fused ops; compared with a dense one.

python docs/examples/mixture_of_experts.py
"""

import torch

import interlace

RANKS, EXPERTS, TOKENS, MODEL, HIDDEN, TOPK = 4, 8, 6, 16, 32, 2
torch.manual_seed(0)
ROUTER = torch.randn(MODEL, EXPERTS)
UP = torch.randn(EXPERTS, MODEL, HIDDEN) / MODEL**0.5
DOWN = torch.randn(EXPERTS, HIDDEN, MODEL) / HIDDEN**0.5
ALL_TOKENS = torch.randn(RANKS, TOKENS, MODEL)


def layer() -> torch.Tensor:
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    tokens, per_rank = ALL_TOKENS[rank], EXPERTS // world_size
    local = slice(rank * per_rank, (rank + 1) * per_rank)

    # Route: a row per token and expert, sorted by expert.
    weights, chosen = (tokens @ ROUTER).softmax(-1).topk(TOPK)
    rows, sent = interlace.experts.permute(tokens, chosen, EXPERTS)

    # Each row travels to its expert's rank, and is multiplied when it arrives.
    hidden, splits = interlace.all_to_all_grouped_matmul(rows, UP[local], sent, activation="silu")

    # Each product travels to its token's rank as soon as it is computed. That rank sums a token's products.
    return interlace.grouped_matmul_combine(hidden, DOWN[local], splits, chosen, weights)


def dense(tokens: torch.Tensor) -> torch.Tensor:
    """The result without ranks: every token through its experts."""
    weights, chosen = (tokens @ ROUTER).softmax(-1).topk(TOPK)
    hidden = torch.nn.functional.silu(torch.einsum("tm,temh->teh", tokens, UP[chosen]))
    return torch.einsum("te,teh,tehm->tm", weights, hidden, DOWN[chosen])


if __name__ == "__main__":
    results = interlace.run(layer, RANKS)
    worst = max((a - dense(x)).abs().max() for a, x in zip(results, ALL_TOKENS, strict=True))
    print(f"largest difference from a dense layer: {worst:.0e}")
    assert worst < 1e-5
