"""all_gather_matmul against gloo's all-gather followed by torch.mm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from measure import Case

import interlace

# M is the gathered length; (N, K) are per-rank layers of models from 0.1 to 8 billion parameters
SHAPES = [(256, 512, 512), (1024, 1024, 1024), (2048, 1024, 2048), (4096, 2048, 1024)]


def cases() -> Iterator[Case]:
    """One case per shape; run on every rank."""
    world_size = interlace.get_world_size()
    for m, n, k in SHAPES:
        generator = torch.Generator().manual_seed(interlace.get_rank())
        shard = torch.randn(m // world_size, k, generator=generator)
        weight = torch.randn(n, k, generator=generator).t()
        gathered = torch.empty(m, k)

        def baseline(shard=shard, weight=weight, gathered=gathered):  # type: ignore[no-untyped-def]
            dist.all_gather_into_tensor(gathered, shard)
            torch.mm(gathered, weight)

        def ours(algorithm, shard=shard, weight=weight):  # type: ignore[no-untyped-def]
            interlace.all_gather_matmul(shard, weight, algorithm=algorithm)

        yield Case(
            "all_gather_matmul",
            {"m": m, "n": n, "k": k, "dtype": "float32"},
            "gloo + torch.mm",
            {
                "gloo + torch.mm": baseline,
                "pipelined": lambda ours=ours: ours("pipelined"),  # type: ignore[misc]
                "unfused": lambda ours=ours: ours("unfused"),  # type: ignore[misc]
                "torch.mm alone": lambda a=gathered, b=weight: torch.mm(a, b),  # type: ignore[misc]
            },
        )
