"""Fused matmul + all-to-all, and all-to-all + matmul: the projections around an attention over heads.

A rank has some tokens and needs some heads of all tokens, or the other way round (DeepSpeed's Ulysses).
Heads are columns of a product before the exchange, and a part of K after it::

    matmul + all-to-all   rank 0 of 3 | tiles of rank 1 | tiles of rank 2 | own tiles | collect 2, 1 |
                                                  publish           publish
    all-to-all + matmul   copiers     | chunk 0 -> 1 | chunk 0 -> 2 | chunk 1 -> 1 | ...
                          consumers   | tiles of chunk 0: own K, wait 1, K of 1, wait 2, K of 2 | ...

The first uses the products of ``matmul_reduce_scatter.py``. Tiles of another rank are stored in that rank's
workspace, at their place in its result, the next rank's first. Nothing is summed. The same programs then
copy the arrived tiles into the output, because the next op needs the workspace. This rank's part is stored
in the output directly.

The second sums over sources, in registers, in the order of the ranks: the same bits in every schedule. A
tile waits in the middle of its K. So rows travel in chunks, and while one is multiplied the next one
travels. Rows of a source are contiguous, because its sends are those of ``transfer.py``.

Each is the gradient of the other's input, with the weight transposed.

Rejected: gathering the tokens and multiplying by the own heads' columns only (``all_gather_matmul.py``), or
reducing the results of each rank's heads. Both move the hidden size of all tokens, this a W-th of all
heads.
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import Epilogue, Turn
from interlace.kernels.epilogue import emit_tile
from interlace.kernels.matmul.matmul_reduce_scatter import produce_part
from interlace.kernels.products import add_product, columns_operand, rows_operand
from interlace.kernels.signal import current_epoch, wait, wait_credit
from interlace.kernels.slots import publish_turn
from interlace.kernels.tiling import first_tile, grouped_tile
from interlace.kernels.transfer import (
    aligned_pointer,
    copy_rows,
    data_pointer,
    push_chunks,
    table_line,
)

SHARD_COLUMNS = 3
_SHARD = tl.constexpr(SHARD_COLUMNS)


@triton.jit
def _produce_for_others(workspace, input, weight, epilogue, output_ptr, shards_ptr, N, K, epoch,
                        TILES: tl.constexpr):  # fmt: skip
    """Store this program's tiles of every rank's columns in that rank's workspace, and publish them."""
    rows = tl.load(shards_ptr + workspace.rank * _SHARD).to(tl.int32)
    tiles = tl.cdiv(rows, TILES.BLOCK_M) * tl.cdiv(N, TILES.BLOCK_N)
    whole = rows_operand(input.ptr, input.stride, K, TILES)
    for step in range(workspace.world_size):
        start = step * tiles
        first = first_tile(start, tl.program_id(0), tl.num_programs(0))
        # A program without a tile of this owner waits for no credit and publishes nothing.
        if first < start + tiles:
            owner = (workspace.rank + 1 + step) % workspace.world_size
            # After a timeout the owner may still be reading memory that this op would overwrite.
            if wait_credit(workspace, owner, epoch) >= epoch - 1:
                # As integers: facts that the compiler knows about one address must not apply to the other.
                address = output_ptr.to(tl.int64)
                if owner != workspace.rank:
                    address = data_pointer(workspace, owner, output_ptr).to(tl.int64)
                first_row = tl.load(shards_ptr + workspace.rank * _SHARD + 1)
                # The op has allocated its output itself, at a multiple of 16 bytes like workspaces.
                to_ptr = aligned_pointer(address.to(output_ptr.dtype)) + first_row * N
                # int64 before the product with a stride: it may pass 2**31 elements.
                column = (owner + tl.zeros((), tl.int64)) * N
                b = columns_operand(weight.ptr + column * weight.stride_n, weight, N, K, TILES)
                bias_ptr = epilogue.bias_ptr
                if TILES.BIAS == "n":
                    bias_ptr += column
                of_owner = Epilogue(bias_ptr, epilogue.row_scale_ptr, epilogue.column_scale_ptr)
                turn = Turn(first, start, tl.num_programs(0))
                produce_part(input, whole, b, weight, of_owner, to_ptr, turn, rows - rows, rows, N, K,
                             TILES, False)  # fmt: skip
                if owner != workspace.rank:
                    # Looked up again: products leave no register for it.
                    first_slot = tl.load(shards_ptr + workspace.rank * _SHARD + 2) - start
                    # After the products: a publish begins with a barrier, which would end the pipeline.
                    publish_turn(workspace, owner, workspace.slot_offset + first_slot * 8, first,
                                 start + tiles, tl.num_programs(0), epoch)  # fmt: skip


@triton.jit
def _collect(workspace, output_ptr, shards_ptr, N, epoch, TILES: tl.constexpr):
    """Copy this program's tiles that the other ranks have stored here into the output."""
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    arrived_ptr = data_pointer(workspace, workspace.rank, output_ptr)
    for step in range(1, workspace.world_size):
        source = (workspace.rank - step + workspace.world_size) % workspace.world_size
        rows, first_row, first_slot = table_line(shards_ptr, source, _SHARD)
        tiles_m = tl.cdiv(rows, TILES.BLOCK_M).to(tl.int32)
        for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
            # Its value is not checked: this is the own output, of an op that failed.
            wait(workspace, source, workspace.slot_offset + (first_slot + tile) * 8, epoch)
            tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, TILES.GROUP_M)
            row = tile_m * TILES.BLOCK_M
            column = tile_n * TILES.BLOCK_N
            place = (first_row + row) * N + column
            copy_rows(output_ptr + place, N, arrived_ptr + place, N, min(rows - row, TILES.BLOCK_M),
                      min(N - column, TILES.BLOCK_N), 16, TILES.BLOCK_N)  # fmt: skip


