"""Ops across processes: the API's table, asynchrony, misuse, algorithms, gradients, ranks out of step."""

import copy
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import interlace
from cases import api_cases, refused_calls, support_table
from interlace import nn
from interlace.runtime.numerics.norms import NAMES, activate
from ranks import ranks
from support import noise
from tiers import few, thorough

FEW = (torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.parametrize("world_size", few([2, 3], 3))
@ranks()
def test_every_operation(world_size: int) -> None:
    served = [
        api_cases.serve(each.name, FEW, False, True)
        for each in support_table.OPERATIONS
        if each.payload in (support_table.ANY, support_table.REDUCED)
    ]
    assert sum(served) > 200


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    return path


@ranks(2)
def test_async_ops_return_before_the_others_have_called(fifo: str) -> None:
    """Rank 1 calls each op only after rank 0 has started it, so a call that blocks never ends."""
    rank = interlace.get_rank()
    ones = torch.ones(4)
    out, two = torch.empty(8), torch.empty(2)
    lists = [torch.empty(4), torch.empty(4)]
    starts: list[Callable[[], Any]] = [
        lambda: interlace.all_reduce(ones.clone(), async_op=True),
        lambda: interlace.all_gather(out, ones, async_op=True),
        lambda: interlace.all_gather_v(out, ones, [4, 4], async_op=True),
        lambda: interlace.reduce_scatter(two, ones, async_op=True),
        lambda: interlace.broadcast(ones.clone(), 1, async_op=True),
        lambda: interlace.reduce(ones.clone(), 0, async_op=True),
        lambda: interlace.gather(ones, lists if rank == 0 else None, 0, async_op=True),
        lambda: interlace.scatter(ones.clone(), [ones, ones] if rank == 1 else None, 1, async_op=True),
        lambda: interlace.all_to_all(list(two.split(1)), list(ones[:2].split(1)), async_op=True),
        lambda: interlace.all_to_all_single(ones.clone(), ones, async_op=True),
        lambda: interlace.all_reduce_coalesced([ones.clone(), two], async_op=True),
        lambda: interlace.barrier(async_op=True),
    ]  # fmt: skip
    interlace.barrier()
    with open(fifo, "wb" if rank == 0 else "rb", buffering=0) as pipe:
        for start in starts:
            if rank == 0:
                work = start()
                assert not work.is_completed()
                busy = torch.ones(8, 8) @ torch.ones(8, 8)  # the caller computes meanwhile
                assert bool((busy == 8).all())
                pipe.write(b"x")
            else:
                assert pipe.read(1) == b"x"
                work = start()
            assert work.wait() is True and work.is_completed()


@ranks(3)
def test_monitored_barrier_names_who_is_missing() -> None:
    rank = interlace.get_rank()
    interlace.monitored_barrier(timeout=timedelta(seconds=300))
    for wait_all in (False, True):
        if rank == 0:
            text = "Ranks 1 failed" if wait_all else "Rank 1 failed"
            with pytest.raises(interlace.CollectiveTimeoutError, match=text) as caught:
                interlace.monitored_barrier(timeout=60, wait_all_ranks=wait_all)
            assert "failed to pass monitoredBarrier in 60000 ms" in str(caught.value)
            assert caught.value.waited_for == (1,)
        elif rank == 2:
            with pytest.raises(RuntimeError, match="Rank 2 successfully reached monitoredBarrier"):
                interlace.monitored_barrier(timeout=60, wait_all_ranks=wait_all)
        interlace.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
            interlace.monitored_barrier(timeout=timedelta(0))
    interlace.barrier()


@pytest.mark.parametrize("place", ["sim", "shm"])
@ranks(2)
def test_a_misuse_of_any_kind_is_raised_on_all_ranks(place: str) -> None:
    refused_calls.refused_by_rank_1()


@pytest.mark.parametrize("algorithm", ["auto", "fused", "pipelined", "unfused"])
@ranks(3)
def test_a_sum_has_equal_bits_on_all_ranks(algorithm: Any) -> None:
    rank, every = interlace.get_rank(), [torch.empty(0)] * 3
    x, weight = noise(rank, 1, (11, 24 + rank)), noise(rank, 2, (24 + rank, 19))
    total = interlace.matmul_all_reduce(x, weight, algorithm=algorithm)
    interlace.all_gather_object(every, total)
    assert torch.equal(total, every[0])


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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16], ids=str)
def test_what_torch_does_not_unpickle_goes_to_ranks_and_comes_back(dtype: torch.dtype) -> None:
    given = torch.arange(6).view(2, 3).t().to(dtype)
    for found in interlace.run(copy.deepcopy, 2, {"rows": [given]}, place="shm"):
        (back,) = found["rows"]
        assert back.dtype == dtype and back.tolist() == given.tolist()


