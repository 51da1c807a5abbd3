"""Combine: rows of experts go back to their tokens, and are summed by slot; ``routing.py`` has the order.

``fused``      one Triton kernel (``kernels/experts/combine.py``)
``pipelined``  rows are copied directly into the workspace of their home, rank by rank; torch sums
``unfused``    rows sorted by home, an all-to-all, torch sums; many nodes

The last two take any dtype, and need counts on the host. With a bound of tokens the fused one needs none,
and uses a plan.

Gradients: for the rows, a dispatch of the tokens' gradients, times their weights; for a weight, its row
times the gradient of its token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from interlace.arguments import checks
from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Combined, ExpertSizes, Rows, SlotRows
from interlace.kernels.experts import combine as kernels
from interlace.kernels.tiling import owner_order
from interlace.ops.collectives import records as by_rank
from interlace.ops.collectives.launch import enqueue_kernel, wait_for_all
from interlace.ops.experts.dispatch import (
    as_many,
    exchanged_rows,
    row_moves,
    slot_options,
    slot_rows,
    sorted_places,
)
from interlace.ops.experts.routing import (
    EXAMPLES,
    Assignment,
    Bounds,
    HostRoutes,
    Routing,
    RoutingArguments,
    agreed,
    assign,
    assignment_of,
    check_spread,
    measured_for,
    most_dispatched,
    resolve_algorithm,
    weights_of,
)
from interlace.ops.op.op import Op, OpGradient, Started, complete, fused_by, kept, requiring, wait
from interlace.ops.op.recording import Ops
from interlace.runtime.core.call import PreparedCall
from interlace.runtime.core.communicator import Communicator, composed_form, internal_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning.configuration import Configuration
from interlace.runtime.tuning.tuning import FUSED_DTYPES

COMBINE = "combine"
BY_TORCH = ("pipelined", "unfused")
Tensor = torch.Tensor
_ops: Any = Ops()


@dataclass
class CombineArguments(RoutingArguments):
    input: Tensor
    segments: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    return_rows: bool
    num_experts: int
    capacity: int
    max_tokens: int
    packed: bool
    algorithm: str


def sum_slots(home: Tensor, inverse: Tensor, weights: Tensor | None, output: Tensor) -> None:
    """Store in ``output[t]`` the sum over slots k, in order, of ``weights[t, k] * home[inverse[t, k]]``."""
    wide = torch.float64 if output.dtype == torch.float64 else torch.float32
    total = torch.zeros(output.shape, dtype=wide, device=output.device)
    if home.shape[0]:
        for slot in range(inverse.shape[1]):
            row = inverse[:, slot]
            value = home[row.clamp(min=0)].to(wide)
            if weights is not None:
                value = value * weights[:, slot, None].to(wide)
            total += torch.where(row[:, None] < 0, 0.0, value)
    output.copy_(total)


@dataclass(frozen=True)
class Home:
    """A rank's tokens, to which rows come back: ``inverse`` ``[T, k]``, ``weights`` of slots or None.

    ``output`` ``[T, N]`` gets the sums. ``kept``, if there is one, gets the rows themselves,
    ``[T * k, N]``; only the first ones are used if there are fewer rows.
    """

    inverse: Tensor
    weights: Tensor | None
    output: Tensor
    kept: Tensor | None = None

    def combined(self) -> Combined:
        weights = self.output if self.weights is None else self.weights
        return Combined(self.inverse, weights, self.output, self.output.shape[0])

    def slots(self, configuration: Configuration, experts: int) -> SlotRows:
        weighted, topk = self.weights is not None, self.inverse.shape[1]
        itemsize = self.output.element_size()
        return slot_rows(configuration, itemsize, topk, experts, weighted=weighted)

    def sum_rows(self, communicator: Communicator, home: Tensor) -> None:
        def sums() -> None:
            sum_slots(home, self.inverse, self.weights, self.output)

        if self.kept is not None and home.numel():
            communicator.compute.copy(self.kept[: home.shape[0]], home, "rows at home")
        communicator.compute.call(sums, "sums by slot")

    def keep(self, communicator: Communicator, workspace: Workspace) -> None:
        """Copy the rows that a kernel has waited for."""
        if self.kept is not None and self.kept.numel():
            home = workspace.data(communicator.rank, 0, self.kept.shape, self.kept.dtype)
            communicator.compute.copy(self.kept, home, "rows at home")


@dataclass(frozen=True)
class Combine:
    """One call: ``rows`` ``[R, N]`` in the order of the dispatch."""

    communicator: Communicator
    rows: Tensor
    home: Home

    def fused(self, segments: Tensor, bounds: Bounds, configuration: Configuration) -> Event:
        """Run the kernel. ``segments``: the dispatch's table."""
        communicator = self.communicator
        experts, world_size, _ = segments.shape
        (_, topk), columns = self.home.inverse.shape, self.rows.shape[1]
        row_bytes = columns * self.rows.element_size()
        layout = Layout(world_size * bounds.senders, bounds.most_tokens * topk * row_bytes)
        arguments: dict[str, Any] = {
            "rows": Rows(self.rows, self.rows.stride(0)),
            "segments_ptr": segments,
            "combined": self.home.combined(),
            "sizes": ExpertSizes(
                0, bounds.most_tokens, experts, bounds.senders, bounds.expert_rows
            ),
            "N": columns,
            "SLOTS": self.home.slots(configuration, experts),
        }
        grid = formulas.persistent_grid(
            0, world_size * bounds.senders, communicator.place.program_limit
        )
        launch = kernels.combine_kernel, grid, arguments, slot_options(configuration)
        keep = partial(self.home.keep, communicator)
        return enqueue_kernel(communicator, "combine", layout, *launch, finish=keep)

    def pipelined(self, routes: HostRoutes) -> Event:
        def put(theirs: Tensor, expert: int, rows: slice, label: str) -> None:
            self.communicator.compute.copy(theirs, self.rows[rows], label)

        return pipelined_home(self.communicator, "combine", routes, self.home, put)

    def unfused(self, routes: HostRoutes) -> Event:
        order = sorted_places(routes.segments(self.communicator.rank)).to(self.rows.device)
        back = exchanged_rows(self.communicator, routes, self.rows, order, back=True)
        self.home.sum_rows(self.communicator, back)
        return self.communicator.compute.record()


