"""Going on without ranks that have died, as docs/tutorials/from-sim-to-torchrun.md says."""

import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.processes import rendezvous as meetings
from interlace.runtime.processes.waiting import Patience
from multi.shm import shrink_ranks
from processes import WAIT, heard, started
from ranks import ranks
from support import free_port
from tiers import few, thorough


def to_the_last(world_size: int, folder: Path, seed: int, hosts: int = 1) -> int:
    """Kills ranks at random moments, some at once, until one is left; how many were killed."""
    chance, killed = random.Random(seed), 0
    with started(shrink_ranks.to_the_last, world_size, folder, hosts) as (processes, ends):
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
    assert to_the_last(world_size, tmp_path, world_size) == world_size - 1


@pytest.mark.parametrize(
    ("world_size", "hosts", "seed"),
    few(
        [
            *itertools.product((2, 4), [2], range(5)),
            *[(size, hosts, seed) for size, hosts in ((4, 4), (6, 3)) for seed in range(4)],
            *[(8, 1, seed) for seed in range(8)],
        ],
        (2, 2, 2),
        (4, 2, 4),
    ),
)
def test_ranks_of_hosts_go_on(world_size: int, hosts: int, seed: int, tmp_path: Path) -> None:
    """Also without rank 0, which serves the store, and without all ranks of a host."""
    assert to_the_last(world_size, tmp_path, seed, hosts) == world_size - 1


@pytest.mark.parametrize(("hosts", "message"), [(1, False), (1, True), (2, False)])
def test_a_rank_that_starts_another_program_is_named(
    hosts: int, message: bool, tmp_path: Path
) -> None:
    """Its process does not end; what it was is gone all the same, and the others go on."""
    with started(shrink_ranks.replaced, 4, tmp_path, message, hosts) as (processes, ends):
        for rank in (0, 2, 3):
            found = f"rank 1 (pid {processes[1].pid}) lives, but has closed its connections"
            assert found in heard(ends[rank])
        assert [heard(ends[rank]) for rank in (0, 2, 3)] == [3] * 3


MOMENTS = ["after coming", "after its card", "joined", "said so"]


@pytest.mark.parametrize(("hosts", "when"), [(hosts, when) for hosts in (1, 2) for when in MOMENTS])
def test_a_rank_that_ends_while_the_others_go_on(hosts: int, when: str, tmp_path: Path) -> None:
    with started(shrink_ranks.killed_while_joining, 4, tmp_path, when, hosts) as (processes, ends):
        sizes = [heard(ends[rank]) for rank in (0, 3)]
        if hosts > 1 and when == "said so":  # it may have ended before any other has heard it
            assert sizes in ([2, 2], [3, 3])
        else:
            assert sizes == ([3, 3] if when == "said so" else [2, 2])
        assert [heard(ends[rank]) for rank in (0, 3)] == [3.0, 3.0]
        assert [process.join(WAIT) or process.exitcode for process in processes] == [0, 1, 1, 0]


@thorough
@pytest.mark.parametrize(
    ("hosts", "gone", "place"), [(1, [1], "shm"), (2, [1], "hosts"), (2, [2, 3], "shm")]
)
def test_who_is_stopped_is_left_out_after_the_timeout(
    hosts: int, gone: list[int], place: str, tmp_path: Path
) -> None:
    """All ranks of a host, too: so looks one that was switched off. When they wake it is too late."""
    seconds = 5.0  # the others come to each op, and to shrink, in thousandths of that
    left = [rank for rank in range(4) if rank not in gone]
    with started(shrink_ranks.stopped, 4, tmp_path, hosts, seconds) as (processes, ends):
        assert [heard(end) for end in ends] == ["up"] * 4
        for rank in gone:
            os.kill(processes[rank].pid, signal.SIGSTOP)
        for rank in left:
            assert "has waited" in heard(ends[rank])
        for rank in left:
            assert heard(ends[rank]) == (place, len(left), float(sum(left)))
        for rank in gone:
            os.kill(processes[rank].pid, signal.SIGCONT)
        for rank in gone:
            heard(ends[rank])
            assert "went on without this one" in heard(ends[rank])


