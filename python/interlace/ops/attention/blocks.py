"""Attention to keys that are all there, and the gradients of it."""

from collections.abc import Sequence

import torch

from interlace.ops.attention.kernel_blocks import KernelBlocks
from interlace.ops.attention.problem import AttentionProblem, AttentionResult, Blocks
from interlace.ops.attention.torch_blocks import TorchBlocks
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor


def blocks_of(
    problem: AttentionProblem,
    configuration: Configuration | None,
    shape: Sequence[int] | None = None,
) -> Blocks:
    """Computed by kernels with a ``configuration``, else by torch.

    ``shape``: of the query, if it is not here yet; ``begin`` then says where it is.
    """
    spans, sources = problem.spans(), problem.sources()
    of = problem.query.shape if shape is None else shape
    made: Blocks
    if configuration is None:
        made = TorchBlocks(problem, of, spans, sources, problem.whose)
    else:
        made = KernelBlocks(problem, of, spans, sources, configuration)
    if shape is None:
        made.begin(problem.query)
    return made


def attend_to_all(
    problem: AttentionProblem, blocks: Blocks, packed: Tensor, output: Tensor, lse: Tensor
) -> None:
    """``packed``: all ranks' keys, there when the compute stream comes here."""
    blocks.attend(None, packed)
    blocks.merge(output, lse)


def differentiate_all(
    problem: AttentionProblem,
    blocks: Blocks,
    packed: Tensor,
    result: AttentionResult,
    of_query: Tensor,
    of_keys: Tensor,
) -> None:
    """``of_query`` and ``of_keys``, fp32 or wider: the gradients of the queries and of all ``packed``."""
    blocks.begin_backward(result)
    parts = torch.split(of_keys, list(problem.shards.lengths))
    for source in set(range(len(parts))) - set(problem.sources()):
        problem.communicator.compute.call(parts[source].zero_, "keys that nobody sees")
    blocks.differentiate(None, packed, of_keys)
    blocks.query_gradient(of_query)


# -- where nothing travels -------------------------------------------------------------------------


def attention_of_heads(
    problem: AttentionProblem, output: Tensor, lse: Tensor, configuration: Configuration | None
) -> Event:
    """All ranks' tokens, and heads that no other rank has."""
    packed, blocks = problem.packed(), blocks_of(problem, configuration)
    problem.after_the_caller()
    attend_to_all(problem, blocks, packed, output, lse)
    return problem.communicator.compute.record()


def attention_of_heads_backward(
    problem: AttentionProblem,
    result: AttentionResult,
    grads: tuple[Tensor, Tensor, Tensor],
    configuration: Configuration | None,
) -> Event:
    packed, blocks = problem.packed(), blocks_of(problem, configuration)
    of_keys = torch.empty_like(packed, dtype=problem.wide)
    problem.after_the_caller()
    differentiate_all(problem, blocks, packed, result, grads[0], of_keys)
    problem.give(of_keys, grads[1:])
    return problem.communicator.compute.record()
