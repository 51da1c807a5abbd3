"""All-to-all + grouped matmul whose counts stay on the device: ``num_max_rows_per_rank``.

Order of rows, checks and agreement are the same as in ``grouped.py``. But results have the length for the
worst case, device memory holds the number of a rank's rows, and no message depends on the rank. So the
fused algorithm can use a plan. torch makes its tables on the device, from the rank's own counts alone. The
other algorithms read counts on the host; they are those in ``grouped.py``.

Legend: W ranks with E experts each; ``splits``, int64 ``[W * E]``: this rank's rows by expert.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from interlace.arguments import checks
from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import CountLines, ExpertSizes, Table
from interlace.kernels.experts import grouped_matmul as kernels
from interlace.ops.collectives.launch import enqueue_kernel, resident_programs
from interlace.ops.experts.grouped import (
    EXCHANGE,
    GroupedArguments,
    Routes,
    agree,
    check,
    checked_tensors,
    expert_operands,
    start_matmul,
    terms_of,
)
from interlace.ops.experts.routing import (
    DispatchHandle,
    Routing,
    count_lines,
    next_power,
    on_device,
)
from interlace.ops.matmul import operands
from interlace.ops.matmul.block_scaled import quantize_record
from interlace.ops.matmul.formats import OPERAND_FORMATS
from interlace.ops.matmul.operands import Linear
from interlace.runtime.core.call import PreparedCall, Terms
from interlace.runtime.core.communicator import Communicator, composed_form, internal_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.memory import Layout
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import configuration
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor


def rows_sent(splits: Tensor, rows: int) -> Tensor:
    """Return ``splits``, cut off after ``rows`` rows: later rows are not read, whatever ``splits`` say."""
    ends = splits.clamp(min=0).cumsum(0).clamp(max=rows)
    return torch.diff(ends, prepend=ends.new_zeros(1))


def experts_of(splits: Tensor, rows: int) -> Tensor:
    """Return ``[rows, 1]``: the expert of each row, -1 for rows after the last expert's."""
    row = torch.arange(rows, device=splits.device)
    expert = torch.searchsorted(splits.cumsum(0), row, right=True)
    return torch.where(expert < splits.numel(), expert, -1).unsqueeze(1)


