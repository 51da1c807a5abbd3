"""mesh_scatter, mesh_broadcast, shard_dim_alltoall and the shard utilities, on simulated ranks."""

from contextlib import nullcontext
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
from support import payload


def mesh_of(rows: Any) -> DeviceMesh:
    return DeviceMesh("cpu", rows, _init_backend=False, _rank=interlace.get_rank())


# -- broadcast and scatter -----------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("mesh_dim, group_src", [(0, 0), (1, 0), (1, 1), (0, 1), (-1, 1)])
@ranks(4, place="sim")
def test_every_row_has_its_own_source(mesh_dim: int, group_src: int, async_op: bool) -> None:
    rank, mesh = interlace.get_rank(), mesh_of([[0, 1], [2, 3]])
    row, column = divmod(rank, 2)
    source = 2 * row + group_src if mesh_dim else 2 * group_src + column
    mine, part = payload(rank, 0, (3, 2)), torch.full((2, 2), torch.nan)
    whole = [payload(rank, 1 + r, (2, 2)) for r in range(2)]
    # arguments of other ranks are not read, as in torch
    works = (
        tensor.mesh_broadcast(mine, mesh, mesh_dim, async_op, group_src=group_src),
        tensor.mesh_scatter(part, whole, mesh, mesh_dim, async_op, group_src=group_src),
    )
    for work in works:
        assert isinstance(work, interlace.Work) if async_op else work is None
        if work is not None:
            work.wait()
    assert torch.equal(mine, payload(source, 0, (3, 2)))
    assert torch.equal(part, payload(source, 1 + (column if mesh_dim else row), (2, 2)))


@pytest.mark.parametrize("async_op", [False, True])
@ranks(place="sim")
def test_without_a_source_nobody_communicates(async_op: bool) -> None:
    """Only rank 1 calls: if it waited for rank 0, the simulator would report a deadlock."""
    mesh = mesh_of([0, 1])
    interlace.groups.resolve((mesh, 0))  # the group of the mesh is made by both
    interlace.barrier()
    if interlace.get_rank() == 0:
        return
    mine, part = torch.ones(2), torch.zeros(2)
    for work in (
        tensor.mesh_broadcast(mine, mesh, 0, async_op, group_src=None),
        tensor.mesh_scatter(part, [mine, mine * 7], mesh, 0, async_op, group_src=None),
    ):
        assert (work is not None) is async_op
        assert work is None or (work.wait() and work.is_completed() and "completed" in repr(work))
    assert mine.tolist() == [1.0, 1.0] and part.tolist() == [7.0, 7.0]
    with pytest.raises(
        ValueError, match=r"scatter_list must have a tensor for each rank .*; got None on rank"
    ):
        tensor.mesh_scatter(part, None, mesh, group_src=None)
    with pytest.raises(
        ValueError, match=r"scatter_list\[1\] has shape \(3,\), but output has \(2,\)"
    ):
        tensor.mesh_scatter(part, [mine, torch.ones(3)], mesh, group_src=None)


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
@ranks(place="sim")
def test_what_one_rank_does_wrong_all_are_told(
    op: str, change: dict[str, Any], kind: type[Exception], text: str
) -> None:
    wrong = change if interlace.get_rank() == 1 else {}
    given = {"group_src": 0, "shape": (2,), "mesh_dim": 0, **wrong}
    lists = ([torch.ones(2)] * 2,) if op == "mesh_scatter" else ()
    arguments = (torch.zeros(given["shape"]), *lists, mesh_of([0, 1]), given["mesh_dim"])
    with pytest.raises(kind, match=text):
        getattr(tensor, op)(*arguments, group_src=given["group_src"])


# -- shard_dim_alltoall --------------------------------------------------------------------------------


