"""Going on without ranks that have died, as docs/tutorials/from-sim-to-torchrun.md says."""

import gc
import itertools
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from faults.recovery import install, killed_one_by_one, shrink_often
from interlace.groups import groups
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.hosts import host_map
from interlace.runtime.places.hosts.regroup import HostsRoll
from interlace.runtime.processes import rendezvous as meetings
from interlace.runtime.processes.rendezvous import RESULT, MemoryMeeting, MemoryRoll
from interlace.runtime.processes.waiting import Patience
from processes import WAIT, heard, started
from ranks import LONG, ranks
from support import free_port
from tiers import few, thorough

on_hosts = pytest.mark.parametrize("hosts", [1, 2])


def sum_of_ranks(rank: int) -> float:
    """Return the sum of the first numbers of ranks over the default group."""
    whole = torch.tensor([float(rank)])
    interlace.all_reduce(whole)
    return whole.item()


def check_survivors(world_size: int, folder: Path, seed: int, hosts: int = 1) -> None:
    trials = killed_one_by_one(world_size, hosts, seed, str(folder), broken=False, wait=WAIT)
    assert not [trial for trial in trials if not trial.right]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_go_on_without_those_that_were_killed(world_size: int, tmp_path: Path) -> None:
    check_survivors(world_size, tmp_path, world_size)


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
    check_survivors(world_size, tmp_path, seed, hosts)


@pytest.mark.parametrize(("hosts", "message"), [(1, False), (1, True), (2, False)])
@ranks(4, gone=[1])
def test_a_rank_that_starts_another_program_is_named(hosts: int, message: bool) -> None:
    pids: list[Any] = [None] * 4
    interlace.all_gather_object(pids, os.getpid())
    interlace.barrier()
    if interlace.get_rank() == 1:
        os.execv(sys.executable, [sys.executable, "-c", f"import time; time.sleep({LONG})"])
    found = rf"rank 1 \(pid {pids[1]}\) lives, but has closed its connections"
    with pytest.raises(InterlaceError, match=found):
        if message and interlace.get_rank() == 0:
            interlace.recv(torch.ones(1), 1)
        interlace.barrier()
    interlace.shrink()
    assert interlace.get_world_size() == 3


MOMENTS = ["after coming", "after its card", "joined", "said so"]


def end_at(when: str, hosts: int) -> None:
    """End this process at that point of the first shrink."""
    roll: Any = MemoryRoll if hosts == 1 else HostsRoll
    cards, say = MemoryMeeting.cards, roll.say

    def ends(*args: Any) -> None:
        if when == "after its card":
            cards(*args)
        os._exit(1)

    def says(self: Any, what: int, value: int) -> None:
        if what != RESULT or when == "said so":
            say(self, what, value)
        if what == RESULT:
            os._exit(1)

    if when.startswith("after"):
        MemoryMeeting.cards = ends  # type: ignore[method-assign]
    else:
        roll.say = says


@pytest.mark.parametrize(
    ("hosts", "when"),
    few(
        [*itertools.product((1, 2), MOMENTS)],
        *itertools.product([1], MOMENTS),
        (2, "after its card"),
        (2, "said so"),
    ),
)
@ranks(4, gone=[1, 2])
def test_a_rank_that_ends_while_the_others_go_on(hosts: int, when: str) -> None:
    rank = interlace.get_rank()
    if rank == 1:
        os._exit(1)
    if rank == 2:
        end_at(when, hosts)
    interlace.shrink()
    size = interlace.get_world_size()
    if hosts > 1 and when == "said so":  # it may have ended before any other has heard it
        assert size in (2, 3)
    else:
        assert size == (3 if when == "said so" else 2)
    try:
        total = sum_of_ranks(rank)
    except InterlaceError:
        interlace.shrink()
        total = sum_of_ranks(rank)
    sizes: list[Any] = [None] * 2
    interlace.all_gather_object(sizes, size)
    assert total == 3.0 and len(set(sizes)) == 1


def stopped(rank: int, world_size: int, folder: str, said: Any, hosts: int, timeout: float) -> None:
    """Call ops until one fails, then shrink; report the error and the survivors, or the reason for none."""
    install(rank, world_size, folder, hosts, timeout)
    interlace.barrier()
    said.send("up")
    try:
        while True:
            interlace.all_reduce(torch.ones(1000))
    except InterlaceError as error:
        said.send(str(error))
    try:
        group = interlace.shrink()
        said.send((group.place.name, group.world_size, sum_of_ranks(rank)))
    except InterlaceError as error:
        said.send(str(error))


@thorough
@pytest.mark.parametrize(
    ("hosts", "gone", "place"), [(1, [1], "shm"), (2, [1], "hosts"), (2, [2, 3], "shm")]
)
def test_who_is_stopped_is_left_out_after_the_timeout(
    hosts: int, gone: list[int], place: str, tmp_path: Path
) -> None:
    """A host with all of its ranks stopped looks like a host without power. When the ranks wake it is too
    late.
    """
    seconds = 5.0  # the others come to each op, and to shrink, in thousandths of that
    left = [rank for rank in range(4) if rank not in gone]
    with started(stopped, 4, tmp_path, hosts, seconds) as (processes, ends):
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


