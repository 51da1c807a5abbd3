"""interlace.functional under torch.compile on ranks: ops, graphs, dynamic shapes, memory."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import interlace
from interlace import functional
from interlace.functional import AsyncTensor, wait
from interlace.ops.matmul.formats import quantize
from multi.functional.op_cases import TABLE, Case, close_gradients, compare, expected, flat
from ranks import ranks
from support import compiled_anew
from tiers import thorough

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
Tensor = torch.Tensor


def own_value() -> float:
    return 1.0 + interlace.get_rank()


def compiled(function: Any, backend: Any = "aot_eager") -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


# -- every op ------------------------------------------------------------------------------------------


def check_in_one_graph(cases: list[Case], *, explicit: bool, backend: str = "aot_eager") -> None:
    """Forward and backward of one compiled function, with waits that are written, or at the first use."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    calls = [(case.bound(), len(case.inputs(rank, size))) for case in cases]

    def run(*inputs: Tensor) -> list[Tensor]:
        results, at = [], 0
        for call, count in calls:
            for each in flat(call(*inputs[at : at + count])):
                results.append((wait(each) if explicit else each) * 2)
            at += count
        return results

    right, right_grads, weights = [], [], []
    for case in cases:
        outputs, grads, cotangents = expected(case)
        right += outputs
        right_grads += grads
        weights += cotangents
    inputs = [x.requires_grad_() for case in cases for x in case.inputs(rank, size)]
    got = compiled(run, backend)(*inputs)
    for each, value in zip(got, right, strict=True):
        assert type(each) is Tensor
        torch.testing.assert_close(each, 2 * value)
    sums = [(each * weight).sum() for each, weight in zip(got, weights, strict=True)]
    torch.stack(sums).sum().backward()
    close_gradients(inputs, right_grads, 2)


ONE_OF_EACH_OP = list({case.op: case for case in reversed(TABLE)}.values())


@ranks()
def test_ranks_of_a_graph_compare_k_as_a_number_of_values() -> None:
    """A graph has only the lengths of packed rows, in bytes."""
    x = quantize(torch.ones(4, (160, 288)[interlace.get_rank()]), "mxfp4")
    factors = x.values, x.values.mT, x.scales, x.scales.mT
    words = r"padded to 128\) differs between ranks: \(256,\) on rank 0, \(384,\) on rank 1"

    def product(*factors: Any) -> Any:
        return wait(functional.all_gather_scaled_matmul(*factors))  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=words):
        compiled(product)(*factors)


@thorough
@pytest.mark.parametrize("explicit", [False, True])
@ranks()
def test_every_op_in_one_graph(explicit: bool) -> None:
    check_in_one_graph(ONE_OF_EACH_OP if explicit else TABLE, explicit=explicit)


@thorough
@ranks()
def test_every_op_in_one_graph_of_inductor() -> None:
    check_in_one_graph(ONE_OF_EACH_OP, explicit=False, backend="inductor")
    for case in TABLE:
        if case.uneven and case.options.get("scatter_dim") == 1:  # which is empty on the last rank
            compare(case, "inductor")


@ranks()
def test_results_of_which_a_loss_uses_one() -> None:
    """For unused results torch passes plain tensors of zeros to the backward."""

    def run(x: Tensor) -> list[Tensor]:
        return [functional.all_reduce(x * 2), functional.all_gather(x.sin()).t(), x.sum()]

    graph = compiled(run)
    for index in range(3):
        grads = []
        for each in (run, graph):
            x = torch.arange(6.0).view(2, 3).requires_grad_()
            each(x)[index].square().sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads)


@ranks()
def test_a_rank_with_a_graph_and_one_without_go_on() -> None:
    """Dynamo may stop compiling a function on some ranks only."""

    def squares(x: Tensor) -> Tensor:
        return functional.matmul_all_reduce(x * x, torch.ones(2, 1)) * 2

    rank = interlace.get_rank()
    x = torch.full((1, 2), own_value(), requires_grad=True)
    y = (squares if rank else compiled(squares))(x)
    y.sum().backward()
    assert y.item() == 20.0
    assert x.grad is not None and x.grad.tolist() == [[8.0 * own_value()] * 2]


# -- graphs --------------------------------------------------------------------------------------------


