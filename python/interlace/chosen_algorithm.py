"""``algorithm="kernel"`` and ``"copy"`` of a plain collective: what an engine would otherwise choose.

Both run on a rank's streams in every place. They sum and average; an engine does all the other ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace import checks
from interlace.kernels.tiling import split_rows
from interlace.runtime import collective_algorithms as algorithms
from interlace.runtime import configuration
from interlace.runtime.communicator import Communicator
from interlace.runtime.stream import Event

COLLECTIVE_ALGORITHMS = ("auto", "kernel", "copy")
WHOLE_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REDUCIBLE_DTYPES = (*checks.FLOAT_DTYPES, *WHOLE_DTYPES)


def check(
    algorithm: str, dtype: torch.dtype, communicator: Communicator, op: str | None = None
) -> str:
    """``algorithm`` if it can do ``op`` (None: only move) for ``dtype``; ValueError or TypeError if not."""
    rank = communicator.rank
    checks.one_of("algorithm", algorithm, COLLECTIVE_ALGORITHMS, rank)
    if algorithm == "kernel" and dtype not in algorithms.KERNEL_DTYPES:
        raise TypeError(
            f'algorithm="kernel" supports float32, float16 and bfloat16, got {dtype} on rank {rank}'
        )
    if algorithm != "auto" and op is not None:
        if op not in checks.REDUCE_OPS:
            raise ValueError(
                f'algorithm="{algorithm}" reduces with op {" or ".join(checks.REDUCE_OPS)}, got {op!r} '
                f"on rank {rank}"
            )
        if dtype not in REDUCIBLE_DTYPES or (op == "avg" and not dtype.is_floating_point):
            raise TypeError(
                f'algorithm="{algorithm}" does not reduce {dtype} with op {op!r}, on rank {rank}'
            )
    return algorithm


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A flat, contiguous tensor in a dtype that only has to be moved."""
    flat = tensor.reshape(-1)
    # a single element counts as contiguous with any stride, but is viewed as bytes with stride 1 only
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def all_gather(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    input: torch.Tensor,
    algorithm: str,
) -> Event:
    """As ``Engine.all_gather``; all tensors are dense."""
    lengths = [part.numel() for part in outputs]
    if algorithm == "copy" or not sum(lengths):
        return algorithms.all_gather_copy(
            communicator, _bytes_of(input), [_bytes_of(part) for part in outputs]
        )
    whole = torch.empty(sum(lengths), dtype=input.dtype, device=input.device)
    config = configuration.choose(communicator.place, input.dtype, max(lengths), 1, 1)
    algorithms.all_gather_kernel(communicator, input.reshape(-1), whole, lengths, config)
    for part, piece in zip(outputs, whole.split(lengths), strict=True):
        communicator.compute.copy(part, piece.view(part.shape), "output")
    return communicator.compute.record()


def reduce_scatter(
    communicator: Communicator,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    op: str,
    algorithm: str,
) -> Event:
    """As ``Engine.reduce_scatter``; all tensors are dense."""
    lengths, average = [part.numel() for part in inputs], op == "avg"
    flat = output.view(-1)
    if algorithm == "copy" or not sum(lengths):
        parts = [part.reshape(-1) for part in inputs]
        return algorithms.reduce_scatter_copy(communicator, parts, flat, average=average)
    whole = torch.cat([part.reshape(-1) for part in inputs])
    config = configuration.choose(communicator.place, output.dtype, max(lengths), 1, 1)
    return algorithms.reduce_scatter_kernel(
        communicator, whole, flat, lengths, config, average=average
    )


def all_reduce(communicator: Communicator, tensor: torch.Tensor, op: str, algorithm: str) -> Event:
    """As ``Engine.all_reduce``; ``tensor`` is dense."""
    flat, average = tensor.view(-1), op == "avg"
    if algorithm == "copy" or not flat.numel():
        segments = split_rows(flat.numel(), communicator.world_size)
        return algorithms.all_reduce_copy(communicator, flat, flat, segments, average=average)
    config = configuration.choose(communicator.place, tensor.dtype, flat.numel(), 1, 1)
    return algorithms.all_reduce_kernel(communicator, flat, flat, config, average=average)
