"""interlace.tensor's uneven collectives against whole tensors on one process: values, gradients, misuse."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import interlace
from cases.support_table import MOVED_DTYPES
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import InterlaceError, RankError
from interlace.runtime.places.gpu.virtual_place import VirtualRankPlace
from interlace.tensor import Placeholder, all_gather_v, gather_v, indexed_all_to_all_v, scatter_v
from interlace.tensor.blocks import chunk_lengths
from ranks import ranks
from support import failure, laid_out, noise

Tensor = torch.Tensor
LENGTHS = {1: [3], 2: [0, 4], 3: [2, 0, 5], 4: [1, 3, 0, 2]}
DIMS = (-1, 0, 1)
CASES = [(world_size, dim) for world_size in LENGTHS for dim in DIMS]


def shape(length: int, dim: int) -> tuple[int, ...]:
    found = [2, 3, 4]
    found[dim] = length
    return tuple(found)


def weighted(tensor: Tensor, call: int) -> Tensor:
    """Return a loss that is not linear, so that its gradient depends on the values."""
    return (tensor.sin() * noise(9, call, tensor.shape, torch.float64)).sum()


def reference(inputs: list[Tensor], function: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
    """Return the gradients of ``inputs`` by torch alone."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    return list(torch.autograd.grad(function(leaves), leaves, allow_unused=True))


# -- values and gradients ------------------------------------------------------------------------------


def picks(rank: int, world_size: int) -> list[Tensor]:
    """Return some positions twice, some for several ranks, and none for the rank itself."""
    every = [torch.tensor([0, 1 + rank, 0][: 1 + (rank + r) % 3]) for r in range(world_size)]
    every[rank] = torch.empty(0, dtype=torch.int32)
    return every


@dataclass
class Moved:
    """``call`` with this rank's tensor; ``right`` is a rank's result from all tensors, or None."""

    call: Callable[[Any, int, int, int], Tensor]
    right: Callable[[list[Tensor], int, int, int], Tensor | None]
    layout: str = "contiguous"


