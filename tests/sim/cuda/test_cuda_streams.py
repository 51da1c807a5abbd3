"""Streams, events and memory of a rank on a GPU, on the fake one: right in every order it may choose.

Every test that would pass by luck has a fault sown into the host's logic, which some order must show.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import interlace
from interlace.groups.groups import default_group
from interlace.kernels.matmul import matmul_reduce_scatter, matmul_reduce_scatter_roles
from interlace.runtime.core.memory import Layout
from interlace.runtime.places.gpu import stream
from interlace.runtime.places.gpu.device_place import DevicePlace
from interlace.runtime.places.gpu.stream import DeviceEvent, DeviceStream, Point
from interlace.runtime.places.gpu.virtual_place import VirtualRankPlace
from stand_ins import fake_host
from stand_ins.fake_cuda import (
    CudaError,
    DeviceHang,
    FakeGpu,
    UseAfterFree,
    capturing,
    gpu as fake_gpu,
)
from stand_ins.fake_host import gpu_ranks, run_virtual
from stand_ins.replaced import Replacement
from tiers import few

SEEDS = range(12)
RUNS = pytest.mark.parametrize("run", [run_virtual, fake_host.run], ids=["virtual", "processes"])


def seeded(seed: int) -> FakeGpu:
    return FakeGpu(seed, eager=0.5 if seed % 2 else 0.05)


def filled(gpu: FakeGpu, value: float, *shape: int) -> torch.Tensor:
    """Return a tensor that gets its value on the current stream later."""
    tensor = torch.full(shape, torch.nan)
    gpu.do(lambda: tensor.fill_(value))
    return tensor


def read(gpu: FakeGpu, tensor: torch.Tensor) -> torch.Tensor:
    """Return the value of ``tensor`` at this point of the current stream."""
    copy = torch.empty_like(tensor)
    gpu.do(lambda: copy.copy_(tensor))
    return copy


def exercise(gpu: FakeGpu, rounds: int = 3) -> Callable[[], bool]:
    """Run ops of every kind on two streams of the caller; return whether all was right."""

    def on_rank() -> bool:
        rank, world_size = interlace.get_rank(), interlace.get_world_size()
        other = torch.cuda.Stream()
        seen: list[tuple[torch.Tensor, float]] = []
        total = sum(range(1, world_size + 1))
        for number in range(rounds):
            scale = float(10 * number)
            x = filled(gpu, scale + rank + 1, 64, 16)
            summed = scale * world_size + total
            weight = torch.eye(16)
            works = [
                interlace.all_gather_matmul(x, weight, algorithm=algorithm, async_op=True)
                for algorithm in ("fused", "pipelined")
            ]
            out = interlace.all_gather_matmul(x, weight, algorithm="fused")
            seen += [(read(gpu, out[64 * r]), scale + r + 1) for r in range(world_size)]
            reduced = filled(gpu, scale + rank + 1, 40)
            interlace.all_reduce(reduced)
            seen.append((read(gpu, reduced), summed))
            with torch.cuda.stream(other):
                y = filled(gpu, scale + rank + 1, 40)
                interlace.all_reduce(y, algorithm="copy")
                seen.append((read(gpu, y), summed))
                work = interlace.all_reduce(z := filled(gpu, scale + rank + 1, 8), async_op=True)
            for done in works:
                out = done.wait()
                seen += [(read(gpu, out[64 * r]), scale + r + 1) for r in range(world_size)]
            work.wait()
            seen.append((read(gpu, z), summed))
            rs = interlace.matmul_reduce_scatter(
                filled(gpu, scale + rank + 1, 64, 16), weight, algorithm="fused", async_op=True
            )
            seen.append((read(gpu, rs.wait()), summed))
        torch.cuda.synchronize()
        return all(bool((tensor == value).all()) for tensor, value in seen)

    return on_rank


def holds(seed: int, *faults: Replacement) -> bool:
    gpu = seeded(seed)
    try:
        return all(fake_host.run(exercise(gpu), 3, gpu, *faults))
    except (CudaError, DeviceHang, UseAfterFree):
        return False


def grouped(gpu: FakeGpu) -> Callable[[], bool]:
    """Run grouped matmuls with other splits in every round, with gathered rows, asynchronous and not."""

    def on_rank() -> bool:
        rank, world_size = interlace.get_rank(), interlace.get_world_size()
        seen: list[tuple[torch.Tensor, float]] = []
        for number in range(3):
            scale = float(10 * number)
            x = filled(gpu, scale + rank + 1, 40, 16)
            first = 3 + 7 * number
            splits = [first, 40 - first, *[0] * (world_size - 2)]
            weight = torch.eye(16).unsqueeze(0)
            works = [
                interlace.all_to_all_grouped_matmul(
                    x, weight, splits, algorithm=algorithm, async_op=True, return_received=True
                )
                for algorithm in ("fused", "pipelined")
            ]
            all_rows, _ = interlace.all_gather_grouped_matmul(x, weight, [40], algorithm="fused")
            seen += [(read(gpu, all_rows[40 * r]), scale + r + 1) for r in range(world_size)]
            for work in works:
                received, output, counts = work.wait()
                for source, rows in enumerate(output.split(counts[0].tolist())):
                    seen.append((read(gpu, rows), scale + source + 1))
                seen.append((read(gpu, received[:1]), scale + 1))
        torch.cuda.synchronize()
        return all(bool((tensor == value).all()) for tensor, value in seen)

    return on_rank


@RUNS
@pytest.mark.parametrize("ops", [exercise, grouped])
@pytest.mark.parametrize("seed", SEEDS)
def test_results_are_right_whatever_runs_first(run: Any, seed: int, ops: Any) -> None:
    gpu = seeded(seed)
    assert all(run(ops(gpu), 3, gpu))
    if ops is grouped:
        assert gpu.launches.count("grouped_matmul_kernel") == 18
    if run is fake_host.run:
        assert gpu.words_written


@RUNS
@pytest.mark.parametrize("world_size", few([2, 4, 7, 8], 4))
@pytest.mark.parametrize("connections", [1, 8, 32])
def test_streams_that_share_hardware_queues(run: Any, world_size: int, connections: int) -> None:
    gpu = FakeGpu(world_size, connections=connections)
    assert all(run(exercise(gpu), world_size, gpu))
    assert all(run(grouped(gpu), world_size, gpu))


def in_two_kernels(gpu: FakeGpu) -> Callable[[], bool]:
    """Run products and sums in two kernels."""

    def on_rank() -> bool:
        rank, world_size = interlace.get_rank(), interlace.get_world_size()
        x, weight = torch.full((42, 64), rank + 1.0), torch.eye(64, dtype=torch.bfloat16)
        with interlace.configured(warp_roles=True):
            inputs = [x.bfloat16() + number for number in range(4)]
            how = {"algorithm": "fused", "async_op": True}
            works = [interlace.matmul_reduce_scatter(each, weight, **how) for each in inputs]
            seen = [read(gpu, work.wait()) for work in works]
        torch.cuda.synchronize()
        total = sum(range(1, world_size + 1))
        return all(bool((y == total + call * world_size).all()) for call, y in enumerate(seen))

    return on_rank


@RUNS
@pytest.mark.parametrize("connections", [1, 8, 32])
def test_products_and_sums_in_two_kernels(run: Any, connections: int) -> None:
    gpu = FakeGpu(connections, connections=connections)
    assert all(run(in_two_kernels(gpu), 4, gpu))
    products = matmul_reduce_scatter_roles.matmul_reduce_scatter_roles_kernel
    for kernel in (products, matmul_reduce_scatter.sum_tiles_kernel):
        assert gpu.launches.count(kernel.__name__) == 16


@contextlib.contextmanager
def _rank_by_rank(self: VirtualRankPlace) -> Iterator[None]:
    """The mutant: all items of one rank come before the next rank's first."""
    with DevicePlace.launching(self):
        self._deferred = []
        try:
            yield
            items = self._deferred
        finally:
            self._deferred = None
        self._meet(None, "the launch of an op")
        for item in items:
            item()
        self._meet(None, "the launch of an op")


