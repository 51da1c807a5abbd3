"""Gradients of an attention, recomputed from what the forward has kept: output and logarithm of the sums.

Part by part as the forward: of the keys of one source, what they give to the gradient of the queries is a
partial result, and what the own queries give to the gradient of these keys is this rank's contribution,
which goes back to the source. Both are fp32, and are added up in the order of the ranks.

With P = exp2(score - lse), the weights, dP = dO @ V.T and delta = sum(dO * O), per row::

    dS = P * (dP - delta)       dQ = dS @ K * scale       dK = dS.T @ Q * scale       dV = P.T @ dO

Two kernels and no atomics: one has a tile of queries and goes over keys, the other a tile of keys and goes
over queries, of all heads that see them in their order. Scores are computed in both.
"""

import triton
import triton.language as tl

from interlace.kernels.attention.tiles import (
    first_and_end,
    head_pointers,
    key_head,
    load_queries,
    load_rows,
    load_spans,
    part_line,
    place_of_tile,
    row_mask,
    scores,
    sees,
)
from interlace.kernels.matmul import tile_offsets


@triton.jit
def _load_sums(sums, heads, batch, head, tile_m, TILES: tl.constexpr):
    """(logarithm of the sum, delta) of each row; what is beyond the last row weighs nothing."""
    offs_m = tile_offsets(tile_m, TILES.BLOCK_M)
    lines = (batch * heads.heads + head) * sums.rows + offs_m
    inside = offs_m < sums.rows
    lse = tl.load(sums.lse_ptr + lines, mask=inside, other=float("inf"))
    return lse, tl.load(sums.delta_ptr + lines, mask=inside, other=0.0)


@triton.jit
def _load_grads(grads, rows, batch, head, tile_m, TILES: tl.constexpr):
    return load_rows(grads, rows, batch, head, tile_m, TILES.VALUE_DIM, TILES.BLOCK_V, TILES)


@triton.jit
def _differentiate_tile(
    query, key, value, grad, acc, lse, delta, valid, scale, TILES: tl.constexpr
):
    weight = tl.exp2(scores(query, key, valid, scale, TILES) - lse[:, None])
    of_weight = tl.dot(grad, tl.trans(value), input_precision=TILES.INPUT_PRECISION)
    of_score = weight * (of_weight - delta[:, None])
    return tl.dot(of_score.to(key.dtype), key, acc, input_precision=TILES.INPUT_PRECISION)


@triton.jit
def _differentiate_run(query, grad, acc, lse, delta, low, high, key_ptr, value_ptr, stride, rows, position,
                       scale, TILES: tl.constexpr):  # fmt: skip
    """Add to ``acc`` what the keys of a run give to the gradient of a tile of queries."""
    offs_d = tl.arange(0, TILES.BLOCK_D)
    offs_v = tl.arange(0, TILES.BLOCK_V)
    first, end = first_and_end(low, high, rows, position, TILES)
    for n in range(first, end, TILES.BLOCK_N):
        offs_n = n + tl.arange(0, TILES.BLOCK_N)
        there, places = offs_n < rows, offs_n.to(tl.int64)[:, None] * stride
        mask = there[:, None] & (offs_d < TILES.HEAD_DIM)[None, :]
        key = tl.load(key_ptr + places + offs_d[None, :], mask=mask, other=0.0)
        valid = sees(low, high, position + offs_n) & there[None, :]
        mask = there[:, None] & (offs_v < TILES.VALUE_DIM)[None, :]
        value = tl.load(value_ptr + places + offs_v[None, :], mask=mask, other=0.0)
        if key.dtype == tl.float32:
            # Under a condition, or queries and gradients would be held in registers across the loop, as
            # operands of products without tensor cores are: whole rows in every thread.
            if tl.max(valid.to(tl.int32)) > 0:
                acc = _differentiate_tile(
                    query, key, value, grad, acc, lse, delta, valid, scale, TILES
                )
        else:
            acc = _differentiate_tile(query, key, value, grad, acc, lse, delta, valid, scale, TILES)
    return acc


@triton.jit(do_not_specialize=["spans", "sums", "partials", "parts", "heads"])
def attention_queries_backward_kernel(
    keys, queries, grads, spans, sums, partials, parts, heads, scale, TILES: tl.constexpr
):
    """What the keys of each part give to the gradient of the queries: its partial results, less a factor.

    Legend: that of ``attention_kernel``; ``grads`` are those of the output, of its shape. ``partials``,
    of size D, hold ``dS @ K``; the factor, the scale of the scores, is the same for all. The grid is
    (tiles, parts).

    Ordering: nothing here waits or signals; the stream has waited for the keys before.

    Example: one row that sees two keys alike, k: P is 1/2 for both, dS = (dP - delta) / 2 each, and the
    partial result (dS + dS) * k.
    """
    _, row, _, _, part = part_line(parts.ptr, parts.first + tl.program_id(1))
    rows = partials.rows
    tile_m, batch, head = place_of_tile(tl.program_id(0), tl.cdiv(rows, TILES.BLOCK_M), heads)
    query = load_queries(queries, rows, batch, head, tile_m, TILES)
    grad = _load_grads(grads, rows, batch, head, tile_m, TILES)
    low, high = load_spans(spans, rows, batch, tile_m, TILES)
    lse, delta = _load_sums(sums, heads, batch, head, tile_m, TILES)
    part_ptr = keys.ptr + row * keys.stride
    key_ptr, value_ptr = head_pointers(part_ptr, heads, batch, key_head(heads, head), TILES)
    acc = tl.full((TILES.BLOCK_M, TILES.BLOCK_D), 0.0, tl.float32)
    acc = _differentiate_run(query, grad, acc, lse, delta, low, high, key_ptr, value_ptr, keys.stride,
                             part.rows, part.position, scale, TILES)  # fmt: skip
    if part.more_rows > 0:
        more = part.rows.to(tl.int64) * keys.stride
        acc = _differentiate_run(query, grad, acc, lse, delta, low, high, key_ptr + more,
                                 value_ptr + more, keys.stride, part.more_rows, part.more_position,
                                 scale, TILES)  # fmt: skip
    offs_m = tile_offsets(tile_m, TILES.BLOCK_M)
    of_part = part.number * heads.batches * heads.heads + batch * heads.heads + head
    pointers = partials.ptr + (of_part * rows + offs_m)[:, None] * TILES.HEAD_DIM
    pointers += tl.arange(0, TILES.BLOCK_D)[None, :]
    tl.store(pointers, acc, mask=row_mask(offs_m, rows, TILES.HEAD_DIM, TILES.BLOCK_D))


