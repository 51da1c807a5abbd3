"""Fused matmul + reduce-scatter: partial tiles leave for their owners as they are computed.

Every rank holds a slice of K, so its product is a partial sum of all rows. Rows belong to owners. The
persistent matmul produces the next rank's rows first and its own last; each tile is stored into the
owner's workspace, region [source rank], and signalled once its program has done all it has for that
owner. Then the same programs sum the own rows::

    rank 0 of 3   | tiles of rank 1 | tiles of rank 2 | own tiles | sum own tiles over sources 0,1,2 |
                                 publish           publish     publish

The rotation makes rank r+1's contributions from r arrive first everywhere, so that no owner is the
target of all ranks at once. Summing in the same kernel needs no further stream, and since producing
never waits for a sum of this op, no order of programs can block.

Why not a signal after every tile: it ends in a barrier, and a loop with a barrier in it is not pipelined
across tiles. Nobody waits for a tile before its owner has produced its own rows, and those come last; by
then all others have been publishing for the time that one part takes.

Rejected: atomic adds into the owner's output (order of arrival would change the bits, and bf16
atomics round at every step), and a second reduce kernel (it cannot start on the first finished tile).
"""

import triton
import triton.language as tl

from interlace.kernels.collectives.reduction import (
    SEGMENT_COLUMNS,
    sum_contributions,
    wait_contributions,
)
from interlace.kernels.epilogue import activate, add_bias, emit_tile, output_operand, store_tile
from interlace.kernels.matmul import columns_operand, multiply_tile, rows_operand, tile_offsets
from interlace.kernels.signal import (
    complete_descriptor_stores,
    current_epoch,
    peer_pointer,
    publish,
    wait_credit,
)
from interlace.kernels.tiling import first_tile, grouped_tile
from interlace.kernels.transfer import data_pointer

_SEGMENT = tl.constexpr(SEGMENT_COLUMNS)


