"""Kernels of the fused ops on scaled operands: fp8 matrices whose numbers are multiplied by scales.

The product is ``(input * input_scale) @ (weight * weight_scale) + bias``, taken by ``torch._scaled_mm``,
which has the last word on dtypes and shapes. A scale is float32 and is either one for all numbers, or one
per row of ``input``, ``[..., 1]``, and per column of ``weight``, ``(1, n)``. One of either kind beside one
of the other is repeated. The one for all of a gathered input has to be equal on all ranks.

============================  ========================================================================
all_gather_scaled_matmul      rows travel in fp8, each with its own scale, if it has one; then the
                              matmuls. In flight as a whole.
scaled_matmul_reduce_scatter  the whole product first, before the call returns; then it is reduced, in
                              ``out_dtype``, in flight.
============================  ========================================================================

That is ``algorithm`` "unfused". "fused" is one kernel (``scaled_kernels.py``), in flight as a whole, which
accumulates in fp32; products of a reduction are scaled before they travel, in ``out_dtype``.

``out_dtype`` is bfloat16 if none is given. There are no gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.ops.eager import plain, scaled_kernels, shapes
from interlace.ops.eager.pending import Started
from interlace.runtime.algorithms import plain as collective_algorithms
from interlace.runtime.algorithms.operands import rows_of
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.stream import Outcome
from interlace.runtime.tuning import configuration
from interlace.runtime.tuning.auto import choose_scaled_algorithm

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ALGORITHMS = ("auto", "fused", "unfused")

_scaled_mm: Any = torch._scaled_mm


def multiply(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
) -> torch.Tensor:
    """The product of two matrices; ``input_scale`` has one element or is ``(rows, 1)``."""
    rows, columns = input.shape[0], weight.shape[1]
    by_row = input_scale.numel() != 1 or weight_scale.numel() != 1
    if by_row:
        input_scale = input_scale.reshape(-1, 1).expand(rows, 1).contiguous()
        weight_scale = weight_scale.reshape(1, -1).expand(1, columns).contiguous()
    dtype = out_dtype or torch.bfloat16
    product: torch.Tensor = _scaled_mm(
        input.contiguous(),
        weight,
        input_scale,
        weight_scale,
        bias,
        out_dtype=dtype,
        use_fast_accum=use_fast_accum,
    )
    return product


def is_by_row(input: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether ``scale`` has an entry for each row of ``input``; else it has one for all, or ValueError.

    One number for one row is the row's, as in torch.
    """
    if scale.shape == (*input.shape[:-1], 1):
        return True
    if scale.numel() != 1:
        raise ValueError(
            f"input_scale must have one element or shape {(*input.shape[:-1], 1)}, got "
            f"{tuple(scale.shape)} for input of {tuple(input.shape)}"
        )
    return False


