"""Gradients of an attention, recomputed from the results of the forward: output and logarithm of the sums.

The backward works part by part like the forward. The keys of one source contribute a partial result to the
gradient of the queries. This rank's queries contribute to the gradient of these keys, and this contribution
returns to the source. Both are fp32, and are added up in the order of the ranks.

With P = exp2(score - lse), the weights, dP = dO @ V.T and delta = sum(dO * O), per row::

    dS = P * (dP - delta)       dQ = dS @ K * scale       dK = dS.T @ Q * scale       dV = P.T @ dO

There are two kernels and no atomics. One keeps a tile of queries, and loops over tiles of keys. The other
keeps a tile of keys, and loops over tiles of queries, of all heads that see them in their order. A program
keeps rows and loops over columns, so the latter computes ``K @ Q.T``. Then P.T and dS.T are in registers as
the products need them, and both kernels have tiles of the same form. Both compute scores and dP. One kernel
would need five products instead of seven. But then a tile of queries gets a sum from every tile of keys, of
several programs. To add these up in one order, without atomics, each would be written and read again in
fp32, or each program would wait for another.
"""

import triton
import triton.language as tl

from interlace.kernels.attention.tiles import (
    between,
    head_pointers,
    key_head,
    key_operand,
    load_places,
    load_queries,
    load_reach,
    load_rows,
    load_spans,
    load_tile,
    low_of_seeing,
    part_line,
    place_of_tile,
    row_mask,
    tiles_of_run,
)
from interlace.kernels.products import tile_offsets

_SET = tl.constexpr(32)  # tiles of queries that a number has bits for


@triton.jit
def _load_sums(sums, heads, batch, head, tile_m, WHOLE: tl.constexpr, TILES: tl.constexpr):
    """Load (logarithm of the sum, delta) of each row; all rows exist if ``WHOLE``."""
    offs_m = tile_offsets(tile_m, TILES.BLOCK_M)
    lines = (batch * heads.heads + head) * sums.rows + offs_m
    if WHOLE:
        lse, delta = tl.load(sums.lse_ptr + lines), tl.load(sums.delta_ptr + lines)
    else:
        inside = offs_m < sums.rows
        lse = tl.load(sums.lse_ptr + lines, mask=inside, other=0.0)
        delta = tl.load(sums.delta_ptr + lines, mask=inside, other=0.0)
    return lse, delta


@triton.jit
def _load_grads(grads, rows, batch, head, tile_m, WHOLE: tl.constexpr, TILES: tl.constexpr):
    return load_rows(grads, rows, batch, head, tile_m, TILES.VALUE_DIM, TILES.BLOCK_V, WHOLE, TILES)


@triton.jit
def _turned_product(rows, columns, TILES: tl.constexpr):
    return tl.dot(rows, tl.trans(columns), input_precision=TILES.INPUT_PRECISION)


@triton.jit
def _weights(product, lse, seen, scale):
    """Return the weights. ``seen`` is None if every query sees every key."""
    # One instruction: multiply and subtract without a rounding in between.
    exponent = product * scale - lse
    if seen is not None:
        exponent = tl.where(seen, exponent, float("-inf"))
    return tl.exp2(exponent)


@triton.jit
def _add_keys(acc, query, grad, key, value, lse, delta, low, high, scale, MASKED: tl.constexpr,
              TILES: tl.constexpr):  # fmt: skip
    """Add to ``acc``, of queries, the contribution of a tile of keys, seen from ``low`` to below
    ``high``."""
    product = _turned_product(query, key, TILES)
    of_weight = _turned_product(grad, value, TILES)
    seen = between(low, high, TILES.BLOCK_N) if MASKED else None
    of_score = _weights(product, lse[:, None], seen, scale) * (of_weight - delta[:, None])
    return tl.dot(of_score.to(key.dtype), key, acc, input_precision=TILES.INPUT_PRECISION)


