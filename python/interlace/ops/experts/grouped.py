"""The fused ops of a mixture of experts: a collective of rows, then a matmul for each expert.

docs/reference/expert-rows.md has the order of rows before and after, algorithms and gradients. The order
does not depend on the algorithm, nor on timing. Expert e belongs to rank ``e // (E / W)`` where experts are
spread over ranks. ``splits[e][s]`` rows of the result belong to the rank's expert e and come from rank s.

The message in which ranks compare a call also carries every rank's splits. Both ops share the code: the
:class:`Routes` are different for all-gather and all-to-all. The torch ops get the numbers of rows on both
sides as lists of ints, so their results are known before they run.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Experts, Table
from interlace.kernels.experts import grouped_matmul as kernels
from interlace.kernels.launch_formulas import Line
from interlace.kernels.tiling import prefix_sums
from interlace.ops.collectives import records as by_rank
from interlace.ops.collectives.all_to_all import whole_numbers
from interlace.ops.experts.products import of_weights
from interlace.ops.experts.routing import EXAMPLES, EXPERTS, SLOTS
from interlace.ops.matmul import operands
from interlace.ops.matmul.block_scaled import product
from interlace.ops.matmul.formats import OPERAND_FORMATS, format_term, length_along_k
from interlace.ops.matmul.operands import Linear
from interlace.ops.op.op import (
    Example,
    Op,
    OpGradient,
    Started,
    fused_by,
    pad,
    requiring,
    spread,
    wait,
)
from interlace.ops.op.recording import Ops
from interlace.runtime.core.call import Call, PreparedCall, Terms
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.context import name_algorithm, with_context
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.configuration import Configuration
from interlace.runtime.tuning.tuning import choose_algorithm

GATHER, EXCHANGE = "all_gather_grouped_matmul", "all_to_all_grouped_matmul"
Tensor = torch.Tensor
_ops: Any = Ops()


class RouteSegment(NamedTuple):
    """``rows`` rows that a source has from ``first`` on; they go to row ``to`` of the result."""

    to: int
    rows: int
    first: int


@dataclass(frozen=True)
class Routes:
    """The routes of one call in whole numbers, the same on all ranks, except ``rank``, which is this one.

    Legend: ``counts[s][e]`` is how many rows rank s has for expert e; a rank's rows are sorted by expert.
    ``experts`` is the number of experts on a rank: all experts for gathered rows, a part of them for
    exchanged rows. A *segment* is the rows of one expert from one source. A rank's results are in the order
    (expert, source, row of the source), and so is its workspace.
    """

    rank: int
    counts: tuple[tuple[int, ...], ...]
    experts: int

    @property
    def world_size(self) -> int:
        return len(self.counts)

    @cached_property
    def firsts(self) -> list[list[int]]:
        """The first rows of experts, by source and expert; the number of all rows last."""
        return [list(prefix_sums(count)) for count in self.counts]

    def experts_of(self, rank: int) -> range:
        first = rank * self.experts % len(self.counts[0])
        return range(first, first + self.experts)

    def block(self, source: int, rank: int) -> tuple[int, int]:
        """Return the rows of ``source`` that go to ``rank``: (first, rows)."""
        experts, firsts = self.experts_of(rank), self.firsts[source]
        return firsts[experts.start], firsts[experts.stop] - firsts[experts.start]

    def received(self, rank: int) -> int:
        return sum(self.block(source, rank)[1] for source in range(self.world_size))

    @cached_property
    def most_received(self) -> int:
        return max(self.received(rank) for rank in range(self.world_size))

    @cached_property
    def longest(self) -> int:
        return max(max(count) for count in self.counts)

    @cached_property
    def _splits(self) -> tuple[int, list[int], int]:
        """Return numbers for ``launch_formulas.py``: ranks, their rows by expert, experts of a rank."""
        return self.world_size, [rows for each in self.counts for rows in each], self.experts

    def segments(self, rank: int) -> list[list[RouteSegment]]:
        """Return ``rank``'s segments by expert and source; experts count from its first one."""
        to = iter(formulas.expert_offsets(rank, *self._splits))
        sources = list(zip(self.counts, self.firsts, strict=True))
        return [
            [RouteSegment(next(to), rows[expert], firsts[expert]) for rows, firsts in sources]
            for expert in self.experts_of(rank)
        ]

    @cached_property
    def mine(self) -> list[list[RouteSegment]]:
        return self.segments(self.rank)

    def splits(self) -> list[list[int]]:
        """Return rows of this rank's result by expert and source."""
        return [[segment.rows for segment in each] for each in self.mine]

    # -- for the kernel ------------------------------------------------------------------------

    def slots(self, chunk_rows: int) -> int:
        """Return the signal slots that the rank with the most rows, or the most experts, needs."""
        return self.experts * self.world_size + self.most_received // chunk_rows + 1

    def segment_lines(self) -> list[Line]:
        return [[*segment] for each in self.mine for segment in each]

    def send_lines(self, chunk_rows: int) -> list[Line]:
        return formulas.expert_send_lines(self.rank, *self._splits, chunk_rows)

    def arrival_slots(self, chunk_rows: int) -> list[tuple[int, int]]:
        """Return (source, slot) of all arrivals, in the order of consumption."""
        return [
            (source, line[4])
            for source in self.sources[1:]
            for line in formulas.expert_send_lines(source, *self._splits, chunk_rows)
            if line[0] == self.rank
        ]

    @property
    def sources(self) -> list[int]:
        """Return all ranks in the order in which their rows arrive: this one, then rank - 1 and so on."""
        return [(self.rank - step) % self.world_size for step in range(self.world_size)]


