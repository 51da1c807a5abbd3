"""The plain collectives against gloo's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from measure import Case

import interlace

ELEMENTS = [1 << 10, 1 << 16, 1 << 20]


def cases() -> Iterator[Case]:
    """All-gather, reduce-scatter and all-reduce of float32 tensors; run on every rank."""
    world_size = interlace.get_world_size()
    for count in ELEMENTS:
        part = torch.randn(count)
        whole = torch.randn(count * world_size)
        shape: dict[str, int | str] = {"elements": count, "dtype": "float32"}
        yield Case(
            "all_gather",
            shape,
            "gloo",
            {
                "gloo": lambda o=whole, i=part: dist.all_gather_into_tensor(o, i),  # type: ignore[misc]
                "copy": lambda o=whole, i=part: interlace.all_gather(o, i),  # type: ignore[misc]
            },
        )
        yield Case(
            "reduce_scatter",
            shape,
            "gloo",
            {
                "gloo": lambda o=part, i=whole: dist.reduce_scatter_tensor(o, i),  # type: ignore[misc]
                "copy": lambda o=part, i=whole: interlace.reduce_scatter(o, i),  # type: ignore[misc]
            },
        )
        yield Case(
            "all_reduce",
            shape,
            "gloo",
            {
                "gloo": lambda x=part: dist.all_reduce(x, op=dist.ReduceOp.AVG),  # type: ignore[misc]
                "copy": lambda x=part: interlace.all_reduce(x, "avg"),  # type: ignore[misc]
            },
        )
