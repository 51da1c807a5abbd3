"""Reduction + norm of rows that are there already: ``matmul_norm.py`` without the matmul.

The contributions are rows of the input, pushed whole; ``row_norms.py`` does the rest. Who owns what is in a
table, so one kernel is an all-reduce in one shot, where every rank owns all rows; one in two shots, where
each owns a part and all gather; and a reduce-scatter, with or without a gather behind it.
"""

import triton
import triton.language as tl

from interlace.kernels.collectives.reduction import SEGMENT_COLUMNS
from interlace.kernels.matmul.row_norms import IN_FLIGHT, collect_rows, norm_rows
from interlace.kernels.signal import current_epoch, wait_credit
from interlace.kernels.slots import publish_turn
from interlace.kernels.tiling import first_tile
from interlace.kernels.transfer import copy_rows, data_pointer, table_line

_SEGMENT = tl.constexpr(SEGMENT_COLUMNS)
_IN_FLIGHT = tl.constexpr(IN_FLIGHT)


@triton.jit(do_not_specialize=["workspace", "gathered"])
def reduce_norm_kernel(
    workspace,
    input_ptr,
    bias_ptr,
    norm,
    gathered,
    output_ptr,
    segments_ptr,
    N,
    AVERAGE: tl.constexpr,
    TAIL: tl.constexpr,
    TILES: tl.constexpr,
):
    """``output[own] = residual + (sum over ranks of input_r)[own] + bias``, and its norm.

    Legend: ``input`` is ``[M, N]``, dense; ``norm`` and ``gathered`` as for
    matmul_reduce_scatter_norm_kernel. ``segments``: a line per owner in ``tiling.owner_order``: owner,
    first row, rows, number of the first tile; a tile is ``BLOCK_M`` whole rows, ``BLOCK_N`` at least N.

    Ordering: a program waits for the owner's credit, stores its tiles of the owner's rows there, publishes
    the slot (source, tile) of each; then as matmul_reduce_scatter_norm_kernel. Sending waits for no sum of
    this op, so no order of programs blocks.

    Example: W = 2, M = 8, tiles of 4 rows, every rank the owner of all, one program per rank. Rank 0
    stores rows 0-3 and 4-7 at rank 1 and publishes slots 0 and 1 there, then the same for itself; then it
    waits for slots 0 and 2 (sources 0 and 1), sums and norms rows 0-3; slots 1 and 3, rows 4-7.
    """
    epoch = current_epoch(workspace)
    program, programs, rank = tl.program_id(0), tl.num_programs(0), workspace.rank
    BITS: tl.constexpr = input_ptr.dtype.element_ty.primitive_bitwidth
    ROWS: tl.constexpr = TILES.BLOCK_M
    WIDEST: tl.constexpr = _IN_FLIGHT * 8 // (ROWS * BITS)
    COLUMNS: tl.constexpr = TILES.BLOCK_N if TILES.BLOCK_N < WIDEST else WIDEST
    for line in range(workspace.world_size):
        owner, first_row, rows, start = table_line(segments_ptr, line, _SEGMENT)
        start = start.to(tl.int32)
        tiles = tl.cdiv(rows, ROWS).to(tl.int32)
        first = first_tile(start, program, programs)
        # A program without a tile of this owner waits for no credit and publishes nothing.
        if first < start + tiles:
            # Given up: the owner may still be reading what this op would overwrite.
            if wait_credit(workspace, owner, epoch) >= epoch - 1:
                to_ptr = data_pointer(workspace, owner, output_ptr) + rank * rows * N
                for number in range(first, start + tiles, programs):
                    # tl.cast: a loop's variable has no .to() in the interpreter.
                    row = tl.cast(number - start, tl.int64) * ROWS
                    count = min(rows - row, ROWS)
                    from_ptr = input_ptr + (first_row + row) * N
                    copy_rows(to_ptr + row * N, N, from_ptr, N, count, N, ROWS, COLUMNS)
                # All at once: a publish waits until all stores so far have arrived.
                slot_byte = workspace.slot_offset + (rank * tiles - start) * 8
                publish_turn(workspace, owner, slot_byte, first, start + tiles, programs, epoch)
    # Waits for data begin only here.
    own_ptr = data_pointer(workspace, rank, output_ptr)
    own = workspace.world_size - 1  # the last line of the table
    _, first_row, rows, _ = table_line(segments_ptr, own, _SEGMENT)
    norm_rows(workspace, own_ptr, bias_ptr, norm, gathered, output_ptr, first_row, rows, N, epoch,
              AVERAGE, TAIL, TILES)  # fmt: skip
    if TAIL.GATHER != "":
        collect_rows(workspace, norm, gathered, segments_ptr, N, epoch, TAIL)
