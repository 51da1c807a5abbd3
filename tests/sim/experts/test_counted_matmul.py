"""All-to-all + grouped matmul with counts on the device: any routing and schedule.

No count is read on the host: test_experts_on_streams.py.
"""

from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, strategies as st

import interlace
from interlace import experts
from interlace.ops.experts.counted import CountedSizes, experts_of, rows_sent
from interlace.ops.experts.grouped import Routes
from interlace.runtime.tuning.configuration import override
from ranks import ranks
from sim.algorithms.test_grouped_matmul import (
    BF16,
    EXCHANGE,
    LOPSIDED,
    SIZES,
    Case,
    cases,
    check_products,
)  # fmt: skip
from sim.api.refusals import check_refused
from support import noise, poisoned

EXTRA = 3  # rows of every rank that go nowhere


def on_rank(case: Case) -> Any:
    rank, bias = interlace.get_rank(), case.bias_matrix(interlace.get_rank())
    rows = torch.cat([case.input(rank), noise(rank, 9, (EXTRA, case.inner), case.dtype)])
    return interlace.all_to_all_grouped_matmul(
        rows,
        case.weight(rank),
        torch.tensor(case.counts[rank]),
        num_max_rows_per_rank=most_rows(case),
        bias=bias,
        activation=case.activation or None,  # type: ignore[arg-type]
        algorithm=case.algorithm,  # type: ignore[arg-type]
    )


def most_rows(case: Case) -> int:
    return max(map(sum, case.counts)) + EXTRA


def check(case: Case) -> None:
    with poisoned(), override(**case.configuration):
        results = interlace.run(on_rank, case.world, case, seed=case.seed)
    for rank, (output, handle) in enumerate(results):
        begin = 0
        for e, expert in enumerate(case.block(rank)):
            for source, counts in enumerate(case.counts):
                home = sum(counts[:expert])
                assert handle.segments[e, source].tolist() == [begin, counts[expert], home]
                begin += counts[expert]
        check_products(case, rank, output[:begin])
        assert output.shape == (case.world * most_rows(case), case.columns)
        assert not output[begin:].any(), "what nothing came for is zero"
        chosen = [e for e, rows in enumerate(case.counts[rank]) for _ in range(rows)]
        assert handle.topk_idx.flatten().tolist() == chosen + [-1] * EXTRA


@hypothesis.settings(max_examples=30)
@given(cases())
def test_any_routing(case: Case) -> None:
    total = case.experts * case.world
    counts = [(each * total)[:total] for each in case.counts]
    check(replace(case, op=EXCHANGE, counts=counts))


@pytest.mark.parametrize("routing", LOPSIDED)
def test_lopsided_routing(routing: str) -> None:
    small = {"block_m": 16, "block_n": 16, "block_k": 16, "chunks": 3, "copiers": 2}
    check(Case(EXCHANGE, 1, LOPSIDED[routing], 9, 17, BF16, configuration=small))


@ranks(2, place="sim")
def test_what_it_brings_goes_home() -> None:
    own = 1.0 + interlace.get_rank()
    x, idx = torch.full((2, 4), own), torch.tensor([[1, 0], [1, -1]])
    weight = torch.full((1, 4, 4), 10.0 ** interlace.get_rank()) / 4
    rows, sent = experts.permute(x, idx, 2, num_out_tokens=4)
    hidden, handle = interlace.all_to_all_grouped_matmul(
        rows, weight, sent, num_max_rows_per_rank=4
    )
    tokens = interlace.grouped_matmul_combine(hidden, torch.eye(4)[None], handle, idx)
    assert experts.combine(hidden, handle)[:, 0].tolist() == [own, 10 * own, 10 * own, 0.0]
    assert tokens[:, 0].tolist() == [11 * own, 10 * own]


