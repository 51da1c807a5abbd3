"""The launch side of matmul + reduce-scatter and matmul + all-reduce.

Matrices are as in ``launch_gather.py``. ``segments`` lists (first row, rows) by owner. ``linear.output``
has the rows that this rank owns. "pipelined" sends each owner's product as soon as it is ready.

Between nodes the fused algorithm has two kernels (``kernels/matmul/node_matmul_reduce_scatter.py``)::

    copy stream     node_sums_kernel, a few programs; quiet_kernel
    compute stream  matmul_node_reduce_scatter_kernel, all others
    at the end      put_credits_kernel, then the end of every op

The few programs start first, so they are resident whatever the others do. No program waits for another one
in the same kernel, and both kernels fit the device together.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import NodeSlots, Regions, Table
from interlace.kernels.matmul import (
    matmul_reduce_scatter as one_node,
    node_matmul_reduce_scatter as kernels,
    row_norms,
)
from interlace.kernels.tiling import owner_order
from interlace.ops.collectives import launch as plain, node_moves as algorithms
from interlace.ops.collectives.launch import resident_programs
from interlace.ops.matmul import launch_gather as node_fused, launch_norms, operands
from interlace.ops.matmul.launch_norms import (
    Segments,
    WholeRows,
    blocks_of,
    gathering,
    tail_arguments,
)
from interlace.ops.matmul.operands import Linear, epilogue, launch_options, product
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.place import Nodes
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration
from interlace.runtime.tuning.table import threshold


@dataclass(frozen=True)
class OwnerTables:
    """Tables of owners for the kernels of one rank; see the legends of the kernels."""

    segments: list[list[int]]
    duties: list[list[int]]
    sums: list[list[int]]


def tables_of(
    rank: int, nodes: Nodes, segments: Sequence[tuple[int, int]], block_m: int, tiles_n: int
) -> OwnerTables:
    """Return the tables; ``segments`` are (first row, rows) by owner."""
    pieces = [formulas.ceil_div(rows, block_m) * tiles_n for _, rows in segments]
    known = algorithms.reductions_of(rank, nodes, pieces)
    return OwnerTables(
        [[by, *segments[owner], start, place] for owner, by, place, start in known.parts],
        [[owner, place, segments[owner][1], start] for owner, place, start in known.duties],
        # a rank first reduces its own rows, which are not a duty
        [[by, max(0, place - 1)] for by, place in known.sums],
    )


def matmul_reduce_scatter(
    communicator: Communicator,
    input: torch.Tensor,
    linear: Linear,
    segments: Sequence[tuple[int, int]],
    configuration: Configuration,
) -> Event:
    """Run ``matmul_reduce_scatter_fused`` between nodes. Neither rows nor columns are 0."""
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

    # before the streams wait for the caller's earlier work
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
        # By default ptxas chooses so few registers that each load waits for the one before.
        more = {**nodes.options, "maxnreg": 128}
        settings = {"num_warps": configuration.num_warps, "options": more}
        kernel = kernels.node_sums_kernel
        communicator.copying.launch(workspace.kernel_launch(kernel, summing, sums, **settings))
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


OF_NORMS = {"options": {"maxnreg": 255}}
"""Launch options of kernels with a norm: it needs more registers than ptxas would choose."""
SMALL_BYTES = threshold("engine_reduce_bytes")  # size of a product


def matmul_reduce_scatter_fused(
    communicator: Communicator,
    input: torch.Tensor,
    linear: Linear,
    segments: Segments,
    configuration: Configuration,
    whole: WholeRows | None = None,
) -> Event:
    """Run one kernel, or two with ``warp_roles``; between nodes see :func:`matmul_reduce_scatter`.

    With a tail the kernel also norms this rank's rows, and gathers the ``whole``; between nodes torch does.
    """
    if communicator.place.nodes is not None:
        if linear.tail is not None:
            total = torch.empty_like(linear.output)
            product = replace(linear, output=total, tail=None)
            about = communicator, input, product, segments, configuration
            matmul_reduce_scatter_fused(*about)
            rest = replace(linear, bias=None, activation="")
            return launch_norms.norm_and_gather(communicator, total, rest, segments, whole)
        if input.shape[0] and linear.weight.shape[1]:
            return matmul_reduce_scatter(communicator, input, linear, segments, configuration)
        return node_fused.matmul_reduce_scatter(communicator, input, linear, segments)
    columns, block_m = linear.weight.shape[1], configuration.block_m
    tiles_n = formulas.ceil_div(columns, configuration.block_n)
    rows = [count for _, count in segments]
    tiles = formulas.tiles_of(rows, block_m, tiles_n)
    row_bytes = columns * linear.output.element_size()
    layout = plain.pushed_layout(communicator, rows, block_m, tiles_n, row_bytes)
    # before the streams wait for the caller's earlier work
    known = operands.product(communicator, configuration, input, linear, published=True)
    resident = plain.resident_programs(communicator, configuration)
    arguments = {
        **known,
        **operands.epilogue(linear),
        "segments_ptr": plain.segment_table(communicator, segments, block_m, tiles_n),
        "AVERAGE": linear.average,
    }
    kernel = one_node.matmul_reduce_scatter_kernel
    grid = formulas.persistent_grid(0, tiles, resident)
    options = operands.launch_options(configuration, input)
    op, then = "matmul_reduce_scatter", []
    if linear.tail is not None:
        tail = tail_arguments(linear, blocks_of(linear, configuration), whole)
        arguments |= tail | gathering(
            communicator, layout, segments, tail["TAIL"].ROWS, linear, whole
        )
        kernel, options = row_norms.matmul_reduce_scatter_norm_kernel, OF_NORMS | options
        return plain.enqueue_kernel(communicator, op, layout, kernel, grid, arguments, options)
    arguments["own_rows"] = rows[communicator.rank]
    if operands.may_have_roles(configuration, input, known):
        # Gluon is a separate language, which most processes never need.
        from interlace.kernels.matmul import matmul_reduce_scatter_roles as roles

        own_rows = rows[communicator.rank]
        sums = one_node.sum_tiles_kernel
        own_tiles = formulas.tiles_of([own_rows], block_m, tiles_n)
        programs = formulas.persistent_grid(0, own_tiles, resident)
        # By default ptxas chooses so few registers that each load waits for the one before.
        more = {**options, "options": {"maxnreg": 128}}
        then = [(sums, programs, operands.taken_by(sums, arguments), more)]
        # Bias and activation apply to the sums.
        arguments["TILES"] = known["TILES"]._replace(BIAS="", ACTIVATION="")
        kernel, extents = (
            roles.matmul_reduce_scatter_roles_kernel,
            (own_rows, input.shape[0], tiles),
        )
        arguments = operands.with_roles(kernel, arguments, extents, configuration.num_stages)
    return plain.enqueue_kernel(communicator, op, layout, kernel, grid, arguments, options, then)


def matmul_reduce_scatter_pipelined(
    communicator: Communicator, input: torch.Tensor, linear: Linear, segments: Segments
) -> Event:
    """Run a torch matmul per owner into the owner's workspace; then sum in rank order."""
    if communicator.place.nodes is not None:
        return node_fused.matmul_reduce_scatter(communicator, input, linear, segments)
    rank, world_size = communicator.rank, communicator.world_size
    columns, dtype = linear.weight.shape[1], linear.output.dtype
    region = max(count for _, count in segments) * columns * dtype.itemsize

    def body(workspace: Workspace) -> None:
        stream = communicator.compute
        stream.wait_credits(workspace)
        for owner in owner_order(rank, world_size):
            first, count = segments[owner]
            theirs = workspace.data(owner, rank * region, (count, columns), dtype)
            about = theirs, input[first : first + count], linear.weight, None, "", linear.format
            stream.call(functools.partial(operands.multiply, *about), f"matmul for rank {owner}")
            if owner != rank:
                stream.publish(workspace, owner, rank)
        plain.wait_for_all(communicator, workspace, 0)
        parts = [
            workspace.data(rank, source * region, linear.output.shape, dtype)
            for source in range(world_size)
        ]
        stream.call(lambda: operands.sum_with_bias(parts, linear), "sum")

    layout = Layout(world_size, world_size * region)
    return communicator.enqueue("matmul_reduce_scatter", layout, body)


