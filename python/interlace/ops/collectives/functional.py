"""``interlace.functional`` of the plain collectives."""

from collections.abc import Sequence

import torch

from interlace.arguments.words import AnyReduceOp, FunctionalGroup
from interlace.ops.op.calls import check, ints, reduction, run


def all_reduce(
    input: torch.Tensor,
    reduce_op: AnyReduceOp = "sum",
    *,
    group: FunctionalGroup = None,
    tag: str = "",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the reduction of every rank's ``input``, on all ranks, with the same bits everywhere.

    ``input``: any shape and strides, equal shapes and dtypes on all ranks. ``reduce_op``: "sum", "avg",
    "product", "min", "max", "band", "bor", "bxor", torch's ``ReduceOp``. ``out`` gets the result, of the
    shape, dtype and device of ``input``; it may be ``input``.

    Raises ValueError or TypeError on every rank, before any data moves. Raises RuntimeError for ``out`` if
    a gradient is required, and in backward for a ``reduce_op`` on bits. Semantics: ``all_reduce`` of
    ``torch.distributed._functional_collectives``; gradients are those for the sum of all ranks' losses.

    >>> interlace.run(lambda: functional.all_reduce(torch.ones(2)).tolist(), 2)
    [[2.0, 2.0], [2.0, 2.0]]
    """
    check("all_reduce", group, tag, input=input, out=out)
    name, input = reduction("all_reduce", group, tag, reduce_op, input)
    return run("all_reduce", group, tag, input, name, out=out)  # type: ignore[no-any-return]


def reduce_scatter(
    input: torch.Tensor,
    reduce_op: AnyReduceOp = "sum",
    scatter_dim: int = 0,
    *,
    group: FunctionalGroup = None,
    tag: str = "",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return this rank's slice, along ``scatter_dim``, of the reduction of every rank's ``input``.

    ``input``: ``[.., n, ..]`` with n at ``scatter_dim``. The size of the group must divide n. The result,
    and ``out``, is ``[.., n / size, ..]``. ``reduce_op`` and errors as for :func:`all_reduce`.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics:
    ``torch.distributed._functional_collectives.reduce_scatter_tensor``.

    >>> interlace.run(lambda: functional.reduce_scatter(torch.arange(4)).tolist(), 2)
    [[0, 2], [4, 6]]
    """
    check("reduce_scatter", group, tag, {"scatter_dim": scatter_dim}, input=input, out=out)
    name, input = reduction("reduce_scatter", group, tag, reduce_op, input)
    return run("reduce_scatter", group, tag, input, name, scatter_dim, out=out)  # type: ignore[no-any-return]


def reduce(
    input: torch.Tensor,
    reduce_op: AnyReduceOp,
    dst: int,
    *,
    group: FunctionalGroup = None,
    tag: str = "",
) -> torch.Tensor:
    """Return the reduction of every rank's ``input`` on rank ``dst`` of the group, and zeros on the others.

    ``input``: any shape, equal on all ranks; the result has the same shape. ``reduce_op`` as for
    :func:`all_reduce`; gradients for "sum" and "avg".

    Raises ValueError or TypeError on every rank, before any data moves; RuntimeError in backward for
    another ``reduce_op``. Semantics: ``torch.distributed.reduce``, without a side effect.

    >>> interlace.run(lambda: functional.reduce(torch.ones(2), "sum", 1).tolist(), 2)
    [[0.0, 0.0], [2.0, 2.0]]
    """
    check("reduce", group, tag, {"dst": dst}, input=input)
    name, input = reduction("reduce", group, tag, reduce_op, input)
    return run("reduce", group, tag, input, name, dst)  # type: ignore[no-any-return]


def all_gather(
    input: torch.Tensor,
    gather_dim: int = 0,
    *,
    group: FunctionalGroup = None,
    tag: str = "",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Concatenate every rank's ``input`` along ``gather_dim``, in rank order. Shapes must be equal.

    The result, and ``out`` if it is passed, is ``[.., size * n, ..]`` for an ``input`` of ``[.., n, ..]``.
    For 0-dim tensors the result has one dimension, as long as the group.

    Raises ValueError or TypeError on every rank, before any data moves; RuntimeError for ``out`` if a
    gradient is wanted. Semantics: ``torch.distributed._functional_collectives.all_gather_tensor``.

    >>> interlace.run(lambda: functional.all_gather(torch.tensor([interlace.get_rank()])).tolist(), 2)
    [[0, 1], [0, 1]]
    """
    check("all_gather", group, tag, {"gather_dim": gather_dim}, input=input, out=out)
    return run("all_gather", group, tag, input, gather_dim, out=out)  # type: ignore[no-any-return]


def all_to_all(
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    group: FunctionalGroup = None,
    tag: str = "",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Send part r of ``input`` to rank r, and concatenate the received parts in rank order.

    ``input``: ``[n, ...]``, cut along dim 0. Parts have equal lengths, or ``input_split_sizes[r]`` rows for
    rank r and ``output_split_sizes[s]`` rows from rank s, whose sum is the length of the result and
    ``out``.

    Raises ValueError or TypeError on every rank, before any data moves; RuntimeError for ``out`` if a
    gradient is wanted. Semantics: ``torch.distributed._functional_collectives.all_to_all_single``.

    >>> def exchanged():
    ...     return functional.all_to_all(10 * interlace.get_rank() + torch.arange(2)).tolist()
    >>> interlace.run(exchanged, 2)
    [[0, 10], [1, 11]]
    """
    op, received, sent = "all_to_all_single", output_split_sizes, input_split_sizes
    check(op, group, tag, input=input, out=out)
    if received is not None:
        received = ints(op, group, tag, "output_split_sizes", received)
    if sent is not None:
        sent = ints(op, group, tag, "input_split_sizes", sent)
    return run("all_to_all", group, tag, input, received, sent, out=out)  # type: ignore[no-any-return]


def broadcast(
    input: torch.Tensor,
    src: int,
    *,
    group: FunctionalGroup = None,
    tag: str = "",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the ``input`` of rank ``src`` of the group; all ranks' inputs have the same shape and dtype.

    ``out``, of that shape, gets the result; it may be ``input``.

    Raises ValueError or TypeError on every rank, before any data moves; RuntimeError for ``out`` if a
    gradient is wanted. Semantics: ``torch.distributed._functional_collectives.broadcast``.

    >>> interlace.run(lambda: functional.broadcast(torch.tensor(interlace.get_rank()), 1).item(), 2)
    [1, 1]
    """
    check("broadcast", group, tag, {"src": src}, input=input, out=out)
    return run("broadcast", group, tag, input, src, out=out)  # type: ignore[no-any-return]


def permute(
    input: torch.Tensor, src_dst: Sequence[int], *, group: FunctionalGroup = None, tag: str = ""
) -> torch.Tensor:
    """Return the ``input`` of the rank r whose ``src_dst[r]`` is this rank. Shapes must be equal.

    ``input``: any shape. ``src_dst``: each rank of the group once.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics:
    ``torch.distributed._functional_collectives.permute_tensor``.

    >>> interlace.run(lambda: functional.permute(torch.tensor(interlace.get_rank()), [1, 2, 0]).item(), 3)
    [2, 0, 1]
    """
    check("permute", group, tag, input=input)
    targets = ints("permute", group, tag, "src_dst", src_dst)
    return run("permute", group, tag, input, targets)  # type: ignore[no-any-return]


def gather(
    input: torch.Tensor,
    dst: int,
    gather_dim: int = 0,
    *,
    group: FunctionalGroup = None,
    tag: str = "",
) -> torch.Tensor:
    """Gather ``input`` on rank ``dst`` like :func:`all_gather`; other ranks get zeros of that shape.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics:
    ``torch.distributed.gather``, into one tensor.

    >>> interlace.run(lambda: functional.gather(torch.ones(1), 0).tolist(), 2)
    [[1.0, 1.0], [0.0, 0.0]]
    """
    check("gather", group, tag, {"dst": dst, "gather_dim": gather_dim}, input=input)
    return run("gather", group, tag, input, dst, gather_dim)  # type: ignore[no-any-return]


def scatter(
    input: torch.Tensor,
    src: int,
    scatter_dim: int = 0,
    *,
    group: FunctionalGroup = None,
    tag: str = "",
) -> torch.Tensor:
    """Return this rank's slice, along ``scatter_dim``, of the ``input`` of rank ``src`` of the group.

    The size of the group must divide that length. On other ranks only the shape and dtype of ``input`` are
    used.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics:
    ``torch.distributed.scatter``, of one tensor.

    >>> interlace.run(lambda: functional.scatter(torch.arange(2) + interlace.get_rank(), 1).tolist(), 2)
    [[1], [2]]
    """
    check("scatter", group, tag, {"src": src, "scatter_dim": scatter_dim}, input=input)
    return run("scatter", group, tag, input, src, scatter_dim)  # type: ignore[no-any-return]