@dataclass
class GroupedArguments:
    """The arguments of either op. Splits are by expert, and by expert and source rank, as above.

    Eager callers may pass tensors as splits, and None as the second. After the check they are lists of
    ints, ``activation`` is a name, and ``out_dtype`` is the output's. ``max_rows``: a bound of every rank's
    rows, if counts stay on the device (``counted.py``). ``recorded``: autograd records the call, so it
    returns the results of the op, and the routes.
    """

    input: Annotated[Any, "Tensor"]
    weight: Annotated[Any, "Tensor"]
    bias: Tensor | None
    input_splits: Annotated[Any, "SymInt[]"]
    output_splits: Annotated[Any, "SymInt[]"]
    return_received: bool
    algorithm: str
    out_dtype: Annotated[Any, "ScalarType?"]
    activation: Annotated[Any, ""] = None
    max_rows: Annotated[int, ""] = 0
    op: Annotated[str, ""] = GATHER
    recorded: Annotated[bool, ""] = False
    format: str = ""


def result(received: Any, output: Tensor, splits: list[list[int]]) -> Any:
    counts = torch.tensor(splits, dtype=torch.int64)
    return (output, counts) if received is None else (received, output, counts)


def grouped_matmul(
    communicator: Communicator,
    record: GroupedArguments,
    output: Tensor | None = None,
    received: Tensor | None = None,
) -> PreparedCall:
    """Prepare either op. ``output`` and ``received`` get the results, if the caller has allocated them."""
    call = check(communicator, record)

    def start() -> Outcome:
        routes, columns = agree(communicator, call)
        product, rows = output, received
        if product is None:
            product, rows = results_of(call, routes.received(communicator.rank))
        event = start_matmul(communicator, call, routes, columns, product, rows)
        if output is not None:
            return Outcome(None, event)
        if record.recorded:
            return Outcome(([product] if rows is None else [product, rows], routes), event)
        return Outcome(result(rows, product, routes.splits()), event)

    return start, (), None


FORMS = {op: internal_form(op, grouped_matmul) for op in (GATHER, EXCHANGE)}


