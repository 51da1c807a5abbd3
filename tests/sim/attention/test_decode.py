"""Decoding over caches that are spread over ranks: results, bits, misuse, races."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import interlace
from interlace import nn, reference
from interlace.groups.groups import default_group
from interlace.ops.attention.reference import AttentionReference
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.places.sim.place import separate_nodes
from interlace.runtime.tuning.configuration import override
from interlace.verify import races
from support import failure, noise, poisoned

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def cache(
    rank: int, tokens: int, heads: int, size: int, dtype: torch.dtype, value_size: int | None = None
) -> list[torch.Tensor]:
    """Keys and values; ``value_size``: of heads of values, None for that of keys."""
    sizes = size, size if value_size is None else value_size
    return [noise(rank, n, (2, tokens, heads, each), dtype) for n, each in enumerate(sizes, 1)]


def decoded(
    tokens: tuple[int, ...], heads: tuple[int, int], size: int, dtype: torch.dtype, algorithm: str,
    new: int = 0, lengths: tuple[tuple[int, int], ...] = (),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    rank = interlace.get_rank()
    shape = (2, new, heads[0], size) if new else (2, heads[0], size)
    given = torch.tensor(lengths[rank], dtype=torch.int32) if lengths else None
    with override(block_m=16, block_n=16):
        return interlace.distributed_decode(
            noise(9, 0, shape, dtype),
            cache(rank, tokens[rank], heads[1], size, dtype),
            lengths=given,
            algorithm=algorithm,  # type: ignore[arg-type]
            return_lse=True,
        )


CASES = [
    ((20, 37, 0), (4, 2), 16, F32, 0, ()),
    ((20, 37, 5), (3, 1), 80, BF16, 0, ((20, 1), (0, 37), (3, 0))),
    ((9, 9, 9), (2, 2), 256, F32, 3, ((9, 0), (2, 0), (4, 0))),
    ((40, 3, 9), (8, 8), 64, F32, 0, ()),
]


@pytest.mark.parametrize("algorithm", ["fused", "unfused"])
@pytest.mark.parametrize("case", CASES, ids=["plain", "lengths", "tokens", "heads"])
def test_agrees_with_the_whole_cache(case: tuple, algorithm: str) -> None:  # type: ignore[type-arg]
    tokens, heads, size, dtype, new, lengths = case
    with poisoned():
        found = interlace.run(decoded, 3, tokens, heads, size, dtype, algorithm, new, lengths)
    for output, lse in found[1:]:
        assert torch.equal(output, found[0][0]) and torch.equal(lse, found[0][1])
    query = noise(9, 0, (2, new or 1, heads[0], size), dtype).transpose(1, 2)
    caches = [cache(r, n, heads[1], size, dtype) for r, n in enumerate(tokens)]
    whole = [torch.cat(each, 1) for each in zip(*caches, strict=True)]
    there = [
        torch.cat(
            [torch.arange(n) < (lengths[r][b] if lengths else n) for r, n in enumerate(tokens)]
        )
        for b in range(2)
    ]
    for b in range(2):
        keys = [each[b : b + 1].transpose(1, 2) for each in whole]
        known = AttentionReference(
            query[b : b + 1], *keys, there[b].expand(new or 1, -1), size**-0.5
        )
        output, lse = (each[b : b + 1] for each in found[0])
        output = output if new else output.unsqueeze(1)
        lse = lse if new else lse.unsqueeze(2)
        assert reference.worst_ratio(output.transpose(1, 2), *known.output()) <= 1
        right, bound = known.sums()
        if there[b].any():
            assert reference.worst_ratio(lse, right, bound) <= 1
        else:
            assert bool(lse.isneginf().all()) and not output.any()


@pytest.mark.parametrize("algorithm", ["fused", "unfused"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_pages_and_guessed_tokens(algorithm: str, dtype: torch.dtype) -> None:
    """Pages in any order, and new tokens that see those before them; the last keys are on rank 1."""
    lengths, new, page = ((20, 3), (37, 9)), 3, 8

    def on_rank() -> tuple[torch.Tensor, torch.Tensor]:
        rank = interlace.get_rank()
        keys = cache(rank, 40, 2, 16, dtype)
        order = torch.randperm(10, generator=torch.Generator().manual_seed(rank))
        paged = [torch.full((10, page, 2, 16), float("nan")).to(dtype) for _ in keys]
        for made, whole in zip(paged, keys, strict=True):
            made[order] = whole.reshape(10, page, 2, 16)
        table = order.view(2, 5).to(torch.int32)
        own = torch.tensor(lengths[rank])
        seen = own.unsqueeze(1).expand(2, new)
        if rank:
            seen = own.unsqueeze(1) - new + 1 + torch.arange(new)
        for row, count in enumerate(own.tolist()):
            table[row, -(-count // page) :] = 99  # behind the keys that are there
        with override(block_m=16, block_n=16):
            return interlace.distributed_decode(
                noise(9, 0, (2, new, 4, 16), dtype),
                paged,
                lengths=seen,
                block_table=table,
                algorithm=algorithm,  # type: ignore[arg-type]
                return_lse=True,
            )

    found = interlace.run(on_rank, 2)
    assert all(map(torch.equal, *found))
    query = noise(9, 0, (2, new, 4, 16), dtype).transpose(1, 2)
    for b in range(2):
        parts = [
            [each[b : b + 1, : lengths[r][b]] for each in cache(r, 40, 2, 16, dtype)]
            for r in range(2)
        ]
        keys = [torch.cat(each, 1).transpose(1, 2) for each in zip(*parts, strict=True)]
        total = keys[0].shape[2]
        mask = torch.arange(total) <= torch.arange(total - new, total).unsqueeze(1)
        known = AttentionReference(query[b : b + 1], *keys, mask, 0.25)
        output, lse = (each[b : b + 1] for each in found[0])
        assert reference.worst_ratio(output.transpose(1, 2), *known.output()) <= 1
        assert reference.worst_ratio(lse, *known.sums()) <= 1


@pytest.mark.parametrize("algorithm", ["fused", "unfused"])
@pytest.mark.parametrize("sizes", [(24, 16), (8, 20)])
def test_values_of_another_head_size(sizes: tuple[int, int], algorithm: str) -> None:
    """A cache of its own for each, one that has the values within the keys, and pages."""
    size, value_size = sizes
    query = noise(9, 0, (2, 4, size), F32)

    def on_rank() -> list[tuple[torch.Tensor, torch.Tensor]]:
        keys, values = cache(interlace.get_rank(), 24, 2, size, F32, value_size)
        table = torch.tensor([[2, 0, 1], [5, 3, 4]])
        pages = [torch.empty(6, 8, 2, each.shape[3]) for each in (keys, values)]
        for made, whole in zip(pages, (keys, values), strict=True):
            made[table.flatten()] = whole.reshape(made.shape)
        how: Any = {"algorithm": algorithm, "return_lse": True}
        with override(block_m=16, block_n=16):
            found = [
                interlace.distributed_decode(query, (keys, values), **how),
                interlace.distributed_decode(query, pages, block_table=table, **how),
            ]
            if value_size < size:
                latent = keys, keys[..., :value_size]
                found.append(interlace.distributed_decode(query, latent, **how))
        return found

    found = interlace.run(on_rank, 2)
    for mine, others in zip(*found, strict=True):
        assert all(map(torch.equal, mine, others))
    caches = [cache(rank, 24, 2, size, F32, value_size) for rank in range(2)]
    keys, values = (torch.cat(each, 1).transpose(1, 2) for each in zip(*caches, strict=True))
    mask = torch.ones(1, 48, dtype=torch.bool)
    shown = [values, values, keys[..., :value_size]][: len(found[0])]
    for (output, lse), seen in zip(found[0], shown, strict=True):
        known = AttentionReference(query.unsqueeze(2), keys, seen, mask, size**-0.5)
        assert output.shape == (2, 4, value_size)
        assert reference.worst_ratio(output.unsqueeze(2), *known.output()) <= 1
        assert reference.worst_ratio(lse.unsqueeze(2), *known.sums()) <= 1


class LargestMade(TorchDispatchMode):
    """The bytes of the largest storage that an op of torch has made."""

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
def test_torch_copies_no_cache(lengths: tuple[int, ...] | None) -> None:
    def on_rank() -> tuple[int, int]:
        keys = cache(0, 512, 2, 64, F32)
        given = None if lengths is None else torch.tensor(lengths)
        with LargestMade(*keys) as made:
            interlace.distributed_decode(
                noise(9, 0, (2, 2, 64), F32), keys, lengths=given, algorithm="unfused"
            )
        return made.largest, keys[0].nbytes

    [(largest, whole)] = interlace.run(on_rank, 1)
    assert 0 < largest < whole / 16


def test_torch_reads_nothing_behind_lengths() -> None:
    """Of more keys than a machine has memory for: one token's, again and again."""

    def on_rank() -> float:
        query, lengths = noise(9, 0, (2, 2, 3, 16), F32), torch.tensor([[5, 3], [0, 2]])
        keys, values = (noise(1, n, (2, 1, 1, 16), F32).expand(2, 2**40, 1, 16) for n in (1, 2))
        made = interlace.distributed_decode(
            query, (keys, values), lengths=lengths, algorithm="unfused"
        )
        right = values[:, :1] * (lengths > 0)[:, :, None, None]
        return float((made - right).abs().max())

    assert interlace.run(on_rank, 1)[0] < 1e-6


