"""Handles of dispatches: ranks that take those of different ones are told, all of them."""

import itertools
from typing import Any

import pytest
import torch

import interlace
from interlace import experts, functional
from interlace.groups.groups import default_group
from interlace.ops.experts.routing import MOST_BACK
from stand_ins import fake_host
from stand_ins.fake_cuda import FakeGpu
from stand_ins.fake_driver import install
from support import failure

CHOSEN = torch.tensor([[0, 1], [1, -1]])
OTHERS = CHOSEN.flip(1)  # of equal shapes
TEXT = "the dispatch of the handle, counted back, differs between ranks: 0 on rank 0, 1 on rank 1"


def dispatched(chosen: torch.Tensor, bound: int | None) -> Any:
    given: Any = {"num_max_dispatch_tokens_per_rank": bound}
    return experts.dispatch(torch.ones(2, 4), chosen, None, 2, **given)


def combined(pair: Any) -> Any:
    return experts.combine(pair[0].x, pair[1])


def with_gradient(pair: Any) -> Any:
    return experts.combine(pair[0].x.requires_grad_(), pair[1])


def multiplied(pair: Any) -> Any:
    return interlace.grouped_matmul_combine(pair[0].x, torch.eye(4)[None], pair[1])


def multiplied_with_gradient(pair: Any) -> Any:
    weight = torch.eye(4)[None].requires_grad_()
    return interlace.grouped_matmul_combine(pair[0].x, weight, pair[1])


OPS = combined, with_gradient, multiplied, multiplied_with_gradient


@pytest.mark.parametrize("bound", [None, 2])
@pytest.mark.parametrize("op", OPS)
def test_handles_of_different_dispatches_are_an_error_on_all(op: Any, bound: int | None) -> None:
    def on_rank() -> list[str]:
        """What each call says; the group goes on."""
        pairs = [dispatched(chosen, bound) for chosen in (CHOSEN, OTHERS)]
        said = []
        for own in (1, 0 if interlace.get_rank() else 1, 0):
            try:
                result = op(pairs[own])
                said.append(str(result[:, 0].tolist()))
            except ValueError as error:
                said.append(str(error))
        return said

    right = "[2.0, 1.0]"
    for first, second, third in interlace.run(on_rank, 2):
        assert (first, third) == (right, right) and TEXT in second


def test_those_of_a_grouped_matmul_count_too() -> None:
    def on_rank() -> None:
        rows, weight = torch.ones(2, 4), torch.eye(4)[None]
        made = [
            interlace.all_to_all_grouped_matmul(
                rows, weight, torch.tensor([1, 1]), num_max_rows_per_rank=2
            )
            for _ in range(2)
        ]
        experts.combine(*made[0 if interlace.get_rank() else 1])

    assert TEXT in str(failure(on_rank, 2))


def test_one_that_was_refused_counts_on_all() -> None:
    """Else the ranks that it was refused by were one behind from then on."""

    def on_rank() -> list[float]:
        pair = dispatched(CHOSEN, 2)
        for how in ({}, {"async_op": True}):
            wrong = torch.ones(3 if interlace.get_rank() else 2, 4)
            with pytest.raises(ValueError, match="topk_idx has 2 rows, x has 3"):
                work: Any = experts.dispatch(wrong, CHOSEN, None, 2, **how)
                work.wait()
        return combined(pair)[:, 0].tolist()  # type: ignore[no-any-return]

    assert interlace.run(on_rank, 2) == [[2.0, 1.0]] * 2


@pytest.mark.parametrize("bound", [0, None])
def test_a_bound_of_rows_that_only_one_rank_has_wrong_counts_too(bound: int | None) -> None:
    def on_rank() -> list[float]:
        pair = dispatched(CHOSEN, 2)
        given: Any = torch.ones(2, 4), torch.eye(4)[None], torch.tensor([1, 1])
        most: Any = bound if interlace.get_rank() else 2
        with pytest.raises(ValueError, match="num_max_rows_per_rank"):
            interlace.all_to_all_grouped_matmul(*given, num_max_rows_per_rank=most)
        return combined(pair)[:, 0].tolist()  # type: ignore[no-any-return]

    assert interlace.run(on_rank, 2) == [[2.0, 1.0]] * 2


def test_who_has_a_functional_handle_says_nothing_and_is_not_told() -> None:
    """As a compiled graph's; ranks may have compiled differently."""

    def on_rank() -> list[float]:
        there = functional if interlace.get_rank() else experts
        received, handle = there.dispatch(torch.ones(2, 4), CHOSEN, None, 2)
        y = interlace.grouped_matmul_combine(received.x, torch.eye(4)[None], handle)
        return (y + experts.combine(received.x, handle))[:, 0].tolist()  # type: ignore[no-any-return]

    assert interlace.run(on_rank, 2) == [[4.0, 2.0]] * 2


def test_who_says_nothing_hides_no_difference_of_others() -> None:
    def on_rank() -> str:
        rank, chosen = interlace.get_rank(), torch.tensor([[0], [1]])
        pairs = [experts.dispatch(torch.ones(2, 4), chosen, None, 3) for _ in range(2)]
        there = experts if rank else functional
        last = there.dispatch(torch.ones(2, 4), chosen, None, 3)
        received, handle = [last, *pairs][rank]
        with pytest.raises(ValueError) as caught:
            experts.combine(received.x, handle)
        return str(caught.value)

    for said in interlace.run(on_rank, 3):
        assert "counted back, differs between ranks: 2 on rank 1, 1 on rank 2" in said


