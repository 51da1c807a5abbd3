"""The matmul between a dispatch and what takes its rows home."""

import torch

from interlace.ops.experts.routed_combine import grouped_on_device, multiplied, multiply_in_graph
from interlace.ops.experts.routing import Received
from interlace.runtime.compat.torch_modes import modes_active

Tensor = torch.Tensor


def multiply(received: Received, weight: Tensor) -> Tensor:
    """Every row of ``received.x`` times the weight of its expert, by torch; without communication.

    ``weight`` ``(experts of this rank, hidden, n)``, of the dtype of ``received.x``; the result is ``(rows,
    n)``, of low latency ``(experts, most rows, n)``; where nothing came it may be anything. Gradients go to
    both. No host of a GPU waits for counts if the rows are of low latency, or bfloat16 whose strides are
    multiples of 16 bytes, for which torch has a grouped matmul. Raises ValueError for other shapes,
    TypeError for what has no rows of a dispatch or is no tensor. Semantics:
    ``torch._grouped_mm(received.x, weight, offs=received.offsets)``, ``torch.bmm``.

    >>> def on_rank():
    ...     tokens, chosen = torch.ones(2, 4), torch.tensor([[0], [1]])
    ...     received, handle = interlace.experts.dispatch(tokens, chosen, None, 2)
    ...     y = interlace.experts.multiply(received, torch.full((1, 4, 1), 1.0 + interlace.get_rank()))
    ...     return interlace.experts.combine(y, handle).flatten().tolist()
    >>> interlace.run(on_rank, 2)
    [[4.0, 8.0], [4.0, 8.0]]
    """
    if not isinstance(received, Received):
        raise TypeError(f"received must be what a dispatch has, got {type(received).__name__}")
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a tensor, got {type(weight).__name__}")
    x, experts = received.x, received.segments.shape[0]
    if weight.dim() != 3 or (experts, x.shape[-1]) != tuple(weight.shape[:2]):
        raise ValueError(
            f"weight must have shape ({experts}, {x.shape[-1]}, n) for these rows, got "
            f"{tuple(weight.shape)}"
        )
    if x.dim() == 3:
        return torch.bmm(x, weight)
    if grouped_on_device(x, weight):
        return torch._grouped_mm(x, weight, offs=received.offsets)
    traced = torch.compiler.is_compiling() or modes_active()
    return (multiply_in_graph if traced else multiplied)(x, weight, received.segments)