def results_of(record: GroupedArguments, rows: Any) -> tuple[Tensor, Tensor | None]:
    """Allocate the output and, if requested, the rows that were multiplied."""
    new, dtype = record.input.new_empty, checks.output_dtype(record.out_dtype, record.input)
    output = new(rows, record.weight.shape[2], dtype=dtype)
    return output, new(rows, record.input.shape[1]) if record.return_received else None


def start_matmul(
    communicator: Communicator,
    call: GroupedArguments,
    routes: Routes,
    columns: int,
    output: Tensor,
    received: Tensor | None,
) -> Event:
    """Choose the algorithm, from facts that ranks share, and start it. ``columns``: of the widest."""
    input, format = call.input, OPERAND_FORMATS.get(call.format)
    linear = Linear(call.weight, call.bias, output, activation=call.activation, format=format)
    inner, place = input.shape[1], communicator.place
    rows = routes.most_received
    empty = not rows * inner
    algorithm = call.algorithm
    if algorithm == "auto" or empty:
        moved = rows * inner * input.element_size() if routes.world_size > 1 else 0
        wide = torch.float64 if call.out_dtype == torch.float64 else input.dtype
        tuned = ""
        if not empty:
            about = rows, columns, inner, routes.world_size
            problem = tuning.Problem(call.op, input.dtype, *about, **tuning.tuned_as(format))
            tuned = tuning.measured_choice(communicator, problem).algorithm
        algorithm = choose_algorithm(place, wide, rows, moved, empty=empty, tuned=tuned)
        if place.nodes is not None:
            algorithm = "unfused"
    matmul = GroupedMatmul(communicator, call.op, input, linear, routes, received)
    checks.one_node(algorithm, communicator)
    name_algorithm(algorithm)
    if algorithm == "unfused":
        return matmul.unfused()
    if algorithm == "pipelined":
        return matmul.pipelined()
    extents = routes.longest, call.weight.shape[2], inner
    fast = linear.fast_accum
    return matmul.fused(
        configuration.choose(place, input.dtype, *extents, grouped=True, fast_accum=fast)
    )


def checked_operands(communicator: Communicator, record: Any) -> dict[str, Any]:
    """Check the fields of ``record`` of all grouped matmuls: factors, the algorithm, the dtype."""
    input = checks.tensor("input", record.input, communicator)
    algorithm, dtype = checks.algorithm_and_dtype(input, record)
    if input.dim() != 2:
        raise ValueError(f"input must have 2 dimensions (rows, k), got shape {tuple(input.shape)}")
    weight = checks.tensor("weight", record.weight, communicator)
    if weight.dim() != 3 or not weight.shape[0]:
        raise ValueError(
            "weight must have 3 dimensions (experts, k, n) and at least one expert, got shape "
            f"{tuple(weight.shape)}"
        )
    checks.same_dtype("weight", weight.dtype, "input", input.dtype)
    if weight.shape[1] != input.shape[1]:
        raise ValueError(
            f"weight has k = {weight.shape[1]} (shape {tuple(weight.shape)}), input has k = "
            f"{input.shape[1]} (shape {tuple(input.shape)})"
        )
    columns = weight.shape[0], weight.shape[2]
    bias = checks.bias_of("bias", record.bias, columns, input, communicator)
    if input.shape[1] > 1 and input.stride(1) != 1:
        input = input.contiguous()
    named = {"input": input, "weight": weight, "bias": bias}
    return {**named, "algorithm": algorithm, "out_dtype": dtype}


def checked_tensors(communicator: Communicator, record: GroupedArguments) -> GroupedArguments:
    """Return the arguments except splits, if they fit together on this rank."""
    operands = checked_operands(communicator, record)
    name = checks.activation("activation", record.activation)
    checks.flag("return_received", record.return_received)
    return GroupedArguments(**{**vars(record), **operands, "activation": name})


def check(communicator: Communicator, record: GroupedArguments) -> GroupedArguments:
    return with_splits(checked_tensors(communicator, record), communicator.world_size)


