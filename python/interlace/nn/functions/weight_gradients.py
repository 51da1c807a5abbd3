"""Gradients of linear weights: at once or later, returned, or added to ``weight.main_grad``.

Matrices have one row per token: ``grad`` is ``[tokens, out]``, ``input`` ``[tokens, in]``, and the gradient
of a weight ``[out, in]`` is ``grad.t() @ input``.

``main_grad`` is Megatron-core's convention: a buffer beside the weight, wider than it as a rule, to which
the backward of every microbatch adds. Autograd must then not add the gradient a second time, so it gets a
placeholder that nobody reads, see :func:`placeholder`.
"""

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from interlace.ops.collectives import eager as plain
from interlace.ops.op.pending import Started, finish
from interlace.runtime.core.communicator import Communicator

ROWS_AT_ONCE = 4096  # that are widened at a time where there is no matmul with a wider output
_HALF = (torch.float16, torch.bfloat16)


def accumulate(weight: torch.Tensor, grad: torch.Tensor, input: torch.Tensor) -> None:
    """``weight.main_grad += grad.t() @ input``, summed in fp32, or in fp64 if ``main_grad`` is.

    ``main_grad`` may be wider or narrower than the operands; what is narrower than fp32 is rounded once.
    A weight of Megatron's FSDP (``__fsdp_param__``) gets its buffer here, which is written, not added to.
    """
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()  # type: ignore[attr-defined]
        weight.main_grad.zero_()  # type: ignore[attr-defined]
    check_main_grad("the weight", weight)
    main: torch.Tensor = weight.main_grad.detach()  # type: ignore[attr-defined]
    narrow = grad.dtype in _HALF
    if main.dtype == grad.dtype and (grad.is_cuda or not narrow):
        main.addmm_(grad.t(), input)
        return
    if grad.is_cuda and narrow and main.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(main, grad.t(), input, torch.float32, out=main)
        return
    wide = torch.promote_types(main.dtype, torch.float32)
    total = main.to(wide)
    for part, rows in zip(
        torch.split(grad, ROWS_AT_ONCE), torch.split(input, ROWS_AT_ONCE), strict=True
    ):
        total.addmm_(part.to(wide).t(), rows.to(wide))
    if total is not main:
        main.copy_(total)


def check_main_grad(name: str, weight: torch.Tensor) -> None:
    """Raise unless ``weight`` has a ``main_grad`` that its gradient can be added to."""
    main = getattr(weight, "main_grad", None)
    if not isinstance(main, torch.Tensor):
        raise ValueError(
            f"gradient_accumulation_fusion: {name} has main_grad {main!r}; give it a buffer, as "
            "weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)"
        )
    if main.shape != weight.shape:
        raise ValueError(
            f"gradient_accumulation_fusion: {name} has shape {tuple(weight.shape)}, its main_grad "
            f"{tuple(main.shape)}"
        )
    if not main.dtype.is_floating_point:
        raise TypeError(
            f"gradient_accumulation_fusion: main_grad of {name} must be of a float dtype, got "
            f"{main.dtype}"
        )


