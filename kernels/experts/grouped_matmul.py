"""Grouped matmul of rows that are still travelling: the first matmul of a mixture of experts.

Every expert has its own weight, and rows that all ranks send it. A rank's rows are sorted by expert, so the
rows that one rank sends to one expert are contiguous: a *segment*. Segments are cut into chunks of
``chunk_rows``; each chunk is pushed to its place in the receiver's workspace, and signalled. The consumers
take their own segments first, in place, then those of rank - 1, rank - 2 ... This is the order of arrival,
because the peers send to rank + 1, rank + 2 ... in turn::

    rank 0  copiers    | to 1: expert a, b | to 2: expert c, d | wait 1: tiles of a, b
            consumers  | own tiles, a, b ..... | wait 2: tiles of a, b | wait 1: tiles of a, b |

The sends and the offsets decide whether all ranks' rows go to all ranks (all-gather) or each row to the
rank that has its expert (all-to-all). The kernel gets no counts or shapes that depend on the routing as
arguments. It reads them in device memory, so one compilation does for all routings.

A tile never has rows of two sources, so it waits for one chunk. The price is tiles that are not full, in at
most one row of tiles per expert and source.

Slots need no table. Segment i begins at row o of the workspace, and its chunk p has slot
``i + o // chunk_rows + p``. A segment of n rows has at most ``1 + (n - 1) // chunk_rows`` chunks, so the
next segment's slots are larger.

There are two kernels with the same consumer. If the host knows all ranks' counts
(``grouped_matmul_kernel``) rows arrive in the order of the output, and the segments' table comes with the
launch. If it does not (``counted_grouped_matmul_kernel``) every source has a region in every rank's
workspace, large enough for the most rows of a rank, so no sender asks for memory. Counts travel beside the
rows, as in a dispatch::

    copiers         rows for rank + 1 | rank + 2 | ...
    first consumer  counts to all | waits for theirs: where does each segment begin? | publishes the table
    all others      wait for the table | own tiles, a, b | ...

Rejected there: an exchange of counts before the rows (a round trip more until the first row leaves).
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import ArrivingRows, Epilogue, Table
from interlace.kernels.epilogue import emit_tile, output_operand, part_of_output
from interlace.kernels.experts.dispatch import SEGMENT_NUMBERS, find_segments, send_counts
from interlace.kernels.products import columns_operand, multiply_tile, part_of_rows, rows_operand
from interlace.kernels.signal import (
    current_epoch,
    fence_descriptor_loads,
    peer_pointer,
    publish,
    wait,
)
from interlace.kernels.slots import wait_all
from interlace.kernels.tiling import first_tile, grouped_tile
from interlace.kernels.transfer import TRANSFER_COLUMNS, push_chunks, region_pointer, table_line

_SEGMENT = tl.constexpr(SEGMENT_NUMBERS)
_SEND = tl.constexpr(TRANSFER_COLUMNS)
_POLLED = tl.constexpr(32)  # slots of counts that are polled together


@triton.jit
def _multiply_arriving(workspace, input, weight, bias_ptr, output_ptr, arriving, epoch, N, K,
                       COPIES: tl.constexpr, TILES: tl.constexpr, REGIONS: tl.constexpr):  # fmt: skip
    """Compute this program's tiles, source by source; ``REGIONS``: each source has its own region."""
    program = tl.program_id(0)
    gathered_address = tl.load(workspace.peers_ptr + workspace.rank) + workspace.data_offset
    # As integers, as in all_gather_matmul.py: the two sources of rows may differ in alignment.
    input_address = input.ptr.to(tl.int64)
    element_bytes = input.ptr.dtype.element_ty.primitive_bitwidth // 8
    COMPILED_STORES: tl.constexpr = TILES.OUT_DESCRIPTOR and TILES.COMPILED
    VECTOR: tl.constexpr = 128 // input.ptr.dtype.element_ty.primitive_bitwidth
    world_size = workspace.world_size
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    # Once per program: making a descriptor costs a write and a fence.
    own = rows_operand(input.ptr, input.stride, K, TILES)
    gathered = rows_operand(gathered_address.to(input.ptr.dtype), K, K, TILES)
    whole_c = output_operand(output_ptr, N, TILES)
    start = tl.zeros((), tl.int32)
    # Source by source, the own rows first, then as the peers' send order makes them arrive.
    num_experts = arriving.num_experts
    chunk_rows = arriving.chunk_rows
    for index in range(arriving.segments):
        expert = index % num_experts
        # `+ world_size`, as a remainder on a GPU has the sign of the dividend.
        source = (workspace.rank + world_size - index // num_experts) % world_size
        segment = expert * world_size + source
        segment_row, count, home_row = table_line(arriving.segments_ptr, segment, _SEGMENT)
        segment_rows = count.to(tl.int32)
        arrived_row = segment_row
        if REGIONS:
            # A source's rows for this rank are contiguous, there and here.
            region = tl.cast(source, tl.int64) * arriving.region_rows
            first_row_there = tl.load(arriving.segments_ptr + source * _SEGMENT + 2)
            arrived_row = region + home_row - first_row_there
            # As in the sends' table. Before them come the slots of counts, and of the segments' table.
            segment = world_size + 1 + source * num_experts + expert
        # Computed, not looked up: the module explains why no two chunks get the same slot.
        first_slot = segment + arrived_row.to(tl.int32) // chunk_rows
        # A row of the input or of the workspace; one number, as registers are few.
        operand_row = tl.where(source == workspace.rank, home_row, arrived_row)
        b_ptr = weight.ptr + expert.to(tl.int64) * weight.stride_e
        # Copiers join for the last source: its rows come when this rank has sent its own last rows.
        # Programs that join count from 0: each tile number must belong to a program that joins.
        absent = tl.where(index < (world_size - 1) * num_experts, COPIES.COPIERS, 0)
        programs = tl.num_programs(0) - absent
        of_expert = Epilogue(bias_ptr + expert * N, None, None)
        for first_row in range(0, segment_rows, chunk_rows):
            rows = min(chunk_rows, segment_rows - first_row)
            tiles_m = tl.cdiv(rows, TILES.BLOCK_M)
            end = start + tiles_m * tiles_n
            first = first_tile(start, program - absent, programs)
            if (first < end) & (program >= absent):
                output_row = segment_row + first_row
                whole_row = operand_row + first_row
                address = input_address + whole_row * input.stride * element_bytes
                stride = input.stride + tl.zeros((), tl.int64)
                whole = own
                if source != workspace.rank:
                    # One wait per chunk. Its value is not checked: tiles go into this rank's own
                    # output.
                    slot = first_slot + first_row // chunk_rows
                    slot_byte = workspace.slot_offset + slot * 8
                    wait(workspace, source, slot_byte, epoch, COMPILED_STORES)
                    if TILES.DESCRIPTORS != "":
                        fence_descriptor_loads(TILES.COMPILED)
                    address = gathered_address + whole_row * K * element_bytes
                    stride = K + tl.zeros((), tl.int64)
                    whole = gathered
                a_ptr = address.to(input.ptr.dtype)
                if TILES.ALIGNED:
                    a_ptr = tl.multiple_of(a_ptr, 16)
                    stride = tl.multiple_of(stride, VECTOR)
                a, a_row = part_of_rows(whole, a_ptr, stride, whole_row, rows, K, TILES)
                # Here and not per expert: most programs have no tile of most experts.
                b = columns_operand(b_ptr, weight, N, K, TILES)
                c_ptr = output_ptr + output_row * N
                c, c_row = part_of_output(whole_c, c_ptr, output_row, rows, N, TILES)
                for tile in tl.range(
                    first,
                    end,
                    programs,
                    flatten=TILES.FLATTEN,
                    warp_specialize=TILES.WARP_SPECIALIZE,
                ):
                    tile_m, tile_n = grouped_tile(tile - start, tiles_m, tiles_n, TILES.GROUP_M)
                    acc = multiply_tile(a, stride, rows, weight, b, N, K, tile_m, tile_n, TILES,
                                        a_row, a_ptr, b_ptr)  # fmt: skip
                    emit_tile(c, acc, of_expert, tile_m, tile_n, rows, N, TILES, False, c_row)
            # Also in a program without a tile of this chunk: all must count the same tiles.
            start = end


@triton.jit(do_not_specialize=["workspace", "sends", "num_experts", "chunk_rows"])
def grouped_matmul_kernel(
    workspace,
    input,
    weight,
    bias_ptr,
    output_ptr,
    sends,
    segments_ptr,
    num_experts,
    chunk_rows,
    N,
    K,
    COPIES: tl.constexpr,
    TILES: tl.constexpr,
):
    """``output[rows of e] = activation(arrived[rows of e] @ weight[e] (+ bias[e]))`` for every expert e.

    Legend: ``input``, ``[T, K]``, has this rank's rows; ``weight`` ``[E, K, N]``; ``bias`` ``[E, N]``
    and ``output`` ``[R, N]`` are contiguous. Output rows are in the order (expert, source rank, row of
    the source). ``segments``, int64 ``[E, W, 3]``, has for every expert and source the output row where the
    segment begins, its rows, and the first of them at its source. Rows arrive in the workspace in
    output order, with holes for this rank's rows. ``sends``: see ``kernels/transfer.py``. Tiles are
    numbered in the order of consumption. Of the P programs that take part program p takes tiles t with
    ``t % P == p``: all programs in rows of the last source, only consumers before.

    Ordering: copiers wait for the receiver's credit, store, publish the chunk's slot. Consumers wait
    for the slot and load the chunk in a loop nested below the wait. The workspace may be rewritten
    after finish_kernel, which follows this kernel on the stream, has given the credit. Copiers have
    the lowest program ids, and wait for chunks only when they have sent all of theirs. So the grid makes
    progress if the copiers of every rank are resident together, with one consumer each.

    Example: W = 2, E = 2 experts on rank 0, which has 3 and 1 rows for them; rank 1 has 2 and 4. Chunks
    and tiles have 4 rows, N is one tile wide, COPIERS = 1, grid 3. On rank 0 ``segments`` is [[0, 3, 0],
    [3, 2, 0]], [[5, 1, 3], [6, 4, 2]]. Its program 1 computes tile 0: output rows 0-2, own rows of expert
    0. Program 2: tile 1, row 5, the own row of expert 1. Program 2 waits for slot 1 + 3 // 4 + 0 = 1
    (expert 0 of rank 1) and computes tile 2, rows 3-4; program 0, when it has sent, waits for slot 3 + 6
    // 4 + 0 = 4: tile 3, rows 6-9.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    # Copiers come first: whatever is resident, the programs that others wait for have begun.
    if COPIES.COPIERS > 0:
        if program < COPIES.COPIERS:
            push_chunks(workspace, input, sends, K, epoch, COPIES)
            # The waits for credits guarded no load; but nothing that follows a wait goes unfenced.
            fence_descriptor_loads(TILES.COMPILED and TILES.DESCRIPTORS != "")
    arriving = ArrivingRows(
        segments_ptr, workspace.world_size * num_experts, num_experts, chunk_rows, 0
    )
    _multiply_arriving(workspace, input, weight, bias_ptr, output_ptr, arriving, epoch, N, K, COPIES,
                       TILES, False)  # fmt: skip


@triton.jit(do_not_specialize=["workspace", "sends", "counts", "sizes", "chunk_rows"])
def counted_grouped_matmul_kernel(
    workspace,
    input,
    weight,
    bias_ptr,
    output_ptr,
    sends,
    counts,
    sizes,
    chunk_rows,
    N,
    K,
    COPIES: tl.constexpr,
    TILES: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Compute ``grouped_matmul_kernel``, and make the segments' table here, from counts that ranks send.

    Legend: as above. ``counts.lines``: as ``counts`` of ``dispatch_send_kernel``; ``counts.segments``,
    int64 ``[E, W, 3]``, is filled. ``sizes.most_tokens``: rows of a region, the most rows of a rank.
    ``sends`` has at most ``count`` lines; the number of lines follows them. Lines are for regions: row o
    that source s sends to a rank is row ``s * most_tokens + o`` there. Segments are numbered by source,
    then by expert; their slots come after the slots of the W counts and of the table.

    Ordering: the first consumer waits for the receivers' credits, stores its counts there and publishes
    them, before anything else. Then it waits for all ranks' counts, writes the table, and publishes it to
    its own rank. Senders wait for credits only. All programs wait for all counts, so that errors name the
    missing rank, and for the table; the rest is as above. If counts have timed out no tile is computed.

    Example: as for ``grouped_matmul_kernel``, with at most 6 rows per rank: rank 1's 2 and 4 rows arrive
    at rows 6-11, expert 0's chunk with slot 3 + 2 + 6 // 4 = 6, expert 1's with slot 3 + 3 + 8 // 4 = 8.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    world_size = workspace.world_size
    table_byte = workspace.slot_offset + world_size * 8
    if COPIES.COPIERS > 0:
        if program < COPIES.COPIERS:
            # The host does not know the number of lines: it follows the last line.
            lines = tl.load(sends.ptr + sends.count * _SEND).to(tl.int32)
            push_chunks(workspace, input, Table(sends.ptr, lines), K, epoch, COPIES)
    if program == COPIES.COPIERS:
        send_counts(workspace, counts.lines_ptr, counts.counts_byte, sizes, epoch)
        own_byte = workspace.data_offset + counts.counts_byte
        own_ptr = region_pointer(workspace, workspace.rank, own_byte, counts.lines_ptr)
        if find_segments(workspace, own_ptr, counts.segments_ptr, sizes, epoch, EXPERTS):
            publish(peer_pointer(workspace, workspace.rank, table_byte), epoch)
    if wait_all(workspace, workspace.slot_offset, 1, epoch, _POLLED) > 0:
        return
    if wait(workspace, workspace.rank, table_byte, epoch) < epoch:
        return
    # As there: own rows are also loaded after these waits, which guard none of their loads.
    fence_descriptor_loads(TILES.COMPILED and TILES.DESCRIPTORS != "")
    arriving = ArrivingRows(
        counts.segments_ptr,
        world_size * sizes.experts,
        sizes.experts,
        chunk_rows,
        sizes.most_tokens,
    )
    _multiply_arriving(workspace, input, weight, bias_ptr, output_ptr, arriving, epoch, N, K, COPIES,
                       TILES, True)  # fmt: skip
