"""The ops of grouped matmuls: kernels, shapes and gradients.

Both take the rows' numbers on both sides, as lists of ints, so what they return is known before they run::

    input_splits   by expert, of all the group's; what this rank has
    output_splits  by expert and source rank, of this rank's experts; what it multiplies

Gradients: of the rows, the products of the outputs' gradients with their experts' weights, moved back: by
all_to_all, or reduced and scattered where they had been gathered (for which all ranks must have equally
many); of a weight, the rows that were multiplied times the gradient. These matmuls are torch's, and the
collective follows them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.ops.experts import grouped
from interlace.ops.experts.grouped import GATHER, GroupedOptions
from interlace.ops.op.gradients import wait
from interlace.ops.op.pending import Started
from interlace.ops.op.sim_dispatch import Ops
from interlace.runtime.core.communicator import Communicator, internal_form

_ops: Any = Ops()
Tensor = torch.Tensor

ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? bias, SymInt[] input_splits, SymInt[] output_splits, "
    "bool return_received, str algorithm, ScalarType? out_dtype"
)


def products(input: Tensor, weight: Tensor, options: GroupedOptions) -> list[Tensor]:
    """The output, and the rows that were multiplied if they are asked for."""
    if input.dim() != 2 or weight.dim() != 3:
        raise ValueError(
            f"input must have 2 dimensions and weight 3, got shapes {tuple(input.shape)} and "
            f"{tuple(weight.shape)}"
        )
    rows = sum(options.output_splits)
    dtype = checks.output_dtype(options.out_dtype, input)
    made = [input.new_empty([rows, weight.shape[2]], dtype=dtype)]
    if options.return_received:
        made.append(input.new_empty([rows, input.shape[1]]))
    return made


def start(
    op: str,
    communicator: Communicator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sent: Sequence[int],
    received: Sequence[int],
    *given: Any,
) -> Started:
    with communicator.accepting(op):
        sizes = grouped.counts("output_splits", list(received))
        options = GroupedOptions(op, list(sent), sizes, *given)
        made = products(input, weight, options)
    tensors = (input, weight, bias, made[0], made[1] if options.return_received else None)
    run = internal_form(op, grouped.grouped_matmul)
    work = run(communicator, tensors, (options,), True)
    return Started(made, work)


def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, weight, bias, sent, received, kept, _, _, ctx.size, ctx.name = inputs
    ctx.sent, ctx.received, ctx.kept = list(sent), list(received), kept
    ctx.shared, ctx.weighed = input.requires_grad, weight.requires_grad
    ctx.biased = bias is not None and bias.requires_grad
    ctx.experts = weight.shape[0]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if kept else input, weight)


def _sources(ctx: Any) -> int:
    """The number of ranks that send; the size of the group, known where that is traced too."""
    return len(ctx.received) // int(ctx.experts)


def _by_source(ctx: Any, rows: Tensor) -> Tensor:
    """Rows that are by expert and source, by source and expert."""
    sources, parts = _sources(ctx), torch.split(rows, ctx.received)
    return torch.cat([part for source in range(sources) for part in parts[source::sources]])


def _from_sources(ctx: Any) -> list[Any]:
    """The number of rows from each rank."""
    sources = _sources(ctx)
    return [sum(ctx.received[source::sources]) for source in range(sources)]


def _sums(lengths: Sequence[Any], count: int) -> list[Any]:
    """Sums of ``count`` lengths each: what goes to the experts of a rank, or all that an expert has."""
    return [sum(lengths[first : first + count]) for first in range(0, len(lengths), count)]


def backward(op: str, ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    kept, weight = ctx.saved_tensors
    grad, of_received = grads[0], grads[1] if ctx.kept else None
    sources = _sources(ctx)
    of_input = of_weight = of_bias = None
    parts: Sequence[Tensor] = ()
    if grad is not None:
        grad = grad.to(weight.dtype)
        parts = torch.split(grad, _sums(ctx.received, sources))
    if ctx.shared and (grad is not None or of_received is not None):
        rows = of_received
        if parts:
            product = torch.cat([part @ weight[e].t() for e, part in enumerate(parts)])
            rows = product if rows is None else rows + product
        assert rows is not None
        rows = _by_source(ctx, rows)
        if op == GATHER:
            of_input = _ops.reduce_scatter(rows, "sum", 0, ctx.size, ctx.name)
        else:
            back = _sums(ctx.sent, int(ctx.experts)), _from_sources(ctx)
            of_input = _ops.all_to_all(rows, *back, ctx.size, ctx.name)
    if ctx.weighed and parts:
        received = wait(kept) if ctx.kept else _received_again(ctx, op, kept)
        inputs = torch.split(received, [part.shape[0] for part in parts])
        of_weight = torch.stack([a.t() @ part for a, part in zip(inputs, parts, strict=True)])
    if ctx.biased and parts:
        of_bias = torch.stack([part.sum(0) for part in parts])
    if of_input is not None:
        of_input = wait(of_input)
    return (of_input, of_weight, of_bias, *[None] * 7)


def _received_again(ctx: Any, op: str, input: Tensor) -> Tensor:
    """The rows that were multiplied, received once more because the op has not kept them."""
    if op == GATHER:
        rows = _ops.all_gather(input, 0, ctx.size, ctx.name)
    else:
        sizes = _from_sources(ctx), _sums(ctx.sent, int(ctx.experts))
        rows = _ops.all_to_all(input, *sizes, ctx.size, ctx.name)
    # they come by source and expert, and were multiplied by expert and source
    sources, experts = _sources(ctx), int(ctx.experts)
    lengths = [each for source in range(sources) for each in ctx.received[source::sources]]
    parts = torch.split(wait(rows), lengths)
    return torch.cat([part for expert in range(experts) for part in parts[expert::experts]])
