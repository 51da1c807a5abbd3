"""Plain collectives that are repeated from a plan, on the fake GPU: as right as those that are not."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.places.gpu import plans as gpu_plans
from interlace.runtime.places.gpu.plans import Signalled
from interlace.runtime.places.gpu.stream import DeviceStream
from interlace.runtime.tuning import tuning as auto
from stand_ins import fake_host
from stand_ins.fake_cuda import FakeGpu, end_current_stream
from stand_ins.fake_host import gpu_ranks, own_plans
from stand_ins.replaced import Replacement

LENGTH = 12
CALLS = 9

pytestmark = pytest.mark.usefixtures("connections")


def of_rank(call: int, rank: int, size: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randint(-3, 4, (size,), generator=generator).float()


def all_of(call: int, size: int = LENGTH) -> list[torch.Tensor]:
    return [of_rank(call, rank, size) for rank in range(interlace.get_world_size())]


def done(work: Any) -> None:
    if work is not None:
        assert work.wait() is True


Op = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(call, async_op) -> what came out, and what is right."""


def reduced(call: int, async_op: bool = False, average: bool = False) -> Any:
    x, size = of_rank(call, interlace.get_rank()), interlace.get_world_size()
    op = torch.distributed.ReduceOp.AVG if average else "sum"
    done(interlace.all_reduce(x, op, async_op=async_op))
    return x, torch.stack(all_of(call)).sum(0) / (size if average else 1)


def gathered(call: int, async_op: bool = False, form: str = "") -> Any:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    out, own = torch.full((size * LENGTH,), float("nan")), of_rank(call, rank)
    if form == "in place":
        own = out[rank * LENGTH : (rank + 1) * LENGTH].copy_(own)
    output = list(out.chunk(size)) if form == "in a list" else out
    done(interlace.all_gather(output, own, async_op=async_op))
    return out, torch.cat(all_of(call))


def scattered(call: int, async_op: bool = False) -> Any:
    rank, size = interlace.get_rank(), interlace.get_world_size() * LENGTH
    out = torch.full((LENGTH,), float("nan"))
    done(interlace.reduce_scatter(out, of_rank(call, rank, size), async_op=async_op))
    return out, torch.stack(all_of(call, size)).sum(0)[rank * LENGTH : (rank + 1) * LENGTH]


def broadcast(call: int, async_op: bool = False) -> Any:
    root = interlace.get_world_size() - 1
    x = of_rank(call, interlace.get_rank()).long()
    done(interlace.broadcast(x, root, async_op=async_op))
    return x, of_rank(call, root).long()


gathered_in_place = functools.partial(gathered, form="in place")
OPS: dict[str, Op] = {
    "reduced": reduced,
    "averaged": functools.partial(reduced, average=True),
    "gathered": gathered,
    "gathered in a list": functools.partial(gathered, form="in a list"),
    "gathered in place": gathered_in_place,
    "scattered": scattered,
    "broadcast": broadcast,
}


def small(most: int) -> Replacement:
    """Messages of at most this many bytes use words with flags, others use workspaces."""
    return auto, "LARGEST_LOW_LATENCY_BYTES", most


IN_WORKSPACES = small(0)


def is_right(op: Op, call: int, *, async_op: bool = False) -> None:
    result, right = op(call, async_op)
    end_current_stream()
    assert torch.equal(result, right), (op, call, result, right)


