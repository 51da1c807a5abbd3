"""Algorithms of others, as their source does them: what published figures are compared with.

``pulled_gather``    SMR, Kraken, Triton-distributed, Flux, torch's native async-TP: the copy engine pulls
                     shards in the order rank+1, rank+2, ...; one persistent matmul waits once per shard
``symm_mem_gather``  torch's ``_pipelined_multi_all_gather_and_consume``: per peer a pull and a
                     ``torch.mm``, alternating two streams
``symm_mem_scatter`` torch's ``_pipelined_produce_and_all2all``: per peer a ``torch.mm``, a barrier, a pull
``multimem_gather``  torch's ``multimem_all_gather_out``, then one ``torch.mm``
``pushed_scatter``   Triton-distributed and Kraken: one persistent matmul, an owner's part is pushed by the
                     copy engine when all its tiles are done; barrier; a kernel that sums
``node_gather``, ``node_scatter``  Triton-distributed on several nodes

Reductions read every contribution once; in the peers' bf16 that is what it costs in fp32 too.
"""

from dataclasses import dataclass, replace

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.tiling import owner_order
from interlace.runtime.tuning.configuration import Configuration
from model.simulation.engine import Cluster, Cores, Process
from model.simulation.kernels import (
    BYTES,
    Multiplier,
    Shape,
    Tiling,
    library_matmul,
    persistent,
    triton_tiling,
)
from model.simulation.nodes import gather as interlace_node_gather


@dataclass(frozen=True)
class Variant:
    """How a project's version of ``pulled_gather`` or ``pushed_scatter`` differs from another's."""

    block_m: int = 128
    block_n: int = 256
    group_m: int = 4
    local_copy: bool = False
    barriers: int = 2  # by torch or own kernels
    nvshmem_barriers: int = 0
    whole: bool = False  # whether ``producing`` covers all parts
    ungrouped_below: int = 0  # a shard of fewer tile rows is not walked in groups


SMR = Variant()
KRAKEN = Variant(ungrouped_below=4)
TRITON_DISTRIBUTED = Variant(group_m=8, local_copy=True, barriers=2)
FLUX = Variant(group_m=8, local_copy=True, barriers=2)
NATIVE = Variant(group_m=8, local_copy=True, barriers=3)
KRAKEN_SCATTER = Variant(group_m=8, barriers=1, whole=True)
TRITON_DISTRIBUTED_SCATTER = Variant(group_m=8, barriers=0, nvshmem_barriers=2)


@dataclass(frozen=True)
class HostOps:
    """The host's work: driver calls per rank, and torch operators per peer and besides."""

    operators: int
    driver_per_rank: int = 0
    operators_per_peer: int = 0

    def microseconds(self, cluster: Cluster) -> float:
        machine, world_size = cluster.machine, cluster.world_size
        operators = self.operators_per_peer * (world_size - 1) + self.operators
        driver = self.driver_per_rank * world_size * machine.driver_op_us
        return driver + operators * machine.torch_op_us


NO_HOST_OPS = HostOps(0)
PULLED_GATHER_OPS = HostOps(7, driver_per_rank=2)  # per rank a copy and a memory operation
PUSHED_SCATTER_OPS = HostOps(10, driver_per_rank=2)  # a view more
SYMM_MEM_GATHER_OPS = HostOps(8, operators_per_peer=3)  # a view, a copy, a matmul
SYMM_MEM_SCATTER_OPS = HostOps(8, operators_per_peer=5)  # two barriers more


def pulled_gather(cluster: Cluster, rank: int, shape: Shape, variant: Variant) -> Process:
    """All-gather + matmul; half of the barriers come before, half after."""
    machine, world_size = cluster.machine, cluster.world_size
    rows = shape.rows[0]
    group_m = variant.group_m if rows >= variant.ungrouped_below * variant.block_m else 1
    tiling = triton_tiling(machine, variant.block_m, variant.block_n, group_m)
    matmul = Multiplier(cluster, rank, tiling, shape.n, shape.k)
    per_shard = tiling.tiles(rows, shape.n)
    grid = min(int(machine.sms), per_shard * world_size)
    after = variant.barriers // 2
    yield (variant.barriers - after) * machine.barrier_us
    if variant.local_copy:
        yield machine.launch_us + rows * shape.k * BYTES / (machine.local_copy_gbs * 1e3)

    def pulling() -> Process:
        for step in range(1, world_size):
            source = (rank + step) % world_size
            yield machine.copy_issue_us
            yield from cluster.copy(source, rank, rows * shape.k * BYTES)
            cluster.publish(rank, rank, step)

    def program(index: int) -> Process:
        start = 0
        for step in range(world_size):
            waited = not step
            for _, tile_m, tile_n in matmul.tiles(rows, start, index, grid):
                if not waited:
                    yield cluster.flag(rank, rank, step)
                    waited = True
                yield from matmul.tile(step, tile_m, tile_n)
            start += per_shard

    pulled = cluster.spawn(pulling(), f"copy engine of rank {rank}")
    yield from persistent(cluster, rank, grid, program)
    yield pulled
    yield after * machine.barrier_us


