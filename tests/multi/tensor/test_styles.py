"""interlace's parallel styles give what torch's give, also where linears share a gather of their input."""

import copy
import functools
import gc
import unittest.mock
import weakref
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

import interlace.compile
import interlace.tensor as styles
from interlace.tensor import shared_gathers
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
from tiers import few, thorough


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

    for placement, text in (
        (Shard(1), "all_gather_matmul over dimension 1"),
        (Replicate(), "torch's ColwiseParallel: the input is replicated, not sharded by sequence"),
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
        (lambda: linear(Doubling), column(input_layouts=Shard(1)), sequence(1), "may differ"),
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


# -- linears that share a gather of their input, which may be prepared for them --------------------------


class AttentionReading(nn.Module):
    """q, k and v read the same input; ``reads`` is the module's own use of it."""

    def __init__(self, reads: Callable[[Any], Any] = lambda x: 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reads = reads
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, INNER, bias=name != "k") for name in "qkv")
        self.wo = nn.Linear(INNER, WIDTH)

    def forward(self, x: Any, scale: Any = 1) -> Any:
        batch, length, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        assert q.shape[:2] == (batch, length) or not isinstance(x, DTensor)
        return self.wo(torch.tanh(q) * k + v) * scale + self.reads(x)


class NormedBlock(nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.attention = nn.LayerNorm(WIDTH), AttentionReading(*args)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(self.norm(x))


def attention_plan(kind: Any, prepare: Any = None, local: bool = True) -> dict[str, Any]:
    """Return torchtitan's plan with ``prepare`` for the module; without it linears take shards."""
    options = {"input_layouts": Shard(1)} if prepare is None else {}
    linears = {f"attention.w{name}": kind.ColwiseParallel(**options) for name in "qkv"}
    return {
        "norm": kind.SequenceParallel(use_local_output=local),
        **({} if prepare is None else {"attention": prepare}),
        **linears,
        "attention.wo": kind.RowwiseParallel(output_layouts=Shard(1)),
    }


SHARD, WHOLE = Shard(1), Replicate()


def gathering(kind: Any, given: Any = SHARD, desired: Any = WHOLE, **options: Any) -> Any:
    layouts = {"input_layouts": given, "desired_input_layouts": desired}
    return kind.PrepareModuleInput(**layouts, **options)


GATHERED = "all_gather_matmul over dimension 1"
SHARED = "matmul; another linear has gathered the input over dimension 1"
OF_LINEARS = {"attention.wq": GATHERED, "attention.wk": SHARED, "attention.wv": SHARED}


def counted() -> Any:
    """Count the fused gathers of a ``with``."""
    real = styles.styles.all_gather_matmul
    return unittest.mock.patch.object(styles.styles, "all_gather_matmul", side_effect=real)


@pytest.mark.parametrize(
    ("prepared", "local"),
    few([(True, True), (False, True), (True, False), (False, False)], (True, True), (False, False)),
)
@on_meshes
def test_one_gather(mesh: DeviceMesh, prepared: bool, local: bool) -> None:
    """Each forward gathers once for q, k and v, and a recomputation gathers once again."""

    def plan(kind: Any) -> dict[str, Any]:
        return attention_plan(kind, gathering(kind) if prepared else None, local)

    with counted() as gathers:
        module, said = both(mesh, NormedBlock, plan, sequence(1))
        assert gathers.call_count == 2, gathers.call_count
        assert {name: said[name] for name in OF_LINEARS} == OF_LINEARS, said
        if prepared:
            text = "left to linears: the gather of the input over dimension 1"
            assert said["attention"] == text
        x = sequence(1)()
        for _ in range(2):
            with torch.no_grad():
                expected = module(x)
        assert gathers.call_count == 4, gathers.call_count
        for call in (module, module.attention):  # a leaf that requires a gradient
            y = sequence(1)().requires_grad_()
            checkpoint(call, y, use_reentrant=False).sum().backward()
        assert gathers.call_count == 8, gathers.call_count
        torch.testing.assert_close(module(x), expected)


@on_meshes
def test_a_gathered_input_lives_no_longer_than_the_input(mesh: DeviceMesh) -> None:
    plan = attention_plan(styles, gathering(styles))
    module = torch_styles.parallelize_module(NormedBlock(), mesh, plan)
    found = []

    def watch(_: Any, inputs: Any, output: Any) -> None:
        found.append(weakref.ref(shared_gathers._own.kept[inputs[0].shard]))

    module.attention.wq.register_forward_hook(watch)
    gc.disable()  # nothing is to wait for the collector
    try:
        for _ in range(2):
            module(sequence(1)())
            assert found[-1]() is None
    finally:
        gc.enable()


@on_meshes
def test_what_is_gathered_again(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plan = {name: styles.ColwiseParallel(input_layouts=Shard(1)) for name in "01"}
    pair = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER))
    first, second = torch_styles.parallelize_module(pair, mesh, plan)
    with counted() as gathers:
        x = sequence(1)()
        first(x).sum().backward()
        second(x).sum().backward()
        assert gathers.call_count == 2
        for loss in [first(x).sum(), first(x).sum()]:  # two steps, with a backward each
            loss.backward()
        assert gathers.call_count == 4
        x = sequence(1)().requires_grad_()
        with torch.no_grad():
            first(x)
        second(x).sum().backward()
        assert gathers.call_count == 6 and x.grad is not None
        x = torch.zeros(shape_of(1))
        with torch.no_grad():
            first(x)
            x.add_(1)
            found = second(x)[0, 0]
        assert gathers.call_count == 8
        weight, bias = second.weight.to_local(), second.bias.to_local()
        torch.testing.assert_close(found, weight.sum(1) + bias)
        x = sequence(1)().requires_grad_()
        (first(x) * checkpoint(second, x, use_reentrant=False)).sum().backward()
        assert (
            gathers.call_count == 11
        )  # values outside of a region do not exist when it runs again
    leaves = []
    for _ in range(2):  # that require a gradient, and have no backward
        x = sequence(1)().requires_grad_()
        leaves.append(weakref.ref(x))
        first(x)
        del x
    assert leaves[0]() is None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@on_meshes
