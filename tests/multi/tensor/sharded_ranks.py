"""Ranks of test_sharded_tensors.py. A module of its own, because new processes import it."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import interlace
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
from multi.process_group.backend_ranks import world
from support import noise

LENGTHS = {(0, 0): 1, (0, 1): 3, (1, 0): 0, (1, 1): 2}  # of dim 0, cut by both mesh dims


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
    """Values and gradients of ``full_tensor`` and ``gather`` against the whole tensor."""
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


def on_meshes(path: str) -> str:
    """Four ranks as two rows and two columns."""
    with world(path):
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
        return "done"


def as_dtensors(path: str) -> list[str]:
    """There and back, with gradients; what torch.chunk would cut otherwise is an error."""
    with world(path):
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
        told = []
        uneven = from_local(torch.ones(1 + rank, 2), mesh, [Shard(0), Shard(0)])
        for bad in (
            uneven.to_dtensor,
            lambda: from_dtensor(DTensor.from_local(local, mesh, [Replicate(), Partial()])),
        ):
            try:
                bad()
            except ValueError as error:
                told.append(str(error))
        return told


def through_one_rank() -> list[Any]:
    """Gradients through placeholders where every rank has a process, and torch's engine, of its own."""
    rank = interlace.get_rank()
    source = torch.arange(5.0, dtype=torch.float64).requires_grad_() if rank == 0 else None
    part = scatter_v(source, [1, 0, 4] if rank == 0 else None)
    middle = gather_v(part * (rank + 1), dst=1).square()
    end = scatter_v(middle, [0, 2, 3], src=1)
    picked = indexed_all_to_all_v(end, [torch.arange(len(end)), *[torch.empty(0).long()] * 2])
    (picked * torch.arange(picked.numel())).sum().backward()
    grad = None if source is None or source.grad is None else source.grad.tolist()
    return [type(middle).__name__, picked.tolist(), grad]


def received_by_functional() -> list[Any]:
    """Functional collectives that only read the shape of what a receiver gives take a placeholder."""
    rank = interlace.get_rank()
    functional = interlace.functional
    whole = torch.arange(4.0)
    given = whole.requires_grad_() if rank == 0 else Placeholder((4,), requires_grad=True)
    everywhere = functional.wait(functional.broadcast(given, 0, group="0"))
    part = functional.wait(functional.scatter(given, 0, group="0"))
    (everywhere.sum() * (1 + rank) + part.sum()).backward()
    grad = given.grad.tolist() if rank == 0 and given.grad is not None else None
    try:
        functional.wait(functional.broadcast(given, 1, group="0"))  # which has none
    except TypeError as error:
        told = str(error)
    return [
        everywhere.tolist(),
        part.tolist(),
        grad,
        "broadcast: a Placeholder of shape (4,)" in told,
    ]
