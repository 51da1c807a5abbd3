"""The contract that every op of the registry keeps, in the simulator and on ranks that are processes.

Cells in the simulator are of `make test`, with fp32. Other dtypes are thorough, and so are processes, but
for calls that have the values of all ops.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_leaves_with_path,
    tree_map_only,
    tree_unflatten,
)

import interlace
from interlace import reference
from interlace.groups.groups import resolve
from interlace.groups.specs import describe
from interlace.kernels.tiling import split_rows
from interlace.ops import local_tensor
from interlace.ops.library import BY_NAME, IN_PLACE
from interlace.ops.op import calls
from interlace.ops.op.op import Op, Setting, finish, wait
from ops import contracts
from ops.contracts import CONTRACTS, DTYPES, evenly, last_has_none
from ranks import ranks
from support import LAYOUTS, laid_out, poison, poisoned
from tiers import few, thorough

SIZE = 3
Tensor = torch.Tensor
PLACES = few(["sim", "shm"], "sim")


def cells(contract: str, ops: Mapping[str, Op] = BY_NAME) -> list[str]:
    return [name for name, op in ops.items() if not contracts.reason(op, contract)]


def matrix(contract: str) -> Callable[..., Any]:
    """Return the cells of a contract in both places."""
    in_places = pytest.mark.parametrize("place", PLACES)
    of_ops = pytest.mark.parametrize("op", cells(contract))
    return lambda test: in_places(of_ops(test))


@dataclasses.dataclass
class Prepared:
    """An op on one rank, with the arguments and the right results of all ranks."""

    op: Op
    setting: Setting
    given: list[dict[str, Any]]
    group: Any = None

    @property
    def own(self) -> dict[str, Any]:
        return self.given[self.setting.rank]

    def begin(self, **others: Any) -> Any:
        return self.op.begin(resolve(self.group), list({**self.own, **others}.values()))

    def through_autograd(self) -> list[Tensor]:
        """Return the results of torch.ops.interlace, or of its replacement in the simulator."""
        name, size = describe(self.group)
        made = calls.call(self.op.name, *self.own.values(), size, name)
        return [wait(each) for each in (made if self.op.several else [made])]

    def check(self, made: Sequence[Tensor]) -> None:
        """Compare values, and the dtypes, shapes and strides that compilers get from the fake kernel."""
        right = contracts.right_results(self.op, self.given, self.setting.size)[self.setting.rank]
        with FakeTensorMode() as mode:
            fakes = tree_map_only(Tensor, mode.from_tensor, list(self.own.values()))
            told = self.op.outputs(self.op.record(fakes), self.setting.size)
        for each, value, fake in zip(made, right, told if self.op.several else [told], strict=True):
            assert (each.dtype, each.shape, each.stride()) == (
                fake.dtype, fake.shape, fake.stride(),
            )  # fmt: skip
            if isinstance(value, tuple):
                assert reference.worst_ratio(each, *value) <= 1
            else:
                assert each.shape == value.shape
                torch.testing.assert_close(widened(each), widened(value), rtol=0, atol=0)


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def prepared(
    op: str,
    *,
    dtype: torch.dtype = torch.float32,
    call: int = 1,
    rows: Callable[[int], tuple[int, ...]] = evenly,
    group: Any = None,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: given,
    **others: Any,
) -> Prepared:
    rank, size = interlace.get_rank(group), interlace.get_world_size(group)
    setting = Setting(rank, size, dtype, call, rows(size))
    known = BY_NAME[op]
    given = [change(known.example(each, **others)) for each in setting.everyone()]
    return Prepared(known, setting, given, group)


def check_values(op: str, **how: Any) -> None:
    prepared_call = prepared(op, **how)
    prepared_call.check(finish(prepared_call.begin()))


# -- results ---------------------------------------------------------------------------------------


def dtypes() -> list[Any]:
    """Return all ops with all dtypes; backwards have supported ones only, as forwards refuse others."""
    pairs = [
        (op, dtype)
        for op, dtype in itertools.product(cells("values"), DTYPES)
        if op not in contracts.BACKWARDS or contracts.takes(BY_NAME[op], DTYPES[dtype])
    ]
    return pairs


@thorough
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("op", "dtype"), dtypes())
@ranks(SIZE)
def test_values(place: str, op: str, dtype: str) -> None:
    """All ranks refuse a dtype that the op does not support."""
    prepared_call = prepared(op, dtype=DTYPES[dtype])
    if contracts.takes(prepared_call.op, DTYPES[dtype]):
        prepared_call.check(finish(prepared_call.begin()))
        prepared_call.check(prepared_call.through_autograd())
        return
    with pytest.raises(TypeError):
        finish(prepared_call.begin())


@ranks(SIZE)
def test_all_ops_in_processes_are_asynchronous() -> None:
    for op in cells("asynchronous"):
        test_asynchronous.body("shm", op)


@ranks(4)
def test_all_ops_in_groups_of_processes() -> None:
    for op in cells("subgroups"):
        test_subgroups.body("shm", op)


ALGORITHMS = [
    (name, algorithm)
    for name in cells("values")
    if "algorithm" in BY_NAME[name].kinds
    for algorithm in ("fused", "pipelined", "unfused")
]


@pytest.mark.parametrize("place", PLACES)
@thorough
@pytest.mark.parametrize(("op", "algorithm"), ALGORITHMS)
@ranks(SIZE)
def test_values_of_every_algorithm(place: str, op: str, algorithm: str) -> None:
    if op in contracts.TWO_WAYS and algorithm == "pipelined":
        with pytest.raises(ValueError, match="algorithm must be one of"):
            prepared(op, algorithm=algorithm).begin()
    else:
        check_values(op, algorithm=algorithm)


@ranks(SIZE)
def test_all_algorithms_in_processes() -> None:
    for op, algorithm in ALGORITHMS:
        test_values_of_every_algorithm.body("shm", op, algorithm)


@pytest.fixture
def memory_of_ranks(place: str) -> Iterator[None]:
    """Memory of simulated ranks has nan before every call, also memory that an earlier call used."""
    with poisoned() if place == "sim" else contextlib.nullcontext():
        yield


@pytest.mark.usefixtures("memory_of_ranks")
@matrix("asynchronous")
@ranks(SIZE)
def test_asynchronous(place: str, op: str) -> None:
    """Two calls are in flight. The last call is recorded by autograd."""
    fused = place == "sim" and "algorithm" in BY_NAME[op].kinds
    algorithm = {"algorithm": "fused"} if fused else {}
    first, second = prepared(op, **algorithm), prepared(op, call=2, **algorithm)
    begun = [(each, each.begin()) for each in (first, second)]
    for each, started in reversed(begun):
        made = finish(started)
        each.check(made)
        assert started.work is None or started.work.is_completed()
        before = [part.clone() for part in made]
        assert all(map(torch.equal, finish(started), before))
    second.check(second.through_autograd())


@matrix("out")
@pytest.mark.parametrize("dtype", few(["float32", "bool"], "float32"))
@ranks(SIZE)
def test_out(place: str, op: str, dtype: str) -> None:
    """An ``out`` that does not fit is refused on all ranks. Some ops accept the input itself as ``out``."""
    call = prepared(op, dtype=DTYPES[dtype])
    name, size = describe(None)
    out = poison(call.op.outputs(call.op.record(list(call.own.values())), size))
    calls.call_out(op, *call.own.values(), size, name, out=out)
    call.check([out])
    for wrong in (out.new_empty(out.numel() + 1), out.to(torch.int16)):
        with pytest.raises(ValueError, match="out must be"):
            calls.call_out(op, *call.own.values(), size, name, out=wrong)
    if op in IN_PLACE:
        itself = call.own["input"].clone()
        own = {**call.own, "input": itself}
        call.check(finish(call.op.begin(resolve(None), list(own.values()), out=itself)))


@matrix("out_dtype")
@pytest.mark.parametrize("dtype", few(["float32", "float16"], "float32"))
@ranks(SIZE)
def test_out_dtype(place: str, op: str, dtype: str) -> None:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        if "residual" in given:
            given["residual"] = given["residual"].to(DTYPES[dtype])
        return given

    check_values(op, dtype=torch.bfloat16, out_dtype=DTYPES[dtype], change=change)


@matrix("empty_on_all")
@ranks(SIZE)
def test_empty_on_all(place: str, op: str) -> None:
    check_values(op, rows=lambda size: evenly(size, 0))


@matrix("empty_on_one")
@ranks(SIZE)
def test_empty_on_one(place: str, op: str) -> None:
    check_values(op, rows=last_has_none)


@matrix("empty_on_one")
@ranks(SIZE)
def test_parts_as_chunks(place: str, op: str) -> None:
    """torch.chunk makes all parts but the last longer than a third."""
    check_values(op, rows=lambda size: [count for _, count in split_rows(2 * size - 1, size)])


@matrix("layouts")
@pytest.mark.parametrize("layout", few(LAYOUTS[1:], "strided"))
@ranks(SIZE)
def test_layouts(place: str, op: str, layout: str) -> None:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        return {
            name: tree_map_only(Tensor, lambda each: laid_out(each, layout), value)
            if layout != "expanded" or contracts.may_expand(BY_NAME[op], name)
            else value
            for name, value in given.items()
        }

    call = prepared(op, change=change)
    before = tree_map_only(Tensor, torch.clone, call.own)
    call.check(finish(call.begin()))
    for each, other in zip(tree_leaves(call.own), tree_leaves(before), strict=True):
        assert not isinstance(each, Tensor) or torch.equal(widened(each), widened(other))


@matrix("subgroups")
@ranks(4)
def test_subgroups(place: str, op: str) -> None:
    odd = interlace.get_rank() % 2
    check_values(op, group=[[2, 0], [1, 3]], call=1 + odd)


# -- gradients, compilers, and one process for all ranks -------------------------------------------


class OwnOfAll(torch.autograd.Function):
    """This rank's tensor out of one for each rank; its gradients come from all ranks.

    A lone tensor is the same on all ranks: its gradient is the sum over ranks.
    """

    @staticmethod
    def forward(ctx: Any, *every: Tensor) -> Tensor:
        ctx.shared = len(every) == 1
        return every[0 if ctx.shared else interlace.get_rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads = gathered(grad)
        return torch.stack(grads).sum(0) if ctx.shared else tuple(grads)


class AllOfOwn(torch.autograd.Function):
    """One result of each rank; the backward takes this rank's gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> tuple[Tensor, ...]:
        return tuple(gathered(own))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[interlace.get_rank()]