@pytest.mark.parametrize(
    ("ops", "connections", "world_size"),
    [
        (exercise, 1, 2),
        (exercise, 8, 4),
        (exercise, 32, 4),
        (in_two_kernels, 1, 4),
        (in_two_kernels, 8, 4),
    ],
)
def test_ranks_that_do_not_launch_in_step_would_hang(
    ops: Any, connections: int, world_size: int
) -> None:
    gpu = FakeGpu(0, connections=connections)
    with pytest.raises(DeviceHang):
        run_virtual(ops(gpu), world_size, gpu, (VirtualRankPlace, "launching", _rank_by_rank))


def test_without_stream_memory_operations() -> None:
    gpu = FakeGpu(1, stream_words=False)
    assert all(fake_host.run(exercise(gpu), 2, gpu))
    assert not gpu.words_written


def _no_move(self: DeviceStream, point: Any) -> None:
    """The mutant: an op does not wait for the op before it on another CUDA stream."""


def _late_start(self: DevicePlace, target: Any) -> None:
    """The mutant: the start of an op is recorded at the copy stream's first use."""


def _do_not_hold(self: DevicePlace, event: Any, waiting_for: str) -> None:
    """The mutant: after ``Work.wait()`` the caller's stream does not wait."""


def _nothing_waited(self: DeviceStream, event: Any) -> None:
    """The mutant: a stream does not wait for events."""


