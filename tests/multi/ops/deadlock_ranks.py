"""Ranks that wait for each other, or seem to, for test_deadlocks.py."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

import interlace
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.places.connect import connect_place
from interlace.runtime.processes.blame import Blame

FEW = 4


def summed(*groups: Any) -> str:
    """The error of an all_reduce of each of these groups, one after another; empty if there is none."""
    try:
        for group in groups:
            interlace.all_reduce(torch.ones(FEW), group=group)
    except interlace.InterlaceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def sum_of_all() -> None:
    assert summed(None) == ""


def two_orders() -> str:
    """The last rank calls the ops of two groups in another order than the others, and then leaves them."""
    groups = [interlace.new_group(), interlace.new_group()]
    last = interlace.get_rank() == interlace.get_world_size() - 1
    try:
        return summed(*groups[:: -1 if last else 1])
    finally:
        if last:
            for group in groups:
                group.close()


def two_orders_and_a_slow_rank() -> str:
    """As above; the last rank has left when the first tells that its wait has ended."""
    with pytest.MonkeyPatch.context() as patch:
        if interlace.get_rank() == 0:
            ended = Blame.ended

            def late(self: Blame, error: interlace.InterlaceError) -> None:
                time.sleep(1)
                ended(self, error)

            patch.setattr(Blame, "ended", late)
        return two_orders()


def mesh() -> str:
    """Ranks 0 and 3 sum first over rows of two by two, 1 and 2 over columns: a circle of four groups."""
    made = [interlace.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    row, column = (group for group in made if isinstance(group, Communicator))
    return summed(*[row, column][:: -1 if interlace.get_rank() in (1, 2) else 1])


def two_orders_on_a_host(path: str) -> str:
    """The same in a group of two hosts of two ranks; the last rank is the odd one."""
    rank, count = interlace.get_rank(), interlace.get_world_size()
    store = FileStore(path, count)
    groups = []
    os.environ["INTERLACE_SECRET"] = "of this test"
    for name in ("one", "two"):
        place = connect_place(store, rank, count, timeout=600, name=name, host=f"host {rank // 2}")
        groups.append(Communicator(place, range(count)))
    try:
        return summed(*groups[:: -1 if rank == count - 1 else 1])
    finally:
        del os.environ["INTERLACE_SECRET"]
        for group in groups:
            group.close()


@contextlib.contextmanager
def logged() -> Iterator[tuple[list[str], threading.Event]]:
    """What is logged, and whether anything was."""
    texts: list[str] = []
    anything = threading.Event()
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        texts.append(record.getMessage())
        anything.set()

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("interlace").addHandler(handler)
    try:
        yield texts, anything
    finally:
        logging.getLogger("interlace").removeHandler(handler)


def in_threads(start: Callable[..., object]) -> list[str]:
    """Every rank sums in two groups, in the order of ``two_orders``; the second op is another thread's,
    which waits for the warning, or the end, of the first."""
    groups = [interlace.new_group(), interlace.new_group()][:: 1 if interlace.get_rank() else -1]
    sums = [torch.ones(FEW), torch.ones(FEW)]
    done = threading.Event()
    with logged() as (texts, anything):

        def second() -> None:
            assert anything.wait(600)
            interlace.all_reduce(sums[1], group=groups[1])
            done.set()

        start(second, ())
        interlace.all_reduce(sums[0], group=groups[0])
        anything.set()
        assert done.wait(600)
    assert [float(each.sum()) for each in sums] == [2.0 * FEW] * 2
    return texts


def start_thread(function: Callable[[], None], arguments: tuple[()]) -> None:
    threading.Thread(target=function).start()


def exchanges() -> list[str]:
    """What is logged while ranks send each other what takes long to copy."""
    mine, other = torch.ones(8 << 20), torch.empty(8 << 20)
    peer = 1 - interlace.get_rank()
    with logged() as (texts, _):
        for _ in range(4):
            work: Any = interlace.isend(mine, peer)
            interlace.recv(other, peer)
            work.wait()
    return texts


def receives_first() -> str:
    """Ranks receive from each other before they send."""
    try:
        interlace.recv(torch.ones(FEW), 1 - interlace.get_rank())
    except interlace.InterlaceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def under_way() -> int:
    """Rank 1 waits in a sum while its messages to rank 0 are still under way, which rank 0 takes slowly."""
    rank, count = interlace.get_rank(), 1 << 20
    for number in range(5):
        tensors = [torch.full((count,), float(number)) for _ in range(4)]
        if rank:
            works = [interlace.isend(each, 0) for each in tensors]
        else:
            for each in tensors:
                each.zero_()
                interlace.recv(each, 1)
                assert bool((each == number).all())
        interlace.all_reduce(torch.ones(FEW))
        if rank:
            for work in works:
                work.wait()
    return number


def stands_elsewhere(op: Callable[[], object], wait_all_ranks: bool) -> str:
    """Rank 1 calls ``op`` when the others are in a monitored barrier; the group goes on afterwards."""
    said = ""
    if interlace.get_rank() != 1:
        try:
            interlace.monitored_barrier(None, timedelta(seconds=3000), wait_all_ranks)
        except interlace.CollectiveTimeoutError as error:
            said = f"{error.waited_for} {error}"
    op()
    sum_of_all()
    return said
