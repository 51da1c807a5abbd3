"""Calls in flight that are recorded: their backwards run in the order of the calls, as waits need not."""

from typing import Any

import pytest
import torch

import interlace


def gradients(flip: bool, activation: Any) -> list[torch.Tensor]:
    rank = interlace.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tensors = [
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((4, 3), (3, 5), (4, 3), (3, 5))
    ]
    x, w, y, v = tensors
    how: Any = {"async_op": True, "activation": activation}
    first, second = (
        interlace.matmul_reduce_scatter(x, w, **how),
        interlace.matmul_reduce_scatter(y, v, **how),
    )
    if flip and rank:
        of_second, of_first = second.wait(), first.wait()
    else:
        of_first, of_second = first.wait(), second.wait()
    (2 * of_first.sum() + 3 * (of_second**2).sum()).backward()
    return [each.grad for each in tensors]  # type: ignore[misc]


@pytest.mark.parametrize("place", ["sim", "shm"])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_ranks_may_wait_in_any_order(place: str, activation: str | None) -> None:
    alike = interlace.run(gradients, 2, False, activation, place=place)
    other = interlace.run(gradients, 2, True, activation, place=place)
    for mine, right in zip(alike, other, strict=True):
        assert all(map(torch.equal, mine, right))


def test_what_has_changed_before_the_wait_has_no_gradient() -> None:
    def call() -> None:
        x, w = torch.ones(4, 3, requires_grad=True), torch.ones(3, 5, requires_grad=True)
        work = interlace.matmul_all_reduce(x, w, async_op=True)
        if interlace.get_rank():
            with torch.no_grad():
                w.mul_(10)
        product = work.wait()
        with pytest.raises(
            (RuntimeError, ValueError),
            match="modified by an inplace operation between the call and wait",
        ):
            product.sum().backward()

    interlace.run(call, 2)


def by_future() -> torch.Tensor:
    x, w = torch.ones(4, 3, requires_grad=True), torch.ones(3, 5)
    work: Any = interlace.matmul_all_reduce(x, w, async_op=True)
    work.get_future().wait().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("place", ["sim", "shm"])
def test_a_future_has_the_recorded_result(place: str) -> None:
    for found in interlace.run(by_future, 2, place=place):
        assert torch.equal(found, torch.full((4, 3), 10.0))


class OwnParameter(torch.nn.Parameter):
    """A parameter with attributes of its layer."""


def with_own_parameter() -> tuple[torch.Size, bool]:
    shard = torch.ones(2 + interlace.get_rank(), 3, requires_grad=True)
    weight = OwnParameter(torch.ones(3, 5))
    product: Any = interlace.all_gather_matmul(shard, weight)
    product.sum().backward()
    assert weight.grad is not None
    return product.shape, bool((weight.grad == 5.0).all())


@pytest.mark.parametrize("place", ["sim", "shm"])
def test_classes_of_parameters_may_have_uneven_shards(place: str) -> None:
    assert interlace.run(with_own_parameter, 2, place=place) == [(torch.Size([5, 5]), True)] * 2
