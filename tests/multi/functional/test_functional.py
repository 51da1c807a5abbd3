"""interlace.functional on ranks: values, gradients, AsyncTensor, misuse, ends of processes."""

import copy
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import functional
from interlace.functional import AsyncTensor, wait
from interlace.ops.collectives.records import OPS as COLLECTIVES
from multi.functional.op_cases import TABLE, compare
from ranks import ranks
from tiers import few

in_both_places = pytest.mark.parametrize("place", few(["shm", "sim"], "shm"))


def here() -> tuple[int, int]:
    return interlace.get_rank(), interlace.get_world_size()


# -- gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(  # with two ranks every permutation is its own inverse
    ("place", "world_size"), few([("sim", 3), ("sim", 2), ("shm", 3), ("shm", 2)], ("sim", 3))
)
@ranks()
def test_values_and_gradients_of_every_op(place: str, world_size: int) -> None:
    for case in TABLE:
        compare(case)


def test_every_collective_has_a_case() -> None:
    assert {op.name for op in COLLECTIVES} - {case.op for case in TABLE} == {"rank"}


@in_both_places
@ranks()
def test_only_what_requires_gradients_gets_them(place: str) -> None:
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        case = next(case for case in TABLE if case.op == op)
        for index in range(3):
            compare(case, wanted=lambda i, index=index: i == index)  # type: ignore[misc]
            compare(case, wanted=lambda i, index=index: i != index)  # type: ignore[misc]


@in_both_places
@ranks()
def test_gradients_that_are_expanded_or_transposed(place: str) -> None:
    rank, size = here()
    x = torch.full((2, 2 * size), 1.0 + rank, requires_grad=True)
    start = 2 * size * rank
    weights = torch.arange(2 * size * size).view(-1, 1)
    ones = [[1.0] * 2 * size] * 2
    for made, right in (
        (lambda: functional.all_reduce(x), [[float(size)] * 2 * size] * 2),
        (
            lambda: functional.all_gather(x, 1).t().mul(weights),
            [[float(size * (start + i)) for i in range(2 * size)]] * 2,
        ),
        (lambda: functional.reduce_scatter(x, "sum", 1).t().contiguous().t(), ones),
        (lambda: functional.matmul_reduce_scatter(x.t(), torch.ones(2, 1), scatter_dim=0), ones),
    ):
        x.grad = None
        made().sum().backward()
        assert x.grad is not None and x.grad.tolist() == right


@in_both_places
@ranks()
def test_gradients_of_half_precision(place: str) -> None:
    rank, size = here()
    x = torch.full((2, 4), 1.0 + rank, dtype=torch.bfloat16, requires_grad=True)
    w = torch.ones(4, 3, dtype=torch.bfloat16, requires_grad=True)
    y = functional.all_gather_matmul(x, w, out_dtype=torch.float32)
    z = functional.matmul_reduce_scatter(x, w, out_dtype=torch.float32)
    assert y.dtype == z.dtype == torch.float32
    of_x, of_w = torch.autograd.grad(y.sum(), (x, w))
    (again,) = torch.autograd.grad(z.sum(), x)
    assert of_x.dtype == of_w.dtype == again.dtype == torch.bfloat16
    assert of_x.tolist() == [[3.0 * size] * 4] * 2 and again.tolist() == [[3.0] * 4] * 2
    assert of_w.tolist() == [[float(sum(2 * (1 + r) for r in range(size)))] * 3] * 4


@in_both_places
@ranks()
def test_without_gradients(place: str) -> None:
    """Modes without gradients record no gradient; a mode that forbids one raises in backward."""
    size = here()[1]
    x = torch.ones(size, size, requires_grad=True)
    with torch.no_grad():
        assert not functional.all_reduce(x).requires_grad
        assert not functional.all_gather_matmul(x, x).requires_grad
    with torch.inference_mode():
        assert wait(functional.all_reduce(x)).is_inference()
        assert wait(functional.all_gather(torch.ones(2))).tolist() == [1.0] * 2 * size
        y = torch.ones(4, 4)
        for op in (functional.all_gather_matmul, functional.matmul_all_reduce):  # in another thread
            assert float(op(y, y).sum()) == 64.0 * size
        assert float(functional.matmul_reduce_scatter(y, y).sum()) == 64.0
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.all_reduce(x @ x).dtype == torch.bfloat16
    for op in ("max", "min"):
        text = f"interlace.reduce with reduce_op '{op}' has no gradient"
        beside = functional.all_reduce(x.to(torch.float64), "product").sum() * 0
        with pytest.raises(RuntimeError, match=text):
            (beside + functional.reduce(x, op, 0).sum()).backward()


