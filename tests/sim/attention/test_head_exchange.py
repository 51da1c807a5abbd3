"""Heads for tokens, with the projections around: results, gradients, bits, misuse; the layer around it."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import interlace
from cases.head_exchange_cases import ALGORITHMS, ExchangeCase, exchanged, layered, worst
from interlace import functional, nn
from ranks import ranks
from sim.api.refusals import ByRank, both, check_refused
from support import poisoned, slow_rank, starved
from tiers import thorough

EVEN = ExchangeCase((20, 20, 20))
UNEVEN = ExchangeCase((33, 0, 5), columns=9, others=(2,), weight="contiguous", copiers=0)
WIDE = ExchangeCase((18, 40), columns=64, dtype=torch.bfloat16, bias=False)
CASES = {"even": EVEN, "uneven": UNEVEN, "wide": WIDE, "alone": ExchangeCase((7,))}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_whole(name: str, algorithm: str) -> None:
    case = CASES[name]
    with poisoned():
        found = interlace.run(exchanged, len(case.lengths), case, algorithm)
    ratios = worst(case, found)
    assert len(ratios) == (8 if case.bias else 6) and max(ratios.values()) <= 1, ratios


@thorough
def test_every_dtype_and_layout() -> None:
    dtypes = torch.float64, torch.float16, torch.bfloat16
    layouts = "contiguous", "strided", "offset", "expanded"
    for dtype, layout, algorithm in itertools.product(dtypes, layouts, ALGORITHMS):
        case = ExchangeCase((9, 4, 0, 2, 17), dtype=dtype, weight=layout, columns=7, hidden=5)
        if dtype != torch.float64 or algorithm != "fused":
            ratios = worst(case, interlace.run(exchanged, 5, case, algorithm))
            assert max(ratios.values()) <= 1, (case, algorithm, ratios)


def test_a_wrong_result_is_beyond_the_bound() -> None:
    found = interlace.run(exchanged, 3, EVEN, "fused")
    for name in found[0]:
        wrong = [{key: value.clone() for key, value in each.items()} for each in found]
        wrong[1][name][(0,) * wrong[1][name].dim()] *= 1.001
        assert worst(EVEN, wrong)[name] > 1, name


def test_schedules_have_the_same_bits() -> None:
    """Sums are in the order of ranks, not in the order of arrival."""
    first = interlace.run(exchanged, 3, EVEN, "fused", seed=0)
    with starved(slow_rank(1)):
        again = [interlace.run(exchanged, 3, EVEN, "fused", seed=1)]
    again.append(interlace.run(exchanged, 3, replace(EVEN, copiers=0), "fused", seed=5))
    for found in again:
        for mine, other in zip(first, found, strict=True):
            assert all(torch.equal(mine[name], other[name]) for name in mine)


TO, FROM = "matmul_all_to_all", "all_to_all_matmul"
X, W = torch.zeros(4, 6), torch.zeros(6, 8)
MISUSE: list[tuple[str, dict[str, Any], str]] = [
    (TO, {"input": torch.zeros(6)}, "input must have at least 2 dimensions"),
    (TO, {"weight": torch.zeros(5, 8)}, "weight has 5 rows, input has k = 6"),
    (TO, {"weight": torch.zeros(6, 9)}, "9 columns, which world size 2 does not divide"),
    (TO, {"weight": W.double()}, "TypeError: weight is torch.float64, input is"),
    (TO, {"bias": torch.zeros(7)}, "bias must have shape (8,)"),
    (TO, {"length": both(9)}, "length is for 9 on rank 0, the ranks have 8 ([4, 4] by rank)"),
    (TO, {"length": -1}, "length must be None or not negative"),
    (TO, {"length": "8"}, "TypeError: length must be an int, got str"),
    (TO, {"input": torch.zeros(5, 6)}, "length is for 8 on rank 0"),
    (TO, {"algorithm": ByRank("fused", "unfused")}, "algorithm differs between ranks"),
    (TO, {"bias": torch.zeros(8)}, "bias differs between ranks"),
    (FROM, {"weight": W}, "weight has 6 rows, 2 ranks with k = 6"),
    (FROM, {"input": torch.zeros(5, 6)}, "does not divide; give length"),
    (FROM, {"length": ByRank(1, 2)}, "input is for 4 on rank 0, the ranks have 3 ([1, 2]"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "changes", "text"), MISUSE)
@ranks(2, place="sim")
def test_misuse_is_named_on_all_ranks(op: str, changes: dict[str, Any], text: str) -> None:
    right = {"input": X, "weight": W if op == TO else torch.zeros(12, 8)}
    right["algorithm"] = "unfused"
    check_refused(getattr(functional, op), right, changes, text)


@pytest.mark.parametrize(
    ("lengths", "heads", "algorithm", "layout", "balance"),
    [
        ((5, 5, 5), (6, 3), "auto", "bshd", "zigzag"),
        ((7, 0, 4), (3, 3), "pipelined", "sbhd", "contiguous"),
        ((4, 9), (4, 2), "unfused", "bshd", "zigzag"),
        ((6, 5), (4, 1), "auto", "sbhd", "zigzag"),  # heads that the ranks do not divide
    ],
)
def test_the_layer_is_an_attention(
    lengths: tuple[int, ...], heads: tuple[int, int], algorithm: str, layout: str, balance: str
) -> None:
    errors = interlace.run(layered, len(lengths), lengths, heads, algorithm, layout, balance)
    assert max(errors) < 1e-5


@ranks(2, place="sim")
def test_the_layer_says_what_it_refuses() -> None:
    for heads, text in (
        ((4, 1), 'algorithm="fused" needs heads that world size 2 divides'),
        ((4, 3), "num_kv_heads must divide num_heads 4, got 3"),
        ((0,), "num_heads"),
    ):
        with pytest.raises(ValueError, match=text):
            nn.UlyssesAttention(8, *heads, algorithm="fused")


TOKENS = torch.zeros(1, 3, 8)
REFUSED_BY_THE_LAYER: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "TypeError: input must be a tensor, got NoneType"),
    ({"input": TOKENS[0]}, "input must have 3 dimensions and 8 features"),
    ({"lengths": 6}, "TypeError: lengths must be a list of ints, got 6"),
    ({"lengths": [6]}, "lengths must have 2 entries, this rank's must be 3; got [6]"),
    ({"lengths": [4, 3]}, "lengths differs between ranks: (3, 3) on rank 0"),
    ({"lengths": [4, 2]}, "this rank's must be 3; got [4, 2]"),
    ({"rotary": "x"}, "TypeError: rotary must be callable or None, got 'x'"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED_BY_THE_LAYER)
@ranks(2, place="sim")
def test_the_layer_tells_all_ranks_what_one_gave(changes: dict[str, Any], text: str) -> None:
    check_refused(
        nn.UlyssesAttention(8, 4, 2, algorithm="unfused"), {"input": TOKENS}, changes, text
    )


@pytest.mark.parametrize("key_heads", [3, 2])
@ranks(3, place="sim")
def test_lengths_of_third_ranks_are_compared(key_heads: int) -> None:
    """Each rank passes its own length, and the sum is correct. The check is also made without an exchange
    of heads.
    """
    layer: Any = nn.UlyssesAttention(8, 2 * key_heads, key_heads, 4)
    lengths = [3, 2, 4] if interlace.get_rank() == 0 else [3, 3, 3]
    text = r"lengths differs between ranks: \(3, 2, 4\) on rank 0, \(3, 3, 3\) on rank 1"
    with pytest.raises(ValueError, match=text):
        layer(TOKENS, lengths=lengths)
    layer(TOKENS)  # the group goes on


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@ranks(2, place="sim")
def test_a_layer_without_tokens_on_any_rank(layout: Any) -> None:
    layer = nn.UlyssesAttention(8, 4, 2, 4, out_bias=True, layout=layout)
    x = torch.zeros((2, 0, 8) if layout == "bshd" else (0, 2, 8), requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None and not layer.out.bias.grad.any()
    assert y.shape == x.shape


@ranks(2, place="sim")
def test_heads_of_all_tokens_say_what_they_refuse() -> None:
    def call(tokens: int, **options: Any) -> None:
        q = torch.zeros(1, tokens, 2, 8)
        nn.functional.attention_of_heads(q, q, q, **options)

    refused: list[tuple[dict[str, Any], str]] = [
        ({"tokens": both(5)}, "which world size 2 does not divide; give length"),
        ({"tokens": both(5), "length": both(3)}, "q has 5 tokens on rank 0, the ranks have 6"),
        # the sum is right
        ({"length": ByRank(5, -1)}, "length must be None or not negative, got -1"),
        ({"length": ByRank(5, torch.tensor(2))}, "TypeError: length must be an int, got Tensor"),
    ]
    for changes, text in refused:
        check_refused(call, {"tokens": 4}, changes, text)
