"""Grouped matmul + combine: the rows of experts are multiplied, go home, and are summed by token.

The counterpart of ``all_to_all_grouped_matmul``: rows are in the order in which that returns them, and a
dispatch (``routing.py``). Who goes where the host knows from splits, or, after a dispatch with a
bound of tokens, the device: then the fused algorithm comes from a plan, and asks for no count.

This is the op by splits; that by a dispatch's segments is in ``routed_combine.py``. The gradients of the
tokens travel and are multiplied by ``all_to_all_grouped_matmul``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.kernels import launch_formulas as formulas
from interlace.ops.collectives.launch import resident_programs
from interlace.ops.experts import combine
from interlace.ops.experts.assignment import Assignment
from interlace.ops.experts.grouped import EXCHANGE, RowSplits, of_weights, rows_and_experts
from interlace.ops.experts.grouped import counts as splits_of
from interlace.ops.experts.launch_dispatch import HostRoutes
from interlace.ops.experts.launch_grouped_combine import OP, GroupedMatmulCombine
from interlace.ops.experts.routing import (
    Routing,
    agreed,
    assignment_of,
    least_of_all,
    on_device,
    weights_of,
)
from interlace.ops.matmul.operands import Linear
from interlace.ops.op.gradients import wait
from interlace.ops.op.op import Op, OpGradient, requiring
from interlace.ops.op.pending import Started
from interlace.ops.op.registry import Ops
from interlace.runtime.core.call import Call, PreparedCall, Terms
from interlace.runtime.core.communicator import Communicator, composed_form, internal_form
from interlace.runtime.core.context import name_algorithm, with_context
from interlace.runtime.core.stream import Outcome
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.auto import choose_algorithm

MATMUL_COMBINE = OP
FACTORS = ("input", "weight", "bias")
Tensor = torch.Tensor
_ops: Any = Ops()


@dataclass
class GroupedCombineArguments:
    """``home_splits``: the rows that this rank has sent, by expert; ``splits``: by expert and source."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    home_splits: list[torch.SymInt]
    splits: list[torch.SymInt]
    return_rows: bool
    algorithm: str
    out_dtype: torch.dtype | None


class CombineOptions(NamedTuple):
    """The arguments of a call that are no tensors of values.

    ``routing``: that of the dispatch, whose segments the call gets instead of ``splits``.
    """

    splits: Any
    algorithm: str = "auto"
    out_dtype: torch.dtype | None = None
    routing: Routing | None = None


class CheckedCombine(NamedTuple):
    """The arguments of a call, checked on this rank."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    assignment: Any  # an Assignment; None where it is not looked at again
    weights: Tensor | None
    algorithm: str
    dtype: torch.dtype

    def terms(self) -> Terms:
        return (
            ("dtype of input", self.input.dtype),
            ("n of weight", self.weight.shape[2]),
            ("the number of experts", self.assignment.experts),
            ("algorithm", self.algorithm),
            ("out_dtype", self.dtype),
            ("whether there are topk_weights", self.weights is not None),
        )


def _prepared(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    segments: Tensor | None,
    outputs: list[Tensor] | None,
    options: CombineOptions,
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    """Checked on this rank: the form that goes on, its tensors and options.

    ``segments``: of the dispatch, if ``options`` have its routing. ``outputs``: as
    :func:`interlace.ops.experts.combine.results_of` makes them; without them the result is the sums.
    """
    call = checked(communicator, input, weight, bias, topk_idx, topk_weights, options)
    routing = options.routing
    if routing is None or not routing.max_tokens:
        given = options.splits if segments is None else segments[..., 1]
        splits = checked_splits(communicator, call, given)
        return _by_splits, (outputs,), (call, splits)
    assert segments is not None
    segments = combine.checked_segments(communicator, segments, routing, "input", call.input)
    routing = routing._replace(algorithm=call.algorithm)
    algorithm = on_device(communicator, call.algorithm, call.weight, call.dtype)
    if algorithm != "fused":
        return _by_torch, (outputs,), (call, routing, algorithm)
    routed = segments, call.assignment.inverse, call.weights, outputs
    return (
        _planned,
        (call.input, call.weight, call.bias, *routed),
        (routing, call.terms(), call.dtype),
    )


def checked(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    options: CombineOptions,
) -> CheckedCombine:
    """The arguments but for splits, if they fit together on this rank."""
    input, weight, algorithm, dtype = rows_and_experts(communicator, input, weight, options)
    bias = checks.bias_of("bias", bias, (weight.shape[0], weight.shape[2]), input, communicator)
    routing, experts = options.routing, weight.shape[0] * communicator.world_size
    if routing is None:
        routing = Routing(experts)
    if routing.num_experts != experts:
        raise ValueError(
            f"weight has {weight.shape[0]} experts on each of {communicator.world_size} ranks, the "
            f"dispatch had {routing.num_experts}"
        )
    assignment = assignment_of(communicator, routing, topk_idx, None)
    weights = weights_of(communicator, topk_weights, assignment.topk_idx)
    if input.shape[1] > 1 and input.stride(1) != 1:
        input = input.contiguous()
    return CheckedCombine(input, weight, bias, assignment, weights, algorithm, dtype)


def checked_splits(communicator: Communicator, call: CheckedCombine, splits: Any) -> list[int]:
    """``splits`` as ints, if they fit the rows."""
    found, each = splits_of("splits", splits), call.weight.shape[0]
    if len(found) != each * communicator.world_size:
        raise ValueError(
            f"splits has {len(found)} entries, {each} experts and {communicator.world_size} ranks make "
            f"{each * communicator.world_size}"
        )
    if sum(found) != call.input.shape[0]:
        raise ValueError(f"splits adds up to {sum(found)}, input has {call.input.shape[0]} rows")
    return found


def agree(
    communicator: Communicator, call: CheckedCombine, splits: list[int], more: Terms = ()
) -> Tensor:
    """All ranks' rows by expert; raises alike on all. ``more``: on what else they have to agree."""
    world_size, experts = communicator.world_size, call.weight.shape[0]
    terms = (*call.terms(), ("k of topk_idx", call.assignment.topk_idx.shape[1]), *more)
    home = tuple(call.assignment.counts.tolist()) if communicator.place.interpreted else None
    part = tuple(splits), home, call.assignment.topk_idx.numel()
    answers = communicator.parts(Call(OP, with_context(terms), part=part))
    received = torch.tensor([each for each, *_ in answers]).view(world_size, experts, world_size)
    counts = received.permute(2, 0, 1).reshape(world_size, -1).contiguous()
    for rank, (_, home, slots) in enumerate(answers):
        _fitting(counts[rank].tolist(), rank, home, slots, experts)
    return counts


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


