"""Attention whose keys and values arrive while it runs, part by part; and the merge of its results.

Every rank has a shard of the sequence: its queries stay, keys and values of all ranks come to it. The
attention of a rank to the keys of one source is a *partial result*: the normalised output and the logarithm
of its sum of exponentials. Partial results are kept apart, in fp32, until all exist, and then merged in the
order of the ranks. So a result has the same bits whatever the order of arrival. It has the same bits, too,
if keys travel by copiers of this kernel, by the copy engine, around a ring, or heads by an all-to-all::

    rank 1  copiers    | keys -> 2 | keys -> 0 |
            consumers  | own keys ....... | wait 0, keys of 0 ... | wait 2, keys of 2 ... |
    then    merge      | partial 0, partial 1, partial 2 -> output |

Why not one running softmax over all parts, which would need no memory for partial results? Its bits depend
on the order of the parts. In the order of the ranks every rank would begin by waiting for rank 0.
"""

import triton
import triton.language as tl

from interlace.kernels.attention.tiles import (
    attend_part,
    part_line,
    place_of_tile,
    row_elements,
    row_mask,
)
from interlace.kernels.products import tile_offsets
from interlace.kernels.signal import current_epoch, fence_descriptor_loads, wait
from interlace.kernels.transfer import data_pointer, push_chunks


