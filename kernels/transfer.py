"""Moving data: chunks pushed to peers, and the plain all-gather.

A matrix is ``rows x columns``; a flat tensor of n elements is ``n x 1``. The launch hands over a table of
sends in the order of ``tiling.send_order``, one line of int64 per send::

    destination, first row in the shard, rows, first row in the gathered matrix, slot

The table of arrivals has the same form, with the source in place of the destination. A chunk has the
same slot on every rank: its number among all chunks in rank order.
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import Copies, Rows
from interlace.kernels.signal import current_epoch, peer_pointer, publish, wait, wait_credit

TRANSFER_COLUMNS = 5
_COLUMNS = tl.constexpr(TRANSFER_COLUMNS)
# The bytes that a program that copies much loads ahead. With less, its share of a link waits for memory.
IN_FLIGHT_BYTES = 64 << 10
_IN_FLIGHT = tl.constexpr(IN_FLIGHT_BYTES)
_MOST_STAGES = tl.constexpr(9)


@triton.jit
def region_pointer(peers, peer, byte_offset, like_ptr):
    """Point to ``peer``'s buffer at ``byte_offset``, a multiple of 256, with the type of ``like_ptr``."""
    address = tl.load(peers.peers_ptr + peer) + byte_offset
    # Both are multiples of 256. The address comes from a table, so the compiler does not know it. Without
    # this hint it splits every access here into single elements.
    return tl.multiple_of(address.to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)


@triton.jit
def data_pointer(workspace, peer, like_ptr):
    """Point to ``peer``'s data region, with the type of ``like_ptr``."""
    return region_pointer(workspace, peer, workspace.data_offset, like_ptr)


@triton.jit
def table_line(table_ptr, number, COLUMNS: tl.constexpr):
    """Load the numbers of one line of a table of int64."""
    line = table_ptr + number * COLUMNS
    values = (tl.load(line),)
    for column in tl.static_range(1, COLUMNS):
        values += (tl.load(line + column),)  # type: ignore[assignment]
    return values


@triton.jit
def aligned_pointer(ptr):
    """Round ``ptr`` down to 16 bytes, so that the compiler knows it; an aligned ``ptr`` does not change.

    A bare ``tl.multiple_of(ptr, 16)`` would mark the operation that made ``ptr``. Then the hint would also
    hold where the caller has not checked the alignment.
    """
    return tl.multiple_of(((ptr.to(tl.int64) >> 4) << 4).to(ptr.dtype), 16)


