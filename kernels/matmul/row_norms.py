"""The tail of a reduction whose rows are normed: sum them, add a residual, norm them, and send them on.

Contributions to ``rows x N`` lie in the owner's workspace, tile by tile, in the layout of
``matmul_reduce_scatter.py``. A norm needs whole rows. So a program takes a slice of a few rows, waits for
the tiles of all columns from every source, and passes over the columns two or three times.

With ``GATHER`` the normed rows go to all ranks. As soon as they are computed they are stored into this
rank's output and into the workspaces of the others, and signalled once per slice. So no rank reads its rows
again to send them. Programs then collect the rows of the others::

    own program | products for rank 1, 2, own | sum and norm own slices, push | collect others' slices |

Every phase waits only for an earlier one of any rank, and all programs are resident, so no order of
programs blocks.

Rejected: a sum per tile and a second kernel for the norms (stores the sum in fp32, or rounds it twice), and
statistics exchanged between programs (a second wait for every tile).

The norm of whole rows:

Legend: ``rows x N``, dense; a slice is ``ROWS`` rows, processed ``COLUMNS`` columns at a time. For a row s
of the sum, with its bias and activation, all in fp32::

    x = s + residual         rounded to the output's dtype, stored: the new residual
    y = (x - mean) * r * weight + bias    r = 1 / sqrt(variance + EPS); "rms" has no mean and no bias
    scale = max |y| / 448, q = y / scale  with QUANTIZE: float8_e4m3fn, one scale per row; otherwise q = y,
                           which may be fp8, too, by a scale within the weight: the cast saturates.
                           With VALUES a packed row, see ``block_scales.py``: a scale for each block

The statistics are computed from x as it is stored. So a backward, or the next layer, can compute y again
from the new residual. A first pass over the columns adds up and stores x, a second one reads it again, out
of the cache. With QUANTIZE a pass between them finds the largest y. One program does a row, and takes its
columns in order, so bits do not depend on the program.

The variance of "layer" is combined block by block. The squares of each block are taken from its own mean,
and corrected for the distance of the means (Chan, Golub and LeVeque, 1979). Squares of x alone would
cancel.

Reduction + norm of existing rows, without a matmul: ``reduce_norm_kernel``.

The contributions are rows of the input, pushed whole. A table lists the owners, so one kernel is a one-shot
all-reduce, where every rank owns all rows; a two-shot all-reduce, where each rank owns a part and all
gather; and a reduce-scatter, with or without a gather after it.

Fused matmul + reduction + norm: this tail follows both reductions of a product.

``matmul_reduce_scatter_norm_kernel``  rows have owners, who norm them; with ``GATHER`` all ranks get them:
                                       the chain reduce-scatter, norm, all-gather of a sequence-parallel
                                       block, and an all-reduce of many rows
``matmul_all_reduce_norm_kernel``      one-shot: every rank sums and norms all rows, for few of them

The device functions of the kernels without a norm compute and send the products.

All-reduce + norm of a few kilobytes, whose words carry their flags, for decoding single tokens:

The protocol is that of ``kernels/collectives/low_latency.py``, block by block. A norm needs whole rows, so
program r does all blocks of row r: first it sends them all, then it sums them one after another. So many
words travel while the program waits for the first, and one program has all statistics of a row.
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import Lot
from interlace.kernels.block_scales import INNER, packed_end, packed_length, quantized
from interlace.kernels.collectives.low_latency import (
    block_epoch,
    end_block,
    half_of,
    load_units,
    payload_of,
    send_to_all,
)
from interlace.kernels.collectives.reduction import SEGMENT_COLUMNS, sum_contributions
from interlace.kernels.epilogue import activate, add_bias
from interlace.kernels.matmul.matmul_reduce_scatter import produce_for_all, produce_for_owners
from interlace.kernels.products import tile_offsets
from interlace.kernels.signal import count_program, current_epoch, wait, wait_credit
from interlace.kernels.slots import publish_to_all, publish_turn, wait_slots
from interlace.kernels.tiling import first_tile, tile_number
from interlace.kernels.transfer import (
    copy_elements,
    copy_rows,
    data_pointer,
    region_pointer,
    table_line,
)

_LARGEST = tl.constexpr(448.0)  # the largest float8_e4m3fn
_INNER = tl.constexpr(INNER)
_SMALLEST_SCALE = tl.constexpr(1e-12)  # so that a row of zeros has a scale to divide by


@triton.jit
def no_statistics(TAIL: tl.constexpr):
    """Return (mean, sum of squares) of rows before any column."""
    ROWS: tl.constexpr = TAIL.ROWS
    return tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)


@triton.jit
def with_block(mean, squares, x, mask, first, N, TAIL: tl.constexpr):
    """Return the statistics with ``x``, the columns from ``first`` on; ``x`` is 0 where ``mask`` is
    false."""
    if TAIL.KIND == "rms":
        squares += tl.sum(x * x, axis=1)
    else:
        before = tl.cast(first, tl.float32)
        count = tl.cast(min(N - first, TAIL.COLUMNS), tl.float32)
        own = tl.sum(x, axis=1) / count
        centred = tl.where(mask, x - own[:, None], 0.0)
        apart = own - mean
        part = count / (before + count)
        squares += tl.sum(centred * centred, axis=1) + apart * apart * (before * part)
        mean += apart * part
    return mean, squares


@triton.jit
def reciprocal_deviation(squares, N, TAIL: tl.constexpr):
    """Return 1 / sqrt(variance + EPS); for "rms" the mean of the squares is the variance."""
    return tl.rsqrt(squares / tl.cast(N, tl.float32) + TAIL.EPS)


@triton.jit
def load_residual(norm, offsets, mask, TAIL: tl.constexpr):
    """Load the residual, if there is one: before the sum, so that both load at once."""
    residual = mask  # never used
    if TAIL.RESIDUAL:
        residual = tl.load(norm.residual_ptr + offsets, mask=mask, other=0.0)
    return residual


@triton.jit
def store_sum(total, residual, output_ptr, offsets, mask, TAIL: tl.constexpr):
    """Add the residual, round, store; return the rounded numbers in fp32, 0 where ``mask`` is false."""
    if TAIL.RESIDUAL:
        total += residual.to(tl.float32)
    rounded = total.to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + offsets, rounded, mask=mask)
    return tl.where(mask, rounded.to(tl.float32), 0.0)


@triton.jit
def _load_vectors(norm, offs_n, mask, N, TAIL: tl.constexpr):
    weight, bias = mask, mask  # never used
    if TAIL.NORM_WEIGHT:
        weight = tl.load(norm.norm_weight_ptr + offs_n, mask=offs_n < N, other=0.0)
    if TAIL.NORM_BIAS:
        bias = tl.load(norm.norm_bias_ptr + offs_n, mask=offs_n < N, other=0.0)
    return weight, bias


@triton.jit
def load_blocks(x_ptr, norm, offs_m, first, rows, N, TAIL: tl.constexpr):
    """Load two blocks of columns from ``first`` on, of whole rows at ``x_ptr``: the inputs of ``normed``.

    All are loaded before one is used, or stored. A load cannot move before a store, which may be to the
    same memory. A block is (columns, mask, x, weight, bias); unused ones have no meaning.
    """
    offs_n = first + tl.arange(0, TAIL.COLUMNS)
    after_n = offs_n + TAIL.COLUMNS
    mask_m = (offs_m < rows)[:, None]
    mask, after_mask = mask_m & (offs_n < N)[None, :], mask_m & (after_n < N)[None, :]
    pointers = x_ptr + offs_m[:, None] * N + offs_n[None, :]
    x = tl.load(pointers, mask=mask, other=0.0)
    after_x = tl.load(pointers + TAIL.COLUMNS, mask=after_mask, other=0.0)
    weight, bias = _load_vectors(norm, offs_n, mask, N, TAIL)
    after_weight, after_bias = _load_vectors(norm, after_n, mask, N, TAIL)
    block = offs_n, mask, x, weight, bias
    return block, (after_n, after_mask, after_x, after_weight, after_bias)


@triton.jit
def normed(block, mean, deviation, TAIL: tl.constexpr):
    """Return y of one block of ``load_blocks``, in fp32."""
    _, _, x, weight, bias = block
    y = (x.to(tl.float32) - mean[:, None]) * deviation[:, None]
    if TAIL.NORM_WEIGHT:
        y *= weight.to(tl.float32)[None, :]
    if TAIL.NORM_BIAS:
        y += bias.to(tl.float32)[None, :]
    return y


@triton.jit
def _sizes(block, mean, deviation, TAIL: tl.constexpr):
    return tl.where(block[1], tl.abs(normed(block, mean, deviation, TAIL)), 0.0)


@triton.jit
def scale_of_rows(output_ptr, mean, deviation, norm, offs_m, rows, N, TAIL: tl.constexpr):
    """Return the scale of each row: its largest number divided by the largest of float8_e4m3fn."""
    ROWS: tl.constexpr = TAIL.ROWS
    largest = tl.zeros((ROWS,), tl.float32)
    for first in range(0, N, 2 * TAIL.COLUMNS):
        block, after = load_blocks(output_ptr, norm, offs_m, first, rows, N, TAIL)
        sizes = _sizes(block, mean, deviation, TAIL)
        sizes = tl.maximum(sizes, _sizes(after, mean, deviation, TAIL))
        largest = tl.maximum(largest, tl.max(sizes, axis=1))
    return tl.maximum(largest / _LARGEST, _SMALLEST_SCALE)


_SEGMENT = tl.constexpr(SEGMENT_COLUMNS)
_SLOTS = tl.constexpr(128)  # slots that are polled together
IN_FLIGHT = 32 << 10  # bytes that a program loads ahead: it has a multiprocessor to itself
_IN_FLIGHT = tl.constexpr(IN_FLIGHT)


@triton.jit
def wait_rows(workspace, tile_m, tiles_m, tiles_n, epoch, TILES: tl.constexpr):
    """Wait until the tiles of all columns have arrived from every source, for rows of ``tile_m``.

    Return 0, or the number of missing tiles after a timeout.
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
    """Sum a slice over sources, add bias, activation and residual, store it; return (mean, squares)."""
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
def _send(workspace, byte, like_ptr, offsets, tile, mask):
    """Store a tile at ``offsets`` of the region of every peer that begins at ``byte``."""
    # The next rank first, so that no rank is the target of all others at once.
    for step in range(1, workspace.world_size):
        peer = (workspace.rank + step) % workspace.world_size
        to_ptr = region_pointer(workspace, peer, workspace.data_offset + byte, like_ptr)
        tl.store(to_ptr + offsets, tile, mask=mask)


