"""Fused matmul + reduce-scatter: partial tiles leave for their owners as they are computed.

Every rank holds a slice of K, so its product is a partial sum of all rows. Rows belong to owners. The
persistent matmul produces the next rank's rows first and its own last. Each tile is stored into the owner's
workspace, region [source rank], and signalled once its program has stored all its tiles of that owner. Then
the same programs sum the own rows::

    rank 0 of 3   | tiles of rank 1 | tiles of rank 2 | own tiles | sum own tiles over sources 0,1,2 |
                                 publish           publish     publish

The rotation makes rank r+1's contributions from r arrive first everywhere, so that no owner is the
target of all ranks at once. Summing in the same kernel needs no further stream, and since producing
never waits for a sum of this op, no order of programs can block.

Why not a signal after every tile? A publish has a barrier, and a loop with a barrier in it is not pipelined
across tiles. And it has a fence, which waits until all stores have arrived at the owner. So a program's
tiles of an owner are published together, with one barrier and one fence. An owner waits for a tile only
after it has produced its own rows, which come last. By then all others have been publishing for the time of
one part.

Rejected: atomic adds into the owner's output (order of arrival would change the bits, and bf16
atomics round at every step), and a second reduce kernel (it cannot start on the first finished tile; for
9.0 there is one, after products that gain more: ``matmul_reduce_scatter_roles.py``).

Fused matmul + all-reduce, one-shot: every partial tile goes to every rank, every rank sums all.

For small outputs, where latency counts and W-fold traffic does not. For larger ones the launch side takes
``matmul_reduce_scatter`` followed by an all-gather of the same parts.

All ranks add the same contributions in rank order, so the results are bitwise equal on all ranks.
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import Epilogue, Turn
from interlace.kernels.collectives.reduction import SEGMENT_COLUMNS, sum_contributions
from interlace.kernels.epilogue import activate, add_bias, emit_tile, output_operand, store_tile
from interlace.kernels.products import (
    columns_operand,
    multiply_tile,
    part_of_rows,
    rows_operand,
    tile_offsets,
)
from interlace.kernels.signal import complete_descriptor_stores, current_epoch, wait_credit
from interlace.kernels.slots import publish_to_all, publish_turn, wait_credits, wait_sources
from interlace.kernels.tiling import first_tile, grouped_tile
from interlace.kernels.transfer import data_pointer, table_line

_SEGMENT = tl.constexpr(SEGMENT_COLUMNS)


@triton.jit
def reduce_tiles(workspace, own_ptr, epoch, bias_ptr, output_ptr, tiles_m, rows, N,
                 AVERAGE: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Sum this program's tiles of ``own [W, rows, N]`` over sources, add the bias, activate, store them.

    In slices of rows: a whole tile of sums and of loaded values does not fit the registers.
    """
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    tiles = tiles_m * tiles_n
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    SLICE: tl.constexpr = min(TILES.BLOCK_M, 16)
    SLICES: tl.constexpr = TILES.BLOCK_M // SLICE
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, TILES.GROUP_M)
        # Before the slices: a load in the loop below cannot be moved above the wait. Its value is not
        # checked: the sum goes into this rank's own output only, of an op that failed.
        wait_sources(workspace, workspace.slot_offset + tile * 8, tiles, epoch)
        # int64 before the product with N: the contributions of one source may pass 2**31 elements.
        elements_per_source = (rows + tl.zeros((), tl.int64)) * N
        offs_n = tile_offsets(tile_n, BLOCK_N)
        for part in range(SLICES):
            # In units of slices, so that rows beyond the edge are masked as in a tile.
            slice_m = tile_m * SLICES + part
            offs_m = tile_offsets(slice_m, SLICE)
            total = sum_contributions(
                workspace.world_size,
                own_ptr,
                elements_per_source,
                offs_m[:, None] * N + offs_n[None, :],
                (offs_m < rows)[:, None] & (offs_n < N)[None, :],
                AVERAGE,
            )
            total = add_bias(total, bias_ptr, slice_m, tile_n, rows, N, SLICE, BLOCK_N, TILES)
            total = activate(total, TILES)
            store_tile(output_ptr, total, slice_m, tile_n, rows, N, SLICE, BLOCK_N)


