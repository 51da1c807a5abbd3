"""Ranks of test_functional_compiled.py: graphs, unwaited results, dynamic shapes, Inductor."""

import re
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import interlace
from interlace import functional
from interlace.functional import AsyncTensor, wait
from multi.functional.functional_ranks import Function, place
from multi.functional.functional_ranks_cases import CASES, expected, flat
from support import compiled_anew


def in_one_graph(backend: str, explicit: bool, names: list[str]) -> None:
    """Several ops in one compiled function, forward and backward."""
    rank, size = place()
    cases = [CASES[name] for name in names]
    counts = [len(case.inputs(rank, size)) for case in cases]

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        results, at = [], 0
        for case, count in zip(cases, counts, strict=True):
            for each in flat(case.call(None, *inputs[at : at + count])):
                results.append((wait(each) if explicit else each) * 2)
            at += count
        return results

    right, right_grads, weights = [], [], []
    for case in cases:
        outputs, grads, cotangents = expected(case, rank, size)
        right += outputs
        right_grads += grads
        weights += cotangents
    inputs = [x.requires_grad_() for case in cases for x in case.inputs(rank, size)]
    torch._dynamo.reset()
    got = torch.compile(run, backend=backend, fullgraph=True)(*inputs)
    for each, value in zip(got, right, strict=True):
        assert type(each) is torch.Tensor
        torch.testing.assert_close(each, 2 * value)
    sum((each * weight).sum() for each, weight in zip(got, weights, strict=True)).backward()
    for each, grad in zip(inputs, right_grads, strict=True):
        zeros = torch.zeros_like(each)
        torch.testing.assert_close(
            zeros if each.grad is None else each.grad, zeros if grad is None else 2 * grad
        )


def a_graph_on_one_rank() -> list[float]:
    """The gradient of a function that the other ranks run as it is."""
    rank, _ = place()
    x = torch.full((1, 2), 1.0 + rank, requires_grad=True)

    def squares(x: torch.Tensor) -> torch.Tensor:
        return functional.matmul_all_reduce(x * x, torch.ones(2, 1)) * 2

    torch._dynamo.reset()
    run = squares if rank else torch.compile(squares, backend="aot_eager", fullgraph=True)
    y = run(x)
    y.sum().backward()
    assert x.grad is not None
    return [y.item(), *x.grad[0].tolist()]


def graphs_of(function: Function, *inputs: Any) -> tuple[Any, list[list[str]]]:
    """The result of ``function`` compiled, and the ops of the forward and the backward graph."""
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append(
            [t._schema.name.split("::")[1] for t in targets if isinstance(t, torch._ops.OpOverload)]
        )
        return graph.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return torch.compile(function, backend=backend, fullgraph=True)(*inputs), graphs


def pairs() -> list[list[str]]:
    """The graphs of a function that works between start and use."""

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = functional.all_gather(x)
        meanwhile = torch.relu(w) @ w
        return torch.cos(gathered) @ meanwhile

    rank, _size = place()
    x = torch.full((2, 3), 1.0 + rank, requires_grad=True)
    result, graphs = graphs_of(run, x, torch.ones(3, 3, requires_grad=True))
    result.sum().backward()
    return graphs


def unwaited_results() -> list[Any]:
    """A compiled function may return what it started, and take what somebody else has."""
    rank, size = place()
    x = torch.full((2,), 1.0 + rank)

    def starts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return functional.all_gather(x * 2), x + 1

    def ends(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return y.sum() + z

    found: list[Any] = []
    (y, z), graphs = graphs_of(starts, x)
    found += [graphs, type(y) is AsyncTensor, type(z) is torch.Tensor]
    summed, graphs = graphs_of(ends, y, z)
    found += [graphs, summed.tolist()]
    for taken in (functional.all_reduce(x), y, wait(functional.all_reduce(x))):
        found.append(graphs_of(lambda t: t * 2, taken)[0].tolist())
    x.requires_grad_()
    (y, z), _ = graphs_of(starts, x)
    graphs_of(ends, y, z)[0].sum().backward()
    assert x.grad is not None
    found.append(x.grad.tolist())
    for leave in (wait, lambda y: y.wait(), lambda y: y.view(2, -1), lambda y: y + 0):
        x.grad = None
        y, _ = graphs_of(starts, x)[0]
        leave(y).sum().backward()
        found.append(x.grad.tolist())
    x.grad = None
    y, _ = graphs_of(starts, x)[0]
    y.backward(torch.ones(2 * size))
    found.append(x.grad.tolist())
    return found


def dynamic_batch(backend: str, uneven: bool) -> int:
    """How many graphs were compiled for batches of several lengths; of uneven ones a part is scattered."""
    rank, _size = place()
    compilations = 0

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if uneven:
            return functional.matmul_reduce_scatter(x, w) * 2
        h = functional.all_gather_matmul(x, w)
        part = functional.reduce_scatter(torch.relu(h), "avg")
        return functional.matmul_reduce_scatter(functional.all_gather(part), w.t()) + x

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=counting, fullgraph=True)
    w = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for batch in (5, 7, 11, 33) if uneven else (4, 6, 10, 34):
        x = torch.full((batch, 3), 1.0 + rank, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        got = compiled(x, w)
        other = x.detach().clone().requires_grad_()
        right = run(other, w)
        torch.testing.assert_close(got, right)
        got.square().sum().backward()
        right.square().sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
    return compilations


def some_results_used(backend: str) -> None:
    """Gradients where a loss uses one result of a compiled function only, whichever it is."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [functional.all_reduce(x * 2), functional.all_gather(x.sin()).t(), x.sum()]

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for index in range(3):
        grads = []
        for each in (run, compiled):
            x = torch.arange(6.0).view(2, 3).requires_grad_()
            each(x)[index].square().sum().backward()  # type: ignore[no-untyped-call]
            grads.append(x.grad)
        torch.testing.assert_close(*grads)


def traced_with_make_fx(mode: str, above_autograd: bool) -> list[str]:
    rank, _size = place()

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = functional.all_reduce(x)
        z = x + 1
        return y * z, functional.all_gather(x)

    x = torch.full((2,), 1.0 + rank)
    graph = make_fx(run, tracing_mode=mode, pre_dispatch=above_autograd)(x)
    torch.testing.assert_close(graph(x), run(x))
    torch.testing.assert_close(graph(x + 1), run(x + 1))
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def generated(option: bool) -> str:
    """Inductor's code of an all_reduce of a tensor that nobody needs afterwards."""
    rank, size = place()

    def run(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(torch.relu(x))
        return y * 2

    torch._dynamo.reset()
    x = torch.full((3, 5), 1.0 + rank)
    with config.patch(fx_graph_cache=True) if option else compiled_anew():
        result, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), x)
    assert torch.equal(x, torch.full((3, 5), 1.0 + rank))
    assert torch.equal(result, torch.full((3, 5), size * (size + 1.0)))
    return str(code)


