"""The fused ops of a mixture of experts: a collective of rows, then a matmul for each expert.

Order of rows
-------------
Before, on every rank: sorted by expert. ``input_splits[e]`` rows are for expert e, of all E experts of the
group; expert e belongs to rank ``e // (E / W)`` where experts are spread over ranks. A token that goes to
k experts is there k times.

After: by expert, then by source rank, then as the source had them. ``splits[e][s]`` rows of the result
belong to the rank's expert e and come from rank s. This is the order of torch's
``symm_mem.all_to_all_vdev_2d``, and what ``all_to_all_single`` gives after its parts have been sorted by
expert (Megatron's ``sort_chunks_by_idxs``). It does not depend on the algorithm, nor on timing.

A call is validated, agreed on with the other ranks (one small host message, which brings everybody's splits
along; a mismatch raises on every rank before any data moves), and handed to one of the algorithms in
``python/interlace/ops/experts/launch_grouped.py``. The ops of torch get the numbers of rows on both sides
as lists of ints, so what they return is known before they run.

Gradients: of the rows, the products of the outputs' gradients with their experts' weights, moved back: by
all_to_all, or reduced and scattered where they had been gathered (for which all ranks must have equally
many); of a weight, the rows that were multiplied times the gradient. These matmuls are torch's, and the
collective follows them.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.ops.collectives.all_to_all import whole_numbers
from interlace.ops.experts.grouped_routes import Routes
from interlace.ops.experts.launch_grouped import GroupedMatmul
from interlace.ops.matmul.operands import Linear
from interlace.ops.op.gradients import wait
from interlace.ops.op.op import Op, OpGradient, requiring
from interlace.ops.op.pending import Started
from interlace.ops.op.registry import Ops
from interlace.runtime.core.call import Call, PreparedCall, Terms
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.context import name_algorithm, with_context
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.auto import choose_algorithm

GATHER, EXCHANGE = "all_gather_grouped_matmul", "all_to_all_grouped_matmul"
Tensor = torch.Tensor
_ops: Any = Ops()


@dataclass
class GroupedArguments:
    """The splits are as above, by expert, and by expert and source rank."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    input_splits: list[torch.SymInt]
    output_splits: list[torch.SymInt]
    return_received: bool
    algorithm: str
    out_dtype: torch.dtype | None


class GroupedOptions(NamedTuple):
    """The arguments of a call that are no tensors of values; ``op`` says which op it is.

    ``max_rows``: a bound of every rank's rows, where counts stay on the device (``counted.py``).
    """

    op: str
    input_splits: Any
    output_splits: Any = None
    return_received: bool = False
    algorithm: str = "auto"
    out_dtype: torch.dtype | None = None
    activation: str | None = None
    max_rows: int = 0


