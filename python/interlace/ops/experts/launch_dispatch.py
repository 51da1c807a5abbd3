"""The launch side of dispatch.

``fused``      two Triton kernels, which need to know no count on the host (``kernels/experts/dispatch.py``)
``pipelined``  torch gathers the rows of one rank after another, straight into its workspace; there they
               are put in the order of experts source by source, as they come
``unfused``    an all-to-all of rows, then they are sorted by expert; many nodes

The last two move a row per slot, and need counts on the host. All take any dtype.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from interlace.kernels.arguments import ExpertRows, ExpertSizes, SlotRows, TokenRegions, TokenRows
from interlace.kernels.experts import dispatch as kernels
from interlace.kernels.tiling import owner_order
from interlace.ops.collectives.launch import agreed_call, sources
from interlace.ops.experts.assignment import (
    Assignment,
    SentTokens,
    known_segments,
)
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.place import Place
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration, choose
from interlace.runtime.tuning.table import FEW_ROWS

Tensor = torch.Tensor
MAX_REGISTERS = 192
WORDS = (torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True)
class DispatchResult:
    """What a dispatch fills: rows by expert, scales and weights of theirs if there are any, segments."""

    rows: Tensor
    scales: Tensor | None
    weights: Tensor | None
    segments: Tensor


@dataclass(frozen=True)
class HostRoutes:
    """Where rows go, for who knows it on the host. ``counts``: ``[W, experts]``, on the CPU, of all ranks.

    ``expert_rows``: as of :class:`Bounds`.
    """

    assignment: Assignment
    counts: Tensor
    expert_rows: int

    def segments(self, rank: int) -> Tensor:
        return known_segments(self.counts, rank, self.assignment.per_rank, self.expert_rows)

    def sizes(self) -> Tensor:
        """``[W, W]``: rows from each rank to each."""
        world_size = self.assignment.world_size
        return self.counts.view(world_size, world_size, -1).sum(2)


@dataclass(frozen=True)
class Bounds:
    """Known to all ranks alike: tokens of the rank with most; programs that send to one rank.

    ``expert_rows``: rows of the result from the first of one expert to the first of the next, 0 where
    they follow each other.
    """

    most_tokens: int
    senders: int
    expert_rows: int


def words_of(tensor: Tensor) -> Tensor:
    """A contiguous matrix as integers, as wide as its rows and its address allow."""
    row_bytes = tensor.shape[1] * tensor.element_size()
    for dtype in WORDS:
        if row_bytes % dtype.itemsize == 0 and tensor.data_ptr() % dtype.itemsize == 0:
            return tensor.view(dtype)
    raise AssertionError("bytes fit everything")


def next_power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def slot_rows(
    configuration: Configuration,
    itemsize: int,
    topk: int,
    experts: int,
    *,
    scaled: bool,
    weighted: bool,
) -> SlotRows:
    """``copy_rows`` rows of ``copy_columns`` words of 4 bytes at a time; ``itemsize``: of an element.

    Of a sum it has fewer rows, as those of up to four slots are on their way at once.
    """
    rows, columns = configuration.copy_rows, configuration.copy_columns * 4 // itemsize
    of_sum = max(1, rows // min(4, 1 << (topk.bit_length() - 1)))
    return SlotRows(topk, next_power(experts), rows, columns, of_sum, scaled, weighted)


def row_moves(place: Place, words: int) -> Configuration:
    """The default of kernels that move rows of ``words`` of 4 bytes, few or many."""
    return choose(place, torch.bfloat16, FEW_ROWS + 1, words, words)


def sender_programs(communicator: Communicator, configuration: Configuration) -> int:
    """Programs for one rank, where this rank may choose."""
    resident = min(communicator.place.program_limit, configuration.programs or 24)
    return max(1, resident // communicator.world_size)


@dataclass(frozen=True)
class Dispatch:
    """One call. ``x`` and ``scales`` are contiguous matrices."""

    communicator: Communicator
    x: Tensor
    scales: Tensor | None
    result: DispatchResult

    def fused(self, sent: SentTokens, bounds: Bounds, configuration: Configuration) -> Event:
        communicator, result = self.communicator, self.result
        world_size, experts = communicator.world_size, sent.lines.shape[1] - kernels.COUNT_NUMBERS
        x, facts = words_of(self.x), sent.facts
        scales = facts if self.scales is None else words_of(self.scales)
        layout = Layout(world_size * (1 + bounds.senders))
        places = [layout.add_data(sent.lines.nbytes)]
        for each in (x, None if self.scales is None else scales, facts):
            row_bytes = 0 if each is None else each.shape[1] * each.element_size()
            places.append(layout.add_data(world_size * bounds.most_tokens * row_bytes))
        slots = slot_rows(
            configuration,
            4,  # narrower words are those of odd rows, whose elements are moved one by one
            facts.shape[1] // 3,
            experts,
            scaled=self.scales is not None,
            weighted=result.weights is not None,
        )
        filled = ExpertRows(
            _as_words(result.rows, x),
            scales if result.scales is None else _as_words(result.scales, scales),
            facts if result.weights is None else result.weights.view(torch.int32),
        )
        shared: dict[str, Any] = {
            "rows": TokenRows(x, x.shape[1], scales, scales.shape[1], facts),
            "segments_ptr": result.segments,
            "regions": TokenRegions(*places),
            "sizes": ExpertSizes(
                x.shape[0], bounds.most_tokens, experts, bounds.senders, bounds.expert_rows
            ),
            "SLOTS": slots,
        }
        given = {"tokens_ptr": sent.tokens, "counts_ptr": sent.lines, **shared}
        taken = {"result": filled, **shared}
        grid = min(communicator.place.program_limit, world_size * bounds.senders)
        # left alone, ptxas takes fewer registers for the sake of occupancy, and spills where k is 2
        own = {"options": {"maxnreg": MAX_REGISTERS}}
        options = {"num_warps": configuration.num_warps, "num_stages": 1, **own}

        def body(workspace: Workspace) -> None:
            for kernel, arguments in (
                (kernels.dispatch_send_kernel, given),
                (kernels.dispatch_receive_kernel, taken),
            ):
                launch = workspace.kernel_launch(kernel, grid, arguments, **options)
                communicator.compute.launch(launch)

        return communicator.enqueue("dispatch", layout, body)

    def _parts(self, routes: HostRoutes, weights: Tensor | None) -> list[tuple[Tensor, ...]]:
        """Of all that a row takes along: a matrix, which rows of it go in their order, and the result."""
        assignment = routes.assignment
        slots = assignment.slots(int(routes.counts[self.communicator.rank].sum()))
        tokens = slots // assignment.topk_idx.shape[1]
        parts = (
            (self.x, tokens, self.result.rows),
            (self.scales, tokens, self.result.scales),
            (_column(weights), slots, _column(self.result.weights)),
        )
        return [
            (bytes_of_rows(given), index, bytes_of_rows(to))
            for given, index, to in parts
            if given is not None and to is not None and given.shape[1]
        ]

    def pipelined(self, routes: HostRoutes, weights: Tensor | None) -> Event:
        """Rows are pushed rank by rank, each rank's as one chunk, and sorted source by source."""
        communicator, rank = self.communicator, self.communicator.rank
        segments = routes.segments(rank)
        self.result.segments.copy_(segments)
        parts, lines = self._parts(routes, weights), segments.tolist()
        sizes = routes.sizes()
        begins, firsts = sizes.cumsum(0) - sizes, sizes.cumsum(1) - sizes
        layout, most = Layout(communicator.world_size), int(sizes.sum(0).max())
        offsets = [layout.add_data(most * given.shape[1]) for given, *_ in parts]

        def there(workspace: Workspace, peer: int, source: int, part: int) -> Tensor:
            """The rows of ``source`` in the workspace of ``peer``."""
            width = parts[part][0].shape[1]
            begin = offsets[part] + int(begins[source, peer]) * width
            return workspace.data(peer, begin, (int(sizes[source, peer]), width), torch.uint8)

        def body(workspace: Workspace) -> None:
            copying, compute = communicator.copying, communicator.compute
            copying.wait_credits(workspace)
            for peer in owner_order(rank, communicator.world_size):
                rows = slice(int(firsts[rank, peer]), int(firsts[rank, peer] + sizes[rank, peer]))
                for number, (given, index, _) in enumerate(parts):
                    if rows.start < rows.stop:
                        to = there(workspace, peer, rank, number)
                        gather = partial(torch.index_select, given, 0, index[rows], out=to)
                        copying.call(gather, f"rows to rank {peer}")
                if peer != rank:
                    copying.publish(workspace, peer, rank)
            for source in [*sources(communicator)[1:], rank]:
                if source == rank:
                    compute.wait_event(copying.record())
                else:
                    compute.wait(workspace, source, source)
                for number, (_, _, to) in enumerate(parts):
                    arrived, begin = there(workspace, rank, source, number), 0
                    for line in lines:
                        first, count, _ = line[source]
                        if count:
                            some = arrived[begin : begin + count]
                            compute.copy(to[first : first + count], some, f"rows of rank {source}")
                        begin += count

        return communicator.enqueue("dispatch", layout, body)

    def unfused(self, routes: HostRoutes, weights: Tensor | None) -> Event:
        compute, segments = self.communicator.compute, routes.segments(self.communicator.rank)
        self.result.segments.copy_(segments)
        exchange = RowExchange(self.communicator, routes.counts, routes.assignment.per_rank)
        order = sorted_places(segments).to(self.x.device)
        for given, index, to in self._parts(routes, weights):
            arrived = exchange.there(given, index)
            if arrived.numel():
                scatter = partial(to.index_copy_, 0, order, arrived)
                compute.call(scatter, "rows by expert")
        return compute.record()


