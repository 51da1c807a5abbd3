"""Plain collectives that are repeated from a plan, on the fake GPU: as right as those that are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.places.gpu import plans as cuda_plans
from interlace.runtime.places.gpu.plans import Plans, Signalled
from interlace.runtime.places.gpu.stream import DeviceStream
from interlace.runtime.tuning import auto
from stand_ins import fake_host
from stand_ins.fake_cuda import FakeGpu
from stand_ins.fake_driver import install

LENGTH = 12
CALLS = 9

pytestmark = pytest.mark.usefixtures("connections")


def plans() -> Plans:
    found = default_group().plans
    assert isinstance(found, Plans)
    return found


def of_rank(call: int, rank: int, size: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randint(-3, 4, (size,), generator=generator).float()


def all_of(call: int, size: int = LENGTH) -> list[torch.Tensor]:
    return [of_rank(call, rank, size) for rank in range(interlace.get_world_size())]


def done(work: Any) -> None:
    if work is not None:
        assert work.wait() is True


Op = Callable[[int, int, bool], tuple[torch.Tensor, torch.Tensor]]
"""(call, rank, async_op) -> what came out, and what is right."""


def reduced(call: int, rank: int, async_op: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = of_rank(call, rank)
    done(interlace.all_reduce(x, async_op=async_op))
    return x, torch.stack(all_of(call)).sum(0)


def averaged(call: int, rank: int, async_op: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = of_rank(call, rank)
    done(interlace.all_reduce(x, torch.distributed.ReduceOp.AVG, async_op=async_op))
    return x, torch.stack(all_of(call)).sum(0) / interlace.get_world_size()


def gathered(call: int, rank: int, async_op: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((interlace.get_world_size() * LENGTH,), float("nan"))
    done(interlace.all_gather(out, of_rank(call, rank), async_op=async_op))
    return out, torch.cat(all_of(call))


def gathered_in_a_list(call: int, rank: int, async_op: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((interlace.get_world_size() * LENGTH,), float("nan"))
    parts = list(out.chunk(interlace.get_world_size()))
    done(interlace.all_gather(parts, of_rank(call, rank), async_op=async_op))
    return out, torch.cat(all_of(call))


def gathered_in_place(call: int, rank: int, async_op: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((interlace.get_world_size() * LENGTH,), float("nan"))
    own = out[rank * LENGTH : (rank + 1) * LENGTH]
    own.copy_(of_rank(call, rank))
    done(interlace.all_gather(out, own, async_op=async_op))
    return out, torch.cat(all_of(call))


def scattered(call: int, rank: int, async_op: bool) -> tuple[torch.Tensor, torch.Tensor]:
    size = interlace.get_world_size() * LENGTH
    out = torch.full((LENGTH,), float("nan"))
    done(interlace.reduce_scatter(out, of_rank(call, rank, size), async_op=async_op))
    return out, torch.stack(all_of(call, size)).sum(0)[rank * LENGTH : (rank + 1) * LENGTH]


def broadcast(call: int, rank: int, async_op: bool) -> tuple[torch.Tensor, torch.Tensor]:
    root = interlace.get_world_size() - 1
    x = of_rank(call, rank).long()
    done(interlace.broadcast(x, root, async_op=async_op))
    return x, of_rank(call, root).long()


OPS: list[Op] = [
    reduced, averaged, gathered, gathered_in_a_list, gathered_in_place, scattered, broadcast,
]  # fmt: skip


@pytest.fixture(autouse=True)
def channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small messages, too, through workspaces."""
    monkeypatch.setattr(auto, "LARGEST_LOW_LATENCY_BYTES", 0)


