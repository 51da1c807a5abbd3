"""Grouped matmul + combine: the rows of experts are multiplied, return home, and are summed by token.

Rows have the order of the results of ``all_to_all_grouped_matmul`` and of a dispatch (``routing.py``).

``fused``      one Triton kernel multiplies, sends and sums (``kernels/experts/combine.py``)
``pipelined``  a torch matmul for each home and expert, directly into the home's workspace
``unfused``    a torch matmul per expert, then a combine; any dtype, many nodes

The last two, and calls with splits, know the routing on the host. After a dispatch with a bound of tokens
the kernel reads it on the device, and uses a plan.

There are two ops. With splits, the gradients of the tokens travel and are multiplied by
``all_to_all_grouped_matmul``. With the segments of a dispatch ("routed"), a graph need not know any number
of rows. Its backward is a separate op without gradients: the gradients of tokens are dispatched like the
tokens, and multiplied where they arrive (``products.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.kernels import launch_formulas as formulas
from interlace.kernels.experts import combine as kernels
from interlace.ops.collectives import records as by_rank
from interlace.ops.collectives.launch import enqueue_kernel, resident_programs
from interlace.ops.experts import combine, dispatch
from interlace.ops.experts.combine import Home, home_rows, of_slot_weights, of_sums, pipelined_home
from interlace.ops.experts.dispatch import (
    DispatchArguments,
    as_many,
    dispatch_rows,
    exchanged_rows,
    sorted_places,
)
from interlace.ops.experts.grouped import (
    EXCHANGE,
    RowSplits,
    checked_operands,
    expert_of,
    expert_operands,
    multiply_by_expert,
    received_again,
    received_counts,
)
from interlace.ops.experts.products import of_products, of_weights
from interlace.ops.experts.routing import (
    EXAMPLES,
    Assignment,
    HostRoutes,
    Routing,
    RoutingArguments,
    agreed,
    assignment_of,
    known_segments,
    least_of_all,
    on_device,
    weights_of,
)
from interlace.ops.matmul import operands
from interlace.ops.matmul.block_scaled import call_in
from interlace.ops.matmul.formats import OPERAND_FORMATS, format_term
from interlace.ops.matmul.operands import Linear
from interlace.ops.op.op import (
    Op,
    OpGradient,
    Started,
    fused_by,
    own_rows,
    requiring,
    wait,
    without_gradient,
)
from interlace.ops.op.recording import Ops, call
from interlace.runtime.core.call import Call, PreparedCall, Terms
from interlace.runtime.core.communicator import Communicator, composed_form, internal_form
from interlace.runtime.core.context import name_algorithm, with_context
from interlace.runtime.core.memory import Layout
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.configuration import Configuration
from interlace.runtime.tuning.tuning import choose_algorithm

OP = "grouped_matmul_combine"
ROUTED = "routed_matmul_combine"
ROUTED_BACKWARD = f"{ROUTED}_backward"
FACTORS = ("input", "weight", "bias")
Tensor = torch.Tensor
_ops: Any = Ops()


@dataclass
class GroupedCombineArguments:
    """``home_splits``: the rows that this rank has sent, by expert; ``splits``: by expert and source.

    Eager callers may pass a tensor as ``splits``; ``home_splits`` is empty until the call is recorded.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    home_splits: Annotated[Any, "SymInt[]"]
    splits: Annotated[Any, "SymInt[]"]
    return_rows: bool
    algorithm: str
    out_dtype: torch.dtype | None
    format: str = ""


@dataclass
class RoutedCombineArguments(RoutingArguments):
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    segments: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    return_rows: bool
    num_experts: int
    capacity: int
    max_tokens: int
    packed: bool
    algorithm: str
    out_dtype: torch.dtype | None
    format: str = ""


@dataclass
class RoutedGradientArguments(RoutingArguments):
    grad: Tensor
    input: Tensor
    weight: Tensor
    segments: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    num_experts: int
    capacity: int
    max_tokens: int
    packed: bool
    algorithm: str
    format: str = ""


_Arguments = GroupedCombineArguments | RoutedCombineArguments