def _column(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.view(-1, 1)


def bytes_of_rows(matrix: Tensor) -> Tensor:
    """As bytes, for fp8 cannot be indexed. Without rows any strides are contiguous, which no view takes."""
    if not matrix.shape[0]:
        return matrix.new_empty(0, matrix.shape[1] * matrix.element_size(), dtype=torch.uint8)
    return matrix.view(torch.uint8)


def _as_words(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1]).view(like.dtype)


def sorted_places(segments: Tensor) -> Tensor:
    """Rows of the result, in the order (source, expert, row) in which an all-to-all brings them."""
    parts = [
        torch.arange(first, first + count)
        for line in segments.transpose(0, 1).tolist()
        for first, count, _ in line
    ]
    return torch.cat(parts)


@dataclass(frozen=True)
class RowExchange:
    """All-to-alls of rows between their homes and their experts; ``counts`` as of ``Dispatch.unfused``."""

    communicator: Communicator
    counts: Tensor
    per_rank: int

    def _sizes(self) -> tuple[list[int], list[int]]:
        """Rows that go to each rank, and that come from it."""
        world_size, rank = self.communicator.world_size, self.communicator.rank
        rows = self.counts.view(world_size, world_size, self.per_rank).sum(2)
        return rows[rank].tolist(), rows[:, rank].tolist()

    def there(self, tensor: Tensor, index: Tensor) -> Tensor:
        """Home rows, which are rows ``index`` of ``tensor``: at their experts, by source, then expert."""
        return self._moved("to experts", tensor, index, *self._sizes())

    def back(self, tensor: Tensor, index: Tensor) -> Tensor:
        """The inverse; ``index`` has them by source, then expert."""
        sent, received = self._sizes()
        return self._moved("back", tensor, index, received, sent)

    def _moved(
        self, way: str, tensor: Tensor, index: Tensor, sent: list[int], received: list[int]
    ) -> Tensor:
        communicator, compute = self.communicator, self.communicator.compute
        rows = tensor.new_empty(sum(sent), tensor.shape[1])
        # No op of the streams comes first, which would hold them until what is read here is there.
        compute.wait_event(communicator.place.record_current())
        if rows.numel():
            gather = partial(torch.index_select, tensor.contiguous(), 0, index, out=rows)
            compute.call(gather, f"rows {way}")
        if communicator.world_size == 1:
            return rows
        made = rows.new_empty(sum(received), rows.shape[1])
        counts = tuple(map(tuple, self.counts.tolist()))
        key = f"rows {way}", counts, rows.shape[1], rows.dtype
        call = agreed_call(communicator, "all_to_all", key)
        outputs = [part.view(-1) for part in torch.split(made, received)]
        inputs = [part.view(-1) for part in torch.split(rows, sent)]
        # The rows are still on their way on the compute stream, and between nodes another one sends.
        communicator.copying.wait_event(compute.record())
        event = communicator.engine.all_to_all(call, outputs, inputs)
        if event is not None:
            compute.wait_event(event)
        return made
