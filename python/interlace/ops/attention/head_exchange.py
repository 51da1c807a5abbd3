"""The fused ops around an attention over heads: matmul + all-to-all, and all-to-all + matmul.

A call is validated, agreed on with the other ranks (one small host message, which brings everybody's number
of rows along; a mismatch raises on every rank before any data moves), and handed to one of the algorithms
in ``python/interlace/ops/attention/launch_head_exchange.py``.
"""

import math
from typing import Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.ops.attention import launch_head_exchange as algorithms
from interlace.ops.attention.launch_head_exchange import FROM_HEADS, TO_HEADS
from interlace.ops.matmul.operands import Linear, rows_of
from interlace.runtime.core.call import PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.auto import choose_algorithm

Tensor = torch.Tensor


class HeadExchangeOptions(NamedTuple):
    """The arguments of a call that are no tensors; see ``functional.matmul_all_to_all``.

    ``length``: of dimension 0 of the result, None where all ranks have equal parts.
    """

    op: str
    length: int | None = None
    algorithm: str = "auto"
    out_dtype: None = None  # for the checks that are other ops', too


class CheckedExchange(NamedTuple):
    """The arguments of a call, checked on this rank. ``own``: this rank's part of dimension 0."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    own: int
    algorithm: str


def result_shape(op: str, input: Tensor, weight: Tensor, length: Any, world_size: Any) -> list[Any]:
    """The shape of a result; sizes may be symbolic."""
    if input.dim() < 2 or weight.dim() != 2:
        raise ValueError(
            f"input must have at least 2 dimensions and weight 2, got shapes {tuple(input.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if isinstance(length, int) and length < 0:
        raise ValueError(f"length must be None or not negative, got {length}")
    if op == TO_HEADS:
        rows = input.shape[0] * world_size if length is None else length
        return [rows, *input.shape[1:-1], weight.shape[1] // world_size]
    rows = input.shape[0] // world_size if length is None else length
    return [rows, *input.shape[1:-1], weight.shape[1]]


def checked(
    communicator: Communicator, input: Any, weight: Any, bias: Any, options: HeadExchangeOptions
) -> CheckedExchange:
    """The arguments, if they fit together on this rank."""
    size, length = communicator.world_size, options.length
    input = checks.tensor("input", input, communicator)
    algorithm, _ = checks.algorithm_and_dtype(input, options)
    if input.dim() < 2:
        raise ValueError(f"input must have at least 2 dimensions, got shape {tuple(input.shape)}")
    rows, inner = input.shape[0], input.shape[-1]
    to_heads = options.op == TO_HEADS
    weight = checks.matrix("weight", weight, input, inner if to_heads else None, communicator)
    bias = checks.bias_of("bias", bias, (weight.shape[1],), input, communicator)
    if to_heads:
        if weight.shape[1] % size:
            raise ValueError(
                f"weight has {weight.shape[1]} columns, which world size {size} does not divide"
            )
        return CheckedExchange(input, weight, bias, rows, algorithm)
    if weight.shape[0] != inner * size:
        raise ValueError(
            f"weight has {weight.shape[0]} rows, {size} ranks with k = {inner} (input has shape "
            f"{tuple(input.shape)}) make {inner * size}"
        )
    if length is None and rows % size:
        raise ValueError(
            f"input has length {rows}, which world size {size} does not divide; give length"
        )
    return CheckedExchange(
        input, weight, bias, rows // size if length is None else length, algorithm
    )


def prepared(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output: Tensor,
    received: Tensor | None,
    options: HeadExchangeOptions,
) -> PreparedCall:
    """Either op. ``output``, and ``received`` if there is one, get the results."""
    call = checked(communicator, input, weight, bias, options)

    def start() -> Outcome:
        op = options.op
        terms = (
            ("dtype of input", call.input.dtype),
            ("the shape of input off dimension 0", tuple(call.input.shape[1:])),
            ("the shape of weight", tuple(call.weight.shape)),
            ("bias", call.bias is not None),
            ("algorithm", call.algorithm),
        )
        whole = output.shape[0] if op == TO_HEADS else call.input.shape[0]
        parts = communicator.parts(communicator.call_of(op, terms, (call.own, whole)))
        lengths = [own for own, _ in parts]
        for rank, (_, total) in enumerate(parts):
            if total != sum(lengths):
                name = "length" if op == TO_HEADS else "input"
                raise ValueError(
                    f"{op}: {name} is for {total} on rank {rank}, the ranks have {sum(lengths)} "
                    f"({lengths} by rank)"
                )
        return Outcome(None, _started(communicator, op, call, lengths, output, received))

    return start, (), None


def _started(
    communicator: Communicator,
    op: str,
    call: CheckedExchange,
    lengths: list[int],
    output: Tensor,
    received: Tensor | None,
) -> Event | None:
    """Choose the algorithm, from what all ranks know alike, and start it."""
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
        tuned = tuning.measured(communicator, problem).algorithm
        algorithm = choose_algorithm(place, input.dtype, sum(rows), moved, empty=False, tuned=tuned)
    checks.one_node(algorithm, communicator)
    name_algorithm(algorithm)
    if algorithm == "fused":
        tiles = configuration.choose(place, input.dtype, max(rows), columns, inner)
        tiles = tuning.measured(communicator, problem, algorithm).over(tiles)
    if op == TO_HEADS:
        if algorithm == "unfused":
            return algorithms.to_heads_unfused(communicator, input, linear, rows)
        if algorithm == "pipelined":
            return algorithms.to_heads_pipelined(communicator, input, linear, rows)
        return algorithms.to_heads_fused(communicator, input, linear, rows, tiles)
    if algorithm == "unfused":
        return algorithms.from_heads_unfused(communicator, input, linear, rows, received)
    if algorithm == "pipelined":
        return algorithms.from_heads_pipelined(communicator, input, linear, rows, received)
    return algorithms.from_heads_fused(communicator, input, linear, rows, received, tiles)


FORMS = {op: internal_form(op, prepared) for op in (TO_HEADS, FROM_HEADS)}
