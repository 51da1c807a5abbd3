"""The steps that ``benchmarks/timeline.py`` records for the picture of a matmul with its all-gather."""

from typing import Any

import pytest

import interlace
from sim.benchmark.model_support import module
from tiers import thorough


@pytest.fixture
def timeline() -> Any:
    return module("timeline")


def test_the_fastest_call_counts_from_the_first_rank_to_the_last(timeline: Any) -> None:
    first = [("pipelined", 10.0, 30.0, [("matmul", 12.0, 20.0)]), ("gloo", 50.0, 60.0, [])]
    second = [("pipelined", 15.0, 31.0, []), ("gloo", 45.0, 60.0, [("copy", 46.0, 50.0)])]
    slower = [("pipelined", 100.0, 130.0, [])]
    ranks = [first + slower, second + slower]
    assert timeline.fastest(ranks, "pipelined") == {
        "microseconds": 21.0,
        "steps": [[("matmul", 2.0, 10.0)], []],
    }
    assert timeline.fastest(ranks, "gloo") == {
        "microseconds": 15.0,
        "steps": [[], [("copy", 1.0, 5.0)]],
    }


@thorough
def test_every_way_has_its_steps(timeline: Any, tmp_path: Any) -> None:
    ranks = interlace.run(timeline.on_rank, 2, 2, f"{tmp_path}/meeting", place="shm")
    for calls in ranks:
        assert [name for name, *_ in calls] == ["gloo", "unfused", "pipelined"] * 2
        for name, begin, end, steps in calls:
            kinds = [kind for kind, *_ in steps]
            assert kinds.count("matmul") == (2 if name == "pipelined" else 1)
            assert kinds.count("gather") == (name == "gloo")
            assert all(begin <= start <= stop <= end for _, start, stop in steps)
