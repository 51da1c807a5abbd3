"""Agreement of ranks on GPUs on their hosts, by processes: calls, and messages."""

import pytest

import interlace
from multi.shm import agreement_ranks
from tiers import thorough


@pytest.mark.parametrize("world_size", [2, 3])
def test_answers_are_right_in_any_order_of_calls(world_size: int) -> None:
    rounds = 600
    right = interlace.run(agreement_ranks.random_calls, world_size, rounds, place="shm")
    assert right == [rounds] * world_size


def test_a_rank_runs_ahead_but_not_for_ever() -> None:
    answers = interlace.run(agreement_ranks.ahead, 2, place="shm")
    assert answers[0][0] > 200 and answers[0][1] == answers[1][1]


@pytest.mark.parametrize("known", [False, True])
def test_a_mismatch_is_found_by_every_rank(known: bool) -> None:
    answers = interlace.run(agreement_ranks.mismatch, 3, known, place="shm")
    for rank, texts in enumerate(answers):
        said = " ".join(texts)
        assert "number differs between ranks: 1 on rank 0, 2 on rank 2" in said, (rank, texts)


@thorough
def test_more_kinds_of_calls_than_are_kept() -> None:
    assert interlace.run(agreement_ranks.many_calls, 2, 1100, place="shm") == [True, True]


def test_messages_of_a_gpu_go_by_way_of_the_host() -> None:
    answers = interlace.run(agreement_ranks.messages_by_way_of_the_host, 3, 4, place="shm")
    for rank, seen in enumerate(answers):
        expected = [10.0 * number + (rank - 1) % 3 for number in range(4)]
        assert seen == [[value, value] for value in expected]
