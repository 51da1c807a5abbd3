"""all_reduce of sparse COO tensors."""

import pytest
import torch

import interlace
from support import failure

ROWS, WIDTH = 6, 2


def entries(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Rows that overlap between ranks, one of them twice; none on rank 2."""
    rows = torch.tensor([rank, rank + 1, rank + 1] if rank != 2 else [], dtype=torch.int64)
    values = torch.arange(1.0, 1 + rows.numel() * WIDTH).view(-1, WIDTH).to(dtype) + rank
    return torch.sparse_coo_tensor(rows[None], values, (ROWS, WIDTH), check_invariants=True)


def reduced(op: str, async_op: bool) -> torch.Tensor:
    tensor = entries(interlace.get_rank())
    work = interlace.all_reduce(tensor, op, async_op=async_op)
    if work is not None:
        work.wait()
    assert tensor.is_sparse and tensor.is_coalesced()
    return tensor.to_dense()


@pytest.mark.parametrize("place", ["sim", "shm"])
@pytest.mark.parametrize(("op", "async_op"), [("sum", False), ("avg", False), ("sum", True)])
def test_equals_the_dense_sum(op: str, async_op: bool, place: str) -> None:
    world_size = 3
    expected = sum(entries(rank).to_dense() for rank in range(world_size))
    results = interlace.run(reduced, world_size, op, async_op, place=place)
    assert isinstance(expected, torch.Tensor)
    for result in results:
        torch.testing.assert_close(result, expected / (world_size if op == "avg" else 1))
        assert torch.equal(result, results[0])


def test_misuse() -> None:
    def maximum() -> None:
        interlace.all_reduce(entries(interlace.get_rank()), "max")

    def dtypes() -> None:
        rank = interlace.get_rank()
        interlace.all_reduce(entries(rank, torch.float32 if rank else torch.float64))

    def mixed() -> None:
        tensor = entries(interlace.get_rank())
        interlace.all_reduce(tensor if interlace.get_rank() else tensor.to_dense())

    assert "op of a sparse all_reduce must be one of sum, avg" in str(failure(maximum, 2))
    assert "dtype of tensor differs between ranks" in str(failure(dtypes, 2))
    assert isinstance(failure(mixed, 2), ValueError)
