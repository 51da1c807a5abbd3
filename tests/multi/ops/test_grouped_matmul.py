"""The grouped ops across processes: every algorithm, gradients, graphs, misuse."""

import pytest

import interlace
from multi.ops import grouped_ranks

OPS = (grouped_ranks.GATHER, grouped_ranks.EXCHANGE)


@pytest.mark.parametrize("op", OPS)
def test_results(op: str) -> None:
    assert interlace.run(grouped_ranks.results, 3, op, place="shm") == [[]] * 3


def test_as_torch_does_it_in_three_steps() -> None:
    assert interlace.run(grouped_ranks.like_torch, 3, place="shm") == [[]] * 3


@pytest.mark.parametrize("op", OPS)
def test_gradients(op: str) -> None:
    assert interlace.run(grouped_ranks.gradients, 2, op, place="shm") == [[]] * 2


def test_misuse_is_known_to_all() -> None:
    words = (
        "must not be negative, got [5, -1]",
        "adds up to 3, input has 4 rows",
        "has 3 experts, which world size 2 does not divide",
        "has 4 entries, 2 ranks with 1 experts in weight make 2",
        "output_splits[1] (expert 1 from rank 1) is 1 on rank 1, input_splits[1] is 2 on rank 1",
        "output_splits has 3 entries, 1 experts and 2 ranks make 2",
        "weight has k = 7",
        "weight must have 3 dimensions",
        "algorithm differs between ranks: fused on rank 0, unfused on rank 1",
        "input_splits must be a tensor of integers, got torch.float32",
        "adds up to 3, input has 4 rows",
        "bias must have shape (1, 3)",
        "the number of experts differs between ranks: 1 on rank 0, 2 on rank 1",
        "dtype of input differs between ranks",
        "what requires a gradient differs between ranks: weight on rank 0, None on rank 1",
        "what requires a gradient differs between ranks: None on rank 0, input on rank 1",
        "96.0",
    )
    for said in interlace.run(grouped_ranks.refused, 2, place="shm"):
        assert [word for word, each in zip(words, said, strict=True) if word not in each] == [], (
            said
        )


def test_in_a_subgroup() -> None:
    found = interlace.run(grouped_ranks.in_a_subgroup, 3, place="shm")
    assert found == [[], [2.0, 4.0], [2.0, 2.0, 4.0, 4.0]]


def test_shapes_are_known_without_a_group() -> None:
    assert interlace.run(grouped_ranks.faked, 1, place="shm") == [[(8, 3), (24, 3)]]
