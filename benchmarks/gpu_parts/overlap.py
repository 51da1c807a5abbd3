"""Two parts of ``gpu.py``: W virtual ranks on one GPU, and a link that is really slow, PCIe.

Virtual ranks share the GPU, so a copy between them costs memory bandwidth only and all matmuls share the
SMs. Times cover all ranks' work together, from the first rank's start to the last one's end.

:class:`TorchPipelined` has torch's pipelined algorithms of symmetric memory, restated for virtual ranks:
threads of one process. The sequences are those in ``torch.distributed._symmetric_memory`` (torch 2.13).
Two streams take turns, step by step. A step copies one peer's shard and multiplies it, or multiplies the
part of one peer, which copies it. Ranks wait for each other with events instead of signal pads; every event
is recorded before a peer may wait for it, for which the threads meet.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from gpu_parts.lone_rank import LoneRank
from gpu_parts.timing import (
    WARM_UP,
    Record,
    Time,
    alternating,
    close,
    dtype_here,
    launch_now,
    on_ranks,
    record,
    times_in_turn,
)

import interlace
from interlace.benchmark.figures import overlap
from interlace.groups.groups import default_group

CALLS = 3
# (M, N, K) of a rank: Llama-70B and 405B layers on 8 ranks
VIRTUAL_SHAPES = ((4096, 3584, 8192), (8192, 3584, 8192), (8192, 6656, 16384))
# on PCIe at 50 GB/s and 700 TFLOP/s, N sets transfer over matmul to about 1.5, 1 and 0.5
SLOW_SHAPES = ((8192, 4608, 8192), (8192, 7168, 8192), (8192, 14336, 8192))
SLOW_WORLDS = (2, 4)
COPIERS = 8

_shared: dict[str, Any] = {}
_lock = threading.Lock()


def timed_together(
    candidates: Mapping[str, Callable[[], object]], repetitions: int
) -> dict[str, Time]:
    """Time candidates on all ranks; per call, from the first start to the last end.

    Processes have no common clock on a GPU: the longest time of any rank, which all begin together.
    """
    group = default_group()
    cuda = group.place.device.type == "cuda"
    virtual_ranks = group.place.virtual
    if virtual_ranks:
        with _lock:
            if "zero" not in _shared:
                _shared["zero"] = torch.cuda.Event(enable_timing=True)
                _shared["zero"].record()

    def microseconds(name: str) -> float:
        interlace.barrier()
        if cuda:
            torch.cuda.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            interlace.barrier()
            events[0].record()
        start = time.perf_counter() * 1e6
        for _ in range(CALLS):
            candidates[name]()
        span = [start, time.perf_counter() * 1e6]
        if cuda:
            events[1].record()
            torch.cuda.synchronize()
            zero = _shared["zero"] if virtual_ranks else events[0]
            span = [zero.elapsed_time(event) * 1e3 for event in events]
        begins, ends = zip(*group.agree("the times of a benchmark", tuple(span)), strict=True)
        return float(max(ends) - min(begins)) / CALLS

    return times_in_turn(candidates, repetitions, WARM_UP if cuda else 0, microseconds)


def virtual(dry_run: bool, repetitions: int) -> Iterator[Record]:
    shapes = ((32, 16, 32),) if dry_run else VIRTUAL_SHAPES
    where: dict[str, Any] = {"place": "sim" if dry_run else "cuda"}
    for world_size in (2,) if dry_run else (2, 4, 8):
        for m, n, k in shapes:
            given = m, n, k, repetitions
            for measure, op, shape in (
                (_gather, "all_gather_matmul", f"{m} x {n} x {k}"),
                (_scatter, "matmul_reduce_scatter", f"{m} x {k} x {n}"),
            ):
                case = f"{op} W={world_size}, {shape}"
                yield on_ranks("virtual", case, measure, *given, world_size=world_size, **where)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=interlace.device(), dtype=dtype_here())


def _gather(m: int, n: int, k: int, repetitions: int) -> Record:
    torch.manual_seed(interlace.get_rank())
    shard, weight = _random(m // interlace.get_world_size(), k), _random(n, k).t()
    gathered, output = shard.new_empty(m, k), shard.new_empty(m, n)
    interlace.all_gather(gathered, shard)
    parts: dict[str, Callable[[], object]] = {
        "matmul": partial(torch.mm, gathered, weight, out=output),
        "transfer": partial(interlace.all_gather, gathered, shard),
    }
    wanted = torch.mm(gathered, weight)
    return _compared("all_gather_matmul", (shard, weight), wanted, parts, repetitions)


def _scatter(m: int, n: int, k: int, repetitions: int) -> Record:
    torch.manual_seed(interlace.get_rank())
    input, weight = _random(m, n), _random(k, n).t()  # the second layer: [m, n] @ [n, k]
    output, part = input.new_empty(m, k), input.new_empty(m // interlace.get_world_size(), k)
    parts: dict[str, Callable[[], object]] = {
        "matmul": partial(torch.mm, input, weight, out=output),
        "transfer": partial(interlace.reduce_scatter, part, output),
    }
    wanted = torch.empty_like(part, dtype=torch.float32)
    interlace.reduce_scatter(wanted, torch.mm(input.float(), weight.float()))
    return _compared("matmul_reduce_scatter", (input, weight), wanted, parts, repetitions)


def _compared(
    op: str,
    operands: tuple[torch.Tensor, torch.Tensor],
    wanted: torch.Tensor,
    parts: Mapping[str, Callable[[], object]],
    repetitions: int,
) -> Record:
    candidates: dict[str, Callable[[], Any]] = {
        name: partial(getattr(interlace, op), *operands, algorithm=name)
        for name in ("fused", "pipelined", "unfused")
    }
    if interlace.device().type == "cuda":
        candidates["torch pipelined"] = partial(getattr(TorchPipelined(), op), *operands)
    correct = all([close(call(), wanted) for call in candidates.values()])
    everywhere = all(default_group().agree("the results of a benchmark", correct))
    times = timed_together({**candidates, **parts}, repetitions)
    fused = times["fused"].median
    derived = {
        "speedup_over_unfused": times["unfused"].median / fused,
        "overlap": overlap(times["matmul"].median, times["transfer"].median, fused) or 0.0,
    }
    if "torch pipelined" in times:
        derived["speedup_over_torch_pipelined"] = times["torch pipelined"].median / fused
    return record(times, everywhere, **derived)


# -- PCIe ----------------------------------------------------------------------------------------


def slow_link(dry_run: bool, repetitions: int) -> Iterator[Record]:
    """Peers' shards in pinned host memory: what is hidden, by copy engine and by programs."""
    shapes = ((64, 32, 48),) if dry_run else SLOW_SHAPES
    place = "sim" if dry_run else "cuda"
    for world_size in SLOW_WORLDS:
        for m, n, k in shapes:
            for how in ("copy engine", "programs"):
                case, given = f"{how}, W={world_size}, {m} x {n} x {k}", (how, world_size, m, n, k)
                yield on_ranks("slow-link", case, _over_pcie, *given, repetitions, place=place)


