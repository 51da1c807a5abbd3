"""The API beyond the table: layouts, keywords, 0-dim, gradients, groups and their names, Work."""

import dataclasses
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_functional
import torch.distributed.tensor._collective_utils as mesh_utils
from torch.distributed.device_mesh import DeviceMesh

import interlace
import torch_names
from interlace import functional
from interlace.groups.groups import default_group
from interlace.groups.specs import bind, describe
from ranks import ranks
from support import payload


def numbers() -> tuple[int, int]:
    return interlace.get_rank(), interlace.get_world_size()


# -- names and forms ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@ranks(3, place="sim")
def test_torch_s_names_and_keywords() -> None:
    rank, world = numbers()
    x = payload(rank, 1, (2,))
    expected = torch.cat([payload(r, 1, (2,)) for r in range(world)])
    for function in (
        interlace.all_gather, interlace.all_gather_into_tensor, interlace.all_gather_single,
        interlace._all_gather_base,
    ):  # fmt: skip
        out = torch.zeros(2 * world)
        function(output_tensor=out, input_tensor=x, group=None, async_op=False)
        assert torch.equal(out, expected)
    outs = [torch.zeros(2) for _ in range(world)]
    interlace.all_gather(tensor_list=outs, tensor=x)
    assert torch.equal(torch.cat(outs), expected)
    total = sum(payload(r, 1, (2,)) for r in range(world))
    wide = x.repeat(world)
    for function in (
        interlace.reduce_scatter, interlace.reduce_scatter_tensor,
        interlace.reduce_scatter_single, interlace._reduce_scatter_base,
    ):  # fmt: skip
        part = torch.zeros(2)
        function(output=part, input=wide, op=dist.ReduceOp.SUM)
        assert torch.equal(part, total)
    part = torch.zeros(2)
    interlace.reduce_scatter(part, input_list=list(wide.split(2)))
    assert torch.equal(part, total)


def classes_of(module: Any, model: Any) -> set[str]:
    """Return the public classes of ``module`` whose names are classes of ``model``."""
    return {n for n in module.__all__ if isinstance(getattr(model, n, None), type)}


