"""The fused ops as interlace does them on one node: fused, pipelined, unfused.

Chunks, sends, arrivals and tiles are ``launch_formulas``' and ``tiling``'s, the ones that the kernels get::

    copy engine | chunk 0 -> next | chunk 0 -> next but one | ... | chunk 1 -> next | ...
    programs    | own chunks, no wait ...... | wait, chunk 0 of the one before | ...

A copier is a program that loads, stores to the peer and publishes; it has an SM to itself. When it has
sent all that it has to, it takes tiles of the last chunks.

In matmul + reduce-scatter and matmul + all-reduce, a program of the fused kernel computes a tile, stores it
to its owner and publishes it before it takes the next. The store is not overlapped by the program's own
arithmetic, only by other programs' arithmetic, which the power limit then slows down less::

    program   | multiply | store, publish | multiply | store, publish | ... | wait for all sources, sum |
"""

from collections.abc import Sequence

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.tiling import arrival_order, chunks_of, owner_order
from interlace.runtime.tuning.configuration import Configuration
from model.simulation.engine import Cluster, Process
from model.simulation.kernels import (
    BYTES,
    Logged,
    Multiplier,
    Shape,
    library_matmul,
    persistent,
    tiling_of,
)


def fused_gather(
    cluster: Cluster,
    rank: int,
    shape: Shape,
    configuration: Configuration,
    order: str = "interleaved",
) -> Process:
    """``all_gather_matmul_fused``; ``configuration.copiers`` 0 leaves the sending to the copy engine.

    ``order`` "by source" sends and takes all chunks for or of a rank before the next rank's, which the
    kernel does not: what ``tiling``'s order is worth.
    """
    machine, world_size, rows = cluster.machine, cluster.world_size, shape.rows
    tiling, block_m = tiling_of(machine, configuration), configuration.block_m
    tiles_n = formulas.ceil_div(shape.n, configuration.block_n)
    size = formulas.chunk_rows(rows, block_m, configuration.chunks)
    sends = formulas.send_lines(rank, world_size, rows, size)
    lines = formulas.chunk_lines(rank, world_size, rows, size, block_m, tiles_n)
    if order == "by source":
        sends = sorted(sends, key=lambda line: (line[0] - rank) % world_size)
        lines = sorted(lines, key=lambda line: (rank - line[0]) % world_size)
        lines = _renumbered(lines, block_m, tiles_n)
    most = max(1, cluster.program_limit() // 4)
    copiers = min(configuration.copiers, len(sends), most)
    resident = cluster.resident_programs(configuration, copiers)
    tiles = formulas.tiles_of(rows, block_m, tiles_n)
    grid = formulas.persistent_grid(copiers, tiles, resident)
    shared = max(1, len(lines) - copiers)  # from this chunk on copiers take tiles
    matmul = Multiplier(cluster, rank, tiling, shape.n, shape.k)

    def copier(program: int) -> Process:
        note = Logged(cluster, rank, program)
        for send in range(program, len(sends), copiers):
            peer, first_row, count = sends[send][:3]
            note.begin()
            yield from cluster.copy(rank, peer, count * shape.k * BYTES, machine.sm_copy_gbs)
            yield machine.signal_us  # a release waits until the peer has the stores
            cluster.publish(rank, peer, ("chunk", first_row // size))
            note.end("copy", peer, first_row // size)

    def consumer(program: int, first: int) -> Process:
        note = Logged(cluster, rank, program)
        for index, (source, first_row, count, _, _, start) in enumerate(lines[first:], first):
            chunk, waited = first_row // size, source == rank
            absent = copiers if index < shared else 0
            for tile, tile_m, tile_n in matmul.tiles(count, start, program - absent, grid - absent):
                if not waited:
                    note.begin()
                    yield cluster.flag(source, rank, ("chunk", chunk))
                    note.end("wait", source, chunk)
                    waited = True
                note.begin()
                yield from matmul.tile((source, chunk), tile_m, tile_n)
                note.end("tile", source, chunk, tile)

    def program(index: int) -> Process:
        if index < copiers:
            yield from copier(index)
        yield from consumer(index, shared if index < copiers else 0)

    if not copiers:
        sending = copy_engine(cluster, rank, shape, sends, size)
        cluster.spawn(sending, f"copy engine of rank {rank}")
    yield from persistent(cluster, rank, grid, program)
    yield machine.launch_us  # finish_kernel


def _renumbered(lines: Sequence[Sequence[int]], block_m: int, tiles_n: int) -> list[list[int]]:
    """Return lines of chunks or segments in a new order, with their tiles numbered anew."""
    found, start = [], 0
    for line in lines:
        found.append([*line[:-1], start])
        start += formulas.ceil_div(line[2], block_m) * tiles_n
    return found


def copy_engine(
    cluster: Cluster, rank: int, shape: Shape, sends: Sequence[Sequence[int]], size: int
) -> Process:
    """``send_by_copy_engine``: one stream, a copy and a publish per line of ``sends``."""
    note = Logged(cluster, rank, -1)
    yield cluster.machine.launch_us  # wait_credits
    for peer, first_row, count, *_ in sends:
        yield cluster.machine.copy_issue_us
        note.begin()
        yield from cluster.copy(rank, peer, count * shape.k * BYTES)
        cluster.publish(rank, peer, ("chunk", first_row // size))
        note.end("copy", peer, first_row // size)


def pipelined_gather(
    cluster: Cluster, rank: int, shape: Shape, configuration: Configuration
) -> Process:
    """``all_gather_matmul_pipelined`` on a GPU: stage, pull chunk by chunk, one ``torch.mm`` per chunk."""
    machine, world_size, rows = cluster.machine, cluster.world_size, shape.rows
    size = max(1, -(-max(rows) // configuration.chunks))
    chunks = [chunks_of(count, size) for count in rows]
    row_bytes = shape.k * BYTES

    def copying() -> Process:
        yield machine.launch_us
        for chunk, (_, count) in enumerate(chunks[rank]):
            yield machine.copy_issue_us + count * row_bytes / (machine.local_copy_gbs * 1e3)
            for step in range(1, world_size):
                cluster.publish(rank, (rank + step) % world_size, ("staged", chunk))
        for source, chunk in order:
            if source != rank:
                yield cluster.flag(source, rank, ("staged", chunk))
                yield machine.copy_issue_us
                yield from cluster.copy(source, rank, chunks[source][chunk][1] * row_bytes)
                cluster.publish(rank, rank, ("here", source, chunk))

    order = arrival_order(rank, world_size, [len(part) for part in chunks])
    cluster.spawn(copying(), f"copy engine of rank {rank}")
    for source, chunk in order:
        if source != rank:
            yield cluster.flag(rank, rank, ("here", source, chunk))
        yield from library_matmul(cluster, rank, chunks[source][chunk][1], shape.n, shape.k)
    yield machine.launch_us


def unfused_gather(cluster: Cluster, rank: int, shape: Shape) -> Process:
    """``all_gather_matmul_unfused``: stage, pull every shard by copies on one stream, one ``torch.mm``."""
    machine, world_size, rows = cluster.machine, cluster.world_size, shape.rows
    row_bytes = shape.k * BYTES
    yield machine.launch_us
    yield machine.copy_issue_us + rows[rank] * row_bytes / (machine.local_copy_gbs * 1e3)
    for step in range(1, world_size):
        cluster.publish(rank, (rank + step) % world_size, "staged")
    for source, _ in arrival_order(rank, world_size, [1] * world_size):
        yield machine.copy_issue_us
        if source == rank:
            yield rows[rank] * row_bytes / (machine.local_copy_gbs * 1e3)
        else:
            yield cluster.flag(source, rank, "staged")
            yield from cluster.copy(source, rank, rows[source] * row_bytes)
    yield from library_matmul(cluster, rank, sum(rows), shape.n, shape.k)
    yield machine.launch_us


# -- matmul + reduce-scatter, matmul + all-reduce ------------------------------------------------


def sum_tile_us(
    cluster: Cluster, configuration: Configuration, programs: int, sums: int, sources: int
) -> float:
    """``reduce_tile``: reads a tile of every source and stores the sum, at what one SM gets of memory.

    ``sums`` is how many tiles a GPU has to sum, by at most ``programs`` at the same time.
    """
    machine = cluster.machine
    nbytes = (sources + 1) * configuration.block_m * configuration.block_n * BYTES
    rate = min(machine.sum_gbs, machine.hbm_gbs / max(1, min(programs, sums)))
    return nbytes / (rate * 1e3)


def fused_scatter(
    cluster: Cluster,
    rank: int,
    shape: Shape,
    configuration: Configuration,
    order: Sequence[int] | None = None,
) -> Process:
    """``matmul_reduce_scatter_fused``; ``order`` of owners instead of ``tiling.owner_order``."""
    machine, world_size, rows = cluster.machine, cluster.world_size, shape.rows
    tiling, block_m = tiling_of(machine, configuration), configuration.block_m
    tiles_n = formulas.ceil_div(shape.n, configuration.block_n)
    segments = formulas.segments_of(rows)
    lines = formulas.segment_lines(rank, world_size, segments, block_m, tiles_n)
    if order is not None:
        by_owner = {line[0]: line for line in lines}
        lines = _renumbered([by_owner[owner] for owner in order], block_m, tiles_n)
    tiles = formulas.tiles_of(rows, block_m, tiles_n)
    grid = formulas.persistent_grid(0, tiles, cluster.resident_programs(configuration))
    own_tiles = formulas.ceil_div(rows[rank], block_m) * tiles_n
    sum_us = sum_tile_us(cluster, configuration, grid, own_tiles, world_size)
    matmul = Multiplier(cluster, rank, tiling, shape.n, shape.k)

    def program(index: int) -> Process:
        note = Logged(cluster, rank, index)
        for owner, first_row, count, start in lines:
            here = formulas.ceil_div(count, block_m) * tiles_n
            for tile, tile_m, tile_n in matmul.tiles(count, start, index, grid):
                note.begin()
                yield from matmul.tile(first_row, tile_m, tile_n)
                note.end("tile", owner, tile, tile)
                nbytes = count * shape.n * BYTES / here
                yield from _store(cluster, rank, owner, nbytes, tile, note)
        for tile in range(index, own_tiles, grid):
            note.begin()
            for source in range(world_size):
                yield cluster.flag(source, rank, ("tile", tile))
            note.end("wait", rank, tile)
            note.begin()
            yield sum_us
            note.end("sum", rank, tile)

    yield from persistent(cluster, rank, grid, program)
    yield machine.launch_us  # finish_kernel


def _store(
    cluster: Cluster, rank: int, owner: int, nbytes: float, tile: int, note: Logged
) -> Process:
    """``store_tile`` and ``publish``: the release waits until the owner has the stores."""
    machine = cluster.machine
    if owner == rank:
        cluster.publish(rank, rank, ("tile", tile))
        return
    note.begin()
    yield from cluster.copy(rank, owner, nbytes, machine.sm_store_gbs)
    yield machine.signal_us
    cluster.publish(rank, owner, ("tile", tile))
    note.end("store", owner, tile)


def all_reduce(cluster: Cluster, rank: int, shape: Shape, configuration: Configuration) -> Process:
    """``matmul_all_reduce_fused``, one-shot: every tile to every rank, everyone sums all."""
    machine, world_size = cluster.machine, cluster.world_size
    tiling = tiling_of(machine, configuration)
    tiles = tiling.tiles(shape.m, shape.n)
    grid = formulas.persistent_grid(0, tiles, cluster.resident_programs(configuration))
    nbytes = shape.m * shape.n * BYTES / tiles
    sum_us = sum_tile_us(cluster, configuration, grid, tiles, world_size)
    matmul = Multiplier(cluster, rank, tiling, shape.n, shape.k)

    def program(index: int) -> Process:
        note = Logged(cluster, rank, index)
        for tile, tile_m, tile_n in matmul.tiles(shape.m, 0, index, grid):
            note.begin()
            yield from matmul.tile("all", tile_m, tile_n)
            note.end("tile", rank, tile, tile)
            for peer in owner_order(rank, world_size):
                yield from _store(cluster, rank, peer, nbytes, tile, note)
        for tile in range(index, tiles, grid):
            for source in range(world_size):
                yield cluster.flag(source, rank, ("tile", tile))
            note.begin()
            yield sum_us
            note.end("sum", rank, tile)

    yield from persistent(cluster, rank, grid, program)
    yield machine.launch_us


def pipelined_scatter(cluster: Cluster, rank: int, shape: Shape) -> Process:
    """``matmul_reduce_scatter_pipelined``: a ``torch.mm`` per owner into its workspace, then the sum."""
    machine, world_size, rows = cluster.machine, cluster.world_size, shape.rows
    yield machine.launch_us
    for owner in owner_order(rank, world_size):
        nbytes = rows[owner] * shape.n * BYTES
        multiplying = cluster.spawn(
            library_matmul(cluster, rank, rows[owner], shape.n, shape.k), "matmul"
        )
        if owner != rank:
            yield from cluster.copy(rank, owner, nbytes)
        yield multiplying
        if owner != rank:
            yield machine.copy_issue_us
            cluster.publish(rank, owner, "product")
    for source in range(world_size):
        if source != rank:
            yield cluster.flag(source, rank, "product")
    yield 2 * machine.launch_us + _fold_us(cluster, rows[rank] * shape.n * BYTES)


def _fold_us(cluster: Cluster, nbytes: float) -> float:
    """``reductions.fold`` by torch: per source a read of it, a read and a write of the sums in fp32."""
    moved = cluster.world_size * nbytes * 5
    return moved / (cluster.machine.hbm_gbs * 1e3) + cluster.world_size * cluster.machine.launch_us


def unfused_scatter(cluster: Cluster, rank: int, shape: Shape) -> Process:
    """``matmul_reduce_scatter_unfused``: one ``torch.mm``; then every owner reads all and sums."""
    machine, world_size, rows = cluster.machine, cluster.world_size, shape.rows
    yield machine.launch_us
    yield from library_matmul(cluster, rank, shape.m, shape.n, shape.k)
    for step in range(1, world_size):
        yield machine.copy_issue_us
        cluster.publish(rank, (rank + step) % world_size, "product")
    nbytes = rows[rank] * shape.n * BYTES
    for source in range(world_size):
        if source != rank:
            yield cluster.flag(source, rank, "product")
            yield from cluster.copy(source, rank, nbytes)
    yield machine.launch_us + _fold_us(cluster, nbytes)
