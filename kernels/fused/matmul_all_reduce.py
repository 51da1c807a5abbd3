"""Fused matmul + all-reduce, one-shot: every partial tile goes to every rank, every rank sums all.

For small outputs, where latency counts and W-fold traffic does not. Larger ones take
``matmul_reduce_scatter`` followed by an all-gather of the same parts, chosen by the host.

All ranks add the same contributions in rank order, so the results are bitwise equal on all ranks.
"""

import triton
import triton.language as tl

from interlace.kernels.epilogue import emit_tile
from interlace.kernels.fused.matmul_reduce_scatter import reduce_tile
from interlace.kernels.matmul import columns_operand, multiply_tile, rows_operand
from interlace.kernels.signal import current_epoch, peer_pointer, publish, wait_credit
from interlace.kernels.tiling import grouped_tile
from interlace.kernels.transfer import data_pointer


@triton.jit(do_not_specialize=["rank", "world_size", "M", "slot_offset"])
def matmul_all_reduce_kernel(
    peers_ptr,
    input_ptr,
    input_stride,
    weight_ptr,
    weight_stride_k,
    weight_stride_n,
    bias_ptr,
    output_ptr,
    M,
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
    AVERAGE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    SUBTILE: tl.constexpr,
):
    """``output[M, N] = activation(sum over ranks of input_r @ weight_r (+ bias[N]))``, everywhere.

    Legend: as matmul_reduce_scatter_kernel, with every rank the owner of all M rows.

    Ordering: a producer waits for each peer's credit, stores the tile into the peer's region [rank],
    publishes the slot (source, tile) there. Sums follow in the same programs, a tile when it has
    arrived from all sources.
    Producing waits for no sum of this op. finish_kernel gives the credit for reuse.

    Example: W = 2, one 64 x 64 tile. Rank 1 stores its tile in region 1 of rank 0, publishes slot 1
    there, then region 1 and slot 1 of itself; then both ranks add regions 0 and 1.
    """
    epoch = current_epoch(peers_ptr, rank)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    rows = M + tl.zeros((), tl.int64)
    a = rows_operand(input_ptr, input_stride, M, K, BLOCK_M, BLOCK_K, DESCRIPTORS)
    b = columns_operand(
        weight_ptr, weight_stride_k, weight_stride_n, N, K, BLOCK_N, BLOCK_K, DESCRIPTORS
    )
    for tile in range(program, tiles, programs):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        acc = multiply_tile(
            a,
            input_stride,
            M,
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
            True,
        )
        for step in range(world_size):
            peer = (rank + 1 + step) % world_size
            free = wait_credit(peers_ptr, rank, world_size, peer, epoch) >= epoch - 1
            to_ptr = data_pointer(peers_ptr, peer, data_offset, output_ptr) + rank * rows * N
            # Of no row, if the wait was given up. Not an `if` around the store: Triton 3.6 corrupts its
            # own memory when it compiles a branch that reads an accumulator from outside for 10.0.
            emit_tile(
                to_ptr,
                N,
                acc,
                bias_ptr,
                bias_ptr,
                bias_ptr,
                tile_m,
                tile_n,
                tl.where(free, rows, 0),
                N,
                BLOCK_M,
                BLOCK_N,
                "",
                "",
                "",
                SUBTILE,
                False,
            )
            if free:
                slot_byte = slot_offset + (rank * tiles + tile) * 8
                publish(peer_pointer(peers_ptr, peer, slot_byte), epoch)
    own_ptr = data_pointer(peers_ptr, rank, data_offset, output_ptr)
    for tile in range(program, tiles, programs):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        reduce_tile(
            peers_ptr,
            rank,
            world_size,
            slot_offset + tile * 8,
            tiles,
            epoch,
            own_ptr,
            bias_ptr,
            output_ptr,
            tile_m,
            tile_n,
            rows,
            N,
            BLOCK_M,
            BLOCK_N,
            BIAS,
            ACTIVATION,
            AVERAGE,
        )
