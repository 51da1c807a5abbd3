"""interlace.functional in a process without any group: make_fx, FakeTensor, meta, export, torch.compile.

Every op is traced from shapes and the name of a group; the graph has what was called, with its arguments.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import interlace
from interlace import functional
from interlace.functional import AsyncTensor, wait
from interlace.ops.collectives.records import OPS as COLLECTIVES

TP = interlace.GroupSpec("tp", 4)
ANY = interlace.GroupSpec("any")
W = torch.ones(3, 8)

# name: the call on an input of 8 x 3, the shape of the result in a group of 4
OPS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "all_reduce": (lambda x, g, w: functional.all_reduce(x, "max", group=g), (8, 3)),
    "all_gather": (lambda x, g, w: functional.all_gather(x, 1, group=g), (8, 12)),
    "reduce_scatter": (lambda x, g, w: functional.reduce_scatter(x, "avg", 0, group=g), (2, 3)),
    "all_to_all": (lambda x, g, w: functional.all_to_all(x, group=g), (8, 3)),
    "broadcast": (lambda x, g, w: functional.broadcast(x, 1, group=g), (8, 3)),
    "reduce": (lambda x, g, w: functional.reduce(x, "sum", 1, group=g), (8, 3)),
    "permute": (lambda x, g, w: functional.permute(x, [1, 2, 3, 0], group=g), (8, 3)),
    "gather": (lambda x, g, w: functional.gather(x, 0, -2, group=g), (32, 3)),
    "scatter": (lambda x, g, w: functional.scatter(x, 0, 0, group=g), (2, 3)),
    "all_gather_matmul": (lambda x, g, w: functional.all_gather_matmul(x, w, group=g), (32, 8)),
    "matmul_reduce_scatter": (
        lambda x, g, w: functional.matmul_reduce_scatter(x, w, "sum", 1, group=g),
        (8, 2),
    ),
    "matmul_all_reduce": (lambda x, g, w: functional.matmul_all_reduce(x, w, group=g), (8, 8)),
}


def test_every_collective_is_traced() -> None:
    assert {op.name for op in COLLECTIVES} - OPS.keys() == {"rank"}  # which no function gives


every_op = pytest.mark.parametrize("name", OPS)


def ops_of(graph: torch.fx.Graph) -> list[str]:
    """Names of the ops, those of interlace by their namespace."""
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    names = [t._schema.name for t in targets if isinstance(t, torch._ops.OpOverload)]
    return [name.replace("::", ".").removeprefix("aten.") for name in names]


def works_between(name: str, group: Any) -> Callable[..., Any]:
    """A function that starts the op, does something else, and uses the result."""

    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        result = OPS[name][0](x, group, w)
        meanwhile = torch.sin(x)
        return torch.cos(result), meanwhile

    return function


@pytest.fixture(autouse=True)
def no_group() -> None:
    assert not dist.is_initialized()
    torch._dynamo.reset()


def expected_ops(name: str) -> list[str]:
    return [f"interlace.{name}", "sin", "_c10d_functional.wait_tensor", "cos"]


@every_op
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_make_fx(name: str, mode: str) -> None:
    graph = make_fx(works_between(name, TP), tracing_mode=mode)(torch.ones(8, 3), W).graph
    assert [op for op in ops_of(graph) if not op.startswith("sym")] == expected_ops(name)
    start = next(node for node in graph.nodes if "interlace" in str(node.target))
    assert start.args[-2:] == (4, "tp") and start.name.startswith(name)


@every_op
@pytest.mark.parametrize("strict", [False, True])
def test_export(name: str, strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return works_between(name, TP)(x, W)

    program = torch.export.export(Module(), (torch.ones(8, 3),), strict=strict)
    assert ops_of(program.graph) == expected_ops(name)
    shape = program.graph.find_nodes(op="output")[0].args[0][0].meta["val"].shape
    assert tuple(shape) == OPS[name][1]


@every_op
def test_results_that_are_returned_unwaited(name: str) -> None:
    def returned(x: torch.Tensor, w: torch.Tensor) -> Any:
        return OPS[name][0](x, TP, w), torch.sin(x)

    class Module(torch.nn.Module):
        forward = staticmethod(returned)

    inputs = torch.ones(8, 3), W
    expected = [f"interlace.{name}", "sin", "_c10d_functional.wait_tensor"]
    for graph in (
        make_fx(returned, tracing_mode="fake")(*inputs),
        torch.export.export(Module(), inputs),
    ):
        assert ops_of(graph.graph) == expected and not graph.graph.find_nodes(op="get_attr")


@every_op
def test_functionalize(name: str) -> None:
    function = torch.func.functionalize(works_between(name, TP))
    graph = make_fx(function, tracing_mode="fake")(torch.ones(8, 3), W).graph
    assert ops_of(graph) == [f"interlace.{name}", "_c10d_functional.wait_tensor", "sin", "cos"]


@pytest.mark.parametrize("above_autograd", [False, True])
def test_what_would_not_be_in_the_graph_is_refused(above_autograd: bool) -> None:
    def summed(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        interlace.all_reduce(y)
        return y

    def on_rank() -> None:
        make_fx(summed, pre_dispatch=above_autograd)(torch.ones(2))

    with pytest.raises(
        TypeError, match=r"all_reduce would not be in the graph.*interlace\.functional"
    ):
        interlace.run(on_rank, 2)


@every_op
def test_compile_with_fullgraph(name: str) -> None:
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(ops_of(graph.graph))
        return lambda args: [torch.ones(OPS[name][1]), torch.ones(8, 3)]

    keep_boxed: Any = lambda graph, inputs: boxed(keep(graph, inputs))  # noqa: E731
    compiled = torch.compile(
        works_between(name, TP), backend=aot_autograd(fw_compiler=keep_boxed), fullgraph=True
    )
    compiled(torch.ones(8, 3), W)
    assert graphs == [expected_ops(name)]


def boxed(function: Any) -> Any:
    function._boxed_call = True
    return function


@every_op
def test_fake_and_meta_tensors(name: str) -> None:
    call, shape = OPS[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        result = call(torch.ones(8, 3), TP, W)
        assert type(result) is AsyncTensor and tuple(result.shape) == shape
        assert wait(result).stride() == result.stride()
        assert tuple((result * 2).shape) == shape
    result = call(torch.ones(8, 3, device="meta"), TP, W.to("meta"))
    assert tuple(result.shape) == shape and (result * 2).is_meta


@every_op
def test_any_size(name: str) -> None:
    """The graph asks for the size of the group; no shape of 4 ranks is in it."""
    if name == "permute":
        pytest.skip("its argument is as long as the group")

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return OPS[name][0](x, ANY, W) * 2

    program = torch.export.export(Module(), (torch.ones(8, 3),))
    names = ops_of(program.graph)
    assert names[0] == "interlace.group_size"
    assert [n for n in names if n.startswith("interlace")][1:] == [f"interlace.{name}"]
    start = program.graph.find_nodes(
        op="call_function", target=getattr(torch.ops.interlace, name).default
    )[0]
    assert isinstance(start.args[-2], torch.fx.Node)


def test_gradients_are_traced_without_a_group() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        loss = functional.all_gather_matmul(x, w, group=TP).sum()
        return torch.autograd.grad(loss, [x, w])

    inputs = torch.ones(8, 3, requires_grad=True), torch.ones(3, 8, requires_grad=True)
    graph = make_fx(step, tracing_mode="fake")(*inputs).graph
    names = [name for name in ops_of(graph) if "." in name or name == "mm"]
    assert names == [
        "interlace.all_gather_matmul", "_c10d_functional.wait_tensor",
        "interlace.matmul_reduce_scatter", "_c10d_functional.wait_tensor", "mm",
        "_c10d_functional.wait_tensor",
    ]  # fmt: skip


def test_dynamic_shapes_are_not_specialized() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            h = functional.all_gather_matmul(x, W, group=TP)
            return functional.reduce_scatter(torch.relu(h), "sum", group=TP) + 1

    batch = torch.export.Dim("batch", min=2, max=4096)
    program = torch.export.export(Module(), (torch.ones(8, 3),), dynamic_shapes=({0: batch},))
    assert len(program.range_constraints) == 1
    output = program.graph.find_nodes(op="output")[0].args[0][0].meta["val"]
    assert not isinstance(output.shape[0], int) and output.shape[1] == 8


def test_errors_while_tracing() -> None:
    for call, message in (
        (lambda x: functional.reduce_scatter(x, group=interlace.GroupSpec("tp", 3)), "not divide"),
        (lambda x: functional.all_gather(x, 2, group=TP), "gather_dim must be within -2..1"),
        (lambda x: functional.permute(x, [0, 0, 1, 2], group=TP), "each rank of 0..3 once"),
        (lambda x: functional.all_to_all(x, [8], None, group=TP), "one entry per rank, 4"),
    ):
        with pytest.raises(ValueError, match=message):
            make_fx(call, tracing_mode="fake")(torch.ones(8, 3))


def test_ops_conform() -> None:
    """torch's own check of custom ops, in a group of one: schema, fake kernel, gradients."""

    def body() -> None:
        x = torch.randn(4, 3, requires_grad=True)
        w = torch.randn(3, 2, requires_grad=True)
        calls: dict[str, tuple[Any, ...]] = {
            "all_reduce": (x, "sum"),
            "all_gather": (x, 1),
            "reduce_scatter": (x, "sum", 1),
            "all_to_all": (x, None, None),
            "broadcast": (x, 0),
            "permute": (x, [0]),
            "all_gather_matmul": (x, [w], [], 0, True, "auto", None),
            "matmul_reduce_scatter": (x, w, None, "sum", 0, None, "auto", None),
            "matmul_all_reduce": (x, w, None, "sum", "auto", None),
        }
        for name, args in calls.items():
            op = getattr(torch.ops.interlace, name).default
            assert torch.Tag.needs_fixed_stride_order in op.tags, name
            torch.library.opcheck(
                op, (*args, 1, "0"), test_utils=("test_schema", "test_autograd_registration",
                "test_faketensor"),
            )  # fmt: skip

    interlace.run(body, 1)