def gathered(tensor: Tensor) -> list[Tensor]:
    every: list[Any] = [None] * interlace.get_world_size()
    interlace.all_gather_object(every, tensor.detach().clone())
    return every


def check_gradients(op: str, dtype: torch.dtype) -> None:
    """Check the function from all ranks' inputs to all ranks' results, each as one vector, by gradcheck.

    Every rank calls it with the same numbers, so all ranks change the same number at the same time.
    """
    call = prepared(op, dtype=dtype)
    values, tree = tree_flatten(call.own)
    of_ranks = [tree_leaves(each) for each in call.given]
    names = [path[0].key for path, _ in tree_leaves_with_path(call.own)]
    inputs: dict[int, list[Tensor]] = {}
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        if isinstance(value, Tensor) and value.dtype == dtype:
            having = of_ranks[:1] if contracts.is_shared(call.op, name) else of_ranks
            inputs[i] = [each[i] for each in having]
    every = tree_leaves(inputs)

    def on_all(numbers: Tensor) -> Tensor:
        parts = numbers.split([each.numel() for each in every])
        leaves = list(values)
        left = iter([part.view(each.shape) for part, each in zip(parts, every, strict=True)])
        for i, of_input in inputs.items():
            leaves[i] = OwnOfAll.apply(*itertools.islice(left, len(of_input)))
        call.given[call.setting.rank] = tree_unflatten(leaves, tree)
        made = call.through_autograd()[: 1 if "return_rows" in call.op.kinds else None]
        results = [AllOfOwn.apply(each) for each in made if each.dtype == dtype]
        return torch.cat([each.flatten() for each in itertools.chain.from_iterable(results)])

    whole = torch.cat([each.flatten() for each in every]).requires_grad_()
    # An error in one of many numbers is small; AllOfOwn replaces undefined gradients by zeros.
    how: Any = {"fast_mode": True, "atol": 1e-7, "rtol": 1e-6, "check_undefined_grad": False}
    assert torch.autograd.gradcheck(on_all, whole, **how)


