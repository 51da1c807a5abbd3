"""Grouped matmul whose rows go home as they are computed: the second matmul of a mixture of experts.

Rows are by expert, then by the rank that they came from, and go back there: a *segment*, the rows of one
expert for one rank, is contiguous here and at home (``combine.py``). The persistent matmul
computes the rows of the next rank first and its own last, as matmul + reduce-scatter does. Each tile is
stored into the workspace of the rank that it is for; a program signals once it has all of its tiles for a
rank there. Then the same programs sum every token's rows by slot::

    rank 0 of 3  | rows of rank 1: experts a, b | rows of rank 2: a, b | own rows: a, b | sum by slot |
                                             publish              publish            publish

So nothing of the product is written twice, and there is no sorting: tiles are stored where they belong.
A program signals every rank, also one for which it has no tile: whose tile a token waits for depends on
the routing, and to know it takes longer than to wait for all.

Rejected: sums over the experts of a rank before rows travel (other bits for every placement of experts),
and atomic adds to the token (the order of arrival changes the bits).
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import Epilogue
from interlace.kernels.epilogue import emit_tile
from interlace.kernels.experts.combine import sum_slots
from interlace.kernels.experts.dispatch import SEGMENT_NUMBERS
from interlace.kernels.products import columns_operand, multiply_tile, part_of_rows, rows_operand
from interlace.kernels.signal import current_epoch, peer_pointer, publish, wait_credit
from interlace.kernels.tiling import first_tile, grouped_tile
from interlace.kernels.transfer import data_pointer, table_line

_SEGMENT = tl.constexpr(SEGMENT_NUMBERS)


@triton.jit
def _multiply_for(workspace, input, whole, weight, bias_ptr, home_ptr, segments_ptr, peer, num_experts,
                  start, N, K, TILES: tl.constexpr):  # fmt: skip
    """Store this program's tiles of the rows of ``peer``; returns the number of the next rank's first."""
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    programs = tl.num_programs(0)
    for expert in range(num_experts):
        segment = expert * workspace.world_size + peer
        first_row, count, home = table_line(segments_ptr, segment, _SEGMENT)
        # 32 bits, as the shape of a descriptor has.
        rows = count.to(tl.int32)
        tiles_m = tl.cdiv(rows, TILES.BLOCK_M)
        end = start + tiles_m * tiles_n
        first = first_tile(start, tl.program_id(0), programs)
        if first < end:
            a_ptr = input.ptr + first_row * input.stride
            a, a_row = part_of_rows(whole, a_ptr, input.stride, first_row, rows, K, TILES)
            b_ptr = weight.ptr + tl.cast(expert, tl.int64) * weight.stride_e
            b = columns_operand(b_ptr, weight, N, K, TILES)
            of_expert = Epilogue(bias_ptr + expert * N, None, None)
            # No wait and no publish in this loop, or it would not be pipelined across tiles.
            for number in tl.range(
                first, end, programs, flatten=TILES.FLATTEN, warp_specialize=TILES.WARP_SPECIALIZE
            ):
                tile_m, tile_n = grouped_tile(number - start, tiles_m, tiles_n, TILES.GROUP_M)
                acc = multiply_tile(
                    a, input.stride, rows, weight, b, N, K, tile_m, tile_n, TILES, a_row
                )
                emit_tile(home_ptr + home * N, acc, of_expert, tile_m, tile_n, rows, N, TILES)
        start = end
    return start


@triton.jit(do_not_specialize=["workspace", "segments_ptr", "combined", "num_experts"])
def grouped_matmul_combine_kernel(
    workspace,
    input,
    weight,
    bias_ptr,
    segments_ptr,
    combined,
    num_experts,
    N,
    K,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
):
    """``output[t] = sum over slots k of w[t, k] * activation(row of (t, k) @ weight[e] (+ bias[e]))``.

    Legend: ``input`` ``[R, K]``, the rows of this rank's E experts; ``weight`` ``[E, K, N]``, ``bias``
    ``[E, N]``. ``segments``, int64 ``[E, W, 3]``: first row of the input, rows, and the first of them at
    home. ``inverse``, int64 ``[T, TOPK]``: the home row of a slot; ``slot_weights`` ``[T, TOPK]``, fp32.
    Tiles are numbered through; program p of P takes tiles t with ``t % P == p``. P is the same on all
    ranks. A product is rounded to the output's dtype before it travels; sums are in fp32.

    Ordering: a program waits for a rank's credit, stores its tiles there, publishes slot (source, program).
    Waits for rows begin when all tiles have been stored, so no order of programs blocks; sums are loaded
    behind the wait for all slots. The workspace is free again when finish_kernel, next on the stream, has
    given this rank's credit.

    Example: W = 2, E = 1, one program per rank, TOPK = 2, rank 0's tokens have experts (0, 1) and (1, -).
    On rank 1 ``segments`` is [[0, 2, 1], [2, 0, 0]]: it multiplies rows 0 and 1, stores them as rows 1 and
    2 of rank 0 and publishes slot 1 there, then slot 1 of its own. Rank 0 publishes slot 0 on rank 1, has
    its own row 0, publishes slot 0; then it waits for slots 0 and 1 and sums: ``inverse`` is [[0, 1], [2,
    -1]].
    """
    epoch = current_epoch(workspace)
    programs = tl.num_programs(0)
    world_size = workspace.world_size
    # Once per program: to make a descriptor costs a write and a fence.
    whole = rows_operand(input.ptr, input.stride, K, TILES)
    start = tl.zeros((), tl.int32)
    for step in range(world_size):
        peer = (workspace.rank + 1 + step) % world_size
        # Given up: the rank may still be reading what this op would overwrite.
        if wait_credit(workspace, peer, epoch) >= epoch - 1:
            home_ptr = data_pointer(workspace, peer, combined.output_ptr)
            start = _multiply_for(workspace, input, whole, weight, bias_ptr, home_ptr, segments_ptr,
                                  peer, num_experts, start, N, K, TILES)  # fmt: skip
            slot = workspace.rank * programs + tl.program_id(0)
            publish(peer_pointer(workspace, peer, workspace.slot_offset + slot * 8), epoch)
    own_ptr = data_pointer(workspace, workspace.rank, combined.output_ptr)
    sum_slots(workspace, own_ptr, combined, N, programs, epoch, SLOTS)