@triton.jit(do_not_specialize=["workspace", "spans", "partials", "sends", "parts", "heads"])
def all_gather_attention_kernel(
    workspace,
    keys,
    queries,
    spans,
    partials,
    sends,
    parts,
    heads,
    scale,
    COPIES: tl.constexpr,
    TILES: tl.constexpr,
):
    """Compute partial results of this rank's queries over every rank's keys, gathered meanwhile.

    Legend: ``keys`` are this rank's, packed (``tiles.py``), ``stride`` elements to a row. ``queries``,
    ``spans``, ``partials``, ``heads``: see ``arguments.py``. ``sends``: see ``kernels/transfer.py``.
    ``parts``: a line per source in the order of consumption: source, number of its partial result, first
    row of its keys among all ranks', rows and position of its first run, of its second (0 rows: no run),
    first slot, slots. Tiles are numbered over all heads; consumer p of P takes tiles t with t % P == p, of
    every part.

    Ordering: copiers wait for the receiver's credit, store, publish the chunk's slot. Consumers wait for
    all slots of a part and load its keys in loops nested below the waits. The workspace may be rewritten
    after finish_kernel, which follows on the stream, has given the credit. Copiers have the lowest program
    ids and wait for no keys, so the grid makes progress if it is resident with one consumer.

    Example: W = 2, 64 rows per rank in one chunk, 1 batch, 2 heads, tiles of 64 rows, COPIERS = 1, grid 3.
    Program 0 of rank 0 copies its keys to rank 1 and publishes slot 0 there. Programs 1 and 2 take tiles
    0 (head 0) and 1 (head 1) over the own keys, then wait for slot 1, and take them over rank 1's keys.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    # Copiers come first: whatever is resident, the programs that others wait for have begun.
    if program < COPIES.COPIERS:
        push_chunks(workspace, keys, sends, keys.stride, epoch, COPIES)
    else:
        programs = tl.num_programs(0) - COPIES.COPIERS
        tiles = tl.cdiv(partials.rows, TILES.BLOCK_M) * heads.batches * heads.heads
        for number in range(parts.count):
            source, row, first_slot, slots, part = part_line(parts.ptr, number)
            # As integers: facts that the compiler knows about one address must not apply to the other.
            address = keys.ptr.to(tl.int64)
            if source != workspace.rank:
                # The values of the waits are not checked: a failed op spoils only this rank's results.
                for slot in range(first_slot, first_slot + slots):
                    wait(workspace, source, workspace.slot_offset + slot * 8, epoch)
                # The waits order generic loads; TMA reads through another proxy.
                fence_descriptor_loads(TILES.COMPILED and TILES.DESCRIPTORS)
                gathered_ptr = data_pointer(workspace, workspace.rank, keys.ptr)
                address = (gathered_ptr + row * keys.stride).to(tl.int64)
            part_ptr = address.to(keys.ptr.dtype)
            if TILES.HEAD_DIM % 16 == 0 and TILES.VALUE_DIM % 16 == 0:
                part_ptr = tl.multiple_of(part_ptr, 16)
            for tile in range(program - COPIES.COPIERS, tiles, programs):
                attend_part(queries, spans, partials, part_ptr, keys.stride, part, heads, tile, scale,
                            TILES)  # fmt: skip


@triton.jit(do_not_specialize=["spans", "partials", "parts", "heads"])
def attention_kernel(keys, queries, spans, partials, parts, heads, scale, TILES: tl.constexpr):
    """Compute partial results over keys that are all in ``keys``: for ``parts``, lines of the table.

    Legend: as in ``all_gather_attention_kernel``; ``parts`` is a ``TablePart``, a line's row is a row of
    ``keys``. The grid is (tiles of all heads, parts).

    Ordering: nothing here waits or signals; the stream has waited for the keys before.

    Example: a ring's third step: ``keys`` is the buffer with the keys of rank r - 2, ``parts`` that rank's
    line, the grid (tiles, 1).
    """
    _, row, _, _, part = part_line(parts.ptr, parts.first + tl.program_id(1))
    part_ptr = keys.ptr + row * keys.stride
    attend_part(queries, spans, partials, part_ptr, keys.stride, part, heads, tl.program_id(0), scale,
                TILES)  # fmt: skip


@triton.jit(do_not_specialize=["partials", "heads", "count"])
def merge_attention_kernel(partials, output, lse_ptr, heads, count, TILES: tl.constexpr):
    """Merge the ``count`` partial results of each row, weighted by their sums of exponentials.

    Legend: ``output`` is ``[rows, batches, heads, V]``; ``lse``, ``[batches, heads, rows]``, is the natural
    logarithm of the whole sums, -inf if a row sees no key; then its output is 0. A program per tile.

    Ordering: follows the kernels of the partial results on their stream. Merges in the order of the parts,
    which is the order of the ranks.

    Example: two partial results 1.0 and 4.0 with logarithms 3 and 4, to base 2: the weights are 1/2 and 1,
    the output (0.5 + 4) / 1.5 = 3, its logarithm ln(24).
    """
    rows = partials.rows
    tile_m, batch, head = place_of_tile(tl.program_id(0), tl.cdiv(rows, TILES.BLOCK_M), heads)
    offs_m = tile_offsets(tile_m, TILES.BLOCK_M)
    inside = offs_m < rows
    mask = row_mask(offs_m, rows, TILES.VALUE_DIM, TILES.BLOCK_V)
    offs_v = tl.arange(0, TILES.BLOCK_V)
    lines = (batch * heads.heads + head) * rows + offs_m
    part_lines = rows.to(tl.int64) * heads.batches * heads.heads
    largest = tl.full((TILES.BLOCK_M,), float("-inf"), tl.float32)
    for number in range(count):
        lse_ptrs = partials.lse_ptr + number * part_lines + lines
        largest = tl.maximum(largest, tl.load(lse_ptrs, mask=inside, other=float("-inf")))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    acc = tl.full((TILES.BLOCK_M, TILES.BLOCK_V), 0.0, tl.float32)
    total = tl.full((TILES.BLOCK_M,), 0.0, tl.float32)
    for number in range(count):
        at = number * part_lines + lines
        lse = tl.load(partials.lse_ptr + at, mask=inside, other=float("-inf"))
        weight = tl.exp2(lse - base)
        pointers = partials.ptr + at[:, None] * TILES.VALUE_DIM + offs_v[None, :]
        acc += weight[:, None] * tl.load(pointers, mask=mask, other=0.0)
        total += weight
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    result = acc / total[:, None]
    out_ptrs = row_elements(output, batch, head, offs_m, TILES.BLOCK_V)
    tl.store(out_ptrs, result.to(output.ptr.dtype.element_ty), mask=mask)
    LN2: tl.constexpr = 0.6931471805599453
    lse = tl.where(nothing, float("-inf"), (base + tl.log2(total)) * LN2)
    tl.store(lse_ptr + lines, lse, mask=inside)
