"""Cross entropy of logits that are split over ranks: torch's numbers, and misuse."""

import contextlib
import math
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import interlace
from interlace import nn as inn
from interlace.kernels.tiling import split_rows
from interlace.nn import vocabulary
from ranks import ranks

TOKENS, CLASSES, IGNORED = (5, 3), 29, -100
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
BOUNDS = {F64: 1e-13, F32: 1e-5, BF16: 1e-5}


def close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


def compare(
    classes: int = CLASSES, *, dtype: torch.dtype = F64, ignored: bool = True, **options: Any
) -> None:
    """Compare loss and gradient with a reference in float64 of the rounded logits."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(*TOKENS, classes, generator=generator, dtype=F64) * 4).to(dtype)
    target = torch.randint(classes, TOKENS, generator=generator)
    if ignored:
        target[1] = IGNORED
    size = interlace.get_world_size()
    first, count = split_rows(classes, size)[interlace.get_rank()]
    mine = logits.narrow(-1, first, count).clone().requires_grad_()
    whole = logits.double().requires_grad_()
    of_all = {} if classes % size == 0 else {"vocab_size": classes}
    loss = inn.VocabParallelCrossEntropy(**of_all, **options)(mine, target)
    expected = F.cross_entropy(whole.flatten(0, 1), target.flatten(), **options)
    assert loss.dtype == (F64 if dtype == F64 else F32)
    close(loss, expected.view(loss.shape), BOUNDS[dtype])
    probe = torch.randn(loss.shape, generator=torch.Generator().manual_seed(4), dtype=F64)
    (loss * probe).sum().backward()
    (expected * probe.view(expected.shape)).sum().backward()
    assert mine.grad is not None and whole.grad is not None and mine.grad.dtype == dtype
    rounding = 2.0**-8 if dtype == BF16 else BOUNDS[dtype]
    close(mine.grad, whole.grad.narrow(-1, first, count), rounding)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@ranks()
def test_loss_and_gradient(world_size: int) -> None:
    for smoothing in (0.0, 0.1):
        compare(12, reduction="sum", label_smoothing=smoothing)
        compare(reduction="mean", label_smoothing=smoothing)
        compare(reduction="none", ignored=False, label_smoothing=smoothing)


@ranks()
def test_other_dtypes_and_pieces() -> None:
    for dtype in (F32, BF16):
        compare(dtype=dtype, label_smoothing=0.2)
    with mock.patch("interlace.nn.vocabulary.ELEMENTS_AT_ONCE", 40):
        compare(label_smoothing=0.1)


@pytest.mark.parametrize("classes", [1, 5])
@ranks(4)
def test_ranks_without_classes(classes: int) -> None:
    compare(classes, ignored=False)


@ranks()
def test_no_tokens_that_count() -> None:
    logits, target = torch.zeros(2, 3, requires_grad=True), torch.full((2,), IGNORED)
    assert math.isnan(inn.vocab_parallel_cross_entropy(logits, target).item())  # as torch
    total = inn.vocab_parallel_cross_entropy(logits, target, reduction="sum")
    total.backward()
    assert logits.grad is not None and total.item() == logits.grad.abs().sum().item() == 0.0


@ranks()
def test_large_logits() -> None:
    """exp() of these logits overflows in fp32."""
    logits = torch.full((1, 2), 500.0 if interlace.get_rank() else -500.0)
    for target, expected in ((2, math.log(2)), (0, 1000 + math.log(2))):
        loss = inn.vocab_parallel_cross_entropy(logits, torch.tensor([target]))
        assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("step", ["forward", "backward"])
@ranks()
def test_an_error_within_it_ends_it_on_all_ranks(step: str) -> None:
    logits = torch.zeros(*TOKENS, 2, requires_grad=True)
    target = torch.zeros(TOKENS, dtype=torch.int64)
    failing: Any = contextlib.nullcontext()
    if interlace.get_rank() == 1:
        full = mock.Mock(side_effect=RuntimeError("memory is full"))
        failing = mock.patch.object(vocabulary, "_pieces", full)
    loss = inn.vocab_parallel_cross_entropy(logits, target) if step == "backward" else None
    with pytest.raises(Exception, match=r"memory is full.*") as caught:
        with failing:
            if loss is None:
                inn.vocab_parallel_cross_entropy(logits, target)
            else:
                loss.backward()
        interlace.barrier()
    assert interlace.get_rank() or (caught.type is ValueError and "rank 1" in str(caught.value))


TARGET = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    "wrong, kind, text",
    [
        (
            {"target": TARGET[:3]}, ValueError,
            "target must have shape (4,) for logits of shape (4, 3), got (3,)",
        ),
        ({"target": TARGET + 6}, ValueError, "target must be within 0..5, got 6"),
        ({"target": TARGET.float()}, TypeError, "target must be an int64 tensor, got torch.float32"),
        ({"reduction": "average"}, ValueError, "reduction must be one of"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be within 0..1, got 1.5"),
        ({"vocab_size": 4}, ValueError, "logits must have 2 of vocab_size 4 classes, got 3"),
    ],
)  # fmt: skip
@ranks()
def test_misuse_on_one_rank_is_refused_on_all(wrong: Any, kind: Any, text: str) -> None:
    given = {"target": TARGET, **(wrong if interlace.get_rank() == 1 else {})}
    with pytest.raises(kind, match=re.escape(text)):
        inn.vocab_parallel_cross_entropy(torch.zeros(4, 3), **given)