class Checked(NamedTuple):
    """The arguments of a call, checked on this rank."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    input_splits: list[int]
    output_splits: list[int] | None
    activation: str
    algorithm: str
    dtype: torch.dtype


def result(received: Any, output: Tensor, splits: list[list[int]]) -> Any:
    counts = torch.tensor(splits, dtype=torch.int64)
    return (output, counts) if received is None else (received, output, counts)


def grouped_matmul(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output: Tensor | None,
    received: Tensor | None,
    options: GroupedOptions,
) -> PreparedCall:
    """Either op, checked. ``output`` and ``received`` get the results, if the caller has made them."""
    call = checked(communicator, input, weight, bias, options)

    def start() -> Outcome:
        routes, columns = agree(communicator, options, call)
        made, rows = output, received
        if made is None:
            count = routes.received(communicator.rank)
            kept = options.return_received
            made, rows = results_of(call.input, call.weight, count, call.dtype, kept)
        event = started(communicator, options.op, call, routes, columns, made, rows)
        if output is not None:
            return Outcome(None, event)
        return Outcome(result(rows, made, routes.splits()), event)

    return start, (), None


FORMS = {op: internal_form(op, grouped_matmul) for op in (GATHER, EXCHANGE)}


def results_of(
    input: Tensor, weight: Tensor, rows: Any, dtype: torch.dtype, return_received: bool
) -> tuple[Tensor, Tensor | None]:
    """Tensors for the output and, if asked for, the rows that were multiplied."""
    output = input.new_empty(rows, weight.shape[2], dtype=dtype)
    return output, input.new_empty(rows, input.shape[1]) if return_received else None


def started(
    communicator: Communicator,
    op: str,
    call: Checked,
    routes: Routes,
    columns: int,
    output: Tensor,
    received: Tensor | None,
) -> Event:
    """Choose the algorithm, from what all ranks know alike, and start it. ``columns``: of the widest."""
    input, linear = call.input, Linear(call.weight, call.bias, output)
    linear.activation = call.activation
    inner, place = input.shape[1], communicator.place
    rows = routes.most_received
    empty = not rows * inner
    algorithm = call.algorithm
    if algorithm == "auto" or empty:
        moved = rows * inner * input.element_size() if routes.world_size > 1 else 0
        wide = torch.float64 if call.dtype == torch.float64 else input.dtype
        tuned = ""
        if not empty:
            about = rows, columns, inner, routes.world_size
            problem = tuning.Problem(op, input.dtype, *about)
            tuned = tuning.measured(communicator, problem).algorithm
        algorithm = choose_algorithm(place, wide, rows, moved, empty=empty, tuned=tuned)
        if place.nodes is not None:
            algorithm = "unfused"
    made = GroupedMatmul(communicator, op, input, linear, routes, received)
    checks.one_node(algorithm, communicator)
    name_algorithm(algorithm)
    if algorithm == "unfused":
        return made.unfused()
    if algorithm == "pipelined":
        return made.pipelined()
    extents = routes.longest, call.weight.shape[2], inner
    return made.fused(configuration.choose(place, input.dtype, *extents, grouped=True))


def rows_and_experts(
    communicator: Communicator, input: Tensor, weight: Tensor, options: Any
) -> tuple[Tensor, Tensor, str, torch.dtype]:
    """``input`` (rows, k) and ``weight`` (experts, k, n), if they fit, with the algorithm and the dtype."""
    input = checks.tensor("input", input, communicator)
    algorithm, dtype = checks.algorithm_and_dtype(input, options)
    if input.dim() != 2:
        raise ValueError(f"input must have 2 dimensions (rows, k), got shape {tuple(input.shape)}")
    weight = checks.tensor("weight", weight, communicator)
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
    return input, weight, algorithm, dtype


def checked_tensors(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: GroupedOptions,
) -> Checked:
    """The arguments but for splits, if they fit together on this rank."""
    input, weight, algorithm, dtype = rows_and_experts(communicator, input, weight, options)
    bias = checks.bias_of("bias", bias, (weight.shape[0], weight.shape[2]), input, communicator)
    name = checks.activation("activation", options.activation)
    checks.flag("return_received", options.return_received)
    if input.shape[1] > 1 and input.stride(1) != 1:
        input = input.contiguous()
    return Checked(input, weight, bias, [], None, name, algorithm, dtype)


def checked(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: GroupedOptions,
) -> Checked:
    """The arguments, if they fit together on this rank."""
    world_size = communicator.world_size
    call = checked_tensors(communicator, input, weight, bias, options)
    input, weight = call.input, call.weight
    experts = weight.shape[0] * (world_size if options.op == EXCHANGE else 1)
    sent = counts("input_splits", options.input_splits)
    if options.op == EXCHANGE and len(sent) % world_size:
        raise ValueError(
            f"input_splits has {len(sent)} experts, which world size {world_size} does not divide"
        )
    if len(sent) != experts:
        of = f"{world_size} ranks with " if options.op == EXCHANGE else ""
        raise ValueError(
            f"input_splits has {len(sent)} entries, {of}{weight.shape[0]} experts in weight make "
            f"{experts}"
        )
    if sum(sent) != input.shape[0]:
        raise ValueError(f"input_splits adds up to {sum(sent)}, input has {input.shape[0]} rows")
    expected = None
    if options.output_splits is not None:
        expected = counts("output_splits", options.output_splits)
        if len(expected) != weight.shape[0] * world_size:
            raise ValueError(
                f"output_splits has {len(expected)} entries, {weight.shape[0]} experts and "
                f"{world_size} ranks make {weight.shape[0] * world_size}"
            )
    return call._replace(input_splits=sent, output_splits=expected)


def counts(name: str, value: Any) -> list[int]:
    """Numbers of rows: ints, or a tensor of integers, none negative."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            raise TypeError(f"{name} must be a tensor of integers, got {value.dtype}")
        value = value.flatten().tolist()
    numbers = whole_numbers(name, value)
    if numbers and min(numbers) < 0:
        raise ValueError(f"{name} must not be negative, got {numbers}")
    return numbers


