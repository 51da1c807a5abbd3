"""Gradients of matmuls in a block-scaled format, against their definition in plain torch, bit by bit."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import interlace
from interlace import functional
from interlace.ops.matmul.formats import FORMATS, quantize
from tiers import few

Tensor = torch.Tensor
INNER, COLUMNS, BATCH = 160, (18, 34), 2
SHARDS = (5, 40, 0, 3)
"""Rows of each rank's shard: more than one block of 32 with ``BATCH``, fewer, and none."""
PLAIN = ("mxfp8", "fp8_block128")
"""Formats of training, that are written anew below."""


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- the definition ------------------------------------------------------------------------------------


def in_blocks(x: Tensor, name: str, across: int) -> tuple[Tensor, Tensor]:
    """Values and their scales, each of the shape of ``x``, for blocks of 32 or of ``across`` x 128."""
    block = 32 if name == "mxfp8" else 128
    rows, columns = x.shape
    scales = torch.empty_like(x)
    for top in range(0, rows, across):
        for left in range(0, columns, block):
            tile = slice(top, top + across), slice(left, left + block)
            scale = x[tile].abs().max() / torch.tensor(448.0)
            if name == "mxfp8":
                fraction, exponent = torch.frexp(scale)
                scale = torch.tensor(2.0) ** (exponent - 1 if fraction == 0.5 else exponent)
            scales[tile] = scale
    return (x / scales).to(torch.float8_e4m3fn).double(), scales


def product(x: Tensor, w: Tensor, name: str, *, weight: bool = False) -> Tensor:
    """``x @ w.T`` of ``(m, k)`` and ``(n, k)``: sums of 128 products, each rounded once, added in float32."""
    across = 128 if weight and name == "fp8_block128" else 1
    (a, of_a), (b, of_b) = in_blocks(x, name, 1), in_blocks(w, name, across)
    total = torch.zeros(len(x), len(w))
    for first in range(0, x.shape[1], 128):
        step = slice(first, first + 128)
        if name == "mxfp8":
            total += ((a * of_a)[:, step] @ (b * of_b)[:, step].T).float()
        else:
            total += (a[:, step] @ b[:, step].T).float() * (of_a[:, first, None] * of_b[:, first])
    return total


def of_rows(left: Sequence[Tensor], right: Sequence[Tensor], name: str) -> Tensor:
    """``left.T @ right`` of the ranks' rows, in blocks along these, which no two ranks share."""
    found = [product(a.T, b.T, name) for a, b in zip(left, right, strict=True) if len(a)]
    return sum(found[1:], found[0])


def summed(parts: Sequence[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])


# -- against it ----------------------------------------------------------------------------------------


def matrix(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, 0).flatten(0, -2)


def close(found: Tensor, left: Tensor, right: Tensor, name: str) -> None:
    """Within the bound of the format of ``left @ right``, in float64: half a step of either factor."""
    a, b = left.double(), right.double()
    step = {"mxfp8": 2.0**-4, "fp8_block128": 2.0**-4, "mxfp8_e5m2": 2.0**-3}.get(name, 0.3125)
    # The second bound of quantize: of numbers that are small beside the largest of their block.
    least = step / 4 if FORMATS[name].packed > 1 else 2.0**-18
    sides = [step * each.abs() + least * each.abs().max() for each in (a, b)]
    bound = sides[0] @ b.abs() + a.abs() @ sides[1] + sides[0] @ sides[1]
    assert torch.all((found.double() - a @ b).abs() <= bound * (1 + 2.0**-20))


