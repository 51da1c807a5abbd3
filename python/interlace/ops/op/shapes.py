"""Results of ops, also as fake tensors, from an op's arguments and the group's size, which comes last.

Kernels and fake kernels share these functions, so a compiled graph and the run agree on every stride. Sizes
may be symbolic.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks


def dimension(name: str, dim: int, ndim: int) -> int:
    """Return ``dim`` counted from 0. 0-dim tensors have a dimension 0."""
    return checks.index(name, dim, max(ndim, 1))


def like(input: torch.Tensor, *_: Any) -> torch.Tensor:
    return input.new_empty(input.shape)


def gathered_tensor(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Make ``[.., size * n, ..]`` for ``input`` of ``[.., n, ..]``; ``[size]`` for a 0-dim one."""
    *_, dim, size = rest
    dim = dimension("gather_dim", dim, input.dim())
    if not input.dim():
        return input.new_empty((size,))
    return input.new_empty([n * size if i == dim else n for i, n in enumerate(input.shape)])


def scattered_tensor(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Make ``[.., n / size, ..]``. Raise ValueError unless ``size`` divides ``n``."""
    *_, dim, size = rest
    if not input.dim():
        raise ValueError("input must have at least 1 dimension, got a 0-dim tensor")
    dim = dimension("scatter_dim", dim, input.dim())
    part = own_length(input.shape[dim], size, f"dimension {dim} of input")
    return input.new_empty([part if i == dim else n for i, n in enumerate(input.shape)])


def own_length(length: Any, size: int, name: str, part: Any = None) -> Any:
    """Return ``part``, this rank's part of ``length``; if it is None, an equal part."""
    if part is not None:
        return part
    if isinstance(length, int) and isinstance(size, int) and length % size:
        raise ValueError(
            f"{name} has length {length}, which the group's size {size} does not divide"
        )
    return length // size


def exchanged_tensor(
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    size: int,
) -> torch.Tensor:
    """Make an all_to_all's result along dim 0: rows as in ``output_split_sizes`` or in the input."""
    if not input.dim():
        raise ValueError("input must have at least 1 dimension, got a 0-dim tensor")
    for name, sizes in (
        ("output_split_sizes", output_split_sizes),
        ("input_split_sizes", input_split_sizes),
    ):
        if sizes is None:
            own_length(input.shape[0], size, f"dimension 0 of input, without {name},")
        elif isinstance(size, int) and len(sizes) != size:
            raise ValueError(f"{name} must have one entry per rank, {size}, got {len(sizes)}")
    rows = input.shape[0] if output_split_sizes is None else sum(output_split_sizes)
    return input.new_empty([rows, *input.shape[1:]])


def permutation(src_dst: Sequence[int], size: int) -> None:
    if sorted(src_dst) != list(range(size)):
        raise ValueError(f"src_dst must have each rank of 0..{size - 1} once, got {list(src_dst)}")