@triton.jit(do_not_specialize=["workspace"])
def matmul_all_to_all_kernel(
    workspace, input, weight, epilogue, output_ptr, shards_ptr, N, K, TILES: tl.constexpr
):
    """``output[all rows, N] = concat over ranks s of activation(input_s @ weight[:, own N] (+ bias))``.

    Legend: ``input`` is ``[rows, K]``, ``weight`` ``[K, W * N]``, the same on all ranks; rank r has its
    columns from ``r * N`` on; ``output`` is contiguous. ``shards``: a line per rank: its rows,
    the first of them among all, and the first slot of its tiles. Tiles are numbered over owners, the
    next rank first; program p of P takes tiles t with ``t % P == p``.

    Ordering: a producer waits for the owner's credit, stores its tiles of that owner, waits until
    descriptor stores among them are complete, then publishes the slot of each. The owner waits for a
    tile's slot, then loads it. Waits for data begin only after everything that others wait for, so no
    order of programs blocks. The workspace is free again when finish_kernel, next on the stream, has
    given this rank's credit.

    Example: W = 2, 64 rows each, 64 columns for each, 64 x 64 tiles, one program. Rank 0 stores its rows
    times columns 64-127 in rows 0-63 of rank 1's workspace and publishes slot 0 there; its rows times
    columns 0-63 go to rows 0-63 of its output; then it waits for slot 1 and copies rows 64-127.
    """
    epoch = current_epoch(workspace)
    _produce_for_others(workspace, input, weight, epilogue, output_ptr, shards_ptr, N, K, epoch,
                        TILES)  # fmt: skip
    _collect(workspace, output_ptr, shards_ptr, N, epoch, TILES)


@triton.jit(do_not_specialize=["workspace", "own", "sends"])
def all_to_all_matmul_kernel(
    workspace,
    input,
    weight,
    epilogue,
    output_ptr,
    own,
    sends,
    N,
    K,
    COPIES: tl.constexpr,
    TILES: tl.constexpr,
):
    """``output[rows, N] = activation(sum over ranks s of input_s[own rows] @ weight[rows of s] (+ bias))``.

    Legend: ``input`` is ``[all rows, K]``; ``own.rows`` from ``own.first_row`` on are this rank's.
    ``weight`` is ``[W * K, N]``, the same on all ranks; rank s's input is multiplied by its rows from
    ``s * K`` on. ``sends``: see ``kernels/transfer.py``. Rank s's rows are in the workspace from row ``s *
    own.rows`` on; a chunk of ``own.chunk_rows``, a multiple of tiles, has slot ``s * own.chunks + chunk``.
    Consumer p of P takes tiles t with ``t % P == p``.

    Ordering: copiers wait for the receiver's credit, store, publish the chunk's slot. A consumer waits for
    a source's slot when its tile reaches that source's part of K, and loads in a loop nested below the
    wait. Copiers have the lowest program ids and wait for no data, so the grid makes progress if it is
    resident with one consumer. The workspace is free again as in ``matmul_all_to_all_kernel``.

    Example: W = 2, 64 rows each in one chunk, N = 64, 64 x 64 tiles, COPIERS = 1, grid 2. Program 0 of rank
    0 copies rows 64-127 to rank 1 and publishes slot 0 there. Program 1 multiplies rows 0-63 of its input
    by the first half of the weight's rows, waits for slot 1 and adds rank 1's rows times the second half.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    # Copiers come first: whatever is resident, the programs that others wait for have begun.
    if program < COPIES.COPIERS:
        push_chunks(workspace, input, sends, K, epoch, COPIES)
    else:
        tiles_m = tl.cdiv(own.rows, TILES.BLOCK_M)
        tiles_n = tl.cdiv(N, TILES.BLOCK_N)
        programs = tl.num_programs(0) - COPIES.COPIERS
        VECTOR: tl.constexpr = 128 // input.ptr.dtype.element_ty.primitive_bitwidth
        for tile in range(program - COPIES.COPIERS, tiles_m * tiles_n, programs):
            tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, TILES.GROUP_M)
            chunk = tile_m * TILES.BLOCK_M // own.chunk_rows
            acc = tl.full((TILES.BLOCK_M, TILES.BLOCK_N), 0.0, tl.float32)
            # In the order of the ranks, the own in its place: bits do not depend on arrival.
            for source in range(workspace.world_size):
                # int64 in both branches: a variable that a branch assigns keeps its type. As an integer:
                # facts that the compiler knows about one address must not apply to the other.
                stride = input.stride + tl.zeros((), tl.int64)
                address = (input.ptr + own.first_row * stride).to(tl.int64)
                if source != workspace.rank:
                    # Its value is not checked: this is the own output, of an op that failed.
                    slot = source * own.chunks + chunk
                    wait(workspace, source, workspace.slot_offset + slot * 8, epoch)
                    stride = K + tl.zeros((), tl.int64)
                    arrived_ptr = data_pointer(workspace, workspace.rank, input.ptr)
                    address = (arrived_ptr + source * own.rows * stride).to(tl.int64)
                a_ptr = address.to(input.ptr.dtype)
                if TILES.ALIGNED:
                    a_ptr = tl.multiple_of(a_ptr, 16)
                    stride = tl.multiple_of(stride, VECTOR)
                row = (source + tl.zeros((), tl.int64)) * K
                b_ptr = weight.ptr + row * weight.stride_k
                acc = add_product(acc, a_ptr, stride, own.rows, weight, b_ptr, N, K, tile_m, tile_n,
                                  TILES)  # fmt: skip
            emit_tile(output_ptr, acc, epilogue, tile_m, tile_n, own.rows, N, TILES)
