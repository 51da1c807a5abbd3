"""The launch side of all-gather + matmul: workspace layout, grid, launch sequence.

Matrices are 2-D here: ``input`` is ``[rows, K]`` with contiguous K, weights are ``[K, N]`` with any
strides, results are contiguous. ``rows`` lists the rows of every rank.

Between nodes a kernel of moves brings chunks, and the matmul takes them in the order in which they arrive
over both links. :func:`matmul_reduce_scatter`, for the unfused and pipelined reductions between nodes,
multiplies other nodes' parts first. Each part is passed on as soon as it is ready, and one kernel sums
within the node, puts, and adds the sums that other nodes have put::

    compute  | mm part of node 1 | mm part of node 1 | mm own node's ... |
    copy       | contribute        | contribute        | contribute ...  | sum, put, sum |
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Table
from interlace.kernels.matmul import all_gather_matmul as all_gather_matmul_kernels
from interlace.ops.collectives import launch as plain, node_moves as algorithms
from interlace.ops.matmul import operands
from interlace.ops.matmul.operands import Linear
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning import configuration as configurations
from interlace.runtime.tuning.configuration import Configuration
from interlace.runtime.tuning.table import threshold


class GatherMoves:
    """Moves of chunks of rows by ``programs`` of ``all_gather_matmul_fused``, instead of copiers."""

    def __init__(
        self,
        communicator: Communicator,
        rows: Sequence[int],
        size: int,
        configuration: Configuration,
    ) -> None:
        self._known = communicator.rank, communicator.nodes, rows, size
        self._configuration = configuration
        self._moves = algorithms.gather_moves(communicator, rows, size)
        self.partners = algorithms.Partners(communicator)
        self.slots = self._moves.leased(communicator.world_size)
        most = max(1, min(self._moves.count, communicator.place.program_limit // 4))
        self.programs = min(max(1, configuration.copiers), most)

    def chunk_lines(self, block_m: int, tiles_n: int) -> list[list[int]]:
        """Return ``launch_formulas.chunk_lines`` in the order in which chunks arrive between nodes."""
        rank, _, rows, _ = self._known
        arrivals = algorithms.arrival_lines(*self._known, with_own=False)
        return formulas.numbered_lines(rank, rows, arrivals, block_m, tiles_n)

    def start(self, workspace: Workspace, input: torch.Tensor) -> None:
        """Begin to move rows of ``input`` on the copy stream."""
        self.partners.move(workspace, input, self._moves, self.programs, self._configuration)


def matmul_reduce_scatter(
    communicator: Communicator,
    input: torch.Tensor,
    linear: operands.Linear,
    segments: Sequence[tuple[int, int]],
) -> Event:
    """Write this rank's rows of the summed products; ``segments``: (first row, rows)."""
    columns, output = linear.weight.shape[1], linear.output
    product = torch.empty(input.shape[0], columns, dtype=output.dtype, device=output.device)
    if output.dtype not in plain.KERNEL_DTYPES or not product.numel():
        operands.multiply(product, input, linear.weight, None, format=linear.format)
        return operands.scatter_product(communicator, product, linear, segments)
    exact = not linear.unfinished
    total = output if exact else torch.empty_like(output, dtype=torch.float32)
    lengths = [count * columns for _, count in segments]
    config = configurations.choose(communicator.place, output.dtype, max(lengths), 1, 1)

    def produce(owner: int) -> None:
        first, count = segments[owner]
        rows = slice(first, first + count)
        operands.multiply(product[rows], input[rows], linear.weight, None, format=linear.format)

    return algorithms.reduce_scatter(
        communicator,
        product.view(-1),
        total.view(-1),
        lengths,
        config,
        average=linear.average,
        op="matmul_reduce_scatter",
        produce=produce,
        finish=None if exact else lambda: operands.finish_sum(total, linear),
    )


# gathered bytes from which staging for peers to read is as fast as a copy engine
SMALL_BYTES = threshold("engine_gather_bytes")
MOST_SIZES = 1024  # sizes kept for repeated shapes


class _GatherSizes(NamedTuple):
    """Values that calls of the same shapes share; ``launches``: by weight, ``chunks``, tiles, grid."""

    chunk_rows: int
    layout: Layout
    scales_at: int
    copiers: int
    sends: Table
    launches: list[tuple[Table, int, int]]
    far: GatherMoves | None


