"""Pipelined dispatch and combine: each signal of theirs is needed, and found missing."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

import interlace
from interlace import experts
from interlace.runtime.places.sim.place import SimStream
from interlace.verify import races
from sim.experts.test_experts import PLAIN, dispatched

CASE = replace(PLAIN, algorithm="pipelined", tokens=[5, 3])
HOW: Any = {"algorithm": "pipelined", "async_op": True}


def dispatches() -> None:
    rank = interlace.get_rank()
    given = CASE.x(rank), CASE.idx(rank), None, CASE.experts
    for work in [experts.dispatch(*given, **HOW) for _ in range(3)]:
        work.wait()


def combines() -> None:
    received, handle = dispatched(CASE)
    for work in [experts.combine(received.x, handle, **HOW) for _ in range(3)]:
        work.wait()


@pytest.mark.parametrize(
    ("run", "without"),
    [
        (dispatches, ""),
        (dispatches, "wait"),
        (dispatches, "publish"),
        (dispatches, "wait_credits"),
        (combines, ""),
        (combines, "wait"),
        (combines, "publish"),
        # not its credits: who has heard of everybody's last rows knows that those before were summed
    ],
)
def test_a_missing_signal_is_found(run: Any, without: str) -> None:
    nothing = mock.patch.object(SimStream, without, lambda *_: None) if without else nullcontext()
    with nothing:
        assert races(run, 2, seeds=1).clean is not bool(without)
