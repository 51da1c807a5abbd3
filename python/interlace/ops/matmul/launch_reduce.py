"""The launch side of matmul + reduce-scatter and matmul + all-reduce.

``fused``      one Triton kernel communicates and multiplies
``pipelined``  torch matmuls per owner, each product on its way as soon as it is done
``unfused``    matmul, then the collective; any dtype

Matrices are 2-D here: ``input`` is ``[rows, K]`` with contiguous K, weights are ``[K, N]`` with any
strides, results are contiguous. ``segments`` lists (first row, rows) by
owner; ``linear.output`` is what this rank owns.
"""

import functools
from collections.abc import Sequence

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.matmul import (
    matmul_all_reduce as matmul_all_reduce_kernels,
    matmul_reduce_scatter as matmul_reduce_scatter_kernels,
)
from interlace.kernels.tiling import owner_order
from interlace.ops.collectives import launch as plain
from interlace.ops.matmul import (
    node_gather as node_fused,
    node_reduce as node_matmul_reduce,
    operands,
)
from interlace.ops.matmul.operands import Linear
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration
from interlace.runtime.tuning.table import threshold

Segments = Sequence[tuple[int, int]]  # (first row, rows) by owner
SMALL_BYTES = threshold("engine_reduce_bytes")  # of a product


def matmul_reduce_scatter_fused(
    communicator: Communicator,
    input: torch.Tensor,
    linear: Linear,
    segments: Segments,
    configuration: Configuration,
) -> Event:
    """One kernel, or with ``warp_roles`` two; between nodes one puts (``node_matmul_reduce.py``)."""
    if communicator.place.nodes is not None:
        if input.shape[0] and linear.weight.shape[1]:
            return node_matmul_reduce.matmul_reduce_scatter(
                communicator, input, linear, segments, configuration
            )
        return node_fused.matmul_reduce_scatter(communicator, input, linear, segments)
    columns, block_m = linear.weight.shape[1], configuration.block_m
    tiles_n = formulas.ceil_div(columns, configuration.block_n)
    rows = [count for _, count in segments]
    tiles = formulas.tiles_of(rows, block_m, tiles_n)
    row_bytes = columns * linear.output.element_size()
    layout = plain.pushed_layout(communicator, rows, block_m, tiles_n, row_bytes)
    # before the streams wait for what the caller has issued
    known = operands.product(communicator, configuration, input, linear, published=True)
    table = plain.segment_table(communicator, segments, block_m, tiles_n)
    resident = plain.resident_programs(communicator, configuration)
    arguments = {
        **known,
        **operands.epilogue(linear),
        "segments_ptr": table,
        "own_rows": rows[communicator.rank],
        "AVERAGE": linear.average,
    }
    kernel = matmul_reduce_scatter_kernels.matmul_reduce_scatter_kernel
    grid = formulas.persistent_grid(0, tiles, resident)
    options = operands.launch_options(configuration, input)
    op, then = "matmul_reduce_scatter", []
    if operands.may_have_roles(configuration, input, known):
        # Gluon is a language of its own, which most processes never need.
        from interlace.kernels.matmul import matmul_reduce_scatter_roles as roles

        own = rows[communicator.rank]
        sums = matmul_reduce_scatter_kernels.sum_tiles_kernel
        own_tiles = formulas.tiles_of([own], block_m, tiles_n)
        programs = formulas.persistent_grid(0, own_tiles, resident)
        # Left alone, ptxas takes so few registers that a load waits for the one before it.
        more = {**options, "options": {"maxnreg": 128}}
        then = [(sums, programs, operands.taken_by(sums, arguments), more)]
        # Bias and activation are for the sums.
        arguments["TILES"] = known["TILES"]._replace(BIAS="", ACTIVATION="")
        kernel, extents = roles.matmul_reduce_scatter_roles_kernel, (own, input.shape[0], tiles)
        arguments = operands.with_roles(kernel, arguments, extents, configuration.num_stages)
    return plain.enqueue_kernel(communicator, op, layout, kernel, grid, arguments, options, then)


def matmul_reduce_scatter_pipelined(
    communicator: Communicator, input: torch.Tensor, linear: Linear, segments: Segments
) -> Event:
    """A torch matmul per owner, straight into the owner's workspace; then sums in rank order."""
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
            about = theirs, input[first : first + count], linear.weight, None
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
    """The whole product first, staged in the own workspace; then everyone sums its part of all."""
    if communicator.place.nodes is not None:
        return node_fused.matmul_reduce_scatter(communicator, input, linear, segments)
    rank, world_size = communicator.rank, communicator.world_size
    columns, dtype = linear.weight.shape[1], linear.output.dtype
    nbytes = input.shape[0] * columns * dtype.itemsize
    # one rounding either way
    exact = linear.bias is None and not linear.activation
    exact = exact and dtype in (torch.float32, torch.float64)
    least_work = communicator.place.direct_access and exact and nbytes <= SMALL_BYTES
    if least_work or not communicator.place.mapped:
        product = input.new_empty(input.shape[0], columns, dtype=dtype)
        operands.multiply(product, input, linear.weight, None)
        return operands.scatter_product(communicator, product, linear, segments)

    def body(workspace: Workspace) -> None:
        stream = communicator.compute
        stream.wait_credits(workspace)
        product = workspace.data(rank, 0, (input.shape[0], columns), dtype)
        stream.call(lambda: operands.multiply(product, input, linear.weight, None), "matmul")
        for peer in plain.others(communicator):
            stream.publish(workspace, peer, rank)
        first, count = segments[rank]
        begin = first * columns * dtype.itemsize
        plain.wait_for_all(communicator, workspace, 0)
        parts = [
            workspace.data(source, begin, (count, columns), dtype) for source in range(world_size)
        ]
        stream.call(lambda: operands.sum_with_bias(parts, linear), "sum")

    layout = Layout(world_size, nbytes, pulled=True)
    return communicator.enqueue("matmul_reduce_scatter", layout, body)


def matmul_all_reduce_fused(
    communicator: Communicator, input: torch.Tensor, linear: Linear, configuration: Configuration
) -> Event:
    """One-shot: one kernel, every tile to every rank."""
    if communicator.place.nodes is not None:

        def reduce_scatter(own: Linear, segments: Segments) -> Event:
            return matmul_reduce_scatter_fused(communicator, input, own, segments, configuration)

        return node_fused.matmul_all_reduce(communicator, linear, reduce_scatter)
    (rows, columns), block_m = linear.output.shape, configuration.block_m
    tiles_n = formulas.ceil_div(columns, configuration.block_n)
    tiles = formulas.tiles_of([rows], block_m, tiles_n)
    row_bytes = columns * linear.output.element_size()
    layout = plain.pushed_layout(communicator, [rows], block_m, tiles_n, row_bytes)
    known = operands.product(communicator, configuration, input, linear)
    # A tile is stored into every rank's memory in turn: a descriptor is for one place.
    known["TILES"] = known["TILES"]._replace(OUT_DESCRIPTOR=False)
    resident = plain.resident_programs(communicator, configuration)
    bias, average = operands.bias_or_none(linear), linear.average
    arguments = {**known, "bias_ptr": bias, "M": rows, "AVERAGE": average}
    kernel = matmul_all_reduce_kernels.matmul_all_reduce_kernel
    grid = formulas.persistent_grid(0, tiles, resident)
    options = operands.launch_options(configuration, input)
    return plain.enqueue_kernel(
        communicator, "matmul_all_reduce", layout, kernel, grid, arguments, options
    )
