"""Gradients of the ops. A gradient is that of the sum of all ranks' losses, as in torch's functional ops.

=====================  ==============================================================================
op                     gradient of its input
=====================  ==============================================================================
all_reduce             all_reduce of the gradients; for max and min to the ranks that had the value, in
                       equal parts; for product times what the other ranks multiplied with
reduce_scatter         all_gather, and so on as for all_reduce
all_gather             reduce_scatter
all_to_all             all_to_all with the sizes exchanged
broadcast / reduce     reduce / broadcast
gather / scatter       scatter / gather
permute                permute, back
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


def setup_reduction(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, reduce_op, *rest = inputs
    *ctx.dims, ctx.size, ctx.name = rest
    ctx.reduce_op = reduce_op
    if reduce_op in ("max", "min"):
        ctx.save_for_backward(input, output)
    elif reduce_op == "product":
        ctx.save_for_backward(input)


def all_reduce(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    total = wait(_ops.all_reduce(grad, "sum", ctx.size, ctx.name))
    whole = wait(ctx.saved_tensors[1]) if ctx.reduce_op in ("max", "min") else None
    return _of_reduced(ctx, "all_reduce", total, whole), None, None, None


def reduce_scatter(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    def gathered(tensor: Tensor) -> Tensor:
        return wait(_ops.all_gather(tensor, ctx.dims[0], ctx.size, ctx.name))

    whole = gathered(wait(ctx.saved_tensors[1])) if ctx.reduce_op in ("max", "min") else None
    return _of_reduced(ctx, "reduce_scatter", gathered(grad), whole), None, None, None, None


def _of_reduced(ctx: Any, op: str, total: Tensor, whole: Tensor | None) -> Tensor:
    """From the gradient of the whole reduced tensor to that of the own one that went into it."""
    size, name = ctx.size, ctx.name
    result: Tensor
    if ctx.reduce_op == "sum":
        return total
    if ctx.reduce_op == "avg":
        result = total / size
        return result
    if ctx.reduce_op in ("max", "min"):
        mine: Tensor = (ctx.saved_tensors[0] == whole).to(total.dtype)
        return total * mine / wait(_ops.all_reduce(mine, "sum", size, name))
    if ctx.reduce_op == "product":
        (own,) = ctx.saved_tensors
        # the product of the others, not a quotient, which has no derivative where one is 0
        every = wait(_ops.all_gather(own.unsqueeze(0), 0, size, name))
        ranks = torch.arange(size, device=own.device).view(size, *[1] * own.dim())
        others = torch.where(ranks == _ops.rank(own, size, name), 1, every).prod(0)
        return total * others.conj()
    raise RuntimeError(f"interlace.{op} with reduce_op {ctx.reduce_op!r} has no gradient")


def setup_moved(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.input_dim = inputs[0].dim()
    *ctx.arguments, ctx.size, ctx.name = inputs[1:]


def all_gather(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (dim,) = ctx.arguments
    part = wait(_ops.reduce_scatter(grad, "sum", dim, ctx.size, ctx.name))
    return part if ctx.input_dim else part.reshape(()), None, None, None


def all_to_all(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    received, sent = ctx.arguments
    return wait(_ops.all_to_all(grad, sent, received, ctx.size, ctx.name)), None, None, None, None


def broadcast(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return wait(_ops.reduce(grad, "sum", *ctx.arguments, ctx.size, ctx.name)), None, None, None


def reduce(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    reduce_op, dst = ctx.arguments
    if reduce_op not in ("sum", "avg"):
        raise RuntimeError(f"interlace.reduce with reduce_op {reduce_op!r} has no gradient")
    own = wait(_ops.broadcast(grad, dst, ctx.size, ctx.name))
    return own if reduce_op == "sum" else own / ctx.size, None, None, None, None


def permute(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (src_dst,) = ctx.arguments
    back = [src_dst.index(rank) for rank in range(len(src_dst))]
    return wait(_ops.permute(grad, back, ctx.size, ctx.name)), None, None, None


def gather(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dst, dim = ctx.arguments
    part = wait(_ops.scatter(grad, dst, dim, ctx.size, ctx.name))
    return part if ctx.input_dim else part.reshape(()), None, None, None, None


def scatter(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    src, dim = ctx.arguments
    return wait(_ops.gather(grad, src, dim, ctx.size, ctx.name)), None, None, None, None


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