class _Streams:
    """The caller's stream and one beside it; without a GPU one stream of the place for both."""

    def __init__(self, lone: LoneRank) -> None:
        self._lone = lone
        self._side = torch.cuda.Stream(priority=-1) if torch.cuda.is_available() else None

    def beside(self, work: Callable[[], None]) -> None:
        if self._side is None:
            work()
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            work()

    def join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def launch(self, launch: Any) -> None:
        launch_now(launch, self._lone.group.compute)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if self._side is None:
            self._lone.group.compute.copy(to, source, "a peer's chunk")
        else:
            to.copy_(source, non_blocking=True)


def _over_pcie(how: str, world_size: int, m: int, n: int, k: int, repetitions: int) -> Record:
    device, dtype = interlace.device(), dtype_here()
    cuda = device.type == "cuda"
    lone = LoneRank(world_size, m, n, k, dtype)
    host = torch.randn(m, k, dtype=dtype)
    host = host.pin_memory() if cuda else host
    lone.shard.copy_(host[: lone.rows[0]])
    weight = torch.randn(n, k, device=device, dtype=dtype).t()
    output = torch.empty(m, n, device=device, dtype=dtype)
    wanted = torch.mm(host.to(device), weight)
    streams, finish = _Streams(lone), lone.finish()
    by_programs = how == "programs"
    steps = [] if by_programs else lone.copy_engine(host)
    push = lone.copiers(host, COPIERS)
    consumer = lone.consumer(weight, output, copiers=COPIERS if by_programs else 0)
    bare = lone.consumer(weight, output, waits=False)

    def produce() -> None:
        if by_programs:
            streams.launch(push)
        for source, to, flag in steps:
            streams.copy(to, source)
            streams.launch(flag)

    def fused() -> None:
        streams.beside(produce)
        streams.launch(consumer)
        streams.join()
        streams.launch(finish)

    def alone() -> None:
        streams.beside(produce)
        streams.join()
        streams.launch(finish)

    lone.gathered.fill_(float("nan"))
    output.fill_(float("nan"))
    fused()
    lone.settle()
    correct = close(output, wanted)
    times = alternating(
        {
            "fused": [fused],
            "matmul": [lambda: streams.launch(bare)],
            "torch.mm": [lambda: torch.mm(lone.gathered, weight, out=output)],
            "transfer": [alone],
        },
        repetitions,
        graph=False,
    )
    lone.settle()  # before its memory goes
    matmul, transfer = times["matmul"].median, times["transfer"].median
    return record(
        times,
        correct,
        overlap=overlap(matmul, transfer, times["fused"].median) or 0.0,
        transfer_over_matmul=transfer / matmul,
    )


