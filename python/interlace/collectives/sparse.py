"""all_reduce of sparse COO tensors: every rank gets all entries, and sums them by index in rank order.

The entries of a rank travel as they are, so this moves world_size times what one rank holds; for tensors
with few entries, such as the gradients of embeddings, that is less than the dense tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from interlace.arguments import checks, reduce_ops
from interlace.runtime.core.call import Call, PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.engine import Engine

NAME = "all_reduce"
OPS = ("sum", "avg")


def _checked(communicator: Communicator, tensor: Any, op: Any) -> tuple[torch.Tensor, str]:
    rank, here = communicator.rank, communicator.place.device.type
    if tensor.layout is not torch.sparse_coo:
        raise TypeError(f"tensor must be dense or sparse COO, got {tensor.layout} on rank {rank}")
    if tensor.device.type != here:
        raise ValueError(
            f"tensor is on {tensor.device}, the group's memory on "
            f"{communicator.place.device}, on rank {rank}"
        )
    name, _ = checks.reduce_op(op, rank)
    checks.one_of("op of a sparse all_reduce", name, OPS, rank)
    reduce_ops.check_dtype(NAME, name, "tensor", tensor.dtype, rank)
    return tensor.detach(), name


def _prepared(communicator: Communicator, tensor: torch.Tensor, op: Any = "sum") -> PreparedCall:
    """Reduce a sparse COO ``tensor`` over ranks, in place; it is coalesced afterwards.

    ``op``: sum or avg. Ranks may hold entries at different indices. Raises ValueError or TypeError on
    every rank if shapes, numbers of sparse dims, dtypes or ops differ.
    """
    data, name = _checked(communicator, tensor, op)
    mine = data.coalesce()
    indices, values = mine.indices(), mine.values().contiguous()
    terms = (
        ("layout", "sparse COO"),
        ("shape of tensor", tuple(data.shape)),
        ("sparse dims of tensor", data.sparse_dim()),
        ("dtype of tensor", data.dtype),
        ("op", name),
    )
    call = Call(NAME, terms, part=int(indices.shape[1]))

    def start() -> None:
        counts = communicator.engine.parts(call)
        everyones = [
            _gathered(communicator.engine, part, what, [_rows(part, count) for count in counts])
            for what, part in (("indices", indices.t().contiguous()), ("values", values))
        ]
        rows, entries = (torch.cat(parts) for parts in everyones)
        total = torch.sparse_coo_tensor(
            rows.t(), entries, data.shape, check_invariants=False
        ).coalesce()
        if name == "avg":
            total = total / communicator.world_size
        with torch.no_grad():  # a detached sparse tensor has entries of its own
            tensor.copy_(total)

    return PreparedCall(start, (tensor,), call)


_all_reduce = internal_form(NAME, _prepared)


def _rows(like: torch.Tensor, count: int) -> torch.Tensor:
    return like.new_empty((count, *like.shape[1:]))


def _gathered(
    engine: Engine, part: torch.Tensor, what: str, parts: list[torch.Tensor]
) -> list[torch.Tensor]:
    """``parts``, one per rank, filled and ready to be read."""
    call = Call(NAME, (("part of a sparse tensor", what), ("dtype of tensor", part.dtype)))
    event = engine.all_gather(call, parts, part)
    if event is not None:
        event.synchronize()
    return parts
