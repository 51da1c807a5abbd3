"""The fusion pass without ranks: what ``explain`` says, who decides, and programs that were exported."""

import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import interlace
import interlace.compile
from interlace import functional
from interlace.compile import (
    CPU,
    GPU,
    Collective,
    FusionPass,
    Machine,
    Pattern,
    Prediction,
    Report,
    call,
    explain,
    fuse,
    predict,
)
from multi.functional.fusion_patterns import GATHER, SCATTER
from tiers import few, thorough

GROUP = interlace.GroupSpec("tp", 4)


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    hidden = functional.all_gather(x, 0, group=GROUP) @ up
    return functional.reduce_scatter(torch.relu(hidden) @ down, "sum", 0, group=GROUP) * 1


def test_explain_without_a_process_group() -> None:
    small = explain(mlp, *(torch.ones(8, 8, requires_grad=True) for _ in range(3)))
    assert [report.graph for report in small.reports] == ["forward", "backward"]
    assert [c.reason for c in small.candidates] == ["predicted to be slower fused"] * 4
    for candidate in small.candidates:
        assert candidate.fused_seconds > candidate.unfused_seconds > 0
        assert candidate.where.startswith("test_compile.py:")
    always = explain(
        mlp, *(torch.ones(8, 8, requires_grad=True) for _ in range(3)), policy="always"
    )
    assert [c.op for c in always.fused] == [GATHER, SCATTER, GATHER, SCATTER]
    for report in always.reports:
        assert "interlace.all_gather.default" in report.before
        for left in ("all_gather.default", "reduce_scatter.default"):
            assert f"interlace.{left}" not in report.after
    never = explain(mlp, *(torch.ones(8, 8) for _ in range(3)), policy="never")
    assert [c.reason for c in never.candidates] == ['policy is "never"'] * 2
    assert "not fused: predicted to be slower fused" in str(small)


class Wrapped(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Make a mesh of two ranks that send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def test_explain_names_the_callers_line_and_the_module(mesh: DeviceMesh) -> None:
    """An op in a hook of torch has no frame of the user: its line is the line that calls explain."""
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(1)),
        "1": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(layers, mesh, plan)

    def places(model: torch.nn.Module) -> list[str]:
        found = explain(model, torch.ones(2, 2, 8))
        for each in found.candidates:
            assert all(each.where.split(" (")[0] in note for note in each.notes)
        return [each.where for each in found.candidates]

    line = places.__code__.co_firstlineno + 1
    assert places(layers) == [f"test_compile.py:{line} ({name})" for name in ("0", "1", "1")]
    line = Wrapped.forward.__code__.co_firstlineno + 1
    expected = [f"test_compile.py:{line} (inner.{name})" for name in ("0", "1", "1")]
    assert places(Wrapped(layers)) == expected


def test_collectives_of_other_kinds_are_told() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        sent = functional.broadcast(x, 0, group=GROUP) @ w
        return (
            functional.all_gather(x, group=GROUP),
            sent,
            functional.all_to_all(sent, group=GROUP) * 1,
        )

    told = explain(function, torch.ones(8, 8), torch.ones(8, 8)).candidates
    assert sorted(each.collective for each in told) == ["all_gather", "all_to_all", "broadcast"]
    assert not any(each.fused for each in told)


def test_a_collective_whose_result_the_graph_returns_is_fused() -> None:
    """The caller of the graph waits for the result, so the graph has no wait for it."""

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.reduce_scatter(x @ w, group=GROUP)

    (report,) = explain(layer, torch.ones(8, 8), torch.ones(8, 8), policy="always").reports
    assert "wait_tensor" not in report.before
    assert [(found.op, found.fused) for found in report.candidates] == [(SCATTER, True)]


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_wait_of_ones_own_hides_no_matmul(waits: bool, learns: bool) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        whole = functional.all_gather(x, group=GROUP)
        return ((functional.wait(whole) if waits else whole) @ w).sum()

    x, w = (torch.ones(8, 8, requires_grad=learns) for _ in range(2))
    first, *_ = explain(function, x, w, policy="always").candidates
    assert (first.collective, first.fused) == ("all_gather", True), first


