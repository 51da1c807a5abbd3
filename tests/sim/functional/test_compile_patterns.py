"""The prediction of the fusion pass and patterns of one's own in it, as a compiler's author calls them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import interlace
import interlace.compile as compiler
from interlace import functional
from interlace.compile import (
    CPU,
    GPU,
    Collective,
    FusionPass,
    Machine,
    Pattern,
    Prediction,
    fuse,
    predict,
)

GROUP = interlace.GroupSpec("tp", 4)
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
    moved = 30.0  # of the product
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
    """For the shapes of a graph: several weights, a sum of terms, and a bias."""

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
        for function, last, expected in (
            (
                gather,
                torch.ones(16, 12, dtype=half),
                predict("all_gather", 64, 16, 16, 4, dtype=half, machine=machine),
            ),
            (
                reduce,
                torch.ones(4, dtype=half),
                predict(
                    "reduce_scatter", 16, 4, 32, 4, dtype=half, machine=machine, bias=True, terms=2
                ),
            ),
        ):
            report = compiler.fuse(graph_of(function, x, w, last), machine=machine)
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
        before = compiler.call(RELU, (collective.input,), after)
    collective.start.replace_input_with(collective.input, before)
    after.replace_all_uses_with(collective.result)


EARLY = Pattern("relu, all_gather", find, rewrite)


def names(graph: fx.Graph) -> list[str]:
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return [str(node.target).removesuffix(".default").rpartition(".")[2] for node in nodes]


def test_a_pattern_comes_before_interlaces_own() -> None:
    graph = graph_of(with_matmul, torch.ones(4, 8), torch.ones(8, 2))
    report = compiler.fuse(graph, policy="always", patterns=[EARLY])
    assert [each.op for each in report.fused] == ["relu, all_gather", "all_gather_matmul"]
    assert names(graph)[:3] == ["relu", "all_gather", "wait_tensor"]
    relu = next(node for node in graph.nodes if node.target is RELU)
    assert relu.meta["val"].shape == (4, 8)
    graph.lint()


def test_the_first_pattern_that_finds_something_decides() -> None:
    never_asked = Pattern("second", lambda _: pytest.fail("asked"), rewrite)
    graph = graph_of(layer, torch.ones(4, 8))
    assert [c.op for c in compiler.fuse(graph, patterns=[EARLY, never_asked]).fused] == [EARLY.name]
    other = Pattern("other", lambda _: None, lambda *_: pytest.fail("found nothing"))
    graph = graph_of(layer, torch.ones(4, 8))
    assert [c.op for c in compiler.fuse(graph, patterns=[other, EARLY]).fused] == [EARLY.name]


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
    """It is asked with the machine of the pass; a pattern that is left leaves the graph as it was."""

    def seconds(collective: Collective, relu: fx.Node, machine: Machine) -> Prediction:
        assert relu.target is RELU and collective.size == 4
        return Prediction(1.0, 1.5 if machine is CPU else 0.5)

    graph = graph_of(layer, torch.ones(4, 8))
    pattern = dataclasses.replace(EARLY, predict=seconds)
    report = compiler.fuse(graph, policy=policy, machine=machine, patterns=[pattern])
    (candidate,) = report.candidates
    assert (candidate.reason, candidate.fused) == (reason, not reason)
    assert candidate.unfused_seconds == 1.0 and candidate.shape == "4x8"
    assert names(graph)[0] == ("all_gather" if reason else "relu")


def test_in_torch_compile() -> None:
    reports: list[compiler.Report] = []

    def on_rank() -> tuple[Any, list[str]]:
        options = {"codegen": "aot_eager", "patterns": [EARLY], "on_report": reports.append}

        def gathered(x: torch.Tensor) -> torch.Tensor:
            return torch.relu(functional.all_gather(x))

        compiled = torch.compile(gathered, backend="interlace", options=options)
        return compiled(torch.tensor([[-1.0, 2.0]])).tolist(), [c.op for c in reports[0].fused]

    assert interlace.run(on_rank, 1) == [([[0.0, 2.0]], ["relu, all_gather"])]
    assert compiler.FusionPass().uuid() is not None
    assert compiler.FusionPass(patterns=[EARLY]).uuid() is None  # nothing is known of its code
