"""Plain collectives of all ranks at once, and what the references of other ops are made of.

A reference gets the arguments of an op by rank, in the order of the group, and its size, and returns the
outputs, a list per rank. Plain arguments are the same on all ranks, except the sizes of an all_to_all.
Shapes, rounding and the order of sums are those of the ops themselves.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from interlace.arguments import checks, reduce_ops
from interlace.ops.op import shapes
from interlace.runtime.numerics import reductions

Tensors = list[torch.Tensor]
Outputs = list[Tensors]


def inputs(ranks: Sequence[Any]) -> Tensors:
    return [each.input for each in ranks]


def alike(op: str, name: str, tensors: Sequence[torch.Tensor], but: int | None = None) -> None:
    """ValueError or TypeError unless dtypes are equal, and shapes, apart from dimension ``but``."""
    for what, kind, values in (
        ("dtype", TypeError, [tensor.dtype for tensor in tensors]),
        ("shape", ValueError, [_lengths(tensor, but) for tensor in tensors]),
    ):
        checks.equal_on_all(op, f"{what} of {name}", values, kind=kind)


def _lengths(tensor: torch.Tensor, but: int | None) -> tuple[Any, ...]:
    skipped = None if but is None else but % tensor.dim()
    return tuple(n for i, n in enumerate(tensor.shape) if i != skipped)


def _rooted(name: str, root: int, size: int) -> None:
    if not 0 <= root < size:
        raise ValueError(f"{name} must be within 0..{size - 1}, a rank of the group, got {root}")


def _copies(tensor: torch.Tensor, size: int) -> Outputs:
    return [[tensor]] + [[tensor.clone()] for _ in range(size - 1)]


def reduced(op: str, inputs: Tensors, reduce_op: Any) -> torch.Tensor:
    """The reduction of all ranks' inputs, in their order."""
    alike(op, "input", inputs)
    name, _ = checks.reduce_op(reduce_op)
    reduce_ops.check_dtype(op, name, "input", inputs[0].dtype)
    total = shapes.like(inputs[0])
    if not (total.is_meta or isinstance(total, FakeTensor)):
        reductions.fold(name, [each.contiguous() for each in inputs], total)
    return total


def all_reduce(ranks: Sequence[Any], size: int) -> Outputs:
    return _copies(reduced("all_reduce", inputs(ranks), ranks[0].reduce_op), size)


def reduce(ranks: Sequence[Any], size: int) -> Outputs:
    dst = ranks[0].dst
    _rooted("dst", dst, size)
    total = reduced("reduce", inputs(ranks), ranks[0].reduce_op)
    return [[total if rank == dst else torch.zeros_like(total)] for rank in range(size)]


def reduce_scatter(ranks: Sequence[Any], size: int) -> Outputs:
    first = ranks[0]
    return scattered(inputs(ranks), first.reduce_op, first.scatter_dim, size)


def scattered(inputs: Tensors, reduce_op: str, dim: int, size: int) -> Outputs:
    """The parts of the reduction, by rank."""
    shapes.scattered(inputs[0], dim, size)  # which says what is wrong
    return _slices(reduced("reduce_scatter", inputs, reduce_op), dim, size)


def _slices(tensor: torch.Tensor, dim: int, size: int) -> Outputs:
    return [[shapes.like(part).copy_(part)] for part in tensor.tensor_split(size, dim)]


def gathered(op: str, inputs: Tensors, dim: int, size: int) -> torch.Tensor:
    """All ranks' inputs, one behind the other along ``dim``."""
    alike(op, "input", inputs)
    whole = shapes.gathered(inputs[0], dim, size)
    for part, input in zip(whole.tensor_split(size, dim), inputs, strict=True):
        part.copy_(input)
    return whole


def all_gather(ranks: Sequence[Any], size: int) -> Outputs:
    return _copies(gathered("all_gather", inputs(ranks), ranks[0].gather_dim, size), size)


def gather(ranks: Sequence[Any], size: int) -> Outputs:
    dst = ranks[0].dst
    _rooted("dst", dst, size)
    whole = gathered("gather", inputs(ranks), ranks[0].gather_dim, size)
    return [[whole if rank == dst else torch.zeros_like(whole)] for rank in range(size)]


def scatter(ranks: Sequence[Any], size: int) -> Outputs:
    src, dim = ranks[0].src, ranks[0].scatter_dim
    _rooted("src", src, size)
    alike("scatter", "input", inputs(ranks))
    shapes.scattered(ranks[0].input, dim, size)
    return _slices(ranks[src].input, dim, size)


def broadcast(ranks: Sequence[Any], size: int) -> Outputs:
    src = ranks[0].src
    _rooted("src", src, size)
    alike("broadcast", "input", inputs(ranks))
    source = ranks[src].input
    return [[shapes.like(source).copy_(source)] for _ in range(size)]


def permute(ranks: Sequence[Any], size: int) -> Outputs:
    targets = list(ranks[0].src_dst)
    alike("permute", "input", inputs(ranks))
    shapes.permutation(targets, size)
    sources = [ranks[targets.index(rank)].input for rank in range(size)]
    return [[shapes.like(source).copy_(source)] for source in sources]


def all_to_all(ranks: Sequence[Any], size: int) -> Outputs:
    outputs = [
        shapes.exchanged(each.input, each.output_split_sizes, each.input_split_sizes, size)
        for each in ranks
    ]
    alike("all_to_all", "input", inputs(ranks), but=0)
    parts = [
        _split(rank, each.input, each.input_split_sizes, size) for rank, each in enumerate(ranks)
    ]
    for target, (output, own) in enumerate(zip(outputs, ranks, strict=True)):
        for source, place in enumerate(_split(target, output, own.output_split_sizes, size)):
            part = parts[source][target]
            if part.shape != place.shape:
                raise ValueError(
                    f"all_to_all: rank {source} sends {part.shape[0]} rows to rank {target}, which "
                    f"expects {place.shape[0]}"
                )
            place.copy_(part)
    return [[output] for output in outputs]


def _split(
    rank: int, tensor: torch.Tensor, sizes: Sequence[int] | None, size: int
) -> Sequence[torch.Tensor]:
    lengths = [tensor.shape[0] // size] * size if sizes is None else list(sizes)
    if sum(lengths) != tensor.shape[0]:
        raise ValueError(
            f"all_to_all: input_split_sizes {lengths} of rank {rank} do not add up to the "
            f"{tensor.shape[0]} rows of its input"
        )
    return torch.split(tensor, lengths)


def rank(ranks: Sequence[Any], size: int) -> Outputs:
    return [[torch.tensor(rank, device=ranks[0].input.device)] for rank in range(size)]
