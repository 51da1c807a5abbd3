"""Ranks of test_functional.py and its siblings: eager, compiled, and what AsyncTensor is."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace import functional
from interlace.functional import AsyncTensor, wait
from multi.functional.functional_ranks_cases import CASES, Case, expected, flat
from multi.process_group.backend_ranks import world

Function = Callable[..., Any]


def place() -> tuple[int, int]:
    return interlace.get_rank(), interlace.get_world_size()


# -- values and gradients of every op ------------------------------------------------------------------


def compare(case: Case, run: Function, wanted: Callable[[int], bool] = lambda index: True) -> None:
    """Outputs and gradients of one op against single-process torch."""
    rank, size = place()
    outputs, grads, weights = expected(case, rank, size, wanted)
    inputs = [x.requires_grad_(wanted(i)) for i, x in enumerate(case.inputs(rank, size))]
    got = flat(run(*inputs))
    assert [type(each) for each in got] == [AsyncTensor] * len(got)
    for each, right in zip(got, outputs, strict=True):
        assert each.shape == right.shape and each.stride() == wait(each).stride()
        torch.testing.assert_close(wait(each.detach()), right)
    loss = sum((each * weight).sum() for each, weight in zip(got, weights, strict=True))
    assert isinstance(loss, torch.Tensor)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    for index, (each, right) in enumerate(zip(inputs, grads, strict=True)):
        if wanted(index):
            zeros = torch.zeros_like(each)
            torch.testing.assert_close(
                zeros if each.grad is None else each.grad, zeros if right is None else right
            )
        else:
            assert each.grad is None


def every_case(chosen: str, compiled: str | None) -> list[str]:
    """The names of the cases that went through, eager or each compiled with a backend."""
    done = []
    for name, case in CASES.items():
        if chosen in name:
            run = in_default_group(case)
            if compiled is not None:
                torch._dynamo.reset()
                run = torch.compile(run, backend=compiled, fullgraph=True)
            try:
                compare(case, run)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
            done.append(name)
    return done


def in_default_group(case: Case) -> Function:
    return lambda *inputs: case.call(None, *inputs)


def complex_gradients() -> tuple[list[str], list[str]]:
    """First and second gradients of complex numbers, of each op that takes them; and which do not."""
    (rank, size), served, refused = place(), [], []
    for name, case in CASES.items():

        def inputs(of: int, case: Case = case) -> list[torch.Tensor]:
            found = [
                torch.complex(x, x.flip(-1) + of + 0.5 if x.dim() else x)
                for x in case.inputs(of, size)
            ]
            return [x.requires_grad_() for x in found]

        def gradients(outputs: Any, of: list[torch.Tensor]) -> list[torch.Tensor]:
            loss = sum((each * each.conj() * each).real.sum() for each in flat(outputs))
            assert isinstance(loss, torch.Tensor)
            first = torch.autograd.grad(loss, of, create_graph=True, materialize_grads=True)
            squares = sum((each * each).imag.sum() for each in first)
            assert isinstance(squares, torch.Tensor)
            if not squares.requires_grad:
                return list(first)
            return [*first, *torch.autograd.grad(squares, of, materialize_grads=True)]

        mine, everyone = inputs(rank), [inputs(of) for of in range(size)]
        try:
            outputs = case.call(None, *mine)
        except TypeError as error:
            assert "complex" in str(error), error
            refused.append(name)
            continue
        right = [each for outs in case.reference(everyone) for each in flat(outs)]
        expected = gradients(right, [x for xs in everyone for x in xs])
        count = len(mine)
        for got, number in zip(gradients(outputs, mine), range(2 * count), strict=False):
            at = (number // count * size + rank) * count + number % count
            torch.testing.assert_close(
                wait(got), expected[at], msg=lambda text, n=name: f"{n}: {text}"
            )
        served.append(name)
    return served, refused


def some_inputs_only() -> None:
    """Only what requires gradients gets any, whichever it is."""
    for name in ("all_gather_matmul 1", "matmul_reduce_scatter avg 1", "matmul_all_reduce sum"):
        case = CASES[name]
        for index in range(3):
            compare(case, in_default_group(case), lambda i, index=index: i == index)
            compare(case, in_default_group(case), lambda i, index=index: i != index)


def odd_gradients() -> None:
    """Gradients that are expanded, transposed, or of a 0-dim output."""
    rank, size = place()
    x = torch.full((2, 2 * size), 1.0 + rank, requires_grad=True)
    functional.all_reduce(x).sum().backward()  # expanded
    assert x.grad is not None and x.grad.tolist() == [[float(size)] * 2 * size] * 2
    x.grad = None
    functional.all_gather(x, 1).t().mul(torch.arange(2 * size * size).view(-1, 1)).sum().backward()
    start = 2 * size * rank
    assert x.grad.tolist() == [[float(size * (start + i)) for i in range(2 * size)]] * 2
    x.grad = None
    functional.reduce_scatter(x, "sum", 1).t().contiguous().t().sum().backward()
    assert x.grad.tolist() == [[1.0] * 2 * size] * 2
    x.grad = None
    functional.matmul_reduce_scatter(x.t(), torch.ones(2, 1), scatter_dim=0).sum().backward()
    assert x.grad.tolist() == [[1.0] * 2 * size] * 2


def half_precision() -> None:
    """bfloat16 inputs with float32 outputs; gradients come in the inputs' dtype."""
    rank, size = place()
    x = torch.full((2, 4), 1.0 + rank, dtype=torch.bfloat16, requires_grad=True)
    w = torch.ones(4, 3, dtype=torch.bfloat16, requires_grad=True)
    y = functional.all_gather_matmul(x, w, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad is not None and w.grad is not None
    assert x.grad.dtype == w.grad.dtype == torch.bfloat16
    assert x.grad.tolist() == [[3.0 * size] * 4] * 2
    assert w.grad.tolist() == [[float(sum(2 * (1 + r) for r in range(size)))] * 3] * 4
    x.grad = w.grad = None
    z = functional.matmul_reduce_scatter(x, w, out_dtype=torch.float32)
    assert z.dtype == torch.float32
    z.sum().backward()
    assert x.grad.dtype == torch.bfloat16 and x.grad.tolist() == [[3.0] * 4] * 2


def second_derivatives() -> None:
    rank, size = place()
    x = torch.arange(1.0, 5.0).add(rank).requires_grad_()
    y = functional.all_gather(x)
    (first,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach() * size)
    (first,) = torch.autograd.grad(
        functional.all_reduce(x, "avg").pow(2).sum(), x, create_graph=True
    )
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.full((4,), 2.0))
    w = torch.ones(1, 1, requires_grad=True)
    z = functional.all_gather_matmul(x.view(-1, 1), w)
    (first,) = torch.autograd.grad((z * z).sum(), w, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    whole = torch.cat([torch.arange(1.0, 5.0) + r for r in range(size)])
    torch.testing.assert_close(second, 2 * (whole * whole).sum().view(1, 1))


def without_gradients() -> list[str]:
    """What refuses gradients says so in backward; modes without gradients record none."""
    _rank, size = place()
    x = torch.ones(size, size, requires_grad=True)
    with torch.no_grad():
        assert not functional.all_reduce(x).requires_grad
        assert not functional.all_gather_matmul(x, x).requires_grad
    with torch.inference_mode():
        assert wait(functional.all_reduce(x)).is_inference()
        assert wait(functional.all_gather(torch.ones(2))).tolist() == [1.0] * 2 * size
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.all_reduce(x @ x).dtype == torch.bfloat16
    messages = []
    for call in (
        lambda: functional.reduce(x, "max", 0),
        lambda: (
            functional.all_reduce(x.to(torch.float64), "product").sum() * 0
            + functional.reduce(x, "min", 0).sum()
        ),
    ):
        try:
            call().sum().backward()
        except RuntimeError as error:
            messages.append(str(error).split("\n")[0])
    return messages


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """The names of the ops that run, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def order_of_backward(name: str, save_gathered: bool) -> list[str]:
    """What runs in the backward of a fused op: starts, waits and matmuls."""
    x = torch.ones(4, 4, requires_grad=True)
    w = torch.ones(4, 4, requires_grad=True)
    options = {} if name != "all_gather_matmul" else {"save_gathered": save_gathered}
    y = getattr(functional, name)(x, w, **options)
    loss = y.sum()
    with Recorder() as recorder:
        loss.backward()
    kept = ("mm", "wait_tensor", *CASE_OPS)
    return [each for each in recorder.names if each in kept]


CASE_OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather",
            "reduce_scatter", "all_reduce")  # fmt: skip


def eager_fused_ops(async_op: bool) -> dict[str, list[Any]]:
    """interlace's own fused functions on tensors that require gradients, as they were on others."""
    rank, size = place()
    found: dict[str, list[Any]] = {}
    w = torch.arange(12.0).view(4, 3).requires_grad_()
    b = torch.ones(3, requires_grad=True)

    def call(name: str, x: torch.Tensor, **options: Any) -> None:
        function = getattr(interlace, name)
        with torch.no_grad():
            right = flat(function(x, w, bias=b, **options))
        w.grad = b.grad = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = function(x, w, bias=b, async_op=async_op, **options)
            if async_op:
                work, result = result, result.wait()
                assert work.is_completed() and work.is_success() and work.exception() is None
                assert work.wait() is result and work.result() is result
                assert work.get_future().wait() is not None
        for each, other in zip(flat(result), right, strict=True):
            assert type(each) is torch.Tensor and torch.equal(each, other)
        recorded = flat(result)[-1].requires_grad
        if recorded:
            sum(each.sum() for each in flat(result)).backward()  # type: ignore[union-attr]
        texts = [
            str(each.message).split(" gradients")[0]
            for each in caught
            if each.category is UserWarning
        ]
        key = f"{name} {sorted(options)}" if options else name
        found.setdefault(key, []).extend(
            [recorded, texts, None if w.grad is None else w.grad.sum().item()]
        )

    x = torch.full((2 * size, 4), 1.0 + rank)
    call("all_gather_matmul", x)
    call("all_gather_matmul", x, return_gathered=True)
    call("matmul_reduce_scatter", x)
    call("matmul_reduce_scatter", x, reduce_op=dist.ReduceOp.AVG)
    call("matmul_all_reduce", x)
    call("all_gather_matmul", torch.ones(1 + rank, 4), gather_dim=0)
    call("matmul_reduce_scatter", torch.ones(3, 4), scatter_dim=0)
    if rank:
        x = x[:, :3]
    refused = refusal(lambda: interlace.all_gather_matmul(x, w))
    found["refused"] = [refused.split(":")[0]]
    assert wait(functional.all_reduce(torch.ones(1))).item() == size
    return found


# -- AsyncTensor ---------------------------------------------------------------------------------------


def started(value: float = 1.0) -> torch.Tensor:
    """An all_reduce under way, of 2 x 2 values that sum to ``value`` times the ranks' sum from 1."""
    return functional.all_reduce(torch.full((2, 2), value * (1 + interlace.get_rank())))


def what_does_not_wait() -> list[Any]:
    """Asked while the other rank has not even called yet."""
    rank, _size = place()
    if rank:
        interlace.barrier(group="late")
        return [started().tolist()]
    tensor = started()
    assert isinstance(tensor, AsyncTensor)
    seen = [
        tuple(tensor.shape), tuple(tensor.size()), tensor.stride(), tensor.dtype, str(tensor.device),
        tensor.dim(), tensor.numel(), tensor.is_contiguous(), tensor.requires_grad, len(tensor),
        tuple(tensor.view(4).shape), type(tensor.view(4)) is AsyncTensor, tensor.completed,
    ]  # fmt: skip
    interlace.barrier(group="late")
    return [*seen, tensor.view(4).tolist(), tensor.tolist(), tensor.completed]


def second_group(function: Function, *args: Any) -> Any:
    """``function`` where there is another group, so that one rank can be late in the first."""
    interlace.new_group(range(interlace.get_world_size()), name="late")
    return function(*args)


def behaviours() -> dict[str, Any]:
    _rank, _size = place()
    found: dict[str, Any] = {}
    found["repr"] = repr(started())
    found["list"] = started().tolist()
    found["numpy"] = started().numpy().tolist()
    found["item"] = started().sum().item()
    found["float"] = float(started().sum())
    found["index"] = started()[0, 1].item()
    found["pickle"] = pickle.loads(pickle.dumps(started())).tolist()
    found["deepcopy"] = copy.deepcopy(started()).tolist()
    buffer = io.BytesIO()
    torch.save({"x": started()}, buffer)
    buffer.seek(0)
    found["save"] = torch.load(buffer)["x"].tolist()
    found["two"] = (started() + started(2.0)).tolist()
    found["cat"] = torch.cat([started(), started(2.0), torch.zeros(1, 2)]).tolist()
    found["stack"] = torch.stack([started(), started()]).shape
    found["types"] = [type(each) for each in (started() + 1, started()[0], started().clone())]
    tensor = started()
    tensor.add_(1)
    tensor += 1
    tensor[0, 0] = 7
    torch.mul(tensor, 2, out=tensor)
    found["in place"] = tensor.tolist()
    plain = torch.zeros(2, 2)
    plain.copy_(started())
    plain += started()
    found["copy_"] = plain.tolist()
    tensor = started()
    interlace.all_reduce(tensor)
    found["interlace.all_reduce"] = tensor.tolist()
    found["functional"] = functional.all_reduce(functional.all_gather(started())).tolist()
    found["equal"] = torch.equal(started(), started()), bool((started() == started()).all())
    found["iter"] = [row.tolist() for row in started()]
    found["contains"] = 3.0 in started()
    found["bool"] = bool(started().sum())
    found["to"] = started().to(torch.int64).tolist(), started().double().dtype
    found["parameter"] = torch.nn.Parameter(wait(started())).tolist()
    found["new"] = started().new_zeros(2).tolist(), torch.zeros_like(started()).tolist()
    found["linear"] = torch.nn.functional.linear(started(), started()).tolist()
    found["split"] = [part.tolist() for part in started().split(1)]
    found["data_ptr"] = (lambda t: t.data_ptr() == wait(t).data_ptr())(started())
    found["data"] = started().data.tolist()
    found["where"] = torch.where(started() > 0, started(), started()).tolist()
    found["foreach"] = [t.tolist() for t in torch._foreach_add([started(), started()], 1.0)]
    tensor = started()
    assert wait(tensor) is wait(tensor) and isinstance(tensor, AsyncTensor)
    assert tensor.wait() is wait(tensor) and wait(wait(tensor)) is wait(tensor)
    assert torch.ops._c10d_functional.wait_tensor(wait(tensor)).tolist() == tensor.tolist()
    return found


def with_requires_grad() -> list[Any]:
    """A result that becomes a leaf, one that is detached, one with hooks."""
    _rank, _size = place()
    leaf = started()
    leaf.requires_grad_()
    (leaf * 3).sum().backward()
    assert leaf.grad is not None
    seen: list[Any] = [leaf.grad.tolist()]
    leaf.grad = None
    (wait(leaf) * 2).sum().backward()
    seen.append(leaf.grad.tolist())  # type: ignore[attr-defined]
    x = torch.ones(2, requires_grad=True)
    y = functional.all_reduce(x)
    seen += [y.requires_grad, y.detach().requires_grad, y.is_leaf]
    hooked: list[Any] = []
    y.register_hook(lambda grad: hooked.append(grad.tolist()))
    wait(y).sum().backward()
    seen += [hooked, x.grad.tolist()]  # type: ignore[union-attr]
    return seen


def in_torch_distributed(path: str, backend: str) -> list[Any]:
    with world(path, backend):
        tensor = started()
        dist.all_reduce(tensor)
        outputs = [torch.zeros(2, 2) for _ in range(dist.get_world_size())]
        dist.all_gather(outputs, started())
        return [tensor.tolist(), [each.tolist() for each in outputs]]


def other_orders() -> list[Any]:
    """Waits in another order than starts; many results that nobody waits for."""
    first, second, third = started(1.0), started(2.0), started(3.0)
    found = [third.tolist(), first.tolist(), second.tolist()]
    for _ in range(1000):
        started()
    kept = [started(float(i)) for i in range(100)]
    found.append(sum(float(each[0, 0]) for each in reversed(kept)))
    return found


def unwaited_in_graphs() -> int:
    """How many more results torch holds for waits to come than before."""
    x, w = torch.ones(64, 64), torch.ones(64, 64, requires_grad=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def one_of_several(x: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_matmul(x, [w, w], return_gathered=True)[1][1] + 1

    before = torch._C._distributed_c10d._get_work_registry_size()
    for _ in range(20):
        started()
        one_of_several(x)
        wait(functional.all_gather_matmul(x, w))  # whose gathered input is kept, too
        wait(functional.all_gather_matmul(x, [w, w], return_gathered=True)[1][1])
    return torch._C._distributed_c10d._get_work_registry_size() - before


def failed_twice() -> list[str]:
    """What an op that failed raises, at its first and its second wait."""
    x = torch.ones(1 + interlace.get_rank())
    tensors = [functional.all_reduce(x), functional.all_reduce(x.requires_grad_())]
    return [refusal(lambda each=each: each) for each in tensors for _ in range(2)]


# -- out -----------------------------------------------------------------------------------------------


def with_out() -> None:
    """Every op that takes ``out`` fills it, whatever its strides, and gives it back."""
    rank, size = place()
    x = torch.arange(2.0 * size * size).view(2 * size, size) + 100 * rank
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("all_reduce", ("max",)),
        ("all_gather", (0,)),
        ("all_gather", (1,)),
        ("reduce_scatter", ("sum", 0)),
        ("reduce_scatter", ("avg", 1)),
        ("all_to_all", ()),
        ("broadcast", (1,)),
    ]
    for name, args in calls:
        function = getattr(functional, name)
        right = wait(function(x, *args))
        dense = torch.full_like(right, torch.nan)
        strided = torch.full((*right.shape[:-1], 2 * right.shape[-1]), torch.nan)[..., ::2]
        transposed = torch.full(right.shape[::-1], torch.nan).t()
        for out in (dense, strided, transposed):
            got = function(x, *args, out=out)
            assert wait(got).data_ptr() == out.data_ptr(), name
            assert torch.equal(out, right), (name, out.stride())
    y = x.clone()
    assert wait(functional.all_reduce(y, out=y)).tolist() == wait(functional.all_reduce(x)).tolist()
    y = x.clone()
    wait(functional.broadcast(y, 1, out=y))
    assert y.tolist() == wait(functional.broadcast(x, 1)).tolist()


def refusal(call: Function) -> str:
    """What a call raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wait(call())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"
