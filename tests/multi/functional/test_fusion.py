"""The fusion pass on ranks: what becomes of a model and of each pattern, and that results stay."""

import copy
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import interlace.compile
from interlace import functional
from multi.functional.fusion_patterns import (
    EPS,
    GATHER,
    PATTERNS,
    REDUCE,
    SCATTER,
    Tensor,
    flat,
    fused,
    gathered,
    legacy,
    scattered,
    weight,
)
from ranks import ranks
from support import compiled_anew
from tiers import few, thorough

TOLERANCE = 1e-4


def error(found: Any, right: Any) -> float:
    pairs = zip(flat(found), flat(right), strict=True)
    return max([float((a - b).detach().abs().max()) for a, b in pairs if a.numel()], default=0.0)


def became(*reports: interlace.compile.Report) -> list[tuple[str, int]]:
    """Return the op of each collective and its number of matmuls; "-" if it is not fused."""
    candidates = [each for report in reports for each in report.candidates]
    return [(each.op if each.fused else "-", each.matmuls) for each in candidates]


# -- a model with sequence and tensor parallelism ------------------------------------------------------


class AttentionOfHeads(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.wq, self.wk, self.wv = (nn.Linear(width, width) for _ in range(3))
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            linear(x).view(batch, length, -1, self.size).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = AttentionOfHeads(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


PLAN = {
    "norm1": SequenceParallel(),
    "norm2": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    **{f"attention.w{name}": ColwiseParallel() for name in "qkv"},
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


@pytest.mark.parametrize(
    ("codegen", "world_size", "blocks"),
    # the pass ends before code is generated, so it needs no other number of ranks
    few([("aot_eager", 2, 1), ("aot_eager", 4, 1), ("inductor", 2, 2)], ("aot_eager", 2, 1)),
)
@ranks(backend="interlace")
def test_transformer_fuses_4_of_4_per_block(codegen: str, world_size: int, blocks: int) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size,))
    model = nn.Sequential(*(TransformerBlock(16, 4) for _ in range(blocks)))
    plain = copy.deepcopy(model)
    for block in model:
        parallelize_module(block, mesh, PLAN)
    whole, gradient = torch.randn(2, 2, 4 * world_size, 16)
    compiled, reports = fused(model, codegen)
    output = compiled(whole.chunk(world_size, 1)[rank].contiguous())
    output.backward(gradient.chunk(world_size, 1)[rank])
    expected = plain(whole)
    expected.backward(gradient)
    assert error(output, expected.chunk(world_size, 1)[rank]) < TOLERANCE
    for own, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None
        assert error(own.grad.full_tensor(), right.grad) < TOLERANCE  # type: ignore[attr-defined]
    forward, backward = reports
    norm = (f"{SCATTER}_norm", 1)
    pairs = [(GATHER, 3), norm, (GATHER, 1), norm] * blocks
    pairs[-1] = (SCATTER, 1)  # no norm comes behind the last one
    assert (forward.graph, became(forward)) == ("forward", pairs)
    pairs = [(GATHER, 1), (SCATTER, 1), (GATHER, 1), (SCATTER, 3)] * blocks
    assert (backward.graph, became(backward)) == ("backward", pairs)


# -- single patterns -----------------------------------------------------------------------------------

MOVING = (
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_reduce.default",
    "interlace.all_gather.default",
    "interlace.reduce_scatter.default",
)
REASONS = {
    "batch gathered": "its batch dimension is gathered",
    "scatter max": "reduce op 'max'",
    "product kept": "also read elsewhere",
    "gathered weight": "the gathered tensor is the weight",
    "weight from the gathered": "its weight comes from the gathered",
    "normed, reduced kept": "left out a norm: the reduced tensor is also read elsewhere",
}


def strides(tensor: Tensor) -> list[tuple[int, int]]:
    """Return lengths and strides; strides of dimensions of length 1 count as 0."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [(length, stride if length != 1 else 0) for length, stride in pairs]


def check_pattern(name: str, codegen: str) -> None:
    function, right = PATTERNS[name]
    compiled, reports = fused(function, codegen)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 8)
    expected, actual = function(x), compiled(x)
    candidates = [each for report in reports for each in report.candidates]
    code = "".join(report.after for report in reports)
    assert became(*reports) == right, (name, candidates)
    assert sum(map(code.count, MOVING)) == sum(not each.fused for each in candidates), (name, code)
    assert error(actual, expected) < TOLERANCE, name
    assert [*map(strides, flat(actual))] == [*map(strides, flat(expected))], name
    assert REASONS.get(name, "") in str(candidates[0]), name
    if right[0][0].endswith("_norm") and name != "normed, statistics kept":
        assert "rsqrt" not in code, f"{name}: a norm is computed again"


@thorough
@pytest.mark.parametrize(
    ("world_size", "codegen", "names"),
    [
        (2, "aot_eager", tuple(PATTERNS)),
        (
            4, "aot_eager",
            ("3-D, dim 1", "last dim", "scatter dim 1", "scatter with bias", "legacy"),
        ),
        (
            2, "inductor",
            ("3-D, dim 1", "addmm", "three readers", "scatter dim 1", "waits later"),
        ),
    ],
    ids=["all", "4 ranks", "Inductor"],
)  # fmt: skip
@ranks(backend="interlace")
def test_patterns(world_size: int, codegen: str, names: Sequence[str]) -> None:
    for name in names:
        check_pattern(name, codegen)


# -- forwards of which a backward follows: they save statistics of the norm ----------------------------


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


@thorough
@pytest.mark.parametrize("codegen", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("layers", "parts", "ops"),
    [
        (vllm_layers, 1, [f"{REDUCE}_norm"] * 2),
        (torch_layers, 2, [f"{SCATTER}_norm", GATHER, f"{REDUCE}_norm"]),
    ],
)
@ranks(backend="interlace")
def test_norms_whose_statistics_a_backward_reads(
    codegen: str, layers: Callable[..., Any], parts: int, ops: list[str]
) -> None:
    rank = dist.get_rank()
    residual = weight(4, 6).chunk(parts)[rank % parts]  # equal on all ranks for an all-reduce
    given = weight(4, 8, seed=rank), residual, weight(8, 6), weight(6, 8), weight(6)
    compiled, reports = fused(layers, codegen)
    results = []
    for each in (layers, compiled):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        outputs = flat(each(*leaves))
        torch.autograd.backward(outputs, [output.sin() for output in outputs])
        results.append((*outputs, *(leaf.grad for leaf in leaves)))
    assert error(*results) < TOLERANCE
    forward = next(report for report in reports if report.graph == "forward")
    assert [candidate.op for candidate in forward.fused] == ops


@thorough
@ranks(backend="interlace")
def test_dynamic_shapes() -> None:
    def function(x: Tensor) -> Tensor:
        hidden = torch.relu(gathered(x, 1) @ weight(8, 6))
        return scattered(hidden @ weight(6, 8), 1)

    compiled, reports = fused(function, "inductor")
    for length in (4, 6, 10):
        x = torch.randn(length, 2, 8)
        torch._dynamo.mark_dynamic(x, 0)
        assert error(compiled(x), function(x)) < TOLERANCE
    (report,) = reports
    assert (report.graph, became(report)) == ("inference", [(GATHER, 1), (SCATTER, 1)])


@thorough
@ranks(backend="interlace")
def test_as_a_pass_of_inductor() -> None:
    options: Any = {"post_grad_custom_post_pass": interlace.compile.FusionPass("always")}
    torch._dynamo.reset()
    with compiled_anew(), unittest.TestCase().assertLogs("interlace.compile", "INFO") as log:
        x = torch.randn(4, 8)
        compiled = torch.compile(legacy, fullgraph=True, options=options)
        result, (code, *_) = run_and_get_code(compiled, x)
        assert error(result, legacy(x)) < TOLERANCE
    ops = "all_gather_matmul 1, matmul_reduce_scatter 1"
    said = [f"interlace: inference graph: fused 2 of 2 collectives ({ops})"]
    assert [record.getMessage() for record in log.records] == said
    assert f"interlace.{GATHER}." in code and f"interlace.{SCATTER}." in code
    assert not any(f"{each.removesuffix('default')}" in code for each in MOVING[:2])
