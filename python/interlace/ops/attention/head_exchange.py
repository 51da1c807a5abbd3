"""The fused ops around an attention over heads: matmul + all-to-all, and all-to-all + matmul.

Algorithms work on 2-D matrices: ``input`` has contiguous columns, weights are ``[K, N]`` with any strides
and the same on all ranks, results are contiguous. ``rows`` lists the rows of every rank. Rank r has the
r-th of W equal parts of the columns of a product, or of the weight's rows. ``received``: ``[W, own rows,
own K]``, the rows that came to this rank, if they are requested.

Each op is the gradient of the other, with the transposed weight. The rows received in that, or in the
forward, give the weight's gradient, by a torch matmul.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from interlace.arguments import checks
from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import OwnRows, Table
from interlace.kernels.attention import head_exchange as kernels
from interlace.kernels.tiling import owner_order
from interlace.ops.collectives import records as by_rank
from interlace.ops.collectives.launch import (
    agreed_call,
    enqueue_kernel,
    other_ranks,
    resident_programs,
    sources,
    wait_for_all,
)
from interlace.ops.matmul import operands
from interlace.ops.matmul.operands import Linear, checked_bias, rows_of
from interlace.ops.matmul.reduce import check_factors
from interlace.ops.op import shapes
from interlace.ops.op.op import Op, OpGradient, Started, fused_by, own_rows, wait
from interlace.ops.op.recording import Ops
from interlace.runtime.core.call import PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.configuration import Configuration
from interlace.runtime.tuning.tuning import choose_algorithm

Tensor = torch.Tensor
TO_HEADS, FROM_HEADS = "matmul_all_to_all", "all_to_all_matmul"
_ops: Any = Ops()


@dataclass
class ToHeadsArguments:
    """Arguments of matmul + all-to-all. ``length``: the result's dimension 0; None: equal parts."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    length: torch.SymInt | None
    algorithm: str
    op: ClassVar = TO_HEADS
    out_dtype: ClassVar = None  # for checks shared with other ops


@dataclass
class FromHeadsArguments:
    """Arguments of all-to-all + matmul. ``length``: the result's dimension 0; None: equal parts."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    length: torch.SymInt | None
    return_received: bool
    algorithm: str
    op: ClassVar = FROM_HEADS
    out_dtype: ClassVar = None


HeadArguments = ToHeadsArguments | FromHeadsArguments


def check(communicator: Communicator, record: HeadArguments) -> HeadArguments:
    """Return the arguments if they fit together on this rank."""
    size, length = communicator.world_size, record.length
    input = checks.tensor("input", record.input, communicator)
    algorithm, _ = checks.algorithm_and_dtype(input, record)
    if input.dim() < 2:
        raise ValueError(f"input must have at least 2 dimensions, got shape {tuple(input.shape)}")
    rows, inner = input.shape[0], input.shape[-1]
    to_heads = record.op == TO_HEADS
    weight = checks.matrix(
        "weight", record.weight, input, inner if to_heads else None, communicator
    )
    bias = checks.bias_of("bias", record.bias, (weight.shape[1],), input, communicator)
    if to_heads:
        if weight.shape[1] % size:
            raise ValueError(
                f"weight has {weight.shape[1]} columns, which world size {size} does not divide"
            )
    elif weight.shape[0] != inner * size:
        raise ValueError(
            f"weight has {weight.shape[0]} rows, {size} ranks with k = {inner} (input has shape "
            f"{tuple(input.shape)}) make {inner * size}"
        )
    elif length is None and rows % size:
        raise ValueError(
            f"input has length {rows}, which world size {size} does not divide; give length"
        )
    return replace(record, input=input, weight=weight, bias=bias, algorithm=algorithm)


def prepare(
    communicator: Communicator,
    record: HeadArguments,
    output: Tensor,
    received: Tensor | None = None,
) -> PreparedCall:
    """Prepare either op. ``output``, and ``received`` if there is one, get the results."""
    call = check(communicator, record)

    def start() -> Outcome:
        op = record.op
        terms = (
            ("dtype of input", call.input.dtype),
            ("the shape of input off dimension 0", tuple(call.input.shape[1:])),
            ("the shape of weight", tuple(call.weight.shape)),
            ("bias", call.bias is not None),
            ("algorithm", call.algorithm),
        )
        own, whole = call.input.shape[0], output.shape[0]
        if op == FROM_HEADS:
            own, whole = whole, own
        parts = communicator.parts(communicator.call_of(op, terms, (own, whole)))
        lengths = _lengths(op, parts)
        return Outcome(None, _launch(communicator, op, call, lengths, output, received))

    return start, (), None


def _lengths(op: str, parts: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ranks' parts of dimension 0; each rank says its part, and the whole it expects."""
    lengths = [length for length, _ in parts]
    for rank, (_, total) in enumerate(parts):
        if total != sum(lengths):
            name = "length" if op == TO_HEADS else "input"
            raise ValueError(
                f"{op}: {name} is for {total} on rank {rank}, the ranks have {sum(lengths)} "
                f"({lengths} by rank)"
            )
    return lengths


