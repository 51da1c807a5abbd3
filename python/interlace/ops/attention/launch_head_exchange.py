"""The launch side of matmul + all-to-all, and of all-to-all + matmul: some columns of all rows, and back.

``fused``      one Triton kernel communicates and multiplies
``pipelined``  torch matmuls: a product per receiver, on its way at once; or one behind pushes
``unfused``    matmul and the collective, one after the other; any dtype

Matrices are 2-D: ``input`` has contiguous columns, weights are ``[K, N]`` with any strides and the same on
all ranks, results are contiguous. ``rows`` lists the rows of every rank. Rank r has the r-th of W equal
parts of the columns of a product, or of the weight's rows. ``received``: ``[W, own rows, own K]``, what
came to this rank, if it is asked for.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import OwnRows, Table
from interlace.kernels.attention import head_exchange as kernels
from interlace.kernels.tiling import owner_order
from interlace.ops.collectives import launch as plain
from interlace.ops.matmul import operands
from interlace.ops.matmul.operands import Linear
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor
TO_HEADS, FROM_HEADS = "matmul_all_to_all", "all_to_all_matmul"


def part_of(linear: Linear, rank: int, world_size: int) -> Linear:
    """The weight's columns of ``rank``."""
    columns = linear.weight.shape[1] // world_size
    own = slice(rank * columns, (rank + 1) * columns)
    bias = None if linear.bias is None else linear.bias[own]
    return replace(linear, weight=linear.weight[:, own], bias=bias)


# -- matmul, then all-to-all -----------------------------------------------------------------------


def to_heads_fused(
    communicator: Communicator,
    input: Tensor,
    linear: Linear,
    rows: Sequence[int],
    configuration: Configuration,
) -> Event:
    columns, block_m = linear.output.shape[1], configuration.block_m
    tiles_n = formulas.ceil_div(columns, configuration.block_n)
    rank, world_size = communicator.rank, communicator.world_size
    weight = linear.weight
    if columns * weight.stride(1) * weight.element_size() % operands.DESCRIPTOR_ALIGNMENT:
        configuration = replace(configuration, descriptors=False)
    table = communicator.table(
        ("shards of heads", tuple(rows), block_m, tiles_n),
        lambda: formulas.shard_lines(rows, block_m, tiles_n),
    )
    own = replace(linear, weight=weight[:, :columns])
    arguments = {
        **operands.product(communicator, configuration, input, own, published=True),
        **operands.epilogue(linear),
        "shards_ptr": table,
    }
    layout = Layout(
        formulas.tiles_of(rows, block_m, tiles_n),
        sum(rows) * columns * linear.output.element_size(),
    )
    tiles = max(
        formulas.tiles_of([rows[rank]], block_m, tiles_n) * world_size,
        formulas.tiles_of([max(rows)], block_m, tiles_n),
    )
    grid = formulas.persistent_grid(0, tiles, plain.resident_programs(communicator, configuration))
    kernel, options = (
        kernels.matmul_all_to_all_kernel,
        operands.launch_options(configuration, input),
    )
    return plain.enqueue_kernel(communicator, TO_HEADS, layout, kernel, grid, arguments, options)


def to_heads_pipelined(
    communicator: Communicator, input: Tensor, linear: Linear, rows: Sequence[int]
) -> Event:
    """A torch matmul per receiver, straight into its workspace."""
    rank, world_size = communicator.rank, communicator.world_size
    shape, dtype = linear.output.shape, linear.output.dtype
    begins = formulas.segments_of(rows)

    def body(workspace: Workspace) -> None:
        stream, (first, count) = communicator.compute, begins[rank]
        stream.wait_credits(workspace)
        for owner in owner_order(rank, world_size):
            part = part_of(linear, owner, world_size)
            if owner != rank:
                part.output = workspace.data(owner, 0, shape, dtype)
            label, here = f"matmul for rank {owner}", slice(first, first + count)
            operands.enqueue_product(communicator, input, part, here, label)
            if owner != rank:
                stream.publish(workspace, owner, rank)
        arrived = workspace.data(rank, 0, shape, dtype)
        for source in plain.sources(communicator)[1:]:
            stream.wait(workspace, source, source)
            begin, length = begins[source]
            here = slice(begin, begin + length)
            stream.copy(linear.output[here], arrived[here], f"rows of rank {source}")

    layout = Layout(world_size, sum(rows) * shape[1] * dtype.itemsize)
    return communicator.enqueue(TO_HEADS, layout, body)


def to_heads_unfused(
    communicator: Communicator, input: Tensor, linear: Linear, rows: Sequence[int]
) -> Event:
    rank, world_size = communicator.rank, communicator.world_size
    output = linear.output
    communicator.compute.wait_event(communicator.place.record_current())
    made = output.new_empty(world_size, rows[rank], output.shape[1])
    if world_size == 1:
        made = output.unsqueeze(0)
    for owner in range(world_size):
        part = replace(part_of(linear, owner, world_size), output=made[owner])
        label = f"matmul for rank {owner}"
        operands.enqueue_product(communicator, input, part, slice(None), label)
    if world_size > 1:
        outputs = [part.view(-1) for part in torch.split(output, list(rows))]
        inputs = [part.view(-1) for part in made]
        _by_engine(communicator, TO_HEADS, rows, output.shape[1], outputs, inputs)
    return communicator.compute.record()


