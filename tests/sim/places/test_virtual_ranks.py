"""Threads that take turns: the launch side of virtual ranks, without a GPU."""

import threading
import time

import pytest

from interlace.runtime.core.errors import CollectiveTimeoutError, RankError
from interlace.runtime.places.gpu.virtual_place import Turns, run_threads


def run(host, world_size: int, timeout: float = 300.0) -> list:  # type: ignore[no-untyped-def, type-arg]
    turns = Turns(world_size, timeout)
    return run_threads(lambda rank: host(turns, rank), world_size, turns)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_meetings_hand_everything_to_everyone(world_size: int) -> None:
    def host(turns: Turns, rank: int) -> list[list[tuple[int, int]]]:
        return [
            turns.meet(number, rank, world_size, (rank, number), "a test") for number in range(50)
        ]

    expected = [[(rank, number) for rank in range(world_size)] for number in range(50)]
    assert run(host, world_size) == [expected] * world_size


def test_only_one_rank_runs_at_a_time() -> None:
    inside = threading.Lock()

    def host(turns: Turns, rank: int) -> None:
        for number in range(200):
            assert inside.acquire(blocking=False), "two ranks run at once"
            inside.release()
            turns.meet(number, rank, 4, None, "a test")

    run(host, 4)


def test_exception_ends_the_others_and_names_the_rank() -> None:
    def host(turns: Turns, rank: int) -> None:
        if rank == 2:
            raise KeyError("lost")
        turns.meet("never", rank, 3, None, "an op")

    with pytest.raises(RankError, match=r"rank 2: KeyError: 'lost'") as caught:
        run(host, 3)
    assert isinstance(caught.value, KeyError) and caught.value.rank == 2


def test_a_rank_that_never_comes_is_named_at_once() -> None:
    def host(turns: Turns, rank: int) -> None:
        if rank != 1:
            turns.meet("lonely", rank, 3, None, "an op")

    with pytest.raises(CollectiveTimeoutError, match=r"for ranks \[1\], which will never come"):
        run(host, 3)


def test_timeout_names_who_is_missing() -> None:
    def host(turns: Turns, rank: int) -> None:
        if rank == 0:  # it has the first turn
            time.sleep(0.4)
        turns.meet("late", rank, 2, None, "an op")

    turns = Turns(2, 0.3)
    with pytest.raises(RankError) as caught:
        run_threads(lambda rank: host(turns, rank), 2, turns)
    assert isinstance(caught.value.original, CollectiveTimeoutError)
