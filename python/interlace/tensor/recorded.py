"""How an op of this package gets into torch's graph: what it returned, and what its backward sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from interlace.runtime.communicator import Communicator
from interlace.tensor.simulated import on_rank, prepare

Gradient = Callable[[torch.Tensor | None], torch.Tensor | None]


class _Recorded(torch.autograd.Function):
    """Communicates nothing in forward: what it returns is there already."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, result: list[torch.Tensor], gradient: Gradient, own: bool
    ) -> torch.Tensor:
        ctx.gradient, ctx.own = gradient, own
        ctx.set_materialize_grads(False)  # zeros for a placeholder would be as large as the whole
        return result[
            0
        ]  # in a list, or it would be taken for an input, and returned as a view of it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:
        def communicate() -> torch.Tensor | None:
            with torch.no_grad():
                return ctx.gradient(grad)  # type: ignore[no-any-return]

        of_input = on_rank(communicate)
        return of_input if ctx.own else None, None, None, None


def recorded(
    communicator: Communicator,
    result: torch.Tensor,
    input: torch.Tensor | None,
    gradient: Gradient,
) -> torch.Tensor:
    """``result`` with a node whose backward calls ``gradient`` with its gradient, on every rank.

    ``gradient`` returns that of ``input``, which may be None, or need none, on ranks that only take part.
    """
    prepare(communicator)
    own = input is not None and input.requires_grad
    anchor = input if own else torch.empty(0, requires_grad=True)
    output: torch.Tensor = _Recorded.apply(anchor, [result], gradient, own)  # type: ignore[no-untyped-call]
    return output