def _by_engine(
    communicator: Communicator,
    op: str,
    rows: Sequence[int],
    columns: int,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> None:
    """The plain collective, behind what is on the compute stream, which then goes on behind it."""
    dtype = outputs[0].dtype
    # an engine begins with what the caller has issued
    communicator.place.hold_current(communicator.compute.record(), f"the parts of {op}")
    call = plain.agreed_call(communicator, op, (f"parts of {op}", tuple(rows), columns, dtype))
    event = communicator.engine.all_to_all(call, outputs, inputs)
    if event is not None:
        communicator.compute.wait_event(event)


# -- all-to-all, then matmul -----------------------------------------------------------------------


def from_heads_fused(
    communicator: Communicator,
    input: Tensor,
    linear: Linear,
    rows: Sequence[int],
    received: Tensor | None,
    configuration: Configuration,
) -> Event:
    """The first programs of the kernel send, or the copy engine does."""
    rank, world_size, inner = communicator.rank, communicator.world_size, input.shape[1]
    configuration = replace(configuration, descriptors=False, output_descriptors=False)
    block_m, place = configuration.block_m, communicator.place
    size = formulas.chunk_rows(rows, block_m, configuration.chunks)
    chunks = formulas.ceil_div(max(rows), size)
    lines = formulas.head_send_lines(rank, world_size, rows, size, chunks)
    table = communicator.table(("sends of heads", tuple(rows), size), lambda: lines)
    tiles_n = formulas.ceil_div(linear.weight.shape[1], configuration.block_n)
    tiles = formulas.tiles_of([rows[rank]], block_m, tiles_n)
    known = {
        **operands.product(communicator, configuration, input, linear),
        **operands.epilogue(linear),
        "K": inner,
        "own": OwnRows(rows[rank], sum(rows[:rank]), size, chunks),
        "sends": Table(table, len(lines)),
    }
    layout = Layout(world_size * chunks, world_size * max(rows) * inner * input.element_size())

    def body(workspace: Workspace) -> None:
        copiers = min(configuration.copiers, len(lines), max(1, place.program_limit // 4))
        if lines and not (copiers and tiles):
            plain.send_by_copy_engine(communicator, workspace, lines, [(input, 0)])
            copiers = 0
        if tiles:
            resident = plain.resident_programs(communicator, configuration, copiers)
            grid = formulas.persistent_grid(copiers, tiles, max(copiers + 1, resident))
            arguments = {**known, **operands.copies(configuration, copiers)}
            kernel, options = (
                kernels.all_to_all_matmul_kernel,
                operands.launch_options(configuration, input),
            )
            communicator.compute.launch(workspace.kernel_launch(kernel, grid, arguments, **options))
        else:
            # No tile, so no program has waited; but what arrives late would hit the next op.
            for source in plain.others(communicator):
                for chunk in range(formulas.ceil_div(rows[rank], size)):
                    communicator.compute.wait(workspace, source, source * chunks + chunk)
        if received is not None:
            arrived = workspace.data(rank, 0, received.shape, received.dtype)
            _keep(communicator, received, arrived, input, rows)

    return communicator.enqueue(FROM_HEADS, layout, body)


def _keep(
    communicator: Communicator,
    received: Tensor,
    arrived: Tensor,
    input: Tensor,
    rows: Sequence[int],
) -> None:
    """What has come from each rank, and the own rows, for the caller."""
    rank, first = communicator.rank, sum(rows[: communicator.rank])
    for source in range(communicator.world_size):
        own = source == rank
        part = input[first : first + rows[rank]] if own else arrived[source]
        communicator.compute.copy(received[source], part, f"received from rank {source}")


def from_heads_pipelined(
    communicator: Communicator,
    input: Tensor,
    linear: Linear,
    rows: Sequence[int],
    received: Tensor | None,
) -> Event:
    """Rows are pushed to where they are columns of the owner's matrix; one torch matmul per chunk."""
    rank, world_size, inner = communicator.rank, communicator.world_size, input.shape[1]
    begins, dtype = formulas.segments_of(rows), input.dtype

    def body(workspace: Workspace) -> None:
        stream, copying = communicator.compute, communicator.copying
        copying.wait_credits(workspace)
        for peer in [rank, *plain.others(communicator)]:
            first, count = begins[peer]
            theirs = workspace.data(peer, 0, (count, world_size, inner), dtype)[:, rank]
            copying.copy(theirs, input[first : first + count], f"rows to rank {peer}")
            if peer != rank:
                copying.publish(workspace, peer, rank)
        stream.wait_event(copying.record())
        plain.wait_for_all(communicator, workspace, 0)
        whole = workspace.data(rank, 0, (rows[rank], world_size * inner), dtype)
        operands.enqueue_product(communicator, whole, linear, slice(None), "matmul")
        if received is not None:
            parts = whole.view(rows[rank], world_size, inner).transpose(0, 1)
            stream.copy(received, parts, "received")

    layout = Layout(world_size, world_size * max(rows) * inner * input.element_size())
    return communicator.enqueue(FROM_HEADS, layout, body)


def from_heads_unfused(
    communicator: Communicator,
    input: Tensor,
    linear: Linear,
    rows: Sequence[int],
    received: Tensor | None,
) -> Event:
    rank, world_size, inner = communicator.rank, communicator.world_size, input.shape[1]
    communicator.compute.wait_event(communicator.place.record_current())
    made = received
    if made is None:
        made = input.new_empty(world_size, rows[rank], inner)
    if world_size == 1:
        communicator.compute.copy(made[0], input, "received")
    else:
        inputs = [part.contiguous().view(-1) for part in torch.split(input, list(rows))]
        outputs = [part.view(-1) for part in made]
        _by_engine(communicator, FROM_HEADS, rows, inner, outputs, inputs)
    whole = made.new_empty(rows[rank], world_size, inner)
    communicator.compute.copy(whole, made.transpose(0, 1), "columns by rank")
    matrix = whole.view(rows[rank], world_size * inner)
    operands.enqueue_product(communicator, matrix, linear, slice(None), "matmul")
    return communicator.compute.record()
