"""Timeouts as torch sets them: of a group, by its function or method, and of one op, by its options."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from interlace.process_group.group import InterlaceProcessGroup
from interlace.runtime.core.errors import CollectiveTimeoutError

LONG, SHORT = timedelta(seconds=120), timedelta(seconds=0.3)


def reduce(group: Any) -> Any:
    return group.allreduce(torch.ones(4))


def by_function(group: Any) -> Any:
    dist.distributed_c10d._set_pg_timeout(SHORT, group)
    return reduce(group)


def by_method(group: Any) -> Any:
    group.set_timeout(SHORT)
    return reduce(group)


def by_options(group: Any) -> Any:
    options = dist.AllreduceOptions()
    options.timeout, options.asyncOp = SHORT, True
    return group.allreduce([torch.ones(4)], options)


def by_argument(group: Any) -> Any:
    return group.allreduce(torch.ones(4), dist.ReduceOp.SUM, SHORT)


def of_a_barrier(group: Any) -> Any:
    options = dist.BarrierOptions()
    options.timeout = SHORT
    return group.barrier(options)


@pytest.mark.parametrize("call", [by_function, by_method, by_options, by_argument, of_a_barrier])
def test_a_rank_that_does_not_come(call: Callable[[Any], Any]) -> None:
    store, gone = HashStore(), threading.Event()

    def on_rank(rank: int) -> Any:
        group = InterlaceProcessGroup(store, rank, 2, LONG, name="timeouts")
        try:
            reduce(group).wait()
            started = time.monotonic()
            if rank:
                assert gone.wait(LONG.total_seconds())
                return None
            with pytest.raises(CollectiveTimeoutError, match=r"0.3 s for ranks \[1\]"):
                call(group).wait()
            return time.monotonic() - started
        finally:
            gone.set()
            group.shutdown()

    with ThreadPoolExecutor(2) as threads:
        seconds, _ = threads.map(on_rank, range(2))
    assert seconds < LONG.total_seconds() / 4
