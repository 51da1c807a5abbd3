"""Nodes of torch's graph for the ops of this package, whose backward is collective.

torch's engine decides when it runs, so ranks whose graphs differ may come to two ops in different order.
The ops of a group are counted, and before a gradient moves the ranks compare which op they are at.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from interlace.ops.op.sim_backward import prepare
from interlace.runtime.core.communicator import Communicator
from interlace.tensor.uneven import facts

Gradient = Callable[[torch.Tensor | None], torch.Tensor | None]

_count: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


class _Recorded(torch.autograd.Function):
    """Communicates nothing in forward: what it returns is there already."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, result: list[torch.Tensor], gradient: Gradient, own: bool
    ) -> torch.Tensor:
        ctx.gradient, ctx.own = gradient, own
        ctx.set_materialize_grads(False)  # zeros for a placeholder would be as large as the whole
        return result[0]  # not an argument of its own, or what is returned would be a view of it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:
        of_input = ctx.gradient(grad)
        return of_input if ctx.own else None, None, None, None


def recorded(
    communicator: Communicator,
    op: str,
    result: torch.Tensor,
    input: torch.Tensor | None,
    gradient: Gradient,
) -> torch.Tensor:
    """``result`` with a node whose backward calls ``gradient`` on every rank, for that of ``input``."""
    own = input is not None and input.requires_grad
    anchor = input if own else torch.empty(0, requires_grad=True)
    prepare(communicator, anchor)
    number = _count[communicator] = _count.get(communicator, 0) + 1
    terms = (("the op, by count,", number),)

    def compared(grad: torch.Tensor | None) -> torch.Tensor | None:
        facts.exchange(communicator, f"backward of {op}", terms, None)
        return gradient(grad)

    output: torch.Tensor = _Recorded.apply(anchor, [result], compared, own)  # type: ignore[no-untyped-call]
    return output
