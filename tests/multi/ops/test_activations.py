"""Activations of the fused ops where autograd records: outputs and gradients are torch's."""

from typing import Any

import pytest
import torch

import interlace
from interlace.runtime.numerics.norms import NAMES, activate
from ranks import ranks
from support import noise

WORLD = 2


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def check_gather(name: str, async_op: bool, return_gathered: bool) -> None:
    """The first of two weights has an activation and a bias."""
    rank = interlace.get_rank()
    shards = leaves(*[noise(each, 1, (3, 5)) for each in range(WORLD)])
    first, second, bias = leaves(noise(9, 2, (5, 4)), noise(9, 3, (5, 6)), noise(9, 4, (4,)))
    mine = leaves(shards[rank].detach(), *[each.detach() for each in (first, second, bias)])
    result: Any = interlace.all_gather_matmul(
        mine[0],
        mine[1:3],
        bias=[mine[3], None],
        activation=[name, None],  # type: ignore[list-item]
        async_op=async_op,
        return_gathered=return_gathered,
    )  # type: ignore[call-overload]
    result = result.wait() if async_op else result
    outputs = result[1] if return_gathered else result
    whole = torch.cat(shards)
    right = [activate(whole @ first + bias, name), whole @ second]
    torch.testing.assert_close(outputs, right)
    (outputs[0].sum() + 2 * outputs[1].sum()).backward()
    # every rank's loss is a sum over all rows, so a shard's gradient has a part of each
    (right[0].sum() + 2 * right[1].sum()).backward()
    assert shards[rank].grad is not None
    torch.testing.assert_close(mine[0].grad, WORLD * shards[rank].grad)
    for each, expected in zip(mine[1:], (first, second, bias), strict=True):
        torch.testing.assert_close(each.grad, expected.grad)


def check_reduce(name: str, op: Any) -> None:
    rank, scatters = interlace.get_rank(), op is interlace.matmul_reduce_scatter
    inputs = leaves(*[noise(each, 5, (4, 5)) for each in range(WORLD)])
    weights = leaves(*[noise(each, 6, (5, 6)) for each in range(WORLD)])
    (bias,) = leaves(noise(9, 7, (6,)))
    x, weight, own_bias = leaves(*[each.detach() for each in (inputs[rank], weights[rank], bias)])
    output = op(x, weight, bias=own_bias, activation=name)
    output.sum().backward()
    total = sum(a @ b for a, b in zip(inputs, weights, strict=True))
    right = activate(total + bias, name)
    losses = 1 if scatters else WORLD  # every rank's loss counts
    (right.sum() * losses).backward()
    torch.testing.assert_close(output, right.chunk(WORLD)[rank] if scatters else right)
    torch.testing.assert_close(x.grad, inputs[rank].grad)
    torch.testing.assert_close(weight.grad, weights[rank].grad)
    interlace.all_reduce(own_bias.grad)
    torch.testing.assert_close(own_bias.grad, bias.grad)


@pytest.mark.parametrize("name", NAMES)
@ranks(WORLD)
def test_outputs_and_gradients(name: str) -> None:
    for choice in (False, True):
        check_gather(name, choice, choice)
    for op in (interlace.matmul_reduce_scatter, interlace.matmul_all_reduce):
        check_reduce(name, op)


@ranks(WORLD)
def test_an_unknown_activation_is_refused_with_gradients_too() -> None:
    x: Any = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(ValueError, match="must be None or one of relu, gelu, gelu_tanh, silu"):
        interlace.matmul_all_reduce(x, torch.ones(4, 2), activation="softmax")  # type: ignore[call-overload]