WORLD = 2


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def check_gather(name: str, async_op: bool, return_gathered: bool) -> None:
    """The first of two weights has an activation and a bias."""
    rank = interlace.get_rank()
    shards = leaves(*[noise(each, 1, (3, 5)) for each in range(WORLD)])
    first, second, bias = leaves(noise(9, 2, (5, 4)), noise(9, 3, (5, 6)), noise(9, 4, (4,)))
    mine = leaves(shards[rank].detach(), *[each.detach() for each in (first, second, bias)])
    result: Any = interlace.all_gather_matmul(
        mine[0],
        mine[1:3],
        bias=[mine[3], None],
        activation=[name, None],  # type: ignore[list-item]
        async_op=async_op,
        return_gathered=return_gathered,
    )  # type: ignore[call-overload]
    result = result.wait() if async_op else result
    outputs = result[1] if return_gathered else result
    whole = torch.cat(shards)
    right = [activate(whole @ first + bias, name), whole @ second]
    torch.testing.assert_close(outputs, right)
    (outputs[0].sum() + 2 * outputs[1].sum()).backward()
    # every rank's loss is a sum over all rows, so a shard's gradient has a part of each
    (right[0].sum() + 2 * right[1].sum()).backward()
    assert shards[rank].grad is not None
    torch.testing.assert_close(mine[0].grad, WORLD * shards[rank].grad)
    for each, expected in zip(mine[1:], (first, second, bias), strict=True):
        torch.testing.assert_close(each.grad, expected.grad)


def check_reduce(name: str, op: Any) -> None:
    rank, scatters = interlace.get_rank(), op is interlace.matmul_reduce_scatter
    inputs = leaves(*[noise(each, 5, (4, 5)) for each in range(WORLD)])
    weights = leaves(*[noise(each, 6, (5, 6)) for each in range(WORLD)])
    (bias,) = leaves(noise(9, 7, (6,)))
    x, weight, own_bias = leaves(*[each.detach() for each in (inputs[rank], weights[rank], bias)])
    output = op(x, weight, bias=own_bias, activation=name)
    output.sum().backward()
    total = sum(a @ b for a, b in zip(inputs, weights, strict=True))
    right = activate(total + bias, name)
    losses = 1 if scatters else WORLD  # every rank's loss counts
    (right.sum() * losses).backward()
    torch.testing.assert_close(output, right.chunk(WORLD)[rank] if scatters else right)
    torch.testing.assert_close(x.grad, inputs[rank].grad)
    torch.testing.assert_close(weight.grad, weights[rank].grad)
    interlace.all_reduce(own_bias.grad)
    torch.testing.assert_close(own_bias.grad, bias.grad)


@pytest.mark.parametrize("name", NAMES)
@ranks(WORLD)
def test_outputs_and_gradients(name: str) -> None:
    for choice in (False, True):
        check_gather(name, choice, choice)
    for op in (interlace.matmul_reduce_scatter, interlace.matmul_all_reduce):
        check_reduce(name, op)


def attended(*tensors: torch.Tensor) -> torch.Tensor:
    options: dict[str, Any] = {"causal": True, "window": (5, -1), "layout": "sbhd"}
    return nn.functional.context_parallel_attention(*tensors, **options)


def decoded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return interlace.functional.distributed_decode(q * 2, (k, v))[0] + 1


def check_graph(
    call: Callable[..., Any], shapes: Sequence[tuple[int, ...]], parameters: Any = ()
) -> None:
    """A graph without breaks must give the bits of the eager call, also of its gradients."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    found = []
    for form in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        leaves = [each.clone().requires_grad_(call is not decoded) for each in inputs]
        output = form(*leaves)
        found.append([output.detach()])
        if output.requires_grad:
            found[-1] += torch.autograd.grad(output.square().sum(), [*leaves, *parameters])
    assert all(map(torch.equal, *found))


@thorough
@ranks(2)
def test_graphs_have_it() -> None:
    check_graph(attended, [(10, 1, 4, 8), (10, 1, 2, 8), (10, 1, 2, 6)])
    torch.manual_seed(0)
    layer = nn.UlyssesAttention(16, 4, 2, 8, True, causal=True)
    check_graph(layer, [(2, 6, 16)], list(layer.parameters()))
    check_graph(decoded, [(2, 4, 8), (2, 5, 2, 8), (2, 5, 2, 6)])
