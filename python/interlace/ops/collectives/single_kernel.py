"""Plain collectives by one Triton kernel each, on dense tensors wherever they lie.

The kernels want one flat tensor where an engine has one per rank. Tensors that are neighbours in one
storage are that already, which is how the API cuts a tensor into parts; others are copied.
"""

from collections.abc import Sequence

import torch

from interlace.ops.collectives import launch as algorithms
from interlace.ops.collectives import low_latency
from interlace.ops.collectives.multimem import BySwitch
from interlace.ops.collectives.node_moves import gather_into
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import neighbours, overlap
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning import configuration

REDUCTIONS = ("sum", "avg")


def _refuse(op: str, why_not: str) -> None:
    if why_not:
        raise ValueError(f'{op}: algorithm="low_latency" cannot do this: {why_not}')


def all_gather(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    input: torch.Tensor,
    algorithm: str = "kernel",
) -> Event:
    """``Engine.all_gather`` of at least one element; ``algorithm`` names the kernel."""
    lengths = [output.numel() for output in outputs]
    if algorithm == "low_latency":
        equal = min(lengths) == max(lengths)
        _refuse("all_gather", low_latency.why_not(input.nbytes, equal=equal))

    def gather(flat: torch.Tensor, target: torch.Tensor) -> Event:
        if algorithm == "low_latency":
            return low_latency.all_gather(communicator, flat, target)
        config = configuration.choose(communicator.place, input.dtype, max(lengths), 1, 1)
        if algorithm == "multimem":
            return BySwitch(communicator, config).all_gather(flat, target, lengths)
        return algorithms.all_gather_kernel(communicator, flat, target, lengths, config)

    return gather_into(communicator, outputs, input.view(-1), gather)


def reduce_scatter(
    communicator: Communicator,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    op: str,
    algorithm: str = "kernel",
) -> Event:
    """``Engine.reduce_scatter`` of at least one element, for ``op`` in ``REDUCTIONS``."""
    lengths = [part.numel() for part in inputs]
    if algorithm == "low_latency":
        _refuse("reduce_scatter", "every rank has all sums in the end; use all_reduce")
    whole = neighbours(inputs)
    own = inputs[communicator.rank]
    in_place = output.data_ptr() == own.data_ptr()  # a block is read before its sum is written
    if whole is None or (overlap(output, whole) and not in_place):
        whole = torch.cat([part.view(-1) for part in inputs])
    config = configuration.choose(communicator.place, output.dtype, max(lengths), 1, 1)
    if algorithm == "multimem":
        return BySwitch(communicator, config).reduce_scatter(whole, output.view(-1), lengths)
    return algorithms.reduce_scatter_kernel(
        communicator, whole, output.view(-1), lengths, config, average=op == "avg"
    )


def broadcast(communicator: Communicator, tensor: torch.Tensor, root: int) -> Event:
    _refuse("broadcast", low_latency.why_not(tensor.nbytes))
    return low_latency.broadcast(communicator, tensor, root)


def all_reduce(
    communicator: Communicator, tensor: torch.Tensor, op: str, algorithm: str = "kernel"
) -> Event:
    """``Engine.all_reduce`` of at least one element, for ``op`` in ``REDUCTIONS``."""
    flat = tensor.view(-1)
    if algorithm == "low_latency":
        _refuse("all_reduce", low_latency.why_not(tensor.nbytes))
        return low_latency.all_reduce(communicator, flat, average=op == "avg")
    config = configuration.choose(communicator.place, tensor.dtype, flat.numel(), 1, 1)
    if algorithm == "multimem":
        return BySwitch(communicator, config).all_reduce(flat, flat)
    return algorithms.all_reduce_kernel(communicator, flat, flat, config, average=op == "avg")
