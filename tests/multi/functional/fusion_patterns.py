"""Functions with collectives around matmuls and norms, and what the fusion pass makes of each."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

import interlace.compile
import torch_names
from interlace import functional
from support import SCALES_BY_ROW

Tensor = torch.Tensor
EPS = 0.1
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


def weight(*shape: int, seed: int = 0) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count) * (1.3 + seed)).view(shape)


def gathered(x: Tensor, dim: int = 0) -> Tensor:
    if dim and not torch_names.NEWEST:
        whole = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
        return torch.cat(whole.chunk(dist.get_world_size()), dim)
    return funcol.all_gather_tensor(x, dim, dist.group.WORLD)


def scattered(x: Tensor, dim: int = 0, op: str = "sum") -> Tensor:
    if dim and not torch_names.NEWEST:
        x, dim = torch.cat(x.chunk(dist.get_world_size(), dim)), 0
    return torch_names.functional_reduce_scatter(x, op, dim, dist.group.WORLD)


def total(x: Tensor, op: str = "sum") -> Tensor:
    return funcol.all_reduce(x, op, dist.group.WORLD)


def legacy(x: Tensor) -> Tensor:
    size = dist.get_world_size()
    whole = torch.empty(x.shape[0] * size, x.shape[1])
    dist.all_gather_into_tensor(whole, x)
    hidden = torch.relu(whole @ weight(8, 6)) @ weight(6, 8)
    part = torch.empty(x.shape[0], 8)
    dist.reduce_scatter_tensor(part, hidden)
    return part


def three(x: Tensor) -> Tensor:
    whole = gathered(x)
    return (whole @ weight(8, 6)).sum() + (whole @ weight(8, 5, seed=1)).sum() + whole.sum()


def megatron(x: Tensor) -> Tensor:
    """Other work comes between the start of the gather and its wait."""
    whole = functional.all_gather(x, group="0")
    other = torch.tanh(x) @ weight(8, 6)
    return functional.wait(whole) @ weight(8, 6, seed=1) + other.sum()


def expanded(x: Tensor) -> Tensor:
    batch = x.view(2, 2, 8)
    whole = gathered(batch, 1)
    return torch.bmm(whole, weight(8, 6).expand(2, 8, 6))


def batch_gathered(x: Tensor) -> Tensor:
    """The gathered entries have different weights."""
    whole = gathered(x.view(2, 2, 8), 0)
    return torch.bmm(whole, weight(8, 6 * whole.shape[0]).view(whole.shape[0], 8, 6))


def batch_kept(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = gathered(x.view(2, 2, 8), 1)
    return torch.bmm(whole, weight(16, 6).view(2, 8, 6)), whole * 2


def batch_scattered(x: Tensor) -> Tensor:
    product = torch.bmm(x.view(1, 4, 8).expand(2, 4, 8), weight(16, 6).view(2, 8, 6))
    return scattered(product, 1)


def batch_reshaped(x: Tensor) -> Tensor:
    """The scattered tensor has another batch than the matmul."""
    product = torch.bmm(x.view(2, 2, 8), weight(16, 6).view(2, 8, 6))
    return scattered(product.view(1, 4, 6), 1)


FLOAT8 = torch.float8_e4m3fn
ONE = torch.ones(())


def scaled_mm(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    return torch._scaled_mm(x, w, x_scale, w_scale, out_dtype=torch.bfloat16).float()


def scaled_rows(x: Tensor) -> Tensor:
    shard = torch.cat([x, x], 1)
    scale = shard.abs().amax(1, keepdim=True)
    whole = gathered((shard / scale).to(FLOAT8), 0)
    w = weight(16, 16).to(FLOAT8).t().contiguous().t()
    return scaled_mm(whole, w, gathered(scale, 0), torch.ones(1, 16) * 0.25)


def scaled_scatter(x: Tensor) -> Tensor:
    left = torch.cat([x, x], 1).to(FLOAT8)
    w = weight(16, 16).to(FLOAT8).t().contiguous().t()
    product = torch._scaled_mm(left, w, ONE * 0.5, ONE, out_dtype=torch.bfloat16)
    return scattered(product).float()


def kept(x: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ weight(8, 6)
    return scattered(product), product * 2


def sums(x: Tensor) -> Tensor:
    return scattered(x @ weight(8, 6) + torch.tanh(x)[:, :5] @ weight(5, 6, seed=1), 0)


def chained(x: Tensor) -> Tensor:
    whole = gathered(x)
    first = whole @ weight(8, 8)
    return whole @ (first.t() @ first)


# -- norms of what was reduced


def product(x: Tensor) -> Tensor:
    return total(x @ weight(8, 6))


def as_vllm(x: Tensor) -> tuple[Tensor, Tensor]:
    """``RMSNorm.forward_native``: the weight is multiplied after the rounding."""
    h = product(x) + weight(4, 6, seed=1)
    wide = h.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + EPS)
    return wide.to(h.dtype) * weight(6, seed=2), h


def by_hand(x: Tensor) -> Tensor:
    """The norm has no residual and no weight, and its square is a product."""
    h = product(x)
    return torch.rsqrt((h * h).mean(-1, True) + EPS) * h


def in_three_dimensions(x: Tensor) -> tuple[Tensor, Tensor]:
    h = weight(2, 2, 6, seed=1) + product(x).view(2, 2, 6)
    return F.rms_norm(h, (6,), weight(6, seed=2), EPS), h


def sequence_parallel(x: Tensor) -> tuple[Tensor, Tensor]:
    """DTensor's layers norm a shard and gather it for a matmul."""
    size = dist.get_world_size()
    h = scattered(x.repeat(1, size).view(1, 4 * size, 8) @ weight(8, 6), 1) + weight(
        1, 4, 6, seed=1
    )
    y = F.layer_norm(h, (6,), weight(6, seed=2), weight(6, seed=3), EPS)
    return gathered(y.flatten(0, 1)) @ weight(6, 5), h


