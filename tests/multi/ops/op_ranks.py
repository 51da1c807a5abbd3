"""Ranks of test_ops_shm.py. A module of its own, because new processes import it."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import GroupMember

import interlace

NON_GROUP_MEMBER = GroupMember.NON_GROUP_MEMBER


def operands(rank: int, world_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Shard and weight of an all-gather + matmul, activations and weight of a matmul + reduce."""
    generator = torch.Generator().manual_seed(1 + rank)
    shard = torch.randn(17 + 3 * rank, 40, generator=generator).to(dtype)
    activations = torch.randn(2 * world_size + 5, 24 + rank, generator=generator).to(dtype)
    weight_out = torch.randn(24 + rank, 19, generator=generator).to(dtype)
    weight_in = torch.randn(33, 40, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    return shard, weight_in, activations, weight_out


def every_op(algorithm: str, dtype: torch.dtype, async_op: bool) -> list[torch.Tensor]:
    """The results of all fused ops."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    shard, weight_in, activations, weight_out = operands(rank, world_size, dtype)
    results = [
        interlace.all_gather_matmul(
            shard, weight_in, algorithm=algorithm, async_op=async_op, return_gathered=True
        ),
        interlace.matmul_reduce_scatter(
            activations, weight_out, algorithm=algorithm, async_op=async_op
        ),
        interlace.matmul_all_reduce(
            activations, weight_out, algorithm=algorithm, async_op=async_op, reduce_op="avg"
        ),
    ]
    if async_op:
        results = [work.wait() for work in results]
    (gathered, product), scattered, reduced = results
    return [gathered, product, scattered, reduced]


def collectives(algorithm: str) -> list[torch.Tensor]:
    """The results of the plain collectives."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    gathered = torch.empty(world_size, 3)
    interlace.all_gather(gathered, torch.full((3,), float(rank)), algorithm=algorithm)
    reduced = torch.arange(7.0) + rank
    interlace.all_reduce(reduced, algorithm=algorithm)
    part = torch.empty(2)
    scattering = "kernel" if algorithm == "low_latency" else algorithm
    interlace.reduce_scatter(
        part, torch.arange(2.0 * world_size) * (rank + 1), algorithm=scattering
    )
    return [gathered, reduced, part]


def in_subgroups() -> list[float]:
    """Sums over the even and the odd ranks, at the same time."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    sums = []
    for parity in (0, 1):
        group = interlace.new_group(list(range(parity, world_size, 2)))
        if group != NON_GROUP_MEMBER:
            x = torch.full((4,), float(rank))
            interlace.all_reduce(x, group=group)
            sums.append(float(x[0]))
    return sums


def overlapping() -> bool:
    """Start several ops, compute meanwhile, wait in the other order; all results are right."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    weight = torch.eye(8)
    works = [
        interlace.all_gather_matmul(torch.full((2, 8), float(rank + 10 * i)), weight, async_op=True)
        for i in range(6)
    ]
    busy = torch.ones(64, 64) @ torch.ones(64, 64)
    right = bool((busy == 64).all())
    for i in reversed(range(6)):
        expected = torch.arange(world_size).repeat_interleave(2).float() + 10 * i
        right &= torch.equal(works[i].wait()[:, 0], expected) and works[i].is_completed()
    return right


def mismatched(what: str) -> None:
    """Call an op with something that differs on rank 1."""
    rank = interlace.get_rank()
    odd = rank == 1
    shard, weight = torch.ones(2, 8), torch.ones(8, 4)
    if what == "k":
        interlace.all_gather_matmul(torch.ones(2, 9 if odd else 8), torch.ones(9 if odd else 8, 4))
    elif what == "dtype":
        dtype = torch.float16 if odd else torch.float32
        interlace.all_gather_matmul(shard.to(dtype), weight.to(dtype))
    elif what == "op":
        (interlace.matmul_reduce_scatter if odd else interlace.all_gather_matmul)(shard, weight)
    elif what == "reduce_op":
        interlace.matmul_reduce_scatter(shard, weight, reduce_op="avg" if odd else "sum")


def usable_after_error() -> float:
    """A mismatch raises on every rank before any data moves, so the group goes on."""
    try:
        mismatched("k")
    except ValueError:
        x = torch.ones(1)
        interlace.all_reduce(x)
        return float(x)
    return -1.0


def _started(call: Callable[..., Any]) -> Callable[[], Any]:
    """The wait for it, which raises what the start did: the op before may have failed by then."""
    try:
        return call(async_op=True).wait
    except interlace.InterlaceError as error:
        raised = error

    def wait() -> None:
        raise raised

    return wait


def out_of_step(queued: bool) -> list[str]:
    """Only rank 0 gathers. What every later call says, also one that was queued before that was known."""
    x, said = torch.ones(2), []
    first: list[Callable[..., Any]] = [lambda **how: interlace.all_reduce(x, **how)]
    if interlace.get_rank() == 0:
        first.insert(0, lambda **how: interlace.all_gather(torch.empty(4), x, **how))
    if queued:
        first = [_started(call) for call in first]
    for call in (
        *first,
        lambda: interlace.all_reduce(x),
        lambda: interlace.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2)),
        interlace.barrier,
        lambda: interlace.new_group([0, 1]),
        lambda: interlace.all_gather(3, x),
    ):
        try:
            call()
        except (TypeError, ValueError, interlace.InterlaceError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
