"""Polls that see nothing new for ever are a deadlock, though their loop counts them in memory."""

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

import interlace
from interlace.runtime.places.sim.scheduler import scheduler


@triton.jit
def counting_wait(flag, looks, AT_MOST: tl.constexpr, SETS: tl.constexpr, WORK: tl.constexpr):
    """Program 0 waits for the flag, at most AT_MOST polls; program 1 sets it after other work."""
    if tl.program_id(0) == 0:
        seen = 0
        while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0) & (seen < AT_MOST):
            seen = tl.atomic_add(looks, 1)
    elif SETS:
        for _ in range(WORK):
            tl.atomic_add(looks + 1, 1)
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")


def waited(at_most: int, sets: bool) -> None:
    words = torch.zeros(3, dtype=torch.int32)
    counting_wait[(2,)](words, words[1:], at_most, sets, 400)


few_polls = mock.patch.object(scheduler, "VAIN_POLLS", 200)


@few_polls
@pytest.mark.parametrize("place", ["sim", "ptx"])
def test_a_wait_that_counts_its_looks_is_a_deadlock(place: str) -> None:
    with pytest.raises(interlace.DeadlockError, match=r"byte 0.*test_vain_polls.py:\d+ in count"):
        interlace.run(waited, 1, 1 << 30, False, place=place)


@few_polls
@pytest.mark.parametrize(("at_most", "sets"), [(1 << 30, True), (300, False)])
def test_a_wait_that_ends_is_none(at_most: int, sets: bool) -> None:
    for seed in range(4):
        interlace.run(waited, 1, at_most, sets, seed=seed)


@triton.jit
def long_reader(flag, looks, words, READS: tl.constexpr, SETS: tl.constexpr, COUNTS: tl.constexpr):
    """Program 1 reads the same words for long, and then sets the flag; program 0 waits for it."""
    if tl.program_id(0) == 0:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
            if COUNTS:
                tl.atomic_add(looks, 1)
    else:
        total = tl.zeros((16,), tl.int32)
        for _ in range(READS):
            total += tl.load(words + tl.arange(0, 16))
        tl.store(words + tl.arange(0, 16), total)
        if SETS:
            tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@pytest.mark.parametrize("counts", [False, True])
def test_who_reads_the_same_for_long_waits_for_nothing(counts: bool) -> None:
    """Polls of other ranks meanwhile do not make this a deadlock."""

    def read(sets: bool) -> int:
        words = torch.ones(18, dtype=torch.int32)
        words[:2] = 0
        long_reader[(2,)](words, words[1:], words[2:], 1500, sets, counts)
        return int(words[2])

    assert interlace.run(read, 1, True, seed=1) == [1500]
    with pytest.raises(interlace.DeadlockError, match=r"byte 0.*test_vain_polls.py:\d+ in long"):
        interlace.run(read, 1, False, seed=1)