def test_what_is_left_of_a_group_of_two_hosts_says_so(tmp_path: Path) -> None:
    with started(shrink_ranks.after_a_death, 4, tmp_path) as (_, ends):
        for rank in (0, 2):
            work, *over = (heard(ends[rank]) for _ in range(8))
            assert "rank 3 (pid" in work
            assert "closed" in over[4] and "closed" in over[5] and "closed" in over[6]
            assert all("rank" in text for text in over)
            assert heard(ends[rank]) == ((0, 1), 2.0)  # of 2 and 0, in this order


def test_nothing_is_left_of_groups_that_were_shrunk() -> None:
    before, after = interlace.run(shrink_ranks.again_and_again, 2, 40, place="shm")[0]
    assert after <= before


def test_nothing_is_left_of_groups_of_two_hosts(tmp_path: Path) -> None:
    """Which reference counts do; the collector of cycles may be late."""
    with started(shrink_ranks.again_and_again_on_two_hosts, 4, tmp_path, 8) as (_, ends):
        for end in ends:
            before, after = heard(end)
            assert after <= before


@thorough
def test_nothing_is_left_of_a_thousand_groups() -> None:
    before, after = interlace.run(shrink_ranks.again_and_again, 3, 1000, place="shm")[0]
    assert after <= before


@ranks(2)
def test_a_group_is_over_when_it_was_shrunk() -> None:
    """Its work and its symmetric memory, too."""
    rank, x, old = interlace.get_rank(), torch.ones(4), interlace.new_group()
    memory = interlace.symmetric_memory.empty(4)
    handle = interlace.symmetric_memory.rendezvous(memory, old)
    interlace.all_reduce(x, group=old, async_op=True).wait()
    new = interlace.shrink(old)
    assert str(new.ranks) == "(0, 1)"
    with pytest.raises(
        InterlaceError, match=f"^rank {rank}: all_reduce on a group that was closed"
    ):
        interlace.all_reduce(x, group=old)
    with pytest.raises(InterlaceError, match=f"^rank {rank}: the group is closed"):
        interlace.shrink(old)
    with pytest.raises(ValueError, match=r"ranks must be distinct, within 0..1, got \[0, 9\]"):
        interlace.rebuild(new, [0, 9])
    said = "the group of <SymmetricMemory of group.*was closed"
    with pytest.raises(InterlaceError, match=said):
        handle.get_buffer(0, (4,), torch.float32)


class OfOthers(Patience):
    """Patience that is at its end when only rank 0 has not come."""

    def step(self, doing: str, waited_for: Sequence[int], ready: Any = None) -> None:
        self._timeout = 0.0 if list(waited_for) == [0] else shrink_ranks.TIMEOUT
        super().step(doing, waited_for, ready)


@ranks(3)
def test_who_does_not_come_is_named() -> None:
    """By those who mean to go on with rank 0, which does not come; it is too late then."""
    group = interlace.new_group()
    if interlace.get_rank():
        with (
            mock.patch.object(meetings, "Patience", OfOthers),
            pytest.raises(interlace.CollectiveTimeoutError, match=r"for ranks \[0\]"),
        ):
            interlace.rebuild(group, range(3))
    interlace.barrier()  # who drops a group leaves it


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_that_mean_different_groups_hear_so(hosts: int, tmp_path: Path) -> None:
    """Nobody is said to have died, and then they may agree."""
    with started(shrink_ranks.in_another_order, 2, tmp_path, hosts) as (_, ends):
        for rank, meant in enumerate(["[0, 1]", "[1, 0]"]):
            said = heard(ends[rank])
            assert f", ranks {meant} in this order: ranks [{1 - rank}] name others" in said
            said = heard(ends[rank])
            assert (", all that live: ranks [1]", ": ranks [0] name others")[rank] in said
            assert heard(ends[rank]) == (1 - rank, 1.0)


@pytest.mark.parametrize("hosts", [1, 2])
def test_torchs_own_groups(hosts: int, tmp_path: Path) -> None:
    """Of the default group comes the next one, of another one with the same global ranks."""
    port = free_port()
    with started(shrink_ranks.of_torch, 4, tmp_path, port, hosts) as (processes, ends):
        for rank in (1, 2, 3):
            assert "rank 0 (pid" in heard(ends[rank])
            if rank > 1:
                assert heard(ends[rank]) == ([2, 3], rank - 2, 3.0)
            assert heard(ends[rank]) == (rank - 1, 3, 6.0, 1 if rank == 1 else -1)
        assert [process.join(WAIT) or process.exitcode for process in processes] == [1, 0, 0, 0]