def _launch(
    communicator: Communicator,
    op: str,
    call: HeadArguments,
    lengths: list[int],
    output: Tensor,
    received: Tensor | None,
) -> Event | None:
    """Choose the algorithm, from facts that ranks share, and start it."""
    place, input = communicator.place, rows_of(call.input, 0)
    each, inner = math.prod(call.input.shape[1:-1]), call.input.shape[-1]
    rows, columns = [length * each for length in lengths], output.shape[-1]
    linear = Linear(call.weight, call.bias, output.view(output.shape[0] * each, columns))
    if received is not None:
        received = received.view(communicator.world_size, rows[communicator.rank], inner)
    algorithm, empty = call.algorithm, not sum(rows) * inner * columns
    all_inner, all_columns = call.weight.shape
    extent = max(rows), all_columns, all_inner, communicator.world_size
    problem = tuning.Problem(op, input.dtype, *extent)
    if empty or (algorithm == "auto" and place.nodes is not None):
        algorithm = "unfused"
    elif algorithm == "auto":
        moved = 0 if op == TO_HEADS else sum(rows) * inner * input.element_size()
        tuned = tuning.measured_choice(communicator, problem).algorithm
        algorithm = choose_algorithm(place, input.dtype, sum(rows), moved, empty=False, tuned=tuned)
    checks.one_node(algorithm, communicator)
    name_algorithm(algorithm)
    exchange = (ToHeads if op == TO_HEADS else FromHeads)(
        communicator, input, linear, rows, received
    )
    if algorithm == "fused":
        tiles = configuration.choose(place, input.dtype, max(rows), columns, inner)
        tiles = tuning.measured_choice(communicator, problem, algorithm).over(tiles)
        return exchange.fused(tiles)
    return exchange.pipelined() if algorithm == "pipelined" else exchange.unfused()


FORMS = {op: internal_form(op, prepare) for op in (TO_HEADS, FROM_HEADS)}


def part_of(linear: Linear, rank: int, world_size: int) -> Linear:
    columns = linear.weight.shape[1] // world_size
    own_columns = slice(rank * columns, (rank + 1) * columns)
    bias = None if linear.bias is None else linear.bias[own_columns]
    return replace(linear, weight=linear.weight[:, own_columns], bias=bias)


