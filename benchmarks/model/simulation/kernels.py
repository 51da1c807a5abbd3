"""Work on a GPU of the model: tiles, persistent kernels, cuBLAS matmuls, and a log of who did what when.

Tensor cores have a clock that power limits; a matmul takes waves of tiles, or its memory traffic.
A tile costs ``2 * BLOCK_M * BLOCK_N * K`` operations of one SM at full clock, whether or not all of it is
inside the matrix. Its rows of A are read from memory once, and columns of B once per band of ``GROUP_M``
tile rows (``tiling.grouped_tile``); then they are in the L2. Another band finds columns of B there only if
it begins within ``sharing_us`` of the one that has read them; where programs wait for chunks, it does not,
and that is why thin chunks are slow. A weight that half of the L2 holds is read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from interlace.kernels.launch_formulas import ceil_div
from interlace.kernels.tiling import first_tile, grouped_tile, split_rows
from interlace.runtime.tuning.configuration import Configuration
from model.simulation.engine import Cluster, Process
from model.simulation.machines import ModelMachine

BYTES = 2  # per element: bf16
_FULL = 128 * 256 / (128 + 256)  # a tile of this form keeps the tensor cores busy
_HALF = 128 * 128 / (128 + 128)


@dataclass(frozen=True)
class Tiling:
    """Blocks of a matmul kernel, and how it runs them."""

    block_m: int = 128
    block_n: int = 256
    group_m: int = 8
    rate: float = 1.0  # relative to a 128 x 256 tile
    gap_us: float = 0.0  # per tile, when its SM multiplies nothing

    def tiles(self, rows: int, n: int) -> int:
        return ceil_div(rows, self.block_m) * ceil_div(n, self.block_n)


def _form_rate(block_m: int, block_n: int, half: float) -> float:
    """Smaller tiles load more per operation; ``half`` is the rate of 128 x 128."""
    form = block_m * block_n / (block_m + block_n)
    return min(1.0, float((form / _FULL) ** (math.log(half) / math.log(_HALF / _FULL))))


def library_tilings(machine: ModelMachine) -> tuple[Tiling, ...]:
    """Return the tilings that cuBLAS may choose in the model: Hopper's, in steps of 16 columns."""
    return tuple(
        Tiling(
            block_m,
            block_n,
            max(1, 1024 // block_m),
            _form_rate(block_m, block_n, machine.small_tile_rate),
            machine.library_tile_us,
        )
        for block_m in (64, 128, 192, 256)
        for block_n in range(64, 257, 16)
        if block_m * block_n <= 256 * 192
    )


def triton_tiling(machine: ModelMachine, block_m: int, block_n: int, group_m: int) -> Tiling:
    rate = _form_rate(block_m, block_n, machine.triton_small_tile_rate)
    return Tiling(block_m, block_n, group_m, rate, machine.tile_us)


def traffic_bytes(machine: ModelMachine, tiling: Tiling, rows: int, n: int, k: int) -> float:
    bands = ceil_div(ceil_div(rows, tiling.block_m), tiling.group_m)
    weight = n * k * BYTES
    if weight <= cached_bytes(machine):
        bands = 1
    return float(bands * weight + rows * k * BYTES + rows * n * BYTES)


def cached_bytes(machine: ModelMachine) -> float:
    """Return the bytes of a weight that the L2 holds in the model."""
    return machine.l2_mb * 1e6 / 2


def compute_us(machine: ModelMachine, tiling: Tiling, k: int) -> float:
    """One tile, of an SM at full clock that waits for no memory."""
    flops = 2.0 * tiling.block_m * tiling.block_n * k / tiling.rate
    return flops / (machine.clock_tflops * 1e6 / machine.sms)


def sharing_us(machine: ModelMachine, tiling: Tiling, n: int, k: int) -> float:
    """For how long after a band has begun with columns of B another finds them in the L2."""
    weight = n * k * BYTES
    if weight <= cached_bytes(machine):
        return math.inf
    return compute_us(machine, tiling, k) * machine.sharing_mb * 1e6 / weight


def rate_of(machine: ModelMachine, working: int) -> float:
    """At which ``working`` SMs advance together."""
    return min(1.0, machine.budget / max(1, working))


def matmul_us(machine: ModelMachine, tiling: Tiling, rows: int, n: int, k: int) -> float:
    """A matmul by itself, without its launch: full waves, then what is left; or its memory traffic."""
    sms = int(machine.sms)
    each = compute_us(machine, tiling, k)
    waves, rest = divmod(tiling.tiles(rows, n), sms)
    duration = waves * (each / rate_of(machine, sms) + tiling.gap_us)
    if rest:
        duration += each / rate_of(machine, rest) + tiling.gap_us
    memory = traffic_bytes(machine, tiling, rows, n, k) / (machine.hbm_gbs * 1e3)
    return max(duration, memory)


@lru_cache(maxsize=4096)
def _fastest(
    tilings: tuple[Tiling, ...], machine: ModelMachine, rows: int, n: int, k: int
) -> tuple[float, Tiling]:
    timed = [
        (matmul_us(machine, tiling, rows, n, k), index) for index, tiling in enumerate(tilings)
    ]
    duration, index = min(timed)
    return duration, tilings[index]


def library_tiling(machine: ModelMachine, rows: int, n: int, k: int) -> Tiling:
    return _fastest(library_tilings(machine), machine, rows, n, k)[1]


def library_us(machine: ModelMachine, rows: int, n: int, k: int) -> float:
    """``torch.mm`` by itself, without its launch."""
    if not rows or not n:
        return 0.0
    return _fastest(library_tilings(machine), machine, rows, n, k)[0]


OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@dataclass(frozen=True)
class Shape:
    """The matmul that every rank does: ``M x K @ K x N``; M are all rows, gathered or not yet scattered."""

    op: str
    m: int
    n: int
    k: int
    world_size: int = 8
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op is {self.op!r}, not one of {', '.join(OPS)}")
        if min(self.m, self.n, self.k, self.world_size, self.nodes) < 1:
            raise ValueError(f"{self} has a dimension below 1")
        if self.world_size % self.nodes:
            raise ValueError(f"world_size {self.world_size} is no multiple of nodes {self.nodes}")

    @property
    def rows(self) -> list[int]:
        return [count for _, count in split_rows(self.m, self.world_size)]

    @property
    def moved_bytes(self) -> int:
        """Bytes of the whole matrix that is gathered, scattered or reduced."""
        return self.m * (self.k if self.op == "all_gather_matmul" else self.n) * BYTES

    def __str__(self) -> str:
        where = f"{self.world_size} ranks" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")
        return f"{self.op} M={self.m} N={self.n} K={self.k}, {where}"


@dataclass
class Prediction:
    shape: Shape
    machine: str
    algorithm: str
    microseconds: float
    matmul_us: float = 0.0  # cuBLAS by itself
    collective_us: float = 0.0  # NCCL by itself
    cluster: Cluster | None = None
    log: list[Span] | None = None

    @property
    def overlap(self) -> float:
        """(matmul + collective - this) / the smaller of them: 1 if that is hidden wholly."""
        smaller = min(self.matmul_us, self.collective_us)
        return (self.matmul_us + self.collective_us - self.microseconds) / smaller


@dataclass(frozen=True)
class Span:
    """A program of a rank was busy with something of ``peer``."""

    begin: float
    end: float
    rank: int
    program: int
    kind: str  # wait, tiles, store, sum, copy
    peer: int
    index: int  # number of the chunk or tile
    count: int = 1  # tiles


class Logged:
    """Adds spans to the cluster's log, or does nothing without one."""

    def __init__(self, cluster: Cluster, rank: int, program: int) -> None:
        self._simulation, self._log = cluster.simulation, cluster.log
        self._rank, self._program = rank, program
        self._begin = 0.0

    def begin(self) -> None:
        self._begin = self._simulation.now

    def end(self, kind: str, peer: int, index: int, count: int = 1) -> None:
        if self._log is not None:
            where = self._rank, self._program, kind, peer, index, count
            self._log.append(Span(self._begin, self._simulation.now, *where))


def tiling_of(machine: ModelMachine, configuration: Configuration) -> Tiling:
    return triton_tiling(
        machine, configuration.block_m, configuration.block_n, configuration.group_m
    )


class Multiplier:
    """Tiles of one persistent kernel on one GPU: what each computes, and who reads memory for it."""

    def __init__(self, cluster: Cluster, rank: int, tiling: Tiling, n: int, k: int) -> None:
        machine = cluster.machine
        self.tiling, self.tiles_n = tiling, ceil_div(n, tiling.block_n)
        self._simulation, self._gpu = cluster.simulation, cluster.gpu(rank)
        self._compute = compute_us(machine, tiling, k)
        self._sharing = sharing_us(machine, tiling, n, k)
        self._a_bytes = tiling.block_m * k * BYTES
        self._b_bytes = tiling.block_n * k * BYTES
        self._c_bytes = tiling.block_m * tiling.block_n * BYTES
        self._read: set[Hashable] = set()
        self._began: dict[int, float] = {}

    def tile(self, rows_key: Hashable, tile_m: int, tile_n: int) -> Process:
        """One tile; ``rows_key`` says in which rows of A ``tile_m`` counts."""
        now = self._simulation.now
        nbytes = self._c_bytes
        band = (rows_key, tile_m // self.tiling.group_m, tile_n)
        if band not in self._read:
            self._read.add(band)
            if now - self._began.get(tile_n, -math.inf) > self._sharing:
                self._began[tile_n] = now
                nbytes += self._b_bytes
        if (rows_key, tile_m) not in self._read:
            self._read.add((rows_key, tile_m))
            nbytes += self._a_bytes
        passed = self._gpu.memory.reserve(now, nbytes)
        yield self._gpu.cores.work(self._compute)
        yield passed - self._simulation.now
        yield self.tiling.gap_us

    def tiles(
        self, rows: int, start: int, program: int, programs: int
    ) -> Iterator[tuple[int, int, int]]:
        """A program's tiles of some rows, numbered from ``start``, as the kernels take them.

        (number within the rows, tile_m, tile_n) in the order of ``tiling.grouped_tile``.
        """
        tiles_m = ceil_div(rows, self.tiling.block_m)
        end = start + tiles_m * self.tiles_n
        for number in range(first_tile.fn(start, program, programs), end, programs):
            tile = number - start
            yield tile, *grouped_tile.fn(tile, tiles_m, self.tiles_n, self.tiling.group_m)


def persistent(
    cluster: Cluster, rank: int, programs: int, body: Callable[[int], Process]
) -> Process:
    """One kernel of ``programs`` resident programs, each holding an SM to its end."""
    cores = cluster.gpu(rank).cores

    def program(index: int) -> Process:
        yield cores.acquire()
        yield from body(index)
        cores.release()

    yield cluster.machine.launch_us
    done = [cluster.spawn(program(index), f"program of rank {rank}") for index in range(programs)]
    yield from done


def library_matmul(cluster: Cluster, rank: int, rows: int, n: int, k: int) -> Process:
    """One launch of ``torch.mm``; its tiles take SMs as they get free, also those of another launch."""
    machine, gpu = cluster.machine, cluster.gpu(rank)
    if not rows or not n:
        return
    tiling, cores = library_tiling(machine, rows, n, k), gpu.cores
    left = tiling.tiles(rows, n)
    each = compute_us(machine, tiling, k)

    def worker() -> Process:
        nonlocal left
        while left > 0:
            left -= 1
            yield cores.acquire()
            yield cores.work(each)
            yield tiling.gap_us
            cores.release()

    yield machine.launch_us
    nbytes = traffic_bytes(machine, tiling, rows, n, k)
    passed = gpu.memory.reserve(cluster.simulation.now, nbytes)
    workers = min(left, cores.sms)
    done = [cluster.spawn(worker(), f"matmul of rank {rank}") for _ in range(workers)]
    yield from done
    yield passed - cluster.simulation.now


def nccl_us(machine: ModelMachine, nbytes: float, world_size: int, nodes: int = 1) -> float:
    """All-gather or reduce-scatter of ``nbytes`` in all, by rings through all ranks.

    Every rank receives ``(W - 1) / W`` of it. Between nodes as many rings as a node has cards share it.
    """
    if world_size == 1:
        return 0.0
    rate = machine.nccl_gbs
    if nodes > 1:
        rate = min(rate, machine.nic_gbs * (world_size // nodes))
    passing = nbytes * (world_size - 1) / world_size / (rate * 1e3)
    hops, node_hops = world_size - nodes, nodes - 1
    simple = machine.nccl_base_us + machine.nccl_hop_us * hops
    simple += machine.nccl_node_hop_us * node_hops
    short = machine.nccl_short_base_us + machine.nccl_short_hop_us * hops
    short += machine.nccl_short_node_hop_us * node_hops
    return min(simple + passing, short + passing / 0.92)


def collective_us(machine: ModelMachine, shape: Shape) -> float:
    """NCCL's share of the unfused sequence; an all-reduce is a reduce-scatter and an all-gather."""
    together = shape.world_size if machine.virtual_ranks else 1
    nbytes = shape.moved_bytes * together
    once = nccl_us(machine, nbytes, shape.world_size, shape.nodes)
    return 2 * once if shape.op == "matmul_all_reduce" else once


def alone_us(machine: ModelMachine, shape: Shape) -> float:
    """cuBLAS by itself; of all ranks one after another where they share a GPU."""
    together = shape.world_size if machine.virtual_ranks else 1
    return together * library_us(machine, shape.m, shape.n, shape.k)


def unfused_us(machine: ModelMachine, shape: Shape) -> float:
    """torch's sequence: NCCL and cuBLAS one after another, no sooner than the host issues them."""
    device = alone_us(machine, shape) + collective_us(machine, shape) + 2 * machine.launch_us
    return max(device, 3 * machine.torch_op_us)