@triton.jit
def produce_part(input, whole, b, weight, epilogue, to_ptr, turn, first_row, rows, N, K,
                 TILES: tl.constexpr, PARTIAL: tl.constexpr = True):  # fmt: skip
    """Store this program's tiles of one owner's ``rows x N``, dense from ``to_ptr`` on, to publish.

    ``PARTIAL``: contributions to a sum, which gets the bias and the activation (``reduce_tiles``).
    """
    tiles_m = tl.cdiv(rows, TILES.BLOCK_M).to(tl.int32)
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    # 32 bits, as the shape of a descriptor has; `rows` comes from a table of int64.
    count = rows.to(tl.int32)
    a_ptr = input.ptr + first_row * input.stride
    a, a_row = part_of_rows(whole, a_ptr, input.stride, first_row, count, K, TILES)
    c = output_operand(to_ptr, N, TILES, count)
    row_scale_ptr = epilogue.row_scale_ptr
    if TILES.SCALES == "row":
        row_scale_ptr += first_row
    of_part = Epilogue(epilogue.bias_ptr, row_scale_ptr, epilogue.column_scale_ptr)
    # No wait and no publish in this loop, or it would not be pipelined across tiles.
    for number in tl.range(
        turn.first,
        turn.start + tiles_m * tiles_n,
        turn.programs,
        flatten=TILES.FLATTEN,
        warp_specialize=TILES.WARP_SPECIALIZE,
    ):
        tile_m, tile_n = grouped_tile(number - turn.start, tiles_m, tiles_n, TILES.GROUP_M)
        acc = multiply_tile(a, input.stride, count, weight, b, N, K, tile_m, tile_n, TILES,
                            a_row, a_ptr, weight.ptr)  # fmt: skip
        emit_tile(c, acc, of_part, tile_m, tile_n, rows, N, TILES, PARTIAL)
    # A release does not order TMA stores under way: the caller may publish only after this.
    COMPILED_STORES: tl.constexpr = TILES.OUT_DESCRIPTOR and TILES.COMPILED
    complete_descriptor_stores(COMPILED_STORES)


@triton.jit
def produce_for_owners(workspace, input, weight, epilogue, output_ptr, segments_ptr, N, K, epoch,
                       TILES: tl.constexpr):  # fmt: skip
    """Store this program's tiles of every owner's rows in the owner's workspace, and publish them."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    rank = workspace.rank
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    # Once per program: making a descriptor costs a write and a fence.
    whole = rows_operand(input.ptr, input.stride, K, TILES)
    b = columns_operand(weight.ptr, weight, N, K, TILES)
    for line in range(workspace.world_size):
        owner, first_row, rows, start = table_line(segments_ptr, line, _SEGMENT)
        start = start.to(tl.int32)
        tiles_m = tl.cdiv(rows, TILES.BLOCK_M).to(tl.int32)
        tiles = tiles_m * tiles_n
        first = first_tile(start, program, programs)
        # A program without a tile of this owner waits for no credit and publishes nothing.
        if first < start + tiles:
            # After a timeout the owner may still be reading memory that this op would overwrite.
            if wait_credit(workspace, owner, epoch) >= epoch - 1:
                # Region [rank] of the owner: every source has its own, so sources do not overwrite each
                # other.
                to_ptr = data_pointer(workspace, owner, output_ptr) + rank * rows * N
                turn = Turn(first, start, programs)
                produce_part(input, whole, b, weight, epilogue, to_ptr, turn, first_row, rows, N, K,
                             TILES)  # fmt: skip
                # After the products: a publish begins with a barrier, which would end the pipeline.
                slot_byte = workspace.slot_offset + (rank * tiles - start) * 8
                publish_turn(workspace, owner, slot_byte, first, start + tiles, programs, epoch)


@triton.jit(do_not_specialize=["workspace", "own_rows"])
def matmul_reduce_scatter_kernel(
    workspace,
    input,
    weight,
    epilogue,
    output_ptr,
    segments_ptr,
    own_rows,
    N,
    K,
    AVERAGE: tl.constexpr,
    TILES: tl.constexpr,
):
    """``output[own_rows, N] = activation(sum over ranks of (input_r @ weight_r)[own] (+ bias))``.

    Legend: ``input`` is ``[M, K_r]``, ``weight`` ``[K_r, N]``; ``output`` is contiguous and has the dtype
    of the contributions. ``segments``: a line per owner in ``tiling.owner_order``: owner, first
    row, rows, number of the first tile. Program p of P takes tiles t with ``t % P == p``. ``SCALES``
    describes this rank's product: "row": ``row_scale`` is ``[M]`` and ``column_scale`` ``[N]``; "tensor":
    one number each.

    Ordering: a producer waits for the owner's credit, stores its tiles of that owner, and waits until
    descriptor stores among them are complete; then it publishes the slot (source, tile) of each. The
    owner waits for the slots of all sources, then loads. The workspace is free again when
    finish_kernel, next on the stream, has given this rank's credit.

    Example: W = 2, M = 128, N = 64, 64 x 64 tiles, one program per rank. Rank 0 computes rows 64-127,
    stores them in region 0 of rank 1 and publishes slot 0 there; then rows 0-63 into its own region
    0, slot 0; then waits for slots 0 (source 0) and 1 (source 1) and adds both regions.
    """
    epoch = current_epoch(workspace)
    produce_for_owners(workspace, input, weight, epilogue, output_ptr, segments_ptr, N, K, epoch,
                       TILES)  # fmt: skip
    # Waits for data begin only here, after everything that others wait for: no order of programs blocks.
    own_ptr = data_pointer(workspace, workspace.rank, output_ptr)
    own_tiles_m = tl.cdiv(own_rows, TILES.BLOCK_M)
    reduce_tiles(workspace, own_ptr, epoch, epilogue.bias_ptr, output_ptr, own_tiles_m, own_rows, N,
                 AVERAGE, TILES)  # fmt: skip


@triton.jit(do_not_specialize=["workspace", "own_rows"])
def sum_tiles_kernel(workspace, epilogue, output_ptr, own_rows, N, AVERAGE: tl.constexpr,
                     TILES: tl.constexpr):  # fmt: skip
    """``output[own_rows, N] = activation(sum over ranks of their contributions (+ bias))``.

    These are the sums of ``matmul_reduce_scatter_kernel``, after a kernel that only has products
    (``matmul_reduce_scatter_roles.py``). Legend: as in that kernel.

    Ordering: it waits for a tile's slots of all sources, then loads. Everything that others wait for is in
    the kernel before it on the stream, so no order of ranks blocks. The workspace is free again as there.

    Example: W = 2, 64 own rows, N = 64, 64 x 64 tiles: the program waits for slots 0 (source 0) and 1
    (source 1), adds regions 0 and 1 of the own workspace and stores 64 rows of the output.
    """
    own_ptr = data_pointer(workspace, workspace.rank, output_ptr)
    own_tiles_m = tl.cdiv(own_rows, TILES.BLOCK_M)
    reduce_tiles(workspace, own_ptr, current_epoch(workspace), epilogue.bias_ptr, output_ptr,
                 own_tiles_m, own_rows, N, AVERAGE, TILES)  # fmt: skip


@triton.jit
def produce_for_all(workspace, input, weight, output_ptr, M, N, K, epoch, TILES: tl.constexpr):
    """Store this program's tiles of the product in every rank's workspace, and publish them."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    rank = workspace.rank
    tiles_m = tl.cdiv(M, TILES.BLOCK_M)
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    tiles = tiles_m * tiles_n
    # int64 before the products with rank and N: a region may begin beyond 2**31 elements.
    rows = M + tl.zeros((), tl.int64)
    a = rows_operand(input.ptr, input.stride, K, TILES, M)
    b = columns_operand(weight.ptr, weight, N, K, TILES)
    partial = Epilogue(None, None, None)
    for tile in range(program, tiles, programs):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, TILES.GROUP_M)
        acc = multiply_tile(a, input.stride, M, weight, b, N, K, tile_m, tile_n, TILES,
                            0, input.ptr, weight.ptr)  # fmt: skip
        free = wait_credits(workspace, epoch) == 0
        # The next rank first, so that no rank is the target of all others at once.
        for step in range(workspace.world_size):
            peer = (rank + 1 + step) % workspace.world_size
            to_ptr = data_pointer(workspace, peer, output_ptr) + rank * rows * N
            # After a timeout, a tile of 0 rows: the mask stops every store. Not an `if` around the store:
            # compiling for 10.0, Triton 3.6 corrupts its own memory when a branch reads an accumulator
            # from outside.
            emit_tile(to_ptr, acc, partial, tile_m, tile_n, tl.where(free, rows, 0), N, TILES, True)
        if free:
            slot_byte = workspace.slot_offset + (rank * tiles + tile) * 8
            publish_to_all(workspace, slot_byte, epoch)


