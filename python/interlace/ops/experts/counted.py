"""All-to-all + grouped matmul whose counts stay on the device: ``num_max_rows_per_rank``.

Order of rows, validation and agreement are those of ``grouped.py``, but results are as long as they
can get, what a rank has is told by device memory, and no message has a part of its own: so the fused
algorithm comes from a plan, and asks for no count. The others read it on the host.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from interlace.arguments import checks
from interlace.kernels import launch_formulas as formulas
from interlace.ops.experts.grouped import (
    EXCHANGE,
    Checked,
    GroupedOptions,
    agree,
    checked,
    checked_tensors,
    started,
    terms_of,
)
from interlace.ops.experts.grouped_routes import Routes
from interlace.ops.experts.launch_counted import (
    CountedMatmul,
    CountedSizes,
    experts_of,
    rows_sent,
)
from interlace.ops.experts.routing import DispatchHandle, Routing, on_device
from interlace.ops.matmul.operands import Linear
from interlace.runtime.core.call import PreparedCall
from interlace.runtime.core.communicator import Communicator, composed_form, internal_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.stream import Outcome
from interlace.runtime.tuning import configuration

Tensor = torch.Tensor


def bound_of(value: Any, options: GroupedOptions) -> GroupedOptions:
    """``options`` with this ``num_max_rows_per_rank``, if it goes with them."""
    bound = checks.integer("num_max_rows_per_rank", value)
    if bound < 1:
        raise ValueError(f"num_max_rows_per_rank must be positive, got {bound}")
    checks.flag("return_received", options.return_received)
    if options.output_splits is not None or options.return_received:
        raise ValueError(
            "output_splits and return_received do not go with num_max_rows_per_rank; received rows are "
            "those of experts.dispatch"
        )
    return options._replace(max_rows=bound)


def _prepared(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_splits: Tensor,
    options: GroupedOptions,
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    """Checked on this rank: the form that goes on, its tensors and options."""
    call = checked_tensors(communicator, input, weight, bias, options)
    splits = checked_splits(communicator, call, input_splits, options.max_rows)
    world_size, (experts, inner, columns) = communicator.world_size, call.weight.shape
    output = call.input.new_zeros(world_size * options.max_rows, columns, dtype=call.dtype)
    segments = splits.new_empty(experts, world_size, 3)
    algorithm = on_device(communicator, call.algorithm, call.weight, call.dtype)
    made = output, segments
    if algorithm != "fused":
        about = algorithm, options
        return _by_torch, (call.input, call.weight, call.bias, splits, *made), about
    mean = max(1, options.max_rows // splits.numel())  # of a segment
    extents = mean, columns, inner
    chosen = configuration.choose(communicator.place, call.input.dtype, *extents, grouped=True)
    size = formulas.chunk_rows([mean], chosen.block_m, chosen.chunks)
    sizes = CountedSizes(options.max_rows, size, world_size, experts)
    tables = sizes.sends(splits, communicator.rank), sizes.count_lines(splits)
    tensors = (call.input, call.weight, call.bias, *tables, *made)
    return _planned, tensors, (sizes, chosen, call.activation, call.dtype, options)


def checked_splits(communicator: Communicator, call: Checked, given: Any, most: int) -> Tensor:
    """``input_splits`` as int64, if it fits; what is only known on a GPU is kept within the rows there."""
    splits = checks.tensor("input_splits", given, communicator)
    if splits.is_floating_point() or splits.is_complex() or splits.dtype is torch.bool:
        raise TypeError(f"input_splits must be a tensor of integers, got {splits.dtype}")
    experts, (rows, _) = call.weight.shape[0] * communicator.world_size, call.input.shape
    if splits.numel() != experts:
        raise ValueError(
            f"input_splits has {splits.numel()} entries, {communicator.world_size} ranks with "
            f"{call.weight.shape[0]} experts in weight make {experts}"
        )
    if rows > most:
        raise ValueError(f"num_max_rows_per_rank is {most}, input has {rows} rows")
    splits = splits.flatten().to(torch.int64)
    if communicator.place.interpreted:
        check_numbers(splits, rows)
    return rows_sent(splits, rows)


def with_counts(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: GroupedOptions,
) -> GroupedOptions:
    """``options`` with splits that the host has read, checked."""
    call = checked_tensors(communicator, input, weight, bias, options)
    splits = checked_splits(communicator, call, options.input_splits, options.max_rows)
    return options._replace(input_splits=splits.tolist())


def check_numbers(splits: Tensor, rows: int) -> None:
    """Raise unless ``splits`` are numbers of ``rows``; reads them, which a GPU's host would wait for."""
    if int(splits.min()) < 0:
        raise ValueError(f"input_splits must not be negative, got {splits.tolist()}")
    if int(splits.sum()) > rows:
        raise ValueError(f"input_splits adds up to {int(splits.sum())}, input has {rows} rows")


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
    chosen: configuration.Configuration,
    activation: str,
    dtype: torch.dtype,
    options: GroupedOptions,
) -> PreparedCall:
    """By the kernel, counts on the device."""

    def start() -> Outcome:
        terms = terms_of(input, sizes.world_size * sizes.experts, dtype, options)
        terms = (*terms, ("n of weight", weight.shape[2]))
        communicator.parts(communicator.call_of(EXCHANGE, terms, None))
        name_algorithm("fused")
        linear = Linear(weight, bias, output, activation=activation)
        op = CountedMatmul(communicator, input, linear, segments)
        return Outcome([output, segments], op.fused(sends, lines, sizes, chosen))

    return start, (), None


def _with_counts(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    splits: Tensor,
    output: Tensor,
    segments: Tensor,
    algorithm: str,
    options: GroupedOptions,
) -> PreparedCall:
    """By torch; the host reads counts, and ranks tell each other theirs."""
    known = splits.tolist()
    given = options._replace(input_splits=known)
    call = checked(communicator, input[: sum(known)], weight, bias, given)
    call = call._replace(algorithm=algorithm)

    def start() -> Outcome:
        routes, columns = agree(communicator, options, call)
        rows = routes.received(communicator.rank)
        event = started(communicator, EXCHANGE, call, routes, columns, output[:rows], None)
        segments.copy_(segments_of(routes))
        return Outcome([output, segments], event)

    return start, (), None


def segments_of(routes: Routes) -> Tensor:
    """The table of a rank's segments, as the kernel makes it, on the CPU."""
    return torch.tensor(routes.segment_lines()).view(-1, routes.world_size, 3)


def padded(
    communicator: Communicator, output: Tensor, routes: Routes, options: GroupedOptions
) -> list[Tensor]:
    """What the op gives, from an ``output`` as long as it is."""
    rest = communicator.world_size * options.max_rows - output.shape[0]
    return [F.pad(output, (0, 0, 0, rest)), segments_of(routes).to(output.device)]


def handle_of(
    communicator: Communicator,
    segments: Tensor,
    splits: Tensor,
    rows: int,
    options: GroupedOptions,
    number: int,
) -> DispatchHandle:
    """That of a dispatch of the rows, each being a token with one expert."""
    experts = experts_of(splits.flatten().to(torch.int64), rows)
    routing = Routing(splits.numel(), 0, options.max_rows, False, options.algorithm)
    return DispatchHandle(segments, experts, None, routing, communicator, number)


_planned = internal_form(EXCHANGE, _on_device, fills=False)
_by_torch = internal_form(EXCHANGE, _with_counts)
counted_grouped_matmul = composed_form(EXCHANGE, _prepared)
"""Of ``(input, weight, bias, input_splits)`` and ``(options,)``: output, and segments as of a dispatch."""
