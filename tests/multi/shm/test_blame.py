"""The rank that errors blame when a wait ends: all ranks name, at once, the rank that all wait for."""

import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import AbortedError, CollectiveTimeoutError, InterlaceError
from interlace.runtime.places.hosts import links
from interlace.runtime.places.shm import mail
from interlace.runtime.places.shm.place import ShmPlace
from interlace.runtime.processes import dump as blame, waiting
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.waiting import Kind, LastingWait
from ranks import LONG, SECRET, close, members, run
from tiers import few, thorough

Grouped = Callable[[int], list[Communicator]]


@pytest.fixture(params=["shm", "hosts"])
def grouped(request: Any) -> Iterator[Grouped]:
    """Make groups of this many ranks, on one host or on as many, and close them."""
    made: list[Communicator] = []

    def make(count: int) -> list[Communicator]:
        hosts = count if request.param == "hosts" else 1
        groups = members(count, hosts, f"group {len(made)}")
        made.extend(groups)
        return groups

    yield make
    close(made)


def test_async_ops_of_two_groups_in_either_order(grouped: Grouped) -> None:
    """The calls return before the peers have called, so no order of the groups can deadlock."""
    first, second = grouped(2), grouped(2)
    tensors = [torch.full((4,), float(number)) for number in range(4)]
    order = first[0], second[0], second[1], first[1]
    works = [
        interlace.all_reduce(tensor, group=group, async_op=True)
        for tensor, group in zip(tensors, order, strict=True)
    ]
    for work in works:
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [3.0] * 4


def test_a_judge_may_outlive_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback of an error keeps it alive. A wait of another group then does not name this group."""
    group = HostGroup(None, 0, 1, timeout=LONG, prefix="here")
    judge = HostGroup(None, 0, 1, timeout=LONG, prefix="gone").blame
    with pytest.raises(ReferenceError):
        judge.whereabouts([0])
    tenths = (number / 10 for number in itertools.count())
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: next(tenths)))
    wait = LastingWait(group.blame, Kind.OF_OP)
    for _ in range(20):
        assert wait.look("all_reduce", [0]) is None
    group.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every machine, a waiting rank has published its wait, and an asked rank has time to answer."""
    monkeypatch.setattr(blame, "FRESH_SECONDS", LONG)
    monkeypatch.setattr(links, "_ANSWER", LONG)


@pytest.fixture
def expire(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Sequence[Communicator], int], None]:
    """Let the clock jump past the bounds of all waits after ``groups`` wait for ``late``."""
    ahead = [0.0]
    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() + ahead[0]})
    for module in (waiting, mail, links):
        monkeypatch.setattr(module, "time", clock)

    def jump(groups: Sequence[Communicator], late: int) -> None:
        while any(list(group.place.late()) != [late] for group in groups):
            time.sleep(1e-3)
        ahead[0] = 2 * LONG

    return jump


def test_a_timeout_ends_the_late_rank_too(grouped: Grouped, expire: Any) -> None:
    groups = grouped(3)
    others = threading.Barrier(3)

    def on_rank(rank: int) -> Any:
        tensor = torch.ones(4)
        if rank == 2:
            expire(groups[:2], 2)
            others.wait(LONG)  # both have given up
        try:
            interlace.all_reduce(tensor, group=groups[rank])
        finally:
            if rank != 2:
                others.wait(LONG)
        return "it has gone on alone"

    errors = run(range(3), on_rank)
    assert all(isinstance(error, InterlaceError) for error in errors), errors
    assert type(errors[2]) is AbortedError
    assert "all_reduce" in str(errors[2])
    for error in errors:
        assert "for ranks [2]" in str(error), errors


