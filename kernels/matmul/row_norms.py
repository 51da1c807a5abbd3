"""The tail of a reduction whose rows are normed: sum them, add a residual, norm them, and send them on.

Contributions to ``rows x N`` lie in the owner's workspace, tile by tile, as ``matmul_reduce_scatter.py``
has them. A norm needs whole rows. So a program takes a slice of a few rows, waits for the tiles of all
columns from every source, and goes over the columns two or three times (``kernels/norms.py``).

With ``GATHER`` the normed rows go to all ranks: as they are made they are stored into the own output and
into the workspaces of the others, and signalled once per slice. Nobody stores them for himself first, and
nobody reads them again to send them. Programs then collect the rows of the others::

    own program | products for rank 1, 2, own | sum and norm own slices, push | collect others' slices |

Every phase waits only for an earlier one of any rank, and all programs are resident, so no order of
programs blocks.

Rejected: a sum per tile and a second kernel for the norms (stores the sum in fp32, or rounds it twice), and
statistics exchanged between programs (a second wait for every tile).
"""

import triton
import triton.language as tl

from interlace.kernels.collectives.reduction import SEGMENT_COLUMNS, sum_contributions
from interlace.kernels.epilogue import activate, add_bias
from interlace.kernels.norms import (
    load_blocks,
    load_residual,
    no_statistics,
    normed,
    reciprocal_deviation,
    scale_of_rows,
    store_sum,
    with_block,
)
from interlace.kernels.products import tile_offsets
from interlace.kernels.signal import wait
from interlace.kernels.slots import publish_to_all, wait_slots
from interlace.kernels.tiling import tile_number
from interlace.kernels.transfer import copy_elements, copy_rows, region_pointer, table_line

_SEGMENT = tl.constexpr(SEGMENT_COLUMNS)
_SLOTS = tl.constexpr(128)  # that are looked at at once
IN_FLIGHT = 32 << 10  # bytes that a program has on their way: it has a multiprocessor to itself
_IN_FLIGHT = tl.constexpr(IN_FLIGHT)


@triton.jit
def wait_rows(workspace, tile_m, tiles_m, tiles_n, epoch, TILES: tl.constexpr):
    """Wait until the tiles of all columns have come from every source, for rows of ``tile_m``.

    0 if all have come; else how many have not, as it was given up.
    """
    missing = tl.zeros((), tl.int32)
    for first in range(0, workspace.world_size * tiles_n, _SLOTS):
        number = first + tl.arange(0, _SLOTS)
        source, tile_n = number // tiles_n, number % tiles_n
        tile = tile_number(tile_m, tile_n, tiles_m, tiles_n, TILES.GROUP_M)
        slot_bytes = workspace.slot_offset + (source * (tiles_m * tiles_n) + tile).to(tl.int64) * 8
        valid = source < workspace.world_size
        missing += wait_slots(workspace, source, slot_bytes, valid, epoch)
    return missing


