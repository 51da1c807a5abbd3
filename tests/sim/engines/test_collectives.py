"""all_gather, reduce_scatter, all_reduce: torch's forms, any dtype, both algorithms, groups, async."""

from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

import interlace
from interlace import reference
from interlace.runtime.tuning.configuration import override
from support import LAYOUTS, laid_out, noise, payload, poison, poisoned

NON_GROUP_MEMBER = dist.GroupMember.NON_GROUP_MEMBER

MOVED = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip
SUMMED = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64]
SMALL = {"block_elements": 16, "copiers": 2, "chunks": 2}
WORLDS = st.sampled_from([1, 2, 3, 5, 8])


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.dtype == b.dtype and a.shape == b.shape
    return a.flatten().tolist() == b.flatten().tolist()


@hypothesis.settings(max_examples=20)
@given(
    world=WORLDS,
    dtype=st.sampled_from(MOVED),
    tail=st.sampled_from([(), (3,), (2, 0), (2, 3)]),
    rows=st.lists(st.integers(0, 40), min_size=8, max_size=8),
    form=st.sampled_from(["cat", "stack", "list", "uneven"]),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS[:4])),
    algorithm=st.sampled_from(["auto", "kernel", "copy"]),
    seed=st.integers(0, 1000),
)
def test_all_gather(
    world: int, dtype: torch.dtype, tail: tuple[int, ...], rows: list[int], form: str,
    layouts: tuple[str, str], algorithm: str, seed: int,
) -> None:  # fmt: skip
    if algorithm == "kernel" and dtype not in (torch.float32, torch.float16, torch.bfloat16):
        algorithm = "auto"
    if form != "uneven":
        rows = [rows[0]] * 8

    def part(rank: int) -> torch.Tensor:
        return laid_out(payload(rank, 1, (rows[rank], *tail), dtype), layouts[0])

    def on_rank() -> Any:
        shapes = {"cat": (world * rows[0], *tail), "stack": (world, rows[0], *tail)}
        if form in shapes:
            out: Any = laid_out(poison(torch.zeros(shapes[form], dtype=dtype)), layouts[1])
        else:
            out = [poison(torch.zeros(rows[r], *tail, dtype=dtype)) for r in range(world)]
            out = [laid_out(each, layouts[1]) for each in out]
        work = interlace.all_gather(
            out, part(interlace.get_rank()), async_op=True, algorithm=algorithm
        )
        assert work.wait() is True
        return out

    with poisoned(), override(**SMALL):
        results = interlace.run(on_rank, world, seed=seed)
    parts = [part(rank) for rank in range(world)]
    for result in results:
        if form == "cat":
            assert equal(result, torch.cat(parts))
        elif form == "stack":
            assert equal(result, torch.stack(parts))
        else:
            assert all(equal(got, want) for got, want in zip(result, parts, strict=True))


@hypothesis.settings(max_examples=20)
@given(
    world=WORLDS,
    dtype=st.sampled_from(SUMMED),
    lengths=st.lists(st.integers(0, 40), min_size=8, max_size=8),
    form=st.sampled_from(["cat", "stack", "uneven"]),
    op=st.sampled_from(["sum", "avg", dist.ReduceOp.SUM, dist.ReduceOp.AVG]),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS[:4])),
    algorithm=st.sampled_from(["auto", "kernel", "copy"]),
    seed=st.integers(0, 1000),
)
def test_reduce_scatter(
    world: int, dtype: torch.dtype, lengths: list[int], form: str, op: Any,
    layouts: tuple[str, str], algorithm: str, seed: int,
) -> None:  # fmt: skip
    if algorithm == "kernel" and dtype not in (torch.float32, torch.float16, torch.bfloat16):
        algorithm = "copy"
    name = "avg" if op in ("avg", dist.ReduceOp.AVG) and dtype.is_floating_point else "sum"
    op = op if dtype.is_floating_point else "sum"
    if form != "uneven":
        lengths = [lengths[0]] * 8

    def parts_of(rank: int) -> list[torch.Tensor]:
        make = noise if dtype.is_floating_point else payload
        return [laid_out(make(rank, 30 + r, (lengths[r], 2), dtype), layouts[0]) for r in
                range(world)]  # fmt: skip

    def on_rank() -> torch.Tensor:
        rank = interlace.get_rank()
        mine = parts_of(rank)
        whole = {"cat": torch.cat, "stack": torch.stack}
        given_ = whole[form](mine) if form in whole else mine
        out = laid_out(poison(torch.zeros(lengths[rank], 2, dtype=dtype)), layouts[1])
        assert interlace.reduce_scatter(out, given_, op, algorithm=algorithm) is None
        return out

    with poisoned(), override(**SMALL):
        results = interlace.run(on_rank, world, seed=seed)
    for rank, result in enumerate(results):
        terms = [parts_of(source)[rank] for source in range(world)]
        if dtype.is_floating_point:
            assert reference.worst_ratio(result, *reference.reduce(terms, name)) <= 1
        else:
            assert torch.equal(result, sum(terms))