@triton.jit(do_not_specialize=["spans", "sums", "parts", "heads"])
def attention_keys_backward_kernel(
    keys, queries, grads, spans, sums, output_ptr, parts, heads, scale, factor, TILES: tl.constexpr
):
    """What the own queries give to the gradients of the keys and values of each part.

    Legend: that of ``attention_queries_backward_kernel``; ``output``, fp32, is packed as the keys are, from
    the part's first row on. ``factor`` is the scale of the scores, ``scale`` that times log2(e). The grid
    is (tiles of keys, batches * key heads, parts).

    Ordering: nothing here waits or signals. What is stored is published after the kernel, on its stream.

    Example: 4 heads of queries, 2 of keys: program (0, 1, 0) has the first tile of keys of key head 1, and
    adds up what the queries of head 2, then those of head 3 give to them.
    """
    _, row, _, _, part = part_line(parts.ptr, parts.first + tl.program_id(2))
    batch = tl.program_id(1) // heads.key_heads
    of_head = tl.program_id(1) % heads.key_heads
    offs_n = tile_offsets(tl.program_id(0), TILES.BLOCK_N)
    key_rows = part.rows + part.more_rows
    offs_d = tl.arange(0, TILES.BLOCK_D)
    offs_v = tl.arange(0, TILES.BLOCK_V)
    there = (offs_n < key_rows)[:, None]
    mask = there & (offs_d < TILES.HEAD_DIM)[None, :]
    mask_v = there & (offs_v < TILES.VALUE_DIM)[None, :]
    first_row = row * keys.stride
    places = offs_n[:, None] * keys.stride
    key_ptr, value_ptr = head_pointers(keys.ptr + first_row, heads, batch, of_head, TILES)
    key = tl.load(key_ptr + places + offs_d[None, :], mask=mask, other=0.0)
    value = tl.load(value_ptr + places + offs_v[None, :], mask=mask_v, other=0.0)
    # Positions of the keys: those of one run, then those of the other.
    index = offs_n.to(tl.int32)
    more = part.more_position + index - part.rows
    positions = tl.where(index < part.rows, part.position + index, more)
    # What is beyond the last key is where no query looks.
    positions = tl.where(index < key_rows, positions, -1)
    first = tl.min(tl.where(index < key_rows, positions, (1 << 31) - 1))
    last = tl.max(positions)
    of_key = tl.full((TILES.BLOCK_N, TILES.BLOCK_D), 0.0, tl.float32)
    of_value = tl.full((TILES.BLOCK_N, TILES.BLOCK_V), 0.0, tl.float32)
    first_head = tl.maximum(of_head * heads.per_key - heads.first_head, 0)
    end_head = tl.minimum((of_head + 1) * heads.per_key - heads.first_head, heads.heads)
    tiles_m = tl.cdiv(sums.rows, TILES.BLOCK_M)
    for number in range(first_head * tiles_m, end_head * tiles_m):
        head = number // tiles_m
        tile_m = number % tiles_m
        low, high = load_spans(spans, sums.rows, batch, tile_m, TILES)
        # Most tiles of queries see none of these keys where the mask is causal or a window.
        if (tl.min(low) <= last) & (tl.max(high) > first):
            query = load_queries(queries, sums.rows, batch, head, tile_m, TILES)
            grad = _load_grads(grads, sums.rows, batch, head, tile_m, TILES)
            lse, delta = _load_sums(sums, heads, batch, head, tile_m, TILES)
            valid = sees(low, high, positions)
            weight = tl.exp2(scores(query, key, valid, scale, TILES) - lse[:, None])
            turned = tl.trans(weight.to(grad.dtype))
            of_value = tl.dot(turned, grad, of_value, input_precision=TILES.INPUT_PRECISION)
            of_weight = tl.dot(grad, tl.trans(value), input_precision=TILES.INPUT_PRECISION)
            of_score = weight * (of_weight - delta[:, None])
            turned = tl.trans(of_score.to(query.dtype))
            of_key = tl.dot(turned, query, of_key, input_precision=TILES.INPUT_PRECISION)
    key_ptr, value_ptr = head_pointers(output_ptr + first_row, heads, batch, of_head, TILES)
    tl.store(key_ptr + places + offs_d[None, :], of_key * factor, mask=mask)
    tl.store(value_ptr + places + offs_v[None, :], of_value, mask=mask_v)
