"""Several nodes: NVLink within, RDMA between, in the orders of ``kernels/node_order.py``.

All-gather + matmul: a rank's moves are ``node_order.gather_moves``. The copy engine does what goes to peers
of the node (or copier programs do), a network card each put; what has landed is forwarded within the node.
The consumer takes chunks in ``node_order.gather_order``: own, own node's, then other nodes'.

Matmul + reduce-scatter: tiles are produced in ``node_order.scatter_order``. A tile for another node goes to
the rank of this node at the owner's place. That rank sums the node's tiles and puts the sum, in fp32, to
the owner, which sums nodes. The design leaves open which programs sum, so both ways are here:

``summers`` 0   the same programs, once all their tiles are produced: nothing leaves the node before
``summers`` n   n programs do nothing else, from the start

Neither is one fused kernel in interlace today; plain gathers and reductions over nodes are.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

from interlace.kernels import launch_formulas as formulas, node_order as node_order
from interlace.kernels.tiling import arrival_order
from interlace.runtime.tuning.configuration import Configuration
from model.simulation.engine import Cluster, Process
from model.simulation.kernels import BYTES, Multiplier, Shape, Tiling, persistent, tiling_of
from model.simulation.one_node import sum_tile_us

SUM_BYTES = 4  # partial sums travel in fp32


def by_holder(rank: int, nodes: list[int], counts: list[int]) -> list[tuple[int, int]]:
    """An order as ``node_order``'s, but from other nodes first all for this rank, then for the next."""
    order = [
        (s, c) for s, c in node_order.gather_order(rank, nodes, counts) if nodes[s] == nodes[rank]
    ]
    holders = (rank, *reversed(node_order.node_peers(rank, nodes)))
    away = [source for holder in holders for source in node_order.put_sources(holder, nodes)]
    for chunk in range(max(counts)):
        order += [(source, chunk) for source in away if chunk < counts[source]]
    return order


@lru_cache(maxsize=64)
def _moves(rank: int, nodes: tuple[int, ...], rows: tuple[int, ...], size: int) -> list[list[int]]:
    moves: list[list[int]] = node_order.gather_moves(rank, list(nodes), list(rows), size)[0]
    return moves


@lru_cache(maxsize=64)
def _produced(rank: int, nodes: tuple[int, ...]) -> list[tuple[int, int]]:
    """(owner, who of this node sums for it), in the order of production."""
    order = node_order.scatter_order(rank, list(nodes))
    return [(owner, node_order.reducer(rank, owner, list(nodes))) for owner in order]


GATHER_ORDERS: dict[str, Callable[..., list[tuple[int, int]]]] = {
    "node_order": node_order.gather_order,
    "by holder": by_holder,
    # as if all ranks were on one node
    "flat": lambda rank, nodes, counts: arrival_order(rank, len(nodes), counts),
}