def _kept_nowhere(self: DevicePlace, *used: Any) -> None:
    """The mutant: no object holds the memory of an asynchronous op."""


FAULTS = [
    (DeviceStream, "follow", _no_move),
    (DevicePlace, "hold_current", _do_not_hold),
    (DeviceStream, "wait_event", _nothing_waited),
]  # that nobody keeps memory: test_what_the_host_dropped_is_not_used_later


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[2].__name__)
def test_a_fault_in_the_order_is_found(fault: Replacement) -> None:
    assert not all(holds(seed, fault) for seed in SEEDS)


def _last_word(self: DeviceStream, point: Any) -> None:
    """The mutant: of two points in one stream the last mentioned one is awaited, not the later one."""
    self._waiting[point.target] = point


@pytest.mark.parametrize("faults", [[], [(DeviceStream, "follow", _last_word)]], ids=["", "fault"])
def test_of_two_points_in_a_stream_the_later_one_counts(faults: list[Replacement]) -> None:
    def ops() -> bool:
        gpu, place = fake_gpu(), default_group().place
        copying, x, y = place.new_stream("copy"), torch.zeros(8), torch.zeros(8)
        early, late = DeviceEvent(), DeviceEvent()
        for event, value in ((early, 0.5), (late, 1.0)):
            gpu.do(lambda value=value: x.fill_(value))
            event.points = [Point((gpu.current, 0))]
            event.points[0].record()
        copying.wait_event(late)
        copying.wait_event(early)
        copying.copy(y, x, "copy")
        torch.cuda.synchronize()
        return bool((y == 1).all())

    right = [fake_host.run(ops, 1, FakeGpu(seed, eager=0.0), *faults)[0] for seed in SEEDS]
    assert all(right) == (not faults)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_eager_ops_is_kept_across_a_capture(seed: int) -> None:
    def ops() -> None:
        group, x, y = default_group(), torch.zeros(8), torch.zeros(8)
        with torch.cuda.stream(torch.cuda.Stream()):
            group.compute.copy(x, torch.ones(8), "before")
        with torch.cuda.stream(torch.cuda.Stream()), capturing():
            group.compute.copy(torch.zeros(8), torch.ones(8), "captured")
        group.compute.copy(y, x, "after")
        torch.cuda.synchronize()
        assert bool((y == 1).all())

    fake_host.run(ops, 1, FakeGpu(seed, eager=0.0))


def test_a_start_that_is_recorded_late_would_hang() -> None:
    """The copy stream would wait for a kernel that waits for the copy streams of peers."""

    def ops() -> None:
        group, layout = default_group(), Layout()
        slot = layout.add_slots(1)

        def body(workspace: Any) -> None:
            group.compute.wait(workspace, 1 - group.rank, slot)  # before its producer: still right
            group.copying.publish(workspace, 1 - group.rank, slot)

        group.enqueue("exchange", layout, body)
        torch.cuda.synchronize()

    fake_host.run(ops, 2, FakeGpu(3))
    with pytest.raises(DeviceHang):
        fake_host.run(ops, 2, FakeGpu(3), (DevicePlace, "about_to_use", _late_start))


def _poisoned(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    return made


@gpu_ranks(2, (torch, "empty", _poisoned(torch.empty)), eager=0.0)
def test_wait_never_blocks_the_host() -> None:
    x = torch.ones(64, 16)
    work = interlace.all_gather_matmul(x, torch.eye(16), algorithm="fused", async_op=True)
    assert not work.is_completed()
    out = work.wait()
    assert bool(out.isnan().any()) or not bool((out == 1).all())
    torch.cuda.synchronize()
    assert work.is_completed() and fake_gpu().launches


@gpu_ranks(
    1,
    (DevicePlace, "keep", _kept_nowhere),
    raises=pytest.raises(UseAfterFree, match="freed before its use"),
    eager=0.0,
)
def test_what_the_host_dropped_is_not_used_later() -> None:
    """This is the control of the fake allocator."""
    interlace.all_gather_matmul(torch.ones(64, 16), torch.eye(16), algorithm="fused", async_op=True)
    gc.collect()
    fake_gpu().synchronize()


@gpu_ranks()
def test_streams_of_the_group_have_priority() -> None:
    place = default_group().place
    assert isinstance(place, DevicePlace)
    assert place.new_stream("compute")._own.priority == 0  # type: ignore[attr-defined]
    assert place.new_stream("copy", priority=True)._own.priority == -1  # type: ignore[attr-defined]
    place.high_priority = True
    group = default_group().split([0])
    assert group is not None
    assert group.compute._own.priority == -1  # type: ignore[attr-defined]


@gpu_ranks()
def test_the_default_stream_is_not_taken_for_a_new_one() -> None:
    assert stream.stream_of(0).cuda_stream == 0
