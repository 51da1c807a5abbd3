"""interlace.functional in a process without any group: make_fx, FakeTensor, meta, export, torch.compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import interlace
from interlace import functional
from interlace.functional import AsyncTensor, wait
from interlace.ops.library import BY_NAME
from interlace.ops.op.op import Setting
from multi.functional.op_cases import TABLE, flat, reference
from ranks import ranks

TP = interlace.GroupSpec("tp", 4)
ANY = interlace.GroupSpec("any")
SIZE = 4
CASES = {case.op: case for case in reversed(TABLE) if not case.uneven and "norm" not in case.op}
"""The first case of each op with one result, of float64."""


def right_shape(name: str) -> torch.Size:
    every = [CASES[name].inputs(rank, SIZE) for rank in range(SIZE)]
    return flat(reference(CASES[name], every))[0].shape


every_op = pytest.mark.parametrize("name", CASES)


def ops_of(graph: torch.fx.Graph) -> list[str]:
    """Return the names of the ops; interlace's have their namespace."""
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    names = [t._schema.name for t in targets if isinstance(t, torch._ops.OpOverload)]
    return [name.replace("::", ".").removeprefix("aten.") for name in names]


@pytest.fixture(autouse=True)
def no_group() -> None:
    assert not dist.is_initialized()
    torch._dynamo.reset()


class Works(torch.nn.Module):
    """A module that starts the op, does other work, and uses or returns the result."""

    def __init__(self, name: str, *, group: Any = TP, uses: bool = True) -> None:
        super().__init__()
        self.name, self.group, self.uses = name, group, uses

    def forward(self, *tensors: torch.Tensor) -> Any:
        result = CASES[self.name].bound(size=SIZE, group=self.group)(*tensors)
        meanwhile = torch.sin(tensors[0])
        return torch.cos(result) if self.uses else result, meanwhile


def exported(works: Works, *, strict: bool = False) -> Any:
    inputs = tuple(CASES[works.name].inputs(0, SIZE))
    graph = torch.export.export(works, inputs, strict=strict).graph
    if works.uses:
        output = graph.find_nodes(op="output")[0].args[0][0]
        assert output.meta["val"].shape == right_shape(works.name)
    return graph


def traced(works: Works, mode: str = "fake", *, functionalized: bool = False) -> torch.fx.Graph:
    def call(*tensors: torch.Tensor) -> Any:
        return works(*tensors)

    function = torch.func.functionalize(call) if functionalized else call
    return make_fx(function, tracing_mode=mode)(*CASES[works.name].inputs(0, SIZE)).graph


WAYS: dict[str, Callable[[Works], torch.fx.Graph]] = {
    "fake": traced,
    "symbolic": lambda works: traced(works, "symbolic"),
    "functionalized": lambda works: traced(works, functionalized=True),
    "export": exported,
    "strict export": lambda works: exported(works, strict=True),
}


@every_op
@pytest.mark.parametrize("way", WAYS)
def test_graphs(name: str, way: str) -> None:
    graph = WAYS[way](Works(name))
    found = [op for op in ops_of(graph) if not op.startswith("sym")]
    wait = "_c10d_functional.wait_tensor"
    between = [wait, "sin"] if way == "functionalized" else ["sin", wait]
    assert found == [f"interlace.{name}", *between, "cos"]
    start = next(node for node in graph.nodes if "interlace" in str(node.target))
    assert start.args[-2:] == (4, "tp") and start.name.startswith(name)


@every_op
@pytest.mark.parametrize("way", ["fake", "export"])
def test_results_that_are_returned_unwaited(name: str, way: str) -> None:
    graph = WAYS[way](Works(name, uses=False))
    assert ops_of(graph) == [f"interlace.{name}", "sin", "_c10d_functional.wait_tensor"]
    assert not graph.find_nodes(op="get_attr")


@pytest.mark.parametrize("name", [name for name in CASES if name != "permute"])
def test_any_size(name: str) -> None:
    inputs = tuple(CASES[name].inputs(0, SIZE))
    graph = torch.export.export(Works(name, group=ANY), inputs).graph
    names = ops_of(graph)
    assert names[0] == "interlace.group_size"
    assert [n for n in names if n.startswith("interlace")][1:] == [f"interlace.{name}"]
    target = getattr(torch.ops.interlace, name).default
    (start,) = graph.find_nodes(op="call_function", target=target)
    assert isinstance(start.args[-2], torch.fx.Node)


@every_op
def test_fake_and_meta_tensors(name: str) -> None:
    call, shape = CASES[name].bound(size=SIZE, group=TP), right_shape(name)
    inputs = CASES[name].inputs(0, SIZE)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = call(*map(mode.from_tensor, inputs))
        assert type(result) is AsyncTensor and result.shape == shape
        assert wait(result).stride() == result.stride()
        assert (result * 2).shape == shape
    result = call(*[each.to("meta") for each in inputs])
    assert result.shape == shape and (result * 2).is_meta


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
            h = functional.all_gather_matmul(x, torch.ones(3, 8), group=TP)
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


@ranks(1, place="sim")
def test_ops_conform() -> None:
    """torch's check of custom ops tests the schema, the fake kernel and the gradients."""
    for name in [name for name in BY_NAME if "scaled" not in name]:
        example = BY_NAME[name].example(Setting(0, 1, rows=(2,)))
        example |= {root: 0 for root in ("src", "dst") if root in example}
        for each in tree_leaves(example):
            if isinstance(each, torch.Tensor) and each.dtype == torch.float32:
                each.requires_grad_(BY_NAME[name].gradient is not None)
        op = getattr(torch.ops.interlace, name).default
        assert torch.Tag.needs_fixed_stride_order in op.tags, name
        checks = "test_schema", "test_autograd_registration", "test_faketensor"
        torch.library.opcheck(op, (*example.values(), 1, "0"), test_utils=checks)
