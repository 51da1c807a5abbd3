"""Combine: every row goes back to the rank of its token, which sums over the token's slots.

Legend: rows are in the order of the dispatch, and ``segments`` are its table (``dispatch.py``). At home a
rank's rows have another order: by expert of the group, then by its tokens. So the rows that one rank sends
home are contiguous there, and so is each segment.

Rows come back one by one, and are not summed over the experts that a token has on one rank. So a sum goes
over slots, 0, 1, 2 ..., in fp32, and is rounded once. It does not depend on the ranks of the experts, nor
on timing. The price is bytes: a token with several experts on one rank comes back as many times.

The second matmul of a mixture of experts is a grouped matmul whose rows return home as they are computed.

Rows are sorted by expert, then by the rank that they came from, and return there. A *segment*, the rows of
one expert for one rank, is contiguous here and at home. The persistent matmul computes the rows of the next
rank first and its own last, like matmul + reduce-scatter. Each tile is stored into the workspace of its
destination rank. A program signals once it has stored all of its tiles for a rank there. Then the same
programs sum every token's rows by slot::

    rank 0 of 3  | rows of rank 1: experts a, b | rows of rank 2: a, b | own rows: a, b | sum by slot |
                                             publish              publish            publish

So no part of the product is written twice, and nothing is sorted: tiles are stored at their final places.
A program signals every rank, also one for which it has no tile. The tile that a token waits for depends on
the routing, and to compute that takes longer than to wait for all.

Rejected: sums over the experts of a rank before rows travel (other bits for every placement of experts),
and atomic adds to the token (the order of arrival changes the bits).
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import Epilogue
from interlace.kernels.epilogue import emit_tile
from interlace.kernels.experts.dispatch import SEGMENT_NUMBERS
from interlace.kernels.products import columns_operand, multiply_tile, part_of_rows, rows_operand
from interlace.kernels.signal import current_epoch, peer_pointer, publish, wait_credit
from interlace.kernels.slots import wait_all
from interlace.kernels.tiling import first_tile, grouped_tile
from interlace.kernels.transfer import copy_rows, data_pointer, table_line

POLLED = 128  # slots that are polled together
_SEGMENT = tl.constexpr(SEGMENT_NUMBERS)
_POLLED = tl.constexpr(POLLED)


@triton.jit
def sum_slots(workspace, home_ptr, combined, N, each, epoch, SLOTS: tl.constexpr):
    """Wait for all ranks' ``each`` slots; ``output[t]`` = sum over slots k of ``weight[t, k] * home[row]``.

    ``home``: the rows that have come back, ``[rows, N]``. A token without any row is 0.
    """
    TOPK: tl.constexpr = SLOTS.TOPK
    ROWS: tl.constexpr = SLOTS.SUM_ROWS
    COLUMNS: tl.constexpr = SLOTS.BLOCK_COLUMNS
    # All waits before the sums: a token's rows come from any rank, by any of its programs. If rows are
    # missing nothing is summed: the sum would be wrong, and the op has failed.
    if wait_all(workspace, workspace.slot_offset, each, epoch, _POLLED) == 0:
        tiles_n = tl.cdiv(N, COLUMNS)
        tiles = tl.cdiv(combined.own_tokens, ROWS) * tiles_n
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            # int64 before the products: rows and their lengths may pass 2**31 elements.
            token = (tile // tiles_n).to(tl.int64) * ROWS + tl.arange(0, ROWS)
            column = (tile % tiles_n) * COLUMNS + tl.arange(0, COLUMNS)
            mask = token < combined.own_tokens
            inside = (column < N)[None, :]
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            # By slot, not by arrival: fp32 sums depend on the order. Unrolled, so that the rows of several
            # slots are loaded before the first is added.
            for slot in tl.range(TOPK, loop_unroll_factor=4):
                row = tl.load(combined.inverse_ptr + token * TOPK + slot, mask=mask, other=-1)
                there = (row >= 0)[:, None] & inside
                pointers = home_ptr + row[:, None] * N + column[None, :]
                value = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
                if SLOTS.WEIGHTED:
                    # The weight of a slot without a row may be anything, also NaN.
                    weight_ptr = combined.slot_weights_ptr + token * TOPK + slot
                    value *= tl.load(weight_ptr, mask=row >= 0, other=0.0)[:, None]
                total += value
            pointers = combined.output_ptr + token[:, None] * N + column[None, :]
            tl.store(
                pointers,
                total.to(combined.output_ptr.dtype.element_ty),
                mask=mask[:, None] & inside,
            )


@triton.jit(do_not_specialize=["workspace", "combined", "sizes"])
def combine_kernel(workspace, rows, segments_ptr, combined, sizes, N, SLOTS: tl.constexpr):
    """Send rows home; ``output[t] = sum over slots k of weight[t, k] * row of (t, k)``.

    Legend: ``rows`` ``[R, N]``, R rows of this rank's experts; ``segments``, int64 ``[E, W, 3]``: first
    row here, rows, and the first of them at home. ``inverse``, int64 ``[T, TOPK]``: the home row of a
    slot. A rank's workspace has room for its home rows, ``[rows, N]``, in the dtype of ``rows``.

    Ordering: a sender waits for the owner's credit, stores, publishes its slot, one per source and sender.
    Waits for rows begin when all is sent, so no order of programs blocks. Sums are loaded after the wait
    for all slots. The workspace may be written again after finish_kernel.

    Example: W = 2, E = 1, TOPK = 2, rank 0's tokens have experts (0, 1) and (1, -), rank 1 has none. Rank
    1's ``segments`` are [[0, 2, 1], [2, 0, 0]]: rows 0 and 1 go to rows 1 and 2 of rank 0, which has sent
    its own row 0 to row 0. ``inverse`` is [[0, 1], [2, -1]]: output 0 is w * row 0 + w * row 1, output 1
    w * row 2.
    """
    epoch = current_epoch(workspace)
    world_size = workspace.world_size
    for item in range(tl.program_id(0), world_size * sizes.senders, tl.num_programs(0)):
        peer = (workspace.rank + 1 + item) % world_size
        sender = item // world_size
        if wait_credit(workspace, peer, epoch) >= epoch - 1:
            home_ptr = data_pointer(workspace, peer, rows.ptr)
            for expert in range(sizes.experts):
                segment = expert * world_size + peer
                first, count, home = table_line(segments_ptr, segment, _SEGMENT)
                # Each segment begins with another sender; otherwise the first would get all short segments.
                begin = (sender + expert) % sizes.senders * SLOTS.BLOCK_ROWS
                for row in range(begin, count.to(tl.int32), sizes.senders * SLOTS.BLOCK_ROWS):
                    some = min(count - row, SLOTS.BLOCK_ROWS)
                    from_ptr = rows.ptr + (first + row) * rows.stride
                    copy_rows(home_ptr + (home + row) * N, N, from_ptr, rows.stride, some, N,
                              SLOTS.BLOCK_ROWS, SLOTS.BLOCK_COLUMNS)  # fmt: skip
            slot = workspace.rank * sizes.senders + sender
            publish(peer_pointer(workspace, peer, workspace.slot_offset + slot * 8), epoch)
    own_ptr = data_pointer(workspace, workspace.rank, rows.ptr)
    sum_slots(workspace, own_ptr, combined, N, sizes.senders, epoch, SLOTS)


@triton.jit
def _multiply_for(workspace, input, whole, weight, bias_ptr, home_ptr, segments_ptr, peer, num_experts,
                  start, N, K, TILES: tl.constexpr):  # fmt: skip
    """Store this program's tiles of the rows of ``peer``; return the number of the next rank's first."""
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    programs = tl.num_programs(0)
    for expert in range(num_experts):
        segment = expert * workspace.world_size + peer
        first_row, count, home = table_line(segments_ptr, segment, _SEGMENT)
        # 32 bits, as the shape of a descriptor has.
        rows = count.to(tl.int32)
        tiles_m = tl.cdiv(rows, TILES.BLOCK_M)
        end = start + tiles_m * tiles_n
        first = first_tile(start, tl.program_id(0), programs)
        if first < end:
            a_ptr = input.ptr + first_row * input.stride
            a, a_row = part_of_rows(whole, a_ptr, input.stride, first_row, rows, K, TILES)
            b_ptr = weight.ptr + tl.cast(expert, tl.int64) * weight.stride_e
            b = columns_operand(b_ptr, weight, N, K, TILES)
            of_expert = Epilogue(bias_ptr + expert * N, None, None)
            # No wait and no publish in this loop, or it would not be pipelined across tiles.
            for number in tl.range(
                first, end, programs, flatten=TILES.FLATTEN, warp_specialize=TILES.WARP_SPECIALIZE
            ):
                tile_m, tile_n = grouped_tile(number - start, tiles_m, tiles_n, TILES.GROUP_M)
                acc = multiply_tile(a, input.stride, rows, weight, b, N, K, tile_m, tile_n, TILES,
                                    a_row, a_ptr, b_ptr)  # fmt: skip
                emit_tile(home_ptr + home * N, acc, of_expert, tile_m, tile_n, rows, N, TILES)
        start = end
    return start


@triton.jit(do_not_specialize=["workspace", "segments_ptr", "combined", "num_experts"])
def grouped_matmul_combine_kernel(
    workspace,
    input,
    weight,
    bias_ptr,
    segments_ptr,
    combined,
    num_experts,
    N,
    K,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
):
    """``output[t] = sum over slots k of w[t, k] * activation(row of (t, k) @ weight[e] (+ bias[e]))``.

    Legend: ``input`` ``[R, K]``, the rows of this rank's E experts; ``weight`` ``[E, K, N]``, ``bias``
    ``[E, N]``. ``segments``, int64 ``[E, W, 3]``: first row of the input, rows, and the first of them at
    home. ``inverse``, int64 ``[T, TOPK]``: the home row of a slot; ``slot_weights`` ``[T, TOPK]``, fp32.
    Tiles are numbered through; program p of P takes tiles t with ``t % P == p``. P is the same on all
    ranks. A product is rounded to the output's dtype before it travels; sums are in fp32.

    Ordering: a program waits for a rank's credit, stores its tiles there, publishes slot (source, program).
    Waits for rows begin when all tiles have been stored, so no order of programs blocks; sums are loaded
    after the wait for all slots. The workspace is free again when finish_kernel, next on the stream, has
    given this rank's credit.

    Example: W = 2, E = 1, one program per rank, TOPK = 2, rank 0's tokens have experts (0, 1) and (1, -).
    On rank 1 ``segments`` is [[0, 2, 1], [2, 0, 0]]: it multiplies rows 0 and 1, stores them as rows 1 and
    2 of rank 0 and publishes slot 1 there, then slot 1 of its own. Rank 0 publishes slot 0 on rank 1, has
    its own row 0, publishes slot 0; then it waits for slots 0 and 1 and sums: ``inverse`` is [[0, 1], [2,
    -1]].
    """
    epoch = current_epoch(workspace)
    programs = tl.num_programs(0)
    world_size = workspace.world_size
    # Once per program: making a descriptor costs a write and a fence.
    whole = rows_operand(input.ptr, input.stride, K, TILES)
    start = tl.zeros((), tl.int32)
    for step in range(world_size):
        peer = (workspace.rank + 1 + step) % world_size
        # After a timeout the rank may still be reading memory that this op would overwrite.
        if wait_credit(workspace, peer, epoch) >= epoch - 1:
            home_ptr = data_pointer(workspace, peer, combined.output_ptr)
            start = _multiply_for(workspace, input, whole, weight, bias_ptr, home_ptr, segments_ptr,
                                  peer, num_experts, start, N, K, TILES)  # fmt: skip
            slot = workspace.rank * programs + tl.program_id(0)
            publish(peer_pointer(workspace, peer, workspace.slot_offset + slot * 8), epoch)
    own_ptr = data_pointer(workspace, workspace.rank, combined.output_ptr)
    sum_slots(workspace, own_ptr, combined, N, programs, epoch, SLOTS)
