"""Functions that test_bench_command.py gives to ``interlace bench``, right and wrong ones."""

from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.benchmark import Kernel


def _all_reduce(nbytes: int, wrong_on: int | None) -> Kernel:
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    count = nbytes // 4

    def inputs(number: int) -> tuple[torch.Tensor]:
        return (torch.full((count,), float(rank + number)),)

    def run(x: torch.Tensor) -> torch.Tensor:
        interlace.all_reduce(x)
        if wrong_on == rank:
            x[-1] += 1  # one element of one rank
        return x

    def gloo(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def check(result: torch.Tensor, number: int) -> None:
        right = world_size * number + sum(range(world_size))
        bad = int((result != right).sum())
        assert not bad, f"{bad} elements are not {right}"

    return Kernel(
        run=run,
        inputs=inputs,
        check=check,
        nbytes=nbytes,
        bus_factor=2 * (world_size - 1) / world_size,
        baselines={"gloo": gloo},
    )


def right(nbytes: int) -> Kernel:
    return _all_reduce(nbytes, None)


def wrong(nbytes: int) -> Kernel:
    return _all_reduce(nbytes, 1)


def late(nbytes: int) -> Kernel:
    """The first call is right, and later calls are wrong, as with a buffer that is used again too early."""
    kernel = _all_reduce(nbytes, None)
    calls = 0

    def run(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        interlace.all_reduce(x)
        return x if calls == 1 else x + 1

    kernel.run = run
    return kernel


def bare(nbytes: int = 64) -> Any:
    x = torch.zeros(nbytes // 4)
    return lambda: interlace.all_reduce(x)


def whole() -> None:
    x = torch.ones(4)
    interlace.all_reduce(x)
    assert x[0] == interlace.get_world_size()


def wrong_whole() -> None:
    interlace.barrier()
    raise AssertionError("wrong sum")


def raising() -> None:
    interlace.barrier()
    {}["missing"]


def fused(m: int, n: int, k: int, dtype: torch.dtype) -> Kernel:
    shard = torch.ones(m // interlace.get_world_size(), k, dtype=dtype)
    weight = torch.ones(k, n, dtype=dtype)
    gathered = torch.ones(m, k, dtype=dtype)
    return Kernel(
        run=lambda: interlace.all_gather_matmul(shard, weight),
        check=lambda result, number: torch.equal(result, torch.full((m, n), float(k))),
        nbytes=gathered.nbytes,
        flops=2.0 * m * n * k,
        matmul=lambda: gathered @ weight,
        communication=lambda: interlace.all_gather(gathered, shard),
    )


def needs_more(nbytes: int, colour: str) -> None:
    """Takes what bench does not give."""
