"""interlace.tensor's uneven collectives against whole tensors on one process: values, gradients, misuse."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from cases.support_table import MOVED_DTYPES
from interlace.ops.collectives import rooted
from interlace.ops.op.sim_backward import prepare
from interlace.runtime.core.errors import InterlaceError, RankError
from interlace.runtime.places.gpu.virtual_place import VirtualRankPlace
from interlace.tensor import (
    Placeholder,
    all_gather_v,
    facts,
    gather_v,
    indexed_all_to_all_v,
    scatter_v,
)
from interlace.tensor.blocks import chunk_lengths
from support import failure, laid_out, noise

LENGTHS = {1: [3], 2: [0, 4], 3: [2, 0, 5], 4: [1, 3, 0, 2]}
DIMS = (-1, 0, 1)
CASES = [(world_size, dim) for world_size in LENGTHS for dim in DIMS]


def shape(length: int, dim: int) -> tuple[int, ...]:
    found = [2, 3, 4]
    found[dim] = length
    return tuple(found)


def parts(lengths: list[int], dim: int, call: int) -> list[torch.Tensor]:
    return [noise(r, call, shape(n, dim), torch.float64) for r, n in enumerate(lengths)]


def weighted(tensor: torch.Tensor, call: int) -> torch.Tensor:
    """A loss that is not linear, so that its gradient shows which values went where."""
    return (tensor.sin() * noise(9, call, tensor.shape, torch.float64)).sum()


def reference(
    inputs: list[torch.Tensor], function: Callable[[list[torch.Tensor]], torch.Tensor]
) -> list[torch.Tensor]:
    """The gradients of ``inputs`` by torch alone."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    return list(torch.autograd.grad(function(leaves), leaves, allow_unused=True))


# -- values and gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "dim"), CASES)
def test_gather(world_size: int, dim: int) -> None:
    lengths, root = LENGTHS[world_size], world_size - 1
    inputs = parts(lengths, dim, 1)
    whole = torch.cat(inputs, dim)
    grads = reference(inputs, lambda all: weighted(torch.cat(all, dim), 2))

    def gather() -> torch.Tensor | None:
        rank = interlace.get_rank()
        mine = laid_out(inputs[rank], "transposed").requires_grad_()
        found = gather_v(mine, dim=dim, group_dst=root)
        assert found.shape == whole.shape and found.dtype == whole.dtype and found.requires_grad
        if rank == root:
            assert type(found) is torch.Tensor and torch.equal(found, whole)
        else:
            assert isinstance(found, Placeholder) and found.ranks == (root,)
        weighted(found, 2).backward()
        return mine.grad

    for got, grad in zip(interlace.run(gather, world_size), grads, strict=True):
        torch.testing.assert_close(got, grad)


@pytest.mark.parametrize("given", [None, Placeholder])
@pytest.mark.parametrize(("world_size", "dim"), CASES)
def test_scatter(world_size: int, dim: int, given: Any) -> None:
    lengths, root = LENGTHS[world_size], world_size // 2
    whole = torch.cat(parts(lengths, dim, 3), dim)
    (wanted,) = reference(
        [whole],
        lambda all: sum(weighted(p, 4 + r) for r, p in enumerate(all[0].split(lengths, dim))),  # type: ignore[arg-type,return-value]
    )

    def scatter() -> torch.Tensor | None:
        rank = interlace.get_rank()
        tensor = None if given is None else Placeholder(whole.shape, dtype=torch.float64)
        sizes = None
        if rank == root:
            tensor, sizes = laid_out(whole, "strided").requires_grad_(), lengths
        found = scatter_v(tensor, sizes, dim, group_src=root)
        assert torch.equal(found, whole.split(lengths, dim)[rank]) and found.is_contiguous()
        assert found.requires_grad
        weighted(found, 4 + rank).backward()
        return tensor.grad if rank == root and tensor is not None else None

    torch.testing.assert_close(interlace.run(scatter, world_size)[root], wanted)