class CheckedCombine(NamedTuple):
    """The arguments of a call, checked on this rank."""

    assignment: Any  # an Assignment; None if it is not used again
    weights: Tensor | None
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    algorithm: str
    out_dtype: torch.dtype
    format: str

    def terms(self) -> Terms:
        return (
            format_term(self.format),
            ("dtype of input", self.input.dtype),
            ("n of weight", self.weight.shape[2]),
            ("the number of experts", self.assignment.experts),
            ("algorithm", self.algorithm),
            ("out_dtype", self.out_dtype),
            ("whether there are topk_weights", self.weights is not None),
        )


@dataclass(frozen=True)
class GroupedMatmulCombine:
    """One call. ``linear``: weights ``[E, K, N]`` and biases ``[E, N]``; its output is not used."""

    communicator: Communicator
    input: Tensor
    linear: Linear
    home: Home

    def fused(
        self, segments: Tensor, most_home_rows: int, grid: int, configuration: Configuration
    ) -> Event:
        """Run the kernel. ``grid``: programs that may wait for each other, equal on all ranks."""
        communicator, linear, home = self.communicator, self.linear, self.home
        known = expert_operands(communicator, self.input, linear, configuration, published=True)
        del known["output_ptr"]
        # A tile is stored into every rank's memory in turn: a descriptor is for one place.
        # In parts: every stored element has an address, besides the sums to add a bias to.
        parts = configuration.activated_parts
        # With 4 warps there are no registers for one loop of tiles and k: it spills on 10.0.
        flatten = known["TILES"].FLATTEN and configuration.num_warps > 4
        tiles = known["TILES"]._replace(OUT_DESCRIPTOR=False, SUBTILE=parts, FLATTEN=flatten)
        arguments: dict[str, Any] = {
            **known,
            "segments_ptr": segments,
            "combined": home.combined(),
            "SLOTS": home.slots(configuration, linear.weight.shape[0]),
            "TILES": tiles,
        }
        row_bytes = home.output.shape[1] * home.output.element_size()
        layout = Layout(communicator.world_size * grid, most_home_rows * row_bytes)
        options = operands.launch_options(configuration, self.input)
        launch = kernels.grouped_matmul_combine_kernel, grid, arguments, options
        keep = partial(home.keep, communicator)
        return enqueue_kernel(communicator, OP, layout, *launch, finish=keep)

    def pipelined(self, routes: HostRoutes) -> Event:
        stream = self.communicator.compute

        def put(theirs: Tensor, expert: int, rows: slice, label: str) -> None:
            part = expert_of(self.linear, expert)
            about = theirs, self.input[rows], part.weight, part.bias, "", part.format
            stream.call(partial(operands.multiply, *about), label)

        return pipelined_home(self.communicator, OP, routes, self.home, put)

    def unfused(self, routes: HostRoutes) -> Event:
        communicator, input = self.communicator, self.input
        segments = routes.segments(communicator.rank)
        columns, dtype = self.home.output.shape[1], self.home.output.dtype
        product = input.new_empty(input.shape[0], columns, dtype=dtype)
        order = sorted_places(segments).to(input.device)
        # No op of the streams precedes this, so the streams must wait for the tensors to read.
        communicator.compute.wait_event(communicator.place.record_current())
        for expert, line in enumerate(segments.tolist()):
            rows = slice(line[0][0], line[-1][0] + line[-1][1])
            part = expert_of(self.linear, expert, product)
            operands.enqueue_product(communicator, input[rows], part, rows, f"expert {expert}")
        back = exchanged_rows(communicator, routes, product, order, back=True)
        self.home.sum_rows(communicator, back)
        return communicator.compute.record()


