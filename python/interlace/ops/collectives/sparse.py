"""all_reduce of sparse COO tensors: every rank gets all entries, and sums them by index in rank order.

A rank's entries are its own sums, so this moves world_size times what one rank holds; for tensors with few
entries, such as the gradients of embeddings, that is less than the dense tensor. Sums are taken in fp32 of
narrower floats, in int64 of whole numbers, and brought to the tensor's dtype once, as the dense op does.
"""

from typing import Any

import torch

from interlace.arguments import checks, reduce_ops
from interlace.runtime.core.call import Call, PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.numerics import reductions

NAME = "all_reduce"


def _wide(values: torch.Tensor) -> torch.Tensor:
    """``values`` in a dtype whose sums need be brought to theirs only at the end, see :func:`_narrow`."""
    dtype = values.dtype
    if dtype in reductions.NARROW_FLOATS:
        return values.to(torch.float32)
    if dtype.is_floating_point or dtype.is_complex:
        return values.to(torch.complex64) if dtype == torch.complex32 else values
    return values.view(torch.int64) if dtype == torch.uint64 else values.to(torch.int64)


def _narrow(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.view(dtype) if dtype == torch.uint64 else values.to(dtype)


def _summed(
    indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each index once, and the sum of its ``values``, from left to right."""
    shape = (*like.shape[: like.sparse_dim()], *values.shape[1:])
    total = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False).coalesce()
    return total.indices(), total.values()


def _checked(communicator: Communicator, tensor: torch.Tensor, op: Any = "sum") -> PreparedCall:
    engine, place = communicator.engine, communicator.place
    if tensor.layout is not torch.sparse_coo:
        raise TypeError(f"tensor must be dense or sparse COO, got {tensor.layout}")
    if tensor.device.type != place.device.type:
        raise ValueError(f"tensor is on {tensor.device}, the group's memory on {place.device}")
    name, _ = checks.reduce_op(op)
    checks.one_of("op of a sparse all_reduce", name, checks.REDUCE_OPS)
    reduce_ops.check_dtype(NAME, name, "tensor", tensor.dtype)
    dtype, mine = tensor.dtype, tensor.detach()
    own, values = _summed(mine._indices(), _wide(mine._values()), mine)
    if not (dtype.is_floating_point or dtype.is_complex):
        values = _narrow(values, dtype)  # a rank's own sum wraps around
    indices, values = own.t().contiguous(), values.contiguous()
    terms = (
        ("shape of tensor", tuple(tensor.shape)),
        ("sparse dims of tensor", tensor.sparse_dim()),
        ("dtype of tensor", f"{tensor.dtype}, sparse COO"),
        ("op", name),
    )
    call = Call(NAME, terms, part=len(indices))

    def start() -> None:
        counts, everyones = engine.agree(call), []
        for what, part in (("indices", indices), ("values", values)):
            parts = [part.new_empty((count, *part.shape[1:])) for count in counts]
            about = (("part of a sparse tensor", what), ("dtype of tensor", part.dtype))
            event = engine.all_gather(Call(NAME, about), parts, part)
            if event is not None:
                event.synchronize()
            everyones.append(torch.cat(parts))
        rows, entries = everyones
        rows, total = _summed(rows.t(), _wide(entries), mine)
        if name == "avg":
            reductions.divide(
                total.view(dtype) if dtype == torch.uint64 else total, communicator.world_size
            )
        result = torch.sparse_coo_tensor(
            rows, _narrow(total, dtype), tensor.shape, check_invariants=False, is_coalesced=True
        )
        with torch.no_grad():  # a detached sparse tensor has entries of its own
            tensor.copy_(result)

    return start, (tensor,), call


_all_reduce = internal_form(NAME, _checked)
