"""Ranks of test_compile.py: models, and functions with one pattern each."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import interlace
import interlace.compile
import torch_names
from interlace import functional
from multi.functional.compile_norms import NORMED
from multi.process_group.backend_ranks import world
from support import SCALES_BY_ROW, compiled_anew

ALWAYS = {"policy": "always"}


# -- a model with sequence and tensor parallelism ------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.wq, self.wk, self.wv = (nn.Linear(width, width) for _ in range(3))
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            linear(x).view(batch, length, -1, self.size).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


PLAN = {
    "norm1": SequenceParallel(),
    "norm2": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


def transformer(path: str, blocks: int, codegen: str) -> dict[str, Any]:
    """Reports of the compiled model, and how far its output and gradients are from the eager ones."""
    with world(path):
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (size,))
        model = nn.Sequential(*(Block(16, 4) for _ in range(blocks)))
        plain = copy.deepcopy(model)
        for block in model:
            parallelize_module(block, mesh, PLAN)
        whole, gradient = torch.randn(2, 4 * size, 16), torch.randn(2, 4 * size, 16)
        shard = whole.chunk(size, 1)[rank].contiguous()
        reports: list[interlace.compile.Report] = []
        torch._dynamo.reset()
        compiled = torch.compile(
            model,
            fullgraph=True,
            backend="interlace",
            options={"codegen": codegen, "on_report": reports.append, **ALWAYS},
        )
        output = compiled(shard)
        output.backward(gradient.chunk(size, 1)[rank])
        expected = plain(whole)
        expected.backward(gradient)
        worst = float((output - expected.chunk(size, 1)[rank]).abs().max())
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            full = mine.grad.full_tensor()
            worst = max(worst, float((full - theirs.grad).abs().max()))
        return {"reports": [summary(report) for report in reports], "worst": worst}


def summary(report: interlace.compile.Report) -> tuple[str, list[tuple[str, int, str]]]:
    return report.graph, [
        (c.op if c.fused else "-", c.matmuls, c.reason) for c in report.candidates
    ]


# -- single patterns -----------------------------------------------------------------------------------
# Each takes the group's size and name, and an input that differs between ranks.

Tensor = torch.Tensor
_c10d = torch.ops._c10d_functional


def weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.sin(torch.arange(rows * columns) * (1.3 + seed)).view(rows, columns)


def gathered(x: Tensor, dim: int) -> Tensor:
    if dim and not torch_names.NEWEST:
        whole = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
        return torch.cat(whole.chunk(dist.get_world_size()), dim)
    return funcol.all_gather_tensor(x, dim, dist.group.WORLD)


def scattered(x: Tensor, dim: int, op: str = "sum") -> Tensor:
    if dim and not torch_names.NEWEST:
        x, dim = torch.cat(x.chunk(dist.get_world_size(), dim)), 0
    return torch_names.functional_reduce_scatter(x, op, dim, dist.group.WORLD)


def legacy(x: Tensor) -> Tensor:
    size = dist.get_world_size()
    whole = torch.empty(x.shape[0] * size, x.shape[1])
    dist.all_gather_into_tensor(whole, x)
    hidden = torch.relu(whole @ weight(8, 6)) @ weight(6, 8)
    part = torch.empty(x.shape[0], 8)
    dist.reduce_scatter_tensor(part, hidden)
    return part


def legacy_all_reduce(x: Tensor) -> Tensor:
    y = x @ weight(8, 6)
    dist.all_reduce(y)
    return y


def three(x: Tensor) -> Tensor:
    whole = gathered(x, 0)
    return (whole @ weight(8, 6)).sum() + (whole @ weight(8, 5, 1)).sum() + whole.sum()


def megatron(x: Tensor) -> Tensor:
    """The gather starts, other work goes on, then the matmul waits for it."""
    whole = functional.all_gather(x, group="0")
    other = torch.tanh(x) @ weight(8, 6)
    return functional.wait(whole) @ weight(8, 6, 1) + other.sum()


def expanded(x: Tensor) -> Tensor:
    batch = x.view(2, 2, 8)
    whole = gathered(batch, 1)
    return torch.bmm(whole, weight(8, 6).expand(2, 8, 6))


def batched(x: Tensor) -> Tensor:
    whole = gathered(x.view(2, 2, 8), 1)
    return torch.bmm(whole, weight(16, 6).view(2, 8, 6))


def batch_gathered(x: Tensor) -> Tensor:
    """The weights belong to the entries that are gathered: they cannot be told apart before."""
    whole = gathered(x.view(2, 2, 8), 0)
    return torch.bmm(whole, weight(8, 6 * whole.shape[0]).view(whole.shape[0], 8, 6))


def batch_kept(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = gathered(x.view(2, 2, 8), 1)
    return torch.bmm(whole, weight(16, 6).view(2, 8, 6)), whole * 2


def batch_scattered(x: Tensor) -> Tensor:
    product = torch.bmm(x.view(1, 4, 8).expand(2, 4, 8), weight(16, 6).view(2, 8, 6))
    return scattered(product, 1)


def batch_reshaped(x: Tensor) -> Tensor:
    """The batch of what is scattered is not that of the matmul: entries of one are none of the other."""
    product = torch.bmm(x.view(2, 2, 8), weight(16, 6).view(2, 8, 6))
    return scattered(product.view(1, 4, 6), 1)


def batch_gathered_reshaped(x: Tensor) -> Tensor:
    whole = gathered(x.view(4, 1, 8), 1).reshape(2, -1, 8)
    return torch.bmm(whole, weight(16, 6).view(2, 8, 6))


FLOAT8 = torch.float8_e4m3fn
ONE = torch.ones(())


def scaled_mm(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    return torch._scaled_mm(x, w, x_scale, w_scale, out_dtype=torch.bfloat16).float()


def scaled_gather(x: Tensor) -> Tensor:
    shard = torch.cat([x, x], 1).to(FLOAT8)
    w = weight(16, 16).to(FLOAT8).t().contiguous().t()
    return scaled_mm(gathered(shard, 0), w, ONE * 0.5, ONE * 2.0)


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
    return scattered(product, 0).float()


def kept(x: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ weight(8, 6)
    return scattered(product, 0), product * 2


def sums(x: Tensor) -> Tensor:
    return scattered(x @ weight(8, 6) + torch.tanh(x)[:, :5] @ weight(5, 6, 1), 0)


def chained(x: Tensor) -> Tensor:
    whole = gathered(x, 0)
    first = whole @ weight(8, 8)
    return whole @ (first.t() @ first)


FUSED = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
GATHER, SCATTER, REDUCE = FUSED
PATTERNS: dict[str, tuple[Callable[[Tensor], Any], list[tuple[str, int]]]] = {
    "mm": (lambda x: gathered(x, 0) @ weight(8, 6), [(GATHER, 1)]),
    "addmm": (lambda x: F.linear(gathered(x, 0), weight(6, 8), torch.ones(6)), [(GATHER, 1)]),
    "3-D, dim 0": (lambda x: gathered(x.view(2, 2, 8), 0) @ weight(8, 6), [(GATHER, 1)]),
    "3-D, dim 1": (lambda x: gathered(x.view(2, 2, 8), 1) @ weight(8, 6), [(GATHER, 1)]),
    "4-D, dim 2": (lambda x: gathered(x.view(1, 2, 2, 8), 2) @ weight(8, 6), [(GATHER, 1)]),
    "last dim": (lambda x: gathered(x, 1) @ weight(8 * dist.get_world_size(), 6), [(GATHER, 1)]),
    "linear with bias, dim 1": (
        lambda x: F.linear(gathered(x.view(2, 2, 8), 1), weight(6, 8), torch.ones(6)),
        [(GATHER, 1)],
    ),
    "three readers": (three, [(GATHER, 2)]),
    "bmm of one weight": (expanded, [(GATHER, 1)]),
    "batch of weights": (batched, [(GATHER, 1)]),
    "batch of weights, gathered kept": (batch_kept, [(GATHER, 1)]),
    "batch of weights, scattered": (batch_scattered, [(SCATTER, 1)]),
    "batch reshaped": (batch_reshaped, [("-", 1)]),
    "batch gathered, reshaped": (batch_gathered_reshaped, [("-", 1)]),
    "batch gathered": (batch_gathered, [("-", 1)]),
    "scaled": (scaled_gather, [(GATHER, 1)]),
    "scaled by row": (scaled_rows, [(GATHER, 1), ("-", 0)]),
    "scaled scatter": (scaled_scatter, [(SCATTER, 1)]),
    "interlace gather": (
        lambda x: functional.all_gather(x.view(2, 2, 8), 1, group="0") @ weight(8, 6),
        [(GATHER, 1)],
    ),
    "waits later": (megatron, [(GATHER, 1)]),
    "scatter": (lambda x: scattered(x @ weight(8, 6), 0), [(SCATTER, 1)]),
    "scatter avg": (lambda x: scattered(x @ weight(8, 6), 0, "avg"), [(SCATTER, 1)]),
    "scatter dim 1": (lambda x: scattered(x.view(1, 4, 8) @ weight(8, 6), 1), [(SCATTER, 1)]),
    "scatter last dim": (lambda x: scattered(x.view(1, 4, 8) @ weight(8, 4), 2), [(SCATTER, 1)]),
    "scatter with bias": (
        lambda x: scattered(F.linear(x, weight(6, 8), torch.arange(6.0)), 0),
        [("-", 0), (SCATTER, 1)][1:],
    ),
    "scatter of a sum": (sums, [(SCATTER, 2)]),
    "interlace scatter": (
        lambda x: functional.reduce_scatter(x @ weight(8, 6), "sum", 0, group="0") * 1,
        [(SCATTER, 1)],
    ),
    "scatter max": (lambda x: scattered(x @ weight(8, 6), 0, "max"), [("-", 0)]),
    "product kept": (kept, [("-", 0)]),
    "all_reduce": (
        lambda x: funcol.all_reduce(x @ weight(8, 6), "sum", dist.group.WORLD) * 2,
        [(REDUCE, 1)],
    ),
    "interlace all_reduce": (
        lambda x: functional.all_reduce(x @ weight(8, 6), "avg", group="0") * 2,
        [(REDUCE, 1)],
    ),
    "all_reduce with bias": (
        lambda x: (
            funcol.all_reduce(F.linear(x, weight(6, 8), torch.ones(6)), "sum", dist.group.WORLD) * 2
        ),
        [(REDUCE, 1)],
    ),
    "legacy": (legacy, [(GATHER, 1), (SCATTER, 1)]),
    "legacy all_reduce": (legacy_all_reduce, [(REDUCE, 1)]),
    "gather alone": (lambda x: gathered(x, 0) + 1, [("-", 0)]),
    "gathered weight": (
        lambda x: weight(6, 4 * dist.get_world_size()) @ gathered(x, 0),
        [("-", 0)],
    ),
    "weight from the gathered": (chained, [(GATHER, 1)]),
    **NORMED,
}


if not SCALES_BY_ROW:
    del PATTERNS["scaled by row"]

MOVING = (
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_reduce.default",
    "interlace.all_gather.default",
    "interlace.reduce_scatter.default",
)


def patterns(path: str, names: list[str], codegen: str) -> dict[str, Any]:
    """Per pattern: what became of its collectives, and how far the result is from the eager one."""
    found = {}
    with world(path):
        rank = dist.get_rank()
        for name in names:
            function = PATTERNS[name][0]
            reports: list[interlace.compile.Report] = []
            torch._dynamo.reset()
            options = {"codegen": codegen, "on_report": reports.append, **ALWAYS}
            compiled = torch.compile(function, fullgraph=True, backend="interlace", options=options)
            torch.manual_seed(rank)
            x = torch.randn(4, 8)
            expected, actual = function(x), compiled(x)
            pairs = zip(_leaves(expected), _leaves(actual), strict=True)
            alike = all(_strides(a) == _strides(b) for a, b in pairs)
            pairs = zip(_leaves(expected), _leaves(actual), strict=True)
            worst = max([float((a - b).abs().max()) for a, b in pairs if a.numel()], default=0.0)
            candidates = [c for report in reports for c in report.candidates]
            left = sum(report.after.count(each) for report in reports for each in MOVING)
            assert left == sum(not c.fused for c in candidates), (name, reports[0].after)
            became = [(c.op if c.fused else "-", c.matmuls) for c in candidates]
            code = "".join(report.after for report in reports)
            found[name] = (became, worst, alike, [str(c) for c in candidates], code)
    return found


def _leaves(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _strides(tensor: Tensor) -> list[tuple[int, int]]:
    """Lengths and strides; those of dimensions of length 1 mean nothing."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [(length, stride if length != 1 else 0) for length, stride in pairs]


