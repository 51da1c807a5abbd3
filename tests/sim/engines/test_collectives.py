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
from ranks import ranks
from support import LAYOUTS, laid_out, noise, payload, poison, poisoned

NON_GROUP_MEMBER = dist.GroupMember.NON_GROUP_MEMBER

MOVED = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip
SUMMED = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64]
SMALL = {"block_elements": 16, "copiers": 2, "chunks": 2}
WORLDS = st.sampled_from([1, 2, 3, 5, 8])


LENGTHS = st.lists(st.integers(0, 40), min_size=8, max_size=8)
ANY = {
    "world": WORLDS,
    "layouts": st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS[:4])),
    "algorithm": st.sampled_from(["auto", "kernel", "copy"]),
    "seed": st.integers(0, 1000),
}


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.dtype == b.dtype and a.shape == b.shape
    return a.flatten().tolist() == b.flatten().tolist()


def possible(algorithm: str, dtype: torch.dtype) -> str:
    kernels_do = dtype in (torch.float32, torch.float16, torch.bfloat16)
    return "copy" if algorithm == "kernel" and not kernels_do else algorithm


def right_sum(result: torch.Tensor, terms: list[torch.Tensor], op: str) -> bool:
    if result.dtype.is_floating_point:
        return reference.worst_ratio(result, *reference.reduce(terms, op)) <= 1
    return torch.equal(result, torch.stack(terms).sum(0).to(result.dtype))


@hypothesis.settings(max_examples=20)
@given(
    **ANY,
    dtype=st.sampled_from(MOVED),
    tail=st.sampled_from([(), (3,), (2, 0), (2, 3)]),
    rows=LENGTHS,
    form=st.sampled_from(["cat", "stack", "list", "uneven"]),
)
def test_all_gather(
    world: int, dtype: torch.dtype, tail: tuple[int, ...], rows: list[int], form: str,
    layouts: tuple[str, str], algorithm: str, seed: int,
) -> None:  # fmt: skip
    rows = rows if form == "uneven" else [rows[0]] * 8

    def part(rank: int) -> torch.Tensor:
        return laid_out(payload(rank, 1, (rows[rank], *tail), dtype), layouts[0])

    def on_rank() -> None:
        shapes = {"cat": (world * rows[0], *tail), "stack": (world, rows[0], *tail)}
        parts = [(rows[rank], *tail) for rank in range(world)]
        outs = [
            laid_out(poison(torch.zeros(shape, dtype=dtype)), layouts[1])
            for shape in ([shapes[form]] if form in shapes else parts)
        ]
        out = outs[0] if form in shapes else outs
        own, how = part(interlace.get_rank()), possible(algorithm, dtype)
        assert interlace.all_gather(out, own, async_op=True, algorithm=how).wait() is True
        right = [part(rank) for rank in range(world)]
        if form in shapes:
            right = [torch.cat(right) if form == "cat" else torch.stack(right)]
        assert all(equal(*pair) for pair in zip(outs, right, strict=True))

    with poisoned(), override(**SMALL):
        interlace.run(on_rank, world, seed=seed)


@hypothesis.settings(max_examples=20)
@given(
    **ANY,
    dtype=st.sampled_from(SUMMED),
    lengths=LENGTHS,
    form=st.sampled_from(["cat", "stack", "uneven"]),
    op=st.sampled_from(["sum", "avg", dist.ReduceOp.SUM, dist.ReduceOp.AVG]),
)
def test_reduce_scatter(
    world: int, dtype: torch.dtype, lengths: list[int], form: str, op: Any,
    layouts: tuple[str, str], algorithm: str, seed: int,
) -> None:  # fmt: skip
    floating = dtype.is_floating_point
    name = "avg" if op in ("avg", dist.ReduceOp.AVG) and floating else "sum"
    lengths = lengths if form == "uneven" else [lengths[0]] * 8
    make = noise if floating else payload

    def part(source: int, rank: int) -> torch.Tensor:
        return laid_out(make(source, 30 + rank, (lengths[rank], 2), dtype), layouts[0])

    def on_rank() -> None:
        rank, how = interlace.get_rank(), possible(algorithm, dtype)
        own = [part(rank, other) for other in range(world)]
        whole = {"cat": torch.cat, "stack": torch.stack}
        input = whole[form](own) if form in whole else own
        out = laid_out(poison(torch.zeros(lengths[rank], 2, dtype=dtype)), layouts[1])
        assert (
            interlace.reduce_scatter(out, input, op if floating else "sum", algorithm=how) is None
        )
        assert right_sum(out, [part(source, rank) for source in range(world)], name)

    with poisoned(), override(**SMALL):
        interlace.run(on_rank, world, seed=seed)


