"""The fused op before a matmul: all-gather + matmul.

A call is validated, agreed on with the other ranks (one small host message; a mismatch raises on every
rank before any data moves), brought into 2-D form, and handed to one of the algorithms in
``runtime/algorithms/gather_matmul.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.fused.shapes import rows_of, unrows
from interlace.kernels.tiling import prefix_sums
from interlace.runtime.algorithms import gather_matmul as algorithms
from interlace.runtime.algorithms import plain
from interlace.runtime.algorithms.operands import Linear, multiply
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.stream import Outcome
from interlace.runtime.numerics import activations
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.auto import choose_algorithm


class Buffers(NamedTuple):
    """Where the results go, if the caller has made it: a matrix per weight, and the gathered input."""

    outputs: Sequence[torch.Tensor]
    gathered: torch.Tensor | None


def all_gather_matmul(
    communicator: Communicator,
    input: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    *,
    gather_dim: int,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None,
    return_gathered: bool,
    async_op: bool,
    algorithm: str,
    out_dtype: torch.dtype | None,
    buffers: Buffers | None = None,
    activation: str | Sequence[str | None] | None = None,
) -> Any:
    op = "all_gather_matmul"
    if communicator.plans is not None:
        known = communicator.plans.again(
            op,
            (input, weight, bias, *(buffers or ())),
            (gather_dim, return_gathered, algorithm, out_dtype, activation),
            async_op=async_op,
        )
        if known is not None:
            return known[0]
    rank = communicator.rank
    weight = weight if isinstance(weight, torch.Tensor) else checks.imported("weight", weight, rank)
    several = not isinstance(weight, torch.Tensor)
    with communicator.accepting(op):
        input = checks.tensor("input", input, communicator)
        checks.float_dtype("input", input.dtype, rank)
        if input.dim() < 2:
            raise ValueError(
                f"input must have at least 2 dimensions, got shape {tuple(input.shape)} on rank {rank}"
            )
        dim = checks.dimension("gather_dim", gather_dim, input.dim(), rank)
        along_k = dim == input.dim() - 1
        algorithm = checks.one_of("algorithm", algorithm, checks.ALGORITHMS, rank)
        result_dtype = checks.output_dtype(out_dtype, input, rank)
        checks.fused_algorithm_allowed(algorithm, input.dtype, result_dtype, rank)
        weights, biases = _weights_and_biases(weight, bias, input, along_k, communicator)
        names = activation_names(activation, len(weights), several, rank)

    def host() -> Outcome:
        explicit = configuration.override_key()
        k = [w.shape[0] for w in weights]
        options = (algorithm, result_dtype, k, bool(return_gathered), explicit)
        lengths, columns = _agree_on_shards(
            communicator, op, input, dim, options, [w.shape[1] for w in weights]
        )
        if buffers is not None and min(lengths) != max(lengths):
            raise ValueError(
                f"{op}: a traceable op takes equal shards, lengths along gather_dim are {lengths}"
            )
        inner = sum(lengths) if along_k else input.shape[-1]
        for number, each in enumerate(weights):
            if each.shape[0] != inner:
                raise ValueError(
                    f"weight{f'[{number}]' if several else ''} has {each.shape[0]} rows, the gathered "
                    f"input has k = {inner} ({input.shape[-1]} on rank {rank})"
                )
        run = _gather_inner if along_k else _gather_rows
        gathered, outputs, event = run(
            communicator,
            input,
            dim,
            list(zip(weights, biases, names, strict=True)),
            lengths,
            algorithm,
            result_dtype,
            return_gathered,
            buffers,
            columns,
        )
        if buffers is not None:
            return Outcome(None, event)
        result = outputs if several else outputs[0]
        return Outcome((gathered, result) if return_gathered else result, event)

    return communicator.run(op, host, async_op=async_op)


Products = list[tuple[torch.Tensor, torch.Tensor | None, str]]  # weight, bias, activation


def activation_names(activation: Any, count: int, several: bool, rank: int) -> list[str]:
    """One name for each of ``count`` weights."""
    if not several or activation is None or isinstance(activation, str):
        return [activations.checked("activation", activation, rank)] * count
    if not isinstance(activation, Sequence):
        raise TypeError(
            f"activation must be a name or a sequence like weight, got {type(activation).__name__} "
            f"on rank {rank}"
        )
    if len(activation) != count:
        raise ValueError(
            f"activation has {len(activation)} entries, weight has {count}, on rank {rank}"
        )
    return [
        activations.checked(f"activation[{i}]", each, rank) for i, each in enumerate(activation)
    ]


def _weights_and_biases(
    weight: Any, bias: Any, input: torch.Tensor, along_k: bool, communicator: Communicator
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Both as lists of equal length, checked; k itself only where the own shard has all of it."""
    rank, inner = communicator.rank, None if along_k else input.shape[-1]
    if isinstance(weight, torch.Tensor):
        matrix = checks.matrix("weight", weight, input, inner, communicator)
        return [matrix], [checks.bias_vector("bias", bias, matrix.shape[1], input, communicator)]
    if not isinstance(weight, Sequence) or isinstance(weight, str) or not weight:
        raise TypeError(
            f"weight must be a tensor or a non-empty sequence of tensors, got {type(weight).__name__} "
            f"on rank {rank}"
        )
    matrices = [
        checks.matrix(f"weight[{i}]", each, input, inner, communicator)
        for i, each in enumerate(weight)
    ]
    vectors = [None] * len(matrices) if bias is None else bias
    if isinstance(vectors, torch.Tensor) or not isinstance(vectors, Sequence):
        raise TypeError(
            f"bias must be a sequence like weight, got {type(bias).__name__} on rank {rank}"
        )
    if len(vectors) != len(matrices):
        raise ValueError(
            f"bias has {len(vectors)} entries, weight has {len(matrices)}, on rank {rank}"
        )
    return matrices, [
        checks.bias_vector(f"bias[{i}]", each, matrix.shape[1], input, communicator)
        for i, (each, matrix) in enumerate(zip(vectors, matrices, strict=True))
    ]