@pytest.mark.parametrize("op", [experts.combine, interlace.grouped_matmul_combine])
def test_another_group_than_the_handles_is_refused(op: Any) -> None:
    def on_rank() -> str:
        alone = [interlace.new_group([rank]) for rank in range(2)][interlace.get_rank()]
        received, handle = dispatched(CHOSEN, 2)
        weight = () if op is experts.combine else (torch.eye(4)[None],)
        with pytest.raises(ValueError) as caught:
            op(received.x, *weight, handle, group=alone if interlace.get_rank() else None)
        return str(caught.value)

    for said in interlace.run(on_rank, 2):
        assert "group has ranks [1], the handle's has [0, 1]" in said and "rank 1" in said


def test_old_handles_are_no_new_message_each_time() -> None:
    def on_rank() -> list[int]:
        pair, kept = dispatched(CHOSEN, 2), []
        for _ in range(MOST_BACK + 3):
            combined(pair)
            kept.append(len(default_group().calls))
            dispatched(CHOSEN, 2)
        return kept

    for kept in interlace.run(on_rank, 2):
        new = [after - before for before, after in itertools.pairwise(kept)]
        assert new == [1] * MOST_BACK + [0, 0]


@pytest.mark.parametrize("swapped", [True, False], ids=["", "control"])
def test_processes_on_gpus_are_told_though_nobody_waited(
    swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what they have noted: both calls were made before, and come from plans."""
    install(monkeypatch, FakeGpu(3))

    def on_rank() -> None:
        plans = default_group().plans
        for number in range(9):
            last, hits = number == 8, plans.hits
            pairs = [dispatched(chosen, 2) for chosen in (CHOSEN, OTHERS)]
            other = swapped and last and interlace.get_rank()
            for own in (1, 0):
                combined(pairs[1 - own if other else own])
            assert not last or plans.hits >= hits + 3
            torch.cuda.synchronize()
        for _ in range(3):
            default_group().barrier()

    if not swapped:
        fake_host.run(on_rank, 2)
        return
    with pytest.raises(ValueError, match="the dispatch of the handle, counted back"):
        fake_host.run(on_rank, 2)


CHANGED = {
    "topk_idx of token 1 is [-1, 1], in the dispatch it was [1, -1]": OTHERS,
    "topk_idx has shape (1, 2), the dispatch's (2, 2)": CHOSEN[:1],
    "topk_idx must be a tensor, got NoneType": None,
}


@pytest.mark.parametrize("text", CHANGED)
def test_low_latency_refuses_another_choice_than_the_dispatchs(text: str) -> None:
    def on_rank() -> None:
        given: Any = torch.ones(2, 4), CHOSEN, 2, 2
        received, handle = experts.low_latency_dispatch(*given, use_fp8=False)
        chosen: Any = CHANGED[text] if interlace.get_rank() else CHOSEN
        experts.low_latency_combine(received.x, chosen, torch.ones(2, 2), handle)

    expected = text.replace(
        "token 1 is [-1, 1], in the dispatch it was [1, -1]", "token 0 is [1, 0]"
    )
    assert expected in str(failure(on_rank, 2))


RESHAPED: dict[str, Any] = {
    "an expert's last row is missing": lambda rows: rows[:, :-1],
    "swapped": lambda rows: rows.transpose(0, 1),
    "too long": lambda rows: torch.cat([rows, rows], 1),
    "too many experts": lambda rows: torch.cat([rows, rows]),
    "too few experts": lambda rows: rows[:1],
    "flat": lambda rows: rows.flatten(0, 1),
}
BY_ROWS: dict[str, Any] = {
    "low_latency_combine": lambda rows, weights, handle: experts.low_latency_combine(
        rows, handle.topk_idx, weights, handle
    ),
    "combine": lambda rows, weights, handle: experts.combine(
        rows, handle._replace(topk_weights=weights)
    ),
    "functional.combine": lambda rows, weights, handle: interlace.functional.combine(
        rows, handle._replace(topk_weights=weights)
    ),
    "grouped_matmul_combine": lambda rows, weights, handle: interlace.grouped_matmul_combine(
        rows, torch.eye(4).repeat(2, 1, 1), handle, topk_weights=weights
    ),
    "functional.grouped_matmul_combine": lambda rows, weights, handle: (
        interlace.functional.grouped_matmul_combine(
            rows, torch.eye(4).repeat(2, 1, 1), handle, topk_weights=weights
        )
    ),
}


@pytest.mark.parametrize("op", BY_ROWS)
def test_rows_of_low_latency_have_the_shape_that_they_came_in(op: str) -> None:
    """Others were read at other experts' places. All ranks are told, and the next call goes on."""

    def on_rank() -> tuple[list[str], list[float]]:
        mine = interlace.get_rank()
        x, weights = torch.full((2, 4), 1.0 + mine), torch.ones(2, 2)
        given: Any = x, torch.tensor([[0, 1], [2, 3]]), 2, 4
        received, handle = experts.low_latency_dispatch(*given, use_fp8=False)
        rows, said = received.x * torch.tensor([1.0, 10.0])[:, None, None], []
        for wrong in RESHAPED.values():
            with pytest.raises(ValueError) as error:
                BY_ROWS[op](wrong(rows) if mine else rows, weights, handle)
            said.append(str(error.value))
        return said, BY_ROWS[op](rows, weights, handle)[:, 0].tolist()

    rows = torch.zeros(2, 4, 4)
    for rank, (said, right) in enumerate(interlace.run(on_rank, 2)):
        for text, wrong in zip(said, RESHAPED.values(), strict=True):
            shape = tuple(wrong(rows).shape)
            assert f"has shape {shape}, rows of this low-latency dispatch have (2, 4, n)" in text
            assert "rank 1" in text
        assert right == [11.0 * (1 + rank)] * 2
