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
``runtime/algorithms/grouped_matmul.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.collectives.all_to_all import whole_numbers
from interlace.runtime.algorithms import grouped_matmul as algorithms
from interlace.runtime.algorithms.grouped_routes import Routes
from interlace.runtime.algorithms.operands import Linear
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.numerics import activations
from interlace.runtime.tuning import configuration
from interlace.runtime.tuning.auto import choose_algorithm

GATHER, EXCHANGE = "all_gather_grouped_matmul", "all_to_all_grouped_matmul"


class Buffers(NamedTuple):
    """Where the results go, if the caller has made it."""

    output: torch.Tensor
    received: torch.Tensor | None


class Asked(NamedTuple):
    """The arguments of a call that are no tensors of values."""

    op: str
    input_splits: Any
    output_splits: Any
    activation: str | None
    return_received: bool
    algorithm: str
    out_dtype: torch.dtype | None


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
    asked: Asked,
    *,
    async_op: bool,
    buffers: Buffers | None = None,
) -> Any:
    """Either op, without gradients. With ``buffers`` the result is nothing but what they hold."""
    call = checked(communicator, input, weight, bias, asked)

    def host() -> Outcome:
        routes = agree(communicator, asked, call)
        made = buffers
        if made is None:
            shape = (routes.received(communicator.rank), call.weight.shape[2])
            output = call.input.new_empty(shape, dtype=call.dtype)
            kept, inner = asked.return_received, call.input.shape[1]
            made = Buffers(output, call.input.new_empty(shape[0], inner) if kept else None)
        event = _start(communicator, asked.op, call, routes, made)
        if buffers is not None:
            return Outcome(None, event)
        return Outcome(result(made.received, made.output, routes.splits()), event)

    return communicator.run(asked.op, host, async_op=async_op)


def _start(
    communicator: Communicator, op: str, call: Checked, routes: Routes, buffers: Buffers
) -> Event:
    """Choose the algorithm, from what all ranks know alike, and start it."""
    input, linear = call.input, Linear(call.weight, call.bias, buffers.output)
    linear.activation = call.activation
    inner, place = input.shape[1], communicator.place
    rows = routes.most_received
    empty = not rows * inner
    algorithm = call.algorithm
    if algorithm == "auto" or empty:
        moved = rows * inner * input.element_size() if routes.world_size > 1 else 0
        wide = torch.float64 if call.dtype == torch.float64 else input.dtype
        algorithm = choose_algorithm(place, wide, rows, moved, empty=empty)
        if place.nodes is not None:
            algorithm = "unfused"
    if algorithm == "unfused":
        return algorithms.grouped_matmul_unfused(
            communicator, op, input, linear, routes, buffers.received
        )
    if place.nodes is not None:
        raise ValueError(
            f'{op}: algorithm="{algorithm}" works within one node, the group has several; use '
            f'"unfused" or "auto", on rank {communicator.rank}'
        )
    columns = call.weight.shape[2]
    chosen = configuration.choose(place, input.dtype, routes.longest, columns, inner, grouped=True)
    run = algorithms.grouped_matmul_pipelined
    if algorithm == "fused":
        run = algorithms.grouped_matmul_fused
    return run(communicator, op, input, linear, routes, buffers.received, chosen)


# -- validation ----------------------------------------------------------------------------------------