@triton.jit
def sum_rows(workspace, own_ptr, bias_ptr, norm, output_ptr, slice_m, rows, N,
             AVERAGE: tl.constexpr, TAIL: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Sum a slice over sources, add bias, activation and residual, store it; (mean, sum of squares)."""
    # int64 before the product with N: the contributions of one source may pass 2**31 elements.
    elements_per_source = (rows + tl.zeros((), tl.int64)) * N
    offs_m = tile_offsets(slice_m, TAIL.ROWS)
    mean, squares = no_statistics(TAIL)
    for block in range(tl.cdiv(N, TAIL.COLUMNS)):
        first = block * TAIL.COLUMNS
        offs_n = first + tl.arange(0, TAIL.COLUMNS)
        offsets = offs_m[:, None] * N + offs_n[None, :]
        mask = (offs_m < rows)[:, None] & (offs_n < N)[None, :]
        residual = load_residual(norm, offsets, mask, TAIL)
        total = sum_contributions(
            workspace.world_size, own_ptr, elements_per_source, offsets, mask, AVERAGE
        )
        tile_n = block + tl.zeros((), tl.int32)
        total = add_bias(total, bias_ptr, slice_m, tile_n, rows, N, TAIL.ROWS, TAIL.COLUMNS, TILES)
        total = activate(total, TILES)
        x = store_sum(total, residual, output_ptr, offsets, mask, TAIL)
        mean, squares = with_block(mean, squares, x, mask, first, N, TAIL)
    return mean, squares


@triton.jit
def _store_block(workspace, norm, gathered, output_ptr, first_row, offs_m, block, N, free,
                 mean, deviation, scale, TAIL: tl.constexpr):  # fmt: skip
    """Norm one of ``load_blocks``, of rows ``offs_m``; store it here, and at peers if they are ``free``."""
    offs_n, mask, x, _, _ = block
    # Stored as it was loaded, 8 numbers a thread: of fp8 it would be 16, by way of shared memory.
    offsets = tl.max_contiguous(offs_m[:, None] * N + offs_n[None, :], [1, 8])
    y = normed(block, mean, deviation, TAIL)
    if TAIL.QUANTIZE:
        y = y / scale[:, None]
    y = y.to(norm.normed_ptr.dtype.element_ty)
    tl.store(norm.normed_ptr + offsets, y, mask=mask)
    if TAIL.GATHER != "":
        # The next rank first, so that no rank is the target of all others at once.
        for step in range(1, workspace.world_size):
            peer = (workspace.rank + step) % workspace.world_size
            byte = workspace.data_offset + gathered.normed_byte
            to_ptr = region_pointer(workspace, peer, byte, norm.normed_ptr)
            tl.store(to_ptr + first_row * N + offsets, y, mask=mask & free)
            if TAIL.GATHER == "both":
                byte = workspace.data_offset + gathered.sum_byte
                to_ptr = region_pointer(workspace, peer, byte, output_ptr)
                tl.store(to_ptr + first_row * N + offsets, x, mask=mask & free)


@triton.jit
def store_normed(workspace, norm, gathered, output_ptr, first_row, slice_m, rows, N, free,
                 mean, deviation, TAIL: tl.constexpr):  # fmt: skip
    """Norm a slice that lies at ``output_ptr``; store it here, and at all peers if they are ``free``."""
    offs_m = tile_offsets(slice_m, TAIL.ROWS)
    mask_m = offs_m < rows
    ROWS: tl.constexpr = TAIL.ROWS
    scale = tl.zeros((ROWS,), tl.float32)
    if TAIL.QUANTIZE:
        scale = scale_of_rows(output_ptr, mean, deviation, norm, offs_m, rows, N, TAIL)
        tl.store(norm.scale_ptr + offs_m, scale, mask=mask_m)
    for first in range(0, N, 2 * TAIL.COLUMNS):
        block, after = load_blocks(output_ptr, norm, offs_m, first, rows, N, TAIL)
        _store_block(workspace, norm, gathered, output_ptr, first_row, offs_m, block, N, free,
                     mean, deviation, scale, TAIL)  # fmt: skip
        if first + TAIL.COLUMNS < N:
            _store_block(workspace, norm, gathered, output_ptr, first_row, offs_m, after, N, free,
                         mean, deviation, scale, TAIL)  # fmt: skip
    if TAIL.GATHER != "" and TAIL.QUANTIZE:
        for step in range(1, workspace.world_size):
            peer = (workspace.rank + step) % workspace.world_size
            byte = workspace.data_offset + gathered.scale_byte
            to_ptr = region_pointer(workspace, peer, byte, norm.scale_ptr)
            tl.store(to_ptr + first_row + offs_m, scale, mask=mask_m & free)


@triton.jit
def publish_slice(workspace, gathered, slice_m, epoch):
    """Tell all peers that a slice of this rank's rows is in their workspaces."""
    own = workspace.rank * gathered.slices + slice_m
    publish_to_all(workspace, workspace.slot_offset + gathered.slots_byte + own * 8, epoch)


@triton.jit
def _copy_out(workspace, byte, to_ptr, row, rows, N, TAIL: tl.constexpr):
    """Copy ``rows`` from ``row`` on out of the own workspace, IN_FLIGHT bytes at a time."""
    BITS: tl.constexpr = to_ptr.dtype.element_ty.primitive_bitwidth
    ROWS: tl.constexpr = _IN_FLIGHT * 8 // (TAIL.COLUMNS * BITS)
    byte = workspace.data_offset + byte
    from_ptr = region_pointer(workspace, workspace.rank, byte, to_ptr)
    copy_rows(to_ptr + row * N, N, from_ptr + row * N, N, rows, N, ROWS, TAIL.COLUMNS)


@triton.jit
def collect_rows(workspace, norm, gathered, segments_ptr, N, epoch, TAIL: tl.constexpr):
    """Copy the rows of all other ranks out of the own workspace, some slices at a time, as they come."""
    BITS: tl.constexpr = norm.normed_ptr.dtype.element_ty.primitive_bitwidth
    SLICES: tl.constexpr = _IN_FLIGHT * 8 // (TAIL.ROWS * TAIL.COLUMNS * BITS)
    # The last line is this rank's own.
    for line in range(workspace.world_size - 1):
        owner, first_row, rows, _ = table_line(segments_ptr, line, _SEGMENT)
        slices = tl.cdiv(rows, TAIL.ROWS).to(tl.int32)
        groups = tl.cdiv(slices, SLICES)
        for group in range(tl.program_id(0), groups, tl.num_programs(0)):
            first = group * SLICES
            for slice_m in range(first, min(first + SLICES, slices)):
                byte = gathered.slots_byte + (owner * gathered.slices + slice_m) * 8
                wait(workspace, owner, workspace.slot_offset + byte, epoch)
            done = tl.cast(first, tl.int64) * TAIL.ROWS
            row, count = first_row + done, min(rows - done, SLICES * TAIL.ROWS)
            _copy_out(workspace, gathered.normed_byte, gathered.all_normed_ptr, row, count, N, TAIL)
            if TAIL.GATHER == "both":
                _copy_out(workspace, gathered.sum_byte, gathered.all_sums_ptr, row, count, N, TAIL)
            if TAIL.QUANTIZE:
                byte = workspace.data_offset + gathered.scale_byte
                from_ptr = region_pointer(workspace, workspace.rank, byte, norm.scale_ptr)
                to_ptr = gathered.all_scales_ptr + row
                copy_elements(to_ptr, from_ptr + row, count, SLICES * TAIL.ROWS)


@triton.jit
def norm_rows(workspace, own_ptr, bias_ptr, norm, gathered, output_ptr, first_row, rows, N, epoch,
              AVERAGE: tl.constexpr, TAIL: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Sum, norm and store this program's slices of the own ``rows``, and push them with ``GATHER``."""
    tiles_m = tl.cdiv(rows, TILES.BLOCK_M).to(tl.int32)
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    slices = tl.cdiv(rows, TAIL.ROWS).to(tl.int32)
    SLICES_EACH: tl.constexpr = TILES.BLOCK_M // TAIL.ROWS
    for number in range(tl.program_id(0), slices, tl.num_programs(0)):
        # A tensor in the interpreter too, where a loop's variable is a Python number.
        slice_m = number + tl.zeros((), tl.int32)
        missing = wait_rows(workspace, slice_m // SLICES_EACH, tiles_m, tiles_n, epoch, TILES)
        # No credit is asked for: a rank that has sent tiles of this op has ended the one before it, and so
        # has read what this op overwrites. Given up, nothing goes to peers, which may still be reading.
        free = missing == 0
        mean, squares = sum_rows(workspace, own_ptr, bias_ptr, norm, output_ptr, slice_m, rows, N,
                                 AVERAGE, TAIL, TILES)  # fmt: skip
        # What one thread has stored another one loads.
        tl.debug_barrier()
        deviation = reciprocal_deviation(squares, N, TAIL)
        store_normed(workspace, norm, gathered, output_ptr, first_row, slice_m, rows, N, free,
                     mean, deviation, TAIL)  # fmt: skip
        if TAIL.GATHER != "":
            if free:
                publish_slice(workspace, gathered, slice_m, epoch)
