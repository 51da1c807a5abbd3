"""Handles of dispatches: if ranks use handles of different dispatches, all ranks raise."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace import experts, functional
from interlace.groups.groups import default_group
from interlace.ops.experts.routing import MOST_BACK
from ranks import ranks
from sim.api.refusals import check_refused
from stand_ins import fake_host
from stand_ins.fake_cuda import FakeGpu
from stand_ins.fake_driver import install

CHOSEN = torch.tensor([[0, 1], [1, -1]])
OTHERS = CHOSEN.flip(1)  # equal shapes
TEXT = "the dispatch of the handle, counted back, differs between ranks: 0 on rank 0, 1 on rank 1"


def dispatched(chosen: torch.Tensor, bound: int | None = 2) -> Any:
    given: Any = {"num_max_dispatch_tokens_per_rank": bound}
    return experts.dispatch(torch.ones(2, 4), chosen, None, 2, **given)


def combined(pair: Any, recorded: bool = False) -> Any:
    return experts.combine(pair[0].x.requires_grad_(recorded), pair[1])


def multiplied(pair: Any, recorded: bool = False) -> Any:
    weight = torch.eye(4)[None].requires_grad_(recorded)
    return interlace.grouped_matmul_combine(pair[0].x, weight, pair[1])


@pytest.mark.parametrize("bound", [None, 2])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("op", [combined, multiplied])
@ranks(2, place="sim")
def test_handles_of_different_dispatches_are_an_error_on_all(
    op: Any, recorded: bool, bound: int | None
) -> None:
    pairs = [dispatched(chosen, bound) for chosen in (CHOSEN, OTHERS)]
    assert op(pairs[1], recorded)[:, 0].tolist() == [2.0, 1.0]
    with pytest.raises(ValueError, match=TEXT):
        op(pairs[0 if interlace.get_rank() else 1], recorded)
    assert op(pairs[0], recorded)[:, 0].tolist() == [2.0, 1.0]


@ranks(2, place="sim")
def test_those_of_a_grouped_matmul_count_too() -> None:
    given: Any = torch.ones(2, 4), torch.eye(4)[None], torch.tensor([1, 1])
    made: Any = [
        interlace.all_to_all_grouped_matmul(*given, num_max_rows_per_rank=2) for _ in range(2)
    ]
    with pytest.raises(ValueError, match=TEXT):
        experts.combine(*made[0 if interlace.get_rank() else 1])


@ranks(2, place="sim")
def test_one_that_was_refused_counts_on_all() -> None:
    """Otherwise the ranks that refused it would be one dispatch behind."""
    pair, rank = dispatched(CHOSEN), interlace.get_rank()
    for how in ({}, {"async_op": True}):
        with pytest.raises(ValueError, match="topk_idx has 2 rows, x has 3"):
            work: Any = experts.dispatch(torch.ones(3 if rank else 2, 4), CHOSEN, None, 2, **how)
            work.wait()
    given: Any = torch.ones(2, 4), torch.eye(4)[None], torch.tensor([1, 1])
    for wrong in (0, None):
        bound: Any = {"num_max_rows_per_rank": wrong if rank else 2}
        with pytest.raises(ValueError, match="num_max_rows_per_rank"):
            interlace.all_to_all_grouped_matmul(*given, **bound)
    assert combined(pair)[:, 0].tolist() == [2.0, 1.0]


@ranks(2, place="sim")
def test_who_has_a_functional_handle_says_nothing_and_is_not_told() -> None:
    """A compiled graph has such handles, and ranks may have compiled different graphs."""
    there = functional if interlace.get_rank() else experts
    pair = there.dispatch(torch.ones(2, 4), CHOSEN, None, 2)
    assert (multiplied(pair) + combined(pair))[:, 0].tolist() == [4.0, 2.0]


@ranks(3, place="sim")
def test_who_says_nothing_hides_no_difference_of_others() -> None:
    rank, given = interlace.get_rank(), (torch.ones(2, 4), torch.tensor([[0], [1]]), None, 3)
    pairs = [experts.dispatch(*given) for _ in range(2)]
    last = (experts if rank else functional).dispatch(*given)
    said = "counted back, differs between ranks: 2 on rank 1, 1 on rank 2"
    with pytest.raises(ValueError, match=said):
        combined([last, *pairs][rank])


@pytest.mark.parametrize("op", [experts.combine, interlace.grouped_matmul_combine])
@ranks(2, place="sim")
def test_another_group_than_the_handles_is_refused(op: Any) -> None:
    rank = interlace.get_rank()
    alone = [interlace.new_group([each]) for each in range(2)][rank]
    received, handle = dispatched(CHOSEN)
    weight = () if op is experts.combine else (torch.eye(4)[None],)
    with pytest.raises(
        ValueError, match=r"group has ranks \[1\], the handle's group has \[0, 1\]"
    ) as caught:
        op(received.x, *weight, handle, group=alone if rank else None)
    assert "rank 1" in str(caught.value)


@ranks(2, place="sim")
def test_old_handles_are_no_new_message_each_time() -> None:
    pair, kept = dispatched(CHOSEN), []
    for _ in range(MOST_BACK + 3):
        combined(pair)
        kept.append(len(default_group().calls))
        dispatched(CHOSEN)
    new = [after - before for before, after in itertools.pairwise(kept)]
    assert new == [1] * MOST_BACK + [0, 0]


@pytest.mark.parametrize("swapped", [True, False], ids=["", "control"])
def test_processes_on_gpus_are_told_though_nobody_waited(
    swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both calls were made earlier and are plans."""
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
    "topk_idx of token 0 is [1, 0], in the dispatch it was [0, 1]": OTHERS,
    "topk_idx has shape (1, 2), the dispatch's (2, 2)": CHOSEN[:1],
    "TypeError: topk_idx must be a tensor, got NoneType": None,
}


