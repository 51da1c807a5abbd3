"""The API across processes: the table, large messages, real asynchrony, monitored barriers, misuse."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from cases import api_cases, refused_calls, support_table
from ranks import ranks
from tiers import few

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


@ranks(3)
def test_every_reduction() -> None:
    assert api_cases.serve("all_reduce", support_table.REDUCED_DTYPES, False) > 100


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


@ranks(2)
def test_what_one_rank_refuses_of_an_asynchronous_op_all_refuse() -> None:
    rank, x = interlace.get_rank(), torch.ones(2)
    work = interlace.all_reduce(torch.ones(2 + rank), async_op=True)
    assert work is not None
    with pytest.raises(ValueError, match="shape of tensor differs"):
        work.wait()
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), ValueError)
    interlace.all_reduce(x, dist.ReduceOp.SUM)
    assert x.tolist() == [2, 2]


@pytest.mark.parametrize("place", ["sim", "shm"])
@ranks(2)
def test_a_misuse_of_any_kind_is_raised_on_all_ranks(place: str) -> None:
    refused_calls.refused_by_rank_1()
