"""The launch side of dispatch.

``fused``    two Triton kernels, which need to know no count on the host (``kernels/experts/dispatch.py``)
``unfused``  an all-to-all of rows, then they are sorted by expert; any dtype, many nodes. It needs counts
             on the host.
"""

from dataclasses import dataclass
from typing import Any

import torch

from interlace.kernels.arguments import ExpertRows, ExpertSizes, SlotRows, TokenRegions, TokenRows
from interlace.kernels.experts import dispatch as kernels
from interlace.runtime.algorithms.experts.assignment import Assignment, known_segments
from interlace.runtime.algorithms.plain import agreed_call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor
WORDS = (torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True)
class DispatchResult:
    """What a dispatch fills: rows by expert, scales and weights of theirs if there are any, segments."""

    rows: Tensor
    scales: Tensor | None
    weights: Tensor | None
    segments: Tensor


@dataclass(frozen=True)
class Bounds:
    """Known to all ranks alike: tokens of the rank with most; programs that send to one rank."""

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
    configuration: Configuration, topk: int, experts: int, *, scaled: bool, weighted: bool
) -> SlotRows:
    # Half the rows of a copy: each has an address of its own on both sides, and is looked up.
    blocks = max(1, configuration.copy_rows // 2), configuration.copy_columns
    return SlotRows(topk, next_power(experts), *blocks, scaled, weighted)


def sender_programs(communicator: Communicator, configuration: Configuration) -> int:
    """Programs for one rank, where this rank may choose."""
    resident = min(communicator.place.program_limit, configuration.programs or 24)
    return max(1, resident // communicator.world_size)


@dataclass(frozen=True)
class Dispatch:
    """One call. ``x`` and ``scales`` are contiguous matrices, ``weights`` ``[T, k]`` fp32."""

    communicator: Communicator
    x: Tensor
    scales: Tensor | None
    weights: Tensor | None
    assignment: Assignment
    bounds: Bounds

    def fused(self, result: DispatchResult, configuration: Configuration) -> Event:
        communicator, assignment, bounds = self.communicator, self.assignment, self.bounds
        world_size, topk = communicator.world_size, assignment.topk_idx.shape[1]
        x, facts = words_of(self.x), assignment.facts(self.weights)
        scales = facts if self.scales is None else words_of(self.scales)
        layout, regions = self._layout(x, None if self.scales is None else scales, facts)
        rows = TokenRows(x, x.shape[1], scales, scales.shape[1], facts)
        sizes = ExpertSizes(
            x.shape[0], bounds.most_tokens, assignment.per_rank, bounds.senders, bounds.expert_rows
        )
        slots = slot_rows(
            configuration,
            topk,
            assignment.per_rank,
            scaled=self.scales is not None,
            weighted=result.weights is not None,
        )
        out, bits = _as_words(result.rows, x), result.weights
        filled = ExpertRows(
            out,
            scales if result.scales is None else _as_words(result.scales, scales),
            facts if bits is None else bits.view(torch.int32),
        )
        shared: dict[str, Any] = {
            "rows": rows,
            "segments_ptr": result.segments,
            "regions": regions,
            "sizes": sizes,
            "SLOTS": slots,
        }
        sent = {"tokens_ptr": assignment.tokens(), "counts_ptr": assignment.count_lines(), **shared}
        taken = {"result": filled, **shared}
        grid = min(communicator.place.program_limit, world_size * bounds.senders)
        options = {"num_warps": configuration.num_warps, "num_stages": 1}

        def body(workspace: Workspace) -> None:
            for kernel, given in (
                (kernels.dispatch_send_kernel, sent),
                (kernels.dispatch_receive_kernel, taken),
            ):
                communicator.compute.launch(workspace.kernel_launch(kernel, grid, given, **options))

        return communicator.enqueue("dispatch", layout, body)

    def _layout(self, x: Tensor, scales: Tensor | None, facts: Tensor) -> tuple[Layout, Any]:
        """Room for what all ranks send, and where in it what lies."""
        world_size, most = self.communicator.world_size, self.bounds.most_tokens
        layout = Layout(world_size * (1 + self.bounds.senders))
        lines = world_size * (kernels.COUNT_NUMBERS + self.assignment.per_rank)
        counts = layout.add_data(lines * 8)
        places = [
            layout.add_data(
                0 if each is None else world_size * most * each.shape[1] * each.element_size()
            )
            for each in (x, scales, facts)
        ]
        return layout, TokenRegions(counts, *places)

    def unfused(self, result: DispatchResult, counts: Tensor) -> Event:
        """``counts``: ``[W, experts]``, on the CPU, of all ranks."""
        communicator, assignment = self.communicator, self.assignment
        rank, per_rank = communicator.rank, assignment.per_rank
        segments = known_segments(counts, rank, per_rank, self.bounds.expert_rows)
        slots = assignment.slots(int(counts[rank].sum()))
        tokens = slots // assignment.topk_idx.shape[1]
        result.segments.copy_(segments)
        exchange = RowExchange(communicator, counts, per_rank)
        order = sorted_places(segments).to(result.rows.device)
        for given, index, to in (
            (self.x, tokens, result.rows),
            (self.scales, tokens, result.scales),
            (_column(self.weights), slots, _column(result.weights)),
        ):
            if given is not None and to is not None:
                _scatter(communicator, to, order, exchange.there(given, index))
        return communicator.compute.record()


def _column(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.view(-1, 1)


def _scatter(communicator: Communicator, to: Tensor, order: Tensor, arrived: Tensor) -> None:
    # as bytes: fp8 cannot be indexed
    target, source = (each.view(torch.uint8) if each.numel() else each for each in (to, arrived))
    if arrived.numel():
        communicator.compute.call(lambda: target.index_copy_(0, order, source), "rows by expert")


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
            # as bytes: fp8 cannot be indexed
            to, of = rows.view(torch.uint8), tensor.contiguous().view(torch.uint8)
            compute.call(lambda: torch.index_select(of, 0, index, out=to), f"rows {way}")
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
