"""Several collectives of one kind as one: one comparison before any data moves, one handle."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.arguments import checks, dense
from interlace.arguments.forms import disjoint
from interlace.arguments.words import AnyReduceOp, Group, PerRank
from interlace.groups.groups import resolve
from interlace.ops.collectives import rootless
from interlace.runtime.core.call import Call, PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.stream import Event
from interlace.runtime.core.work import Work


def _together(
    communicator: Communicator, name: str, prepared: Sequence[PreparedCall]
) -> PreparedCall:
    """``prepared``, one after another, when all of it was compared on all ranks."""
    calls = [call for *_, call in prepared if call is not None]
    key = (name, *[call.message for call in calls])
    whole = communicator.calls.get(key)
    if whole is None:
        terms: list[tuple[str, Any]] = [("number of tensors", len(calls))]
        for index, call in enumerate(calls):
            terms += [(f"{term}, of entry {index},", value) for term, value in call.terms]
        whole = dense.remember(communicator, key, Call(name, tuple(terms)))

    def start() -> Any:
        communicator.engine.agree(whole)
        event = None
        for begin, *_ in prepared:
            event = begin()
        return event

    return start, [tensor for _, outputs, _ in prepared for tensor in outputs], whole


def _read_first(
    communicator: Communicator,
    prepared: PreparedCall,
    together: Callable[[list[torch.Tensor]], PreparedCall],
) -> PreparedCall:
    """``prepared`` of tensors that are reduced in place; of copies if two share memory, as torch has it."""
    _, outputs, _ = prepared
    tensors = [checks.imported("tensors", each) for each in outputs]
    if disjoint(tensors):
        return prepared
    copies = [torch.empty_like(each) for each in tensors]
    begin, _, call = together(copies)

    def start() -> Event | None:
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        event: Any = begin()
        return dense.copied_back(communicator, tensors, copies, event)

    return start, outputs, call


def _of_lists(
    name: str, names: Sequence[str], checked: Callable[..., PreparedCall]
) -> Callable[..., Work | None]:
    """The internal form of ``name``: ``checked`` for entries of lists, which errors call ``names``."""

    def check(communicator: Communicator, *arguments: Any) -> PreparedCall:
        lists, options = arguments[: len(names)], arguments[len(names) :]
        for each, value in zip(names, lists, strict=True):
            if not isinstance(value, (list, tuple)):
                raise TypeError(f"{name}: {each} must be a list, got {type(value).__name__}")
        if len(lists[0]) != len(lists[-1]):
            raise ValueError(
                f"{name}: {names[0]} has {len(lists[0])} entries, {names[-1]} has {len(lists[-1])}"
            )

        def together(*lists: Any) -> PreparedCall:
            entries = zip(*lists, strict=True)
            return _together(
                communicator, name, [checked(communicator, *entry, *options) for entry in entries]
            )

        prepared = together(*lists)
        return prepared if len(lists) > 1 else _read_first(communicator, prepared, together)

    return internal_form(name, check, names=(*names, "op"))


_all_reduce_coalesced = _of_lists("all_reduce_coalesced", ["tensors"], rootless.checked_all_reduce)
_all_gather_coalesced = _of_lists(
    "all_gather_coalesced",
    ["output_tensor_lists", "input_tensor_list"],
    rootless.checked_all_gather,
)
_all_gather_into_tensor_coalesced = _of_lists(
    "all_gather_into_tensor_coalesced", ["outputs", "inputs"], rootless.checked_all_gather
)
_reduce_scatter_tensor_coalesced = _of_lists(
    "reduce_scatter_tensor_coalesced", ["outputs", "inputs"], rootless.checked_reduce_scatter
)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: AnyReduceOp = "sum",
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """:func:`interlace.all_reduce` of each of ``tensors``, which may differ in shape and dtype.

    Where two of ``tensors`` share memory, all are read before one is written. Returns None, or a
    :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank before any data moves.
    Semantics: ``torch.distributed.all_reduce_coalesced``, which returns a Future.

    >>> def on_rank():
    ...     tensors = [torch.ones(1), torch.arange(2)]
    ...     interlace.all_reduce_coalesced(tensors)
    ...     return [tensor.tolist() for tensor in tensors]
    >>> interlace.run(on_rank, 2)[0]
    [[2.0], [0, 2]]
    """
    return _all_reduce_coalesced(resolve(group).on(tensors), (tensors,), (op,), async_op)


def all_gather_coalesced(
    output_tensor_lists: Sequence[PerRank],
    input_tensor_list: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """:func:`interlace.all_gather` of each tensor of ``input_tensor_list``, into an output each.

    Tensors of a list may differ in shape and dtype; each of ``output_tensor_lists`` is a tensor, of the
    shapes that ``all_gather`` takes, or a list of one per rank.
    Returns None, or a :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank before
    any data moves. Semantics: ``torch.distributed.all_gather_coalesced``, which returns a Future.

    >>> def on_rank():
    ...     mine = [torch.tensor([interlace.get_rank()]), torch.ones(1)]
    ...     outputs = [[torch.empty_like(each) for _ in range(2)] for each in mine]
    ...     interlace.all_gather_coalesced(outputs, mine)
    ...     return outputs[0]
    >>> interlace.run(on_rank, 2)[0]
    [tensor([0]), tensor([1])]
    """
    lists = output_tensor_lists, input_tensor_list
    return _all_gather_coalesced(resolve(group).on(input_tensor_list), lists, (), async_op)


def all_gather_into_tensor_coalesced(
    outputs: Sequence[PerRank],
    inputs: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """:func:`all_gather_coalesced` under the name that backends of torch have for it.

    ``inputs`` may differ in shape and dtype, and so do ``outputs``. Raises what that does.

    >>> def on_rank():
    ...     outputs = [torch.empty(2), torch.empty(4)]
    ...     interlace.all_gather_into_tensor_coalesced(outputs, [torch.ones(1), torch.zeros(2)])
    ...     return outputs
    >>> interlace.run(on_rank, 2)[0]
    [tensor([1., 1.]), tensor([0., 0., 0., 0.])]
    """
    communicator = resolve(group).on(inputs)
    return _all_gather_into_tensor_coalesced(communicator, (outputs, inputs), (), async_op)


def reduce_scatter_tensor_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[PerRank],
    op: AnyReduceOp = "sum",
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """:func:`interlace.reduce_scatter` of each of ``inputs``, in either form, into each of ``outputs``.

    Each of ``outputs`` has the shape of this rank's part. Returns None, or a :class:`Work` with
    ``async_op``. Raises ValueError or TypeError on every rank before any data moves. Semantics: the method
    of that name of torch's backends.

    >>> def on_rank():
    ...     outputs = [torch.empty(1), torch.empty(2)]
    ...     interlace.reduce_scatter_tensor_coalesced(outputs, [torch.ones(2), torch.arange(4.0)])
    ...     return outputs
    >>> interlace.run(on_rank, 2)
    [[tensor([2.]), tensor([0., 2.])], [tensor([2.]), tensor([4., 6.])]]
    """
    communicator = resolve(group).on(outputs)
    return _reduce_scatter_tensor_coalesced(communicator, (outputs, inputs), (op,), async_op)
