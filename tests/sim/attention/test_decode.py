"""Decoding over caches that are spread over ranks: results, bits, misuse, races."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import interlace
from interlace import reference
from interlace.ops.attention.problem import AttentionReference
from interlace.runtime.tuning.configuration import override
from ranks import ranks
from sim.api.refusals import ByRank, both, check_refused
from support import noise, poisoned

F32, BF16 = torch.float32, torch.bfloat16


def cache(
    rank: int, tokens: int, heads: int, size: int, dtype: torch.dtype, value_size: int | None = None
) -> list[torch.Tensor]:
    """Return keys and values; ``value_size``: size of value heads, None for the size of key heads."""
    sizes = size, size if value_size is None else value_size
    return [noise(rank, n, (2, tokens, heads, each), dtype) for n, each in enumerate(sizes, 1)]


ALGORITHMS = pytest.mark.parametrize("algorithm", ["fused", "unfused"])
SMALL = {"block_m": 16, "block_n": 16}


def check_sequence(
    made: tuple[torch.Tensor, torch.Tensor],
    query: torch.Tensor,
    keys: Any,
    seen: torch.Tensor | None = None,
) -> None:
    """Compare one sequence: ``query`` (new, heads, size), ``keys`` and values (tokens, heads, size).

    ``seen`` has the keys of each token; by default each token sees all.
    """
    output, lse = (each.unsqueeze(0) for each in made)
    if not len(keys[0]):
        assert bool(lse.isneginf().all()) and not output.any()
        return
    whole = [each.unsqueeze(0).transpose(1, 2) for each in (query, *keys)]
    if seen is None:
        seen = torch.ones(len(query), len(keys[0]), dtype=torch.bool)
    known = AttentionReference(*whole, seen, query.shape[-1] ** -0.5)
    assert reference.worst_ratio(output.transpose(1, 2), *known.output()) <= 1
    assert reference.worst_ratio(lse, *known.sums()) <= 1


def same_on_all(results: tuple[torch.Tensor, torch.Tensor]) -> None:
    for each in results:
        every: list[Any] = [None] * interlace.get_world_size()
        interlace.all_gather_object(every, each)
        assert all(torch.equal(each, other) for other in every)


CASES: dict[str, tuple[Any, ...]] = {
    "plain": ((20, 37, 0), (4, 2), 16, F32, 0, None),
    "lengths": ((20, 37, 5), (3, 1), 80, BF16, 0, ((20, 1), (0, 37), (3, 0))),
    "tokens": ((9, 9, 9), (2, 2), 256, F32, 3, ((9, 0), (2, 0), (4, 0))),
    "heads": ((40, 3, 9), (8, 8), 64, F32, 0, None),
}


@ALGORITHMS
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_whole_cache(case: str, algorithm: Any) -> None:
    tokens, heads, size, dtype, new, lengths = CASES[case]

    def on_rank() -> None:
        rank = interlace.get_rank()
        query = noise(9, 0, (2, new, heads[0], size) if new else (2, heads[0], size), dtype)
        caches = [cache(r, n, heads[1], size, dtype) for r, n in enumerate(tokens)]
        own = None if lengths is None else torch.tensor(lengths[rank], dtype=torch.int32)
        with override(**SMALL):
            output, lse = interlace.distributed_decode(
                query, caches[rank], lengths=own, algorithm=algorithm, return_lse=True
            )
        same_on_all((output, lse))
        if not new:
            query, output, lse = query.unsqueeze(1), output.unsqueeze(1), lse.unsqueeze(2)
        for b in range(2):
            there = [n if lengths is None else lengths[r][b] for r, n in enumerate(tokens)]
            keys = [
                torch.cat([each[b, :n] for each, n in zip(parts, there, strict=True)])
                for parts in zip(*caches, strict=True)
            ]
            check_sequence((output[b], lse[b]), query[b], keys)

    with poisoned():
        interlace.run(on_rank, 3)


@ALGORITHMS
@pytest.mark.parametrize("dtype", [F32, BF16])
@ranks(2, place="sim")
def test_pages_and_guessed_tokens(algorithm: Any, dtype: torch.dtype) -> None:
    lengths, new, page, rank = ((20, 3), (37, 9)), 3, 8, interlace.get_rank()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(rank))
    caches = [cache(each, 40, 2, 16, dtype) for each in range(2)]
    paged = [torch.full((10, page, 2, 16), float("nan")).to(dtype) for _ in range(2)]
    for made, whole in zip(paged, caches[rank], strict=True):
        made[order] = whole.reshape(10, page, 2, 16)
    table = order.view(2, 5).to(torch.int32)
    own = torch.tensor(lengths[rank])
    seen = own.unsqueeze(1).expand(2, new)
    if rank:
        seen = own.unsqueeze(1) - new + 1 + torch.arange(new)
    for row, count in enumerate(own.tolist()):
        table[row, -(-count // page) :] = 99  # behind the keys that are there
    query, options = noise(9, 0, (2, new, 4, 16), dtype), {"lengths": seen, "block_table": table}
    with override(**SMALL):
        output, lse = interlace.distributed_decode(
            query, paged, algorithm=algorithm, return_lse=True, **options
        )
    same_on_all((output, lse))
    for b in range(2):
        keys = [
            torch.cat([each[b, : lengths[r][b]] for r, each in enumerate(parts)])
            for parts in zip(*caches, strict=True)
        ]
        total = len(keys[0])
        mask = torch.arange(total) <= torch.arange(total - new, total).unsqueeze(1)
        check_sequence((output[b], lse[b]), query[b], keys, mask)


@ALGORITHMS
@pytest.mark.parametrize("sizes", [(24, 16), (8, 20)])
@ranks(2, place="sim")
def test_values_of_another_head_size(sizes: tuple[int, int], algorithm: Any) -> None:
    """The values have a separate cache, are within the keys, or are in pages."""
    size, value_size = sizes
    query = noise(9, 0, (2, 4, size), F32)
    caches = [cache(rank, 24, 2, size, F32, value_size) for rank in range(2)]
    keys, values = caches[interlace.get_rank()]
    table = torch.tensor([[2, 0, 1], [5, 3, 4]])
    pages = [torch.empty(6, 8, 2, each.shape[3]) for each in (keys, values)]
    for made, whole in zip(pages, (keys, values), strict=True):
        made[table.flatten()] = whole.reshape(made.shape)
    every = [torch.cat(parts, 1) for parts in zip(*caches, strict=True)]
    given: list[Any] = [(keys, values), pages]
    expected = [every, every]
    if value_size < size:
        given.append((keys, keys[..., :value_size]))
        expected.append([every[0], every[0][..., :value_size]])
    for number, (held, right) in enumerate(zip(given, expected, strict=True)):
        paged = {"block_table": table} if number == 1 else {}
        with override(**SMALL):
            output, lse = interlace.distributed_decode(
                query, held, algorithm=algorithm, return_lse=True, **paged
            )
        assert output.shape == (2, 4, value_size)
        same_on_all((output, lse))
        for b in range(2):
            made_of = output[b].unsqueeze(0), lse[b].unsqueeze(1)
            check_sequence(made_of, query[b].unsqueeze(0), [each[b] for each in right])


class LargestMade(TorchDispatchMode):
    """A mode that notes the bytes of the largest storage that an op of torch has made."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.largest, self._known = 0, {each.untyped_storage().data_ptr() for each in known}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **kwargs or {})
        for each in tree_leaves(made):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in self._known:
                self.largest = max(self.largest, storage.nbytes())
        return made