@dataclass(frozen=True)
class HeadExchangeCall:
    """One call of either op; see the module."""

    communicator: Communicator
    input: Tensor
    linear: Linear
    rows: Sequence[int]
    received: Tensor | None = None

    def by_engine(
        self, op: str, columns: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        """Run the plain collective, ordered with the compute stream before and after."""
        communicator = self.communicator
        dtype = outputs[0].dtype
        # an engine waits for the work that the caller has issued
        communicator.place.hold_current(communicator.compute.record(), f"the parts of {op}")
        call = agreed_call(communicator, op, (f"parts of {op}", tuple(self.rows), columns, dtype))
        event = communicator.engine.all_to_all(call, outputs, inputs)
        if event is not None:
            communicator.compute.wait_event(event)


class ToHeads(HeadExchangeCall):
    def fused(self, configuration: Configuration) -> Event:
        communicator, input, linear, rows = self.communicator, self.input, self.linear, self.rows
        columns, block_m = linear.output.shape[1], configuration.block_m
        tiles_n = formulas.ceil_div(columns, configuration.block_n)
        rank, world_size = communicator.rank, communicator.world_size
        weight = linear.weight
        if columns * weight.stride(1) * weight.element_size() % operands.DESCRIPTOR_ALIGNMENT:
            configuration = replace(configuration, descriptors=False)
        table = communicator.table(
            ("shards of heads", tuple(rows), block_m, tiles_n),
            lambda: formulas.shard_lines(rows, block_m, tiles_n),
        )
        own_linear = replace(linear, weight=weight[:, :columns])
        arguments = {
            **operands.product(communicator, configuration, input, own_linear, published=True),
            **operands.epilogue(linear),
            "shards_ptr": table,
        }
        layout = Layout(
            formulas.tiles_of(rows, block_m, tiles_n),
            sum(rows) * columns * linear.output.element_size(),
        )
        tiles = max(
            formulas.tiles_of([rows[rank]], block_m, tiles_n) * world_size,
            formulas.tiles_of([max(rows)], block_m, tiles_n),
        )
        grid = formulas.persistent_grid(0, tiles, resident_programs(communicator, configuration))
        kernel = kernels.matmul_all_to_all_kernel
        launch = kernel, grid, arguments, operands.launch_options(configuration, input)
        return enqueue_kernel(communicator, TO_HEADS, layout, *launch)

    def pipelined(self) -> Event:
        """Run a torch matmul per receiver, directly into its workspace."""
        communicator, input, linear, rows = self.communicator, self.input, self.linear, self.rows
        rank, world_size = communicator.rank, communicator.world_size
        shape, dtype = linear.output.shape, linear.output.dtype
        begins = formulas.segments_of(rows)

        def body(workspace: Workspace) -> None:
            stream, (first, count) = communicator.compute, begins[rank]
            stream.wait_credits(workspace)
            for owner in owner_order(rank, world_size):
                part = part_of(linear, owner, world_size)
                if owner != rank:
                    part.output = workspace.data(owner, 0, shape, dtype)
                label, here = f"matmul for rank {owner}", slice(first, first + count)
                operands.enqueue_product(communicator, input, part, here, label)
                if owner != rank:
                    stream.publish(workspace, owner, rank)
            arrived = workspace.data(rank, 0, shape, dtype)
            for source in sources(communicator)[1:]:
                stream.wait(workspace, source, source)
                begin, length = begins[source]
                here = slice(begin, begin + length)
                stream.copy(linear.output[here], arrived[here], f"rows of rank {source}")

        layout = Layout(world_size, sum(rows) * shape[1] * dtype.itemsize)
        return communicator.enqueue(TO_HEADS, layout, body)

    def unfused(self) -> Event:
        communicator, input, linear, rows = self.communicator, self.input, self.linear, self.rows
        rank, world_size = communicator.rank, communicator.world_size
        output = linear.output
        communicator.compute.wait_event(communicator.place.record_current())
        products = output.new_empty(world_size, rows[rank], output.shape[1])
        if world_size == 1:
            products = output.unsqueeze(0)
        for owner in range(world_size):
            part = replace(part_of(linear, owner, world_size), output=products[owner])
            label = f"matmul for rank {owner}"
            operands.enqueue_product(communicator, input, part, slice(None), label)
        if world_size > 1:
            outputs = [part.view(-1) for part in torch.split(output, list(rows))]
            inputs = [part.view(-1) for part in products]
            self.by_engine(TO_HEADS, output.shape[1], outputs, inputs)
        return communicator.compute.record()


class FromHeads(HeadExchangeCall):
    def fused(self, configuration: Configuration) -> Event:
        """Run the kernel; its first programs send, or the copy engine does."""
        communicator, input, linear, rows = self.communicator, self.input, self.linear, self.rows
        received = self.received
        rank, world_size, inner = communicator.rank, communicator.world_size, input.shape[1]
        configuration = replace(configuration, descriptors=False, output_descriptors=False)
        block_m = configuration.block_m
        size = formulas.chunk_rows(rows, block_m, configuration.chunks)
        chunks = formulas.ceil_div(max(rows), size)
        lines = formulas.head_send_lines(rank, world_size, rows, size, chunks)
        table = communicator.table(("sends of heads", tuple(rows), size), lambda: lines)
        tiles_n = formulas.ceil_div(linear.weight.shape[1], configuration.block_n)
        tiles = formulas.tiles_of([rows[rank]], block_m, tiles_n)
        arguments = {
            **operands.product(communicator, configuration, input, linear),
            **operands.epilogue(linear),
            "K": inner,
            "own": OwnRows(rows[rank], sum(rows[:rank]), size, chunks),
            "sends": Table(table, len(lines)),
        }
        layout = Layout(world_size * chunks, world_size * max(rows) * inner * input.element_size())

        def arrivals() -> Iterator[tuple[int, int]]:
            for source in other_ranks(communicator):
                for chunk in range(formulas.ceil_div(rows[rank], size)):
                    yield source, source * chunks + chunk

        def keep(workspace: Workspace) -> None:
            if received is not None:
                arrived = workspace.data(rank, 0, received.shape, received.dtype)
                self._keep(received, arrived)

        options = operands.launch_options(configuration, input)
        launch = kernels.all_to_all_matmul_kernel, arguments, options
        about = FROM_HEADS, layout, configuration, launch, (lines, input), tiles
        return operands.enqueue_with_sends(communicator, *about, arrivals, keep)

    def _keep(self, received: Tensor, arrived: Tensor) -> None:
        """Copy the rows from each rank, and the own rows, for the caller."""
        communicator, input, rows = self.communicator, self.input, self.rows
        rank, first = communicator.rank, sum(rows[: communicator.rank])
        for source in range(communicator.world_size):
            is_own = source == rank
            part = input[first : first + rows[rank]] if is_own else arrived[source]
            communicator.compute.copy(received[source], part, f"received from rank {source}")

    def pipelined(self) -> Event:
        """Push rows to their columns of the owner's matrix; run one torch matmul per chunk."""
        communicator, input, linear, rows = self.communicator, self.input, self.linear, self.rows
        received = self.received
        rank, world_size, inner = communicator.rank, communicator.world_size, input.shape[1]
        begins, dtype = formulas.segments_of(rows), input.dtype

        def body(workspace: Workspace) -> None:
            stream, copying = communicator.compute, communicator.copying
            copying.wait_credits(workspace)
            for peer in [rank, *other_ranks(communicator)]:
                first, count = begins[peer]
                theirs = workspace.data(peer, 0, (count, world_size, inner), dtype)[:, rank]
                copying.copy(theirs, input[first : first + count], f"rows to rank {peer}")
                if peer != rank:
                    copying.publish(workspace, peer, rank)
            stream.wait_event(copying.record())
            wait_for_all(communicator, workspace, 0)
            whole = workspace.data(rank, 0, (rows[rank], world_size * inner), dtype)
            operands.enqueue_product(communicator, whole, linear, slice(None), "matmul")
            if received is not None:
                parts = whole.view(rows[rank], world_size, inner).transpose(0, 1)
                stream.copy(received, parts, "received")

        layout = Layout(world_size, world_size * max(rows) * inner * input.element_size())
        return communicator.enqueue(FROM_HEADS, layout, body)

    def unfused(self) -> Event:
        communicator, input, linear, rows = self.communicator, self.input, self.linear, self.rows
        received = self.received
        rank, world_size, inner = communicator.rank, communicator.world_size, input.shape[1]
        communicator.compute.wait_event(communicator.place.record_current())
        rows_of_all = received
        if rows_of_all is None:
            rows_of_all = input.new_empty(world_size, rows[rank], inner)
        if world_size == 1:
            communicator.compute.copy(rows_of_all[0], input, "received")
        else:
            inputs = [part.contiguous().view(-1) for part in torch.split(input, list(rows))]
            outputs = [part.view(-1) for part in rows_of_all]
            self.by_engine(FROM_HEADS, inner, outputs, inputs)
        whole = rows_of_all.new_empty(rows[rank], world_size, inner)
        communicator.compute.copy(whole, rows_of_all.transpose(0, 1), "columns by rank")
        matrix = whole.view(rows[rank], world_size * inner)
        operands.enqueue_product(communicator, matrix, linear, slice(None), "matmul")
        return communicator.compute.record()


def _parts(record: HeadArguments) -> Any:
    """Return the input's shape between rows and columns, if the arguments have the shapes of the op."""
    input, length = record.input, record.length
    check_factors(input, record.weight)
    if isinstance(length, int) and length < 0:
        raise ValueError(f"length must be None or not negative, got {length}")
    return input.shape[1:-1]


def _save_needs(ctx: Any, record: HeadArguments) -> None:
    """Save which gradients are needed, and how the other op is called for them."""
    ctx.algorithm = record.algorithm
    ctx.shared, ctx.weighed = record.input.requires_grad, record.weight.requires_grad
    ctx.biased = record.bias is not None and record.bias.requires_grad


def to_heads_output(record: ToHeadsArguments, size: Any) -> Tensor:
    between, input = _parts(record), record.input
    rows = input.shape[0] * size if record.length is None else record.length
    return input.new_empty([rows, *between, record.weight.shape[1] // size])


def _start(communicator: Communicator, given: HeadArguments) -> Started:
    size = communicator.world_size
    with communicator.accepting(given.op):
        if isinstance(given, ToHeadsArguments):
            made = [to_heads_output(given, size)]
        else:
            made = from_heads_outputs(given, size)
    return Started(made, FORMS[given.op](communicator, (given, *made), async_op=True))


def _save_to_heads(ctx: Any, record: ToHeadsArguments, output: Tensor) -> None:
    _save_needs(ctx, record)
    ctx.save_for_backward(record.input, record.weight)


def _to_heads_gradients(ctx: Any, grad: Tensor) -> dict[str, Tensor]:
    input, weight = ctx.saved_tensors
    grad, kept = grad.to(weight.dtype), ctx.weighed or ctx.biased
    of_input, *received = _ops.all_to_all_matmul(
        grad, weight.t(), None, input.shape[0], kept, ctx.algorithm, ctx.size, ctx.name
    )
    found = {}
    if kept:
        # by rank, like the columns of the weight
        parts = wait(received[0])
        if ctx.weighed:
            of_weight = input.flatten(0, -2).t() @ parts
            found["weight"] = of_weight.transpose(0, 1).flatten(1)
        if ctx.biased:
            found["bias"] = parts.sum(1).flatten()
    return {"input": wait(of_input), **found}


def from_heads_outputs(record: FromHeadsArguments, size: Any) -> list[Tensor]:
    """Allocate the output and, if requested, the rows from each rank, ``[ranks, own rows, k]``."""
    between, input = _parts(record), record.input
    rows = input.shape[0] // size if record.length is None else record.length
    tensors = [input.new_empty([rows, *between, record.weight.shape[1]])]
    if record.return_received:
        tensors.append(input.new_empty([size, rows, *between, input.shape[-1]]).flatten(1, -2))
    return tensors


def _save_from_heads(ctx: Any, record: FromHeadsArguments, outputs: Sequence[Tensor]) -> None:
    _save_needs(ctx, record)
    ctx.total, ctx.shape = record.input.shape[0], outputs[0].shape[:-1]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(outputs[1] if record.return_received else None, record.weight)


def _from_heads_gradients(ctx: Any, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    received, weight = ctx.saved_tensors
    grad, of_received = grads[0], None if received is None else grads[1]
    found: dict[str, Tensor] = {}
    if ctx.shared and of_received is not None:  # in a backward of a backward
        moved = of_received.transpose(0, 1).reshape(*ctx.shape, -1)
        same = torch.eye(moved.shape[-1], dtype=moved.dtype, device=moved.device)
        found["input"] = _to_heads(ctx, moved, same)
    if grad is not None:
        grad = grad.to(weight.dtype)
        rows = grad.flatten(0, -2)
        if ctx.shared:
            product = _to_heads(ctx, grad, weight.t())
            found["input"] = found["input"] + product if "input" in found else product
        if ctx.weighed:
            if received is None:
                raise RuntimeError(f"{FROM_HEADS} without return_received has no weight's gradient")
            found["weight"] = (wait(received).mT @ rows).flatten(0, 1)
        if ctx.biased:
            found["bias"] = rows.sum(0)
    return found


def _to_heads(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
    return wait(
        _ops.matmul_all_to_all(rows, weight, None, ctx.total, ctx.algorithm, ctx.size, ctx.name)
    )


def _alike(ranks: Sequence[HeadArguments]) -> list[Tensor | None]:
    """Return the biases of ranks, after a check that their tensors fit together."""
    op, first = ranks[0].op, ranks[0]
    checks.algorithm_and_dtype(first.input, first)
    by_rank.alike(op, "input", by_rank.inputs(ranks), but=0)
    by_rank.alike(op, "weight", [rank.weight for rank in ranks])
    checks.same_dtype("weight", first.weight.dtype, "input", first.input.dtype)
    return [checked_bias(rank.bias, rank.weight.shape[1], rank.input) for rank in ranks]


def _to_heads_reference(ranks: Sequence[ToHeadsArguments], size: int) -> list[list[Tensor]]:
    """Return every rank's product, cut into the columns of each receiver."""
    outputs, biases = [to_heads_output(rank, size) for rank in ranks], _alike(ranks)
    shapes.own_length(ranks[0].weight.shape[1], size, "dimension 1 of weight")
    wholes = [len(output) for output in outputs]
    own_lengths = [len(rank.input) for rank in ranks]
    lengths = _lengths(TO_HEADS, list(zip(own_lengths, wholes, strict=True)))
    places = [torch.split(output, lengths) for output in outputs]
    for source, (each, bias) in enumerate(zip(ranks, biases, strict=True)):
        product = each.input.new_empty([*each.input.shape[:-1], each.weight.shape[1]])
        operands.multiply(product.flatten(0, -2), rows_of(each.input, 0), each.weight, bias)
        for place, columns in zip(places, product.chunk(size, -1), strict=True):
            place[source].copy_(columns)
    return [[output] for output in outputs]


def _from_heads_reference(ranks: Sequence[FromHeadsArguments], size: int) -> list[list[Tensor]]:
    """Multiply the ranks' parts, side by side, by the weight."""
    outputs, biases = [from_heads_outputs(each, size) for each in ranks], _alike(ranks)
    own_lengths = [len(each[0]) for each in outputs]
    wholes = [len(each.input) for each in ranks]
    lengths = _lengths(FROM_HEADS, list(zip(own_lengths, wholes, strict=True)))
    sent = [torch.split(each.input, lengths) for each in ranks]
    for rank, (output, *received) in enumerate(outputs):
        arrived = [parts[rank] for parts in sent]
        matrix = torch.cat(arrived, -1).flatten(0, -2)
        operands.multiply(output.flatten(0, -2), matrix, ranks[rank].weight, biases[rank])
        for each in received:
            each.copy_(torch.stack(arrived).flatten(1, -2))
    return outputs


OPS = (
    Op(
        TO_HEADS,
        ToHeadsArguments,
        _start,
        to_heads_output,
        OpGradient(_save_to_heads, _to_heads_gradients),
        {"input, weight or bias": ("input", "weight", "bias")},
        reference=_to_heads_reference,
        algorithms=fused_by(f"{TO_HEADS}_kernel"),
        examples={
            "input": own_rows,
            "length": lambda setting: setting.total if setting.uneven else None,
        },
    ),
    Op(
        FROM_HEADS,
        FromHeadsArguments,
        _start,
        from_heads_outputs,
        OpGradient(_save_from_heads, _from_heads_gradients),
        several=True,
        reference=_from_heads_reference,
        algorithms=fused_by(f"{FROM_HEADS}_kernel"),
        examples={
            "weight": lambda setting: setting.numbers(setting.width * setting.size, setting.width)
        },
    ),
)
