"""The ops under torch's LocalTensorMode: one process plays all ranks, and gets what ranks would get."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import interlace
from interlace import functional as F
from interlace.ops import local_tensor
from multi.functional.op_cases import TABLE, flat, reference
from ranks import ranks

RANKS = 4
PAIRS = [[0, 2], [1, 3]]
EVEN = {case.name: case for case in TABLE if not case.uneven}


def local(make: Callable[[int], torch.Tensor], **options: Any) -> Any:
    return LocalTensor({rank: make(rank) for rank in range(RANKS)}, **options)


def of_rank(made: Any, rank: int) -> torch.Tensor:
    assert isinstance(made, LocalTensor)
    return made._local_tensors[rank]


def ramp(tensor: Any) -> torch.Tensor:
    return torch.arange(1.0, 1 + tensor.numel(), dtype=torch.float64).view(tensor.shape)


@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize("inside", [True, False], ids=["in the mode", "by the tensor"])
def test_outputs_and_gradients_of_all_ranks(name: str, inside: bool) -> None:
    case, ranks = EVEN[name], range(RANKS)
    every = [[x.requires_grad_() for x in case.inputs(rank, RANKS)] for rank in ranks]
    right = [flat(each) for each in reference(case, every)]
    loss = torch.stack([(y * ramp(y)).sum() for outputs in right for y in outputs]).sum()
    grads = torch.autograd.grad(loss, [x for xs in every for x in xs], materialize_grads=True)
    inputs = [
        local(lambda rank, i=i: every[rank][i].detach().clone(), requires_grad=True)
        for i in range(len(every[0]))
    ]
    group = None if inside else interlace.GroupSpec("all of them", RANKS)
    with LocalTensorMode(RANKS) if inside else contextlib.nullcontext():
        made = [F.wait(y) for y in flat(case.bound(size=RANKS, group=group)(*inputs))]
        losses = torch.stack([(y * ramp(y)).sum() for y in made])
        found = torch.autograd.grad(losses.sum(), inputs, materialize_grads=True)
    for rank in ranks:
        own = grads[rank * len(inputs) : (rank + 1) * len(inputs)]
        expected = zip([*made, *found], [*right[rank], *own], strict=True)
        for each, other in expected:
            torch.testing.assert_close(of_rank(each, rank), other)


# -- groups, and what no other form has, as real ranks get it ------------------------------------------


def own_numbers(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 2)
    return torch.randn(8, 6, generator=generator) * 4


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    torch.ops.interlace.broadcast_(y, 2, RANKS, "0")
    return torch.ops._c10d_functional.wait_tensor(y)  # type: ignore[no-any-return]


SPECIAL: dict[str, Callable[[Any], Any]] = {
    "premul_sum": lambda x: F.all_reduce(x, dist._make_nccl_premul_sum(0.5)),
    "halves": lambda x: F.all_reduce(x.bfloat16(), "avg"),
    "bits": lambda x: F.all_reduce(x.int(), "bxor"),
    "out": lambda x: F.all_reduce(x, "max", out=torch.zeros_like(x)),
    "broadcast_": in_place,
    "tagged pairs": lambda x: F.all_reduce(x, group=PAIRS, tag="fast"),
    # results of ops, not waited for, go into ops; of two kinds of groups
    "chain": lambda x: F.all_gather(
        F.all_reduce(x, "avg", group=PAIRS) * 2, 1, group=[[0, 1], [2, 3]]
    ),
}


def special() -> dict[str, list[torch.Tensor]]:
    x = own_numbers(interlace.get_rank())
    return {name: [F.wait(y) for y in flat(case(x))] for name, case in SPECIAL.items()}


def test_as_real_ranks() -> None:
    x = local(own_numbers)
    with LocalTensorMode(RANKS):
        made = {name: [F.wait(y) for y in flat(case(x))] for name, case in SPECIAL.items()}
    for rank, real in enumerate(interlace.run(special, RANKS, place="shm")):
        for name, right in real.items():
            for each, other in zip(made[name], right, strict=True):
                own = of_rank(each, rank)
                assert own.stride() == other.stride(), name
                # sums that cancel are as exact as their terms are large
                scale = max(float(other.double().abs().max()), 1.0)
                torch.testing.assert_close(own / scale, other / scale, msg=lambda m, n=name: n + m)


def test_uneven_all_to_all() -> None:
    sent = [[1, 2], [3, 0]]
    received = [[1, 3], [2, 0]]
    rows = [torch.arange(3.0) + 10 * rank for rank in range(2)]
    mode = LocalTensorMode(2)
    x = LocalTensor(dict(enumerate(rows)))
    with mode:
        sizes = [
            [torch.SymInt(torch.distributed._local_tensor.LocalIntNode(dict(enumerate(column))))
             if column[0] != column[1] else column[0]
             for column in zip(*table, strict=True)]
            for table in (received, sent)
        ]  # fmt: skip
        y = F.all_to_all(x, *sizes) * 1
    assert y._local_tensors[0].tolist() == [0.0, 10.0, 11.0, 12.0]
    assert y._local_tensors[1].tolist() == [1.0, 2.0]


def test_what_is_no_answer_is_an_error() -> None:
    x = local(lambda rank: torch.ones(4, 4) * rank)
    uneven = local(lambda rank: torch.ones(4 + rank % 2))
    wide = local(lambda rank: torch.ones(4), requires_grad=False)
    plain = torch.ones(4)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "rank 1 is not a member", lambda: F.all_reduce(x, group=[0, 2])),
        (ValueError, "only .0, 1, 2, 3. are simulated", lambda: F.all_reduce(x, group=[*range(8)])),
        (ValueError, "pass the ranks", lambda: F.all_reduce(x, group=interlace.GroupSpec("tp", 2))),
        (ValueError, "shape of input differs", lambda: F.all_reduce(uneven)),
        (TypeError, "plain tensors only", lambda: F.all_reduce(plain)),
        (ValueError, "root|0..3", lambda: F.broadcast(x, 4)),
        (TypeError, "not defined for", lambda: F.all_reduce(wide, "band")),
        (ValueError, "does not divide", lambda: F.reduce_scatter(local(lambda r: torch.ones(6)))),
        (TypeError, "out must be a LocalTensor", lambda: F.all_reduce(wide, out=plain)),
        (ValueError, "op was called for", lambda: torch.ops.interlace.all_reduce(x, "sum", 2, "0")),
        (
            ValueError,
            "must have the same ranks",
            lambda: F.matmul_all_reduce(x, LocalTensor({0: torch.ones(4, 4)})),
        ),
    ]
    for kind, message, call in refused:
        with LocalTensorMode(RANKS) as mode, pytest.raises(kind, match=message):
            with mode.disable():
                mode.enable_()
            call()


class Derived(LocalTensorMode):
    """A subclass for which torch finds no rule."""


@ranks(1, place="sim")
def test_where_rules_are_not_found() -> None:
    """torch would run such an op once per rank on a real group, so the op refuses."""
    x = LocalTensor({0: torch.ones(2), 1: torch.ones(2)})
    with pytest.raises(TypeError, match="an op would run for each simulated rank"), Derived(2):
        torch.ops.interlace.all_reduce(x, "sum", 1, "0")


def test_names_can_be_defined() -> None:
    x = local(lambda rank: torch.tensor([float(1 << rank)]))
    local_tensor.define("rows", PAIRS)
    with LocalTensorMode(RANKS):
        y = F.all_reduce(x, group=interlace.GroupSpec("rows")) + 0
    assert [y._local_tensors[rank].item() for rank in range(RANKS)] == [5.0, 10.0, 5.0, 10.0]


@ranks()
def test_eager_functions_refuse() -> None:
    """A LocalTensor has no memory, so the functions could only return wrong numbers."""
    x = LocalTensor({rank: torch.ones(2, 2) * (rank + 1) for rank in range(2)})
    plain, out = torch.ones(2, 2), torch.empty(4, 2)
    calls: list[Callable[[Any], Any]] = [
        interlace.all_reduce,
        lambda t: interlace.broadcast(t, 0),
        lambda t: interlace.all_gather_into_tensor(out, t),
        lambda t: interlace.reduce_scatter_tensor(torch.empty(1, 2), t),
        lambda t: interlace.all_gather_matmul(t, plain),
        lambda t: interlace.matmul_reduce_scatter(plain, t),
        lambda t: interlace.matmul_all_reduce(t, plain),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"interlace\.functional"):
            call(x)
        with LocalTensorMode(2), pytest.raises(TypeError, match=r"interlace\.functional"):
            call(plain)


# -- torch's side: DTensor, groups, meshes -------------------------------------------------------------


@pytest.fixture
def fake_world() -> Iterator[None]:
    """Make the usual environment of LocalTensor: a default group whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_world")