def through_inductor(path: str) -> tuple[list[str], float, list[str]]:
    """As a pass in Inductor's own options: the log, the error, the ops in the generated code."""
    from torch._inductor.utils import run_and_get_code

    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    with world(path):
        handler, log = Keep(), logging.getLogger("interlace.compile")
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            torch._dynamo.reset()
            fusion = interlace.compile.FusionPass("always")
            compiled = torch.compile(
                legacy, fullgraph=True, options={"post_grad_custom_post_pass": fusion}
            )
            x = torch.randn(4, 8)
            with compiled_anew():
                result, code = run_and_get_code(compiled, x)
            worst = float((result - legacy(x)).abs().max())
        finally:
            log.removeHandler(handler)
        others = (
            "_c10d_functional.all_gather_into_tensor",
            "_c10d_functional.reduce_scatter_tensor",
        )
        found = [
            op for op in (*(f"interlace.{op}" for op in FUSED), *others) if f"{op}." in code[0]
        ]
        return lines, worst, found


def dynamic(path: str) -> tuple[int, list[float], list[Any]]:
    """One compilation for several lengths: how many there were, the errors, what became of it."""
    reports: list[interlace.compile.Report] = []

    def function(x: Tensor) -> Tensor:
        hidden = torch.relu(gathered(x, 1) @ weight(8, 6))
        return scattered(hidden @ weight(6, 8), 1)

    with world(path):
        torch._dynamo.reset()
        options = {"on_report": reports.append, **ALWAYS}
        compiled = torch.compile(function, fullgraph=True, backend="interlace", options=options)
        errors = []
        for length in (4, 6, 10):
            x = torch.randn(length, 2, 8)
            torch._dynamo.mark_dynamic(x, 0)
            errors.append(float((compiled(x) - function(x)).abs().max()))
        return len(reports), errors, [summary(report) for report in reports]