@pytest.mark.parametrize(("world_size", "dim"), CASES)
def test_all_gather(world_size: int, dim: int) -> None:
    lengths = LENGTHS[world_size]
    inputs = parts(lengths, dim, 20)
    whole = torch.cat(inputs, dim)

    def losses(all: list[torch.Tensor]) -> torch.Tensor:
        return sum(weighted(torch.cat(all, dim), 30 + r) for r in range(world_size))  # type: ignore[return-value]

    grads = reference(inputs, losses)

    def gather() -> torch.Tensor | None:
        rank = interlace.get_rank()
        mine = inputs[rank].clone().requires_grad_()
        found = all_gather_v(mine, lengths if rank else None, dim)
        assert torch.equal(found, whole)
        weighted(found, 30 + rank).backward()
        return mine.grad

    for got, grad in zip(interlace.run(gather, world_size), grads, strict=True):
        torch.testing.assert_close(got, grad)


def picks(rank: int, world_size: int, length: int) -> list[torch.Tensor]:
    """Some positions twice, some for several ranks, nothing for the rank itself."""
    every = [
        torch.tensor([0, length - 1, 0][: 1 + (rank + peer) % 3]) for peer in range(world_size)
    ]
    every[rank] = torch.empty(0, dtype=torch.int32)
    return every


@pytest.mark.parametrize(("world_size", "dim"), CASES)
def test_indexed_all_to_all(world_size: int, dim: int) -> None:
    inputs = parts([2 + r for r in range(world_size)], dim, 40)
    every = [picks(r, world_size, 2 + r) for r in range(world_size)]

    def received(all: list[torch.Tensor], rank: int) -> torch.Tensor:
        return torch.cat(
            [t.index_select(dim, every[s][rank].long()) for s, t in enumerate(all)], dim
        )

    def losses(all: list[torch.Tensor]) -> torch.Tensor:
        return sum(weighted(received(all, r), 50 + r) for r in range(world_size))  # type: ignore[return-value]

    grads = reference(inputs, losses)
    sizes = [[len(each) for each in row] for row in every]

    def exchange() -> torch.Tensor | None:
        rank = interlace.get_rank()
        mine = inputs[rank].clone().requires_grad_()
        found = indexed_all_to_all_v(mine, every[rank], sizes if rank else None, dim)
        assert torch.equal(found, received(inputs, rank))
        weighted(found, 50 + rank).backward()
        return mine.grad

    for got, grad in zip(interlace.run(exchange, world_size), grads, strict=True):
        torch.testing.assert_close(got, grad)