def _check(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """What ranks would disagree on, if they left it to torch to find."""
    if input.dim() < 2 or weight.dim() != 2 or weight.shape[0] != input.shape[-1]:
        raise ValueError(
            f"input must be [..., k] and weight (k, n), got {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    for name, operand in (("input", input), ("weight", weight)):
        if operand.dtype not in FLOAT8:
            raise TypeError(f"{name} must be float8_e4m3fn or float8_e5m2, got {operand.dtype}")
    for name, scale in (("input_scale", input_scale), ("weight_scale", weight_scale)):
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {scale.dtype}")
    is_by_row(input, input_scale)
    columns = weight.shape[1]
    if weight_scale.numel() != 1 and tuple(weight_scale.shape) != (1, columns):
        raise ValueError(
            f"weight_scale must have one element or shape (1, {columns}), got {tuple(weight_scale.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (columns,):
        raise ValueError(f"bias must have shape ({columns},), got {tuple(bias.shape)}")


def _wants_kernel(
    communicator: Communicator, algorithm: str, rows: int, inner: int, columns: int
) -> bool:
    """Whether ``algorithm`` is "fused", or "auto" takes the kernel if it can; equal on all ranks."""
    checks.one_of("algorithm", algorithm, ALGORITHMS, communicator.rank)
    empty = not rows * inner * columns
    chosen = choose_scaled_algorithm(communicator.place, rows, empty=empty)
    return not empty and (algorithm == "fused" or (algorithm == "auto" and chosen == "fused"))


def _kernel_can(op: str, algorithm: str, why_not: Sequence[str]) -> bool:
    """Whether the kernel can do it on every rank; ValueError if it cannot and must."""
    for rank, why in enumerate(why_not):
        if why and algorithm == "fused":
            raise ValueError(f'{op}: algorithm="fused" cannot do this: {why}, on rank {rank}')
    return not any(why_not)


# -- all_gather_scaled_matmul --------------------------------------------------------------------------


def gathered_products(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    input_scale: torch.Tensor,
    weight_scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    gather_dim: int,
    out_dtype: torch.dtype | None,
    size: int,
) -> list[shapes.Product]:
    """A product per weight, then the gathered input, which is always made."""
    if len(weight_scales) != len(weights) or len(biases) not in (0, len(weights)):
        raise ValueError(
            f"weight_scales and biases must be as many as the {len(weights)} weights, got "
            f"{len(weight_scales)} and {len(biases)}"
        )
    for number, (weight, scale) in enumerate(zip(weights, weight_scales, strict=True)):
        _check(input, weight, input_scale, scale, biases[number] if biases else None)
    dim = shapes.dimension("gather_dim", gather_dim, input.dim())
    if dim == input.dim() - 1:
        raise ValueError(
            f"gather_dim={gather_dim} is the contracted dimension, along which scales cannot be gathered"
        )
    dtype = out_dtype or torch.bfloat16
    products = [shapes.gathered_rows(input, dim, size, w.shape[1], dtype) for w in weights]
    return [*products, shapes.gathered_input(input, dim, size)]


def all_gather_scaled_matmul(
    communicator: Communicator,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    input_scale: torch.Tensor,
    weight_scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    gather_dim: int,
    return_gathered: bool,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
    algorithm: str = "auto",
) -> Started:
    op, size = "all_gather_scaled_matmul", communicator.world_size
    with communicator.accepting(op):
        for each in (input, input_scale, *weights, *weight_scales):
            checks.tensor("each operand", each, communicator)
        products = gathered_products(
            input, weights, input_scale, weight_scales, biases, gather_dim, out_dtype, size
        )
        inner, widest = input.shape[-1], max(weight.shape[1] for weight in weights)
        rows = products[-1].matrix.shape[0]
        kernel = _wants_kernel(communicator, algorithm, rows, inner, widest)
    *outputs, gathered = products
    dim = gather_dim % input.dim()
    by_row = is_by_row(input, input_scale)
    shard = rows_of(input, dim).contiguous()
    scale = rows_of(input_scale, dim).contiguous() if by_row else input_scale

    def host() -> Outcome:
        why_not = scaled_kernels.why_not(communicator, inner, weights, out_dtype) if kernel else ""
        mine = (
            tuple(input.shape), dim, input.dtype, by_row, algorithm, use_fast_accum, why_not,
            [weight.shape[1] for weight in weights], configuration.OVERRIDE.get(),
        )  # fmt: skip
        answers = communicator.agree(op, mine)
        for index, name in enumerate(("shape of input", "gather_dim", "dtype of input")):
            values = [answer[index] for answer in answers]
            checks.equal_on_all(op, name, values, communicator.rank)
        kinds = [answer[3] for answer in answers]
        checks.equal_on_all(op, "whether input_scale is by row", kinds, communicator.rank)
        for index, name in ((4, "algorithm"), (5, "use_fast_accum"), (8, "configuration")):
            values = [answer[index] for answer in answers]
            checks.equal_on_all(op, name, values, communicator.rank)
        if kernel and _kernel_can(op, algorithm, [answer[6] for answer in answers]):
            given = [
                (weight, weight_scale, biases[number] if biases else None, outputs[number].matrix)
                for number, (weight, weight_scale) in enumerate(
                    zip(weights, weight_scales, strict=True)
                )
            ]
            event = scaled_kernels.gather(
                communicator,
                shard,
                scale,
                by_row,
                given,
                gathered.matrix if return_gathered else None,
                use_fast_accum,
                [columns for answer in answers for columns in answer[7]],
            )
            return Outcome(None, event)
        _gather(communicator, shard.view(torch.uint8), gathered.matrix.view(torch.uint8))
        whole_scale = scale
        if by_row:
            whole_scale = scale.new_empty(gathered.matrix.shape[0], 1)
            _gather(communicator, scale, whole_scale)
        for number, (weight, weight_scale) in enumerate(zip(weights, weight_scales, strict=True)):

            def product(number: int = number, w: Any = weight, s: Any = weight_scale) -> None:
                bias = biases[number] if biases else None
                made = multiply(gathered.matrix, w, whole_scale, s, bias, out_dtype, use_fast_accum)
                outputs[number].matrix.copy_(made)

            communicator.compute.call(product, "scaled matmul")
        return Outcome(None, communicator.compute.record())

    work = communicator.run(op, host, async_op=True)
    views = [product.view for product in (products if return_gathered else outputs)]
    return Started(views, work)


def _gather(communicator: Communicator, part: torch.Tensor, whole: torch.Tensor) -> None:
    if whole.numel():
        parts = whole.view(-1).chunk(communicator.world_size)
        collective_algorithms.all_gather_copy(communicator, part.reshape(-1), list(parts))


# -- scaled_matmul_reduce_scatter ----------------------------------------------------------------------


def scattered(
    input: torch.Tensor,
    weight: torch.Tensor,
    scatter_dim: int,
    out_dtype: torch.dtype | None,
    size: int,
) -> torch.Tensor:
    """``[.., n / size, .., columns]``, dense."""
    whole = input.new_empty(
        (*input.shape[:-1], weight.shape[1]), dtype=out_dtype or torch.bfloat16, device="meta"
    )
    shape = shapes.scattered(whole, scatter_dim, size).shape
    return input.new_empty(shape, dtype=whole.dtype)


def product(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
) -> torch.Tensor:
    """One rank's whole product, ``[..., n]``."""
    _check(input, weight, input_scale, weight_scale, bias)
    scale = rows_of(input_scale, 0) if is_by_row(input, input_scale) else input_scale
    matrix = multiply(
        rows_of(input, 0), weight, scale, weight_scale, bias, out_dtype, use_fast_accum
    )
    return matrix.view(*input.shape[:-1], weight.shape[1])


def bias_of(bias: torch.Tensor | None, average: bool, rank: int) -> torch.Tensor | None:
    """What ``rank`` adds to its product, so that ``bias`` is in the reduced one once."""
    return bias if average or rank == 0 else None


def scaled_matmul_reduce_scatter(
    communicator: Communicator,
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
    algorithm: str = "auto",
) -> Started:
    op = "scaled_matmul_reduce_scatter"
    with communicator.accepting(op):
        for each in (input, weight, input_scale, weight_scale):
            checks.tensor("each operand", each, communicator)
        average = checks.one_of("reduce_op", reduce_op, checks.REDUCE_OPS, communicator.rank)
        _check(input, weight, input_scale, weight_scale, bias)
        rows = input.numel() // max(1, input.shape[-1])
        output = None
        if _wants_kernel(communicator, algorithm, rows, input.shape[-1], weight.shape[1]):
            output = scattered(input, weight, scatter_dim, out_dtype, communicator.world_size)
    if output is not None:
        terms = {
            "the shape of input without k": tuple(input.shape[:-1]),
            "the columns of weight": weight.shape[1],
            "scatter_dim": scatter_dim % input.dim(),
            "reduce_op": average,
            "out_dtype": output.dtype,
            "use_fast_accum": use_fast_accum,
            "algorithm": algorithm,
            "whether there is a bias": bias is not None,
            "configuration": configuration.OVERRIDE.get(),
        }
        largest = _largest_inner(communicator, input, weight, terms)
        if largest:
            event = functools.partial(
                scaled_kernels.reduce,
                communicator,
                input,
                weight,
                input_scale,
                weight_scale,
                bias,
                output,
                scatter_dim,
                average=average == "avg",
                fast_accum=use_fast_accum,
                inner=largest,
            )
            return Started(
                [output], communicator.run(op, lambda: Outcome(None, event()), async_op=True)
            )
    with communicator.accepting(op):
        whole = product(
            input,
            weight,
            input_scale,
            weight_scale,
            bias_of(bias, average == "avg", communicator.rank),
            out_dtype,
            use_fast_accum,
        )
    return plain.reduce_scatter(communicator, whole, reduce_op, scatter_dim)


def _largest_inner(
    communicator: Communicator, input: torch.Tensor, weight: torch.Tensor, terms: dict[str, Any]
) -> int:
    """The largest k of all ranks, once they agree on ``terms``; 0 if the kernel cannot do it."""
    op, inner = "scaled_matmul_reduce_scatter", input.shape[-1]
    why = scaled_kernels.why_not(communicator, inner, [weight], terms["out_dtype"])

    def host() -> Outcome:
        answers = communicator.agree(op, (tuple(terms.values()), inner, why))
        for index, name in enumerate(terms):
            values = [answer[0][index] for answer in answers]
            checks.equal_on_all(op, name, values, communicator.rank)
        can = _kernel_can(op, terms["algorithm"], [answer[2] for answer in answers])
        return Outcome(max(answer[1] for answer in answers) if can else 0, None)

    largest: int = communicator.run(op, host, async_op=False)
    return largest


def setup_no_gradient(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def no_gradient(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("interlace's ops on scaled operands have no gradients")
