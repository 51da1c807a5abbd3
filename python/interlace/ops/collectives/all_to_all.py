"""Every rank sends a part to every rank; and ``*_v``, collectives of parts that differ in length.

A whole is one tensor, the parts of all ranks one after another along ``dim``, or a list with one tensor per
rank. ``sizes`` are the lengths of the parts along ``dim``, by rank, the same on every rank that has the
whole. None stands for the lengths of a list's tensors, or for equal lengths of one tensor. Ranks compare
the length of each part before any data moves.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.checks import apart, disjoint, fill_dense, one_per_rank, remember
from interlace.arguments.words import AnyReduceOp, Group
from interlace.groups.groups import resolve
from interlace.ops.collectives.rooted import _gather, _scatter
from interlace.ops.collectives.rootless import _all_gather, _reduce_scatter
from interlace.runtime.core.call import Call, PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.memory import contiguous, movable, overlap
from interlace.runtime.core.stream import Event
from interlace.runtime.core.work import Work


def _pairwise(op: str, relation: str, output: str, input: str) -> Callable[[Sequence[Any]], None]:
    """Return a check that each rank expects what the other sends; parts are (expected, sent)."""

    def match(parts: Sequence[Any]) -> None:
        for receiver, (expected, _) in enumerate(parts):
            for sender, (_, sent) in enumerate(parts):
                if expected[sender] != sent[receiver]:
                    raise ValueError(
                        f"{op}: {output}[{sender}] {relation} {expected[sender]} on rank {receiver}, "
                        f"{input}[{receiver}] {relation} {sent[receiver]} on rank {sender}"
                    )

    return match


def _prepare_exchange(
    communicator: Communicator,
    call: Call,
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    record: Sequence[torch.Tensor],
) -> PreparedCall:
    shared = not disjoint([*inputs, *outputs])
    if shared:
        apart("output_tensor_list", outputs, "", [], communicator.rank, written=True)
        shared = any(overlap(each, output) for each in inputs for output in outputs)

    def start() -> Event | None:
        # peers may fill an output while others have not yet read an input in the same memory
        parts = [
            contiguous(movable(each).clone().view(each.dtype) if shared else each)
            for each in inputs
        ]
        return fill_dense(
            communicator,
            outputs,
            lambda targets: communicator.engine.all_to_all(call, targets, parts),
        )

    return start, record, call


def checked_all_to_all(
    communicator: Communicator,
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
) -> PreparedCall:
    first = input_tensor_list[0] if isinstance(input_tensor_list, (list, tuple)) else None
    first = checks.import_array("input_tensor_list[0]", first)
    dtype = first.dtype if isinstance(first, torch.Tensor) else torch.float32
    inputs = one_per_rank(
        "input_tensor_list", input_tensor_list, "input_tensor_list[0]", dtype, communicator,
        written=False,
    )  # fmt: skip
    outputs = one_per_rank(
        "output_tensor_list", output_tensor_list, "input_tensor_list[0]", dtype, communicator,
        written=True,
    )  # fmt: skip
    expected = tuple(output.shape for output in outputs)
    sent = tuple(each.shape for each in inputs)
    key = ("all_to_all", dtype, *expected, *sent)
    call = communicator.calls.get(key)
    if call is None:
        call = Call(
            "all_to_all",
            (("dtype", dtype),),
            part=(tuple(map(tuple, expected)), tuple(map(tuple, sent))),
            match=_pairwise("all_to_all", "has shape", "output_tensor_list", "input_tensor_list"),
            equal_fits=expected == sent and len(set(sent)) == 1,
        )
        remember(communicator, key, call)
    return _prepare_exchange(communicator, call, outputs, inputs, output_tensor_list)


_all_to_all = internal_form("all_to_all", checked_all_to_all)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Send ``input_tensor_list[r]`` to rank r and receive into ``output_tensor_list`` by rank. Any dtype.

    Shapes may differ between pairs; rank r's output from rank s has the shape of s's input for r. Returns
    None, or a :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank before any data
    moves. Semantics: ``torch.distributed.all_to_all``.

    >>> def on_rank():
    ...     outputs = [torch.empty(1) for _ in range(2)]
    ...     inputs = [torch.tensor([10.0 * interlace.get_rank() + r]) for r in range(2)]
    ...     interlace.all_to_all(outputs, inputs)
    ...     return torch.cat(outputs).tolist()
    >>> interlace.run(on_rank, 2)
    [[0.0, 10.0], [1.0, 11.0]]
    """
    lists = output_tensor_list, input_tensor_list
    return _all_to_all(resolve(group).on(input_tensor_list), lists, (), async_op)


def _absent(split_sizes: Any) -> bool:
    return split_sizes is None or (hasattr(split_sizes, "__len__") and len(split_sizes) == 0)


def whole_numbers(name: str, value: Any) -> list[int]:
    try:
        return [operator.index(each) for each in value]
    except TypeError:
        raise TypeError(f"{name} must be a list of ints, got {value!r}") from None


