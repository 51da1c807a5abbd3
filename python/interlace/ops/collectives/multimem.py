"""The launch side of the plain collectives by the switch (``kernels/collectives/multimem.py``).

They need memory with a multicast address. Interpreted kernels can do without, as in place ``shm``: they
reach the ranks one by one. Sums are in the switch's order, so those are taken only when asked for.

All tensors here are flat and contiguous. Parts begin at 16 bytes, so an input that does not is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.collectives import multimem
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

VECTOR_BYTES = 16


@dataclass(frozen=True)
class BySwitch:
    """The collectives of a group, each one kernel."""

    communicator: Communicator
    configuration: Configuration

    @property
    def _block(self) -> int:
        """Elements of a block: at least a vector of any dtype."""
        return max(VECTOR_BYTES, self.configuration.block_elements)

    def _run(
        self,
        op: str,
        kernel: object,
        layout: Layout,
        blocks: int,
        arguments: dict[str, Any],
        sums: int | None = None,
    ) -> Event:
        """Enqueue ``kernel`` alone; ``sums`` is where in the data region its sums are, if it has any."""
        place, configuration = self.communicator.place, self.configuration
        grid = formulas.persistent_grid(0, blocks, configuration.programs or place.program_limit)

        def body(workspace: Workspace) -> None:
            multicast = workspace.buffer.multicast
            assert multicast or place.interpreted, "which the engine has made sure of"
            reducing: dict[str, int] = {}
            if sums is not None:
                reducing = {"blocks": blocks, "sums_offset": workspace.data_offset + sums}
            known = {
                **arguments,
                **reducing,
                "multicast": multicast,
                "BLOCK": self._block,
                "MULTIMEM": multicast != 0,
            }
            warps = configuration.num_warps
            self.communicator.compute.launch(
                workspace.kernel_launch(kernel, grid, known, num_warps=warps)
            )

        return self.communicator.enqueue(op, layout, body)

    def _parts(self, lengths: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """The table of parts of ``lengths``, and how many blocks they have."""
        block = self._block
        table = self.communicator.table(
            ("multimem parts", tuple(lengths), block, dtype),
            lambda: formulas.multimem_parts(lengths, block, dtype.itemsize),
        )
        return table, sum(formulas.ceil_div(length, block) for length in lengths)

    def all_gather(
        self, input: torch.Tensor, output: torch.Tensor, lengths: Sequence[int]
    ) -> Event:
        """``output = concat(input of rank 0, 1, ...)``; ``lengths`` by rank."""
        table, blocks = self._parts(lengths, input.dtype)
        layout = Layout(blocks, formulas.multimem_bytes(lengths, input.element_size()))
        aligned = input if input.data_ptr() % VECTOR_BYTES == 0 else input.clone()
        arguments = {"input_ptr": aligned, "output_ptr": output, "parts_ptr": table}
        kernel = multimem.multimem_all_gather_kernel
        return self._run("all_gather", kernel, layout, blocks, arguments)

    def reduce_scatter(
        self, input: torch.Tensor, output: torch.Tensor, lengths: Sequence[int]
    ) -> Event:
        """``output`` = the sum over ranks of the own part of ``input``, whose parts have ``lengths``."""
        block, item, world_size = self._block, input.element_size(), self.communicator.world_size
        table, blocks = self._parts(lengths, input.dtype)
        layout = Layout(world_size * blocks, blocks * block * item, pulled=True)
        sums = layout.add_data(formulas.ceil_div(max(lengths), block) * block * item)
        arguments = {"input_ptr": input, "output_ptr": output, "parts_ptr": table}
        kernel = multimem.multimem_reduce_scatter_kernel
        return self._run("reduce_scatter", kernel, layout, blocks, arguments, sums)

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor) -> Event:
        """``output`` = the sum over ranks of ``input``, which may be the same tensor."""
        block, item, elements = self._block, input.element_size(), input.numel()
        blocks, world_size = formulas.ceil_div(elements, block), self.communicator.world_size
        layout = Layout((world_size + 1) * blocks, blocks * block * item, pulled=True)
        sums = layout.add_data(blocks * block * item)
        arguments = {"input_ptr": input, "output_ptr": output, "elements": elements}
        kernel = multimem.multimem_all_reduce_kernel
        return self._run("all_reduce", kernel, layout, blocks, arguments, sums)
