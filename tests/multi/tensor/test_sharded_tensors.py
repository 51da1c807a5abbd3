"""interlace.tensor on processes: meshes of two dims, DTensors, gradients, collectives as torch's."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import interlace
import interlace.tensor as tensor
from interlace import functional
from interlace.tensor import (
    Placeholder,
    ShardedTensor,
    from_dtensor,
    from_local,
    gather_v,
    indexed_all_to_all_v,
    scatter,
    scatter_v,
)
from multi.tensor.meshes import expected_chunk
from ranks import ranks
from support import noise, payload

LENGTHS = {(0, 0): 1, (0, 1): 3, (1, 0): 0, (1, 1): 2}  # along dim 0, cut by both mesh dims


def whole_of(*shape: int) -> torch.Tensor:
    return noise(0, 5, shape, torch.float64)


def loss_of(whole: torch.Tensor, rank: int) -> torch.Tensor:
    return (whole.sin() * noise(rank, 9, whole.shape, torch.float64)).sum()


def grad_of(whole: torch.Tensor, *ranks: int) -> torch.Tensor:
    leaf = whole.clone().requires_grad_()
    sum(loss_of(leaf, rank) for rank in ranks).backward()  # type: ignore[union-attr]
    assert leaf.grad is not None
    return leaf.grad


def check(sharded: ShardedTensor, whole: torch.Tensor, block: Any, summed_over: Any) -> None:
    """Compare values and gradients of ``full_tensor`` and ``gather`` with the whole tensor."""
    rank, local = interlace.get_rank(), sharded.to_local()
    assert sharded.shape == whole.shape and torch.equal(local, whole[block])
    full = sharded.full_tensor()
    assert torch.equal(full, whole)
    loss_of(full, rank).backward()
    assert local.grad is not None
    torch.testing.assert_close(local.grad, grad_of(whole, *summed_over)[block])
    local.grad = None
    one = sharded.gather(group_dst=3)
    assert one.shape == whole.shape and (type(one) is Placeholder) == (rank != 3)
    assert rank != 3 or torch.equal(one, whole)
    loss_of(one, 1).backward()
    sends = rank == 3 or Replicate() not in sharded.placements or rank == 2
    expected = grad_of(whole, 1)[block] if sends else torch.zeros_like(local)
    torch.testing.assert_close(local.grad, expected)


@ranks(4, backend="interlace")
def test_meshes_of_two_dims() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rank = interlace.get_rank()
    row, column = divmod(rank, 2)

    def leaf(part: torch.Tensor) -> torch.Tensor:
        return part.clone().requires_grad_()

    whole = whole_of(5, 6)
    block: Any = (slice(0, 5) if row else slice(0, 0), slice(2, 6) if column else slice(0, 2))
    two_dims = from_local(leaf(whole[block]), mesh, [Shard(0), Shard(-1)])
    assert two_dims.sizes == {0: (0, 5), 1: (2, 4)}
    check(two_dims, whole, block, range(4))

    starts = {(0, 0): 0, (0, 1): 1, (1, 0): 4, (1, 1): 4}
    start = starts[row, column]
    block = (slice(start, start + LENGTHS[row, column]),)
    whole = whole_of(6, 2)
    twice = from_local(leaf(whole[block]), mesh, [Shard(0), Shard(0)])
    assert twice.sizes == {0: (4, 2), 1: (1, 3) if row == 0 else (0, 2)}
    check(twice, whole, block, range(4))

    block = (slice(0, 1) if column == 0 else slice(1, 6),)
    copied = from_local(leaf(whole[block]), mesh, [Replicate(), Shard(0)], {1: [1, 5]})
    check(copied, whole, block, [2 * row, 2 * row + 1])

    source = whole.clone().requires_grad_() if rank == 2 else None
    parts = scatter(source, mesh, [Replicate(), Shard(0)], group_src=2)
    assert torch.equal(parts.to_local(), whole[3 * column : 3 * column + 3])
    (parts.to_local() * (1 + row)).sum().backward()
    if source is not None:
        assert torch.equal(source.grad, torch.full_like(whole, 3.0))  # type: ignore[arg-type]


@ranks(4, backend="interlace")
def test_to_and_from_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    rank = interlace.get_rank()
    whole = whole_of(5, 3)
    placements = [Shard(0), Shard(1)]
    given = distribute_tensor(whole, mesh, placements)
    local = given.to_local().clone().requires_grad_()
    sharded = from_local(local, mesh, placements)
    made = sharded.to_dtensor()
    assert isinstance(made, DTensor) and made.shape == whole.shape
    assert made.stride() == whole.stride() and torch.equal(made.full_tensor(), whole)
    (made * 3).to_local().sum().backward()
    assert local.grad is not None and bool((local.grad == 3).all())
    back = from_dtensor(made)
    assert back.shape == whole.shape and back.sizes == sharded.sizes
    assert torch.equal(back.full_tensor(), whole) and back.requires_grad
    tiny = from_dtensor(distribute_tensor(whole[:1], mesh, [Shard(0), Shard(0)]))
    assert torch.equal(tiny.full_tensor(), whole[:1])
    uneven = from_local(torch.ones(1 + rank, 2), mesh, [Shard(0), Shard(0)])
    with pytest.raises(ValueError) as caught:
        uneven.to_dtensor()
    for each in ("rank 0 has (1, 2), torch.chunk gives it (3, 2)",
                 "rank 3 has (4, 2), torch.chunk gives it (2, 2)"):  # fmt: skip
        assert each in str(caught.value)
    with pytest.raises(ValueError, match="is a part of a sum, not of a tensor"):
        from_dtensor(DTensor.from_local(local, mesh, [Replicate(), Partial()]))


@pytest.mark.parametrize("place", ["shm", "sim"])
@ranks(3)
def test_gradients_through_one_rank(place: str) -> None:
    """The backward crosses every placeholder: scatter, work on all, gather, work on one, scatter."""
    rank = interlace.get_rank()
    source = torch.arange(5.0, dtype=torch.float64).requires_grad_() if rank == 0 else None
    part = scatter_v(source, [1, 0, 4] if rank == 0 else None)
    middle = gather_v(part * (rank + 1), dst=1).square()
    end = scatter_v(middle, [0, 2, 3], src=1)
    picked = indexed_all_to_all_v(end, [torch.arange(len(end)), *[torch.empty(0).long()] * 2])
    (picked * torch.arange(picked.numel())).sum().backward()
    assert type(middle) is (torch.Tensor if rank == 1 else Placeholder)
    if source is None:
        assert picked.tolist() == []
        return
    # rank 1 has no part, all but the first are rank 2's
    assert picked.tolist() == [(3.0 * n) ** 2 for n in range(5)]
    assert source.grad is not None and source.grad.tolist() == [18.0 * n * n for n in range(5)]


@ranks()
def test_functional_collectives_take_placeholders_from_receivers() -> None:
    rank, whole = interlace.get_rank(), torch.arange(4.0)
    given = whole.requires_grad_() if rank == 0 else Placeholder((4,), requires_grad=True)
    everywhere = functional.wait(functional.broadcast(given, 0))
    part = functional.wait(functional.scatter(given, 0))
    (everywhere.sum() * (1 + rank) + part.sum()).backward()
    assert torch.equal(everywhere, whole) and torch.equal(part, whole[2 * rank : 2 * rank + 2])
    if rank == 0:
        assert given.grad is not None and given.grad.tolist() == [4.0] * 4
    with pytest.raises(TypeError, match=r"broadcast: a Placeholder of shape \(4,\)"):
        functional.wait(functional.broadcast(given, 1))  # which has none


@pytest.mark.parametrize("columns", [4, 5])
@ranks()
def test_gradients_of_shards_along_another_dimension(columns: int) -> None:
    """The reference is the gather and the chunk in one process."""
    rank = interlace.get_rank()
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=rank)
    parts = [payload(each, 0, (3, columns)).requires_grad_() for each in range(2)]
    for each in range(2):
        (expected_chunk(parts, 0, 1, each).square().sum() * (2 + each)).backward()
    for async_op in (False, True):
        mine = parts[rank].detach().clone().requires_grad_()
        made = tensor.shard_dim_alltoall(mine, 0, 1, mesh, 0, async_op=async_op)
        (made.square().sum() * (2 + rank)).backward()
        assert torch.equal(mine.grad, parts[rank].grad)  # type: ignore[arg-type]