def symm_mem_gather(cluster: Cluster, rank: int, shape: Shape) -> Process:
    """torch's decomposition; copies of the two streams take turns at the copy engine."""
    machine, world_size = cluster.machine, cluster.world_size
    rows = shape.rows[0]
    nbytes = rows * shape.k * BYTES
    engine = Cores(cluster.simulation, 1, 1.0)
    yield machine.barrier_us
    yield machine.copy_issue_us + nbytes / (machine.local_copy_gbs * 1e3)
    yield machine.barrier_us

    def stream(steps: range) -> Process:
        for step in steps:
            if step:
                yield engine.acquire()
                yield machine.copy_issue_us
                yield from cluster.copy((rank + step) % world_size, rank, nbytes)
                engine.release()
            yield from library_matmul(cluster, rank, rows, shape.n, shape.k)

    streams = [
        cluster.spawn(stream(range(first, world_size, 2)), f"stream {first} of rank {rank}")
        for first in (0, 1)
    ]
    yield from streams
    yield machine.barrier_us


def symm_mem_scatter(cluster: Cluster, rank: int, shape: Shape) -> Process:
    """torch's decomposition: matmul, barrier, pull, barrier, in two streams with a buffer each; a sum."""
    machine, world_size = cluster.machine, cluster.world_size
    rows = shape.rows[0]
    nbytes = rows * shape.n * BYTES
    engine = Cores(cluster.simulation, 1, 1.0)
    yield machine.barrier_us

    def stream(steps: range) -> Process:
        for step in steps:
            yield from library_matmul(cluster, rank, rows, shape.n, shape.k)
            yield from cluster.barrier(rank, ("ready", step))
            yield engine.acquire()
            yield machine.copy_issue_us
            yield from cluster.copy((rank - step) % world_size, rank, nbytes)
            engine.release()
            yield from cluster.barrier(rank, ("read", step))

    streams = [
        cluster.spawn(stream(range(first, world_size, 2)), f"stream {first} of rank {rank}")
        for first in (1, 2)
    ]
    yield from library_matmul(cluster, rank, rows, shape.n, shape.k)
    yield from streams
    yield machine.barrier_us + machine.launch_us
    yield (world_size + 1) * nbytes / (machine.hbm_gbs * 1e3)


def multimem_gather(cluster: Cluster, rank: int, shape: Shape) -> Process:
    """Every rank stores its shard once, the switch copies it to all: what arrives is the limit."""
    machine, world_size = cluster.machine, cluster.world_size
    arriving = shape.m * shape.k * BYTES * (world_size - 1) / world_size
    yield 2 * machine.barrier_us + machine.launch_us + arriving / (machine.link_gbs * 1e3)
    yield from library_matmul(cluster, rank, shape.m, shape.n, shape.k)


