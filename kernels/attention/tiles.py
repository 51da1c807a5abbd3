"""Tiles of an attention: rows of queries, keys, scores, and the online softmax over them.

Legend: queries are ``[rows, batches, heads, D]`` with any strides but the last, results the same of size
V. Keys and values are *packed*: row n has the keys ``[batches, key heads, D]``, then the values
``[batches, key heads, V]``, so that both travel as one row of a matrix. D is ``HEAD_DIM``, V ``VALUE_DIM``.

A query sees one interval of positions (``Spans``): this covers causal masks, windows and packed sequences.
Keys know their positions because a part is one or two runs of the whole sequence (two if a rank has one
chunk from the front and one from the back).

Scores are kept to base 2, multiplied by ``scale * log2(e)``: the hardware has exp2. All sums are fp32.
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import KeyPart
from interlace.kernels.products import tile_offsets
from interlace.kernels.transfer import table_line

PART_COLUMNS = 9
_PART = tl.constexpr(PART_COLUMNS)
_FAR = tl.constexpr((1 << 31) - 1)


@triton.jit
def part_line(parts_ptr, number):
    """Load (source, first row of its keys, first slot, slots), and the ``KeyPart``, of a table's line."""
    values = table_line(parts_ptr, number, _PART)
    part = KeyPart(
        values[1],
        values[3].to(tl.int32),
        values[4].to(tl.int32),
        values[5].to(tl.int32),
        values[6].to(tl.int32),
    )
    return values[0], values[2], values[7], values[8], part


@triton.jit
def place_of_tile(tile, tiles_m, heads):
    """Return (row of tiles, batch, query head) of a tile: heads in order, whose programs share keys."""
    head = tile // tiles_m
    return tile % tiles_m, head // heads.heads, head % heads.heads


@triton.jit
def row_elements(of, batch, head, offs_m, BLOCK: tl.constexpr):
    """Point to the elements of rows ``offs_m`` of a head, ``BLOCK`` of each."""
    offs_d = tl.arange(0, BLOCK)
    # int64 before the products: a batch times its stride may pass 2**31 elements.
    head_ptr = of.ptr + batch.to(tl.int64) * of.stride_b + head.to(tl.int64) * of.stride_h
    return head_ptr + offs_m[:, None] * of.stride + offs_d[None, :]


