"""Dispatch: rows of tokens to their experts; ``routing.py`` says in which order.

``fused``      two Triton kernels, which need no count on the host (``kernels/experts/dispatch.py``)
``pipelined``  torch gathers the rows for one rank after another, directly into its workspace; the receiver
               sorts them by expert, source by source, as they arrive
``unfused``    an all-to-all of rows, then a sort by expert; many nodes

The last two move a row per slot, and need counts on the host. All take any dtype. With a bound of tokens
torch computes the fused algorithm's routes on the device, the rest may use a plan, and the result has room
for the worst case. Without it (0) the result has the exact length, which a graph learns when it runs. The
gradient of the rows is a combine of the rows' gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from interlace.arguments import checks
from interlace.kernels.arguments import ExpertRows, ExpertSizes, SlotRows, TokenRegions, TokenRows
from interlace.kernels.experts import dispatch as kernels
from interlace.kernels.tiling import owner_order
from interlace.ops.collectives import records as by_rank
from interlace.ops.collectives.launch import agreed_call, enqueue_kernel, sources
from interlace.ops.experts.routing import (
    EXAMPLES,
    Assignment,
    Bounds,
    DispatchHandle,
    HostRoutes,
    Received,
    Routing,
    RoutingArguments,
    SentTokens,
    agreed,
    assign,
    assignment_of,
    check_spread,
    known_segments,
    measured_for,
    next_power,
    resolve_algorithm,
    routing_of,
    senders_of,
    weights_of,
)
from interlace.ops.matmul.block_scaled import is_traced, packed_tokens
from interlace.ops.matmul.formats import Scaled, format_term, unpacked_rows
from interlace.ops.op.op import Op, OpGradient, Started, fused_by, own_rows, wait
from interlace.ops.op.recording import Ops
from interlace.runtime.core.call import PreparedCall, Terms
from interlace.runtime.core.communicator import Communicator, composed_form, internal_form
from interlace.runtime.core.context import comparing, name_algorithm
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning.configuration import Configuration, choose
from interlace.runtime.tuning.table import FEW_ROWS

DISPATCH = "dispatch"
Tensor = torch.Tensor
MAX_REGISTERS = 192
WORDS = (torch.int32, torch.int16, torch.int8)
MOVED_DTYPES = (*checks.FLOAT_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
_ops: Any = Ops()
_check: Any = torch._check


@dataclass
class DispatchArguments(RoutingArguments):
    input: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    num_experts: int
    capacity: int
    max_tokens: int
    packed: bool
    algorithm: str


def words_of(tensor: Tensor) -> Tensor:
    """Return a contiguous matrix as integers, as wide as its rows and its address allow."""
    row_bytes = tensor.shape[1] * tensor.element_size()
    if not tensor.shape[0]:  # then any strides count as contiguous, and no view accepts them
        tensor = tensor.new_empty(0, tensor.shape[1])
    for dtype in WORDS:
        if row_bytes % dtype.itemsize == 0 and tensor.data_ptr() % dtype.itemsize == 0:
            return tensor.view(dtype)
    raise AssertionError("bytes fit everything")


def slot_rows(
    configuration: Configuration,
    itemsize: int,
    topk: int,
    experts: int,
    *,
    scaled: bool = False,
    weighted: bool,
) -> SlotRows:
    """Return constants: ``copy_rows`` rows of ``copy_columns`` 4-byte words at a time.

    ``itemsize``: of an element. A sum takes fewer rows, as it loads the rows of up to four slots at once.
    """
    rows, columns = configuration.copy_rows, configuration.copy_columns * 4 // itemsize
    of_sum = max(1, rows // min(4, 1 << (topk.bit_length() - 1)))
    return SlotRows(topk, next_power(experts), rows, columns, of_sum, scaled, weighted)


def slot_options(configuration: Configuration) -> dict[str, Any]:
    # by default ptxas uses fewer registers, for occupancy, and spills where k is 2
    compiler_options = {"options": {"maxnreg": MAX_REGISTERS}}
    return {"num_warps": configuration.num_warps, "num_stages": 1, **compiler_options}


def row_moves(
    communicator: Communicator, op: str, rows: Tensor, most: int, slots: int, routing: Routing
) -> tuple[Bounds, Configuration]:
    bounds = Bounds(
        most, senders_of(communicator, op), routing.expert_rows(communicator.world_size)
    )
    columns = rows.shape[1]
    words = max(1, columns * rows.element_size() // 4)  # for any number of rows
    chosen = choose(communicator.place, torch.bfloat16, FEW_ROWS + 1, words, words)
    tuned = measured_for(communicator, op, rows.dtype, slots, columns, "fused")
    return bounds, tuned.over(chosen)


@dataclass(frozen=True)
class Dispatch:
    """One call. ``x`` and ``scales`` are contiguous matrices."""

    communicator: Communicator
    x: Tensor
    scales: Tensor | None
    result: Received

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
            4,  # narrower words occur for odd rows only, whose elements are moved one by one
            facts.shape[1] // 3,
            experts,
            scaled=self.scales is not None,
            weighted=result.topk_weights is not None,
        )
        filled = ExpertRows(
            _as_words(result.x, x),
            scales if result.scales is None else _as_words(result.scales, scales),
            facts if result.topk_weights is None else result.topk_weights.view(torch.int32),
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
        record = {"tokens_ptr": sent.tokens, "counts_ptr": sent.lines, **shared}
        taken = {"result": filled, **shared}
        grid = min(communicator.place.program_limit, world_size * bounds.senders)
        options = slot_options(configuration)
        send = kernels.dispatch_send_kernel, grid, record, options
        receive = kernels.dispatch_receive_kernel, grid, taken, options
        return enqueue_kernel(communicator, "dispatch", layout, *send, [receive])

    def _parts(self, routes: HostRoutes, weights: Tensor | None) -> list[tuple[Tensor, ...]]:
        """Return, for each matrix that travels: the matrix, the rows to send in order, and the result."""
        assignment = routes.assignment
        slots = assignment.slots(int(routes.counts[self.communicator.rank].sum()))
        tokens = slots // assignment.topk_idx.shape[1]
        parts = (
            (self.x, tokens, self.result.x),
            (self.scales, tokens, self.result.scales),
            (_column(weights), slots, _column(self.result.topk_weights)),
        )
        return [
            (bytes_of_rows(record), index, bytes_of_rows(to))
            for record, index, to in parts
            if record is not None and to is not None and record.shape[1]
        ]

    def pipelined(self, routes: HostRoutes, weights: Tensor | None) -> Event:
        """Push rows rank by rank, as one chunk per rank, and sort them source by source."""
        communicator, rank = self.communicator, self.communicator.rank
        segments = routes.segments(rank)
        self.result.segments.copy_(segments)
        parts, lines = self._parts(routes, weights), segments.tolist()
        sizes = routes.sizes()
        begins, firsts = sizes.cumsum(0) - sizes, sizes.cumsum(1) - sizes
        layout, most = Layout(communicator.world_size), int(sizes.sum(0).max())
        offsets = [layout.add_data(most * given.shape[1]) for given, *_ in parts]

        def rows_at(workspace: Workspace, peer: int, source: int, part: int) -> Tensor:
            width = parts[part][0].shape[1]
            begin = offsets[part] + int(begins[source, peer]) * width
            return workspace.data(peer, begin, (int(sizes[source, peer]), width), torch.uint8)

        def body(workspace: Workspace) -> None:
            copying, compute = communicator.copying, communicator.compute
            copying.wait_credits(workspace)
            for peer in owner_order(rank, communicator.world_size):
                rows = slice(int(firsts[rank, peer]), int(firsts[rank, peer] + sizes[rank, peer]))
                for number, (record, index, _) in enumerate(parts):
                    if rows.start < rows.stop:
                        to = rows_at(workspace, peer, rank, number)
                        gather = partial(torch.index_select, record, 0, index[rows], out=to)
                        copying.call(gather, f"rows to rank {peer}")
                if peer != rank:
                    copying.publish(workspace, peer, rank)
            for source in [*sources(communicator)[1:], rank]:
                if source == rank:
                    compute.wait_event(copying.record())
                else:
                    compute.wait(workspace, source, source)
                for number, (_, _, to) in enumerate(parts):
                    arrived, begin = rows_at(workspace, rank, source, number), 0
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
        order = sorted_places(segments).to(self.x.device)
        for record, index, to in self._parts(routes, weights):
            arrived = exchanged_rows(self.communicator, routes, record, index)
            if arrived.numel():
                scatter = partial(to.index_copy_, 0, order, arrived)
                compute.call(scatter, "rows by expert")
        return compute.record()


def _column(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.view(-1, 1)


def bytes_of_rows(matrix: Tensor) -> Tensor:
    """View as bytes: fp8 cannot be indexed. Without rows any strides are contiguous; no view takes them."""
    if not matrix.shape[0]:
        return matrix.new_empty(0, matrix.shape[1] * matrix.element_size(), dtype=torch.uint8)
    return matrix.view(torch.uint8)


def _as_words(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1]).view(like.dtype)


def sorted_places(segments: Tensor) -> Tensor:
    """Return the result's row of each row in the order (source, expert, row) of an all-to-all."""
    parts = [
        torch.arange(first, first + count)
        for line in segments.transpose(0, 1).tolist()
        for first, count, _ in line
    ]
    return torch.cat(parts)


