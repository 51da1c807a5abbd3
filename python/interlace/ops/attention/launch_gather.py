"""Attention in one Triton kernel that gathers the keys of all ranks, waits and computes; then a merge."""

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Rows, Table
from interlace.kernels.attention import forward
from interlace.ops.attention.kernel_blocks import KernelBlocks
from interlace.ops.attention.problem import AttentionProblem, rows_argument
from interlace.ops.collectives import launch as plain
from interlace.ops.matmul import operands
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor
Line = formulas.Line


class GatheredKeys:
    """Where the keys of all ranks lie in every rank's workspace, in which chunks, and who sends which."""

    def __init__(self, problem: AttentionProblem, chunks: int) -> None:
        self.problem, lengths = problem, problem.shards.lengths
        self.size = max(1, formulas.ceil_div(max(lengths), chunks))
        world, rank = problem.shards.world_size, problem.rank
        readers = problem.readers()
        self.sends: list[Line] = [
            line
            for line in formulas.send_lines(rank, world, lengths, self.size)
            if line[0] in readers
        ]
        self.slots = formulas.chunk_slots(lengths, self.size)

    def first_row(self, source: int) -> int:
        return sum(self.problem.shards.lengths[:source])

    def slots_of(self, source: int) -> tuple[int, int]:
        """The first slot of the chunks of ``source``, and how many there are."""
        lengths = self.problem.shards.lengths
        first = formulas.chunk_slots(lengths[:source], self.size)
        return first, formulas.ceil_div(lengths[source], self.size)

    def nbytes(self, itemsize: int) -> int:
        return self.problem.shards.total * self.problem.row_elements * itemsize

    def wait(self, workspace: Workspace, source: int) -> None:
        """Hold the compute stream until the keys of ``source`` are there."""
        first, count = self.slots_of(source)
        for slot in range(first, first + count):
            self.problem.communicator.compute.wait(workspace, source, slot)


def all_gather_attention_fused(
    problem: AttentionProblem, output: Tensor, lse: Tensor, configuration: Configuration
) -> Event:
    """The copy engine sends, or the first programs of the kernel do."""
    communicator, shards, rank = problem.communicator, problem.shards, problem.rank
    keys = GatheredKeys(problem, configuration.chunks)
    packed, place = problem.packed(), communicator.place
    spans, sources = problem.spans(), problem.sources()
    blocks = KernelBlocks(problem, problem.query.shape, spans, sources, configuration)
    blocks.begin(problem.query)
    numbers = {source: number for number, source in enumerate(sources)}
    arrivals = problem.arrivals()
    parts = communicator.table(
        ("attention arrivals", shards, problem.mask, keys.size),
        lambda: [
            shards.part_line(s, numbers[s], keys.first_row(s), keys.slots_of(s)) for s in arrivals
        ],
        passing=True,
    )
    sends = communicator.table(
        ("attention sends", shards, problem.mask, keys.size), lambda: keys.sends, passing=True
    )
    layout = Layout(keys.slots, keys.nbytes(packed.element_size()))

    def body(workspace: Workspace) -> None:
        copiers = min(configuration.copiers, len(keys.sends), max(1, place.program_limit // 4))
        tiles = blocks.query_tiles
        if keys.sends and not (copiers and tiles):
            plain.send_by_copy_engine(communicator, workspace, keys.sends, [(packed, 0)])
            copiers = 0
        if tiles:
            resident = max(
                copiers + 1, plain.resident_programs(communicator, configuration, copiers)
            )
            arguments = {
                "keys": Rows(packed, packed.stride(0)),
                "queries": rows_argument(blocks.query),
                "spans": blocks.spans,
                "partials": blocks.partials,
                "sends": Table(sends, len(keys.sends)),
                "parts": Table(parts, len(arrivals)),
                "heads": blocks.heads,
                "scale": blocks.scale,
                **operands.copies(configuration, copiers),
                "TILES": blocks.tiles,
            }
            kernel = forward.all_gather_attention_kernel
            grid = formulas.persistent_grid(copiers, tiles, resident)
            options = operands.launch_options(configuration)
            communicator.compute.launch(workspace.kernel_launch(kernel, grid, arguments, **options))
        else:
            # No tile, so no program has waited; but what arrives late would hit the next op.
            for source in arrivals:
                if source != rank:
                    keys.wait(workspace, source)
        blocks.merge(output, lse)

    return communicator.enqueue(problem.op, layout, body)
