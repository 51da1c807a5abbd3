"""Fused matmul + all-reduce, one-shot: every partial tile goes to every rank, every rank sums all.

For small outputs, where latency counts and W-fold traffic does not. For larger ones the launch side takes
``matmul_reduce_scatter`` followed by an all-gather of the same parts.

All ranks add the same contributions in rank order, so the results are bitwise equal on all ranks.
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import Epilogue
from interlace.kernels.epilogue import emit_tile
from interlace.kernels.matmul.matmul_reduce_scatter import reduce_tiles
from interlace.kernels.products import columns_operand, multiply_tile, rows_operand
from interlace.kernels.signal import current_epoch
from interlace.kernels.slots import publish_to_all, wait_credits
from interlace.kernels.tiling import grouped_tile
from interlace.kernels.transfer import data_pointer


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
        acc = multiply_tile(a, input.stride, M, weight, b, N, K, tile_m, tile_n, TILES)
        free = wait_credits(workspace, epoch) == 0
        # The next rank first, so that no rank is the target of all others at once.
        for step in range(workspace.world_size):
            peer = (rank + 1 + step) % workspace.world_size
            to_ptr = data_pointer(workspace, peer, output_ptr) + rank * rows * N
            # If the wait was given up, a tile of 0 rows: the mask lets nothing through. Not an `if` around
            # the store: compiling for 10.0, Triton 3.6 corrupts its own memory when a branch reads an
            # accumulator from outside.
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
    # A loop of its own, after all stores: producing waits for no sum, so no order of programs blocks.
    own_ptr = data_pointer(workspace, workspace.rank, output_ptr)
    rows = M + tl.zeros((), tl.int64)
    tiles_m = tl.cdiv(M, TILES.BLOCK_M)
    reduce_tiles(workspace, own_ptr, epoch, bias_ptr, output_ptr, tiles_m, rows, N, AVERAGE, TILES)
