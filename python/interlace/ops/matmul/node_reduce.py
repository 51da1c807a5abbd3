"""The launch side of the fused matmul + reduce-scatter between nodes: tables, workspace, launches.

See ``kernels/matmul/node_matmul_reduce_scatter.py``, which has the two kernels::

    copy stream     node_sums_kernel, a few programs; quiet_kernel
    compute stream  matmul_node_reduce_scatter_kernel, all others
    at the end      put_credits_kernel, then what ends every op

The few come first, so that they are resident whatever the many do. Neither waits for a program of its
own kind, and both fit the device together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import NodeSlots, Regions, Table
from interlace.kernels.matmul import node_matmul_reduce_scatter as kernels
from interlace.ops.collectives import node_moves as algorithms
from interlace.ops.collectives.launch import resident_programs
from interlace.ops.matmul.operands import Linear, epilogue, launch_options, product
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.place import Nodes
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration


@dataclass(frozen=True)
class OwnerTables:
    """Tables that tell the kernels of one rank of owners; see the legends of the kernels."""

    segments: list[list[int]]
    duties: list[list[int]]
    sums: list[list[int]]


def tables_of(
    rank: int, nodes: Nodes, segments: Sequence[tuple[int, int]], block_m: int, tiles_n: int
) -> OwnerTables:
    """``segments`` are (first row, rows) by owner."""
    pieces = [formulas.ceil_div(rows, block_m) * tiles_n for _, rows in segments]
    known = algorithms.reductions_of(rank, nodes, pieces)
    return OwnerTables(
        [[by, *segments[owner], start, place] for owner, by, place, start in known.parts],
        [[owner, place, segments[owner][1], start] for owner, place, start in known.duties],
        # the first that a rank reduces are its own rows, which are no duty
        [[by, max(0, place - 1)] for by, place in known.sums],
    )


def matmul_reduce_scatter(
    communicator: Communicator,
    input: torch.Tensor,
    linear: Linear,
    segments: Sequence[tuple[int, int]],
    configuration: Configuration,
) -> Event:
    """``matmul_reduce.matmul_reduce_scatter_fused`` between nodes; neither rows nor columns are 0."""
    rank, nodes = communicator.rank, communicator.nodes
    columns, block_m, block_n = linear.weight.shape[1], configuration.block_m, configuration.block_n
    tiles_n = formulas.ceil_div(columns, block_n)
    rows = [count for _, count in segments]
    each = formulas.ceil_div(max(rows), block_m) * tiles_n
    stride = max(rows) * columns
    names, (regions, most_sums) = len(nodes.names()), algorithms.regions_of(nodes)
    tile_bytes = block_m * block_n * 4

    layout = Layout()
    slots = layout.add_slots(regions * each)
    landing_slot = layout.add_slots(names * each) - slots
    landed_slot = layout.add_slots(names * each) - slots
    quiet_slot = layout.add_slots(communicator.world_size)
    layout.add_data(regions * stride * linear.output.element_size())
    partial = layout.add_data((most_sums - 1) * each * tile_bytes)
    landing = layout.add_data(names * each * tile_bytes)

    # before the streams wait for what the caller has issued
    operands = product(communicator, configuration, input, linear, published=True)
    known = tables_of(rank, nodes, segments, block_m, tiles_n)
    key = (tuple(segments), block_m, tiles_n)
    table = communicator.table
    far = algorithms.Partners(communicator)
    sums_table = table(("node tile sums", key), lambda: known.sums)
    shared = {
        "node": algorithms.node_argument(communicator, sums_table),
        "slots": NodeSlots(each, landing_slot, landed_slot),
        "own_rows": rows[rank],
        "N": columns,
    }
    segments_table = table(("node segments", key), lambda: known.segments)
    duties_table = table(("node tile duties", key), lambda: known.duties)
    moved = sum(formulas.ceil_div(count, block_m) * tiles_n for _, _, count, _ in known.duties)
    moved += formulas.ceil_div(rows[rank], block_m) * tiles_n
    limit = communicator.place.program_limit
    summing = max(1, min(max(1, configuration.copiers), moved, limit // 4))
    resident = max(1, resident_programs(communicator, configuration, summing) - summing)
    grid = formulas.persistent_grid(0, formulas.tiles_of(rows, block_m, tiles_n), resident)

    def body(workspace: Workspace) -> None:
        begin = workspace.data_offset
        both = {**shared, "regions": Regions(stride, begin + partial, begin + landing)}
        sums = {
            **both,
            "contribution_ptr": linear.output,
            "duties": Table(duties_table, len(known.duties)),
            "PUT": nodes.put,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "GROUP_M": configuration.group_m,
            "BLOCK": configuration.block_elements,
        }
        # Left alone, ptxas takes so few registers that a load waits for the one before it.
        more = {**nodes.options, "maxnreg": 128}
        how = {"num_warps": configuration.num_warps, "options": more}
        kernel = kernels.node_sums_kernel
        communicator.copying.launch(workspace.kernel_launch(kernel, summing, sums, **how))
        products = {
            **both,
            **operands,
            **epilogue(linear),
            "segments_ptr": segments_table,
            "AVERAGE": linear.average,
        }
        kernel, options = (
            kernels.matmul_node_reduce_scatter_kernel,
            launch_options(configuration, input),
        )
        communicator.compute.launch(workspace.kernel_launch(kernel, grid, products, **options))
        far.quiet(communicator.copying, workspace, quiet_slot)
        far.put_credits(workspace)

    return communicator.enqueue("matmul_reduce_scatter", layout, body)
