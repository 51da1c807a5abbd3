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
``python/interlace/ops/experts/launch_grouped.py``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.ops.collectives.all_to_all import whole_numbers
from interlace.ops.experts.grouped_routes import Routes
from interlace.ops.experts.launch_grouped import GroupedMatmul
from interlace.ops.matmul.operands import Linear
from interlace.runtime.core.call import Call, PreparedCall, Terms
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import name_algorithm, with_context
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.auto import choose_algorithm

GATHER, EXCHANGE = "all_gather_grouped_matmul", "all_to_all_grouped_matmul"


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

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    input_splits: list[int]
    output_splits: list[int] | None
    activation: str
    algorithm: str
    dtype: torch.dtype


def result(received: Any, output: torch.Tensor, splits: list[list[int]]) -> Any:
    counts = torch.tensor(splits, dtype=torch.int64)
    return (output, counts) if received is None else (received, output, counts)


def grouped_matmul(
    communicator: Communicator,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor | None,
    received: torch.Tensor | None,
    options: GroupedOptions,
) -> PreparedCall:
    """Either op, checked. ``output`` and ``received`` get the results, if the caller has made them."""
    call = checked(communicator, input, weight, bias, options)

    def start() -> Outcome:
        routes, columns = agree(communicator, options, call)
        made, rows = output, received
        if made is None:
            count = routes.received(communicator.rank)
            made = call.input.new_empty(count, call.weight.shape[2], dtype=call.dtype)
            if options.return_received:
                rows = call.input.new_empty(count, call.input.shape[1])
        event = started(communicator, options.op, call, routes, columns, made, rows)
        if output is not None:
            return Outcome(None, event)
        return Outcome(result(rows, made, routes.splits()), event)

    return start, (), None


def started(
    communicator: Communicator,
    op: str,
    call: Checked,
    routes: Routes,
    columns: int,
    output: torch.Tensor,
    received: torch.Tensor | None,
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
    communicator: Communicator, input: torch.Tensor, weight: torch.Tensor, options: Any
) -> tuple[torch.Tensor, torch.Tensor, str, torch.dtype]:
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
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
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
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
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
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            raise TypeError(f"{name} must be a tensor of integers, got {value.dtype}")
        value = value.flatten().tolist()
    numbers = whole_numbers(name, value)
    if numbers and min(numbers) < 0:
        raise ValueError(f"{name} must not be negative, got {numbers}")
    return numbers


def terms_of(
    input: torch.Tensor, experts: int, dtype: torch.dtype, options: GroupedOptions
) -> Terms:
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
