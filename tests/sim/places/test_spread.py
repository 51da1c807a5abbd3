"""Moves of ranks that share cores unevenly; they stay free to run anywhere."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, strategies as st

from interlace.runtime.processes import control as spread
from interlace.runtime.processes.control import CoreSpread, move
from stand_ins.replaced import replaced


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