SHAPES = [(2, 6), (2, 7), (3, 4, 5), (1, 1), (3, 0), (0, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@ranks(3, place="sim")
def test_shards_along_another_dimension(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    dims = [(g, s) for g in range(len(shape)) for s in range(len(shape))] + [(-1, 0), (0, -1)]
    row = [2, 0, 1]
    mesh, at = mesh_of(row), row.index(interlace.get_rank())
    for call, (gather_dim, shard_dim) in enumerate(dims):
        parts = [payload(each, call, shape, dtype) for each in row]
        expected = expected_chunk(parts, gather_dim, shard_dim, at)
        found = tensor.shard_dim_alltoall(parts[at], gather_dim, shard_dim, mesh, 0)
        later = tensor.shard_dim_alltoall(parts[at], gather_dim, shard_dim, mesh, 0, async_op=True)
        assert type(found) is torch.Tensor and type(later) is AsyncTensor
        assert later.shape == expected.shape
        for each in (found, later.wait()):
            assert each.shape == expected.shape and torch.equal(each, expected)
            assert each.is_contiguous()


@ranks(place="sim")
def test_starts_at_once() -> None:
    rank, mesh = interlace.get_rank(), mesh_of([0, 1])
    x = torch.arange(4.0).view(2, 2) + rank
    made = [tensor.shard_dim_alltoall(x * k, 0, 1, mesh, 0, async_op=True) for k in (1, 2)]
    sums = [float(each.sum()) for each in (made if rank else made[::-1])]
    assert sums == ([10.0, 20.0] if rank else [12.0, 6.0])


@pytest.mark.parametrize(
    ("dims", "columns", "text"),
    [
        ((2, 1, 0), 2, r"gather_dim must be within -2\.\.1, got 2"),
        ((0, 1, 1), 2, r"group: dim must be within -1\.\.0, got 1"),
        ((0, 1, 0), 6, r"has shape \(2, [12]\) on rank"),
    ],
)
@ranks(place="sim")
def test_shapes_and_dimensions_that_do_not_fit(
    dims: tuple[int, int, int], columns: int, text: str
) -> None:
    gather, shard, mesh = dims if interlace.get_rank() else (0, 1, 0)
    x = torch.ones(2, columns if interlace.get_rank() else 2)
    with pytest.raises(ValueError, match=text):
        tensor.shard_dim_alltoall(x, gather, shard, mesh_of([0, 1]), mesh)


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
    """A padding of 0 on one rank still gives the op."""

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
        (lambda x: tensor.pad_tensor(x, 2, 1), r"pad_dim must be within -2\.\.1, got 2"),
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


ONES = torch.ones(2, 3)
METADATA: list[tuple[torch.Tensor, bool, str]] = [
    (ONES.half(), False, "the dtype of local_tensor differs between ranks: torch.float32 on"),
    (ONES.clone().requires_grad_(), False, "requires_grad of local_tensor differs between ranks: False"),
    (ONES.view(3, 2), True, r"shape of local_tensor differs between ranks: \(2, 3\) on rank 0"),
    (ONES.view(3, 2).t(), True, r"stride of local_tensor differs between ranks: \(3, 1\) on rank 0"),
    (ONES.view(3, 2), False, ""),
    (ONES.clone(), True, ""),
]  # fmt: skip


@pytest.mark.parametrize(("other", "shapes_too", "text"), METADATA)
@ranks(3, place="sim")
def test_metadata_that_differs(other: torch.Tensor, shapes_too: bool, text: str) -> None:
    x = other if interlace.get_rank() == 1 else ONES
    told = pytest.raises(ValueError, match=f"check_tensor_meta: {text}.*rank 1$")
    with told if text else nullcontext():
        tensor.check_tensor_meta(x, check_shape_stride=shapes_too)


@ranks(3, place="sim")
def test_metadata_within_a_group() -> None:
    if interlace.get_rank() < 2:
        tensor.check_tensor_meta(torch.ones(2), group=[0, 1])


@ranks(place="sim")
def test_no_tensor_on_one_rank() -> None:
    mine: Any = torch.ones(2) if interlace.get_rank() else None
    with pytest.raises(TypeError, match=r"local_tensor must be a tensor, got NoneType"):
        tensor.check_tensor_meta(mine)