def one_length_per_rank(name: str, value: Any, count: int) -> tuple[int, ...]:
    lengths = tuple(whole_numbers(name, value))
    if len(lengths) != count or min(lengths) < 0:
        raise ValueError(
            f"{name} must be one length per rank, {count}, none of them negative, got {list(lengths)}"
        )
    return lengths


def sizes(
    name: str, value: Any, total: int, of: str, communicator: Communicator
) -> tuple[int, ...]:
    """Return lengths along a dim, one per rank, that add up to ``total``; equal if ``value`` is empty."""
    world_size = communicator.world_size
    if _absent(value):
        if total % world_size:
            raise ValueError(
                f"{of} has {total} rows, which world size {world_size} does not divide; give {name}"
            )
        return (total // world_size,) * world_size
    lengths = one_length_per_rank(name, value, world_size)
    if sum(lengths) != total:
        raise ValueError(f"{name} must add up to the {total} rows of {of}, got {list(lengths)}")
    return lengths


def checked_all_to_all_single(
    communicator: Communicator,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> PreparedCall:
    name = "all_to_all_single"
    data = checks.source("input", input, communicator)
    out = checks.target("output", output, communicator)
    even = _absent(output_split_sizes) and _absent(input_split_sizes)
    key: Any = (name, data.dtype, data.shape, out.dtype, out.shape)
    known = communicator.calls.get(key) if even else None
    if (
        known is not None
        and data.numel()
        and data.is_contiguous()
        and out.is_contiguous()
        and not overlap(data, out)
    ):
        return (lambda: communicator.engine.all_to_all(known, out, data), (output,), known)
    if out.dtype is not data.dtype:
        checks.same_dtype("output", out.dtype, "input", data.dtype)
    if not data.dim() or not out.dim() or data.shape[1:] != out.shape[1:]:
        raise ValueError(
            f"output and input must be equal in shape off dim 0, got {tuple(out.shape)} and "
            f"{tuple(data.shape)}"
        )
    sent = sizes("input_split_sizes", input_split_sizes, data.shape[0], "input", communicator)
    expected = sizes("output_split_sizes", output_split_sizes, out.shape[0], "output", communicator)
    if not even or data.shape != out.shape:
        key = (name, data.dtype, data.shape, expected, sent)
    call = communicator.calls.get(key)
    if call is None:
        call = Call(
            name,
            (("dtype of input", data.dtype), ("shape of input off dim 0", tuple(data.shape[1:]))),
            part=(expected, sent),
            match=_pairwise(name, "is", "output_split_sizes", "input_split_sizes"),
            equal_fits=expected == sent and len(set(sent)) == 1,
        )
        remember(communicator, key, call)
    outputs, inputs = list(torch.split(out, list(expected))), list(torch.split(data, list(sent)))
    return _prepare_exchange(communicator, call, outputs, inputs, [output])


_all_to_all_single = internal_form("all_to_all_single", checked_all_to_all_single)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Send part r of ``input`` to rank r and receive into ``output`` in rank order. Any dtype.

    Parts are rows: ``input_split_sizes[r]`` rows of ``input`` go to rank r, ``output_split_sizes[s]`` rows
    of ``output`` come from rank s; None or empty stands for equal parts. Returns None, or a :class:`Work`
    with ``async_op``. Raises ValueError or TypeError on every rank before any data moves. Semantics:
    ``torch.distributed.all_to_all_single``.

    >>> def on_rank():
    ...     output = torch.empty(4)
    ...     interlace.all_to_all_single(output, torch.arange(4.0) + 10 * interlace.get_rank())
    ...     return output.tolist()
    >>> interlace.run(on_rank, 2)
    [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]
    """
    splits = output_split_sizes, input_split_sizes
    return _all_to_all_single(resolve(group).on(input), (output, input), splits, async_op)


Whole = torch.Tensor | list[torch.Tensor]


def split(
    name: str,
    whole: Any,
    sizes_name: str,
    lengths: Sequence[int] | None,
    dim: int,
    communicator: Communicator,
) -> list[torch.Tensor]:
    """Return the parts of ``whole``; raise unless ``lengths`` cut it into one part per rank."""
    whole = checks.import_array(name, whole)
    if not isinstance(whole, (torch.Tensor, list, tuple)):
        raise TypeError(
            f"{name} must be a tensor or a list of tensors, got {checks.describe(whole)}"
        )
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
    """Overwrite ``tensor`` with this rank's part, ``sizes[rank]`` long along ``dim``, of ``src``'s input.

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
    """Send part r of ``input`` to rank r and receive into ``output`` in rank order; parts are along
    ``dim``.

    ``output_split_sizes[s]`` is the length of the part from rank s, ``input_split_sizes[r]`` of the part
    for rank r. Returns None, or a :class:`Work` with ``async_op``. Raises ValueError or TypeError on every
    rank before any data moves. With ``dim=0`` like ``torch.distributed.all_to_all_single``.

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