class OpNames(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten" or "mm" in str(func):
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name, options, expected",
    [
        # the fused ops are each other's gradients; the weight's matmul is between start and wait
        ("all_gather_matmul", {}, "matmul_reduce_scatter wait_tensor mm wait_tensor"),
        (
            "all_gather_matmul", {"save_gathered": False},
            "all_gather matmul_reduce_scatter wait_tensor mm wait_tensor",
        ),
        ("matmul_reduce_scatter", {}, "all_gather_matmul wait_tensor wait_tensor mm"),
        ("matmul_all_reduce", {}, "all_reduce wait_tensor mm mm"),
    ],
)  # fmt: skip
@ranks()
def test_what_runs_in_backward(name: str, options: dict[str, Any], expected: str) -> None:
    x, w = (torch.ones(4, 4, requires_grad=True) for _ in range(2))
    loss = getattr(functional, name)(x, w, **options).sum()
    with OpNames() as ran:
        loss.backward()
    assert ran.names == expected.split()


# -- AsyncTensor ---------------------------------------------------------------------------------------

SUM = [[3.0, 3.0], [3.0, 3.0]]


def started(value: float = 1.0) -> torch.Tensor:
    """Start an all_reduce of 2 x 2 values; the sum is ``value`` times the sum of 1 + rank."""
    return functional.all_reduce(torch.full((2, 2), value * (1 + interlace.get_rank())))


@ranks()
def test_asking_for_sizes_does_not_wait() -> None:
    """A wait would deadlock: the other rank calls only after the first rank has read the sizes."""
    interlace.new_group([0, 1], name="late")
    if interlace.get_rank():
        interlace.barrier(group="late")
        assert started().tolist() == SUM
        return
    tensor = started()
    assert isinstance(tensor, AsyncTensor)
    assert tensor.shape == tensor.size() == (2, 2) and tensor.stride() == (2, 1)
    assert (tensor.dtype, str(tensor.device)) == (torch.float32, "cpu")
    assert (tensor.dim(), tensor.numel(), len(tensor)) == (2, 4, 2)
    assert tensor.is_contiguous() and not tensor.requires_grad
    assert tensor.view(4).shape == (4,) and type(tensor.view(4)) is AsyncTensor
    assert not tensor.completed
    interlace.barrier(group="late")
    assert (tensor.view(4).tolist(), tensor.tolist(), tensor.completed) == ([3.0] * 4, SUM, True)


