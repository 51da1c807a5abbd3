"""The plain collectives as ops: their arguments and gradients.

==============  ==========================================================================================
op              gradient of its input
==============  ==========================================================================================
all_reduce      all_reduce of the gradients; for max and min to the ranks that had the value, in equal
                parts; for product times what the other ranks multiplied with
reduce_scatter  all_gather, and so on as for all_reduce
all_gather      reduce_scatter
all_to_all      all_to_all with the sizes exchanged
broadcast       reduce; of reduce: broadcast
gather          scatter; of scatter: gather
permute         permute, back
==============  ==========================================================================================
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from interlace.ops.collectives import eager, reference
from interlace.ops.op.gradients import wait
from interlace.ops.op.op import Op, OpGradient
from interlace.ops.op.sim_dispatch import Ops

_ops: Any = Ops()
Tensor = torch.Tensor
Length = torch.SymInt


@dataclass
class AllReduceArguments:
    input: Tensor
    reduce_op: str


@dataclass
class AllGatherArguments:
    input: Tensor
    gather_dim: int


@dataclass
class ReduceScatterArguments:
    input: Tensor
    reduce_op: str
    scatter_dim: int


@dataclass
class AllToAllArguments:
    input: Tensor
    output_split_sizes: list[Length] | None
    input_split_sizes: list[Length] | None


@dataclass
class BroadcastArguments:
    input: Tensor
    src: int


@dataclass
class ReduceArguments:
    input: Tensor
    reduce_op: str
    dst: int


@dataclass
class PermuteArguments:
    input: Tensor
    src_dst: list[int]


@dataclass
class GatherArguments:
    input: Tensor
    dst: int
    gather_dim: int


@dataclass
class ScatterArguments:
    input: Tensor
    src: int
    scatter_dim: int


@dataclass
class RankArguments:
    input: Tensor


def _save(ctx: Any, given: Any, output: Tensor) -> None:
    """The arguments without the tensors, which only some reductions need."""
    tensors, reduce_op = [], getattr(given, "reduce_op", "")
    if isinstance(given, (AllReduceArguments, ReduceScatterArguments)):
        tensors += [given.input] if reduce_op in ("max", "min", "product") else []
        tensors += [output] if reduce_op in ("max", "min") else []
    ctx.save_for_backward(*tensors)
    ctx.call, ctx.input_dim = {**vars(given), "input": None}, given.input.dim()


def _all_reduce(ctx: Any, grad: Tensor) -> Tensor:
    total = wait(_ops.all_reduce(grad, "sum", ctx.size, ctx.name))
    return _of_reduced(ctx, "all_reduce", total, lambda output: output)


def _reduce_scatter(ctx: Any, grad: Tensor) -> Tensor:
    def gathered(tensor: Tensor) -> Tensor:
        return wait(_ops.all_gather(tensor, ctx.call["scatter_dim"], ctx.size, ctx.name))

    return _of_reduced(ctx, "reduce_scatter", gathered(grad), gathered)


def _of_reduced(ctx: Any, op: str, total: Tensor, whole: Callable[[Tensor], Tensor]) -> Tensor:
    """From the gradient of the whole reduced tensor, which ``whole`` makes, to that of the own input."""
    size, name, reduce_op = ctx.size, ctx.name, ctx.call["reduce_op"]
    result: Tensor
    if reduce_op == "sum":
        return total
    if reduce_op == "avg":
        result = total / size
        return result
    if reduce_op in ("max", "min"):
        own, output = ctx.saved_tensors
        mine: Tensor = (own == whole(wait(output))).to(total.dtype)
        return total * mine / wait(_ops.all_reduce(mine, "sum", size, name))
    if reduce_op == "product":
        (own,) = ctx.saved_tensors
        # the product of the others, not a quotient, which has no derivative where one is 0
        every = wait(_ops.all_gather(own.unsqueeze(0), 0, size, name))
        ranks = torch.arange(size, device=own.device).view(size, *[1] * own.dim())
        others = torch.where(ranks == _ops.rank(own, size, name), 1, every).prod(0)
        return total * others.conj()
    raise RuntimeError(f"interlace.{op} with reduce_op {reduce_op!r} has no gradient")


def _all_gather(ctx: Any, grad: Tensor) -> Tensor:
    part = wait(_ops.reduce_scatter(grad, "sum", ctx.call["gather_dim"], ctx.size, ctx.name))
    return part if ctx.input_dim else part.reshape(())


def _all_to_all(ctx: Any, grad: Tensor) -> Tensor:
    received, sent = ctx.call["output_split_sizes"], ctx.call["input_split_sizes"]
    return wait(_ops.all_to_all(grad, sent, received, ctx.size, ctx.name))


def _broadcast(ctx: Any, grad: Tensor) -> Tensor:
    return wait(_ops.reduce(grad, "sum", ctx.call["src"], ctx.size, ctx.name))


def _reduce(ctx: Any, grad: Tensor) -> Tensor:
    reduce_op = ctx.call["reduce_op"]
    if reduce_op not in ("sum", "avg"):
        raise RuntimeError(f"interlace.reduce with reduce_op {reduce_op!r} has no gradient")
    own = wait(_ops.broadcast(grad, ctx.call["dst"], ctx.size, ctx.name))
    return own if reduce_op == "sum" else own / ctx.size


def _permute(ctx: Any, grad: Tensor) -> Tensor:
    src_dst = ctx.call["src_dst"]
    back = [src_dst.index(rank) for rank in range(len(src_dst))]
    return wait(_ops.permute(grad, back, ctx.size, ctx.name))


def _gather(ctx: Any, grad: Tensor) -> Tensor:
    given = ctx.call
    part = wait(_ops.scatter(grad, given["dst"], given["gather_dim"], ctx.size, ctx.name))
    return part if ctx.input_dim else part.reshape(())


def _scatter(ctx: Any, grad: Tensor) -> Tensor:
    return wait(_ops.gather(grad, ctx.call["src"], ctx.call["scatter_dim"], ctx.size, ctx.name))


def _record(
    name: str, arguments: type, gradient: Callable[[Any, Tensor], Tensor] | None = None
) -> Op:
    """A collective; ``eager`` has a function of its name, and ``gradient`` gives that of its input."""
    start: Any = getattr(eager, name)
    by_name = None
    if gradient is not None:
        by_name = OpGradient(_save, lambda ctx, grad: {"input": gradient(ctx, grad)})
    return Op(
        name,
        arguments,
        lambda communicator, given, **out: start(communicator, *vars(given).values(), **out),
        lambda given, size: start.make(*vars(given).values(), size),
        by_name,
        communicates={},
        reference=getattr(reference, name),
    )


OPS = (
    _record("all_reduce", AllReduceArguments, _all_reduce),
    _record("all_gather", AllGatherArguments, _all_gather),
    _record("reduce_scatter", ReduceScatterArguments, _reduce_scatter),
    _record("all_to_all", AllToAllArguments, _all_to_all),
    _record("broadcast", BroadcastArguments, _broadcast),
    _record("reduce", ReduceArguments, _reduce),
    _record("permute", PermuteArguments, _permute),
    _record("gather", GatherArguments, _gather),
    _record("scatter", ScatterArguments, _scatter),
    _record("rank", RankArguments),
)
