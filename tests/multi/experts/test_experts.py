"""Dispatch, combine, grouped matmul + combine across processes: every algorithm, gradients, graphs."""

import pytest

import interlace
from multi.experts import expert_ranks
from multi.experts.expert_ranks import FORMS
from tiers import few


def test_results() -> None:
    assert interlace.run(expert_ranks.results, 3, place="shm") == [[]] * 3


def test_counts_of_a_layer_stay_on_the_device() -> None:
    """They are checked here, and read for what torch does."""
    read = interlace.run(expert_ranks.reads_of_a_layer, 3, "fused", place="shm")
    assert read[0] == read[2] == expert_ranks.CHECKS and read[1] < read[0]  # rank 1 has no token
    read = interlace.run(expert_ranks.reads_of_a_layer, 3, "pipelined", place="shm")
    assert all({"_with_counts", "agreed"} <= each for each in read), read


@pytest.mark.parametrize("how", few(FORMS, *(how for how in FORMS if "inductor" not in how)))
def test_gradients(how: str) -> None:
    assert interlace.run(expert_ranks.gradients, 2, how, place="shm") == [[]] * 2


@pytest.mark.parametrize("most", few([None, 9], None))
def test_a_layer_is_one_graph(most: int | None) -> None:
    assert interlace.run(expert_ranks.layer_compiled, 2, most, place="shm") == [[]] * 2


def test_shapes_are_known_without_a_group() -> None:
    shapes = [(80, 8), (2, 40, 8), (24, 8), (6, 2), (6, 5), (6, 3), (6, 7)]
    assert interlace.run(expert_ranks.faked, 1, place="shm") == [shapes]


def test_a_first_call_that_one_rank_refuses_is_told_to_all() -> None:
    first, second = interlace.run(expert_ranks.refused_at_first, 2, place="shm")
    said = "weight must be a tensor, got NoneType"
    assert first == [f"grouped_matmul_combine: rank 1 cannot take part: {said}"]
    assert second == [f"{said} (on rank 1)"]


def test_a_graph_does_no_op_twice() -> None:
    ops = [
        *["dispatch"] * 2,
        "combine",
        "grouped_matmul_combine",
        "dispatch",
        "dispatch",
        "combine",
    ]
    # twice, as ranks compare caches of tune before
    assert interlace.run(expert_ranks.called, 2, "dropless compiled", place="shm") == [ops] * 2
