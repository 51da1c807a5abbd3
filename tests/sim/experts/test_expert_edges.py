"""Edges of dispatch and combine: no tokens, no slots, odd numbers and arguments."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import interlace
from interlace import experts, functional
from ranks import ranks
from support import failure

ALGORITHMS = ("fused", "pipelined", "unfused")
NAN = float("nan")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@ranks(2, place="sim")
def test_a_rank_without_tokens_sends_fp8(algorithm: Any) -> None:
    tokens = 2 * interlace.get_rank()
    x, idx = torch.ones(tokens, 128), torch.zeros(tokens, 1, dtype=torch.int64)
    received, _ = experts.low_latency_dispatch(x, idx, 2, 2, algorithm=algorithm)
    back = experts.dequantize(received.x, received.scales, torch.float32)
    assert received.num_tokens_per_expert.tolist() == [0 if interlace.get_rank() else 2]
    assert interlace.get_rank() or back[0, :2].sum().item() == pytest.approx(256)
    assert tuple(experts.quantize(torch.ones(0, 256))[1].shape) == (0, 2)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@ranks(2, place="sim")
def test_the_weight_of_a_slot_without_a_row_is_not_looked_at(algorithm: Any) -> None:
    """It has no expert, or its expert is full."""
    idx = torch.tensor([[0, -1], [-1, -1], [0, 1]])
    weights = torch.tensor([[2.0, NAN], [NAN, torch.inf], [NAN, 3.0]])
    how: Any = {"capacity": 1, "algorithm": algorithm}
    received, handle = experts.dispatch(torch.ones(3, 2), idx, weights, 2, **how)
    made = experts.combine(received.x, handle, algorithm=algorithm)
    assert made.tolist() == [[2.0, 2.0], [0.0, 0.0], [3.0, 3.0]]


def test_permute_knows_its_experts() -> None:
    for wrong in (2, -2):
        with pytest.raises(ValueError, match=f"topk_idx has .*{wrong}"):
            experts.permute(torch.ones(2, 4), torch.tensor([[0, 1], [1, wrong]]), 2)
    rows, splits = experts.permute(torch.ones(2, 4), torch.tensor([[0, 1], [1, -1]]), 2)
    assert rows.shape[0] == 3 and splits.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
@ranks(2, place="sim")
def test_experts_may_be_integers_of_any_width(dtype: Any) -> None:
    given = torch.full((1, 2), 2.0), torch.tensor([[1, 0]], dtype=dtype), None, np.int64(2)
    received, handle = experts.dispatch(*given)
    assert experts.combine(received.x, handle).tolist() == [[4.0, 4.0]]


def test_products_whose_counts_stay_on_the_device() -> None:
    """As those of the host's counts, with their gradients: torch's grouped matmul runs here, too."""
    called: list[int] = []

    def grouped(*tensors: torch.Tensor) -> bool:
        called.append(len(tensors))
        return True

    def on_rank() -> list[torch.Tensor]:
        torch.manual_seed(interlace.get_rank())
        made = [torch.randn(each) for each in ((5, 16), (2, 16, 8), (2, 8, 16), (2, 16), (5, 2))]
        x, up, down, bias = (each.bfloat16().requires_grad_() for each in made[:4])
        weights = made[4].requires_grad_()
        idx = torch.tensor([[0, 3], [1, -1], [-1, -1], [3, 2], [0, 1]])
        received, handle = experts.dispatch(x, idx, weights, 4, num_max_dispatch_tokens_per_rank=6)
        hidden = experts.multiply(received, up).relu()
        y = interlace.grouped_matmul_combine(hidden, down, handle, bias=bias)
        y.float().square().sum().backward()
        return [y.detach(), *(each.grad for each in (x, up, down, bias, weights))]  # type: ignore[misc]

    expected = interlace.run(on_rank, 2)
    with mock.patch("interlace.ops.experts.products.grouped_on_device", grouped):
        found = interlace.run(on_rank, 2)
    assert sorted(called) == [2, 2, 3, 3]
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one, other, strict=True):
            # sums of bf16 in another order
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * float(a.abs().max()))


@ranks(1, place="sim")
def test_multiply_names_what_does_not_fit() -> None:
    received, _ = experts.dispatch(torch.ones(1, 4), torch.tensor([[0]]), None, 1)
    multiply: Any = experts.multiply
    with pytest.raises(ValueError, match=r"weight must have shape \(1, 4, n\)"):
        multiply(received, torch.ones(1, 3, 4))
    with pytest.raises(TypeError, match="received must be what a dispatch has, got Tensor"):
        multiply(received.x, torch.ones(1, 4, 4))
    with pytest.raises(TypeError, match="weight must be a tensor, got list"):
        multiply(received, [])


@pytest.mark.parametrize("name", ["combine", "low_latency_combine", "functional.combine"])
@ranks(2, place="sim")
def test_all_ranks_are_told_of_a_handle_that_is_none(name: str) -> None:
    combined: Any = functional.combine if "." in name else getattr(experts, name)
    x, idx = torch.ones(2, 128), torch.tensor([[0, 1], [1, -1]])
    handle, rank = experts.dispatch(x, idx, None, 2)[1], interlace.get_rank()
    more = [idx, None] if name == "low_latency_combine" else []
    for wrong_ranks in ([0], [0, 1]):
        said = "handle must be that of a dispatch, got NoneType"
        with pytest.raises(TypeError, match=said) as error:
            combined(torch.ones(4, 2), *more, None if rank in wrong_ranks else handle)
        assert f"rank {rank if rank in wrong_ranks else 0}" in str(error.value)


def test_tokens_that_no_dispatch_has_had_are_named() -> None:
    def on_rank() -> None:
        idx = torch.zeros(2, 1, dtype=torch.int64)
        received, handle = experts.dispatch(torch.ones(2, 4), idx, None, 2)
        longer = handle._replace(topk_idx=torch.full((3, 1), -1))
        experts.combine(received.x, longer if interlace.get_rank() else handle)

    assert "topk_idx has 3 rows, no dispatch has had more than 2" in str(failure(on_rank, 2))