def gathers(name: str, dim: int, algorithm: str) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    lengths = SHARDS[:size]
    shape = [(BATCH, n, INNER) if dim else (n, BATCH, INNER) for n in lengths]
    shards = [noise(r, *shape[r]) for r in range(size)]
    every = [[noise(10 * i + r, n, INNER) for i, n in enumerate(COLUMNS)] for r in range(size)]
    x = shards[rank].clone().requires_grad_()
    weights = [w.clone().requires_grad_() for w in every[rank]]
    bias = noise(7, COLUMNS[0]).requires_grad_()
    how: Any = {"gather_dim": dim, "bias": [bias, None], "algorithm": algorithm, "format": name}
    outputs: Any = interlace.all_gather_matmul(x, [w.t() for w in weights], **how)
    of_outputs = [[noise(20 * i + r, *y.shape) for i, y in enumerate(outputs)] for r in range(size)]
    torch.autograd.backward(outputs, of_outputs[rank])
    whole = matrix(torch.cat(shards, dim), dim)
    rows = [matrix(each, dim) for each in shards]
    grads = [torch.cat([matrix(g, dim) for g in grad], 1) for grad in of_outputs]
    joined = [torch.cat(each) for each in every]
    own = [matrix(g, dim) for g in of_outputs[rank]]
    if name in PLAIN:
        for y, w, b in zip(outputs, every[rank], (bias.detach(), 0.0), strict=True):
            assert torch.equal(matrix(y, dim), product(whole, w, name, weight=True) + b)
        of_all = summed(
            [product(g, w.T, name, weight=True) for g, w in zip(grads, joined, strict=True)]
        )
        mine = of_all.split([n * BATCH for n in lengths])[rank]
        assert torch.equal(matrix(x.grad, dim), mine)  # type: ignore[arg-type]
        for w, g in zip(weights, own, strict=True):
            parts = g.split([n * BATCH for n in lengths])
            assert torch.equal(w.grad.T, of_rows(rows, parts, name))  # type: ignore[union-attr]
    of_bias = of_outputs[rank][0].flatten(0, -2).sum(0)
    assert torch.equal(bias.grad, of_bias)  # type: ignore[arg-type]
    for w, g in zip(weights, own, strict=True):
        close(w.grad.T, whole.T, g, name)  # type: ignore[union-attr]


def scatters(name: str, algorithm: str) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    rows = 40 * size - 3  # the last part is shorter
    inputs = [noise(r, rows, BATCH, INNER) for r in range(size)]
    weights = [noise(10 + r, COLUMNS[0], INNER) for r in range(size)]
    x, w = inputs[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
    products = [matrix(x, 0) for x in inputs]
    for op, whole in (
        (interlace.matmul_reduce_scatter, False),
        (interlace.matmul_all_reduce, True),
    ):
        for reduce_op in ("sum", "avg"):
            x.grad = w.grad = None
            how: Any = {"reduce_op": reduce_op, "algorithm": algorithm, "format": name}
            y: Any = op(x, w.t(), **how)
            grad = noise(30, rows, BATCH, COLUMNS[0])
            # every rank has a loss of its rows, or each the same share of all
            (y * (grad if whole else grad.chunk(size)[rank])).sum().backward()
            grad = grad * (size if whole else 1) / (size if reduce_op == "avg" else 1)
            of_product = matrix(grad, 0)
            if name in PLAIN:
                pairs = zip(products, weights, strict=True)
                total = summed([product(a, b, name, weight=True) for a, b in pairs])
                total = total / size if reduce_op == "avg" else total
                total = total.view(rows, BATCH, -1)
                assert torch.equal(y, total if whole else total.chunk(size)[rank])
                found = product(of_product, weights[rank].T, name, weight=True)
                assert torch.equal(matrix(x.grad, 0), found)  # type: ignore[arg-type]
                parts = 1 if whole else size
                sides = [[matrix(p, 0) for p in t.chunk(parts)] for t in (inputs[rank], grad)]
                assert torch.equal(w.grad.T, of_rows(*sides, name))  # type: ignore[union-attr]
            close(matrix(x.grad, 0), of_product, weights[rank], name)  # type: ignore[arg-type]
            close(w.grad.T, products[rank].T, of_product, name)  # type: ignore[union-attr]


@pytest.mark.parametrize("algorithm", ["fused", "pipelined", "unfused"])
@pytest.mark.parametrize("name", PLAIN)
def test_products_are_as_defined(name: str, algorithm: str) -> None:
    interlace.run(gathers, 3, name, 0, algorithm)
    interlace.run(scatters, 2, name, algorithm)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ranks", few((1, 2, 4), 2))
def test_gradients_are_within_the_bound_of_the_format(name: str, ranks: int) -> None:
    interlace.run(gathers, ranks, name, 1, "auto")
    interlace.run(scatters, ranks, name, "auto")
