"""Collectives of parts that differ in length along a dim: ``*_v``.

A whole is one tensor, the parts of all ranks one after another along ``dim``, or a list with one tensor per
rank. ``sizes`` are the lengths of the parts along ``dim``, by rank, the same on every rank that has the
whole; for a list they are what the tensors say, and for one tensor None stands for equal lengths. Off
``dim`` all parts are equal in shape. Every rank's own tensor has the length that the whole gives it, which
is compared between ranks before any data moves.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.words import AnyReduceOp, Group
from interlace.groups.groups import resolve
from interlace.ops.collectives.all_to_all import _all_to_all, sizes, whole_numbers
from interlace.ops.collectives.rooted import _gather, _scatter
from interlace.ops.collectives.rootless import _all_gather, _reduce_scatter
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.work import Work

Whole = torch.Tensor | list[torch.Tensor]


def split(
    name: str,
    whole: Any,
    sizes_name: str,
    lengths: Sequence[int] | None,
    dim: int,
    communicator: Communicator,
) -> list[torch.Tensor]:
    """The parts of ``whole``; raises unless ``lengths`` cut it into one part per rank."""
    if not isinstance(whole, (torch.Tensor, list, tuple)):
        raise TypeError(f"{name} must be a tensor or a list of tensors, got {type(whole).__name__}")
    if not isinstance(whole, torch.Tensor):
        tensors = list(whole)
        if lengths is not None:
            expected = whole_numbers(sizes_name, lengths)
            found = []
            for r, each in enumerate(tensors):
                part = checks.source(f"{name}[{r}]", each, communicator)
                found.append(part.shape[checks.index("dim", dim, part.dim())])
            if found != expected:
                raise ValueError(f"{sizes_name} is {expected}, {name} has {found} along dim {dim}")
        return tensors
    whole = checks.source(name, whole, communicator)
    if not whole.dim():
        raise ValueError(f"{name} must have dimensions to be split along")
    dim = checks.index("dim", dim, whole.dim())
    counts = sizes(sizes_name, lengths, whole.shape[dim], name, communicator)
    return list(torch.split(whole, list(counts), dim))


def all_gather_v(
    output: Whole,
    tensor: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    dim: int = 0,
) -> Work | None:
    """Gather every rank's ``tensor``, of lengths ``output_split_sizes`` along ``dim``, into ``output``.

    Returns None, or a :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank before
    any data moves. torch has this for lists only, ``torch.distributed.all_gather``.

    >>> def gather():
    ...     out = torch.empty(3)
    ...     interlace.all_gather_v(out, torch.ones(1 + interlace.get_rank()), [1, 2])
    ...     return out.tolist()
    >>> interlace.run(gather, 2)
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    communicator = resolve(group).on(tensor)
    with communicator.accepting("all_gather"):
        parts = split("output", output, "output_split_sizes", output_split_sizes, dim, communicator)
    return _all_gather(communicator, (parts, tensor), (), async_op)


def reduce_scatter_v(
    output: torch.Tensor,
    input: Whole,
    input_split_sizes: Sequence[int] | None = None,
    op: AnyReduceOp = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    dim: int = 0,
) -> Work | None:
    """Reduce over ranks; ``output`` of rank r is the part of length ``input_split_sizes[r]`` along ``dim``.

    ``input`` is whole or a list of its parts, ``op`` as for :func:`interlace.all_reduce`. Returns None, or
    a :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank before any data moves.

    >>> def on_rank():
    ...     output = torch.empty(1 + 2 * interlace.get_rank())
    ...     interlace.reduce_scatter_v(output, torch.arange(4.0), [1, 3])
    ...     return output.tolist()
    >>> interlace.run(on_rank, 2)
    [[0.0], [2.0, 4.0, 6.0]]
    """
    communicator = resolve(group).on(output)
    with communicator.accepting("reduce_scatter"):
        parts = split("input", input, "input_split_sizes", input_split_sizes, dim, communicator)
    return _reduce_scatter(communicator, (output, parts), (op,), async_op)


def gather_v(
    tensor: torch.Tensor,
    output: Whole | None = None,
    sizes: Sequence[int] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    dim: int = 0,
) -> Work | None:
    """Gather every rank's ``tensor``, of lengths ``sizes`` along ``dim``, into ``output`` of rank ``dst``.

    ``output`` and ``sizes`` are None on other ranks; ``dst`` is 0 by default. Returns None, or a
    :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank before any data moves.

    >>> def on_rank():
    ...     rank = interlace.get_rank()
    ...     whole = (torch.empty(3), [1, 2]) if rank == 0 else ()
    ...     interlace.gather_v(torch.full((1 + rank,), float(rank)), *whole)
    ...     return whole[0].tolist() if whole else None
    >>> interlace.run(on_rank, 2)
    [[0.0, 1.0, 1.0], None]
    """
    communicator = resolve(group).on(tensor)
    parts = None
    if output is not None:
        with communicator.accepting("gather"):
            parts = split("output", output, "sizes", sizes, dim, communicator)
    return _gather(communicator, (tensor, parts), (dst, group_dst), async_op)


def scatter_v(
    tensor: torch.Tensor,
    input: Whole | None = None,
    sizes: Sequence[int] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    dim: int = 0,
) -> Work | None:
    """``tensor`` becomes this rank's part, ``sizes[rank]`` long along ``dim``, of rank ``src``'s input.

    ``input`` and ``sizes`` are None on other ranks; ``src`` is 0 by default. Returns None, or a
    :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank before any data moves.

    >>> def on_rank():
    ...     tensor = torch.empty(1 + interlace.get_rank())
    ...     whole = (torch.arange(3.0), [1, 2]) if interlace.get_rank() == 0 else ()
    ...     interlace.scatter_v(tensor, *whole)
    ...     return tensor.tolist()
    >>> interlace.run(on_rank, 2)
    [[0.0], [1.0, 2.0]]
    """
    communicator = resolve(group).on(tensor)
    parts = None
    if input is not None:
        with communicator.accepting("scatter"):
            parts = split("input", input, "sizes", sizes, dim, communicator)
    return _scatter(communicator, (tensor, parts), (src, group_src), async_op)


def all_to_all_v(
    output: Whole,
    input: Whole,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    dim: int = 0,
) -> Work | None:
    """Rank r gets part r of every rank's ``input``, in rank order, in ``output``; parts are along ``dim``.

    ``output_split_sizes[s]`` is the length of what comes from rank s, ``input_split_sizes[r]`` of what goes
    to rank r. Returns None, or a :class:`Work` with ``async_op``. Raises ValueError or TypeError on every
    rank before any data moves. With ``dim=0`` as ``torch.distributed.all_to_all_single``.

    >>> def on_rank():
    ...     rank = interlace.get_rank()
    ...     output = torch.empty(1, 2 + 2 * rank)  # parts are columns: 1 for rank 0, 2 for rank 1
    ...     interlace.all_to_all_v(output, torch.full((1, 3), float(rank)), [1 + rank] * 2, [1, 2], dim=1)
    ...     return output.tolist()
    >>> interlace.run(on_rank, 2)
    [[[0.0, 1.0]], [[0.0, 0.0, 1.0, 1.0]]]
    """
    communicator = resolve(group).on(input)
    with communicator.accepting("all_to_all"):
        outputs = split(
            "output", output, "output_split_sizes", output_split_sizes, dim, communicator
        )
        inputs = split("input", input, "input_split_sizes", input_split_sizes, dim, communicator)
    return _all_to_all(communicator, (outputs, inputs), (), async_op)