@pytest.mark.parametrize("table", [None, torch.tensor([[1, 0], [2, 2]])])
def test_elements_of_a_row_may_lie_apart(table: torch.Tensor | None) -> None:
    def on_rank() -> bool:
        query, lengths = noise(9, 0, (2, 2, 16), F32), torch.tensor([7, 5])
        shape = (2 if table is None else 3, 7, 16, 2)
        apart = [noise(1, number, shape, F32).mT for number in (1, 2)]
        made, right = (
            interlace.distributed_decode(
                query, keys, lengths=lengths, block_table=table, algorithm="unfused"
            )
            for keys in (apart, [each.contiguous() for each in apart])
        )
        return torch.equal(made, right)

    assert interlace.run(on_rank, 1)[0]


def test_many_queries_go_by_a_plain_gather() -> None:
    def on_rank() -> float:
        q = noise(0, 0, (1, 160, 64), F32)
        keys = [noise(interlace.get_rank(), n, (1, 3, 1, 64), F32) for n in (1, 2)]
        by = [interlace.distributed_decode(q, keys, algorithm=a) for a in ("fused", "unfused")]
        return float((by[0] - by[1]).abs().max())

    assert max(interlace.run(on_rank, 2)) < 1e-5


@pytest.mark.parametrize("algorithm", ["fused", "unfused"])
def test_no_sequences_have_no_result(algorithm: str) -> None:
    def on_rank() -> list[tuple[int, ...]]:
        keys = torch.zeros(0, 3, 2, 8)
        made = interlace.distributed_decode(
            torch.zeros(0, 4, 8),
            (keys, keys),
            algorithm=algorithm,
            return_lse=True,  # type: ignore[arg-type]
        )
        return [tuple(each.shape) for each in made]

    assert interlace.run(on_rank, 2)[0] == [(0, 4, 8), (0, 4)]


