"""Timeouts as torch sets them: of a group, by its function or method, and of one op, by its options."""

import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import interlace
from guard import MOST
from interlace.process_group.collectives import Collectives
from interlace.process_group.group import InterlaceProcessGroup
from interlace.runtime.compat.torch_groups import c10d
from interlace.runtime.core.errors import CollectiveTimeoutError

LONG = timedelta(seconds=2 * MOST)  # no test lasts so long
SHORT = timedelta(seconds=0.1)


def reduce(group: Any) -> Any:
    return group.allreduce(torch.ones(4))


def by_function(group: Any) -> Any:
    dist.distributed_c10d._set_pg_timeout(SHORT, group)
    return reduce(group)


def by_method(group: Any) -> Any:
    group.set_timeout(SHORT)
    return reduce(group)


def by_argument(group: Any) -> Any:
    return group.allreduce(torch.ones(4), dist.ReduceOp.SUM, SHORT)


def in_a_context(group: Any) -> Any:
    options = c10d.AllreduceOptions()
    options.asyncOp = True
    with interlace.timeout(SHORT):
        return group.allreduce([torch.ones(4)], options)


def of_one_op_within_a_context(group: Any) -> Any:
    options = c10d.AllreduceOptions()
    options.timeout, options.asyncOp = SHORT, True
    with interlace.timeout(LONG):
        return group.allreduce([torch.ones(4)], options)


def of_a_message(group: Any) -> Any:
    with interlace.timeout(SHORT):
        return group.recv([torch.ones(4)], 1)


WAYS = [
    by_function, by_method, by_argument, in_a_context, of_one_op_within_a_context, of_a_message,
]  # fmt: skip


@pytest.mark.parametrize("call", WAYS)
def test_a_rank_that_does_not_come(call: Callable[[Any], Any]) -> None:
    nobody_comes(call)


# methods, their arguments, their options with the root that makes rank 0 wait
ONE, PAIR, BOTH = torch.ones(1), torch.ones(2), [torch.ones(1), torch.ones(1)]
METHODS: dict[str, tuple[tuple[Any, ...], Any, int | None]] = {
    "allreduce": (([ONE],), c10d.AllreduceOptions, None),
    "allreduce_coalesced": (([ONE],), c10d.AllreduceCoalescedOptions, None),
    "broadcast": (([ONE],), c10d.BroadcastOptions, 1),
    "reduce": (([ONE],), c10d.ReduceOptions, 0),
    "allgather": (([BOTH], [ONE]), c10d.AllgatherOptions, None),
    "all_gather_single": ((PAIR, ONE), c10d.AllgatherOptions, None),
    "allgather_coalesced": (([BOTH], [ONE]), c10d.AllgatherOptions, None),
    "all_gather_single_coalesced": (([PAIR], [ONE]), c10d.AllgatherOptions, None),
    "reduce_scatter": (([ONE], [BOTH]), c10d.ReduceScatterOptions, None),
    "reduce_scatter_single": ((ONE, PAIR), c10d.ReduceScatterOptions, None),
    "reduce_scatter_single_coalesced": (([ONE], [PAIR]), c10d.ReduceScatterOptions, None),
    "alltoall": ((BOTH, BOTH), c10d.AllToAllOptions, None),
    "all_to_all_single": ((PAIR, PAIR, [], []), c10d.AllToAllOptions, None),
    "gather": (([BOTH], [ONE]), c10d.GatherOptions, 0),
    "gather_single": ((PAIR, ONE), c10d.GatherOptions, 0),
    "scatter": (([ONE], []), c10d.ScatterOptions, 1),
    "barrier": ((), c10d.BarrierOptions, None),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_timeout_of_its_options(name: str, asynchronous: bool) -> None:
    arguments, kind, root = METHODS[name]
    options = kind()
    options.timeout, options.asyncOp = SHORT, asynchronous
    if root is not None:
        options.rootRank = root
    nobody_comes(lambda group: getattr(group, name)(*arguments, options))


def test_every_method_with_options_is_in_that_table() -> None:
    """Torch's older and newer names of the same methods do not count."""
    with_options = {
        name
        for name, method in vars(Collectives).items()
        if callable(method) and "opts" in inspect.signature(method).parameters
    }
    assert with_options - {"_run", "gather_into_tensor"} == set(METHODS)


def nobody_comes(call: Callable[[Any], Any]) -> None:
    """``call(group)`` on rank 0, or its wait, must end after ``SHORT``; rank 1 never calls."""
    store, gone = HashStore(), threading.Event()

    def on_rank(rank: int) -> None:
        group = InterlaceProcessGroup(store, rank, 2, LONG, name="timeouts")
        try:
            reduce(group).wait()
            if rank:
                assert gone.wait(LONG.total_seconds())
                return
            with pytest.raises(CollectiveTimeoutError, match=r"0.1 s for ranks \[1\]"):
                call(group).wait()
        finally:
            gone.set()
            group.shutdown()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(on_rank, range(2)))
