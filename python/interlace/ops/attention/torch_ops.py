"""The ops of attention over a sharded sequence: kernels, shapes and gradients.

The result is the output, of the query's shape but with the size of the values' heads, and the logarithm of
every row's sum of exponentials, ``[batch, heads, tokens]``, fp32 or wider; both have gradients. The
backward is an op of its own, which computes scores once more: keys travel again, and what the ranks'
queries give to the gradients of a rank's keys comes back to it.

The exchanges of heads around it have each other for gradients: of the input of matmul + all-to-all it is
all-to-all + matmul with the transposed weight, and the other way round. What came with that, or in the
forward, gives the weight's gradient, a torch matmul.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.ops.attention import calls, head_exchange
from interlace.ops.attention.calls import AttentionOptions
from interlace.ops.attention.decode import decode
from interlace.ops.attention.head_exchange import HeadExchangeOptions
from interlace.ops.attention.launch_head_exchange import FROM_HEADS, TO_HEADS
from interlace.ops.op.gradients import wait
from interlace.ops.op.pending import Started
from interlace.ops.op.sim_dispatch import Ops
from interlace.runtime.core.communicator import Communicator

_ops: Any = Ops()
Tensor = torch.Tensor

OPTIONS = (
    "str method, bool causal, float? scale, int[]? window, str layout, str balance, str algorithm, "
    "SymInt? length"
)
ARGUMENTS = f"Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens, {OPTIONS}"
BACKWARD_ARGUMENTS = (
    "Tensor grad, Tensor? lse_grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, "
    f"Tensor? cu_seqlens, {OPTIONS}"
)


def results(query: Tensor, value: Tensor, layout: str) -> list[Tensor]:
    """The output and the logarithms of the sums, empty."""
    for name, each in (("q", query), ("v", value)):
        if each.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions ({layout}), got shape {tuple(each.shape)}"
            )
    tokens, batches = (1, 0) if layout == "bshd" else (0, 1)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    shape = [query.shape[batches], query.shape[2], query.shape[tokens]]
    output = query.new_empty([*query.shape[:3], value.shape[3]])
    return [output, query.new_empty(shape, dtype=wide)]


def fake(query: Tensor, key: Tensor, value: Tensor, documents: Any, *rest: Any) -> list[Tensor]:
    *given, _ = rest
    return results(query, value, AttentionOptions(*given).layout)


def fake_backward(grad: Tensor, lse_grad: Any, *rest: Any) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in rest[:3]]


def start(communicator: Communicator, *rest: Any) -> Started:
    query, key, value, documents, *given = rest
    options = AttentionOptions(*given)
    with communicator.accepting(calls.FORWARD):
        made = results(query, value, options.layout)
    tensors = (query, key, value, documents, *made)
    return _started(communicator, made, calls.attention, tensors, options)


def start_backward(communicator: Communicator, *rest: Any) -> Started:
    *tensors, documents = rest[:8]
    options = AttentionOptions(*rest[8:])
    made = fake_backward(*tensors)
    given = (*tensors, documents, made)
    return _started(communicator, made, calls.attention_backward, given, options)


def _started(
    communicator: Communicator,
    made: list[Tensor],
    run: Any,
    tensors: Any,
    options: AttentionOptions,
) -> Started:
    """Asynchronous, but on a CPU, whose cores have nothing else to do meanwhile.

    A rank without tokens has nothing that anybody would wait for: it waits here for its part to end.
    """
    if communicator.place.direct_access:
        run(communicator, tensors, (options,), False)
        return Started(made, None)
    work = run(communicator, tensors, (options,), True)
    if made[0].numel():
        return Started(made, work)
    work.wait()
    return Started(made, None)


def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    query, key, value, documents, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, documents, *output)


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    query, key, value, documents, output, lse = ctx.saved_tensors
    none = [None] * (1 + len(ctx.options))
    grad, lse_grad = grads
    if grad is None and lse_grad is None:
        return (None, None, None, *none)
    if grad is None:
        grad = torch.zeros_like(output)
    output, lse = wait(output), wait(lse)
    made = _ops.context_parallel_attention_backward(
        grad.to(query.dtype), lse_grad, query, key, value, output, lse, documents, *ctx.options
    )
    return (*(wait(each) for each in made), *none)


# -- decoding --------------------------------------------------------------------------------------

DECODE_ARGUMENTS = (
    "Tensor q, Tensor key, Tensor value, Tensor? lengths, Tensor? block_table, "
    "float? scale, str algorithm"
)


def decode_results(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Tensor]:
    """The output and the logarithms of the sums, empty."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    outer, heads = list(query.shape[:-2]), query.shape[-2]
    shape = [outer[0], heads, *outer[1:]]
    output = query.new_empty([*query.shape[:-1], value.shape[-1]])
    return [output, query.new_empty(shape, dtype=wide)]


