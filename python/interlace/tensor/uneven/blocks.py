"""Blocks of a whole tensor, one per rank: moved from one rank to all, from all to one, and summed.

A block says where a rank's part lies in the whole, ``(start, length)`` along each dim. Several ranks may
have the same block, of which they hold replicas. Nothing here is recorded for backward.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from interlace.kernels.tiling import split_rows
from interlace.ops.collectives import rooted
from interlace.ops.op.sim_backward import in_rank
from interlace.runtime.core.communicator import Communicator

Block = tuple[tuple[int, int], ...]


def shape_of(block: Block) -> tuple[int, ...]:
    return tuple(length for _, length in block)


def cut(whole: torch.Tensor, block: Block) -> torch.Tensor:
    for dim, (start, length) in enumerate(block):
        whole = whole.narrow(dim, start, length)
    return whole


def along(shape: Sequence[int], dim: int, lengths: Sequence[int]) -> list[Block]:
    """Blocks of ``lengths`` along ``dim``, one after another."""
    starts = [0, *accumulate(lengths)]
    every = [(0, length) for length in shape]
    return [
        (*every[:dim], (start, length), *every[dim + 1 :])
        for start, length in zip(starts, lengths, strict=False)
    ]


def chunk_lengths(total: int, count: int) -> list[int]:
    """The lengths that ``torch.chunk`` cuts ``total`` into, zeros where it makes fewer than ``count``."""
    return [length for _, length in split_rows(total, count)]


def wide(dtype: torch.dtype, accumulate: str | None = "fp32") -> torch.dtype:
    """In what sums of ``dtype`` are accumulated: fp32 if that is wider and ``accumulate`` is not None."""
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if narrow and accumulate is not None else dtype


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, in a dtype of that size whose elements torch moves by any of its functions."""
    return tensor.view(_BITS[tensor.element_size()])


def empty(communicator: Communicator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=communicator.place.device)


def scatter(
    communicator: Communicator,
    whole: torch.Tensor | None,
    blocks: Sequence[Block | None],
    root: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """This rank's block of ``whole``, which is on ``root``; None, and nothing is sent, if it has none."""
    own = blocks[communicator.rank]
    out = empty(communicator, (0,) if own is None else shape_of(own), dtype)
    parts = None
    if whole is not None:
        parts = [whole.new_empty(0) if each is None else cut(whole, each) for each in blocks]
    in_rank(lambda: rooted._scatter(communicator, (out, parts), (None, root)))
    return None if own is None else out


def gather(
    communicator: Communicator,
    part: torch.Tensor,
    blocks: Sequence[Block | None],
    root: int,
    shape: Sequence[int],
) -> torch.Tensor | None:
    """On ``root``: the whole of every rank's ``part``; elsewhere None. Who has no block sends nothing."""
    if blocks[communicator.rank] is None:
        part = part.new_empty(0)
    whole = outputs = None
    if communicator.rank == root:
        whole = empty(communicator, shape, part.dtype)
        outputs = [part.new_empty(0) if each is None else cut(whole, each) for each in blocks]
    in_rank(lambda: rooted._gather(communicator, (part, outputs), (None, root)))
    return whole


def gather_sum(
    communicator: Communicator,
    part: torch.Tensor,
    blocks: Sequence[Block],
    root: int,
    shape: Sequence[int],
) -> torch.Tensor | None:
    """Gather as :func:`gather`; of ranks with the same block, the sum of theirs, in fp32, in rank order."""
    if len(set(blocks)) == len(blocks):
        return gather(communicator, part, blocks, root, shape)
    outputs = None
    if communicator.rank == root:
        outputs = [empty(communicator, shape_of(each), part.dtype) for each in blocks]
    in_rank(lambda: rooted._gather(communicator, (part, outputs), (None, root)))
    if outputs is None:
        return None
    whole = torch.zeros(tuple(shape), dtype=wide(part.dtype), device=part.device)
    for block, replica in zip(blocks, outputs, strict=True):
        cut(whole, block).add_(replica)
    return whole.to(part.dtype)