def checked(
    communicator: Communicator,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    asked: Asked,
) -> Checked:
    """The arguments, if they fit together on this rank."""
    rank, world_size = communicator.rank, communicator.world_size
    with communicator.accepting(asked.op):
        input = checks.tensor("input", input, communicator)
        checks.float_dtype("input", input.dtype, rank)
        if input.dim() != 2:
            raise ValueError(
                f"input must have 2 dimensions (rows, k), got shape {tuple(input.shape)} on rank {rank}"
            )
        weight = checks.tensor("weight", weight, communicator)
        if weight.dim() != 3 or not weight.shape[0]:
            raise ValueError(
                "weight must have 3 dimensions (experts, k, n) and at least one expert, got shape "
                f"{tuple(weight.shape)} on rank {rank}"
            )
        checks.same_dtype("weight", weight.dtype, "input", input.dtype, rank)
        if weight.shape[1] != input.shape[1]:
            raise ValueError(
                f"weight has k = {weight.shape[1]} (shape {tuple(weight.shape)}), input has k = "
                f"{input.shape[1]} (shape {tuple(input.shape)}), on rank {rank}"
            )
        experts = weight.shape[0] * (world_size if asked.op == EXCHANGE else 1)
        sent = counts("input_splits", asked.input_splits, rank)
        if asked.op == EXCHANGE and len(sent) % world_size:
            raise ValueError(
                f"input_splits has {len(sent)} experts, which world size {world_size} does not divide, "
                f"on rank {rank}"
            )
        if len(sent) != experts:
            of = f"{world_size} ranks with " if asked.op == EXCHANGE else ""
            raise ValueError(
                f"input_splits has {len(sent)} entries, {of}{weight.shape[0]} experts in weight make "
                f"{experts}, on rank {rank}"
            )
        if sum(sent) != input.shape[0]:
            raise ValueError(
                f"input_splits adds up to {sum(sent)}, input has {input.shape[0]} rows, on rank {rank}"
            )
        expected = None
        if asked.output_splits is not None:
            expected = counts("output_splits", asked.output_splits, rank)
            if len(expected) != weight.shape[0] * world_size:
                raise ValueError(
                    f"output_splits has {len(expected)} entries, {weight.shape[0]} experts and "
                    f"{world_size} ranks make {weight.shape[0] * world_size}, on rank {rank}"
                )
        if bias is not None:
            bias = checks.tensor("bias", bias, communicator)
            if bias.shape != (weight.shape[0], weight.shape[2]):
                raise ValueError(
                    f"bias must have shape {(weight.shape[0], weight.shape[2])} to match weight, got "
                    f"{tuple(bias.shape)} on rank {rank}"
                )
            checks.same_dtype("bias", bias.dtype, "input", input.dtype, rank)
            bias = bias.contiguous()
        name = activations.checked("activation", asked.activation, rank)
        algorithm = checks.one_of("algorithm", asked.algorithm, checks.ALGORITHMS, rank)
        dtype = checks.output_dtype(asked.out_dtype, input, rank)
        checks.fused_algorithm_allowed(algorithm, input.dtype, dtype, rank)
    if input.shape[1] > 1 and input.stride(1) != 1:
        input = input.contiguous()
    return Checked(input, weight, bias, sent, expected, name, algorithm, dtype)


def counts(name: str, value: Any, rank: int) -> list[int]:
    """Numbers of rows: ints, or a tensor of integers, none negative."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            raise TypeError(
                f"{name} must be a tensor of integers, got {value.dtype} on rank {rank}"
            )
        value = value.flatten().tolist()
    numbers = whole_numbers(name, value, rank)
    if numbers and min(numbers) < 0:
        raise ValueError(f"{name} must not be negative, got {numbers} on rank {rank}")
    return numbers


def agree(
    communicator: Communicator, asked: Asked, call: Checked, said: str | None = None
) -> Routes:
    """The routes; raises unless all ranks' arguments fit together, on every rank the same.

    ``said``: what ranks call this agreement, if not by the op.
    """
    op, rank, world_size = asked.op, communicator.rank, communicator.world_size
    options = (
        call.input.shape[1],
        len(call.input_splits),
        call.algorithm,
        call.dtype,
        bool(asked.return_received),
        configuration.override_key(),
    )
    answers = communicator.agree(
        said or op, (call.input.dtype, options, tuple(call.input_splits), call.output_splits)
    )
    checks.equal_on_all(op, "dtype of input", [a[0] for a in answers], rank, kind=TypeError)
    names = (
        "k of input", "the number of experts", "algorithm", "out_dtype", "return_received",
        "configuration",
    )  # fmt: skip
    for index, name in enumerate(names):
        checks.equal_on_all(op, name, [a[1][index] for a in answers], rank)
    experts = len(call.input_splits)
    if op == GATHER:
        blocks = [(0, experts)] * world_size
    else:
        each = experts // world_size
        blocks = [(r * each, (r + 1) * each) for r in range(world_size)]
    routes = Routes(rank, tuple(answer[2] for answer in answers), tuple(blocks))
    for receiver, answer in enumerate(answers):
        if answer[3] is not None:
            _expected(op, routes, receiver, answer[3])
    return routes


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