@triton.jit
def _store_tile(workspace, gathered, to_ptr, first, offsets, tile, mask, free, TAIL: tl.constexpr):
    """Store a tile of normed rows here, and at peers, where this rank's rows begin at element ``first``."""
    tl.store(to_ptr + offsets, tile, mask=mask)
    if TAIL.GATHER != "":
        _send(workspace, gathered.normed_byte, to_ptr, first + offsets, tile, mask & free)


@triton.jit
def _store_packed(workspace, norm, gathered, first_row, offs_m, mask_m, y, first, N, free,
                  TAIL: tl.constexpr):  # fmt: skip
    """Store ``y``, numbers from column ``first`` on and 0 from N on, as a part of packed rows."""
    values, scales = quantized(y, TAIL)
    PACKED: tl.constexpr = y.shape[1] // values.shape[1]
    UNIT: tl.constexpr = 4 if TAIL.SCALE == "fp32" else 1
    KIND: tl.constexpr = tl.float32 if TAIL.SCALE == "fp32" else tl.uint8
    length, numbers = packed_length(N, TAIL), tl.cdiv(N, _INNER) * _INNER
    offs_value = first // PACKED + tl.arange(0, values.shape[1])
    offsets = offs_m[:, None] * length + offs_value[None, :]
    offsets = tl.max_contiguous(offsets, [1, 8 // PACKED])
    mask = mask_m[:, None] & (offs_value < numbers // PACKED)[None, :]
    _store_tile(workspace, gathered, norm.normed_ptr, first_row * length, offsets, values, mask,
                  free, TAIL)  # fmt: skip
    block = first // TAIL.BLOCK + tl.arange(0, scales.shape[1])
    scales = tl.where((block * TAIL.BLOCK < N)[None, :], scales, tl.zeros_like(scales))
    offsets = (offs_m[:, None] * length + numbers // PACKED) // UNIT + block[None, :]
    mask = mask_m[:, None] & (block < numbers // TAIL.BLOCK)[None, :]
    scale_ptr = norm.normed_ptr.to(tl.pointer_type(KIND))
    _store_tile(workspace, gathered, scale_ptr, first_row * length // UNIT, offsets, scales, mask,
                  free, TAIL)  # fmt: skip


@triton.jit
def _store_ends(workspace, norm, gathered, first_row, offs_m, mask_m, N, free, TAIL: tl.constexpr):
    """Store what follows the scales of packed rows: the whole tensor's scale, 1, and padding."""
    WHOLE: tl.constexpr = 4 if TAIL.SCALE == "e4m3" else 0
    length, end = packed_length(N, TAIL), packed_end(N, TAIL) - WHOLE
    offs_n = tl.arange(0, 32)
    # The bytes of 1.0.
    bytes = tl.where(offs_n == 2, 0x80, tl.where(offs_n == 3, 0x3F, 0))
    bytes = tl.where(offs_n < WHOLE, bytes, 0).to(tl.uint8)
    bytes = tl.broadcast_to(bytes[None, :], (TAIL.ROWS, 32))
    mask = mask_m[:, None] & (offs_n < length - end)[None, :]
    offsets = offs_m[:, None] * length + (end + offs_n)[None, :]
    _store_tile(workspace, gathered, norm.normed_ptr, first_row * length, offsets, bytes, mask,
                  free, TAIL)  # fmt: skip


@triton.jit
def _store_block(workspace, norm, gathered, output_ptr, first_row, offs_m, mask_m, block, y, first, N,
                 free, scale, TAIL: tl.constexpr):  # fmt: skip
    """Store ``y``, the norm of one of ``load_blocks``, here, and at peers if they are ``free``."""
    offs_n, mask, x, _, _ = block
    # Stored like it was loaded, 8 numbers a thread: 16 numbers of fp8 would pass through shared memory.
    offsets = tl.max_contiguous(offs_m[:, None] * N + offs_n[None, :], [1, 8])
    if TAIL.VALUES != "":
        y = tl.where(mask, y, 0.0)
        _store_packed(workspace, norm, gathered, first_row, offs_m, mask_m, y, first, N, free,
                      TAIL)  # fmt: skip
    else:
        if TAIL.QUANTIZE:
            y = y / scale[:, None]
        y = y.to(norm.normed_ptr.dtype.element_ty)
        _store_tile(workspace, gathered, norm.normed_ptr, first_row * N, offsets, y, mask, free,
                      TAIL)  # fmt: skip
    if TAIL.GATHER == "both":
        byte = gathered.sum_byte
        _send(workspace, byte, output_ptr, first_row * N + offsets, x, mask & free)


@triton.jit
def store_normed(workspace, norm, gathered, output_ptr, first_row, slice_m, rows, N, free,
                 mean, deviation, TAIL: tl.constexpr):  # fmt: skip
    """Norm the slice at ``output_ptr``; store it here, and at all peers if they are ``free``."""
    offs_m = tile_offsets(slice_m, TAIL.ROWS)
    mask_m = offs_m < rows
    ROWS: tl.constexpr = TAIL.ROWS
    scale = tl.zeros((ROWS,), tl.float32)
    if TAIL.QUANTIZE:
        scale = scale_of_rows(output_ptr, mean, deviation, norm, offs_m, rows, N, TAIL)
        tl.store(norm.scale_ptr + offs_m, scale, mask=mask_m)
    for first in range(0, N, 2 * TAIL.COLUMNS):
        block, after = load_blocks(output_ptr, norm, offs_m, first, rows, N, TAIL)
        y = normed(block, mean, deviation, TAIL)
        _store_block(workspace, norm, gathered, output_ptr, first_row, offs_m, mask_m, block, y, first,
                     N, free, scale, TAIL)  # fmt: skip
        next = first + TAIL.COLUMNS
        if next < N:
            y = normed(after, mean, deviation, TAIL)
            _store_block(workspace, norm, gathered, output_ptr, first_row, offs_m, mask_m, after, y,
                         next, N, free, scale, TAIL)  # fmt: skip
    if TAIL.VALUES != "":
        _store_ends(workspace, norm, gathered, first_row, offs_m, mask_m, N, free, TAIL)
    if TAIL.GATHER != "" and TAIL.QUANTIZE:
        byte, offsets = gathered.scale_byte, first_row + offs_m
        _send(workspace, byte, norm.scale_ptr, offsets, scale, mask_m & free)


@triton.jit
def publish_slice(workspace, gathered, slice_m, epoch):
    """Signal to all peers that a slice of this rank's rows is in their workspaces."""
    own = workspace.rank * gathered.slices + slice_m
    publish_to_all(workspace, workspace.slot_offset + gathered.slots_byte + own * 8, epoch)


@triton.jit
def _copy_out(workspace, byte, to_ptr, row, rows, N, TAIL: tl.constexpr):
    """Copy ``rows`` of N elements from ``row`` on out of this workspace, IN_FLIGHT bytes at a time."""
    BITS: tl.constexpr = to_ptr.dtype.element_ty.primitive_bitwidth
    ROWS: tl.constexpr = _IN_FLIGHT * 8 // (TAIL.COLUMNS * BITS)
    byte = workspace.data_offset + byte
    from_ptr = region_pointer(workspace, workspace.rank, byte, to_ptr)
    copy_rows(to_ptr + row * N, N, from_ptr + row * N, N, rows, N, ROWS, TAIL.COLUMNS)


@triton.jit
def collect_rows(workspace, norm, gathered, segments_ptr, N, epoch, TAIL: tl.constexpr):
    """Copy the rows of all other ranks out of this workspace, some slices at a time, as they arrive."""
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
            length = N
            if TAIL.VALUES != "":
                length = packed_length(N, TAIL)
            byte = gathered.normed_byte
            _copy_out(workspace, byte, gathered.all_normed_ptr, row, count, length, TAIL)
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
        # Also a tensor in the interpreter, where a loop's variable is a Python number.
        slice_m = number + tl.zeros((), tl.int32)
        missing = wait_rows(workspace, slice_m // SLICES_EACH, tiles_m, tiles_n, epoch, TILES)
        # No credit is needed: a rank that has sent tiles of this op has ended the op before, and so has
        # read the memory that this op overwrites. After a timeout peers may still be reading.
        free = missing == 0
        mean, squares = sum_rows(workspace, own_ptr, bias_ptr, norm, output_ptr, slice_m, rows, N,
                                 AVERAGE, TAIL, TILES)  # fmt: skip
        # A thread loads here what another thread has stored.
        tl.debug_barrier()
        deviation = reciprocal_deviation(squares, N, TAIL)
        store_normed(workspace, norm, gathered, output_ptr, first_row, slice_m, rows, N, free,
                     mean, deviation, TAIL)  # fmt: skip
        if TAIL.GATHER != "":
            if free:
                publish_slice(workspace, gathered, slice_m, epoch)


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
    the slot (source, tile) of each; then like matmul_reduce_scatter_norm_kernel. Sending waits for no sum
    of this op, so no order of programs blocks.

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


@triton.jit(do_not_specialize=["workspace", "gathered"])
def matmul_reduce_scatter_norm_kernel(
    workspace,
    input,
    weight,
    epilogue,
    norm,
    gathered,
    output_ptr,
    segments_ptr,
    N,
    K,
    AVERAGE: tl.constexpr,
    TAIL: tl.constexpr,
    TILES: tl.constexpr,
):
    """``output[own] = residual + activation(sum over ranks of (input_r @ weight_r)[own] + bias)``, normed.

    Legend: as matmul_reduce_scatter_kernel. ``norm``: the residual of the own rows, weight and bias of the
    norm ``[N]``, the place of the normed own rows, in the dtype of the output or float8_e4m3fn, and their
    scales. ``gathered``: whole results, with ``GATHER``; the rows of owner r begin at the first row of its
    segment.

    Ordering: products as in that kernel. Then a program waits for all tiles of its slices' rows from all
    sources. With ``GATHER`` it stores the rows at every peer and publishes the slot (source, slice) there.
    A peer has ended the op before this one, as its tiles have arrived. Last the program waits for the slots
    of all other sources and copies their rows out. No phase waits for a later one, so no order of programs
    blocks. finish_kernel gives the credit for reuse.

    Example: W = 2, M = 32, N = 64, 16 x 16 tiles, slices of 4 rows, ``GATHER`` "normed", one program per
    rank. Rank 0 sends tiles 0-3 of rows 16-31 to rank 1, makes its own, waits for slots 0-3 (source 0) and
    4-7 (source 1), norms rows 0-3, stores them here and at rank 1 and publishes slot 8 there, ... 11; then
    it waits for slots 12-15, the slices of rank 1, and copies rows 16-31.
    """
    epoch = current_epoch(workspace)
    produce_for_owners(workspace, input, weight, epilogue, output_ptr, segments_ptr, N, K, epoch,
                       TILES)  # fmt: skip
    # Waits for data begin only here, after everything that others wait for: no order of programs blocks.
    own_ptr = data_pointer(workspace, workspace.rank, output_ptr)
    own = workspace.world_size - 1  # the last line of the table
    _, first_row, rows, _ = table_line(segments_ptr, own, _SEGMENT)
    norm_rows(workspace, own_ptr, epilogue.bias_ptr, norm, gathered, output_ptr, first_row, rows, N,
              epoch, AVERAGE, TAIL, TILES)  # fmt: skip
    if TAIL.GATHER != "":
        collect_rows(workspace, norm, gathered, segments_ptr, N, epoch, TAIL)


@triton.jit(do_not_specialize=["workspace", "M"])
def matmul_all_reduce_norm_kernel(
    workspace,
    input,
    weight,
    bias_ptr,
    norm,
    output_ptr,
    M,
    N,
    K,
    AVERAGE: tl.constexpr,
    TAIL: tl.constexpr,
    TILES: tl.constexpr,
):
    """``output[M, N] = residual + activation(sum over ranks of input_r @ weight_r + bias)``, and its norm.

    Legend: as matmul_all_reduce_kernel; ``norm`` as for matmul_reduce_scatter_norm_kernel, of all M rows,
    on every rank.

    Ordering: as matmul_all_reduce_kernel; a slice of rows is summed when the tiles of all its columns have
    arrived from all sources.

    Example: W = 2, 16 x 64, 16 x 16 tiles, slices of 4 rows. Rank 1 stores its four tiles in region 1 of
    both ranks, slots 4-7; then both wait for slots 0-7, and norm rows 0-3, 4-7, 8-11, 12-15.
    """
    epoch = current_epoch(workspace)
    produce_for_all(workspace, input, weight, output_ptr, M, N, K, epoch, TILES)
    # A separate loop, after all stores: producing waits for no sum, so no order of programs blocks.
    own_ptr = data_pointer(workspace, workspace.rank, output_ptr)
    rows = M + tl.zeros((), tl.int64)
    norm_rows(workspace, own_ptr, bias_ptr, norm, None, output_ptr, 0, rows, N, epoch, AVERAGE, TAIL,
              TILES)  # fmt: skip


@triton.jit
def _sum_of_block(peers, lot, own, valid, AVERAGE: tl.constexpr, HALF: tl.constexpr,
                  WORDS: tl.constexpr, COMPILED: tl.constexpr):  # fmt: skip
    """Sum a block's numbers over ranks in fp32, ``[1, numbers]``; also return how many words are
    missing."""
    low = tl.zeros((WORDS,), tl.float32)
    high = tl.zeros((WORDS,), tl.float32)
    missing = tl.zeros((), tl.int32)
    # Rank order and fp32, with the own numbers in their place: same bits on all ranks.
    for source in range(peers.world_size):
        payload, lost = payload_of(peers, source, lot, own, valid, WORDS, COMPILED)
        missing += lost
        if HALF.is_fp32():
            low += payload.to(tl.float32, bitcast=True)
        else:
            low += half_of(payload, False, HALF)
            high += half_of(payload, True, HALF)
    if HALF.is_fp32():
        total = tl.reshape(low, (1, WORDS))
    else:
        # The lower half of a word is the first of its two numbers.
        total = tl.reshape(tl.join(low, high), (1, 2 * WORDS))
    if AVERAGE:
        total = total / peers.world_size
    return total, missing


@triton.jit(do_not_specialize=["peers"])
def low_latency_norm_kernel(
    peers,
    input_ptr,
    bias_ptr,
    norm,
    output_ptr,
    N,
    epochs_offset,
    words_offset,
    BIAS: tl.constexpr,
    AVERAGE: tl.constexpr,
    TAIL: tl.constexpr,
    UNIT: tl.constexpr,
    WORDS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """``output[M, N] = residual + sum over ranks of input_r + bias``, and its norm, everywhere.

    Legend: ``input`` is ``[M, N]``, dense, seen as integers of ``UNIT`` bytes; ``norm`` as for
    matmul_all_reduce_norm_kernel. The grid is M. A row is ``n = ceil(words / WORDS)`` blocks; the blocks of
    row r begin with ``r * n``. ``COLUMNS`` of ``TAIL`` is the numbers of a block, ``ROWS`` is 1.

    Ordering: the protocol's, for every block. A program has sent all blocks of its row before it waits for
    the first, and no program waits for another of its rank.

    Example: W = 2, M = 1, N = 512 bf16 numbers, WORDS = 128: two blocks. Rank 0 sends 128 words of block 0
    and 128 of block 1 to rank 1; then it polls the words of block 0 from rank 1, adds both ranks' numbers
    and the residual, stores them; the same of block 1; then it norms the row.
    """
    HALF: tl.constexpr = output_ptr.dtype.element_ty
    row = tl.program_id(0)
    blocks = tl.cdiv(N, TAIL.COLUMNS)
    units = N * (output_ptr.dtype.element_ty.primitive_bitwidth // 8) // UNIT
    words = tl.cdiv(units * UNIT, 4)
    row_ptr = input_ptr + row * units
    for number in range(blocks):
        block = row * blocks + number
        epoch_ptr, epoch = block_epoch(peers, epochs_offset, block)
        # A block that has timed out before is not sent again: its words may not have been read.
        if epoch > 0:
            index = number * WORDS + tl.arange(0, WORDS)
            own = load_units(row_ptr, index, units, UNIT)
            send_to_all(peers, Lot(words_offset, epoch, block), own, WORDS, COMPILED)
    lost = tl.zeros((), tl.int32)
    mean, squares = no_statistics(TAIL)
    offs_m = row.to(tl.int64) + tl.arange(0, 1)
    for number in range(blocks):
        block = row * blocks + number
        epoch_ptr, epoch = block_epoch(peers, epochs_offset, block)
        if epoch > 0:
            index = number * WORDS + tl.arange(0, WORDS)
            own = load_units(row_ptr, index, units, UNIT)
            lot = Lot(words_offset, epoch, block)
            total, missing = _sum_of_block(
                peers, lot, own, index < words, AVERAGE, HALF, WORDS, COMPILED
            )
            first = number * TAIL.COLUMNS
            offs_n = first + tl.arange(0, TAIL.COLUMNS)
            if BIAS:
                bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
                total += bias.to(tl.float32)[None, :]
            # A sum must include all ranks: otherwise the output stays as it was.
            mask = (offs_n < N)[None, :] & (missing == 0)
            offsets = offs_m[:, None] * N + offs_n[None, :]
            residual = load_residual(norm, offsets, mask, TAIL)
            x = store_sum(total, residual, output_ptr, offsets, mask, TAIL)
            mean, squares = with_block(mean, squares, x, mask, first, N, TAIL)
            lost += missing
            end_block(epoch_ptr, epoch, missing)
        else:
            lost += 1
    if lost == 0:
        # A thread loads here what another thread has stored.
        tl.debug_barrier()
        deviation = reciprocal_deviation(squares, N, TAIL)
        store_normed(peers, norm, None, output_ptr, 0, row, row + 1, N, True, mean, deviation, TAIL)
    count_program(peers)
