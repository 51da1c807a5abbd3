"""The launch side of the algorithms between nodes: workspace layout, tables, launch sequence.

Every op is two kernels side by side, or one that sums::

    copy stream     move_kernel: sends, stages, puts, lands, forwards (kernels/collectives/node_moves.py)
    compute stream  whatever takes what has come: a kernel, copies, a fused matmul
    at the end      put_credits_kernel, then what ends every op

Puts have a separate kernel because NVSHMEM's code comes with them: it needs registers and stack, which a
matmul must not spend. So the kernels that consume are the same as on one node.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from interlace.kernels import launch_formulas as formulas, node_order as order, transfer
from interlace.kernels.arguments import Node, NodeSlots, Regions, Rows, Table, TablePart
from interlace.kernels.collectives import node_moves as move_kernels, node_reduction as reduction
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace, bytes_of, neighbours, overlap
from interlace.runtime.core.place import Nodes
from interlace.runtime.core.stream import Event, Stream
from interlace.runtime.tuning.configuration import Configuration, choose

ALIGNMENT = 256  # bytes, for chunks
LARGEST_PIECE = 1 << 16  # elements of a partial sum that is put at once
PIECES = 32  # for the longest part, if it is long enough


@dataclass(frozen=True)
class Moves:
    """A table of moves, their number, and the slots that they name; a slot per rank more is leased."""

    table: torch.Tensor
    count: int
    slots: int

    def leased(self, world_size: int) -> int:
        return self.slots + world_size


def gather_moves(communicator: Communicator, rows: Sequence[int], size: int) -> Moves:
    rank, nodes = communicator.rank, communicator.nodes
    lines, slots = order.gather_moves(rank, nodes.of, rows, size)
    table = communicator.table(("node moves", tuple(rows), size), lambda: lines)
    return Moves(table, len(lines), slots)


class Partners:
    """Ranks of other nodes that this one exchanges puts with. Makes tables: before the op is on streams."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self._nodes = communicator, communicator.nodes
        ranks = self._nodes.partners(communicator.rank)
        self._table = Table(communicator.table("node partners", lambda: [ranks]), len(ranks))

    def move(
        self,
        workspace: Workspace,
        input: torch.Tensor,
        moves: Moves,
        programs: int,
        configuration: Configuration,
    ) -> None:
        """Start the moves of ``input``, a matrix or flat, on the copy stream."""
        stream, flat = self._communicator.copying, input.dim() == 1
        columns = configuration.block_elements if flat else configuration.copy_columns
        if moves.count:
            self._launch(
                stream,
                workspace,
                move_kernels.move_kernel,
                max(1, min(programs, moves.count)),
                configuration.num_warps,
                input=Rows(input, input.stride(0)),
                moves=Table(moves.table, moves.count),
                columns=1 if flat else input.shape[1],
                BLOCK_ROWS=0 if flat else configuration.copy_rows,
                BLOCK_COLUMNS=columns,
            )
        self.quiet(stream, workspace, moves.slots)

    def quiet(self, stream: Stream, workspace: Workspace, slot: int) -> None:
        """Hold ``stream`` until what was put is out; ``slot`` is the first of a slot per rank."""
        if self._table.count:
            known = {"slot": slot, "partners": self._table}
            self._launch(stream, workspace, move_kernels.quiet_kernel, 1, 1, **known)

    def put_credits(self, workspace: Workspace) -> None:
        """The last item of an op's body: ranks of other nodes may use this rank's workspace again."""
        compute = self._communicator.compute
        compute.wait_event(self._communicator.copying.record())
        if self._table.count:
            kernel = move_kernels.put_credits_kernel
            self._launch(compute, workspace, kernel, 1, 1, partners=self._table)

    def _launch(
        self, stream: Stream, workspace: Workspace, kernel: Any, grid: int, warps: int, **named: Any
    ) -> None:
        known = {**named, "PUT": self._nodes.put}
        options = {"num_warps": warps, "options": self._nodes.options}
        stream.launch(workspace.kernel_launch(kernel, grid, known, **options))


