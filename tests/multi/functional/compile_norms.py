"""Functions of test_compile.py that norm what they have reduced: as vLLM writes it, torch, and by hand.

Those of TRAINED take gradients: their forwards save statistics of the norm.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

import torch_names
from interlace import functional
from multi.process_group.backend_ranks import world

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


def behind_a_bias(x: Tensor) -> tuple[Tensor, Tensor]:
    """As Megatron: a bias that the layer leaves to be added with the residual; and one before the sum."""
    reduced = funcol.all_reduce(F.linear(x, numbers(6, 8), numbers(6)), "avg", dist.group.WORLD)
    h = reduced + numbers(6, seed=4) + numbers(4, 6, seed=1)
    rows = funcol.all_reduce(x.sin(), "avg", dist.group.WORLD) + numbers(8, seed=4)
    return F.layer_norm(h, (6,), numbers(6, seed=2), None, EPS), F.rms_norm(rows, (8,), None, EPS)


def gathered_at_once(x: Tensor) -> Tensor:
    """The gather reads the normed rows themselves."""
    y = F.rms_norm(scattered(x @ numbers(8, 6)), (6,), numbers(6, seed=2), EPS)
    return funcol.all_gather_tensor(y, 0, dist.group.WORLD) @ numbers(6, 5)


def without_matmul(x: Tensor) -> Tensor:
    return F.rms_norm(funcol.all_reduce(x.sin(), "avg", dist.group.WORLD), (8,), None, EPS)


def statistics_kept(x: Tensor) -> tuple[Tensor, Tensor]:
    h = product(x)
    root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return h * root, root


def reduced_kept(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of the op there is the sum with the residual, and not that without it."""
    reduced = product(x)
    return F.rms_norm(reduced + numbers(4, 6, seed=1), (6,), None, EPS), reduced


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
    "normed behind a bias": (
        behind_a_bias,
        [("matmul_all_reduce_norm", 1), ("all_reduce_norm", 0)],
    ),
    "normed shard, gathered": (
        gathered_at_once,
        [("matmul_reduce_scatter_norm", 1), ("all_gather_matmul", 1)],
    ),
    "normed without matmul": (without_matmul, [("all_reduce_norm", 0)]),
    "normed, statistics kept": (statistics_kept, [("matmul_all_reduce_norm", 1)]),
    "normed, reduced kept": (reduced_kept, [("matmul_all_reduce", 1)]),
    "normed along another dimension": (other_dimension, [("matmul_all_reduce", 1)]),
}


# -- forwards of which a backward follows --------------------------------------------------------------


def vllm_layers(x: Tensor, residual: Tensor, down: Tensor, up: Tensor, gain: Tensor) -> Any:
    """Two layers; the second one's residual is the first one's."""
    for _ in range(2):
        residual = residual + functional.all_reduce(x @ down, group="0")
        wide = residual.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        x = torch.relu((wide.to(x.dtype) * gain) @ up)
    return x, residual


def torch_layers(x: Tensor, residual: Tensor, down: Tensor, up: Tensor, gain: Tensor) -> Any:
    residual = functional.reduce_scatter(x @ down, "sum", 0, group="0") + residual
    normed = F.layer_norm(residual, (6,), gain, gain.sin(), EPS)
    x = torch.relu(functional.all_gather(normed, 0, group="0") @ up)
    h = functional.all_reduce(x @ down, "avg", group="0")
    return F.rms_norm(h, (6,), gain, EPS) @ up


TRAINED: dict[str, tuple[Callable[..., Any], int, list[str]]] = {
    "as vLLM": (vllm_layers, 1, ["matmul_all_reduce_norm"] * 2),
    "torch's": (
        torch_layers,
        2,
        ["matmul_reduce_scatter_norm", "all_gather_matmul", "matmul_all_reduce_norm"],
    ),
}


def trained(path: str, codegen: str) -> dict[str, tuple[list[str], float]]:
    """What the collectives of the forwards became, and the error of results and gradients."""
    found = {}
    with world(path):
        for name, (function, parts, _) in TRAINED.items():
            rank = dist.get_rank()
            residual = numbers(4, 6).chunk(parts)[rank % parts]  # of an all-reduce the same on all
            given = numbers(4, 8, seed=rank), residual, numbers(8, 6), numbers(6, 8), numbers(6)
            reports: list[Any] = []
            torch._dynamo.reset()
            options = {"codegen": codegen, "on_report": reports.append, "policy": "always"}
            compiled = torch.compile(function, fullgraph=True, backend="interlace", options=options)
            results = []
            for each in (function, compiled):
                leaves = [tensor.clone().requires_grad_() for tensor in given]
                made = each(*leaves)
                outputs = made if isinstance(made, tuple) else (made,)
                torch.autograd.backward(outputs, [output.sin() for output in outputs])
                results.append([*outputs, *(leaf.grad for leaf in leaves)])
            worst = max(float((a - b).detach().abs().max()) for a, b in zip(*results, strict=True))
            forward = next(report for report in reports if report.graph == "forward")
            found[name] = [candidate.op for candidate in forward.fused], worst
    return found