@pytest.mark.parametrize("lengths", [None, (512, 512), (512, 7), (0, 300)])
@ranks(1, place="sim")
def test_torch_copies_no_cache(lengths: tuple[int, ...] | None) -> None:
    keys, query = cache(0, 512, 2, 64, F32), noise(9, 0, (2, 2, 64), F32)
    given = None if lengths is None else torch.tensor(lengths)
    with LargestMade(*keys) as made:
        interlace.distributed_decode(query, keys, lengths=given, algorithm="unfused")
    assert 0 < made.largest < keys[0].nbytes / 16


@ranks(1, place="sim")
def test_torch_reads_nothing_behind_lengths() -> None:
    """The cache is a view of one token's keys, longer than the machine's memory."""
    query, lengths = noise(9, 0, (2, 2, 3, 16), F32), torch.tensor([[5, 3], [0, 2]])
    keys, values = (noise(1, n, (2, 1, 1, 16), F32).expand(2, 2**40, 1, 16) for n in (1, 2))
    made = interlace.distributed_decode(query, (keys, values), lengths=lengths, algorithm="unfused")
    right = values[:, :1] * (lengths > 0)[:, :, None, None]
    assert float((made - right).abs().max()) < 1e-6


@pytest.mark.parametrize("table", [None, torch.tensor([[1, 0], [2, 2]])])
@ranks(1, place="sim")
def test_elements_of_a_row_may_lie_apart(table: torch.Tensor | None) -> None:
    query, lengths = noise(9, 0, (2, 2, 16), F32), torch.tensor([7, 5])
    shape = (2 if table is None else 3, 7, 16, 2)
    apart = [noise(1, number, shape, F32).mT for number in (1, 2)]
    made, right = (
        interlace.distributed_decode(
            query, keys, lengths=lengths, block_table=table, algorithm="unfused"
        )
        for keys in (apart, [each.contiguous() for each in apart])
    )
    assert torch.equal(made, right)