def with_splits(call: GroupedArguments, world_size: int) -> GroupedArguments:
    input, weight = call.input, call.weight
    experts = weight.shape[0] * (world_size if call.op == EXCHANGE else 1)
    sent = row_counts("input_splits", call.input_splits)
    if call.op == EXCHANGE and len(sent) % world_size:
        raise ValueError(
            f"input_splits has {len(sent)} experts, which world size {world_size} does not divide"
        )
    if len(sent) != experts:
        of = f"{world_size} ranks with " if call.op == EXCHANGE else ""
        raise ValueError(
            f"input_splits has {len(sent)} entries, {of}{weight.shape[0]} experts in weight make "
            f"{experts}"
        )
    if sum(sent) != input.shape[0]:
        raise ValueError(f"input_splits adds up to {sum(sent)}, input has {input.shape[0]} rows")
    expected = None
    if call.output_splits is not None:
        received = "output_splits", call.output_splits
        expected = received_counts(*received, weight.shape[0], world_size)
    call.input_splits, call.output_splits = sent, expected
    return call


def row_counts(name: str, value: Any) -> list[int]:
    """Return numbers of rows, which are ints or a tensor of integers, as ints; refuse negative ones."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            raise TypeError(f"{name} must be a tensor of integers, got {value.dtype}")
        value = value.flatten().tolist()
    numbers = whole_numbers(name, value)
    if numbers and min(numbers) < 0:
        raise ValueError(f"{name} must not be negative, got {numbers}")
    return numbers


def received_counts(name: str, value: Any, experts: int, world_size: int) -> list[int]:
    """Return :func:`row_counts` of each of this rank's ``experts`` from each rank."""
    found = row_counts(name, value)
    if len(found) != experts * world_size:
        raise ValueError(
            f"{name} has {len(found)} entries, {experts} experts and {world_size} ranks make "
            f"{experts * world_size}"
        )
    return found


def terms_of(call: GroupedArguments, experts: int) -> Terms:
    k: tuple[str, int] = "k of input", call.input.shape[1]
    return (
        format_term(call.format),
        ("dtype of input", call.input.dtype),
        length_along_k(*k, call.format) if call.format else k,
        ("the number of experts", experts),
        ("algorithm", call.algorithm),
        ("out_dtype", call.out_dtype),
        ("return_received", call.return_received),
        ("num_max_rows_per_rank", call.max_rows or None),
    )


def agree(communicator: Communicator, call: GroupedArguments) -> tuple[Routes, int]:
    """Return the routes, and the columns of the widest weight; raise alike on all ranks."""
    op, rank, world_size = call.op, communicator.rank, communicator.world_size
    terms = terms_of(call, len(call.input_splits))
    part = tuple(call.input_splits), call.output_splits, call.weight.shape[2]
    answers = communicator.parts(Call(op, with_context(terms), part=part))
    experts = len(call.input_splits)
    on_rank = experts if op == GATHER else experts // world_size
    routes = Routes(rank, tuple(sent for sent, *_ in answers), on_rank)
    for receiver, (_, expected, _) in enumerate(answers):
        if expected is not None:
            _check_splits(op, routes, receiver, expected)
    return routes, max(columns for *_, columns in answers)


def _check_splits(op: str, routes: Routes, receiver: int, expected: Sequence[int]) -> None:
    """Compare a rank's ``output_splits`` with the rows that the ranks have for it."""
    for number, segment in enumerate(s for each in routes.segments(receiver) for s in each):
        if expected[number] != segment.rows:
            expert, source = divmod(number, routes.world_size)
            expert += routes.experts_of(receiver).start
            raise ValueError(
                f"{op}: output_splits[{number}] (expert {expert} from rank {source}) is "
                f"{expected[number]} on rank {receiver}, input_splits[{expert}] is {segment.rows} on "
                f"rank {source}"
            )


# -- launches --------------------------------------------------------------------------------------