def start_decode(communicator: Communicator, *rest: Any) -> Started:
    """Done, or ordered before what the caller does next, when it returns: tokens wait for each other."""
    *tensors, scale, algorithm = rest
    made = decode(communicator, tuple(tensors), (scale, algorithm, True), False)
    return Started([each.contiguous() for each in made], None)  # type: ignore[union-attr]


def no_gradient(op: str) -> tuple[Any, Any]:
    """Without one torch would warn, and give zeros."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"interlace's {op} has no gradients")

    return (lambda ctx, inputs, output: None), backward


# -- the exchanges of heads around it --------------------------------------------------------------

TO_HEADS_ARGUMENTS = "Tensor input, Tensor weight, Tensor? bias, SymInt? length, str algorithm"
FROM_HEADS_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? bias, SymInt? length, bool return_received, str algorithm"
)


def to_heads_result(
    input: Tensor, weight: Tensor, bias: Any, length: Any, _: str, size: Any
) -> Tensor:
    return input.new_empty(head_exchange.result_shape(TO_HEADS, input, weight, length, size))


def start_to_heads(
    communicator: Communicator, input: Tensor, weight: Tensor, bias: Any, length: Any, how: str
) -> Started:
    size = communicator.world_size
    with communicator.accepting(TO_HEADS):
        output = to_heads_result(input, weight, bias, length, how, size)
    options = HeadExchangeOptions(TO_HEADS, length, how)
    tensors = input, weight, bias, output, None
    return Started([output], head_exchange.FORMS[TO_HEADS](communicator, tensors, (options,), True))


def from_heads_results(
    input: Tensor, weight: Tensor, bias: Any, length: Any, received: bool, _: str, size: Any
) -> list[Tensor]:
    """The output; what came from each rank, ``[ranks, own rows, k]``, if it is asked for."""
    shape = head_exchange.result_shape(FROM_HEADS, input, weight, length, size)
    made = [input.new_empty(shape)]
    if received:
        made.append(input.new_empty([size, *shape[:-1], input.shape[-1]]).flatten(1, -2))
    return made


def start_from_heads(
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Any,
    length: Any,
    received: bool,
    how: str,
) -> Started:
    size = communicator.world_size
    with communicator.accepting(FROM_HEADS):
        made = from_heads_results(input, weight, bias, length, received, how, size)
    options = HeadExchangeOptions(FROM_HEADS, length, how)
    tensors = input, weight, bias, made[0], made[1] if received else None
    run = head_exchange.FORMS[FROM_HEADS]
    return Started(made, run(communicator, tensors, (options,), True))


def setup_to_heads(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, weight, bias, _, ctx.algorithm, ctx.size, ctx.name = inputs
    ctx.shared, ctx.weighed = input.requires_grad, weight.requires_grad
    ctx.biased = bias is not None and bias.requires_grad
    ctx.save_for_backward(input, weight)


def to_heads_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    input, weight = ctx.saved_tensors
    kept = ctx.weighed or ctx.biased
    given = grad.to(weight.dtype), weight.t(), None, input.shape[0], kept, ctx.algorithm
    of_input, *rest = _ops.all_to_all_matmul(*given, ctx.size, ctx.name)
    of_weight = of_bias = None
    if kept:
        # by rank, as columns of the weight are
        parts = wait(rest[0])
        if ctx.weighed:
            own = input.flatten(0, -2).t() @ parts
            of_weight = own.transpose(0, 1).flatten(1)
        if ctx.biased:
            of_bias = parts.sum(1).flatten()
    return wait(of_input), of_weight, of_bias, *[None] * 4


def setup_from_heads(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, weight, bias, _, ctx.kept, ctx.algorithm, ctx.size, ctx.name = inputs
    ctx.shared, ctx.weighed = input.requires_grad, weight.requires_grad
    ctx.biased = bias is not None and bias.requires_grad
    ctx.total, ctx.shape = input.shape[0], output[0].shape[:-1]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if ctx.kept else None, weight)


def from_heads_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    received, weight = ctx.saved_tensors
    grad, of_received = grads[0], grads[1] if ctx.kept else None
    of_input = of_weight = of_bias = None
    if ctx.shared and of_received is not None:  # in a backward of a backward
        moved = of_received.transpose(0, 1).reshape(*ctx.shape, -1)
        same = torch.eye(moved.shape[-1], dtype=moved.dtype, device=moved.device)
        of_input = _to_heads(ctx, moved, same)
    if grad is not None:
        grad = grad.to(weight.dtype)
        rows = grad.flatten(0, -2)
        if ctx.shared:
            product = _to_heads(ctx, grad, weight.t())
            of_input = product if of_input is None else of_input + product
        if ctx.weighed:
            if received is None:
                raise RuntimeError(f"{FROM_HEADS} without return_received has no weight's gradient")
            of_weight = (wait(received).mT @ rows).flatten(0, 1)
        of_bias = rows.sum(0) if ctx.biased else None
    return of_input, of_weight, of_bias, *[None] * 5


def _to_heads(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
    given = rows, weight, None, ctx.total, ctx.algorithm
    return wait(_ops.matmul_all_to_all(*given, ctx.size, ctx.name))
