"""Conversions between replicated and sharded activations, each with its gradient.

===========================  ======================================  ==================================
function                     forward                                 backward
===========================  ======================================  ==================================
copy_to_group                nothing                                 all-reduce
reduce_from_group            all-reduce                              nothing
scatter_to_group             this rank's part                        all-gather
gather_from_group            all-gather                              this rank's part
reduce_scatter_to_sequence   reduce-scatter                          all-gather
gather_from_sequence         all-gather                              reduce-scatter
===========================  ======================================  ==================================

``scatter_to_group`` and ``gather_from_group`` are for values that all ranks compute alike, so gradients are
not summed. ``gather_from_sequence`` is for values that ranks then use differently. Parts are equal.
Semantics: Megatron-core's ``tensor_parallel.mappings``. All ranks have the same loss, or the loss is the
sum over sequence shards. Ranks must agree on which tensors require gradients. No second derivatives.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.groups.groups import resolve
from interlace.ops.collectives import records
from interlace.ops.collectives.functional import all_reduce
from interlace.ops.op.async_tensor import wait
from interlace.ops.op.op import finish
from interlace.runtime.core.communicator import Communicator

Tensor = torch.Tensor
_Move = Callable[[Tensor, int, Communicator], Tensor]


def _group(group: Group, *values: object) -> Communicator:
    communicator = resolve(group).on(*values)
    communicator.check_recordable(*values)
    return communicator


def _as_it_is(tensor: Tensor, dim: int, group: Communicator) -> Tensor:
    return tensor.view_as(tensor)


def _reduce(tensor: Tensor, dim: int, group: Communicator) -> Tensor:
    return finish(records.ALL_REDUCE.begin(group, (tensor.detach(), "sum")))[0]


def _part(tensor: Tensor, dim: int, group: Communicator) -> Tensor:
    return tensor.chunk(group.world_size, dim)[group.rank].contiguous()


def _whole(tensor: Tensor, dim: int, group: Communicator) -> Tensor:
    return finish(records.ALL_GATHER.begin(group, (tensor.detach(), dim)))[0]


def _reduced_part(tensor: Tensor, dim: int, group: Communicator) -> Tensor:
    return finish(records.REDUCE_SCATTER.begin(group, (tensor.detach(), "sum", dim)))[0]


class _Region(torch.autograd.Function):
    """A function with the collective ``there`` in forward and ``back`` in backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, group: Communicator, forth: _Move, back: _Move
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.back = dim, group, back
        return forth(tensor, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.dim, ctx.group), None, None, None, None


@functools.cache
def _region(op: str) -> type[_Region]:
    """Return a :class:`_Region` under the name of ``op``, which a profile shows."""
    return type(op, (_Region,), {})


def _pass(
    op: str, tensor: Tensor, dim: int | None, group: Group, forth: _Move, back: _Move
) -> Tensor:
    communicator = _group(group, tensor)
    with communicator.accepting(op):
        size = communicator.world_size
        if not isinstance(tensor, Tensor):
            raise TypeError(f"tensor must be a tensor, got {type(tensor).__name__}")
        dim = 0 if dim is None else checks.index("dim", dim, tensor.dim())
        if forth in (_part, _reduced_part) and tensor.shape[dim] % size:
            raise ValueError(
                f"{op}: the group's size {size} must divide the length {tensor.shape[dim]} of dim {dim}"
            )
    if communicator.world_size == 1:
        return tensor
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _region(op).apply(tensor, dim, communicator, forth, back)  # type: ignore[no-any-return,no-untyped-call]
    return forth(tensor, dim, communicator)