def terms_of(input: Tensor, experts: int, dtype: torch.dtype, options: GroupedOptions) -> Terms:
    """What is equal on all ranks."""
    return (
        ("dtype of input", input.dtype),
        ("k of input", input.shape[1]),
        ("the number of experts", experts),
        ("algorithm", options.algorithm),
        ("out_dtype", dtype),
        ("return_received", options.return_received),
        ("num_max_rows_per_rank", options.max_rows or None),
    )


def agree(
    communicator: Communicator, options: GroupedOptions, call: Checked, more: Terms = ()
) -> tuple[Routes, int]:
    """The routes, and the columns of the widest weight; raises alike on all ranks.

    ``more``: on what else they have to agree.
    """
    op, rank, world_size = options.op, communicator.rank, communicator.world_size
    terms = terms_of(call.input, len(call.input_splits), call.dtype, options)
    mine = tuple(call.input_splits), call.output_splits, call.weight.shape[2]
    answers = communicator.parts(Call(op, with_context((*terms, *more)), part=mine))
    experts = len(call.input_splits)
    if op == GATHER:
        blocks = [(0, experts)] * world_size
    else:
        each = experts // world_size
        blocks = [(r * each, (r + 1) * each) for r in range(world_size)]
    routes = Routes(rank, tuple(sent for sent, *_ in answers), tuple(blocks))
    for receiver, (_, expected, _) in enumerate(answers):
        if expected is not None:
            _expected(op, routes, receiver, expected)
    return routes, max(columns for *_, columns in answers)


def _expected(op: str, routes: Routes, receiver: int, expected: Sequence[int]) -> None:
    """Compare a rank's ``output_splits`` with what the ranks have for it."""
    for number, segment in enumerate(s for each in routes.segments(receiver) for s in each):
        if expected[number] != segment.rows:
            expert = routes.blocks[receiver][0] + segment.expert
            raise ValueError(
                f"{op}: output_splits[{number}] (expert {expert} from rank {segment.source}) is "
                f"{expected[number]} on rank {receiver}, input_splits[{expert}] is {segment.rows} on "
                f"rank {segment.source}"
            )


def results(given: GroupedArguments, size: int) -> list[Tensor]:
    input, weight = given.input, given.weight
    if input.dim() != 2 or weight.dim() != 3:
        raise ValueError(
            f"input must have 2 dimensions and weight 3, got shapes {tuple(input.shape)} and "
            f"{tuple(weight.shape)}"
        )
    rows, dtype = sum(given.output_splits), checks.output_dtype(given.out_dtype, input)
    output, received = results_of(input, weight, rows, dtype, given.return_received)
    return [output] if received is None else [output, received]


def start(op: str, communicator: Communicator, given: GroupedArguments) -> Started:
    with communicator.accepting(op):
        received = counts("output_splits", list(given.output_splits))
        how = given.return_received, given.algorithm, given.out_dtype
        options = GroupedOptions(op, list(given.input_splits), received, *how)
        made = results(given, communicator.world_size)
    tensors = (given.input, given.weight, given.bias, made[0], made[1] if made[1:] else None)
    return Started(made, FORMS[op](communicator, tensors, (options,), True))