def pipelined_home(
    communicator: Communicator,
    op: str,
    routes: HostRoutes,
    home: Home,
    put: Callable[[Tensor, int, slice, str], None],
) -> Event:
    """Send rows home, the next rank's first and this rank's last; then sum.

    ``put(theirs, expert, rows, label)`` copies ``rows`` of an expert to ``theirs``, on the compute stream.
    """
    rank, world_size = communicator.rank, communicator.world_size
    columns, dtype = home.output.shape[1], home.output.dtype
    row_bytes = columns * dtype.itemsize
    layout = Layout(world_size, int(routes.counts.sum(1).max()) * row_bytes)
    own_rows = int(routes.counts[rank].sum())

    def body(workspace: Workspace) -> None:
        stream = communicator.compute
        stream.wait_credits(workspace)
        segments = routes.segments(rank).tolist()
        for peer in owner_order(rank, world_size):
            for expert, line in enumerate(segments):
                first, count, to = line[peer]
                if count:
                    theirs = workspace.data(peer, to * row_bytes, (count, columns), dtype)
                    label = f"expert {expert}, rows of rank {peer}"
                    put(theirs, expert, slice(first, first + count), label)
            if peer != rank:
                stream.publish(workspace, peer, rank)
        wait_for_all(communicator, workspace, 0)
        home.sum_rows(communicator, workspace.data(rank, 0, (own_rows, columns), dtype))

    return communicator.enqueue(op, layout, body)