def node_of_rank(cluster: Cluster) -> list[int]:
    return [rank // cluster.per_node for rank in range(cluster.world_size)]


def gather(
    cluster: Cluster,
    rank: int,
    shape: Shape,
    configuration: Configuration,
    *,
    order: str = "node_order",
    tiling: Tiling | None = None,
) -> Process:
    """All-gather + matmul; ``order`` is one of :data:`GATHER_ORDERS`: what an order is worth."""
    machine, nodes, rows = cluster.machine, node_of_rank(cluster), shape.rows
    tiling = tiling or tiling_of(machine, configuration)
    block_m = tiling.block_m
    size = formulas.chunk_rows(rows, block_m, configuration.chunks)
    moves = _moves(rank, tuple(nodes), tuple(rows), size)
    counts = [formulas.ceil_div(count, size) for count in rows]
    taken = GATHER_ORDERS[order](rank, nodes, counts)
    tiles_n = formulas.ceil_div(shape.n, tiling.block_n)
    tiles = formulas.tiles_of(rows, block_m, tiles_n)
    copiers = min(configuration.copiers, len(moves), max(1, cluster.program_limit() // 4))
    resident = cluster.resident_programs(configuration, copiers)
    grid = formulas.persistent_grid(copiers, tiles, resident)
    consumers = grid - copiers
    matmul = Multiplier(cluster, rank, tiling, shape.n, shape.k)
    row_bytes = shape.k * BYTES
    first_rows = [sum(rows[:source]) for source in range(len(rows))] if cluster.everyone else None

    def chunk_at(source: int, row: int) -> int:
        first = first_rows[source] if first_rows else source * rows[0]
        return (row - first) // size

    def move(line: Sequence[int], rate: float) -> Process:
        kind, peer, source, _, to_row, count, _, _ = line
        chunk = chunk_at(source, to_row)
        if kind == node_order.LAND:
            yield cluster.flag(source, rank, ("landed", chunk))
            cluster.publish(rank, rank, ("forward", source, chunk))
            cluster.arrive(source, rank, ("chunk", chunk))
        elif kind == node_order.FORWARD:
            yield cluster.flag(rank, rank, ("forward", source, chunk))
            yield from cluster.copy(rank, peer, count * row_bytes, rate)
            cluster.publish(source, peer, ("chunk", chunk))
        elif peer == rank:  # staged, to be put
            yield count * row_bytes / (min(rate, machine.local_copy_gbs) * 1e3)
        else:
            yield from cluster.copy(rank, peer, count * row_bytes, rate)
            cluster.publish(rank, peer, ("chunk", chunk))

    def copying() -> Process:
        yield machine.launch_us
        for line in moves:
            if line[0] == node_order.PUT:
                continue
            yield machine.copy_issue_us if line[0] != node_order.LAND else 0.0
            yield from move(line, float("inf"))

    def putting() -> Process:
        yield 2 * machine.launch_us
        for kind, peer, source, _, to_row, count, _, _ in moves:
            if kind == node_order.PUT:
                yield from cluster.put(rank, peer, count * row_bytes)
                cluster.arrive(rank, peer, ("landed", chunk_at(source, to_row)))

    def program(index: int) -> Process:
        if index < copiers:
            mine = [line for line in moves if line[0] != node_order.PUT][index::copiers]
            for line in mine:
                yield from move(line, machine.sm_copy_gbs)
            return
        start = 0
        for source, chunk in taken:
            count = min(size, rows[source] - chunk * size)
            waited = source == rank
            for _, tile_m, tile_n in matmul.tiles(count, start, index - copiers, consumers):
                if not waited:
                    yield cluster.flag(source, rank, ("chunk", chunk))
                    waited = True
                yield from matmul.tile((source, chunk), tile_m, tile_n)
            start += formulas.ceil_div(count, block_m) * tiles_n

    cluster.spawn(putting(), f"network card of rank {rank}")
    if not copiers:
        cluster.spawn(copying(), f"copy engine of rank {rank}")
    yield from persistent(cluster, rank, grid, program)
    yield machine.launch_us


def scatter(
    cluster: Cluster, rank: int, shape: Shape, configuration: Configuration, *, summers: int = 0
) -> Process:
    machine, nodes, rows = cluster.machine, node_of_rank(cluster), shape.rows
    tiling, block_m = tiling_of(machine, configuration), configuration.block_m
    tiles_n = formulas.ceil_div(shape.n, configuration.block_n)
    tiles = formulas.tiles_of(rows, block_m, tiles_n)
    summers = min(summers, cluster.program_limit() // 2) if cluster.nodes > 1 else 0
    resident = cluster.resident_programs(configuration, summers)
    grid = formulas.persistent_grid(summers, tiles, resident)
    producers = grid - summers
    part = formulas.ceil_div(max(rows), block_m) * tiles_n
    lines, start = [], 0
    for owner, to in _produced(rank, tuple(nodes)):
        lines.append((owner, to, rows[owner], start))
        start += formulas.ceil_div(rows[owner], block_m) * tiles_n
    duties = node_order.reduced_owners(rank, nodes)[1:]
    members = node_order.members(nodes, nodes[rank])
    senders = node_order.put_sources(rank, nodes)
    targets = [(owner, cluster.distance(rank, owner)[0]) for owner in duties]
    sum_us = sum_tile_us(cluster, configuration, summers or grid, part, len(members))
    last_us = sum_tile_us(cluster, configuration, grid, part, len(members) + cluster.nodes)
    matmul = Multiplier(cluster, rank, tiling, shape.n, shape.k)

    def produce(index: int) -> Process:
        for owner, to, count, start in lines:
            nbytes = count * shape.n * BYTES / (formulas.ceil_div(count, block_m) * tiles_n)
            away = cluster.distance(rank, owner)[0]
            for tile, tile_m, tile_n in matmul.tiles(count, start, index, producers):
                yield from matmul.tile(owner, tile_m, tile_n)
                if to != rank:
                    yield from cluster.copy(rank, to, nbytes, machine.sm_store_gbs)
                    yield machine.signal_us
                cluster.publish(rank, to, ("part", away, tile))

    def partial_sums(index: int, programs: int) -> Process:
        work = [(owner, away, tile) for owner, away in targets for tile in range(part)]
        for owner, away, tile in work[index::programs]:
            for member in members:
                yield cluster.flag(member, rank, ("part", away, tile))
            yield sum_us
            nbytes = rows[owner] * shape.n * SUM_BYTES / part
            cluster.spawn(put(owner, tile, nbytes), f"network card of rank {rank}")

    def put(owner: int, tile: int, nbytes: float) -> Process:
        yield from cluster.put(rank, owner, nbytes)
        cluster.arrive(rank, owner, ("sum", tile))

    def own_sums(index: int, programs: int) -> Process:
        for tile in range(index, part, programs):
            for member in members:
                yield cluster.flag(member, rank, ("part", 0, tile))
            for source in senders:
                yield cluster.flag(source, rank, ("sum", tile))
            yield last_us

    def program(index: int) -> Process:
        if index < summers:
            yield from partial_sums(index, summers)
        else:
            yield from produce(index - summers)
            if not summers:
                yield from partial_sums(index, grid)
        yield from own_sums(index, grid)

    yield from persistent(cluster, rank, grid, program)
    yield machine.launch_us
