"""Gradients of the ops. A gradient is that of the sum of all ranks' losses, as in torch's functional ops.

=====================  ==============================================================================
op                     gradient of its input
=====================  ==============================================================================
all_gather_matmul      matmul_reduce_scatter; of a weight: gathered input times gradient
matmul_reduce_scatter  all_gather_matmul; of the weight: input times gathered gradient. Unequal parts get
                       zeros behind them for it, which are then left off
matmul_all_reduce      all_reduce, then matmuls
=====================  ==============================================================================

Of the gradients of a fused op the one that communicates is started first, and waited for last.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.ops.op.sim_dispatch import Ops
from interlace.runtime.compat.torch_modes import modes_active

_ops: Any = Ops()
Tensor = torch.Tensor


def wait(tensor: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor.default(tensor)
    return waited


def kept(output: Tensor) -> Tensor:
    """An output of an op, to be saved for its backward, which takes it as :func:`complete`.

    A graph waits for it in its forward: what it is used for without a gradient is moved there, and a wait
    that were left in the backward would have the op done again.
    """
    return wait(output) if modes_active() else output


def complete(saved: Tensor) -> Tensor:
    """What :func:`kept` has saved."""
    return saved if modes_active() else wait(saved)


def rows(tensor: Tensor, dim: int) -> Tensor:
    """A matrix of the last dimension, its rows in the order in which ``dim`` comes first."""
    dim = dim % tensor.dim()
    if dim == tensor.dim() - 1:
        return tensor.flatten(0, -2)
    return tensor.movedim(dim, 0).flatten(0, -2)


def setup_gather(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, weights, biases, ctx.dim, ctx.with_gathered, ctx.algorithm, _, ctx.size, ctx.name = (
        inputs
    )
    ctx.count = len(weights)
    ctx.biased = [bias is not None and bias.requires_grad for bias in biases]
    ctx.weighed = [weight.requires_grad for weight in weights]
    ctx.shared = input.requires_grad
    ctx.set_materialize_grads(False)  # zeros for the gathered input would keep the fused op away
    kept = output[-1] if ctx.with_gathered else input
    ctx.save_for_backward(kept, *weights)


def all_gather_matmul(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    kept, *weights = ctx.saved_tensors
    size, name, dim = ctx.size, ctx.name, ctx.dim
    products = [None if grad is None else grad.to(kept.dtype) for grad in grads[: ctx.count]]
    of_gathered = grads[ctx.count] if ctx.with_gathered else None
    gathered = kept
    if not ctx.with_gathered and any(ctx.weighed):
        gathered = _ops.all_gather(kept, dim, size, name)
    of_input = None
    if ctx.shared:
        of_input = _of_shards(products, weights, of_gathered, dim, ctx.algorithm, size, name)
    of_weights: list[Tensor | None] = [None] * ctx.count
    if any(ctx.weighed):
        whole = rows(wait(gathered), dim)
        for index, product in enumerate(products):
            if product is not None and ctx.weighed[index]:
                of_weights[index] = whole.mT @ rows(product, dim)
    of_biases = [
        product.flatten(0, -2).sum(0) if biased and product is not None else None
        for product, biased in zip(products, ctx.biased, strict=False)
    ]
    if of_input is not None:
        of_input = wait(of_input)
    return of_input, of_weights, of_biases, None, None, None, None, None, None


def _of_shards(
    products: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    of_gathered: Tensor | None,
    dim: int,
    algorithm: str,
    size: int,
    name: str,
) -> Any:
    """The input's gradient, in flight: products' gradients times their weights, reduced and scattered."""
    pairs = [(p, w) for p, w in zip(products, weights, strict=True) if p is not None]
    if not pairs:
        if of_gathered is None:
            return None
        return _ops.reduce_scatter(of_gathered, "sum", dim, size, name)
    product = pairs[0][0] if len(pairs) == 1 else torch.cat([p for p, _ in pairs], -1)
    weight = pairs[0][1] if len(pairs) == 1 else torch.cat([w for _, w in pairs], 1)
    if of_gathered is not None:
        total = of_gathered + product @ weight.t()
        return _ops.reduce_scatter(total, "sum", dim, size, name)
    how = ("sum", dim, None, algorithm, None, size, name)
    return _ops.matmul_reduce_scatter(product, weight.t(), None, *how)


def padded(tensor: Tensor, dim: int, length: Any) -> Tensor:
    """``tensor`` with zeros behind it, up to ``length`` along ``dim``."""
    behind = [0, 0] * (tensor.dim() - 1 - dim) + [0, length - tensor.shape[dim]]
    return torch.nn.functional.pad(tensor, behind)


def longest(length: Any, size: int) -> Any:
    """The longest of the ``size`` parts of ``length``: all but the last ones are as long."""
    return (length + size - 1) // size


def setup_reduced(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, weight, bias, ctx.reduce_op, *dims, ctx.algorithm, _, ctx.size, ctx.name = inputs
    ctx.dim, ctx.length = dims or (None, None)
    ctx.columns = weight.shape[1]
    ctx.biased = bias is not None and bias.requires_grad
    ctx.weighed, ctx.shared = weight.requires_grad, input.requires_grad
    ctx.save_for_backward(input, weight)


def matmul_reduce_scatter(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    input, weight = ctx.saved_tensors
    size, name, dim = ctx.size, ctx.name, ctx.dim % input.dim()
    columns, factor = dim == input.dim() - 1, weight.t()
    length = weight.shape[1] if columns else input.shape[dim]
    algorithm = (
        "auto" if columns else ctx.algorithm
    )  # of the contracted dimension not all can gather
    if ctx.length is not None:
        grad = padded(grad, dim, longest(length, size))
        if columns:
            factor = padded(factor, 0, size * longest(length, size))
    of_bias = _of_bias(ctx, grad, columns)
    grad = grad.to(input.dtype)
    if ctx.reduce_op == "avg":
        grad = grad / size
    of_input = of_weight = None
    if ctx.shared:
        of_input, *rest = _ops.all_gather_matmul(
            grad, [factor], [], dim, ctx.weighed, algorithm, None, size, name
        )
        whole = rest[0] if rest else None
        of_input = wait(of_input)
        if not columns:
            of_input = of_input.narrow(dim, 0, length)  # what was padded is behind all parts
    else:
        whole = _ops.all_gather(grad, dim, size, name) if ctx.weighed else None
    if ctx.weighed and whole is not None:
        whole = wait(whole).narrow(dim, 0, length)
        of_weight = rows(input, dim).mT @ rows(whole, dim)
    return of_input, of_weight, of_bias, *[None] * 7


def _of_bias(ctx: Any, grad: Tensor, along_columns: bool) -> Tensor | None:
    if not ctx.biased:
        return None
    sums = grad.flatten(0, -2).sum(0)
    if not along_columns:
        return sums
    # this rank added its own part of the bias only
    rank = _ops.rank(sums, ctx.size, ctx.name)
    mine = torch.arange(ctx.size, device=sums.device) == rank
    result: Tensor = (mine.unsqueeze(1) * sums).flatten()
    return result.narrow(0, 0, ctx.columns)


def matmul_all_reduce(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    input, weight = ctx.saved_tensors
    of_bias = grad.flatten(0, -2).sum(0) if ctx.biased else None
    if not (ctx.shared or ctx.weighed):
        return None, None, of_bias, None, None, None, None, None
    total = wait(_ops.all_reduce(grad.to(input.dtype), "sum", ctx.size, ctx.name))
    if ctx.reduce_op == "avg":
        total = total / ctx.size
    of_input = total @ weight.t() if ctx.shared else None
    of_weight = rows(input, 0).mT @ rows(total, 0) if ctx.weighed else None
    return of_input, of_weight, of_bias, None, None, None, None, None
