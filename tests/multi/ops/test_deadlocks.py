"""Ranks of one host that wait for each other hear of it at once; those that only seem to, go on.

No timeout of these runs is ever reached: what is raised was seen.
"""

import _thread
from collections.abc import Callable
from pathlib import Path

import pytest

import interlace
from guard import MOST as LONG
from interlace.runtime.places.pool import default_pool
from multi.ops import deadlock_ranks as ranks


@pytest.fixture(autouse=True, scope="module")
def no_threads_of_other_tests() -> None:
    """New processes: with a thread that is none of interlace's it is a warning."""
    default_pool.close()


@pytest.mark.parametrize("world_size", [2, 4])
def test_ops_of_groups_in_another_order(world_size: int) -> None:
    errors = interlace.run(ranks.two_orders, world_size, place="shm", timeout=LONG)
    for rank, error in enumerate(errors):
        assert "deadlock: ranks wait for each other" in error, errors
        assert f"waits for ranks [{world_size - 1}] in all_reduce of group" in error
        assert "waits for ranks [0] in all_reduce of group" in error
        assert error.startswith("DeadlockError" if rank in (0, world_size - 1) else "AbortedError")


def test_who_waits_behind_ranks_that_wait_for_each_other_hears_that() -> None:
    """Though they leave as soon as they have found it."""
    errors = interlace.run(ranks.two_orders_and_a_slow_rank, 4, place="shm", timeout=LONG)
    assert all("deadlock: ranks wait for each other" in error for error in errors), errors


def test_a_circle_through_four_groups() -> None:
    errors = interlace.run(ranks.mesh, 4, place="shm", timeout=LONG)
    for error in errors:
        assert all(f"\n  rank {rank} of group" in error for rank in range(4)), errors


def test_in_a_group_of_several_hosts(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    errors = interlace.run(ranks.two_orders_on_a_host, 4, path, place="shm", timeout=LONG)
    for error in errors:
        assert "rank 2 of group" in error and "rank 3 of group" in error, errors


@pytest.mark.parametrize("start", [ranks.start_thread, _thread.start_new_thread])
def test_where_other_threads_may_go_on_it_is_a_warning(start: Callable[..., object]) -> None:
    """Those that ``threading`` does not know, too."""
    logged = interlace.run(ranks.in_threads, 2, start, place="shm", timeout=LONG)
    assert any(logged)
    for text in (text for each in logged for text in each):
        assert "rank 0 of group" in text and "rank 1 of group" in text
        assert text.endswith("a deadlock, unless other threads of theirs go on")


def test_ranks_that_receive_before_they_send() -> None:
    errors = interlace.run(ranks.receives_first, 2, place="shm", timeout=LONG)
    assert all("deadlock" in error and "in recv from rank 0" in error for error in errors), errors


def test_messages_under_way_are_no_deadlock() -> None:
    assert interlace.run(ranks.under_way, 2, place="shm", timeout=LONG) == [4, 4]
    assert interlace.run(ranks.exchanges, 2, place="shm", timeout=LONG) == [[], []]


@pytest.mark.parametrize("wait_all_ranks", [False, True])
@pytest.mark.parametrize("op", ["all_reduce", "barrier"])
def test_a_monitored_barrier_names_who_waits_in_another_op(op: str, wait_all_ranks: bool) -> None:
    function = interlace.barrier if op == "barrier" else ranks.sum_of_all
    first, odd, last = interlace.run(
        ranks.stands_elsewhere, 3, function, wait_all_ranks, place="shm", timeout=LONG
    )
    assert odd == ""
    assert first.startswith("(1,) [Rank 0]: Rank"), first
    assert "1 failed to pass monitoredBarrier" in first
    assert "rank 1 of group 'interlace/run" in first and f"in {op} of group" in first
    assert last.startswith("(0,) Rank 2 successfully reached monitoredBarrier"), last
    # it came too late to be told where rank 0 had given up before it came
    assert "rank 1 failed to pass it" in last or f"in {op} of group" in last, last
