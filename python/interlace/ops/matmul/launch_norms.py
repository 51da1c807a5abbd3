"""The launch side of the kernels that end with a norm of rows (``kernels/matmul/row_norms.py``).

``Linear.tail`` describes the steps after a sum of rows. Algorithms that multiply with torch apply it where
they add a bias (``operands.finish_sum``). The reduction of existing rows has a ``Linear`` without a
product. ``linear.output`` is this rank's rows of the sum with the residual. ``whole`` are all ranks' rows
of the results, which include this rank's: the normed rows, any scales, and the sums, or None if these are
not gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Gathered, NormOperands, Tail
from interlace.kernels.block_scales import INNER
from interlace.kernels.matmul import row_norms
from interlace.kernels.matmul.row_norms import IN_FLIGHT
from interlace.kernels.tiling import split_rows
from interlace.ops.collectives import launch as plain
from interlace.ops.collectives.launch import BLOCK_WORDS, blocks_of_row, in_units, run_words
from interlace.ops.matmul import operands
from interlace.ops.matmul.operands import Linear
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import WORD, Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.numerics.norms import wide
from interlace.runtime.tuning.configuration import Configuration, choose
from interlace.runtime.tuning.table import threshold
from interlace.runtime.tuning.tuning import UNMEASURED, Measured

ONE_SHOT_BYTES = threshold("one_shot_bytes")
MOST_ROWS = 16  # in a slice: with more rows, some programs have no slice
Segments = Sequence[tuple[int, int]]  # (first row, rows) by owner


class WholeRows(NamedTuple):
    """All ranks' rows of the gathered tensors."""

    normed: torch.Tensor
    scale: torch.Tensor | None
    sum: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        return [each for each in self if each is not None]


