"""Calls on a GPU that do not fit together: found without waiting, and named on every rank.

The GPU is the fake one, and its watchdog looks only when a test calls it.
"""

import pytest
import torch

import interlace
from interlace.runtime.core.errors import CollectiveTimeoutError
from interlace.runtime.tuning import tuning as auto
from stand_ins import fake_host
from stand_ins.fake_cuda import FakeGpu
from stand_ins.fake_host import gpu_ranks, look, own_place

pytestmark = pytest.mark.usefixtures("connections")


def reduce(length: int, dtype: torch.dtype = torch.float32) -> None:
    interlace.all_reduce(torch.ones(length, dtype=dtype))


DIFFERS = pytest.raises(ValueError, match="shape of tensor differs between ranks")


@pytest.mark.parametrize("first", [0, 1], ids=["unknown call", "known call"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_mismatch_is_named_though_nobody_waited(first: int, rank: int) -> None:
    def on_rank() -> None:
        reduce(4)
        if first:
            reduce(5)
        torch.cuda.synchronize()
        reduce(4)
        reduce(5 if interlace.get_rank() == rank else 4)
        for _ in range(3):
            reduce(4)

    with DIFFERS as caught:
        fake_host.run(on_rank, 3, FakeGpu(eager=0.0))
    text = str(caught.value)
    assert f"rank {rank}" in text or "on rank 0" in text
    assert "(5,)" in text and "(4,)" in text


@gpu_ranks(2, raises=DIFFERS, eager=0.0)
def test_a_mismatch_is_found_by_the_watchdog_of_a_rank_that_waits() -> None:
    for length in (4, 5, 4):
        reduce(length)
    torch.cuda.synchronize()
    reduce(5 if interlace.get_rank() else 4)
    own_place().processes.exchange(b"", "all have called")
    look()
    own_place().check()


# Small messages would be found to differ before the ranks can meet.
IN_WORKSPACES = (auto, "LARGEST_LOW_LATENCY_BYTES", 0)


@pytest.mark.parametrize("known", [True, False], ids=["", "a plan"])
@gpu_ranks(
    2,
    IN_WORKSPACES,
    raises=pytest.raises(ValueError, match=r"shape of tensor differs.*, True, False\]"),
    eager=0.0,
)
def test_the_work_of_the_very_op_fails(known: bool) -> None:
    """No later call and no watchdog is needed: the work fails after the peer has noted its call."""
    place, rank = own_place(), interlace.get_rank()
    for length in (4, 5, 4, 5, 4, 5) if known else (4, 5):
        reduce(length)
    torch.cuda.synchronize()
    before = interlace.all_reduce(torch.ones(4), async_op=True)
    assert before is not None
    before.wait()
    torch.cuda.synchronize()
    assert before.is_success()
    if rank:
        place.processes.exchange(b"", "rank 0 has called")
    work = interlace.all_reduce(torch.ones(5 if rank else 4), async_op=True)
    assert work is not None
    early = work.exception()
    if rank == 0:
        assert early is None and not work.is_completed()
        place.processes.exchange(b"", "rank 0 has called")
    place.processes.meet(None, "both have called")
    found = [work.exception(), work.is_completed(), work.is_success()]
    for wait in (work.wait, work.synchronize):
        with pytest.raises(ValueError, match="shape of tensor differs"):
            wait()
    assert before.is_success() and before.exception() is None
    place.processes.meet(None, "both have looked")
    raise ValueError(repr(found))


@gpu_ranks(raises=pytest.raises(CollectiveTimeoutError, match="the group failed"), eager=0.0)
def test_works_fail_with_their_group() -> None:
    place = own_place()
    works = [interlace.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
    torch.cuda.synchronize()
    seen, other = works
    assert seen is not None and other is not None
    assert seen.is_completed()
    place.fail(CollectiveTimeoutError("the group failed"))
    assert seen.is_success() and seen.exception() is None
    assert isinstance(other.exception(), CollectiveTimeoutError)
    assert other.is_completed() and not other.is_success()


OTHER_OPS = pytest.raises(ValueError, match="ranks call different ops at the same time")


@gpu_ranks(2, raises=OTHER_OPS, eager=0.0)
def test_another_op_is_named() -> None:
    reduce(4)
    reduce(4)
    if interlace.get_rank():
        interlace.broadcast(torch.ones(4), 0)
    else:
        reduce(4)
    reduce(4)


@gpu_ranks(2, seed=4)
def test_shards_may_change_their_length() -> None:
    """Every call asks for the terms that may differ between ranks."""
    rank = interlace.get_rank()
    for lengths in ((8, 8), (8, 8), (8, 24), (16, 8), (8, 8)):
        x = torch.full((lengths[rank], 8), rank + 1.0)
        out = interlace.all_gather_matmul(x, torch.eye(8), algorithm="fused")
        expected = torch.cat([torch.full((n, 8), r + 1.0) for r, n in enumerate(lengths)])
        torch.cuda.current_stream().synchronize()
        assert torch.equal(out, expected)


@gpu_ranks(2, raises=pytest.raises(TypeError, match="must be a tensor, got str"), eager=0.0)
def test_a_refused_call_is_told_to_those_who_went_on() -> None:
    reduce(4)
    reduce(4)
    if interlace.get_rank():
        interlace.all_reduce("no tensor")  # type: ignore[arg-type]
    else:
        reduce(4)
        reduce(4)