@matrix("gradients")
@ranks(SIZE)
def test_gradients(place: str, op: str) -> None:
    if op in contracts.NO_GRADIENTS:
        call = prepared(op)
        for each in tree_leaves(call.own):
            if isinstance(each, Tensor) and each.dtype == torch.float32:
                each.requires_grad_()
        with pytest.raises(RuntimeError, match="no gradients"):
            call.through_autograd()[0].sum().backward()  # type: ignore[no-untyped-call]
    else:
        check_gradients(op, torch.float64)


@thorough
@matrix("gradients_complex")
@ranks(SIZE)
def test_gradients_of_complex_numbers(place: str, op: str) -> None:
    check_gradients(op, torch.complex128)


@thorough
@pytest.mark.parametrize("op", cells("compiled"))
@ranks(SIZE)
def test_compiled(op: str) -> None:
    call = prepared(op)
    name, size = describe(None)
    leaves, tree = tree_flatten(list(call.own.values()))
    at = [i for i, value in enumerate(leaves) if isinstance(value, Tensor)]

    def graph(*tensors: Tensor) -> list[Tensor]:
        inputs = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            inputs[i] = tensor
        made = getattr(torch.ops.interlace, op).default(*tree_unflatten(inputs, tree), size, name)
        return [wait(each) for each in (made if call.op.several else [made])]

    torch._dynamo.reset()
    call.check(torch.compile(graph, fullgraph=True)(*[leaves[i] for i in at]))


