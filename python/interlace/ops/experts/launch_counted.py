"""The launch side of all-to-all + grouped matmul whose counts the host does not know.

One Triton kernel: ``kernels/experts/grouped_matmul.py``. Other algorithms need counts on the host, and are
those of ``grouped_matmul.py``. Tables are made by torch on the device, from the rank's own counts alone.

Legend: W ranks with E experts each; ``splits``, int64 ``[W * E]``: this rank's rows by expert.
"""

from dataclasses import dataclass

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import CountLines, ExpertSizes, Table
from interlace.kernels.experts import grouped_matmul as kernels
from interlace.ops.collectives.launch import resident_programs
from interlace.ops.experts.assignment import count_lines
from interlace.ops.experts.launch_dispatch import next_power
from interlace.ops.experts.launch_grouped import expert_operands
from interlace.ops.matmul import operands
from interlace.ops.matmul.operands import Linear
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor


def rows_sent(splits: Tensor, rows: int) -> Tensor:
    """``splits``, as far as ``rows`` go: no more of them are read, whatever was said."""
    ends = splits.clamp(min=0).cumsum(0).clamp(max=rows)
    return torch.diff(ends, prepend=ends.new_zeros(1))


def experts_of(splits: Tensor, rows: int) -> Tensor:
    """``[rows, 1]``: the expert of each row, -1 behind those of all."""
    row = torch.arange(rows, device=splits.device)
    expert = torch.searchsorted(splits.cumsum(0), row, right=True)
    return torch.where(expert < splits.numel(), expert, -1).unsqueeze(1)


@dataclass(frozen=True)
class CountedSizes:
    """What all ranks know alike: ``most_rows`` of a rank, rows per chunk, ranks, experts of each."""

    most_rows: int
    chunk_rows: int
    world_size: int
    experts: int

    @property
    def lines(self) -> int:
        """The most sends of a rank: every segment may have a chunk that is not whole."""
        return (self.world_size - 1) * self.experts + self.most_rows // self.chunk_rows

    @property
    def slots(self) -> int:
        segments = self.world_size * self.experts
        return self.world_size + 1 + segments + self.world_size * self.most_rows // self.chunk_rows

    def count_lines(self, splits: Tensor) -> Tensor:
        counts = splits.view(self.world_size, self.experts)
        return count_lines(counts.sum(1), counts)

    def sends(self, splits: Tensor, rank: int) -> Tensor:
        """Lines of the kernel's ``sends``, ``lines`` of them; then how many of them are to be done."""
        world_size, experts, size = self.world_size, self.experts, self.chunk_rows
        if world_size == 1:
            return splits.new_zeros(1)
        counts = splits.view(world_size, experts)
        first = splits.cumsum(0) - splits
        place = (rank * self.most_rows + counts.cumsum(1) - counts).flatten()
        expert = torch.arange(experts, device=splits.device)
        slot = world_size + 1 + rank * experts + expert + place.view(counts.shape) // size
        peers = (rank + 1 + torch.arange(world_size - 1, device=splits.device)) % world_size
        order = (peers.unsqueeze(1) * experts + expert).flatten()  # the next rank first
        chunks = ((splits + size - 1) // size)[order]
        ends = chunks.cumsum(0)
        number = torch.arange(self.lines, device=splits.device)
        which = torch.searchsorted(ends, number, right=True).clamp(max=order.numel() - 1)
        segment, chunk = order[which], number - (ends - chunks)[which]
        done = chunk * size
        lines = [
            segment // experts,
            first[segment] + done,
            (splits[segment] - done).clamp(max=size),
            place[segment] + done,
            slot.flatten()[segment] + chunk,
        ]
        return torch.cat([torch.stack(lines, 1).flatten(), ends[-1:]])


@dataclass(frozen=True)
class CountedMatmul:
    """One call. ``linear``: as of ``GroupedMatmul``; its output has room for all ranks' most rows."""

    communicator: Communicator
    input: Tensor
    linear: Linear
    segments: Tensor

    def fused(
        self, sends: Tensor, lines: Tensor, sizes: CountedSizes, configuration: Configuration
    ) -> Event:
        communicator, (experts, inner, columns) = self.communicator, self.linear.weight.shape
        world_size, rows = sizes.world_size, sizes.world_size * sizes.most_rows
        layout = Layout(sizes.slots)
        layout.add_data(rows * inner * self.input.element_size())
        counts_byte = layout.add_data(lines.nbytes)
        copiers = 0
        if world_size > 1:  # the copy engine would have to know what to send
            most = max(1, communicator.place.program_limit // 4)
            copiers = max(1, min(configuration.copiers, sizes.lines, most))
        known = expert_operands(communicator, self.input, self.linear, configuration)
        del known["num_experts"]
        # As of grouped_matmul_combine.
        flatten = known["TILES"].FLATTEN and configuration.num_warps > 4
        arguments = {
            **known,
            "TILES": known["TILES"]._replace(FLATTEN=flatten),
            **operands.copies(configuration, copiers),
            "sends": Table(sends, sizes.lines),
            "counts": CountLines(lines, self.segments, counts_byte),
            "sizes": ExpertSizes(self.input.shape[0], sizes.most_rows, experts, 0, 0),
            "chunk_rows": sizes.chunk_rows,
            "EXPERTS": next_power(experts),
        }
        tiles = rows // configuration.block_m + world_size * experts  # a last one of each segment
        tiles *= formulas.ceil_div(columns, configuration.block_n)
        resident = max(copiers + 1, resident_programs(communicator, configuration, copiers))
        grid = formulas.persistent_grid(copiers, tiles, resident)
        options = operands.launch_options(configuration, self.input)

        def body(workspace: Workspace) -> None:
            kernel = kernels.counted_grouped_matmul_kernel
            communicator.compute.launch(workspace.kernel_launch(kernel, grid, arguments, **options))

        return communicator.enqueue("all_to_all_grouped_matmul", layout, body)