def expert_operands(
    communicator: Communicator,
    input: Tensor,
    linear: Linear,
    configuration: Configuration,
    *,
    published: bool = False,
) -> dict[str, Any]:
    """Return kernel arguments for the first expert's matmul, and the strides to the others' weights."""
    weight = linear.weight
    first = replace(linear, weight=weight[0])
    if weight.stride(0) * weight.element_size() % operands.DESCRIPTOR_ALIGNMENT:
        configuration = replace(configuration, descriptors=False)
    return {
        **operands.product(communicator, configuration, input, first, published=published),
        "weight": Experts(weight, *weight.stride()),
        "bias_ptr": operands.bias_or_none(first),
        "num_experts": weight.shape[0],
    }


def expert_of(linear: Linear, expert: int, output: Tensor | None = None) -> Linear:
    bias = None if linear.bias is None else linear.bias[expert]
    to = linear.output if output is None else output
    return replace(linear, weight=linear.weight[expert], bias=bias, output=to)


@dataclass(frozen=True)
class GroupedMatmul:
    """One call of either op. ``received``: see the public ops."""

    communicator: Communicator
    op: str
    input: Tensor
    linear: Linear
    routes: Routes
    received: Tensor | None

    def fused(self, configuration: Configuration) -> Event:
        """One kernel. Its first programs copy, or the copy engine sends."""
        communicator, input, routes = self.communicator, self.input, self.routes
        columns, inner, itemsize = self.linear.weight.shape[2], input.shape[1], input.element_size()
        block_m = configuration.block_m
        size = formulas.chunk_rows([max(1, routes.longest)], block_m, configuration.chunks)
        lines = routes.send_lines(size)
        key = (routes, size)
        sends = communicator.table(("grouped sends", *key), lambda: lines, passing=True)
        segments = communicator.table(("grouped rows", *key), routes.segment_lines, passing=True)
        layout = Layout(routes.slots(size), routes.most_received * inner * itemsize)
        # Made before the op begins on the streams: they wait for all work the caller has issued by then.
        arguments = {
            **expert_operands(communicator, input, self.linear, configuration),
            "sends": Table(sends, len(lines)),
            "segments_ptr": segments,
            "chunk_rows": size,
        }
        tiles_n = formulas.ceil_div(columns, configuration.block_n)
        rows = [segment.rows for expert in routes.mine for segment in expert]
        tiles = formulas.tiles_of(rows, block_m, tiles_n)

        def keep(workspace: Workspace) -> None:
            if self.received is not None:
                shape = self.received.shape
                self._keep(workspace.data(routes.rank, 0, shape, input.dtype), self.received)

        options = operands.launch_options(configuration, input)
        launch = kernels.grouped_matmul_kernel, arguments, options
        about = self.op, layout, configuration, launch, (lines, input), tiles
        arrivals = functools.partial(routes.arrival_slots, size)
        return operands.enqueue_with_sends(communicator, *about, arrivals, keep)

    def _keep(self, arrived: Tensor, received: Tensor) -> None:
        """Copy the arrived rows, and own rows where the workspace has holes."""
        copy, done = self.communicator.compute.copy, 0
        for segment in [*(each[self.routes.rank] for each in self.routes.mine), None]:
            end = received.shape[0] if segment is None else segment.to
            if done < end:
                copy(received[done:end], arrived[done:end], "received")
            if segment is not None:
                done = segment.to + segment.rows
                if segment.rows:
                    rows = self.input[segment.first : segment.first + segment.rows]
                    copy(received[segment.to : done], rows, "own rows")

    def pipelined(self) -> Event:
        """Torch matmuls per source and expert, by order of arrival, staged as for ``all_gather_matmul``."""
        communicator, input, routes = self.communicator, self.input, self.routes
        received, rank = self.received, communicator.rank
        inner, itemsize = input.shape[1], input.element_size()
        direct = communicator.place.direct_access
        staged_bytes = max(each[-1] for each in routes.firsts) * inner * itemsize
        layout = Layout(routes.world_size, staged_bytes, pulled=True)
        if received is None and not direct:
            received = input.new_empty(routes.received(rank), inner)

        def body(workspace: Workspace) -> None:
            stream, copying = communicator.compute, communicator.copying
            copying.wait_credits(workspace)
            staged: set[tuple[int, int]] = set()
            for step in range(1, routes.world_size):
                peer = (rank + step) % routes.world_size
                first, count = block = routes.block(rank, peer)
                if count and block not in staged:
                    shape = (count, inner)
                    own_rows = workspace.data(rank, first * inner * itemsize, shape, input.dtype)
                    copying.copy(own_rows, input[first : first + count], f"stage for rank {peer}")
                    staged.add(block)
                copying.publish(workspace, peer, rank)
            for source in routes.sources:
                if source != rank:
                    (stream if direct else copying).wait(workspace, source, source)
                for expert, segments in enumerate(routes.mine):
                    segment = segments[source]
                    if not segment.rows:
                        continue
                    rows = slice(segment.to, segment.to + segment.rows)
                    operand = input[segment.first : segment.first + segment.rows]
                    if source != rank:
                        begin = segment.first * inner * itemsize
                        operand = workspace.data(source, begin, (segment.rows, inner), input.dtype)
                        if not direct:
                            assert received is not None
                            copying.copy(received[rows], operand, f"rows of rank {source}")
                            stream.wait_event(copying.record())
                            operand = received[rows]
                    label = f"expert {expert}, rows of rank {source}"
                    part = expert_of(self.linear, expert)
                    operands.enqueue_product(communicator, operand, part, rows, label)
                    if received is not None and (direct or source == rank):
                        stream.copy(received[rows], operand, "received")

        return communicator.enqueue(self.op, layout, body)

    def unfused(self) -> Event:
        """Run the collective, sort rows by expert, then one torch matmul per expert."""
        input, routes, received = self.input, self.routes, self.received
        stream, lone = self.communicator.compute, routes.world_size == 1
        # No op of the streams precedes this, so the streams must wait for the tensors to read.
        stream.wait_event(self.communicator.place.record_current())
        if received is None:
            received = (
                input if lone else input.new_empty(routes.received(routes.rank), input.shape[1])
            )
        elif lone:
            stream.copy(received, input, "received")
        if not lone:
            arrived = self._by_source()
            begin = 0
            for source in range(routes.world_size):
                for segments in routes.mine:
                    segment = segments[source]
                    if segment.rows:
                        to = received[segment.to : segment.to + segment.rows]
                        theirs = arrived[begin : begin + segment.rows]
                        stream.copy(to, theirs, f"rows of rank {source}")
                        begin += segment.rows
        for index, segments in enumerate(routes.mine):
            first, count = segments[0].to, sum(segment.rows for segment in segments)
            part, rows = expert_of(self.linear, index), slice(first, first + count)
            label = f"expert {index}"
            operands.enqueue_product(self.communicator, received[rows], part, rows, label)
        return stream.record()

    def _by_source(self) -> Tensor:
        """Return the rows that arrive, one source after another, each sorted by expert."""
        communicator, input, routes = self.communicator, self.input, self.routes
        rank, inner = routes.rank, input.shape[1]
        counts = [routes.block(source, rank)[1] for source in range(routes.world_size)]
        arrived = input.new_empty(sum(counts), inner)
        outputs = [part.view(-1) for part in torch.split(arrived, counts)]
        call = Call(self.op, (("rows", routes.counts), ("columns", inner), ("dtype", input.dtype)))
        flat = input.contiguous()
        if routes.experts == len(routes.counts[0]):  # every rank's rows go to all
            event = communicator.engine.all_gather(call, outputs, flat.view(-1))
        else:
            sent = [routes.block(rank, peer)[1] for peer in range(routes.world_size)]
            inputs = [part.view(-1) for part in torch.split(flat, sent)]
            event = communicator.engine.all_to_all(call, outputs, inputs)
        if event is not None:
            communicator.compute.wait_event(event)
        return arrived


