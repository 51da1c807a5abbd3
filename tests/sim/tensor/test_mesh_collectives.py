"""mesh_scatter, mesh_broadcast, shard_dim_alltoall and the shard utilities, on simulated ranks."""

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._collective_utils import pad_tensor, unpad_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import interlace
import interlace.tensor as tensor
from interlace.functional import AsyncTensor
from multi.tensor.meshes import expected_chunk
from ranks import ranks
from support import failure, payload


def mesh_of(rows: Any) -> DeviceMesh:
    """On the calling rank."""
    return DeviceMesh("cpu", rows, _init_backend=False, _rank=interlace.get_rank())


# -- broadcast and scatter -----------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("mesh_dim, group_src", [(0, 0), (1, 0), (1, 1), (0, 1), (-1, 1)])
def test_every_row_has_its_own_source(mesh_dim: int, group_src: int, async_op: bool) -> None:
    rows = [[0, 1], [2, 3]]

    def on_rank() -> tuple[bool, bool]:
        rank = interlace.get_rank()
        mesh = mesh_of(rows)
        row, column = divmod(rank, 2)
        source = 2 * row + group_src if mesh_dim else 2 * group_src + column
        mine = payload(rank, 0, (3, 2))
        done = tensor.mesh_broadcast(mine, mesh, mesh_dim, async_op, group_src=group_src)
        assert isinstance(done, interlace.Work) if async_op else done is None
        part = torch.full((2, 2), torch.nan)
        whole = [payload(rank, 1 + r, (2, 2)) for r in range(2)]
        # what others pass is not read, as in torch
        more = tensor.mesh_scatter(part, whole, mesh, mesh_dim, async_op, group_src=group_src)
        assert isinstance(more, interlace.Work) if async_op else more is None
        for work in (done, more):
            if work is not None:
                work.wait()
        place = column if mesh_dim else row
        return (
            torch.equal(mine, payload(source, 0, (3, 2))),
            torch.equal(part, payload(source, 1 + place, (2, 2))),
        )

    assert interlace.run(on_rank, 4) == [(True, True)] * 4


@pytest.mark.parametrize("async_op", [False, True])
def test_without_a_source_nobody_communicates(async_op: bool) -> None:
    """Only rank 1 calls: had it to wait for rank 0, the simulator would report a deadlock."""

    def on_rank() -> Any:
        rank = interlace.get_rank()
        mesh = mesh_of([0, 1])
        interlace.barrier()
        if rank == 0:
            return None
        mine, part = torch.ones(2), torch.zeros(2)
        works = (
            tensor.mesh_broadcast(mine, mesh, 0, async_op, group_src=None),
            tensor.mesh_scatter(part, [mine, mine * 7], mesh, 0, async_op, group_src=None),
        )
        for work in works:
            assert (work is not None) is async_op
            assert work is None or (
                work.wait() and work.is_completed() and "completed" in repr(work)
            )
        with pytest.raises(
            ValueError, match="every rank takes its entry of its own list, got None"
        ):
            tensor.mesh_scatter(part, None, mesh, group_src=None)
        with pytest.raises(ValueError, match=r"scatter_list\[1\] has shape \(3,\), output \(2,\)"):
            tensor.mesh_scatter(part, [mine, torch.ones(3)], mesh, group_src=None)
        return mine.tolist(), part.tolist()

    # the group of the mesh is made before, by both
    def both() -> Any:
        interlace.groups.resolve((mesh_of([0, 1]), 0))
        return on_rank()

    assert interlace.run(both, 2) == [None, ([1.0, 1.0], [7.0, 7.0])]


def test_meta_tensors_need_no_group() -> None:
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0)
    meta = torch.ones(4, 6, device="meta")
    assert tensor.mesh_broadcast(meta, mesh) is None
    for work in (
        tensor.mesh_broadcast(meta, mesh, async_op=True),
        tensor.mesh_scatter(meta, None, mesh, async_op=True),
    ):
        assert isinstance(work, torch.distributed.Work) and work.wait() and work.is_completed()
        assert work.get_future().wait() == [meta]
    made = tensor.shard_dim_alltoall(meta, 0, 1, mesh, 0)
    assert made.is_meta and made.shape == (8, 3) and made.is_contiguous()


def test_graphs_have_the_ops() -> None:
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0)

    def traced(x: torch.Tensor) -> torch.Tensor:
        y, part = x + 1, x.new_empty(2, 6)
        tensor.mesh_broadcast(y, mesh, group_src=1)
        tensor.mesh_scatter(part, list(y.chunk(2)), mesh)
        return tensor.shard_dim_alltoall(part, 0, 1, mesh, 0)

    graph = make_fx(traced, tracing_mode="fake")(torch.ones(4, 6))
    names = [str(n.target).split(".")[1] for n in graph.graph.nodes if "interlace" in str(n.target)]
    assert names == ["broadcast_out", "scatter", "all_to_all"]
    with FakeTensorMode():
        assert traced(torch.ones(4, 6)).shape == (4, 3)


