"""The plain collectives against gloo's."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from cpu.measure import Case

import interlace

ELEMENTS = [1 << 10, 1 << 16, 1 << 20]


def cases(op: str) -> Iterator[Case]:
    """All-gather, reduce-scatter and all-reduce of float32 tensors; run on every rank."""
    for count in ELEMENTS:
        part = torch.randn(count)
        whole = torch.randn(count * interlace.get_world_size())
        for name, theirs, ours in (
            (
                "all_gather",
                partial(dist.all_gather_into_tensor, whole, part),
                partial(interlace.all_gather, whole, part),
            ),
            (
                "reduce_scatter",
                partial(dist.reduce_scatter_tensor, part, whole),
                partial(interlace.reduce_scatter, part, whole),
            ),
            (
                "all_reduce",
                partial(dist.all_reduce, part, op=dist.ReduceOp.AVG),
                partial(interlace.all_reduce, part, "avg"),
            ),
        ):
            shape: dict[str, int | str] = {"elements": count, "dtype": "float32"}
            yield Case(name, shape, "gloo", {"gloo": theirs, "copy": ours})