def rounds() -> None:
    """Calls of growing and shrinking size, behind each other."""
    for call, heads in enumerate((1, 4, 2, 4)):
        q = noise(call, 0, (2, heads, 16), F32)
        keys = [noise(10 * call + interlace.get_rank(), n, (2, 5, heads, 16), F32) for n in (1, 2)]
        every = [
            [noise(10 * call + r, n, (2, 5, heads, 16), F32) for r in range(interlace.get_world_size())]
            for n in (1, 2)
        ]  # fmt: skip
        whole = [torch.cat(each, 1).transpose(1, 2) for each in every]
        right = torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(2), *whole)
        found = interlace.distributed_decode(q, keys, algorithm="fused")
        if (found - right.squeeze(2)).abs().max() > 1e-4:
            raise AssertionError(f"wrong result in call {call}")


def test_calls_behind_each_other_have_no_race() -> None:
    report = races(rounds, 3, seeds=1)
    assert report.clean, report


@pytest.mark.parametrize(
    ("q", "keys", "changes", "kind", "text"),
    [
        ((2, 4), (2, 3, 4, 8), {}, ValueError, "q must be (batch, heads, size)"),
        ((2, 4, 8), (2, 3, 3, 8), {}, ValueError, "kv_cache has 3 heads, which does not divide q's 4"),
        ((2, 4, 8), (3, 3, 4, 8), {}, ValueError,
         "kv_cache[0] has shape (3, 3, 4, 8), q has (2, 4, 8); batches and the size of heads must"),
        ((2, 4, 8), (2, 3, 4, 8), {"values": (2, 5, 4, 8)}, ValueError,
         "kv_cache[1] has shape (2, 5, 4, 8), kv_cache[0] has (2, 3, 4, 8)"),
        ((2, 4, 8), (2, 3, 4, 8), {"values": (2, 3, 4, 0)}, ValueError,
         "kv_cache[1] has heads of size 0 (shape (2, 3, 4, 0))"),
        ((2, 4, 8), (2, 3, 4, 8), {"values": (2, 3, 4, 300), "algorithm": "fused"}, ValueError,
         "heads of at most 256, got torch.float32 and 300"),
        ((2, 4, 8), (7, 3, 4, 9), {"block_table": torch.tensor([[1], [2]])}, ValueError,
         "kv_cache[0] has shape (7, 3, 4, 9), q has (2, 4, 8); the size of heads must"),
        ((2, 4, 8), (2, 3, 4, 8), {"lengths": torch.tensor([4, 0])}, ValueError, "must be within 0..3"),
        ((2, 4, 8), (2, 3, 4, 8), {"lengths": torch.tensor([1.0, 0])}, ValueError, "lengths must be int"),
        ((2, 4, 8), (2, 3, 4, 8), {"lengths": torch.ones(2, 2).int()}, ValueError, "shape (2,) or (2, 1)"),
        ((2, 4, 8), (7, 3, 4, 8), {"block_table": torch.ones(2, 2)}, ValueError, "block_table must be"),
        ((2, 4, 8), (7, 3, 4, 8), {"block_table": torch.tensor([[1], [7]])}, ValueError, "has page 7"),
        ((2, 4, 8), (2, 3, 4, 8), {"kv_cache": (torch.ones(1),)}, TypeError, "values, got 1 in a tuple"),
        ((2, 4, 8), (2, 3, 4, 8), {"return_lse": 1}, TypeError, "return_lse must be a bool, got 1"),
        ((2, 4, 8), (2, 3, 4, 8), {"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
        ((2, 4, 8), (2, 3, 4, 8), {"algorithm": "pipelined"}, ValueError, "algorithm must be one of auto"),
    ],
)  # fmt: skip
def test_misuse_is_named_on_all_ranks(q, keys, changes, kind, text) -> None:  # type: ignore[no-untyped-def]
    def on_rank() -> None:
        more = dict(changes)
        cache = torch.zeros(keys), torch.zeros(more.pop("values", keys))
        interlace.distributed_decode(torch.zeros(q), more.pop("kv_cache", cache), **more)

    error = failure(on_rank, 2)
    assert isinstance(error, kind) and text in str(error), error


def test_a_backward_says_that_there_is_none() -> None:
    """Rather than that a result comes without the history of what it was made of."""

    def on_rank() -> None:
        cached = torch.zeros(2, 3, 4, 8)
        q = torch.zeros(2, 4, 8, requires_grad=interlace.get_rank() == 1)
        output, lse = interlace.distributed_decode(q, (cached, cached), return_lse=True)
        assert lse.shape == (2, 4) and output.requires_grad == q.requires_grad
        if q.requires_grad:
            with pytest.raises(RuntimeError, match="distributed_decode has no gradients"):
                output.sum().backward()

    interlace.run(on_rank, 2)


def test_shapes_that_differ_are_told_as_they_were_given() -> None:
    def on_rank() -> None:
        cached = torch.zeros(2, 3, 4, 8)
        q = torch.zeros(2, 4, 8) if interlace.get_rank() else torch.zeros(2, 2, 4, 8)
        interlace.distributed_decode(q, (cached, cached))

    text = "the shape of q differs between ranks: (2, 2, 4, 8) on rank 0, (2, 4, 8) on rank 1"
    assert text in str(failure(on_rank, 2))


def test_sizes_of_values_that_differ_are_told() -> None:
    def on_rank() -> None:
        keys, size = torch.zeros(2, 3, 4, 8), 4 + interlace.get_rank()
        interlace.distributed_decode(torch.zeros(2, 4, 8), (keys, torch.zeros(2, 3, 4, size)))

    text = "the size of heads of kv_cache[1] differs between ranks: 4 on rank 0, 5 on rank 1"
    assert text in str(failure(on_rank, 2))


def test_several_nodes() -> None:
    """What the kernels of the ranks have found goes by a plain gather, and attention is unfused."""

    def on_rank() -> tuple[float, float]:
        ranks, torch_sdpa = tuple(range(4)), torch.nn.functional.scaled_dot_product_attention
        place = default_group().place.subgroup(ranks, 1)
        group = Communicator(separate_nodes(place, [0, 0, 1, 1], "late"), ranks)
        q, k, v = (noise(0, n, (2, 12, 2, 16), F32) for n in range(3))
        mine = [each.chunk(4, 1)[group.rank] for each in (k, v)]
        one = interlace.distributed_decode(q[:, 0], mine, algorithm="fused", group=group)
        right = torch_sdpa(*(each.transpose(1, 2) for each in (q[:, :1], k, v)))
        own = [nn.functional.shard_sequence(each, group=group) for each in (q, k, v)]
        all_of_it = torch_sdpa(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)
        made = nn.functional.context_parallel_attention(*own, group=group)
        part = nn.functional.shard_sequence(all_of_it, group=group)
        return float((one - right[:, :, 0]).abs().max()), float((made - part).abs().max())

    for errors in interlace.run(on_rank, 4):
        assert max(errors) < 1e-5
