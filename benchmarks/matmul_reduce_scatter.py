"""matmul_reduce_scatter against torch.mm followed by gloo's reduce-scatter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from measure import Case

import interlace

SHAPES = [(256, 512, 512), (1024, 1024, 1024), (2048, 1024, 2048), (4096, 1024, 512)]


def cases() -> Iterator[Case]:
    """One case per shape; run on every rank."""
    world_size = interlace.get_world_size()
    for m, n, k in SHAPES:
        generator = torch.Generator().manual_seed(interlace.get_rank())
        activations = torch.randn(m, k, generator=generator)
        weight = torch.randn(n, k, generator=generator).t()
        output = torch.empty(m // world_size, n)

        def baseline(a=activations, b=weight, output=output):  # type: ignore[no-untyped-def]
            dist.reduce_scatter_tensor(output, torch.mm(a, b))

        def ours(algorithm, a=activations, b=weight):  # type: ignore[no-untyped-def]
            interlace.matmul_reduce_scatter(a, b, algorithm=algorithm)

        yield Case(
            "matmul_reduce_scatter",
            {"m": m, "n": n, "k": k, "dtype": "float32"},
            "torch.mm + gloo",
            {
                "torch.mm + gloo": baseline,
                "pipelined": lambda ours=ours: ours("pipelined"),  # type: ignore[misc]
                "unfused": lambda ours=ours: ours("unfused"),  # type: ignore[misc]
                "torch.mm alone": lambda a=activations, b=weight: torch.mm(a, b),  # type: ignore[misc]
            },
        )
