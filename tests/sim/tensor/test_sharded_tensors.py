"""interlace.tensor.ShardedTensor on simulated ranks. On meshes of two dims: tests/multi."""

import re
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import interlace
from interlace.tensor import Placeholder, from_local, scatter
from interlace.tensor.blocks import chunk_sharding, shape_of, unlike_chunks
from ranks import ranks
from support import failure, noise

LENGTHS = {1: [3], 2: [4, 0], 3: [2, 0, 5], 4: [0, 1, 3, 2]}
CASES = [(world_size, dim) for world_size in LENGTHS for dim in (-1, 0, 1)]


def whole_of(world_size: int, dim: int) -> torch.Tensor:
    shape = [2, 3, 4]
    shape[dim] = sum(LENGTHS[world_size])
    return noise(0, world_size, shape, torch.float64)


def loss_of(whole: torch.Tensor, rank: int) -> torch.Tensor:
    return (whole.sin() * noise(rank, 9, whole.shape, torch.float64)).sum()


@pytest.mark.parametrize("sizes", ["infer", "given"])
@pytest.mark.parametrize(("world_size", "dim"), CASES)
def test_from_local_and_back(world_size: int, dim: int, sizes: str) -> None:
    whole, lengths = whole_of(world_size, dim), LENGTHS[world_size]
    leaf = whole.clone().requires_grad_()
    losses = torch.stack([loss_of(leaf, rank) for rank in range(world_size)])
    (summed,) = torch.autograd.grad(losses.sum(), leaf)
    (alone,) = torch.autograd.grad(loss_of(leaf, 5), leaf)

    def on_rank() -> None:
        rank = interlace.get_rank()
        local = whole.split(lengths, dim)[rank].clone().requires_grad_()
        given: Any = "infer" if sizes == "infer" else {0: lengths}
        sharded = from_local(local, None, [Shard(dim)], given)
        assert sharded.to_local() is local and sharded.requires_grad
        assert sharded.shape == whole.shape and sharded.sizes == {0: tuple(lengths)}
        assert sharded.placements == (Shard(dim % 3),)
        full = sharded.full_tensor()
        assert torch.equal(full, whole)
        loss_of(full, rank).backward()
        torch.testing.assert_close(local.grad, summed.split(lengths, dim)[rank])
        local.grad = None
        gathered = sharded.gather(group_dst=world_size - 1)
        assert gathered.shape == whole.shape
        if rank == world_size - 1:
            assert torch.equal(gathered, whole)
        else:
            assert type(gathered) is Placeholder
        loss_of(gathered, 5).backward()
        torch.testing.assert_close(local.grad, alone.split(lengths, dim)[rank])

    interlace.run(on_rank, world_size)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("world_size", "dim"), CASES)
def test_scatter(world_size: int, dim: int, given: bool) -> None:
    whole, root = whole_of(world_size, dim), world_size // 2
    lengths = LENGTHS[world_size] if given else None
    wanted = whole.cos() * noise(5, 9, whole.shape, torch.float64)

    def on_rank() -> None:
        is_root = interlace.get_rank() == root
        source = whole.clone().requires_grad_() if is_root else None
        sizes = {0: lengths} if lengths is not None and is_root else None
        sharded = scatter(source, None, Shard(dim), sizes, group_src=root)
        if lengths is not None:
            assert sharded.sizes[0] == tuple(lengths)
        assert torch.equal(sharded.full_tensor().detach(), whole)
        loss_of(sharded.gather(), 5).backward()
        if source is not None:
            torch.testing.assert_close(source.grad, wanted)

    interlace.run(on_rank, world_size)


@ranks(4, place="sim")
def test_replicas_send_once_and_their_gradients_add_up() -> None:
    rank = interlace.get_rank()
    source = torch.ones(2, dtype=torch.bfloat16).requires_grad_() if rank == 0 else None
    sharded = scatter(source, None, Replicate())
    assert sharded.sizes == {} and sharded.full_tensor() is sharded.to_local()
    (sharded.to_local() * (1.0 if rank else 256.0)).sum().backward()
    if source is not None:  # in bfloat16 256 + 1 + 1 + 1 is 260, or 256 if each addition is rounded
        assert source.grad is not None and source.grad.tolist() == [260.0] * 2
    mine = torch.full((2,), float(rank), requires_grad=True)
    whole = from_local(mine, None, [Replicate()]).gather(group_dst=2)
    whole.sum().backward()
    assert rank != 2 or whole.tolist() == [2.0, 2.0]
    assert mine.grad is not None and mine.grad.tolist() == [float(rank == 2)] * 2


