"""interlace's parallel styles give what torch's give: outputs, gradients, state dicts, steps."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_styles
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import interlace.tensor as styles
from multi.tensor.meshes import (
    INNER,
    SEQUENCE,
    WIDTH,
    Plan,
    both,
    model,
    on_meshes,
    sequence,
    shape_of,
    whole,
)
from ranks import ranks
from tiers import few


def feed_forward(mesh: DeviceMesh, kind: Any) -> nn.Module:
    plan = {
        "0": kind.ColwiseParallel(input_layouts=Shard(1)),
        "2": kind.RowwiseParallel(output_layouts=Shard(1)),
    }
    return torch_styles.parallelize_module(model(), mesh, plan)


@pytest.mark.parametrize(
    ("dim", "bias", "scattered", "local"),
    few(
        [
            (0, True, True, True),
            (0, False, False, True),
            (1, True, True, False),
            (1, True, False, False),
            (1, False, True, True),
            (1, True, False, True),
        ],
        (0, True, True, True),
        (1, True, False, False),
    ),
)
@on_meshes
def test_feed_forward(mesh: DeviceMesh, dim: int, bias: bool, scattered: bool, local: bool) -> None:
    def plan(kind: Any) -> dict[str, Any]:
        output = Shard(dim) if scattered else Replicate()
        return {
            "0": kind.ColwiseParallel(input_layouts=Shard(dim)),
            "2": kind.RowwiseParallel(output_layouts=output, use_local_output=local),
        }

    _, said = both(mesh, lambda: model(bias), plan, sequence(dim))
    last = f"matmul_reduce_scatter over dimension {dim}" if scattered else "matmul_all_reduce"
    assert said == {"0": f"all_gather_matmul over dimension {dim}", "2": last}, said


@on_meshes
def test_other_output_layouts(mesh: DeviceMesh) -> None:
    def plan(kind: Any) -> dict[str, Any]:
        return {"0": kind.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}

    _, said = both(mesh, lambda: nn.Sequential(model()[0]), plan, sequence(1))
    assert said == {"0": "all_gather_matmul over dimension 1"}, said


@on_meshes
def test_dtensor_inputs(mesh: DeviceMesh) -> None:
    """The placement of a DTensor counts, not ``input_layouts``."""

    def plan(kind: Any) -> dict[str, Any]:
        return {"": kind.ColwiseParallel(input_layouts=Shard(1))}

    replicated = (
        "torch's ColwiseParallel: the input is replicated, not sharded by sequence: nothing"
    )
    for placement, text in (
        (Shard(1), "all_gather_matmul over dimension 1"),
        (Replicate(), replicated),
    ):

        def made(placement: Any = placement) -> DTensor:
            torch.manual_seed(5)
            return DTensor.from_local(torch.randn(shape_of(1)), mesh, [placement])

        _, said = both(mesh, lambda: model()[0], plan, made)
        assert said[""].startswith(text), said


class Doubling(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


@on_meshes
def test_torchs_way_and_why(mesh: DeviceMesh) -> None:
    def column(**options: Any) -> Plan:
        return lambda kind: {"": kind.ColwiseParallel(**options)}

    def row(**options: Any) -> Plan:
        return lambda kind: {"": kind.RowwiseParallel(**options)}

    def features() -> torch.Tensor:
        torch.manual_seed(1 + dist.get_rank())
        return torch.randn(2, SEQUENCE, WIDTH // dist.get_world_size())

    def replicated() -> torch.Tensor:
        torch.manual_seed(1)
        return torch.randn(shape_of(1))

    def linear(kind: Any = nn.Linear, outputs: int = INNER) -> Any:
        torch.manual_seed(0)
        return kind(WIDTH, outputs)

    expected: list[tuple[Callable[[], Any], Plan, Any, str]] = [
        (linear, column(), replicated, "not sharded by sequence"),
        (
            lambda: linear(Doubling),
            column(input_layouts=Shard(1)),
            sequence(1),
            "Doubling may differ",
        ),
        (linear, row(output_layouts=Shard(-1)), features, "neither replicated nor sharded"),
        (linear, row(output_layouts=Partial()), features, "neither replicated nor sharded"),
        (linear, row(input_layouts=Replicate()), replicated, "not sharded by features"),
    ]
    for make, plan, inputs, reason in expected:
        _, said = both(mesh, make, plan, inputs)
        assert reason in said[""] and "torch's" in said[""], (reason, said)
    column_of_shards = styles.ColwiseParallel(input_layouts=Shard(1))
    odd = torch_styles.parallelize_module(linear(outputs=INNER + 1), mesh, column_of_shards)
    odd(sequence(1)())
    assert f"out_features length {INNER + 1} of dimension 0 is not divisible" in odd.explain()


@on_meshes
def test_embeddings_and_norms(mesh: DeviceMesh) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        norm, dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.0)
        return nn.Sequential(nn.Embedding(12, WIDTH), norm, dropout, *model())

    def plan(kind: Any) -> dict[str, Any]:
        return {
            "0": kind.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "1": kind.SequenceParallel(),
            "2": kind.SequenceParallel(use_local_output=True),
            "3": kind.ColwiseParallel(input_layouts=Shard(1)),
            "5": kind.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }

    _, said = both(mesh, make, plan, lambda: torch.arange(2 * SEQUENCE).view(2, SEQUENCE))
    assert "Embedding is not an nn.Linear" in said["0"] and "SequenceParallel" in said["1"]
    assert said["3"].startswith("all_gather_matmul") and "reduce_scatter" in said["5"]


@on_meshes
def test_autocast(mesh: DeviceMesh) -> None:
    module = feed_forward(mesh, styles)
    with torch.autocast("cpu", torch.bfloat16):
        output = module(sequence(1)())
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(
        each.grad is not None and each.grad.dtype == torch.float32 for each in module.parameters()
    )
    assert styles.explain(module)["2"] == "matmul_reduce_scatter over dimension 1"


@pytest.mark.parametrize(
    "forms",
    few([["module", "copy", "checkpointed"], ["compiled"]], ["module", "copy", "checkpointed"]),
)
@on_meshes
def test_other_forms_of_a_module(mesh: DeviceMesh, forms: list[str]) -> None:
    x, found = sequence(1)(), []
    for kind, form in ((torch_styles, "module"), *((styles, form) for form in forms)):
        module = feed_forward(mesh, kind)
        module = copy.deepcopy(module) if form == "copy" else module
        call: Any = module
        if form == "checkpointed":
            call = functools.partial(checkpoint, module, use_reentrant=False)
        elif form == "compiled":
            if dist.get_world_size() > 2 or dist.get_backend() == "gloo":
                continue  # Dynamo takes seconds
            torch._dynamo.reset()
            call = torch.compile(module, backend="aot_eager", fullgraph=True)
        input = x.clone().requires_grad_()
        output = call(input)
        output.square().sum().backward()
        gradients = [whole(each.grad) for each in module.parameters()]
        found.append([whole(output), input.grad, *gradients])
        if kind is styles and form != "compiled":
            assert "matmul_reduce_scatter" in styles.explain(module)["2"]
    for each in found[1:]:
        for mine, theirs in zip(each, found[0], strict=True):
            torch.testing.assert_close(mine, theirs)


@ranks(2, backend="interlace")
def test_a_compiled_block_between_parts_that_communicate() -> None:
    """The inputs have a gradient: an AsyncCollectiveTensor would lose it in the compiled module."""
    mesh, gradients = init_device_mesh("cpu", (2,)), []
    plan = {
        "0": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "2": styles.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for compiles in (False, True):
        torch.manual_seed(0)
        first, second = Doubling(WIDTH, WIDTH), Doubling(WIDTH, WIDTH)
        parts = nn.Embedding(12, WIDTH), first, nn.Linear(WIDTH, WIDTH), second
        module = torch_styles.parallelize_module(nn.Sequential(*parts), mesh, plan)
        if compiles:
            for block in (first, second):
                block.compile(backend="aot_eager", fullgraph=True)
        module(torch.arange(2 * SEQUENCE).view(2, SEQUENCE)).square().sum().backward()
        gradients.append([whole(weight.grad) for weight in module.parameters()])
    for eager, fused in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, eager)


def test_refused_modules() -> None:
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    for style in (styles.ColwiseParallel(), styles.RowwiseParallel()):
        with pytest.raises(NotImplementedError, match="only support"):
            style._apply(nn.Conv1d(1, 1, 1), mesh)
