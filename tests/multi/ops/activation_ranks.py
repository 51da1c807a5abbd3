"""Ranks of test_activations.py. A module of its own, because new processes import it."""

from typing import Any

import torch

import interlace

WORLD = 2


def gathering(rank: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """A shard, two weights and a bias for the first."""
    draw = torch.Generator().manual_seed(rank)
    shared = torch.Generator().manual_seed(9)
    shard = torch.randn(3, 5, generator=draw, dtype=torch.float64).float()
    weights = [torch.randn(5, n, generator=shared) for n in (4, 6)]
    return shard, weights, torch.randn(4, generator=shared)


def reducing(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's slice of activations and of a weight, and the bias of all."""
    draw = torch.Generator().manual_seed(20 + rank)
    shared = torch.Generator().manual_seed(11)
    x, w = torch.randn(4, 5, generator=draw), torch.randn(5, 6, generator=draw)
    return x, w, torch.randn(6, generator=shared)


def gather_gradients(name: str, async_op: bool, return_gathered: bool) -> list[Any]:
    """Outputs and gradients of an all-gather + matmul with an activation on the first of two weights."""
    x, weights, bias = gathering(interlace.get_rank())
    leaves = [each.requires_grad_() for each in (x, *weights, bias)]
    result = interlace.all_gather_matmul(
        x,
        weights,
        bias=[bias, None],
        activation=[name, None],
        async_op=async_op,
        return_gathered=return_gathered,
    )
    if async_op:
        result = result.wait()
    outputs = result[1] if return_gathered else result
    sum((output * (i + 1)).sum() for i, output in enumerate(outputs)).backward()
    return [each.detach() for each in outputs] + [leaf.grad for leaf in leaves]


def reduce_gradients(name: str, scatter: bool) -> list[Any]:
    x, weight, bias = reducing(interlace.get_rank())
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    op = interlace.matmul_reduce_scatter if scatter else interlace.matmul_all_reduce
    output = op(x, weight, bias=bias, activation=name)
    output.sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def refused() -> str:
    x = torch.ones(2, 4, requires_grad=True)
    try:
        interlace.matmul_all_reduce(x, torch.ones(4, 2), activation="softmax")
    except ValueError as error:
        return str(error)
    return "accepted"
