"""Polls that see nothing new for ever are a deadlock, though their loop counts them in memory."""

import pytest
import torch
import triton
import triton.language as tl

import interlace
from interlace.runtime.scheduler import scheduler


@triton.jit
def counting_wait(flag, looks, AT_MOST: tl.constexpr, SETS: tl.constexpr, WORK: tl.constexpr):
    """Program 0 waits for the flag, or gives up; program 1 sets it after much else."""
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


@pytest.mark.parametrize("place", ["sim", "ptx"])
def test_a_wait_that_counts_its_looks_is_a_deadlock(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "VAIN_POLLS", 200)
    with pytest.raises(interlace.DeadlockError, match=r"byte 0.*test_vain_polls.py:\d+ in count"):
        interlace.run(waited, 1, 1 << 30, False, place=place)


@pytest.mark.parametrize(("at_most", "sets"), [(1 << 30, True), (300, False)])
def test_a_wait_that_ends_is_none(
    at_most: int, sets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another works for long and sets the flag then; or the wait has a bound."""
    monkeypatch.setattr(scheduler, "VAIN_POLLS", 200)
    for seed in range(4):
        interlace.run(waited, 1, at_most, sets, seed=seed)
