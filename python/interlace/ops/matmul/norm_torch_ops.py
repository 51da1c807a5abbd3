"""The reductions whose rows are normed, as ops: schemas and gradients.

With h the sum with the residual and y its norm, the gradient of h is that of y through the norm, for which
h is kept and nothing else, and its own. It is the residual's; reduced or gathered as by the op without a
norm it gives those of the input and the weight. A weight of the norm gets what comes of the rows that a
rank norms: of the own rows where they are scattered, so replicas of a weight sum their gradients, as
sequence-parallel layers do; of all rows, on every rank, where all ranks have them. Rows that were gathered
give their gradients back by a reduce-scatter. fp8 has no gradient.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from interlace.ops.matmul import eager_norms as norms
from interlace.ops.matmul.reduce import MatmulReduceOptions, equal_part, factor_gradients
from interlace.ops.op.from_text import from_text
from interlace.ops.op.gradients import longest, padded, wait
from interlace.ops.op.registry import Ops
from interlace.runtime.numerics.norms import RowNorm, backward

_ops: Any = Ops()
Tensor = torch.Tensor

_VECTORS = "Tensor? bias, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias"
_NORM = "str kind, float eps, str quantize"
SCHEMAS = {
    "matmul_reduce_scatter_norm": (
        f"Tensor input, Tensor weight, {_VECTORS}, str reduce_op, int scatter_dim, SymInt? length, "
        f"str algorithm, ScalarType? out_dtype, {_NORM}, bool gather_normed"
    ),
    "matmul_all_reduce_norm": (
        f"Tensor input, Tensor weight, {_VECTORS}, str reduce_op, str algorithm, "
        f"ScalarType? out_dtype, {_NORM}"
    ),
    "all_reduce_norm": f"Tensor input, {_VECTORS}, str reduce_op, str algorithm, {_NORM}",
    "reduce_scatter_norm": (
        f"Tensor input, {_VECTORS}, str reduce_op, int scatter_dim, SymInt? length, str algorithm, "
        f"{_NORM}, bool gather_normed"
    ),
}


def setup(op: str, ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    *given, ctx.size, ctx.name = inputs
    count = 2 if op in norms.MATMULS else 1
    factors, (bias, residual, weight, norm_bias, *options) = given[:count], given[count:]
    ctx.call, ctx.count, ctx.factors = norms.call_of(op, *options), len(inputs), count
    ctx.shared, ctx.weighed = factors[0].requires_grad, factors[-1].requires_grad
    ctx.needs = [
        None if each is None or not each.requires_grad else each.dtype
        for each in (bias, residual, weight, norm_bias)
    ]
    ctx.has = [weight is not None, norm_bias is not None]
    ctx.set_materialize_grads(False)
    vectors = [each for each in (weight, norm_bias) if each is not None]
    ctx.save_for_backward(output[1], *factors, *vectors)


def gradient(op: str, ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    total, *saved = ctx.saved_tensors
    total = wait(total)
    factors, vectors = saved[: ctx.factors], iter(saved[ctx.factors :])
    weight, norm_bias = (next(vectors) if has else None for has in ctx.has)
    call, size, name = ctx.call, ctx.size, ctx.name
    of_normed, of_sum = grads[0], grads[1]
    found: list[Tensor | None] = [None] * 4  # of bias, residual, weight, norm_bias
    if of_normed is not None:
        if call.norm.quantize:
            raise RuntimeError(
                f"interlace.{op} with quantize={call.norm.quantize!r} has no gradient"
            )
        if call.norm.gather_normed:
            of_normed = _own_rows(of_normed, call, size, name)
        norm = RowNorm(call.norm.kind, call.norm.eps, weight, norm_bias)
        of_rows, found[2], found[3] = backward(total, norm, of_normed)
        of_sum = of_rows if of_sum is None else of_rows + of_sum
    if of_sum is None:
        return tuple([None] * ctx.count)
    of_sum = of_sum.to(total.dtype)
    found[1] = of_sum
    if op in norms.MATMULS:
        part = equal_part(of_sum, (*factors[0].shape[:-1], factors[1].shape[1]), call, size)
        by_name = factor_gradients(
            part,
            *factors,
            options=MatmulReduceOptions.of(call),
            needs=(ctx.shared, ctx.weighed),
            size=size,
            name=name,
        )
        of_factors = [by_name.get("input"), by_name.get("weight")]
    else:
        of_factors = [_of_rows(ctx, factors[0], of_sum)]
    found[0] = of_sum.flatten(0, -2).sum(0) if of_sum.dim() > 1 else of_sum
    vectors_of = [
        None if dtype is None or each is None else each.to(dtype)
        for each, dtype in zip(found, ctx.needs, strict=True)
    ]
    made = [*of_factors, *vectors_of]
    rest: list[Tensor | None] = [None] * (ctx.count - len(made))
    return (*made, *rest)


def _own_rows(grad: Tensor, call: norms.NormCall, size: int, name: str) -> Tensor:
    """The gradients of all ranks for the own rows, summed."""
    dim = (call.scatter_dim or 0) % grad.dim()
    if call.length is not None:
        grad = padded(grad, dim, size * longest(grad.shape[dim], size))
    own = wait(_ops.reduce_scatter(grad, "sum", dim, size, name))
    return own if call.length is None else own.narrow(dim, 0, call.length)


def _of_rows(ctx: Any, input: Tensor, of_sum: Tensor) -> Tensor | None:
    """Summed or gathered."""
    call = ctx.call
    if not ctx.shared:
        return None
    if call.scatter_dim is None:
        whole = wait(_ops.all_reduce(of_sum, "sum", ctx.size, ctx.name))
    else:
        dim = call.scatter_dim % input.dim()
        length = input.shape[dim]
        part = equal_part(of_sum, input.shape, call, ctx.size)
        whole = wait(_ops.all_gather(part, dim, ctx.size, ctx.name)).narrow(dim, 0, length)
    return whole / ctx.size if call.reduce_op == "avg" else whole


OTHERS = "bias, residual or norm"  # with gather_normed their gradients are scattered first
COMMUNICATES: dict[str, dict[str, tuple[int, ...]]] = {
    "matmul_reduce_scatter_norm": {"input": (0,), "weight": (1,), OTHERS: (2, 3, 4, 5)},
    "matmul_all_reduce_norm": {"input or weight": (0, 1)},
    "all_reduce_norm": {"input": (0,)},
    "reduce_scatter_norm": {"input": (0,), OTHERS: (1, 2, 3, 4)},
}
OPS = tuple(
    from_text(
        op,
        arguments,
        norms.START[op],
        norms.FAKE[op],
        (functools.partial(setup, op), functools.partial(gradient, op)),
        "Tensor[]",
        COMMUNICATES[op],
    )
    for op, arguments in SCHEMAS.items()
)