@ranks(2, place="sim")
def test_many_queries_go_by_a_plain_gather() -> None:
    q = noise(0, 0, (1, 160, 64), F32)
    keys = [noise(interlace.get_rank(), n, (1, 3, 1, 64), F32) for n in (1, 2)]
    fused, unfused = (
        interlace.distributed_decode(q, keys, algorithm="fused"),
        interlace.distributed_decode(q, keys, algorithm="unfused"),
    )
    assert float((fused - unfused).abs().max()) < 1e-5


@ALGORITHMS
@ranks(2, place="sim")
def test_no_sequences_have_no_result(algorithm: Any) -> None:
    keys, query = torch.zeros(0, 3, 2, 8), torch.zeros(0, 4, 8)
    made = interlace.distributed_decode(query, (keys, keys), algorithm=algorithm, return_lse=True)
    assert [tuple(each.shape) for each in made] == [(0, 4, 8), (0, 4)]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


KEYS, PAGES = zeros(2, 3, 4, 8), zeros(7, 3, 4, 8)
MISUSE: list[tuple[dict[str, Any], str]] = [
    ({"q": zeros(2, 4)}, "q must be (batch, heads, size)"),
    ({"kv_cache": (zeros(2, 3, 3, 8),) * 2}, "kv_cache has 3 heads, which does not divide q's 4"),
    ({"kv_cache": (zeros(3, 3, 4, 8),) * 2},
     "kv_cache[0] has shape (3, 3, 4, 8), q has (2, 4, 8); batches and the size of heads must"),
    ({"kv_cache": (KEYS, zeros(2, 5, 4, 8))}, "(2, 5, 4, 8), kv_cache[0] has (2, 3, 4, 8)"),
    ({"kv_cache": (KEYS, zeros(2, 3, 4, 0))}, "kv_cache[1] has heads of size 0 (shape (2, 3, 4, 0))"),
    ({"kv_cache": both((KEYS, zeros(2, 3, 4, 300))), "algorithm": both("fused")},
     "heads of at most 256, got torch.float32 and 300"),
    ({"kv_cache": (zeros(7, 3, 4, 9),) * 2, "block_table": torch.tensor([[1], [2]])},
     "kv_cache[0] has shape (7, 3, 4, 9), q has (2, 4, 8); the size of heads must"),
    ({"lengths": torch.tensor([4, 0])}, "must be within 0..3"),
    ({"lengths": torch.tensor([1.0, 0])}, "lengths must be int"),
    ({"lengths": torch.ones(2, 2).int()}, "shape (2,) or (2, 1)"),
    ({"kv_cache": (PAGES, PAGES), "block_table": torch.ones(2, 2)}, "block_table must be"),
    ({"kv_cache": (PAGES, PAGES), "block_table": torch.tensor([[1], [7]])}, "has page 7"),
    ({"kv_cache": (torch.ones(1),)}, "TypeError: values, got 1 in a tuple"),
    ({"return_lse": 1}, "TypeError: return_lse must be a bool, got 1"),
    ({"scale": float("nan")}, "scale must be finite, got nan"),
    ({"q": ByRank(zeros(2, 2, 4, 8), zeros(2, 4, 8))},
     "the shape of q differs between ranks: (2, 2, 4, 8) on rank 0, (2, 4, 8) on rank 1"),
    ({"kv_cache": ByRank((KEYS, zeros(2, 3, 4, 4)), (KEYS, zeros(2, 3, 4, 5)))},
     "the size of heads of kv_cache[1] differs between ranks: 4 on rank 0, 5 on rank 1"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), MISUSE)
@ranks(2, place="sim")
def test_misuse_is_named_on_all_ranks(changes: dict[str, Any], text: str) -> None:
    right = {"q": zeros(2, 4, 8), "kv_cache": (KEYS, KEYS), "algorithm": "unfused"}
    check_refused(interlace.distributed_decode, right, changes, text)


@ranks(2, place="sim")
def test_a_backward_says_that_there_is_none() -> None:
    q = torch.zeros(2, 4, 8, requires_grad=interlace.get_rank() == 1)
    output, lse = interlace.distributed_decode(q, (KEYS, KEYS), return_lse=True)
    assert lse.shape == (2, 4) and output.requires_grad == q.requires_grad
    if q.requires_grad:
        with pytest.raises(RuntimeError, match="distributed_decode has no gradients"):
            output.sum().backward()  # type: ignore[no-untyped-call]