def test_a_prepared_input_that_others_read(mesh: DeviceMesh) -> None:
    def local(x: DTensor) -> torch.Tensor:
        """Return its first rows; each rank's loss has another gradient for them."""
        return x.to_local(grad_placements=[Partial()])[:, :SEQUENCE].mean()

    def check(reads: Callable[[Any], Any], name: str) -> None:
        def plan(kind: Any) -> dict[str, Any]:
            return attention_plan(kind, gathering(kind))

        _, said = both(mesh, lambda: NormedBlock(reads), plan, sequence(1))
        text = f"all_gather of the input over dimension 1: {name} reads it"
        assert said["attention"] == text, said
        assert said["attention.wq"] == GATHERED

    check(local, "to_local")
    check(lambda x: local(torch.relu(x)), "relu")
    check(lambda x: local(Doubled.apply(x)), "mul")
    check(lambda x: x.redistribute(placements=[Shard(1)]).to_local(), "redistribute")
    module = torch_styles.parallelize_module(
        NormedBlock(), mesh, attention_plan(styles, gathering(styles))
    )
    seen: list[Any] = []
    module.attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    module(sequence(1)())
    assert isinstance(seen[0], DTensor) and seen[0].placements == (Replicate(),)
    assert seen[0].shape == (3, SEQUENCE * dist.get_world_size(), WIDTH) == tuple(seen[0].size())
    assert "Ungathered" in repr(seen[0]) and seen[0]._gathered is None


class Pair(nn.Module):
    """q and k; ``before`` and ``between`` are the module's uses of their input."""

    def __init__(self, before: Callable[[Any], Any], between: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.between = before, between
        self.wq, self.wk = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)

    def forward(self, x: Any) -> Any:
        self.before(x)
        q = self.wq(x)
        self.between(x)
        return q * self.wk(x)


def pair_plan(kind: Any) -> dict[str, Any]:
    linears = {f"0.w{name}": kind.ColwiseParallel() for name in "qk"}
    return {"0": gathering(kind), **linears}


@on_meshes
def test_a_prepared_input_that_changes_in_place(mesh: DeviceMesh) -> None:
    def unseen(x: DTensor) -> None:
        with torch.no_grad():
            x.mul_(2)

    def in_view(x: DTensor) -> None:
        with torch.no_grad():
            x[0].mul_(3)

    def seen_and_unseen(x: DTensor) -> None:
        torch.relu(x)
        unseen(x)
        x.mul_(2)
        unseen(x)

    for change in (unseen, in_view, seen_and_unseen):
        both(mesh, lambda c=change: nn.Sequential(Pair(c, lambda x: 0)), pair_plan, sequence(1))
    x, outputs = sequence(1)(), []
    for kind in (torch_styles, styles):  # one that q has not read; torch's could not go backward
        module = nn.Sequential(Pair(lambda x: 0, unseen))
        with torch.no_grad():
            outputs.append(torch_styles.parallelize_module(module, mesh, pair_plan(kind))(x))
    torch.testing.assert_close(*outputs)