@thorough
@pytest.mark.parametrize("late", few([1, 2, 3], 2))
def test_all_blame_the_one_behind_which_they_wait_on_whichever_host(late: int, expire: Any) -> None:
    """The error must not confuse numbers of ranks in the group with numbers on a host."""
    groups = members(4, hosts=2)
    ended = threading.Barrier(4)

    def on_rank(rank: int) -> Any:
        try:
            if rank == late:
                expire([group for group in groups if group.rank != late], late)
            else:
                with interlace.timeout(1000):
                    interlace.all_reduce(torch.ones(4), group=groups[rank])
        finally:
            ended.wait(LONG)

    errors = run(range(4), on_rank)
    timeouts = [error for error in errors if isinstance(error, CollectiveTimeoutError)]
    assert all(error.waited_for == (late,) for error in timeouts), errors
    for rank, error in enumerate(errors):
        if rank != late:
            text = f"all_reduce has waited 1000 s for ranks [{late}]"
            assert isinstance(error, InterlaceError) and text in str(error), errors
    close(groups)


@pytest.mark.parametrize("op", ["all_reduce", "irecv"])
def test_work_that_is_waited_for_in_vain_names_who_has_not_come(
    op: str, grouped: Grouped, patient: None
) -> None:
    groups = grouped(3)
    tensor = torch.ones(4)
    for group in groups[:2]:
        interlace.all_reduce(tensor.clone(), group=group, async_op=True)
    work = interlace.irecv(tensor, 2, group=groups[0], tag=1)
    if op == "all_reduce":
        work = interlace.all_reduce(tensor, group=groups[0], async_op=True)
        while list(groups[0].place.late()) != [2]:  # its own thread has come to it
            time.sleep(0.001)
    with pytest.raises(CollectiveTimeoutError, match=r"; it waits for ranks \[2\]") as caught:
        work.wait(timedelta(seconds=0.01))
    assert caught.value.waited_for == (2,)


@pytest.mark.parametrize("waits_on", few([None, 0, 1], 0))
def test_who_waits_for_another_is_not_to_blame(
    waits_on: int | None, grouped: Grouped, expire: Any
) -> None:
    """Rank 0 receives from rank 1, which receives from rank 2, which sends nothing."""
    groups = grouped(3)
    if waits_on is not None:
        groups[waits_on].place.set_timeout(10 * LONG)
    ended = threading.Barrier(3)

    def on_rank(rank: int) -> Any:
        try:
            if rank < 2:
                tensor = torch.empty(4)
                groups[rank].engine.recv(Call("recv"), tensor, rank + 1, 0).result()
            else:
                expire(groups[:2], 2)
            return None
        finally:
            ended.wait(LONG)

    errors = run(range(3), on_rank)[:2]
    named = [error.waited_for for error in errors if isinstance(error, CollectiveTimeoutError)]
    assert set(named) <= {(2,)}, errors  # none, if the thread that moves messages gave up first
    assert all("for ranks [2]" in str(error) for error in errors), errors


def test_a_receive_that_nobody_waits_for_ends_alone(grouped: Grouped) -> None:
    """As in ``monitored_barrier``, a timeout does not end the group."""
    groups = grouped(2)
    with interlace.timeout(0.1):
        work = interlace.irecv(torch.empty(1), 1, group=groups[0])
    while not work.is_completed():
        time.sleep(0.001)
    assert isinstance(work.exception(), CollectiveTimeoutError)
    assert run(range(2), lambda rank: groups[rank].barrier()) == [None, None]


@pytest.mark.parametrize("op", ["all_reduce", "recv from rank 1"])
def test_a_bound_of_one_op_is_that_of_its_waits(op: str, grouped: Grouped) -> None:
    groups, x = grouped(2), torch.ones(4)
    with interlace.timeout(0.3):
        if op == "all_reduce":
            work = interlace.all_reduce(x, group=groups[0], async_op=True)
        else:
            work = interlace.irecv(x, 1, group=groups[0])
    with pytest.raises(CollectiveTimeoutError, match=rf"{op} .*has waited 0.3 s"):
        work.wait()