class _CopyToGroup(torch.autograd.Function):
    """Views of several tensors, with one collective that sums all their gradients over the group."""

    @staticmethod
    def forward(ctx: Any, group: Communicator, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # sum in at least fp32, as gradients of few rows are summed
        dtypes = [grad.dtype for grad in grads]
        dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        flat = torch.cat([grad.reshape(-1).to(dtype) for grad in grads])
        flat = wait(all_reduce(flat, group=ctx.group))
        parts = zip(torch.split(flat, [grad.numel() for grad in grads]), grads, strict=True)
        return None, *[part.view_as(grad).to(grad.dtype) for part, grad in parts]


def copy_to_group(*tensors: Tensor | None, group: Group = None) -> tuple[Any, ...]:
    """Return ``tensors`` as they are; their gradients are summed over ``group``, all in one collective.

    For parameters that every rank holds and applies to different data, such as layer norms and positions on
    sequence shards. Tensors have any shapes; None stays None. Without this function each rank has only its
    share of the gradient.

    Raises TypeError on this rank for a value that is neither a tensor nor None. Semantics: Megatron-core's
    ``copy_to_tensor_model_parallel_region``.

    >>> def grad():
    ...     scale = torch.ones(1, requires_grad=True)
    ...     (shared,) = nn.copy_to_group(scale)
    ...     (shared * (1 + interlace.get_rank())).sum().backward()
    ...     return scale.grad.item()
    >>> interlace.run(grad, 2)
    [3.0, 3.0]
    """
    present = [tensor for tensor in tensors if tensor is not None]
    communicator = _group(group, *present)
    with communicator.accepting():
        for each in present:
            if not isinstance(each, Tensor):
                raise TypeError(f"tensors must be tensors or None, got {type(each).__name__}")
    wanted = [each for each in present if each.requires_grad]
    if communicator.world_size == 1 or not wanted or not torch.is_grad_enabled():
        return tensors
    copied = iter(_CopyToGroup.apply(communicator, *wanted))  # type: ignore[no-untyped-call]
    return tuple(
        next(copied) if tensor is not None and tensor.requires_grad else tensor
        for tensor in tensors
    )


def reduce_from_group(tensor: Tensor, *, group: Group = None) -> Tensor:
    """Return the sum of ``tensor`` over ranks, for the same use on all ranks: its gradient is not summed.

    ``tensor``: any shape, equal on all ranks. Raises ValueError or TypeError on every rank, before any data
    moves. Semantics: Megatron-core's ``reduce_from_tensor_model_parallel_region``.

    >>> interlace.run(lambda: nn.reduce_from_group(torch.ones(2)).tolist(), 2)
    [[2.0, 2.0], [2.0, 2.0]]
    """
    return _pass("reduce_from_group", tensor, None, group, _reduce, _as_it_is)


def scatter_to_group(tensor: Tensor, dim: int = -1, *, group: Group = None) -> Tensor:
    """Return this rank's part, along ``dim``, of ``tensor``, which is the same on all ranks.

    The group's size divides the length of ``dim``. Raises ValueError or TypeError on every rank, before any
    data moves. Semantics: Megatron-core's ``scatter_to_tensor_model_parallel_region``.

    >>> interlace.run(lambda: nn.scatter_to_group(torch.arange(4)).tolist(), 2)
    [[0, 1], [2, 3]]
    """
    return _pass("scatter_to_group", tensor, dim, group, _part, _whole)


def gather_from_group(tensor: Tensor, dim: int = -1, *, group: Group = None) -> Tensor:
    """Return all ranks' parts along ``dim``, for the same use on all ranks: the gradient is not summed.

    ``tensor``: this rank's part, of equal shapes on all ranks. Raises ValueError or TypeError on every
    rank, before any data moves. Semantics: Megatron-core's ``gather_from_tensor_model_parallel_region``.

    >>> interlace.run(lambda: nn.gather_from_group(torch.tensor([interlace.get_rank()])).tolist(), 2)
    [[0, 1], [0, 1]]
    """
    return _pass("gather_from_group", tensor, dim, group, _whole, _part)


def reduce_scatter_to_sequence(tensor: Tensor, dim: int = 0, *, group: Group = None) -> Tensor:
    """Return this rank's part, along ``dim``, of the sum of ``tensor`` over ranks.

    Shapes are equal on all ranks, and the group's size divides the length of ``dim``. Raises ValueError or
    TypeError on every rank, before any data moves. Semantics: Megatron-core's
    ``reduce_scatter_to_sequence_parallel_region``.

    >>> interlace.run(lambda: nn.reduce_scatter_to_sequence(torch.arange(4)).tolist(), 2)
    [[0, 2], [4, 6]]
    """
    return _pass("reduce_scatter_to_sequence", tensor, dim, group, _reduced_part, _whole)


def gather_from_sequence(tensor: Tensor, dim: int = 0, *, group: Group = None) -> Tensor:
    """Return all ranks' parts along ``dim``. Each rank uses them differently: gradients are summed.

    ``tensor``: this rank's part, of equal shapes on all ranks. Raises ValueError or TypeError on every
    rank, before any data moves. Semantics: Megatron-core's ``gather_from_sequence_parallel_region``.

    >>> interlace.run(lambda: nn.gather_from_sequence(torch.tensor([interlace.get_rank()])).tolist(), 2)
    [[0, 1], [0, 1]]
    """
    return _pass("gather_from_sequence", tensor, dim, group, _whole, _reduced_part)


def sequence_dim(tensor: object, batch_first: bool) -> int:
    """Return 1 for ``[b, s, h]``, otherwise 0, also if ``tensor`` is not a tensor: the op reports that."""
    return 1 if batch_first and isinstance(tensor, Tensor) and tensor.dim() > 2 else 0
