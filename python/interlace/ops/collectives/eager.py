"""Kernels of the collectives: each fills its output on a group, and says what to wait for.

They are called as ``op(communicator, *arguments, out=None)``. What is not dim 0 goes as a list of slices,
which the op itself, not the caller, gathers and scatters in memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.arguments import dense
from interlace.ops.collectives import rooted, rootless
from interlace.ops.collectives.all_to_all import _all_to_all_single
from interlace.ops.op import shapes
from interlace.ops.op.pending import Started
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import contiguous, movable
from interlace.runtime.core.work import Work

Tensor = torch.Tensor
Start = Callable[..., Work | None]


def _into(make: Callable[..., Tensor]) -> Callable[[Start], Callable[..., Started]]:
    """The output is ``make(*arguments, size)``, or ``out`` if as good; ``op.make`` is for fake tensors."""

    def op_of(start: Start) -> Callable[..., Started]:
        def op(communicator: Communicator, *given: Any, out: Tensor | None = None) -> Started:
            try:
                input, *rest = given
                dense.check_not_quantized("input", input.dtype)
                if input.is_conj() or input.is_neg():  # lazily: its memory is other numbers
                    input = input.resolve_conj().resolve_neg()
                made = make(input, *rest, communicator.world_size)
                if out is None:
                    out = made
                elif (
                    out.shape != made.shape or out.dtype != made.dtype or out.device != made.device
                ):
                    raise ValueError(
                        f"out must be {tuple(made.shape)} of {made.dtype} on {made.device}, got "
                        f"{tuple(out.shape)} of {out.dtype} on {out.device}"
                    )
            except Exception as error:
                communicator.refuse(start.__name__, error)
                raise
            return Started([out], start(communicator, out, input, *rest))

        op.make = make  # type: ignore[attr-defined]
        return op

    return op_of


@_into(shapes.like)
def all_reduce(
    communicator: Communicator, output: Tensor, input: Tensor, reduce_op: Any
) -> Work | None:
    if output is not input:
        output.copy_(input)
    return rootless._all_reduce(communicator, (output,), (reduce_op,), True)


@_into(shapes.gathered)
def all_gather(
    communicator: Communicator, output: Tensor, input: Tensor, gather_dim: int
) -> Work | None:
    dim = gather_dim % max(input.dim(), 1)
    whole: Any = output
    if dim or not output.is_contiguous():
        whole = list(output.tensor_split(communicator.world_size, dim))
    return rootless._all_gather(communicator, (whole, input), (), True)


@_into(shapes.scattered)
def reduce_scatter(
    communicator: Communicator, output: Tensor, input: Tensor, reduce_op: Any, scatter_dim: int
) -> Work | None:
    dim = scatter_dim % input.dim()
    whole: Any = input
    if dim or not input.is_contiguous():
        whole = list(input.tensor_split(communicator.world_size, dim))
    return rootless._reduce_scatter(communicator, (output, whole), (reduce_op,), True)


@_into(shapes.exchanged)
def all_to_all(
    communicator: Communicator, output: Tensor, input: Tensor, *splits: Sequence[int] | None
) -> Work | None:
    return _all_to_all_single(communicator, (output, input), splits, True)


@_into(shapes.like)
def broadcast(communicator: Communicator, output: Tensor, input: Tensor, src: int) -> Work | None:
    if communicator.rank == src and output is not input:
        movable(output).copy_(movable(input))
    return rooted._broadcast(communicator, (output,), (None, src), True)


@_into(shapes.like)
def reduce(
    communicator: Communicator, output: Tensor, input: Tensor, reduce_op: Any, dst: int
) -> Work | None:
    """The reduction on ``dst``, zeros elsewhere."""
    if communicator.rank == dst:
        reduced = output.copy_(input)
    else:
        reduced = input.contiguous()  # which an expanded gradient is not
        output.zero_()
    return rooted._reduce(communicator, (reduced,), (None, dst, reduce_op), True)


@_into(shapes.permuted)
def permute(
    communicator: Communicator, output: Tensor, input: Tensor, src_dst: Sequence[int]
) -> Work | None:
    """Rank r's input goes to rank ``src_dst[r]``."""
    size, rank = communicator.world_size, communicator.rank
    sent, received = [0] * size, [0] * size
    sent[src_dst[rank]] = received[list(src_dst).index(rank)] = input.numel()
    flat = output.view(-1), contiguous(input).view(-1)
    return _all_to_all_single(communicator, flat, (received, sent), True)


@_into(shapes.gathered)
def gather(
    communicator: Communicator, output: Tensor, input: Tensor, dst: int, gather_dim: int
) -> Work | None:
    """Along ``gather_dim`` on ``dst``, zeros of the same shape elsewhere."""
    parts = None
    if communicator.rank == dst:
        parts = list(output.tensor_split(communicator.world_size, gather_dim))
        if not input.dim():
            parts = list(output.unbind())
    else:
        movable(output).zero_()
    return rooted._gather(communicator, (input, parts), (None, dst), True)


@_into(shapes.scattered)
def scatter(
    communicator: Communicator, output: Tensor, input: Tensor, src: int, scatter_dim: int
) -> Work | None:
    """The own slice of the input of ``src`` along ``scatter_dim``; other ranks' inputs are not read."""
    parts = None
    if communicator.rank == src:
        parts = list(input.tensor_split(communicator.world_size, scatter_dim))
    return rooted._scatter(communicator, (output, parts), (None, src), True)


@_into(shapes.number)
def rank(communicator: Communicator, output: Tensor, input: Tensor) -> None:
    output.fill_(communicator.rank)
