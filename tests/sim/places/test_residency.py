"""Kernels of two groups on one GPU, turns of virtual ranks, and cores of ranks."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import interlace
from interlace.groups.new import new_group
from interlace.runtime.core.errors import CollectiveTimeoutError, RankError
from interlace.runtime.places.gpu.device_place import Residency
from interlace.runtime.places.gpu.virtual_place import Turns, run_threads
from interlace.runtime.processes import control as spread
from interlace.runtime.processes.control import CoreSpread, move
from stand_ins import fake_host
from stand_ins.fake_cuda import DeviceHang, FakeGpu
from stand_ins.replaced import Replacement, replaced

A, B, C = 1, 2, 3


def admitted(known: Residency, group: int, programs: int, *, end: bool = True) -> list[int]:
    """Return the streams for which an op of ``group``, on stream ``group``, has to wait."""
    waited = [point.target[0] for point in known.admit(group, programs, (group, 0))]
    if end:
        known.ended(group, (group, 0))
    return waited


@pytest.mark.parametrize(
    "ops",
    [
        [(A, 3, []), (B, 3, []), (C, 3, []), (A, 4, [])],  # all fit
        # the oldest is waited for; C counts 6, as it may still wait for A's
        [(A, 6, []), (B, 4, []), (C, 3, [A]), (A, 1, [B])],
        [(A, 10, [])] * 5,  # a group does not wait for itself
        # C fits beside B, but not beside A, for which B still waits
        [(A, 8, []), (B, 3, [A]), (C, 3, [B])],
    ],
)
def test_an_op_waits_for_the_oldest_that_leaves_no_room(
    ops: list[tuple[int, int, list[int]]],
) -> None:
    known = Residency(10)
    for group, programs, waited in ops:
        assert admitted(known, group, programs) == waited


def test_kernels_of_one_op_add_up() -> None:
    known = Residency(10)
    admitted(known, A, 3, end=False)
    admitted(known, A, 3)
    assert admitted(known, B, 5) == [A]


def test_a_closed_group_is_forgotten() -> None:
    known = Residency(10)
    admitted(known, A, 8)
    known.forget(A)
    assert admitted(known, B, 8) == []


# -- on the fake GPU ---------------------------------------------------------------------------------


def two_groups() -> bool:
    """Run asynchronous ops of two groups of the same ranks in flight together, known kinds too."""
    rank, other = interlace.get_rank(), new_group([0, 1])
    seen = []
    for number in range(4):
        x = torch.full((64, 16), 10.0 * number + rank + 1)
        works = [
            interlace.matmul_reduce_scatter(
                x, torch.eye(16), group=group, algorithm="fused", async_op=True
            )
            for group in (None, other)
        ]
        seen += [(work, 20.0 * number + 3) for work in works]
    results = [(work.wait(), value) for work, value in seen]
    torch.cuda.current_stream().synchronize()
    return all(bool((out == value).all()) for out, value in results)


def holds(seed: int, *faults: Replacement) -> bool:
    try:
        gpu = FakeGpu(seed, eager=0.05, multiprocessors=3)
        return all(fake_host.run(two_groups, 2, gpu, *faults))
    except DeviceHang:
        return False


@pytest.mark.parametrize("seed", range(4))
def test_two_groups_do_not_block(seed: int) -> None:
    assert holds(seed)


def test_without_an_order_they_block() -> None:
    def nothing(self: Residency, group: int, programs: int, where: Any) -> list[Any]:
        return []

    assert not all(holds(seed, (Residency, "admit", nothing)) for seed in range(8))


def run(host, world_size: int, timeout: float = 300.0) -> list:  # type: ignore[no-untyped-def, type-arg]
    turns = Turns(world_size, timeout)
    return run_threads(lambda rank: host(turns, rank), world_size, turns)


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


@pytest.mark.parametrize(
    ("cores", "allowed", "moves"),
    [
        ([0, 0, 0, 1], (0, 1), {2: 1}),
        ([0, 0, 0, 0], (0, 1), {3: 1}),
        ([1, 0, 1, 1], (0, 1), {3: 0}),
        ([0, 0], (0, 1), {1: 1}),
        ([0, 0, 1, 1], (0, 1), {}),
        ([0, 0, 1], (0, 1), {}),  # one of two cores must have two
        ([0, 0, 0, 1], (0,), {}),  # nowhere else to go
        ([0, 0, 5, 5], (0, 1), {1: 1}),  # a rank that is bound elsewhere counts there only
        ([-1, -1, 0, 1], (0, 1), {}),  # not said yet
        ([3, 3, 3, 0], (0, 1), {}),  # on a core that was taken away
    ],
)
def test_who_moves_where(cores: list[int], allowed: tuple[int, ...], moves: dict[int, int]) -> None:
    found = {rank: move(cores, rank, allowed) for rank in range(len(cores))}
    assert {rank: target for rank, target in found.items() if target is not None} == moves


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.sets(st.integers(0, 3), min_size=1))
def test_moving_makes_it_even(cores: list[int], allowed: set[int]) -> None:
    """In the end no core has two ranks more than another core that they may use."""
    cores = [core if core in allowed else min(allowed) for core in cores]
    for _ in range(len(cores) + 1):
        targets = [(rank, move(cores, rank, tuple(allowed))) for rank in range(len(cores))]
        moving = [(rank, target) for rank, target in targets if target is not None]
        assert len(moving) <= 1
        for rank, target in moving:
            cores[rank] = target
    counts = [cores.count(core) for core in allowed]
    assert not moving
    assert max(counts) - min(counts) < 2


@contextmanager
def crowded(
    said: list[int], *, between: float = 1e6, refuses: bool = False
) -> Iterator[tuple[CoreSpread, list[tuple[int, ...]]]]:
    """Return the new affinity of the last rank of four, which may use cores 0 and 1."""
    bound: list[tuple[int, ...]] = []

    def bind(_: int, cores: Any) -> None:
        bound.append(tuple(cores))
        if refuses:
            raise PermissionError("not permitted")

    words = [memoryview(bytearray(8)).cast("q") for _ in said]
    for word, core in zip(words, said, strict=True):
        word[0] = 1 + core
    with replaced(
        (os, "sched_getaffinity", lambda _: {0, 1}),
        (os, "sched_setaffinity", bind),
        (spread, "_core", lambda: 0),
        (spread, "SECONDS_BETWEEN", between),
    ):
        yield CoreSpread(words, len(said) - 1), bound


def test_a_move_leaves_the_affinity_as_it_was() -> None:
    with crowded([0, 0, 1, 0]) as (ranks, bound):
        ranks.say()
        ranks.look()
        assert bound == [(1,), (0, 1)]
        ranks.say()
        ranks.look()  # at once: the operating system may have its way first
        assert len(bound) == 2


def test_nobody_moves_before_all_have_said_where_they_are() -> None:
    with crowded([-1, -1, -1, -1], between=0.0) as (ranks, bound):
        ranks.look()
        ranks.say()
        ranks.look()
    assert not bound


def test_who_may_not_move_does_not_try_again() -> None:
    with crowded([0, 0, 0, 0], between=0.0, refuses=True) as (ranks, bound):
        for _ in range(3):
            ranks.say()
            ranks.look()
    assert bound == [(1,)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_this_thread_does_move() -> None:
    allowed = os.sched_getaffinity(0)
    words = [memoryview(bytearray(8)).cast("q") for _ in range(2)]
    ranks = CoreSpread(words, 1)
    assert spread._core is not None
    for _ in range(20):  # the operating system also moves threads
        ranks.say()
        here = words[1][0]
        words[0][0] = here
        ranks._next = 0.0
        ranks.look()
        if 1 + spread._core() != here:
            break
    else:
        pytest.fail("the thread stayed where the other rank is")
    assert os.sched_getaffinity(0) == allowed