# -- outputs and gradients -------------------------------------------------------------------------


def results(record: GroupedArguments, size: int) -> list[Tensor]:
    input, weight = record.input, record.weight
    if input.dim() != 2 or weight.dim() != 3:
        raise ValueError(
            f"input must have 2 dimensions and weight 3, got shapes {tuple(input.shape)} and "
            f"{tuple(weight.shape)}"
        )
    output, received = results_of(record, sum(record.output_splits))
    return [output] if received is None else [output, received]


def start(op: str, communicator: Communicator, record: GroupedArguments) -> Started:
    with communicator.accepting(op):
        row_counts("output_splits", list(record.output_splits))
        tensors = results(record, communicator.world_size)
    record.op = op
    return Started(tensors, FORMS[op](communicator, (record, *tensors), (), True))


class RowSplits(NamedTuple):
    """A call's numbers of rows. A traced ``received`` also has the group's size."""

    sent: list[Any]
    received: list[Any]
    experts: int  # on this rank

    @property
    def sources(self) -> int:
        return len(self.received) // self.experts

    @property
    def unequal(self) -> list[int] | None:
        """Return the rows of each source, if they are known and unequal."""
        lengths = self.from_ranks
        known = all(isinstance(length, int) for length in lengths)
        return lengths if known and min(lengths) != max(lengths) else None

    @property
    def of_experts(self) -> list[Any]:
        return _sums(self.received, self.sources)

    @property
    def to_ranks(self) -> list[Any]:
        return _sums(self.sent, self.experts)

    @property
    def from_ranks(self) -> list[Any]:
        return [sum(self.received[source :: self.sources]) for source in range(self.sources)]

    def by_source(self, rows: Tensor) -> Tensor:
        return _transpose(torch.split(rows, self.received), self.sources)

    def by_expert(self, rows: Tensor) -> Tensor:
        sources = range(self.sources)
        lengths = [each for source in sources for each in self.received[source :: len(sources)]]
        return _transpose(torch.split(rows, lengths), self.experts)


