"""Several collectives of one kind as one: one comparison before any data moves, one handle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import dense
from interlace.collectives.rootless import (
    checked_all_gather,
    checked_all_reduce,
    checked_reduce_scatter,
)
from interlace.groups.groups import resolve
from interlace.runtime.core.call import Call, PreparedCall
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.work import Work


def _check_lengths(
    communicator: Communicator, op: str, names: tuple[str, str], first: Any, second: Any
) -> None:
    """Raise unless both are lists of one length."""
    rank = communicator.rank
    for name, value in zip(names, (first, second), strict=True):
        if not isinstance(value, (list, tuple)):
            raise TypeError(
                f"{op}: {name} must be a list, got {type(value).__name__} on rank {rank}"
            )
    if len(first) != len(second):
        raise ValueError(
            f"{op}: {names[0]} has {len(first)} entries, {names[1]} has {len(second)}, on rank {rank}"
        )


def _together(
    communicator: Communicator, name: str, prepared: Sequence[PreparedCall]
) -> PreparedCall:
    """``prepared``, one after another, when all of it was compared on all ranks."""
    calls = [each.terms for each in prepared if each.terms is not None]
    key = (name, *[call.message for call in calls])
    whole = communicator.calls.get(key)
    if whole is None:
        terms: list[tuple[str, Any]] = [("number of tensors", len(calls))]
        for index, call in enumerate(calls):
            terms += [(f"{term}, of entry {index},", value) for term, value in call.terms]
        whole = dense.remember(communicator, key, Call(name, tuple(terms)))

    def start() -> Any:
        communicator.engine.parts(whole)
        event = None
        for each in prepared:
            event = each.start()
        return event

    return PreparedCall(start, [tensor for each in prepared for tensor in each.outputs], whole)


def _all_reduce_coalesced(
    communicator: Communicator,
    tensors: Sequence[torch.Tensor],
    op: Any = "sum",
    async_op: bool = False,
) -> Work | None:
    name = "all_reduce_coalesced"

    def check(*_: Any) -> PreparedCall:
        _check_lengths(communicator, name, ("tensors", "tensors"), tensors, tensors)
        return _together(
            communicator, name, [checked_all_reduce(communicator, each, op) for each in tensors]
        )

    return communicator.call(name, check, (), async_op=async_op)  # type: ignore[no-any-return]


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], op: Any = "sum", group: Any = None, async_op: bool = False
) -> Work | None:
    """:func:`interlace.all_reduce` of each of ``tensors``, which may differ in shape and dtype.

    Returns None, or a :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank before
    any data moves. Semantics: ``torch.distributed.all_reduce_coalesced``, which returns a Future.

    >>> import interlace, torch
    >>> def on_rank():
    ...     tensors = [torch.ones(1), torch.arange(2)]
    ...     interlace.all_reduce_coalesced(tensors)
    ...     return [tensor.tolist() for tensor in tensors]
    >>> interlace.run(on_rank, 2)[0]
    [[2.0], [0, 2]]
    """
    return _all_reduce_coalesced(resolve(group).on(tensors), tensors, op, async_op)


def _all_gather_coalesced(
    communicator: Communicator,
    outputs: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    async_op: bool = False,
    *,
    name: str = "all_gather_coalesced",
    names: tuple[str, str] = ("output_tensor_lists", "input_tensor_list"),
) -> Work | None:
    def check(*_: Any) -> PreparedCall:
        _check_lengths(communicator, name, names, outputs, inputs)
        pairs = zip(outputs, inputs, strict=True)
        return _together(
            communicator, name, [checked_all_gather(communicator, *pair) for pair in pairs]
        )

    return communicator.call(name, check, (), async_op=async_op)  # type: ignore[no-any-return]


def all_gather_coalesced(
    output_tensor_lists: Sequence[Any],
    input_tensor_list: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Work | None:
    """:func:`interlace.all_gather` of each tensor of ``input_tensor_list``, into an output each.

    Tensors of a list may differ in shape and dtype; an output is a tensor or a list of one per rank.
    Returns None, or a :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank before
    any data moves. Semantics: ``torch.distributed.all_gather_coalesced``, which returns a Future.

    >>> import interlace, torch
    >>> def on_rank():
    ...     mine = [torch.tensor([interlace.get_rank()]), torch.ones(1)]
    ...     outputs = [[torch.empty_like(each) for _ in range(2)] for each in mine]
    ...     interlace.all_gather_coalesced(outputs, mine)
    ...     return outputs[0]
    >>> interlace.run(on_rank, 2)[0]
    [tensor([0]), tensor([1])]
    """
    return _all_gather_coalesced(
        resolve(group).on(input_tensor_list), output_tensor_lists, input_tensor_list, async_op
    )


def all_gather_into_tensor_coalesced(
    outputs: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Work | None:
    """As :func:`all_gather_coalesced`, under the name that backends of torch have for it.

    ``inputs`` may differ in shape and dtype. Raises what that does.

    >>> import interlace, torch
    >>> def on_rank():
    ...     outputs = [torch.empty(2), torch.empty(4)]
    ...     interlace.all_gather_into_tensor_coalesced(outputs, [torch.ones(1), torch.zeros(2)])
    ...     return outputs
    >>> interlace.run(on_rank, 2)[0]
    [tensor([1., 1.]), tensor([0., 0., 0., 0.])]
    """
    return _all_gather_coalesced(
        resolve(group).on(inputs), outputs, inputs, async_op,
        name="all_gather_into_tensor_coalesced", names=("outputs", "inputs"),
    )  # fmt: skip


def _reduce_scatter_tensor_coalesced(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[Any],
    op: Any = "sum",
    async_op: bool = False,
) -> Work | None:
    name = "reduce_scatter_tensor_coalesced"

    def check(*_: Any) -> PreparedCall:
        _check_lengths(communicator, name, ("outputs", "inputs"), outputs, inputs)
        pairs = zip(outputs, inputs, strict=True)
        return _together(
            communicator, name, [checked_reduce_scatter(communicator, *pair, op) for pair in pairs]
        )

    return communicator.call(name, check, (), async_op=async_op)  # type: ignore[no-any-return]


def reduce_scatter_tensor_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[Any],
    op: Any = "sum",
    group: Any = None,
    async_op: bool = False,
) -> Work | None:
    """:func:`interlace.reduce_scatter` of each of ``inputs``, in either form, into each of ``outputs``.

    Each of ``outputs`` has the shape of this rank's part. Returns None, or a :class:`Work` with
    ``async_op``. Raises ValueError or TypeError on every rank before any data moves. Semantics: the method
    of that name of torch's backends.

    >>> import interlace, torch
    >>> def on_rank():
    ...     outputs = [torch.empty(1), torch.empty(2)]
    ...     interlace.reduce_scatter_tensor_coalesced(outputs, [torch.ones(2), torch.arange(4.0)])
    ...     return outputs
    >>> interlace.run(on_rank, 2)
    [[tensor([2.]), tensor([0., 2.])], [tensor([2.]), tensor([4., 6.])]]
    """
    return _reduce_scatter_tensor_coalesced(
        resolve(group).on(outputs), outputs, inputs, op, async_op
    )