def _agree_on_shards(
    communicator: Communicator,
    op: str,
    input: torch.Tensor,
    dim: int,
    options: tuple[Any, ...],
    columns: list[int],
) -> tuple[list[int], list[int]]:
    """Length of every rank's shard along ``dim``; columns of all ranks' weights. Raises unless all else
    agrees.
    """
    rank = communicator.rank
    others = tuple(input.shape[:dim] + input.shape[dim + 1 :])
    mine = (input.dim(), dim, others, input.dtype, options, input.shape[dim], columns)
    answers = communicator.agree(op, mine)
    names = ("the number of dimensions of input", "gather_dim", "the shape of input off gather_dim")
    for index, name in enumerate(names):
        checks.equal_on_all(op, name, [answer[index] for answer in answers], rank)
    checks.equal_on_all(op, "dtype of input", [a[3] for a in answers], rank, kind=TypeError)
    options_of = ("algorithm", "out_dtype", "rows of weight", "return_gathered", "configuration")
    for index, name in enumerate(options_of):
        checks.equal_on_all(op, name, [a[4][index] for a in answers], rank)
    return [answer[5] for answer in answers], [n for answer in answers for n in answer[6]]


def _gather_rows(
    communicator: Communicator,
    input: torch.Tensor,
    dim: int,
    linears: Products,
    lengths: list[int],
    algorithm: str,
    dtype: torch.dtype,
    return_gathered: bool,
    buffers: Buffers | None,
    columns: list[int],
) -> tuple[torch.Tensor | None, list[torch.Tensor], Any]:
    """Shards are rows of the matmul: ``gather_dim`` is not the contracted one."""
    shard = rows_of(input, dim)
    others = [length for i, length in enumerate(input.shape[:-1]) if i != dim]
    per_index = 1
    for length in others:
        per_index *= length
    rows = [length * per_index for length in lengths]
    inner, total = shard.shape[1], sum(rows)
    targets = _targets(linears, total, dtype, input, buffers)
    gathered = None if buffers is None else buffers.gathered
    if return_gathered and gathered is None:
        gathered = torch.empty(total, inner, dtype=input.dtype, device=input.device)
    problem = tuning.gather_problem(communicator, input.dtype, max(rows), columns, inner)
    choice = tuning.choose(communicator, problem, algorithm)
    config = choice.configuration
    empty = not total * inner
    if algorithm == "auto" or empty:
        bytes_gathered = (total - min(rows)) * inner * input.element_size()
        wide = torch.float64 if dtype == torch.float64 else input.dtype
        algorithm = choose_algorithm(
            communicator.place, wide, total, bytes_gathered, empty=empty, tuned=choice.algorithm
        )
    if algorithm == "fused":
        event = algorithms.all_gather_matmul_fused(
            communicator, shard, targets, rows, gathered, config
        )
    elif algorithm == "pipelined":
        event = algorithms.all_gather_matmul_pipelined(
            communicator, shard, targets, rows, gathered, config
        )
    else:
        whole = gathered
        if whole is None:
            whole = torch.empty(total, inner, dtype=input.dtype, device=input.device)
        event = algorithms.all_gather_matmul_unfused(communicator, shard, targets, rows, whole)
    shape = [sum(lengths), *others]
    outputs = [unrows(target.output, shape, dim) for target in targets]
    return None if gathered is None else unrows(gathered, shape, dim), outputs, event


