"""Combine: every row goes back to the rank of its token, which sums over the token's slots.

Legend: rows are as a dispatch has sorted them, ``segments`` as it has found them
(``dispatch.py``). At home a rank's rows have an order of their own: by expert of all the
group's, then as its tokens are. So what one rank sends home, and there each segment, is contiguous.

Rows come back one by one, and not summed over the experts that a token has on one rank: so a sum goes over
slots, 0, 1, 2 ..., in fp32, and is rounded once. It is the same whatever rank an expert is on, and whoever
is late. The price is bytes: a token with several experts on one rank comes back as often.
"""

import triton
import triton.language as tl

from interlace.kernels.experts.dispatch import SEGMENT_NUMBERS
from interlace.kernels.signal import current_epoch, peer_pointer, publish, wait_credit
from interlace.kernels.slots import wait_all
from interlace.kernels.transfer import copy_rows, data_pointer, table_line

POLLED = 128  # slots that are looked at together
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
    # All waits before the sums: a token's rows come from any rank, by any of its programs. What has not
    # come is not looked at, as the sum would be no sum; the op has failed then.
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
            # slots are on their way before the first is added.
            for slot in tl.range(TOPK, loop_unroll_factor=4):
                row = tl.load(combined.inverse_ptr + token * TOPK + slot, mask=mask, other=-1)
                there = (row >= 0)[:, None] & inside
                pointers = home_ptr + row[:, None] * N + column[None, :]
                value = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
                if SLOTS.WEIGHTED:
                    # Of a slot without a row the weight may be anything, not a number too.
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
    Waits for rows begin when all is sent, so no order of programs blocks. Sums are loaded behind the wait
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
                # Another sender begins each segment: short ones would all be the first one's.
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