def _prepare(
    communicator: Communicator, record: _Arguments, outputs: list[Tensor] | None
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    """Check the arguments on this rank; return the function that runs the op, its tensors and options."""
    call = check(communicator, record)
    if isinstance(record, GroupedCombineArguments):
        splits = checked_splits(communicator, call, record.splits)
        return _by_host, (outputs,), (call, splits, "", not record.home_splits)
    routing, segments = record.routing, record.segments
    if not routing.max_tokens:
        splits = checked_splits(communicator, call, segments[..., 1])
        return _by_host, (outputs,), (call, splits)
    segments = combine.checked_segments(communicator, segments, routing, "input", call.input)
    algorithm = on_device(communicator, call.algorithm, call.weight, call.out_dtype)
    if algorithm != "fused":
        return _by_host, (outputs,), (call, routing, algorithm)
    about = segments, call.assignment.inverse, call.weights, outputs
    tensors = (call.input, call.weight, call.bias, *about)
    return _planned, tensors, (routing, call.terms(), call.out_dtype, call.format)


def check(communicator: Communicator, record: _Arguments) -> CheckedCombine:
    """Return the arguments except splits, if they fit together on this rank."""
    factors = checked_operands(communicator, record)
    routing = _routing_of(record, factors["weight"].shape[0], communicator.world_size)
    assignment = assignment_of(communicator, routing, record.topk_idx, None)
    weights = weights_of(communicator, record.topk_weights, assignment.topk_idx)
    return CheckedCombine(assignment, weights, **factors, format=record.format)


def _routing_of(record: _Arguments, each: int, world_size: int) -> Routing:
    """Return the routing of the dispatch, if it had ``each`` experts on every rank."""
    if isinstance(record, GroupedCombineArguments):
        return Routing(each * world_size)
    if record.num_experts != each * world_size:
        raise ValueError(
            f"weight has {each} experts on each of {world_size} ranks, the dispatch had "
            f"{record.num_experts}"
        )
    return record.routing


def checked_splits(communicator: Communicator, call: CheckedCombine, splits: Any) -> list[int]:
    found = received_counts("splits", splits, call.weight.shape[0], communicator.world_size)
    if sum(found) != call.input.shape[0]:
        raise ValueError(f"splits adds up to {sum(found)}, input has {call.input.shape[0]} rows")
    return found


def agree(communicator: Communicator, call: CheckedCombine, splits: list[int]) -> Tensor:
    """Return all ranks' rows by expert; raise alike on all ranks."""
    experts = call.weight.shape[0]
    terms = (*call.terms(), ("k of topk_idx", call.assignment.topk_idx.shape[1]))
    home = tuple(call.assignment.counts.tolist()) if communicator.place.interpreted else None
    part = tuple(splits), home, call.assignment.topk_idx.numel()
    answers = communicator.parts(Call(OP, with_context(terms), part=part))
    counts = _counts([each for each, *_ in answers], experts)
    for rank, (_, home, slots) in enumerate(answers):
        _fitting(counts[rank].tolist(), rank, home, slots, experts)
    return counts


def _counts(splits: Sequence[Sequence[int]], experts: int) -> Tensor:
    """Return all ranks' rows by expert, from the splits of the ranks, each for ``experts`` experts."""
    world_size = len(splits)
    received = torch.tensor(splits).view(world_size, experts, world_size)
    return received.permute(2, 0, 1).reshape(world_size, -1).contiguous()


def _fitting(
    rows: list[int], rank: int, home: Sequence[int] | None, slots: int, experts: int
) -> None:
    """Compare other ranks' rows of ``rank`` with its own choice of experts, as far as that is known."""
    if home is None:
        if sum(rows) > slots:
            raise ValueError(
                f"{OP}: splits have {sum(rows)} rows of rank {rank}, topk_idx has {slots} slots there"
            )
        return
    for expert, (sent, chosen) in enumerate(zip(rows, home, strict=True)):
        if sent != chosen:
            raise ValueError(
                f"{OP}: splits on rank {expert // experts} have {sent} rows of expert {expert} from rank "
                f"{rank}, topk_idx has {chosen} on rank {rank}"
            )


def _chosen(communicator: Communicator, call: CheckedCombine, most: int) -> str:
    """Return the algorithm, from facts that ranks share; ``most``: the most home rows of a rank."""
    place, (_, inner, columns) = communicator.place, call.weight.shape
    empty = not most * inner * columns
    checks.one_node(call.algorithm, communicator)
    if place.nodes is not None:
        return "unfused"
    if call.algorithm != "auto" and not empty:
        return call.algorithm
    wide = torch.float64 if call.out_dtype == torch.float64 else call.input.dtype
    tuned = ""
    if not empty:
        about = most, columns, inner, communicator.world_size
        format = tuning.tuned_as(OPERAND_FORMATS.get(call.format))
        problem = tuning.Problem(OP, call.input.dtype, *about, **format)
        tuned = tuning.measured_choice(communicator, problem).algorithm
    return choose_algorithm(place, wide, most, 0, empty=empty, tuned=tuned)


def _configure(
    communicator: Communicator, call: CheckedCombine, rows: int
) -> tuple[Configuration, int]:
    """Return configuration and programs, equal on all ranks, for at most ``rows`` per segment."""
    place, dtype = communicator.place, call.input.dtype
    programs = resident_programs(communicator, configuration.choose(place, dtype, 1, 1, 1))
    resident = least_of_all(communicator, OP, f"programs for {dtype}", programs)
    _, inner, columns = call.weight.shape
    kind = OPERAND_FORMATS.get(call.format)
    options = {"grouped": True, "fast_accum": kind is None or kind.fast_accum}
    return configuration.choose(place, dtype, rows, columns, inner, **options), resident


def _op(
    communicator: Communicator, call: CheckedCombine, inverse: Tensor, outputs: list[Tensor] | None
) -> GroupedMatmulCombine:
    like = call.input.new_empty(0, call.weight.shape[2], dtype=call.out_dtype)
    home = combine.home_of(like, inverse, call.weights, outputs)
    linear = Linear(call.weight, call.bias, home.output, format=OPERAND_FORMATS.get(call.format))
    return GroupedMatmulCombine(communicator, call.input, linear, home)


def _on_host(
    communicator: Communicator,
    outputs: list[Tensor] | None,
    call: CheckedCombine,
    splits: list[int] | Routing,
    algorithm: str = "",
    eager: bool = False,
) -> PreparedCall:
    """Run with routes on the host, from all ranks' splits, or from counts after a dispatch with a bound.

    If an ``eager`` caller has allocated the ``outputs``, the result is the rows that this rank has sent, by
    expert.
    """

    def start() -> Outcome:
        assignment, rows = call.assignment, 0
        if isinstance(splits, Routing):
            about = assignment.topk_idx.shape, call.terms(), assignment.counts
            _, counts = agreed(communicator, OP, splits, *about)
            assert counts is not None
            rows = splits.expert_rows(communicator.world_size)
        else:
            counts = agree(communicator, call, splits)
        routes, most = HostRoutes(assignment, counts, rows), int(counts.sum(1).max())
        op = _op(communicator, call, assignment.inverse, outputs)
        way = algorithm or _chosen(communicator, call, most)
        name_algorithm(way)
        if way == "fused":
            rank, ranks = communicator.rank, communicator.world_size
            key = ("segments of experts", rank, tuple(map(tuple, counts.tolist())))
            lines = routes.segments(rank).view(-1, 3)
            segments = communicator.table(key, lines.tolist, passing=True)
            chosen, resident = _configure(communicator, call, int(counts.max()))
            tiles = (counts + chosen.block_m - 1) // chosen.block_m
            most_tiles = int(tiles.view(ranks, ranks, -1).sum((0, 2)).max())
            most_tiles *= formulas.ceil_div(call.weight.shape[2], chosen.block_n)
            grid = formulas.persistent_grid(0, most_tiles, resident)
            event = op.fused(segments, most, grid, chosen)
        else:
            event = (op.pipelined if way == "pipelined" else op.unfused)(routes)
        if outputs is None:
            return Outcome(op.home.output, event)
        return Outcome(counts[communicator.rank].tolist() if eager else None, event)

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
    format: str,
) -> PreparedCall:
    """Run the kernel after a dispatch with a bound; it reads the routes on the device."""
    call = CheckedCombine(None, weights, input, weight, bias, "fused", dtype, format)

    def start() -> Outcome:
        tokens, _ = agreed(communicator, OP, routing, inverse.shape, terms)
        most, segment_count = tokens * inverse.shape[1], segments.shape[0] * segments.shape[1]
        op = _op(communicator, call, inverse, outputs)
        name_algorithm("fused")
        chosen, resident = _configure(communicator, call, max(1, most // routing.num_experts))
        rows = routing.bound(inverse.shape[1], communicator.world_size)
        tiles = rows // chosen.block_m + segment_count  # one of each segment may not be full
        tiles *= formulas.ceil_div(weight.shape[2], chosen.block_n)
        grid = formulas.persistent_grid(0, tiles, resident)
        event = op.fused(segments, most, grid, chosen)
        return Outcome(None if outputs else op.home.output, event)

    return start, (), None


_planned = internal_form(OP, _on_device, fills=False)
_by_host = internal_form(OP, _on_host)
grouped_matmul_combine = composed_form(OP, _prepare)
"""Maps ``(arguments, outputs)`` to the results, for the arguments of either op."""


def results(record: _Arguments, size: int) -> list[Tensor]:
    input, weight, idx = record.input, record.weight, record.topk_idx
    if input.dim() != 2 or weight.dim() != 3 or idx.dim() != 2:
        raise ValueError(
            "input and topk_idx must have 2 dimensions and weight 3, got shapes "
            f"{tuple(input.shape)}, {tuple(idx.shape)} and {tuple(weight.shape)}"
        )
    like = input.new_empty((0, weight.shape[2]), dtype=checks.output_dtype(record.out_dtype, input))
    return combine.results_of(like, idx, record.return_rows)


def start(communicator: Communicator, record: _Arguments) -> Started:
    with communicator.accepting(OP):
        outputs = results(record, communicator.world_size)
    work = grouped_matmul_combine(communicator, (record, outputs), async_op=True)
    return Started(outputs, work)


def save(ctx: Any, record: GroupedCombineArguments, output: Sequence[Tensor]) -> None:
    sent, received = list(record.home_splits), list(record.splits)
    ctx.splits = RowSplits(sent, received, int(record.weight.shape[0]))
    ctx.needed, ctx.algorithm, ctx.format = requiring(record), record.algorithm, record.format
    home = home_rows(OP, ctx.needed, record.return_rows, output)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(record.input, record.weight, record.topk_idx, record.topk_weights, home)


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> Mapping[str, Tensor]:
    input, weight, idx, weights, home = ctx.saved_tensors
    found: dict[str, Tensor] = {}
    grad, splits = of_sums(OP, grads), ctx.splits
    if grad is None:
        return found
    ranks = splits.sources
    chosen = Assignment(idx.to(torch.int64), splits.experts * ranks, ranks)
    if ctx.needed.intersection(FACTORS):
        slots = chosen.slots(sum(splits.sent))
        rows = grad[slots // int(idx.shape[1])]
        if weights is not None:
            rows = rows * weights.reshape(-1)[slots].unsqueeze(1)
        rows = rows.to(input.dtype)
        # the products of rows that travel, as in forward; and the rows, for the weight's gradient
        of_input, *received = call_in(
            call, ctx.format, EXCHANGE, rows, weight.transpose(1, 2), None, splits.sent,
            splits.received, not ctx.format, ctx.algorithm, None, ctx.size, ctx.name,
        )  # fmt: skip
        of_input = wait(of_input)
        if "input" in ctx.needed:
            found["input"] = of_input
        parts: Sequence[Tensor] = ()
        if ctx.needed.intersection(("weight", "bias")):
            arrived = wait(received[0]) if received else received_again(EXCHANGE, ctx, rows)
            parts = torch.split(arrived, splits.of_experts)
        if "weight" in ctx.needed:
            inputs = torch.split(input, splits.of_experts)
            found["weight"] = of_weights(weight, inputs, parts, ctx.format)
        if "bias" in ctx.needed:
            found["bias"] = torch.stack([part.sum(0) for part in parts])
    if home is not None:
        found["topk_weights"] = of_slot_weights(weights, home, chosen.inverse, grad)
    return found


# -- by the segments of a dispatch -------------------------------------------------------------------


def save_routed(ctx: Any, record: RoutedCombineArguments, output: Sequence[Tensor]) -> None:
    ctx.needed, ctx.routing, ctx.format = requiring(record), record.routing, record.format
    home = home_rows(OP, ctx.needed, record.return_rows, output)
    ctx.set_materialize_grads(False)
    about = record.segments, record.topk_idx, record.topk_weights
    ctx.save_for_backward(record.input, record.weight, *about, home)


def backward_routed(ctx: Any, grads: Sequence[Tensor | None]) -> Mapping[str, Tensor]:
    input, weight, segments, idx, weights, home = ctx.saved_tensors
    found: dict[str, Tensor] = {}
    grad = of_sums(ROUTED, grads)
    if grad is None:
        return found
    if ctx.needed.intersection(FACTORS):
        about = segments, idx, weights, *ctx.routing, ctx.format, ctx.size, ctx.name
        gradients = getattr(_ops, ROUTED_BACKWARD)(grad, input, weight, *about)
        for name, each in zip(FACTORS, gradients, strict=True):
            complete = wait(each)
            if name in ctx.needed:
                found[name] = complete
    if home is not None:
        found["topk_weights"] = of_slot_weights(weights, home, ctx.routing.inverse(idx), grad)
    return found


def routed_gradients(record: RoutedGradientArguments, size: int) -> list[Tensor]:
    """Allocate the gradients of input, weight and bias."""
    weight = record.weight
    bias = weight.new_empty((weight.shape[0], weight.shape[2]))
    return [record.input.new_empty(record.input.shape), weight.new_empty(weight.shape), bias]


def start_routed_backward(communicator: Communicator, record: RoutedGradientArguments) -> Started:
    tensors = dispatch_rows(communicator, (_of_tokens(record), None))
    return Started(_gradients(record, *tensors[:-1]), None)


def _of_tokens(record: RoutedGradientArguments) -> DispatchArguments:
    return DispatchArguments(
        record.grad, None, record.topk_idx, record.topk_weights, *record.routing
    )


def _gradients(record: RoutedGradientArguments, rows: Tensor, *weights: Tensor) -> list[Tensor]:
    if weights:
        rows = rows * weights[0].unsqueeze(1)
    rows = as_many(rows.to(record.input.dtype), record.input.shape[0])
    factors = record.input, rows, record.weight
    return of_products(*factors, record.segments, record.packed, record.format)


# -- references: one process plays all ranks --------------------------------------------------------


def reference(ranks: Sequence[_Arguments], size: int) -> list[list[Tensor]]:
    first, factors = ranks[0], [rank.weight for rank in ranks]
    by_rank.alike(OP, "input", by_rank.inputs(ranks), but=0)
    by_rank.alike(OP, "weight", factors)
    checks.same_dtype("weight", first.weight.dtype, "input", first.input.dtype)
    _, dtype = checks.algorithm_and_dtype(first.input, first)
    experts, _, columns = first.weight.shape
    segments, products = _segments(ranks, experts), []
    for each, table in zip(ranks, segments, strict=True):
        product = each.input.new_zeros(each.input.shape[0], columns, dtype=dtype)
        where = [slice(line[0][0], line[-1][0] + line[-1][1]) for line in table.tolist()]
        multiply_by_expert(product, each.input, each.weight, each.bias, where, each.format)
        products.append(product)
    return combine.returned(OP, ranks, _routing_of(first, experts, size), products, segments)


def _segments(ranks: Sequence[Any], experts: int) -> list[Tensor]:
    """Return the segments of each rank's experts, from its dispatch or its splits."""
    if isinstance(ranks[0], RoutedCombineArguments):
        return [rank.segments for rank in ranks]
    counts = _counts([list(rank.splits) for rank in ranks], experts)
    return [known_segments(counts, rank, experts) for rank in range(len(ranks))]


def backward_reference(ranks: Sequence[RoutedGradientArguments], size: int) -> list[list[Tensor]]:
    dispatched_of = dispatch.reference([_of_tokens(rank) for rank in ranks], size)
    return [
        _gradients(each, *dispatched[:-1])
        for each, dispatched in zip(ranks, dispatched_of, strict=True)
    ]


GRADIENT, ROUTED_GRADIENT = OpGradient(save, backward), OpGradient(save_routed, backward_routed)
COMMUNICATES = {"input, weight or bias": FACTORS}
OPS = (
    *(
        Op(
            name,
            arguments,
            start,
            results,
            gradient,
            COMMUNICATES,
            several=True,
            reference=reference,
            without=("format",),
            algorithms=fused_by(f"{OP}_kernel"),
            examples=EXAMPLES,
        )
        for name, arguments, gradient in (
            (OP, GroupedCombineArguments, GRADIENT),
            (ROUTED, RoutedCombineArguments, ROUTED_GRADIENT),
        )
    ),
    Op(
        ROUTED_BACKWARD,
        RoutedGradientArguments,
        start_routed_backward,
        routed_gradients,
        without_gradient(ROUTED_BACKWARD),
        several=True,
        reference=backward_reference,
        examples={**EXAMPLES, "grad": own_rows},
    ),
)