def _chosen(communicator: Communicator, call: CheckedCombine, most: int) -> str:
    """The algorithm, from what all ranks know alike; ``most`` home rows has the rank with most."""
    place, (_, inner, columns) = communicator.place, call.weight.shape
    empty = not most * inner * columns
    checks.one_node(call.algorithm, communicator)
    if place.nodes is not None:
        return "unfused"
    if call.algorithm != "auto" and not empty:
        return call.algorithm
    wide = torch.float64 if call.dtype == torch.float64 else call.input.dtype
    tuned = ""
    if not empty:
        about = most, columns, inner, communicator.world_size
        tuned = tuning.measured(
            communicator, tuning.Problem(OP, call.input.dtype, *about)
        ).algorithm
    return choose_algorithm(place, wide, most, 0, empty=empty, tuned=tuned)


def _configured(
    communicator: Communicator, call: CheckedCombine, rows: int
) -> tuple[configuration.Configuration, int]:
    """The configuration for ``rows``, the most of one expert and source; programs, alike on all ranks."""
    place, dtype = communicator.place, call.input.dtype
    mine = resident_programs(communicator, configuration.choose(place, dtype, 1, 1, 1))
    resident = least_of_all(communicator, OP, f"programs for {dtype}", mine)
    _, inner, columns = call.weight.shape
    return configuration.choose(place, dtype, rows, columns, inner, grouped=True), resident


def _op(
    communicator: Communicator, call: CheckedCombine, inverse: Tensor, outputs: list[Tensor] | None
) -> GroupedMatmulCombine:
    like = call.input.new_empty(0, call.weight.shape[2], dtype=call.dtype)
    home = combine.home_of(like, inverse, call.weights, outputs)
    linear = Linear(call.weight, call.bias, home.output)
    return GroupedMatmulCombine(communicator, call.input, linear, home)


def _with_splits(
    communicator: Communicator,
    outputs: list[Tensor] | None,
    call: CheckedCombine,
    splits: list[int],
) -> PreparedCall:
    """All ranks tell what they have, and the host knows who goes where."""

    def start() -> Outcome:
        routes = HostRoutes(call.assignment, agree(communicator, call, splits), 0)
        algorithm = _chosen(communicator, call, most := int(routes.counts.sum(1).max()))
        op = _op(communicator, call, call.assignment.inverse, outputs)
        name_algorithm(algorithm)
        if algorithm == "fused":
            chosen, resident = _configured(communicator, call, int(routes.counts.max()))
            grid = formulas.persistent_grid(0, op.tiles(routes, chosen), resident)
            event = op.fused(op.host_segments(routes), most, grid, chosen)
        else:
            event = (op.pipelined if algorithm == "pipelined" else op.unfused)(routes)
        return Outcome(None if outputs else op.home.output, event)

    return start, (), None


def _with_counts(
    communicator: Communicator,
    outputs: list[Tensor] | None,
    call: CheckedCombine,
    routing: Routing,
    algorithm: str,
) -> PreparedCall:
    """After a dispatch with a bound, by torch, which needs counts on the host."""

    def start() -> Outcome:
        shape, own = call.assignment.topk_idx.shape, call.assignment.counts
        _, counts = agreed(communicator, OP, routing, shape, call.terms(), own)
        assert counts is not None
        routes = HostRoutes(call.assignment, counts, routing.expert_rows(communicator.world_size))
        op = _op(communicator, call, call.assignment.inverse, outputs)
        name_algorithm(algorithm)
        event = (op.pipelined if algorithm == "pipelined" else op.unfused)(routes)
        return Outcome(None if outputs else op.home.output, event)

    return start, (), None


