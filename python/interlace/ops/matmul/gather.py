"""The fused op all-gather + matmul. ``launch_gather.py`` has its algorithms, on matrices.

The gradient of the input is a matmul_reduce_scatter. The gradient of a weight is the gathered input times
the product's gradient. The op that communicates is started first, and waited for last.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Annotated, Any

import torch

from interlace.arguments import checks
from interlace.ops.collectives import records as by_rank
from interlace.ops.matmul import launch_gather as algorithms
from interlace.ops.matmul.block_scaled import call_in, packed_parts, product, product_of_rows
from interlace.ops.matmul.formats import OPERAND_FORMATS, format_term, length_along_k
from interlace.ops.matmul.operands import (
    Linear,
    checked_bias,
    gathered_input,
    gathered_rows,
    multiply,
    rows_of,
)
from interlace.ops.op import shapes
from interlace.ops.op.op import (
    Op,
    OpGradient,
    Output,
    Started,
    fused_by,
    names_of_tensors,
    own_rows,
    pad,
    rows,
    spread,
    start_form,
    wait,
)
from interlace.ops.op.recording import call
from interlace.runtime.core.call import PreparedCall
from interlace.runtime.core.communicator import Communicator, record_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import tuning
from interlace.runtime.tuning.tuning import choose_algorithm

OP = "all_gather_matmul"
Tensor = torch.Tensor


@dataclasses.dataclass
class AllGatherMatmulArguments:
    """The arguments of the op; see :func:`interlace.all_gather_matmul`.

    In an eager call ``weights`` may be one weight, and ``biases`` one bias or None. ``recorded``: autograd
    records the call, which then returns the op's results. ``lengths``: the shards' lengths by rank, None if
    they are equal.
    """

    input: Annotated[Any, "Tensor"]
    weights: Annotated[Any, "Tensor[]"] = None
    biases: Annotated[Any, "Tensor?[]"] = None
    gather_dim: int = 0
    return_gathered: bool = False
    algorithm: str = "auto"
    out_dtype: torch.dtype | None = None
    activation: Annotated[str | Sequence[str | None] | None, ""] = None
    recorded: Annotated[bool, ""] = False
    lengths: Annotated[list[int] | None, ""] = None
    format: str = ""


def prepare(
    communicator: Communicator, record: AllGatherMatmulArguments, buffers: Sequence[Tensor] | None
) -> PreparedCall:
    """Check the call on this rank. ``buffers`` for results: one per weight, one for the gathered input."""
    biases = None if buffers is not None and not record.biases else record.biases
    operands = checks.operands(
        communicator, record.input, record.weights, biases, record, record.gather_dim
    )
    input, several = operands.input, operands.several
    dim = record.gather_dim % input.dim()
    along_k = dim == input.dim() - 1
    if along_k and operands.algorithm not in ("auto", "unfused"):
        raise ValueError(
            f"algorithm={operands.algorithm!r} cannot gather along the contracted dimension, "
            f'gather_dim={dim} of {input.dim()} dimensions; use "unfused" or "auto"'
        )

    def start() -> Outcome:
        lengths, columns = _agree(
            communicator, operands, dim, record.return_gathered, record.format
        )
        if buffers is not None and min(lengths) != max(lengths):
            raise ValueError(
                f"{OP}: input must be equally long on all ranks along dimension {dim}, lengths by rank "
                f"are {lengths}; pad the shorter ones, or call interlace.{OP}, which accepts them"
            )
        inner = sum(lengths) if along_k else input.shape[-1]
        for number, each in enumerate(operands.weights):
            if each.shape[0] != inner:
                raise ValueError(
                    f"weight{f'[{number}]' if several else ''} has {each.shape[0]} rows, the gathered "
                    f"input has k = {inner} ({input.shape[-1]} on rank {communicator.rank})"
                )
        outputs: list[Output] = []
        if buffers is None:
            kind = operands.weights, operands.dtype, record.return_gathered
            outputs = _outputs(input, dim, sum(lengths), *kind)
        shard = input.movedim(-1, 0).flatten(1).contiguous() if along_k else rows_of(input, dim)
        matrices = list(buffers or [output.matrix for output in outputs])
        whole = matrices.pop() if record.return_gathered else None
        linears = [
            Linear(weight, bias, output, activation=name, format=OPERAND_FORMATS.get(record.format))
            for weight, bias, output, name in zip(
                operands.weights, operands.biases, matrices, operands.activations, strict=True
            )
        ]
        if along_k:
            if whole is None:
                whole = input.new_empty(inner, shard.shape[1])
            event = algorithms.all_gather_inner_matmul(
                communicator, shard, linears, lengths, whole.view(inner, shard.shape[1])
            )
        else:
            per_index = math.prod(n for i, n in enumerate(input.shape[:-1]) if i != dim)
            rows = [length * per_index for length in lengths]
            event = _multiply_rows(communicator, shard, linears, rows, whole, operands, columns)
        if buffers is not None:
            return Outcome(None, event)
        views = [output.view for output in outputs]
        if record.recorded:
            return Outcome((views, None if min(lengths) == max(lengths) else lengths), event)
        gathered = views.pop() if record.return_gathered else None
        result = views if several else views[0]
        return Outcome((gathered, result) if record.return_gathered else result, event)

    return start, (), None


TENSORS = names_of_tensors(AllGatherMatmulArguments)
gather_matmul = record_form(
    OP, AllGatherMatmulArguments, TENSORS, prepare,
    weights="weight", biases="bias", recorded="", lengths="", format="",
)  # fmt: skip


def _agree(
    communicator: Communicator,
    operands: checks.Operands,
    dim: int,
    return_gathered: bool,
    format: str,
) -> tuple[list[int], list[int]]:
    """Return every rank's length along ``dim`` and all weights' columns. Raise unless all else agrees."""
    shape, dtype = operands.input.shape, operands.input.dtype
    part = shape[dim], tuple(weight.shape[1] for weight in operands.weights)
    *leading, last = shape[:dim] + shape[dim + 1 :]
    of_shape = "the shape of input off gather_dim"
    if format:
        of_shape, last = length_along_k(of_shape, last, format)
    terms = (
        ("the number of dimensions of input", len(shape)),
        ("gather_dim", dim),
        format_term(format),
        (of_shape, (*leading, last)),
        ("dtype of input", dtype),
        ("algorithm", operands.algorithm),
        ("out_dtype", operands.dtype),
        ("rows of weight", tuple(weight.shape[0] for weight in operands.weights)),
        ("return_gathered", bool(return_gathered)),
    )
    answers = communicator.parts(communicator.call_of(OP, terms, part))
    return [length for length, _ in answers], [n for _, columns in answers for n in columns]


def _multiply_rows(
    communicator: Communicator,
    shard: Tensor,
    linears: list[Linear],
    rows: list[int],
    gathered: Tensor | None,
    operands: checks.Operands,
    columns: list[int],
) -> Event:
    inner, total = shard.shape[1], sum(rows)
    problem = tuning.gather_problem(
        communicator.world_size,
        shard.dtype,
        max(rows),
        tuple(columns),
        inner,
        **tuning.tuned_as(linears[0].format),
    )
    choice = tuning.choose(communicator, problem, operands.algorithm)
    algorithm, empty = operands.algorithm, not total * inner
    if algorithm == "auto" or empty:
        bytes_gathered = (total - min(rows)) * inner * shard.element_size()
        wide = torch.float64 if operands.dtype == torch.float64 else shard.dtype
        algorithm = choose_algorithm(
            communicator.place, wide, total, bytes_gathered, empty=empty, tuned=choice.algorithm
        )
    name_algorithm(algorithm)
    if algorithm == "unfused":
        whole = shard.new_empty(total, inner) if gathered is None else gathered
        return algorithms.all_gather_matmul_unfused(communicator, shard, linears, rows, whole)
    run = algorithms.all_gather_matmul_pipelined
    if algorithm == "fused":
        run = algorithms.all_gather_matmul_fused
    return run(communicator, shard, linears, rows, gathered, choice.configuration)


def results(record: AllGatherMatmulArguments, size: int) -> list[Output]:
    """Make a product per weight, then the gathered input if it is requested."""
    input = record.input
    if input.dim() < 2:
        raise ValueError(f"input must have at least 2 dimensions, got shape {tuple(input.shape)}")
    for weight in record.weights:
        if weight.dim() != 2:
            raise ValueError(
                f"weight must have 2 dimensions (k, n), got shape {tuple(weight.shape)}"
            )
    dim = shapes.dimension("gather_dim", record.gather_dim, input.dim())
    dtype = checks.output_dtype(record.out_dtype, input)
    kind = record.weights, dtype, record.return_gathered
    return _outputs(input, dim, input.shape[dim] * size, *kind)


def _outputs(
    input: Tensor, dim: int, length: Any, weights: Sequence[Tensor], dtype: Any, gathered: bool
) -> list[Output]:
    products = [gathered_rows(input, dim, length, weight.shape[1], dtype) for weight in weights]
    return [*products, gathered_input(input, dim, length)] if gathered else products


_takes_any_lengths: ContextVar[bool] = ContextVar("interlace_any_lengths", default=False)


class taking_any_lengths:
    """A context in which the op accepts shards of unequal lengths and adds these to its results.

    For an eager call through torch's dispatcher. A compiler could not know this result.
    """

    def __enter__(self) -> None:
        self._token = _takes_any_lengths.set(True)

    def __exit__(self, *_: object) -> None:
        _takes_any_lengths.reset(self._token)


def start(communicator: Communicator, record: AllGatherMatmulArguments) -> Started:
    if _takes_any_lengths.get():
        call = dataclasses.replace(record, biases=record.biases or None, recorded=True)
        outputs, lengths = gather_matmul(communicator, call)
        return Started([*outputs, *([torch.tensor(lengths)] if lengths else [])], None)
    with communicator.accepting(OP):
        views = results(record, communicator.world_size)
    return start_form(gather_matmul, communicator, record, views)


def _save(ctx: Any, record: AllGatherMatmulArguments, output: Sequence[Tensor]) -> None:
    ctx.dim, ctx.algorithm, ctx.format = record.gather_dim, record.algorithm, record.format
    ctx.with_gathered, ctx.reduced = record.return_gathered, False
    count = len(record.weights)
    of_op = output[count + record.return_gathered :]
    ctx.lengths = of_op[0].tolist() if of_op else record.lengths
    ctx.length = None if ctx.lengths is None else record.input.shape[record.gather_dim]
    ctx.shared = record.input.requires_grad
    ctx.weighed = [weight.requires_grad for weight in record.weights]
    ctx.biased = [bias is not None and bias.requires_grad for bias in record.biases]
    ctx.set_materialize_grads(False)  # zeros for the gathered input would prevent the fused op
    ctx.save_for_backward(output[count] if ctx.with_gathered else record.input, *record.weights)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> dict[str, Any]:
    kept, *weights = ctx.saved_tensors
    products = [None if grad is None else grad.to(kept.dtype) for grad in grads[: len(weights)]]
    of_gathered = grads[len(weights)] if ctx.with_gathered else None
    gathered, of_input = start_gradients(ctx, kept, products, weights, of_gathered)
    of_weights: list[Tensor | None] = [None] * len(weights)
    if any(ctx.weighed):
        whole = wait(gathered)
        whole = whole if ctx.format else rows(whole, ctx.dim)
        for index, product in enumerate(products):
            if product is not None and ctx.weighed[index]:
                found = product_of_rows(whole, _part_rows(ctx, product), ctx.format)
                of_weights[index] = found.to(weights[index].dtype)
    of_biases = [
        product.flatten(0, -2).sum(0) if biased and product is not None else None
        for product, biased in zip(products, ctx.biased, strict=False)
    ]
    if of_input is not None:
        of_input = wait(of_input)
        if ctx.lengths is not None:
            of_input = of_input.narrow(ctx.dim, 0, ctx.length)
    return {"input": of_input, "weights": of_weights, "biases": of_biases}


def _part_rows(ctx: Any, product: Tensor) -> Tensor:
    """Return the rows of a product's gradient; with a format, each rank's part is padded to the longest."""
    lengths = ctx.lengths if ctx.format else None
    return rows(spread(product, lengths, ctx.dim), ctx.dim)


def start_gradients(
    ctx: Any,
    kept: Tensor,
    products: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    of_gathered: Tensor | None = None,
    start: Callable[..., Any] = call,
) -> tuple[Any, Any]:
    """Start to gather the input for weights' gradients, with a format as packed parts, and its gradient.

    The latter is the sum of the products' gradients times their weights, reduced and scattered. Unequal
    shards are padded with zeros. In a linear layer, all ranks may have the whole input: then the sum is
    only reduced, or with ``ctx.name`` None not even that.
    """
    dim, size, name, lengths = ctx.dim, ctx.size, ctx.name, ctx.lengths
    gathered = kept
    if any(ctx.weighed) and not ctx.with_gathered:
        part, along = kept, dim
        if ctx.format:
            equal = kept if lengths is None else pad(kept, dim % kept.dim(), max(lengths))
            part, along = packed_parts(rows(equal, dim), 1, ctx.format), 0
        gathered = start("all_gather", part, along, size, name)
    pairs = [(p, w) for p, w in zip(products, weights, strict=True) if p is not None]
    if not ctx.shared or not (pairs or of_gathered is not None):
        return gathered, None
    if pairs:
        grad = pairs[0][0] if len(pairs) == 1 else torch.cat([p for p, _ in pairs], -1)
        weight = pairs[0][1] if len(pairs) == 1 else _side_by_side([w for _, w in pairs])
    if of_gathered is not None:
        total = of_gathered + grad @ weight.t() if pairs else of_gathered
        total = spread(total, lengths, dim)
        return gathered, start("reduce_scatter", total, "sum", dim, size, name)
    if name is None:
        return gathered, product(grad, weight.t(), ctx.format)
    op: str = "matmul_all_reduce"
    where: tuple[Any, ...] = ()
    if not ctx.reduced:
        op, where = "matmul_reduce_scatter", (dim, None)
        if dim in (-1, grad.dim() - 1):
            weight = spread(weight, lengths, 0)
        else:
            grad = spread(grad, lengths, dim)
    options = ("sum", *where, ctx.algorithm, None, size, name)
    return gathered, call_in(start, ctx.format, op, grad, weight.t(), None, *options)


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """Return one weight with the columns of all, in memory by rows or by columns as the first one."""
    if weights[0].stride(0) == 1:
        return torch.cat([weight.t() for weight in weights], 0).t()
    return torch.cat([*weights], 1)


def as_lists(weights: Any, biases: Any) -> tuple[list[Any], list[Any]]:
    """Return the weights and biases for the op: all biases or none; a missing one becomes zeros."""
    several = not isinstance(weights, Tensor)
    weights = list(weights) if several else [weights]
    biases = list(biases) if isinstance(biases, (list, tuple)) else [biases] * len(weights)
    present = next((bias for bias in biases if bias is not None), None)
    if present is None:
        return weights, []
    # in torch's custom ops, a list with None has no gradients
    pairs = zip(weights, biases, strict=True)
    return weights, [present.new_zeros(w.shape[1:]) if b is None else b for w, b in pairs]


def reference(ranks: Sequence[AllGatherMatmulArguments], size: int) -> list[list[Tensor]]:
    op, first = "all_gather_matmul", ranks[0]
    checks.algorithm_and_dtype(first.input, first)
    columns = [[weight.shape[0] for weight in rank.weights] for rank in ranks]
    checks.equal_on_all(op, "rows of weight", columns)
    whole = by_rank.gather_all(op, by_rank.inputs(ranks), first.gather_dim, size)
    dim = first.gather_dim % whole.dim()
    along_k = dim == whole.dim() - 1
    if along_k and first.algorithm not in ("auto", "unfused"):
        raise ValueError(
            f"algorithm={first.algorithm!r} cannot gather along the contracted dimension"
        )
    matrix = whole.flatten(0, -2) if along_k else rows_of(whole, dim)
    outputs = []
    for rank in ranks:
        products = results(rank, size)
        for number, weight in enumerate(rank.weights):
            checks.same_dtype("weight", weight.dtype, "input", rank.input.dtype)
            vector = rank.biases[number] if rank.biases else None
            bias = checked_bias(vector, weight.shape[1], rank.input)
            kind = OPERAND_FORMATS.get(rank.format)
            multiply(products[number].matrix, matrix, weight, bias, format=kind)
        if rank.return_gathered:
            products[-1].view.copy_(whole)
        outputs.append([result.view for result in products])
    return outputs


ALL_GATHER_MATMUL = Op(
    OP,
    AllGatherMatmulArguments,
    start,
    lambda given, size: [result.view for result in results(given, size)],
    OpGradient(_save, _backward),
    {"input": ("input",), "a weight": ("weights",)},
    several=True,
    reference=reference,
    without=("format",),
    algorithms=fused_by("all_gather_matmul_kernel"),
    examples={"input": own_rows},
)