def behind_a_bias(x: Tensor) -> tuple[Tensor, Tensor]:
    """Megatron adds a layer's bias with the residual; another bias comes before the sum."""
    reduced = total(F.linear(x, weight(6, 8), weight(6)), "avg")
    h = reduced + weight(6, seed=4) + weight(4, 6, seed=1)
    rows = total(x.sin(), "avg") + weight(8, seed=4)
    return F.layer_norm(h, (6,), weight(6, seed=2), None, EPS), F.rms_norm(rows, (8,), None, EPS)


def gathered_at_once(x: Tensor) -> Tensor:
    y = F.rms_norm(scattered(x @ weight(8, 6)), (6,), weight(6, seed=2), EPS)
    return gathered(y) @ weight(6, 5)


def statistics_kept(x: Tensor) -> tuple[Tensor, Tensor]:
    h = product(x)
    root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return h * root, root


def reduced_kept(x: Tensor) -> tuple[Tensor, Tensor]:
    """The op returns the sum with the residual, and not the sum without it."""
    reduced = product(x)
    return F.rms_norm(reduced + weight(4, 6, seed=1), (6,), None, EPS), reduced


def other_dimension(x: Tensor) -> Tensor:
    h = product(x)
    return h * torch.rsqrt(h.pow(2).mean(0, keepdim=True) + EPS)


def world_size() -> int:
    return dist.get_world_size()