@triton.jit(do_not_specialize=["workspace", "M"])
def matmul_all_reduce_kernel(
    workspace,
    input,
    weight,
    bias_ptr,
    output_ptr,
    M,
    N,
    K,
    AVERAGE: tl.constexpr,
    TILES: tl.constexpr,
):
    """``output[M, N] = activation(sum over ranks of input_r @ weight_r (+ bias[N]))``, everywhere.

    Legend: as matmul_reduce_scatter_kernel, with every rank the owner of all M rows.

    Ordering: a producer waits for all peers' credits, stores the tile into region [rank] of each,
    publishes the slot (source, tile) at all of them at once. Sums follow in the same programs, a tile when
    it has arrived from all sources.
    Producing waits for no sum of this op. finish_kernel gives the credit for reuse.

    Example: W = 2, one 64 x 64 tile. Rank 1 stores its tile in region 1 of rank 0, publishes slot 1
    there, then region 1 and slot 1 of itself; then both ranks add regions 0 and 1.
    """
    epoch = current_epoch(workspace)
    produce_for_all(workspace, input, weight, output_ptr, M, N, K, epoch, TILES)
    # A separate loop, after all stores: producing waits for no sum, so no order of programs blocks.
    own_ptr = data_pointer(workspace, workspace.rank, output_ptr)
    rows = M + tl.zeros((), tl.int64)
    tiles_m = tl.cdiv(M, TILES.BLOCK_M)
    reduce_tiles(workspace, own_ptr, epoch, bias_ptr, output_ptr, tiles_m, rows, N, AVERAGE, TILES)