def shared_programs(
    communicator: Communicator, configuration: Configuration, moves: int
) -> tuple[int, int]:
    """Programs for moves, and those that are left for the kernel that runs beside them."""
    limit = communicator.place.program_limit
    moving = max(1, min(max(1, configuration.copiers), moves, limit // 2))
    left = max(1, limit - moving)
    return moving, min(left, configuration.programs) if configuration.programs else left


def all_gather(
    communicator: Communicator,
    input: torch.Tensor,
    output: torch.Tensor,
    lengths: Sequence[int],
    configuration: Configuration,
    after: Event | None = None,
) -> Event:
    """``output = concat(input of rank 0, 1, ...)``: flat uint8, ``lengths`` by rank, not all 0.

    ``input`` may be its own part of ``output``. It is there ``after`` an op for which the caller's stream
    does not wait.
    """
    rank, block = communicator.rank, configuration.block_elements
    chunk = formulas.chunk_elements(lengths, block, configuration.chunks)
    chunk = formulas.ceil_div(chunk, ALIGNMENT) * ALIGNMENT
    moves = gather_moves(communicator, lengths, chunk)
    in_place = output[sum(lengths[:rank]) :].data_ptr() == input.data_ptr()
    arrivals = arrival_lines(rank, communicator.nodes, lengths, chunk, with_own=not in_place)
    table = communicator.table(("node arrivals", tuple(lengths), chunk, in_place), lambda: arrivals)
    layout = Layout(moves.leased(communicator.world_size), sum(lengths))
    moving, collecting = shared_programs(communicator, configuration, moves.count)
    far, kernel = Partners(communicator), transfer.all_gather_kernel
    arguments = {
        "input_ptr": input,
        "output_ptr": output,
        "sends": Table(table, 0),
        "arrivals": Table(table, len(arrivals)),
        "COPIERS": 0,
        "BLOCK": block,
    }

    def body(workspace: Workspace) -> None:
        if after is not None:
            communicator.copying.wait_event(after)
        far.move(workspace, input, moves, moving, configuration)
        if arrivals:
            grid, warps = min(collecting, len(arrivals)), configuration.num_warps
            communicator.compute.launch(
                workspace.kernel_launch(kernel, grid, arguments, num_warps=warps)
            )
        far.put_credits(workspace)

    return communicator.enqueue("all_gather", layout, body)


def arrival_lines(
    rank: int, nodes: Nodes, rows: Sequence[int], chunk_rows: int, *, with_own: bool
) -> list[list[int]]:
    """The ``launch_formulas.arrival_lines`` in the order in which chunks come between nodes."""
    counts = [formulas.ceil_div(count, chunk_rows) for count in rows]
    return [
        formulas.transfer_line(source, source, chunk, rows, chunk_rows)
        for source, chunk in order.gather_order(rank, nodes.of, counts)
        if with_own or source != rank
    ]


def gather_into(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    input: torch.Tensor,
    gather: Callable[[torch.Tensor, torch.Tensor], Event],
) -> Event:
    """``outputs[r]`` = rank r's ``input``, anywhere, by ``gather(input, target)`` into one flat tensor."""
    whole, own_output = neighbours(outputs), outputs[communicator.rank]
    in_place = own_output.data_ptr() == input.data_ptr()
    lengths = [output.numel() for output in outputs]
    target = whole
    if target is None:
        target = torch.empty(sum(lengths), dtype=input.dtype, device=input.device)
    elif not in_place and overlap(input, target):
        input = input.clone()  # it must not change before it has been sent
    event = gather(input, target)
    if whole is not None:
        return event
    for source, piece in enumerate(torch.split(target, lengths)):
        if source != communicator.rank or not in_place:
            # as bytes: torch copies no elements of less than one
            communicator.compute.copy(bytes_of(outputs[source]), bytes_of(piece), "output")
    return communicator.compute.record()


def gather_parts(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    input: torch.Tensor,
    after: Event | None = None,
) -> Event | None:
    """``outputs[r]`` = rank r's ``input``, all flat uint8 and anywhere; None if there is nothing."""
    lengths = [output.numel() for output in outputs]
    if not sum(lengths):
        return None
    config = choose(communicator.place, torch.uint8, max(lengths), 1, 1)

    def gather(flat: torch.Tensor, target: torch.Tensor) -> Event:
        assert after is None or flat is input
        return all_gather(communicator, flat, target, lengths, config, after)

    return gather_into(communicator, outputs, input, gather)


def exchange(
    communicator: Communicator,
    op: str,
    input: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]],
    configuration: Configuration,
) -> Event:
    """``outputs[r]`` = part [own rank] of rank r's ``input``, but the own; of ``sizes[source][rank]``."""
    rank, nodes = communicator.rank, communicator.nodes
    lines, firsts, total, slots = order.exchange_moves(rank, nodes.of, sizes)
    key = ("node exchange", tuple(tuple(size) for size in sizes))
    moves = Moves(communicator.table(key, lambda: lines), len(lines), slots)
    layout = Layout(moves.leased(communicator.world_size), total)
    moving, _ = shared_programs(communicator, configuration, moves.count)
    elsewhere = [source for source, node in enumerate(nodes.of) if node != nodes.of[rank]]
    far = Partners(communicator)

    def body(workspace: Workspace) -> None:
        far.move(workspace, input, moves, moving, configuration)
        for source in (*order.node_peers(rank, nodes.of), *elsewhere):
            if count := sizes[source][rank]:
                communicator.compute.wait(workspace, source, source)
                theirs = workspace.data(rank, firsts[source], (count,), torch.uint8)
                communicator.compute.copy(outputs[source], theirs, f"part of rank {source}")
        far.put_credits(workspace)

    return communicator.enqueue(op, layout, body)