@pytest.mark.parametrize(
    "change, kind, text",
    [
        ({"group_src": 2}, ValueError, r"group_src must be within 0\.\.1, got 2"),
        ({"group_src": "0"}, TypeError, r"group_src must be an int, got '0'"),
        ({"group_src": 1}, ValueError, "root"),
        ({"shape": (3,)}, ValueError, "shape"),
        ({"mesh_dim": 1}, ValueError, r"dim must be within -1\.\.0, got 1"),
        ({"mesh_dim": "tp"}, ValueError, r"dim 'tp' is not one of \[\]"),
    ],
)
@pytest.mark.parametrize("op", ["mesh_broadcast", "mesh_scatter"])
def test_what_one_rank_does_wrong_all_are_told(
    op: str, change: dict[str, Any], kind: type[Exception], text: str
) -> None:
    def on_rank() -> str:
        rank = interlace.get_rank()
        given = {"group_src": 0, "shape": (2,), "mesh_dim": 0, **(change if rank == 1 else {})}
        output = torch.zeros(given["shape"])
        args = ([torch.ones(2)] * 2,) if op == "mesh_scatter" else ()
        try:
            source, dim = given["group_src"], given["mesh_dim"]
            getattr(tensor, op)(output, *args, mesh_of([0, 1]), dim, group_src=source)
        except kind as error:
            return str(error)
        return "nothing was raised"

    for said in interlace.run(on_rank, 2):
        assert re.search(text, said), said


# -- shard_dim_alltoall --------------------------------------------------------------------------------