@triton.jit
def copy_elements(to_ptr, from_ptr, elements, BLOCK: tl.constexpr, IN_FLIGHT: tl.constexpr = 0):
    """Copy ``elements``, contiguous on both sides: whole blocks by 16 bytes if both are aligned.

    ``IN_FLIGHT``: bytes that are loaded ahead, into shared memory, if there are many blocks.
    """
    ITEM: tl.constexpr = max(1, from_ptr.dtype.element_ty.primitive_bitwidth // 8)
    STAGES: tl.constexpr = min(1 + IN_FLIGHT // (BLOCK * ITEM), _MOST_STAGES)
    # A 0 of the same type as `elements`: a variable must have one type in both branches.
    whole = elements - elements
    # Checked at run time: a pointer into the middle of a tensor may have any alignment. A mask would split
    # the 16 bytes again, so only the rest has a mask.
    if ((to_ptr.to(tl.int64) | from_ptr.to(tl.int64)) & 15) == 0:
        whole = elements // BLOCK * BLOCK
        aligned_to_ptr = aligned_pointer(to_ptr)
        aligned_from_ptr = aligned_pointer(from_ptr)
        for first in tl.range(0, whole, BLOCK, num_stages=STAGES):
            offsets = first + tl.arange(0, BLOCK)
            tl.store(aligned_to_ptr + offsets, tl.load(aligned_from_ptr + offsets))
    for first in range(whole, elements, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        mask = offsets < elements
        tl.store(to_ptr + offsets, tl.load(from_ptr + offsets, mask=mask), mask=mask)


@triton.jit
def copy_rows(to_ptr, to_stride, from_ptr, from_stride, rows, columns,
              BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):  # fmt: skip
    """Copy ``rows x columns`` elements, both sides contiguous along columns."""
    for row in range(0, rows, BLOCK_ROWS):
        # int64 before the product with a stride: it may pass 2**31 elements.
        offs_m = row + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        mask_m = (offs_m < rows)[:, None]
        for column in range(0, columns, BLOCK_COLUMNS):
            offs_n = column + tl.arange(0, BLOCK_COLUMNS)
            mask = mask_m & (offs_n < columns)[None, :]
            block = tl.load(from_ptr + offs_m[:, None] * from_stride + offs_n[None, :], mask=mask)
            tl.store(to_ptr + offs_m[:, None] * to_stride + offs_n[None, :], block, mask=mask)


@triton.jit
def copy_chunk(to_ptr, from_ptr, from_stride, rows, columns,
               BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):  # fmt: skip
    """Copy rows to a dense destination; dense rows are copied as one piece, loaded ahead."""
    if from_stride == columns:
        # int64 before the product: it may pass 2**31 elements.
        elements = (rows + tl.zeros((), tl.int64)) * columns
        copy_elements(to_ptr, from_ptr, elements, BLOCK_ROWS * BLOCK_COLUMNS, _IN_FLIGHT)
    else:
        copy_rows(to_ptr, columns, from_ptr, from_stride, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)


@triton.jit
def push_chunks(workspace, input, sends, columns, epoch, COPIES: tl.constexpr,
                row_scale_ptr=None, scale_offset=0, SCALED: tl.constexpr = False):  # fmt: skip
    """Do every ``COPIERS``-th send of the table: wait for the peer's credit, copy, publish.

    If the wait has timed out nothing is stored: the peer may still be reading there.
    ``COPY_ROWS`` 0: a flat tensor, copied ``COPY_COLUMNS`` elements at a time. ``SCALED``: a number per
    row, ``row_scale_ptr[row]``, goes with its chunk, to ``scale_offset`` of the peer's workspace.
    """
    # Every n-th, not a contiguous range: early chunks leave first, whichever program sends them.
    for send in range(tl.program_id(0), sends.count, COPIES.COPIERS):
        peer, first_row, rows, gathered_row, slot = table_line(sends.ptr, send, _COLUMNS)
        # Per send and not once for all: a peer that is ready gets its chunk while another still reads.
        if wait_credit(workspace, peer, epoch) >= epoch - 1:
            to_ptr = data_pointer(workspace, peer, input.ptr) + gathered_row * columns
            from_ptr = input.ptr + first_row * input.stride
            if COPIES.COPY_ROWS == 0:
                copy_elements(to_ptr, from_ptr, rows, COPIES.COPY_COLUMNS, _IN_FLIGHT)
            else:
                copy_chunk(to_ptr, from_ptr, input.stride, rows, columns,
                           COPIES.COPY_ROWS, COPIES.COPY_COLUMNS)  # fmt: skip
            if SCALED:
                # Before the signal, which covers both: a consumer waits once per chunk.
                scales_ptr = region_pointer(workspace, peer, scale_offset, row_scale_ptr)
                copy_elements(scales_ptr + gathered_row, row_scale_ptr + first_row, rows, 128)
            publish(peer_pointer(workspace, peer, workspace.slot_offset + slot * 8), epoch)


@triton.jit(do_not_specialize=["workspace", "sends", "arrivals"])
def all_gather_kernel(workspace, input_ptr, output_ptr, sends, arrivals,
                      COPIERS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """All-gather: programs below ``COPIERS`` push the shard, the others collect the output.

    Legend: the shard is ``[n_r]``, the output ``[sum of n]``, flat; a "row" is one element here.
    ``sends``, ``arrivals``: tables as the module describes; the own chunks are arrivals too.

    Ordering: a copier waits for the receiver's credit (it has finished the previous op here), copies,
    publishes the chunk's slot. A collector waits for the slot, then reads the workspace. The
    workspace is reused only after finish_kernel has given this rank's credit. Copiers have the lower
    program ids and never wait for collectors.

    Example: 2 ranks, 3 elements each, chunks of 2. Rank 0 sends elements 0-1 to slot 0 and element 2
    to slot 1 of rank 1; rank 1 collects its own elements 3-5 from its input, then 0-1 once slot 0 is
    at the epoch, then 2 once slot 1 is.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    # Producers have the lower numbers. Whatever part of the grid is resident, the programs that others wait
    # for have begun. With collectors first, waiting programs could fill a small GPU.
    if program < COPIERS:
        flat = Rows(input_ptr, 1)
        push_chunks(workspace, flat, sends, 1, epoch, Copies(COPIERS, 0, BLOCK))
    else:
        gathered_ptr = data_pointer(workspace, workspace.rank, input_ptr)
        # Collectors count from 0, because copiers take no arrivals.
        for arrival in range(program - COPIERS, arrivals.count, tl.num_programs(0) - COPIERS):
            source, first_row, rows, gathered_row, slot = table_line(
                arrivals.ptr, arrival, _COLUMNS
            )
            from_ptr = input_ptr + first_row
            # The value of the wait is not checked: the copy fills only this rank's output, of a failed op.
            # The loads cannot overtake the wait: they are in a loop after it.
            if source != workspace.rank:
                wait(workspace, source, workspace.slot_offset + slot * 8, epoch)
                from_ptr = gathered_ptr + gathered_row
            copy_elements(output_ptr + gathered_row, from_ptr, rows, BLOCK, _IN_FLIGHT)
