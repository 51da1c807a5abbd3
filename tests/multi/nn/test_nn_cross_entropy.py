"""Cross entropy of logits that are split over ranks: torch's numbers, and misuse."""

import math
from typing import Any

import pytest
import torch

import interlace
from multi.nn import nn_loss_ranks as ranks

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def on_ranks(function: Any, world_size: int, *args: Any) -> list[Any]:
    return interlace.run(function, world_size, *args, place="shm")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient(world_size: int, reduction: str, smoothing: float) -> None:
    options = {"reduction": reduction, "label_smoothing": smoothing}
    even = reduction == "sum"
    on_ranks(ranks.compare, world_size, F64, even, reduction != "none", options)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    on_ranks(ranks.compare, 2, dtype, False, True, {"label_smoothing": 0.2})


def test_rows_are_taken_in_pieces() -> None:
    on_ranks(ranks.in_pieces, 2, {"label_smoothing": 0.1})


def test_no_tokens_that_count() -> None:
    for mean, total, grad in on_ranks(ranks.all_ignored, 2):
        assert math.isnan(mean) and total == grad == 0.0  # as torch


@pytest.mark.parametrize("classes", [1, 5])
def test_ranks_without_classes(classes: int) -> None:
    on_ranks(ranks.of_few_classes, 4, classes)


@pytest.mark.parametrize("step", ["forward", "backward"])
def test_an_error_within_it_ends_it_on_all_ranks(step: str) -> None:
    kind, text = on_ranks(ranks.failing_within, 2, step)[0]
    assert kind == "ValueError" and "memory is full" in text and "rank 1" in text


def test_large_logits() -> None:
    likely, unlikely = math.log(2), 1000 + math.log(2)
    for found in on_ranks(ranks.of_large_logits, 2):
        assert found == pytest.approx([likely, unlikely], rel=1e-6)


@pytest.mark.parametrize(
    "what, expected",
    [
        ("shape", "ValueError: target must have shape (4,) for logits of shape (4, 3), got (3,)"),
        ("class", "ValueError: target must be within 0..5, got 6"),
        ("dtype", "TypeError: target must be of int64, got torch.float32"),
        ("reduction", "ValueError: reduction must be one of"),
        ("smoothing", "ValueError: label_smoothing must be within 0..1, got 1.5"),
        ("vocabulary", "ValueError: logits must have 2 of vocab_size 4 classes, got 3"),
    ],
)
def test_misuse_on_one_rank_is_refused_on_all(what: str, expected: str) -> None:
    kind, text = expected.split(": ", 1)
    for found in on_ranks(ranks.wrong, 2, what):
        assert found.startswith(f"{kind}: ") and text in found
