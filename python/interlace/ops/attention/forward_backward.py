"""Attention to keys that come by one of the ways of ``moves.py``, and gradients, for every way.

``fused``      Triton kernels on the keys of one rank after another
``pipelined``  torch likewise
``unfused``    a plain all-gather first, then torch; any dtype

Contributions to the gradients of a rank's keys are staged where they are made, and the rank adds them up,
in fp32 (``returns.py``).
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from interlace.ops.attention.blocks import blocks_of
from interlace.ops.attention.key_gradients import KeySums, RingSums, StagedSums
from interlace.ops.attention.key_transport import RingKeys, StagedKeys, Travelling
from interlace.ops.attention.problem import AttentionProblem, AttentionResult
from interlace.runtime.core.call import Call
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor
WAYS: dict[str, Callable[[AttentionProblem, Layout], Travelling]] = {
    "all_gather": StagedKeys,
    "ring": RingKeys,
}
BACK: dict[str, Callable[[AttentionProblem, Layout], KeySums]] = {
    "all_gather": StagedSums,
    "ring": RingSums,
}


def attention_on_the_way(
    problem: AttentionProblem,
    method: str,
    output: Tensor,
    lse: Tensor,
    configuration: Configuration | None,
) -> Event:
    problem = replace(problem, heads_first=configuration is None)
    layout, blocks = Layout(), blocks_of(problem, configuration)
    keys = WAYS[method](problem, layout)

    def body(workspace: Workspace) -> None:
        for source, packed in keys.travel(workspace):
            blocks.attend(source, packed)
        blocks.merge(output, lse)

    return problem.communicator.enqueue(problem.op, layout, body)


def gathered_by_engine(problem: AttentionProblem) -> dict[int, Tensor]:
    """All ranks' keys, by source, through the plain collective."""
    communicator, lengths = problem.communicator, problem.shards.lengths
    packed = problem.packed()
    if problem.shards.world_size == 1:
        return {0: packed}
    whole = packed.new_empty(problem.shards.total, problem.row_elements)
    parts = torch.split(whole, list(lengths))
    terms = (("rows", lengths), ("row", problem.row_elements), ("dtype", packed.dtype))
    call = Call(problem.op, terms)
    event = communicator.engine.all_gather(call, [part.view(-1) for part in parts], packed.view(-1))
    if event is not None:
        communicator.compute.wait_event(event)
    return dict(enumerate(parts))


def attention_unfused(problem: AttentionProblem, output: Tensor, lse: Tensor) -> Event:
    blocks, gathered = blocks_of(problem, None), gathered_by_engine(problem)
    problem.after_the_caller()
    for source in problem.sources():
        blocks.attend(source, gathered[source])
    blocks.merge(output, lse)
    return problem.communicator.compute.record()


# -- backward --------------------------------------------------------------------------------------


def attention_backward(
    problem: AttentionProblem,
    method: str,
    result: AttentionResult,
    grads: tuple[Tensor, Tensor, Tensor],
    configuration: Configuration | None,
) -> Event:
    """``grads``, of query, key and value, as the problem has these; keys come by ``method`` once more."""
    problem = replace(problem, heads_first=configuration is None)
    layout, blocks = Layout(), blocks_of(problem, configuration)
    keys = WAYS[method](problem, layout)
    sums = BACK[method](problem, layout)

    def body(workspace: Workspace) -> None:
        # the last op here may still be read by others
        problem.communicator.compute.wait_credits(workspace)
        blocks.begin_backward(result)
        for source, packed in keys.travel(workspace, sums.step):
            blocks.differentiate(source, packed, sums.room(workspace, source))
            sums.made(workspace, source)
        blocks.query_gradient(grads[0])
        problem.give(sums.total(workspace), grads[1:])

    return problem.communicator.enqueue(problem.op, layout, body)


def attention_backward_unfused(
    problem: AttentionProblem, result: AttentionResult, grads: tuple[Tensor, Tensor, Tensor]
) -> Event:
    """Plain collectives around torch."""
    communicator, lengths = problem.communicator, problem.shards.lengths
    blocks, gathered = blocks_of(problem, None), gathered_by_engine(problem)
    dtype = problem.wide
    whole = problem.key.new_zeros(problem.shards.total, problem.row_elements, dtype=dtype)
    parts = torch.split(whole, list(lengths))
    problem.after_the_caller()
    blocks.begin_backward(result)
    for source in problem.sources():
        blocks.differentiate(source, gathered[source], parts[source])
    blocks.query_gradient(grads[0])
    total = parts[0]
    if problem.shards.world_size > 1:
        total = torch.empty_like(parts[problem.rank])
        # an engine begins with what the caller has issued, which the contributions are then among
        event = communicator.compute.record()
        communicator.place.hold_current(event, f"the gradients of {problem.op}")
        terms = (("rows", lengths), ("row", problem.row_elements), ("dtype", dtype))
        call = Call(f"{problem.op} of keys", terms)
        flat = [part.view(-1) for part in parts]
        ended = communicator.engine.reduce_scatter(call, total.view(-1), flat, "sum")
        if ended is not None:
            communicator.compute.wait_event(ended)
    problem.give(total, grads[1:])
    return communicator.compute.record()