def test_the_closest_timeout_is_that_of_a_wait(grouped: Grouped) -> None:
    """An inner context's timeout comes before an outer context's, and that comes before the group's."""
    groups = grouped(2)
    groups[0].set_timeout(timedelta(seconds=20))
    assert groups[0].place.bound() == 20
    with mock.patch.dict(os.environ, SECRET):
        parts = run(range(2), lambda rank: groups[rank].split([0, 1]))
    assert [part.place.bound() for part in parts] == [20, LONG]
    with interlace.timeout(30):
        assert groups[0].place.bound() == 30
        with interlace.timeout(10):
            assert groups[0].place.bound() == 10
    assert groups[0].place.bound() == 20
    close(parts)


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_monitored_barrier_after_a_death_says_so_at_once(
    grouped: Grouped, wait_all_ranks: bool
) -> None:
    groups = grouped(3)
    if groups[2].place.name == "hosts":
        groups[2].place._links._sever()
    else:
        for group in groups[:2]:
            group.place.group.pidfds[2] = _pidfd_of_a_process_that_has_ended()

    def on_rank(rank: int) -> None:
        interlace.monitored_barrier(groups[rank], LONG, wait_all_ranks)

    first, second = run(range(2), on_rank)
    assert "Rank 2 failed to pass monitoredBarrier" in str(first) and first.waited_for == (2,)
    for error in first, second:
        assert "rank 2" in str(error) and "died" in str(error), error


def _pidfd_of_a_process_that_has_ended() -> int:
    process = subprocess.Popen(["true"])
    descriptor = os.pidfd_open(process.pid)
    process.wait()
    return descriptor


def test_a_death_is_named_before_a_rank_that_left() -> None:
    """Rank 1 has left because rank 2 died. Rank 0 waits only for rank 1, but the error names rank 2."""
    groups = members(3)
    group = groups[0].place.group
    assert isinstance(group, HostGroup) and isinstance(groups[0].place, ShmPlace)
    groups[1].place.close()
    error = group.interruption("recv", (1,))
    assert "rank 1 has left" in str(error)
    group.pidfds[2] = ended = _pidfd_of_a_process_that_has_ended()
    error = group.interruption("recv", (1,))
    assert "rank 2" in str(error) and "died" in str(error), ended
    close(groups)


@pytest.mark.parametrize(
    ("received", "kind", "text"),
    [
        (torch.empty(3), ValueError, "number of elements differs between ranks: 4 were"),
        (torch.empty(4).long(), TypeError, "dtype of tensor differs between ranks: torch.float32"),
    ],
)
def test_a_message_that_does_not_fit(
    received: torch.Tensor, kind: type[Exception], text: str, grouped: Grouped
) -> None:
    """The sender gets the error once, at the end of one of its messages; the next message is correct."""
    groups = grouped(2)

    def on_rank(rank: int) -> Any:
        engine, call = groups[rank].engine, Call("message")
        if rank:
            try:
                return engine.recv(call, received, 0, 7).result()
            finally:
                engine.send(call, torch.ones(1), 0, 0)
        engine.send(call, torch.ones(4), 1, 7).result()
        return engine.recv(call, torch.ones(1), 1, 0).result()  # its next message

    errors = run(range(2), on_rank)
    assert [type(error) for error in errors] == [kind, kind]
    assert str(errors[0]) == str(errors[1]) and str(errors[0]).startswith(f"recv: {text}")
    target = torch.zeros(3)
    receiving = interlace.irecv(target, 0, group=groups[1], tag=8)
    interlace.isend(torch.full((3,), 7.0), 1, group=groups[0], tag=8).wait()
    receiving.wait()
    assert target.tolist() == [7.0] * 3
    run(range(2), lambda rank: groups[rank].barrier())  # the group goes on


def test_closing_a_group_waits_for_its_ops_until_the_other_rank_leaves() -> None:
    groups = members(2)
    work = interlace.all_reduce(torch.ones(4), group=groups[0], async_op=True)
    groups[1].close()
    groups[0].close()
    with pytest.raises(InterlaceError, match="rank 1 has left the group"):
        work.wait()