def placeholder(weight: torch.Tensor) -> torch.Tensor | None:
    """The gradient that autograd gets for a weight whose own goes to ``main_grad``.

    None, unless the weight has the attribute ``grad_added_to_main_grad``: then that is set to True, and the
    placeholder is a tensor of undefined values, or of zeros if ``weight.zero_out_wgrad``. Megatron's
    data-parallel hooks run on a gradient only, and look at the attribute to know that it says nothing.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)


def gradient(
    weight: torch.Tensor, grad: torch.Tensor, input: torch.Tensor, *, fused: bool
) -> torch.Tensor | None:
    """The gradient that backward returns for ``weight``; ``fused``: it is added to ``main_grad`` now."""
    if fused:
        accumulate(weight, grad, input)
        return placeholder(weight)
    return (grad.t() @ input).to(weight.dtype)


def gather(communicator: Communicator | None, rows: torch.Tensor) -> Started:
    """Start to gather ``rows``, equally many on all ranks; without a communicator they are all."""
    if communicator is None:
        return Started([rows], None)
    return plain.all_gather(communicator, rows, 0)


class _Deferred(NamedTuple):
    """``communicator``: the group over which ``input`` is still to be gathered, or None."""

    weights: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    input: torch.Tensor
    communicator: Communicator | None
    fused: bool

    def start(self) -> Started:
        return gather(self.communicator, self.input)


class DeferredWeightGradients:
    """Weight gradients that are computed when the user says so, not in backward.

    Given to a layer as ``deferred=``, its backward leaves here what the weights' gradients need, and
    computes that of the input alone, as for pipeline schedules that fill their bubbles with the rest.
    :meth:`run` computes the oldest, adding each to ``weight.grad``, or to ``main_grad`` where
    ``gradient_accumulation_fusion`` was set. ``len()`` is the number of backwards that wait here.

    One object may serve any number of layers. What it holds, an input and the outputs' gradients per
    backward, is freed as it is used. A sequence-parallel input is held as this rank's shard and gathered in
    :meth:`run`, so all ranks call that for the same backwards, in the same order; hooks on the weights'
    gradients do not run. The semantics are those of Megatron-core's ``wgrad_deferral_limit`` and of
    TransformerEngine's ``delay_wgrad_compute``.

    >>> def step():
    ...     weight, deferred = torch.ones(2, 4, requires_grad=True), nn.DeferredWeightGradients()
    ...     (y,) = nn.column_parallel_linear(torch.ones(3, 4), [weight], group=None, deferred=deferred)
    ...     y.sum().backward()
    ...     waiting, before = len(deferred), weight.grad
    ...     deferred.run()
    ...     return waiting, before, weight.grad[0, 0].item(), len(deferred)
    >>> interlace.run(step, 2)
    [(1, None, 6.0, 0), (1, None, 6.0, 0)]
    """

    def __init__(self) -> None:
        self._pending: deque[_Deferred] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def accepts(self) -> bool:
        """Whether the backward that asks is to leave its gradients here; others compute them at once."""
        return True

    def add(
        self,
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        input: torch.Tensor,
        *,
        communicator: Communicator | None = None,
        fused: bool = False,
    ) -> None:
        """Called by backward. ``grads``: a matrix ``[tokens, out]`` per weight; ``input``: ``[tokens,
        in]``, or this rank's equal part of the rows, which :meth:`run` gathers over ``communicator``.
        """
        self._pending.append(_Deferred(list(weights), list(grads), input, communicator, fused))

    @torch.no_grad()
    def run(self, limit: int | None = None) -> int:
        """Compute the gradients of the ``limit`` oldest backwards, by default of all; how many that was.

        The next input is gathered while the gradients of one are computed. Raises TypeError or ValueError
        for a ``limit`` that is no number of backwards, on all ranks if the oldest has to be gathered.
        """
        over = self._pending[0].communicator if self._pending else None
        op = "DeferredWeightGradients.run"
        with contextlib.nullcontext() if over is None else over.accepting(op):
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
                raise TypeError(f"limit must be an int or None, got {limit!r}")
            if limit is not None and limit < 0:
                raise ValueError(f"limit must be at least 0, got {limit}")
        count = len(self) if limit is None else min(limit, len(self))
        following = self._pending[0].start() if count else None
        for left in range(count, 0, -1):
            pending, started = self._pending.popleft(), following
            assert started is not None
            (input,) = finish(started)
            following = self._pending[0].start() if left > 1 else None
            for weight, grad in zip(pending.weights, pending.grads, strict=True):
                if pending.fused:
                    accumulate(weight, grad, input)
                else:
                    own = grad.t() @ input
                    before = weight.grad
                    weight.grad = own.to(weight.dtype) if before is None else before.add_(own)
        return count