@pytest.mark.parametrize("words", [False, True], ids=["", "words"])
@pytest.mark.parametrize("async_op", [False, True], ids=["", "asynchronous"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_repeated_calls_are_right(op: str, world_size: int, async_op: bool, words: bool) -> None:
    # the first two make the plans of both workspaces; words that carry their flag need none
    planned = CALLS - 1 if words and op != "scattered" else CALLS - 2

    def on_rank() -> None:
        for call in range(CALLS):
            is_right(OPS[op], call, async_op=async_op)
        assert own_plans().hits == planned

    fake_host.run(on_rank, world_size, FakeGpu(3), small(LENGTH * 8 if words else 0))


@gpu_ranks(2, small(32 << 10), seed=3)
def test_words_that_have_grown_are_planned_anew() -> None:
    """A plan with the old words would meet peers that use the new words."""
    hits = []
    for call, length in enumerate((8, 8, 4096, 8, 8, 4096)):
        x = of_rank(call, interlace.get_rank(), length)
        interlace.all_reduce(x)
        end_current_stream()
        assert torch.equal(x, torch.stack(all_of(call, length)).sum(0)), call
        hits.append(own_plans().hits)
    assert hits == [0, 1, 1, 1, 2, 3]


def test_ops_in_turn_and_without_waiting() -> None:
    def on_rank() -> None:
        rank, size = interlace.get_rank(), interlace.get_world_size()
        for call in range(8):
            x, y = of_rank(call, rank), of_rank(call, rank).long()
            out = torch.full((size * LENGTH,), float("nan"))
            largest = of_rank(call, rank)
            works = [
                interlace.all_reduce(x, async_op=True),
                interlace.broadcast(y, 0, async_op=True),
                interlace.all_gather(out, of_rank(call + 50, rank), async_op=True),
            ]
            interlace.all_reduce(largest, "max")
            for work in reversed(works):
                done(work)
            end_current_stream()
            assert torch.equal(x, torch.stack(all_of(call)).sum(0))
            assert torch.equal(y, of_rank(call, 0).long())
            assert torch.equal(out, torch.cat(all_of(call + 50)))
            assert torch.equal(largest, torch.stack(all_of(call)).amax(0))
        assert own_plans().hits > 8

    for seed in range(4):
        fake_host.run(on_rank, 3, FakeGpu(seed, eager=0.1), IN_WORKSPACES)


def in_place_and_apart() -> None:
    """Return calls with equal shapes: in place, not in place, and with other overlaps."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    for call in range(4):
        for op in (gathered_in_place, gathered, gathered_in_place):
            is_right(op, call)
    before = own_plans().hits
    for call in range(4):
        pool = torch.zeros(size * LENGTH)
        pool[2 : 2 + LENGTH] = of_rank(call, rank)  # within the output, and no rank's part
        with pytest.raises(ValueError):
            interlace.all_gather(pool, pool[2 : 2 + LENGTH])
    assert own_plans().hits == before


def test_in_place_is_another_kind_of_call() -> None:
    fake_host.run(in_place_and_apart, 2, FakeGpu(3), IN_WORKSPACES)


def test_a_plan_that_forgets_where_tensors_lie_is_found() -> None:
    forgetful = (gpu_plans, "_where_they_lie", lambda key, *rest: True)
    errors = (AssertionError, interlace.InterlaceError, RuntimeError, pytest.fail.Exception)
    with pytest.raises(errors):
        fake_host.run(in_place_and_apart, 2, FakeGpu(3), IN_WORKSPACES, forgetful)


@gpu_ranks(2, IN_WORKSPACES, seed=3)
def test_lists_that_are_not_one_memory_are_right() -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    for call in range(4):
        for together in (True, False):
            whole = torch.full((size * LENGTH,), float("nan"))
            parts = list(whole.chunk(size))
            if not together:
                parts = [part.clone() for part in reversed(parts)]
            interlace.all_gather(parts, of_rank(call, rank))
            end_current_stream()
            assert torch.equal(torch.cat(parts), torch.cat(all_of(call)))


def test_a_signal_that_is_not_repeated_is_found() -> None:
    def silent(self: Signalled, stream: DeviceStream, workspace: Any) -> None:
        if self.method != "wait":
            getattr(stream, self.method)(workspace, *self.arguments)

    def on_rank() -> None:
        for call in range(CALLS):
            is_right(broadcast, call)

    fault = (Signalled, "again", silent)
    with pytest.raises((AssertionError, interlace.InterlaceError)):
        for seed in range(8):
            fake_host.run(on_rank, 3, FakeGpu(seed, eager=0.05), IN_WORKSPACES, fault)


@gpu_ranks(2, IN_WORKSPACES, seed=3)
def test_a_call_that_failed_leaves_no_plan_to_another() -> None:
    for call in range(4):
        with pytest.raises(ValueError):
            interlace.all_reduce(torch.zeros(LENGTH), "no such op")
        interlace.barrier()
        is_right(reduced, call)
    assert not any("no such op" in kind[2] for kind in own_plans()._plans)


@gpu_ranks(2, IN_WORKSPACES, seed=3)
def test_hooks_see_calls_that_are_planned() -> None:
    """A plan runs before the hooks look at its results."""
    rank, group, sums = interlace.get_rank(), default_group(), []
    behind = own_plans()

    def after(call: interlace.HookedOp) -> None:
        end_current_stream()
        sums.append(call.outputs["tensor"].clone())

    with group.register_hook(after=after):
        for call in range(CALLS):
            work = interlace.all_reduce(of_rank(call, rank), async_op=bool(call % 2))
            if work is not None:
                work.wait()
    right = [torch.stack(all_of(call)).sum(0) for call in range(CALLS)]
    assert all(torch.equal(*pair) for pair in zip(sums, right, strict=True))
    interlace.barrier()
    assert group.plans is behind and behind.hits == CALLS - 2
