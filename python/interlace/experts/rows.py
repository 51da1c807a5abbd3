"""Dispatch and combine as they are called: rows of tokens to their experts, and back."""

from __future__ import annotations

from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.words import FusedAlgorithm, Group
from interlace.experts.quantized import quantize
from interlace.groups.groups import check_group, resolve
from interlace.ops.experts import functional as functional
from interlace.ops.experts.assignment import Assignment
from interlace.ops.experts.combine import COMBINE
from interlace.ops.experts.combine import combine as combine_form
from interlace.ops.experts.dispatch import DISPATCH
from interlace.ops.experts.dispatch import dispatch as dispatch_form
from interlace.ops.experts.routing import (
    DispatchHandle,
    Received,
    by_handle,
    check_experts,
    dispatch_number,
    flat,
    routing_of,
)
from interlace.ops.matmul.api import requires_gradients
from interlace.ops.op.recorded import RecordedWork, started
from interlace.runtime.compat.torch_modes import modes_active
from interlace.runtime.core.work import Work

Tensor = torch.Tensor


def dispatch(
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_experts: int,
    *,
    capacity: int | None = None,
    num_max_dispatch_tokens_per_rank: int | None = None,
    use_fp8: bool = False,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
) -> tuple[Received, DispatchHandle] | Work:
    """Send every token to the ranks that have its experts, where rows are sorted by expert.

    Of ``num_experts`` experts rank r has those from ``r * num_experts / W`` on. A token with several
    experts on one rank travels there once.

    Parameters
    ----------
    x : ``(t, hidden)``, this rank's tokens; ``t`` may differ between ranks. Or fp8 with its scales, a pair
        ``(values, scales)``, as :func:`quantize` makes it.
    topk_idx : integers ``(t, k)``: the experts of each token, -1 for none. Different ones for one token.
    topk_weights : ``(t, k)``, or None. They go with the rows, and :func:`combine` multiplies by them.
    num_experts : of all ranks together.
    capacity : the most rows that this rank sends to one expert; later tokens' rows are left out, and count
        as 0 when combined. None: dropless.
    num_max_dispatch_tokens_per_rank : a bound of every rank's ``t``. Then ``received.x`` is as long as it
        can get, rows that nothing came for are zero, and on a GPU the host waits for nothing: counts are in
        ``received``, on the device. None: it is as long as it is, for which the host of a GPU waits.
    use_fp8 : quantize ``x`` first. Not differentiable then.
    algorithm : "fused", Triton kernels; "pipelined", torch, rank after rank; "unfused", an all-to-all and
        torch; "auto".

    Returns
    -------
    ``(received, handle)``: :class:`Received`, whose ``x`` has a row for each token and expert of this rank,
    by expert, then by source rank, then as the source's tokens are; and what :func:`combine` needs. With
    ``async_op`` a :class:`Work` whose ``wait()`` returns it.

    Raises ValueError or TypeError naming the argument, both values and the rank, on every rank, before any
    data moves. Gradients go to ``x`` and ``topk_weights``.

    Compared with DeepEP's ``Buffer.dispatch`` and torch's ``symm_mem.all_to_all_vdev_2d``: as DeepEP it
    takes ``topk_idx`` and sends a token once per rank; its rows come sorted by expert, a row per expert, as
    those of ``all_to_all_vdev_2d``, and not in the order of sources. There is no buffer to make, and no
    layout to ask for first. The order does not depend on timing.

    >>> def on_rank():
    ...     tokens = torch.tensor([[1.0], [2.0]]) + 10 * interlace.get_rank()
    ...     experts = torch.tensor([[0, 1], [1, -1]])  # of the second token only one
    ...     received, _ = interlace.experts.dispatch(tokens, experts, None, 2)
    ...     return received.x.flatten().tolist(), received.num_tokens_per_expert.tolist()
    >>> interlace.run(on_rank, 2)
    [([1.0, 11.0], [2]), ([1.0, 2.0, 11.0, 12.0], [4])]
    """
    most = num_max_dispatch_tokens_per_rank
    given, how = (num_experts, capacity, most, False), (group, algorithm, async_op)
    return dispatched(x, topk_idx, topk_weights, given, use_fp8, *how)  # type: ignore[no-any-return]


def dispatched(
    x: Any,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    given: tuple[Any, ...],
    use_fp8: bool,
    group: Group,
    algorithm: str,
    async_op: bool,
) -> Any:
    communicator = resolve(group).on(x, topk_idx)
    number = dispatch_number(communicator)
    with communicator.accepting(DISPATCH):
        checks.flag("use_fp8", use_fp8)
        if use_fp8:
            if isinstance(x, (tuple, list)):
                raise ValueError(
                    "use_fp8 quantizes x, which is a pair of values and scales already"
                )
            x = quantize(x)
        data, scales = functional.values_and_scales(x)
        routing = routing_of(*given)._replace(algorithm=algorithm)
    tensors = (data, scales, topk_idx, topk_weights)

    def numbered(made: tuple[Received, DispatchHandle]) -> tuple[Received, DispatchHandle]:
        return made[0], made[1]._replace(number=number)

    if requires_gradients(*tensors):
        num_experts, capacity, most, low_latency = given
        how: Any = {"capacity": capacity, "low_latency": low_latency, "algorithm": algorithm}
        how |= {"num_max_dispatch_tokens_per_rank": most, "group": communicator}
        operands = (x, topk_idx, topk_weights, num_experts)
        return started(DISPATCH, async_op, operands, numbered, **how)

    def finish(made: list[Tensor]) -> tuple[Received, DispatchHandle]:
        return numbered(functional.named(made, tensors, routing, communicator))

    made = dispatch_form(communicator, (*tensors, None), (routing,), async_op)
    if async_op:
        return RecordedWork(DISPATCH, None, [made], lambda _: finish(made.wait()))
    return finish(made)


