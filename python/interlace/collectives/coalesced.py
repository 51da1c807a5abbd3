"""Several collectives of one kind as one: one comparison before any data moves, one handle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import dense
from interlace.collectives.rootless import (
    Prepared,
    prepare_all_gather,
    prepare_all_reduce,
    prepare_reduce_scatter,
)
from interlace.groups.groups import resolve
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.engine import Engine
from interlace.runtime.core.stream import Event
from interlace.runtime.core.work import Work


def _equally_many(
    communicator: Communicator, op: str, names: tuple[str, str], first: Any, second: Any
) -> None:
    """Raise, on all ranks, unless both are lists of one length."""
    with communicator.accepting(op):
        _check_lengths(communicator.rank, op, names, first, second)


def _check_lengths(rank: int, op: str, names: tuple[str, str], first: Any, second: Any) -> None:
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
    communicator: Communicator, name: str, prepared: Sequence[Prepared], async_op: bool
) -> Work | None:
    """Run ``prepared`` one after another, when all of it was compared on all ranks."""
    calls = [call for call, _, _ in prepared]
    key = (name, *[call.message for call in calls])
    whole = communicator.calls.get(key)
    if whole is None:
        terms: list[tuple[str, Any]] = [("number of tensors", len(calls))]
        for index, call in enumerate(calls):
            terms += [(f"{term}, of entry {index},", value) for term, value in call.terms]
        whole = dense.remember(communicator, key, Call(name, tuple(terms)))
    outputs = [tensor for _, _, tensors in prepared for tensor in tensors]

    def start(engine: Engine) -> Event | None:
        engine.parts(whole)
        event = None
        for _, begin, _ in prepared:
            event = begin(engine)
        return event

    return communicator.collective(whole, start, outputs, async_op=async_op)


def _all_reduce_coalesced(
    communicator: Communicator,
    tensors: Sequence[torch.Tensor],
    op: Any = "sum",
    async_op: bool = False,
) -> Work | None:
    name = "all_reduce_coalesced"
    _equally_many(communicator, name, ("tensors", "tensors"), tensors, tensors)
    prepared = [prepare_all_reduce(communicator, tensor, op) for tensor in tensors]
    return _together(communicator, name, prepared, async_op)


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
    _equally_many(communicator, name, names, outputs, inputs)
    pairs = zip(outputs, inputs, strict=True)
    prepared = [prepare_all_gather(communicator, output, tensor) for output, tensor in pairs]
    return _together(communicator, name, prepared, async_op)


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
    _equally_many(communicator, name, ("outputs", "inputs"), outputs, inputs)
    pairs = zip(outputs, inputs, strict=True)
    prepared = [prepare_reduce_scatter(communicator, output, whole, op) for output, whole in pairs]
    return _together(communicator, name, prepared, async_op)


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
