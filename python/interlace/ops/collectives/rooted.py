"""Collectives with a root: broadcast, reduce, gather, scatter; torch's semantics.

``src`` and ``dst`` are ranks of the default group, ``group_src`` and ``group_dst`` ranks of the group; the
internal forms take both. ``rootless.py`` explains the kinds of functions.
"""

import functools
from collections.abc import Sequence
from typing import Any, get_args

import torch

from interlace.arguments import checks, words
from interlace.arguments.checks import apart, copied_back, fill_dense, one_per_rank, remember
from interlace.arguments.words import AnyReduceOp, BroadcastAlgorithm, Group
from interlace.groups.groups import resolve
from interlace.ops.collectives import stream_engine
from interlace.runtime.core.call import Call, PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.memory import contiguous
from interlace.runtime.core.stream import Event
from interlace.runtime.core.work import Work

Rank = int | None


BROADCAST_ALGORITHMS: tuple[str, ...] = get_args(BroadcastAlgorithm)


def checked_broadcast(
    communicator: Communicator,
    tensor: torch.Tensor,
    src: Rank,
    group_src: Rank,
    algorithm: str = "auto",
) -> PreparedCall:
    root = checks.group_rank("src", src, group_src, communicator)
    is_root = communicator.rank == root
    data = (checks.source if is_root else checks.target)("tensor", tensor, communicator)
    key = ("broadcast", data.dtype, data.shape, root, algorithm)
    call = communicator.calls.get(key)
    if call is None:
        checks.one_of("algorithm", algorithm, BROADCAST_ALGORITHMS)
        stream_engine.check_nodes(algorithm, communicator)
        terms = (
            ("shape of tensor", tuple(data.shape)),
            ("dtype of tensor", data.dtype),
            ("root", root),
            ("algorithm", algorithm),
        )
        call = remember(communicator, key, Call("broadcast", terms))
    if algorithm == "auto" and data.is_contiguous():
        return functools.partial(communicator.engine.broadcast, call, data, root), (tensor,), call

    def start() -> Event | None:
        made = contiguous(data)
        event = stream_engine.serving(communicator, algorithm).broadcast(call, made, root)
        return event if is_root else copied_back(communicator, [data], [made], event)

    return start, (tensor,), call


_broadcast = internal_form("broadcast", checked_broadcast, fills=True)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    algorithm: BroadcastAlgorithm = "auto",
) -> Work | None:
    """Overwrite ``tensor`` with the tensor of rank ``src``, in place. Any dtype.

    ``algorithm``: "auto", "copy", or for up to 64 KiB "low_latency" (``stream_engine``'s words).
    Returns None, or a :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank, before
    any data moves, if shapes, dtypes or roots differ. Semantics: ``torch.distributed.broadcast``.

    >>> def on_rank():
    ...     tensor = torch.tensor([interlace.get_rank()])
    ...     interlace.broadcast(tensor, src=1)
    ...     return tensor.tolist()
    >>> interlace.run(on_rank, 2)
    [[1], [1]]
    """
    return _broadcast(resolve(group).on(tensor), (tensor,), (src, group_src, algorithm), async_op)


def checked_reduce(
    communicator: Communicator, tensor: torch.Tensor, dst: Rank, group_dst: Rank, op: Any = "sum"
) -> PreparedCall:
    root = checks.group_rank("dst", dst, group_dst, communicator)
    data = checks.target("tensor", tensor, communicator)
    name, factor = checks.reduce_op(op)
    if factor is not None:
        words.check_factor(factor, "tensor", data)
    key = ("reduce", data.dtype, data.shape, name, root)
    call = communicator.calls.get(key)
    if call is None:
        words.check_dtype("reduce", name, "tensor", data.dtype)
        terms = (
            ("shape of tensor", tuple(data.shape)),
            ("dtype of tensor", data.dtype),
            ("op", name),
            ("root", root),
        )
        call = remember(communicator, key, Call("reduce", terms))

    def start() -> Event | None:
        made, reducing = words.dense(data, name, factor)
        event = communicator.engine.reduce_to(call, made, root, reducing)
        if communicator.rank != root:
            return event
        return copied_back(communicator, [data], [made], event)

    return start, (tensor,), call


_reduce = internal_form("reduce", checked_reduce)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: AnyReduceOp = "sum",
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce ``tensor`` over ranks into the ``tensor`` of rank ``dst``; other ranks' stay unchanged.

    Any shape, equal on all ranks. ``op`` as for :func:`interlace.all_reduce`. Returns None, or a
    :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank before any data moves.
    Semantics: ``torch.distributed.reduce``.

    >>> def on_rank():
    ...     tensor = torch.tensor([1 + interlace.get_rank()])
    ...     interlace.reduce(tensor, dst=0)
    ...     return tensor.tolist()
    >>> interlace.run(on_rank, 2)
    [[3], [2]]
    """
    return _reduce(resolve(group).on(tensor), (tensor,), (dst, group_dst, op), async_op)


def only_on_root(name: str, value: Any, root: int, rank: int) -> None:
    """Check torch's rule: the list is passed on the root, and on no other rank."""
    if rank == root and value is None:
        raise ValueError(f"{name} must be given on the root, group rank {root}, got None")
    if value is not None and not isinstance(value, (Sequence, torch.Tensor)):
        raise TypeError(f"{name} must be a list of tensors or None, got {type(value).__name__}")
    if rank != root and value is not None and len(value):
        raise ValueError(
            f"{name} must be given on the root only, group rank {root}, got {len(value)} tensors"
        )


