"""Failures and timeouts that torch's C++ must see, groups that are dropped, and the end of processes."""

import gc
import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

import interlace
from guard import LIMIT, MOST
from interlace.process_group.collectives import Collectives
from interlace.process_group.group import InterlaceProcessGroup
from interlace.runtime.compat.torch_groups import c10d
from interlace.runtime.core.errors import CollectiveTimeoutError
from interlace.runtime.processes import dump
from multi.process_group.tools import Recorder, own
from ranks import ranks
from tiers import thorough

ENDS = """
import sys, torch.distributed as dist

_, path, rank = sys.argv
dist.init_process_group("interlace", init_method=f"file://{path}", rank=int(rank), world_size=2)
groups = [dist.new_group() for _ in range(3)]
for group in groups:
    dist.barrier(group)
raise RuntimeError("the mistake")
"""

UNDER_WAY = """
import atexit, gc, os, sys, threading, time, torch, torch.distributed as dist, interlace
from interlace.runtime.processes import worker
worker.END_SECONDS = 600.0  # however slow the receiver is

def large_message(rank, store, destroyed=False):
    dist.barrier()
    x = torch.full((1_000_000,), float(rank + 1))
    if rank == 0:
        global kept
        kept = dist.isend(x, 1)
        if destroyed:
            dist.destroy_process_group()
    else:
        time.sleep(0.3)
        dist.recv(x, 0)
        assert x.min() == x.max() == 1
        print("received")

def message_and_the_end_of_its_group(rank, store):
    large_message(rank, store, destroyed=True)

def callback_in_a_thread(rank, store):
    begun, ends = threading.Event(), threading.Event()

    def follow(future):
        begun.set()
        ends.wait()
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            torch.ones(1000).sum()
        print("has followed", flush=True)

    if rank == 1:
        store.wait(["follows"])  # after the op it would be called at once and in this thread
        dist.all_reduce(torch.ones(4))
    else:
        global following
        work = dist.all_reduce(torch.ones(4), async_op=True)
        following = work.get_future().then(follow)
        store.set("follows", "")
        begun.wait()
        atexit.register(ends.set)

gc.freeze()  # or every end looks through all that was imported
children = []
for last in (large_message, message_and_the_end_of_its_group, callback_in_a_thread):
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            store = dist.FileStore(f"{sys.argv[1]}/{last.__name__}", 2)
            dist.init_process_group("interlace", store=store, rank=rank, world_size=2)
            last(rank, store)
            sys.exit()  # as Python ends
assert not any(os.waitpid(child, 0)[1] for child in children)
"""


@ranks(2, backend="interlace")
def test_a_backward_whose_peer_has_left_raises() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="rank 1 has left the group"):
            model(torch.ones(1, 2)).sum().backward()


@ranks(2, backend="interlace")
def test_an_op_that_fails_under_a_mode_raises() -> None:
    if dist.get_rank() == 0:
        with Recorder():
            work = dist.all_reduce(own(), async_op=True)
        with pytest.raises(interlace.InterlaceError, match="rank 1 has left the group"):
            work.wait()


@ranks(2, backend="interlace")
def test_roots_and_peers_that_are_no_ranks() -> None:
    x = torch.ones(1)
    calls: list[tuple[Callable[[], Any], str]] = [
        (partial(dist.broadcast, x, group_src=-1), "src must be within 0..1, got -1"),
        (partial(dist.reduce, x, group_dst=9), "dst must be within 0..1, got 9"),
        (partial(dist.isend, x, group_dst=-1), "dst must be within 0..1, got -1"),
        (partial(dist.gather, x, None, group_dst=-1), "dst must be within 0..1, got -1"),
    ]
    for call, text in calls:
        with pytest.raises(ValueError, match=rf"{text} \(on rank {dist.get_rank()}\)"):
            call()
    dist.all_reduce(x)
    assert float(x) == 2.0


def dropped_groups(count: int, pending: str, seconds: float = LIMIT / 2) -> bool:
    """Return whether groups with pending ops that nobody closed leave no descriptor and no thread."""

    def left() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd")) + threading.active_count()

    before = left()
    for _ in range(count):
        group = interlace.new_group(range(interlace.get_world_size()))
        group.barrier()
        if pending == "op":
            interlace.all_reduce(own(), group=group, async_op=True).wait()
        if pending and interlace.get_rank() == 0:  # on no other rank, so it cannot end by itself
            if pending == "op":
                interlace.all_reduce(own(), group=group, async_op=True)
            elif pending == "message":
                interlace.irecv(own(), 1, group=group)
            else:
                interlace.isend(torch.ones(100_000), 1, group=group)
        del group
    interlace.barrier()
    until = time.monotonic() + seconds
    while left() > before and time.monotonic() < until:
        time.sleep(1e-2)
    return left() <= before


@pytest.mark.parametrize("pending", ["", "op", "message"])
@ranks(2)
def test_dropped_groups_leave_no_descriptors_and_no_threads(pending: str) -> None:
    assert dropped_groups(10, pending)


@thorough
def test_a_process_of_many_groups_says_once_why_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, str(tmp_path / "store")]
    env = {**os.environ, dump.VARIABLE: str(tmp_path / "records")}
    processes = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, env=env)
        for rank in range(2)
    ]
    for rank, process in enumerate(processes):
        said = [line for line in process.communicate()[1].splitlines() if "last ops" in line]
        assert len(said) == 1 and said[0].count(f"_rank_{rank}") == 4, said
        assert "its process ended with RuntimeError: the mistake" in said[0]


def test_what_is_under_way_ends_before_its_process_does(tmp_path: Path) -> None:
    """A callback's thread once returned from torch after Python had ended, and aborted the process."""
    command = [sys.executable, "-c", UNDER_WAY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["has followed", "received", "received"]


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