@triton.jit
def _take_keys(acc, query, grad, lse, delta, reach, keys, values, stride, first_row, rows, position,
               scale, TILES: tl.constexpr):  # fmt: skip
    """Add to ``acc`` the contribution of the keys of a run, in tiles like ``attend_run``."""
    first, start, stop, end = tiles_of_run(reach, rows, position, TILES)
    HEAD: tl.constexpr = TILES.HEAD_DIM
    SIZE: tl.constexpr = TILES.VALUE_DIM
    WIDE: tl.constexpr = query.dtype == tl.float32
    if WIDE:
        stop = start
    # Counted from the run's first key on, and not beyond its last.
    low, high = reach[0] - position, tl.minimum(reach[1] - position, rows)
    for MASKED in tl.static_range(WIDE, 2):
        begin, limit = start, stop
        if MASKED:
            begin, limit = first, end - (stop - start)
        for number in range(begin, limit, TILES.BLOCK_N):
            n = number
            if MASKED:
                n = tl.where(number < start, number, number + stop - start)
            row = first_row + n
            key = load_tile(keys, stride, row, rows - n, HEAD, TILES.BLOCK_D, not MASKED, TILES)
            value = load_tile(values, stride, row, rows - n, SIZE, TILES.BLOCK_V, not MASKED, TILES)
            if WIDE:
                # Under a condition: otherwise, without tensor cores, queries and gradients would be held
                # in registers across the loop as operands, whole rows in every thread.
                if tl.max(between(low - n, high - n, TILES.BLOCK_N).to(tl.int32)) > 0:
                    acc = _add_keys(acc, query, grad, key, value, lse, delta, low - n, high - n, scale,
                                    MASKED, TILES)  # fmt: skip
            else:
                acc = _add_keys(acc, query, grad, key, value, lse, delta, low - n, high - n, scale, MASKED,
                                TILES)  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["spans", "sums", "partials", "parts", "heads"])
def attention_queries_backward_kernel(
    keys, queries, grads, spans, sums, partials, parts, heads, scale, TILES: tl.constexpr
):
    """Compute the contribution of each part's keys to the gradient of the queries, without a factor.

    Legend: as in ``attention_kernel``; ``grads`` are the output's gradients, of its shape. ``partials``, of
    size D, hold ``dS @ K``; the missing factor, the scale of the scores, is the same for all. The grid is
    (tiles, parts).

    Ordering: nothing here waits or signals; the stream has waited for the keys before.

    Example: one row that sees two keys alike, k: P is 1/2 for both, dS = (dP - delta) / 2 each, and the
    partial result (dS + dS) * k.
    """
    _, row, _, _, part = part_line(parts.ptr, parts.first + tl.program_id(1))
    rows = partials.rows
    tile_m, batch, head = place_of_tile(tl.program_id(0), tl.cdiv(rows, TILES.BLOCK_M), heads)
    query = load_queries(queries, rows, batch, head, tile_m, False, TILES)
    grad = _load_grads(grads, rows, batch, head, tile_m, False, TILES)
    offs_m = tile_offsets(tile_m, TILES.BLOCK_M)
    # A scale of 1: no score is compared with another.
    reach = load_reach(spans, rows, batch, tile_m, 1, TILES)
    lse, delta = _load_sums(sums, heads, batch, head, tile_m, False, TILES)
    part_ptr = keys.ptr + row * keys.stride
    key_ptr, value_ptr = head_pointers(part_ptr, heads, batch, key_head(heads, head), TILES)
    key_rows = part.rows + part.more_rows
    head_keys = key_operand(key_ptr, keys.stride, key_rows, TILES.HEAD_DIM, TILES.BLOCK_D, TILES)
    values = key_operand(value_ptr, keys.stride, key_rows, TILES.VALUE_DIM, TILES.BLOCK_V, TILES)
    acc = tl.full((TILES.BLOCK_M, TILES.BLOCK_D), 0.0, tl.float32)
    # One loop over the runs: the code of a run is there once.
    for run in range(1 + tl.minimum(part.more_rows, 1)):
        first_row = tl.where(run == 0, 0, part.rows)
        run_rows = tl.where(run == 0, part.rows, part.more_rows)
        position = tl.where(run == 0, part.position, part.more_position)
        acc = _take_keys(acc, query, grad, lse, delta, reach, head_keys, values, keys.stride, first_row,
                         run_rows, position, scale, TILES)  # fmt: skip
    of_part = part.number * heads.batches * heads.heads + batch * heads.heads + head
    pointers = partials.ptr + (of_part * rows + offs_m)[:, None] * TILES.HEAD_DIM
    pointers += tl.arange(0, TILES.BLOCK_D)[None, :]
    tl.store(pointers, acc, mask=row_mask(offs_m, rows, TILES.HEAD_DIM, TILES.BLOCK_D))


