"""Attention over a sharded sequence in processes: every method, graphs, decoding."""

import pytest
import torch

import interlace
from cases.attention_cases import METHODS, AttentionCase, ratios
from cases.head_exchange_cases import ALGORITHMS, ExchangeCase, worst
from multi.attention import attention_ranks as ranks

CASES = {
    "fused": AttentionCase((18, 5), size=16, batch=1, heads=(2, 1)),
    "pipelined": AttentionCase((130, 0, 77), size=64, dtype=torch.bfloat16, layout="sbhd"),
    "unfused": AttentionCase((9, 20, 4), value_size=8, dtype=torch.float64, window=(6, 0)),
}


@pytest.mark.parametrize(
    ("algorithm", "method"),
    [
        *(("pipelined", method) for method in METHODS),
        ("fused", "ring"),
        ("unfused", "all_gather"),
        ("unfused", "ulysses"),
    ],
)
def test_agrees_with_the_whole_sequence(algorithm: str, method: str) -> None:
    case = CASES[algorithm]
    given = case, method, algorithm
    found = interlace.run(ranks.attended, len(case.lengths), *given, place="shm")
    assert max(ratios(case, found).values()) <= 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_heads_are_exchanged(algorithm: str) -> None:
    case = ExchangeCase((20, 0, 7), others=(2,))
    found = interlace.run(ranks.projected, 3, case, algorithm, place="shm")
    assert max(worst(case, found).values()) <= 1


def test_the_layer_with_projections() -> None:
    case = (7, 4), (4, 2), "auto", "bshd", "zigzag"
    assert max(interlace.run(ranks.in_layer, 2, *case, place="shm")) < 1e-5


def test_graphs_have_it() -> None:
    assert interlace.run(ranks.traced, 2, place="shm") == [[], []]
    assert interlace.run(ranks.compiled, 2, place="shm") == [[], []]
    assert interlace.run(ranks.compiled_layer, 2, place="shm") == [[], []]


def test_gradients_of_gradients_are_refused() -> None:
    for text in interlace.run(ranks.differentiated_twice, 2, place="shm"):
        assert "context_parallel_attention_backward has no gradients" in text


def test_decoding() -> None:
    assert interlace.run(ranks.decoded_in_graphs, 2, place="shm") == [[], []]
    assert interlace.run(ranks.decoded, 3, place="shm") == [True] * 3