SHAPES = [(2, 6), (2, 7), (3, 4, 5), (1, 1), (3, 0), (0, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_shards_along_another_dimension(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    dims = [(g, s) for g in range(len(shape)) for s in range(len(shape))] + [(-1, 0), (0, -1)]

    def on_rank() -> list[str]:
        rank, wrong = interlace.get_rank(), []
        mesh = mesh_of([2, 0, 1])  # ranks of the row in another order
        row = [2, 0, 1]
        for call, (gather_dim, shard_dim) in enumerate(dims):
            parts = [payload(each, call, shape, dtype) for each in row]
            mine, at = parts[row.index(rank)], row.index(rank)
            expected = expected_chunk(parts, gather_dim, shard_dim, at)
            found = tensor.shard_dim_alltoall(mine, gather_dim, shard_dim, mesh, 0)
            later = tensor.shard_dim_alltoall(mine, gather_dim, shard_dim, mesh, 0, async_op=True)
            assert type(found) is torch.Tensor and type(later) is AsyncTensor
            assert later.shape == expected.shape
            for each in (found, later.wait()):
                same = each.shape == expected.shape and torch.equal(each, expected)
                if not same or not each.is_contiguous():
                    wrong.append(f"{gather_dim} -> {shard_dim}: {each} is not {expected}")
        return wrong

    assert interlace.run(on_rank, 3) == [[], [], []]


def test_starts_at_once() -> None:
    """Neither rank waits for the other before both have started, in different orders of use."""

    def on_rank() -> list[float]:
        mesh = mesh_of([0, 1])
        x = torch.arange(4.0).view(2, 2) + interlace.get_rank()
        made = [tensor.shard_dim_alltoall(x * k, 0, 1, mesh, 0, async_op=True) for k in (1, 2)]
        return [float(each.sum()) for each in (made if interlace.get_rank() else made[::-1])]

    assert interlace.run(on_rank, 2) == [[12.0, 6.0], [10.0, 20.0]]


def test_shapes_that_differ() -> None:
    def on_rank() -> None:
        x = torch.ones(2, 4 + 2 * interlace.get_rank())
        tensor.shard_dim_alltoall(x, 0, 1, mesh_of([0, 1]), 0)

    error = failure(on_rank, 2)
    assert isinstance(error, ValueError) and "has shape (2, 2) on rank" in str(error)


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ((2, 1, 0), "gather_dim must be within -2..1, got 2"),
        ((0, 1, 1), "group: dim must be within -1..0, got 1"),
    ],
)
def test_a_dimension_that_is_not_there(dims: tuple[int, int, int], text: str) -> None:
    def on_rank() -> str:
        gather, shard, mesh = dims if interlace.get_rank() else (0, 1, 0)
        try:
            tensor.shard_dim_alltoall(torch.ones(2, 2), gather, shard, mesh_of([0, 1]), mesh)
        except ValueError as error:
            return str(error)
        return "nothing was raised"

    for said in interlace.run(on_rank, 2):
        assert text in said


# -- shards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_pads_and_back_as_torch(dim: int) -> None:
    x = payload(0, 0, (2, 3, 4)).requires_grad_()
    padded = tensor.pad_tensor(x, dim, 2)
    assert torch.equal(padded, pad_tensor(x, dim, 2))
    assert torch.equal(tensor.pad_tensor(x, dim - 3, 2), padded)
    back = tensor.unpad_tensor(padded, dim, 2)
    assert torch.equal(back, x) and torch.equal(back, unpad_tensor(padded, dim, 2))
    back.square().sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
    assert tensor.pad_tensor(x, dim, 0) is x and tensor.unpad_tensor(x, dim, 0) is x


def test_graphs_of_symbolic_padding_are_alike() -> None:
    """A size that happens to be 0 on a rank still gives the op, as in torch."""

    def traced(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        size = n.shape[0]
        return tensor.unpad_tensor(tensor.pad_tensor(x, 0, size), 0, size)

    graphs = [
        make_fx(traced, tracing_mode="symbolic")(torch.ones(4, 2), torch.ones(n)).graph
        for n in (2, 3)
    ]
    targets = [[str(node.target) for node in each.nodes] for each in graphs]
    assert targets[0] == targets[1]
    assert any("constant_pad" in name for name in targets[0])


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda x: tensor.pad_tensor(x, 2, 1), "pad_dim 2 is no dimension"),
        (lambda x: tensor.pad_tensor(x, 0, -1), r"pad_size must be within 0\.\.any"),
        (lambda x: tensor.unpad_tensor(x, 0, 3), r"pad_size must be within 0\.\.2"),
        (lambda x: tensor.fill_empty_tensor_to_shards([], 0, 1), "shards is empty"),
    ],
)
def test_shards_that_cannot_be(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(torch.ones(2, 2))


def test_empty_shards() -> None:
    shards = [torch.ones(2, 3)]
    found = tensor.fill_empty_tensor_to_shards(shards, 1, 2)
    assert found is shards and [tuple(each.shape) for each in found] == [(2, 3), (2, 0), (2, 0)]
    assert tensor.fill_empty_tensor_to_shards(shards, 1, 0) is shards and len(shards) == 3


# -- metadata ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, shapes_too, text",
    [
        (
            {"dtype": torch.float16},
            False,
            "the dtype of local_tensor differs between ranks: torch.float32 on",
        ),
        (
            {"requires_grad": True},
            False,
            "requires_grad of local_tensor differs between ranks: False on",
        ),
        (
            {"size": (3, 2)},
            True,
            r"shape of local_tensor differs between ranks: \(2, 3\) on rank 0",
        ),
        (
            {"transposed": True},
            True,
            r"stride of local_tensor differs between ranks: \(3, 1\) on rank 0",
        ),
        ({"size": (3, 2)}, False, None),
        ({}, True, None),
    ],
)
def test_metadata_that_differs(changed: dict[str, Any], shapes_too: bool, text: str | None) -> None:
    def on_rank() -> str:
        what = changed if interlace.get_rank() == 1 else {}
        x = torch.ones(what.get("size", (2, 3)), dtype=what.get("dtype", torch.float32))
        if what.get("transposed"):
            x = torch.ones(3, 2).t()
        x.requires_grad_(what.get("requires_grad", False))
        try:
            tensor.check_tensor_meta(x, check_shape_stride=shapes_too)
        except ValueError as error:
            return str(error)
        return "alike"

    for said in interlace.run(on_rank, 3):
        if text is None:
            assert said == "alike"
        else:
            assert re.search(f"check_tensor_meta: {text}", said), said
            assert said.endswith("rank 1")


@ranks(3, place="sim")
def test_metadata_within_a_group() -> None:
    """Rank 2, which differs, is in none of the groups that compare."""
    rank = interlace.get_rank()
    dtype = torch.int32 if rank == 2 else torch.float32
    if rank < 2:
        tensor.check_tensor_meta(torch.ones(2, dtype=dtype), group=[0, 1])


def test_no_tensor_on_one_rank() -> None:
    def on_rank() -> str:
        mine: Any = torch.ones(2) if interlace.get_rank() else None
        with pytest.raises(TypeError, match=r"local_tensor must be a tensor, got NoneType"):
            tensor.check_tensor_meta(mine)
        return "told"

    assert interlace.run(on_rank, 2) == ["told", "told"]
