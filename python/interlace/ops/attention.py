"""The op of attention over a sharded sequence: kernels, shapes and gradients.

The result is the output, of the query's shape, and the logarithm of every row's sum of exponentials,
``[batch, heads, tokens]``, fp32 or wider; both have gradients. The backward is an op of its own, which
computes scores once more: keys travel again, and what the ranks' queries give to the gradients of a rank's
keys comes back to it.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.attention import calls
from interlace.attention.calls import AttentionOptions
from interlace.ops.eager.pending import Started
from interlace.ops.gradients import wait
from interlace.ops.undispatched import Ops
from interlace.runtime.core.communicator import Communicator

_ops: Any = Ops()
Tensor = torch.Tensor

OPTIONS = (
    "str method, bool causal, float? scale, int[]? window, str layout, str balance, str algorithm"
)
ARGUMENTS = f"Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens, {OPTIONS}"
BACKWARD_ARGUMENTS = (
    "Tensor grad, Tensor? lse_grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, "
    f"Tensor? cu_seqlens, {OPTIONS}"
)


def results(query: Tensor, layout: str) -> list[Tensor]:
    """The output and the logarithms of the sums, empty."""
    if query.dim() != 4:
        raise ValueError(f"query must have 4 dimensions ({layout}), got shape {tuple(query.shape)}")
    tokens, batches = (1, 0) if layout == "bshd" else (0, 1)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    shape = [query.shape[batches], query.shape[2], query.shape[tokens]]
    return [query.new_empty(query.shape), query.new_empty(shape, dtype=wide)]


def fake(query: Tensor, key: Tensor, value: Tensor, documents: Any, *rest: Any) -> list[Tensor]:
    *given, _ = rest
    return results(query, AttentionOptions(*given).layout)


def fake_backward(grad: Tensor, lse_grad: Any, *rest: Any) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in rest[:3]]


def start(communicator: Communicator, *rest: Any) -> Started:
    query, key, value, documents, *given = rest
    options = AttentionOptions(*given)
    with communicator.accepting(calls.FORWARD):
        made = results(query, options.layout)
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
