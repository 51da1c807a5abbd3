"""Parallel linear functions beside unsharded ones in float64, and fused products; run on every rank."""

from typing import Any

import torch

import interlace
from interlace.nn import column_parallel_linear, row_parallel_linear
from support import noise

IN, BATCH, SHARD = 6, 2, 3
OUT = (4, 2, 5)  # columns of one rank, per weight


def close(actual: Any, expected: torch.Tensor, terms: int) -> None:
    """Compare to the rounding of a sum of ``terms`` products of numbers near 1."""
    assert actual is not None and tuple(actual.shape) == tuple(expected.shape)
    bound = 8 * terms * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=bound, atol=bound)


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