def _sizes(
    communicator: Communicator,
    configuration: Configuration,
    rows: Sequence[int],
    columns: Sequence[int],
    row_bytes: int,
    scale_bytes: int,
) -> _GatherSizes:
    """Compute sizes. ``scale_bytes`` are sent with every row; ``columns`` are this rank's weights'."""
    key = "all_gather_matmul", configuration, tuple(rows), tuple(columns), row_bytes, scale_bytes
    known: _GatherSizes | None = communicator.derived.get(key)
    if known is not None:
        return known
    rank, world_size, place = communicator.rank, communicator.world_size, communicator.place
    block_m = configuration.block_m
    size = formulas.chunk_rows(rows, block_m, configuration.chunks)
    slots, sends = formulas.chunk_slots(rows, size), plain.send_table(communicator, rows, size)
    copiers, moving, far = min(configuration.copiers, sends.count), 0, None
    if place.nodes is not None:
        far = GatherMoves(communicator, rows, size, configuration)
        copiers, moving = 0, far.programs
    copiers = min(copiers, max(1, place.program_limit // 4))
    layout = Layout()
    layout.add_slots(slots if far is None else far.slots)
    layout.add_data(formulas.gathered_bytes(rows, row_bytes))
    scales_at = layout.add_data(sum(rows) * scale_bytes) if scale_bytes else 0
    launches = []
    for index, each in enumerate(columns):
        tiles_n = formulas.ceil_div(each, configuration.block_n)
        if far is not None:
            lines = far.chunk_lines(block_m, tiles_n)
        else:
            lines = formulas.chunk_lines(rank, world_size, rows, size, block_m, tiles_n)
        named = "chunks", tuple(rows), size, block_m, tiles_n
        chunks = communicator.table(named, lines.copy)
        copying_programs = copiers if index == 0 else 0
        resident = max(
            copying_programs + 1,
            plain.resident_programs(communicator, configuration, copying_programs) - moving,
        )
        tiles = formulas.tiles_of(rows, block_m, tiles_n)
        grid = formulas.persistent_grid(copying_programs, tiles, resident)
        launches.append((Table(chunks, len(lines)), tiles, grid))
    sizes = _GatherSizes(size, layout, scales_at, copiers, sends, launches, far)
    if len(communicator.derived) >= MOST_SIZES:
        communicator.derived.clear()
    communicator.derived[key] = sizes
    return sizes


def all_gather_matmul_fused(
    communicator: Communicator,
    input: torch.Tensor,
    linears: Sequence[Linear],
    rows: Sequence[int],
    gathered: torch.Tensor | None,
    configuration: Configuration,
) -> Event:
    """Launch one kernel per weight. The first has the copiers, or the copy engine sends.

    Between nodes a separate kernel moves the rows. If the weights' ``scales`` are "row", each row is sent
    with its scale.
    """
    rank, inner = communicator.rank, input.shape[1]
    total = sum(rows)
    sent_scale = linears[0].row_scale if linears[0].scales == "row" else None
    # Made before the op begins on the streams: they wait for all work issued until then.
    sizes = _sizes(
        communicator,
        configuration,
        rows,
        [linear.weight.shape[1] for linear in linears],
        inner * input.element_size(),
        0 if sent_scale is None else sent_scale.element_size(),
    )
    size, far, scales_at = sizes.chunk_rows, sizes.far, sizes.scales_at
    products = [
        operands.product(communicator, configuration, input, linear) | operands.epilogue(linear)
        for linear in linears
    ]

    def body(workspace: Workspace) -> None:
        if far is not None:
            far.start(workspace, input)
        elif not sizes.copiers:
            lines = formulas.send_lines(rank, communicator.world_size, rows, size)
            sent = [(input, 0)] + ([] if sent_scale is None else [(sent_scale, scales_at)])
            plain.send_by_copy_engine(communicator, workspace, lines, sent)
        path = multicast_path(communicator, configuration, workspace)
        copiers = sizes.copiers
        for (chunks, tiles, grid), operand in zip(sizes.launches, products, strict=True):
            # a switch moves 16 bytes at a time
            multicast = path if copiers and operand["TILES"].ALIGNED else ""
            kernel = all_gather_matmul_kernels.all_gather_matmul_kernel
            arguments = {
                **operand,
                **operands.copies(configuration, copiers, multicast),
                "scale_offset": workspace.data_offset + scales_at,
                "sends": sizes.sends,
                "chunks": chunks,
                "multicast": workspace.buffer.multicast,
            }
            plainly = not copiers and not operand["TILES"].BIAS
            if plainly and operands.may_have_roles(configuration, input, operand):
                # Gluon is a separate language, which most processes never need.
                from interlace.kernels.matmul import all_gather_matmul_roles as roles

                kernel, extents = roles.all_gather_matmul_roles_kernel, (rows[rank], total, tiles)
                stages = configuration.num_stages
                arguments = operands.with_roles(kernel, arguments, extents, stages)
            options = operands.launch_options(configuration, input)
            communicator.compute.launch(workspace.kernel_launch(kernel, grid, arguments, **options))
            copiers = 0
        if not any(linear.weight.shape[1] for linear in linears):
            # No tile, so no program has waited; but a late arrival would reach the next op.
            lines = formulas.arrival_lines(rank, communicator.world_size, rows, size, False)
            for source, *_, slot in lines:
                communicator.compute.wait(workspace, source, slot)
        if gathered is not None:
            arrived = workspace.data(rank, 0, (total, inner), input.dtype)
            first = sum(rows[:rank])
            for begin, end in ((0, first), (first + rows[rank], total)):
                if begin < end:
                    communicator.compute.copy(gathered[begin:end], arrived[begin:end], "gathered")
            if rows[rank]:
                communicator.compute.copy(gathered[first : first + rows[rank]], input, "own shard")
        if far is not None:
            far.partners.put_credits(workspace)

    return communicator.enqueue("all_gather_matmul", sizes.layout, body)


def multicast_path(
    communicator: Communicator, configuration: Configuration, workspace: Workspace
) -> str:
    """Return how copiers reach all ranks at once: "multimem", "peers" if interpreted, or ""."""
    if not configuration.multimem:
        return ""
    if workspace.buffer.multicast:
        return "multimem"
    return "peers" if communicator.place.interpreted else ""


def all_gather_matmul_pipelined(
    communicator: Communicator,
    input: torch.Tensor,
    linears: Sequence[Linear],
    rows: Sequence[int],
    gathered: torch.Tensor | None,
    configuration: Configuration,
) -> Event:
    """Run torch matmuls on chunks in the order of arrival.

    Every rank stages its shard in its own workspace, chunk by chunk. If a peer's memory is as fast as the
    rank's own, matmuls read it there. Otherwise the copy stream copies each chunk first. Between nodes a
    kernel moves the chunks to every rank, and matmuls read them there.
    """
    rank, world_size, inner = communicator.rank, communicator.world_size, input.shape[1]
    row_bytes, dtype, far = inner * input.element_size(), input.dtype, None
    direct, nodes = communicator.place.direct_access, communicator.place.nodes
    # a CPU gains more from large matmuls than from finer overlap
    chunks = 1 if direct and nodes is None else configuration.chunks
    size = max(1, formulas.ceil_div(max(rows), chunks))
    if nodes is None:
        lines = formulas.arrival_lines(rank, world_size, rows, size, True)
        layout = Layout(formulas.chunk_slots(rows, size), max(rows) * row_bytes, pulled=True)
    else:
        direct, far = True, GatherMoves(communicator, rows, size, configuration)
        lines = algorithms.arrival_lines(rank, nodes, rows, size, with_own=True)
        layout = Layout(far.slots, formulas.gathered_bytes(rows, row_bytes))
    if gathered is None and not direct:
        gathered = torch.empty(sum(rows), inner, dtype=dtype, device=input.device)

    def stage(workspace: Workspace) -> None:
        copying = communicator.copying
        copying.wait_credits(workspace)
        for source, first, count, _, slot in lines:
            if source == rank:
                mine = workspace.data(rank, first * row_bytes, (count, inner), dtype)
                copying.copy(mine, input[first : first + count], f"stage rows from {first} on")
                for peer in plain.other_ranks(communicator):
                    copying.publish(workspace, peer, slot)

    def body(workspace: Workspace) -> None:
        stream, copying = communicator.compute, communicator.copying
        if far is None:
            stage(workspace)
        else:
            far.start(workspace, input)
        for source, first, count, row, slot in lines:
            operand, rows_here = input[first : first + count], slice(row, row + count)
            label = f"rows from {first} on of rank {source}"
            if source != rank:
                owner, begin = (source, first) if far is None else (rank, row)
                theirs = workspace.data(owner, begin * row_bytes, (count, inner), dtype)
                if direct:
                    stream.wait(workspace, source, slot)
                    operand = theirs
                else:
                    assert gathered is not None
                    copying.wait(workspace, source, slot)
                    copying.copy(gathered[rows_here], theirs, label)
                    stream.wait_event(copying.record())
                    operand = gathered[rows_here]
            for linear in linears:
                operands.enqueue_product(communicator, operand, linear, rows_here, label)
            if gathered is not None and (direct or source == rank):
                stream.copy(gathered[rows_here], operand, "gathered")
        if far is not None:
            far.partners.put_credits(workspace)

    return communicator.enqueue("all_gather_matmul", layout, body)


def all_gather_matmul_unfused(
    communicator: Communicator,
    input: torch.Tensor,
    linears: Sequence[Linear],
    rows: Sequence[int],
    gathered: torch.Tensor,
) -> Event:
    """Gather everything into ``gathered``, then one torch matmul per weight."""
    parts = [part.view(-1) for part in torch.split(gathered, list(rows))]
    flat = input.contiguous().view(-1)
    if communicator.place.direct_access and gathered.nbytes <= SMALL_BYTES:
        key = ("rows of all_gather_matmul", tuple(rows), input.shape[1], input.dtype)
        call = plain.agreed_call(communicator, "all_gather_matmul", key)
        communicator.engine.all_gather(call, parts, flat)
    else:
        plain.gather_made(communicator, flat, parts)
    for linear in linears:
        operands.enqueue_product(communicator, gathered, linear, slice(None), "matmul")
    return communicator.compute.record()


def all_gather_inner_matmul(
    communicator: Communicator,
    shard: torch.Tensor,
    linears: Sequence[Linear],
    lengths: Sequence[int],
    gathered: torch.Tensor,
) -> Event:
    """Gather slices of K: ``shard`` ``[own K, rows]`` and ``gathered`` ``[K, rows]`` are transposed."""
    parts = [part.view(-1) for part in torch.split(gathered, list(lengths))]
    plain.gather_made(communicator, shard.view(-1), parts)
    for linear in linears:
        operands.enqueue_product(communicator, gathered.T, linear, slice(None), "matmul")
    return communicator.compute.record()