@triton.jit
def _tiles_that_see(spans, rows, batch, base, first, last, TILES: tl.constexpr):
    """Return two sets of tiles of queries, from ``base`` on: bits of a number, and how many there are.

    The rows of the first set all see the keys from position ``first`` to ``last``. In each tile of the
    second set some row may see some of them. With a causal mask or a window, most tiles are in neither.
    """
    tile = tl.arange(0, _SET)
    begins = (base + tile) * TILES.BLOCK_M
    offs_m = begins[:, None] + tl.arange(0, TILES.BLOCK_M)[None, :]
    low, high = load_spans(spans, rows, batch, offs_m.to(tl.int64))
    low = low_of_seeing(low, high)
    some = (begins < rows) & (tl.min(low, 1) <= last) & (tl.max(high, 1) > first)
    inside = begins + TILES.BLOCK_M <= rows
    whole = some & inside & (tl.max(low, 1) <= first) & (tl.min(high, 1) > last)
    partly = some & (whole == 0)
    bits = tl.full((_SET,), 1, tl.uint32) << tile
    counts = tl.sum(tl.where(whole, 1, tl.where(partly, 1 << 16, 0)))
    of_whole, of_partly = tl.sum(tl.where(whole, bits, 0)), tl.sum(tl.where(partly, bits, 0))
    return of_whole, counts & 0xFFFF, of_partly, counts >> 16