def _on_device(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Tensor,
    inverse: Tensor,
    weights: Tensor | None,
    outputs: list[Tensor] | None,
    routing: Routing,
    terms: Terms,
    dtype: torch.dtype,
) -> PreparedCall:
    """After a dispatch with a bound, by the kernel, which reads who goes where on the device."""
    call = CheckedCombine(input, weight, bias, None, weights, "fused", dtype)

    def start() -> Outcome:
        tokens, _ = agreed(communicator, OP, routing, inverse.shape, terms)
        most, segment_count = tokens * inverse.shape[1], segments.shape[0] * segments.shape[1]
        op = _op(communicator, call, inverse, outputs)
        name_algorithm("fused")
        chosen, resident = _configured(communicator, call, max(1, most // routing.num_experts))
        rows = routing.bound(inverse.shape[1], communicator.world_size)
        tiles = rows // chosen.block_m + segment_count  # one of each segment may not be full
        tiles *= formulas.ceil_div(weight.shape[2], chosen.block_n)
        grid = formulas.persistent_grid(0, tiles, resident)
        event = op.fused(segments, most, grid, chosen)
        return Outcome(None if outputs else op.home.output, event)

    return start, (), None


_planned = internal_form(OP, _on_device, fills=False)
_by_splits = internal_form(OP, _with_splits)
_by_torch = internal_form(OP, _with_counts)
grouped_matmul_combine = composed_form(OP, _prepared)
"""Of ``(input, weight, bias, topk_idx, topk_weights, segments, outputs)`` and ``(options,)``."""


def results(given: Any, size: int) -> list[Tensor]:
    """Tensors for what this op gives, and that of ``routed_combine.py``."""
    input, weight, idx = given.input, given.weight, given.topk_idx
    if input.dim() != 2 or weight.dim() != 3 or idx.dim() != 2:
        raise ValueError(
            "input and topk_idx must have 2 dimensions and weight 3, got shapes "
            f"{tuple(input.shape)}, {tuple(idx.shape)} and {tuple(weight.shape)}"
        )
    like = input.new_empty((0, weight.shape[2]), dtype=checks.output_dtype(given.out_dtype, input))
    return combine.results_of(like, idx, given.return_rows)


def start(communicator: Communicator, given: GroupedCombineArguments) -> Started:
    with communicator.accepting(OP):
        outputs = results(given, communicator.world_size)
        options = CombineOptions(list(given.splits), given.algorithm, given.out_dtype)
    tensors = (given.input, given.weight, given.bias, given.topk_idx, given.topk_weights)
    work = grouped_matmul_combine(communicator, (*tensors, None, outputs), (options,), True)
    return Started(outputs, work)


def save(ctx: Any, given: GroupedCombineArguments, output: Sequence[Tensor]) -> None:
    sent, received = list(given.home_splits), list(given.splits)
    ctx.splits = RowSplits(sent, received, int(given.weight.shape[0]))
    ctx.needed, ctx.algorithm = requiring(given), given.algorithm
    home = combine.home_rows(OP, ctx.needed, given.return_rows, output)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(given.input, given.weight, given.topk_idx, given.topk_weights, home)


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> Mapping[str, Tensor]:
    input, weight, idx, weights, home = ctx.saved_tensors
    found: dict[str, Tensor] = {}
    grad, splits = grads[0], ctx.splits
    if grad is None:
        return found
    ranks = splits.sources
    chosen = Assignment(idx.to(torch.int64), splits.experts * ranks, ranks)
    if ctx.needed.intersection(FACTORS):
        slots = chosen.slots(sum(splits.sent))
        rows = grad[slots // int(idx.shape[1])]
        if weights is not None:
            rows = rows * weights.reshape(-1)[slots].unsqueeze(1)
        # the products of rows that travel, as in forward; and the rows, for the weight's gradient
        of_input, received = getattr(_ops, EXCHANGE)(
            rows.to(weight.dtype), weight.transpose(1, 2), None, splits.sent, splits.received, True,
            ctx.algorithm, None, ctx.size, ctx.name,
        )  # fmt: skip
        of_input, received = wait(of_input), wait(received)
        parts = torch.split(received, splits.of_experts)
        if "input" in ctx.needed:
            found["input"] = of_input
        if "weight" in ctx.needed:
            found["weight"] = of_weights(torch.split(input, splits.of_experts), parts)
        if "bias" in ctx.needed:
            found["bias"] = torch.stack([part.sum(0) for part in parts])
    if home is not None:
        found["topk_weights"] = combine.of_slot_weights(weights, home, chosen.inverse, grad)
    return found


GRADIENT = OpGradient(save, backward)
COMMUNICATES = {"input, weight or bias": FACTORS}
OPS = (Op(OP, GroupedCombineArguments, start, results, GRADIENT, COMMUNICATES, several=True),)
