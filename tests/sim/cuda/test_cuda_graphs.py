"""Ops in captured graphs, on the fake GPU: replayed a hundred times with other inputs, between eager ones.

The controls sow what would break it: an epoch that the host bakes in, an event from outside the capture,
memory or a kernel that is made during it.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from cases.device_ranks import (
    all_to_all,
    asynchronous_gather,
    fused_gather,
    fused_scatter,
    pipelined_gather,
    pipelined_scatter,
    reduced_product,
    unfused_gather,
)
from interlace.groups.groups import default_group
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.core.memory import MOST_PASSING_TABLES
from interlace.runtime.places.gpu.device_place import DevicePlace
from interlace.runtime.places.gpu.plans import Plans
from interlace.runtime.places.gpu.stream import DeviceStream
from stand_ins import fake_host
from stand_ins.fake_cuda import CudaError, DeviceHang, FakeGpu, capturing, gpu as fake_gpu
from stand_ins.fake_host import gpu_ranks, run_virtual

REPLAYS = 100
ROWS, INNER = 24, 8

ANY_NUMBER_OF_QUEUES = pytest.mark.usefixtures("connections")


def in_place(name: str, *rest: Any, **options: Any) -> Callable[..., torch.Tensor]:
    """Run a plain collective on a copy of ``x``; few bytes use words with flags by default."""

    def op(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        fake_gpu().do(lambda: out.copy_(x))
        work = getattr(interlace, name)(out, *rest, **options)
        if work is not None:
            work.wait()
        return out

    op.__name__ = "_".join([name, options.get("algorithm", "low_latency")])
    return op


def gathering(**options: Any) -> Callable[..., torch.Tensor]:
    def op(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(interlace.get_world_size() * ROWS, INNER)
        interlace.all_gather(out, x, **options)
        return out

    op.__name__ = "_".join(["all_gather", options.get("algorithm", "low_latency")])
    return op


all_reduce_copy = in_place("all_reduce", algorithm="copy", async_op=True)


def exchange_grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    splits = [ROWS // 2] * interlace.get_world_size()
    splits[-1] = ROWS - sum(splits[:-1])
    each = weight.unsqueeze(0)
    return interlace.all_to_all_grouped_matmul(x, each, splits, algorithm="fused")[0]


def gather_grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    each = weight.unsqueeze(0)
    return interlace.all_gather_grouped_matmul(x, each, [ROWS], algorithm="pipelined")[0]


# the whole output, if every rank's input is filled with its value
OPS: dict[Any, Callable[[list[float], int], list[float]]] = {
    fused_gather: lambda values, rank: values,
    pipelined_gather: lambda values, rank: values,
    asynchronous_gather: lambda values, rank: values,
    unfused_gather: lambda values, rank: values,
    fused_scatter: lambda values, rank: [sum(values)],
    pipelined_scatter: lambda values, rank: [sum(values)],
    reduced_product: lambda values, rank: [sum(values)],
    in_place("all_reduce", algorithm="kernel"): lambda values, rank: [sum(values)],
    all_reduce_copy: lambda values, rank: [sum(values)],
    gathering(algorithm="kernel"): lambda values, rank: values,
    all_to_all: lambda values, rank: values,
    in_place("broadcast", 1, algorithm="copy"): lambda values, rank: [values[1]],
    exchange_grouped: lambda values, rank: values,
    gather_grouped: lambda values, rank: values,
    in_place("all_reduce"): lambda values, rank: [sum(values)],
    gathering(): lambda values, rank: values,
    in_place("broadcast", 1, async_op=True): lambda values, rank: [values[1]],
}


NOT_PLANNED = (
    pipelined_gather, unfused_gather, pipelined_scatter, all_reduce_copy, all_to_all,
    exchange_grouped, gather_grouped,
)  # fmt: skip


def right(output: torch.Tensor, expected: list[float]) -> bool:
    return all(
        bool((part == value).all())
        for part, value in zip(output.chunk(len(expected)), expected, strict=True)
    )


def replaying(gpu: FakeGpu, op: Any, replays: int) -> Callable[[], bool]:
    """Replay a graph of ``op`` with other inputs and eager calls between; return whether all was right.

    The graph is captured from the op's plan, if it has one.
    """

    def on_rank() -> bool:
        rank, world_size = interlace.get_rank(), interlace.get_world_size()
        x, weight, read = torch.zeros(ROWS, INNER), torch.eye(INNER), None

        def values(number: int) -> list[float]:
            return [float(4 * number + r) for r in range(world_size)]

        def checked(number: int, call: Callable[[], torch.Tensor]) -> bool:
            nonlocal read
            value = values(number)[rank]
            gpu.do(lambda: x.fill_(value))
            output = call()
            read = torch.full_like(output, torch.nan)
            copy = read
            gpu.do(lambda: copy.copy_(output))
            # virtual ranks share a host: all must have replayed before one blocks
            default_group().place.exchange(b"", "a replay")
            torch.cuda.current_stream().synchronize()
            return right(copy, OPS[op](values(number), rank))

        good = all(checked(number, lambda: op(x, weight)) for number in range(2))
        torch.cuda.synchronize()
        plans = default_group().plans
        before = plans.hits if isinstance(plans, Plans) else 0
        with capturing() as graph:
            output = op(x, weight)
        if isinstance(plans, Plans):  # virtual ranks have none
            good &= plans.hits == before + (op not in NOT_PLANNED)

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        for number in range(replays):
            good &= checked(100 + number, replay)
            if number % 10 == 3:
                good &= checked(number, lambda: op(x, weight))
        return good

    return on_rank


@ANY_NUMBER_OF_QUEUES
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_replays_with_other_inputs(op: Any) -> None:
    gpu = FakeGpu(5)
    assert all(fake_host.run(replaying(gpu, op, REPLAYS), 2, gpu))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_replays_of_virtual_ranks(op: Any) -> None:
    gpu = FakeGpu(5)
    assert all(run_virtual(replaying(gpu, op, REPLAYS), 2, gpu))


def test_virtual_ranks_replay_in_queues_of_their_own() -> None:
    """A graph goes to the GPU as a whole: docs/how-to/gpu/first-run.md has this limit."""
    gpu = FakeGpu(5, connections=1)
    with pytest.raises(DeviceHang):
        run_virtual(replaying(gpu, fused_gather, 1), 2, gpu)


@ANY_NUMBER_OF_QUEUES
@gpu_ranks(3, seed=2)
def test_two_graphs_in_turn() -> None:
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    x, weight = torch.ones(ROWS, INNER), torch.eye(INNER)
    graphs, outputs, ops = [], [], (fused_gather, all_reduce_copy, fused_scatter)
    for op in ops:
        op(x, weight)
    for op in ops:
        torch.cuda.synchronize()
        with capturing() as graph:
            outputs.append([op(x, weight), op(x, weight), op(x, weight)])
        graphs.append(graph)
    for number in range(30):
        value = float(number + rank)
        fake_gpu().do(lambda value=value: x.fill_(value))
        which = number % 3
        graphs[which].replay()
        torch.cuda.synchronize()
        values = [float(number + r) for r in range(world_size)]
        assert all(right(out, OPS[ops[which]](values, rank)) for out in outputs[which])


def _baked(self: DevicePlace, workspace: Any) -> Any:
    """The mutant: the host's count of ops is a constant of a captured graph."""
    finished = self._epochs[workspace.buffer.addresses[self.rank]]
    return self._stream_words(), finished + 1