@hypothesis.settings(max_examples=15)
@given(
    **ANY,
    dtype=st.sampled_from(SUMMED),
    shape=st.sampled_from([(), (0,), (1,), (3, 5), (33,), (2, 3, 7)]),
    op=st.sampled_from(["sum", "avg"]),
)
def test_all_reduce(
    world: int, dtype: torch.dtype, shape: tuple[int, ...], op: str, layouts: tuple[str, str],
    algorithm: str, seed: int,
) -> None:  # fmt: skip
    floating = dtype.is_floating_point
    op = op if floating else "sum"
    terms = [(noise if floating else payload)(rank, 2, shape, dtype) for rank in range(world)]

    def on_rank() -> torch.Tensor:
        x = terms[interlace.get_rank()].clone()
        x = laid_out(x, layouts[1]) if shape else x
        interlace.all_reduce(x, op, algorithm=possible(algorithm, dtype))
        assert right_sum(x, terms, op)
        return x

    with poisoned(), override(**SMALL):
        results = interlace.run(on_rank, world, seed=seed)
    assert all(equal(result, results[0]) for result in results), "bits differ between ranks"


def test_groups_at_once() -> None:
    """Overlapping groups, a group of a group, one whose ranks are not in order; outsiders get a mark."""

    def on_rank() -> None:
        rank = interlace.get_rank()
        groups = [interlace.new_group(r) for r in ([0, 1], [3, 2], [3, 0, 2], None, [1])]
        members = [[0, 1], [3, 2], [3, 0, 2], [0, 1, 2, 3], [1]]
        pending = []
        for call in range(3):
            for number, (group, inside) in enumerate(zip(groups, members, strict=True)):
                if rank not in inside:
                    assert group == NON_GROUP_MEMBER
                    with pytest.raises(ValueError, match="not a member"):
                        interlace.barrier(group)
                    continue
                assert interlace.get_rank(group) == inside.index(rank)
                assert interlace.get_world_size(group) == len(inside)
                x = payload(rank, 10 * number + call, (5,))
                out = torch.empty(len(inside), 5)
                works = [interlace.all_gather(out, x, group, True)]
                summed = x.clone()
                works.append(interlace.all_reduce(summed, "sum", group, True))
                expected = torch.stack([payload(r, 10 * number + call, (5,)) for r in inside])
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


@ranks(2, place="sim")
def test_work_is_a_handle() -> None:
    x = torch.ones(5)
    work = interlace.all_reduce(x, async_op=True)
    assert "all_reduce" in repr(work) and "rank" in repr(work)
    assert work.wait() is True and work.wait() is True
    assert work.is_completed()
    assert "completed" in repr(work)
    product = interlace.all_gather_matmul(torch.ones(1, 2), torch.ones(2, 1), async_op=True)
    assert isinstance(product, interlace.Work)
    assert torch.equal(product.result(), product.wait())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("algorithm", ["auto", "copy"])
@ranks(2, place="sim")
def test_a_single_element_may_have_any_stride(dtype: torch.dtype, algorithm: str) -> None:
    one = torch.arange(3).to(dtype)[1::2] + interlace.get_rank()
    outputs = [torch.zeros(3, dtype=dtype)[1::2] for _ in range(2)]
    interlace.all_gather(outputs, one.as_strided((1,), (2,)), algorithm=algorithm)
    assert [output.tolist() for output in outputs] == [[1], [2]]