@on_meshes
def test_hooks_on_a_prepared_input(mesh: DeviceMesh) -> None:
    seen: list[torch.Tensor] = []

    def double(grad: DTensor) -> DTensor:
        seen.append(grad.full_tensor())
        return grad * 2

    def retain(x: DTensor) -> None:
        x.retain_grad()
        kept.append(x)

    def nothing(x: DTensor) -> None:
        pass

    def watch(x: DTensor) -> None:
        x.register_hook(double)

    kept: list[Any] = []
    for before, between in (
        (watch, nothing), (nothing, watch), (torch.relu, watch), (retain, nothing), (nothing, retain),
    ):  # fmt: skip
        both(mesh, lambda a=before, b=between: nn.Sequential(Pair(a, b)), pair_plan, sequence(1))
    whole = [each.grad.full_tensor() for each in kept]
    for found in (seen, whole):
        for i in range(0, len(found), 4):  # two steps in torch's style, and two in interlace's
            torch.testing.assert_close(found[i : i + 2], found[i + 2 : i + 4])


@on_meshes
def test_prepared_in_torchs_way(mesh: DeviceMesh) -> None:
    column = styles.ColwiseParallel()
    for prepare, linears, reason in (
        (gathering(styles, use_local_output=True), {"attention.wq": column}, "gets no DTensor"),
        (
            gathering(styles, WHOLE, SHARD), {"attention.wq": column},
            "from replicated to Shard(1) is not a gather of a sequence",
        ),
        (gathering(styles, SHARD, SHARD), {"attention.wq": column}, "no layout changes"),
        (gathering(styles), {}, "no linear inside has"),
    ):  # fmt: skip
        plan = {"attention": prepare, **linears}
        module = torch_styles.parallelize_module(NormedBlock(), mesh, plan)
        module.attention.forward = lambda x: x
        module(sequence(1)())
        said = styles.explain(module)["attention"]
        assert said.startswith("torch's PrepareModuleInput") or not linears
        assert reason in said, said
    # torch's own PrepareModuleInput beside linears of interlace
    plan = attention_plan(styles, gathering(torch_styles))
    module = torch_styles.parallelize_module(NormedBlock(), mesh, plan)
    module(sequence(1)())
    said = styles.explain(module)["attention.wq"]
    assert "nothing to gather" in said and "use interlace.tensor's PrepareModuleInput" in said, said


@on_meshes
def test_prepared_outputs_and_kwargs(mesh: DeviceMesh) -> None:
    layouts = {"output_layouts": Shard(1), "desired_output_layouts": Replicate()}
    ways = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    _, said = both(
        mesh, NormedBlock,
        lambda k: attention_plan(k, k.PrepareModuleInputOutput(**ways, **layouts)), sequence(1),
    )  # fmt: skip
    assert {name: said[name] for name in OF_LINEARS} == OF_LINEARS
    assert "left to linears" in said["attention"] and "PrepareModuleOutput" in said["attention"]

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = AttentionReading()

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x=x)

    def plan(kind: Any) -> dict[str, Any]:
        named = {"input_kwarg_layouts": {"x": Shard(1)}}
        named["desired_input_kwarg_layouts"] = {"x": Replicate()}
        return {
            "inner": kind.PrepareModuleInput(**named),
            **{f"inner.w{name}": kind.ColwiseParallel() for name in "qkv"},
            "inner.wo": kind.RowwiseParallel(output_layouts=Shard(1)),
        }

    _, said = both(mesh, Named, plan, sequence(1))
    assert said["inner.wk"] == SHARED and "left to linears" in said["inner"]


@thorough
@on_meshes
def test_a_graph_has_one_gather_of_a_prepared_input(mesh: DeviceMesh) -> None:
    plan = attention_plan(styles, gathering(styles))
    module = torch_styles.parallelize_module(NormedBlock(), mesh, plan)
    x, reports = sequence(1)(), list[interlace.compile.Report]()
    options = {"codegen": "aot_eager", "policy": "always", "on_report": reports.append}
    call = torch.compile(module, fullgraph=True, backend="interlace", options=options)
    output = call(x)
    torch.testing.assert_close(output, module(x))
    output.sum().backward()
    assert ("all_gather_matmul", 3) in [
        (each.op, each.matmuls) for r in reports for each in r.fused
    ]
