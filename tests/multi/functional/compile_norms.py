"""Functions of test_compile.py that norm what they have reduced: as vLLM writes it, torch, and by hand."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

import torch_names

Tensor = torch.Tensor
EPS = 0.1


def numbers(*shape: int, seed: int = 0) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count) * (1.3 + seed)).view(shape)


def product(x: Tensor) -> Tensor:
    return funcol.all_reduce(x @ numbers(8, 6), "sum", dist.group.WORLD)


def scattered(x: Tensor, dim: int = 0) -> Tensor:
    if dim and not torch_names.NEWEST:
        x, dim = torch.cat(x.chunk(dist.get_world_size(), dim)), 0
    return torch_names.functional_reduce_scatter(x, "sum", dim, dist.group.WORLD)


def as_vllm(x: Tensor) -> tuple[Tensor, Tensor]:
    """``RMSNorm.forward_native``: the weight is multiplied after the rounding, here of none."""
    h = product(x) + numbers(4, 6, seed=1)
    wide = h.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + EPS)
    return wide.to(h.dtype) * numbers(6, seed=2), h


def by_hand(x: Tensor) -> Tensor:
    """No residual, no weight, the square a product."""
    h = product(x)
    return torch.rsqrt((h * h).mean(-1, True) + EPS) * h


def in_three_dimensions(x: Tensor) -> tuple[Tensor, Tensor]:
    h = numbers(2, 2, 6, seed=1) + product(x).view(2, 2, 6)
    return F.rms_norm(h, (6,), numbers(6, seed=2), EPS), h


def sequence_parallel(x: Tensor) -> tuple[Tensor, Tensor]:
    """As DTensor's layers leave it: a shard is normed, and then gathered for a matmul."""
    size = dist.get_world_size()
    h = scattered(x.repeat(1, size).view(1, 4 * size, 8) @ numbers(8, 6), 1) + numbers(
        1, 4, 6, seed=1
    )
    y = F.layer_norm(h, (6,), numbers(6, seed=2), numbers(6, seed=3), EPS)
    return funcol.all_gather_tensor(y.flatten(0, 1), 0, dist.group.WORLD) @ numbers(6, 5), h


def without_matmul(x: Tensor) -> Tensor:
    return F.rms_norm(funcol.all_reduce(x.sin(), "avg", dist.group.WORLD), (8,), None, EPS)


def statistics_kept(x: Tensor) -> tuple[Tensor, Tensor]:
    h = product(x)
    root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return h * root, root


def other_dimension(x: Tensor) -> Tensor:
    h = product(x)
    return h * torch.rsqrt(h.pow(2).mean(0, keepdim=True) + EPS)


NORMED: dict[str, tuple[Callable[[Tensor], Any], list[tuple[str, int]]]] = {
    "normed as vLLM": (as_vllm, [("matmul_all_reduce_norm", 1)]),
    "normed by hand": (by_hand, [("matmul_all_reduce_norm", 1)]),
    "normed, 3-D": (in_three_dimensions, [("matmul_all_reduce_norm", 1)]),
    "normed shard": (
        sequence_parallel,
        [("matmul_reduce_scatter_norm", 1), ("all_gather_matmul", 1)],
    ),
    "normed without matmul": (without_matmul, [("all_reduce_norm", 0)]),
    "normed, statistics kept": (statistics_kept, [("matmul_all_reduce", 1)]),
    "normed along another dimension": (other_dimension, [("matmul_all_reduce", 1)]),
}