def _prepare(
    communicator: Communicator, record: CombineArguments, outputs: list[Tensor] | None
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    """Check the arguments on this rank; return the function that runs the op, its tensors and options."""
    routing = record.routing
    rows = checks.tensor("y", record.input, communicator)
    checks.float_dtype("y", rows.dtype)
    if rows.dim() != 2:
        raise ValueError(f"y must have 2 dimensions (rows, n), got {tuple(rows.shape)}")
    checks.one_of("algorithm", routing.algorithm, checks.ALGORITHMS)
    algorithm = resolve_algorithm(communicator, routing.algorithm)
    checks.fused_dtype(routing.algorithm, "y", rows.dtype, 'another one or "auto"')
    if not rows.shape[1] or (algorithm == "fused" and rows.dtype not in FUSED_DTYPES):
        algorithm = "unfused"
    assignment = assignment_of(communicator, routing, record.topk_idx, None)
    weights = weights_of(communicator, record.topk_weights, assignment.topk_idx)
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    segments = checked_segments(communicator, record.segments, routing, "y", rows)
    tokens, most = len(assignment.topk_idx), most_dispatched(communicator)
    if not routing.max_tokens and most and tokens > most:
        raise ValueError(f"topk_idx has {tokens} rows, no dispatch has had more than {most}")
    if algorithm == "fused":
        tensors = rows, segments, assignment.inverse, weights, outputs
        return (_planned if routing.max_tokens else _unplanned), tensors, (routing,)
    return _counted, (rows, weights, outputs), (assignment, algorithm, routing)


def checked_segments(
    communicator: Communicator, segments: Tensor, routing: Routing, name: str, rows: Tensor
) -> Tensor:
    """Return a handle's segments, if the argument ``name`` with these ``rows`` fits its dispatch."""
    segments = checks.tensor("handle.segments", segments, communicator)
    expected = routing.num_experts // communicator.world_size, communicator.world_size, 3
    if tuple(segments.shape) != expected:
        raise ValueError(
            f"the handle is of a group with segments {tuple(segments.shape)}, not {expected}"
        )
    if communicator.place.interpreted and segments.numel():
        last = int((segments[..., 0] + segments[..., 1]).max())
        if rows.shape[0] < last:
            raise ValueError(
                f"{name} has {rows.shape[0]} rows, the dispatch has made {last} of them"
            )
    return segments.contiguous()  # kernels read it as a table


def _on_device(
    communicator: Communicator,
    rows: Tensor,
    segments: Tensor,
    inverse: Tensor,
    weights: Tensor | None,
    outputs: list[Tensor] | None,
    routing: Routing,
) -> PreparedCall:
    def start() -> Outcome:
        terms = (("dtype of y", rows.dtype), ("n of y", rows.shape[1]))
        most, _ = agreed(communicator, COMBINE, routing, inverse.shape, terms)
        home = home_of(rows, inverse, weights, outputs)
        event = None
        if most:
            name_algorithm("fused")
            slots = most * inverse.shape[1]
            moves = row_moves(communicator, COMBINE, rows, most, slots, routing)
            event = Combine(communicator, rows, home).fused(segments, *moves)
        return Outcome(None if outputs else home.output, event)

    return start, (), None


def _with_counts(
    communicator: Communicator,
    rows: Tensor,
    weights: Tensor | None,
    outputs: list[Tensor] | None,
    assignment: Assignment,
    algorithm: str,
    routing: Routing,
) -> PreparedCall:
    """Run with torch; the host knows all ranks' counts."""

    def start() -> Outcome:
        terms = (("dtype of y", rows.dtype), ("n of y", rows.shape[1]))
        shape = assignment.topk_idx.shape
        most, counts = agreed(communicator, COMBINE, routing, shape, terms, assignment.counts)
        assert counts is not None
        way = algorithm if most else "unfused"
        if routing.algorithm == "auto" and communicator.place.nodes is None:
            problem = rows.dtype, int(counts.sum(1).max()), rows.shape[1]
            named = measured_for(communicator, COMBINE, *problem).algorithm
            way = named if named in BY_TORCH else way
        name_algorithm(way)
        routes = HostRoutes(assignment, counts, routing.expert_rows(communicator.world_size))
        home = home_of(rows, assignment.inverse, weights, outputs)
        op = Combine(communicator, rows, home)
        event = (op.pipelined if way == "pipelined" else op.unfused)(routes)
        return Outcome(None if outputs else home.output, event)

    return start, (), None


_planned = internal_form(COMBINE, _on_device, fills=False)
_unplanned = internal_form(COMBINE, _on_device)  # for rows of the exact length
_counted = internal_form(COMBINE, _with_counts)
combine_rows = composed_form(COMBINE, _prepare)
"""Maps ``(arguments, outputs)`` to the results."""


def home_of(
    rows: Tensor, inverse: Tensor, weights: Tensor | None, outputs: list[Tensor] | None
) -> Home:
    tensors = outputs or results_of(rows, inverse, False)
    return Home(inverse, weights, tensors[0], tensors[1] if tensors[1:] else None)


def results_of(rows: Tensor, topk_idx: Tensor, return_rows: bool) -> list[Tensor]:
    """Allocate the results of a combine: sums and, if requested, the home rows, ``[tokens * k, n]``."""
    results = [rows.new_empty(topk_idx.shape[0], rows.shape[1])]
    if return_rows:
        results.append(rows.new_empty(topk_idx.numel(), rows.shape[1]))
    return results


def results(record: CombineArguments, size: int) -> list[Tensor]:
    return results_of(record.input, record.topk_idx, record.return_rows)


def start(communicator: Communicator, record: CombineArguments) -> Started:
    with communicator.accepting(COMBINE):
        if record.input.dim() != 2:
            raise ValueError(f"y must have 2 dimensions, got shape {tuple(record.input.shape)}")
        outputs = results(record, communicator.world_size)
    return Started(outputs, combine_rows(communicator, (record, outputs), async_op=True))


def save(ctx: Any, record: CombineArguments, output: Sequence[Tensor]) -> None:
    ctx.needed, ctx.routing, ctx.rows = requiring(record), record.routing, record.input.shape[0]
    home = home_rows(COMBINE, ctx.needed, record.return_rows, output)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(record.topk_idx, record.topk_weights, home)


def home_rows(
    op: str, needed: set[str], return_rows: bool, output: Sequence[Tensor]
) -> Tensor | None:
    """Return the home rows of an op, to be saved, if gradients of ``topk_weights`` are needed."""
    if "topk_weights" not in needed:
        return None
    if not return_rows:
        raise RuntimeError(f"{op}: gradients of topk_weights need return_rows")
    return kept(output[1])


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> Mapping[str, Tensor]:
    idx, weights, home = ctx.saved_tensors
    found: dict[str, Tensor] = {}
    grad = of_sums(COMBINE, grads)
    if grad is None:
        return found
    if "input" in ctx.needed:
        results = _ops.dispatch(grad, None, idx, weights, *ctx.routing, ctx.size, ctx.name)
        rows = wait(results[0])
        if weights is not None:
            rows = (rows * wait(results[1]).unsqueeze(1)).to(grad.dtype)
        found["input"] = as_many(rows, ctx.rows)
    if home is not None:
        inverse = ctx.routing.inverse(idx)
        found["topk_weights"] = of_slot_weights(weights, home, inverse, grad)
    return found


def of_sums(op: str, grads: Sequence[Tensor | None]) -> Tensor | None:
    """Return the gradient of an op's sums; raise for a gradient of home rows, which is not supported."""
    if any(grad is not None for grad in grads[1:]):
        raise RuntimeError(
            f"interlace's {op} has no gradients of the rows that it brings home, and so no second ones of "
            "topk_weights"
        )
    return grads[0]


def of_slot_weights(weights: Tensor, home: Tensor, inverse: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of each slot's weight: its home row times its token's gradient, at least fp32."""
    wide = torch.promote_types(weights.dtype, torch.float32)
    rows = complete(home)[inverse.clamp(min=0)].to(wide)
    product = torch.einsum("tkn,tn->tk", rows, grad.to(wide))
    return torch.where(inverse < 0, 0.0, product).to(weights.dtype)


def returned(
    op: str,
    ranks: Sequence[Any],
    routing: Routing,
    rows: Sequence[Tensor],
    segments: Sequence[Tensor],
) -> list[list[Tensor]]:
    """Return all ranks' combined ``rows``, which lie on the experts' ranks as ``segments`` say."""
    results = []
    for rank, record in enumerate(ranks):
        inverse = assign(routing, record.topk_idx, None, len(ranks), read=True).inverse
        home = torch.cat(
            [
                theirs[first : first + count]
                for theirs, table in zip(rows, segments, strict=True)
                for first, count, _ in table[:, rank].tolist()
            ]
        )
        if len(home) != int((inverse >= 0).sum()):
            raise ValueError(
                f"{op}: the experts have {len(home)} rows of rank {rank}, topk_idx has "
                f"{int((inverse >= 0).sum())} there"
            )
        outputs = results_of(rows[rank], record.topk_idx, record.return_rows)
        sum_slots(home, inverse, record.topk_weights, outputs[0])
        for output in outputs[1:]:
            output.copy_(as_many(home, len(output)))
        results.append(outputs)
    return results


def reference(ranks: Sequence[CombineArguments], size: int) -> list[list[Tensor]]:
    rows, routing = by_rank.inputs(ranks), ranks[0].routing
    by_rank.alike(COMBINE, "y", rows, but=0)
    check_spread(routing, size)
    return returned(COMBINE, ranks, routing, rows, [rank.segments for rank in ranks])


GRADIENT = OpGradient(save, backward)
COMMUNICATES = {"y": ("input",)}
OPS = (
    Op(
        COMBINE,
        CombineArguments,
        start,
        results,
        GRADIENT,
        COMMUNICATES,
        several=True,
        reference=reference,
        algorithms=fused_by("combine_kernel"),
        examples=EXAMPLES,
    ),
)