@ranks(4, place="sim")
def test_sizes_that_are_known_or_found() -> None:
    """If rank 3 waited for a message with known sizes, the simulator would report a deadlock."""
    rank = interlace.get_rank()
    local = torch.ones([2, 2, 1, 0][rank], 3)
    found = from_local(local, None, [Shard(0)])
    text = f"local=({len(local)}, 3) on rank {rank}"
    assert "sizes={0: (2, 2, 1, 0)}" in repr(found) and text in repr(found)
    if rank == 3:
        known = from_local(local, None, [Shard(0)], "chunk", shape=(5, 3))
        listed = from_local(local, None, [Shard(0)], {0: [2, 2, 1, 0]})
        assert known.sizes == listed.sizes == found.sizes and known.shape == (5, 3)
        assert from_local(torch.ones(2, 3), None, [Shard(0)], "chunk").shape == (8, 3)


# -- where parts lie -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 3), (1, 7), (0, 4), (8, 8)])
def test_chunks_are_those_of_torch(shape: tuple[int, int]) -> None:
    sharding = chunk_sharding((3, 2), (Shard(0), Shard(0)), shape)
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    for row, outer in enumerate([*whole.chunk(3), *[whole[:0]] * 3][:3]):
        for column, inner in enumerate([*outer.chunk(2), *[whole[:0]] * 2][:2]):
            block = sharding.blocks[2 * row + column]
            assert shape_of(block) == tuple(inner.shape)
            (start, length), _ = block
            assert torch.equal(whole[start : start + length], inner)
    assert not unlike_chunks(sharding)


# -- misuse --------------------------------------------------------------------------------------------

ROWS = (Shard(0),)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def local(tensor: torch.Tensor, *args: Any, placements: Any = ROWS, **options: Any) -> Any:
    return lambda: from_local(tensor, None, placements, *args, **options)


def whole(length: int, sizes: list[int], call: str) -> Any:
    return lambda: getattr(from_local(ones(length), None, ROWS, {0: sizes}), call)()


def scattered(tensor: Any, placements: Any = ROWS, *args: Any) -> Any:
    return lambda: scatter(tensor, None, placements, *args)


MISUSE: list[tuple[Any, Any, str]] = [
    (local(ones(2, 2)), local(ones(2, 3)), "length 2 along dim 1 on rank 0, 3 on rank 1"),
    (local(ones(2, 2)), local(ones(2)), "2 dims on rank 0, 1 on rank 1"),
    (local(ones(2)), local(ones(2, dtype=torch.int64)), "dtype differs"),
    (local(ones(2)), local(ones(2), placements=[Replicate()]), "placements differs"),
    (local(ones(2)), local(ones(2), placements=[Shard(1)]), "with 1 dims"),
    (local(ones(2)), local(ones(2), placements=[Partial()]), "not of a tensor"),
    (local(ones(2)), local(ones(2), placements=[]), "one for each of the 1 mesh dims"),
    (local(ones(2)), local(ones(2), "guess"), 'sizes must be "infer"'),
    (local(ones(2), "chunk"), local(ones(2), "chunk", shape=(3,)), "makes it (1,)"),
    (local(ones(2), {0: [2, 3]}), local(ones(2), {0: [2, 3]}), "makes it (3,)"),
    (local(ones(2), {0: [2, 2]}), local(ones(2), {1: [2, 2]}), "got lengths for [1]"),
    (local(ones(2), {0: [2, 2]}), local(ones(2), {0: [2, 2, 2]}), "one length per rank, 2"),
    (whole(1, [1, 3], "gather"), whole(2, [2, 2], "gather"), "where parts lie differs"),
    (whole(1, [1, 3], "full_tensor"), whole(2, [2, 2], "full_tensor"), "sizes is [1, 3] on rank 0"),
    (scattered(ones(3)), scattered(ones(3)), "must be None or a Placeholder"),
    (scattered(None), scattered(None), "tensor must be a tensor"),
    (scattered(ones(3), [Shard(0)], {0: [1, 1]}), scattered(None), "add up to shape (2,)"),
    (scattered(ones(3)), scattered(None, [Replicate()]), "but (Shard(dim=0),) on the source"),
    (scattered(ones(3)), scattered(Placeholder((4,))), "tensor is (4,) of torch.float32 on rank 1"),
]


@pytest.mark.parametrize(("good", "bad", "words"), MISUSE, ids=[case[2] for case in MISUSE])
@ranks(place="sim")
def test_misuse_on_one_rank_is_raised_on_all(good: Any, bad: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        (bad if interlace.get_rank() == 1 else good)()
        interlace.barrier()


def test_dtensors_need_a_mesh() -> None:
    error = failure(lambda: from_local(ones(2), None, [Shard(0)]).to_dtensor(), 1)
    assert isinstance(error, TypeError) and "needs a DeviceMesh" in str(error)