class RowSplits(NamedTuple):
    """A call's numbers of rows. The group's size is that of ``received``, where it is traced too."""

    sent: list[Any]
    received: list[Any]
    experts: int  # of this rank

    @property
    def sources(self) -> int:
        return len(self.received) // self.experts

    @property
    def of_experts(self) -> list[Any]:
        """The rows that each expert of this rank multiplies."""
        return _sums(self.received, self.sources)

    @property
    def to_ranks(self) -> list[Any]:
        return _sums(self.sent, self.experts)

    @property
    def from_ranks(self) -> list[Any]:
        return [sum(self.received[source :: self.sources]) for source in range(self.sources)]

    def by_source(self, rows: Tensor) -> Tensor:
        """Rows that are by expert and source, by source and expert."""
        return _transposed(torch.split(rows, self.received), self.sources)

    def by_expert(self, rows: Tensor) -> Tensor:
        """Rows that are by source and expert, by expert and source."""
        sources = range(self.sources)
        lengths = [each for source in sources for each in self.received[source :: len(sources)]]
        return _transposed(torch.split(rows, lengths), self.experts)


def _sums(lengths: Sequence[Any], count: int) -> list[Any]:
    """Sums of ``count`` lengths each."""
    return [sum(lengths[first : first + count]) for first in range(0, len(lengths), count)]


def _transposed(parts: Sequence[Tensor], columns: int) -> Tensor:
    """``parts`` of a table with so many columns, column by column."""
    return torch.cat([part for column in range(columns) for part in parts[column::columns]])


def save(ctx: Any, given: GroupedArguments, output: Sequence[Tensor]) -> None:
    sent, received = list(given.input_splits), list(given.output_splits)
    ctx.splits = RowSplits(sent, received, int(given.weight.shape[0]))
    ctx.needed, ctx.kept = requiring(given), given.return_received
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if ctx.kept else given.input, given.weight)


def backward(op: str, ctx: Any, grads: Sequence[Tensor | None]) -> Mapping[str, Tensor]:
    kept, weight = ctx.saved_tensors
    splits, found = ctx.splits, {}
    grad, of_rows = grads[0], grads[1] if ctx.kept else None
    of_input = None
    parts: Sequence[Tensor] = ()
    if grad is not None:
        parts = torch.split(grad.to(weight.dtype), splits.of_experts)
    if "input" in ctx.needed and (grad is not None or of_rows is not None):
        if parts:
            product = torch.cat([part @ weight[e].t() for e, part in enumerate(parts)])
            of_rows = product if of_rows is None else of_rows + product
        assert of_rows is not None
        rows = splits.by_source(of_rows)
        if op == GATHER:
            of_input = _ops.reduce_scatter(rows, "sum", 0, ctx.size, ctx.name)
        else:
            back = splits.to_ranks, splits.from_ranks
            of_input = _ops.all_to_all(rows, *back, ctx.size, ctx.name)
    if "weight" in ctx.needed and parts:
        received = wait(kept) if ctx.kept else _received_again(op, ctx, kept)
        found["weight"] = of_weights(torch.split(received, splits.of_experts), parts)
    if "bias" in ctx.needed and parts:
        found["bias"] = torch.stack([part.sum(0) for part in parts])
    if of_input is not None:
        found["input"] = wait(of_input)
    return found


def of_weights(inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """The gradient of the weights: of each expert its rows times their products' gradients."""
    return torch.stack([rows.t() @ grad for rows, grad in zip(inputs, grads, strict=True)])


def _received_again(op: str, ctx: Any, input: Tensor) -> Tensor:
    """The rows that were multiplied, received once more because the op has not kept them."""
    splits: RowSplits = ctx.splits
    group = ctx.size, ctx.name
    if op == GATHER:
        return splits.by_expert(wait(_ops.all_gather(input, 0, *group)))
    back = splits.from_ranks, splits.to_ranks
    return splits.by_expert(wait(_ops.all_to_all(input, *back, *group)))


OPS = tuple(
    Op(
        name,
        GroupedArguments,
        functools.partial(start, name),
        results,
        OpGradient(save, functools.partial(backward, name)),
        {"input": ("input",), "weight": ("weight",)},
        several=True,
    )
    for name in (GATHER, EXCHANGE)
)