@pytest.mark.parametrize("words", [False, True], ids=["", "words"])
@pytest.mark.parametrize("async_op", [False, True], ids=["", "asynchronous"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("world_size", [2, 3])
def test_repeated_calls_are_right(
    op: Op, world_size: int, async_op: bool, words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = install(monkeypatch, FakeGpu(3))
    monkeypatch.setattr(auto, "LARGEST_LOW_LATENCY_BYTES", LENGTH * 8 if words else 0)

    def on_rank() -> int:
        for call in range(CALLS):
            result, right = op(call, interlace.get_rank(), async_op)
            gpu.synchronize(gpu.current)
            assert torch.equal(result, right), (call, result, right)
        return plans().hits

    # the first two make the plans of both workspaces; words that carry their flag need none
    planned = CALLS - 1 if words and op is not scattered else CALLS - 2
    assert fake_host.run(on_rank, world_size) == [planned] * world_size


def test_words_that_have_grown_are_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan through words that were outgrown would meet peers that are through the new ones."""
    gpu = install(monkeypatch, FakeGpu(3))
    monkeypatch.setattr(auto, "LARGEST_LOW_LATENCY_BYTES", 32 << 10)

    def on_rank() -> list[int]:
        rank, size, hits = interlace.get_rank(), interlace.get_world_size(), []
        for call, length in enumerate((8, 8, 4096, 8, 8, 4096)):
            x = of_rank(call, rank, length)
            interlace.all_reduce(x)
            gpu.synchronize(gpu.current)
            assert torch.equal(x, torch.stack(all_of(call, length)).sum(0)), (call, size)
            hits.append(plans().hits)
        return hits

    assert fake_host.run(on_rank, 2) == [[0, 1, 1, 1, 2, 3]] * 2


def test_ops_in_turn_and_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned and not planned, pulled and pushed, with works that are waited for late."""
    for seed in range(4):
        gpu = install(monkeypatch, FakeGpu(seed, eager=0.1))

        def on_rank(gpu: FakeGpu = gpu) -> int:
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
                gpu.synchronize(gpu.current)
                assert torch.equal(x, torch.stack(all_of(call)).sum(0))
                assert torch.equal(y, of_rank(call, 0).long())
                assert torch.equal(out, torch.cat(all_of(call + 50)))
                assert torch.equal(largest, torch.stack(all_of(call)).amax(0))
            return plans().hits

        assert min(fake_host.run(on_rank, 3)) > 8


def in_place_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same shapes, first in place and then not, and where input and output overlap otherwise."""
    gpu = install(monkeypatch, FakeGpu(3))

    def on_rank() -> None:
        rank, size = interlace.get_rank(), interlace.get_world_size()
        for call in range(4):
            for op in (gathered_in_place, gathered, gathered_in_place):
                result, right = op(call, rank, False)
                gpu.synchronize(gpu.current)
                assert torch.equal(result, right), (call, op)
        before = plans().hits
        for call in range(4):
            pool = torch.zeros(size * LENGTH)
            pool[2 : 2 + LENGTH] = of_rank(call, rank)  # within the output, and no rank's part
            with pytest.raises(ValueError):
                interlace.all_gather(pool, pool[2 : 2 + LENGTH])
        assert plans().hits == before

    fake_host.run(on_rank, 2)


def test_in_place_is_another_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    in_place_and_apart(monkeypatch)


def test_a_plan_that_forgets_where_tensors_lie_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_plans, "_where_they_lie", lambda key, *rest: True)
    with pytest.raises(
        (AssertionError, interlace.InterlaceError, RuntimeError, pytest.fail.Exception)
    ):
        in_place_and_apart(monkeypatch)


def test_lists_that_are_not_one_memory_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch, FakeGpu(3))

    def on_rank() -> int:
        rank, size = interlace.get_rank(), interlace.get_world_size()
        for call in range(4):
            for together in (True, False):
                whole = torch.full((size * LENGTH,), float("nan"))
                parts = list(whole.chunk(size))
                if not together:
                    parts = [part.clone() for part in reversed(parts)]
                interlace.all_gather(parts, of_rank(call, rank))
                gpu.synchronize(gpu.current)
                assert torch.equal(torch.cat(parts), torch.cat(all_of(call)))
        return plans().hits

    assert min(fake_host.run(on_rank, 2)) >= 0


def test_plain_plans_are_captured_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch, FakeGpu(3))

    def on_rank() -> int:
        rank, size = interlace.get_rank(), interlace.get_world_size()
        x, y = torch.zeros(LENGTH), torch.zeros(LENGTH, dtype=torch.int64)
        out = torch.zeros(size * LENGTH)

        def calls() -> None:
            interlace.all_gather(out, x)
            interlace.broadcast(y, 0)

        for _ in range(4):
            calls()
        torch.cuda.synchronize()
        before = plans().hits
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        calls()
        graph.capture_end()
        captured = plans().hits - before
        for call in range(12):
            gpu.do(lambda call=call: x.copy_(of_rank(call, rank)))
            gpu.do(lambda call=call: y.copy_(of_rank(call, rank).long()))
            if call % 3:
                graph.replay()
            else:
                calls()
            gpu.synchronize(gpu.current)
            assert torch.equal(out, torch.cat(all_of(call)))
            assert torch.equal(y, of_rank(call, 0).long())
        return captured

    assert fake_host.run(on_rank, 2) == [2, 2]


def test_a_signal_that_is_not_repeated_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(self: Signalled, stream: DeviceStream, workspace: Any) -> None:
        if self.method != "wait":
            getattr(stream, self.method)(workspace, *self.arguments)

    monkeypatch.setattr(Signalled, "again", silent)
    with pytest.raises((AssertionError, interlace.InterlaceError)):
        for seed in range(8):
            install(monkeypatch, FakeGpu(seed, eager=0.05))

            def on_rank() -> None:
                for call in range(CALLS):
                    result, right = broadcast(call, interlace.get_rank(), False)
                    torch.cuda.current_stream().synchronize()
                    assert torch.equal(result, right)

            fake_host.run(on_rank, 3)


def test_a_call_that_failed_leaves_no_plan_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch, FakeGpu(3))

    def on_rank() -> None:
        rank = interlace.get_rank()
        for call in range(4):
            with pytest.raises(ValueError):
                interlace.all_reduce(torch.zeros(LENGTH), "no such op")
            interlace.barrier()
            result, right = reduced(call, rank, False)
            gpu.synchronize(gpu.current)
            assert torch.equal(result, right)
        assert not any("no such op" in kind[2] for kind in plans()._plans)

    fake_host.run(on_rank, 2)


def test_hooks_see_calls_that_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans go on behind the hooks, which look at results that are there."""
    gpu = install(monkeypatch, FakeGpu(3))

    def on_rank() -> tuple[int, int]:
        rank, group, sums = interlace.get_rank(), default_group(), []
        behind = plans()

        def after(call: interlace.HookedOp) -> None:
            gpu.synchronize(gpu.current)
            sums.append(call.outputs["tensor"].clone())

        with group.register_hook(after=after):
            for call in range(CALLS):
                work = interlace.all_reduce(of_rank(call, rank), async_op=bool(call % 2))
                if work is not None:
                    work.wait()
        right = [torch.stack(all_of(call)).sum(0) for call in range(CALLS)]
        assert all(torch.equal(*pair) for pair in zip(sums, right, strict=True))
        interlace.barrier()
        assert group.plans is behind
        return behind.hits, len(sums)

    assert fake_host.run(on_rank, 2) == [(CALLS - 2, CALLS)] * 2
