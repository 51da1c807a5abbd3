"""Attention of a few queries, the same on all ranks, to keys that are spread over ranks: decoding.

Every rank attends to its own keys, in pieces, so that a few heads fill a GPU. The pieces are merged like
partial results (``forward.py``). The ranks exchange their results once, as words that carry their flags
(``kernels/collectives/low_latency.py``), and merge them in the order of the ranks: same bits everywhere.

A program of the exchange does ``LANES`` elements of one row, or of several whole rows if heads are smaller.
Its words are these elements, then the logarithms of the sums of their rows, then zeros. All of its words
are sent in every op, as the protocol of words requires.
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import Lot
from interlace.kernels.attention.tiles import (
    attend_run,
    load_places,
    load_queries,
    reach_of,
    scores,
    soften,
    store_partial,
    weigh,
)
from interlace.kernels.collectives.low_latency import (
    block_epoch,
    end_block,
    payload_of,
    send_to_all,
)
from interlace.kernels.products import tile_offsets
from interlace.kernels.signal import count_program

DECODE_LANES = 128
_LANES = tl.constexpr(DECODE_LANES)


@triton.jit(do_not_specialize=["lengths_ptr", "partials", "heads", "pages", "most", "piece"])
def decode_attention_kernel(
    keys,
    value,
    queries,
    lengths_ptr,
    partials,
    heads,
    pages,
    most,
    piece,
    scale,
    PAGED: tl.constexpr,
    TILES: tl.constexpr,
):
    """Compute partial results of all queries over pieces of ``piece`` keys, a multiple of tiles.

    Legend: ``keys`` are ``[most, batches, heads, D]``, ``value`` the same of size V. With ``PAGED`` they
    are ``[pages.size, all pages, heads, D]``, and ``pages`` lists the pages of each sequence, in order.
    ``queries``: ``[rows, batches, heads, D]``, with the heads of the keys; a row per token and query head
    that sees the key head. ``lengths``, int64 ``[batches, rows]``: how many keys a row sees. The grid is
    (tiles of rows, batches * heads, pieces).

    Ordering: nothing here waits or signals.

    Example: 1 sequence of 700 keys, 2 heads of keys, pieces of 256: the grid is (1, 2, 3), and program
    (0, 1, 2) of head 1 has keys 512 to 699.
    """
    tile_m, number = tl.program_id(0), tl.program_id(2)
    batch, head = tl.program_id(1) // heads.heads, tl.program_id(1) % heads.heads
    offs_m = tile_offsets(tile_m, TILES.BLOCK_M)
    of_rows = lengths_ptr + batch.to(tl.int64) * partials.rows + offs_m
    lengths = tl.load(of_rows, mask=offs_m < partials.rows, other=0)
    first = number * piece
    # Within this piece.
    high = tl.minimum(tl.minimum(lengths, most).to(tl.int32) - first, piece)
    rows = tl.maximum(tl.max(high), 0)
    query = load_queries(queries, partials.rows, batch, head, tile_m, False, TILES)
    key_ptr = keys.ptr + head.to(tl.int64) * keys.stride_h
    value_ptr = value.ptr + head.to(tl.int64) * value.stride_h
    acc = tl.full((TILES.BLOCK_M, TILES.BLOCK_V), 0.0, tl.float32)
    largest = tl.full((TILES.BLOCK_M,), float("-inf"), tl.float32)
    total = tl.full((TILES.BLOCK_M,), 0.0, tl.float32)
    if PAGED:
        table_ptr = pages.ptr + batch.to(tl.int64) * pages.stride
        for n in range(0, rows, TILES.BLOCK_N):
            offs_n = n + tl.arange(0, TILES.BLOCK_N)
            there = offs_n < rows
            token = first + offs_n
            page = tl.load(table_ptr + token // pages.size, mask=there, other=0).to(tl.int64)
            index = (token % pages.size).to(tl.int64)
            key_places = page * keys.stride_b + index * keys.stride
            value_places = page * value.stride_b + index * value.stride
            valid = offs_n[None, :] < high[:, None]
            key = load_places(key_ptr, key_places, there, TILES.HEAD_DIM, TILES.BLOCK_D)
            score = scores(query, key, valid, scale, TILES)
            weight, before, largest, total = soften(score, largest, total, 1.0)
            values = load_places(value_ptr, value_places, there, TILES.VALUE_DIM, TILES.BLOCK_V)
            acc = weigh(acc, before, weight, values, TILES)
    else:
        sequence, index = batch.to(tl.int64), first.to(tl.int64)
        key_ptr += sequence * keys.stride_b + index * keys.stride
        value_ptr += sequence * value.stride_b + index * value.stride
        low = tl.full((TILES.BLOCK_M,), 0, tl.int32)
        reach = reach_of(low, high, scale)
        acc, largest, total = attend_run(query, acc, largest, total, reach, key_ptr, keys.stride, value_ptr,
                                         value.stride, 0, rows, 0, scale, TILES)  # fmt: skip
    all_heads = heads.batches * heads.heads
    store_partial(partials, acc, largest, total, number, tl.program_id(1), all_heads, tile_m, TILES)


@triton.jit(do_not_specialize=["peers", "rows"])
def decode_exchange_kernel(
    peers,
    input_ptr,
    lse_ptr,
    output_ptr,
    output_lse_ptr,
    rows,
    epochs_offset,
    words_offset,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Merge the results of all ranks, each row weighted by its sum of exponentials, into ``output``.

    Legend: ``input``, fp32, and ``output`` are ``[rows, VALUE_DIM]``; ``lse`` and ``output_lse``, fp32
    ``[rows]``, natural logarithms. ``WIDTH``: elements of a row that a program does, a power of two, at
    most 128; it does ``128 / WIDTH`` rows. The grid: ``ceil(rows * WIDTH / 128)`` times
    ``ceil(VALUE_DIM / WIDTH)``.

    Ordering: the protocol of ``kernels/collectives/low_latency.py``: every program sends all its words to
    every other rank and waits for some of each. A program has read its input before it stores.

    Example: W = 2, heads of 64, 4 rows: 2 programs. Program 1 of rank 0 sends 128 numbers of rows 2 and 3,
    their two logarithms and 126 zeros, and polls 130 words of rank 1.
    """
    ROWS: tl.constexpr = _LANES // WIDTH
    epoch_ptr, epoch = block_epoch(peers, epochs_offset, tl.program_id(0))
    # After an earlier timeout this program may not overwrite words again.
    if epoch > 0:
        blocks = tl.cdiv(rows, ROWS)
        first_row = tl.program_id(0) % blocks * ROWS
        first_column = tl.program_id(0) // blocks * WIDTH
        lane = tl.arange(0, WORDS)
        row = first_row + lane % _LANES // WIDTH
        column = first_column + lane % WIDTH
        data = (lane < _LANES) & (row < rows) & (column < VALUE_DIM)
        # After the numbers a logarithm for each of the rows.
        of_row = first_row + lane - _LANES
        sums = (lane >= _LANES) & (lane < _LANES + ROWS) & (of_row < rows)
        own = tl.load(input_ptr + row.to(tl.int64) * VALUE_DIM + column, mask=data, other=0.0)
        own += tl.load(lse_ptr + of_row, mask=sums, other=0.0)
        words = own.to(tl.int32, bitcast=True)
        lot = Lot(words_offset, epoch, tl.program_id(0))
        send_to_all(peers, lot, words, WORDS, COMPILED)
        valid = data | sums
        # The first word of each rank is waited for in any case: there is always a first row.
        largest = tl.full((WORDS,), float("-inf"), tl.float32)
        acc = tl.full((WORDS,), 0.0, tl.float32)
        total = tl.full((WORDS,), 0.0, tl.float32)
        missing = tl.zeros((), tl.int32)
        # In the order of the ranks, the own in its place: same bits on all ranks.
        for source in range(peers.world_size):
            payload, lost = payload_of(peers, source, lot, words, valid, WORDS, COMPILED)
            missing += lost
            number = payload.to(tl.float32, bitcast=True)
            # Every lane needs the logarithm of its row.
            lse = tl.full((WORDS,), float("-inf"), tl.float32)
            for index in tl.static_range(ROWS):
                at = tl.where(lane == _LANES + index, number, float("-inf"))
                mine = (lane % _LANES // WIDTH == index) & (lane < _LANES)
                lse = tl.where(mine | (lane == _LANES + index), tl.max(at), lse)
            highest = tl.maximum(largest, lse)
            base = tl.where(highest == float("-inf"), 0.0, highest)
            LOG2E: tl.constexpr = 1.4426950408889634
            before = tl.exp2((largest - base) * LOG2E)
            weight = tl.exp2((lse - base) * LOG2E)
            acc = acc * before + number * weight
            total = total * before + weight
            largest = highest
        # A result must include all ranks: otherwise the output stays as it was.
        if missing == 0:
            nothing = total == 0.0
            divisor = tl.where(nothing, 1.0, total)
            LN2: tl.constexpr = 0.6931471805599453
            lse = tl.where(nothing, float("-inf"), largest + tl.log2(divisor) * LN2)
            result = (acc / divisor).to(output_ptr.dtype.element_ty)
            tl.store(output_ptr + row.to(tl.int64) * VALUE_DIM + column, result, mask=data)
            tl.store(output_lse_ptr + of_row, lse, mask=sums & (first_column == 0))
        end_block(epoch_ptr, epoch, missing)
    # Counted also after a timeout: the launch side waits for programs to end, not to succeed.
    count_program(peers)