def _gather_inner(
    communicator: Communicator,
    input: torch.Tensor,
    dim: int,
    linears: Products,
    lengths: list[int],
    algorithm: str,
    dtype: torch.dtype,
    return_gathered: bool,
    buffers: Buffers | None,
    columns: list[int],
) -> tuple[torch.Tensor | None, list[torch.Tensor], Any]:
    """Shards are slices of the contracted dimension: every output needs every shard.

    Gathered as rows of the transposed input; "auto" and "unfused" only.
    """
    rank = communicator.rank
    if algorithm not in ("auto", "unfused"):
        raise ValueError(
            f"algorithm={algorithm!r} cannot gather along the contracted dimension, gather_dim={dim} "
            f'of {input.dim()} dimensions, on rank {rank}; use "unfused" or "auto"'
        )
    shard = input.movedim(-1, 0).contiguous()
    others = shard.shape[1:]
    per_index = shard[0].numel() if shard.shape[0] else 1
    for length in others if not shard.shape[0] else ():
        per_index *= length
    inner = sum(lengths)
    if buffers is not None and buffers.gathered is not None:
        transposed = buffers.gathered.view(inner, *others)
    else:
        transposed = torch.empty(inner, *others, dtype=input.dtype, device=input.device)
    whole = transposed.movedim(0, -1)
    rows = [length * per_index for length in lengths]
    firsts = prefix_sums(rows)
    flat = transposed.view(-1)
    parts = [flat[first : first + count] for first, count in zip(firsts, rows, strict=False)]
    plain.all_gather_copy(communicator, shard.view(-1), parts)
    total = flat.numel() // inner if inner else 1
    if not inner:
        for length in others:
            total *= length
    targets = _targets(linears, total, dtype, input, buffers)
    for target in targets:
        communicator.compute.call(
            lambda target=target: multiply(  # type: ignore[misc]
                target.output,
                whole.reshape(total, inner),
                target.weight,
                target.bias,
                target.activation,
            ),
            "matmul",
        )
    outputs = [target.output.view(*others, target.output.shape[1]) for target in targets]
    return (whole if return_gathered else None), outputs, communicator.compute.record()


def _targets(
    linears: Products,
    rows: int,
    dtype: torch.dtype,
    input: torch.Tensor,
    buffers: Buffers | None,
) -> list[Linear]:
    """Each weight with its bias and a matrix for its output."""
    if buffers is not None:
        return [
            Linear(w, b, out, activation=name)
            for (w, b, name), out in zip(linears, buffers.outputs, strict=True)
        ]
    return [
        Linear(
            w, b, torch.empty(rows, w.shape[1], dtype=dtype, device=input.device), activation=name
        )
        for w, b, name in linears
    ]