def exchanged_rows(
    communicator: Communicator,
    routes: HostRoutes,
    tensor: Tensor,
    index: Tensor,
    *,
    back: bool = False,
) -> Tensor:
    """Send home rows ``tensor[index]`` to their experts, where they arrive by source, then expert.

    ``back``: the inverse; ``index`` lists the experts' rows in that order.
    """
    sizes, rank, way = routes.sizes(), communicator.rank, "back" if back else "to experts"
    sent, received = sizes[rank].tolist(), sizes[:, rank].tolist()
    if back:
        sent, received = received, sent
    compute, rows = communicator.compute, tensor.new_empty(sum(sent), tensor.shape[1])
    # No op of the streams precedes this, so the streams must wait for the tensors to read.
    compute.wait_event(communicator.place.record_current())
    if rows.numel():
        gather = partial(torch.index_select, tensor.contiguous(), 0, index, out=rows)
        compute.call(gather, f"rows {way}")
    if communicator.world_size == 1:
        return rows
    made = rows.new_empty(sum(received), rows.shape[1])
    counts = tuple(map(tuple, routes.counts.tolist()))
    key = f"rows {way}", counts, rows.shape[1], rows.dtype
    call = agreed_call(communicator, "all_to_all", key)
    outputs = [part.view(-1) for part in torch.split(made, received)]
    inputs = [part.view(-1) for part in torch.split(rows, sent)]
    # The rows may still travel on the compute stream, and between nodes another stream sends.
    communicator.copying.wait_event(compute.record())
    event = communicator.engine.all_to_all(call, outputs, inputs)
    if event is not None:
        compute.wait_event(event)
    return made


