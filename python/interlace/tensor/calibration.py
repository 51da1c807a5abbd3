"""Measurement of collectives along each dimension of a mesh, and the lines that fit the times.

All rows of a dimension run at the same time, as they do in training. Small and large messages are two
*protocols*, each with its own line by Theil-Sen. The line of large messages begins where the lines cross,
if that is between the sizes measured; otherwise it begins half-way on a scale of doublings. If noise hides
the slope of small messages, they get the slope of large ones.
"""

import datetime
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from interlace.groups import groups as own_groups
from interlace.ops.collectives import all_to_all, rootless
from interlace.runtime.compat.releases import INTERLACE_VERSION
from interlace.runtime.tuning import calibration
from interlace.runtime.tuning.calibration import Link, LinkProtocol, MeasuredMesh

OWN = SimpleNamespace(  # the ops without torch's process groups
    all_gather_into_tensor=rootless.all_gather_into_tensor,
    all_reduce=rootless.all_reduce,
    all_to_all_single=all_to_all.all_to_all_single,
    barrier=rootless.barrier,
    reduce_scatter_tensor=rootless.reduce_scatter_tensor,
)
ITEM = 4  # bytes of a float32
SMALL = (1 << 10, 4 << 10, 16 << 10, 64 << 10)
LARGE = (512 << 10, 2 << 20, 8 << 20)
WARM_UP = 2
LEAST_SLOPE = 1e-7  # us per byte: 10**13 bytes/s, faster than any link
Key = tuple[int, str, int]  # dim, op, bytes
Times = dict[Key, list[float]]


OUTLIER = 10  # times as long as other times that should be of the same order of magnitude


class NoisyTimesError(ValueError):
    """Times that contradict each other, so that no latency or bandwidth follows from them."""

    def __init__(self, op: str, dim: int, why: str) -> None:
        super().__init__(
            f"{op} along dimension {dim} of the mesh: {why}. That is noise, so nothing is written: try "
            "again on a quiet machine, or with more --repetitions"
        )


@dataclass(frozen=True)
class CalibrationRequest:
    """A request to measure: ``repetitions`` of small messages, a third as many of large ones."""

    mesh: tuple[int, ...]
    small: tuple[int, ...] = SMALL
    large: tuple[int, ...] = LARGE
    repetitions: int = 21

    @property
    def cases(self) -> list[Key]:
        """Return the cases in the order of measurement, which is equal on all ranks."""
        sizes = (*self.small, *self.large)
        dims = [dim for dim, ranks in enumerate(self.mesh) if ranks > 1]
        return list(itertools.product(dims, calibration.OPS, sizes))

    def calls(self, size: int) -> int:
        return self.repetitions if size in self.small else max(3, self.repetitions // 3)


def on_rank(request: CalibrationRequest, tick: Callable[[int, int], None]) -> Times:
    """Return the microseconds of this rank's calls, in ``interlace.run`` or torch's process group."""
    grid = torch.arange(math.prod(request.mesh)).view(*request.mesh)
    if dist.is_initialized():
        on_gpus = "nccl" in str(dist.get_backend())
        device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
        )
        rank = dist.get_rank()
        mesh = DeviceMesh(device.type, grid)
        groups: list[object] = [mesh.get_group(dim) for dim in range(len(request.mesh))]
        ops: Any = dist
    else:
        rank, device = own_groups.get_rank(), own_groups.device()
        mesh = DeviceMesh(device.type, grid, _init_backend=False, _rank=rank)
        groups = [(mesh, dim) for dim in range(len(request.mesh))]
        ops = OWN
    found: Times = {}
    cases = request.cases
    for number, (dim, op, size) in enumerate(cases):
        call = _call(ops, op, size, request.mesh[dim], groups[dim], device)
        found[dim, op, size] = _time(call, request.calls(size), ops, device)
        if rank == 0:
            tick(number + 1, len(cases))
    return found