def generated_overlap() -> str:
    """Inductor's code of a function that works while it gathers."""

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = functional.all_gather(x)
        work = torch.sin(w @ w) @ w
        return torch.cos(gathered) @ work

    torch._dynamo.reset()
    inputs = torch.rand(2, 64, 64, dtype=torch.float64)
    with compiled_anew(reorder_for_peak_memory=False):
        result, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), *inputs)
    torch.testing.assert_close(result, run(*inputs))
    return str(code)


def memory_in_flight() -> None:
    """Inputs of an op that is running are nobody else's memory, and nor are those of an unwaited one."""
    rank, _size = place()

    def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gathered = functional.all_gather_matmul(torch.relu(x), torch.cos(w))
        left = functional.all_gather(torch.exp(x))
        work = torch.sin(w) @ w
        for _ in range(4):
            work = torch.sin(work) @ w / 64
        return left, gathered[: work.shape[0]] + work

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True)
    with compiled_anew(reorder_for_peak_memory=False):
        _, (code,) = run_and_get_code(compiled, *torch.rand(2, 64, 64, dtype=torch.float64))
    starts = re.findall(r"interlace\.all_gather\w*\.default\((buf\d+)(?:, \[(buf\d+)\])?", code)
    used = {name for names in starts for name in names if name}
    assert len(used) == 3, code
    reused = set(re.findall(r"= (buf\d+); del buf\d+  # reuse", code))
    assert reused and not reused & used, (reused, used)
    for seed in range(5):
        x, w = torch.rand(
            2, 64, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        x += rank
        got, right = compiled(x, w), run(x, w)
        assert type(got[0]) is AsyncTensor
        for each, other in zip(got, right, strict=True):
            torch.testing.assert_close(wait(each), wait(other))


def work_behind_a_start() -> str:
    """Inductor's code of a function that exchanges heads, multiplies, and waits last."""
    place()

    def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sent = functional.matmul_all_to_all(torch.tanh(x), x)
        return (w @ w) @ w, wait(sent)

    torch._dynamo.reset()
    with compiled_anew():
        _, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), *torch.rand(2, 64, 64))
    return str(code)


def more_results_than_inputs() -> None:
    """Inductor looks for an input of each result's number."""
    rank, _size = place()

    def run(x: torch.Tensor) -> torch.Tensor:
        (normed, scale), total = functional.all_reduce_norm(
            x, norm=interlace.RMSNorm(eps=1e-6), quantize="fp8"
        )
        return normed.float() * scale + total

    torch._dynamo.reset()
    x = torch.arange(64.0).view(2, 32) + rank
    with compiled_anew():
        torch.testing.assert_close(torch.compile(run, fullgraph=True)(x), run(x))


def _step(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x) + 1


def in_place_in_graphs() -> tuple[list[float], list[float], list[float]]:
    """``out=`` and the ops in place, compiled."""
    rank, size = place()
    x, out = torch.full((2,), 1.0 + rank), torch.zeros(2)

    def with_out(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        functional.all_reduce(x, out=out)
        return out + 1

    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.interlace.all_reduce_(x, "sum", size, "0")
        return torch.ops._c10d_functional.wait_tensor(y) + 1

    torch._dynamo.reset()
    first = torch.compile(with_out, backend="aot_eager", fullgraph=True)(x, out)
    second = torch.compile(in_place, backend="aot_eager", fullgraph=True)(x)
    assert x.tolist() == out.tolist() == [size * (size + 1) / 2] * 2
    return first.tolist(), second.tolist(), out.tolist()
