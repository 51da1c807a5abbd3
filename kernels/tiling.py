"""Orders of rows, chunks and tiles, as pure integer functions.

Plain functions are for the launch side, which makes of them the tables that kernels read. Functions under
``triton.jit`` are for the device; their ``.fn`` is the plain Python function, so both kinds are tested
without Triton.
"""

import triton


def split_rows(total, world_size):
    """First row and number of rows per rank, as ``torch.chunk`` splits: [(0, n), (n, n), ...].

    Every rank but the last few gets ``ceil(total / world_size)`` rows; trailing ranks may get fewer
    or none. Example: ``split_rows(5, 4) == [(0, 2), (2, 2), (4, 1), (5, 0)]``.
    """
    size = -(-total // world_size)
    firsts = [min(rank * size, total) for rank in range(world_size)]
    return [(first, min(size, total - first)) for first in firsts]


def prefix_sums(lengths):
    """The start of each part, and the total last: ``prefix_sums([2, 3]) == [0, 2, 5]``."""
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums


def chunks_of(rows, chunk_rows):
    """Cut ``rows`` into chunks: ``chunks_of(5, 2) == [(0, 2), (2, 2), (4, 1)]``."""
    return [(first, min(chunk_rows, rows - first)) for first in range(0, rows, chunk_rows)]


def send_order(rank, world_size, chunk_count):
    """The order in which a rank sends its chunks: [(chunk, destination), ...].

    Chunk by chunk, and per chunk to the next rank first. At any time all ranks send to different
    destinations. ``send_order(0, 3, 2) == [(0, 1), (0, 2), (1, 1), (1, 2)]``.
    """
    return [
        (chunk, (rank + step) % world_size)
        for chunk in range(chunk_count)
        for step in range(1, world_size)
    ]


def arrival_order(rank, world_size, chunk_counts):
    """The order in which a rank takes chunks: [(source, chunk), ...].

    Its own chunks first, which need no transfer; then as the peers' ``send_order`` makes them arrive.
    ``arrival_order(1, 3, [2, 1, 1]) == [(1, 0), (0, 0), (2, 0), (0, 1)]``.
    """
    order = [(rank, chunk) for chunk in range(chunk_counts[rank])]
    for chunk in range(max(chunk_counts, default=0)):
        for step in range(1, world_size):
            source = (rank - step) % world_size
            if chunk < chunk_counts[source]:
                order.append((source, chunk))
    return order


def owner_order(rank, world_size):
    """The order in which a rank produces parts for their owners: the next rank first, itself last."""
    return [(rank + 1 + step) % world_size for step in range(world_size)]


@triton.jit
def first_tile(start, program, programs):
    """The first of a program's tiles at or after ``start``; it takes ``t % programs == program``."""
    # A remainder has the sign of the dividend on a GPU, other than in Python: `+ programs` keeps it
    # positive, and the function the same in both.
    return start + (program - start % programs + programs) % programs


@triton.jit
def grouped_tile(index, tiles_m, tiles_n, GROUP_M):
    """Tile ``index`` of a ``tiles_m x tiles_n`` grid, walked in bands of ``GROUP_M`` tile rows.

    Neighbours in time share rows of A and columns of B, which then come from the L2 cache. Returns
    (tile_m, tile_n). With 3 x 2 tiles and bands of 2: (0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
    """
    band = GROUP_M * tiles_n
    first_m = (index // band) * GROUP_M
    # The last band may be lower: with GROUP_M its tiles would be numbered past the edge.
    height = min(tiles_m - first_m, GROUP_M)
    within = index % band
    return first_m + within % height, within // height


@triton.jit
def tile_number(tile_m, tile_n, tiles_m, tiles_n, GROUP_M):
    """The inverse of :func:`grouped_tile`; of 3 x 2 tiles in bands of 2, (2,1) is number 5."""
    band = tile_m // GROUP_M
    first_m = band * GROUP_M
    height = min(tiles_m - first_m, GROUP_M)
    return band * GROUP_M * tiles_n + tile_n * height + tile_m - first_m