def matmul_reduce_scatter_unfused(
    communicator: Communicator, input: torch.Tensor, linear: Linear, segments: Segments
) -> Event:
    """Compute the whole product in this rank's workspace; then every rank sums its part."""
    if communicator.place.nodes is not None:
        return node_fused.matmul_reduce_scatter(communicator, input, linear, segments)
    rank, columns, dtype = communicator.rank, linear.weight.shape[1], linear.output.dtype
    nbytes = input.shape[0] * columns * dtype.itemsize
    # one rounding in both cases
    exact = linear.bias is None and not linear.activation
    exact = exact and dtype in (torch.float32, torch.float64)
    least_work = communicator.place.direct_access and exact and nbytes <= SMALL_BYTES
    if least_work or not communicator.place.mapped:
        product = input.new_empty(input.shape[0], columns, dtype=dtype)
        operands.multiply(product, input, linear.weight, None, format=linear.format)
        return operands.scatter_product(communicator, product, linear, segments)

    def body(workspace: Workspace) -> None:
        stream = communicator.compute
        stream.wait_credits(workspace)
        product = workspace.data(rank, 0, (input.shape[0], columns), dtype)
        stream.call(
            lambda: operands.multiply(product, input, linear.weight, None, format=linear.format),
            "matmul",
        )
        for peer in plain.other_ranks(communicator):
            stream.publish(workspace, peer, rank)
        first, _ = segments[rank]
        operands.sum_staged(communicator, workspace, linear, first * columns * dtype.itemsize)

    layout = Layout(communicator.world_size, nbytes, pulled=True)
    return communicator.enqueue("matmul_reduce_scatter", layout, body)


def matmul_all_reduce_fused(
    communicator: Communicator, input: torch.Tensor, linear: Linear, configuration: Configuration
) -> Event:
    """Run one kernel that sends every tile to every rank (one-shot). With a tail all norm all rows."""
    (rows, columns), block_m = linear.output.shape, configuration.block_m
    tiles_n = formulas.ceil_div(columns, configuration.block_n)
    tiles = formulas.tiles_of([rows], block_m, tiles_n)
    row_bytes = columns * linear.output.element_size()
    layout = plain.pushed_layout(communicator, [rows], block_m, tiles_n, row_bytes)
    known = operands.product(communicator, configuration, input, linear)
    # A tile is stored into every rank's memory in turn, but a descriptor is for one rank.
    known["TILES"] = known["TILES"]._replace(OUT_DESCRIPTOR=False)
    resident = plain.resident_programs(communicator, configuration)
    bias, average = operands.bias_or_none(linear), linear.average
    arguments = {**known, "bias_ptr": bias, "M": rows, "AVERAGE": average}
    kernel = one_node.matmul_all_reduce_kernel
    grid = formulas.persistent_grid(0, tiles, resident)
    options = operands.launch_options(configuration, input)
    if linear.tail is not None:
        kernel, options = row_norms.matmul_all_reduce_norm_kernel, OF_NORMS | options
        arguments |= tail_arguments(linear, blocks_of(linear, configuration))
    return plain.enqueue_kernel(
        communicator, "matmul_all_reduce", layout, kernel, grid, arguments, options
    )
