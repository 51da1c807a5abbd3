"""matmul_all_reduce against torch.mm followed by gloo's all-reduce."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from measure import Case

import interlace

SHAPES = [(16, 1024, 1024), (256, 512, 512), (1024, 1024, 1024), (4096, 1024, 512)]


def cases() -> Iterator[Case]:
    """One case per shape; run on every rank."""
    for m, n, k in SHAPES:
        generator = torch.Generator().manual_seed(interlace.get_rank())
        activations = torch.randn(m, k, generator=generator)
        weight = torch.randn(n, k, generator=generator).t()

        def baseline(a=activations, b=weight):  # type: ignore[no-untyped-def]
            dist.all_reduce(torch.mm(a, b))

        def ours(algorithm, a=activations, b=weight):  # type: ignore[no-untyped-def]
            interlace.matmul_all_reduce(a, b, algorithm=algorithm)

        yield Case(
            "matmul_all_reduce",
            {"m": m, "n": n, "k": k, "dtype": "float32"},
            "torch.mm + gloo",
            {
                "torch.mm + gloo": baseline,
                "pipelined": lambda ours=ours: ours("pipelined"),  # type: ignore[misc]
                "unfused": lambda ours=ours: ours("unfused"),  # type: ignore[misc]
                "torch.mm alone": lambda a=activations, b=weight: torch.mm(a, b),  # type: ignore[misc]
            },
        )
