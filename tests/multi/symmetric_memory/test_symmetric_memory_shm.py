"""Symmetric memory for user code across processes; what ranks do is in ``symmetric_ranks.py``."""

import pathlib
from typing import Any

import pytest

import interlace
from interlace.runtime.core.errors import RankError
from interlace.runtime.places.pool import ProcessPool
from multi.symmetric_memory import symmetric_ranks as ranks
from sim.api.test_symmetric_memory import check_misuses, check_views
from support import shared_names
from tiers import thorough


def run(function: Any, world_size: int, *args: Any, **options: Any) -> list[Any]:
    return interlace.run(function, world_size, *args, place="shm", **options)


@pytest.mark.parametrize("world_size", [3, 2])
def test_kernel_pushes_through_the_table(pool: ProcessPool, world_size: int) -> None:
    assert run(ranks.gather, world_size, 12) == [[[], True]] * world_size


@pytest.mark.parametrize("world_size", [3, 2, 1])
def test_signals_of_host_and_kernels_mix(pool: ProcessPool, world_size: int) -> None:
    assert run(ranks.ring, world_size, 12) == [[[], True]] * world_size


def test_group_of_some_ranks(pool: ProcessPool) -> None:
    first, nothing, second = run(ranks.in_a_part, 3)
    assert first == [1, 2, False, [2.0] * 4, "2-0", True]
    assert second == [0, 2, False, [0.0] * 4, "2-0", True]
    assert nothing == []


def test_views_and_what_the_handle_says(pool: ProcessPool) -> None:
    check_views(run(ranks.views, 2), "SHM")


def test_empty_is_not_collective(pool: ProcessPool) -> None:
    assert run(ranks.empty_is_alone, 3) == [[[0, 1, 2], rank, 0] for rank in range(3)]


def test_words(pool: ProcessPool) -> None:
    for rank, values in enumerate(run(ranks.words, 2)):
        assert values == [0, *[2**32 - 1] * 3, 0, 0, 2**31 + (rank - 1) % 2, 0]


def test_grids_and_programs_that_wait_for_later_ones(pool: ProcessPool) -> None:
    assert run(ranks.grids, 2) == [[[1, 2, 3, 4, 5, 6], [7] * 4]] * 2


def test_launches_while_async_ops_run(pool: ProcessPool) -> None:
    rounds = 4
    sums = [float(2 * number + 2 * (0 + 1 + 2 * number)) for number in range(rounds)]
    assert run(ranks.overlaps_async_ops, 2, rounds) == [sums] * 2


def test_misuse_is_refused_on_every_rank_and_the_group_goes_on(pool: ProcessPool) -> None:
    check_misuses(run(ranks.misuses, 2))


def test_wait_that_passes_its_bound_says_what_it_waited_for(pool: ProcessPool) -> None:
    text, _ = run(ranks.times_out, 2)
    assert "(1,) rank 0: wait_signal on channel 5 has waited 0.05 s for ranks [1]" in text


def test_closed_group_leaves_kernels_to_triton(pool: ProcessPool) -> None:
    for routed, still, text, out in run(ranks.after_close, 2):
        assert (routed, still) == (1, 0)
        assert "closed" in text
        assert out == [7] * 4


def test_tensors_of_a_handle_outlive_it(pool: ProcessPool) -> None:
    assert run(ranks.outlives, 3) == [[2.0, 0.0, 1.0]] * 3


@thorough
def test_memory_and_descriptors_are_given_back(pool: ProcessPool) -> None:
    named = shared_names()
    run(ranks.gives_back, 2)  # whatever the first use leaves behind for good
    for before, with_both, with_handle, after in run(ranks.gives_back, 2):
        assert with_both == (before[0] + 1, before[1] + 2)  # one descriptor, to share it again
        assert with_handle == (before[0], before[1] + 2)
        assert after == before
    assert shared_names() <= named


def test_killed_peer_is_named(pool: ProcessPool, tmp_path: pathlib.Path) -> None:
    """By who waits in the handle, and by who waits in a kernel of its own."""
    named = shared_names()
    with pytest.raises(RankError, match=r"rank 1: .* exit code -9 \(SIGKILL\)"):
        run(ranks.killed_while_waited_for, 3, 1, str(tmp_path))
    for rank in (0, 2):
        dead, text = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert dead == "1", f"rank {rank} says: {text}"
    assert "in wait_signal on channel 1" in (tmp_path / "0").read_text()
    assert "wait_by_swap program 0" in (tmp_path / "2").read_text()
    assert shared_names() <= named