@pytest.mark.parametrize(
    "options", few([{}, {"policy": "never"}, {"codegen": "aot_eager", "policy": "always"}])
)
def test_a_copy_stays_a_copy(options: dict[str, str]) -> None:
    def swapped(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        old = torch.empty_like(cache)
        old.copy_(cache)
        cache.copy_(x)
        return old

    def copied(x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        made.copy_(x)
        return made

    torch._dynamo.reset()
    compiled = torch.compile(swapped, backend="interlace", options=options)
    assert compiled(torch.ones(3), torch.zeros(3)).tolist() == [0, 0, 0]
    x = torch.ones(3)
    made = torch.compile(copied, backend="interlace", options=options)(x)
    assert made.data_ptr() != x.data_ptr()


class Exported(torch.nn.Module):
    """Composite ops between collectives: linear, flatten, chunk, and a ``to`` of no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 6), torch.nn.Linear(6, 8, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.calls.add_(1)
        whole = functional.all_gather(x, 1, group=GROUP)
        hidden = torch.relu(self.up(whole.to(torch.float32)))
        part = functional.wait(functional.reduce_scatter(self.down(hidden), "sum", 1, group=GROUP))
        left, right = functional.all_gather(part.flatten(0, 1), group=GROUP).chunk(2, 1)
        scores = left @ self.up.weight[:, :4].t()
        return part, part.to(torch.float32), scores, right.t().contiguous()


def exported(decomposed: bool = False) -> torch.export.ExportedProgram:
    program = torch.export.export(Exported(), (torch.ones(2, 4, 8),))
    return program.run_decompositions() if decomposed else program


@pytest.mark.parametrize("decomposed", few([False, True], False))
def test_an_exported_program_is_fused_and_saved(decomposed: bool) -> None:
    program = exported(decomposed)
    before = [each.arg.name for each in program.graph_signature.output_specs]
    report = fuse(program, policy="always")
    ops = [(each.collective, each.op if each.fused else each.reason) for each in report.candidates]
    assert ops == [
        ("all_gather", GATHER), ("reduce_scatter", SCATTER),
        ("all_gather", "no matmul reads the gathered tensor"),
    ]  # fmt: skip
    assert [each.name for each in program.graph.output_node().args[0]] == before
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for code in (program.graph_module.code, torch.export.load(file).graph_module.code):
        assert f"interlace.{GATHER}" in code and f"interlace.{SCATTER}" in code


def test_modules_and_graphs_are_fused() -> None:
    module = exported().module()
    for each in (exported().graph, module):
        assert len(fuse(each, policy="always").fused) == 2
    assert f"interlace.{GATHER}" in module.code
    reports: list[Report] = []
    FusionPass("always", on_report=reports.append)(exported().module())
    assert len(reports[0].fused) == 2 and f"interlace.{SCATTER}" in reports[0].after
    with pytest.raises(TypeError, match=r"torch\.export\.ExportedProgram, got function"):
        fuse(mlp)


def test_a_wrong_option_of_the_backend() -> None:
    with pytest.raises(Exception, match="codegen must be one of inductor, aot_eager, got 'c'"):
        torch.compile(lambda x: x + 1, backend="interlace", options={"codegen": "c"})(torch.ones(1))


@thorough
def test_the_graphs_in_the_docs() -> None:
    """docs/how-to/compile/torch-compile.md shows the output of docs/examples/fusion.py."""
    root = Path(__file__).parents[3]
    command = [sys.executable, str(root / "docs/examples/fusion.py")]
    environment = {**os.environ, "PYTHONPATH": str(root / "python")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    shown = [
        block
        for block in (root / "docs/how-to/compile/torch-compile.md").read_text().split("```")
        if "arg0_1" in block
    ]
    assert len(shown) == 2
    for graph, block in zip(done.stdout.split("def forward")[1:], shown, strict=True):
        lines = [line.strip() for line in graph.splitlines()[1:] if line.startswith("    ")]
        assert block.strip().splitlines() == lines


# -- decisions, and patterns of the user ------------------------------------------------------------------

RELU = torch.ops.aten.relu.default
FAST_LINKS = dataclasses.replace(GPU, name="fast links", bandwidth=1e13, fused_bandwidth=1e13)


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def test_a_prediction_by_hand() -> None:
    machine = Machine("m", 1.0, 100.0, 10.0, 0.5, 50.0, 0.25)
    half = torch.float16
    # 6 x 4 numbers of 2 bytes are gathered, of which 24 come from others; 2 * 6 * 5 * 4 operations
    moved, multiplied = 24.0, 24.0
    assert predict("all_gather", 6, 5, 4, 2, dtype=half, machine=machine) == Prediction(
        1 + moved / 100 + multiplied, 0.5 + moved / 50 + multiplied - 0.25 * moved / 50
    )
    moved = 30.0  # bytes of the product
    fused = 0.5 * 3 + 0.75 * moved / 50 + multiplied
    assert predict(
        "reduce_scatter", 6, 5, 4, 2, dtype=half, machine=machine, bias=True, terms=2, batch=3
    ) == pytest.approx((1 + moved / 100 + multiplied, fused + 48 / 100 + 1))
    unfused, _ = predict("all_reduce", 6, 5, 4, 2, dtype=half, machine=machine)
    assert unfused == pytest.approx(1 + 2 * moved / 100 + multiplied)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"collective": "gather"}, "collective must be one of all_gather, .*, got 'gather'"),
        ({"inner": -1}, "inner must be at least 0, got -1"),
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"terms": -2}, "terms must be at least 1, got -2"),
        ({"rows": 1.5}, "rows must be an int, got 1.5"),
        ({"columns": None}, "columns must be an int, got None"),
        ({"dtype": "bf16"}, "dtype must be a dtype, got 'bf16'"),
        ({"machine": "gpu"}, "machine must be a Machine, got 'gpu'"),
    ],
)
def test_what_cannot_be_predicted(wrong: dict[str, Any], text: str) -> None:
    right = {"collective": "all_gather", "rows": 1, "columns": 1, "inner": 1, "world_size": 1}
    right |= {"dtype": torch.float32, "machine": CPU}
    with pytest.raises((ValueError, TypeError), match=text):
        predict(**right | wrong)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"policy": "often"}, "policy must be one of"),
        ({"machine": "gpu"}, "machine must be a Machine or None, got 'gpu'"),
        ({"patterns": [1]}, r"patterns\[0\] must be a Pattern, got 1"),
        ({"patterns": 1}, "patterns must be a sequence of Patterns, got 1"),
    ],
)
def test_options_of_the_pass_are_refused_when_it_is_made(wrong: dict[str, Any], text: str) -> None:
    for made in (FusionPass, lambda **options: fuse(fx.Graph(), **options)):
        with pytest.raises((ValueError, TypeError), match=text):
            made(**wrong)


def test_the_pass_decides_by_it() -> None:
    def gather(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        whole = functional.all_gather(x, 1, group=GROUP)
        return whole @ w, whole @ v

    def reduce(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        product = torch.addmm(bias, rows, w) + rows @ w
        return functional.reduce_scatter(product, "sum", 0, group=GROUP) * 1

    half = torch.bfloat16
    x, w = torch.ones(2, 8, 16, dtype=half), torch.ones(16, 4, dtype=half)
    for machine in (CPU, GPU):
        how: dict[str, Any] = {"dtype": half, "machine": machine}
        of_gather = predict("all_gather", 64, 16, 16, 4, **how)
        of_reduce = predict("reduce_scatter", 16, 4, 32, 4, bias=True, terms=2, **how)
        for function, shape, expected in ((gather, (16, 12), of_gather), (reduce, (4,), of_reduce)):
            last = torch.ones(shape, dtype=half)
            report = fuse(graph_of(function, x, w, last), machine=machine)
            (found,) = report.candidates
            assert (found.unfused_seconds, found.fused_seconds) == expected
            assert bool(report.fused) is (expected.fused < expected.unfused)


# -- patterns ------------------------------------------------------------------------------------------


def layer(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(functional.all_gather(x, group=GROUP))


def with_matmul(x: torch.Tensor, w: torch.Tensor) -> Any:
    return layer(x), functional.all_gather(x, group=GROUP) @ w


def find(collective: Collective) -> fx.Node | None:
    readers = list(collective.result.users)
    alone = collective.kind == "all_gather" and len(readers) == 1
    return readers[0] if alone and readers[0].target is RELU else None


def rewrite(collective: Collective, after: fx.Node) -> None:
    with after.graph.inserting_before(collective.start):
        before = call(RELU, (collective.input,), after)
    collective.start.replace_input_with(collective.input, before)
    after.replace_all_uses_with(collective.result)


EARLY = Pattern("relu_then_all_gather", find, rewrite)


def names(graph: fx.Graph) -> list[str]:
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return [str(node.target).removesuffix(".default").rpartition(".")[2] for node in nodes]


def test_a_pattern_comes_before_interlaces_own() -> None:
    graph = graph_of(with_matmul, torch.ones(4, 8), torch.ones(8, 2))
    report = fuse(graph, policy="always", patterns=[EARLY])
    assert [each.op for each in report.fused] == ["relu_then_all_gather", "all_gather_matmul"]
    assert names(graph)[:3] == ["relu", "all_gather", "wait_tensor"]
    relu = next(node for node in graph.nodes if node.target is RELU)
    assert relu.meta["val"].shape == (4, 8)
    graph.lint()


def test_the_first_pattern_that_finds_something_decides() -> None:
    never_asked = Pattern("second", lambda _: pytest.fail("asked"), rewrite)
    graph = graph_of(layer, torch.ones(4, 8))
    assert [c.op for c in fuse(graph, patterns=[EARLY, never_asked]).fused] == [EARLY.name]
    other = Pattern("other", lambda _: None, lambda *_: pytest.fail("found nothing"))
    graph = graph_of(layer, torch.ones(4, 8))
    assert [c.op for c in fuse(graph, patterns=[other, EARLY]).fused] == [EARLY.name]


@pytest.mark.parametrize(
    ("policy", "machine", "reason"),
    [
        ("never", FAST_LINKS, 'policy is "never"'),
        ("auto", CPU, "predicted to be slower fused"),
        ("auto", FAST_LINKS, ""),
        ("always", CPU, ""),
    ],
)
def test_policy_and_prediction_of_a_pattern(policy: str, machine: Machine, reason: str) -> None:
    def seconds(collective: Collective, relu: fx.Node, machine: Machine) -> Prediction:
        assert relu.target is RELU and collective.size == 4
        return Prediction(1.0, 1.5 if machine is CPU else 0.5)

    graph = graph_of(layer, torch.ones(4, 8))
    pattern = dataclasses.replace(EARLY, predict=seconds)
    report = fuse(graph, policy=policy, machine=machine, patterns=[pattern])
    (candidate,) = report.candidates
    assert (candidate.reason, candidate.fused) == (reason, not reason)
    assert candidate.unfused_seconds == 1.0 and candidate.shape == "4x8"
    assert names(graph)[0] == ("all_gather" if reason else "relu")


def test_in_torch_compile() -> None:
    reports: list[Report] = []

    def on_rank() -> tuple[Any, list[str]]:
        options = {"codegen": "aot_eager", "patterns": [EARLY], "on_report": reports.append}

        def gathered(x: torch.Tensor) -> torch.Tensor:
            return torch.relu(functional.all_gather(x))

        compiled = torch.compile(gathered, backend="interlace", options=options)
        return compiled(torch.tensor([[-1.0, 2.0]])).tolist(), [c.op for c in reports[0].fused]

    assert interlace.run(on_rank, 1) == [([[0.0, 2.0]], ["relu_then_all_gather"])]
    assert FusionPass().uuid() is not None
    assert FusionPass(patterns=[EARLY]).uuid() is None  # nothing is known of its code
