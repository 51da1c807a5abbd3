"""The plain collectives that the fused ops need, with torch.distributed's semantics.

``all_gather(output, tensor)``, ``reduce_scatter(output, input)``, ``all_reduce(tensor)``. The output is
a tensor or a list of tensors; for a tensor its shape decides between concatenating and stacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace import checks
from interlace.groups import resolve
from interlace.kernels.tiling import split_rows
from interlace.runtime import collective_algorithms as algorithms
from interlace.runtime import configuration
from interlace.runtime.communicator import Communicator
from interlace.runtime.stream import Event, Outcome

COLLECTIVE_ALGORITHMS = ("auto", "kernel", "copy")
WHOLE_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REDUCIBLE_DTYPES = (*checks.FLOAT_DTYPES, *WHOLE_DTYPES)


def _use_kernel(
    communicator: Communicator, algorithm: str, dtype: torch.dtype, elements: int
) -> bool:
    """Whether to run the Triton kernel. "auto": wherever it is the fast or the instructive way."""
    supported = dtype in algorithms.KERNEL_DTYPES
    if algorithm == "kernel" and not supported:
        raise TypeError(
            f'algorithm="kernel" supports float32, float16 and bfloat16, got {dtype} '
            f"on rank {communicator.rank}"
        )
    if algorithm == "auto":
        return supported and elements > 0 and not communicator.place.direct_access
    return algorithm == "kernel" and elements > 0


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A flat, contiguous tensor in a dtype that only has to be moved."""
    flat = tensor.reshape(-1)
    # a single element counts as contiguous with any stride, but is viewed as bytes with stride 1 only
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def all_gather(
    output: torch.Tensor | list[torch.Tensor],
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> Any:
    """Gather every rank's ``tensor`` into ``output``. Any dtype.

    Parameters
    ----------
    output : a list with one tensor per rank, each of that rank's shape (shapes may differ); or one
        tensor, ``(world_size * n, ...)`` to concatenate along dim 0 or ``(world_size, n, ...)`` to stack.
    algorithm : "auto", "kernel" (Triton), "copy" (copy engine).

    Returns None, or a :class:`Work` with ``async_op``. Semantics: ``torch.distributed.all_gather`` and
    ``all_gather_into_tensor``. Raises ValueError or TypeError before any data moves.

    >>> import interlace, torch
    >>> def gather():
    ...     out = torch.empty(2, dtype=torch.int64)
    ...     interlace.all_gather(out, torch.tensor([interlace.get_rank()]))
    ...     return out
    >>> interlace.run(gather, 2)
    [tensor([0, 1]), tensor([0, 1])]
    """
    communicator = resolve(group)
    rank, world_size = communicator.rank, communicator.world_size
    with communicator.accepting("all_gather"):
        algorithm = checks.one_of("algorithm", algorithm, COLLECTIVE_ALGORITHMS, rank)
        tensor = checks.tensor("tensor", tensor, communicator)
        parts = _parts("output", output, tensor, communicator)
        for part in parts:
            checks.output("output", part, communicator)
        if tuple(parts[rank].shape) != tuple(tensor.shape):
            raise ValueError(
                f"output[{rank}] has shape {tuple(parts[rank].shape)}, tensor has {tuple(tensor.shape)}, "
                f"on rank {rank}"
            )
        expected = [tuple(part.shape) for part in parts]

    def host() -> Outcome:
        mine = (tuple(tensor.shape), tensor.dtype, algorithm, expected)
        answers = communicator.agree("all_gather", mine)
        checks.equal_on_all(
            "all_gather", "dtype of tensor", [a[1] for a in answers], rank, kind=TypeError
        )
        checks.equal_on_all("all_gather", "algorithm", [a[2] for a in answers], rank)
        for receiver, (_, _, _, outputs) in enumerate(answers):
            for source, (shape, _, _, _) in enumerate(answers):
                if outputs[source] != shape:
                    raise ValueError(
                        f"all_gather: output[{source}] has shape {outputs[source]} on rank "
                        f"{receiver}, tensor has {shape} on rank {source}"
                    )
        return Outcome(None, _gather(communicator, tensor, output, parts, algorithm))

    # shapes on other ranks are known only after the exchange; all of it may run in the background
    assert world_size == len(parts)
    return _finished(communicator.run("all_gather", host, async_op=async_op), async_op)


def _gather(
    communicator: Communicator,
    tensor: torch.Tensor,
    output: Any,
    parts: list[torch.Tensor],
    algorithm: str,
) -> Event:
    total = sum(part.numel() for part in parts)
    flat = tensor.contiguous().view(-1)
    whole = isinstance(output, torch.Tensor) and output.is_contiguous()
    if _use_kernel(communicator, algorithm, tensor.dtype, total):
        target = (
            output.detach().view(-1)
            if whole
            else torch.empty(total, dtype=tensor.dtype, device=tensor.device)
        )
        lengths = [part.numel() for part in parts]
        config = configuration.choose(communicator.place, tensor.dtype, max(lengths), 1, 1)
        event = algorithms.all_gather_kernel(communicator, flat, target, lengths, config)
        if whole:
            return event
        pieces = list(target.split(lengths))
    else:
        pieces = [
            part.view(-1)
            if part.is_contiguous()
            else torch.empty(part.numel(), dtype=part.dtype, device=part.device)
            for part in parts
        ]
        event = algorithms.all_gather_copy(
            communicator, _bytes_of(flat), [_bytes_of(piece) for piece in pieces]
        )
        if all(part.is_contiguous() for part in parts):
            return event
    for part, piece in zip(parts, pieces, strict=True):
        if part.data_ptr() != piece.data_ptr():
            communicator.compute.copy(part, piece.view(part.shape), "output")
    return communicator.compute.record()


def _parts(
    name: str, whole: Any, like: torch.Tensor, communicator: Communicator
) -> list[torch.Tensor]:
    """One tensor per rank from a list, or from one tensor in cat or stack form."""
    rank, world_size = communicator.rank, communicator.world_size
    if isinstance(whole, torch.Tensor):
        tensor = checks.tensor(name, whole, communicator)
        checks.same_dtype(name, tensor.dtype, "tensor", like.dtype, rank)
        shape = tuple(like.shape)
        if tuple(tensor.shape) == (world_size, *shape):
            return list(tensor.unbind(0))
        if shape and tuple(tensor.shape) == (world_size * shape[0], *shape[1:]):
            return [tensor.narrow(0, r * shape[0], shape[0]) for r in range(world_size)]
        forms = [str((world_size, *shape))]
        if shape:
            forms.insert(0, str((world_size * shape[0], *shape[1:])))
        raise ValueError(
            f"{name} must have shape {' or '.join(forms)} for tensors of {shape} and world size "
            f"{world_size}, got {tuple(tensor.shape)} on rank {rank}"
        )
    if not isinstance(whole, Sequence):
        raise TypeError(
            f"{name} must be a tensor or a list of tensors, got {type(whole).__name__} on rank {rank}"
        )
    if len(whole) != world_size:
        raise ValueError(
            f"{name} must have one tensor per rank, {world_size}, got {len(whole)} on rank {rank}"
        )
    parts = [checks.tensor(f"{name}[{r}]", part, communicator) for r, part in enumerate(whole)]
    for r, part in enumerate(parts):
        checks.same_dtype(f"{name}[{r}]", part.dtype, "tensor", like.dtype, rank)
    return parts


def _finished(result: Any, async_op: bool) -> Any:
    """torch's convention: a Work when asynchronous, else None."""
    return result if async_op else None


def _check_reduction(name: str, tensor: torch.Tensor, op: Any, rank: int) -> bool:
    """Whether to average; sums of whole numbers are exact, their averages are not defined here."""
    average = checks.one_of("op", op, checks.REDUCE_OPS, rank) == "avg"
    if tensor.dtype not in REDUCIBLE_DTYPES:
        raise TypeError(f"{name} of dtype {tensor.dtype} cannot be reduced, on rank {rank}")
    if average and not tensor.is_floating_point():
        raise TypeError(f'op="avg" needs a floating {name}, got {tensor.dtype} on rank {rank}')
    return average


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor | list[torch.Tensor],
    op: Any = "sum",
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> Any:
    """Reduce over ranks; rank r keeps part r in ``output``.

    Parameters
    ----------
    output : this rank's part.
    input : a list with one part per rank (lengths may differ, each equal to its owner's ``output``), or
        one tensor that is the parts concatenated along dim 0 or stacked.
    op : "sum" or "avg", or torch's ``ReduceOp.SUM`` / ``AVG``.

    Sums in rank order, fp32 for float16 and bfloat16. Returns None, or a :class:`Work` with
    ``async_op``. Semantics: ``torch.distributed.reduce_scatter`` and ``reduce_scatter_tensor``.
    """
    communicator = resolve(group)
    rank = communicator.rank
    with communicator.accepting("reduce_scatter"):
        algorithm = checks.one_of("algorithm", algorithm, COLLECTIVE_ALGORITHMS, rank)
        output = checks.output("output", output, communicator)
        average = _check_reduction("output", output, op, rank)
        parts = _parts("input", input, output, communicator)
        shapes = [tuple(part.shape) for part in parts]
        if shapes[rank] != tuple(output.shape):
            raise ValueError(
                f"input[{rank}] has shape {shapes[rank]}, output has {tuple(output.shape)}, on rank {rank}"
            )

    def host() -> Outcome:
        op_name = "reduce_scatter"
        answers = communicator.agree(op_name, (shapes, output.dtype, average, algorithm))
        checks.equal_on_all(op_name, "shapes of input", [a[0] for a in answers], rank)
        checks.equal_on_all(
            op_name, "dtype of input", [a[1] for a in answers], rank, kind=TypeError
        )
        checks.equal_on_all(
            op_name, "op", ["avg" if answer[2] else "sum" for answer in answers], rank
        )
        checks.equal_on_all(op_name, "algorithm", [a[3] for a in answers], rank)
        target = output if output.is_contiguous() else torch.empty_like(output).contiguous()
        lengths = [part.numel() for part in parts]
        if _use_kernel(communicator, algorithm, output.dtype, sum(lengths)):
            whole = torch.cat([part.reshape(-1) for part in parts])
            config = configuration.choose(communicator.place, output.dtype, max(lengths), 1, 1)
            event = algorithms.reduce_scatter_kernel(
                communicator, whole, target.view(-1), lengths, config, average=average
            )
        else:
            flat = [part.contiguous().view(-1) for part in parts]
            event = algorithms.reduce_scatter_copy(
                communicator, flat, target.view(-1), average=average
            )
        return Outcome(None, _copied(communicator, output, target, event))

    return _finished(communicator.run("reduce_scatter", host, async_op=async_op), async_op)


def _copied(
    communicator: Communicator, output: torch.Tensor, target: torch.Tensor, event: Event
) -> Event:
    """Bring a contiguous result into the strides of the caller's tensor."""
    if output.data_ptr() == target.data_ptr():
        return event
    communicator.compute.copy(output, target, "output")
    return communicator.compute.record()


def all_reduce(
    tensor: torch.Tensor,
    op: Any = "sum",
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> Any:
    """Reduce ``tensor`` over ranks, in place; every rank ends with the same bits.

    ``op`` is "sum" or "avg", or torch's ``ReduceOp.SUM`` / ``AVG``. "kernel" is one-shot, "copy" is
    two-shot. Returns None, or a :class:`Work` with ``async_op``. Semantics:
    ``torch.distributed.all_reduce``.

    >>> import interlace, torch
    >>> def reduce():
    ...     x = torch.full((2,), 1.0 + interlace.get_rank())
    ...     interlace.all_reduce(x)
    ...     return x
    >>> interlace.run(reduce, 2)
    [tensor([3., 3.]), tensor([3., 3.])]
    """
    communicator = resolve(group)
    rank = communicator.rank
    with communicator.accepting("all_reduce"):
        algorithm = checks.one_of("algorithm", algorithm, COLLECTIVE_ALGORITHMS, rank)
        tensor = checks.output("tensor", tensor, communicator)
        average = _check_reduction("tensor", tensor, op, rank)

    def host() -> Outcome:
        name = "all_reduce"
        mine = (tuple(tensor.shape), tensor.dtype, "avg" if average else "sum", algorithm)
        answers = communicator.agree(name, mine)
        checks.equal_on_all(name, "shape of tensor", [a[0] for a in answers], rank)
        checks.equal_on_all(name, "dtype of tensor", [a[1] for a in answers], rank, kind=TypeError)
        checks.equal_on_all(name, "op", [a[2] for a in answers], rank)
        checks.equal_on_all(name, "algorithm", [a[3] for a in answers], rank)
        target = tensor if tensor.is_contiguous() else tensor.contiguous()
        flat = target.view(-1)
        if _use_kernel(communicator, algorithm, tensor.dtype, flat.numel()):
            config = configuration.choose(communicator.place, tensor.dtype, flat.numel(), 1, 1)
            event = algorithms.all_reduce_kernel(communicator, flat, flat, config, average=average)
        else:
            segments = split_rows(flat.numel(), communicator.world_size)
            event = algorithms.all_reduce_copy(communicator, flat, flat, segments, average=average)
        return Outcome(None, _copied(communicator, tensor, target, event))

    return _finished(communicator.run("all_reduce", host, async_op=async_op), async_op)
