"""Products of the rows of experts, and their gradients, by torch; without communication.

They are opaque to compilers, because torch's grouped matmul takes one dtype there.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.words import BlockFormatName
from interlace.ops.experts.routing import Received
from interlace.ops.matmul.block_scaled import (
    check_numbers,
    product,
    product_of_rows,
    refuse_second_gradient,
)
from interlace.ops.matmul.formats import format_named
from interlace.runtime.compat.torch_modes import modes_active
from interlace.runtime.core.communicator import requires_gradients

ALIGNED = 16  # bytes, for all strides of torch's grouped matmul
Tensor = torch.Tensor


def multiply(
    received: Received, weight: Tensor, *, format: BlockFormatName | None = None
) -> Tensor:
    """Multiply every row of ``received.x`` by its expert's weight, with torch; without communication.

    ``weight`` ``(experts of this rank, hidden, n)``, of the dtype of ``received.x``. Returns ``(rows, n)``,
    after a low-latency dispatch ``(experts, most rows, n)``; unused rows may have any value. Gradients go
    to both. The host of a GPU does not wait for counts after a low-latency dispatch, or if torch has a
    grouped matmul: for bfloat16 with strides of multiples of 16 bytes. With ``format``
    the rows and the weight are multiplied in a block-scaled format, such as "mxfp8", and so are the factors
    of their gradients, as in :func:`interlace.all_to_all_grouped_matmul`. Then the host waits unless the
    rows are of low latency and need no gradient. Raises ValueError for other shapes, TypeError if
    ``received`` is not a dispatch's result or ``weight`` is not a tensor.
    Semantics: ``torch._grouped_mm(received.x, weight, offs=received.offsets)``, ``torch.bmm``.

    >>> def on_rank():
    ...     tokens, chosen = torch.ones(2, 4), torch.tensor([[0], [1]])
    ...     received, handle = interlace.experts.dispatch(tokens, chosen, None, 2)
    ...     y = interlace.experts.multiply(received, torch.full((1, 4, 1), 1.0 + interlace.get_rank()))
    ...     return interlace.experts.combine(y, handle).flatten().tolist()
    >>> interlace.run(on_rank, 2)
    [[4.0, 8.0], [4.0, 8.0]]
    """
    if not isinstance(received, Received):
        raise TypeError(
            f"received must be the Received of a dispatch, got {type(received).__name__}"
        )
    x, experts = received.x, received.segments.shape[0]
    for name, value in (("received.x", x), ("weight", weight)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {checks.describe(value)}")
    if weight.dim() != 3 or (experts, x.shape[-1]) != tuple(weight.shape[:2]):
        raise ValueError(
            f"weight must have shape ({experts}, {x.shape[-1]}, n) for these rows, got "
            f"{tuple(weight.shape)}"
        )
    if format is not None:
        kind = check_products(x, weight, format)
        if x.dim() == 3 and not requires_gradients(x, weight):
            pairs = zip(x, weight, strict=True)
            return torch.stack([product(*pair, kind, by_row=True) for pair in pairs])
        rows = multiply_in_graph(x.flatten(0, -2), weight, received.segments, kind)
        return rows.view(*x.shape[:-1], weight.shape[2])  # type: ignore[no-any-return]
    if x.dim() == 3:
        return torch.bmm(x, weight)
    if grouped_on_device(x, weight):
        return torch._grouped_mm(x, weight, offs=received.offsets)
    traced = torch.compiler.is_compiling() or modes_active()
    return (multiply_in_graph if traced else multiplied)(x, weight, received.segments, "")


def check_products(x: Tensor, weight: Tensor, format: str) -> str:
    """Return the name of a format in which rows and weights can be multiplied, and their gradients."""
    kind = format_named(format)
    for name, value in (("received.x", x), ("weight", weight)):
        check_numbers(name, value)
    kind.check_shape("received.x", x.shape)
    if requires_gradients(x, weight):  # a gradient of x has blocks along n
        kind.check_shape("weight", weight.shape)
    return kind.name


def of_weights(
    weight: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor], format: str
) -> Tensor:
    """Return the gradient of the weights: for each expert its rows times their products' gradients.

    With a format both have blocks along the rows of one expert, from all ranks.
    """
    pairs = zip(inputs, grads, strict=True)
    return torch.stack([product_of_rows(*pair, format) for pair in pairs]).to(weight.dtype)


def of_products(
    input: Tensor, rows: Tensor, weight: Tensor, segments: Tensor, packed: bool, format: str
) -> list[Tensor]:
    """Return the gradients of input, weight and bias; ``rows`` are the products' gradients."""
    experts, inner, columns = weight.shape
    if packed and not format:
        many, wide = input.view(experts, -1, inner), rows.view(experts, -1, columns)
        of_input = torch.bmm(wide, weight.transpose(1, 2)).view(input.shape)
        return [of_input, torch.bmm(many.transpose(1, 2), wide), wide.sum(1)]
    if not format and grouped_on_device(input, rows, weight):
        ends = segments[..., 1].sum(1).cumsum(0).to(torch.int32)
        row = torch.arange(input.shape[0], device=input.device)
        of_input = torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        of_input = of_input.masked_fill((row >= ends[-1]).unsqueeze(1), 0)
        of_weight = torch._grouped_mm(input.t(), rows, offs=ends)
        expert = torch.searchsorted(ends, row, right=True).clamp(max=experts - 1)
        wide = torch.zeros(experts, columns, device=rows.device)  # rows of no expert are 0
        return [of_input, of_weight, wide.index_add_(0, expert, rows.float()).to(rows.dtype)]
    of_input = multiplied(rows, weight.transpose(1, 2), segments, format)
    where = rows_of_experts(segments)
    inputs, grads = ([matrix[part] for part in where] for matrix in (input, rows))
    of_bias = torch.stack([grad.sum(0) for grad in grads])
    return [of_input, of_weights(weight, inputs, grads, format), of_bias]


