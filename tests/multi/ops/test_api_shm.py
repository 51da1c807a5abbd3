"""The API across processes: the table, large messages, real asynchrony, monitored barriers, misuse."""

import os
from pathlib import Path

import pytest

import interlace
from cases import refused_calls
from multi.ops import api_ranks
from tiers import few


@pytest.mark.parametrize("world_size", few([2, 3], 3))
def test_every_operation(world_size: int) -> None:
    counts = interlace.run(api_ranks.every_operation, world_size, place="shm")
    assert min(counts) > 200


def test_every_reduction() -> None:
    assert min(interlace.run(api_ranks.every_reduction, 3, place="shm")) > 100


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_large(world_size: int) -> None:
    interlace.run(api_ranks.large, world_size, 300_001, place="shm")


def test_async_ops_return_before_the_others_have_called(tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    assert interlace.run(api_ranks.held_back, 2, fifo, place="shm") == [12, 12]


def test_monitored_barrier_names_who_is_missing() -> None:
    interlace.run(api_ranks.monitored, 3, place="shm")


def test_objects_and_groups_of_ranks() -> None:
    interlace.run(api_ranks.objects_and_groups, 4, place="shm")


def test_what_one_rank_refuses_all_refuse() -> None:
    texts = interlace.run(api_ranks.refused, 2, place="shm")
    assert all("op must be one of sum, avg" in text for text in texts)
    assert "rank 1 cannot take part" in texts[0]


def test_a_misuse_of_any_kind_is_raised_on_all_ranks() -> None:
    interlace.run(refused_calls.refused_by_rank_1, 2, place="shm")


def test_a_message_of_another_length_or_dtype() -> None:
    interlace.run(api_ranks.wrong_message, 2, place="shm")
