"""Grouped matmul + combine: the rows of experts are multiplied, go home, and are summed by token.

The counterpart of ``all_to_all_grouped_matmul``: rows are in the order in which that returns them
(``fused/grouped.py``), which is the order of a dispatch, too (``fused/dispatch.py``).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.fused.dispatch import Routing, assignment_of, combined, weights_of
from interlace.fused.grouped import counts as splits_of
from interlace.fused.grouped import rows_and_experts
from interlace.runtime.algorithms.experts.combine import Home
from interlace.runtime.algorithms.experts.grouped_combine import OP, GroupedMatmulCombine
from interlace.runtime.algorithms.operands import Linear
from interlace.runtime.algorithms.plain import resident_programs
from interlace.runtime.core.call import Call, PreparedCall
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.hooks import profiled_op
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import configuration
from interlace.runtime.tuning.auto import choose_algorithm

MATMUL_COMBINE = OP
Tensor = torch.Tensor


class CombineOptions(NamedTuple):
    """The arguments of a call that are no tensors of values."""

    splits: Any
    return_rows: bool = False
    algorithm: str = "auto"
    out_dtype: torch.dtype | None = None


class CheckedCombine(NamedTuple):
    """The arguments of a call, checked on this rank; ``home``: rows by expert, None if on a GPU."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    assignment: Any
    weights: Tensor | None
    splits: list[int]
    algorithm: str
    dtype: torch.dtype
    home: tuple[int, ...] | None


def grouped_matmul_combine(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    outputs: list[Tensor] | None,
    options: CombineOptions,
) -> PreparedCall:
    """The op, checked; its result is the sums and, if asked for, the home rows, ``[tokens * k, n]``."""
    call = checked(communicator, input, weight, bias, topk_idx, topk_weights, options)

    def start() -> Outcome:
        counts, resident = agree(communicator, call)
        made = outputs
        if made is None:
            like = call.input.new_empty(0, call.weight.shape[2])
            made = combined(like, call.assignment.topk_idx, options.return_rows, call.dtype)
        event = _started(communicator, call, counts, resident, made)
        return Outcome(made if outputs is None else None, event)

    return start, (), None


def checked(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    options: CombineOptions,
) -> CheckedCombine:
    """The arguments, if they fit together on this rank."""
    world_size = communicator.world_size
    input, weight, algorithm, dtype = rows_and_experts(communicator, input, weight, options)
    splits = splits_of("splits", options.splits)
    if len(splits) != weight.shape[0] * world_size:
        raise ValueError(
            f"splits has {len(splits)} entries, {weight.shape[0]} experts and {world_size} ranks make "
            f"{weight.shape[0] * world_size}"
        )
    if sum(splits) != input.shape[0]:
        raise ValueError(f"splits adds up to {sum(splits)}, input has {input.shape[0]} rows")
    bias = checks.bias_of("bias", bias, (weight.shape[0], weight.shape[2]), input, communicator)
    routing = Routing(weight.shape[0] * world_size)
    assignment = assignment_of(communicator, routing, topk_idx, None)
    weights = weights_of(communicator, topk_weights, assignment.topk_idx)
    on_host = assignment.topk_idx.device.type == "cpu"
    home = tuple(assignment.counts.tolist()) if on_host else None
    if input.shape[1] > 1 and input.stride(1) != 1:
        input = input.contiguous()
    about = splits, algorithm, dtype, home
    return CheckedCombine(input, weight, bias, assignment, weights, *about)


def agree(
    communicator: Communicator, call: CheckedCombine, name: str | None = None
) -> tuple[Tensor, int]:
    """All ranks' rows by expert, and programs; raises alike on all. ``name``: what ranks call it."""
    world_size, experts = communicator.world_size, call.weight.shape[0]
    common = configuration.choose(communicator.place, call.input.dtype, 1, 1, 1)
    terms = (
        ("dtype of input", call.input.dtype),
        ("n of weight", call.weight.shape[2]),
        ("the number of experts", experts * world_size),
        ("k of topk_idx", call.assignment.topk_idx.shape[1]),
        ("algorithm", call.algorithm),
        ("out_dtype", call.dtype),
        ("whether there are topk_weights", call.weights is not None),
        ("configuration", configuration.OVERRIDE.get()),
    )
    programs = resident_programs(communicator, common)
    tokens = call.assignment.topk_idx.numel()
    part = tuple(call.splits), call.home, tokens, programs
    answers = communicator.parts(Call(name or OP, terms, part=part))
    received = torch.tensor([splits for splits, *_ in answers]).view(
        world_size, experts, world_size
    )
    counts = received.permute(2, 0, 1).reshape(world_size, -1).contiguous()
    for rank, (_, home, slots, _) in enumerate(answers):
        _fitting(counts[rank].tolist(), rank, home, slots, experts)
    return counts, min(each for *_, each in answers)


def _fitting(
    rows: list[int], rank: int, home: Sequence[int] | None, slots: int, experts: int
) -> None:
    """Compare what other ranks have of ``rank`` with its own choice of experts, as far as that is known."""
    if home is None:
        if sum(rows) > slots:
            raise ValueError(
                f"{OP}: splits have {sum(rows)} rows of rank {rank}, topk_idx has {slots} slots there"
            )
        return
    for expert, (there, own) in enumerate(zip(rows, home, strict=True)):
        if there != own:
            raise ValueError(
                f"{OP}: splits on rank {expert // experts} have {there} rows of expert {expert} from rank "
                f"{rank}, topk_idx has {own} on rank {rank}"
            )


def _started(
    communicator: Communicator,
    call: CheckedCombine,
    counts: Tensor,
    resident: int,
    made: list[Tensor],
) -> Event:
    """Choose the algorithm, from what all ranks know alike, and start it."""
    place, (_, inner, columns) = communicator.place, call.weight.shape
    most = int(counts.sum(1).max())
    empty = not most * inner * columns
    algorithm = call.algorithm
    if algorithm == "auto" or empty:
        wide = torch.float64 if call.dtype == torch.float64 else call.input.dtype
        algorithm = choose_algorithm(place, wide, most, 0, empty=empty)
        if place.nodes is not None:
            algorithm = "unfused"
    if algorithm != "unfused" and place.nodes is not None:
        raise ValueError(
            f'{OP}: algorithm="{algorithm}" works within one node, the group has several; use "unfused" '
            'or "auto"'
        )
    home = Home(call.assignment.inverse, call.weights, made[0], made[1] if made[1:] else None)
    linear = Linear(call.weight, call.bias, made[0])
    op = GroupedMatmulCombine(communicator, call.input, linear, counts, home)
    if op_ranges := profiled_op.get():
        op_ranges.begin(algorithm)
    if algorithm == "unfused":
        return op.unfused()
    if algorithm == "pipelined":
        return op.pipelined()
    extents = int(counts.max()), columns, inner
    return op.fused(configuration.choose(place, call.input.dtype, *extents, grouped=True), resident)
