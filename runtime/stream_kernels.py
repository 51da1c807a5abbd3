"""Plain collectives by one Triton kernel each, on dense tensors wherever they lie.

The kernels want one flat tensor where an engine has one per rank. Tensors that are neighbours in one
storage are that already, which is how the API cuts a tensor into parts; others are copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.runtime import collective_algorithms as algorithms
from interlace.runtime import configuration
from interlace.runtime.communicator import Communicator
from interlace.runtime.memory import neighbours, overlap
from interlace.runtime.stream import Event

REDUCTIONS = ("sum", "avg")


def all_gather(
    communicator: Communicator, outputs: Sequence[torch.Tensor], input: torch.Tensor
) -> Event:
    """``Engine.all_gather`` of at least one element."""
    lengths = [output.numel() for output in outputs]
    flat, whole = input.view(-1), neighbours(outputs)
    own = outputs[communicator.rank]
    target = whole
    if target is None:
        target = torch.empty(sum(lengths), dtype=input.dtype, device=input.device)
    elif own.data_ptr() != input.data_ptr() and overlap(input, target):
        flat = flat.clone()  # it must not change before it has been sent
    config = configuration.choose(communicator.place, input.dtype, max(lengths), 1, 1)
    event = algorithms.all_gather_kernel(communicator, flat, target, lengths, config)
    if whole is not None:
        return event
    for source, piece in enumerate(torch.split(target, lengths)):
        output = outputs[source]
        if source != communicator.rank or output.data_ptr() != input.data_ptr():
            communicator.compute.copy(output, piece.view(output.shape), "output")
    return communicator.compute.record()


def reduce_scatter(
    communicator: Communicator, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: str
) -> Event:
    """``Engine.reduce_scatter`` of at least one element, for ``op`` in ``REDUCTIONS``."""
    lengths = [part.numel() for part in inputs]
    whole = neighbours(inputs)
    own = inputs[communicator.rank]
    in_place = output.data_ptr() == own.data_ptr()  # a block is read before its sum is written
    if whole is None or (overlap(output, whole) and not in_place):
        whole = torch.cat([part.view(-1) for part in inputs])
    config = configuration.choose(communicator.place, output.dtype, max(lengths), 1, 1)
    return algorithms.reduce_scatter_kernel(
        communicator, whole, output.view(-1), lengths, config, average=op == "avg"
    )


def all_reduce(communicator: Communicator, tensor: torch.Tensor, op: str) -> Event:
    """``Engine.all_reduce`` of at least one element, for ``op`` in ``REDUCTIONS``."""
    flat = tensor.view(-1)
    config = configuration.choose(communicator.place, tensor.dtype, flat.numel(), 1, 1)
    return algorithms.all_reduce_kernel(communicator, flat, flat, config, average=op == "avg")