def _prepare(
    communicator: Communicator, record: DispatchArguments, outputs: list[Tensor] | None
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    """Check the arguments on this rank; return the function that runs the op, its tensors and options."""
    scales, routing = record.scales, record.routing
    x = checks.tensor("x", record.input, communicator)
    if x.dtype not in MOVED_DTYPES:
        raise TypeError(f"x must be of floats or fp8, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"x must have 2 dimensions (tokens, hidden), got {tuple(x.shape)}")
    if scales is not None:
        scales = checks.tensor("the scales of x", scales, communicator)
        if scales.dim() != 2 or scales.shape[0] != x.shape[0]:
            raise ValueError(
                f"the scales of x must have 2 dimensions and {x.shape[0]} rows, got "
                f"{tuple(scales.shape)}"
            )
        scales = scales.contiguous()
    checks.one_of("algorithm", routing.algorithm, checks.ALGORITHMS)
    assignment = assignment_of(communicator, routing, record.topk_idx, x.shape[0])
    weights = weights_of(communicator, record.topk_weights, assignment.topk_idx)
    algorithm = resolve_algorithm(communicator, routing.algorithm)
    if not x.shape[1]:
        algorithm = "unfused"
    idx, x = assignment.topk_idx, x.contiguous()
    record = replace(record, input=x, scales=scales, topk_idx=idx, topk_weights=weights)
    if algorithm == "fused" and routing.max_tokens:
        tensors = results(record, communicator.world_size) if outputs is None else outputs
        about = weights is not None, outputs is not None, routing
        return _planned, (x, scales, *assignment.sent(weights), tensors), about
    return _counted, (record, outputs), (assignment, algorithm)


def _terms(x: Tensor, scales: Tensor | None, weighted: bool) -> Terms:
    length = "the number of bytes in a row of x" if x.dtype == torch.uint8 else "hidden of x"
    return (
        ("dtype of x", x.dtype),
        (length, x.shape[1]),
        ("scales of x", None if scales is None else (scales.shape[1], scales.dtype)),
        ("whether there are topk_weights", weighted),
    )


def _on_device(
    communicator: Communicator,
    x: Tensor,
    scales: Tensor | None,
    facts: Tensor,
    tokens: Tensor,
    lines: Tensor,
    tensors: list[Tensor],
    weighted: bool,
    record: bool,
    routing: Routing,
) -> PreparedCall:
    """Run the kernels; counts stay on the device. ``record``: the caller allocated ``tensors``."""

    def start() -> Outcome:
        shape, terms = (x.shape[0], facts.shape[1] // 3), _terms(x, scales, weighted)
        most, _ = agreed(communicator, DISPATCH, routing, shape, terms)
        name_algorithm("fused")
        op = Dispatch(communicator, x, scales, received_of(tensors, scales is not None, weighted))
        moves = row_moves(communicator, DISPATCH, x, most, most * shape[1], routing)
        event = op.fused(SentTokens(facts, tokens, lines), *moves)
        return Outcome(None if record else tensors, event)

    return start, (), None


def _with_counts(
    communicator: Communicator,
    record: DispatchArguments,
    outputs: list[Tensor] | None,
    assignment: Assignment,
    algorithm: str,
) -> PreparedCall:
    """Run with all ranks' counts on the host: for results of the exact length, or with torch."""
    x, scales, weights, routing = record.input, record.scales, record.topk_weights, record.routing

    def start() -> Outcome:
        terms, shape = _terms(x, scales, weights is not None), assignment.topk_idx.shape
        most, counts = agreed(communicator, DISPATCH, routing, shape, terms, assignment.counts)
        assert counts is not None
        routes = HostRoutes(assignment, counts, routing.expert_rows(communicator.world_size))
        tensors = outputs
        if tensors is None:
            rows = int(routes.sizes()[:, communicator.rank].sum())
            tensors = results(record, communicator.world_size, rows)
        result = received_of(tensors, scales is not None, weights is not None)
        op, way = Dispatch(communicator, x, scales, result), algorithm if most else "unfused"
        rows = int(counts.sum(1).max())
        if routing.algorithm == "auto" and communicator.place.nodes is None and x.shape[1]:
            way = measured_for(communicator, DISPATCH, x.dtype, rows, x.shape[1]).algorithm or way
        name_algorithm(way)
        if way == "fused":
            moves = row_moves(communicator, DISPATCH, x, most, rows, routing)
            event = op.fused(assignment.sent(weights), *moves)
        else:
            event = (op.pipelined if way == "pipelined" else op.unfused)(routes, weights)
        return Outcome(tensors if outputs is None else None, event)

    return start, (), None


_planned = internal_form(DISPATCH, _on_device, fills=False)
_counted = internal_form(DISPATCH, _with_counts)
dispatch_rows = composed_form(DISPATCH, _prepare)
"""Maps ``(arguments, outputs)`` to the list of :func:`results`."""


def received_of(tensors: Sequence[Tensor], scaled: bool, weighted: bool) -> Received:
    """Return the list of :func:`results`, by name."""
    rows, *rest, segments = tensors
    scales = rest.pop(0) if scaled else None
    return Received(rows, scales, rest[0] if weighted else None, segments)


# -- outputs and gradients -------------------------------------------------------------------------


def arguments_of(
    x: Any, topk_idx: Any, topk_weights: Any, num_experts: Any, **how: Any
) -> tuple[DispatchArguments, AbstractContextManager[None]]:
    """Return the record of a call, and a context for the call; ``how``: see :func:`routing_of`."""
    terms: AbstractContextManager[None] = nullcontext()
    if isinstance(x, Scaled):
        x, terms = packed_tokens(x)
    elif not is_traced():
        terms = comparing(format_term(""))
    data, scales = values_and_scales(x)
    routing = routing_of(num_experts, **how)
    return DispatchArguments(data, scales, topk_idx, topk_weights, *routing), terms


def name_results(
    tensors: Sequence[Tensor], record: DispatchArguments, group: Any, x: Any
) -> tuple[Received, DispatchHandle]:
    """Return the list of :func:`results` by name, low-latency rows by expert; and the handle.

    ``x``: the caller's. If it is block-scaled, so are the rows.
    """
    received = received_of(tensors, record.scales is not None, record.topk_weights is not None)
    if record.packed:
        experts = received.segments.shape[0]
        scales = None if received.scales is None else _by_expert(received.scales, experts)
        received = received._replace(x=_by_expert(received.x, experts), scales=scales)
    if isinstance(x, Scaled):
        rows: Any = unpacked_rows(received.x, x.kind, x.shape[-1])
        received = received._replace(x=rows)
    about = received.segments, record.topk_idx, record.topk_weights, record.routing
    return received, DispatchHandle(*about, group)


def _by_expert(rows: Tensor, experts: int) -> Tensor:
    return rows.view(experts, rows.shape[0] // experts, rows.shape[1])


def values_and_scales(x: Any) -> tuple[Any, Any]:
    """Return values and scales from a dispatch's argument: a tensor, or a pair."""
    if not isinstance(x, (tuple, list)):
        return x, None
    if len(x) != 2:
        raise ValueError(f"x must be a tensor or a pair (values, scales), got {len(x)} of them")
    return x[0], x[1]


def results(record: DispatchArguments, size: int, rows: Any = None) -> list[Tensor]:
    """Allocate the results of a dispatch; zeros with a bound, as not all rows are written then.

    ``rows``: their number, without a bound; None for tracers, in whose graphs it has no value.
    """
    x, scales, idx, routing = record.input, record.scales, record.topk_idx, record.routing
    if x.dim() != 2 or idx.dim() != 2:
        raise ValueError(
            f"x and topk_idx must have 2 dimensions, got shapes {tuple(x.shape)} and {tuple(idx.shape)}"
        )
    if routing.max_tokens:
        rows = routing.bound(idx.shape[1], size)
    elif rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()
    tensors = [x.new_empty(rows, x.shape[1])]
    if scales is not None:
        tensors.append(scales.new_empty(rows, scales.shape[1]))
    if record.topk_weights is not None:
        tensors.append(record.topk_weights.new_empty(rows, dtype=torch.float32))
    if routing.max_tokens:
        for tensor in tensors:
            (tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)).zero_()
    segments = routing.num_experts // size, size, 3
    return [*tensors, idx.new_empty(segments, dtype=torch.int64)]


def start(communicator: Communicator, record: DispatchArguments) -> Started:
    if not record.max_tokens:
        return Started(dispatch_rows(communicator, (record, None)), None)
    with communicator.accepting(DISPATCH):
        tensors = results(record, communicator.world_size)
    return Started(tensors, dispatch_rows(communicator, (record, tensors), async_op=True))


def save(ctx: Any, record: DispatchArguments, output: Sequence[Tensor]) -> None:
    ctx.routing, ctx.weighted = record.routing, record.topk_weights is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1], record.topk_idx)


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> Mapping[str, Tensor]:
    segments, idx = ctx.saved_tensors
    segments = wait(segments)
    of_rows, of_weights = grads[0], grads[-2] if ctx.weighted else None

    def combine(rows: Tensor, return_rows: bool) -> list[Tensor]:
        about = segments, idx, None, return_rows, *ctx.routing, ctx.size, ctx.name
        return list(_ops.combine(rows, *about))

    found = {}
    if of_rows is not None:
        found["input"] = wait(combine(of_rows, False)[0])
    if of_weights is not None:
        home = wait(combine(of_weights.view(-1, 1), True)[1]).view(-1)
        inverse = ctx.routing.inverse(idx)
        found["topk_weights"] = torch.where(inverse < 0, 0.0, home[inverse.clamp(min=0)])
    return found


def as_many(rows: Tensor, count: Any) -> Tensor:
    """Return ``count`` rows of a dispatch: its first ones, padded with zeros."""
    count_of_rows: Any = rows.shape[0]
    if isinstance(count_of_rows, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # brings sympy

        if free_unbacked_symbols(count_of_rows):
            _check(count_of_rows == count)  # in a graph the rows of a dispatch are never padded
            return rows
    return rows if count_of_rows == count else F.pad(rows, (0, 0, 0, count - count_of_rows))


def _by_expert_of_all(record: DispatchArguments, assignment: Assignment) -> list[Tensor]:
    """Return all tensors of the rows that a rank sends, in the order of :func:`results`, by expert."""
    slots = assignment.slots(int(assignment.counts.sum()))
    tokens = slots // record.topk_idx.shape[1]
    matrices = [each.contiguous() for each in (record.input, record.scales) if each is not None]
    found = [bytes_of_rows(matrix)[tokens].view(matrix.dtype) for matrix in matrices]
    if record.topk_weights is not None:
        found.append(record.topk_weights.reshape(-1)[slots])
    return found


def reference(ranks: Sequence[DispatchArguments], size: int) -> list[list[Tensor]]:
    routing = ranks[0].routing
    by_rank.alike(DISPATCH, "x", by_rank.inputs(ranks), but=0)
    check_spread(routing, size)
    chosen = [
        assign(routing, each.topk_idx, each.input.shape[0], size, read=True) for each in ranks
    ]
    counts = torch.stack([each.counts for each in chosen])
    sent, results_of = list(map(_by_expert_of_all, ranks, chosen)), []
    for rank, (record, assignment) in enumerate(zip(ranks, chosen, strict=True)):
        rows = routing.expert_rows(size)
        segments = known_segments(counts, rank, assignment.per_rank, rows)
        outputs = results(record, size, int(segments[..., 1].sum()))
        outputs[-1].copy_(segments)
        for line in segments.tolist():
            for theirs, (first, count, home) in zip(sent, line, strict=True):
                for to, each in zip(outputs, theirs, strict=False):
                    to[first : first + count].copy_(each[home : home + count])
        results_of.append(outputs)
    return results_of


GRADIENT = OpGradient(save, backward)
COMMUNICATES = {"x or topk_weights": ("input", "topk_weights")}
OPS = (
    Op(
        DISPATCH,
        DispatchArguments,
        start,
        results,
        GRADIENT,
        COMMUNICATES,
        several=True,
        reference=reference,
        algorithms=fused_by("dispatch_send_kernel", "dispatch_receive_kernel"),
        examples={**EXAMPLES, "input": own_rows},
    ),
)