@dataclass(frozen=True)
class CountedSizes:
    """Sizes that all ranks share: ``most_rows`` of a rank, rows per chunk, ranks, experts per rank."""

    most_rows: int
    chunk_rows: int
    world_size: int
    experts: int

    @property
    def lines(self) -> int:
        """The most sends of a rank: each segment may have one chunk that is not full."""
        return (self.world_size - 1) * self.experts + self.most_rows // self.chunk_rows

    @property
    def slots(self) -> int:
        segments = self.world_size * self.experts
        return self.world_size + 1 + segments + self.world_size * self.most_rows // self.chunk_rows

    def count_lines(self, splits: Tensor) -> Tensor:
        counts = splits.view(self.world_size, self.experts)
        return count_lines(counts.sum(1), counts)

    def sends(self, splits: Tensor, rank: int) -> Tensor:
        """Return ``lines`` lines of the kernel's ``sends``, and after them the number of lines in use."""
        world_size, experts, size = self.world_size, self.experts, self.chunk_rows
        if world_size == 1:
            return splits.new_zeros(1)
        counts = splits.view(world_size, experts)
        first = splits.cumsum(0) - splits
        place = (rank * self.most_rows + counts.cumsum(1) - counts).flatten()
        expert = torch.arange(experts, device=splits.device)
        slot = world_size + 1 + rank * experts + expert + place.view(counts.shape) // size
        peers = (rank + 1 + torch.arange(world_size - 1, device=splits.device)) % world_size
        order = (peers.unsqueeze(1) * experts + expert).flatten()  # the next rank first
        chunks = ((splits + size - 1) // size)[order]
        ends = chunks.cumsum(0)
        number = torch.arange(self.lines, device=splits.device)
        segment_of = torch.searchsorted(ends, number, right=True).clamp(max=order.numel() - 1)
        segment, chunk = order[segment_of], number - (ends - chunks)[segment_of]
        done = chunk * size
        lines = [
            segment // experts,
            first[segment] + done,
            (splits[segment] - done).clamp(max=size),
            place[segment] + done,
            slot.flatten()[segment] + chunk,
        ]
        return torch.cat([torch.stack(lines, 1).flatten(), ends[-1:]])


@dataclass(frozen=True)
class CountedMatmul:
    """One call. ``linear``: as in ``GroupedMatmul``; its output has room for all ranks' most rows."""

    communicator: Communicator
    input: Tensor
    linear: Linear
    segments: Tensor

    def fused(
        self, sends: Tensor, lines: Tensor, sizes: CountedSizes, configuration: Configuration
    ) -> Event:
        communicator, (experts, inner, columns) = self.communicator, self.linear.weight.shape
        world_size, rows = sizes.world_size, sizes.world_size * sizes.most_rows
        layout = Layout(sizes.slots)
        layout.add_data(rows * inner * self.input.element_size())
        counts_byte = layout.add_data(lines.nbytes)
        copiers = 0
        if world_size > 1:  # the copy engine would need counts on the host
            most = max(1, communicator.place.program_limit // 4)
            copiers = max(1, min(configuration.copiers, sizes.lines, most))
        known = expert_operands(communicator, self.input, self.linear, configuration)
        del known["num_experts"]
        # As in grouped_matmul_combine.
        flatten = known["TILES"].FLATTEN and configuration.num_warps > 4
        arguments = {
            **known,
            "TILES": known["TILES"]._replace(FLATTEN=flatten),
            **operands.copies(configuration, copiers),
            "sends": Table(sends, sizes.lines),
            "counts": CountLines(lines, self.segments, counts_byte),
            "sizes": ExpertSizes(self.input.shape[0], sizes.most_rows, experts, 0, 0),
            "chunk_rows": sizes.chunk_rows,
            "EXPERTS": next_power(experts),
        }
        tiles = rows // configuration.block_m + world_size * experts  # a last tile for each segment
        tiles *= formulas.ceil_div(columns, configuration.block_n)
        resident = max(copiers + 1, resident_programs(communicator, configuration, copiers))
        grid = formulas.persistent_grid(copiers, tiles, resident)
        options = operands.launch_options(configuration, self.input)
        kernel = kernels.counted_grouped_matmul_kernel
        return enqueue_kernel(communicator, EXCHANGE, layout, kernel, grid, arguments, options)


def checked_bound(value: Any, call: GroupedArguments) -> int:
    """Return ``num_max_rows_per_rank``, if it is valid together with the rest of ``call``."""
    bound = checks.integer("num_max_rows_per_rank", value)
    if bound < 1:
        raise ValueError(f"num_max_rows_per_rank must be positive, got {bound}")
    checks.flag("return_received", call.return_received)
    if call.output_splits is not None or call.return_received:
        raise ValueError(
            "output_splits and return_received do not go with num_max_rows_per_rank; use experts.dispatch "
            "to get received rows"
        )
    return bound


def _prepare(
    communicator: Communicator, record: GroupedArguments
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    """Check the arguments on this rank; return the function that runs the op, its tensors and options."""
    call = checked_tensors(communicator, record)
    splits = checked_splits(communicator, call)
    world_size, (experts, inner, columns) = communicator.world_size, call.weight.shape
    output = call.input.new_zeros(world_size * call.max_rows, columns, dtype=call.out_dtype)
    segments = splits.new_empty(experts, world_size, 3)
    algorithm = on_device(communicator, call.algorithm, call.weight, call.out_dtype)
    if algorithm != "fused":
        return _by_torch, (call, splits, output, segments), (algorithm,)
    mean = max(1, call.max_rows // splits.numel())  # rows of a segment
    kind, extents = OPERAND_FORMATS.get(call.format), (mean, columns, inner)
    chosen = configuration.choose(
        communicator.place, call.input.dtype, *extents, grouped=True,
        fast_accum=kind is None or kind.fast_accum,
    )  # fmt: skip
    size = formulas.chunk_rows([mean], chosen.block_m, chosen.chunks)
    sizes = CountedSizes(call.max_rows, size, world_size, experts)
    tables = sizes.sends(splits, communicator.rank), sizes.count_lines(splits)
    tensors = (call.input, call.weight, call.bias, *tables, output, segments)
    terms = (*terms_of(call, world_size * experts), ("n of weight", columns))
    return _planned, tensors, (sizes, chosen, call.activation, call.format, terms)


def checked_splits(communicator: Communicator, call: GroupedArguments) -> Tensor:
    """Return ``input_splits`` as int64, if valid. Splits on a GPU are cut off, not checked."""
    splits = checks.tensor("input_splits", call.input_splits, communicator)
    if splits.is_floating_point() or splits.is_complex() or splits.dtype is torch.bool:
        raise TypeError(f"input_splits must be a tensor of integers, got {splits.dtype}")
    experts, (rows, _) = call.weight.shape[0] * communicator.world_size, call.input.shape
    if splits.numel() != experts:
        raise ValueError(
            f"input_splits has {splits.numel()} entries, {communicator.world_size} ranks with "
            f"{call.weight.shape[0]} experts in weight make {experts}"
        )
    if rows > call.max_rows:
        raise ValueError(f"num_max_rows_per_rank is {call.max_rows}, input has {rows} rows")
    splits = splits.flatten().to(torch.int64)
    if communicator.place.interpreted:
        check_numbers(splits, rows)
    return rows_sent(splits, rows)


def check_numbers(splits: Tensor, rows: int) -> None:
    """Raise unless ``splits`` are valid for ``rows``. This reads them: a GPU's host would wait."""
    if int(splits.min()) < 0:
        raise ValueError(f"input_splits must not be negative, got {splits.tolist()}")
    if int(splits.sum()) > rows:
        raise ValueError(f"input_splits adds up to {int(splits.sum())}, input has {rows} rows")


def with_counts(communicator: Communicator, record: GroupedArguments) -> GroupedArguments:
    """Return ``record``, checked on this rank, with splits that the host has read."""
    call = checked_tensors(communicator, quantize_record(record))
    return _counted(record, checked_splits(communicator, call).tolist())


def _counted(record: GroupedArguments, counts: list[int]) -> GroupedArguments:
    """Return ``record`` with splits ``counts``, without rows after their sum."""
    return replace(record, input=record.input[: sum(counts)], input_splits=counts)


def _on_device(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sends: Tensor,
    lines: Tensor,
    output: Tensor,
    segments: Tensor,
    sizes: CountedSizes,
    chosen: Configuration,
    activation: str,
    format: str,
    terms: Terms,
) -> PreparedCall:
    def start() -> Outcome:
        communicator.parts(communicator.call_of(EXCHANGE, terms, None))
        name_algorithm("fused")
        kind = OPERAND_FORMATS.get(format)
        linear = Linear(weight, bias, output, activation=activation, format=kind)
        op = CountedMatmul(communicator, input, linear, segments)
        return Outcome([output, segments], op.fused(sends, lines, sizes, chosen))

    return start, (), None


def _with_counts(
    communicator: Communicator,
    record: GroupedArguments,
    splits: Tensor,
    output: Tensor,
    segments: Tensor,
    algorithm: str,
) -> PreparedCall:
    """Run with torch; the host reads counts, and ranks exchange them."""
    call = check(communicator, _counted(record, splits.tolist()))

    def start() -> Outcome:
        routes, columns = agree(communicator, call)
        chosen = replace(call, algorithm=algorithm)
        rows = routes.received(communicator.rank)
        event = start_matmul(communicator, chosen, routes, columns, output[:rows], None)
        segments.copy_(segments_of(routes))
        return Outcome([output, segments], event)

    return start, (), None


def segments_of(routes: Routes) -> Tensor:
    """Return the table of a rank's segments on the CPU, equal to the kernel's table."""
    return torch.tensor(routes.segment_lines()).view(-1, routes.world_size, 3)


def pad_results(output: Tensor, routes: Routes, call: GroupedArguments) -> list[Tensor]:
    """Return the op's results, from an ``output`` of the exact length."""
    rest = routes.world_size * call.max_rows - output.shape[0]
    return [F.pad(output, (0, 0, 0, rest)), segments_of(routes).to(output.device)]


def handle_of(
    communicator: Communicator, call: GroupedArguments, segments: Tensor, number: int
) -> DispatchHandle:
    """Return the handle of a dispatch of the rows, where each row is a token with one expert."""
    splits = call.input_splits
    experts = experts_of(splits.flatten().to(torch.int64), call.input.shape[0])
    routing = Routing(splits.numel(), 0, call.max_rows, False, call.algorithm)
    return DispatchHandle(segments, experts, None, routing, communicator, number)


_planned = internal_form(EXCHANGE, _on_device, fills=False)
_by_torch = internal_form(EXCHANGE, _with_counts)
counted_grouped_matmul = composed_form(EXCHANGE, _prepare)
"""Maps ``(call,)`` to output and segments, like those of a dispatch."""