def regions_of(nodes: Nodes) -> tuple[int, int]:
    """Contributions on the rank that gets most, and partial sums on the rank that makes most."""
    ranks = range(len(nodes.of))
    owned = [len(order.reduced_owners(rank, nodes.of)) for rank in ranks]
    return max(owned[rank] * len(nodes.members(rank)) for rank in ranks), max(owned)


def node_argument(communicator: Communicator, sums: torch.Tensor) -> Node:
    """The argument that tells kernels that sum of this rank's node; ``sums`` says who sums for it."""
    rank, nodes, names = communicator.rank, communicator.nodes, communicator.nodes.names()
    members = nodes.members(rank)
    table, place = communicator.table("node members", lambda: [members]), members.index(rank)
    return Node(table, len(members), place, sums, len(names), names.index(nodes.of[rank]))


class Reductions(NamedTuple):
    """A plan of who sums what in a reduce-scatter, as one rank needs to know it.

    ``parts``: lines (owner, reducer, the owner's place with it, first piece), in the order of production.
    ``duties``: (owner, its place here, first piece) of what this rank sums for others. ``sums``: by node,
    who sums this rank's part there, and its place with it.
    """

    parts: list[tuple[int, int, int, int]]
    duties: list[tuple[int, int, int]]
    sums: list[tuple[int, int]]


def reductions_of(rank: int, nodes: Nodes, pieces: Sequence[int]) -> Reductions:
    """``pieces`` by owner: how many its part has."""
    of = nodes.of

    def place(by: int, owner: int) -> int:
        return int(order.reduced_owners(by, of).index(owner))

    parts, start = [], 0
    for owner in order.scatter_order(rank, of):
        by = order.reducer(rank, owner, of)
        parts.append((owner, by, place(by, owner), start))
        start += pieces[owner]
    duties, start = [], 0
    for number, owner in enumerate(order.reduced_owners(rank, of)):
        if owner != rank:
            duties.append((owner, number, start))
            start += pieces[owner]
    by_node = [
        rank if node == of[rank] else order.counterpart(rank, node, of) for node in nodes.names()
    ]
    return Reductions(parts, duties, [(by, place(by, rank)) for by in by_node])