Became = tuple[str, int]
GATHERED, SCATTERED, REDUCED, LEFT = (GATHER, 1), (SCATTER, 1), (REDUCE, 1), ("-", 0)
NORMED, NORMED_PART = (f"{REDUCE}_norm", 1), (f"{SCATTER}_norm", 1)
BIAS = torch.ones(6)
PATTERNS: dict[str, tuple[Callable[[Tensor], Any], list[Became]]] = {
    "mm": (lambda x: gathered(x) @ weight(8, 6), [GATHERED]),
    "addmm": (lambda x: F.linear(gathered(x), weight(6, 8), BIAS), [GATHERED]),
    "3-D, dim 0": (lambda x: gathered(x.view(2, 2, 8), 0) @ weight(8, 6), [GATHERED]),
    "3-D, dim 1": (lambda x: gathered(x.view(2, 2, 8), 1) @ weight(8, 6), [GATHERED]),
    "last dim": (lambda x: gathered(x, 1) @ weight(8 * world_size(), 6), [GATHERED]),
    "three readers": (three, [(GATHER, 2)]),
    "bmm of one weight": (expanded, [GATHERED]),
    "batch of weights, gathered kept": (batch_kept, [GATHERED]),
    "batch of weights, scattered": (batch_scattered, [SCATTERED]),
    "batch reshaped": (batch_reshaped, [("-", 1)]),
    "batch gathered": (batch_gathered, [("-", 1)]),
    "scaled by row": (scaled_rows, [GATHERED, (GATHER, 0)]),
    "scaled scatter": (scaled_scatter, [SCATTERED]),
    "interlace gather": (
        lambda x: functional.all_gather(x.view(2, 2, 8), 1, group="0") @ weight(8, 6), [GATHERED],
    ),
    "waits later": (megatron, [GATHERED]),
    "scatter": (lambda x: scattered(x @ weight(8, 6)), [SCATTERED]),
    "scatter dim 1": (lambda x: scattered(x.view(1, 4, 8) @ weight(8, 6), 1), [SCATTERED]),
    "scatter last dim": (lambda x: scattered(x.view(1, 4, 8) @ weight(8, 4), 2), [SCATTERED]),
    "scatter with bias": (
        lambda x: scattered(F.linear(x, weight(6, 8), torch.arange(6.0))), [SCATTERED],
    ),
    "scatter of a sum": (sums, [(SCATTER, 2)]),
    "interlace scatter": (
        lambda x: functional.reduce_scatter(x @ weight(8, 6), "avg", group="0") * 1, [SCATTERED],
    ),
    "scatter max": (lambda x: scattered(x @ weight(8, 6), op="max"), [LEFT]),
    "product kept": (kept, [LEFT]),
    "all_reduce": (lambda x: total(x @ weight(8, 6)) * 2, [REDUCED]),
    "interlace all_reduce": (
        lambda x: functional.all_reduce(x @ weight(8, 6), "avg", group="0") * 2, [REDUCED],
    ),
    "legacy": (legacy, [GATHERED, SCATTERED]),
    "gathered weight": (lambda x: weight(6, 4 * world_size()) @ gathered(x), [LEFT]),
    "weight from the gathered": (chained, [GATHERED]),
    "normed as vLLM": (as_vllm, [NORMED]),
    "normed by hand": (by_hand, [NORMED]),
    "normed, 3-D": (in_three_dimensions, [NORMED]),
    "normed shard": (sequence_parallel, [NORMED_PART, GATHERED]),
    "normed behind a bias": (behind_a_bias, [NORMED, ("all_reduce_norm", 0)]),
    "normed shard, gathered": (gathered_at_once, [NORMED_PART, GATHERED]),
    "normed, statistics kept": (statistics_kept, [NORMED]),
    "normed, reduced kept": (reduced_kept, [REDUCED]),
    "normed along another dimension": (other_dimension, [REDUCED]),
}  # fmt: skip
if not SCALES_BY_ROW:
    del PATTERNS["scaled by row"]


def fused(function: Any, codegen: str = "aot_eager", **more: Any) -> tuple[Any, list[Any]]:
    """Compile ``function`` with all possible fusions; the list gets a report of each graph."""
    reports: list[interlace.compile.Report] = []
    options = {"codegen": codegen, "on_report": reports.append, "policy": "always"}
    torch._dynamo.reset()
    how: Any = {"fullgraph": True, "backend": "interlace", "options": options, **more}
    return torch.compile(function, **how), reports


def flat(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