def test_groups_of_torch() -> None:
    x = local(lambda rank: torch.tensor([float(1 << rank)]))
    evens, odds = [5.0, 10.0, 5.0, 10.0], [3.0, 3.0, 12.0, 12.0]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    turned = dist.DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("a", "b"))
    with LocalTensorMode(RANKS):
        sums = {
            "default": F.all_reduce(x),
            "world": F.all_reduce(x, group=dist.group.WORLD),
            "dp": F.all_reduce(x, group=mesh["dp"]),
            "name": F.all_reduce(x, group=mesh.get_group("dp").group_name),
            "tp": F.all_reduce(x, group=mesh.get_group("tp")),
            "turned": F.all_gather(x, group=(turned, "b")),
        }
    got = {
        name: [t.tolist() for t in F.wait(y)._local_tensors.values()] for name, y in sums.items()
    }
    assert got["default"] == got["world"] == [[15.0]] * 4
    assert got["dp"] == got["name"] == [[value] for value in evens]
    assert got["tp"] == [[value] for value in odds]
    assert got["turned"] == [[1.0, 8.0], [4.0, 2.0], [4.0, 2.0], [1.0, 8.0]]
    with pytest.raises(interlace.InterlaceError, match="fake"):
        interlace.all_reduce(x)


@pytest.mark.usefixtures("fake_world")
def test_dtensor() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, w1, w2 = own_numbers(1), own_numbers(2).view(6, 8), own_numbers(3)
    with LocalTensorMode(RANKS):
        rows = distribute_tensor(x, mesh, [Replicate(), Shard(0)])
        columns = distribute_tensor(w1, mesh, [Replicate(), Shard(1)])
        inner = distribute_tensor(w2, mesh, [Replicate(), Shard(0)])
        h = F.all_gather_matmul(rows.to_local(), columns.to_local(), group=(mesh, "tp"))
        y = F.matmul_reduce_scatter(torch.relu(h), inner.to_local(), group=mesh["tp"])
        out = DTensor.from_local(F.wait(y), mesh, [Replicate(), Shard(0)])
        whole = out.redistribute(mesh, [Replicate(), Replicate()]).to_local()
        again = out.redistribute(mesh, [Shard(0), Replicate()]).to_local()
        reduced = F.reduce_scatter(again, group=mesh["dp"]) * 1
    expected = torch.relu(x @ w1) @ w2
    torch.testing.assert_close(whole.reconcile(), expected)
    halves = expected.chunk(2)
    for rank, part in reduced._local_tensors.items():
        torch.testing.assert_close(part, (halves[0] + halves[1]).chunk(2)[rank // 2])
