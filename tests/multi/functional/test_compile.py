"""The fusion pass without ranks: what ``explain`` says, who decides, and programs that were exported."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import interlace
import interlace.compile
from interlace import functional
from multi.functional.fusion_patterns import GATHER, SCATTER
from tiers import few, thorough

GROUP = interlace.GroupSpec("tp", 4)


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    hidden = functional.all_gather(x, 0, group=GROUP) @ up
    return functional.reduce_scatter(torch.relu(hidden) @ down, "sum", 0, group=GROUP) * 1


def test_explain_without_a_process_group() -> None:
    small = interlace.compile.explain(
        mlp, *(torch.ones(8, 8, requires_grad=True) for _ in range(3))
    )
    assert [report.graph for report in small.reports] == ["forward", "backward"]
    assert [c.reason for c in small.candidates] == ["predicted to be slower fused"] * 4
    for candidate in small.candidates:
        assert candidate.fused_seconds > candidate.unfused_seconds > 0
        assert candidate.where.startswith("test_compile.py:")
    always = interlace.compile.explain(
        mlp, *(torch.ones(8, 8, requires_grad=True) for _ in range(3)), policy="always"
    )
    assert [c.op for c in always.fused] == [GATHER, SCATTER, GATHER, SCATTER]
    for report in always.reports:
        assert "interlace.all_gather.default" in report.before
        for left in ("all_gather.default", "reduce_scatter.default"):
            assert f"interlace.{left}" not in report.after
    never = interlace.compile.explain(mlp, *(torch.ones(8, 8) for _ in range(3)), policy="never")
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
    """Of two ranks that send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def test_explain_names_the_callers_line_and_the_module(mesh: DeviceMesh) -> None:
    """Of what torch's hooks do; where no frame is the user's, it is the line that calls explain."""
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(1)),
        "1": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(layers, mesh, plan)

    def places(model: torch.nn.Module) -> list[str]:
        found = interlace.compile.explain(model, torch.ones(2, 2, 8))
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

    told = interlace.compile.explain(function, torch.ones(8, 8), torch.ones(8, 8)).candidates
    assert sorted(each.collective for each in told) == ["all_gather", "all_to_all", "broadcast"]
    assert not any(each.fused for each in told)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_wait_of_ones_own_hides_no_matmul(waits: bool, learns: bool) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        whole = functional.all_gather(x, group=GROUP)
        return ((functional.wait(whole) if waits else whole) @ w).sum()

    x, w = (torch.ones(8, 8, requires_grad=learns) for _ in range(2))
    first, *_ = interlace.compile.explain(function, x, w, policy="always").candidates
    assert (first.collective, first.fused) == ("all_gather", True), first


@pytest.mark.parametrize(
    "options", few([{}, {"policy": "never"}, {"codegen": "aot_eager", "policy": "always"}])
)
def test_a_copy_stays_a_copy(options: dict[str, str]) -> None:
    """Of a tensor that changes afterwards, and of one that the caller may change."""

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
    """Composite ops between collectives: linear, matmul, flatten, a ``to`` that changes nothing, chunk."""

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
    report = interlace.compile.fuse(program, policy="always")
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
    """Of a module the code is new, too. Another thing is a TypeError that says what is accepted."""
    module = exported().module()
    for each in (exported().graph, module):
        assert len(interlace.compile.fuse(each, policy="always").fused) == 2
    assert f"interlace.{GATHER}" in module.code
    reports: list[interlace.compile.Report] = []
    interlace.compile.FusionPass("always", on_report=reports.append)(exported().module())
    assert len(reports[0].fused) == 2 and f"interlace.{SCATTER}" in reports[0].after
    with pytest.raises(TypeError, match=r"torch\.export\.ExportedProgram, got function"):
        interlace.compile.fuse(mlp)


def test_a_wrong_option_of_the_backend() -> None:
    with pytest.raises(Exception, match="codegen must be one of inductor, aot_eager, got 'c'"):
        torch.compile(lambda x: x + 1, backend="interlace", options={"codegen": "c"})(torch.ones(1))


@thorough
def test_the_graphs_in_the_docs() -> None:
    """docs/compile.md shows what docs/examples/fusion.py prints."""
    root = Path(__file__).parents[3]
    command = [sys.executable, str(root / "docs/examples/fusion.py")]
    environment = {**os.environ, "PYTHONPATH": str(root / "python")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    shown = [
        block for block in (root / "docs/compile.md").read_text().split("```") if "arg0_1" in block
    ]
    assert len(shown) == 2
    for graph, block in zip(done.stdout.split("def forward")[1:], shown, strict=True):
        lines = [line.strip() for line in graph.splitlines()[1:] if line.startswith("    ")]
        assert block.strip().splitlines() == lines
