"""Column- and row-parallel linear functions against autograd of the unsharded ones in float64."""

from __future__ import annotations

import doctest
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import interlace
from interlace.nn import (
    DeferredWeightGradients,
    column_parallel_linear,
    linear_function,
    linear_gradients,
    row_parallel_linear,
    weight_gradients,
)
from tests.support import failure, noise

IN, BATCH, SHARD = 6, 2, 3
OUT = (4, 2, 5)  # columns of one rank, per weight


def shape_of(dims: int, dim: int, length: int, width: int) -> list[int]:
    """Of activations: 2-D, or 3-D with the sequence at ``dim``."""
    shape = [length, BATCH] if dims == 3 else [length]
    return [*(reversed(shape) if dim else shape), width]


def close(actual: Any, expected: torch.Tensor, terms: int) -> None:
    """To the rounding of a sum of ``terms`` products of numbers near 1, each of which may be off."""
    assert actual is not None and tuple(actual.shape) == tuple(expected.shape)
    bound = 8 * terms * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=bound, atol=bound)


def column_case(
    dtype: torch.dtype, dims: int, dim: int, count: int, biased: bool, sharded: bool
) -> None:
    """Runs on every rank: output and gradients, against one process that has everything."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    whole = noise(0, 1, shape_of(dims, dim, SHARD * size, IN), dtype)
    all_weights = [noise(0, 2 + i, (size * OUT[i], IN), dtype) for i in range(count)]
    all_biases = [
        noise(0, 6 + i, (size * OUT[i],), dtype) if biased else None for i in range(count)
    ]
    factors = [
        noise(0, 9 + i, shape_of(dims, dim, SHARD * size, size * OUT[i]), dtype)
        for i in range(count)
    ]

    leaves = [t.to(torch.float64, copy=True).requires_grad_() for t in (whole, *all_weights)]
    bias_leaves = [
        None if b is None else b.to(torch.float64, copy=True).requires_grad_() for b in all_biases
    ]
    expected = [
        torch.nn.functional.linear(leaves[0], w, b)
        for w, b in zip(leaves[1:], bias_leaves, strict=True)
    ]
    torch.stack(
        [(y * f.double()).sum() for y, f in zip(expected, factors, strict=True)]
    ).sum().backward()

    def mine(tensor: torch.Tensor, along: int, of: int = rank) -> torch.Tensor:
        return tensor.chunk(size, along)[of].detach().clone()

    x = (mine(whole, dim) if sharded else whole.clone()).requires_grad_()
    ws = [mine(w, 0).requires_grad_() for w in all_weights]
    bs = [None if b is None else mine(b, 0).requires_grad_() for b in all_biases]
    ys = column_parallel_linear(x, ws, bs, group=None, gather_dim=dim, sequence_parallel=sharded)
    for y, e in zip(ys, expected, strict=True):
        close(y.detach(), mine(e, -1), IN)
    torch.stack(
        [(y * mine(f, -1)).sum() for y, f in zip(ys, factors, strict=True)]
    ).sum().backward()
    of_input = leaves[0].grad
    close(x.grad, mine(of_input, dim) if sharded else of_input, size * sum(OUT[:count]))
    for w, leaf in zip(ws, leaves[1:], strict=True):
        close(w.grad, mine(leaf.grad, 0), SHARD * size * BATCH)
    for b, bias_leaf in zip(bs, bias_leaves, strict=True):
        if b is not None:
            close(b.grad, mine(bias_leaf.grad, 0), SHARD * size * BATCH)


def row_case(dtype: torch.dtype, dims: int, dim: int, biased: bool, sharded: bool) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    whole = noise(0, 1, shape_of(dims, dim, SHARD * size, IN * size), dtype)
    all_weight, bias = noise(0, 2, (OUT[0], IN * size), dtype), noise(0, 3, (OUT[0],), dtype)
    factor = noise(0, 4, shape_of(dims, dim, SHARD * size, OUT[0]), dtype)
    leaves = [t.to(torch.float64, copy=True).requires_grad_() for t in (whole, all_weight, bias)]
    expected = torch.nn.functional.linear(leaves[0], leaves[1], leaves[2] if biased else None)
    (expected * factor.double()).sum().backward()

    x = whole.chunk(size, -1)[rank].clone().requires_grad_()
    w = all_weight.chunk(size, 1)[rank].clone().requires_grad_()
    b = bias.clone().requires_grad_() if biased else None
    y = row_parallel_linear(x, w, b, group=None, scatter_dim=dim, sequence_parallel=sharded)
    close(y.detach(), expected.chunk(size, dim)[rank] if sharded else expected, IN * size)
    (y * (factor.chunk(size, dim)[rank] if sharded else factor)).sum().backward()
    close(x.grad, leaves[0].grad.chunk(size, -1)[rank], OUT[0])
    close(w.grad, leaves[1].grad.chunk(size, 1)[rank], SHARD * size * BATCH)
    if b is not None:
        close(b.grad, leaves[2].grad, SHARD * size * BATCH)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dims,dim", [(2, 0), (3, 0), (3, 1)])
def test_float64_equals_the_unsharded_layer(size: int, dims: int, dim: int) -> None:
    def case() -> None:
        for sharded in (True, False):
            column_case(torch.float64, dims, dim, 1, False, sharded)
            column_case(torch.float64, dims, dim, 3, True, sharded)
            row_case(torch.float64, dims, dim, True, sharded)
            row_case(torch.float64, dims, dim, False, sharded)

    interlace.run(case, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_dtypes_keep_their_bounds(dtype: torch.dtype) -> None:
    def case() -> None:
        column_case(dtype, 3, 0, 3, True, True)
        row_case(dtype, 3, 1, True, True)
        row_case(dtype, 2, 0, True, False)

    interlace.run(case, 2)