def test_there_and_back_through_a_rank() -> None:
    """Scatter, work, gather, work on one rank, scatter again: backward crosses every placeholder."""
    lengths = [2, 0, 3]
    whole = noise(0, 60, (5, 2), torch.float64)

    def through(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([p.sin() * (1 + r) for r, p in enumerate(parts)]).cumsum(0).cos()

    def losses(all: list[torch.Tensor]) -> torch.Tensor:
        ends = through(list(all[0].split(lengths))).split([1, 2, 2])
        return sum(weighted(each, 61 + r) for r, each in enumerate(ends))  # type: ignore[return-value]

    (wanted,) = reference([whole], losses)

    def chain() -> torch.Tensor | None:
        rank = interlace.get_rank()
        source = whole.clone().requires_grad_() if rank == 0 else None
        mine = scatter_v(source, lengths if rank == 0 else None)
        middle = gather_v(mine.sin() * (1 + rank), dst=1).cumsum(0).cos()
        assert isinstance(middle, Placeholder) == (rank != 1)
        end = scatter_v(middle, [1, 2, 2], src=1)
        weighted(end, 61 + rank).backward()
        return None if source is None else source.grad

    torch.testing.assert_close(interlace.run(chain, 3)[0], wanted)


def test_only_one_rank_requires_gradients() -> None:
    def only_rank_one() -> Any:
        rank = interlace.get_rank()
        mine = torch.ones(1 + rank, requires_grad=rank == 1)
        one, everywhere = gather_v(mine), all_gather_v(mine)
        assert one.requires_grad and everywhere.requires_grad
        (one.sum() * 5).backward()
        everywhere.sum().backward()
        return None if mine.grad is None else mine.grad.tolist()

    assert interlace.run(only_rank_one, 3) == [None, [8.0, 8.0], None]


def test_nothing_is_recorded_without_need() -> None:
    def detached() -> Any:
        mine = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            quiet = gather_v(mine).requires_grad or all_gather_v(mine).requires_grad
        part = scatter_v(torch.arange(4) if interlace.get_rank() == 0 else None)
        return quiet, part.requires_grad, part.tolist()

    assert interlace.run(detached, 2) == [(False, False, [0, 1]), (False, False, [2, 3])]


def test_unused_results_on_the_rank_with_the_data_are_zeros() -> None:
    def unused() -> Any:
        mine = torch.ones(1 + interlace.get_rank(), requires_grad=True)
        whole = gather_v(mine)
        whole[:1].sum().backward()
        return mine.grad.tolist() if mine.grad is not None else None

    assert interlace.run(unused, 2) == [[1.0], [0.0, 0.0]]


def test_hooks_may_communicate_in_backward() -> None:
    def hooked() -> Any:
        rank = interlace.get_rank()
        mine = torch.ones(2, requires_grad=True)
        between = mine * 1

        def hook(grad: torch.Tensor) -> torch.Tensor:
            picked = indexed_all_to_all_v(grad, [torch.arange(2)] * 2).view(2, 2)
            return all_gather_v(grad).sum() * picked.sum(0)

        between.register_hook(hook)
        (between * (1 + rank)).sum().backward()
        return None if mine.grad is None else mine.grad.tolist()

    assert interlace.run(hooked, 2) == [[18.0, 18.0]] * 2


def test_virtual_ranks_of_a_gpu_refuse_to_record() -> None:
    group: Any = SimpleNamespace(place=object.__new__(VirtualRankPlace), world_size=2, rank=1)
    with pytest.raises(InterlaceError, match=r"rank 1: gradients .* need ranks that are processes"):
        prepare(group, torch.ones(1, requires_grad=True))
    prepare(group, torch.ones(1), None)
    with torch.no_grad():
        prepare(group, torch.ones(1, requires_grad=True))


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


# -- accumulation --------------------------------------------------------------------------------------

BIG = 256.0  # in bfloat16 its neighbour is 258, so that adding 1 is lost


@pytest.mark.parametrize(("accumulate", "sum"), [("fp32", 260.0), (None, 256.0)])
def test_gradients_accumulate_in_fp32(accumulate: str | None, sum: float) -> None:
    """256 + 1 + 1 + 1 rounds to 260; the other way each addition is rounded, and all are lost."""

    def gathered() -> float:
        rank = interlace.get_rank()
        mine = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
        found = all_gather_v(mine, accumulate=accumulate)
        found.backward(torch.full((4,), 1.0 if rank else BIG, dtype=torch.bfloat16))
        assert mine.grad is not None and mine.grad.dtype == torch.bfloat16
        return mine.grad.item()

    def indexed() -> float:
        mine = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
        found = indexed_all_to_all_v(mine, [torch.tensor([0])] * 4, accumulate=accumulate)
        grad = torch.full((4,), 1.0 if interlace.get_rank() else BIG, dtype=torch.bfloat16)
        found.backward(grad)
        assert mine.grad is not None
        return mine.grad.item()

    assert interlace.run(gathered, 4) == [sum] * 4
    assert interlace.run(indexed, 4) == [sum] * 4


# -- what is sent --------------------------------------------------------------------------------------


def test_one_message_each() -> None:
    """And in backward one to compare whose turn it is."""
    sent: list[str] = []
    exchange = facts.exchange

    def counted(communicator: Any, op: str, *args: Any) -> Any:
        sent.append(op)
        return exchange(communicator, op, *args)

    def calls() -> None:
        rank = interlace.get_rank()
        whole = torch.ones(5, requires_grad=True) if rank == 0 else None
        part = scatter_v(whole)
        gather_v(part).sum().backward()
        part = part.detach().requires_grad_()
        all_gather_v(part).sum().backward()
        picked = [torch.arange(len(part))] * 2
        indexed_all_to_all_v(part, picked).sum().backward()

    names = ["scatter_v", "gather_v", "all_gather_v", "indexed_all_to_all_v"]
    with (
        mock.patch("interlace.tensor.facts.exchange", counted),
    ):
        interlace.run(calls, 2)
    assert sorted(sent) == sorted([*names, *(f"backward of {name}" for name in names)] * 2)


def test_gather_and_scatter_are_one_to_all_and_all_to_one() -> None:
    """Rank r sends or gets its part and nothing else."""
    given: list[tuple[str, int, list[int] | None, int]] = []
    gather, scatter = rooted._gather, rooted._scatter

    def watch(name: str, real: Any) -> Any:
        def watched(communicator: Any, arguments: Any, *rest: Any) -> Any:
            tensor, tensors = arguments
            listed = None if tensors is None else [each.numel() for each in tensors]
            given.append((name, communicator.rank, listed, tensor.numel()))
            return real(communicator, arguments, *rest)

        return watched

    def both() -> None:
        part = scatter_v(torch.ones(5, 2) if interlace.get_rank() == 1 else None, src=1)
        gather_v(part, dst=1)

    with (
        mock.patch.object(rooted, "_gather", watch("gather", gather)),
        mock.patch.object(rooted, "_scatter", watch("scatter", scatter)),
    ):
        interlace.run(both, 2)
    assert sorted(given) == [
        ("gather", 0, None, 6),
        ("gather", 1, [6, 4], 4),
        ("scatter", 0, None, 6),
        ("scatter", 1, [6, 4], 4),
    ]


# -- misuse --------------------------------------------------------------------------------------------


def on_one(good: Callable[[], Any], bad: Callable[[], Any]) -> Callable[[], str]:
    """Rank 1 does ``bad``; what every rank is told."""

    def both() -> str:
        try:
            bad() if interlace.get_rank() == 1 else good()
        except (TypeError, ValueError) as error:
            return f"{type(error).__mro__[0].__name__}: {error}"
        return "nothing"

    return both


def rows(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*size, dtype=dtype)


def source(tensor: torch.Tensor, rank: int = 0) -> torch.Tensor | None:
    return tensor if interlace.get_rank() == rank else None


MISUSE: list[tuple[Callable[[], Any], Callable[[], Any], str]] = [
    (lambda: gather_v(rows(2, 2)), lambda: gather_v(rows(2, 3)), "equal in shape off dim 0"),
    (lambda: gather_v(rows(2, 2)), lambda: gather_v(rows(2, 2), dim=1), "dim differs"),
    (
        lambda: all_gather_v(rows(2)),
        lambda: all_gather_v(rows(2, dtype=torch.int32)),
        "dtype of tensor differs",
    ),
    (lambda: gather_v(rows(2)), lambda: gather_v(rows(2), dst=1), "root differs"),
    (lambda: gather_v(rows(2)), lambda: gather_v(rows(2), [2, 3, 2]), "the tensors have [2, 2, 2]"),
    (lambda: gather_v(rows(2)), lambda: gather_v(rows(2), [2, 2]), "one length per rank, 3"),
    (lambda: all_gather_v(rows(2)), lambda: all_gather_v(rows(2), dim=1), "dim must be within"),
    (lambda: gather_v(rows(2)), lambda: gather_v(torch.tensor(1.0)), "must have dimensions"),
    (
        lambda: gather_v(rows(2)),
        lambda: gather_v(Placeholder((2,))),
        "tensor: a Placeholder of shape (2,) and torch.float32 has no data here; its value is on other "
        "ranks",
    ),
    (lambda: gather_v(rows(2)), lambda: all_gather_v(rows(2)), "different ops"),
    (
        lambda: all_gather_v(rows(2)),
        lambda: all_gather_v(rows(2), accumulate="fp16"),
        "accumulate must be one of fp32",
    ),
    (
        lambda: all_gather_v(rows(2)),
        lambda: all_gather_v(rows(2), accumulate=None),
        "accumulate differs",
    ),
    (lambda: scatter_v(source(rows(6))), lambda: scatter_v(rows(6)), "must be None or a Placeholder"),
    (
        lambda: scatter_v(None, src=1),
        lambda: scatter_v(rows(6), [2, 2, 3], src=1),
        "add up to 7 on rank 1",
    ),
    (lambda: scatter_v(None, src=1), lambda: scatter_v(None, src=1), "tensor must be a tensor"),
    (
        lambda: scatter_v(source(rows(6))),
        lambda: scatter_v(Placeholder((6,), dtype=torch.int64)),
        "tensor is (6,) of torch.int64 on rank 1",
    ),
    (lambda: scatter_v(source(rows(6))), lambda: scatter_v(None, dim=1), "dim is 1 on rank 1"),
    (
        lambda: scatter_v(source(rows(6))),
        lambda: scatter_v(None, [1, 1, 4]),
        "sizes is [1, 1, 4] on rank 1",
    ),
    (
        lambda: indexed_all_to_all_v(rows(3), [torch.tensor([0])] * 3),
        lambda: indexed_all_to_all_v(rows(3), [torch.tensor([3])] * 3),
        "indices[0] must be within 0..2, got 3..3",
    ),
    (
        lambda: indexed_all_to_all_v(rows(3), [torch.tensor([0])] * 3),
        lambda: indexed_all_to_all_v(rows(3), [torch.tensor([0])] * 2),
        "list of 3 tensors",
    ),
    (
        lambda: indexed_all_to_all_v(rows(3), [torch.tensor([0])] * 3),
        lambda: indexed_all_to_all_v(rows(3), [torch.tensor([0])] * 3, [[1, 1, 2]] * 3),
        "sizes[0] is [1, 1, 2] on rank 1",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("good", "bad", "words"), MISUSE, ids=[case[2] for case in MISUSE])
def test_misuse_on_one_rank_is_raised_on_all(good: Any, bad: Any, words: str) -> None:
    told = interlace.run(on_one(good, bad), 3)
    assert all(words in each for each in told), told


def test_grad_modes_have_to_agree() -> None:
    def differ() -> None:
        with torch.set_grad_enabled(interlace.get_rank() == 0):
            gather_v(torch.ones(2, requires_grad=True))

    with pytest.raises(RankError, match=r"is_grad_enabled.* differs between ranks"):
        interlace.run(differ, 2)


def test_backward_in_another_order_is_named() -> None:
    """Two ops of equal shapes, whose gradients would go to each other's inputs."""

    def crossed() -> None:
        one, two = (torch.ones(2, requires_grad=True) for _ in range(2))
        losses = [all_gather_v(one).sum(), all_gather_v(two).sum()]
        for loss in losses if interlace.get_rank() == 0 else losses[::-1]:
            loss.backward()

    with pytest.raises(RankError, match=r"the op, by count, differs between ranks: 1 on rank 0, 2"):
        interlace.run(crossed, 2)


def test_a_rank_that_fails_in_backward_ends_all() -> None:
    """The engine runs in a thread of its own: what a hook raises there reaches the caller."""

    def broken() -> None:
        mine = torch.ones(2, requires_grad=True)
        between = mine * 2
        if interlace.get_rank() == 1:
            between.register_hook(lambda grad: 1 / 0)
        all_gather_v(all_gather_v(between)).sum().backward()

    with pytest.raises(RankError, match="rank 1"):
        interlace.run(broken, 2)


@pytest.mark.parametrize("dtype", MOVED_DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_any_dtype_is_picked(dtype: torch.dtype) -> None:
    rows = torch.arange(6 * dtype.itemsize, dtype=torch.uint8).view(3, -1)

    def picked() -> torch.Tensor:
        return indexed_all_to_all_v(rows.view(dtype), [torch.tensor([2, 0])] * 2).view(torch.uint8)

    for found in interlace.run(picked, 2):
        assert torch.equal(found, rows[[2, 0, 2, 0]])