# -- torch -----------------------------------------------------------------------------------------


_board: dict[tuple[Any, ...], Any] = {}  # values that virtual ranks show each other


class TorchPipelined:
    def __init__(self) -> None:
        self._second = torch.cuda.Stream()
        self._rank, self._world_size = interlace.get_rank(), interlace.get_world_size()
        self._turn = 0

    def _show(self, kind: str, value: Any) -> None:
        _board[kind, self._turn % 2, self._rank] = value

    def _of(self, kind: str, peer: int) -> Any:
        return _board[kind, self._turn % 2, peer]

    def _meet(self) -> None:
        """Hosts only: a barrier of ops would wait for the device, and be timed."""
        default_group().agree("a step", None)

    def _recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def all_gather_matmul(self, shard: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``shard`` ``[m / W, k]``, ``weight`` ``[k, n]``: ``[m, n]``."""
        rank, world_size = self._rank, self._world_size
        rows = shard.shape[0]
        self._turn += 1
        first = torch.cuda.current_stream()
        gathered = shard.new_empty(rows * world_size, shard.shape[1])
        output = shard.new_empty(rows * world_size, weight.shape[1])
        self._show("shard", shard)
        self._show("ready", self._recorded(first))
        self._meet()
        self._second.wait_stream(first)
        streams = (first, self._second)
        for step in range(1, world_size):
            peer = (rank + step) % world_size
            part = slice(peer * rows, (peer + 1) * rows)
            with torch.cuda.stream(streams[step % 2]):
                streams[step % 2].wait_event(self._of("ready", peer))
                gathered[part].copy_(self._of("shard", peer))
                torch.mm(gathered[part], weight, out=output[part])
        own = slice(rank * rows, (rank + 1) * rows)
        torch.mm(shard, weight, out=output[own])
        first.wait_stream(self._second)
        return output

    def matmul_reduce_scatter(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``input`` ``[m, k]``, ``weight`` ``[k, n]``: this rank's ``[m / W, n]`` of the sum."""
        rank, world_size = self._rank, self._world_size
        rows = input.shape[0] // world_size
        self._turn += 1
        first = torch.cuda.current_stream()
        stack = input.new_empty(world_size, rows, weight.shape[1])
        self._second.wait_stream(first)
        streams = (first, self._second)
        for step in range(1, world_size):
            stream, target = streams[step % 2], (rank - step) % world_size
            with torch.cuda.stream(stream):
                partial = torch.mm(input[target * rows : (target + 1) * rows], weight)
            self._show(f"part {step}", partial)
            self._show(f"made {step}", self._recorded(stream))
            self._meet()
            source = (rank + step) % world_size
            with torch.cuda.stream(stream):
                stream.wait_event(self._of(f"made {step}", source))
                stack[source].copy_(self._of(f"part {step}", source))
        torch.mm(input[rank * rows : (rank + 1) * rows], weight, out=stack[rank])
        first.wait_stream(self._second)
        for each in (stack, *(self._of(f"part {step}", rank) for step in range(1, world_size))):
            each.record_stream(self._second)
        return stack.sum(dim=0)
