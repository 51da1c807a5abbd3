"""Parallel linear functions beside unsharded ones in float64, and fused products; run on every rank."""

from typing import Any

import torch

import interlace
from interlace.nn import column_parallel_linear, row_parallel_linear
from support import noise

IN, BATCH, SHARD = 6, 2, 3
OUT = (4, 2, 5)  # columns of one rank, per weight


def shape_of(dims: int, dim: int, length: int, width: int) -> list[int]:
    """The shape of activations: 2-D, or 3-D with the sequence at ``dim``."""
    shape = [length, BATCH] if dims == 3 else [length]
    return [*(reversed(shape) if dim else shape), width]


def close(actual: Any, expected: torch.Tensor, terms: int) -> None:
    """Compare to the rounding of a sum of ``terms`` products of numbers near 1."""
    assert actual is not None and tuple(actual.shape) == tuple(expected.shape)
    bound = 8 * terms * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=bound, atol=bound)


def column_case(
    dtype: torch.dtype, dims: int, dim: int, count: int, biased: bool, sharded: bool
) -> None:
    """Compare output and gradients on every rank with one process that has everything."""
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


def side_by_side() -> None:
    """Two layers whose backwards do not depend on each other."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    x = noise(rank, 1, (SHARD, IN)).requires_grad_()
    w, v = (noise(rank, 2 + i, (OUT[i], IN)).requires_grad_() for i in range(2))
    (left,) = column_parallel_linear(x, [w], group=None)
    (right,) = column_parallel_linear(x, [v], group=None)
    (left.sum() + right.sum()).backward()
    y = x.detach().clone().requires_grad_()
    together = column_parallel_linear(y, [w.detach(), v.detach()], group=None)
    torch.stack([each.sum() for each in together]).sum().backward()
    assert x.grad is not None and y.grad is not None
    close(x.grad, y.grad, size * sum(OUT[:2]))
    assert w.grad is not None and v.grad is not None
    assert torch.equal(w.grad[0], v.grad[0])  # both are the sum of all tokens


def autocast() -> None:
    """Operands are cast to bf16, and gradients have the dtypes of their tensors."""
    rank = interlace.get_rank()
    x = noise(rank, 1, (2 * SHARD, IN)).requires_grad_()
    w, v = noise(rank, 2, (OUT[0], IN)), noise(rank, 3, (OUT[0], OUT[0]))
    w.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (middle,) = column_parallel_linear(x, [w], group=None)
        y = row_parallel_linear(middle, v, group=None)
        assert middle.dtype == y.dtype == torch.bfloat16
    own = [t.detach().bfloat16().requires_grad_() for t in (x, w)]
    (again,) = column_parallel_linear(own[0], [own[1]], group=None)
    assert torch.equal(middle, again)
    y.float().sum().backward()
    row_parallel_linear(again, v.bfloat16(), group=None).float().sum().backward()
    for leaf, low in zip((x, w), own, strict=True):
        assert leaf.grad is not None and low.grad is not None
        assert leaf.grad.dtype == torch.float32 and torch.equal(leaf.grad, low.grad.float())


def products(warp_roles: bool, transposed: bool, tile: dict[str, int]) -> list[torch.Tensor]:
    """No tile divides the rows, and there are more tiles than programs."""
    torch.manual_seed(interlace.get_rank())
    device, found = interlace.device(), []
    for rows, inner, columns in ((300, 4096, 512), (2048, 1040, 4112), (1, 64, 256)):
        x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
        w = torch.randn(columns, inner, device=device, dtype=torch.bfloat16).T
        w = w if transposed else w.contiguous()
        with interlace.configured(warp_roles=warp_roles, copiers=0, chunks=2, **tile):
            for op in (interlace.all_gather_matmul, interlace.matmul_reduce_scatter):
                found += [op(x, w, algorithm="fused") for _ in range(3)]
    return [each.cpu() for each in found]
