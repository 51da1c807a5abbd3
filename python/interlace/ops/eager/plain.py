"""Kernels of the collectives: each starts its op on a group, and says what it fills and what to wait for.

Outputs are made here, or are the caller's ``out``. What is not dim 0 goes as a list of slices, which the
op itself, not the caller, gathers and scatters in memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.collectives import rooted, rootless
from interlace.collectives.all_to_all import _all_to_all_single
from interlace.ops.eager import shapes
from interlace.ops.eager.pending import Started
from interlace.runtime.core.communicator import Communicator

Tensor = torch.Tensor


def _output(
    communicator: Communicator,
    op: str,
    out: Tensor | None,
    make: Callable[..., Tensor],
    *given: Any,
) -> Tensor:
    """``make(*given)``, or ``out`` if that is as good. All ranks hear of what is wrong on one."""
    with communicator.accepting(op):
        made = make(*given)
        if out is None:
            return made
        if out.shape != made.shape or out.dtype != made.dtype or out.device != made.device:
            raise ValueError(
                f"out must be {tuple(made.shape)} of {made.dtype} on {made.device}, got "
                f"{tuple(out.shape)} of {out.dtype} on {out.device}, on rank {communicator.rank}"
            )
        return out


def all_reduce(
    communicator: Communicator, input: Tensor, reduce_op: Any, out: Tensor | None = None
) -> Started:
    output = _output(communicator, "all_reduce", out, shapes.like, input)
    if output is not input:
        output.copy_(input)
    return Started([output], rootless._all_reduce(communicator, (output,), (reduce_op,), True))


def all_gather(
    communicator: Communicator, input: Tensor, gather_dim: int, out: Tensor | None = None
) -> Started:
    size = communicator.world_size
    output = _output(communicator, "all_gather", out, shapes.gathered, input, gather_dim, size)
    dim = gather_dim % max(input.dim(), 1)
    whole: Any = output
    if dim or not output.is_contiguous():
        whole = _parts(output, dim, size)
    return Started([output], rootless._all_gather(communicator, (whole, input), (), True))


def _parts(tensor: Tensor, dim: int, size: int) -> list[Tensor]:
    length = tensor.shape[dim] // size
    return [tensor.narrow(dim, rank * length, length) for rank in range(size)]


def reduce_scatter(
    communicator: Communicator,
    input: Tensor,
    reduce_op: Any,
    scatter_dim: int,
    out: Tensor | None = None,
) -> Started:
    size = communicator.world_size
    shape = (input, scatter_dim, size)
    output = _output(communicator, "reduce_scatter", out, shapes.scattered, *shape)
    dim = scatter_dim % input.dim()
    whole: Any = input
    if dim or not input.is_contiguous():
        whole = _parts(input, dim, size)
    work = rootless._reduce_scatter(communicator, (output, whole), (reduce_op,), True)
    return Started([output], work)


def all_to_all(
    communicator: Communicator,
    input: Tensor,
    received: Sequence[int] | None,
    sent: Sequence[int] | None,
    out: Tensor | None = None,
) -> Started:
    op, shape = "all_to_all_single", (input, received, sent, communicator.world_size)
    output = _output(communicator, op, out, shapes.exchanged, *shape)
    work = _all_to_all_single(communicator, (output, input), (received, sent), True)
    return Started([output], work)


def broadcast(
    communicator: Communicator, input: Tensor, src: int, out: Tensor | None = None
) -> Started:
    output = _output(communicator, "broadcast", out, shapes.like, input)
    if communicator.rank == src and output is not input:
        output.copy_(input)
    return Started([output], rooted._broadcast(communicator, (output,), (None, src), True))


def reduce(communicator: Communicator, input: Tensor, reduce_op: Any, dst: int) -> Started:
    """The reduction on ``dst``, zeros elsewhere."""
    output = shapes.like(input)
    if communicator.rank == dst:
        output.copy_(input)
        reduced = output
    else:
        reduced = input.contiguous()  # which an expanded gradient is not
        output.zero_()
    work = rooted._reduce(communicator, (reduced,), (None, dst, reduce_op), True)
    return Started([output], work)


def permute(communicator: Communicator, input: Tensor, src_dst: Sequence[int]) -> Started:
    """Rank r's input goes to rank ``src_dst[r]``."""
    size, rank = communicator.world_size, communicator.rank
    output = _output(communicator, "permute", None, shapes.permuted, input, src_dst, size)
    sent, received = [0] * size, [0] * size
    sent[src_dst[rank]] = received[list(src_dst).index(rank)] = input.numel()
    flat = output.view(-1), input.reshape(-1)
    work = _all_to_all_single(communicator, flat, (received, sent), True)
    return Started([output], work)


def gather(communicator: Communicator, input: Tensor, dst: int, gather_dim: int) -> Started:
    """Along ``gather_dim`` on ``dst``, zeros of the same shape elsewhere."""
    size = communicator.world_size
    output = _output(communicator, "gather", None, shapes.gathered, input, gather_dim, size)
    parts = None
    if communicator.rank == dst:
        parts = _parts(output, gather_dim % max(input.dim(), 1), size)
        if not input.dim():
            parts = [part.view(()) for part in parts]
    else:
        output.zero_()
    return Started([output], rooted._gather(communicator, (input, parts), (None, dst), True))


def scatter(communicator: Communicator, input: Tensor, src: int, scatter_dim: int) -> Started:
    """The own slice of the input of ``src`` along ``scatter_dim``; other ranks' inputs are not read."""
    size = communicator.world_size
    output = _output(communicator, "scatter", None, shapes.scattered, input, scatter_dim, size)
    parts = None
    if communicator.rank == src:
        parts = _parts(input, scatter_dim % input.dim(), size)
    return Started([output], rooted._scatter(communicator, (output, parts), (None, src), True))


def rank(communicator: Communicator, input: Tensor) -> Started:
    """The caller's rank in the group, a 0-dim int64 tensor on the device of ``input``."""
    return Started([torch.tensor(communicator.rank, device=input.device)], None)