def slice_blocks(
    columns: int, configuration: Configuration, itemsize: int, least: int = 1
) -> tuple[int, int]:
    """Return (rows, columns) that a kernel reads at once: powers of two, at most ``block_elements`` in all.

    They are also at most 32 bytes for each thread and each of four ranks: with twice as many, ptxas spills.
    There are at least ``least`` columns.

    >>> slice_blocks(100, Configuration(), 2), slice_blocks(8192, Configuration(), 2)
    ((16, 128), (1, 4096))
    """
    elements = min(configuration.block_elements, 32 * 32 * configuration.num_warps // itemsize)
    wide = max(least, min(1 << (columns - 1).bit_length(), elements))
    return max(1, min(elements // wide, configuration.block_m, MOST_ROWS)), wide


def blocks_of(linear: Linear, configuration: Configuration) -> tuple[int, int]:
    """Return :func:`slice_blocks` for the rows of a sum."""
    packed = linear.tail is not None and linear.tail.format is not None
    columns, itemsize = linear.output.shape[1], linear.output.element_size()
    return slice_blocks(columns, configuration, itemsize, INNER if packed else 1)


def sent_rows(columns: int, slice_rows: int, itemsize: int) -> int:
    """Return the rows that are sent with one signal: a slice, or as many slices as IN_FLIGHT allows.

    >>> sent_rows(4096, 1, 2), sent_rows(100, 16, 2), sent_rows(65536, 1, 2)
    (4, 16, 1)
    """
    most = IN_FLIGHT // (itemsize << (columns - 1).bit_length())
    return max(slice_rows, min(most, MOST_ROWS))


def tail_arguments(
    linear: Linear, blocks: tuple[int, int], whole: WholeRows | None = None
) -> dict[str, Any]:
    """Return the operands of the norm, and its constants; ``blocks``: see :func:`slice_blocks`."""
    tail = linear.tail
    assert tail is not None
    constants = Tail(
        KIND=tail.norm.kind,
        EPS=float(tail.norm.eps),
        RESIDUAL=tail.residual is not None,
        NORM_WEIGHT=tail.norm.weight is not None,
        NORM_BIAS=tail.norm.bias is not None,
        QUANTIZE=tail.scale is not None,
        GATHER="" if whole is None else "normed" if whole.sum is None else "both",
        ROWS=blocks[0],
        COLUMNS=blocks[1],
    )
    if tail.format is not None:
        constants = constants._replace(**tail.format.kernel_constants)
    vectors = tail.norm.weight, tail.norm.bias
    # missing operands are None, a constant in the kernel
    return {
        "norm": NormOperands(tail.residual, *vectors, tail.normed, tail.scale),
        "TAIL": constants,
    }


def gathering(
    communicator: Communicator,
    layout: Layout,
    segments: Segments,
    slice_rows: int,
    linear: Linear,
    whole: WholeRows | None,
) -> dict[str, Any]:
    """Return the argument about rows from other ranks, and add memory for them to ``layout``."""
    tail, output = linear.tail, linear.output
    assert tail is not None
    if whole is None:
        return {"gathered": Gathered(*[None] * 8)}
    rows = [count for _, count in segments]
    slots = formulas.slice_slots(communicator.world_size, rows, slice_rows)
    first = layout.add_slots(slots)
    normed = layout.add_data(sum(rows) * tail.normed.shape[1] * tail.normed.element_size())
    of_sum = output.shape[1] * output.element_size() if whole.sum is not None else 0
    sums = layout.add_data(sum(rows) * of_sum)
    scale = layout.add_data(sum(rows) * 4 if whole.scale is not None else 0)
    slices = slots // communicator.world_size
    bytes_ = first * WORD, slices, normed, sums, scale
    return {"gathered": Gathered(whole.normed, whole.sum, whole.scale, *bytes_)}


def product_in_words(communicator: Communicator, input: torch.Tensor, linear: Linear) -> Event:
    """Run a torch matmul with few rows; one low-latency kernel sums and norms them on all ranks."""
    product = torch.empty_like(linear.output)
    communicator.compute.call(
        lambda: operands.multiply(product, input, linear.weight, None, format=linear.format),
        "matmul",
    )
    return RowReduction(
        communicator, "matmul_all_reduce", product, linear, None, None
    ).low_latency()


def reduce_fused(
    communicator: Communicator,
    op: str,
    input: torch.Tensor,
    linear: Linear,
    segments: Segments,
    configuration: Configuration,
    whole: WholeRows | None = None,
) -> Event:
    """Run one kernel that sums this rank's rows of the dense ``input`` over ranks and norms them."""
    columns = linear.output.shape[1]
    itemsize = linear.output.element_size()
    tail = tail_arguments(linear, blocks_of(linear, configuration), whole)
    slice_rows = tail["TAIL"].ROWS
    block_m = sent_rows(columns, slice_rows, itemsize)
    rows = [count for _, count in segments]
    layout = plain.pushed_layout(communicator, rows, block_m, 1, columns * itemsize)
    arguments = {
        "input_ptr": input,
        "bias_ptr": operands.bias_or_none(linear),
        "output_ptr": linear.output,
        "N": columns,
        **tail,
        **gathering(communicator, layout, segments, slice_rows, linear, whole),
        "segments_ptr": plain.segment_table(communicator, segments, block_m, 1),
        "AVERAGE": linear.average,
        "TILES": operands.whole_rows(block_m, columns, linear),
    }
    slices = formulas.tiles_of(rows, slice_rows, 1)
    grid = formulas.persistent_grid(0, slices, plain.resident_programs(communicator, configuration))
    options = {"num_warps": configuration.num_warps, "options": {"maxnreg": 168}}
    return plain.enqueue_kernel(
        communicator, op, layout, row_norms.reduce_norm_kernel, grid, arguments, options
    )


def norm_and_gather(
    communicator: Communicator,
    total: torch.Tensor,
    linear: Linear,
    segments: Segments | None,
    whole: WholeRows | None,
) -> Event:
    """Finish rows whose sums, ``total``, are rounded: norm them, and gather them with ``whole``."""
    communicator.compute.call(
        lambda: operands.finish_sum(total.to(wide(total.dtype)), linear), "norm"
    )
    event = communicator.compute.record()
    if whole is None or segments is None:
        return event
    return gather(communicator, whole, segments, event)


def gather(communicator: Communicator, whole: WholeRows, segments: Segments, event: Event) -> Event:
    """Gather all ranks' rows in ``whole``. This rank's rows are ready after ``event``."""
    for tensor in whole.tensors():
        parts = [tensor[first : first + count].view(-1) for first, count in segments]
        event = plain.gather_made(communicator, parts[communicator.rank], parts)
    return event


@dataclass
class RowReduction:
    """A reduction of existing, dense rows with a norm. ``segments`` is None if all ranks get all rows."""

    communicator: Communicator
    op: str
    input: torch.Tensor
    linear: Linear
    segments: Segments | None
    whole: WholeRows | None
    measured: Measured = UNMEASURED

    def run(self, algorithm: str) -> Event:
        """Run the algorithm of that name. Without elements there are only scales and padding to move."""
        if not self.input.numel():
            total = self.linear.output.clone()
            about = self.linear, self.segments, self.whole
            return norm_and_gather(self.communicator, total, *about)
        event: Event = getattr(self, algorithm)()
        return event

    def _by_owner(self) -> tuple[Linear, Segments, WholeRows | None]:
        """Return the steps for this rank's rows, the rows by owner, and all ranks' results."""
        linear = self.linear
        if self.segments is not None:
            return linear, self.segments, self.whole
        assert linear.tail is not None
        segments = split_rows(self.input.shape[0], self.communicator.world_size)
        first, count = segments[self.communicator.rank]
        tail, part = linear.tail.part(first, count), linear.output[first : first + count]
        whole = WholeRows(linear.tail.normed, linear.tail.scale, linear.output)
        return replace(linear, output=part, tail=tail), segments, whole

    def fused(self) -> Event:
        """Run one kernel. For few rows every rank norms all (one-shot); otherwise each norms its own."""
        place, rows = self.communicator.place, self.input.shape[0]
        default = choose(place, self.input.dtype, rows, self.input.shape[1], 1)
        configuration = self.measured.over(default)
        linear, whole = self.linear, None
        segments: Segments = [(0, rows)] * self.communicator.world_size
        if self.segments is not None or self.input.nbytes > ONE_SHOT_BYTES:
            linear, segments, whole = self._by_owner()
        call = (self.communicator, self.op, self.input, linear, segments, configuration, whole)
        return reduce_fused(*call)

    def low_latency(self) -> Event:
        """Run one kernel for few bytes, whose words contain their flags, with a program for every row."""
        linear, (rows, columns) = self.linear, self.input.shape
        nbytes = columns * self.input.element_size()
        (units,) = in_units(self.input.view(-1))
        if nbytes % units.element_size():  # a row begins within a unit
            units = self.input.view(-1).view(torch.int16)
        blocks = rows * blocks_of_row(columns, self.input.element_size())
        in_block = 4 * BLOCK_WORDS // self.input.element_size()
        values = {
            **tail_arguments(linear, (1, in_block)),
            "input_ptr": units,
            "bias_ptr": operands.bias_or_none(linear),
            "output_ptr": linear.output,
            "N": columns,
            "UNIT": units.element_size(),
            "BIAS": linear.bias is not None,
            "AVERAGE": linear.average,
        }
        kernel = row_norms.low_latency_norm_kernel
        return run_words(self.communicator, self.op, kernel, rows, values, blocks)

    def pipelined(self) -> Event:
        """Run torch operators: sum this rank's rows in fp32, norm them, then gather on all ranks."""
        linear, segments, whole = self._by_owner()
        communicator, columns = self.communicator, self.input.shape[1]
        row_bytes = columns * self.input.element_size()
        first, _ = segments[communicator.rank]

        def sum_up(workspace: Workspace) -> None:
            operands.sum_staged(communicator, workspace, linear, first * row_bytes)

        staged = [plain.Staged(0, self.input, plain.other_ranks(communicator))]
        event = plain.pull(communicator, self.op, self.input.nbytes, staged, then=sum_up)
        return event if whole is None else gather(communicator, whole, segments, event)

    def unfused(self) -> Event:
        """Run the collective, whose sums are rounded, then torch's norm of them."""
        communicator, linear, segments = self.communicator, self.linear, self.segments
        reduction, flat = "avg" if linear.average else "sum", self.input.view(-1)
        total = torch.empty_like(linear.output)
        about = (f"sum of {self.op}", self.input.shape, self.input.dtype, reduction)
        mapped = communicator.place.all_mapped
        call = None if mapped else plain.agreed_call(communicator, self.op, about)
        if segments is None and call is not None:
            total.copy_(self.input)
            communicator.engine.all_reduce(call, total, reduction)
        elif segments is None:
            parts = split_rows(flat.numel(), communicator.world_size)
            plain.all_reduce_copy(communicator, flat, total.view(-1), parts, reduction=reduction)
        else:
            rows = [self.input[first : first + count].view(-1) for first, count in segments]
            if call is not None:
                communicator.engine.reduce_scatter(call, total.view(-1), rows, reduction)
            else:
                plain.reduce_scatter_copy(communicator, rows, total.view(-1), reduction=reduction)
        return norm_and_gather(communicator, total, linear, segments, self.whole)