def combine(
    y: Tensor,
    handle: DispatchHandle,
    *,
    weighted: bool = True,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
) -> Tensor | Work:
    """Send every row back to its token's rank, and sum over the token's experts: ``(t, n)``.

    Parameters
    ----------
    y : ``(rows, n)``, what the experts have made of ``received.x``, row by row; of low latency ``(experts,
        most rows, n)``. ``n`` may differ from ``hidden``.
    handle : that of the :func:`dispatch`; it may be used several times.
    weighted : multiply by the ``topk_weights`` that the dispatch was given, if there were any, in fp32 and
        where the token is.
    group : that of the handle; it is told if ``handle`` is none.
    algorithm : as for :func:`dispatch`.

    Returns ``(t, n)`` of ``y``'s dtype, or with ``async_op`` a :class:`Work` whose ``wait()`` returns it:
    the sum over slots 0, 1, 2 ... in fp32, rounded once. A token without any row is 0. Raises ValueError or
    TypeError on every rank, before any data moves. Gradients go to ``y`` and ``topk_weights``.

    Compared with DeepEP's ``Buffer.combine``: that sums over a rank's experts before rows travel, so bits
    depend on where experts are, and it leaves weights to the caller (``weighted=False``, and multiply by
    ``received.topk_weights``); Megatron's dispatcher (``unpermute``) gives the same sums in the order of
    experts.

    >>> def on_rank():
    ...     weights = torch.tensor([[0.5, 0.25]])
    ...     received, handle = interlace.experts.dispatch(
    ...         torch.ones(1, 2), torch.tensor([[0, 1]]), weights, num_experts=2
    ...     )
    ...     return interlace.experts.combine(received.x * 4, handle).tolist()
    >>> interlace.run(on_rank, 2)
    [[[3.0, 3.0]], [[3.0, 3.0]]]
    """
    handled = isinstance(handle, DispatchHandle)
    communicator = resolve(handle.group if handled else group).on(y)
    with communicator.accepting(COMBINE):
        if not handled:
            raise TypeError(f"handle must be that of a dispatch, got {type(handle).__name__}")
        check_group(group, handle.group)
        checks.flag("weighted", weighted)
        if not isinstance(y, Tensor):
            raise TypeError(f"y must be a tensor, got {type(y).__name__}")
        rows = flat(handle, "y", y)
    weights = handle.topk_weights if weighted else None
    routing = handle.routing._replace(algorithm=algorithm)
    tensors = (rows, handle.segments, handle.topk_idx, weights)
    with by_handle(communicator, handle):
        if requires_gradients(*tensors):
            how: Any = {"weighted": weighted, "algorithm": algorithm}
            return started(COMBINE, async_op, (y, handle), **how)  # type: ignore[no-any-return]
        return combine_form(communicator, (*tensors, None), (routing,), async_op)  # type: ignore[no-any-return]


def permute(
    x: Tensor, topk_idx: Tensor, num_experts: int, *, num_out_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of ``x`` by expert, and how many there are of each: what the grouped matmuls take.

    ``x`` ``(t, hidden)``, ``topk_idx`` integers ``(t, k)``, -1 for none. Returns ``(rows, splits)``: ``(r,
    hidden)`` sorted by expert, then by token, and int64 ``(num_experts,)``. Without communication;
    gradients go to ``x``. On a GPU the host waits for ``r``; ``num_out_tokens`` says it instead: with ``t *
    k`` of them, all that there can be, rows of slots without an expert are the last ones. Raises
    RuntimeError, torch's, for shapes that do not fit, and on a CPU, without ``num_out_tokens``, ValueError
    for other experts. Semantics: Megatron-core's ``permute``.

    >>> rows, splits = interlace.experts.permute(
    ...     torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [1, -1]]), 2
    ... )
    >>> rows.flatten().tolist(), splits.tolist()
    ([1.0, 1.0, 2.0], [1, 2])
    """
    traced = torch.compiler.is_compiling() or modes_active()
    if num_out_tokens is None and topk_idx.device.type == "cpu" and not traced:
        check_experts(topk_idx, num_experts)
    chosen = Assignment(topk_idx.to(torch.int64), num_experts, 1)
    slots = chosen.slots(int(chosen.counts.sum()) if num_out_tokens is None else num_out_tokens)
    return x[slots // topk_idx.shape[1]], chosen.counts
