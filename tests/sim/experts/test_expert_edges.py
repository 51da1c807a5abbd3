"""Edges of dispatch and combine: no tokens, no slots, odd numbers and arguments."""

from typing import Any

import numpy as np
import pytest
import torch

import interlace
from interlace import experts
from support import failure

ALGORITHMS = ("fused", "pipelined", "unfused")
NAN = float("nan")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_without_tokens_sends_fp8(algorithm: Any) -> None:
    def on_rank() -> Any:
        tokens = 2 * interlace.get_rank()
        x, idx = torch.ones(tokens, 128), torch.zeros(tokens, 1, dtype=torch.int64)
        received, _ = experts.low_latency_dispatch(x, idx, 2, 2, algorithm=algorithm)
        back = experts.dequantize(received.x, received.scales, torch.float32)
        empty = experts.quantize(torch.ones(0, 256))
        return received.num_tokens_per_expert.tolist(), back[0, :2].sum().item(), empty[1].shape

    counts, total, shape = interlace.run(on_rank, 2)[0]
    assert counts == [2] and total == pytest.approx(256) and tuple(shape) == (0, 2)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_weight_of_a_slot_without_a_row_is_not_looked_at(algorithm: Any) -> None:
    """It has no expert, or its expert is full."""

    def on_rank() -> list[list[float]]:
        idx = torch.tensor([[0, -1], [-1, -1], [0, 1]])
        weights = torch.tensor([[2.0, NAN], [NAN, torch.inf], [NAN, 3.0]])
        how: Any = {"capacity": 1, "algorithm": algorithm}
        received, handle = experts.dispatch(torch.ones(3, 2), idx, weights, 2, **how)
        return experts.combine(received.x, handle, algorithm=algorithm).tolist()

    assert interlace.run(on_rank, 2) == [[[2.0, 2.0], [0.0, 0.0], [3.0, 3.0]]] * 2


def dispatch_of(idx: torch.Tensor) -> Any:
    return experts.dispatch(torch.ones(2, 4), idx, None, 2)[0].x.shape[0]


def low_latency_of(idx: torch.Tensor) -> Any:
    return experts.low_latency_dispatch(torch.ones(2, 4), idx, 2, 2, use_fp8=False)[0].x.shape[0]


def functional_of(idx: torch.Tensor) -> Any:
    return interlace.functional.dispatch(torch.ones(2, 4), idx, None, 2)[0].x.shape[0]


@pytest.mark.parametrize("op", [dispatch_of, low_latency_of, functional_of])
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("topk_idx has -2", [[0, 1], [1, -2]]),
        ("topk_idx has expert 2, there are 2", [[0, 1], [1, 2]]),
        ("topk_idx names an expert twice for token 1: [1, 1]", [[0, 1], [1, 1]]),
    ],
)
def test_a_choice_of_experts_that_is_none_is_refused(op: Any, text: str, wrong: Any) -> None:
    """On all ranks, which go on; no expert may be said twice."""

    def on_rank() -> tuple[str, int]:
        right = torch.tensor([[0, 1], [-1, -1]])
        with pytest.raises(ValueError) as error:
            op(torch.tensor(wrong) if interlace.get_rank() else right)
        return str(error.value), op(right)

    for said, rows in interlace.run(on_rank, 2):
        assert text in said and "rank 1" in said
        assert rows == (1 if op is low_latency_of else 2)


def test_permute_knows_its_experts() -> None:
    for wrong in (2, -2):
        with pytest.raises(ValueError, match=f"topk_idx has .*{wrong}"):
            experts.permute(torch.ones(2, 4), torch.tensor([[0, 1], [1, wrong]]), 2)
    rows, splits = experts.permute(torch.ones(2, 4), torch.tensor([[0, 1], [1, -1]]), 2)
    assert rows.shape[0] == 3 and splits.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_experts_may_be_integers_of_any_width(dtype: Any) -> None:
    def on_rank() -> Any:
        given = torch.full((1, 2), 2.0), torch.tensor([[1, 0]], dtype=dtype), None, np.int64(2)
        received, handle = experts.dispatch(*given)
        return experts.combine(received.x, handle).tolist()

    assert interlace.run(on_rank, 2) == [[[4.0, 4.0]]] * 2


def test_products_whose_counts_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr("interlace.ops.experts.products.grouped_on_device", grouped)
    found = interlace.run(on_rank, 2)
    assert sorted(called) == [2, 2, 3, 3]
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one, other, strict=True):
            # sums of bf16 in another order
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * float(a.abs().max()))


def test_multiply_names_what_does_not_fit() -> None:
    def on_rank() -> None:
        received, _ = experts.dispatch(torch.ones(1, 4), torch.tensor([[0]]), None, 1)
        with pytest.raises(ValueError, match=r"weight must have shape \(1, 4, n\)"):
            experts.multiply(received, torch.ones(1, 3, 4))
        with pytest.raises(TypeError, match="received must be what a dispatch has, got Tensor"):
            experts.multiply(received.x, torch.ones(1, 4, 4))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="weight must be a tensor, got list"):
            experts.multiply(received, [])  # type: ignore[arg-type]

    interlace.run(on_rank, 1)


def dispatched(**given: Any) -> Any:
    x, idx = torch.ones(2, 128), torch.tensor([[0, 1], [1, -1]])
    return experts.low_latency_dispatch(**{"x": x, "topk_idx": idx, "num_experts": 2} | given)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("use_fp8 must be a bool, got 'no'", {"use_fp8": "no"}),
        ("num_max_dispatch_tokens_per_rank differs", {"num_max_dispatch_tokens_per_rank": 3}),
        ("num_max_dispatch_tokens_per_rank is 1", {"num_max_dispatch_tokens_per_rank": 1}),
        (
            "x must be a tensor or a pair (values, scales), got 3",
            {"x": (torch.ones(2, 128),) * 3, "use_fp8": False},
        ),
    ],
)
def test_misuse_of_low_latency_is_named(text: str, given: dict[str, Any]) -> None:
    def on_rank() -> None:
        dispatched(
            **{"num_max_dispatch_tokens_per_rank": 2} | (given if interlace.get_rank() else {})
        )

    assert text in str(failure(on_rank, 2))


@pytest.mark.parametrize(
    "combined", [experts.combine, experts.low_latency_combine, interlace.functional.combine]
)
def test_all_ranks_are_told_of_a_handle_that_is_none(combined: Any) -> None:
    low = combined is experts.low_latency_combine

    def on_rank() -> list[Any]:
        x, idx = torch.ones(2, 128), torch.tensor([[0, 1], [1, -1]])
        handle = experts.dispatch(x, idx, None, 2)[1]
        more = [idx, None] if low else []
        texts = []
        for given in (handle if interlace.get_rank() else None, None):
            with pytest.raises(TypeError) as error:
                combined(torch.ones(4, 2), *more, given)
            texts.append(str(error.value))
        return texts

    for texts in interlace.run(on_rank, 2):
        assert all("handle must be that of a dispatch, got NoneType" in text for text in texts)
        assert "rank 0" in texts[0]


def test_tokens_that_no_dispatch_has_had_are_named() -> None:
    def on_rank() -> None:
        idx = torch.zeros(2, 1, dtype=torch.int64)
        received, handle = experts.dispatch(torch.ones(2, 4), idx, None, 2)
        longer = handle._replace(topk_idx=torch.full((3, 1), -1))
        experts.combine(received.x, longer if interlace.get_rank() else handle)

    assert "topk_idx has 3 rows, no dispatch has had more than 2" in str(failure(on_rank, 2))
