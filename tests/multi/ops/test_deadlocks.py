"""Ranks of one host that wait for each other get an error at once; ranks that only seem to, continue."""

import _thread
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

import interlace
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.places.pool import default_pool
from interlace.runtime.processes.dump import Blame
from ranks import ranks

FEW = 4


@pytest.fixture(autouse=True, scope="module")
def no_threads_of_other_tests() -> None:
    """Start new processes: a thread of another library would make a deadlock a warning."""
    default_pool.close()


def summed(*groups: Any) -> str:
    """Return the error of an all_reduce in each of these groups, one after another; "" if there is none."""
    try:
        for group in groups:
            interlace.all_reduce(torch.ones(FEW), group=group)
    except interlace.InterlaceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def two_orders(groups: list[Any]) -> str:
    """The last rank calls the ops of two groups in another order than the others, and then closes them."""
    last = interlace.get_rank() == interlace.get_world_size() - 1
    try:
        return summed(*groups[:: -1 if last else 1])
    finally:
        if last:
            for group in groups:
                group.close()


@pytest.mark.parametrize("world_size", [2, 4])
@ranks()
def test_ops_of_groups_in_another_order(world_size: int) -> None:
    error = two_orders([interlace.new_group(), interlace.new_group()])
    assert "deadlock: ranks wait for each other" in error
    assert f"waits for ranks [{world_size - 1}] in all_reduce of group" in error
    assert "waits for ranks [0] in all_reduce of group" in error
    in_the_circle = interlace.get_rank() in (0, world_size - 1)
    assert error.startswith("DeadlockError" if in_the_circle else "AbortedError")


@ranks(4)
def test_who_waits_behind_ranks_that_wait_for_each_other_hears_that() -> None:
    """The first of these ranks reports late that its wait has ended."""
    with pytest.MonkeyPatch.context() as patch:
        if interlace.get_rank() == 0:
            ended = Blame.ended

            def late(self: Blame, error: interlace.InterlaceError) -> None:
                time.sleep(1)
                ended(self, error)

            patch.setattr(Blame, "ended", late)
        error = two_orders([interlace.new_group(), interlace.new_group()])
    assert "deadlock: ranks wait for each other" in error


@ranks(4)
def test_a_circle_through_four_groups() -> None:
    made = [interlace.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    row, column = (group for group in made if isinstance(group, Communicator))
    error = summed(*[row, column][:: -1 if interlace.get_rank() in (1, 2) else 1])
    assert all(f"\n  rank {rank} of group" in error for rank in range(4)), error


@ranks(4, hosts=2)
def test_in_a_group_of_several_hosts() -> None:
    error = two_orders([interlace.new_group(), interlace.new_group()])
    assert "rank 2 of group" in error and "rank 3 of group" in error, error


@contextlib.contextmanager
def logged() -> Iterator[tuple[list[str], threading.Event]]:
    """Return the log, and whether it has an entry."""
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


def start_thread(function: Callable[[], None], arguments: tuple[()]) -> None:
    threading.Thread(target=function).start()


@pytest.mark.parametrize("start", [start_thread, _thread.start_new_thread])
@ranks(2)
def test_where_other_threads_may_go_on_it_is_a_warning(start: Callable[..., object]) -> None:
    """Every rank sums in two groups, in orders that differ. The second sum is in another thread, which
    ``threading`` may not know.
    """
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
    every: list[Any] = [None] * 2
    interlace.all_gather_object(every, texts)
    assert any(every)
    for text in texts:
        assert "rank 0 of group" in text and "rank 1 of group" in text
        assert text.endswith("a deadlock, unless other threads of theirs go on")


@ranks(2)
def test_ranks_that_receive_before_they_send() -> None:
    with pytest.raises(interlace.InterlaceError, match="deadlock") as caught:
        interlace.recv(torch.ones(FEW), 1 - interlace.get_rank())
    assert "in recv from rank 0" in str(caught.value)


@ranks(2)
def test_messages_under_way_are_no_deadlock() -> None:
    """Rank 1 waits in a sum while rank 0 takes its messages slowly."""
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


@ranks(2)
def test_messages_that_take_long_to_copy_are_no_deadlock() -> None:
    own, other, peer = torch.ones(8 << 20), torch.empty(8 << 20), 1 - interlace.get_rank()
    with logged() as (texts, _):
        for _ in range(4):
            work: Any = interlace.isend(own, peer)
            interlace.recv(other, peer)
            work.wait()
    assert texts == []


@pytest.mark.parametrize(("op", "wait_all_ranks"), [("all_reduce", False), ("barrier", True)])
@ranks(3)
def test_a_monitored_barrier_names_who_waits_in_another_op(op: str, wait_all_ranks: bool) -> None:
    rank, said = interlace.get_rank(), ""
    if rank != 1:
        with pytest.raises(interlace.CollectiveTimeoutError) as caught:
            interlace.monitored_barrier(None, timedelta(seconds=3000), wait_all_ranks)
        said = f"{caught.value.waited_for} {caught.value}"
    if op == "barrier":
        interlace.barrier()
    else:
        interlace.all_reduce(torch.ones(FEW))
    interlace.all_reduce(torch.ones(FEW))
    if rank == 0:
        assert said.startswith("(1,) [Rank 0]: Rank"), said
        assert "1 failed to pass monitoredBarrier" in said
        assert "rank 1 of group 'interlace/run" in said and f"in {op} of group" in said
    elif rank == 2:
        assert said.startswith("(0,) Rank 2 successfully reached monitoredBarrier"), said
        # it came too late to be told where rank 0 had given up before it came
        assert "rank 1 failed to pass it" in said or f"in {op} of group" in said, said