def _agree(
    communicator: Communicator, op: str, tensor: torch.Tensor, record: Any, root: int
) -> tuple[torch.Tensor, list[torch.Tensor] | None, Call]:
    """Return this rank's tensor, on the root the tensors of its list ``record``, and the call."""
    rank, name, gathers = communicator.rank, f"{op}_list", op == "gather"
    data = (checks.source if gathers else checks.target)("tensor", tensor, communicator)
    only_on_root(name, record, root, rank)
    tensors: list[torch.Tensor] | None = None
    if rank == root:
        tensors = one_per_rank(name, record, "tensor", data.dtype, communicator, written=gathers)
        apart(name, tensors, "tensor", [data], rank, written=gathers)
    key = (op, root, data.dtype, data.shape, *[each.shape for each in tensors or ()])
    call = communicator.calls.get(key)
    if call is not None:
        return data, tensors, call

    def match(answers: Sequence[Any]) -> None:
        for rank, shape in enumerate(answers[root][1] or [answers[root][0]] * len(answers)):
            if shape != answers[rank][0]:
                raise ValueError(
                    f"{op}: {name}[{rank}] has shape {shape} on rank {root}, tensor has "
                    f"{answers[rank][0]} on rank {rank}"
                )

    alike = all(each.shape == data.shape for each in tensors or ())
    shapes = None if tensors is None or alike else [tuple(each.shape) for each in tensors]
    terms, part = (("dtype of tensor", data.dtype), ("root", root)), (tuple(data.shape), shapes)
    call = Call(op, terms, part=part, match=match, equal_fits=True)
    remember(communicator, key, call)
    return data, tensors, call


def checked_gather(
    communicator: Communicator,
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None,
    dst: Rank,
    group_dst: Rank,
) -> PreparedCall:
    root = checks.group_rank("dst", dst, group_dst, communicator, default=0)
    data, outputs, call = _agree(communicator, "gather", tensor, gather_list, root)

    def start() -> Event | None:
        engine, source = communicator.engine, contiguous(data)
        if outputs is None:
            return engine.gather(call, None, source, root)
        return fill_dense(
            communicator, outputs, lambda targets: engine.gather(call, targets, source, root)
        )

    return start, gather_list or (), call


_gather = internal_form("gather", checked_gather)


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather every rank's ``tensor`` into ``gather_list`` of rank ``dst``, by default 0. Any dtype.

    ``gather_list``: on ``dst`` one tensor per rank, each of that rank's shape (shapes may differ); None or
    empty elsewhere. Returns None, or a :class:`Work` with ``async_op``. Raises ValueError or TypeError on
    every rank before any data moves. Semantics: ``torch.distributed.gather``.

    >>> def on_rank():
    ...     rank = interlace.get_rank()
    ...     parts = [torch.empty(1), torch.empty(2)] if rank == 0 else None
    ...     interlace.gather(torch.full((1 + rank,), float(rank)), parts)
    ...     return parts
    >>> interlace.run(on_rank, 2)
    [[tensor([0.]), tensor([1., 1.])], None]
    """
    return _gather(resolve(group).on(tensor), (tensor, gather_list), (dst, group_dst), async_op)


def checked_scatter(
    communicator: Communicator,
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None,
    src: Rank,
    group_src: Rank,
) -> PreparedCall:
    root = checks.group_rank("src", src, group_src, communicator, default=0)
    out, inputs, call = _agree(communicator, "scatter", tensor, scatter_list, root)

    def start() -> Event | None:
        engine = communicator.engine
        sources = None if inputs is None else [contiguous(each) for each in inputs]
        return fill_dense(
            communicator, [out], lambda targets: engine.scatter(call, targets[0], sources, root)
        )

    return start, (tensor,), call


_scatter = internal_form("scatter", checked_scatter)


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Overwrite ``tensor`` with this rank's entry of ``scatter_list`` of rank ``src``, by default 0.

    Any dtype.

    ``scatter_list``: on ``src`` one tensor per rank, each of that rank's shape (shapes may differ); None or
    empty elsewhere. Returns None, or a :class:`Work` with ``async_op``. Raises ValueError or TypeError on
    every rank before any data moves. Semantics: ``torch.distributed.scatter``.

    >>> def on_rank():
    ...     tensor = torch.empty(2)
    ...     parts = [torch.zeros(2), torch.ones(2)] if interlace.get_rank() == 0 else None
    ...     interlace.scatter(tensor, parts)
    ...     return tensor.tolist()
    >>> interlace.run(on_rank, 2)
    [[0.0, 0.0], [1.0, 1.0]]
    """
    return _scatter(resolve(group).on(tensor), (tensor, scatter_list), (src, group_src), async_op)