def _call(
    ops: Any, op: str, size: int, ranks: int, group: object, device: torch.device
) -> Callable[[], None]:
    """Return a call of ``op`` whose whole tensor has ``size`` bytes, rounded up to equal parts."""
    part = max(1, -(-size // (ITEM * ranks)))
    whole, shard = torch.ones(part * ranks, device=device), torch.ones(part, device=device)
    if op == "all_gather":
        return lambda: ops.all_gather_into_tensor(whole, shard, group=group)
    if op == "reduce_scatter":
        return lambda: ops.reduce_scatter_tensor(shard, whole, group=group)
    if op == "all_reduce":
        return lambda: ops.all_reduce(whole.fill_(1.0), group=group)
    output = torch.empty_like(whole)
    return lambda: ops.all_to_all_single(output, whole, group=group)


def _time(call: Callable[[], None], calls: int, ops: Any, device: torch.device) -> list[float]:
    synchronize: Any = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for number in range(WARM_UP + calls):
        ops.barrier()
        begun = time.perf_counter()
        call()
        synchronize()
        if number >= WARM_UP:
            times.append((time.perf_counter() - begun) * 1e6)
    return times


def medians(by_rank: Sequence[Times]) -> dict[Key, float]:
    """Return the median time of each case over its calls; the slowest rank gives the time of a call."""
    return {
        key: statistics.median(
            max(calls) for calls in zip(*(each[key] for each in by_rank), strict=True)
        )
        for key in by_rank[0]
    }


def fit(points: Mapping[int, float], slope: float | None = None) -> tuple[float, float]:
    """Return latency in us and us per byte (unless ``slope`` is known) from times by bytes.

    >>> fit({1000: 12.0, 2000: 14.0, 3000: 16.0, 4000: 99.0})
    (10.0, 0.002)
    """
    pairs = itertools.combinations(sorted(points.items()), 2)
    slopes = [(late - soon) / (more - less) for (less, soon), (more, late) in pairs]
    slope = statistics.median_low(slopes) if slope is None else slope
    return max(0.0, statistics.median(t - slope * size for size, t in points.items())), slope


def link_of(
    dim: int, ranks: int, op: str, small: Mapping[int, float], large: Mapping[int, float]
) -> Link:
    """Return the line of each protocol, and where the second begins. Raise NoisyTimesError."""
    (latency, slope), (later, flatter) = fit(small), fit(large)
    if flatter < LEAST_SLOPE:
        raise NoisyTimesError(op, dim, _took(max(large), min(large), large))
    if slope < LEAST_SLOPE:
        latency, slope = fit(small, flatter)
    if latency <= 0:
        raise NoisyTimesError(
            op, dim, f"{_took(max(small), min(small), small)}, which leaves no latency"
        )
    later = max(
        later, latency
    )  # beyond the caches, times of larger messages may grow more than in proportion
    times = {**small, **large}
    for less, more in itertools.combinations(sorted(times), 2):
        if times[less] > OUTLIER / 2 * times[more]:
            raise NoisyTimesError(op, dim, _took(more, less, times))
    low, high = max(small), min(large)
    crossing = (later - latency) / (slope - flatter) if slope > flatter else 0.0
    begins = crossing if low <= crossing <= high else math.sqrt(low * high)
    for_small = LinkProtocol(0, round(latency, 3), _rate(slope))
    for_large = LinkProtocol(round(begins), round(later, 3), _rate(flatter))
    return Link(dim, ranks, op, (for_small, for_large))


def _took(one: int, other: int, times: Mapping[int, float]) -> str:
    return f"{one:,} bytes took {times[one]:.0f} us, {other:,} bytes {times[other]:.0f} us"


def _refuse_outliers(found: Mapping[Key, float]) -> None:
    """Raise NoisyTimesError if an op took much longer than others of its dimension and size."""
    for (dim, op, size), took in found.items():
        usual = statistics.median(found[dim, other, size] for other in calibration.OPS)
        if took > OUTLIER * usual:
            why = f"{size:,} bytes took {took:.0f} us, in other ops {usual:.0f} us"
            raise NoisyTimesError(op, dim, why)


def _rate(slope: float) -> float:
    """Return 10**9 bytes/s, from us per byte."""
    return float(f"{1e-3 / slope:.6g}")


def measured_mesh(
    request: CalibrationRequest, by_rank: Sequence[Times], backend: str, processes: str
) -> MeasuredMesh:
    """Return the mesh that the ranks' times describe. ``processes``: a word for the kind of the ranks."""
    found = medians(by_rank)
    _refuse_outliers(found)
    links = []
    for dim, ranks in enumerate(request.mesh):
        for op in calibration.OPS:
            if ranks == 1:  # no data to send
                links.append(Link(dim, ranks, op, (LinkProtocol(0, 0.0, _rate(LEAST_SLOPE)),)))
                continue
            small = {size: found[dim, op, size] for size in request.small}
            large = {size: found[dim, op, size] for size in request.large}
            links.append(link_of(dim, ranks, op, small, large))
    return MeasuredMesh(
        backend,
        request.mesh,
        datetime.date.today().isoformat(),
        str(torch.__version__),
        INTERLACE_VERSION,
        processes,
        tuple(links),
    )