def reduce_scatter(
    communicator: Communicator,
    input: torch.Tensor,
    output: torch.Tensor,
    lengths: Sequence[int],
    configuration: Configuration,
    *,
    average: bool,
    op: str = "reduce_scatter",
    produce: Callable[[int], None] | None = None,
    finish: Callable[[], None] | None = None,
) -> Event:
    """``output`` = the sum over ranks of the own part of flat ``input``, cut into ``lengths``.

    With ``produce``, torch code that makes one owner's part of ``input``, a part is handed over while the
    next one is made. ``finish`` is torch code that works on ``output``.
    """
    rank, block, nodes = communicator.rank, configuration.block_elements, communicator.nodes
    longest, (regions, most_sums), names = max(lengths), regions_of(nodes), len(nodes.names())
    piece = min(formulas.ceil_div(longest, PIECES), LARGEST_PIECE)
    piece = formulas.ceil_div(piece, block) * block
    pieces = formulas.ceil_div(longest, piece)
    stride = pieces * piece
    layout = Layout()
    slots = layout.add_slots(regions * pieces)
    landing_slot = layout.add_slots(names * pieces) - slots
    quiet_slot = layout.add_slots(communicator.world_size)
    layout.add_data(regions * stride * input.element_size())
    partial = layout.add_data(most_sums * stride * 4)
    landing = layout.add_data(names * stride * 4)
    parts_table, duties, sums_table = _sum_tables(communicator, lengths, piece)
    limit = configuration.programs or communicator.place.program_limit
    far = Partners(communicator)
    constants = {
        "input_ptr": input,
        "output_ptr": output,
        "node": node_argument(communicator, sums_table),
        "slots": NodeSlots(pieces, landing_slot, landing_slot),
        "piece": piece,
        "PUT": nodes.put,
        "BLOCK": block,
        "AVERAGE": average,
    }

    def launch(stream: Stream, workspace: Workspace, parts: tuple[int, int], sum_up: bool) -> None:
        grid = formulas.persistent_grid(0, pieces * (names if sum_up else 1), limit)
        begin, kernel = workspace.data_offset, reduction.node_reduce_scatter_kernel
        arguments = {
            **constants,
            "regions": Regions(stride, begin + partial, begin + landing),
            "parts": TablePart(parts_table, *parts),
            "duties": duties if sum_up else Table(duties.ptr, 0),
            "own_elements": lengths[rank] if sum_up else 0,
        }
        options = {"num_warps": configuration.num_warps, "options": nodes.options}
        stream.launch(workspace.kernel_launch(kernel, grid, arguments, **options))

    def body(workspace: Workspace) -> None:
        compute, copying = communicator.compute, communicator.copying
        if produce is None:
            launch(compute, workspace, (0, len(lengths)), True)
        else:
            for number, owner in enumerate(order.scatter_order(rank, nodes.of)):
                compute.call(lambda owner=owner: produce(owner), f"part of rank {owner}")  # type: ignore[misc]
                copying.wait_event(compute.record())
                launch(copying, workspace, (number, 1), False)
            launch(copying, workspace, (0, 0), True)
            compute.wait_event(copying.record())
        if finish is not None:
            compute.call(finish, "bias")
        far.quiet(compute, workspace, quiet_slot)
        far.put_credits(workspace)

    return communicator.enqueue(op, layout, body)


def _sum_tables(
    communicator: Communicator, lengths: Sequence[int], piece: int
) -> tuple[torch.Tensor, Table, torch.Tensor]:
    """Return tables of ``node_reduce_scatter_kernel``: parts, this rank's duties, ranks that sum for it."""
    firsts = [sum(lengths[:owner]) for owner in range(len(lengths))]
    pieces = [formulas.ceil_div(length, piece) for length in lengths]
    known = reductions_of(communicator.rank, communicator.nodes, pieces)
    parts = [(by, at, firsts[o], lengths[o], start) for o, by, at, start in known.parts]
    duties = [(o, at, firsts[o], lengths[o], start) for o, at, start in known.duties]
    key = (tuple(lengths), piece)
    return (
        communicator.table(("node parts", key), lambda: parts),
        Table(communicator.table(("node duties", key), lambda: duties), len(duties)),
        communicator.table(("node sums", key), lambda: known.sums),
    )