@ranks(4, hosts=2, gone=[3])
def test_what_is_left_of_a_group_of_two_hosts_says_so() -> None:
    rank, old = interlace.get_rank(), groups.default_group()
    near: Any = [interlace.new_group([0, 1]), interlace.new_group([2, 3])][rank // 2]
    square = torch.ones(64, 64)
    interlace.matmul_all_reduce(square, square, group=near)  # so it has workspaces
    work: Any = interlace.irecv(torch.ones(4), 3) if rank < 3 else None
    interlace.barrier()
    if rank == 3:
        os._exit(1)

    def check(said: str, *calls: Any) -> None:
        for call in calls if rank != 1 else ():
            with pytest.raises(InterlaceError, match=said):
                call()

    check(r"rank 3 \(pid", work.wait)
    check(
        "rank",
        lambda: interlace.all_reduce(torch.ones(4)),
        lambda: interlace.all_reduce(torch.ones(4), group=near),
        lambda: interlace.matmul_all_reduce(square, square, group=near),
    )
    new = interlace.shrink()
    half = interlace.rebuild(new, [2, 0]) if rank != 1 else None
    check("rank", lambda: interlace.matmul_all_reduce(square, square, group=near))
    check(
        "rank.*closed",
        lambda: interlace.all_reduce(torch.ones(4), group=old),
        lambda: interlace.shrink(old),
        lambda: interlace.all_reduce(torch.ones(4), group=new),
    )
    if half is not None:
        whole = torch.tensor([float(rank)])
        interlace.broadcast(whole, half.ranks[0], group=half)
        assert half.ranks == (0, 1) and whole.item() == 2.0  # the ranks 2 and 0, in this order


@ranks(4, hosts=2)
def test_nothing_is_left_of_groups_of_two_hosts() -> None:
    """Reference counts must free them, because the collector of cycles may run late."""
    shrink_often(4)
    gc.collect()
    gc.disable()
    try:
        before, after = shrink_often(8)
    finally:
        gc.enable()
    assert after <= before


@pytest.mark.parametrize("times", few([40, 1000], 40))
@ranks(3)
def test_nothing_is_left_of_a_thousand_groups(times: int) -> None:
    before, after = shrink_often(times)
    assert after <= before


@ranks(2)
def test_a_group_is_over_when_it_was_shrunk() -> None:
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
    """A patience that ends when only rank 0 has not come."""

    def step(self, doing: str, waited_for: Sequence[int], ready: Any = None) -> None:
        self._timeout = 0.0 if list(waited_for) == [0] else LONG
        super().step(doing, waited_for, ready)


@ranks(3)
def test_who_does_not_come_is_named() -> None:
    group = interlace.new_group()
    if interlace.get_rank():
        with (
            mock.patch.object(meetings, "Patience", OfOthers),
            pytest.raises(interlace.CollectiveTimeoutError, match=r"for ranks \[0\]"),
        ):
            interlace.rebuild(group, range(3))
    interlace.barrier()  # a rank that drops a group leaves it


@on_hosts
@ranks(2)
def test_ranks_that_mean_different_groups_hear_so(hosts: int) -> None:
    rank = interlace.get_rank()
    meant = [[0, 1], [1, 0]][rank]
    said = f", ranks {meant} in this order: ranks [{1 - rank}] name others"
    with pytest.raises(ValueError, match=re.escape(said)):
        interlace.rebuild(None, meant)
    said = (", all that live: ranks [1]", ": ranks [0] name others")[rank]
    with pytest.raises(ValueError, match=re.escape(said)):
        interlace.rebuild(None, [0, 1]) if rank else interlace.shrink()
    group = interlace.rebuild(None, [1, 0])
    whole = torch.tensor([float(rank)])
    interlace.broadcast(whole, 0, group=group)
    assert (group.rank, whole.item()) == (1 - rank, 1.0)


def of_torch(rank: int, world_size: int, folder: str, said: Any, port: int, hosts: int) -> None:
    """Test torch's groups, whose store dead rank 0 has served; one group is without rank 1."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), INTERLACE_SECRET="of of_torch"
    )
    if hosts > 1:
        host_map.this_host = lambda: f"host {rank % hosts}"
    dist.init_process_group("interlace", rank=rank, world_size=world_size)
    part: Any = dist.new_group([0, 2, 3])
    dist.barrier()
    if rank == 0:
        os._exit(1)
    try:
        dist.all_reduce(torch.ones(4))
    except InterlaceError as error:
        said.send(str(error))
    if rank > 1:
        part = interlace.shrink(part)
        whole = torch.tensor([float(rank)])
        dist.broadcast(whole, 3, group=part)
        dist.barrier(part)
        said.send((dist.get_process_group_ranks(part), dist.get_rank(part), whole.item()))
    interlace.shrink()
    assert dist.group.WORLD.interlace_communicator.place.name == ("shm" if hosts == 1 else "hosts")
    half = dist.new_group([0])
    whole = torch.full((4,), float(rank))
    dist.all_reduce(whole)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    said.send((dist.get_rank(), dist.get_world_size(), whole[0].item(), dist.get_world_size(half)))
    dist.destroy_process_group()


@on_hosts
def test_torchs_own_groups(hosts: int, tmp_path: Path) -> None:
    """A shrunk default group is replaced by the new one; another group is replaced by one with the same
    global ranks.
    """
    port = free_port()
    with started(of_torch, 4, tmp_path, port, hosts) as (processes, ends):
        for rank in (1, 2, 3):
            assert "rank 0 (pid" in heard(ends[rank])
            if rank > 1:
                assert heard(ends[rank]) == ([2, 3], rank - 2, 3.0)
            assert heard(ends[rank]) == (rank - 1, 3, 6.0, 1 if rank == 1 else -1)
        assert [process.join(WAIT) or process.exitcode for process in processes] == [1, 0, 0, 0]