@pytest.mark.parametrize("text", CHANGED)
@ranks(2, place="sim")
def test_low_latency_refuses_another_choice_than_the_dispatchs(text: str) -> None:
    received, handle = experts.low_latency_dispatch(torch.ones(2, 4), CHOSEN, 2, 2, use_fp8=False)
    right = {
        "y": received.x,
        "topk_idx": CHOSEN,
        "topk_weights": torch.ones(2, 2),
        "handle": handle,
    }
    check_refused(experts.low_latency_combine, right, {"topk_idx": CHANGED[text]}, text)


RESHAPED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda rows: rows[:, :-1],  # an expert's last row is missing
    lambda rows: rows.transpose(0, 1),
    lambda rows: torch.cat([rows, rows], 1),
    lambda rows: torch.cat([rows, rows]),
    lambda rows: rows[:1],
    lambda rows: rows.flatten(0, 1),
]


def by_rows(op: str, rows: torch.Tensor, handle: Any) -> Any:
    """The op on rows of two experts; ``handle`` has the weights of the tokens."""
    there: Any = functional if "functional" in op else interlace
    if op == "low_latency_combine":
        return experts.low_latency_combine(rows, handle.topk_idx, handle.topk_weights, handle)
    if op.endswith("matmul_combine"):
        return there.grouped_matmul_combine(rows, torch.eye(4).repeat(2, 1, 1), handle)
    return (functional if there is functional else experts).combine(rows, handle)


@pytest.mark.parametrize(
    "op",
    [
        "low_latency_combine", "combine", "functional.combine", "grouped_matmul_combine",
        "functional.grouped_matmul_combine",
    ],
)  # fmt: skip
@ranks(2, place="sim")
def test_rows_of_low_latency_have_the_shape_that_they_came_in(op: str) -> None:
    rank = interlace.get_rank()
    given: Any = torch.full((2, 4), 1.0 + rank), torch.tensor([[0, 1], [2, 3]]), 2, 4
    received, handle = experts.low_latency_dispatch(*given, use_fp8=False)
    handle = handle._replace(topk_weights=torch.ones(2, 2))
    rows = received.x * torch.tensor([1.0, 10.0])[:, None, None]
    for wrong in RESHAPED:
        with pytest.raises(ValueError) as error:
            by_rows(op, wrong(rows) if rank else rows, handle)
        shape = tuple(wrong(rows).shape)
        said = f"has shape {shape}, rows of this low-latency dispatch have (2, 4, n)"
        assert said in str(error.value) and "rank 1" in str(error.value)
    assert by_rows(op, rows, handle)[:, 0].tolist() == [11.0 * (1 + rank)] * 2