@triton.jit
def reduce_tile(
    peers_ptr,
    rank,
    world_size,
    slot_byte,
    slots_per_source,
    epoch,
    contribution_ptr,
    bias_ptr,
    output_ptr,
    tile_m,
    tile_n,
    rows,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    AVERAGE: tl.constexpr,
):
    """Sum one tile of ``[W, rows, N]`` contributions over sources, add the bias, activate, store it.

    In slices of rows: a whole tile of sums and of loaded values does not fit the registers.
    """
    wait_contributions(peers_ptr, rank, world_size, slot_byte, slots_per_source, epoch)
    SLICE: tl.constexpr = min(BLOCK_M, 16)
    elements_per_source = (rows + tl.zeros((), tl.int64)) * N
    offs_n = tile_offsets(tile_n, BLOCK_N)
    for part in range(BLOCK_M // SLICE):
        slice_m = tile_m * (BLOCK_M // SLICE) + part
        offs_m = tile_offsets(slice_m, SLICE)
        total = sum_contributions(
            world_size,
            contribution_ptr,
            elements_per_source,
            offs_m[:, None] * N + offs_n[None, :],
            (offs_m < rows)[:, None] & (offs_n < N)[None, :],
            AVERAGE,
            (SLICE, BLOCK_N),
        )
        total = add_bias(total, bias_ptr, slice_m, tile_n, rows, N, SLICE, BLOCK_N, BIAS)
        total = activate(total, ACTIVATION)
        store_tile(output_ptr, N, total, slice_m, tile_n, rows, N, SLICE, BLOCK_N)


@triton.jit
def produce_part(
    input_ptr,
    input_stride,
    row_scale_ptr,
    b,
    weight_stride_k,
    weight_stride_n,
    column_scale_ptr,
    bias_ptr,
    to_ptr,
    first,
    start,
    tiles_m,
    tiles_n,
    programs,
    first_row,
    rows,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SCALES: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    FAST_ACCUM: tl.constexpr,
    FLATTEN: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    SUBTILE: tl.constexpr,
    OUT_DESCRIPTOR: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Store this program's tiles of one owner's ``rows x N``, dense from ``to_ptr`` on, ready to publish.

    They are number ``first`` and every ``programs``-th after it; the owner's begin with ``start``.
    """
    a_ptr = input_ptr + first_row * input_stride
    a = rows_operand(a_ptr, input_stride, rows.to(tl.int32), K, BLOCK_M, BLOCK_K, DESCRIPTORS)
    c = output_operand(
        to_ptr,
        N,
        rows.to(tl.int32),
        N,
        BLOCK_M,
        BLOCK_N,
        SUBTILE,
        OUT_DESCRIPTOR,
    )
    scale_ptr = row_scale_ptr
    if SCALES == "row":
        scale_ptr += first_row
    for number in tl.range(
        first,
        start + tiles_m * tiles_n,
        programs,
        flatten=FLATTEN,
        warp_specialize=WARP_SPECIALIZE,
    ):
        tile_m, tile_n = grouped_tile(number - start, tiles_m, tiles_n, GROUP_M)
        acc = multiply_tile(
            a,
            input_stride,
            rows.to(tl.int32),
            b,
            weight_stride_k,
            weight_stride_n,
            N,
            K,
            tile_m,
            tile_n,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            DESCRIPTORS,
            INPUT_PRECISION,
            FAST_ACCUM,
        )
        emit_tile(
            c,
            N,
            acc,
            bias_ptr,
            scale_ptr,
            column_scale_ptr,
            tile_m,
            tile_n,
            rows,
            N,
            BLOCK_M,
            BLOCK_N,
            "",
            "",
            SCALES,
            SUBTILE,
            OUT_DESCRIPTOR,
        )
    COMPILED_STORES: tl.constexpr = OUT_DESCRIPTOR and COMPILED
    complete_descriptor_stores(COMPILED_STORES)


@triton.jit(do_not_specialize=["rank", "world_size", "own_rows", "slot_offset"])
def matmul_reduce_scatter_kernel(
    peers_ptr,
    input_ptr,
    input_stride,
    row_scale_ptr,
    weight_ptr,
    weight_stride_k,
    weight_stride_n,
    column_scale_ptr,
    bias_ptr,
    output_ptr,
    segments_ptr,
    own_rows,
    N,
    K,
    rank,
    world_size,
    slot_offset,
    data_offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
    AVERAGE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    FAST_ACCUM: tl.constexpr,
    FLATTEN: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    SUBTILE: tl.constexpr,
    OUT_DESCRIPTOR: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """``output[own_rows, N] = activation(sum over ranks of (input_r @ weight_r)[own] (+ bias))``.

    Legend: ``input`` is ``[M, K_r]``, rows ``input_stride`` apart, ``weight`` ``[K_r, N]``; ``output`` is
    contiguous and its dtype is that of the contributions. ``segments``: a line per owner in
    ``tiling.owner_order``: owner, first row, rows, number of the first tile. Program p of P takes tiles
    t with ``t % P == p``. ``SCALES``: of this rank's product; "row": ``row_scale`` is ``[M]`` and
    ``column_scale`` ``[N]``; "tensor": one number each.

    Ordering: a producer waits for the owner's credit and stores its tiles of that owner; descriptor
    stores it then waits for, until they are complete; then it publishes the slot (source, tile) of
    each. The owner waits for the slots of all sources, then loads. The workspace is free again when
    finish_kernel, next on the stream, has given this rank's credit.

    Example: W = 2, M = 128, N = 64, 64 x 64 tiles, one program per rank. Rank 0 computes rows 64-127,
    stores them in region 0 of rank 1 and publishes slot 0 there; then rows 0-63 into its own region
    0, slot 0; then waits for slots 0 (source 0) and 1 (source 1) and adds both regions.
    """
    epoch = current_epoch(peers_ptr, rank)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    b = columns_operand(
        weight_ptr, weight_stride_k, weight_stride_n, N, K, BLOCK_N, BLOCK_K, DESCRIPTORS
    )
    for line in range(world_size):
        segment = segments_ptr + line * _SEGMENT
        owner = tl.load(segment)
        first_row = tl.load(segment + 1)
        rows = tl.load(segment + 2)
        start = tl.load(segment + 3).to(tl.int32)
        tiles_m = tl.cdiv(rows, BLOCK_M).to(tl.int32)
        tiles = tiles_m * tiles_n
        first = first_tile(start, program, programs)
        if first < start + tiles:
            if wait_credit(peers_ptr, rank, world_size, owner, epoch) >= epoch - 1:
                produce_part(
                    input_ptr,
                    input_stride,
                    row_scale_ptr,
                    b,
                    weight_stride_k,
                    weight_stride_n,
                    column_scale_ptr,
                    bias_ptr,
                    data_pointer(peers_ptr, owner, data_offset, output_ptr) + rank * rows * N,
                    first,
                    start,
                    tiles_m,
                    tiles_n,
                    programs,
                    first_row,
                    rows,
                    N,
                    K,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    GROUP_M,
                    DESCRIPTORS,
                    SCALES,
                    INPUT_PRECISION,
                    FAST_ACCUM,
                    FLATTEN,
                    WARP_SPECIALIZE,
                    SUBTILE,
                    OUT_DESCRIPTOR,
                    COMPILED,
                )
                for number in range(first, start + tiles, programs):
                    slot_byte = slot_offset + (rank * tiles + number - start) * 8
                    publish(peer_pointer(peers_ptr, owner, slot_byte), epoch)
    own_ptr = data_pointer(peers_ptr, rank, data_offset, output_ptr)
    own_tiles_m = tl.cdiv(own_rows, BLOCK_M)
    own_tiles = own_tiles_m * tiles_n
    for tile in range(program, own_tiles, programs):
        tile_m, tile_n = grouped_tile(tile, own_tiles_m, tiles_n, GROUP_M)
        reduce_tile(
            peers_ptr,
            rank,
            world_size,
            slot_offset + tile * 8,
            own_tiles,
            epoch,
            own_ptr,
            bias_ptr,
            output_ptr,
            tile_m,
            tile_n,
            own_rows,
            N,
            BLOCK_M,
            BLOCK_N,
            BIAS,
            ACTIVATION,
            AVERAGE,
        )
