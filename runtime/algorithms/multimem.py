"""The launch side of the plain collectives by the switch (``kernels/collectives/multimem.py``).

They need memory with a multicast address. Interpreted kernels can do without, as in place ``shm``: they
reach the ranks one by one. Sums are in the switch's order, so those are taken only when asked for.

All tensors here are flat and contiguous. Parts begin at 16 bytes, so an input that does not is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.collectives import multimem
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

VECTOR_BYTES = 16


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % VECTOR_BYTES == 0 else tensor.clone()


def _block(configuration: Configuration) -> int:
    """Elements of a block: at least a vector of any dtype."""
    return max(VECTOR_BYTES, configuration.block_elements)


def _launch(
    communicator: Communicator,
    workspace: Workspace,
    configuration: Configuration,
    kernel: object,
    blocks: int,
    op: str,
    arguments: dict[str, object],
) -> None:
    multicast = workspace.buffer.multicast
    assert multicast or communicator.place.interpreted, "which the engine has made sure of"
    limit = configuration.programs or communicator.place.program_limit
    communicator.compute.launch(
        KernelLaunch(
            kernel,
            formulas.persistent_grid(0, blocks, limit),
            {
                **workspace.kernel_arguments(),
                **arguments,
                "multicast": multicast,
                "BLOCK": _block(configuration),
                "MULTIMEM": multicast != 0,
            },
            op,
            num_warps=configuration.num_warps,
        )
    )


def all_gather(
    communicator: Communicator,
    input: torch.Tensor,
    output: torch.Tensor,
    lengths: Sequence[int],
    configuration: Configuration,
) -> Event:
    """``output = concat(input of rank 0, 1, ...)``; ``lengths`` by rank."""
    block = _block(configuration)
    parts = formulas.multimem_parts(lengths, block, input.element_size())
    blocks = sum(formulas.ceil_div(length, block) for length in lengths)
    source = _aligned(input)
    layout = Layout()
    layout.add_slots(blocks)
    layout.add_data(formulas.multimem_bytes(lengths, input.element_size()))
    table = communicator.table(
        ("multimem parts", tuple(lengths), block, input.dtype), lambda: parts
    )

    def body(workspace: Workspace) -> None:
        _launch(
            communicator,
            workspace,
            configuration,
            multimem.multimem_all_gather_kernel,
            blocks,
            "all_gather",
            {
                "input_ptr": source,
                "output_ptr": output,
                "parts_ptr": table,
                "blocks": blocks,
            },
        )

    return communicator.enqueue("all_gather", layout, body)


def reduce_scatter(
    communicator: Communicator,
    input: torch.Tensor,
    output: torch.Tensor,
    lengths: Sequence[int],
    configuration: Configuration,
) -> Event:
    """``output`` = the sum over ranks of the own part of ``input``, whose parts have ``lengths``."""
    block, item = _block(configuration), input.element_size()
    parts = formulas.multimem_parts(lengths, block, item)
    blocks = sum(formulas.ceil_div(length, block) for length in lengths)
    layout = Layout(pulled=True)
    layout.add_slots(communicator.world_size * blocks)
    layout.add_data(blocks * block * item)
    sums = layout.add_data(formulas.ceil_div(max(lengths), block) * block * item)
    table = communicator.table(
        ("multimem parts", tuple(lengths), block, input.dtype), lambda: parts
    )

    def body(workspace: Workspace) -> None:
        _launch(
            communicator,
            workspace,
            configuration,
            multimem.multimem_reduce_scatter_kernel,
            blocks,
            "reduce_scatter",
            {
                "input_ptr": input,
                "output_ptr": output,
                "parts_ptr": table,
                "blocks": blocks,
                "sums_offset": workspace.data_offset + sums,
            },
        )

    return communicator.enqueue("reduce_scatter", layout, body)


def all_reduce(
    communicator: Communicator,
    input: torch.Tensor,
    output: torch.Tensor,
    configuration: Configuration,
) -> Event:
    """``output`` = the sum over ranks of ``input``, which may be the same tensor."""
    block, item, elements = _block(configuration), input.element_size(), input.numel()
    blocks = formulas.ceil_div(elements, block)
    layout = Layout(pulled=True)
    layout.add_slots((communicator.world_size + 1) * blocks)
    layout.add_data(blocks * block * item)
    sums = layout.add_data(blocks * block * item)

    def body(workspace: Workspace) -> None:
        _launch(
            communicator,
            workspace,
            configuration,
            multimem.multimem_all_reduce_kernel,
            blocks,
            "all_reduce",
            {
                "input_ptr": input,
                "output_ptr": output,
                "elements": elements,
                "blocks": blocks,
                "sums_offset": workspace.data_offset + sums,
            },
        )

    return communicator.enqueue("all_reduce", layout, body)
