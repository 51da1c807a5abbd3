"""all_reduce of sparse COO tensors."""

import pytest
import torch

import interlace
from interlace.runtime.numerics import reductions
from support import failure

ROWS, WIDTH = 6, 2


def entries(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return rows that overlap between ranks, one of them twice; rank 2 has none."""
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
    assert "torch.float64 on rank 0, torch.float64, sparse COO on rank 1" in str(failure(mixed, 2))


def on_ranks(op: str, *values: torch.Tensor) -> torch.Tensor:
    """Return the results of ranks that each have these entries of row 0."""

    def on_rank() -> torch.Tensor:
        own = values[interlace.get_rank()]
        rows = torch.zeros(1, len(own), dtype=torch.int64)
        tensor = torch.sparse_coo_tensor(rows, own, (ROWS,), check_invariants=True)
        interlace.all_reduce(tensor, op)
        return tensor._values()

    first, *others = interlace.run(on_rank, len(values))
    assert all(first.tolist() == other.tolist() for other in others)
    return first


def test_sums_are_rounded_once() -> None:
    half = torch.float16
    large, one = torch.tensor([2048], dtype=half), torch.ones(1, dtype=half)
    assert on_ranks("sum", large, one, one).tolist() == [2050]
    assert on_ranks("sum", torch.cat([large, one, one]), one[:0]).tolist() == [2050]  # on one rank
    assert on_ranks("avg", *[torch.tensor([60000.0], dtype=half)] * 3).tolist() == [60000]


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", reductions.DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_entries_are_reduced_as_dense_tensors_are(op: str, dtype: torch.dtype) -> None:
    if dtype.is_floating_point or dtype.is_complex:
        parts = [torch.tensor([value], dtype=torch.float32).to(dtype) for value in (1.5, -4.0, 1.0)]
    elif dtype == torch.bool:
        parts = [torch.tensor([value]) for value in (True, False, True)]
    else:
        most = torch.iinfo(dtype).max
        parts = [torch.tensor([most - less], dtype=torch.uint64).to(dtype) for less in (0, 2, 50)]
    expected = torch.empty_like(parts[0])
    reductions.fold(op, parts, expected)
    assert on_ranks(op, *parts).tolist() == expected.tolist()
