"""The launch side of the plain collectives by the switch (``kernels/collectives/multimem.py``).

They need memory with a multicast address. Interpreted kernels can do without, as in place ``shm``: they
reach the ranks one by one. Sums are in the switch's order, so those are taken only when asked for.

All tensors here are flat and contiguous. Parts begin at 16 bytes, so an input that does not is copied.
"""

from collections.abc import Mapping, Sequence

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.collectives import multimem
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

VECTOR_BYTES = 16


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % VECTOR_BYTES == 0 else tensor.clone()


def _block(configuration: Configuration) -> int:
    """Elements of a block: at least a vector of any dtype."""
    return max(VECTOR_BYTES, configuration.block_elements)


def _run(
    communicator: Communicator,
    configuration: Configuration,
    op: str,
    kernel: object,
    layout: Layout,
    blocks: int,
    arguments: Mapping[str, object],
    sums: int | None = None,
) -> Event:
    """Enqueue ``kernel`` alone; ``sums`` is where in the data region its sums are, if it has any."""
    limit = configuration.programs or communicator.place.program_limit

    def body(workspace: Workspace) -> None:
        multicast = workspace.buffer.multicast
        assert multicast or communicator.place.interpreted, "which the engine has made sure of"
        known = {
            **arguments,
            **({} if sums is None else {"sums_offset": workspace.data_offset + sums}),
            "blocks": blocks,
            "multicast": multicast,
            "BLOCK": _block(configuration),
            "MULTIMEM": multicast != 0,
        }
        grid, warps = formulas.persistent_grid(0, blocks, limit), configuration.num_warps
        communicator.compute.launch(workspace.kernel_launch(kernel, grid, known, num_warps=warps))

    return communicator.enqueue(op, layout, body)


def _parts(
    communicator: Communicator, lengths: Sequence[int], block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, int]:
    """The table of parts of ``lengths``, and how many blocks they have."""
    table = communicator.table(
        ("multimem parts", tuple(lengths), block, dtype),
        lambda: formulas.multimem_parts(lengths, block, dtype.itemsize),
    )
    return table, sum(formulas.ceil_div(length, block) for length in lengths)


def all_gather(
    communicator: Communicator,
    input: torch.Tensor,
    output: torch.Tensor,
    lengths: Sequence[int],
    configuration: Configuration,
) -> Event:
    """``output = concat(input of rank 0, 1, ...)``; ``lengths`` by rank."""
    table, blocks = _parts(communicator, lengths, _block(configuration), input.dtype)
    layout = Layout(blocks, formulas.multimem_bytes(lengths, input.element_size()))
    arguments = {"input_ptr": _aligned(input), "output_ptr": output, "parts_ptr": table}
    kernel = multimem.multimem_all_gather_kernel
    return _run(communicator, configuration, "all_gather", kernel, layout, blocks, arguments)


def reduce_scatter(
    communicator: Communicator,
    input: torch.Tensor,
    output: torch.Tensor,
    lengths: Sequence[int],
    configuration: Configuration,
) -> Event:
    """``output`` = the sum over ranks of the own part of ``input``, whose parts have ``lengths``."""
    block, item = _block(configuration), input.element_size()
    table, blocks = _parts(communicator, lengths, block, input.dtype)
    layout = Layout(communicator.world_size * blocks, blocks * block * item, pulled=True)
    sums = layout.add_data(formulas.ceil_div(max(lengths), block) * block * item)
    arguments = {"input_ptr": input, "output_ptr": output, "parts_ptr": table}
    kernel = multimem.multimem_reduce_scatter_kernel
    return _run(
        communicator, configuration, "reduce_scatter", kernel, layout, blocks, arguments, sums
    )


def all_reduce(
    communicator: Communicator,
    input: torch.Tensor,
    output: torch.Tensor,
    configuration: Configuration,
) -> Event:
    """``output`` = the sum over ranks of ``input``, which may be the same tensor."""
    block, item, elements = _block(configuration), input.element_size(), input.numel()
    blocks = formulas.ceil_div(elements, block)
    layout = Layout((communicator.world_size + 1) * blocks, blocks * block * item, pulled=True)
    sums = layout.add_data(blocks * block * item)
    arguments = {"input_ptr": input, "output_ptr": output, "elements": elements}
    kernel = multimem.multimem_all_reduce_kernel
    return _run(communicator, configuration, "all_reduce", kernel, layout, blocks, arguments, sums)