@hypothesis.settings(max_examples=15)
@given(
    world=WORLDS,
    dtype=st.sampled_from(SUMMED),
    shape=st.sampled_from([(), (0,), (1,), (3, 5), (33,), (2, 3, 7)]),
    op=st.sampled_from(["sum", "avg"]),
    layout=st.sampled_from(LAYOUTS[:4]),
    algorithm=st.sampled_from(["auto", "kernel", "copy"]),
    seed=st.integers(0, 1000),
)
def test_all_reduce(
    world: int, dtype: torch.dtype, shape: tuple[int, ...], op: str, layout: str,
    algorithm: str, seed: int,
) -> None:  # fmt: skip
    if algorithm == "kernel" and dtype not in (torch.float32, torch.float16, torch.bfloat16):
        algorithm = "copy"
    floating = dtype.is_floating_point
    op = op if floating else "sum"
    make = noise if floating else payload

    def on_rank() -> torch.Tensor:
        x = make(interlace.get_rank(), 2, shape, dtype)
        x = laid_out(x, layout) if shape else x
        interlace.all_reduce(x, op, algorithm=algorithm)
        return x

    with poisoned(), override(**SMALL):
        results = interlace.run(on_rank, world, seed=seed)
    terms = [make(rank, 2, shape, dtype) for rank in range(world)]
    for result in results:
        assert equal(result, results[0]), "bits differ between ranks"
        if floating:
            assert reference.worst_ratio(result, *reference.reduce(terms, op)) <= 1
        else:
            assert torch.equal(result, torch.stack(terms).sum(0).to(dtype))


def test_groups_at_once() -> None:
    """Overlapping groups, a group of a group, one whose ranks are not in order; outsiders get a mark."""

    def on_rank() -> None:
        rank = interlace.get_rank()
        groups = [interlace.new_group(r) for r in ([0, 1], [3, 2], [3, 0, 2], None, [1])]
        members = [[0, 1], [3, 2], [3, 0, 2], [0, 1, 2, 3], [1]]
        pending = []
        for call in range(3):
            for number, (group, ranks) in enumerate(zip(groups, members, strict=True)):
                if rank not in ranks:
                    assert group == NON_GROUP_MEMBER
                    with pytest.raises(ValueError, match="not a member"):
                        interlace.barrier(group)
                    continue
                assert interlace.get_rank(group) == ranks.index(rank)
                assert interlace.get_world_size(group) == len(ranks)
                x = payload(rank, 10 * number + call, (5,))
                out = torch.empty(len(ranks), 5)
                works = [interlace.all_gather(out, x, group, True)]
                summed = x.clone()
                works.append(interlace.all_reduce(summed, "sum", group, True))
                expected = torch.stack([payload(r, 10 * number + call, (5,)) for r in ranks])
                pending.append((works, out, summed, expected))
        for works, out, summed, expected in reversed(pending):
            for work in works:
                work.wait()
            assert torch.equal(out, expected)
            assert torch.equal(summed, expected.sum(0))
        if groups[2] != NON_GROUP_MEMBER:
            inner = interlace.new_group([2, 1], group=groups[2])  # ranks 2 and 0 of the run
            if inner != NON_GROUP_MEMBER:
                x = torch.tensor([float(rank)])
                out = torch.empty(2, 1)
                interlace.all_gather(out, x, inner)
                assert out.flatten().tolist() == [2.0, 0.0]

    for seed in range(3):
        with poisoned():
            interlace.run(on_rank, 4, seed=seed)


def test_work_is_a_handle() -> None:
    def on_rank() -> None:
        x = torch.ones(5)
        work = interlace.all_reduce(x, async_op=True)
        assert "all_reduce" in repr(work) and "rank" in repr(work)
        assert work.wait() is True and work.wait() is True
        assert work.is_completed()
        assert "completed" in repr(work)
        product = interlace.all_gather_matmul(torch.ones(1, 2), torch.ones(2, 1), async_op=True)
        assert isinstance(product, interlace.Work)
        assert torch.equal(product.result(), product.wait())

    interlace.run(on_rank, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("algorithm", ["auto", "copy"])
def test_a_single_element_may_have_any_stride(dtype: torch.dtype, algorithm: str) -> None:
    def on_rank() -> list[Any]:
        one = torch.arange(3).to(dtype)[1::2] + interlace.get_rank()
        outputs = [torch.zeros(3, dtype=dtype)[1::2] for _ in range(2)]
        interlace.all_gather(outputs, one.as_strided((1,), (2,)), algorithm=algorithm)
        return [output.tolist() for output in outputs]

    assert interlace.run(on_rank, 2) == [[[1], [2]]] * 2


@pytest.mark.parametrize("algorithm", ["kernel", "copy"])
def test_in_place_gather(algorithm: str) -> None:
    """``tensor`` may be this rank's part of ``output``, as torch and NCCL have it."""

    def on_rank() -> torch.Tensor:
        rank = interlace.get_rank()
        out = torch.full((3, 20), torch.nan)
        out[rank] = payload(rank, 1, (20,))
        interlace.all_gather(out, out[rank], algorithm=algorithm)
        return out

    with poisoned(), override(**SMALL):
        for result in interlace.run(on_rank, 3):
            assert torch.equal(result, torch.stack([payload(r, 1, (20,)) for r in range(3)]))
