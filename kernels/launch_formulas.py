"""Sizes and orders of launches: grids, signal slots, workspaces and tables, from whole numbers alone.

The launch side of the algorithms calls these functions. A bundle that is built ahead of time has a copy
of this file in its loader, ``load.py``, so a launch without Triton has the same numbers. So all values here
are whole numbers, and lists and tuples of them.

Legend: ``rows`` lists the rows of every rank (of a flat tensor: its elements); ``tiles_n`` is the number
of tiles side by side; ``resident`` is how many programs the device keeps resident at once.
"""

from collections.abc import Sequence

from interlace.kernels.tiling import arrival_order, owner_order, send_order

Line = list[int]


def ceil_div(total: int, part: int) -> int:
    """Return the number of parts of ``total``; the last may be short."""
    return -(-total // part)


def persistent_grid(reserved: int, tiles: int, resident: int) -> int:
    """Return the programs of a persistent grid: no more than tiles, and than are resident.

    ``reserved`` programs of the grid do something else.
    """
    return reserved + max(1, min(resident - reserved, tiles))


def tiles_of(rows: Sequence[int], block_m: int, tiles_n: int) -> int:
    """Return the tiles of all ranks' rows; no tile holds rows of two ranks."""
    return sum(ceil_div(count, block_m) for count in rows) * tiles_n


def chunk_rows(rows: Sequence[int], block_m: int, chunks: int) -> int:
    """Return rows per chunk: whole tiles, and the longest shard in about ``chunks`` chunks."""
    return ceil_div(ceil_div(max(rows), block_m), chunks) * block_m


def chunk_elements(rows: Sequence[int], block: int, chunks: int) -> int:
    """Return elements per chunk of a flat tensor: like :func:`chunk_rows`, but not in whole blocks."""
    return max(block, ceil_div(max(rows), chunks))


def chunk_slots(rows: Sequence[int], chunk_size: int) -> int:
    """Return the chunks of all ranks. Each has a slot, and is an arrival somewhere."""
    return sum(ceil_div(count, chunk_size) for count in rows)


def sends_of(rank: int, world_size: int, rows: Sequence[int], chunk_size: int) -> int:
    """Return the sends of a rank: a chunk that goes to every peer counts once for each."""
    return ceil_div(rows[rank], chunk_size) * (world_size - 1)


def gathered_bytes(rows: Sequence[int], row_bytes: int) -> int:
    """Return the data region of a gather: all ranks' rows."""
    return sum(rows) * row_bytes


def transfer_line(peer: int, source: int, chunk: int, rows: Sequence[int], chunk_size: int) -> Line:
    """Return [peer, first row in the shard, rows, first row in the whole, slot] of a ``source``'s chunk."""
    first = chunk * chunk_size
    count = min(chunk_size, rows[source] - first)
    slot = chunk_slots(rows[:source], chunk_size) + chunk
    return [peer, first, count, sum(rows[:source]) + first, slot]


def send_lines(rank: int, world_size: int, rows: Sequence[int], chunk_size: int) -> list[Line]:
    """Return lines of a rank's sends, in order."""
    count = ceil_div(rows[rank], chunk_size)
    return [
        transfer_line(peer, rank, chunk, rows, chunk_size)
        for chunk, peer in send_order(rank, world_size, count)
    ]


def arrival_lines(
    rank: int, world_size: int, rows: Sequence[int], chunk_size: int, own: bool
) -> list[Line]:
    """Return lines of the chunks that a rank takes, in order, with its own chunks if ``own``."""
    counts = [ceil_div(count, chunk_size) for count in rows]
    return [
        transfer_line(source, source, chunk, rows, chunk_size)
        for source, chunk in arrival_order(rank, world_size, counts)
        if own or source != rank
    ]


def chunk_lines(
    rank: int, world_size: int, rows: Sequence[int], chunk_size: int, block_m: int, tiles_n: int
) -> list[Line]:
    """Return lines of ``all_gather_matmul_kernel``'s ``chunks``."""
    arrivals = arrival_lines(rank, world_size, rows, chunk_size, False)
    return numbered_lines(rank, rows, arrivals, block_m, tiles_n)


def numbered_lines(
    rank: int, rows: Sequence[int], arrivals: Sequence[Line], block_m: int, tiles_n: int
) -> list[Line]:
    """Return lines of the own shard, as one chunk, then of ``arrivals``; each with its first tile."""
    lines = [[rank, 0, rows[rank], sum(rows[:rank]), 0, 0]] if rows[rank] else []
    start = ceil_div(rows[rank], block_m) * tiles_n
    for line in arrivals:
        lines.append([*line, start])
        start += ceil_div(line[2], block_m) * tiles_n
    return lines


def reduce_slots(world_size: int, rows: Sequence[int], block_m: int, tiles_n: int) -> int:
    """Return slots: one per source and tile of an owner's part; for the longest part, on all ranks."""
    return world_size * ceil_div(max(rows), block_m) * tiles_n


def contributed_bytes(world_size: int, rows: Sequence[int], row_bytes: int) -> int:
    """Return the data region of a reduction: a contribution to the longest part from every rank."""
    return world_size * max(rows) * row_bytes


def segments_of(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first row, rows) by owner, one after another."""
    return [(sum(rows[:owner]), rows[owner]) for owner in range(len(rows))]


def segment_lines(
    rank: int, world_size: int, segments: Sequence[tuple[int, int]], block_m: int, tiles_n: int
) -> list[Line]:
    """Return lines (owner, first row, rows, number of the first tile) in the order of production."""
    lines = []
    start = 0
    for owner in owner_order(rank, world_size):
        first, count = segments[owner]
        lines.append([owner, first, count, start])
        start += ceil_div(count, block_m) * tiles_n
    return lines


def shard_lines(rows: Sequence[int], block_m: int, tiles_n: int) -> list[Line]:
    """Return lines of ``shards`` of ``head_exchange.py``, by rank: rows, first row, first slot."""
    lines = []
    for rank in range(len(rows)):
        lines.append([rows[rank], sum(rows[:rank]), tiles_of(rows[:rank], block_m, tiles_n)])
    return lines


def head_send_lines(
    rank: int, world_size: int, rows: Sequence[int], chunk_size: int, chunks: int
) -> list[Line]:
    """Return lines of ``all_to_all_matmul_kernel``'s ``sends`` to the owners of rows, in order."""
    lines = []
    for chunk, peer in send_order(rank, world_size, chunks):
        first = chunk * chunk_size
        count = min(chunk_size, rows[peer] - first)
        if count > 0:
            place = rank * rows[peer] + first
            lines.append([peer, sum(rows[:peer]) + first, count, place, rank * chunks + chunk])
    return lines


def expert_offsets(rank: int, world_size: int, splits: Sequence[int], experts: int) -> list[int]:
    """Return rows of ``rank`` before each segment, by expert and source; the number of all rows last.

    ``splits``: every rank's rows for each expert, one rank after another; ``experts``: the number on one
    rank. Unless all ranks have all experts, each rank has different ones.
    """
    total = len(splits) // world_size
    first = rank * experts % total
    offsets = [0]
    for expert in range(first, first + experts):
        for source in range(world_size):
            offsets.append(offsets[-1] + splits[source * total + expert])
    return offsets


def expert_segment_lines(
    rank: int, world_size: int, splits: Sequence[int], experts: int
) -> list[Line]:
    """Return lines of ``grouped_matmul_kernel``'s ``segments``: output row, rows, first source row."""
    total = len(splits) // world_size
    offsets = expert_offsets(rank, world_size, splits, experts)
    lines = []
    for number in range(experts * world_size):
        begin = number % world_size * total
        row = begin + rank * experts % total + number // world_size
        lines.append([offsets[number], splits[row], sum(splits[begin:row])])
    return lines


def expert_send_lines(
    rank: int, world_size: int, splits: Sequence[int], experts: int, chunk_size: int
) -> list[Line]:
    """Return lines of ``grouped_matmul_kernel``'s ``sends``; the next rank first: all differ.

    The chunks of a segment have their own slots: ``kernels/experts/grouped_matmul.py`` explains why.
    """
    total = len(splits) // world_size
    lines = []
    for step in range(1, world_size):
        peer = (rank + step) % world_size
        begin = peer * experts % total
        offsets = expert_offsets(peer, world_size, splits, experts)
        for expert in range(experts):
            number = expert * world_size + rank
            row = rank * total + begin + expert
            first = sum(splits[rank * total : row])
            slot = number + offsets[number] // chunk_size
            for chunk in range(ceil_div(splits[row], chunk_size)):
                done = chunk * chunk_size
                count = min(chunk_size, splits[row] - done)
                lines.append([peer, first + done, count, offsets[number] + done, slot + chunk])
    return lines


def multimem_parts(rows: Sequence[int], block: int, item: int) -> list[Line]:
    """Return lines of ``parts`` of ``multimem.py``, by rank: first element, elements, byte, first block."""
    lines = []
    first = 0
    byte = 0
    blocks = 0
    for count in rows:
        lines.append([first, count, byte, blocks])
        first += count
        byte += ceil_div(count * item, 16) * 16
        blocks += ceil_div(count, block)
    return lines


def multimem_bytes(rows: Sequence[int], item: int) -> int:
    """Return the bytes of the data region of a gather by the switch.

    Every part begins at a multiple of 16 bytes.
    """
    return sum(ceil_div(count * item, 16) * 16 for count in rows)


def slice_slots(world_size: int, rows: Sequence[int], slice_rows: int) -> int:
    """Return the number of slots: one for each source and slice of its rows.

    Every source has as many slices as the source with the most rows, so all ranks have the same number.
    """
    return world_size * ceil_div(max(rows), slice_rows)


def zigzag_runs(rank: int, rows: Sequence[int]) -> list[Line]:
    """Return [first token of the shard, tokens, position in the sequence] of a rank's two chunks.

    The sequence has 2 W chunks, and rank r has the chunks r and 2 W - 1 - r. If the rank has an odd number
    of tokens, its first chunk has one token more than its second.
    """
    backs = [count // 2 for count in rows]
    front = rows[rank] - backs[rank]
    before = sum(rows[:rank]) - sum(backs[:rank])
    behind = sum(rows) - sum(backs) + sum(backs[rank + 1 :])
    return [[0, front, before], [front, backs[rank], behind]]


def causal_spans(rank: int, rows: Sequence[int]) -> list[Line]:
    """Return [first, end] of the positions that each token of a rank sees.

    The mask is causal, and the sequence is cut by zigzag.
    """
    return [
        [0, place + 1]
        for run in zigzag_runs(rank, rows)
        for place in range(run[2], run[2] + run[1])
    ]


def key_part_line(
    source: int, number: int, row: int, runs: Sequence[Sequence[int]], slots: Sequence[int]
) -> Line:
    """Return a line of ``parts`` of the attention kernels.

    It holds ``source``, ``number`` and ``row``, tokens and position of two runs, and ``slots``.
    """
    line = [source, number, row]
    for run in runs:
        line.append(run[1])
        line.append(run[2])
    return [*line, *slots]


def key_part_lines(rank: int, world_size: int, rows: Sequence[int], chunk_size: int) -> list[Line]:
    """Return the lines of ``parts`` of the attention kernels, if queries see the keys of all ranks.

    The sequence is cut by zigzag.
    """
    lines = []
    for step in range(world_size):
        source = (rank - step) % world_size
        first = chunk_slots(rows[:source], chunk_size)
        slots = [first, ceil_div(rows[source], chunk_size)]
        runs = zigzag_runs(source, rows)
        lines.append(key_part_line(source, source, sum(rows[:source]), runs, slots))
    return lines


def key_lines(rows: Sequence[int]) -> list[Line]:
    """As ``key_part_lines`` of keys that are there: a source's alone, then one's after another's."""
    return [
        key_part_line(source, source, among * sum(rows[:source]), zigzag_runs(source, rows), [0, 0])
        for among in (0, 1)
        for source in range(len(rows))
    ]


def all_causal_spans(rows: Sequence[int]) -> list[Line]:
    """``causal_spans`` of all ranks, one after another."""
    return [line for rank in range(len(rows)) for line in causal_spans(rank, rows)]


def pieces_of(rows: int, block: int, most: int) -> int:
    """Pieces of ``rows`` keys, each of whole blocks: ``most`` at most."""
    return max(1, min(most, ceil_div(rows, block)))


def piece_rows(rows: int, block: int, most: int) -> int:
    """Keys of a piece."""
    return ceil_div(ceil_div(rows, block), pieces_of(rows, block, most)) * block
