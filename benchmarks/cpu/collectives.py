"""The plain collectives against gloo's."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from cpu.measure import Case, Shape

import interlace

ELEMENTS = [1 << 10, 1 << 16, 1 << 20]


def cases(op: str) -> Iterator[Case]:
    """All-gather, reduce-scatter and all-reduce of float32 tensors; run on every rank."""
    for count in ELEMENTS:
        part = torch.randn(count)
        whole = torch.randn(count * interlace.get_world_size())
        average = partial(dist.all_reduce, op=dist.ReduceOp.AVG)
        for name, theirs, *tensors in (
            ("all_gather", dist.all_gather_into_tensor, whole, part),
            ("reduce_scatter", dist.reduce_scatter_tensor, part, whole),
            ("all_reduce", average, part),
        ):
            how = {"op": "avg"} if name == "all_reduce" else {}
            ours = partial(getattr(interlace, name), *tensors, **how)
            shape: Shape = {"elements": count, "dtype": "float32"}
            yield Case(name, shape, "gloo", {"gloo": partial(theirs, *tensors), "copy": ours})