def graphs_of(function: Callable[..., Any], *inputs: Any) -> tuple[Any, list[list[str]]]:
    """The result of ``function`` compiled, and the ops of the forward and the backward graph."""
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append(
            [t._schema.name.split("::")[1] for t in targets if isinstance(t, torch._ops.OpOverload)]
        )
        return graph.forward

    return compiled(function, aot_autograd(fw_compiler=keep, bw_compiler=keep))(*inputs), graphs


@thorough
@ranks()
def test_unwaited_results_and_arguments_of_graphs() -> None:
    def starts(x: Tensor) -> tuple[Tensor, Tensor]:
        return functional.all_gather(x * 2), x + 1

    def ends(y: Tensor, z: Tensor) -> Tensor:
        return y.sum() + z

    x = torch.full((2,), own_value())
    (y, z), graphs = graphs_of(starts, x)
    assert graphs == [["mul", "all_gather", "add"]]
    assert type(y) is AsyncTensor and type(z) is Tensor
    summed, graphs = graphs_of(ends, y, z)
    assert graphs == [["wait_tensor", "sum", "add"]] and summed.tolist() == [13 + own_value()] * 2
    for taken, doubled in (
        (functional.all_reduce(x), [6.0, 6.0]),
        (y, [4.0, 4.0, 8.0, 8.0]),
        (wait(functional.all_reduce(x)), [6.0, 6.0]),
    ):
        assert graphs_of(lambda t: t * 2, taken)[0].tolist() == doubled
    x.requires_grad_()
    (y, z), _ = graphs_of(starts, x)
    graphs_of(ends, y, z)[0].sum().backward()
    # from the sum, on both elements of both ranks, and from the 1
    assert x.grad is not None and x.grad.tolist() == [9.0, 9.0]
    leaves: list[Callable[[Any], Any]] = [
        wait, lambda y: y.wait(), lambda y: y.view(2, -1), lambda y: y + 0, lambda y: y,
    ]  # fmt: skip
    for leave in leaves:
        x.grad = None
        left = leave(graphs_of(starts, x)[0][0])
        left.backward(torch.ones(left.shape))
        assert x.grad is not None and x.grad.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("uneven", [False, True])
