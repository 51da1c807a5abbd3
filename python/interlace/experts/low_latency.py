"""The low-latency forms: results whose places are known before anything comes, for decoding."""

from typing import Any

import torch

from interlace.arguments.words import FusedAlgorithm, Group
from interlace.experts.rows import combine, dispatched
from interlace.groups.groups import resolve
from interlace.ops.experts.combine import COMBINE
from interlace.ops.experts.routing import DispatchHandle, check_same_choice

Tensor = torch.Tensor


def low_latency_dispatch(
    x: Tensor,
    topk_idx: Tensor,
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    *,
    use_fp8: bool = True,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
) -> Any:
    """Dispatch few tokens into places that every expert has for all that can come.

    ``x`` ``(t, hidden)``, ``t`` at most ``num_max_dispatch_tokens_per_rank``; ``topk_idx`` ``(t, k)``, -1
    for none. ``use_fp8`` sends float8_e4m3fn with a scale per 128 channels. Returns ``(received, handle)``:
    ``received.x`` is ``(experts of this rank, W * num_max_dispatch_tokens_per_rank, hidden)``, and
    ``received.num_tokens_per_expert``, on the device, says how many rows of each expert are there, from its
    first one on; the others are zero. No host of a GPU waits for counts.

    Raises ValueError or TypeError on every rank, before any data moves. Gradients as of
    :func:`interlace.experts.dispatch`, without ``use_fp8``.

    Compared with DeepEP's ``Buffer.low_latency_dispatch``: the same arguments and shapes; ``packed_recv_x``
    and ``packed_recv_count`` are ``received.x`` (with ``received.scales``) and
    ``received.num_tokens_per_expert``. Rows are in the order of source ranks and not of arrival, a token
    travels once to each rank, and there is no hook: the two kernels follow each other on the group's
    stream.

    >>> def on_rank():
    ...     x, experts = torch.full((1, 128), 1.0 + interlace.get_rank()), torch.tensor([[0, 1]])
    ...     received, handle = interlace.experts.low_latency_dispatch(x, experts, 2, 2)
    ...     counts = received.num_tokens_per_expert.tolist()
    ...     return tuple(received.x.shape), received.x.dtype, counts
    >>> interlace.run(on_rank, 2)[0]
    ((1, 4, 128), torch.float8_e4m3fn, [2])
    """
    given = (num_experts, None, num_max_dispatch_tokens_per_rank, True)
    how = (group, algorithm, async_op)
    return dispatched(x, topk_idx, None, given, use_fp8, *how)


def low_latency_combine(
    y: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    handle: DispatchHandle,
    *,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
) -> Any:
    """Rows back to their tokens, times ``topk_weights`` ``(t, k)``, and summed: ``(t, n)``.

    ``y`` ``(experts of this rank, W * num_max_dispatch_tokens_per_rank, n)``, of which only rows that came
    are looked at; ``topk_idx``, ``handle`` and ``group`` those of the dispatch. Sums as of
    :func:`interlace.experts.combine`. Raises ValueError or TypeError on every rank, before any data moves:
    also for another ``topk_idx`` than the dispatch's, of which a GPU's host sees the shape alone; rows go
    home by the dispatch's.

    Compared with DeepEP's ``Buffer.low_latency_combine``: the same arguments.

    >>> def on_rank():
    ...     x, experts, weights = torch.ones(1, 2), torch.tensor([[0, 1]]), torch.tensor([[1.0, 3.0]])
    ...     received, handle = interlace.experts.low_latency_dispatch(x, experts, 1, 2, use_fp8=False)
    ...     return interlace.experts.low_latency_combine(received.x, experts, weights, handle).tolist()
    >>> interlace.run(on_rank, 2)
    [[[4.0, 4.0]], [[4.0, 4.0]]]
    """
    if isinstance(handle, DispatchHandle):  # else combine refuses it
        communicator = resolve(handle.group).on(y)
        with communicator.accepting(COMBINE):
            check_same_choice(communicator, handle.topk_idx, topk_idx)
        handle = handle._replace(topk_weights=topk_weights)
    return combine(y, handle, group=group, async_op=async_op, algorithm=algorithm)