def rows_of_experts(segments: Tensor) -> list[slice]:
    """Return the rows of each expert; the host reads their places."""
    firsts, counts = segments[:, 0, 0].tolist(), segments[..., 1].sum(1).tolist()
    return [slice(first, first + count) for first, count in zip(firsts, counts, strict=True)]


def multiplied(x: Tensor, weight: Tensor, segments: Tensor, format: str) -> Tensor:
    """Return rows by expert times weights; the host reads the counts. Rows without an expert are 0."""
    where = rows_of_experts(segments)
    following = [*(rows.start for rows in where[1:]), x.shape[0]]
    products = []
    for expert, (rows, end) in enumerate(zip(where, following, strict=True)):
        found = product(x[rows], weight[expert], format, by_row=True)
        products += [found, found.new_zeros(end - rows.stop, found.shape[1])]
    return torch.cat(products)


# The same for graphs, which cannot read counts.
multiply_in_graph: Any = torch.library.custom_op("interlace::multiply", multiplied, mutates_args=())


@torch.library.custom_op("interlace::multiply_backward", mutates_args=())
def _multiply_backward(
    grad: Tensor, x: Tensor, weight: Tensor, segments: Tensor, format: str
) -> tuple[Tensor, Tensor]:
    of_x, of_weight, _ = of_products(x, grad, weight, segments, False, format)
    return of_x, of_weight


def _save_for_multiply(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.format = inputs
    ctx.save_for_backward(*tensors)


def _gradients_of_multiply(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if ctx.format:
        refuse_second_gradient()
    return (*_multiply_backward(grad, *ctx.saved_tensors, ctx.format), None, None)


multiply_in_graph.register_fake(lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[2]))
multiply_in_graph.register_autograd(_gradients_of_multiply, setup_context=_save_for_multiply)
_multiply_backward.register_fake(
    lambda grad, x, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.shape))
)


def grouped_on_device(*tensors: Tensor) -> bool:
    """Return whether torch has a grouped matmul for these that reads its counts on the device."""
    return all(
        tensor.is_cuda
        and tensor.dtype is torch.bfloat16
        and all(stride == 1 or not 2 * stride % ALIGNED for stride in tensor.stride())
        for tensor in tensors
    )