@ranks()
def test_one_graph_for_all_batches(uneven: bool) -> None:
    compilations = 0

    def run(x: Tensor, w: Tensor) -> Tensor:
        if uneven:
            return functional.matmul_reduce_scatter(x, w) * 2
        h = functional.all_gather_matmul(x, w)
        part = functional.reduce_scatter(torch.relu(h), "avg")
        return functional.matmul_reduce_scatter(functional.all_gather(part), w.t()) + x

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    graph = compiled(run, counting)
    w = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for batch in (5, 7, 11, 33) if uneven else (4, 6, 10, 34):
        x = torch.full((batch, 3), own_value(), requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        other = x.detach().clone().requires_grad_()
        got, right = graph(x, w), run(other, w)
        torch.testing.assert_close(got, right)
        got.square().sum().backward()
        right.square().sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
    assert compilations == 1


@pytest.mark.parametrize("above_autograd", [False, True])
@ranks()
def test_make_fx(above_autograd: bool) -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = functional.all_reduce(x)
        z = x + 1
        return y * z, functional.all_gather(x)

    x = torch.full((2,), own_value())
    graph = make_fx(run, pre_dispatch=above_autograd)(x)
    for given in (x, x + 1):
        torch.testing.assert_close(graph(given), run(given))
    assert [str(node.target) for node in graph.graph.nodes if node.op == "call_function"] == [
        "interlace.all_reduce.default", "aten.add.Tensor", "_c10d_functional.wait_tensor.default",
        "aten.mul.Tensor", "interlace.all_gather.default", "_c10d_functional.wait_tensor.default",
    ]  # fmt: skip


@ranks()
def test_out_and_ops_in_place() -> None:
    x, out = torch.full((2,), own_value()), torch.zeros(2)

    def with_out(x: Tensor, out: Tensor) -> Tensor:
        functional.all_reduce(x, out=out)
        return out + 1

    def in_place(x: Tensor) -> Tensor:
        y = torch.ops.interlace.all_reduce_(x, "sum", 2, "0")
        return torch.ops._c10d_functional.wait_tensor(y) + 1  # type: ignore[no-any-return]

    first, second = compiled(with_out)(x, out), compiled(in_place)(x)
    assert first.tolist() == second.tolist() == [4.0, 4.0]
    assert x.tolist() == out.tolist() == [3.0, 3.0]


# -- Inductor ------------------------------------------------------------------------------------------


def code_of(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> tuple[Any, str]:
    """Compile ``function`` anew; return its result and Inductor's code from the call on."""
    with compiled_anew(**options):
        result, (code,) = run_and_get_code(compiled(function, "inductor"), *inputs)
    return result, code[code.index("def call") :]


@thorough
@pytest.mark.parametrize("cache", [False, True])
@ranks()
def test_inductor_reduces_in_place(cache: bool) -> None:
    """Inductor copies no input that nothing uses later; without the lowering the op is out of place."""

    def run(x: Tensor) -> Tensor:
        return functional.all_reduce(torch.relu(x)) * 2

    x = torch.full((3, 5), own_value())
    if cache:
        with config.patch(fx_graph_cache=True):
            result, (code,) = run_and_get_code(compiled(run, "inductor"), x)
        code = code[code.index("def call") :]
    else:
        result, code = code_of(run, x)
    assert torch.equal(x, torch.full((3, 5), own_value()))
    assert torch.equal(result, torch.full((3, 5), 6.0))
    (buffer,) = re.findall(r"interlace\.all_reduce_\.default\((buf\d+), 'sum', 2, '0'\)", code)
    assert f"wait_tensor.default({buffer})" in code
    assert "interlace.all_reduce.default" not in code
    assert code[: code.index("all_reduce_")].count("empty_strided") == 1, "a copy was made"


@thorough
@ranks()
def test_inductor_keeps_work_between_start_and_wait() -> None:
    """``reorder_for_locality`` would move the work after the wait."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        gathered = functional.all_gather(x)
        work = torch.sin(w @ w) @ w
        return torch.cos(gathered) @ work

    inputs = torch.rand(2, 64, 64, dtype=torch.float64)
    result, code = code_of(run, *inputs, reorder_for_peak_memory=False)
    torch.testing.assert_close(result, run(*inputs))
    start = code.index("interlace.all_gather.default")
    assert code[start : code.index("wait_tensor.default")].count("extern_kernels") >= 1, code


@thorough
@ranks()
def test_inductor_leaves_memory_in_flight_alone() -> None:
    """Inductor must not reuse the inputs and outputs of an op that still runs."""

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        gathered = functional.all_gather_matmul(torch.relu(x), torch.cos(w))
        left = functional.all_gather(torch.exp(x))
        work = torch.sin(w) @ w
        for _ in range(4):
            work = torch.sin(work) @ w / 64
        return left, gathered[: work.shape[0]] + work

    graph = compiled(run, "inductor")
    with compiled_anew(reorder_for_peak_memory=False):
        _, (code,) = run_and_get_code(graph, *torch.rand(2, 64, 64, dtype=torch.float64))
    starts = re.findall(r"interlace\.all_gather\w*\.default\((buf\d+)(?:, \[(buf\d+)\])?", code)
    used = {name for names in starts for name in names if name}
    assert len(used) == 3, code
    reused = set(re.findall(r"= (buf\d+); del buf\d+  # reuse", code))
    assert reused and not reused & used, (reused, used)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x, w = torch.rand(2, 64, 64, generator=generator, dtype=torch.float64)
        x += interlace.get_rank()
        got, right = graph(x, w), run(x, w)
        assert type(got[0]) is AsyncTensor
        for each, other in zip(got, right, strict=True):
            torch.testing.assert_close(wait(each), wait(other))


@thorough
@ranks()
def test_inductor_leaves_what_is_exchanged_alone() -> None:
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        sent = functional.matmul_all_to_all(torch.tanh(x), x)
        return (w @ w) @ w, wait(sent)

    _, code = code_of(run, *torch.rand(2, 64, 64))
    (sent,) = re.findall(r"interlace\.matmul_all_to_all\.default\((buf\d+),", code)
    assert f"del {sent}  # reuse" not in code


@thorough
@ranks()
def test_inductor_has_ops_of_more_results_than_inputs() -> None:
    """Inductor looks for one input for each result."""

    def run(x: Tensor) -> Tensor:
        (normed, scale), total = functional.all_reduce_norm(
            x, norm=interlace.RMSNorm(eps=1e-6), quantize="fp8"
        )
        return normed.float() * scale + total

    x = torch.arange(64.0).view(2, 32) + interlace.get_rank()
    torch.testing.assert_close(code_of(run, x)[0], run(x))