def test_an_epoch_of_the_host_in_a_graph_is_found() -> None:
    gpu, fault = FakeGpu(5), (DevicePlace, "words_for", _baked)
    with contextlib.suppress(DeviceHang):
        assert not all(fake_host.run(replaying(gpu, all_to_all, 10), 2, gpu, fault))


def _waits_for_everything(self: DeviceStream, point: Any) -> None:
    """The control of isolation: a capture waits for points outside of it."""
    self._waiting[(point.target[0], self.target()[1])] = point


def test_an_event_from_outside_the_capture_is_found() -> None:
    def on_rank() -> None:
        x, weight = torch.ones(ROWS, INNER), torch.eye(INNER)
        all_reduce_copy(x, weight)
        all_reduce_copy(x, weight)
        torch.cuda.synchronize()
        with capturing():
            all_to_all(x, weight)

    fake_host.run(on_rank, 2, FakeGpu(5))
    with pytest.raises(CudaError, match="uncaptured work"):
        fake_host.run(on_rank, 2, FakeGpu(5), (DeviceStream, "follow", _waits_for_everything))


@pytest.mark.parametrize(
    ("warm_up", "message"),
    [
        ((), r"cannot be made during a graph capture; call it once with tensors like these"),
        ((ROWS, INNER), ""),
        ((16 * ROWS, INNER), "is not loaded for these arguments|cannot be made during a graph"),
    ],
    ids=["nothing", "the same", "something smaller"],
)
def test_what_was_never_called_cannot_be_captured(warm_up: tuple[int, ...], message: str) -> None:
    def on_rank() -> None:
        weight = torch.eye(INNER)
        if warm_up:
            fused_gather(torch.ones(ROWS, INNER), weight)
        rows = warm_up[0] if warm_up else ROWS
        torch.cuda.synchronize()
        with capturing():
            fused_gather(torch.ones(rows, INNER), weight)

    with pytest.raises(InterlaceError, match=message) if message else contextlib.nullcontext():
        fake_host.run(on_rank, 2, FakeGpu(5))


@gpu_ranks()
def test_tables_of_a_graph_outlive_those_that_pass() -> None:
    group = default_group()
    captured = group.table("captured", lambda: [[1, 2]], passing=True)
    with capturing():
        group.table("captured", lambda: [[1, 2]], passing=True)
    group.table("only seen", lambda: [[1, 2]], passing=True)
    for number in range(2 * MOST_PASSING_TABLES):
        group.table(number, lambda number=number: [[number]], passing=True)
    assert group.table("captured", lambda: [[0]], passing=True) is captured
    assert group.table("only seen", lambda: [[0]], passing=True).tolist() == [0]


MAKE_IT_BEFORE = pytest.raises(
    InterlaceError, match="once with tensors like these before the capture"
)


@gpu_ranks(raises=MAKE_IT_BEFORE)
def test_a_table_is_not_made_during_a_capture() -> None:
    with capturing():
        default_group().table(("never", "seen"), lambda: [[1, 2]])


@gpu_ranks(2, raises=pytest.raises(CudaError, match="unjoined work"), seed=5)
def test_an_asynchronous_op_that_is_not_waited_for_ends_the_capture() -> None:
    """CUDA does not end a capture while a stream has not joined; torch's ops behave the same way."""
    x, weight = torch.ones(ROWS, INNER), torch.eye(INNER)
    asynchronous_gather(x, weight)
    torch.cuda.synchronize()
    with capturing():
        interlace.all_gather_matmul(x, weight, algorithm="fused", async_op=True)
