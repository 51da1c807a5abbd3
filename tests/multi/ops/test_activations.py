"""Activations of the fused ops where autograd records: outputs and gradients are torch's."""

from typing import Any

import pytest
import torch

import interlace
from interlace.runtime.numerics.activations import NAMES, activate
from multi.ops import activation_ranks as ranks


def leaf(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("async_op", "return_gathered"), [(False, False), (True, True)])
def test_gather(name: str, async_op: bool, return_gathered: bool) -> None:
    found = interlace.run(
        ranks.gather_gradients, ranks.WORLD, name, async_op, return_gathered, place="shm"
    )
    shards = leaf(*(ranks.gathering(rank)[0] for rank in range(ranks.WORLD)))
    for rank, (first, second, *gradients) in enumerate(found):
        _, weights, bias = ranks.gathering(rank)
        own = leaf(*weights, bias)
        whole = torch.cat(shards)
        outputs = [activate(whole @ own[0] + own[2], name), whole @ own[1]]
        torch.testing.assert_close(first, outputs[0].detach())
        torch.testing.assert_close(second, outputs[1].detach())
        # every rank's loss is a sum over all rows, so a shard's gradient has a part of each
        (outputs[0].sum() + 2 * outputs[1].sum()).backward()
        for mine, expected in zip(gradients[1:], own, strict=True):
            torch.testing.assert_close(mine, expected.grad)
    for rank, (*_, of_shard, _, _, _) in enumerate(found):
        torch.testing.assert_close(of_shard, shards[rank].grad)


@pytest.mark.parametrize("scatter", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_reduce(name: str, scatter: bool) -> None:
    found = interlace.run(ranks.reduce_gradients, ranks.WORLD, name, scatter, place="shm")
    given: Any = [ranks.reducing(rank) for rank in range(ranks.WORLD)]
    inputs, weights = leaf(*(g[0] for g in given)), leaf(*(g[1] for g in given))
    (bias,) = leaf(given[0][2])
    total = sum(x @ w for x, w in zip(inputs, weights, strict=True))
    output = activate(total + bias, name)
    losses = 1 if scatter else ranks.WORLD  # every rank's loss counts
    (output.sum() * losses).backward()
    parts = output.detach().chunk(ranks.WORLD) if scatter else [output.detach()] * ranks.WORLD
    for rank, (mine, of_input, of_weight, _) in enumerate(found):
        torch.testing.assert_close(mine, parts[rank])
        torch.testing.assert_close(of_input, inputs[rank].grad)
        torch.testing.assert_close(of_weight, weights[rank].grad)
    torch.testing.assert_close(sum(result[3] for result in found), bias.grad)


def test_an_unknown_activation_is_refused_with_gradients_too() -> None:
    for text in interlace.run(ranks.refused, ranks.WORLD, place="shm"):
        assert "activation must be None or one of relu, gelu, gelu_tanh, silu" in text
