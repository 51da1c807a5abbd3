"""Code for a process and a GPU per rank runs unchanged on simulated ranks, and its streams are streams."""

import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import interlace
from interlace.verify import races, schedules, shims
from interlace.verify.suite.jobs import load_function

FILE = pathlib.Path(__file__).with_name("gpu_code.py")


@pytest.fixture
def function() -> Iterator[Callable[[str], Any]]:
    with shims.installed("torch"):
        yield lambda name: load_function(f"{FILE}::{name}")


def test_globals_are_each_ranks_own_and_end_with_the_run(function: Any) -> None:
    fn = function("caches_are_each_ranks_own")
    for _ in range(2):
        assert interlace.run(fn, 2) == [(2, [[0, 0]]), (4, [[1, 1]])]
    assert fn.__globals__["calls"] == 0 and not fn.__globals__["WORDS"]


def test_names_of_a_gpu_and_of_a_group(function: Any) -> None:
    assert interlace.run(function("names_of_a_gpu"), 2) == [[2.0] * 4] * 2
    assert not torch.cuda.is_available()


@pytest.mark.parametrize("name", ["pipelined", "waits_for_values"])
def test_streams_that_are_in_order(function: Any, name: str) -> None:
    fn = function(name)
    report = races(fn, 2, seeds=3)
    assert report.clean and report.events > 50, str(report)
    assert schedules(fn, 2, n=6, workers=1, shrink=False).clean


def test_a_stream_waits_for_a_value_and_autograd_goes_through_streams(function: Any) -> None:
    found = interlace.run(function("waits_for_values"), 2)
    assert found == [([2.0, 2.0], [2.0, 2.0]), ([4.0, 4.0], [4.0, 4.0])]


def test_a_stream_that_waits_in_vain_is_a_deadlock(function: Any) -> None:
    fn = functools.partial(function("waits_for_values"), told=False)
    with pytest.raises(
        interlace.DeadlockError, match=r"rank 0 stream 2.* a value at .*int32 tensor"
    ):
        interlace.run(fn, 1)
