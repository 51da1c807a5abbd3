"""A mixture of experts on 4 simulated ranks, 2 experts each: route, fused dispatch and matmul, way back.

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
    own = slice(rank * per_rank, (rank + 1) * per_rank)

    # Route: a row per token and expert, sorted by expert.
    weights, chosen = (tokens @ ROUTER).softmax(-1).topk(TOPK)
    order = chosen.flatten().argsort(stable=True)
    sent = torch.bincount(chosen.flatten(), minlength=EXPERTS)

    # Each row travels to its expert's rank, and is multiplied when it arrives.
    hidden, received = interlace.all_to_all_grouped_matmul(
        tokens[order // TOPK], UP[own], sent, activation="silu"
    )

    # The second matmul, by expert; then rows in the order of their sources, and home.
    by_expert = hidden.split(received.sum(1).tolist())
    result = torch.cat([rows @ weight for rows, weight in zip(by_expert, DOWN[own], strict=True)])
    parts = result.split(received.flatten().tolist())  # by expert, then source
    by_source = torch.cat([part for s in range(world_size) for part in parts[s::world_size]])
    home = torch.empty(len(order), MODEL)
    interlace.all_to_all_single(
        home, by_source, sent.view(world_size, -1).sum(1).tolist(), received.sum(0).tolist()
    )

    # Back in the order of tokens, and combined.
    rows = torch.empty_like(home)
    rows[order] = home
    return (rows.view(TOKENS, TOPK, MODEL) * weights.unsqueeze(-1)).sum(1)


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
