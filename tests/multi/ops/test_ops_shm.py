"""Ops across processes: all algorithms, and ranks out of step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from ranks import ranks

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-2}


def operands(rank: int, world_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return shard and weight of an all-gather + matmul, activations and weight of a matmul + reduce."""
    generator = torch.Generator().manual_seed(1 + rank)
    shard = torch.randn(17 + 3 * rank, 40, generator=generator).to(dtype)
    activations = torch.randn(2 * world_size + 5, 24 + rank, generator=generator).to(dtype)
    weight_out = torch.randn(24 + rank, 19, generator=generator).to(dtype)
    weight_in = torch.randn(33, 40, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    return shard, weight_in, activations, weight_out


@pytest.mark.parametrize("algorithm", ["auto", "fused", "pipelined", "unfused"])
@ranks(3)
def test_fused_ops(algorithm: Any) -> None:
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    for dtype, async_op in ((torch.float32, False), (torch.bfloat16, True)):
        inputs = [operands(each, world_size, dtype) for each in range(world_size)]
        shard, weight_in, activations, weight_out = inputs[rank]
        options: dict[str, Any] = {"algorithm": algorithm, "async_op": async_op}
        made = [
            interlace.all_gather_matmul(shard, weight_in, return_gathered=True, **options),
            interlace.matmul_reduce_scatter(activations, weight_out, **options),
            interlace.matmul_all_reduce(activations, weight_out, reduce_op="avg", **options),
        ]
        (gathered, output), scattered, reduced = (
            [work.wait() for work in made] if async_op else made
        )
        whole = torch.cat([shard for shard, *_ in inputs])
        product = whole.double() @ weight_in.double()
        total = torch.stack([a.double() @ b.double() for _, _, a, b in inputs]).sum(0)
        near, largest = TOLERANCE[dtype], total.abs().max()
        assert torch.equal(gathered, whole)
        assert (output.double() - product).abs().max() <= near * product.abs().max()
        assert (reduced.double() - total / world_size).abs().max() <= near * largest
        every: list[Any] = [None] * world_size
        interlace.all_gather_object(every, (reduced, scattered))
        assert torch.equal(reduced, every[0][0])
        parts = torch.cat([part for _, part in every])
        assert (parts.double() - total).abs().max() <= near * largest


@pytest.mark.parametrize("algorithm", ["kernel", "copy", "multimem", "low_latency"])
@ranks(4)
def test_collectives(algorithm: Any) -> None:
    rank, world_size, every = interlace.get_rank(), 4, torch.arange(4.0)
    gathered = torch.empty(world_size, 3)
    interlace.all_gather(gathered, torch.full((3,), float(rank)), algorithm=algorithm)
    assert torch.equal(gathered, every[:, None].expand(-1, 3))
    reduced = torch.arange(7.0) + rank
    interlace.all_reduce(reduced, algorithm=algorithm)
    assert torch.equal(reduced, torch.arange(7.0) * world_size + every.sum())
    part, scattering = torch.empty(2), "kernel" if algorithm == "low_latency" else algorithm
    whole = torch.arange(2.0 * world_size) * (rank + 1)
    interlace.reduce_scatter(part, whole, algorithm=scattering)
    assert torch.equal(part, torch.arange(2.0 * rank, 2.0 * rank + 2) * (every + 1).sum())


def _started(call: Callable[..., Any]) -> Callable[[], Any]:
    """Return the wait for a call, which raises an error of its start: the op before may have failed."""
    try:
        return call(async_op=True).wait
    except interlace.InterlaceError as error:
        raised = error

    def wait() -> None:
        raise raised

    return wait


@pytest.mark.parametrize("place", ["sim", "shm"])
@ranks(2)
def test_ranks_out_of_step_hear_the_first_cause_from_every_later_call(place: str) -> None:
    """Calls of processes are queued, so they begin before the cause is known."""
    x, said, rank = torch.ones(2), [], interlace.get_rank()
    first: list[Callable[..., Any]] = [lambda **how: interlace.all_reduce(x, **how)]
    if rank == 0:
        first.insert(0, lambda **how: interlace.all_gather(torch.empty(4), x, **how))
    if place == "shm":
        first = [_started(call) for call in first]
    calls: list[Callable[[], Any]] = [
        *first,
        lambda: interlace.all_reduce(x),
        lambda: interlace.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2)),
        interlace.barrier,
        lambda: interlace.new_group([0, 1]),
    ]
    for call in calls:
        with pytest.raises((ValueError, interlace.InterlaceError)) as caught:
            call()
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    cause = "ranks call different ops at the same time: rank 0 calls all_gather, rank 1 calls all_reduce"
    assert said[0] == f"DifferentOpsError: {cause}"
    assert len(said) == 6 - rank
    for text in said[1:]:
        assert text.startswith(f"InterlaceError: rank {rank}: ") and text.endswith(cause)
        assert "out of step" in text
    wrong: Any = 3
    with pytest.raises(TypeError, match=rf"output must be a tensor .*, got int \(on rank {rank}\)"):
        interlace.all_gather(wrong, x)