def scattered(tensor: Any, rank: int, size: int, dim: int) -> Tensor:
    sizes = LENGTHS[size] if rank == size // 2 else None
    return scatter_v(tensor, sizes, dim, group_src=size // 2)


def picked(every: list[Tensor], rank: int, size: int, dim: int) -> Tensor:
    rows = [t.index_select(dim, picks(source, size)[rank].long()) for source, t in enumerate(every)]
    return torch.cat(rows, dim)


OPS = {
    "gather": Moved(
        lambda t, rank, size, dim: gather_v(t, dim=dim, group_dst=size - 1),
        lambda every, rank, size, dim: torch.cat(every, dim) if rank == size - 1 else None,
        "transposed",
    ),
    "scatter": Moved(
        scattered,
        lambda every, rank, size, dim: every[size // 2].split(LENGTHS[size], dim)[rank],
        "strided",
    ),
    "all_gather": Moved(
        lambda t, rank, size, dim: all_gather_v(t, LENGTHS[size] if rank else None, dim),
        lambda every, rank, size, dim: torch.cat(every, dim),
    ),
    "indexed_all_to_all": Moved(
        lambda t, rank, size, dim: indexed_all_to_all_v(
            t,
            picks(rank, size),
            [list(map(len, picks(r, size))) for r in range(size)] if rank else None,
            dim,
        ),
        picked,
    ),
}


def inputs_of(op: str, size: int, dim: int) -> list[Tensor]:
    """In a scatter only the root's input counts."""
    lengths = LENGTHS[size]
    if op.startswith("scatter"):
        lengths = [sum(lengths)] * size
    elif op == "indexed_all_to_all":
        lengths = [2 + rank for rank in range(size)]
    return [noise(r, 1, shape(n, dim), torch.float64) for r, n in enumerate(lengths)]


OPS["scatter, with placeholders"] = OPS["scatter"]


@pytest.mark.parametrize(("world_size", "dim"), CASES)
@pytest.mark.parametrize("op", OPS)
def test_values_and_gradients(op: str, world_size: int, dim: int) -> None:
    moved, inputs = OPS[op], inputs_of(op, world_size, dim)
    right = [moved.right(inputs, rank, world_size, dim) for rank in range(world_size)]

    def loss(every: list[Tensor]) -> Tensor:
        outputs = [moved.right(every, rank, world_size, dim) for rank in range(world_size)]
        there = [weighted(y, 30 + rank) for rank, y in enumerate(outputs) if y is not None]
        return torch.stack(there).sum()

    grads = reference(inputs, loss)

    def on_rank() -> None:
        rank, mine = interlace.get_rank(), None
        if not op.startswith("scatter") or rank == world_size // 2:
            mine = laid_out(inputs[rank].clone(), moved.layout).requires_grad_()
        elif "placeholders" in op:
            mine = Placeholder(inputs[rank].shape, dtype=torch.float64)
        found, expected = moved.call(mine, rank, world_size, dim), right[rank]
        assert found.requires_grad and found.dtype == torch.float64
        if expected is None:
            assert isinstance(found, Placeholder) and found.ranks == (world_size - 1,)
        else:
            assert type(found) is Tensor and torch.equal(found, expected)
            assert found.is_contiguous()
        weighted(found, 30 + rank).backward()  # type: ignore[no-untyped-call]
        if mine is not None and type(mine) is Tensor:
            torch.testing.assert_close(mine.grad, grads[rank])

    interlace.run(on_rank, world_size)


@ranks(3, place="sim")
def test_only_one_rank_requires_gradients() -> None:
    rank = interlace.get_rank()
    mine = torch.ones(1 + rank, requires_grad=rank == 1)
    one, every = gather_v(mine), all_gather_v(mine)
    assert one.requires_grad and every.requires_grad
    (one.sum() * 5).backward()
    every.sum().backward()
    assert (mine.grad.tolist() if mine.grad is not None else None) == (
        [8.0] * 2 if rank == 1 else None
    )


@ranks(place="sim")
def test_nothing_is_recorded_without_need() -> None:
    rank, mine = interlace.get_rank(), torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not gather_v(mine).requires_grad and not all_gather_v(mine).requires_grad
    part = scatter_v(torch.arange(4) if rank == 0 else None)
    assert not part.requires_grad and part.tolist() == [2 * rank, 2 * rank + 1]


@ranks(place="sim")
def test_unused_results_on_the_rank_with_the_data_are_zeros() -> None:
    mine = torch.ones(1 + interlace.get_rank(), requires_grad=True)
    gather_v(mine)[:1].sum().backward()  # type: ignore[no-untyped-call]
    assert mine.grad is not None and mine.grad.tolist() == [[1.0], [0.0, 0.0]][interlace.get_rank()]


@ranks(place="sim")
def test_hooks_may_communicate_in_backward() -> None:
    mine = torch.ones(2, requires_grad=True)
    between = mine * 1

    def hook(grad: Tensor) -> Tensor:
        picked = indexed_all_to_all_v(grad, [torch.arange(2)] * 2).view(2, 2)
        return all_gather_v(grad).sum() * picked.sum(0)

    between.register_hook(hook)
    (between * (1 + interlace.get_rank())).sum().backward()
    assert mine.grad is not None and mine.grad.tolist() == [18.0, 18.0]


def test_virtual_ranks_of_a_gpu_refuse_to_record() -> None:
    group: Any = SimpleNamespace(place=object.__new__(VirtualRankPlace), world_size=2, rank=1)
    with pytest.raises(InterlaceError, match=r"rank 1: gradients .* need ranks that are processes"):
        Communicator.check_recordable(group, torch.ones(1, requires_grad=True))
    Communicator.check_recordable(group, torch.ones(1), None)
    with torch.no_grad():
        Communicator.check_recordable(group, torch.ones(1, requires_grad=True))


def test_second_derivatives_are_refused() -> None:
    def twice() -> None:
        mine = torch.ones(2, requires_grad=True)
        loss = all_gather_v(mine).pow(2).sum()
        (grad,) = torch.autograd.grad(loss, mine, create_graph=True)
        grad.sum().backward()

    assert "once_differentiable" in str(failure(twice, 1))


@pytest.mark.parametrize(("total", "count"), [(0, 3), (1, 4), (5, 4), (7, 3), (8, 4)])
def test_default_sizes_are_those_of_chunk(total: int, count: int) -> None:
    chunks = [len(each) for each in torch.arange(total).chunk(count)]
    assert chunk_lengths(total, count)[: len(chunks)] == chunks and sum(chunks) == total

    def scatter() -> int:
        return len(scatter_v(torch.ones(total) if interlace.get_rank() == 0 else None))

    assert interlace.run(scatter, count) == chunk_lengths(total, count)


BIG = 256.0  # in bfloat16 its neighbour is 258, so that adding 1 is lost


@pytest.mark.parametrize(("accumulate", "total"), [("fp32", 260.0), (None, 256.0)])
@ranks(4, place="sim")
def test_gradients_accumulate_in_fp32(accumulate: str | None, total: float) -> None:
    """bfloat16 rounds 256 + 1 + 1 + 1 to 260; with a rounding after each addition the sum stays 256."""
    grad = torch.full((4,), 1.0 if interlace.get_rank() else BIG, dtype=torch.bfloat16)
    mine = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    for found in (
        all_gather_v(mine, accumulate=accumulate),
        indexed_all_to_all_v(mine, [torch.tensor([0])] * 4, accumulate=accumulate),
    ):
        mine.grad = None
        found.backward(grad)  # type: ignore[no-untyped-call]
        assert mine.grad is not None and mine.grad.dtype == torch.bfloat16
        assert mine.grad.item() == total


# -- misuse --------------------------------------------------------------------------------------------


def rows(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*size, dtype=dtype)


def source(tensor: Tensor, rank: int = 0) -> Tensor | None:
    return tensor if interlace.get_rank() == rank else None


def picking(position: int = 0, peers: int = 3, sizes: Any = None) -> Callable[[], Any]:
    return lambda: indexed_all_to_all_v(rows(3), [torch.tensor([position])] * peers, sizes)


def gathering(*size: int, **options: Any) -> Callable[[], Any]:
    return lambda: gather_v(rows(*size), **options)


def everywhere(tensor: Tensor, **options: Any) -> Callable[[], Any]:
    return lambda: all_gather_v(tensor, **options)


def scattering(tensor: Any, *sizes: Any, **options: Any) -> Callable[[], Any]:
    return lambda: scatter_v(tensor() if callable(tensor) else tensor, *sizes, **options)


ROOT = scattering(lambda: source(rows(6)))
MISUSE: list[tuple[Callable[[], Any], Callable[[], Any], str]] = [
    (gathering(2, 2), gathering(2, 3), "the same shape on all ranks except along dim 0"),
    (gathering(2, 2), gathering(2, 2, dim=1), "dim differs"),
    (everywhere(rows(2)), everywhere(rows(2, dtype=torch.int32)), "dtype of tensor differs"),
    (gathering(2), gathering(2, dst=1), "root differs"),
    (gathering(2), gathering(2, sizes=[2, 3, 2]), "the tensors have [2, 2, 2]"),
    (gathering(2), gathering(2, sizes=[2, 2]), "one length per rank, 3"),
    (everywhere(rows(2)), everywhere(rows(2), dim=1), "dim must be within"),
    (gathering(2), lambda: gather_v(torch.tensor(1.0)), "must have dimensions"),
    (
        gathering(2), lambda: gather_v(Placeholder((2,))),
        "tensor: a Placeholder of shape (2,) and torch.float32 has no data here; its value is on other "
        "ranks",
    ),
    (gathering(2), everywhere(rows(2)), "different ops"),
    (everywhere(rows(2)), everywhere(rows(2), accumulate="fp16"), "accumulate must be one of fp32"),
    (everywhere(rows(2)), everywhere(rows(2), accumulate=None), "accumulate differs"),
    (ROOT, scattering(rows(6)), "must be None or a Placeholder"),
    (scattering(None, src=1), scattering(rows(6), [2, 2, 3], src=1), "add up to 7 on rank 1"),
    (scattering(None, src=1), scattering(None, src=1), "tensor must be a tensor"),
    (
        ROOT, scattering(Placeholder((6,), dtype=torch.int64)),
        "tensor is (6,) of torch.int64 on rank 1",
    ),
    (ROOT, scattering(None, dim=1), "dim is 1 on rank 1"),
    (ROOT, scattering(None, [1, 1, 4]), "sizes is [1, 1, 4] on rank 1"),
    (picking(), picking(3), "indices[0] must be within 0..2, got 3..3"),
    (picking(), picking(0, 2), "list of 3 tensors"),
    (picking(), picking(0, 3, [[1, 1, 2]] * 3), "sizes[0] is [1, 1, 2] on rank 1"),
]  # fmt: skip


@pytest.mark.parametrize(("good", "bad", "words"), MISUSE, ids=[case[2] for case in MISUSE])
@ranks(3, place="sim")
def test_misuse_on_one_rank_is_raised_on_all(good: Any, bad: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        bad() if interlace.get_rank() == 1 else good()


def test_grad_modes_have_to_agree() -> None:
    def differ() -> None:
        with torch.set_grad_enabled(interlace.get_rank() == 0):
            gather_v(torch.ones(2, requires_grad=True))

    with pytest.raises(RankError, match=r"is_grad_enabled.* differs between ranks"):
        interlace.run(differ, 2)


def test_backward_in_another_order_is_named() -> None:
    """Two ops have equal shapes, and their gradients would go to each other's inputs."""

    def crossed() -> None:
        one, two = (torch.ones(2, requires_grad=True) for _ in range(2))
        losses = [all_gather_v(one).sum(), all_gather_v(two).sum()]
        for loss in losses if interlace.get_rank() == 0 else losses[::-1]:
            loss.backward()

    with pytest.raises(RankError, match=r"the op, by count, differs between ranks: 1 on rank 0, 2"):
        interlace.run(crossed, 2)


@pytest.mark.parametrize("dtype", MOVED_DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@ranks(place="sim")
def test_any_dtype_is_picked(dtype: torch.dtype) -> None:
    rows = torch.arange(6 * dtype.itemsize, dtype=torch.uint8).view(3, -1)
    found = indexed_all_to_all_v(rows.view(dtype), [torch.tensor([2, 0])] * 2).view(torch.uint8)
    assert torch.equal(found, rows[[2, 0, 2, 0]])