def test_gradients_are_those_without_a_bound() -> None:
    def layer(bound: bool) -> list[torch.Tensor]:
        rank = interlace.get_rank()
        tensors = [
            noise(rank, n, shape, torch.float32) for n, shape in enumerate([(5, 8), (2, 8, 4)])
        ]
        rows, weight = (each.requires_grad_() for each in tensors)
        splits = torch.tensor([2, 0, 1, 1])
        given: Any = {"num_max_rows_per_rank": 6} if bound else {}
        input = rows if bound else rows[:4]
        output, _ = interlace.all_to_all_grouped_matmul(
            input, weight, splits, activation="silu", **given
        )
        assert output.shape[0] == (12 if bound else output.shape[0])
        output.square().sum().backward()
        return [output[: int(splits.sum())].detach(), rows.grad, weight.grad]  # type: ignore[list-item]

    for counted_, plain in zip(
        *(interlace.run(layer, 2, each) for each in (True, False)), strict=True
    ):
        assert all(map(torch.equal, counted_, plain))


MISUSE: list[tuple[dict[str, Any], str]] = [
    ({"num_max_rows_per_rank": 3}, "num_max_rows_per_rank is 3, input has 4 rows"),
    ({"num_max_rows_per_rank": 0}, "num_max_rows_per_rank must be positive, got 0"),
    ({"num_max_rows_per_rank": 9},
     "num_max_rows_per_rank differs between ranks: 8 on rank 0, 9 on rank 1"),
    ({"num_max_rows_per_rank": None},
     "num_max_rows_per_rank differs between ranks: 8 on rank 0, None on rank 1"),
    ({"weight": torch.ones(1, 8, 2)}, "n of weight differs between ranks"),
    ({"input_splits": [2, 2]}, "TypeError: input_splits must be a tensor, got list"),
    ({"input_splits": torch.ones(2)},
     "TypeError: input_splits must be a tensor of integers, got torch.float32"),
    ({"input_splits": torch.tensor([1, 1, 1])},
     "input_splits has 3 entries, 2 ranks with 1 experts in weight make 2"),
    ({"input_splits": torch.tensor([2, 3])}, "input_splits adds up to 5, input has 4 rows"),
    ({"input_splits": torch.tensor([5, -1])}, "input_splits must not be negative"),
    ({"return_received": True}, "return_received do not go with num_max_rows_per_rank"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), MISUSE)
@ranks(2, place="sim")
def test_misuse_of_one_rank_is_named_on_all(changes: dict[str, Any], text: str) -> None:
    x, weight, splits = torch.ones(4, 8), torch.ones(1, 8, 3), torch.tensor([2, 2])
    right = {"input": x, "weight": weight, "input_splits": splits, "num_max_rows_per_rank": 8}
    check_refused(interlace.all_to_all_grouped_matmul, right, changes, text)


# -- tables ------------------------------------------------------------------------------------------


@given(st.lists(SIZES, min_size=3, max_size=3), st.sampled_from([16, 32]), st.integers(0, 20))
def test_sends_are_those_of_known_counts(counts: list[list[int]], chunk: int, more: int) -> None:
    """Rows, chunks and their order are equal, and no two chunks of a rank share a slot."""
    most = max(1, *map(sum, counts)) + more
    sizes = CountedSizes(most, chunk, 3, 2)
    slots: list[set[int]] = [set(range(4)) for _ in range(3)]  # slots of counts and of the table
    for rank in range(3):
        routes = Routes(rank, tuple(map(tuple, counts)), 2)
        lines = routes.send_lines(chunk)
        made = sizes.sends(torch.tensor(counts[rank]), rank)
        assert int(made[-1]) == len(lines) <= sizes.lines
        found = made[:-1].view(-1, 5)[: len(lines)].tolist()
        assert [line[:3] for line in found] == [line[:3] for line in lines]
        for peer, first, rows, place, slot in found:
            begin = sum(counts[rank][: 2 * peer])
            assert place == rank * most + first - begin and place + rows <= (rank + 1) * most
            assert slot not in slots[peer] and slot < sizes.slots
            slots[peer].add(slot)


def test_numbers_that_are_wrong_stay_within_the_rows() -> None:
    """The host cannot check counts of a GPU."""
    assert rows_sent(torch.tensor([2, -1, 9, 1]), 5).tolist() == [2, 0, 3, 0]
    assert experts_of(torch.tensor([1, 0, 2]), 4).flatten().tolist() == [0, 2, 2, -1]