@triton.jit
def row_mask(offs_m, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return which of ``BLOCK`` elements of rows ``offs_m`` exist, for heads of ``SIZE``."""
    return (offs_m < rows)[:, None] & (tl.arange(0, BLOCK) < SIZE)[None, :]


@triton.jit
def load_rows(of, rows, batch, head, tile_m, SIZE: tl.constexpr, BLOCK: tl.constexpr,
              WHOLE: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Load a tile of a head's rows of ``SIZE`` elements; all rows exist if ``WHOLE``, others are zeros."""
    offs_m = tile_offsets(tile_m, TILES.BLOCK_M)
    there = tl.full((TILES.BLOCK_M,), True, tl.int1) if WHOLE else offs_m < rows
    pointers = row_elements(of, batch, head, offs_m, BLOCK)
    return tl.load(pointers, mask=there[:, None] & (tl.arange(0, BLOCK) < SIZE)[None, :], other=0.0)


@triton.jit
def load_queries(queries, rows, batch, head, tile_m, WHOLE: tl.constexpr, TILES: tl.constexpr):
    return load_rows(
        queries, rows, batch, head, tile_m, TILES.HEAD_DIM, TILES.BLOCK_D, WHOLE, TILES
    )


@triton.jit
def load_spans(spans, rows, batch, offs_m):
    """Load (low, high) of each of the rows ``offs_m``; rows beyond the last repeat the last row."""
    lines = spans.ptr + batch.to(tl.int64) * spans.span_stride + tl.minimum(offs_m, rows - 1) * 2
    return tl.load(lines).to(tl.int32), tl.load(lines + 1).to(tl.int32)


@triton.jit
def low_of_seeing(low, high):
    """Return ``low``, or a number beyond all positions: then the least is from a row that sees keys."""
    return tl.where(low < high, low, _FAR)


@triton.jit
def key_head(heads, head):
    return (head + heads.first_head) // heads.per_key


@triton.jit
def head_pointers(rows_ptr, heads, batch, of_head, TILES: tl.constexpr):
    """Point to the keys, and to the values, of a key head in the packed row at ``rows_ptr``."""
    line = (batch * heads.key_heads + of_head).to(tl.int64)
    values_ptr = rows_ptr + heads.batches * heads.key_heads * TILES.HEAD_DIM
    return rows_ptr + line * TILES.HEAD_DIM, values_ptr + line * TILES.VALUE_DIM


@triton.jit
def between(low, high, COLUMNS: tl.constexpr):
    """Return ``[M, COLUMNS]``: whether a column is at least a row's low and below its high.

    In the result of tensor cores, bits 1 and 2 of a column come from the lane. Without them the columns of
    a thread are constants within the instructions, which need no register.
    """
    columns = tl.arange(0, COLUMNS)[None, :]
    of_lane = columns & 6
    constant = columns - of_lane
    return (low[:, None] - of_lane <= constant) & (constant < high[:, None] - of_lane)


@triton.jit
def load_reach(spans, rows, batch, tile_m, scale, TILES: tl.constexpr):
    """Load each row's range of keys, and the range where some row sees keys, and where all rows do.

    The last range is empty if ``scale`` is not above 0: there the largest product is not the largest score.
    """
    low, high = load_spans(spans, rows, batch, tile_offsets(tile_m, TILES.BLOCK_M))
    return reach_of(low_of_seeing(low, high), high, scale)


@triton.jit
def reach_of(low, high, scale):
    """Return the result of ``load_reach`` for rows that see from ``low`` to below ``high``."""
    to_all = tl.where(scale > 0, tl.min(high), 0)
    return low, high, tl.min(low), tl.max(low), to_all, tl.max(high)


@triton.jit
def tiles_of_run(reach, rows, position, TILES: tl.constexpr):
    """Return (first, start, stop, end) of a run's keys, at multiples of tiles except the end.

    From first to below end some row may see them; from start to below stop all rows see all of them.
    """
    _, _, from_some, from_all, to_all, to_some = reach
    # If no row sees any key, from_some is _FAR and to_some is 0: there is no tile in between.
    first = tl.maximum(from_some - position, 0) // TILES.BLOCK_N
    start = tl.cdiv(tl.minimum(tl.maximum(from_all - position, 0), rows), TILES.BLOCK_N)
    stop = tl.maximum(tl.minimum(to_all - position, rows) // TILES.BLOCK_N, start)
    end = tl.minimum(rows, to_some - position)
    return first * TILES.BLOCK_N, start * TILES.BLOCK_N, stop * TILES.BLOCK_N, end


@triton.jit
def scores(query, key, valid, scale, TILES: tl.constexpr):
    """Return ``query @ key.T * scale``, -inf where it is not ``valid``."""
    product = tl.dot(query, tl.trans(key), input_precision=TILES.INPUT_PRECISION)
    return tl.where(valid, product * scale, float("-inf"))


@triton.jit
def load_places(ptr, places, there, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of ``SIZE`` elements at ``ptr + places``; zeros beyond, and if not ``there``."""
    offs = tl.arange(0, BLOCK)
    # Places are added up before the pointer: with one size and one stride, keys and values share them.
    pointers = ptr + (places[:, None] + offs[None, :])
    return tl.load(pointers, mask=there[:, None] & (offs < SIZE)[None, :], other=0.0)


@triton.jit
def load_tile(source, stride, row, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
              TILES: tl.constexpr):  # fmt: skip
    """Load a tile of keys or of values from ``row`` on, of ``rows`` rows, or all if ``WHOLE``."""
    if TILES.DESCRIPTORS:
        tile = source.load([row, 0])
    else:
        offs = tl.arange(0, TILES.BLOCK_N)
        there = tl.full((TILES.BLOCK_N,), True, tl.int1) if WHOLE else offs < rows
        first_ptr = source + row.to(tl.int64) * stride
        tile = load_places(first_ptr, offs.to(tl.int64) * stride, there, SIZE, BLOCK)
    return tile


@triton.jit
def soften(product, largest, total, scale):
    """Continue the online softmax over a tile of scores, ``product * scale``, with a scale above 0.

    Return their weights, the factor of all earlier tiles' weights, and the state.
    """
    highest = tl.maximum(largest, tl.max(product, 1) * scale)
    # A row that has seen nothing yet has -inf here, and -inf minus -inf is NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    # One instruction: multiply and subtract without a rounding in between.
    weight = tl.exp2(product * scale - base[:, None])
    before = tl.exp2(largest - base)
    return weight, before, highest, total * before + tl.sum(weight, 1)


@triton.jit
def weigh(acc, before, weight, value, TILES: tl.constexpr):
    """Return ``acc * before + weight @ value``."""
    weight = weight.to(value.dtype)
    return tl.dot(weight, value, acc * before[:, None], input_precision=TILES.INPUT_PRECISION)


@triton.jit
def attend_run(query, acc, largest, total, reach, keys, stride, values, value_stride, first_row, rows,
               position, scale, TILES: tl.constexpr):  # fmt: skip
    """Continue the online softmax over ``rows`` keys of a head, from ``position`` of the sequence on.

    State: ``acc``, the sum of values weighted with ``exp2(score - largest)``, and ``total``, the sum of the
    weights. ``keys``, ``values``: descriptors, or pointers to row 0, with the stride of the rows; the run
    begins at ``first_row``. Tiles that all rows see completely come first and need no masks; then the tiles
    before them, and the tiles after them.

    Example: tiles of 128 rows and 64 keys, causal: rows 256 to 383 all see keys 0 to 255. So four tiles
    have no masks, then the tiles of keys 256 and 320 have masks.
    """
    first, start, stop, end = tiles_of_run(reach, rows, position, TILES)
    HEAD: tl.constexpr = TILES.HEAD_DIM
    VALUE: tl.constexpr = TILES.VALUE_DIM
    if query.dtype == tl.float32:
        # Without tensor cores a product costs more than its masks, and two loops more registers than one.
        stop = start
    for n in range(start, stop, TILES.BLOCK_N):
        row = first_row + n
        key = load_tile(keys, stride, row, rows - n, HEAD, TILES.BLOCK_D, True, TILES)
        product = tl.dot(query, tl.trans(key), input_precision=TILES.INPUT_PRECISION)
        weight, before, largest, total = soften(product, largest, total, scale)
        value = load_tile(values, value_stride, row, rows - n, VALUE, TILES.BLOCK_V, True, TILES)
        acc = weigh(acc, before, weight, value, TILES)
    # Counted from the run's first key on, and not beyond its last.
    low, high = reach[0] - position, tl.minimum(reach[1] - position, rows)
    for number in range(first, end - (stop - start), TILES.BLOCK_N):
        n = tl.where(number < start, number, number + stop - start)
        row = first_row + n
        key = load_tile(keys, stride, row, rows - n, HEAD, TILES.BLOCK_D, False, TILES)
        score = scores(query, key, between(low - n, high - n, TILES.BLOCK_N), scale, TILES)
        weight, before, largest, total = soften(score, largest, total, 1.0)
        value = load_tile(values, value_stride, row, rows - n, VALUE, TILES.BLOCK_V, False, TILES)
        acc = weigh(acc, before, weight, value, TILES)
    return acc, largest, total


@triton.jit
def store_partial(
    partials, acc, largest, total, number, head, all_heads, tile_m, TILES: tl.constexpr
):
    """Store the partial result of a tile; ``head`` counts the heads of all batches, ``all_heads``."""
    # Rows that see nothing here have a sum of 0: their result is 0, its weight 2 ** -inf.
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    acc = acc / total[:, None]
    lse = tl.where(nothing, float("-inf"), largest + tl.log2(total))
    offs_m = tile_offsets(tile_m, TILES.BLOCK_M)
    lines = (number * all_heads + head).to(tl.int64) * partials.rows + offs_m
    offs_v = tl.arange(0, TILES.BLOCK_V)
    pointers = partials.ptr + lines[:, None] * TILES.VALUE_DIM + offs_v[None, :]
    mask = row_mask(offs_m, partials.rows, TILES.VALUE_DIM, TILES.BLOCK_V)
    tl.store(pointers, acc, mask=mask)
    tl.store(partials.lse_ptr + lines, lse, mask=offs_m < partials.rows)


@triton.jit
def key_operand(ptr, stride, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Return keys or values of a head for ``load_tile``; loads beyond ``rows`` give zero."""
    operand = ptr
    if TILES.DESCRIPTORS:
        operand = tl.make_tensor_descriptor(ptr, [rows, SIZE], [stride, 1], [TILES.BLOCK_N, BLOCK])
    return operand


@triton.jit
def attend_part(queries, spans, partials, keys_ptr, stride, part, heads, tile, scale,
                TILES: tl.constexpr):  # fmt: skip
    """Attend from one tile of queries to the keys of ``part``, at ``keys_ptr``: a partial result."""
    rows = partials.rows
    tiles_m = tl.cdiv(rows, TILES.BLOCK_M)
    tile_m, batch, head = place_of_tile(tile, tiles_m, heads)
    query = load_queries(queries, rows, batch, head, tile_m, False, TILES)
    reach = load_reach(spans, rows, batch, tile_m, scale, TILES)
    key_ptr, value_ptr = head_pointers(keys_ptr, heads, batch, key_head(heads, head), TILES)
    key_rows = part.rows + part.more_rows
    keys = key_operand(key_ptr, stride, key_rows, TILES.HEAD_DIM, TILES.BLOCK_D, TILES)
    values = key_operand(value_ptr, stride, key_rows, TILES.VALUE_DIM, TILES.BLOCK_V, TILES)
    acc = tl.full((TILES.BLOCK_M, TILES.BLOCK_V), 0.0, tl.float32)
    largest = tl.full((TILES.BLOCK_M,), float("-inf"), tl.float32)
    total = tl.full((TILES.BLOCK_M,), 0.0, tl.float32)
    # One loop over the runs: the code of a run is there once.
    for run in range(1 + tl.minimum(part.more_rows, 1)):
        first_row = tl.where(run == 0, 0, part.rows)
        run_rows = tl.where(run == 0, part.rows, part.more_rows)
        position = tl.where(run == 0, part.position, part.more_position)
        acc, largest, total = attend_run(query, acc, largest, total, reach, keys, stride, values, stride,
                                         first_row, run_rows, position, scale, TILES)  # fmt: skip
    all_heads = heads.batches * heads.heads
    of_all = batch * heads.heads + head
    store_partial(partials, acc, largest, total, part.number, of_all, all_heads, tile_m, TILES)
