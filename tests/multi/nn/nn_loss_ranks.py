"""Ranks of test_nn_cross_entropy.py: the loss of split logits against torch's, and misuse."""

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import interlace
from interlace import nn as inn
from interlace.kernels.tiling import split_rows
from interlace.nn import vocabulary

TOKENS, CLASSES, IGNORED = (5, 3), 29, -100


def inputs(dtype: torch.dtype, classes: int, ignored: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(*TOKENS, classes, generator=generator, dtype=torch.float64) * 4).to(dtype)
    target = torch.randint(classes, TOKENS, generator=generator)
    if ignored:
        target[1] = IGNORED
    return logits, target


def compare(dtype: torch.dtype, even: bool, ignored: bool, options: dict[str, Any]) -> None:
    """Loss and gradient; the reference is in float64, of the logits as they were rounded."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    classes = 12 if even else CLASSES
    logits, target = inputs(dtype, classes, ignored)
    first, count = split_rows(classes, size)[rank]
    mine = logits.narrow(-1, first, count).clone().requires_grad_()
    whole = logits.double().requires_grad_()
    vocabulary = {} if even else {"vocab_size": classes}
    loss = inn.VocabParallelCrossEntropy(**vocabulary, **options)(mine, target)
    expected = F.cross_entropy(whole.flatten(0, 1), target.flatten(), **options)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    bounds = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-5}
    close(loss, expected.view(loss.shape), bounds[dtype])
    probe = torch.randn(loss.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (loss * probe).sum().backward()
    (expected * probe.flatten() if probe.dim() else expected * probe).sum().backward()
    assert mine.grad is not None and mine.grad.dtype == dtype
    rounding = 2.0**-8 if dtype == torch.bfloat16 else bounds[dtype]
    close(mine.grad, whole.grad.narrow(-1, first, count), rounding)


def close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


def in_pieces(options: dict[str, Any]) -> None:
    with mock.patch("interlace.nn.vocabulary.ELEMENTS_AT_ONCE", 40):
        compare(torch.float64, False, True, options)


def all_ignored() -> list[float]:
    logits, target = torch.zeros(2, 3, requires_grad=True), torch.full((2,), IGNORED)
    mean = inn.vocab_parallel_cross_entropy(logits, target)
    total = inn.vocab_parallel_cross_entropy(logits, target, reduction="sum")
    total.backward()
    assert logits.grad is not None
    return [mean.item(), total.item(), logits.grad.abs().sum().item()]


def of_large_logits() -> list[float]:
    """exp() of them would overflow in fp32."""
    rank = interlace.get_rank()
    logits = torch.full((1, 2), 500.0 if rank else -500.0)
    return [
        inn.vocab_parallel_cross_entropy(logits, torch.tensor([target])).item() for target in (2, 0)
    ]


def wrong(what: str) -> str:
    """Rank 1 alone does something wrong; what every rank says of it."""
    logits, target = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    options: dict[str, Any] = {}
    if interlace.get_rank() == 1:
        if what == "shape":
            target = target[:3]
        elif what == "class":
            target[2] = 6
        elif what == "dtype":
            target = target.float()
        elif what == "reduction":
            options["reduction"] = "average"
        elif what == "smoothing":
            options["label_smoothing"] = 1.5
        elif what == "vocabulary":
            options["vocab_size"] = 4
    try:
        inn.vocab_parallel_cross_entropy(logits, target, **options)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def of_few_classes(classes: int) -> None:
    """Ranks that have none of the classes."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    whole = torch.randn(
        *TOKENS, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    target = torch.zeros(TOKENS, dtype=torch.int64)
    first, count = split_rows(classes, size)[rank]
    mine = whole.narrow(-1, first, count).clone().requires_grad_()
    loss = inn.vocab_parallel_cross_entropy(mine, target, vocab_size=classes)
    loss.backward()
    whole.requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), target.flatten())
    expected.backward()
    close(loss, expected, 1e-13)
    assert mine.grad is not None and whole.grad is not None
    close(mine.grad, whole.grad.narrow(-1, first, count), 1e-13)


def failing_within(step: str) -> tuple[str, str]:
    """What a rank raises if rank 1 fails in the middle."""
    logits = torch.zeros(*TOKENS, 2, requires_grad=True)
    target = torch.zeros(TOKENS, dtype=torch.int64)

    def full(*_: Any) -> Any:
        raise RuntimeError("memory is full")

    def failing() -> Any:
        there = interlace.get_rank() == 1
        return mock.patch.object(vocabulary, "_pieces", full if there else vocabulary._pieces)

    try:
        with failing() if step == "forward" else contextlib.nullcontext():
            loss = inn.vocab_parallel_cross_entropy(logits, target)
        with failing():
            loss.backward()
        interlace.barrier()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""
