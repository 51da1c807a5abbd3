"""all_reduce of sparse COO tensors: every rank gets all entries, and sums them by index in rank order.

The entries of a rank travel as they are, so this moves world_size times what one rank holds; for tensors
with few entries, such as the gradients of embeddings, that is less than the dense tensor.
"""

from typing import Any

import torch

from interlace.arguments import checks, reduce_ops
from interlace.runtime.core.call import Call, PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form

NAME = "all_reduce"


def _checked(communicator: Communicator, tensor: torch.Tensor, op: Any = "sum") -> PreparedCall:
    engine, place = communicator.engine, communicator.place
    if tensor.layout is not torch.sparse_coo:
        raise TypeError(f"tensor must be dense or sparse COO, got {tensor.layout}")
    if tensor.device.type != place.device.type:
        raise ValueError(f"tensor is on {tensor.device}, the group's memory on {place.device}")
    name, _ = checks.reduce_op(op)
    checks.one_of("op of a sparse all_reduce", name, checks.REDUCE_OPS)
    reduce_ops.check_dtype(NAME, name, "tensor", tensor.dtype)
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
    terms = (
        ("layout", "sparse COO"),
        ("shape of tensor", tuple(tensor.shape)),
        ("sparse dims of tensor", tensor.sparse_dim()),
        ("dtype of tensor", tensor.dtype),
        ("op", name),
    )
    call = Call(NAME, terms, part=len(indices))

    def start() -> None:
        counts, everyones = engine.parts(call), []
        for what, part in (("indices", indices), ("values", values)):
            parts = [part.new_empty((count, *part.shape[1:])) for count in counts]
            about = (("part of a sparse tensor", what), ("dtype of tensor", part.dtype))
            event = engine.all_gather(Call(NAME, about), parts, part)
            if event is not None:
                event.synchronize()
            everyones.append(torch.cat(parts))
        rows, entries = everyones
        total = torch.sparse_coo_tensor(
            rows.t(), entries, tensor.shape, check_invariants=False
        ).coalesce()
        if name == "avg":
            total = total / communicator.world_size
        with torch.no_grad():  # a detached sparse tensor has entries of its own
            tensor.copy_(total)

    return start, (tensor,), call


_all_reduce = internal_form(NAME, _checked)