def saved(tensor: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save({"x": tensor}, buffer)
    buffer.seek(0)
    return torch.load(buffer)["x"]  # type: ignore[no-any-return]


def changed_in_place() -> torch.Tensor:
    tensor = started()
    tensor.add_(1)
    tensor += 1
    tensor[0, 0] = 7
    return torch.mul(tensor, 2, out=tensor)


def taken_in_place() -> torch.Tensor:
    plain = torch.zeros(2, 2)
    plain.copy_(started())
    plain += started()
    return plain


def reduced_again() -> torch.Tensor:
    tensor = started()
    interlace.all_reduce(tensor)
    return tensor


SIX = [[6.0, 6.0]] * 2
BEHAVIOURS: dict[str, tuple[Callable[[], Any], Any]] = {
    "repr": (lambda: repr(started()), "AsyncTensor(tensor([[3., 3.],\n        [3., 3.]]))"),
    "numpy": (lambda: started().numpy(), SUM),
    "item": (lambda: started().sum().item(), 12.0),
    "float": (lambda: float(started().sum()), 12.0),
    "pickle": (lambda: pickle.loads(pickle.dumps(started())), SUM),
    "deepcopy": (lambda: copy.deepcopy(started()), SUM),
    "save": (lambda: saved(started()), SUM),
    "two": (lambda: started() + started(2.0), [[9.0, 9.0]] * 2),
    "cat": (
        lambda: torch.cat([started(), started(2.0), torch.zeros(1, 2)]), [*SUM, *SIX, [0.0, 0.0]],
    ),
    "types": (
        lambda: [type(each) for each in (started() + 1, started()[0], started().clone())],
        [torch.Tensor] * 3,
    ),
    "in place": (changed_in_place, [[14.0, 10.0], [10.0, 10.0]]),
    "copy_": (taken_in_place, SIX),
    "interlace.all_reduce": (reduced_again, SIX),
    "functional": (lambda: functional.all_reduce(functional.all_gather(started())), SIX * 2),
    "equal": (lambda: torch.equal(started(), started()), True),
    "iter": (lambda: [row.tolist() for row in started()], SUM),
    "contains": (lambda: 3.0 in started(), True),
    "bool": (lambda: bool(started().sum()), True),
    "parameter": (lambda: torch.nn.Parameter(wait(started())), SUM),
    "data_ptr": (lambda: (lambda t: t.data_ptr() == wait(t).data_ptr())(started()), True),
    "data": (lambda: started().data, SUM),
    "dlpack": (lambda: torch.from_dlpack(functional.all_gather(torch.ones(1, 2))), [[1.0, 1.0]] * 2),
    "format": (lambda: f"{functional.all_reduce(torch.tensor(1.0)):.2f}", "2.00"),
}  # fmt: skip


@ranks()
def test_an_async_tensor_is_a_tensor() -> None:
    for name, (behaviour, right) in BEHAVIOURS.items():
        found = behaviour()
        assert (found.tolist() if hasattr(found, "tolist") else found) == right, name
    tensor = started()
    assert wait(tensor) is wait(tensor) and isinstance(tensor, AsyncTensor)
    assert tensor.wait() is wait(tensor) and wait(wait(tensor)) is wait(tensor)
    assert torch.ops._c10d_functional.wait_tensor(wait(tensor)).tolist() == tensor.tolist()
    with pytest.raises(Exception, match="would change the shape of an AsyncTensor in place"):
        started().t_()


@ranks()
def test_async_tensors_and_autograd() -> None:
    leaf = started().requires_grad_()
    (leaf * 3).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == SUM
    leaf.grad = None
    (wait(leaf) * 2).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [[2.0, 2.0]] * 2
    x = torch.ones(2, requires_grad=True)
    y = functional.all_reduce(x)
    assert y.requires_grad and not y.detach().requires_grad and not y.is_leaf
    hooked: list[Any] = []
    y.register_hook(lambda grad: hooked.append(grad.tolist()))
    wait(y).sum().backward()
    assert hooked == [[1.0, 1.0]] and x.grad is not None and x.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("backend", ["gloo", "interlace"])
@ranks()
def test_async_tensors_in_torch_distributed(backend: str) -> None:
    tensor = started()
    dist.all_reduce(tensor)
    outputs = [torch.zeros(2, 2) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, started())
    assert tensor.tolist() == SIX and [each.tolist() for each in outputs] == [SUM, SUM]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("compiled", few([False, True], False))
@ranks()
def test_results_leave_nothing_in_torchs_registry(compiled: bool) -> None:
    x, w = torch.ones(64, 64), torch.ones(64, 64, requires_grad=True)

    def one_of_several(x: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_matmul(x, [w, w], return_gathered=True)[1][1] + 1

    call: Any = one_of_several
    if compiled:
        call = torch.compile(one_of_several, backend="aot_eager", fullgraph=True)
    before = torch._C._distributed_c10d._get_work_registry_size()
    for _ in range(5):
        started()
        call(x)
        wait(functional.all_gather_matmul(x, w))  # its gathered input is kept
        wait(functional.all_gather_matmul(x, [w, w], return_gathered=True)[1][1])
    assert torch._C._distributed_c10d._get_work_registry_size() == before


@ranks()
def test_failures_are_raised_again() -> None:
    x = torch.ones(1 + interlace.get_rank())
    expected = r"^all_reduce: shape of tensor differs between ranks: \(1,\) on rank 0, "
    for tensor in (functional.all_reduce(x), functional.all_reduce(x.requires_grad_())):
        for _ in range(2):
            with pytest.raises(ValueError, match=expected):
                wait(tensor)


OUT: list[tuple[str, tuple[Any, ...]]] = [
    ("all_reduce", ("max",)),
    ("all_gather", (0,)),
    ("all_gather", (1,)),
    ("reduce_scatter", ("sum", 0)),
    ("reduce_scatter", ("avg", 1)),
    ("all_to_all", ()),
    ("broadcast", (1,)),
]


@ranks()
def test_out_has_any_strides_and_is_given_back() -> None:
    rank, size = here()
    x = torch.arange(2.0 * size * size).view(2 * size, size) + 100 * rank
    for name, args in OUT:
        function = getattr(functional, name)
        right = wait(function(x, *args))
        strided = torch.full((*right.shape[:-1], 2 * right.shape[-1]), torch.nan)[..., ::2]
        for out in (strided, torch.full(right.shape[::-1], torch.nan).t()):
            got = function(x, *args, out=out)
            assert wait(got).data_ptr() == out.data_ptr(), name
            assert torch.equal(out, right), (name, out.stride())


# -- misuse --------------------------------------------------------------------------------------------


@ranks()
def test_errors_survive_operators() -> None:
    """An operator of Tensor takes a TypeError for "not implemented", and must not drop the op's message."""
    x = torch.ones(2, dtype=torch.float64 if interlace.get_rank() else torch.float32)
    weight, ones = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    uses: list[Callable[[Any], Any]] = [
        lambda y: y == x, lambda y: x < y, lambda y: y * 2, lambda y: 2 / y, lambda y: x - y,
        lambda y: weight + y, lambda y: ones @ y, lambda y: operator.iadd(y, x),
        lambda y: operator.ipow(x.clone(), y), lambda y: operator.and_(True, y), lambda y: -y,
        lambda y: y.sum(), lambda y: y[0],
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(TypeError, match=r"^all_reduce: dtype of tensor differs"):
            use(functional.all_reduce(x))


@ranks()
def test_operators_are_those_of_tensors() -> None:
    x, whole_numbers = torch.tensor([3.0, -7.0, 0.3]), torch.tensor([12, 5, 3])
    names = "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"
    bits = "lshift", "rshift", "and_", "or_", "xor"
    for name in (*names, "eq", "ne", "lt", "le", "gt", "ge", *bits):
        op, own = getattr(operator, name), whole_numbers if name in bits else x
        other = own.flip(0)
        whole, right = functional.all_reduce(own, "max"), functional.all_reduce(other, "max")
        pairs = [
            (each, op(own, other)) for each in (op(whole, other), op(own, right), op(whole, right))
        ]
        if name != "matmul":
            pairs += [(op(whole, 2), op(own, 2)), (op(2, whole), op(2, own))]
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