def _sums(lengths: Sequence[Any], count: int) -> list[Any]:
    return [sum(lengths[first : first + count]) for first in range(0, len(lengths), count)]


def _transpose(parts: Sequence[Tensor], columns: int) -> Tensor:
    """Concatenate ``parts`` of a table of ``columns`` columns, column by column."""
    return torch.cat([part for column in range(columns) for part in parts[column::columns]])


def save(ctx: Any, record: GroupedArguments, output: Sequence[Tensor]) -> None:
    sent, received = list(record.input_splits), list(record.output_splits)
    ctx.splits = RowSplits(sent, received, int(record.weight.shape[0]))
    ctx.needed, ctx.kept, ctx.format = requiring(record), record.return_received, record.format
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if ctx.kept else record.input, record.weight)


def backward(op: str, ctx: Any, grads: Sequence[Tensor | None]) -> Mapping[str, Tensor]:
    kept, weight = ctx.saved_tensors
    splits, found = ctx.splits, {}
    grad, of_rows = grads[0], grads[1] if ctx.kept else None
    of_input = None
    parts: Sequence[Tensor] = ()
    if grad is not None:
        parts = torch.split(grad.to(kept.dtype), splits.of_experts)
    if "input" in ctx.needed and (grad is not None or of_rows is not None):
        if parts:
            pairs = zip(parts, weight.transpose(1, 2), strict=True)
            products = torch.cat([product(*pair, ctx.format, by_row=True) for pair in pairs])
            of_rows = products if of_rows is None else of_rows + products
        assert of_rows is not None
        rows = splits.by_source(of_rows)
        if op == GATHER:
            rows = spread(rows, splits.unequal, 0)
            of_input = _ops.reduce_scatter(rows, "sum", 0, ctx.size, ctx.name)
        else:
            back = splits.to_ranks, splits.from_ranks
            of_input = _ops.all_to_all(rows, *back, ctx.size, ctx.name)
    if "weight" in ctx.needed and parts:
        received = wait(kept) if ctx.kept else received_again(op, ctx, kept)
        inputs = torch.split(received, splits.of_experts)
        found["weight"] = of_weights(weight, inputs, parts, ctx.format)
    if "bias" in ctx.needed and parts:
        found["bias"] = torch.stack([part.sum(0) for part in parts])
    if of_input is not None:
        found["input"] = wait(of_input)
        if op == GATHER and splits.unequal is not None:
            found["input"] = found["input"][: sum(splits.sent)]
    return found