@triton.jit
def _lowest(bits):
    """Return the number of the lowest bit: the exponent of a power of two, which fp32 has exactly."""
    return ((bits ^ (bits & (bits - 1))).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _product_of_keys(key, query, TILES: tl.constexpr):
    if key.dtype == tl.float32:
        # Without tensor cores, keys as rows would be in the registers of every thread.
        product = tl.trans(_turned_product(query, key, TILES))
    else:
        product = _turned_product(key, query, TILES)
    return product


@triton.jit
def _take_queries(of_key, of_value, kept, tiles, queries, grads, spans, sums, heads, batch, head, scale,
                  MASKED: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Add the contributions of a set of tiles of queries, lowest first, to ``of_key`` and ``of_value``.

    ``kept``: keys, values, positions. ``tiles``: the first that may be in the set, its bits, how many.
    """
    key, value, positions = kept
    base, bits, rounds = tiles
    for _ in range(rounds):
        tile_m = base + _lowest(bits)
        bits &= bits - 1
        query = load_queries(queries, sums.rows, batch, head, tile_m, not MASKED, TILES)
        grad = _load_grads(grads, sums.rows, batch, head, tile_m, not MASKED, TILES)
        product = _product_of_keys(key, query, TILES)
        of_weight = _product_of_keys(value, grad, TILES)
        # After the products: numbers along columns take many registers.
        lse, delta = _load_sums(sums, heads, batch, head, tile_m, not MASKED, TILES)
        seen = None
        if MASKED:
            low, high = load_spans(spans, sums.rows, batch, tile_offsets(tile_m, TILES.BLOCK_M))
            seen = (low[None, :] <= positions[:, None]) & (positions[:, None] < high[None, :])
        weight = _weights(product, lse[None, :], seen, scale)
        of_score = (weight * (of_weight - delta[None, :])).to(query.dtype)
        of_key = tl.dot(of_score, query, of_key, input_precision=TILES.INPUT_PRECISION)
        weight = weight.to(grad.dtype)
        of_value = tl.dot(weight, grad, of_value, input_precision=TILES.INPUT_PRECISION)
    return of_key, of_value


@triton.jit(do_not_specialize=["spans", "sums", "parts", "heads"])
def attention_keys_backward_kernel(
    keys, queries, grads, spans, sums, output_ptr, parts, heads, scale, factor, TILES: tl.constexpr
):
    """Compute the contribution of this rank's queries to the gradients of each part's keys and values.

    Legend: as in ``attention_queries_backward_kernel``; ``output``, fp32, is packed like the keys, from the
    part's first row on. ``factor`` is the scale of the scores, ``scale`` is that times log2(e). The grid is
    (tiles of keys, batches * key heads, parts).

    Ordering: nothing here waits or signals. The results are published after the kernel, on its stream.

    Example: 4 heads of queries, 2 of keys: program (0, 1, 0) has the first tile of keys of key head 1, and
    adds up the contributions of the queries of head 2, then of head 3. For each 32 tiles of queries it
    first takes those that see all of the keys, then the others that see some.
    """
    _, row, _, _, part = part_line(parts.ptr, parts.first + tl.program_id(2))
    batch = tl.program_id(1) // heads.key_heads
    of_head = tl.program_id(1) % heads.key_heads
    key_rows = part.rows + part.more_rows
    offs_n = tile_offsets(tl.program_id(0), TILES.BLOCK_N)
    there = offs_n < key_rows
    places = offs_n * keys.stride
    key_ptr, value_ptr = head_pointers(keys.ptr + row * keys.stride, heads, batch, of_head, TILES)
    key = load_places(key_ptr, places, there, TILES.HEAD_DIM, TILES.BLOCK_D)
    value = load_places(value_ptr, places, there, TILES.VALUE_DIM, TILES.BLOCK_V)
    # Positions of the keys: first one run, then the other. Keys beyond the end need no
    # mask, because their results are not stored.
    index = offs_n.to(tl.int32)
    more_position = part.more_position + index - part.rows
    positions = tl.where(index < part.rows, part.position + index, more_position)
    first = tl.min(tl.where(there, positions, (1 << 31) - 1))
    last = tl.max(tl.where(there, positions, -1))
    first_head = tl.maximum(of_head * heads.per_key - heads.first_head, 0)
    end_head = tl.minimum((of_head + 1) * heads.per_key - heads.first_head, heads.heads)
    sets = tl.cdiv(sums.rows, TILES.BLOCK_M * _SET)
    kept = (key, value, positions)
    of_key = tl.full((TILES.BLOCK_N, TILES.BLOCK_D), 0.0, tl.float32)
    of_value = tl.full((TILES.BLOCK_N, TILES.BLOCK_V), 0.0, tl.float32)
    for number in range(first_head * sets, end_head * sets):
        head, base = number // sets, number % sets * _SET
        whole, many, some, more = _tiles_that_see(spans, sums.rows, batch, base, first, last, TILES)
        if key.dtype == tl.float32:
            some, more = whole | some, many + more
        else:
            of_key, of_value = _take_queries(of_key, of_value, kept, (base, whole, many), queries, grads,
                                             spans, sums, heads, batch, head, scale, False,
                                             TILES)  # fmt: skip
        of_key, of_value = _take_queries(of_key, of_value, kept, (base, some, more), queries, grads, spans,
                                         sums, heads, batch, head, scale, True, TILES)  # fmt: skip
    output = output_ptr + row * keys.stride
    key_ptr, value_ptr = head_pointers(output, heads, batch, of_head, TILES)
    pointers = key_ptr + (places[:, None] + tl.arange(0, TILES.BLOCK_D)[None, :])
    mask = row_mask(offs_n, key_rows, TILES.HEAD_DIM, TILES.BLOCK_D)
    tl.store(pointers, of_key * factor, mask=mask)
    pointers = value_ptr + (places[:, None] + tl.arange(0, TILES.BLOCK_V)[None, :])
    mask = row_mask(offs_n, key_rows, TILES.VALUE_DIM, TILES.BLOCK_V)
    tl.store(pointers, of_value, mask=mask)