def of_all_ranks(values: Sequence[Any]) -> Any:
    """Return a LocalTensor, a number that differs between ranks, or a value that all ranks share."""
    if isinstance(values[0], Tensor):
        return LocalTensor(dict(enumerate(values)))
    if all(each == values[0] for each in values):
        return values[0]
    return torch.SymInt(LocalIntNode(dict(enumerate(values))))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("op", cells("local_tensor"))
def test_local_tensor(op: str) -> None:
    known, setting = BY_NAME[op], Setting(0, SIZE, call=1, rows=evenly(SIZE))
    given = [known.example(each) for each in setting.everyone()]
    tree = tree_flatten(list(given[0].values()))[1]
    columns = zip(*[tree_leaves(list(each.values())) for each in given], strict=True)
    every = [of_all_ranks(column) for column in columns]
    call = functools.partial(getattr(torch.ops.interlace, op).default, *tree_unflatten(every, tree))
    local_tensor.define("everyone", [list(range(SIZE))])
    with LocalTensorMode(SIZE):
        made = call(SIZE, "everyone")
    for each in setting.everyone():
        own = [whole._local_tensors[each.rank] for whole in (made if known.several else [made])]
        Prepared(known, each, given).check(own)


# -- misuse ----------------------------------------------------------------------------------------


def misused(op: Op) -> list[tuple[str, Any]]:
    """Return wrong values by argument."""
    return [
        (name, wrong) for name in op.kinds if (wrong := contracts.wrong_of(op, name)) is not None
    ]


@matrix("misuse")
@ranks(SIZE)
def test_misuse(place: str, op: str) -> None:
    """Each wrong argument, of rank 1 or of all ranks, raises on all before any data moves. Then the group
    continues.
    """
    call = prepared(op)
    rank = interlace.get_rank()
    for name, wrong in misused(call.op):
        for ranks_wrong in ([1], range(SIZE)):
            others = {name: wrong} if rank in ranks_wrong else {}
            with pytest.raises((TypeError, ValueError)) as caught:
                finish(call.begin(**others))
            assert rank in ranks_wrong or "rank" in str(caught.value), (name, caught.value)
    call.check(finish(call.begin()))


# -- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@ranks(2)
def test_shapes_that_differ_are_no_other_shape(place: str) -> None:
    """The shapes have equal numbers of elements, and no rank reshapes its tensor."""
    rank = interlace.get_rank()
    tensor = torch.arange(8.0).reshape((2, 4) if rank == 0 else (4, 2))
    for op, *options in (
        ("all_reduce",),
        ("all_gather",),
        ("reduce_scatter",),
        ("all_to_all",),
        ("broadcast", 0),
        ("reduce", "sum", 0),
        ("gather", 0),
        ("permute", [1, 0]),
    ):
        with pytest.raises(ValueError, match=r"\(2, 4\)|\(4,\)|\(1, 4\)"):
            wait(getattr(interlace.functional, op)(tensor, *options))


@pytest.mark.parametrize("place", PLACES)
@ranks(2)
def test_tokens_of_one_rank_whose_rows_lie_apart(place: str) -> None:
    tokens = 3 * interlace.get_rank()
    x = torch.ones(tokens, 16, dtype=torch.bfloat16)[:, ::2]
    to_the_first = torch.zeros(tokens, 1, dtype=torch.int64)
    received, _ = interlace.experts.dispatch(
        x, to_the_first, torch.ones(tokens, 1), 2, algorithm="fused"
    )
    assert received.x.shape == (0 if interlace.get_rank() else 3, 8)


def test_every_op_has_its_cells() -> None:
    assert contracts.gaps(BY_NAME) == []
    for each in contracts.REASONS:
        assert each.contract in CONTRACTS
        assert any(each.holds(op) for op in BY_NAME.values()), each.text
    assert contracts.REFERENCES.keys() <= BY_NAME.keys()
