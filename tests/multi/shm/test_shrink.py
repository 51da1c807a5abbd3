"""Going on without ranks that have died, wherever the end comes: what docs/places.md says."""

import multiprocessing
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import interlace
from guard import busy
from multi.shm import shrink_ranks as ranks
from tiers import thorough

WAIT = 120.0


@contextmanager
def started(
    function: Callable[..., Any], world_size: int, folder: Path, *rest: Any
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Processes that run ``function(rank, world_size, folder, end, *rest)``, and what they say."""
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = []
    for rank, (_, end) in enumerate(pipes):
        arguments = (rank, world_size, str(folder), end, *rest)
        processes.append(context.Process(target=function, args=arguments, daemon=True))
        processes[-1].start()
        end.close()
    try:
        yield processes, [mine for mine, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def heard(end: Any) -> Any:
    assert end.poll(WAIT), "it says nothing"
    return end.recv()


def to_the_last(world_size: int, folder: Path, seed: int) -> int:
    """Kills ranks at random moments, some at once, until one is left; how many were killed."""
    chance, killed = random.Random(seed), 0
    with started(ranks.to_the_last, world_size, folder) as (processes, ends):
        alive = list(range(world_size))
        while True:
            said: dict[int, list[int]] = {}
            for rank in alive:
                while said.get(rank) != alive:  # before that of fewer deaths, if these came in turn
                    said[rank] = heard(ends[rank])
                    assert set(alive) <= set(said[rank]), said
            if len(alive) == 1:
                break
            for rank in chance.sample(alive, chance.randint(1, min(2, len(alive) - 1))):
                time.sleep(chance.random() * 0.02)
                processes[rank].kill()
                alive.remove(rank)
                killed += 1
        processes[alive[0]].join(WAIT)
        assert processes[alive[0]].exitcode == 0
    return killed


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_go_on_without_those_that_were_killed(world_size: int, tmp_path: Path) -> None:
    assert to_the_last(world_size, tmp_path, seed=world_size) == world_size - 1


@thorough
@pytest.mark.parametrize("seed", range(8))
def test_eight_ranks_go_on_to_the_last(seed: int, tmp_path: Path) -> None:
    assert to_the_last(8, tmp_path, seed) == 7


@pytest.mark.parametrize("when", ["after coming", "after its card", "joined", "said so"])
def test_a_rank_that_ends_while_the_others_go_on(when: str, tmp_path: Path) -> None:
    with started(ranks.killed_while_joining, 4, tmp_path, when) as (processes, ends):
        sizes = [heard(ends[rank]) for rank in (0, 3)]
        assert sizes == ([3, 3] if when == "said so" else [2, 2])
        assert [heard(ends[rank]) for rank in (0, 3)] == [3.0, 3.0]
        assert [process.join(WAIT) or process.exitcode for process in processes] == [0, 1, 1, 0]


def test_nothing_is_left_of_groups_that_were_shrunk() -> None:
    before, after = interlace.run(ranks.again_and_again, 2, 40, place="shm")[0]
    assert after <= before


@thorough
def test_nothing_is_left_of_a_thousand_groups() -> None:
    before, after = interlace.run(ranks.again_and_again, 3, 1000, place="shm")[0]
    assert after <= before


def test_a_group_is_over_when_it_was_shrunk() -> None:
    for rank, said in enumerate(interlace.run(ranks.after_the_end, 2, place="shm")):
        assert said[0] == "(0, 1)"
        assert said[1] == f"InterlaceError: rank {rank}: all_reduce on a group that was closed"
        assert said[2] == f"InterlaceError: rank {rank}: the group is closed"
        assert "ranks must be distinct, within 0..1, got [0, 9]" in said[3]


def test_who_does_not_come_is_named() -> None:
    said = interlace.run(ranks.without_rank_0, 3, 0.2 * busy(), place="shm")
    assert all("for ranks [0]" in text for text in said[1:]), said


def test_torchs_own_group(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with started(ranks.of_torch, 3, tmp_path, port) as (processes, ends):
        for rank in (1, 2):
            assert "rank 0 (pid" in heard(ends[rank])
            assert "is not torch's default group" in heard(ends[rank])
            assert heard(ends[rank]) == (rank - 1, 2, 3.0, 1 if rank == 1 else -1)
        assert [process.join(WAIT) or process.exitcode for process in processes] == [1, 0, 0]