def received_again(op: str, ctx: Any, input: Tensor) -> Tensor:
    """Receive the rows that were multiplied once more, because the op has not kept them as floats."""
    splits: RowSplits = ctx.splits
    group = ctx.size, ctx.name
    if op == GATHER:
        longest = max(splits.unequal or [input.shape[0]])
        rows = wait(_ops.all_gather(pad(input, 0, longest), 0, *group))
        by_source = rows.reshape(splits.sources, longest, input.shape[1])
        parts = zip(by_source, splits.from_ranks, strict=True)
        return splits.by_expert(torch.cat([part[:length] for part, length in parts]))
    back = splits.from_ranks, splits.to_ranks
    return splits.by_expert(wait(_ops.all_to_all(input, *back, *group)))


def multiply_by_expert(
    output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    where: Iterable[slice],
    format: str = "",
) -> None:
    for expert, rows in enumerate(where):
        of_expert = None if bias is None else bias[expert]
        factors = input[rows], weight[expert], of_expert
        operands.multiply(output[rows], *factors, format=OPERAND_FORMATS.get(format))


def reference(op: str, ranks: Sequence[GroupedArguments], size: int) -> list[list[Tensor]]:
    calls = [with_splits(replace(each, op=op), size) for each in ranks]
    by_rank.alike(op, "input", by_rank.inputs(calls), but=0)
    by_rank.alike(op, "weight", [each.weight for each in calls], but=2)
    checks.algorithm_and_dtype(calls[0].input, calls[0])
    experts = calls[0].weight.shape[0]
    sent, outputs = [torch.split(each.input, each.input_splits) for each in calls], []
    for rank, call in enumerate(calls):
        checks.same_dtype("weight", call.weight.dtype, "input", call.input.dtype)
        first = 0 if op == GATHER else rank * experts
        arrived = [parts[e] for e in range(first, first + experts) for parts in sent]
        lengths = [len(each) for each in arrived]
        if lengths != call.output_splits:
            raise ValueError(
                f"{op}: output_splits is {call.output_splits} on rank {rank}, of input_splits the ranks "
                f"have {lengths} for it"
            )
        rows = torch.cat(arrived)
        output, received = results_of(call, len(rows))
        begins = prefix_sums(_sums(lengths, size))
        where = itertools.starmap(slice, itertools.pairwise(begins))
        multiply_by_expert(output, rows, call.weight, call.bias, where, call.format)
        outputs.append([output] if received is None else [output, received.copy_(rows)])
    return outputs


_GATHERED: dict[str, Example] = {
    "input": lambda setting: setting.numbers(EXPERTS * setting.own, setting.width),
    "input_splits": lambda setting: [setting.own] * EXPERTS,
    "output_splits": lambda setting: list(setting.rows) * EXPERTS,
}
_EXCHANGED: dict[str, Example] = {
    "input": lambda setting: setting.numbers(SLOTS * setting.own, setting.width),
    "input_splits": EXAMPLES["home_splits"],
    "output_splits": EXAMPLES["splits"],
}
OPS = tuple(
    Op(
        name,
        GroupedArguments,
        functools.partial(start, name),
        results,
        OpGradient(save, functools.partial(backward, name)),
        {"input": ("input",), "weight": ("weight",)},
        several=True,
        reference=functools.partial(reference, name),
        without=("format",),
        algorithms=fused_by("grouped_matmul_kernel"),
        examples={**EXAMPLES, **examples},
    )
    for name, examples in ((GATHER, _GATHERED), (EXCHANGE, _EXCHANGED))
)