def producing(
    cluster: Cluster, rank: int, shape: Shape, tiling: Tiling, owners: list[int], *, whole: bool
) -> Process:
    """A persistent matmul; when all tiles of an owner's rows are done, the flag of the owner is set.

    ``whole``: tiles are grouped over all rows, so that a group may hold several owners' rows and none is
    done before all are; else owner by owner.
    """
    rows, tiles_n = shape.rows[0], formulas.ceil_div(shape.n, tiling.block_n)
    matmul = Multiplier(cluster, rank, tiling, shape.n, shape.k)
    parts = [shape.m] if whole else [rows] * len(owners)
    grid = min(int(cluster.machine.sms), sum(tiling.tiles(part, shape.n) for part in parts))
    left = [0] * len(owners)

    def places(part: int, tile_m: int) -> range:
        if not whole:
            return range(part, part + 1)
        first = tile_m * tiling.block_m
        last = min(first + tiling.block_m, shape.m) - 1
        return range(first // rows, last // rows + 1)

    for part, count in enumerate(parts):
        for tile_m in range(formulas.ceil_div(count, tiling.block_m)):
            for place in places(part, tile_m):
                left[place] += tiles_n

    def program(index: int) -> Process:
        start = 0
        for part, count in enumerate(parts):
            for _, tile_m, tile_n in matmul.tiles(count, start, index, grid):
                yield from matmul.tile(part, tile_m, tile_n)
                for place in places(part, tile_m):
                    left[place] -= 1
                    if not left[place]:
                        cluster.publish(rank, rank, ("done", owners[place]))
            start += tiling.tiles(count, shape.n)

    yield from persistent(cluster, rank, grid, program)


def pushed_scatter(cluster: Cluster, rank: int, shape: Shape, variant: Variant) -> Process:
    machine, world_size = cluster.machine, cluster.world_size
    rows = shape.rows[0]
    nbytes = rows * shape.n * BYTES
    tiling = triton_tiling(machine, variant.block_m, variant.block_n, variant.group_m)
    owners = owner_order(rank, world_size)

    def pushing() -> Process:
        yield variant.nvshmem_barriers // 2 * machine.nvshmem_barrier_us
        for owner in owners:
            yield cluster.flag(rank, rank, ("done", owner))
            yield machine.copy_issue_us
            if owner == rank:
                yield nbytes / (machine.local_copy_gbs * 1e3)
            else:
                yield from cluster.copy(rank, owner, nbytes)

    pushed = cluster.spawn(pushing(), f"copy engine of rank {rank}")
    yield from producing(cluster, rank, shape, tiling, owners, whole=variant.whole)
    yield pushed
    after = variant.nvshmem_barriers - variant.nvshmem_barriers // 2
    yield variant.barriers * machine.barrier_us + after * machine.nvshmem_barrier_us
    yield machine.launch_us + (world_size + 1) * nbytes / (machine.hbm_gbs * 1e3)


def node_gather(cluster: Cluster, rank: int, shape: Shape) -> Process:
    """Triton-distributed on nodes: a local copy, two NVSHMEM barriers; whole shards, put and forwarded."""
    machine, variant = cluster.machine, TRITON_DISTRIBUTED
    tiling = triton_tiling(machine, variant.block_m, variant.block_n, variant.group_m)
    rows = shape.rows
    yield 2 * machine.nvshmem_barrier_us
    yield machine.launch_us + rows[0] * shape.k * BYTES / (machine.local_copy_gbs * 1e3)
    whole = replace(Configuration(), chunks=1, copiers=0, block_m=variant.block_m)
    yield from interlace_node_gather(cluster, rank, shape, whole, tiling=tiling)


def node_scatter(cluster: Cluster, rank: int, shape: Shape) -> Process:
    """Triton-distributed on nodes. Per node, the next first, own node last: a scatter within this node, a
    barrier, a sum, a put to the owner. Then a barrier and the sum over nodes.
    """
    machine, nodes, per_node = cluster.machine, cluster.nodes, cluster.per_node
    nbytes = shape.rows[0] * shape.n * BYTES
    variant = TRITON_DISTRIBUTED_SCATTER
    tiling = triton_tiling(machine, variant.block_m, variant.block_n, variant.group_m)
    node, place = rank // per_node, rank % per_node
    owners = [
        (node + 1 + away) % nodes * per_node + (place + 1 + step) % per_node
        for away in range(nodes)
        for step in range(per_node)
    ]

    def scattering() -> Process:
        yield machine.nvshmem_barrier_us
        for number in range(nodes):
            for owner in owners[number * per_node : (number + 1) * per_node]:
                yield cluster.flag(rank, rank, ("done", owner))
                yield machine.copy_issue_us
                to = node * per_node + owner % per_node
                if to == rank:
                    yield nbytes / (machine.local_copy_gbs * 1e3)
                else:
                    yield from cluster.copy(rank, to, nbytes)
            yield machine.nvshmem_barrier_us
            cluster.publish(rank, rank, ("scattered", number))

    def reducing() -> Process:
        for number in range(nodes):
            yield cluster.flag(rank, rank, ("scattered", number))
            yield machine.launch_us + (per_node + 1) * nbytes / (machine.hbm_gbs * 1e3)
            if number < nodes - 1:
                owner = (node + 1 + number) % nodes * per_node + place
                yield from cluster.put(rank, owner, nbytes)

    cluster.spawn(scattering(), f"copy engine of rank {rank}")
    reduced = cluster.spawn(reducing(), f"reduction of rank {rank}")
    yield from producing(cluster, rank, shape, tiling, owners, whole=False)
    yield reduced
    yield machine.nvshmem_barrier_us
    yield machine.launch_us + (nodes + 1) * nbytes / (machine.hbm_gbs * 1e3)