def test_objects_of_torch() -> None:
    """A class with the name of a torch class accepts torch's objects; topologies are in
    tensor/test_costs.py.
    """
    assert classes_of(interlace, dist) == {"P2POp", "ReduceOp", "Work"}  # no function takes a Work
    assert classes_of(interlace.tensor, mesh_utils) == {"MeshTopoInfo"}
    dist.init_process_group("interlace", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, y = torch.arange(2.0), torch.zeros(2)
        messages = [dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, y, 0)]
        for work in interlace.batch_isend_irecv(messages):
            work.wait()
        interlace.all_reduce(y, op=dist.ReduceOp(dist.ReduceOp.SUM))
        assert torch.equal(x, y)
        started = torch_functional.all_reduce(x, "sum", dist.group.WORLD)
        assert type(started) is torch_functional.AsyncCollectiveTensor
        waited = functional.wait(started)
        assert type(waited) is torch.Tensor and torch.equal(waited, x)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: interlace.all_gather(torch.ones(1)), "missing required argument: 'tensor'"),
        (lambda: interlace.all_gather(torch.ones(1), torch.ones(1), tensor_list=[torch.ones(1)]),
         "both 'output' and 'tensor_list'"),
        (lambda: interlace.reduce_scatter(torch.ones(1)), "missing required argument: 'input'"),
    ],
)  # fmt: skip
def test_arguments_missing_or_given_twice(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        interlace.run(call, 1)


@pytest.mark.parametrize("op", list(dist.ReduceOp.RedOpType.__members__.values())[:8])
@ranks(2, place="sim")
def test_a_reduce_op_by_all_its_names(op: Any) -> None:
    rank = interlace.get_rank()
    results = []
    for name in (op, dist.ReduceOp(op), op.name.lower(), op.name):
        x = torch.tensor([rank + 1, 5, 3 * rank])
        interlace.all_reduce(x, name)
        results.append(x.tolist())
    assert results == [results[0]] * 4


@ranks(2, place="sim")
def test_premul_sum_has_a_factor_of_each_kind() -> None:
    rank, _ = numbers()
    for op in (
        torch_names.premul_sum(0.5),
        dist._make_nccl_premul_sum(0.5),
        dist._make_nccl_premul_sum(torch.tensor([0.5])),
    ):
        x = torch.full((3,), 2.0 + rank)
        interlace.all_reduce(x, op)
        assert x.tolist() == [2.5] * 3
    x = torch.full((3,), 2.0)
    interlace.all_reduce(x, torch_names.premul_sum(1.0 + rank))  # each rank its own
    assert x.tolist() == [6.0] * 3


@pytest.mark.parametrize("async_op", [False, True])
@ranks(2, place="sim")
def test_a_strided_output_leaves_the_gaps_alone(async_op: bool) -> None:
    rank, whole = interlace.get_rank(), torch.full((4, 6), -1.0)
    own = torch.arange(6.0).view(2, 3)
    calls: list[tuple[Callable[[torch.Tensor], Any], list[list[float]]]] = [
        (lambda x: interlace.all_gather(x, own, async_op=async_op), [*own.tolist()] * 2),
        (lambda x: interlace.all_reduce(x[:2].copy_(own), async_op=async_op), (2 * own).tolist()),
        (lambda x: interlace.reduce(x[:2].copy_(own), 1, async_op=async_op), ((1 + rank) * own).tolist()),
        (lambda x: interlace.reduce_scatter(x[:2], [own.T.reshape(2, 3)] * 2, async_op=async_op),
         (2 * own.T.reshape(2, 3)).tolist()),
    ]  # fmt: skip
    for call, right in calls:
        work = call(whole[:, ::2])
        assert (work is not None) == async_op
        if work is not None:
            work.wait()
        assert whole[: len(right), ::2].tolist() == right
        assert (whole[:, 1::2] == -1).all()


@ranks(2, place="sim")
def test_parts_along_another_dim() -> None:
    rank, world = numbers()
    sizes = [1, 3]
    out = torch.zeros(2, 4)
    x = payload(rank, 1, (2, sizes[rank]))
    interlace.all_gather_v(out, x, sizes, dim=1)
    expected = torch.cat([payload(r, 1, (2, sizes[r])) for r in range(world)], 1)
    assert torch.equal(out, expected)
    part = torch.zeros(2, sizes[rank])
    interlace.reduce_scatter_v(part, expected, sizes, dim=-1)
    assert torch.equal(part, 2 * x)
    part = torch.zeros(2, sizes[rank])
    whole = expected if rank == 1 else None
    interlace.scatter_v(part, whole, sizes if rank == 1 else None, group_src=1, dim=1)
    assert torch.equal(part, x)
    out = torch.zeros(2, 4) if rank == 1 else None
    interlace.gather_v(part, out, sizes if rank == 1 else None, dst=1, dim=1)
    assert out is None or torch.equal(out, expected)
    out = torch.zeros(2, 2 * sizes[rank])
    interlace.all_to_all_v(out, expected, [sizes[rank]] * 2, sizes, dim=1)
    assert torch.equal(out, torch.cat([x, x], 1))


@ranks(2, place="sim")
def test_outputs_that_require_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    interlace.all_reduce(x)
    interlace.broadcast(x, 0)
    out = torch.zeros(4, requires_grad=True)
    interlace.all_gather(out, x)
    assert x.tolist() == [2, 2] and out.tolist() == [2] * 4
    assert x.grad_fn is None and out.grad_fn is None and x.requires_grad


# -- groups -------------------------------------------------------------------------------------------


def _sum_in(group: Any) -> float:
    x = torch.tensor([10.0 ** interlace.get_rank()])
    interlace.all_reduce(x, group=group)
    return x.item()


@pytest.mark.parametrize("place", ["sim", "shm"])
@ranks(4)
def test_a_group_of_every_kind(place: str) -> None:
    rank, _ = numbers()
    named = interlace.new_group([1, 3], name="odd", timeout=timedelta(seconds=50))
    local = [1, 3] if rank % 2 else [2, 0]
    alone = interlace.new_group(local, use_local_synchronization=True)
    again = interlace.new_group(local, use_local_synchronization=True)
    assert alone is not again
    rows, names = [[0, 2], [1, 3]], ("a", "b")
    mesh = DeviceMesh("cpu", rows, mesh_dim_names=names, _init_backend=False, _rank=rank)
    row = 1010.0 if rank % 2 else 101.0
    column = 11.0 if rank < 2 else 1100.0
    assert _sum_in(None) == _sum_in("0") == _sum_in([0, 1, 2, 3]) == 1111.0
    assert _sum_in(local) == _sum_in(alone) == _sum_in(again) == row
    assert _sum_in([[0, 2], [1, 3]]) == row
    assert _sum_in((mesh, "b")) == _sum_in((mesh, 1)) == _sum_in((mesh, -1)) == row
    assert _sum_in((mesh, 0)) == column
    flat = DeviceMesh("cpu", [3, 2, 1, 0], _init_backend=False, _rank=rank)
    assert _sum_in(flat) == 1111.0 and interlace.get_rank(flat) == 3 - rank
    if rank % 2:
        assert _sum_in("odd") == _sum_in(named) == row
        assert interlace.get_rank([3, 1]) == (0 if rank == 3 else 1)
    else:
        assert named == dist.GroupMember.NON_GROUP_MEMBER
    assert interlace.groups.resolve(local) is interlace.groups.resolve(list(local))
    mine, every = interlace.new_subgroups(2)
    assert _sum_in(mine) == column and len(every) == 2
    mine, every = interlace.new_subgroups_by_enumeration([[3, 0], [1]])
    assert (mine is None) == (rank == 2) and len(every) == 2
    assert mine is None or _sum_in(mine) == (10.0 if rank == 1 else 1001.0)
    mine = interlace.split_group(None, [[0, 3], [2, 1]])
    assert _sum_in(mine) == (1001.0 if rank in (0, 3) else 110.0)


def test_a_process_group_with_a_communicator_of_its_own() -> None:
    class Ours(interlace.groups.groups.OnInterlace, dist.ProcessGroup):
        pass

    def on_rank() -> None:
        group = Ours(*numbers())
        group.interlace_communicator = default_group()
        assert interlace.groups.resolve(group) is default_group()

    interlace.run(on_rank, 2)


@pytest.mark.parametrize(
    ("group", "kind", "text"),
    [
        ([[0, 1, 2], [3]], ValueError, r"all groups must have the same size, got sizes \[3, 1\]"),
        ([[0, 1], [1, 2]], ValueError, "a rank is in two of"),
        ([0, 0], ValueError, "ranks must be distinct"),
        ([0, 9], ValueError, r"within 0\.\.3, got \[0, 9\]"),
        ([], ValueError, "ranks must be distinct"),
        ([0, 1.5], TypeError, "ranks must be ints"),
        ([[0, 1]], ValueError, "rank [23] is not in any of"),
        ([1, 2], ValueError, "rank [03] is not a member"),
        ("nobody", ValueError, "no group named 'nobody'"),
    ],
)
def test_no_such_group(group: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        interlace.run(lambda: interlace.barrier(group), 4)


@ranks(4, place="sim")
def test_roots_of_a_group_and_of_all_ranks() -> None:
    rank, _ = numbers()
    if rank == 0:
        return
    group = [3, 1, 2]
    x = torch.tensor([rank])
    interlace.broadcast(x, 1, group)
    assert x.item() == 1
    x = torch.tensor([rank])
    interlace.broadcast(x, group=group, group_src=0)
    assert x.item() == 3
    x = torch.tensor([rank])
    interlace.reduce(x, group=group, group_dst=2)
    assert x.item() == (6 if rank == 2 else rank)
    if rank == 3:
        interlace.send(torch.tensor([7]), group=group, group_dst=1)
    elif rank == 1:
        y = torch.zeros(1, dtype=torch.int64)
        assert interlace.recv(y, group=group) == 3  # a rank of the default group
        assert y.item() == 7


# -- Work, barriers, objects --------------------------------------------------------------------------


@ranks(2, place="sim")
def test_work_has_torch_s_surface() -> None:
    world = interlace.get_world_size()
    x = torch.ones(3)
    work = interlace.all_reduce(x, async_op=True)
    assert isinstance(work, dist.Work)
    assert work.wait(timedelta(seconds=20)) is True
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is x and work.get_future().wait()[0] is x
    work.synchronize()
    work.block_current_stream()
    with pytest.raises(ValueError, match="no source rank"):
        work.source_rank()
    work = interlace.barrier(async_op=True)
    assert isinstance(work, interlace.Work) and work.wait() is True
    assert interlace.barrier(device_ids=[0], timeout=timedelta(seconds=9)) is None
    outs = [torch.zeros(3) for _ in range(world)]
    results = interlace.all_gather(outs, x, async_op=True).result()
    assert all(a is b for a, b in zip(results, outs, strict=True))


@pytest.mark.parametrize("place", ["sim", "shm"])
@ranks(3)
def test_objects(place: str) -> None:
    rank, world = numbers()

    def thing(of: int, size: int) -> Any:
        return {"rank": of, "bytes": bytes([of]) * size * (of + 1)}

    for size in (1, 9000, 200_000):  # 9000: small on rank 0 only
        everything = [thing(r, size) for r in range(world)]
        got: list[Any] = [None] * world
        interlace.all_gather_object(got, thing(rank, size))
        assert got == everything
        root = world - 1
        got = [None] * world
        interlace.gather_object(thing(rank, size), got if rank == root else None, root)
        assert got == (everything if rank == root else [None] * world)
        both = [thing(root, size), "x"] if rank == root else [None, None]
        interlace.broadcast_object_list(both, root)
        assert both == [thing(root, size), "x"]
        mine: list[Any] = [None]
        interlace.scatter_object_list(mine, everything if rank == root else None, root)
        assert mine == [thing(rank, size)]
        if rank == 0:
            interlace.send_object_list([thing(0, size), None], 1)
        elif rank == 1:
            pair = [1, 2]
            assert interlace.recv_object_list(pair, 0 if size == 1 else None) == 0
            assert pair == [thing(0, size), None]


@ranks(2, place="sim")
def test_monitored_barrier_when_all_come() -> None:
    for _ in range(3):
        interlace.monitored_barrier(timeout=timedelta(seconds=50), wait_all_ranks=True)
    interlace.monitored_barrier([1, 0])


@pytest.mark.parametrize(
    "group, tag, expected",
    [
        ([0, 2], "", ("ranks:0,2", 2)),
        ((1, 0), "", ("ranks:1,0", 2)),
        ([[0, 2], [1, 3]], "", ("ranks:0,2|1,3", 2)),
        ([[0, 2], [1, 3]], "fast", ("ranks:0,2|1,3#fast", 2)),
        (interlace.GroupSpec("tp", 4), "", ("tp", 4)),
    ],
)
def test_names_need_no_group(group: Any, tag: str, expected: tuple[str, int]) -> None:
    assert not dist.is_initialized()
    assert describe(group, tag) == expected


@pytest.mark.parametrize(
    "group, tag, kind, message",
    [
        ([-1, 0], "", ValueError, "not negative"),
        ([0, True], "", TypeError, "ranks must be ints, got True"),
        ([[0, 1], 2], "", TypeError, "must be ranks or lists of ranks"),
        ([[]], "", TypeError, "must be ranks or lists of ranks"),
        ([0], "a#b", ValueError, "without '#'"),
        (interlace.GroupSpec("tp", 2), "fast", ValueError, "goes with a list of ranks"),
        (None, "", interlace.InterlaceError, "no group"),
        (3, "", TypeError, "got int"),
    ],
)
def test_what_is_no_group(group: Any, tag: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        describe(group, tag)


def test_specs_are_checked() -> None:
    for arguments in ((3, 2), ("", 2), ("tp", "2"), ("tp", True), ("tp", 2.0)):
        with pytest.raises(TypeError, match="GroupSpec"):
            interlace.GroupSpec(*arguments)  # type: ignore[arg-type]
    for arguments in (("tp", 0), ("tp", -1), ("ranks:0", 1)):
        with pytest.raises(ValueError, match="GroupSpec"):
            interlace.GroupSpec(*arguments)
    spec = interlace.GroupSpec("tp", 2)
    assert spec == pickle.loads(pickle.dumps(spec)) and hash(spec) == hash(
        dataclasses.replace(spec)
    )
    assert interlace.GroupSpec("tp") != spec and interlace.GroupSpec("tp").size is None


@ranks(4, place="sim")
def test_binding() -> None:
    rank = interlace.get_rank()
    pairs, columns = [[0.0, 1.0], [2.0, 3.0]][rank // 2], [[0.0, 2.0], [1.0, 3.0]][rank % 2]

    def gathered(group: Any) -> list[float]:
        found: list[float] = functional.all_gather(
            torch.tensor([float(rank)]), group=group
        ).tolist()
        return found

    spec = interlace.GroupSpec("bound here", 2)
    with pytest.raises(ValueError, match="no group named 'bound here'"):
        gathered(spec)
    with pytest.raises(ValueError, match="has size 2, the group has 4"):
        spec.bind(None)
    spec.bind([[0, 1], [2, 3]])
    assert gathered(spec) == pairs
    spec.bind([[0, 2], [1, 3]])  # again, to another group
    for form in (spec, "bound here", interlace.GroupSpec("bound here")):
        assert gathered(form) == columns
    with pytest.raises(ValueError, match="has 2 ranks, but the op was traced for 3"):
        gathered(interlace.GroupSpec("bound here", 3))
    interlace.new_group([0, 1, 2, 3], name="named")
    assert gathered(interlace.GroupSpec("named", 4)) == [0.0, 1.0, 2.0, 3.0]


def test_a_name_stands_for_one_group_in_its_run_only() -> None:
    spec = interlace.GroupSpec("of one run", 2)

    def body(binding: bool) -> str:
        if binding:
            spec.bind(None)
        try:
            functional.all_reduce(torch.ones(1), group=spec)
        except ValueError as error:
            return str(error)[:24]
        return "found"

    assert interlace.run(body, 2, True) == ["found", "found"]
    assert interlace.run(body, 2, False) == ["group: there is no group"] * 2


@ranks(2, place="sim")
def test_communicators_have_names_that_find_them() -> None:
    groups = [interlace.new_group([1, 0]) for _ in range(3)]
    groups.append(interlace.new_group([0, 1], name="mine"))
    names = [describe(group)[0] for group in groups]
    assert all(bind(name, 2) is group for name, group in zip(names, groups, strict=True))
    assert len(set(names)) == 4 and names[3] == "mine"
