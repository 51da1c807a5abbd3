"""Fused ops between nodes: matmuls that run while rows or sums travel within and between nodes.

All-gather + matmul keeps its kernel: it takes chunks in the order in which they come over both links, and
the kernel of moves brings them. Fused matmul + reduce-scatter is in ``node_matmul_reduce.py``. The other
algorithms multiply part by part in the order in which parts are needed, those of other nodes first; each
is handed over as soon as it is done, and one kernel sums within the node, puts, and adds what the other
nodes have put::

    compute  | mm part of node 1 | mm part of node 1 | mm own node's ... |
    copy       | contribute        | contribute        | contribute ...  | sum, put, sum |
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.tiling import split_rows
from interlace.ops.collectives import launch as plain, node_moves as algorithms
from interlace.ops.matmul import operands
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace, bytes_of
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning import configuration as configurations
from interlace.runtime.tuning.configuration import Configuration


class GatherMoves:
    """Moves of chunks of rows by ``programs`` of ``all_gather_matmul_fused``, in place of copiers."""

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
        """The ``launch_formulas.chunk_lines`` in the order in which chunks come between nodes."""
        rank, _, rows, _ = self._known
        arrivals = algorithms.arrival_lines(*self._known, own=False)
        return formulas.numbered_lines(rank, rows, arrivals, block_m, tiles_n)

    def start(self, workspace: Workspace, input: torch.Tensor) -> None:
        """Begin to move rows of ``input`` on the copy stream."""
        self.partners.move(workspace, input, self._moves, self.programs, self._configuration)


def all_gather_matmul_pipelined(
    communicator: Communicator,
    input: torch.Tensor,
    linears: Sequence[operands.Linear],
    rows: Sequence[int],
    gathered: torch.Tensor | None,
    configuration: Configuration,
) -> Event:
    """A torch matmul per chunk, each as soon as its chunk is there."""
    rank, inner = communicator.rank, input.shape[1]
    size = max(1, formulas.ceil_div(max(rows), configuration.chunks))
    moves = GatherMoves(communicator, rows, size, configuration)
    nbytes = formulas.gathered_bytes(rows, inner * input.element_size())
    lines = algorithms.arrival_lines(rank, communicator.nodes, rows, size, own=True)

    def body(workspace: Workspace) -> None:
        stream = communicator.compute
        moves.start(workspace, input)
        arrived = workspace.data(rank, 0, (sum(rows), inner), input.dtype)
        for source, first, count, row, slot in lines:
            operand, rows_here = input[first : first + count], slice(row, row + count)
            if source != rank:
                stream.wait(workspace, source, slot)
                operand = arrived[rows_here]
            for linear in linears:
                label = f"matmul of rows from rank {source}"
                operands.enqueue_product(communicator, operand, linear, rows_here, label)
            if gathered is not None:
                stream.copy(gathered[rows_here], operand, "gathered")
        moves.partners.put_credits(workspace)

    return communicator.enqueue("all_gather_matmul", Layout(moves.slots, nbytes), body)


def matmul_reduce_scatter(
    communicator: Communicator,
    input: torch.Tensor,
    linear: operands.Linear,
    segments: Sequence[tuple[int, int]],
) -> Event:
    """``linear.output`` = own rows of the sum over ranks of products; ``segments``: (first row, rows)."""
    columns, output = linear.weight.shape[1], linear.output
    product = torch.empty(input.shape[0], columns, dtype=output.dtype, device=output.device)
    if output.dtype not in plain.KERNEL_DTYPES or not product.numel():
        operands.multiply(product, input, linear.weight, None)
        return operands.scatter_product(communicator, product, linear, segments)
    exact = not linear.unfinished
    total = output if exact else torch.empty_like(output, dtype=torch.float32)
    lengths = [count * columns for _, count in segments]
    config = configurations.choose(communicator.place, output.dtype, max(lengths), 1, 1)

    def produce(owner: int) -> None:
        first, count = segments[owner]
        rows = slice(first, first + count)
        operands.multiply(product[rows], input[rows], linear.weight, None)

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


def matmul_all_reduce(
    communicator: Communicator,
    linear: operands.Linear,
    reduce_scatter: Callable[[operands.Linear, Sequence[tuple[int, int]]], Event],
) -> Event:
    """Every rank sums a part of the rows, by ``reduce_scatter``; then all gather the parts."""
    rank, output = communicator.rank, linear.output
    segments = split_rows(output.shape[0], communicator.world_size)
    parts = [output[first : first + count] for first, count in segments]
    bias = linear.bias
    if bias is not None and linear.bias_along == "m":
        first, count = segments[rank]
        bias = bias[first : first + count]
    event = reduce_scatter(replace(linear, bias=bias, output=parts[rank]), segments)
    whole = [bytes_of(part) for part in parts]
    return algorithms.gather_parts(communicator, whole, whole[rank], event) or event
