"""all_reduce of whatever is drawn, groups at once, works, and single elements of any stride."""

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

import interlace
from interlace import reference
from interlace.runtime.tuning.configuration import override
from ranks import ranks
from support import LAYOUTS, laid_out, noise, payload, poisoned

NON_GROUP_MEMBER = dist.GroupMember.NON_GROUP_MEMBER

SUMMED = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64]
SMALL = {"block_elements": 16, "copiers": 2, "chunks": 2}


@hypothesis.settings(max_examples=15)
@given(
    world=st.sampled_from([1, 2, 3, 5, 8]),
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
    terms = [(noise if floating else payload)(rank, 2, shape, dtype) for rank in range(world)]

    def on_rank() -> torch.Tensor:
        x = terms[interlace.get_rank()].clone()
        x = laid_out(x, layout) if shape else x
        interlace.all_reduce(x, op, algorithm=algorithm)
        if floating:
            assert reference.worst_ratio(x, *reference.reduce(terms, op)) <= 1
        else:
            assert torch.equal(x, torch.stack(terms).sum(0).to(dtype))
        return x

    with poisoned(), override(**SMALL):
        first, *others = interlace.run(on_rank, world, seed=seed)
    assert all(torch.equal(first, each) for each in others), "bits differ between ranks"


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
